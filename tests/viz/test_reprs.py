"""Tables of trainers, optimizers, schedules and runs: the numbers in them, and that nothing in them is taken for markup."""

import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim import lr_scheduler as torchs

import tristep
from tristep.viz import Run
from tristep.viz.views.reprs import to_html

pytestmark = pytest.mark.usefixtures("few_steps")

VOID = ("img", "br")


class Page(HTMLParser):
    """Tables by their captions, each a list of rows of words; all tags, and the alternatives of the pictures."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.words, self.open = {}, [], [], []
        self.images = []
        self.rows, self.cell, self.caption = [], None, None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(dict(attributes))
        elif tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th", "caption"):
            self.cell = ""

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self.caption = self.cell
        elif tag in ("td", "th"):
            self.rows[-1].append(self.cell)
        elif tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data):
        self.words.append(data)
        if self.cell is not None:
            self.cell += data

    def table(self, caption):
        return {row[0]: row[1] if len(row) == 2 else row[1:] for row in self.tables[caption]}


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))


def _step(net, trainer):
    trainer.zero_grad()
    net(torch.ones(2, 5)).sum().backward()
    trainer.step(2) if isinstance(trainer, tristep.Trainer) else trainer.step()


def test_a_trainer():
    new = Page(to_html(tristep.Trainer(_net(), "sgd", {"learning_rate": 0.5})))
    settings = new.table("settings")
    assert (settings["updates"], settings["lr"], settings["optimizer's state"]) == ("0", "0.5", "0 bytes")
    assert new.images == []
    net = _net()
    schedule = tristep.lr_scheduler.CosineScheduler(50, base_lr=0.25)
    trainer = tristep.Trainer(net, "adam", {"lr_scheduler": schedule, "wd": 0.125, "beta1": 0.75})
    net[0].bias.lr_mult = 3.0
    for _ in range(4):
        _step(net, trainer)
    page = Page(to_html(trainer))
    assert "Trainer with Adam: 4 parameters, 22 elements" in page.words
    settings = page.table("settings")
    assert settings["updates"] == "4"
    assert settings["learning rate"] == f"{schedule(4):.6g}"
    assert settings["schedule"] == repr(schedule)
    assert (settings["wd"], settings["beta1"]) == ("0.125", "0.75")
    assert settings["optimizer's state"] == f"{22 * 2 * 4} bytes"  # two moments of four bytes
    assert page.tables["parameters"] == [
        ["names", "parameters", "elements", "lr_mult", "wd_mult"],
        ["0.weight, 1.weight, 1.bias", "3", "19", "1", "1"],
        ["0.bias", "1", "3", "3", "1"],
    ]
    (image,) = page.images
    assert image["alt"] == f"learning rate from {schedule(1):.4g} at 1 to 0 at 50, at most {schedule(1):.4g}"


def test_a_schedule_has_a_picture_and_lists_its_arguments():
    image = Page(to_html(tristep.lr_scheduler.CosineScheduler(100, base_lr=1.0))).images[0]
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(image["src"].removeprefix("data:image/png;base64,")))))
    drawn = pixels[..., 3] > 128
    height, width = drawn.shape
    assert not drawn[0, 0]
    tops = [int(np.flatnonzero(drawn[:, column]).mean()) for column in np.flatnonzero(drawn.any(0))]
    assert len(tops) > 0.85 * width
    assert tops[0] < 0.2 * height
    assert tops[-1] > 0.8 * height
    assert max(np.diff(tops)) <= height // 10
    assert min(np.diff(tops)) >= -2  # it falls, up to the width of its line
    settings = Page(to_html(tristep.lr_scheduler.PolyScheduler(80, base_lr=0.5, pwr=3, warmup_steps=8))).table("settings")
    assert (settings["max_update"], settings["pwr"], settings["warmup_steps"]) == ("80", "3", "8")


@pytest.mark.parametrize("module", [torch.optim, tristep.optim])
def test_an_optimizer_of_torchs_interface(module):
    net = _net()
    groups = [{"params": list(net[0].named_parameters()), "lr": 0.5}, {"params": list(net[1].named_parameters())}]
    optimizer = module.AdamW(groups, lr=0.01, weight_decay=0.25)
    for _ in range(3):
        _step(net, optimizer)
    page = Page(to_html(optimizer))
    assert "AdamW: 4 parameters, 22 elements" in page.words
    groups = page.table("groups")
    assert groups["group"] == ["0", "1"]
    assert groups["parameters"] == ["2", "2"]
    assert groups["elements"] == ["18", "4"]
    assert groups["lr"] == ["0.5", "0.01"]
    assert groups["weight_decay"] == ["0.25", "0.25"]
    state = page.table("state")
    assert state["steps"] == "3"
    assert int(state["state"].removesuffix(" bytes")) in (22 * 8, 22 * 8 + 4 * 4)  # torch's counts are tensors of four bytes
    assert state["names"] == "weight, bias, weight, bias"


def test_states_of_8_bits():
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    trainer = tristep.Trainer([parameter], "adam", {"state_dtype": "8bit"})
    parameter.grad = torch.ones_like(parameter)
    trainer.step(1)
    size = 2 * (64 * 128 + 64 * 128 // 128 * 4)  # two states, of a byte for each element and four for each 128
    assert Page(to_html(trainer)).table("settings")["optimizer's state"] == f"{size:,} bytes"


def test_words_from_outside_are_words():
    evil = "<script>alert(1)</script><img src=x onerror='alert(2)'>&lt;"
    net = torch.nn.Module()
    net.register_parameter(evil.replace(".", ""), torch.nn.Parameter(torch.ones(2)))
    run = Run(evil, notes={evil: evil})
    run.add_scalars(1, {evil: 1.0})
    trainer = tristep.Trainer(net, "sgd")
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    optimizer.param_groups[0][evil] = evil
    for thing in (trainer, optimizer, run):
        text = to_html(thing)
        page = Page(text)
        assert {tag for tag, _ in page.tags} <= {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
        assert any(evil in words for words in page.words)
        assert "<script" not in text


def test_a_scheduler_of_torch():
    optimizer = torch.optim.SGD(_net().parameters(), lr=0.4)
    scheduler = torchs.CosineAnnealingLR(optimizer, 30)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    page = Page(to_html(scheduler))
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (3, rate)
    settings = page.table("settings")
    assert (settings["epoch"], settings["rates now"]) == ("3", f"{rate:.6g}")
    assert page.images[0]["alt"].startswith(f"learning rate from {rate:.4g} at 3")
    waiting = Page(to_html(torchs.ReduceLROnPlateau(optimizer)))  # for a plateau, which nobody knows before
    assert (waiting.images, waiting.table("settings")["patience"]) == ([], "10")


def test_a_run():
    assert Page(to_html(Run("none"))).table("about it")["last step"] == "0"
    run = Run("adam", ["weight"], notes={"seed": "7"})
    for step, loss in enumerate([4.0, 0.5, float("nan"), 2.0], start=1):
        run.add_scalars(step, {"loss": loss})
    run.add_tensors([1], {"gradient_norm": np.ones((1, 1))})
    page = Page(to_html(run))
    assert "Run adam" in page.words
    assert page.table("about it") == {"last step": "4", "parameters": "1", "seed": "7", "of each parameter": "gradient_norm"}
    assert page.tables["numbers over its steps"] == [
        ["name", "values", "last", "least", "largest", "not finite"],
        ["loss", "4", "2", "0.5", "4", "1"],
    ]


def test_colours_are_the_notebooks_with_others_to_fall_back_on():
    page = Page(to_html(tristep.Trainer(_net(), "sgd")))
    styles = " ".join(attributes.get("style", "") for _, attributes in page.tags)
    assert styles.count("var(--jp-ui-font-color1,inherit)") >= 1
    assert "var(--jp-border-color2,#e4e5ea)" in styles


def test_other_things():
    with pytest.raises(TypeError, match="thing is a dict: must be one of Trainer"):
        to_html({})
