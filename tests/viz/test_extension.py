"""The IPython extension, in a shell of its own: what each magic does, and that nothing stays when it is unloaded."""

import ast
import sys
import textwrap
import types
from functools import partial

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch_paths import torch_path
from traitlets.config import Config

import tristep
from tristep.viz import Line, LiveLoop
from tristep.viz.live.cell_loops import split_at_loop


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A shell, which takes long to make."""
    kept = sys.displayhook, sys.excepthook, sys.modules.get("__main__")
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shell = InteractiveShell.instance(config=config)
        yield shell
        InteractiveShell.clear_instance()
    sys.displayhook, sys.excepthook = kept[:2]
    sys.modules["__main__"] = kept[2]


@pytest.fixture
def bare(fresh):
    """The shell without the extension, and without what other tests have made in it."""
    yield fresh
    if "tristep" in fresh.extension_manager.loaded:
        fresh.extension_manager.unload_extension("tristep")
    fresh.reset()


@pytest.fixture
def shell(bare):
    bare.run_line_magic("load_ext", "tristep")
    bare.ex("import torch, tristep")
    return bare


def run(shell, cell):
    """Run a cell, and raise what it raised."""
    result = shell.run_cell(textwrap.dedent(cell))
    result.raise_error()
    return result.result


def everything(shell):
    return {
        "magics": {kind: dict(own) for kind, own in shell.magics_manager.magics.items()},
        "registry": dict(shell.magics_manager.registry),
        "events": {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()},
        "configurables": list(shell.configurables),
        "transformers": (list(shell.ast_transformers), list(shell.input_transformers_post)),
        "names": set(shell.user_ns),
    }


def test_unloading_leaves_nothing_behind(bare):
    before = everything(bare)
    bare.extension_manager.load_extension("tristep")
    after = everything(bare)
    assert set(after["magics"]["line"]) - set(before["magics"]["line"]) == {"opt_compare"}
    assert set(after["magics"]["cell"]) - set(before["magics"]["cell"]) == {"train"}
    assert len(after["events"]["pre_run_cell"]) == len(before["events"]["pre_run_cell"]) + 1
    bare.extension_manager.reload_extension("tristep")
    assert len(everything(bare)["configurables"]) == len(before["configurables"]) + 1
    bare.extension_manager.unload_extension("tristep")
    assert everything(bare) == before
    bare.extension_manager.load_extension("tristep")
    tristep.load_ipython_extension(bare)  # twice is once
    assert len(everything(bare)["configurables"]) == len(before["configurables"]) + 1
    bare.extension_manager.unload_extension("tristep")
    assert everything(bare) == before


SETUP = """
    seeded = torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.1})
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 2, generator=generator))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    seeded = torch.manual_seed(5)
    """
LOOP = """
    seen = 0
    for epoch in range(3):
        total: float = 0.0
        for x, in loader:
            if len(x) < 4:
                continue
            trainer.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            trainer.step(1)
            total += loss.item()
            import math as imported
            def after(): return epoch
            squares = [(inner := i) ** 2 for i in range(3)]
        seen += 1
    done = f"epochs {seen}"
    """
NAMES = ("seen", "epoch", "total", "x", "loss", "imported", "after", "squares", "inner", "done")


def test_a_cell_trained_live_is_the_same_as_the_cell_alone(shell):
    run(shell, SETUP + LOOP)
    plain = {name: shell.user_ns[name] for name in NAMES}
    weights = [parameter.detach().clone() for parameter in shell.user_ns["net"].parameters()]
    known = set(shell.user_ns)
    run(shell, SETUP)
    for name in NAMES:
        del shell.user_ns[name]
    run(shell, "%%train\n" + textwrap.dedent(LOOP))
    loop = shell.user_ns["loop"]
    assert isinstance(loop, LiveLoop)
    assert (loop.status, loop.n_steps, loop.mode) == ("finished", 15, "block")
    for parameter, weight in zip(shell.user_ns["net"].parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
    assert set(shell.user_ns) - known == {"loop"}
    for name in ("seen", "epoch", "total", "squares", "inner", "done", "imported"):
        assert shell.user_ns[name] == plain[name]
    assert torch.equal(shell.user_ns["loss"], plain["loss"])
    assert shell.user_ns["after"]() == 2
    assert loop.run.scalars["learning_rate"].recent()[1].tolist() == [0.1] * 15
    assert loop.run.scalars["loss"].recent()[1][-1] == plain["loss"].item()


def test_a_cell_can_be_paused_and_branched(shell):
    run(shell, SETUP)
    run(
        shell,
        """\
        %%train --name training --show loss double
        for step in range(10):
            trainer.zero_grad()
            loss = net(torch.ones(4, 2)).square().mean(1)
            double = 2 * loss.mean().item()
            loss.mean().backward()
            trainer.step(1)
            if step == 3:
                training.pause()
        """,
    )
    loop = shell.user_ns["training"]
    assert (loop.status, loop.n_steps) == ("paused", 4)
    run(shell, "training.branch('slower'); training.multiplier = 0.5; training.resume()")
    assert (loop.status, loop.n_steps) == ("finished", 10)
    assert loop.run.scalars["learning_rate"].recent()[1].tolist() == [0.05] * 6
    for recorded in loop.runs:
        double, loss = (recorded.scalars[name].recent()[1] for name in ("double", "loss"))
        assert double == pytest.approx(2 * loss, rel=1e-6)


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("for a in b:\n    trainer.step(1)", 1),
        ("for a in b:\n    for c in d:\n        trainer.step(1)", 2),
        ("for a in b:\n    for c in d:\n        optimizer.step()\n    scheduler.step()", 2),
        ("for a in b:\n    for c in d:\n        train(c)", 1),
        ("for a in b:\n    for c in d:\n        trainer.step(1)\nfor e in f:\n    trainer.step(1)", 2),
    ],
)
def test_which_loop_is_stepped_through(cell, line):
    before, steps = split_at_loop(ast.parse(cell))
    loops = [node for node in ast.walk(steps) if isinstance(node, (ast.For, ast.While))]
    found = [loop.lineno for loop in loops if isinstance(getattr(loop.body[0], "value", None), ast.Await)]
    assert found == [line]
    assert before.body == []


def test_a_while_loop_with_an_else_and_a_loop_without_turns(shell):
    run(shell, "%%train\nn = 0\nwhile n < 3:\n    n += 1\n    loss = n\nelse:\n    over = True\n")
    assert shell.user_ns["over"] is True
    assert shell.user_ns["loop"].run.scalars["loss"].recent()[1].tolist() == [1, 2, 3]
    run(shell, "%%train\nfor n in []:\n    pass\nafter = 1\n")
    assert (shell.user_ns["loop"].n_steps, shell.user_ns["after"]) == (0, 1)


def test_a_cell_run_again_stops_its_loop(shell):
    loop = LiveLoop(iter(range(9)), view=None)
    loop.step(2)
    loop.cell = "abc"
    info = types.SimpleNamespace(cell_id="other")
    shell.events.trigger("pre_run_cell", info)
    assert loop.status == "paused"
    info.cell_id = "abc"
    shell.events.trigger("pre_run_cell", info)
    assert loop.status == "stopped"


def test_optimizers_compared(shell):
    view = run(shell, "%opt_compare adam lion sgd --on rosenbrock --steps 60 --start 0 2")
    assert list(view.trajectories.names) == ["adam", "lion", "sgd"]
    assert (view.trajectories.function.name, view.trajectories.steps) == ("Rosenbrock", 60)
    one = [value["learning_rate"] for value in view.trajectories.values].index(1.0)
    for k, (name, make) in enumerate({"adam": torch.optim.Adam, "lion": None, "sgd": torch.optim.SGD}.items()):
        if make is not None:
            best = partial(make, lr=view.best[name])
            expected = torch_path(best, lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2, (0.0, 2.0), 10)
            np.testing.assert_allclose(view.trajectories.paths[k, one, 0, :11], expected, rtol=1e-3, atol=1e-4)
    lines = [layer for layer in view.scene().panels[0].layers if isinstance(layer, Line) and layer.head]
    assert [line.name for line in lines] == ["adam", "lion", "sgd"]
