"""ZeRO-1 of a rule of whole matrices: each is orthogonalized by its owner alone, and weights are those of one process."""

import operator
from functools import reduce
from importlib import import_module
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tristep
from tristep.trainer.kvstore.buckets import GradientBuckets

SHAPES = [(24, 16), (140, 120), (40, 8), (7,), (3, 12, 20), (16, 24), (120, 140), (5, 2, 2, 3), (30, 17)]
FEW = [(12, 8), (30,)]
RANKS = 3


def _gradients(step, shapes):
    """This rank's gradients, or all ranks' sums in one process; they are exact, in any order."""
    of_ranks = []
    for rank in range(RANKS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        of_ranks.append([torch.randint(-8, 9, shape, generator=generator).float() for shape in shapes])
    if dist.get_world_size() > 1:
        return of_ranks[dist.get_rank()]
    return [reduce(operator.add, each) for each in zip(*of_ranks, strict=True)]


def _trained(name, shapes, native=False):
    """Weights and states after some steps, and for each step how many matrices this rank has orthogonalized."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    store = {"kvstore": "dist_sync"} if dist.get_world_size() > 1 else {}
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    trainer = tristep.Trainer(named, name, {"learning_rate": 0.02, "wd": 0.1}, **store)
    rules, counted = import_module("tristep.kernels.rules.muon"), []
    orthogonalized = rules.orthogonalized

    def counting(matrices, *args):
        counted[-1] += len(matrices)
        return orthogonalized(matrices, *args)

    native = mock.Mock(return_value=True) if native else GradientBuckets.native  # the collectives that a GPU uses
    with mock.patch.object(rules, "orthogonalized", counting), mock.patch.object(GradientBuckets, "native", native):
        for step in range(3):
            counted.append(0)
            for param, gradient in zip(params, _gradients(step, shapes), strict=True):
                param.grad = gradient
            trainer.step(RANKS)
    states = [value.double().numpy() for row in trainer.state_dict()["state"].values() for value in row.values()]
    return [param.detach().double().numpy() for param in params] + states, counted


@pytest.mark.sample(1)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("shapes", [SHAPES, FEW], ids=["all ranks", "idle ranks"])
@pytest.mark.parametrize("name", ["muon", "dion2"])
def test_three_ranks_train_as_one_process_to_the_bit(processes, name, shapes, native):
    ((expected, alone),) = processes(1).run(_trained, name, shapes)
    answers = processes(RANKS).run(_trained, name, shapes, native)
    for found, _ in answers:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert np.sum([counted for _, counted in answers], axis=0).tolist() == alone  # each matrix once
