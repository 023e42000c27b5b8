"""Rules of whole tensors: plain torch on every device, whatever engine is asked for, compared with elementwise rules."""

import math

import numpy as np
import pytest
import torch

from tristep.kernels import TensorRule, Update, rule, rules, storage, tensor_rule, update
from tristep.kernels.backends import asked_engine, eager
from tristep.kernels.layouts import compute_dtype
from tristep.kernels.rules.matrix import eigenvectors
from tristep.kernels.states import states_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@tensor_rule(shapes=lambda shape: {"rows": shape[:1], "pair": (2,)})
def by_rows(w, g, state, hyper):
    """Momentum, and in addition sums of rows, of which there is one for each, and two numbers."""
    mom, rows, pair = state
    (lr,) = hyper
    mom = 0.5 * mom + g
    return w - lr * mom, (mom, rows + w.reshape(len(w), -1).sum(1), pair + torch.stack([w.sum(), g.sum()]))


@tensor_rule
def swapped(w, g, state, hyper):
    """States change places, and one takes the old weight."""
    first, second, _third = state
    return w + g, (second, first, w)


@tensor_rule
def normalized(w, g, state, hyper):
    """The example of the documentation."""
    (lr,) = hyper
    return w - lr * g / g.norm(), state


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(F64, False), (F32, False), *((dtype, masters) for dtype in (F16, BF16) for masters in (False, True))],
)
def test_whole_tensors_come_in_the_arithmetics_type(eager_place, dtype, masters):
    """One without elements and one without a gradient are left alone."""
    rng = np.random.default_rng(0)
    arithmetic = compute_dtype(dtype)
    weights = [eager_place.tensor(rng.normal(size=shape), dtype) for shape in [(3, 4), (5,), (2, 3, 4), (0, 3), (2, 3)]]
    gradients = [*(eager_place.tensor(rng.normal(size=weight.shape), dtype) for weight in weights[:-1]), None]
    copies = [eager_place.tensor(rng.normal(size=weight.shape), arithmetic) for weight in weights] if masters else None
    for weight, master in zip(weights, copies or (), strict=False):
        weight.copy_(master)
    states = states_for(by_rows, weights)
    read, untouched = [tensor.cpu().double().numpy().copy() for tensor in (copies or weights)], weights[-1].clone()
    eager_place.run(by_rows, weights, gradients, states, [[0.5, 0.25]] * 5, copies)
    assert torch.equal(weights[-1], untouched)
    assert not any(tensor.any() for tensor in states[-1])
    for k, (w, gradient) in enumerate(zip(read, gradients, strict=True)):
        mom, rows, pair = states[k]
        assert {tensor.dtype for tensor in states[k]} == {arithmetic}
        assert [tuple(tensor.shape) for tensor in states[k]] == [w.shape, w.shape[:1], (2,)]
        if gradient is None or not w.size:
            continue
        g = 0.5 * gradient.cpu().double().numpy()
        close = {"rtol": 1e-12 if dtype == F64 else 1e-5, "atol": 1e-12 if dtype == F64 else 1e-5}
        np.testing.assert_allclose(mom.cpu(), g, **close)
        np.testing.assert_allclose(rows.cpu(), w.reshape(len(w), -1).sum(1), **close)
        np.testing.assert_allclose(pair.cpu(), [w.sum(), g.sum()], **close)
        if copies is None:
            expected = torch.from_numpy(w - 0.25 * g)
            torch.testing.assert_close(weights[k].cpu().double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        else:
            np.testing.assert_allclose(copies[k].cpu(), w - 0.25 * g, **close)
            assert torch.equal(weights[k], copies[k].to(dtype))


@pytest.mark.parametrize("layout", ["transposed", "with gaps", "turned"])
def test_weights_and_gradients_of_any_layout(eager_place, layout):
    """They reach the rule in their own shape."""
    w, g = torch.randn(2, 4, 6).unbind()
    pair = []
    for values in (w, g):
        shape, strides = {"transposed": ((24,), (1, 4)), "with gaps": ((80,), (20, 3)), "turned": ((40,), (1, 6))}[layout]
        buffer = torch.full(shape, math.nan).to(eager_place.device)
        pair.append(buffer.as_strided((4, 6), strides).copy_(values))
    weight, gradient = pair
    states = states_for(by_rows, [weight])
    eager_place.run(by_rows, [weight], [gradient], states, [[1.0, 0.5]])
    torch.testing.assert_close(weight.cpu(), w - 0.5 * g)
    torch.testing.assert_close(states[0][0].cpu(), g)
    torch.testing.assert_close(states[0][1].cpu(), w.sum(1))


@pytest.mark.parametrize("batched", [False, True])
def test_old_values_may_become_new_ones_of_others(eager_place, batched):
    weights, gradients = (list(torch.full((2, 3), value, device=eager_place.device).unbind()) for value in (5.0, 1.0))
    states = [
        tuple(torch.full((3,), value + 10 * k, device=eager_place.device) for value in (1.0, 2.0, 3.0)) for k in range(2)
    ]
    eager_place.run(TensorRule(swapped.fn, batched=batched), weights, gradients, states, [[1.0]] * 2)
    found = [[tensor[0].item() for tensor in (w, *row)] for w, row in zip(weights, states, strict=True)]
    assert found == [[6.0, 2.0, 1.0, 5.0], [6.0, 12.0, 11.0, 5.0]]


@pytest.mark.sample(0, "cpu")
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (5,)], ids=str)
@pytest.mark.parametrize("name", ["muon", "adafactor", "came", "group_adagrad"])
def test_gradients_of_zero_move_no_weight(place, name, shape):
    """Not even when all were zero so far, and the papers' epsilons and products of averages are too small for float32."""
    values = dict.fromkeys(getattr(rules, name).hyper, 0.5) | {"decay": 0.0, "adam_decay": 0.0, "clip": math.inf}
    values |= {name: x for name, x in {"epsilon1": 1e-30, "epsilon2": 1e-16, "split": 0.0}.items() if name in values}
    w = torch.ones(shape, device=place.device)
    (state,) = states_for(getattr(rules, name), [w])
    for _ in range(2):
        update(getattr(rules, name), [w], [torch.zeros_like(w)], [state], values, engine=place.engine)
    assert bool((w == 1).all())


def test_steps_leave_no_graph_behind_and_are_noticed(eager_place):
    w = torch.nn.Parameter(torch.ones(3, device=eager_place.device))
    version = w._version
    update(normalized, [w], [torch.ones(3, device=eager_place.device)], [()], {"lr": 3.0**0.5}, engine=eager_place.engine)
    torch.testing.assert_close(w.detach().cpu(), torch.zeros(3), rtol=0, atol=1e-6)
    assert w.requires_grad
    assert w.grad_fn is None
    assert w._version > version


def test_whatever_engine_is_asked_for_it_is_torch(place):
    w = torch.ones(3, device=place.device)
    run = Update(normalized, [w], [()], engine=place.engine)
    assert run.engines() == ["eager"]
    assert Update(rules.sgd, [w], [()], engine=place.engine).engines() == [place.engine]
    with pytest.raises(ValueError, match="engine='tritom'"):
        Update(normalized, [w], [()], engine="tritom")


def test_rules_may_see_which_engine_is_asked_for(place):
    seen = []

    @tensor_rule
    def asking(w, g, state, hyper):
        (lr,) = hyper
        seen.append(asked_engine.get())
        return w - lr * g, state

    w, g = torch.ones(2, 3, device=place.device).unbind()
    update(asking, [w], [g], [()], {"lr": 1.0}, engine=place.engine)
    assert [*seen, asked_engine.get()] == [place.engine, None]


# ---- states in low precision -----------------------------------------------------------------------------------------


@tensor_rule(batched=True, shapes=lambda shape: {"total": ()}, nonnegative=("var",))
def averaged(w, g, state, hyper):
    """As `averaged_by_element`, and a state of another shape."""
    mom, var, total = state
    lr, beta = hyper
    mom = beta * mom + g
    var = beta * var + g * g
    return w - lr * mom, (mom, var, total + 1.0)


@rule(nonnegative=("var",))
def averaged_by_element(w, g, state, hyper):
    mom, var = state
    lr, beta = hyper
    mom = beta * mom + g
    var = beta * var + g * g
    return w - lr * mom, (mom, var)


@pytest.mark.parametrize("stacked", [False, True], ids=["", "stacked"])
@pytest.mark.parametrize("dtype", [BF16, torch.uint8, torch.int8], ids=str)
def test_states_in_low_precision_are_those_of_elementwise_rules(monkeypatch, dtype, stacked):
    """To the bit, by the same random numbers; only states of the weight's shape, and no small ones in 8 bits."""
    monkeypatch.setattr(eager, "STACKS_ON_CPU", eager.Limit(2**20, 2**24 if stacked else 1))
    seed = storage.CodesOnly(3) if storage.is_packed(dtype) else None
    runs = []
    for each in (averaged, averaged_by_element):
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=draw) for shape in [(64, 65), (64, 65), (30, 4), (64, 65), (5000,)]]
        states = states_for(each, weights, dtype)
        run = Update(each, weights, states, engine="eager", seed=seed)
        for step in range(3):
            run.hyper[:, :3] = [1.0, 0.1, 0.75]
            run.hyper[2, 1] = 0.05
            if seed is not None:
                run.hyper[:, 3] = step
            gradients = [
                None if i == 1 and step == 1 else torch.randn(w.shape, generator=draw) for i, w in enumerate(weights)
            ]
            run.bind(gradients)
            run()
        runs.append((weights, states))
    (weights, states), (expected, like) = runs
    assert all(map(torch.equal, weights, expected))
    for row, others in zip(states, like, strict=True):
        assert [tensor.dtype for tensor in row[:2]] == [tensor.dtype for tensor in others]
        assert all(map(torch.equal, row[:2], others))
    assert [row[2].item() for row in states] == [3, 2, 3, 3, 3]
    assert states[2][0].dtype == (F32 if storage.is_packed(dtype) else BF16)


def test_a_skipped_step_leaves_packed_states_as_they_are():
    w, g = torch.ones(64, 64), torch.ones(64, 64)
    states = states_for(averaged, [w], torch.uint8)
    run = Update(averaged, [w], states, grad_scale_and_skip=(control := torch.tensor([1.0, 0.0])))
    run.hyper[:] = [1.0, 0.1, 0.5]
    for skip in (0.0, 1.0):
        control[1] = skip
        run.bind([g])
        run()
        if not skip:
            before = [tensor.clone() for tensor in (w, *states[0])]
    assert all(map(torch.equal, (w, *states[0]), before))


# ---- stacks ----------------------------------------------------------------------------------------------------------

VALUES = {
    "muon": {"epsilon": 1e-7, "scale": 0.2, "split": 0.0},
    "normuon": {"epsilon": 1e-7, "scale": 0.2, "split": 0.0},
    "soap": {"epsilon": 1e-8, "limit": 10_000.0, "vectors": 0.0},
}


@pytest.mark.parametrize(("dtype", "masters"), [(F64, False), (F32, False), (BF16, False), (BF16, True)], ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_a_stack_of_tensors_is_updated_as_each_alone(monkeypatch, eager_place, name, dtype, masters):
    """Some without gradient, of other hyper-parameters, transposed, and one whose gradient is infinite."""
    rule, place, rng = getattr(rules, name), eager_place, np.random.default_rng(2)
    shapes = [(6, 4)] * 5 + [(4, 6)] * 3 + [(7,)] * 3 + [(2, 3, 4)] * 2 + [(6, 4), ()]
    start = [place.tensor(rng.normal(size=shape), dtype) for shape in shapes]
    start[2] = start[2].T.contiguous().T
    runs = []
    for limit in (eager.Limit(2**16, 2**12), eager.Limit(0, 1)):  # a few matrices together, or one
        monkeypatch.setattr(eager, "STACKS_ON_CPU", limit)
        monkeypatch.setattr(eager, "STACKS_ELSEWHERE", limit)
        weights, states = [w.clone() for w in start], states_for(rule, start)
        copies = [w.float() for w in start] if masters else None
        draw = np.random.default_rng(3)
        for step in range(3):
            gradients = [place.tensor(draw.normal(size=shape), dtype) for shape in shapes]
            if name != "soap":  # there are no eigenvectors of infinity
                gradients[4][0, 0] = math.inf if step == 1 else 0.5
            gradients[5] = None if step == 2 else gradients[5]
            values = dict.fromkeys(rule.hyper, 0.25) | {"clip": math.inf, "decay": 0.01} | VALUES[name]
            values |= {"first": float(step == 0), "turn": float(step == 2)} if name == "soap" else {}
            each = [values | {"lr": 0.1 if i % 4 else 0.05} for i in range(len(shapes))]
            rows = [[0.5, *(row[name] for name in rule.hyper)] for row in each]
            place.run(rule, weights, gradients, states, rows, copies)
        runs.append([*weights, *(copies or []), *(tensor for row in states for tensor in row)])
    # The iteration of muon is in bfloat16, where a stack may be added up in another order; others differ by roundings.
    close = {"rtol": 0.02, "atol": 0.02} if name != "soap" or dtype == BF16 else {"rtol": 1e-4, "atol": 1e-5}
    for stacked, alone in zip(*runs, strict=True):
        torch.testing.assert_close(stacked, alone, equal_nan=True, **close)


def test_a_matrix_without_eigenvectors_in_float32_does_not_trouble_the_others(monkeypatch):
    """It gets those of float64, and they the same as alone."""
    decompose, asked = torch.linalg.eigh, []

    def eigh(matrices):
        asked.append((matrices.dtype, len(matrices)))
        if matrices.dtype == F32 and bool((matrices.amax((1, 2)) > 100).any()):
            raise torch.linalg.LinAlgError
        return decompose(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    roots = torch.randn(3, 4, 4)
    roots[1] *= 100
    grams = roots @ roots.mT
    vectors = eigenvectors(grams)
    assert asked == [(F32, 3), (F32, 1), (F32, 1), (F64, 1), (F32, 1)]
    turned = (vectors.mT.double() @ grams.double() @ vectors.double()) / grams.double().norm(dim=(1, 2), keepdim=True)
    values = torch.linalg.eigvalsh(grams.double()).flip(-1) / grams.double().norm(dim=(1, 2), keepdim=True)[..., 0]
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=1e-5)


def test_states_of_another_shape_are_refused():
    w, (mom, rows, pair) = torch.nn.Parameter(torch.zeros(4, 5)), (torch.zeros(4, 5), torch.zeros(5), torch.zeros(2))
    with pytest.raises(ValueError, match=r"rows of weights\[0\] is torch.float32 \(5,\) .*: must be torch.float32 \(4,\)"):
        Update(by_rows, [w], [(mom, rows, pair)])
    run = Update(by_rows, [w], states_for(by_rows, [w]))
    assert run.fits()
    w.data = w.data[:3].clone()  # cut
    assert not run.fits()
