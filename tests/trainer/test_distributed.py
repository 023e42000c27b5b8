"""The Trainer over several processes: equal weights on all ranks, and those of one process with the whole batch."""

import contextlib
import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tristep
from tristep import kvstore

PARTS = 12  # samples of a step, over all ranks


def _net(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)).to(dtype)


def _batch(step, dtype, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(PARTS, 7, generator=generator), torch.randn(PARTS, 2, generator=generator)
    part = slice(rank * PARTS // ranks, (rank + 1) * PARTS // ranks)
    return x[part].to(dtype), y[part].to(dtype)


def _weights(net):
    return torch.cat([param.detach().flatten() for param in net.parameters()]).numpy().copy()


def _train(optimizer, arguments, steps=5, dtype=torch.float64, spoil=True, first=0, net=None, trainer=None, **settings):
    """Weights after each step; with a store, on each rank with its part of the batch."""
    several = "kvstore" in settings
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    net = net or _net(dtype)
    if spoil and rank:  # rank 0's are taken
        with torch.no_grad():
            for param in net.parameters():
                param.add_(1.0)
    trainer = trainer or tristep.Trainer(net, optimizer, dict(arguments), **settings)
    if several:  # a store gives the first weights at the first step, so the first gradients are of these, too
        trainer._stepper.start()
    after = []
    for step in range(first, first + steps):
        x, y = _batch(step, dtype, rank, ranks)
        trainer.zero_grad()
        (net(x) - y).square().sum().backward()
        trainer.step(PARTS)
        after.append(_weights(net))
    return np.stack(after), net, trainer


def _all(*args, **kwargs):
    return _train(*args, **kwargs)[0]


def _run(optimizer, arguments, dtype, store):
    return _all(optimizer, arguments, dtype=dtype, **store)


OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    ("adam", {"learning_rate": 0.01}),
    ("lamb", {"learning_rate": 0.01}),
    ("adamw", {"learning_rate": 0.01, "clip_norm": 0.5}),
    ("muon", {"learning_rate": 0.01}),
]


@pytest.mark.parametrize(("optimizer", "arguments"), OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
@pytest.mark.parametrize("update_on_kvstore", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_equals_one_process_with_the_global_batch(processes, ranks, optimizer, arguments, update_on_kvstore):
    store = {"kvstore": "dist_sync", "update_on_kvstore": update_on_kvstore}
    expected = _all(optimizer, arguments)
    found = processes(ranks).run(_run, optimizer, arguments, torch.float64, store)
    for weights in found:
        np.testing.assert_array_equal(weights, found[0])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-6 if optimizer == "muon" else 1e-12)


COMPRESSIONS = [
    {"type": "2bit", "threshold": 0.02},
    {"type": "1bit", "threshold": 0.0},
    *({"type": kind} for kind in ("fp16", "bf16", "int8", "int4", "sign", "topk", "randomk", "powersgd")),
]


def _compressed(params):
    """Weights of both ways to update."""
    found = []
    for update in (True, False):
        store = {"kvstore": "dist_sync", "compression_params": params, "update_on_kvstore": update}
        found.append(_all("sgd", {"learning_rate": 0.01}, dtype=torch.float32, **store))
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_compressed_sums_are_the_same_on_all_ranks_whoever_updates(processes, params):
    found = processes(2).run(_compressed, params)
    plain = _all("sgd", {"learning_rate": 0.01}, dtype=torch.float32)
    for rank in found:
        for weights in rank:
            np.testing.assert_array_equal(weights, found[0][0])
    assert np.isfinite(found[0][0]).all()
    assert not np.array_equal(found[0][0], plain)
    if params["type"] in ("fp16", "bf16", "int8"):
        np.testing.assert_allclose(found[0][0], plain, rtol=0, atol=2e-3)


def _two_bit():
    """What MXNet's 2bit sends, by NumPy, and what the trainer's gradients become."""
    net = _net(torch.float32)
    trainer = tristep.Trainer(
        net,
        "sgd",
        {"learning_rate": 0.0},
        kvstore="dist_sync",
        update_on_kvstore=False,
        compression_params={"type": "2bit", "threshold": 0.25},
    )
    own, sums = [], []
    for step in range(4):
        gradients = [
            torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for param in net.parameters()
        ]
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient.clone()
        trainer.allreduce_grads()
        own.append(torch.cat([gradient.flatten() for gradient in gradients]).numpy())
        sums.append(torch.cat([param.grad.flatten() for param in net.parameters()]).numpy().copy())
        trainer.update(1)
    return np.stack(own), np.stack(sums)


def test_two_bits_are_mxnets_on_every_rank(processes):
    found = processes(3).run(_two_bit)
    total = 0.0
    for own, _ in found:
        residual, sent = np.zeros_like(own[0]), []
        for gradient in own:
            x = residual + gradient
            sent.append(np.where(x >= 0.25, np.float32(0.25), np.where(x <= -0.25, np.float32(-0.25), np.float32(0))))
            residual = x - sent[-1]
        total = total + np.stack(sent)
    for _, sums in found:
        np.testing.assert_array_equal(sums, total)


def _kept_back(params):
    """Sums of all gradients so far, what was sent of them, and all that is kept back, after several steps."""
    # Most of a bucket is gaps here: a code that left its own sums there would soon drown the gradients.
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 40))
    trainer = tristep.Trainer(
        net, "sgd", {"learning_rate": 0.0}, kvstore="dist_sync", update_on_kvstore=False, compression_params=params
    )
    total, sent = torch.zeros(0), torch.zeros(0)
    for step in range(30):
        gradients = []
        for param in net.parameters():
            generator = torch.Generator().manual_seed(100 * step + 10 * dist.get_rank() + param.numel() % 7)
            param.grad = torch.randn(param.shape, generator=generator)
            gradients.append(param.grad.flatten().clone())
        own = torch.cat(gradients)
        dist.all_reduce(own)
        trainer.allreduce_grads()
        found = torch.cat([param.grad.flatten() for param in net.parameters()])
        total, sent = (own, found.clone()) if step == 0 else (total + own, sent + found)
        trainer.update(1)
    residuals = trainer.state_dict()["residuals"]
    kept = torch.cat([sum(residuals[name].values()).flatten() for name, _ in net.named_parameters()])
    return total.numpy(), sent.numpy(), kept.numpy()


@pytest.mark.parametrize("params", COMPRESSIONS, ids=lambda params: params["type"])
def test_what_was_not_sent_is_kept_back_and_no_more(processes, params):
    (total, sent, kept), (other, same, _) = processes(2).run(_kept_back, params)
    np.testing.assert_array_equal(total, other)
    np.testing.assert_array_equal(sent, same)
    if params["type"] != "1bit":  # it sends ones, however small gradients are
        assert np.abs(kept).max() < 60
    np.testing.assert_allclose(sent + kept, total, rtol=0, atol=2e-4)


def _automatic(link):
    """What "auto" takes on a link that is said to be measured, or on the real one, what it prints, and trained weights."""
    from tristep.trainer import cost_model
    from tristep.trainer.sync import allreduce

    store = {"kvstore": "dist_sync", "compression_params": {"type": "auto"}}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        if link is not None:
            patch.setattr(cost_model, "measure_link", lambda group: cost_model.Link(*link, measured=True))
            patch.setattr(allreduce, "_copy_speed", lambda device: 20e9)
        weights, _, trainer = _train("sgd", {"learning_rate": 0.01}, dtype=torch.float32, **store)
    chosen = trainer._sync._compression_params
    return chosen, printed.getvalue(), weights


@pytest.mark.parametrize(
    ("link", "chosen", "says"),
    [
        ((1e6, 0.0), {"type": "int4"}, "int4 is taken"),
        ((1e15, 0.0), None, "compression costs more than it saves"),
        (None, ..., "were measured"),
    ],
    ids=["slow", "fast", "real"],
)
def test_what_pays_on_the_link_is_taken(processes, link, chosen, says):
    (first, printed, weights), (other, silent, same) = processes(2).run(_automatic, link)
    assert first == other
    assert chosen is ... or first == chosen
    np.testing.assert_array_equal(weights, same)
    assert says in printed
    assert not silent


def _resumed(params, update, path, half):
    store = {"kvstore": "dist_sync", "compression_params": params, "update_on_kvstore": update}
    arguments = {"learning_rate": 0.02, "momentum": 0.9}
    if half:
        _, net, trainer = _train("sgd", arguments, 3, torch.float32, spoil=False, **store)
        trainer.save_states(path)
        return _weights(net), _train("sgd", arguments, 3, torch.float32, False, 3, net, trainer, **store)[0]
    net = _net(torch.float32)
    torch.nn.utils.vector_to_parameters(torch.load(str(path) + ".weights"), net.parameters())
    trainer = tristep.Trainer(net, "sgd", dict(arguments), **store)
    trainer.load_states(path)
    return _train("sgd", arguments, 3, torch.float32, False, 3, net, trainer, **store)[0]


@pytest.mark.parametrize(
    "params", [None, {"type": "2bit", "threshold": 0.02}, {"type": "int8"}], ids=["plain", "2bit", "int8"]
)
@pytest.mark.parametrize("update", [True, False])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(processes, tmp_path, params, update):
    path = tmp_path / "states"
    found = processes(2).run(_resumed, params, update, path, True)
    torch.save(torch.from_numpy(found[0][0]), str(path) + ".weights")
    again = processes(2).run(_resumed, params, update, path, False)
    for rank in again:
        np.testing.assert_array_equal(rank, found[0][1])
    if params is None:  # one process goes on with what two have saved
        net = _net(torch.float32)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(found[0][0]), net.parameters())
        trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.02, "momentum": 0.9})
        trainer.load_states(path)
        alone = _train("sgd", {}, 3, torch.float32, False, 3, net, trainer)[0]
        np.testing.assert_allclose(alone, found[0][1], rtol=0, atol=1e-6)
    else:  # three load the residuals of two
        for rank in processes(3).run(_resumed, params, update, path, False):
            assert np.isfinite(rank).all()
            np.testing.assert_allclose(rank, found[0][1], rtol=0, atol=0.05)


def _unused(update, ignore):
    """A layer that rank 1 does not use."""
    net = _net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=update)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found, messages = [], []
    for step in range(3):
        x, y = _batch(step, torch.float64, rank, ranks)
        trainer.zero_grad()
        hidden = net[:4](x)
        out = net[4](hidden) if rank == 0 else hidden[:, :2]
        (out - y).square().sum().backward()
        try:
            trainer.step(PARTS, ignore_stale_grad=ignore)
        except tristep.StaleGradientError as error:
            messages.append(str(error))
        found.append(_weights(net))
    return messages, np.stack(found)


@pytest.mark.parametrize("update", [True, False])
def test_what_some_ranks_do_not_use_is_an_error_on_all_or_counts_with_what_there_is(processes, update):
    (messages, weights), (other, _) = processes(2).run(_unused, update, False)
    assert len(messages) == len(other) == 3
    assert "'4.weight' (fresh in 1 of 2 copies), '4.bias' (fresh in 1 of 2 copies)" in messages[0]
    np.testing.assert_array_equal(weights, np.stack([_weights(_net())] * 3))
    (messages, first), (other, second) = processes(2).run(_unused, update, True)
    assert messages == other == []
    np.testing.assert_array_equal(first, second)
    net = _net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    for step in range(3):
        trainer.zero_grad()
        for rank in (0, 1):
            x, y = _batch(step, torch.float64, rank, 2)
            hidden = net[:4](x)
            ((net[4](hidden) if rank == 0 else hidden[:, :2]) - y).square().sum().backward()
        trainer.step(PARTS)
        np.testing.assert_allclose(first[step], _weights(net), rtol=0, atol=1e-12)


def _again():
    """A step that was refused for one parameter, and is repeated when that has its gradient."""
    net = _net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=False)
    x, y = _batch(0, torch.float64, dist.get_rank(), dist.get_world_size())
    (net(x) - y).square().sum().backward()
    late = net[4].bias.grad
    net[4].bias.grad = None
    with pytest.raises(tristep.StaleGradientError, match=r"'4.bias'"):
        trainer.step(PARTS)
    net[4].bias.grad = late
    trainer.step(PARTS)
    return _weights(net)


def test_a_refused_step_can_be_repeated_and_sums_nothing_twice(processes):
    expected = _all("sgd", {"learning_rate": 0.1}, 1)[0]
    for weights in processes(2).run(_again):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)


def _in_parts(update, clip):
    """Two backward passes to a step, and gradients clipped between sum and update."""
    net = _net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=update)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        x, y = _batch(step, torch.float64, rank, ranks)
        trainer.zero_grad(set_to_none=step % 2 == 0)
        with trainer.accumulate():
            (net(x[:2]) - y[:2]).square().sum().backward()
        (net(x[2:]) - y[2:]).square().sum().backward()
        if clip:
            trainer.allreduce_grads()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            trainer.update(PARTS)
        else:
            trainer.step(PARTS)
    return _weights(net)


@pytest.mark.parametrize("update", [True, False])
def test_gradients_of_several_backward_passes_add_up(processes, update):
    expected = _all("sgd", {"learning_rate": 0.1}, 3)[-1]
    for weights in processes(2).run(_in_parts, update, False):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)


def test_sums_can_be_clipped_before_the_update(processes):
    net = _net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    for step in range(3):
        x, y = _batch(step, torch.float64)
        trainer.zero_grad()
        (net(x) - y).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        trainer.step(PARTS)
    for weights in processes(2).run(_in_parts, False, True):
        np.testing.assert_allclose(weights, _weights(net), rtol=0, atol=1e-12)


def _changes(update):
    """Rates, multipliers, a schedule and averaged weights, over two processes or in one."""
    several = update is not None
    net = _net()
    net[0].weight.lr_mult = 0.5
    store = {"kvstore": "dist_sync", "update_on_kvstore": update} if several else {}
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.02, "ema_decay": 0.5}, **store)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    for step in range(4):
        x, y = _batch(step, torch.float64, rank, ranks)
        trainer.zero_grad()
        (net(x) - y).square().sum().backward()
        trainer.step(PARTS)
        trainer.set_learning_rate(trainer.learning_rate / 2)
        if step == 1:
            net[2].weight.lr_mult = 2.0
    own = _weights(net)
    with trainer.averaged_weights():
        average = _weights(net)
    np.testing.assert_array_equal(_weights(net), own)
    return own, average


@pytest.mark.parametrize("update", [True, False])
def test_rates_multipliers_and_averages_are_those_of_one_process(processes, update):
    expected = _changes(None)
    for found in processes(2).run(_changes, update):
        for ours, alone in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-10)


def _scaled(update):
    """Loss scaling where one rank's gradient overflows once: scales, and which steps changed the weights."""
    net = _net(torch.float32)
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.01}, kvstore="dist_sync", update_on_kvstore=update)
    tristep.amp.init()
    tristep.amp.init_trainer(trainer, tristep.amp.LossScaler(2.0**10, scale_window=2))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scales, changed = [], []
    for step in range(5):
        x, y = _batch(step, torch.float32, rank, ranks)
        if step == 2 and rank == 1:
            x = x * torch.inf
        before = _weights(net)
        trainer.zero_grad()
        with tristep.amp.scale_loss((net(x) - y).square().sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(PARTS)
        scales.append(trainer._loss_scaler.loss_scale)
        changed.append(not np.array_equal(before, _weights(net)))
    return scales, changed, _weights(net)


@pytest.mark.parametrize("update", [True, False])
def test_an_overflow_on_one_rank_is_one_on_all(processes, update):
    found = processes(2).run(_scaled, update)
    for scales, changed, weights in found:
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert changed == [True, True, False, True, True]
        np.testing.assert_array_equal(weights, found[0][2])


def _of_a_store():
    """A trainer with a store object, and the store by itself."""
    store = kvstore.create("dist_sync")
    weights = _all("sgd", {"learning_rate": 0.1}, 2, kvstore=store, update_on_kvstore=False)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("a", torch.zeros(3))
    out = torch.zeros(3)
    sums = []
    for _ in range(2):
        store.pushpull("a", torch.tensor([0.4, 0.6, -2.0]), out=out)
        sums.append(out.tolist())
    return weights, store.rank, store.num_workers, sums


def test_a_store_object_is_used(processes):
    expected = _all("sgd", {"learning_rate": 0.1}, 2)
    for rank, (weights, own, ranks, sums) in enumerate(processes(2).run(_of_a_store)):
        assert (own, ranks) == (rank, 2)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
        assert sums == [[0.0, 1.0, -1.0], [1.0, 1.0, -1.0]]


def _refused():
    tristep.amp.init()
    net = _net()
    messages = []
    for call in (
        lambda: tristep.Trainer([net, _net()], "sgd", kvstore="dist_sync"),
        lambda: tristep.Trainer(net, "sgd", kvstore="dist_sync", compression_params={"type": "3bit"}),
        lambda: _all("sgd", {}, kvstore="dist_sync", compression_params={"type": "2bit"}),
        lambda: tristep.Trainer(net, "sgd", kvstore="dist_sync").update(1),
        lambda: tristep.amp.init_trainer(tristep.Trainer(net, "muon", kvstore="dist_sync")),
        lambda: tristep.Trainer(net, "sgd", kvstore="dist_sync", telemetry=True),
        lambda: _all("sgd", {}, dtype=torch.float32 if dist.get_rank() else torch.float64, kvstore="dist_sync"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit_is_refused_on_all_ranks(processes):
    parts = (
        "params has 2 copies of the model with kvstore='dist_sync'",
        "compression_params['type']='3bit'",
        "the gradient of '0.weight' is torch.float64, which cannot be compressed",
        "update() where the store updates the weights",
        "a loss scaler with Muon and update_on_kvstore=True",
        "telemetry=True where each process updates its share of the weights",
        "parameter number 0 is '0.weight' torch.float64 (40, 7) on rank 0 and '0.weight' torch.float32 (40, 7) on rank 1",
    )
    for messages in processes(2).run(_refused):
        for message, part in zip(messages, parts, strict=True):
            assert part in message


def _measured():
    _, _, trainer = _train(
        "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=False, telemetry=tristep.Telemetry()
    )
    return trainer.telemetry["gradient_norm"]


def test_telemetry_sees_the_sums(processes):
    *_, alone = _train("sgd", {"learning_rate": 0.1}, telemetry=tristep.Telemetry())
    for found in processes(2).run(_measured):
        np.testing.assert_allclose(found, alone.telemetry["gradient_norm"], rtol=1e-9)


def test_without_several_processes_there_is_no_such_store(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RuntimeError, match=r"kvstore='dist_sync' needs several processes: start the program with torchrun"):
        tristep.Trainer(_net(), "sgd", kvstore="dist_sync")
