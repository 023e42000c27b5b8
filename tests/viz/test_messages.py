"""What users type first: it is taken, or the error says what came, what is allowed and what to write."""

import re

import numpy as np
import pytest
import torch

import tristep
from tristep.viz import LiveLoop, LossView, Playground, Recorder, function, simulate


def _loss():
    return torch.tensor(0.25)


def _found(order):
    net, loss = torch.nn.Linear(2, 1), torch.nn.MSELoss()
    things = {"net": net, "loss": loss, "data": [(torch.ones(4, 2), torch.zeros(4, 1))] * 3}
    return tristep.lr_find(tristep.Trainer(net, "sgd"), tuple(things[name] for name in order.split()))


def _trained():
    net = torch.nn.Linear(2, 1)
    return tristep.Trainer(net, "sgd"), net, torch.nn.MSELoss(), [(torch.ones(4, 2), torch.zeros(4, 1))] * 3


def _recorder():
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd")
    net(torch.ones(4, 2)).sum().backward()
    trainer.step(4)
    return Recorder(trainer), trainer


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LiveLoop(_loss()), "steps=tensor(0.2500): must be a generator function, .* LiveLoop(step) instead of Live"),
        (lambda: LiveLoop(0.25), "steps=0.25: .*; give the function itself"),
        (
            lambda: LiveLoop("step"),
            "steps='step': must be a generator function, an iterator or a callable that takes one step$",
        ),
        (
            lambda: tristep.lr_find(*_trained()),
            "lr_find(Trainer, Linear, MSELoss, list): must be a trainer and .*, lr_find(trainer, (net, loss, data))",
        ),
        (
            lambda: simulate("beale", "sgd", learning_rates=0.1),
            "learning_rates=0.1: must be a list .*, such as learning_rates=[0.1]",
        ),
        (
            lambda: simulate("beale", "sgd", sweep={"momentum": 0.5}),
            "sweep['momentum']=0.5: must be a list of the values to try, such as sweep={'momentum': [0.5]}",
        ),
        (
            lambda: LossView([[1.0, 0.5], [2.0, 1.0]]),
            "runs must be .*, got list: .* {'adam': [1.0, 0.5], 'sgd': [1.0, 0.8]}",
        ),
        (lambda: _found("net data loss"), "step=(Linear, list, MSELoss): must be (net, loss, data) in this order"),
        (lambda: _found("loss net data"), "step=(MSELoss, Linear, list): must be (net, loss, data) in this order"),
        (lambda: _found("data loss net"), "step=(list, MSELoss, Linear): must be (net, loss, data) in this order"),
        (
            lambda: Playground("beale", "adam", lr=0.1),
            "Playground has no argument 'lr' (=0.1). Write settings={\"learning_rate\": 0.1}. There are 'on', 'optimizer'",
        ),
        (lambda: Playground("beale", setting={}), "no argument 'setting' (={}). Did you mean 'settings'"),
        (
            lambda: LossView({"a": {"loss": [1.0]}}),
            "runs['a']={'loss': [1.0]}: must be a list of losses, one number for each",
        ),
        (lambda: LossView({"a": torch.ones(2, 2)}), "runs['a']=tensor(.*must be a list of losses"),
        (
            lambda: simulate("beale", "adam", learning_rate=0.1),
            "simulate() has no argument 'learning_rate' (=0.1). Give learning_rates=[0.1] for all",
        ),
        (lambda: simulate("beale", "adam", beta1=0.5), "argument 'beta1' (=0.5). Give sweep={\"beta1\": [0.5]} for all"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_write(call, words):
    with pytest.raises(TypeError, match="(?s)" + re.escape(words).replace(r"\.\*", ".*").replace(r"\$", "$")):
        call()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x^2 + y**2", r"\^ is no power here; write \*\*, such as x\*\*2\n  x\^2 \+ y\*\*2\n   \^$"),
        ("np.sin(x) + y", r"write sin\(x\) instead of np.sin\(x\)"),
        ("np.max(x, y)", r"write max\(x, y\) instead of np.max\(x, y\)"),
        ("np.pi * x + y", r"write pi instead of np.pi"),
    ],
)
def test_python_in_expressions_gets_the_words_to_write(text, words):
    with pytest.raises(ValueError, match=words):
        function(text)


def test_numbers_of_a_step_need_names():
    recorder, _trainer = _recorder()
    with pytest.raises(
        TypeError, match=r"step\(tensor\(0.2500\)\): give each number by its name, such as step\(loss=loss\)"
    ):
        recorder.step(_loss())
    recorder.step(loss=_loss())
    with pytest.raises(TypeError, match=r"note\(0.5, 1\): give each number by its name, such as note\(val_loss=loss\)"):
        recorder.note(0.5, 1)
    assert recorder.run.scalars["loss"].recent()[1].tolist() == [0.25]


KINDS = (list, tuple, np.array, torch.tensor, lambda losses: [torch.tensor(losses[0]), *losses[1:]])


@pytest.mark.parametrize("kind", KINDS)
def test_losses_by_name_or_of_one_run_are_drawn(kind):
    view = LossView({"adam": kind([4.0, 2.0, 1.0]), "sgd": kind([4.0, 3.0])})
    assert [run.name for run in view.runs] == ["adam", "sgd"]
    (axes,) = view.figure().axes
    drawn = [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xdata()) > 1]
    assert [[1, 4], [2, 2], [3, 1]] in drawn
    assert [[1, 4], [2, 3]] in drawn
    assert "adam: 3 steps, loss from 4 to 1\nsgd: 2 steps, loss from 4 to 3" in view.describe()
    alone = LossView(kind([1, 0.5, 0.25]))
    (run,) = alone.runs
    assert run.scalars["loss"].curve().mean.tolist() == [1.0, 0.5, 0.25]
    assert alone.describe() == "run: 3 steps, loss from 1 to 0.25"
