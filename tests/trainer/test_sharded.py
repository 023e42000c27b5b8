"""Updates cut among ranks: weights as without, states that are 1/N, saved on any number of ranks and loaded on another."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tristep
from tristep import optimizer as optimizers
from tristep.trainer import checkpoint
from tristep.trainer.optimizer import Updater
from tristep.trainer.optimizer.plan import StepPlan
from tristep.trainer.sync.buckets import GradientBuckets
from tristep.trainer.sync.partition import can_cut, owners_of
from tristep.trainer.sync.sharded import ShardedUpdate

LIMITS = {"bucket_bytes": 30_000, "first_bucket_bytes": 5_000}


def _net(dtype=torch.float32, width=96):
    torch.manual_seed(5)
    conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
    layers = [conv, nn.Flatten(), nn.Linear(128, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)]
    return nn.Sequential(*layers).to(dtype)


def _batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, 4, 4, generator=generator).to(dtype), torch.randn(12, 3, generator=generator).to(dtype)


def _backward(net, step, rank, ranks, unused):
    x, y = (whole[rank * 12 // ranks : (rank + 1) * 12 // ranks] for whole in _batch(step, next(net.parameters()).dtype))
    hidden = net[:-1](x)
    out = net[-1](hidden) if rank != unused else hidden[:, :3]
    ((out - y) ** 2).sum().backward()


def _weights(net):
    return [param.detach().double().numpy().copy() for param in net.parameters()]


def _named(net):
    return [name for name, _ in net.named_parameters()], [param for _, param in net.named_parameters()]


def _optimizer(name, arguments):
    schedule = arguments.pop("schedule", False) if arguments else False
    if schedule:
        arguments["learning_rate"] = 0.01
        arguments["lr_scheduler"] = tristep.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.01)
    if name == "by hand":
        return ByHand(**arguments)
    return optimizers.create(name, **arguments)


class ByHand(optimizers.Optimizer):
    """An optimizer with a nested state, in torch's operations."""

    def create_state(self, index, weight):
        return [torch.zeros_like(weight), (torch.zeros(()), None)]

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state[0].mul_(0.9).add_(grad * self.rescale_grad)
        state[1][0].add_(1.0)
        weight.sub_(self._get_lr(index) * state[0])


def _train_cut(
    name, arguments, steps, dtype=torch.float32, unused=None, multipliers=False, loaded=None, start=0, native=False
):
    """Weights after each step, the whole state at the end, and what this rank has of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = _net(dtype)
    names, params = _named(net)
    if multipliers:
        params[0].lr_mult, params[3].wd_mult, params[4].lr_mult = 0.5, 0.0, 2.0
    optimizer = _optimizer(name, dict(arguments))
    optimizer.param_dict = dict(enumerate(params))
    optimizer.rescale_grad = 1 / 12
    engine = "eager" if ranks > 2 else None  # so that not every process has to compile
    sharded = ShardedUpdate(optimizer, params, names, engine=engine, **LIMITS)
    sharded.buckets.broadcast_weights()
    if native:
        sharded.buckets.native = lambda bucket: bucket.even
    if loaded is not None:
        weights, path = loaded
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(torch.from_numpy(weight))
        sharded.load_state_dict(checkpoint.read(path))
    each = []
    for step in range(start, start + steps):
        net.zero_grad()
        _backward(net, step, rank, ranks, unused if step else None)
        sharded.reduce([param.grad is not None for param in params])
        used = sharded.buckets.used
        sharded.update(used)
        each.append(_weights(net))
    state = sharded.state_dict()
    held = [(piece.param, piece.start, piece.stop) for piece in sharded.pieces]
    return each, _plain(state), held, sharded.cuts


def _plain(state):
    tensors = {
        name: {slot: (str(tensor.dtype), tensor.double().numpy().copy()) for slot, tensor in slots.items()}
        for name, slots in state["state"].items()
    }
    return json.dumps({key: value for key, value in state.items() if key != "state"}), tensors


def _train_summed(name, arguments, steps, dtype=torch.float32, unused=None, multipliers=False):
    """The same with gradients that all ranks get, and an optimizer that each has as a whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = _net(dtype)
    names, params = _named(net)
    if multipliers:
        params[0].lr_mult, params[3].wd_mult, params[4].lr_mult = 0.5, 0.0, 2.0
    optimizer = _optimizer(name, dict(arguments))
    optimizer.param_dict = dict(enumerate(params))
    optimizer.rescale_grad = 1 / 12
    buckets = GradientBuckets(params, names, **LIMITS)
    updater = Updater(optimizer, "eager" if ranks > 2 else None)
    plan, each = None, []
    for step in range(steps):
        net.zero_grad()
        _backward(net, step, rank, ranks, unused if step else None)
        buckets.finish([param.grad is not None for param in params])
        plan = plan or StepPlan(updater, range(len(params)), params, names)
        plan.step([param.grad if used else None for param, used in zip(params, buckets.used, strict=True)])
        each.append(_weights(net))
    return each, _plain(checkpoint.collect(updater, names, params)), None, None


def _train_alone(name, arguments, steps, dtype=torch.float32):
    net = _net(dtype)
    trainer = tristep.Trainer(net, _optimizer(name, dict(arguments)))
    each = []
    for step in range(steps):
        net.zero_grad()
        _backward(net, step, 0, 1, None)
        trainer.step(12)
        each.append(_weights(net))
    return each, _plain(trainer.state_dict()), trainer


def _equal(one, other, atol=None):
    for a, b in zip(one, other, strict=True):
        if atol is None:
            assert a.tobytes() == b.tobytes()
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def _same_state(one, other, atol=None):
    (header, tensors), (other_header, others) = one, other
    assert json.loads(header) == json.loads(other_header)
    assert list(tensors) == list(others)
    for name, slots in tensors.items():
        assert list(slots) == list(others[name])
        for slot, (dtype, values) in slots.items():
            assert (dtype, values.shape) == (others[name][slot][0], others[name][slot][1].shape)
            _equal([values], [others[name][slot][1]], atol)


ELEMENTWISE = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, torch.float32),
    ("adam", {"learning_rate": 0.01, "wd": 0.01, "clip_gradient": 0.1}, torch.float32),
    ("adamw", {"schedule": True, "wd": 0.01}, torch.float64),
    ("nadam", {"learning_rate": 0.01}, torch.float32),
    ("ftrl", {"learning_rate": 0.1}, torch.float32),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "lookahead": 2, "ema_decay": 0.9}, torch.float32),
    ("adam", {"learning_rate": 0.01, "multi_precision": True}, torch.bfloat16),
    ("adam", {"learning_rate": 0.01, "multi_precision": "remainder", "state_dtype": "bfloat16"}, torch.bfloat16),
]
WHOLE = [
    ("lamb", {"learning_rate": 0.01}, torch.float32),
    ("lars", {"learning_rate": 0.1, "momentum": 0.9}, torch.float32),
    ("sgld", {"learning_rate": 0.01}, torch.float32),
    ("muon", {"learning_rate": 0.01}, torch.float32),
    ("adam", {"learning_rate": 0.01, "cautious": True}, torch.float32),
    ("by hand", {"learning_rate": 0.01, "schedule": True}, torch.float32),
]


@pytest.mark.parametrize(("name", "arguments", "dtype"), ELEMENTWISE + WHOLE)
def test_weights_and_whole_state_are_to_the_bit_those_of_ranks_that_all_have_everything(processes, name, arguments, dtype):
    run = (name, arguments, 4, dtype, 1, name != "by hand")
    cut = processes(2).run(_train_cut, *run)
    summed = processes(2).run(_train_summed, *run)
    for (weights, state, held, cuts), (expected, expected_state, *_) in zip(cut, summed, strict=True):
        assert cuts == ((name, arguments, dtype) in ELEMENTWISE)
        assert held
        for one, other in zip(weights, expected, strict=True):
            _equal(one, other)
        _same_state(state, expected_state)


@pytest.mark.parametrize(
    ("ranks", "name", "arguments", "dtype"),
    [
        (2, *ELEMENTWISE[0]),
        (2, *ELEMENTWISE[2]),
        (3, *ELEMENTWISE[2]),
        (3, *WHOLE[0][:2], torch.float64),
        (2, "prodigy", {"d0": 1e-3}, torch.float64),
        (3, "prodigy", {"d0": 1e-3}, torch.float64),
        (4, *ELEMENTWISE[2]),
    ],
)
def test_training_equals_one_process_with_the_global_batch(processes, ranks, name, arguments, dtype):
    found = processes(ranks).run(_train_cut, name, arguments, 4, dtype)
    expected, state, _ = _train_alone(name, arguments, 4, dtype)
    atol = 1e-12 if dtype == torch.float64 else 1e-6
    for weights, own_state, *_ in found:
        for step, (one, other) in enumerate(zip(weights, expected, strict=True)):
            _equal(one, other, atol)
            _equal(one, found[0][0][step])
        _same_state(own_state, state, 10 * atol)


def test_the_backends_own_collectives_give_the_same(processes):
    """On CUDA they are used; gloo has them, too, and there they add up as its all-reduce does, for any number of ranks."""
    run = ("adam", {"learning_rate": 0.01}, 3)
    cut = processes(3).run(_train_cut, *run, torch.float32, None, False, None, 0, True)
    for (weights, state, *_), (expected, expected_state, *_) in zip(cut, processes(3).run(_train_summed, *run), strict=True):
        for one, other in zip(weights, expected, strict=True):
            _equal(one, other)
        _same_state(state, expected_state)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("adam", {"learning_rate": 0.01, "clip_norm": 0.05}),
        ("lamb", {"learning_rate": 0.01, "clip_norm": 0.05}),
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "skip_nonfinite": True}),
        ("prodigy", {"learning_rate": 1.0}),
    ],
)
def test_norms_over_all_tensors_are_those_of_all_ranks(processes, name, arguments):
    found = processes(2).run(_train_cut, name, arguments, 4, torch.float64)
    expected, state, _ = _train_alone(name, arguments, 4, torch.float64)
    for weights, own_state, *_ in found:
        for step, (one, other) in enumerate(zip(weights, expected, strict=True)):
            _equal(one, other, 1e-12)
            _equal(one, found[0][0][step])
        _same_state(own_state, state, 1e-9)


def _small(ranks_with_pieces):
    """A net of fewer blocks than ranks, so that some have nothing to update but a share of the norm to give."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    names, params = _named(net)
    optimizer = optimizers.create("adam", learning_rate=0.1, clip_norm=0.5)
    sharded = ShardedUpdate(optimizer, params, names, engine="eager")
    for step in range(3):
        net.zero_grad()
        net(torch.ones(2, 4) * (step + 1 + dist.get_rank())).square().sum().backward()
        sharded.reduce([True, True])
        sharded.update(sharded.buckets.used)
    assert bool(sharded.pieces) == (dist.get_rank() < ranks_with_pieces)
    return _weights(net), _plain(sharded.state_dict())


def test_a_rank_without_a_piece_takes_part(processes):
    found = processes(3).run(_small, 1)
    for weights, state in found:
        _equal(weights, found[0][0])
        _same_state(state, found[0][1])
        assert json.loads(state[0])["counts"] == {"weight": 3, "bias": 3}


def _average():
    net = _net(torch.float64)
    names, params = _named(net)
    optimizer = optimizers.create("adam", learning_rate=0.1, ema_decay=0.5)
    optimizer.rescale_grad = 1 / 12
    sharded = ShardedUpdate(optimizer, params, names, **LIMITS)
    for step in range(3):
        net.zero_grad()
        _backward(net, step, dist.get_rank(), 2, None)
        sharded.reduce([True] * len(params))
        sharded.update(sharded.buckets.used)
    sharded.apply(*optimizer.average_in_use())
    return _weights(net)


def test_averaged_weights_are_shown_to_all_ranks(processes):
    net = _net(torch.float64)
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.1, "ema_decay": 0.5})
    for step in range(3):
        net.zero_grad()
        _backward(net, step, 0, 1, None)
        trainer.step(12)
    with trainer.averaged_weights():
        expected = _weights(net)
    found = processes(2).run(_average)
    _equal(found[0], found[1])
    _equal(found[0], expected, 1e-9)


def _nonfinite():
    net = _net()
    names, params = _named(net)
    optimizer = optimizers.create("adam", learning_rate=0.1, skip_nonfinite=True)
    sharded = ShardedUpdate(optimizer, params, names, **LIMITS)
    control = torch.tensor([0.5, 0.0])
    sharded.use_control(control)
    seen, totals = [], []
    for step in range(3):
        net.zero_grad()
        if step == 1 and dist.get_rank() == 1:
            with sharded.buckets.accumulate():  # nothing is sent yet, so gradients may be written to
                _backward(net, step, 1, 2, None)
                params[-1].grad[0] = float("inf")
        else:
            _backward(net, step, dist.get_rank(), 2, None)
        sharded.reduce([True] * len(params))
        sharded.update(sharded.buckets.used)
        seen.append(_weights(net))
        totals.append(sharded.total().item())
    return seen, totals


def test_an_infinity_on_one_rank_leaves_all_weights_as_they_are(processes):
    found = processes(2).run(_nonfinite)
    for seen, totals in found:
        assert totals == found[0][1]
        assert [np.isfinite(total) for total in totals] == [True, False, True]
        _equal(seen[0], seen[1])
        assert any((a != b).any() for a, b in zip(seen[1], seen[2], strict=True))
        assert all(np.isfinite(weight).all() for weight in seen[2])


def _count_bytes(name, arguments):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(11)), nn.Linear(300, 10))
    names, params = _named(net)
    engine = "eager" if dist.get_world_size() > 2 else None
    sharded = ShardedUpdate(optimizers.create(name, **arguments), params, names, engine=engine, bucket_bytes=2**20)
    net(torch.ones(1, 300)).sum().backward()
    sharded.reduce([True] * len(params))
    sharded.update(sharded.buckets.used)
    states = [tensor for state in sharded.updater.states.values() for tensor in state]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in states}
    return sum(memory.values()), sum(param.numel() for param in params)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_share_of_the_states_bytes(processes, ranks):
    for held, elements in processes(ranks).run(_count_bytes, "adam", {}):
        assert elements > 990_000
        assert held <= 1.02 * 8 * elements / ranks


def test_packed_states_take_a_quarter(processes):
    wide = processes(2).run(_count_bytes, "adam", {})
    for (packed, _), (held, _) in zip(processes(2).run(_count_bytes, "adam", {"state_dtype": "8bit"}), wide, strict=True):
        assert packed < 0.28 * held


FILES = [
    ("adam", {"learning_rate": 0.01, "schedule": True}, torch.float32),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}, torch.bfloat16),
    ("lamb", {"learning_rate": 0.01}, torch.float32),
    # In float64 all ranks round the same matrices to bfloat16, whose directions amplify the last bits of a float32.
    ("muon", {"learning_rate": 0.01}, torch.float64),
    ("by hand", {"learning_rate": 0.01}, torch.float32),
]


def _save(name, arguments, dtype, path):
    net = _net(dtype)
    names, params = _named(net)
    optimizer = _optimizer(name, dict(arguments))
    optimizer.param_dict, optimizer.rescale_grad = dict(enumerate(params)), 1 / 12
    sharded = ShardedUpdate(optimizer, params, names, **LIMITS)
    for step in range(3):
        net.zero_grad()
        _backward(net, step, dist.get_rank(), dist.get_world_size(), None)
        sharded.reduce([True] * len(params))
        sharded.update(sharded.buckets.used)
    state = sharded.state_dict(everywhere=False)
    if dist.get_rank() == 0:
        checkpoint.write(path, state)
    assert bool(state["state"]) == (dist.get_rank() == 0)
    return _weights(net)


@pytest.mark.parametrize(("name", "arguments", "dtype"), FILES)
def test_saved_on_two_ranks_loaded_on_three_on_one_and_back(processes, tmp_path, name, arguments, dtype):
    path = str(tmp_path / "states")
    weights = processes(2).run(_save, name, arguments, dtype, path)[0]
    on_two = processes(2).run(_train_cut, name, arguments, 2, dtype, None, False, (weights, path), 3)
    on_three = processes(3).run(_train_cut, name, arguments, 2, dtype, None, False, (weights, path), 3)
    net = _net(dtype)
    trainer = tristep.Trainer(net.named_parameters(), _optimizer(name, dict(arguments)))
    with torch.no_grad():
        for param, weight in zip(net.parameters(), weights, strict=True):
            param.copy_(torch.from_numpy(weight))
    trainer.load_states(path)
    for step in (3, 4):
        net.zero_grad()
        _backward(net, step, 0, 1, None)
        trainer.step(12)
    atol = 2e-2 if name == "sgd" else 1e-6  # of bfloat16 weights
    going_on = processes(2).run(_train_cut, name, arguments, 5, dtype)
    _equal(on_two[0][0][-1], going_on[0][0][-1])  # as if there had been no file
    _same_state(on_two[0][1], going_on[0][1])
    _equal(on_three[0][0][-1], on_two[0][0][-1], atol)
    _equal(_weights(net), on_two[0][0][-1], atol)
    # And what a trainer saved is loaded on three ranks.
    again = str(tmp_path / "of a trainer")
    trainer.save_states(again)
    for _, state, *_ in processes(3).run(_train_cut, name, arguments, 0, dtype, None, False, (_weights(net), again)):
        _same_state(state, _plain(trainer.state_dict()))


def _eight_bits(path):
    """Packed states of a net whose pieces are all large enough to be packed."""
    torch.manual_seed(0)
    net = nn.Linear(256, 128, bias=False)
    names, params = _named(net)
    optimizer = optimizers.create("adam", learning_rate=0.01, state_dtype="8bit")
    sharded = ShardedUpdate(optimizer, params, names)
    for step in range(3):
        net.zero_grad()
        (net(torch.ones(2, 256) * (step + 1 + dist.get_rank())) ** 2).sum().backward()
        sharded.reduce([True])
        sharded.update(sharded.buckets.used)
    state = sharded.state_dict()
    if dist.get_rank() == 0:
        checkpoint.write(path, state)
    before = sharded.updater.states[0]
    assert {tensor.dtype for tensor in before} == {torch.uint8}
    dist.barrier()
    sharded.load_state_dict(checkpoint.read(path))
    same = [torch.equal(a, b) for a, b in zip(before, sharded.updater.states[0], strict=True)]
    codes = [tensor.numpy().copy() for tensor in state["state"]["weight"].values()]
    pieces = [tensor.numpy().copy() for tensor in before]
    return same, codes, pieces, _weights(net)


def test_packed_states_are_put_together_and_cut_without_loss(processes, tmp_path):
    found = processes(2).run(_eight_bits, str(tmp_path / "states"))
    n = 256 * 128
    for same, codes, _, weights in found:
        assert all(same)
        for k in range(2):  # each state
            halves = [pieces[k] for _, _, pieces, _ in found]
            assert (codes[k][:n] == np.concatenate([half[: n // 2] for half in halves])).all()
            assert (codes[k][n:] == np.concatenate([half[n // 2 :] for half in halves])).all()
        _equal(weights, found[0][3])
    first, second = (pieces[0][: n // 2] for _, _, pieces, _ in found)
    assert (first != second).any()


def _at_random():
    weight = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    optimizer = optimizers.create("sgd", learning_rate=2.0**-10, stochastic_rounding=True)
    sharded = ShardedUpdate(optimizer, [weight], ["w"])
    weight.sum().backward()
    sharded.reduce([True])
    sharded.update(sharded.buckets.used)
    return weight.detach().float().numpy().copy()


def test_every_rank_rounds_at_random_in_its_own_way(processes):
    found = processes(2).run(_at_random)
    assert (found[0] == found[1]).all()
    moved = found[0] < 1  # the step is half of what bfloat16 can tell apart there, so it is taken whole or not at all
    assert (found[0][moved] == 1 - 2.0**-8).all()
    assert 900 < moved.sum() < 1150
    assert (moved[:1024] != moved[1024:]).any()


def _mistakes(path):
    messages = []
    gap = nn.Parameter(torch.ones(4, 6)[:, ::2])
    net = _net()
    names, params = _named(net)
    sharded = ShardedUpdate(optimizers.create("adam"), params, names)

    def fail(function):
        try:
            function()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")

    fail(lambda: ShardedUpdate(optimizers.create("adam"), [gap], ["w"]))
    fail(lambda: sharded.update([True] * len(params)))
    fail(lambda: sharded.load_state_dict(checkpoint.read(path)))
    return messages, len(sharded.updater.states)


def test_mistakes_are_named(processes, tmp_path):
    net = nn.Linear(2, 2)
    trainer = tristep.Trainer(net, "adam")
    trainer.save_states(tmp_path / "other")
    for messages, states in processes(2).run(_mistakes, str(tmp_path / "other")):
        assert messages[0].startswith("ValueError: params: 'w' has gaps in memory")
        assert messages[1].startswith("RuntimeError: there are no summed up gradients")
        assert messages[2].startswith("ValueError: saved state is of 2 parameters")
        assert states == 0


def test_what_is_cut_and_who_owns_what():
    cut = {name: can_cut(optimizers.create(name)) for name in ("sgd", "adam", "adamw", "lamb", "lars", "muon", "sgld")}
    assert cut == {"sgd": True, "adam": True, "adamw": True, "lamb": False, "lars": False, "muon": False, "sgld": False}
    assert can_cut(optimizers.create("adam", clip_norm=1.0, skip_nonfinite=True))
    assert not can_cut(optimizers.create("adam", cautious=True))
    sizes = [5, 100, 60, 50, 0, 5]
    owned = list(zip(sizes, owners_of(sizes, 2), strict=True))
    assert [sum(size for size, owner in owned if owner == rank) for rank in (0, 1)] == [110, 110]
