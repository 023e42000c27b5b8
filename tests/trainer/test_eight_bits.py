"""`state_dtype="8bit"` and `"4bit"`: packed states in training and in files; the judges are runs with float32 states."""

import copy
import math

import pytest
import torch
from optimizer_table import row_of
from stored_training import packs, train

import tristep
from tristep import Trainer
from tristep.kernels import storage

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
SHAPES = ((64, 80), (7,), (41, 100), ())


def parameters(device, dtype=F32, shapes=SHAPES):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in shapes]


def made(device, state_dtype="8bit", name="adamw", engine=None, dtype=F32, **arguments):
    params = parameters(device, dtype)
    arguments = {"learning_rate": 0.01, "state_dtype": state_dtype, **arguments}
    return params, Trainer(params, name, arguments, engine=engine)


def stepped(*args, steps=5, **kwargs):
    params, trainer = made(*args, **kwargs)
    train(params, lambda: trainer.step(1), steps)
    return params, trainer


def saved(trainer, name="0"):
    return trainer.state_dict()["state"][name]


def distance(params, others, start):
    """How far apart two trainings have come, in parts of how far the second one has."""
    apart = sum(float((a - b).detach().double().square().sum()) for a, b in zip(params, others, strict=True))
    gone = sum(float((b - c).detach().double().square().sum()) for b, c in zip(others, start, strict=True))
    return math.sqrt(apart / gone)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", list(packs()))
def test_steps_are_near_those_in_full(name, device):
    params, trainer = stepped(device, name=name, engine="eager")
    expected, full = stepped(device, None, name=name, engine="eager")
    assert distance(params, expected, parameters(device)) < row_of(name).packed_distance
    rule = trainer.optimizer.composed_rule
    for slot, state in saved(trainer).items():
        narrow = slot in rule.state and slot not in rule.full_precision
        assert state.dtype == (U8 if narrow else F32)
        assert narrow == (state.shape == (5120 + 160,))
    for slot, state in saved(trainer, "1").items():
        assert state.dtype == F32
        torch.testing.assert_close(state, saved(full, "1")[slot], msg="a small weight's states are exact")


@pytest.mark.parametrize("name", ["adamw", "lion", "adan"])
def test_steps_with_4_bits_go_the_same_way(name, device):
    """By gradients that persist, of which momenta are averages; the weights come within half of what they moved."""
    trained = {}
    for state_dtype in ("4bit", None):
        params, trainer = made(device, state_dtype, name, "eager")
        torch.manual_seed(2)
        means = [torch.randn(param.shape).to(param) for param in params]
        for _ in range(20):
            for param, mean in zip(params, means, strict=True):
                param.grad = mean + 0.1 * torch.randn(param.shape).to(param)
            trainer.step(1)
        trained[state_dtype] = params
    assert saved(trainer)[trainer.optimizer.rule.state[0]].dtype == F32
    assert distance(trained["4bit"], trained[None], parameters(device)) < 0.5


TOGETHER = {"dtype": BF16, "multi_precision": "split8", "cautious": True, "clip_norm": 1.0, "stochastic_rounding": True}


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        pytest.param("triton", TOGETHER, marks=pytest.mark.sample(0)),
        pytest.param("cpu", TOGETHER, marks=pytest.mark.sample(0)),
        ("eager", TOGETHER),
        ("eager", {"dtype": BF16, "multi_precision": "remainder", "lookahead": 2}),
        ("eager", {"ema_decay": 0.9, "decoupled_wd": True, "name": "adam", "wd": 0.1}),
        ("eager", {**TOGETHER, "state_dtype": "4bit"}),
    ],
    ids=str,
    indirect=["engine"],
)
def test_training_goes_on_to_the_bit(arguments, engine, device, everything, tmp_path):
    params, trainer = stepped(device, engine=engine, **arguments, steps=3)
    trainer.save_states(tmp_path / "states")
    resumed, other = made(device, engine=engine, **arguments)
    for param, old in zip(resumed, params, strict=True):
        param.data.copy_(old)
    other.load_states(tmp_path / "states")
    for each, step in ((params, trainer), (resumed, other)):
        train(each, lambda step=step: step.step(1), 2, seed=2)
    after, again = everything(trainer, params), everything(other, resumed)
    assert after["weights"] == again["weights"]
    assert after["optimizer"] == again["optimizer"]


@pytest.mark.parametrize("packs", ["8bit", "4bit"])
def test_states_are_converted_when_they_are_loaded(packs, device):
    params, narrow = stepped(device, packs)
    packed = saved(narrow)
    numbers = {slot: storage.unpacked(state, params[0].shape, slot == "var") for slot, state in packed.items()}
    for state_dtype, dtype in ((None, F32), ("bfloat16", BF16)):
        _, other = made(device, state_dtype)
        other.load_state_dict(narrow.state_dict())
        assert other.optimizer.state_dtype == state_dtype
        for slot, state in saved(other).items():
            assert torch.equal(state, numbers[slot].to(dtype))
    _, wide = made(device, None)
    wide.load_state_dict(narrow.state_dict())
    others, back = made(device, packs)
    back.load_state_dict(wide.state_dict())
    for slot, state in saved(back).items():
        assert torch.equal(storage.unpacked(state, params[0].shape, slot == "var"), numbers[slot])
    train(others, lambda: back.step(1), 1)


def test_a_weight_in_another_order_has_float32_states_from_then_on(device):
    (param,) = parameters(device, shapes=[(16, 32, 3, 3)])
    trainer = Trainer([param], "sgd", {"state_dtype": "8bit", "learning_rate": 0.01, "momentum": 0.9})
    train([param], lambda: trainer.step(1), 1)
    assert saved(trainer)["mom"].dtype == U8
    numbers = storage.unpacked(saved(trainer)["mom"], param.shape)
    param.data = param.data.contiguous(memory_format=torch.channels_last)
    trainer.optimizer.momentum = 0.5
    param.grad = torch.zeros_like(param)
    trainer.step(1)
    assert saved(trainer)["mom"].dtype == F32
    assert saved(trainer)["mom"].stride() == param.stride()
    torch.testing.assert_close(saved(trainer)["mom"], 0.5 * numbers)


def test_what_starts_otherwise_than_at_zero(device):
    _, trainer = made(device, name="rprop")
    state = trainer.optimizer.create_state(0, parameters(device)[0])
    sizes = storage.unpacked(state[1], torch.Size(SHAPES[0]), True)
    torch.testing.assert_close(sizes, torch.full_like(sizes, 0.01), rtol=1 / 32, atol=0)


def test_rows_of_sparse_gradients(device, everything):
    def sparse(weight):
        rows = torch.ones(2, weight.shape[1], device=device)
        return torch.sparse_coo_tensor(torch.tensor([[1, 5]]), rows, weight.shape, check_invariants=True).to(device)

    params = parameters(device, shapes=[(64, 80), (6, 4)])
    trainer = Trainer(params, "sgd", {"momentum": 0.9, "state_dtype": "8bit"})
    for param in params:
        param.grad = sparse(param)
    before = everything(trainer, params)["weights"]
    with pytest.raises(ValueError, match=r"state_dtype='8bit' for '0', whose gradient is sparse.*lazy_update=False"):
        trainer.step(1)
    assert everything(trainer, params)["weights"] == before
    params[0].grad = torch.zeros_like(params[0])  # the other one's state is float32, being small
    trainer.step(1)
    assert everything(trainer, params)["weights"][1] != before[1]
    dense = Trainer(params, "sgd", {"momentum": 0.9, "state_dtype": "8bit", "lazy_update": False})
    for param in params:
        param.grad = sparse(param)
    dense.step(1)


# torch's interface.


def test_torchs_state_dict_goes_on_to_the_bit(device):
    params = parameters(device)
    first = tristep.optim.Adan(params, lr=0.01, state_dtype="8bit")
    train(params, first.step, 3)
    resumed = [torch.nn.Parameter(param.detach().clone()) for param in params]
    second = tristep.optim.Adan(resumed, lr=0.01, state_dtype="8bit")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for each, step in ((params, first.step), (resumed, second.step)):
        train(each, step, 2, seed=2)
    assert all(map(torch.equal, params, resumed))
    assert second.state[resumed[0]]["square"].dtype == U8


# Refusals.


@pytest.mark.parametrize("packs", ["8bit", "4bit"])
def test_states_packed_otherwise_are_refused(packs, device, everything):
    """With another scale than a power of two, such as the largest number of a block."""
    params, trainer = stepped(device, packs)
    before, saved_state = everything(trainer, params), copy.deepcopy(trainer.state_dict())
    pieces = storage.pieces(saved_state["state"]["0"]["mean"], 5120)
    pieces[1][3] *= 1.5
    with pytest.raises(
        ValueError, match=rf"mean of '0' is packed in {packs[0]} bits, but its scales are no powers of two.*Begin with new"
    ):
        trainer.load_state_dict(saved_state)
    assert everything(trainer, params) == before
    optimizer = tristep.optim.Lion(params, state_dtype=packs)
    train(params, optimizer.step, 1)
    saved_state = copy.deepcopy(optimizer.state_dict())
    saved_state["state"][0]["mean"] = optimizer.state[params[0]]["mean"].clone()
    storage.pieces(saved_state["state"][0]["mean"], 5120)[1][3] *= 1.5
    with pytest.raises(ValueError, match=rf"'mean' of parameter 0 is packed in {packs[0]} bits, but its scales"):
        optimizer.load_state_dict(saved_state)
