"""The Trainer over several processes: equal weights on all ranks, and those of one process with the whole batch."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_training import PARTS, make_batch, make_net, train, weights_after_steps, weights_of

import tristep


def _resumed(update, path, half):
    store = {"kvstore": "dist_sync", "compression_params": {"type": "int8"}, "update_on_kvstore": update}
    arguments = {"learning_rate": 0.02, "momentum": 0.9}
    if half:
        _, net, trainer = train("sgd", arguments, 3, torch.float32, spoil=False, **store)
        trainer.save_states(path)
        return weights_of(net), train("sgd", arguments, 3, torch.float32, False, 3, net, trainer, **store)[0]
    net = make_net(torch.float32)
    torch.nn.utils.vector_to_parameters(torch.load(str(path) + ".weights"), net.parameters())
    trainer = tristep.Trainer(net, "sgd", dict(arguments), **store)
    trainer.load_states(path)
    return train("sgd", arguments, 3, torch.float32, False, 3, net, trainer, **store)[0]


@pytest.mark.parametrize("update", [True, False])
def test_three_ranks_go_on_with_what_two_have_saved_and_kept_back(processes, tmp_path, update):
    path = tmp_path / "states"
    found = processes(2).run(_resumed, update, path, True)
    torch.save(torch.from_numpy(found[0][0]), str(path) + ".weights")
    for rank in processes(3).run(_resumed, update, path, False):
        assert np.isfinite(rank).all()
        np.testing.assert_allclose(rank, found[0][1], rtol=0, atol=0.05)


def _unused(update, ignore):
    """A layer that rank 1 does not use."""
    net = make_net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=update)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found, messages = [], []
    for step in range(3):
        x, y = make_batch(step, torch.float64, rank, ranks)
        trainer.zero_grad()
        hidden = net[:4](x)
        out = net[4](hidden) if rank == 0 else hidden[:, :2]
        (out - y).square().sum().backward()
        try:
            trainer.step(PARTS, ignore_stale_grad=ignore)
        except tristep.StaleGradientError as error:
            messages.append(str(error))
        found.append(weights_of(net))
    return messages, np.stack(found)


@pytest.mark.parametrize("update", [True, False])
def test_what_some_ranks_do_not_use_is_an_error_on_all_or_counts_with_what_there_is(processes, update):
    (messages, weights), (other, _) = processes(2).run(_unused, update, False)
    assert len(messages) == len(other) == 3
    assert "'4.weight' (fresh in 1 of 2 copies), '4.bias' (fresh in 1 of 2 copies)" in messages[0]
    np.testing.assert_array_equal(weights, np.stack([weights_of(make_net())] * 3))
    (messages, first), (other, second) = processes(2).run(_unused, update, True)
    assert messages == other == []
    np.testing.assert_array_equal(first, second)
    net = make_net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    for step in range(3):
        trainer.zero_grad()
        for rank in (0, 1):
            x, y = make_batch(step, torch.float64, rank, 2)
            hidden = net[:4](x)
            ((net[4](hidden) if rank == 0 else hidden[:, :2]) - y).square().sum().backward()
        trainer.step(PARTS)
        np.testing.assert_allclose(first[step], weights_of(net), rtol=0, atol=1e-12)


def _again():
    """A step that was refused for one parameter, and is repeated when that has its gradient."""
    net = make_net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=False)
    x, y = make_batch(0, torch.float64, dist.get_rank(), dist.get_world_size())
    (net(x) - y).square().sum().backward()
    late = net[4].bias.grad
    net[4].bias.grad = None
    with pytest.raises(tristep.StaleGradientError, match=r"'4.bias'"):
        trainer.step(PARTS)
    net[4].bias.grad = late
    trainer.step(PARTS)
    return weights_of(net)


def test_a_refused_step_can_be_repeated_and_sums_nothing_twice(processes):
    expected = weights_after_steps("sgd", {"learning_rate": 0.1}, 1)[0]
    for weights in processes(2).run(_again):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)


def _in_parts(update, clip):
    """Two backward passes to a step, and gradients clipped between sum and update."""
    net = make_net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=update)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        x, y = make_batch(step, torch.float64, rank, ranks)
        trainer.zero_grad(set_to_none=step % 2 == 0)
        with trainer.accumulate():
            with trainer.accumulate():
                pass  # its end is not that of the outer one
            (net(x[:2]) - y[:2]).square().sum().backward()
        (net(x[2:]) - y[2:]).square().sum().backward()
        if clip:
            trainer.allreduce_grads()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            trainer.update(PARTS)
        else:
            trainer.step(PARTS)
    return weights_of(net)


@pytest.mark.parametrize("update", [True, False])
def test_gradients_of_several_backward_passes_add_up(processes, update):
    expected = weights_after_steps("sgd", {"learning_rate": 0.1}, 3)[-1]
    for weights in processes(2).run(_in_parts, update, False):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)


def test_sums_can_be_clipped_before_the_update(processes):
    net = make_net()
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    for step in range(3):
        x, y = make_batch(step, torch.float64)
        trainer.zero_grad()
        (net(x) - y).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        trainer.step(PARTS)
    for weights in processes(2).run(_in_parts, False, True):
        np.testing.assert_allclose(weights, weights_of(net), rtol=0, atol=1e-12)


def _changes(update):
    """Rates, multipliers, a schedule and averaged weights, over two processes or in one."""
    several = update is not None
    net = make_net()
    net[0].weight.lr_mult = 0.5
    store = {"kvstore": "dist_sync", "update_on_kvstore": update} if several else {}
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.02, "ema_decay": 0.5}, **store)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    for step in range(4):
        x, y = make_batch(step, torch.float64, rank, ranks)
        trainer.zero_grad()
        (net(x) - y).square().sum().backward()
        trainer.step(PARTS)
        trainer.set_learning_rate(trainer.learning_rate / 2)
        if step == 1:
            net[2].weight.lr_mult = 2.0
    own = weights_of(net)
    with trainer.averaged_weights():
        average = weights_of(net)
    np.testing.assert_array_equal(weights_of(net), own)
    return own, average


@pytest.mark.parametrize("update", [True, False])
def test_rates_multipliers_and_averages_are_those_of_one_process(processes, update):
    expected = _changes(None)
    for found in processes(2).run(_changes, update):
        for ours, alone in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-10)


def _scaled(update, compression_params=None):
    """Loss scaling where one rank's gradient overflows once: scales, and which steps changed the weights."""
    net = make_net(torch.float32)
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.01}, "dist_sync", compression_params, update)
    tristep.amp.init()
    tristep.amp.init_trainer(trainer, tristep.amp.LossScaler(2.0**10, scale_window=2))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scales, changed = [], []
    for step in range(5):
        x, y = make_batch(step, torch.float32, rank, ranks)
        if step == 2 and rank == 1:
            x = x * torch.inf
        before = weights_of(net)
        trainer.zero_grad()
        with tristep.amp.scale_loss((net(x) - y).square().sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(PARTS)
        scales.append(trainer._loss_scaler.loss_scale)
        changed.append(not np.array_equal(before, weights_of(net)))
    return scales, changed, weights_of(net)


@pytest.mark.parametrize(
    ("update", "compression_params"), [(True, None), (False, None), (False, {"type": "bf16"}), (False, {"type": "topk"})]
)
def test_an_overflow_on_one_rank_is_one_on_all(processes, update, compression_params):
    found = processes(2).run(_scaled, update, compression_params)
    for scales, changed, weights in found:
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert changed == [True, True, False, True, True]
        np.testing.assert_array_equal(weights, found[0][2])


def _refused():
    tristep.amp.init()
    net = make_net()
    messages = []
    for call in (
        lambda: weights_after_steps("sgd", {}, kvstore="dist_sync", compression_params={"type": "2bit"}),
        lambda: tristep.Trainer(net, "sgd", kvstore="dist_sync").update(1),
        lambda: tristep.amp.init_trainer(tristep.Trainer(net, "muon", kvstore="dist_sync")),
        lambda: _scaled(False, {"type": "2bit"}),
        lambda: tristep.Trainer(net, "sgd", kvstore="dist_sync", telemetry=True),
        lambda: weights_after_steps(
            "sgd", {}, dtype=torch.float32 if dist.get_rank() else torch.float64, kvstore="dist_sync"
        ),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit_is_refused_on_all_ranks(processes):
    parts = (
        "the gradient of '0.weight' is torch.float64, which cannot be compressed",
        "update() where the store updates the weights",
        "a loss scaler with Muon and update_on_kvstore=True",
        "a loss scaler with compression_params={'type': '2bit'}: this compression hides an overflow",
        "telemetry=True where each process updates its share of the weights",
        "parameter number 0 is '0.weight' torch.float64 (40, 7) on rank 0 and '0.weight' torch.float32 (40, 7) on rank 1",
    )
    for messages in processes(2).run(_refused):
        for message, part in zip(messages, parts, strict=True):
            assert part in message


def _measured():
    _, _, trainer = train(
        "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=False, telemetry=tristep.Telemetry()
    )
    return trainer.telemetry["gradient_norm"]


def test_telemetry_sees_the_sums(processes):
    *_, alone = train("sgd", {"learning_rate": 0.1}, telemetry=tristep.Telemetry())
    for found in processes(2).run(_measured):
        np.testing.assert_allclose(found, alone.telemetry["gradient_norm"], rtol=1e-9)
