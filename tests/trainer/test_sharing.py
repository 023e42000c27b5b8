"""Matrices of which each is orthogonalized by one rank, with an all-reduce and with ZeRO-1."""

import operator
from functools import reduce
from importlib import import_module
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tristep
from tristep.trainer.kvstore import sharing
from tristep.trainer.kvstore.buckets import GradientBuckets

# Several of one shape, which are computed in a stack, large ones, which are not, a stack of three matrices, and vectors.
SHAPES = [(24, 16), (24, 16), (280, 240), (24, 16), (40, 8), (7,), (3, 12, 20), (16, 24), (240, 280), (24, 16), (5, 2, 2, 3)]
SMALL = [shape for shape in SHAPES if max(shape) < 100]
FEW = [(12, 8), (30,)]
UNLIKE = [(24, 16), (280, 240), (40, 8), (7,), (3, 12, 20), (16, 24), (240, 280), (5, 2, 2, 3), (30, 17)]
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


def _trainer(name, arguments, shapes, dtype=torch.float32, update=False, **settings):
    """A trainer of this process alone, or of all."""
    torch.manual_seed(0)
    params = [(f"p{i}", torch.nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(shapes)]
    store = {"kvstore": "dist_sync", "update_on_kvstore": update} if dist.get_world_size() > 1 else {}
    trainer = tristep.Trainer(params, name, dict(arguments), **settings, **store)
    trainer._init_kvstore()
    return trainer, [param for _, param in params]


def _trained(name, arguments, missing=None, dtype=torch.float32, shapes=SHAPES, update=False, native=False):
    """Weights and states after some steps, and for each step how many matrices this rank has orthogonalized."""
    trainer, params = _trainer(name, arguments, shapes, dtype, update)
    rules, counted = import_module("tristep.kernels.rules.muon"), []
    orthogonalized = rules.orthogonalized

    def counting(matrices, *args):
        counted[-1] += len(matrices)
        return orthogonalized(matrices, *args)

    native = mock.Mock(return_value=True) if native else GradientBuckets.native  # the collectives that a GPU uses
    with (
        mock.patch.object(rules, "orthogonalized", counting),
        mock.patch.object(sharing, "STAGE_BYTES", 1000),
        mock.patch.object(GradientBuckets, "native", native),
    ):
        for step in range(4):
            counted.append(0)
            for i, (param, gradient) in enumerate(zip(params, _gradients(step, shapes), strict=True)):
                param.grad = None if missing and i in missing.get(step, ()) else gradient.to(dtype)
            trainer.step(RANKS, ignore_stale_grad=bool(missing))
    states = [value.double().numpy() for row in trainer.state_dict()["state"].values() for value in row.values()]
    return [param.detach().double().numpy() for param in params] + states, counted


def _same(arrays, expected):
    for one, other in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "arguments", "missing", "dtype", "shapes"),
    [
        ("muon", {"learning_rate": 0.02, "wd": 0.1}, None, torch.float32, SHAPES),
        ("dion2", {"learning_rate": 0.02, "wd": 0.1}, None, torch.float32, SHAPES),
        ("muon", {"learning_rate": 0.02}, {1: (0, 2), 3: (0, 1, 2, 3, 4, 6, 7, 8, 9)}, torch.float32, SHAPES),
        ("normuon", {"split": {"p0|p1": 3, "p2": [100, 180], "*": 1}}, None, torch.float32, SHAPES),
        ("nordion2", {"learning_rate": 0.02, "fraction": 0.5}, None, torch.float32, SHAPES),
        ("muon", {"clip_norm": 0.5, "cautious_wd": True, "wd": 0.1}, None, torch.float32, SHAPES),
        ("muon", {"learning_rate": 0.02, "multi_precision": True}, None, torch.bfloat16, SHAPES),
        ("muon", {"learning_rate": 0.02, "state_dtype": "bfloat16"}, None, torch.float32, SHAPES),
        ("muon", {"learning_rate": 0.02}, None, torch.float32, FEW),
        ("soap", {"learning_rate": 0.02}, None, torch.float32, FEW),
    ],
    ids=["muon", "dion2", "missing", "blocks", "nordion2", "limits", "masters", "states", "idle ranks", "soap"],
)
def test_three_ranks_train_as_one_process_to_the_bit(processes, name, arguments, missing, dtype, shapes):
    run = (name, arguments, missing, dtype, shapes)
    ((expected, alone),) = processes(1).run(_trained, *run)
    answers = processes(RANKS).run(_trained, *run)
    for found, _ in answers:
        _same(found, expected)
    counts = np.array([counted for _, counted in answers])
    if missing is None:
        assert (counts[:, 0] == alone[0]).all()  # in the first step every rank computes all
        assert counts[:, 1:].sum(axis=0).tolist() == alone[1:]  # each matrix once


@pytest.mark.sample(1)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("shapes", [UNLIKE, FEW], ids=["all ranks", "idle ranks"])
@pytest.mark.parametrize("name", ["muon", "dion2"])
def test_three_ranks_with_cut_states_train_as_one_process_to_the_bit(processes, name, shapes, native):
    run = (name, {"learning_rate": 0.02, "wd": 0.1}, None, torch.float32, shapes)
    ((expected, alone),) = processes(1).run(_trained, *run)
    answers = processes(RANKS).run(_trained, *run, True, native)
    for found, _ in answers:
        _same(found, expected)
    assert np.sum([counted for _, counted in answers], axis=0).tolist() == alone  # each matrix once


def _elsewhere():
    """Weights of which one lies at an odd address on one rank, as in a file that was mapped."""
    trainer, params = _trainer("muon", {}, SMALL)
    if dist.get_rank() == 1:
        weight = params[1].data
        params[1].data = torch.empty(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)
    for step in range(4):
        for param, gradient in zip(params, _gradients(step, SMALL), strict=True):
            param.grad = gradient
        trainer.step(RANKS)
    return [param.detach().numpy() for param in params]


def test_addresses_do_not_decide_what_is_shared(processes):
    (expected,) = processes(1).run(_elsewhere)
    for found in processes(RANKS).run(_elsewhere):
        _same(found, expected)


def _measured(quantities):
    trainer, params = _trainer("muon", {}, SMALL, telemetry=tristep.Telemetry(metrics=quantities))
    for step in range(3):
        for param, gradient in zip(params, _gradients(step, SMALL), strict=True):
            param.grad = gradient
        trainer.step(RANKS)
    trainer.telemetry.flush()
    return [trainer.telemetry[name] for name in quantities]


def test_telemetry_measures_all_matrices_on_every_rank(processes):
    quantities = "update_norm", "update_ratio", "cosine"
    (expected,) = processes(1).run(_measured, quantities)
    assert all(np.isfinite(values).all() for values in expected)
    for found in processes(RANKS).run(_measured, quantities):
        _same(found, expected)


def _apart(alone):
    """Weights after steps in which gradients are not summed: each rank has its own."""
    trainer, params = _trainer("muon", {"learning_rate": 0.02}, SMALL)
    if alone:
        trainer.replicas[0].share = None
    for step in range(3):
        for param, gradient in zip(params, _gradients(step, SMALL), strict=True):
            param.grad = gradient
        trainer.update(1)
    return [param.detach().numpy() for param in params]


def test_ranks_that_do_not_sum_gradients_compute_their_own_steps(processes):
    found, expected = (processes(2).run(_apart, alone) for alone in (False, True))
    for one, other in zip(found, expected, strict=True):
        _same(one, other)
    assert (found[0][0] != found[1][0]).any()


def _of_several_optimizers():
    entries = [("p0|p1|p5", "muon", {}), ("ndim>1", "dion2", {}), ("*", "adamw", {})]
    trainer, params = _trainer(entries, {}, SMALL)
    for step in range(3):
        for param, gradient in zip(params, _gradients(step, SMALL), strict=True):
            param.grad = gradient
        trainer.step(RANKS)
    return [param.detach().numpy() for param in params]


def test_several_optimizers_share_their_parts_in_turn(processes):
    (expected,) = processes(1).run(_of_several_optimizers)
    for found in processes(RANKS).run(_of_several_optimizers):
        _same(found, expected)
