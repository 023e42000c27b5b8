"""The recorder: what it writes down, judged by copies of weights and gradients taken independently."""

import copy
import functools
import gc
import pickle
import types
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tristep
from tristep.viz import Dashboard, Recorder, Run

pytestmark = pytest.mark.usefixtures("few_steps")


def _net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _trainer(net, name="sgd", rate=0.1, **options):
    return tristep.Trainer(net, name, {"learning_rate": rate}, **options)


def _sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def _train(net, step, zero_grad, recorder, steps=9, note=None):
    """Norms of weight, gradient and update, their ratio and cosine, [steps, n_parameters], and the losses."""
    generator = torch.Generator().manual_seed(2)
    found, losses = [], []
    for _ in range(steps):
        x = torch.randn(8, 3, generator=generator)
        zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        before = [param.detach().double().numpy().copy() for param in net.parameters()]
        gradients = [param.grad.double().numpy().copy() for param in net.parameters()]
        step()
        recorder.step(loss=loss)
        losses.append(loss.item())
        row = []
        for w, g, param in zip(before, gradients, net.parameters(), strict=True):
            moved = param.detach().double().numpy() - w
            lengths = [np.linalg.norm(each) for each in (w, g, moved)]
            row.append([*lengths, lengths[2] / lengths[0], (g * moved).sum() / lengths[1] / lengths[2]])
        found.append(row)
        if note is not None:
            note.append([param.detach().numpy().copy() for param in net.parameters()])
    recorder.flush()
    return np.array(found), losses


NOTHING = types.SimpleNamespace(step=lambda **_: None, flush=lambda: None)  # records nothing
NAMES = ("weight_norm", "gradient_norm", "update_norm", "update_ratio", "cosine")


@pytest.mark.parametrize("kind", ["trainer", "torch", "tristep.optim"])
@pytest.mark.parametrize("every", [1, 4])
def test_norms_ratio_and_cosine_of_each_parameter(kind, every):
    net = _net()
    if kind == "trainer":
        source = tristep.Trainer(net, "adam", {"learning_rate": 0.01})
        step, zero_grad = lambda: source.step(1), source.zero_grad
    else:
        module = torch.optim if kind == "torch" else tristep.optim
        source = module.AdamW(net.named_parameters(), lr=0.01)
        step, zero_grad = source.step, source.zero_grad
    recorder = Recorder(source, "adam", every=every)
    expected, losses = _train(net, step, zero_grad, recorder)
    run = recorder.run
    assert run.parameters == [name for name, _ in net.named_parameters()]
    assert run.scalars["loss"].recent()[0].tolist() == list(range(1, 10))
    assert run.scalars["loss"].recent()[1].tolist() == losses
    assert set(run.scalars["learning_rate"].recent()[1].tolist()) == {0.01}
    for k, name in enumerate(NAMES):
        steps, values = run.tensors[name].recent()
        assert steps.tolist() == list(range(1, 10, every))
        np.testing.assert_allclose(values, expected[::every, :, k], rtol=2e-4)
    assert "Adam" in run.notes["optimizer"]


@pytest.mark.parametrize("how", ["run", "a view", "a dashboard's words"])
def test_what_is_read_is_all_that_was_recorded(how):
    """Without flush or close, and however few steps ago the last look at what has arrived was."""
    net = _net()
    trainer = _trainer(net)
    recorder = Recorder(trainer)
    view = Dashboard(recorder) if how != "run" else None
    for x in torch.randn(100, 5, 3, generator=torch.Generator().manual_seed(0)):
        trainer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        trainer.step(1)
        recorder.step(loss=loss)
        if view is not None:
            view.refresh()
    if how == "a view":
        steps = view.figure().axes[1].lines[0].get_xdata()
        assert steps.max() == 100
    elif how == "a dashboard's words":
        assert view.describe().startswith("run: 100 steps")
    else:
        assert recorder.run.last_step == 100
        assert len(recorder.run.scalars["loss"]) == len(recorder.run.tensors["gradient_norm"]) == 100


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float32, {"multi_precision": True}, "float32"),
        (torch.bfloat16, {}, "bfloat16"),
        (torch.bfloat16, {"stochastic_rounding": True}, "bfloat16 with stochastic rounding"),
        (torch.bfloat16, {"multi_precision": True, "stochastic_rounding": True}, "bfloat16 with float32 master"),
        (torch.bfloat16, {"multi_precision": "remainder"}, "bfloat16 with split master"),
        (torch.bfloat16, {"multi_precision": "split8"}, "bfloat16 with 24-bit master"),
        (
            torch.bfloat16,
            {"multi_precision": "split8", "stochastic_rounding": True},
            "bfloat16 with 24-bit master and stochastic rounding",
        ),
        (torch.float16, {"multi_precision": True}, "float16 with float32 master"),
    ],
    ids=str,
)
def test_how_parameters_are_stored(dtype, settings, expected):
    net = _net().to(dtype)
    net[2].to(torch.float64)
    with Recorder(tristep.Trainer(net, "adam", settings)) as recorder:
        assert recorder.run.storage == [expected] * 2 + ["float64"] * 2


def test_how_parameters_of_several_optimizers_are_stored():
    several = [("*bias", "adam"), ("*", "muon", {"multi_precision": True})]
    with Recorder(tristep.Trainer(_net().to(torch.bfloat16), several)) as recorder:
        assert recorder.run.storage == ["bfloat16 with float32 master", "bfloat16"] * 2


def test_histograms_come_now_and_then_and_norms_always():
    net = _net()
    trainer = _trainer(net)
    recorder = Recorder(trainer, histograms=["weight"], histogram_every=4)
    note = [[param.detach().numpy().copy() for param in net.parameters()]]
    expected, _ = _train(net, lambda: trainer.step(1), trainer.zero_grad, recorder, note=note)
    run = recorder.run
    steps, counts = run.histograms["weight_histogram"].recent()
    assert steps.tolist() == [1, 5, 9]
    for step, row in zip(steps, counts, strict=True):
        for weight, own in zip(note[step - 1], row, strict=True):  # as it was before the step
            bins = np.searchsorted(run.edges, weight.ravel(), side="right")
            np.testing.assert_array_equal(own, np.bincount(bins, minlength=65))
    for k, name in enumerate(NAMES[:2]):
        np.testing.assert_allclose(run.tensors[name].recent()[1], expected[:, :, k], rtol=2e-4)


def test_histograms_come_from_the_first_step_on_at_growing_intervals():
    weight = torch.nn.Parameter(torch.ones(3))
    trainer = tristep.Trainer([weight], "sgd", {"learning_rate": 0.001}, engine="eager")
    recorder = Recorder(trainer, histograms=["gradient"])
    for _ in range(192):
        weight.grad = torch.tensor([1.0, -1.0, 0.0])
        trainer.step(1)
        recorder.step()
    steps, counts = recorder.run.histograms["gradient_histogram"].recent()
    assert steps[:16].tolist() == list(range(1, 17))
    intervals = np.diff(steps)
    assert (np.diff(intervals) >= 0).all()
    assert (np.abs(intervals[16:] - steps[16:-1] / 16) <= 1).all()
    assert 60 <= len(steps) <= 68
    edges = np.array([-np.inf, *recorder.run.edges, np.inf])
    assert (counts == np.histogram([1.0, -1.0, 0.0], edges)[0]).all()


def test_single_elements_are_followed():
    net, note = _net(), []
    trainer = _trainer(net)
    recorder = Recorder(trainer, weights={"0.weight": [0, 5], "2.bias": 0})
    _train(net, lambda: trainer.step(1), trainer.zero_grad, recorder, note=note)
    steps, values = recorder.run.weights["0.weight"].recent()
    assert steps.tolist() == list(range(1, 10))
    np.testing.assert_array_equal(values, [each[0].ravel()[[0, 5]] for each in note])
    np.testing.assert_array_equal(recorder.run.weights["2.bias"].recent()[1], [each[3] for each in note])


def test_closing_leaves_trainer_and_optimizer_as_they_were(tmp_path):
    trainer = tristep.Trainer(_net(), "sgd")
    with Recorder(trainer) as recorder:
        assert trainer.telemetry is not None
        with pytest.raises(ValueError, match="source has another recorder"):
            Recorder(trainer)
    assert trainer.telemetry is None
    optimizer = torch.optim.SGD(_net().parameters(), lr=0.1)
    with Recorder(optimizer):
        assert optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    recorder.run.save(tmp_path / "run.safetensors")
    assert Run.load(tmp_path / "run.safetensors").parameters == recorder.run.parameters


@pytest.mark.parametrize("histograms", [(), ("gradient",)])
def test_the_telemetry_of_a_trainer_is_recorded_and_stays_as_it_is(histograms):
    """A recorder with telemetry of its own, on a twin, gives the numbers; the trainer's has all of its own steps."""
    runs, telemetry = [], tristep.Telemetry(histograms=histograms)
    for given in (None, telemetry):
        net = _net()
        trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.01}, telemetry=given)
        own = {"histograms": histograms, "histogram_every": 1} if given is None else {}
        with Recorder(trainer, **own) as recorder:
            _train(net, lambda trainer=trainer: trainer.step(1), trainer.zero_grad, recorder)
        assert trainer.telemetry is given
        _train(net, lambda trainer=trainer: trainer.step(1), trainer.zero_grad, NOTHING)
        runs.append(recorder.run)
    assert runs[0].tensors.keys() == runs[1].tensors.keys()
    assert runs[0].edges.tolist() == runs[1].edges.tolist()
    for name, series in runs[0].tensors.items():
        for one, two in zip(series.recent(), runs[1].tensors[name].recent(), strict=True):
            np.testing.assert_array_equal(one, two, err_msg=name)
    assert telemetry.steps.tolist() == list(range(1, 19))
    np.testing.assert_array_equal(
        telemetry["gradient_norm"][:9].astype(np.float32), runs[1].tensors["gradient_norm"].recent()[1]
    )


def test_only_steps_of_the_recording_are_taken_from_the_telemetry_of_a_trainer():
    net = _net()
    trainer = _trainer(net, telemetry=True)
    train = functools.partial(_train, net, lambda: trainer.step(1), trainer.zero_grad)
    train(NOTHING, steps=3)
    before = copy.deepcopy(trainer.state_dict())
    recorder = Recorder(trainer)
    runs = [(recorder.run, train(recorder, steps=4)[0], [4, 5, 6, 7])]
    other = Run("other", recorder.run.parameters)
    recorder.record_into(other, 3)  # steps 4 and 5 are taken again
    trainer.load_state_dict(before)
    for run, expected, numbers in [*runs, (other, train(recorder, steps=2)[0], [4, 5])]:
        steps, norms = run.tensors["weight_norm"].recent()
        assert steps.tolist() == numbers
        np.testing.assert_allclose(norms, expected[:, :, 0], rtol=1e-5)


def test_a_trainers_telemetry_sets_how_often_is_measured():
    net = _net()
    trainer = _trainer(net, telemetry=tristep.Telemetry(every=4))
    recorder = Recorder(trainer)
    _train(net, lambda: trainer.step(1), trainer.zero_grad, recorder)
    assert recorder.run.tensors["update_ratio"].recent()[0].tolist() == [1, 5, 9]


@pytest.mark.parametrize(
    ("telemetry", "arguments", "message"),
    [
        (
            {"metrics": ["weight_norm", "cosine"]},
            {},
            "telemetry without gradient_norm, update_norm, .*add them to its metrics",
        ),
        ({"size": 16}, {}, "telemetry of size=16: make one of size >= 128, or set trainer.telemetry = None"),
        ({}, {"every": 4}, "every=4, but source has telemetry with every=1: leave it out"),
        ({}, {"histograms": ["weight"]}, r"without histograms of weight: give it Telemetry\(histograms=\['weight'\]\)"),
        ({"histograms": ["weight"]}, {"histogram_every": 8}, "histogram_every=8, but source has telemetry with every=1"),
    ],
)
def test_the_telemetry_of_a_trainer_that_does_not_fit_is_refused(telemetry, arguments, message):
    given = tristep.Telemetry(**telemetry)
    trainer = tristep.Trainer(_net(), "sgd", telemetry=given)
    with pytest.raises(ValueError, match=message):
        Recorder(trainer, **arguments)
    assert trainer.telemetry is given
    assert not given.is_recorders
    trainer.telemetry = None
    Recorder(trainer, **arguments)  # as the message says


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lambda net: net, {}, TypeError, "source must be a Trainer or a torch.optim.Optimizer, got Sequential"),
        (_sgd, {"every": 0}, ValueError, "every=0: must be 1 or more"),
        (_sgd, {"histograms": ["weight"]}, ValueError, r"histograms=\('weight',\) need a Trainer"),
        (_sgd, {"module": torch.nn.Linear(3, 4)}, ValueError, "module has none of the parameters that source steps"),
        (_sgd, {"module": 3}, TypeError, "module must be a torch.nn.Module, got int"),
        (_trainer, {"module": torch.nn.Linear(3, 4)}, TypeError, "a Trainer has names of its own"),
        (_trainer, {"histograms": ["w"]}, ValueError, "histograms='w'"),
        (_trainer, {"weights": {"w": 0}}, ValueError, "weights has 'w': must be one of"),
        (_trainer, {"weights": {"0.bias": 4}}, ValueError, r"weights\['0.bias'\]=4: must be integers from 0 to 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_source_alone(make, arguments, error, message):
    source = make(_net())
    with pytest.raises(error, match=message):
        Recorder(source, **arguments)
    assert getattr(source, "telemetry", None) is None
    assert not getattr(source, "_optimizer_step_pre_hooks", None)


def test_what_is_no_number_of_a_step_is_refused():
    net = _net()
    trainer = _trainer(net)
    recorder = Recorder(trainer)
    with pytest.raises(ValueError, match="before the first step"):
        recorder.note(val_loss=1.0)
    net(torch.ones(1, 3)).sum().backward()
    trainer.step(1)
    with pytest.raises(TypeError, match="loss must be a number, got 'low'"):
        recorder.step(loss="low")
    with pytest.raises(ValueError, match=r"loss has shape \(2,\): must be a single number"):
        recorder.step(loss=torch.ones(2))
    recorder.step(loss=2.0)
    with pytest.raises(ValueError, match=r"step\(\) after update 1, which has been recorded"):
        recorder.step()
    recorder.note(val_loss=1.0)
    for name in ("loss", "val_loss"):
        with pytest.raises(ValueError, match=f"note\\(\\) of {name!r}: step 1 has a number"):
            recorder.note(**{name: 3.0})
    assert {name: series.recent()[1].tolist() for name, series in recorder.run.scalars.items()} == {
        "loss": [2.0],
        "learning_rate": [trainer.learning_rate],
        "val_loss": [1.0],
    }


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("histograms", [(), ("gradient",)])
def test_a_copy_of_a_recorded_trainer_trains_on_unrecorded(duplicate, histograms):
    net = _net()
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.01})
    recorder = Recorder(trainer, histograms=histograms)
    _train(net, lambda: trainer.step(1), trainer.zero_grad, recorder, steps=3)
    other_net, other = duplicate((net, trainer))
    assert other.telemetry is None
    _train(net, lambda: trainer.step(1), trainer.zero_grad, recorder)
    other_recorder = Recorder(other)
    expected, _ = _train(other_net, lambda: other.step(1), other.zero_grad, other_recorder)
    for one, two in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(one, two)
    assert recorder.run.last_step == other_recorder.run.last_step == 12
    steps, norms = other_recorder.run.tensors["gradient_norm"].recent()
    assert steps.tolist() == list(range(4, 13))
    np.testing.assert_allclose(norms, expected[:, :, 1], rtol=2e-4)


@pytest.mark.parametrize("kind", ["trainer", "torch"])
def test_what_is_displayed_keeps_data_and_no_model(kind):
    net = _net()
    trainer = tristep.Trainer(net, "adam") if kind == "trainer" else torch.optim.AdamW(net.parameters())
    step = functools.partial(trainer.step, 1) if kind == "trainer" else trainer.step
    recorder = Recorder(trainer, every=1, weights={"0.bias" if kind == "trainer" else "0.1": [0, 2]})
    view = Dashboard(recorder)
    _, losses = _train(net, step, trainer.zero_grad, recorder)
    models = [weakref.ref(each) for each in (net, trainer, *net.parameters())]
    del net, trainer, step
    gc.collect()
    assert [ref() for ref in models] == [None] * len(models)
    assert recorder.source is None
    assert view.run.scalars["loss"].recent()[1].tolist() == losses
    assert view.run.tensors["gradient_norm"].last_step == 9
    assert "9 steps" in view.describe()
    with pytest.raises(RuntimeError, match="what this Recorder records is gone"):
        recorder.step()
    recorder.close()


def _sharded_norms(through):
    """Of each step of a sharded net what is recorded, and what whole tensors have."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(_net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if through == "recorder":
        recorder = Recorder(optimizer, every=1, module=net)
        note = lambda: recorder.step()  # noqa: E731
    else:
        callback = pytest.importorskip("tristep.integrations.lightning").TristepCallback(every=1, view=None)
        fit = types.SimpleNamespace(optimizers=[optimizer], global_step=0, is_global_zero=dist.get_rank() == 0)
        callback.on_train_start(fit, net)
        recorder = callback._followed.recorder
        note = lambda: callback.on_train_batch_end(fit, net, None, None, 0)  # noqa: E731
    expected = []
    for k in range(3):
        torch.manual_seed(k)
        optimizer.zero_grad()
        net(torch.randn(5, 3)).square().sum().backward()
        whole = [param.full_tensor().detach().double() for param in net.parameters()]
        gradients = [param.grad.full_tensor().double() for param in net.parameters()]
        optimizer.step()
        note()
        moved = [param.full_tensor().detach().double() - w for param, w in zip(net.parameters(), whole, strict=True)]
        cosines = [torch.cosine_similarity(g.flatten(), m.flatten(), 0) for g, m in zip(gradients, moved, strict=True)]
        norms = [[tensor.norm().item() for tensor in tensors] for tensors in (whole, gradients, moved)]
        expected.append([*norms, (np.array(norms[2]) / norms[0]).tolist(), [each.item() for each in cosines]])
    found = [recorder.run.tensors[name].recent()[1].tolist() for name in NAMES]
    with pytest.raises(ValueError, match="weights has '0.bias', of which each rank has a shard"):
        Recorder(optimizer, module=net, weights={"0.bias": 0})
    return found, np.array(expected).swapaxes(0, 1).tolist()


@pytest.mark.sample(0)
@pytest.mark.parametrize("through", ["recorder", "lightning"])
def test_norms_of_sharded_tensors_are_those_of_whole_ones(processes, through):
    for found, expected in processes(2).run(_sharded_norms, through):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
