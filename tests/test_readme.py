"""What the README and the guide show runs, and does what they say."""

import ast
import linecache
import re
from collections import ChainMap
from pathlib import Path

import numpy as np
import pytest
import torch

import tristep
from tristep.trainer.optimizer import Optimizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cells():
    """What the Python blocks of each page define, each run once in order, without those of the other."""
    registry = dict(Optimizer.opt_registry)
    torch.manual_seed(0)
    pages = []
    for page in (README, GUIDE):
        pages.append({"__name__": "__main__"})  # as in a notebook
        for text in _blocks("python", page):
            _run(text, pages[-1], f"<block {len(pages)}, {hash(text)}>")
    yield ChainMap({name: pages[0][name] for name in ("net", "loss")}, *reversed(pages))
    Optimizer.opt_registry.clear()
    Optimizer.opt_registry.update(registry)


def test_the_opening_example_learns(cells):
    weight, loss = cells["net"].weight.detach(), cells["loss"].item() / 32
    assert loss < 0.5 * np.log(10)  # half of what guessing costs
    torch.testing.assert_close(weight.argmax(dim=0), torch.arange(10))


def test_telemetry_has_all_steps_and_parameters(cells):
    telemetry = cells["telemetry"]
    assert telemetry.names == ["weight", "bias"]
    assert telemetry["update_ratio"].shape == (20, 2)
    assert (telemetry["update_ratio"] > 0).all()


@pytest.mark.parametrize("engine", ["cpu", "eager", "triton"])
def test_lion_is_that_of_the_paper(cells, engine):
    if engine == "cpu":
        pytest.importorskip("numba")  # `make gpu` uses what a machine has
    device = "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"
    weight = torch.nn.Parameter(torch.randn(7, 5, device=device))
    schedule = tristep.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    optimizer = cells["MyLion"](wd=0.3, lr_scheduler=schedule)
    trainer = tristep.Trainer([weight], optimizer, engine=engine)

    w, mean = weight.detach().cpu().numpy().astype(np.float64), np.zeros((7, 5))
    for t in range(1, 7):
        weight.grad = torch.randn(7, 5, device=device)
        trainer.step(batch_size=4)

        # Chen et al. (2023), algorithm 2.
        g = weight.grad.cpu().numpy().astype(np.float64) / 4
        c = 0.9 * mean + 0.1 * g
        w = w - schedule(t) * (np.sign(c) + 0.3 * w)
        mean = 0.99 * mean + 0.01 * g
        np.testing.assert_allclose(weight.detach().cpu().numpy(), w, rtol=1e-6, atol=1e-6)


def test_lion_can_be_had_by_its_name(cells):
    assert isinstance(cells["trainer"].optimizer, cells["MyLion"])
    assert cells["trainer"].learning_rate == 0.001


def test_parameters_get_the_optimizers_of_their_patterns(cells):
    text, fused = [text for text in _blocks("python") if '"muon"' in text]
    names = {"torch": torch, "tristep": tristep}
    _run(fused, names, "<README, fused matrices>")
    _run(text, names, "<README, several optimizers>")
    got = {row[0]: row[2] for row in names["several"].optimizer.table()[1:]}
    assert [name for name, optimizer in got.items() if optimizer == "muon"] == ["hidden.weight"]
    assert len(got) == 5


def test_the_code_for_those_from_mxnet_does_gluons_step():
    _, text, _ = _blocks("diff")
    before, after = _sides(text)
    ast.parse(before)  # there is no MXNet here to run it
    *_, step = (line for line in after.splitlines() if line.strip())
    names: dict = {}
    _run(after.replace(step, ""), names, "<README, after>")
    weight = names["net"].weight
    expected = weight.detach() - 1 / 8 * weight.grad
    _run(step, names, "<README, step>")
    torch.testing.assert_close(weight.detach(), expected)


def test_the_code_for_several_devices_clips_and_keeps_copies_equal():
    _, first, text = _blocks("diff")
    before, after = _sides(text)
    ast.parse(before)
    names: dict = {}
    _run(_sides(first)[1], names, "<README, after>")
    *_, step = (line for line in after.splitlines() if line.strip())
    _run(after.replace(step, ""), names, "<README, several devices>")
    nets, trainer = names["nets"], names["trainer"]
    bound = np.sqrt(3 / ((4 + 1) / 2))  # of Xavier
    assert 0 < nets[0].weight.abs().max() <= bound
    assert not nets[0].bias.any()
    assert [trainer.optimizer.multipliers(i)[1] for i in range(2)] == [1.0, 0.0]
    norm = torch.cat([param.grad.flatten() for param in nets[1].parameters()]).norm()
    assert norm <= 1.0 + 1e-6
    weights = nets[0].weight.detach().clone()
    _run(step, names, "<README, update>")
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    torch.testing.assert_close((weights - nets[0].weight).abs(), torch.full((1, 4), 0.01), rtol=1e-2, atol=0)  # Adam's first


def test_those_from_torch_get_torchs_numbers():
    text, *_ = _blocks("diff")
    trained = []
    for side in _sides(text):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        names = {"net": net}
        _run(side, names, "<README, torch>")
        for _ in range(5):
            net(torch.randn(4, 3)).square().sum().backward()
            names["optimizer"].step()
        trained.append((type(names["optimizer"]).__module__.split(".")[0], net.weight.detach()))
    (theirs, expected), (ours, actual) = trained
    assert (theirs, ours) == ("torch", "tristep")
    torch.testing.assert_close(actual, expected)


def _blocks(language, text=README + GUIDE):
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert blocks
    return blocks


def _sides(diff):
    """What stands before a change and what after it."""
    lines = diff.splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign)) for sign in ("-", "+")]


def _run(text, names, filename):
    """Run code as a notebook does: its text is where Python looks for a function's source."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), names)
