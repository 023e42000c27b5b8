"""A fresh interpreter that compiles kernels for GPUs, since here Triton may be set to interpret them: no GPU is needed.

It starts with the first request and serves all tests of a worker. What Triton compiles is kept in its cache, keyed by the
kernel's source and Triton's version, in the folder that tests/conftest.py names.
"""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


class Compiling:
    """Runs scripts in an interpreter without TRITON_INTERPRET. Modules that they import stay imported, names do not."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.path],  # its scripts import what the tests import
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, arguments: Any = None) -> Any:
        """What the script, which finds `arguments` and `usage` under these names, leaves in `result`, as JSON has it.

        Raises:
            AssertionError: the script raised.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([script, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the interpreter that compiles has ended"
        failed, result = json.loads(line)
        assert not failed, result
        return result

    def end(self) -> None:
        self._process.communicate()


def usage(compiled: Any) -> str:
    """The registers and memory that a kernel compiled for NVIDIA uses, as cuobjdump prints them."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path[:] = sys.argv[1:]
    for number, line in enumerate(sys.stdin):
        script, arguments = json.loads(line)
        # Rules in a script have a source, as those in a notebook's cell.
        name = f"<script {number}>"
        linecache.cache[name] = len(script), None, script.splitlines(keepends=True), name
        scope = {"__name__": f"script_{number}", "arguments": arguments, "usage": usage}
        try:
            exec(compile(script, name, "exec"), scope)
            answer = False, scope["result"]
        except BaseException:
            answer = True, traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
