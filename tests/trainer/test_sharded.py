"""Updates cut among ranks: weights as without, states that are 1/N, and what is refused."""

import json

import pytest
import torch
import torch.distributed as dist
from sharded_training import (
    as_arrays,
    backward,
    equal,
    make_net,
    make_optimizer,
    on_ranks,
    same_state,
    train_on_ranks,
    weights_of,
)
from torch import nn

import tristep
from tristep import optimizer as optimizers


def train_alone(name, arguments, steps, dtype=torch.float32):
    net = make_net(dtype)
    trainer = tristep.Trainer(net, make_optimizer(name, dict(arguments)))
    each = []
    for step in range(steps):
        net.zero_grad()
        backward(net, step, 0, 1, None)
        trainer.step(12)
        each.append(weights_of(net))
    return each, as_arrays(trainer.state_dict()), trainer


ELEMENTWISE = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, torch.float32),
    ("adam", {"learning_rate": 0.01, "wd": 0.01, "clip_gradient": 0.1}, torch.float32),
    ("adamw", {"schedule": True, "wd": 0.01}, torch.float64),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "lookahead": 2, "ema_decay": 0.9}, torch.float32),
    ("adam", {"learning_rate": 0.01, "multi_precision": "remainder", "state_dtype": "bfloat16"}, torch.bfloat16),
    ("adam", {"learning_rate": 0.01, "multi_precision": "split8", "state_dtype": "bfloat16"}, torch.bfloat16),
]
WHOLE = [
    ("lamb", {"learning_rate": 0.01}, torch.float32),
    ("sgld", {"learning_rate": 0.01}, torch.float32),
    ("muon", {"learning_rate": 0.01}, torch.float32),
    ("by hand", {"learning_rate": 0.01, "schedule": True}, torch.float32),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "arguments", "dtype"), ELEMENTWISE + WHOLE)
def test_weights_and_whole_state_are_to_the_bit_those_of_ranks_that_all_have_everything(processes, name, arguments, dtype):
    run = (name, arguments, 4, dtype, 1, name != "by hand")
    cut = processes(2).run(train_on_ranks, *run)
    summed = processes(2).run(train_on_ranks, *run, None, 0, False)
    for (weights, state), (expected, expected_state) in zip(cut, summed, strict=True):
        for one, other in zip(weights, expected, strict=True):
            equal(one, other)
        same_state(state, expected_state)


NORMS = [  # which are of all tensors of all ranks
    ("adam", {"learning_rate": 0.01, "clip_norm": 0.05}),
    ("prodigy", {"learning_rate": 1.0}),
    ("lamb", {"learning_rate": 0.01, "agc": 0.01, "clip_norm": 0.05, "skip_norm": 0.1}),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("ranks", "name", "arguments", "dtype"),
    [
        (2, *ELEMENTWISE[0]),
        (2, *ELEMENTWISE[2]),
        (3, *WHOLE[0][:2], torch.float64),
        (3, "prodigy", {"d0": 1e-3}, torch.float64),
        pytest.param(4, *ELEMENTWISE[2], marks=pytest.mark.sample(0)),
        *((2, *norms, torch.float64) for norms in NORMS),
    ],
)
def test_training_equals_one_process_with_the_global_batch(processes, ranks, name, arguments, dtype):
    found = processes(ranks).run(train_on_ranks, name, arguments, 4, dtype)
    expected, state, _ = train_alone(name, arguments, 4, dtype)
    atol = 1e-12 if dtype == torch.float64 else 1e-6
    for weights, own_state in found:
        for step, (one, other) in enumerate(zip(weights, expected, strict=True)):
            equal(one, other, atol)
            equal(one, found[0][0][step])
        same_state(own_state, state, 1000 * atol)


def _small(ranks_with_pieces):
    """A net of fewer blocks than ranks, so that some have nothing to update but a share of the norm to give."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    trainer = on_ranks(net, optimizers.create("adam", learning_rate=0.1, clip_norm=0.5), engine="eager")
    for step in range(3):
        net.zero_grad()
        net(torch.ones(2, 4) * (step + 1 + dist.get_rank())).square().sum().backward()
        trainer.step(1)
    assert bool(trainer._sync.updater.states) == (dist.get_rank() < ranks_with_pieces)
    return weights_of(net), as_arrays(trainer.state_dict())


def test_a_rank_without_a_piece_takes_part(processes):
    found = processes(3).run(_small, 1)
    for weights, state in found:
        equal(weights, found[0][0])
        same_state(state, found[0][1])
        assert json.loads(state[0])["counts"] == {"weight": 3, "bias": 3}


def _at_random():
    weight = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    trainer = on_ranks([("w", weight)], optimizers.create("sgd", learning_rate=2.0**-10, stochastic_rounding=True))
    weight.sum().backward()
    trainer.step(1)
    return weight.detach().float().numpy().copy()


def test_every_rank_rounds_at_random_in_its_own_way(processes):
    found = processes(2).run(_at_random)
    assert (found[0] == found[1]).all()
    moved = found[0] < 1  # the step is half of what bfloat16 can tell apart there, so it is taken whole or not at all
    assert (found[0][moved] == 1 - 2.0**-8).all()
    assert 900 < moved.sum() < 1150
    assert (moved[:1024] != moved[1024:]).any()


def _mistakes(path):
    gap = nn.Parameter(torch.ones(4, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"params: 'w' has gaps in memory"):
        on_ranks([("w", gap)], optimizers.create("adam"))
    trainer = on_ranks(make_net(), optimizers.create("adam"))
    with pytest.raises(ValueError, match="saved state is of 2 parameters"):
        trainer.load_states(path)
    return trainer.state_dict()["state"]


def test_mistakes_are_named(processes, tmp_path):
    tristep.Trainer(nn.Linear(2, 2), "adam").save_states(tmp_path / "other")
    assert processes(2).run(_mistakes, str(tmp_path / "other")) == [{}, {}]
