"""The fixtures of tests in a real browser: chromium, the page that shows scenes, a JupyterLab and its notebooks.

Without chromium the tests are skipped, or fail where TRISTEP_BROWSER=require. Screenshots are kept in TRISTEP_SCREENSHOTS,
or in a temporary folder, and the end of the run says where. TRISTEP_KERNEL names the kernel of the notebooks, by default
"python3".
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from chromium import NO_CHROMIUM, Browser, chromium_binaries, is_required, skip_or_fail, start
from lab_notebooks import KERNEL, KERNEL_6, Lab, Notebook
from scene_page import Stage

LACKING = [name for name in ("matplotlib", "anywidget", "ipywidgets", "nbformat") if find_spec(name) is None]


def pytest_ignore_collect() -> bool | None:
    return True if LACKING else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LACKING:
        terminalreporter.write_line(f"tests in a browser are left out, as they need {', '.join(LACKING)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent) + os.sep
    ours = [item for item in items if str(item.path).startswith(folder)]
    for item in ours:
        item.add_marker("browser")
    if ours and not chromium_binaries() and not is_required():  # one line that says so, not one for each
        ours[0].add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
        config.hook.pytest_deselected(items=ours[1:])
        items[:] = [item for item in items if item not in ours[1:]]


@pytest.fixture(autouse=True)
def eager_in_quick_tier() -> None:
    """Views take long trainings of few rules, which the loops that tests/viz compiles make shorter."""


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


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser on an empty page, in which nothing may go wrong."""
    chromium.driver.get("about:blank")
    chromium.theme("light")
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


@pytest.fixture
def stage(chromium: Browser, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Where scenes are shown without a notebook, on a page that the test before has had, unless a test has failed."""
    chromium.theme("light")
    chromium.complaints()
    yield Stage(chromium, tmp_path_factory.getbasetemp(), anew=request.session.testsfailed > 0)
    assert chromium.complaints() == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Lab]:
    """A JupyterLab; it ends with the tests."""
    try:
        import jupyterlab  # noqa: F401
    except ModuleNotFoundError:
        skip_or_fail("no JupyterLab for tests in a browser: pip install jupyterlab")
    running = Lab(tmp_path_factory.mktemp("lab"))
    yield running
    running.end()


@pytest.fixture(params=["present", "ipykernel 6"])
def kernel(request: pytest.FixtureRequest) -> str:
    """The name of a kernel that notebooks can have: one after the other, that of the environment and ipykernel 6."""
    if request.param == "present":
        return KERNEL
    if KERNEL_6 is None:
        skip_or_fail(f"no ipykernel-6.* in {sys.prefix} for tests in a browser: `make test` gets it")
    return KERNEL_6.name


@pytest.fixture
def shared(lab: Lab, browser: Browser) -> Callable[..., Notebook]:
    """A function that opens an empty notebook, by default with the present kernel, which has seen other tests before."""
    return lambda kernel=KERNEL, page="doc/tree": Notebook(lab, browser, f"shared-{kernel}", [], kernel, page)


@pytest.fixture
def notebook(lab: Lab, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook of these cells of code, with a kernel of its own."""
    opened: list[Notebook] = []

    def open_it(*cells: str, page: str = "doc/tree") -> Notebook:
        name = f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower()).strip('-')}-{len(opened)}"
        opened.append(Notebook(lab, browser, name, list(cells), page=page))
        return opened[-1]

    yield open_it
    for book in opened:
        if not book.closed:
            book.close()
