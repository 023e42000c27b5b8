"""Tensors of any layout, anywhere in memory, in any number: the right elements change, and no others."""

import math
import weakref

import pytest
import torch

from tristep.kernels import Update, rules, update

F32, BF16 = torch.float32, torch.bfloat16
SENTINEL = 12352.0  # exact in every type
SHAPE = (2, 3, 4, 5)
INF = math.inf
HYPER = [0.5, 0.1, 0.01, 0.6, 0.9]  # rescale_grad, lr, wd, clip, momentum
# An element may be computed in another lane or path than in the judge's layout, and what is contracted to fused
# multiply-adds may differ there: some ulps of numbers up to 4. An element in a wrong place is off by about 1.
CLOSE = {F32: {"rtol": 0.0, "atol": 2e-6}, BF16: {"rtol": 2**-7, "atol": 2e-6}}


def _dense_strides(order):
    """Strides of a tensor of shape SHAPE whose dimensions lie in memory in this order."""
    strides, step = [0] * len(SHAPE), 1
    for dimension in reversed(order):
        strides[dimension], step = step, step * SHAPE[dimension]
    return tuple(strides)


LAYOUTS = {
    "contiguous": _dense_strides((0, 1, 2, 3)),
    "channels_last": _dense_strides((0, 2, 3, 1)),
    "transposed": _dense_strides((3, 2, 1, 0)),
    "sliced": (100, 32, 6, 1),
    "every second": tuple(2 * stride for stride in _dense_strides((0, 1, 2, 3))),
    "sliced and transposed": tuple(3 * stride for stride in _dense_strides((1, 3, 0, 2))),
}
DENSE = ("contiguous", "channels_last", "transposed")


class Guarded:
    """A tensor in the middle of a buffer full of sentinels, which also fill any gaps between its elements."""

    def __init__(self, values, dtype, device, strides, offset):
        extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
        start = 64 + offset
        self.buffer = torch.full((extent + 2 * start,), SENTINEL, dtype=dtype, device=device)
        self.tensor = self.buffer.as_strided(values.shape, strides, start)
        self.tensor.copy_(values)
        outside = torch.ones_like(self.buffer, dtype=torch.bool)
        outside.as_strided(values.shape, strides, start).zero_()
        self.outside = outside
        assert self.tensor.data_ptr() % 16 == offset * dtype.itemsize % 16

    def intact(self):
        return bool((self.buffer[self.outside] == SENTINEL).all())


def _values(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _expected(w, g, m, dtype=F32):
    """One step of momentum SGD in float64, from numbers as they are stored."""
    rescale, lr, wd, clip, momentum = HYPER
    w, g, m = w.to(dtype).double(), g.to(dtype).double(), m.double()
    m = momentum * m - lr * ((rescale * g).clamp(-clip, clip) + wd * w)
    return (w + m).float(), m.float()


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "one element off"])
@pytest.mark.parametrize("gradient_layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_weight_and_gradient(place, layout, gradient_layout, offset):
    values, slope, momentum = _values(0), _values(1), _values(2)
    for dtype in (F32, BF16):
        state_layout = layout if layout in DENSE else "contiguous"
        weight = Guarded(values, dtype, place.device, LAYOUTS[layout], offset)
        gradient = Guarded(slope, dtype, place.device, LAYOUTS[gradient_layout], offset)
        state = Guarded(momentum, F32, place.device, LAYOUTS[state_layout], offset)
        before = gradient.buffer.clone()
        place.run(rules.sgd_momentum, [weight.tensor], [gradient.tensor], [(state.tensor,)], [HYPER])
        w, m = _expected(values, slope, momentum, dtype)
        torch.testing.assert_close(weight.tensor.cpu().float(), w, **CLOSE[dtype])
        torch.testing.assert_close(state.tensor.cpu(), m, **CLOSE[F32])
        assert weight.intact()
        assert state.intact()
        assert torch.equal(gradient.buffer, before)


@pytest.mark.parametrize("which", ["weight", "gradient", "state", "master"])
def test_a_single_misaligned_tensor(place, which):
    """One is enough to forbid wide accesses; 1,030 elements are a full tile of the GPU engine and a rest."""
    values, slope, momentum = _values(0, (1030,)), _values(1, (1030,)), _values(2, (1030,))
    offsets = {name: int(name == which) for name in ("weight", "gradient", "state", "master")}
    weight = Guarded(values, BF16, place.device, (1,), offsets["weight"])
    gradient = Guarded(slope, F32, place.device, (1,), offsets["gradient"])
    state = Guarded(momentum, F32, place.device, (1,), offsets["state"])
    master = Guarded(values, F32, place.device, (1,), offsets["master"])
    place.run(rules.sgd_momentum, [weight.tensor], [gradient.tensor], [(state.tensor,)], [HYPER], [master.tensor])
    w, m = _expected(values, slope, momentum)
    torch.testing.assert_close(master.tensor.cpu(), w, **CLOSE[F32])
    torch.testing.assert_close(state.tensor.cpu(), m, **CLOSE[F32])
    assert torch.equal(weight.tensor, master.tensor.to(BF16))
    assert all(guarded.intact() for guarded in (weight, gradient, state, master))


@pytest.mark.parametrize("size", [lambda tile: 1, *(lambda tile, k=k: tile + k for k in (-1, 0, 1)), lambda tile: 2 * tile])
def test_nothing_is_written_beyond_a_tensors_ends(place, size):
    values = torch.ones(size(place.tile))
    weight, state = (Guarded(values, F32, place.device, (1,), 0) for _ in range(2))
    gradient = torch.ones_like(values, device=place.device)
    place.run(rules.sgd_momentum, [weight.tensor], [gradient], [(state.tensor,)], [[1.0, 0.5, 0.0, INF, 0.0]])
    assert bool((weight.tensor == 0.5).all())
    assert bool((state.tensor == -0.5).all())
    assert weight.intact()
    assert state.intact()


def test_a_weight_with_elements_in_one_place_is_refused(place):
    weight, state = torch.zeros(1, 3, device=place.device).expand(4, 3), torch.zeros(4, 3, device=place.device)
    with pytest.raises(ValueError, match=r"weights\[0\] has several elements in one place.*expand\(\).*contiguous"):
        Update(rules.sgd_momentum, [weight], [(state,)], engine=place.engine)
    Update(rules.sgd, [torch.zeros(0, 3).expand(4, 0, 3)], [()], engine="eager")  # nothing, so nothing twice


def _momentum_update(place, weight, state=None):
    state = torch.zeros_like(weight) if state is None else state
    run = Update(rules.sgd_momentum, [weight], [(state,)], engine=place.engine)
    run.hyper[:] = [1.0, 0.5, 0.0, INF, 0.5]
    return run, state


def test_a_weight_that_moved_is_found(place):
    parameter = torch.nn.Parameter(torch.zeros(1030, device=place.device))
    gradients = [torch.ones(1030, device=place.device)]
    run, state = _momentum_update(place, parameter)
    run.bind(gradients)
    run()
    assert run.rebind(gradients)
    left = parameter.data
    parameter.data = torch.full((1030,), 2.0, device=place.device)
    assert not run.rebind(gradients)
    run.bind(gradients)
    run()
    assert bool((left == -0.5).all())
    assert bool((parameter == 1.25).all())
    assert bool((state == -0.75).all())


def test_a_state_that_moved_into_shared_memory_is_found(place):
    """As where a state_dict is sent to another process."""
    if place.device != "cpu":
        pytest.skip("moves memory of the CPU only")
    weight, gradient = torch.zeros(8), torch.ones(8)
    run, state = _momentum_update(place, weight)
    for _ in range(2):
        run.bind([gradient])
        run()
        state.share_memory_()
    assert weight.tolist() == [-0.5 - 0.75] * 8
    assert state.tolist() == [-0.75] * 8


@pytest.mark.parametrize("masters", [False, True])
def test_a_weight_that_got_other_strides_keeps_its_state(place, masters):
    """As `model.to(memory_format=torch.channels_last)` does it, in the middle of training."""
    parameter = torch.nn.Parameter(_values(0).to(place.device, BF16 if masters else F32))
    state, slope = _values(2).to(place.device), _values(1)
    master = parameter.detach().float() if masters else None
    w, m = _expected(parameter.detach().float().cpu(), slope, state.cpu())
    run = Update(rules.sgd_momentum, [parameter], [(state,)], [master], engine=place.engine)
    run.hyper[:] = HYPER
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    gradient = slope.to(place.device).to(memory_format=torch.channels_last)
    for _ in range(2):
        run.bind([gradient])
        run()
        torch.testing.assert_close((master if masters else parameter.detach()).cpu(), w, **CLOSE[F32])
        torch.testing.assert_close(state.cpu(), m, **CLOSE[F32])
        w, m = _expected(w, slope, m)
    if masters:
        assert torch.equal(parameter.detach(), master.to(BF16))
    assert parameter.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(), SHAPE])
@pytest.mark.parametrize("which", ["weight", "gradient"])
def test_a_view_that_is_to_be_negated(place, which, shape):
    """As the imaginary part of a conjugate is, whose memory holds the opposite of its values."""

    def negated(values):
        view = torch.complex(torch.zeros(shape), -values).to(place.device).conj().imag
        assert view.is_neg()
        return view

    plain = _values(0, shape).to(place.device)
    weight = negated(_values(0, shape)) if which == "weight" else plain.clone()
    steps = [Update(rules.sgd, [each], [()], engine=place.engine) for each in (plain, weight)]
    for step in range(4):
        gradient = _values(step + 1, shape)
        second = negated(gradient) if which == "gradient" and step > 1 else gradient.to(place.device)
        for update_one, given in zip(steps, (gradient.to(place.device), second), strict=True):
            update_one.hyper[:] = [1.0, 0.1, 0.01, INF]
            update_one.bind([given])
            update_one()
        torch.testing.assert_close(weight, plain, rtol=1e-6, atol=1e-6)


def test_each_step_takes_the_gradient_that_is_there_now(place):
    """New contents, another tensor, none, one of another layout, and one that has moved; of momentum 0.5 and rate 0.5."""
    weight, first, second = (torch.full((1030,), value, device=place.device) for value in (0.0, 1.0, 5.0))
    run, _ = _momentum_update(place, weight)
    expected, momentum = 0.0, 0.0

    def step(size):
        nonlocal expected, momentum
        run()
        momentum = 0.5 * momentum - 0.5 * size
        expected += momentum
        assert bool((weight == expected).all()), size

    run.bind([first])
    step(1.0)
    first.fill_(3.0)
    step(3.0)
    assert run.rebind([second])
    step(5.0)
    assert not run.rebind([second[:-1]])
    assert not run.rebind([second.double()])
    assert run.rebind([None])  # for a weight that is left alone
    run()
    assert bool((weight == expected).all())
    for size in (3.0, 4.0, 5.0):  # the second time it is known that the gradient stays the same tensor
        second.data = torch.full((1030,), size, device=place.device)
        run.bind([second])
        step(size)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_gradients_are_not_kept_alive_after_a_step_and_not_read_when_they_are_gone(place, layout, own):
    """Neither those that were bound first nor others of the same layout. From `bind` to the step `own` ones are kept."""
    weight = torch.zeros(SHAPE, device=place.device, requires_grad=True)
    run = Update(rules.sgd, [weight], [()], engine=place.engine)
    run.hyper[:] = [1.0, 0.5, 0.0, INF]
    with pytest.raises(RuntimeError, match="no gradients to step with.*bind"):
        run()
    for _ in range(2):
        gradient = Guarded(torch.ones(SHAPE), F32, place.device, LAYOUTS[layout], 0).tensor
        alive = weakref.ref(gradient)
        if own:
            weight.grad = gradient
        run.bind([gradient], own=own)
        if own:
            weight.grad = gradient = None
        run()
        gradient = None
        assert alive() is None
        with pytest.raises(RuntimeError, match="some of them have been deleted.*bind"):
            run()
    assert bool((weight == -1.0).all())


def test_many_small_tensors(place):
    """Each with a rate of its own, which do not get mixed up, some without elements and some without a gradient."""
    weights = [torch.full((n % 7,), float(n), device=place.device) for n in range(300)]
    gradients = [None if n % 5 == 0 else torch.full_like(weight, n % 3) for n, weight in enumerate(weights)]
    run = place.run(rules.sgd, weights, gradients, [()] * 300, [[1.0, float(n), 0.0, INF] for n in range(300)])
    assert run.launches == 1
    for n, weight in enumerate(weights):
        assert weight.tolist() == [float(n if n % 5 == 0 else n - n * (n % 3))] * (n % 7)
    assert place.run(rules.sgd, [], [], [], []).launches == 0


def test_values_may_change_at_every_step_without_waiting(place):
    """More steps than an engine may have buffers for what it uploads, each with a rate of its own."""
    weight, gradient = torch.zeros(1030, device=place.device), torch.ones(1030, device=place.device)
    run = Update(rules.sgd, [weight], [()], engine=place.engine)
    run.bind([gradient])
    for k in range(40):
        run.hyper[:] = [1.0, float(k % 7), 0.0, INF]
        run()
    assert bool((weight == -float(sum(k % 7 for k in range(40)))).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 9 GiB of GPU memory")
def test_a_tensor_of_more_than_two_to_the_31_elements():
    n = 2**31 + 1030
    weight = torch.zeros(n, dtype=BF16, device="cuda")
    gradient = torch.zeros(n, dtype=BF16, device="cuda")
    gradient[-1030:] = 1.0
    update(rules.sgd, [weight], [gradient], [()], {"lr": 0.5, "wd": 0.0, "clip": INF})
    assert bool((weight[-1030:] == -0.5).all())
    assert int(torch.count_nonzero(weight)) == 1030


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_current_stream_is_used():
    """A step waits for what was queued before it on its own stream, and only there."""
    stream = torch.cuda.Stream()
    weight, gradient = torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda")
    run = Update(rules.sgd, [weight], [()])
    run.hyper[:] = [1.0, 1.0, 0.0, INF]
    run.bind([gradient])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        gradient.fill_(1.0)
        run()
    stream.synchronize()
    assert bool((weight == -1).all())
