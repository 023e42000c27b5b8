"""The live loop in a real kernel: what a notebook's messages, buttons and interrupts do while it trains."""

import base64
import doctest
import inspect
import re
import textwrap
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from tristep import viz

SECONDS = 120  # until it is taken for hung
WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """
    import time, torch, tristep
    from tristep import viz
    viz.set_renderer("ipywidgets")
    def made():
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
        return net, tristep.Trainer(net, "sgd", {"learning_rate": 0.01})
    def steps(net, trainer, n=None):
        done = 0
        while n is None or done < n:
            trainer.zero_grad()
            loss = net(torch.ones(4, 2)).square().mean()
            loss.backward()
            trainer.step(1)
            done += 1
            yield loss
            time.sleep(0.002)  # so that the hundreds of steps of a busy processor need not be repeated
    """


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A notebook's kernel in folders of its own, for all tests."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name))
        notebook = Notebook()
        try:
            notebook.run(SETUP)
            yield notebook
        finally:
            notebook.close()


@pytest.fixture
def notebook(kernel):
    """The notebook, without what other tests have made in it."""
    kernel.widgets.clear()
    kernel.subshell = None
    yield kernel
    kernel.run("from tristep.viz.live import stop_loops; stop_loops(); loop = None; viz.set_renderer('ipywidgets')", "z")


class Notebook:
    """A front end that marks its cells, as JupyterLab does."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.widgets = {}  # those that are open, by the id of their comm: what they were opened with
        self.subshell = None  # which takes the messages of widgets; None: the shell, which runs cells, too

    def connect(self):
        """Once more, after another client of this kernel, which has taken the place of this one."""
        self.client.stop_channels()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def send(self, code, cell="a"):
        content = {
            "code": textwrap.dedent(code),
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,  # the next cell is there before a kernel has done with an error
        }
        message = self.client.session.msg("execute_request", content, metadata={"cellId": cell} if cell else {})
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def listen(self, wanted):
        """What is told, up to the message for which `wanted` is true."""
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            found.append(message)
            if message["msg_type"] == "comm_open":
                self.widgets[message["content"]["comm_id"]] = message["content"]["data"].get("state", {})
            if message["msg_type"] == "comm_close":
                self.widgets.pop(message["content"]["comm_id"], None)
            if wanted(message):
                return found

    def hear(self, words):
        """What is printed with these words."""
        heard = self.listen(lambda message: message["msg_type"] == "stream" and words in message["content"]["text"])
        return heard[-1]["content"]["text"]

    def told(self, sent):
        """All messages up to the end of a cell."""

        def idle(message):
            own = message["parent_header"].get("msg_id") == sent
            return own and message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"

        return self.listen(idle)

    def run(self, code, cell="a"):
        """Run a cell to its end: what it printed, and its value as text."""
        sent = self.send(code, cell)
        told = self.told(sent)
        own = [message for message in told if message["parent_header"].get("msg_id") == sent]
        errors = [message["content"] for message in own if message["msg_type"] == "error"]
        assert not errors, "\n".join(errors[0]["traceback"])
        streams = [message["content"]["text"] for message in told if message["msg_type"] == "stream"]
        values = [message["content"]["data"]["text/plain"] for message in told if message["msg_type"] == "execute_result"]
        return "".join(streams), values[-1] if values else None

    def value(self, code):
        return self.run(code, "b")[1]

    def until(self, code, expected):
        """Ask again and again; each question lets the kernel do something else."""
        for _ in range(1000):
            if self.value(code) == expected:
                return
        raise AssertionError(f"{code} is {self.value(code)}, not {expected}")

    def press(self, label):
        (comm,) = (comm for comm, state in self.widgets.items() if state.get("description") == label)
        content = {"comm_id": comm, "data": {"method": "custom", "content": {"event": "click"}}}
        message = self.client.session.msg("comm_msg", content)
        if self.subshell is not None:
            message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)

    def open_subshell(self):
        """Let another thread of the kernel take the messages of widgets, as JupyterLab does; ipykernel 7 has that."""
        sent = self.client.kernel_info()
        reply = self.reply(sent)
        if "kernel subshells" not in reply["content"].get("supported_features", ()):
            pytest.skip("this kernel has no subshells")
        self.client.control_channel.send(self.client.session.msg("create_subshell_request"))
        self.subshell = self.client.get_control_msg(timeout=SECONDS)["content"]["subshell_id"]

    def reply(self, sent):
        """The answer to a message."""
        while True:
            reply = self.client.get_shell_msg(timeout=SECONDS)
            if reply["parent_header"].get("msg_id") == sent:
                return reply


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("buttons", ["shell", "subshell"])
def test_a_loop_in_the_background_answers_cells_buttons_and_interrupts(notebook, buttons):
    if buttons == "subshell":
        notebook.open_subshell()
    printed, _ = notebook.run(
        """\
        net, trainer = made()
        loop = viz.LiveLoop(steps(net, trainer), trainer=trainer).start()
        print(loop.mode, loop.status)
        """
    )
    assert printed == "task running\n"  # the cell has come back
    notebook.until("loop.n_steps > 3", "True")
    notebook.press("Pause")
    notebook.until("loop.status", "'paused'")
    done = int(notebook.value("loop.n_steps")) + 1
    notebook.press("Step")
    notebook.until("loop.n_steps", str(done))  # a subshell says that it has heard before the step is taken
    notebook.until("loop.status", "'paused'")
    assert done == int(notebook.value("len(loop.run.scalars['loss'])"))
    notebook.run("before = loop.n_steps; loop.multiplier = 0.5", "b")
    notebook.press("Resume")
    notebook.until(f"loop.n_steps > {done} + 2", "True")
    assert notebook.value("loop.learning_rate") == "0.005"
    for _ in range(3):  # in a step or between two
        notebook.manager.interrupt_kernel()
        notebook.until("loop.status", "'paused'")
        done = int(notebook.value("loop.n_steps"))
        notebook.press("Resume")
        notebook.until(f"loop.n_steps > {done}", "True")
    notebook.press("Stop")
    notebook.until("loop.status", "'stopped'")
    # The same weights as without all that.
    equal = """\
        again, other = made()
        for step in range(1, loop.n_steps + 1):
            other.set_learning_rate(0.01 if step <= before else 0.005)
            next(steps(again, other, 1))
        all(map(torch.equal, again.parameters(), net.parameters()))
        """
    assert notebook.value(equal) == "True"


TOLD = """\
    def told():
        for i, loss in enumerate(steps(*made())):
            if i == 5:
                print("under way", flush=True)
            yield loss
    """


@pytest.mark.slow
def test_an_interrupt_ends_a_cell_that_awaits_a_loop_and_spares_a_loop_while_a_cell_computes(notebook):
    sent = notebook.send(textwrap.dedent(TOLD) + "loop = viz.LiveLoop(told, view=None).start()\nawait loop")
    notebook.hear("under way")
    for _ in range(8):  # then it awaits a paused loop; by luck the kernel noticed some
        notebook.manager.interrupt_kernel()
        assert notebook.reply(sent)["content"]["status"] == "error"
        assert notebook.value("loop.status") == "'paused'"
        sent = notebook.send("print('waits', flush=True)\nawait loop", "c")
        notebook.hear("waits")
    notebook.manager.interrupt_kernel()
    assert notebook.reply(sent)["content"]["status"] == "error"
    notebook.run("loop.resume()", "b")
    notebook.until("loop.n_steps > 10", "True")

    sent = notebook.send("print('computes', flush=True)\nwhile True: pass")
    notebook.hear("computes")
    notebook.manager.interrupt_kernel()
    assert notebook.reply(sent)["content"]["ename"] == "KeyboardInterrupt"
    assert notebook.value("loop.status") == "'running'"


@pytest.mark.slow
def test_train_runs_a_cell_in_the_background_and_again_in_its_place(notebook):
    notebook.run("%load_ext tristep\nviz.set_renderer('text')")  # which needs no picture
    cell = """\
        %%train
        net, trainer = made()
        total = 0
        while True:
            trainer.zero_grad()
            loss = net(torch.ones(4, 2)).square().mean()
            loss.backward()
            trainer.step(1)
            total += 1
        """
    notebook.run(cell, "train")
    notebook.until("loop.n_steps > 2", "True")
    assert notebook.value("loop.pause(); total == loop.n_steps") == "True"
    notebook.run("first = loop; loop.resume()", "b")
    notebook.run(cell, "train")
    assert notebook.value("first.status, loop.status") == "('stopped', 'running')"
    assert notebook.value("loop.stop(); loop.status") == "'stopped'"


CURVE = """
    class Curve(viz.View):
        def scene(self):
            power = viz.Control("power", "power", [1, 2])
            line = viz.Line([0, 1, 2], [[0, 1, 2], [0, 1, 4]], by=("power",))
            panel = viz.Panel(viz.Axis("x", 0, 2), viz.Axis("y", 0, 4), [line])
            return viz.Scene([panel], controls=[power], description="Powers of x.")
    view = Curve()
    view
    """


@pytest.mark.slow
def test_run_all_stays_in_order_and_keeps_widgets_pictures_and_words(notebook):
    file = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    cells = [
        SETUP,
        CURVE,
        "net, trainer = made(); loop = viz.LiveLoop(steps(net, trainer, 40), trainer=trainer).start()",
        "print(loop.mode, loop.status, loop.n_steps, loop.view.figure()._repr_png_(1.0)[0].hex())",
    ]
    file.cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells]
    runner = NotebookClient(file, km=notebook.manager, timeout=SECONDS)
    try:
        runner.execute()
    finally:
        runner.kc.stop_channels()
        notebook.connect()
    output, picture = file.cells[1].outputs
    assert set(output.data) == {WIDGET, "text/plain"}
    assert set(picture.data) == {"image/png", "text/plain"}  # what is left where there are no widgets
    # Once: a page without widgets, as nbconvert makes, has the words of the beginning above the picture otherwise.
    assert (output.data["text/plain"], picture.data["text/plain"]) == ("", "Powers of x.")
    assert base64.b64decode(picture.data["image/png"]).startswith(b"\x89PNG")
    states = file.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    models = {state["model_name"] for state in states.values()}
    assert {"StackModel", "ImageModel", "LinkModel", "SelectionSliderModel"} <= models
    assert output.data[WIDGET]["model_id"] in states
    # That of a loop is the last one.
    *words, shown = file.cells[3].outputs[0]["text"].split()
    assert words == ["block", "finished", "40"]
    _, picture = (output for output in file.cells[2].outputs if output["output_type"] == "display_data")
    assert base64.b64decode(picture["data"]["image/png"]).hex() == shown
    assert picture["data"]["text/plain"].startswith("run: finished, step 40, learning rate 0.01")


def test_a_loop_as_a_cell_s_value_shows_its_view_once(notebook):
    def shown(code):
        told = notebook.told(notebook.send(code))
        outputs = [
            message["content"]["data"] for message in told if message["msg_type"] in ("display_data", "execute_result")
        ]
        return [sorted(data) for data in outputs], [data["text/plain"] for data in outputs]

    kinds, words = shown("loop = viz.LiveLoop(steps(*made(), 5), mode='task')\nloop.start()")
    assert sum(WIDGET in kind for kind in kinds) == 1
    # A page without widgets shows a widget's words instead: they would tell of the beginning, above the last picture.
    assert [text for kind, text in zip(kinds, words, strict=True) if WIDGET in kind] == [""]
    assert any(text.startswith("run: r") and "image/png" in kind for kind, text in zip(kinds, words, strict=True))
    assert not any(text.startswith("LiveLoop(") for text in words)
    assert sum(WIDGET in kind for kind in shown("loop")[0]) == 1  # another cell shows it, too
    _, words = shown("viz.LiveLoop(steps(*made(), 5), mode='block', view=None).start()")
    assert words == ["LiveLoop('run', finished, 5 steps, mode='block')"]


MADE_AGAIN = """
    net, trainer = made()
    recorder = viz.Recorder(trainer)
    made_so_far += [weakref.ref(net), weakref.ref(trainer)]
    def train():
        for loss in steps(net, trainer, LENGTH):
            recorder.step(loss=loss)
            yield loss
    """
TRAINED = "for _ in train(): pass"
SHOWN = {
    "dashboard": (TRAINED, "viz.Dashboard(recorder)"),
    "loss view": (TRAINED, "display(viz.LossView([recorder]))"),
    "recorder": (TRAINED, "recorder"),
    "loop that ends": ("viz.LiveLoop(train, trainer=trainer, recorder=recorder, mode='block').start()",),
    "loop that is stopped": ("loop = viz.LiveLoop(train, trainer=trainer, mode='task').start()\nloop",),
    "loop with snapshots": ("loop = viz.LiveLoop(train, trainer=trainer, mode='task')\nloop.step(2); loop.branch()\nloop",),
    "loop over epochs": (
        "viz.LiveLoop.fit(net, torch.nn.MSELoss(), [(torch.ones(4, 2), torch.ones(4, 1))], trainer, mode='block').start()",
    ),
}


@pytest.mark.sample(0)
@pytest.mark.slow
@pytest.mark.parametrize("cells_are_known", [True, False], ids=["cells", "no cells"])
def test_cells_that_are_run_again_keep_no_model(notebook, cells_are_known):
    notebook.run("%load_ext tristep\nimport gc, weakref")
    kept = {}
    for name, cells in SHOWN.items():
        notebook.run(f"made_so_far = []; LENGTH = {None if name.endswith(('stopped', 'snapshots')) else 3}", "z")
        for _ in range(5):
            for k, cell in enumerate((MADE_AGAIN, *cells)):
                notebook.run(cell, f"{name} {k}" if cells_are_known else None)
        for other in range(3):  # _, __ and ___ have something else then
            notebook.run(str(other), "z")
        kept[name] = notebook.value(
            "gc.collect() and None; [k // 2 for k, ref in enumerate(made_so_far) if ref() is not None]"
        )
    notebook.run("%unload_ext tristep", "z")
    assert kept == dict.fromkeys(SHOWN, "[4, 4]")  # net and trainer of the last run, which are variables


@pytest.mark.slow
def test_a_cell_that_makes_its_loop_again_stops_the_one_before(notebook):
    cell = """\
        net, trainer = made()
        def train():
            yield from steps(net, trainer)
        before = globals().get("loop")
        loop = viz.LiveLoop(train, trainer=trainer)
        loop.start()
        """
    notebook.run("loop = None; viz.set_renderer('text')", "z")
    notebook.run(cell)
    notebook.until("loop.n_steps > 3", "True")
    notebook.run(cell)
    notebook.until("loop.n_steps > 3", "True")
    notebook.run("loop.pause()", "b")
    assert notebook.value("before.status, loop.status") == "('stopped', 'paused')"
    assert notebook.value("loop.n_steps == trainer.optimizer.num_update") == "True"
    notebook.run("one = viz.LiveLoop(train, view=None); two = viz.LiveLoop(train, view=None); one.step(); two.step()", "c")
    notebook.until("one.status, two.status", "('paused', 'paused')")  # made by the same run of a cell


ROOT = Path(__file__).parents[2]


def fences(start, stop):
    """The code in a part of docs/notebooks.md, each block a cell."""
    text = (ROOT / "docs/notebooks.md").read_text(encoding="utf-8")
    part = text[text.index(start) : text.index(stop)]
    return re.findall(r"^```(?:python|ipython)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)


def example(of):
    """The example of a docstring, each statement a cell, up to the start of the loop."""
    cells = [each.source for each in doctest.DocTestParser().get_examples(inspect.getdoc(of))]
    return cells[: next(i for i, cell in enumerate(cells) if ".start()" in cell) + 1]


def tutorial():
    cells = [cell.source for cell in jupytext.read(ROOT / "tutorials/01_first_steps.py").cells if cell.cell_type == "code"]
    return cells[: next(i for i, cell in enumerate(cells) if "LiveLoop(" in cell) + 1]


RECORDED = fences("## Recording", "### Loggers")
IN_A_CELL = fences("A training in a cell, as it stands", "`%unload_ext")
EXAMPLES = {  # all that start a loop: their cells, and what makes the training endless
    "docs, live": ([*RECORDED, *fences("## Live", "### Magics")], "range(10)", "range(10**9)"),
    "docs, %%train": (["%load_ext tristep", *RECORDED, *IN_A_CELL], "in loader", "in __import__('itertools').cycle(loader)"),
    "tutorial 1": (tutorial(), "epochs=12", "epochs=10**9"),
    "LiveLoop": (example(viz.LiveLoop), "range(20)", "range(10**9)"),
    "LiveLoop.fit": (example(viz.LiveLoop.fit), "epochs=3", "epochs=10**9"),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_cells_of_an_example_run_again_one_by_one_leave_what_they_make_to_the_new_loop(notebook, name):
    cells, short, endless = EXAMPLES[name]
    *before, last = [
        cell.replace(short, endless) if cell == cells[-1] or "yield" in cell or "LiveLoop.fit" in cell else cell
        for cell in cells
    ]
    assert endless in "".join([*before, last])
    notebook.run("viz.set_renderer('text'); trainer = None", "z")

    def run_before(check):
        for k, cell in enumerate(before):
            notebook.run(f"{cell}\nbegun = trainer and trainer.optimizer.num_update", f"{name} {k}")
            if check:  # between cells the loop that was there steps
                notebook.run("for _ in range(3): print('.')", "z")
                assert notebook.value("trainer is trained or trainer.optimizer.num_update == begun") == "True"

    run_before(False)
    notebook.run(last, name)
    notebook.until("loop.n_steps > 3", "True")
    notebook.run("first, trained = loop, trainer", "z")
    run_before(True)
    notebook.run(last, name)
    notebook.until("loop.n_steps > 3", "True")
    notebook.run("loop.pause()", "z")
    assert notebook.value("first is loop, first.status, loop.status") == "(False, 'stopped', 'paused')"
    begun = "0" if "trainer =" in last else "begun"
    assert notebook.value(f"trainer is not trained and trainer.optimizer.num_update == loop.n_steps + {begun}") == "True"
    notebook.run("first = trained = None", "z")


@pytest.mark.slow
def test_loops_that_are_there_are_listed_with_a_button_that_stops_each(notebook):
    notebook.run("loop = viz.LiveLoop(lambda: None, view=None, name='endless').start()", "a")
    assert notebook.value("repr(viz.loops())").startswith('"endless: running, step ')
    notebook.run("viz.loops()", "b")
    assert any(str(state.get("value", "")).startswith("endless: running, step ") for state in notebook.widgets.values())
    notebook.press("Stop")
    assert notebook.value("loop.status") == "'stopped'"
    assert notebook.value("viz.loops()") == "no loop is running or paused"


def pictures(told):
    """The words of pictures that have been renewed."""
    return [message["content"]["data"]["text/plain"] for message in told if message["msg_type"] == "update_display_data"]


@pytest.mark.sample(0)
@pytest.mark.slow
def test_the_saved_picture_is_renewed_each_minute_not_by_each_cell_and_at_the_end(notebook):
    """To draw it takes a quarter of a second, for which `1 + 1` would wait."""
    told = []
    listen = notebook.listen

    def note(wanted):
        told.extend(listen(wanted))
        return told

    notebook.listen = note
    try:
        notebook.run(
            """\
            now = [1000.0]
            loop = viz.LiveLoop(lambda: None, frames_per_second=1000)
            loop.view.display.clock = lambda: now[0]
            loop.start()
            """
        )
        told.clear()
        for _ in range(4):
            assert notebook.value("1 + 1") == "2"
        assert not pictures(told)
        steps = [0]
        for seconds in (4, 6, 12, 24, 48, 60, 60):  # the first comes soon, or a kernel that dies early leaves an empty one
            told.clear()
            notebook.run(f"now[0] += {seconds}", "b")
            while seconds > 4 and not pictures(told):
                notebook.value("1 + 1")
            steps += [int(re.search(r"step ([\d,]*\d)", words)[1].replace(",", "")) for words in pictures(told)]
        assert len(steps) == 7
        assert steps == sorted(set(steps))
        told.clear()
        notebook.run("loop.stop()", "b")
        assert pictures(told)[-1].startswith("run: stopped, step ")
    finally:
        notebook.listen = listen


@pytest.mark.sample(0)
@pytest.mark.slow
def test_a_kernel_that_is_shut_down_leaves_a_picture_of_the_end():
    notebook = Notebook()
    try:
        notebook.run(SETUP + "loop = viz.LiveLoop(lambda: 0.5).start()")
        notebook.until("loop.n_steps > 100", "True")
        notebook.client.control_channel.send(notebook.client.session.msg("shutdown_request", {"restart": False}))
        (words,) = pictures(notebook.listen(lambda message: message["msg_type"] == "update_display_data"))[-1:]
        assert "step " in words
        assert "ready" not in words
    finally:
        notebook.close()
