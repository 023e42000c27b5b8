"""Options for how weights and states are stored: bfloat16 states, stochastic rounding, remainders.

The judges are runs with float32 states and masters, and torch's own rounding.
"""

import copy

import pytest
import torch
from stored_training import close_to, made, parameters, saved, stepped, train

import tristep
from tristep import Trainer

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
STORED = {
    "states": (F32, {"state_dtype": "bfloat16"}),
    "at random": (BF16, {"stochastic_rounding": True, "state_dtype": "bfloat16"}),
    "float16": (F16, {"multi_precision": True, "state_dtype": "bfloat16"}),
    "remainder": (BF16, {"multi_precision": "remainder", "state_dtype": "bfloat16"}),
    "24 bits": (BF16, {"multi_precision": "split8"}),
    "24 bits at random": (BF16, {"multi_precision": "split8", "stochastic_rounding": True, "state_dtype": "bfloat16"}),
    "all together": (
        BF16,
        {
            "multi_precision": "remainder",
            "state_dtype": "bfloat16",
            "cautious": True,
            "lookahead": 3,
            "stochastic_rounding": True,
        },
    ),
}


@pytest.mark.sample(4)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("stored", STORED)
def test_steps_are_near_those_in_full(stored, engine, device):
    dtype, arguments = STORED[stored]
    full = {key: value for key, value in arguments.items() if key in ("cautious", "lookahead")}
    params, trainer = stepped(device, dtype, arguments, engine, steps=12)
    expected, _ = stepped(device, dtype, {**full, "multi_precision": True}, engine, steps=12)
    # Rounded at random, a weight walks by some of the distances between two numbers.
    close_to(params, expected, 3e-3, rtol=2**-4 if stored == "at random" else 2**-7)
    state = next(iter(trainer.state_dict()["state"].values()))
    assert state["mean"].dtype == (BF16 if "state_dtype" in arguments else F32)
    if "lookahead" in arguments:
        assert state["slow_weight"].dtype == F32


@pytest.mark.sample(0, "cpu", "triton")
def test_small_steps_move_weights_with_each_but_not_without(engine, device):
    """A step of 1/64 of what bfloat16 tells from 1, 64 times."""
    moved, count = {}, 4000
    for name, arguments in {
        "nearest": {},
        "at random": {"stochastic_rounding": True},
        "remainder": {"multi_precision": "remainder"},
        "24 bits": {"multi_precision": "split8"},
    }.items():
        param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
        trainer = Trainer([param], "sgd", {"learning_rate": 2.0**-14, **arguments}, engine=engine)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            trainer.step(1)
        moved[name] = 1.0 - float(param.detach().double().mean())
    assert moved["nearest"] == 0.0
    assert moved["remainder"] == pytest.approx(2.0**-8, rel=1e-6)
    assert moved["24 bits"] == pytest.approx(2.0**-8, rel=1e-6)
    # Each step is 2^-8 down with a probability of 1/64 (below 1 the numbers are that close): variances add up.
    assert moved["at random"] == pytest.approx(2.0**-8, abs=5 * 2.0**-8 / count**0.5)


@pytest.mark.sample(0, "cpu", "triton")
def test_rounding_repeats_with_its_seed_and_differs_without(engine, device):
    arguments = {"stochastic_rounding": True}
    first, _ = stepped(device, BF16, arguments, engine)
    again, _ = stepped(device, BF16, arguments, engine)
    other, _ = stepped(device, BF16, {**arguments, "rounding_seed": 1}, engine)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


@pytest.mark.sample(0, "cpu", "triton")
def test_states_are_converted_when_they_are_loaded(engine, device):
    """A trainer keeps how it stores; the rest is the file's."""
    params, wide = stepped(device, F32, {}, engine)
    _, narrow = made(device, F32, {"state_dtype": "bfloat16"}, engine)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.optimizer.state_dtype == "bfloat16"
    for slot in ("mean", "var"):
        for name, state in saved(wide, slot).items():
            assert torch.equal(saved(narrow, slot)[name], state.to(BF16))
    _, back = made(device, F32, {}, engine)
    back.load_state_dict(narrow.state_dict())
    assert back.optimizer.state_dtype is None
    for name, state in saved(narrow, "var").items():
        assert saved(back, "var")[name].dtype == F32
        assert torch.equal(saved(back, "var")[name], state.float())
    train(params, lambda: wide.step(1), 1)


@pytest.mark.parametrize(
    "arguments",
    [{"state_dtype": "bfloat16"}, {"multi_precision": "remainder"}, {"multi_precision": "split8"}, {}],
    ids=str,
)
def test_rows_of_sparse_gradients(arguments, device):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(9, 4).to(device, BF16)) for _ in range(2)]
    trainers = [
        Trainer(
            [weights[0]], "sgd", {"learning_rate": 0.1, "momentum": 0.9, "stochastic_rounding": not arguments, **arguments}
        ),
        Trainer([weights[1]], "sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}),
    ]
    weights[1].data.copy_(weights[0])
    before = weights[0].detach().clone()
    for _ in range(3):
        rows = torch.randn(2, 4)
        for weight, trainer in zip(weights, trainers, strict=True):
            weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 5]]), rows.to(BF16), (9, 4), check_invariants=True).to(
                device
            )
            trainer.step(1)
    close_to(weights[:1], weights[1:], 5e-3)
    same = [row for row in range(9) if row not in (1, 5)]
    assert torch.equal(weights[0][same], before[same])


# torch's interface.

BY_TORCH = [{"state_dtype": "bfloat16", "stochastic_rounding": True}]
BY_TORCH += [{"multi_precision": kind} for kind in (True, "remainder", "split8")]


@pytest.mark.parametrize("arguments", BY_TORCH, ids=str)
def test_torchs_state_dict_goes_on_to_the_bit(arguments, device):
    params = parameters(device, BF16)
    first = tristep.optim.Adan(params, lr=0.01, **arguments)
    train(params, first.step, 3)
    resumed = [torch.nn.Parameter(param.detach().clone()) for param in params]
    second = tristep.optim.Adan(resumed, lr=0.01, **arguments)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for each, step in ((params, first.step), (resumed, second.step)):
        train(each, step, 2, seed=2)
    assert all(map(torch.equal, params, resumed))
    for param, other in zip(params, resumed, strict=True):
        for key, state in first.state[param].items():
            assert second.state[other][key].dtype == state.dtype
            assert torch.equal(second.state[other][key], state)


def test_groups_may_store_in_different_ways(device):
    params = parameters(device, F32)
    groups = [{"params": params[:2], "state_dtype": "bfloat16"}, {"params": params[2:]}]
    mixed = tristep.optim.Lion(groups, lr=0.01)
    train(params, mixed.step, 2)
    assert [mixed.state[param]["mean"].dtype for param in params] == [BF16, BF16, F32, F32]


# Refusals.


@pytest.mark.parametrize(
    ("dtype", "arguments", "message"),
    [
        (F64, {"state_dtype": "bfloat16"}, "state_dtype='bfloat16': '0' is torch.float64"),
        (F16, {"stochastic_rounding": True}, "stochastic_rounding=True: '0' is torch.float16"),
        (F16, {"multi_precision": "remainder"}, "multi_precision='remainder': '0' is torch.float16"),
        (F16, {"multi_precision": "split8"}, "multi_precision='split8': '0' is torch.float16"),
    ],
    ids=str,
)
def test_weights_that_do_not_go_with_the_options_are_refused(dtype, arguments, message, device, everything):
    params, trainer = made(device, dtype, arguments)
    before = everything(trainer, params)["weights"]
    with pytest.raises(ValueError, match=message):
        train(params, lambda: trainer.step(1), 1)
    assert everything(trainer, params)["weights"] == before
    assert trainer.state_dict()["state"] == {}
