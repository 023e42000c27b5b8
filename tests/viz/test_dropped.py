"""What is dropped is freed: everything that watches a model, after no step, one or two; torch.optim leaves nothing."""

import gc
import weakref

import pytest
import torch

import tristep
from tristep import Trainer, optim, viz
from tristep.contrib.qk_clip import QKClip

IMAGE = torch.ones(2, 6)


def _net():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))


def _loss(net):
    net.zero_grad()
    return net(IMAGE).square().mean()


def _stepping(net, step):
    def run():
        _loss(net).backward()
        step()

    return run


def _trainer(net, folder, optimizer="adam", **arguments):
    trainer = Trainer(net, optimizer, **arguments)
    return _stepping(net, lambda: trainer.step(1)), trainer


def _zero_grads(net, folder):
    return _trainer(net, folder, zero_grads=True)


def _telemetry(net, folder):
    return _trainer(net, folder, telemetry=True)


def _several_optimizers(net, folder):
    return _trainer(net, folder, [("*.bias", "sgd"), ("*", "muon")])


def _in_backward(net, folder):
    trainer = Trainer(net, "adam")

    def run():
        with trainer.step_in_backward(1):
            _loss(net).backward()

    return run, trainer


def _captured(net, folder):
    trainer = Trainer(net, "adam")
    step = trainer.capture(_stepping(net, lambda: trainer.step(1)))
    return step, trainer, step


def _loss_scaler(net, folder):
    trainer = Trainer(net, "adam")
    tristep.amp.init_trainer(trainer)

    def run():
        with tristep.amp.scale_loss(_loss(net), trainer) as loss:
            loss.backward()
        trainer.step(1)

    return run, trainer


def _averages(net, folder):
    run, trainer = _trainer(net, folder, optimizer_params={"ema_decay": 0.9})

    def averaged():
        run()
        with trainer.averaged_weights():
            net(IMAGE)

    return averaged, trainer


def _store(net, folder):
    nets = [net, *tristep.replicate(net, ["cpu"])]
    store = tristep.kvstore.create("local")
    trainer = Trainer(nets, "sgd", kvstore=store)

    def run():
        for each in nets:
            _loss(each).backward()
        trainer.step(1)

    return run, trainer, store


def _recorder(net, folder):
    trainer = Trainer(net, "adam")
    recorder = viz.Recorder(trainer)
    return _stepping(net, lambda: (trainer.step(1), recorder.step(loss=1.0))), trainer, recorder


def _recorder_of_torchs(net, folder):
    optimizer = torch.optim.AdamW(net.parameters())
    recorder = viz.Recorder(optimizer, every=1)
    return _stepping(net, lambda: (optimizer.step(), recorder.step(loss=1.0))), optimizer, recorder


def _view(net, folder):
    run, trainer, recorder = _recorder(net, folder)
    view = viz.Dashboard(recorder)
    view.scene()
    return run, trainer, recorder, view


def _loop(net, folder):
    trainer = Trainer(net, "adam")
    loop = viz.LiveLoop.fit(net, torch.nn.MSELoss(), [(IMAGE, torch.ones(2, 2))] * 9, trainer)
    return loop.step, trainer, loop


def _manager(net, folder):
    trainer = Trainer(net, "adam")
    manager = tristep.CheckpointManager(folder, trainer, net, save_interval_steps=1)

    def saved():
        trainer.step(1)
        manager.step()
        manager.wait()

    return _stepping(net, saved), trainer, manager


def _qk_clip(net, folder):
    run, trainer = _trainer(net, folder)
    net[0].attention = torch.nn.MultiheadAttention(6, 1)
    clip = QKClip(net, tau=1.0)

    def clipped():
        run()
        net[0].attention(IMAGE, IMAGE, IMAGE)
        clip.step()

    return clipped, trainer, clip


def _optim(make):
    def made(net, folder):
        optimizer = make(net)
        return _stepping(net, optimizer.step), optimizer

    return made


WATCHERS = {
    "Trainer": _trainer,
    "zero_grads": _zero_grads,
    "telemetry": _telemetry,
    "several optimizers": _several_optimizers,
    "step_in_backward": _in_backward,
    "capture": _captured,
    "loss scaler": _loss_scaler,
    "averaged weights": _averages,
    "store": _store,
    "recorder": _recorder,
    "recorder of torch's": _recorder_of_torchs,
    "view": _view,
    "loop": _loop,
    "manager": _manager,
    "QKClip": _qk_clip,
    "optim.Adam": _optim(lambda net: optim.Adam(net.parameters())),
    "optim.Lion": _optim(lambda net: optim.Lion(net.parameters(), ema_decay=0.9)),
    "optim.MultiOptimizer": _optim(lambda net: optim.MultiOptimizer(net, [("*.bias", "AdamW"), ("*", "Muon")])),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WATCHERS)
def test_what_is_dropped_is_freed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", None)
    tristep.amp.init()
    left = {}
    for steps in range(3):
        net = _net()
        run, *watchers = WATCHERS[name](net, tmp_path / str(steps))
        parameters = list(net.parameters())
        for _ in range(steps):
            run()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        references = [weakref.ref(each) for each in (net, *watchers, *parameters, *gradients)]
        del net, run, watchers, parameters, gradients
        gc.collect()
        left[steps] = sum(reference() is not None for reference in references)
    assert left == {0: 0, 1: 0, 2: 0}


GROUPED = {
    "Adam": lambda groups: optim.Adam(groups, lr=0.1),
    "Lion": lambda groups: optim.Lion(groups, lr=0.1, betas=(0.8, 0.9)),
    "Muon": lambda groups: optim.Muon(groups, lr=0.1),
    "SAM": lambda groups: optim.SAM(groups, "AdamW", lr=0.1),
    "MultiOptimizer": lambda groups: optim.MultiOptimizer(
        [(f"{k}.weight", parameter) for k, group in enumerate(groups) for parameter in group["params"]],
        [("0.*", "Lion"), ("1.*", "Adam"), ("*", "Lion", {"lr": 0.1})],
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["pop", "clear"])
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_that_is_taken_out_is_freed_by_the_next_step(name, how):
    """As torch's optimizers free it; states are the user's to take out."""
    parameters = [torch.nn.Parameter(torch.eye(3)) for _ in range(3)]
    references = [weakref.ref(parameter) for parameter in parameters[1:]]
    optimizer = GROUPED[name]([{"params": [parameter]} for parameter in parameters])

    def closure():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones(3, 3)

    step = (lambda: optimizer.step(closure)) if name == "SAM" else (lambda: (closure(), optimizer.step()))
    step()
    kept = optimizer.param_groups[0]
    for parameter in parameters[1:]:
        optimizer.state.pop(parameter)
    del parameters[1:], parameter
    if how == "pop":
        optimizer.param_groups.pop()
        optimizer.param_groups.pop()
    else:
        optimizer.param_groups.clear()
        optimizer.param_groups.append(kept)
    before = parameters[0].detach().clone()
    step()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert not torch.equal(parameters[0], before)
