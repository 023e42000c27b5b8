"""Debian's chromium without a window, for tests: it runs scripts, moves the mouse and reads pixels and the console."""

import base64
import hashlib
import io
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

NO_CHROMIUM = "no chromium for tests in a browser; on Debian: apt-get install chromium chromium-driver"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --hide-scrollbars "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-device-scale-factor=1 --window-size=1400,1100"
)


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

    def find_deep(self, selector: str, field: str = "") -> list[Any]:
        """All elements, or this field of them, that there are by now, also in shadow roots, where marimo has its widgets."""
        return list(
            self.run(
                "const [selector, field] = arguments, all = (root) => [...root.querySelectorAll(selector),"
                " ...[...root.querySelectorAll('*')].flatMap((each) => each.shadowRoot ? all(each.shadowRoot) : [])];"
                "return all(document).map((each) => field ? each[field] : each)",
                selector,
                field,
            )
        )

    def keys(self, element: Any, *keys: str) -> None:
        self.run("arguments[0].focus({preventScroll: true})", element)
        element.send_keys(*keys)

    def pixels(self, selector: Any = ".tristep-picture canvas") -> np.ndarray:
        """uint8 [height, width, 3] of a canvas, or the first that is selected, after what is to be drawn has been drawn."""
        from PIL import Image

        url = self.driver.execute_async_script(
            "const [canvas, done] = arguments;"
            "const find = () => typeof canvas === 'string' ? document.querySelector(canvas) : canvas;"
            "const look = () => done(find().toDataURL());"
            "requestAnimationFrame(() => requestAnimationFrame(look))",
            selector,
        )
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).convert("RGB"))

    def digest(self, selector: Any = ".tristep-picture canvas") -> str:
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
        ink = (self.pixels(selector) == rgb(quiet)).all(axis=2)
        high = ink.sum(axis=0)
        column = int(np.argmax(high > 0.95 * high.max()))  # of a panel whose circles are round the line may be shorter
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
        # Voilà's page sends the second when it is left, and is refused at any time after that.
        harmless = "favicon", "/voila/api/shutdown/"
        found = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
        return [message for message in found if not any(each in message for each in harmless)]


def start(profile: Path, shots: Path | None = None) -> Browser:
    """A chromium with this folder for its profile; without one the test is skipped, or fails, and says how to get it."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError:
        skip_or_fail("no selenium for tests in a browser: pip install selenium")
    found = chromium_binaries()
    if not found:
        skip_or_fail(NO_CHROMIUM)
    binary, driver = found
    options = webdriver.ChromeOptions()
    options.binary_location = binary  # else selenium would look for one to download
    for flag in [*_FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    running.set_script_timeout(100)
    return Browser(running, shots or profile)


def chromium_binaries() -> list[str]:
    """Chromium and its driver, or nothing."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    return [path for path in found if path] if all(found) else []


def is_required() -> bool:
    return os.environ.get("TRISTEP_BROWSER") == "require"


def skip_or_fail(what: str) -> NoReturn:
    if is_required():
        pytest.fail(what)
    pytest.skip(what)


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.uint8)
