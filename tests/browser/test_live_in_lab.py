"""Training that is watched and steered in JupyterLab by keys and clicks, with both kernels and both renderers of widgets."""

import json
import os
import re
import signal

import pytest

LEFT, RIGHT = "\ue012", "\ue014"

BEGIN = """
import json, time, ipykernel, torch, tristep
from tristep import viz
viz.set_renderer({renderer!r})
if "loop" in globals():  # of another test, which may have failed
    loop.stop()
print(ipykernel.__version__)
"""
TRAINING = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.01})
samples = torch.randn(64, 4)
rates, closed = [], []

def train():
    try:
        while True:
            trainer.zero_grad()
            loss = (net(samples) - samples.sum(1, keepdim=True)).square().mean()
            loss.backward()
            trainer.step(1)
            rates.append(trainer.learning_rate)
            yield loss
            time.sleep(0.002)  # of a larger net, which would not keep a processor busy all the time
    finally:
        closed.append(True)

loop = viz.LiveLoop(train, trainer=trainer).start()
"""
FAILING = """
def fail():
    yield 1.0
    yield 0.5
    raise ValueError("no batch of that size")

failing = viz.LiveLoop(fail).start()
"""


@pytest.fixture(params=["canvas", "ipywidgets"])
def renderer(request):
    return request.param


class Seen:
    """What a person sees of a loop, and does to it."""

    def __init__(self, browser, renderer, cell):
        self.browser, self.cell = browser, f"[data-cell={cell}]"
        self.canvas = renderer == "canvas"

    def picture(self):
        if self.canvas:
            return self.browser.digest(f"{self.cell} .tristep-picture canvas")
        return self.browser.image(f"{self.cell} img.widget-image")

    def words(self):
        element = self.browser.find(f"{self.cell} .tristep-picture canvas" if self.canvas else f"{self.cell} img")
        return element.get_attribute("aria-label" if self.canvas else "title")

    def press(self, label):
        # JupyterLab takes cells out of the page that are out of sight: it is asked for again when it can be seen.
        script = (
            "const [cell, label, done] = arguments;"
            "const find = () => [...document.querySelectorAll(`${cell} button`)].filter((each) => each.innerText === label);"
            "find()[0]?.scrollIntoView({block: 'center'});"
            "requestAnimationFrame(() => requestAnimationFrame(() => done(find())))"
        )
        ask = self.browser.driver.execute_async_script
        (button,) = self.browser.until(lambda: ask(script, self.cell, label), f"the button {label!r}")
        button.click()

    def slider(self):
        return self.rate("input, .noUi-handle")

    def multiplier(self):
        return self.rate("output, .widget-readout").text

    def rate(self, part):
        """A part of the control of the learning rate, one of several."""
        script = (
            "const [cell, part] = arguments;"
            "const rows = document.querySelectorAll(`${cell} :is(.tristep-control, .widget-slider)`);"
            "return [...rows].find((row) => row.innerText.includes('learning rate'))?.querySelector(part)"
        )
        return self.browser.until(lambda: self.browser.run(script, self.cell, part), part)


@pytest.mark.sample(0)  # test_live_kernel.py has its Python half
def test_a_loop_is_watched_and_steered(shared, browser, kernel, renderer):
    book = shared(kernel)
    version = book.run(BEGIN.format(renderer=renderer)).strip()
    assert version.split(".")[0] == ("6" if "6" in kernel else "7")
    book.run(TRAINING, "loop")
    seen = Seen(browser, renderer, "loop")

    # It goes on while cells run, and the curve with it.
    steps = [int(book.run("print(loop.n_steps)")) for _ in range(3)]
    assert steps[0] < steps[1] < steps[2]
    first = browser.until(seen.picture, "a picture")
    browser.until(lambda: seen.picture() not in ("", first), "a picture that changes", 60)
    browser.until(lambda: _step(seen.words()) > steps[0], "a later step in words", 60)

    seen.press("Pause")
    browser.until(lambda: ": paused" in seen.words(), "the pause")
    paused = int(book.run("print(loop.n_steps)"))
    assert book.run("print(loop.status, loop.n_steps, len(rates))").split() == ["paused", str(paused), str(paused)]
    assert _step(seen.words()) == paused

    seen.press("Step")
    browser.until(lambda: _step(seen.words()) == paused + 1, "one step")
    assert book.run("print(loop.status, loop.n_steps, len(rates))").split() == ["paused", *[str(paused + 1)] * 2]

    # Two places on the slider are a factor of two.
    browser.keys(seen.slider(), RIGHT, RIGHT)
    browser.until(lambda: seen.multiplier() == "0.02 (× 2)", "the multiplier next to the slider")
    browser.until(lambda: float(book.run("print(loop.multiplier)")) == 2, "Python")
    seen.press("Resume")
    used = f"print(json.dumps(sorted(set(rates[{paused + 1}:]))))"
    assert browser.until(lambda: json.loads(book.run(used)), "steps at another rate") == [0.02]
    browser.until(lambda: "learning rate 0.02 (× 2)" in seen.words(), "the rate in words", 60)
    browser.keys(seen.slider(), LEFT, LEFT, LEFT)
    browser.until(lambda: json.loads(book.run(used))[0] == pytest.approx(0.01 / 2**0.5), "a lower rate")
    assert json.loads(book.run(used))[-1] == 0.02
    browser.run("arguments[0].scrollIntoView()", browser.find(f"{seen.cell} .jp-Cell-outputWrapper"))
    browser.keep(f"live-{renderer}-{version}")

    seen.press("Stop")
    browser.until(lambda: ": stopped" in seen.words(), "the end")
    recorded = """
    kept = loop.run.scalars["learning_rate"].recent()[1].tolist()
    print(json.dumps([loop.status, closed, kept == rates[-len(kept):]]))
    """
    assert json.loads(book.run(recorded)) == ["stopped", [True], True]
    last = seen.picture()
    assert int(book.run("print(loop.n_steps)")) == _step(seen.words())
    assert seen.picture() == last
    browser.run("arguments[0].scrollIntoView()", browser.find(f"{seen.cell} .jp-Cell-outputWrapper"))
    browser.keep(f"live-{renderer}-{version}-stopped")

    # What a step raises stands in the picture.
    book.run(FAILING, "failing")
    failing = Seen(browser, renderer, "failing")
    browser.until(lambda: "failed after step 2\nValueError: no batch of that size" in failing.words(), "the exception")
    browser.run("arguments[0].scrollIntoView()", browser.find(failing.cell))
    browser.keep(f"live-{renderer}-{version}-failed")
    book.run("loop.view.close(); failing.view.close()")


@pytest.mark.sample(0)
def test_a_view_says_that_its_kernel_has_ended(notebook, browser):
    book = notebook()
    book.run(BEGIN.format(renderer="canvas"))
    process = int(book.run(TRAINING + "import os\nprint(os.getpid())", "loop"))
    seen = Seen(browser, "canvas", "loop")
    browser.until(lambda: ": running" in seen.words(), "a running loop")
    os.kill(process, signal.SIGKILL)
    silence = browser.find(f"{seen.cell} .tristep-silence")
    browser.until(silence.is_displayed, "words about it", 60)
    assert "the kernel has ended or been restarted" in silence.text
    buttons = browser.driver.find_elements("css selector", f"{seen.cell} .tristep-buttons button")
    assert len(buttons) >= 4
    assert {button.get_attribute("aria-disabled") for button in buttons} == {"true"}
    assert len(seen.picture()) > 0
    browser.keep("live-canvas-killed")
    browser.complaints()  # of JupyterLab about its kernel


def _step(words):
    return int(re.search(r"step ([\d,]*\d)", words)[1].replace(",", ""))
