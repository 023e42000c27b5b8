"""Servers of notebooks on loopback, for tests in a browser."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from chromium import Browser

FOLDERS = {
    "HOME": "home",
    "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CONFIG_HOME": "config",
}


class Server:
    """A server with all that it keeps in a folder of its own.

    Args:
        root: the folder. Variables of the environment that are named in FOLDERS are folders in it.
        command: arguments of Python, with spaces between them; "{port}" is where it listens.
        status: the path of an address that answers as soon as it is there.

    Attributes:
        url: its address, without a slash at the end.
    """

    def __init__(self, root: Path, command: str, status: str) -> None:
        self.root, self._status = root, status
        environment = os.environ | {name: str(root / folder) for name, folder in FOLDERS.items()}
        environment["MARIMO_SKIP_UPDATE_CHECK"] = "1"
        environment.pop("MPLBACKEND", None)
        if "PYTHONPATH" in environment:  # so that kernels import what the tests import
            environment["PYTHONPATH"] = resolved(environment["PYTHONPATH"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = root / "server.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command.format(port=port).split()],
                env=environment,
                cwd=root,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        Browser.until(self._answers, f"{command}; see {self._log}", 60)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(self.url + self._status, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def resolved(paths: str) -> str:
    """Of PYTHONPATH, for processes that run in another folder."""
    return os.pathsep.join(str(Path(path).resolve()) for path in paths.split(os.pathsep) if path)
