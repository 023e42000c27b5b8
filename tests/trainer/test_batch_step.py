"""`fit` and live loops that capture their steps: the same bits as normal steps, or a reason why not.

Without a GPU the graph is played, as in test_gpu_graphs.py.
"""

import random

import pytest
import torch
from played_graphs import PlayedGraph, played

from tristep import Trainer, fit

pytest.importorskip("tristep.kernels.backends.triton.launch", reason="Triton has builds for Linux only")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    with played(monkeypatch):
        yield


class Net(torch.nn.Module):
    """With what a graph repeats; subclasses do what it does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = torch.nn.Linear(4, 3, bias=False), 1.0

    def forward(self, x):
        return self.factor * self.layer(torch.tanh(x))


class Counts(Net):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Draws(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 + random.random())


class Fails(Net):
    """As a model that reads a value: on a stream that is recorded it cannot."""

    def forward(self, x):
        if PlayedGraph.recording is not None:
            random.random()
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().forward(x)


def _data(n=4, last=5):
    rng = torch.Generator().manual_seed(1)
    batches = [torch.rand(size, 4, generator=rng).to(DEVICE) for size in [8] * (n - 1) + [last]]
    return [(x, x[:, :3].argmax(dim=1)) for x in batches]


def _fitted(kind, capture, optimizer="adam", loss=None, **arguments):
    random.seed(3)
    net = kind().to(DEVICE)
    trainer = Trainer(net, optimizer, {"learning_rate": 0.05}, engine=None if optimizer == "muon" else "triton")
    loss = torch.nn.CrossEntropyLoss(reduction="none") if loss is None else loss
    arguments = {"epochs": 2, "eval_metric": "acc", "progress": False} | arguments
    return net, fit(net, loss, _data(), trainer=trainer, capture=capture, **arguments)


def _same(found, expected):
    (net, done), (other, normal) = found, expected
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    assert done.losses == normal.losses
    assert [epoch["accuracy"] for epoch in done.epochs] == [epoch["accuracy"] for epoch in normal.epochs]


@pytest.mark.sample(1)
@pytest.mark.parametrize("capture", [True, "auto"])
def test_captured_steps_have_the_bits_of_normal_ones(capture):
    """The smaller last batch of each epoch runs without the graph."""
    found = _fitted(Net, capture)
    assert PlayedGraph.made == 1
    assert found[1].not_captured == ""
    _same(found, _fitted(Net, False))
    assert PlayedGraph.made == 1


REASONS = {
    "counts": (Counts, "adam", r"attribute 'calls' of a Counts changes in a step"),
    "draws": (Draws, "adam", r"random numbers on the CPU"),
    "fails": (Fails, "adam", r"recording it raised RuntimeError: operation not permitted"),
    "matrices": (Net, "soap", r"an optimizer with an elementwise rule"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("reason", REASONS)
def test_what_a_graph_would_not_repeat_is_trained_normally_and_said(reason, capsys):
    kind, optimizer, words = REASONS[reason]
    found = _fitted(kind, "auto", optimizer, progress=True, epochs=1)
    said = found[1].not_captured
    assert said
    assert capsys.readouterr().out.count("no CUDA graph: ") == 1
    with pytest.raises((RuntimeError, ValueError), match=words) as error:
        _fitted(kind, True, optimizer, epochs=1)
    assert said in str(error.value)
    _same(found, _fitted(kind, False, optimizer, epochs=1))


def test_attributes_that_are_changed_between_steps_are_recorded_anew():
    def change(done):
        done.trainer.net.factor = 0.5

    runs = []
    for capture in ("auto", False):
        net = Net().to(DEVICE)
        trainer = Trainer(net, "adam", {"learning_rate": 0.05}, engine="triton")
        trainer.net = net
        loss = torch.nn.CrossEntropyLoss()
        arguments = {"epochs": 2, "eval_metric": "acc", "progress": False, "epoch_end_callback": change}
        done = fit(net, loss, _data(), trainer=trainer, capture=capture, eval_data=_data(2, 8), **arguments)
        runs.append((net, done))
    _same(*runs)
    assert PlayedGraph.made == 2
    assert runs[0][1].not_captured == ""


def test_a_live_loop_captures_its_steps():
    pytest.importorskip("matplotlib")
    from tristep.viz import LiveLoop

    runs = []
    for capture in ("auto", False):
        net = Net().to(DEVICE)
        trainer = Trainer(net, "adam", {"learning_rate": 0.05}, engine="triton")
        loop = LiveLoop.fit(net, torch.nn.CrossEntropyLoss(), _data(), trainer, capture=capture, view=None, mode="block")
        loop.start()
        runs.append([*(value.clone() for value in net.state_dict().values()), loop.run.scalars["loss"].recent()[1].tolist()])
    assert PlayedGraph.made == 1
    assert runs[0][-1] == runs[1][-1]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][:-1], runs[1][:-1], strict=True))
