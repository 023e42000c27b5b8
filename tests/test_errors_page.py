"""Each message in docs/errors.md is raised by what the page says, or stands in the source."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tristep
from tristep import Trainer, rule
from tristep.optimizer import SGD, Adam, RuleOptimizer

ROOT = Path(__file__).parents[1]
TITLES = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
NOT_HERE = {  # what cannot be missing where tests run: the file whose text has the message
    "tristep.viz draws with matplotlib, which is missing": "viz/__init__.py",
    "engine='triton' needs Triton, which is missing": "kernels/backends/__init__.py",
    "engine='cpu' needs the package numba": "kernels/backends/__init__.py",
}


def net():
    return nn.Linear(4, 2)


def stepped(optimizer="sgd", model=None, **options):
    """A trainer that has taken a step, and its model."""
    model = net() if model is None else model
    trainer = Trainer(model, optimizer, **options)
    model(torch.ones(3, 4)).sum().backward()
    trainer.step(1)
    return trainer, model


def two_steps():
    stepped()[0].step(1)


def lent():
    optimizer = SGD()
    first = Trainer(net(), optimizer)
    Trainer(net(), optimizer)
    first.step(1)


def inference():
    model = net()
    trainer = Trainer(model, "sgd")
    with torch.inference_mode():
        model.weight.grad = torch.ones(2, 4)
    model.bias.grad = torch.ones(2)
    trainer.step(1)


def reshaped():
    trainer, model = stepped("adam")
    model.weight.data, model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3, 4), torch.ones(2)
    trainer.step(1)


def summed():
    copies = tristep.replicate(net(), ["cpu", "cpu"])
    Trainer(copies, "sgd", kvstore="local", update_on_kvstore=True).allreduce_grads()


def unscaled():
    with tristep.amp.scale_loss(torch.ones(()), Trainer(net(), "sgd")):
        pass


def no_file():
    exec("@rule\ndef f(w, g, state, hyper):\n    (lr,) = hyper\n    return w - lr * g, state", {"rule": rule})


def no_such_name():
    @rule
    def f(w, g, state, hyper):
        (lr,) = hyper
        return w - lr * scale * g, state  # noqa: F821


def choice():
    @rule
    def f(w, g, state, hyper):
        (lr,) = hyper
        if g > 0:
            g = 0.0
        return w - lr * g, state


def no_attribute():
    @rule
    def f(w, g, state, hyper):
        lr, my_scale = hyper
        return w - lr * my_scale * g, state

    Mine = type("Mine", (RuleOptimizer,), {"rule": f})
    Trainer(net(), Mine())


def old_state():
    @rule
    def f(w, g, state, hyper):
        (m,) = state
        (lr,) = hyper
        m = 0.9 * m + g
        return w - lr * m, state


CALLS = [  # in the order of the page
    lambda: Trainer(net(), "sgd", engine="triton"),
    lambda: Trainer(net(), "adamm"),
    lambda: Trainer(net(), "adam", {"weight_decay": 0.1}),
    lambda: Trainer(net(), "adam", {"learning_rate": "0.1"}),
    lambda: Trainer([], "adam"),
    lambda: Trainer(net().weight, "adam"),
    lambda: Trainer([torch.zeros(3)], "adam"),
    lambda: Trainer(nn.LazyLinear(2), "adam").step(1),
    lambda: Trainer(net(), [("*bias*", "sgd", {})]),
    lambda: Trainer(net(), [("*weight*", "muon"), ("*bias*", "adamw"), ("*norm*", "adamw")]),
    lambda: Trainer(net(), Adam(), {"learning_rate": 0.1}),
    lent,
    two_steps,
    lambda: Trainer(net(), "sgd").step(),
    lambda: setattr(Trainer(net(), "sgd"), "learning_rate", 0.1),
    inference,
    reshaped,
    summed,
    unscaled,
    lambda: Trainer(net(), "sgd", kvstore="dist_sync"),
    lambda: Trainer(nn.Sequential(net(), net()), "adam").load_state_dict(Trainer(net(), "adam").state_dict()),
    lambda: Trainer(net(), "sgd").load_state_dict(Trainer(net(), "adam").state_dict()),
    no_file,
    no_such_name,
    choice,
    no_attribute,
    old_state,
]
RAISED = dict(zip([title for title in TITLES if title not in NOT_HERE], CALLS, strict=True))


@pytest.mark.parametrize("title", RAISED)
def test_the_message_is_raised(title, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Exception, match=f"^{re.escape(title)}"):
        RAISED[title]()


@pytest.mark.parametrize("title", NOT_HERE)
def test_the_message_is_in_the_source(title):
    assert title in TITLES
    assert title in (ROOT / NOT_HERE[title]).read_text(encoding="utf-8")
