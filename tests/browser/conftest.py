"""A real browser for tests: Debian's chromium without a window, pages opened from files, and a JupyterLab on loopback.

Without chromium the tests are skipped, or fail where TRISTEP_BROWSER=require. Screenshots are kept in TRISTEP_SCREENSHOTS,
or in a temporary folder, and the end of the run says where. TRISTEP_KERNEL names the kernel of the notebooks, by default
"python3".
"""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

GET_IT = "no chromium for tests in a browser; on Debian: apt-get install chromium chromium-driver"
KERNEL = os.environ.get("TRISTEP_KERNEL", "python3")
KERNEL_6 = next(iter(sorted(Path(sys.prefix).glob("ipykernel-6.*"))), None)  # a folder that `make test` fills
MODULE = Path(__file__).parents[2] / "viz" / "render" / "static" / "scene.js"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --hide-scrollbars "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-device-scale-factor=1 --window-size=1400,1100"
)
# The open notebook; `shell.currentWidget` is none until something has got the focus.
_BOOK = "[...(window.jupyterapp?.shell.widgets('main') ?? [])].find((each) => each.context)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker("browser")
    if ours and not _binaries() and not _required():  # one line that says so, not one for each
        ours[0].add_marker(pytest.mark.skip(reason=GET_IT))
        config.hook.pytest_deselected(items=ours[1:])
        items[:] = [item for item in items if item not in ours[1:]]


class Browser:
    """A chromium and what tests ask of it."""

    def __init__(self, driver: Any, shots: Path) -> None:
        self.driver = driver
        self.shots = shots

    @staticmethod
    def until(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
        """What the condition gives as soon as it is true; asked again and again."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.01)
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.until(lambda: self.driver.find_elements("css selector", selector), selector)[0]

    def keys(self, element: Any, *keys: str) -> None:
        self.run("arguments[0].focus({preventScroll: true})", element)
        element.send_keys(*keys)

    def pixels(self, selector: str = ".tristep-picture canvas") -> np.ndarray:
        """uint8 [height, width, 3] of a canvas, after what is to be drawn has been drawn."""
        from PIL import Image

        url = self.driver.execute_async_script(
            "const [selector, done] = arguments, look = () => done(document.querySelector(selector).toDataURL());"
            "requestAnimationFrame(() => requestAnimationFrame(look))",
            selector,
        )
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).convert("RGB"))

    def digest(self, selector: str = ".tristep-picture canvas") -> str:
        return hashlib.sha256(self.pixels(selector).tobytes()).hexdigest()

    def image(self, selector: str) -> str:
        """The SHA-256 of the file that the one <img> shows which is to be seen; empty while there is none."""
        return str(
            self.driver.execute_async_script(
                "const [selector, done] = arguments;"
                "const all = [...document.querySelectorAll(selector)];"
                "const seen = all.filter((each) => each.offsetWidth && each.complete && each.naturalWidth);"
                "const hex = (sum) => [...new Uint8Array(sum)].map((each) => each.toString(16).padStart(2, '0')).join('');"
                "if (seen.length !== 1) done('');"
                "else fetch(seen[0].src).then((file) => file.arrayBuffer())"
                "  .then((bytes) => crypto.subtle.digest('SHA-256', bytes)).then((sum) => done(hex(sum)), () => done(''))",
                selector,
            )
        )

    def frame(self, selector: str = ".tristep-picture canvas", quiet: str = "#63666f") -> tuple[int, int, int, int]:
        """Left, top, right and bottom of a scene's first panel, in pixels; found by the colour of its two lines."""
        ink = (self.pixels(selector) == _rgb(quiet)).all(axis=2)
        column = int(np.argmax(ink.sum(axis=0)))
        row = int(np.argmax(ink[:, column:].sum(axis=1)))
        along, down = ink[row, column:], np.flatnonzero(ink[: row + 1, column])
        return column, int(down[0]), column + int(np.argmin(np.append(along, False))), row

    def pointer(self, *moves: tuple[str, float, float], selector: str = ".tristep-picture canvas") -> None:
        """The mouse over a canvas: ("move" | "down" | "up", x, y), in its pixels from the upper left corner."""
        from selenium.webdriver.common.action_chains import ActionChains

        canvas = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'nearest'})", canvas)
        box = self.run("const b = arguments[0].getBoundingClientRect(); return [b.x, b.y]", canvas)
        chain = ActionChains(self.driver, duration=0)
        for kind, x, y in moves:
            chain.w3c_actions.pointer_action.move_to_location(round(box[0] + x), round(box[1] + y))
            if kind != "move":
                getattr(chain.w3c_actions.pointer_action, f"pointer_{kind}")()
        chain.perform()

    def click(self, x: float, y: float, selector: str = ".tristep-picture canvas") -> None:
        self.pointer(("down", x, y), ("up", x, y), selector=selector)

    def keep(self, name: str) -> None:
        """Keep a screenshot."""
        self.driver.save_screenshot(str(self.shots / f"{name}.png"))

    def theme(self, name: str) -> None:
        """What the system asks for: "light" or "dark"."""
        features = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last time."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """Where screenshots are kept; said at the end."""
    asked = os.environ.get("TRISTEP_SCREENSHOTS")
    folder = Path(asked).resolve() if asked else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nscreenshots: {folder}", file=sys.stderr)


@pytest.fixture(scope="session")
def chromium(shots: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = start(tmp_path_factory.mktemp("chromium"), shots)
    yield running
    running.driver.quit()


def start(profile: Path, shots: Path | None = None) -> Browser:
    """A chromium with this folder for its profile; without one the test is skipped, or fails, and says how to get it."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError:
        _missing("no selenium for tests in a browser: pip install selenium")
    found = _binaries()
    if not found:
        _missing(GET_IT)
    binary, driver = found
    options = webdriver.ChromeOptions()
    options.binary_location = binary  # else selenium would look for one to download
    for flag in [*_FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    running.set_script_timeout(100)
    return Browser(running, shots or profile)


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser on an empty page, in which nothing may go wrong."""
    chromium.driver.get("about:blank")
    chromium.theme("light")
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


def _binaries() -> list[str]:
    """Chromium and its driver, or nothing."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    return [path for path in found if path] if all(found) else []


def _required() -> bool:
    return os.environ.get("TRISTEP_BROWSER") == "require"


def _missing(what: str) -> NoReturn:
    if _required():
        pytest.fail(what)
    pytest.skip(what)


class Stage:
    """A page with the module's functions in its window, on which scenes are shown."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser = browser
        self.frame, self.pointer, self.click = browser.frame, browser.pointer, browser.click
        names = "decode, part, drawn, number, words, ticks, mount"
        module = MODULE.read_text(encoding="utf-8")
        file = folder / "stage.html"
        file.write_text(
            '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body><div id="stage"></div>'
            f'<script type="module">{module}\nObject.assign(window, {{ {names} }});\n'
            "window.bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)).buffer;\n"
            "window.sent = [];\n</script>",
            encoding="utf-8",
        )
        browser.driver.get(file.as_uri())

    def show(self, scene: Any, remote: bool = True, theme: str = "auto") -> None:
        self.browser.run(
            "window.sent = []; window.shown?.destroy();"
            "window.shown = mount(document.getElementById('stage'), bytes(arguments[0]),"
            " {send: arguments[1] ? (message) => sent.push(message) : null, theme: arguments[2]})",
            base64.b64encode(scene.to_bytes()).decode(),
            remote,
            theme,
        )

    def update(self, scene: Any) -> None:
        self.browser.run("shown.update(bytes(arguments[0]))", base64.b64encode(scene.to_bytes()).decode())
        self.browser.pixels()  # it is shown from the next frame on

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What Python would have been told of this kind."""
        return [message for message in self.browser.run("return window.sent") if message["kind"] == kind]

    def place(self, scene: Any, x: float, y: float) -> tuple[float, float]:
        """The pixel of a place in the panel of a scene of one, by arithmetic on its axes."""
        left, top, right, bottom = self.frame()
        panel = scene.panels[0]
        across, up = _share(panel.x, x), _share(panel.y, y)
        return left + across * (right - left), bottom - up * (bottom - top)


@pytest.fixture
def stage(browser: Browser, tmp_path: Path) -> Stage:
    """Where scenes are shown without a notebook."""
    return Stage(browser, tmp_path)


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.uint8)


def _share(axis: Any, value: float) -> float:
    low, high = axis.low, axis.high
    if axis.scale == "log":
        low, high, value = np.log10([low, high, value])
    share = (value - low) / (high - low)
    return float(share if axis.upwards else 1 - share)


class Lab:
    """A JupyterLab of its own on loopback, and one notebook at a time in the browser."""

    def __init__(self, root: Path) -> None:
        self.root = root
        settings = root / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        quiet = {"fetchNews": "false", "checkForUpdates": False}  # no network, nothing that pops up
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
        (root / "notebooks").mkdir()
        if KERNEL_6 is not None:
            paths = [str(KERNEL_6), *filter(None, [os.environ.get("PYTHONPATH")])]
            spec = {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": KERNEL_6.name,
                "language": "python",
                "env": {"PYTHONPATH": _resolved(os.pathsep.join(paths))},
            }
            (root / "data" / "kernels" / KERNEL_6.name).mkdir(parents=True)
            (root / "data" / "kernels" / KERNEL_6.name / "kernel.json").write_text(json.dumps(spec))
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
            "MPLCONFIGDIR": "matplotlib",
        }
        environment = os.environ | {name: str(root / folder) for name, folder in folders.items()}
        environment.pop("MPLBACKEND", None)
        if "PYTHONPATH" in environment:  # so that kernels import what the tests import
            environment["PYTHONPATH"] = _resolved(environment["PYTHONPATH"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = (
            f"--no-browser --ip=127.0.0.1 --port={port} --port-retries=0 --allow-root --IdentityProvider.token= "
            f"--ServerApp.password= --expose-app-in-browser --LabApp.extension_manager=readonly"
        ).split()
        with (root / "lab.log").open("w") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={root / 'notebooks'}"],
                env=environment,
                cwd=root,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        Browser.until(self._answers, f"JupyterLab; see {root / 'lab.log'}", 60)

    def _answers(self) -> bool:
        assert self.server.poll() is None, (self.root / "lab.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/api/status", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self) -> None:
        os.killpg(self.server.pid, signal.SIGTERM)
        try:
            self.server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()


def _resolved(paths: str) -> str:
    """Of PYTHONPATH, for processes that run in another folder."""
    return os.pathsep.join(str(Path(path).resolve()) for path in paths.split(os.pathsep) if path)


class Notebook:
    """A notebook that is open in JupyterLab. One of a name that has been opened before has its kernel, and its variables."""

    def __init__(self, lab: Lab, browser: Browser, name: str, cells: list[str], kernel: str = KERNEL) -> None:
        import nbformat

        self.lab, self.browser, self.name, self.closed = lab, browser, name, False
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": kernel, "display_name": kernel}  # without it Lab asks, and waits forever
        nbformat.write(book, lab.root / "notebooks" / f"{name}.ipynb")
        browser.driver.get(f"{lab.url}/doc/tree/{name}.ipynb?reset")
        ready = (
            f"const c = {_BOOK}?.context;"
            "return document.querySelector('.jp-Dialog')?.innerText ??"
            "  Boolean(c?.isReady && c.sessionContext.isReady"
            "          && c.sessionContext.session?.kernel?.connectionStatus === 'connected')"
        )
        state = Browser.until(lambda: browser.run(ready), "a kernel", 60)
        assert state is True, state
        browser.run(f"jupyterapp.shell.activateById({_BOOK}.id)")

    def run_all(self, wait: bool = True) -> None:
        """Run all cells; without waiting, those that take long go on."""
        self.browser.run(
            "window.ran = null; jupyterapp.commands.execute('notebook:run-all-cells')"
            ".then((done) => { window.ran = done; }, (error) => { window.ran = String(error); })"
        )
        if not wait:
            return
        ran = self.browser.until(
            lambda: self.browser.run("return window.ran === null ? null : [window.ran]"), "the cells", 240
        )
        assert ran == [True], f"{ran}: {self.text()}"
        assert not self.browser.driver.find_elements(
            "css selector", "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type*='stderr']"
        ), self.text()

    def start(self, code: str, name: str = "") -> None:
        """Run this in a new cell at the end. Elements of the cell are below `[data-cell=name]`."""
        self.browser.run(
            f"const book = {_BOOK}.content, [code, name] = arguments; window.ran = null;"
            "(async () => {"
            "  book.activeCellIndex = book.widgets.length - 1;"
            "  await jupyterapp.commands.execute('notebook:insert-cell-below');"
            "  const cell = book.activeCell;"
            "  cell.model.sharedModel.setSource(code);"
            "  cell.node.dataset.cell = name;"
            "  await book.scrollToItem(book.activeCellIndex);"
            "  await jupyterapp.commands.execute('notebook:run-cell');"
            "  return cell.model.outputs.toJSON();"
            "})().then((outputs) => { window.ran = outputs; }, (error) => { window.ran = String(error); })",
            textwrap.dedent(code).strip(),
            name,
        )

    def run(self, code: str, name: str = "", seconds: float = 60) -> str:
        """Run this as `start` does, and give what it prints when it has ended."""
        self.start(code, name)
        outputs = self.browser.until(
            lambda: self.browser.run("return window.ran === null ? null : [window.ran]"), f"the cell\n{code}", seconds
        )[0]
        assert isinstance(outputs, list), outputs
        wrong = [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]
        assert not wrong, wrong
        return "".join("".join(each["text"]) for each in outputs if each["output_type"] == "stream")

    def outputs(self) -> list[tuple[int | None, list[dict[str, Any]]]]:
        """Of each cell how often cells had been run when it was, and what it gave, also where it is not to be seen."""
        found: list[tuple[int | None, list[dict[str, Any]]]] = self.browser.run(
            f"return {_BOOK}.content.widgets.map(({{model}}) => [model.executionCount, model.outputs.toJSON()])"
        )
        return found

    def show(self, number: int) -> str:
        """Scroll to a cell, and give what selects it."""
        self.browser.driver.execute_async_script(
            f"const book = {_BOOK}.content, [number, done] = arguments, {{node}} = book.widgets[number];"
            "node.dataset.cell = number;"
            "const show = () => {"  # a cell beyond the edge is put into the page, and then it has another height
            "  (node.querySelector('.jp-Cell-outputWrapper') ?? node).scrollIntoView();"
            "  requestAnimationFrame(() => requestAnimationFrame(done));"
            "};"
            "book.scrollToItem(number, 'start').then(show, show)",
            number,
        )
        return f"[data-cell='{number}']"

    def text(self) -> str:
        """What stands in the outputs."""
        return str(
            self.browser.run(
                "return [...document.querySelectorAll('.jp-OutputArea-output')].map(e => e.innerText).join('\\n')"
            )
        )

    def says(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        """Wait until this stands in the outputs."""
        found: re.Match[str] = Browser.until(lambda: re.search(pattern, self.text()), pattern, seconds)
        return found

    def close(self) -> None:
        """Leave it, and end its kernel."""
        self.closed = True
        self.browser.driver.execute_async_script(
            f"const cb = arguments[0], c = {_BOOK}.context;c.save().then(() => c.sessionContext.shutdown()).then(cb, cb)"
        )
        self.browser.driver.get("about:blank")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Lab]:
    """A JupyterLab; it ends with the tests."""
    try:
        import jupyterlab  # noqa: F401
    except ModuleNotFoundError:
        _missing("no JupyterLab for tests in a browser: pip install jupyterlab")
    running = Lab(tmp_path_factory.mktemp("lab"))
    yield running
    running.end()


@pytest.fixture(params=["present", "ipykernel 6"])
def kernel(request: pytest.FixtureRequest) -> str:
    """The name of a kernel that notebooks can have: one after the other, that of the environment and ipykernel 6."""
    if request.param == "present":
        return KERNEL
    if KERNEL_6 is None:
        _missing(f"no ipykernel-6.* in {sys.prefix} for tests in a browser: `make test` gets it")
    return KERNEL_6.name


@pytest.fixture
def shared(lab: Lab, browser: Browser) -> Callable[..., Notebook]:
    """A function that opens an empty notebook, by default with the present kernel, which has seen other tests before."""
    return lambda kernel=KERNEL: Notebook(lab, browser, f"shared-{kernel}", [], kernel)


@pytest.fixture
def notebook(lab: Lab, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook of these cells of code, with a kernel of its own."""
    opened: list[Notebook] = []

    def open_it(*cells: str) -> Notebook:
        name = f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower()).strip('-')}-{len(opened)}"
        opened.append(Notebook(lab, browser, name, list(cells)))
        return opened[-1]

    yield open_it
    for book in opened:
        if not book.closed:
            book.close()
