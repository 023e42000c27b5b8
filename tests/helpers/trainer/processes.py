"""Several processes that share a gloo group, for tests: each runs the same function of the test's file, as rank 0, 1, ...

Processes are started once for a number of ranks and a pytest worker, and kept. After a failure all of them are ended and the
next test gets new ones, since some may wait for a collective that will never come. They are forks of one that has imported
torch and tristep, which takes seconds, and has done nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from functools import cache
from multiprocessing.connection import Client, Listener, wait
from typing import Any

SECONDS = 60  # that a rank waits for the others, and the test for the ranks' answers


class Forks:
    """A process that has imported what takes long, and forks on request."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, *sys.path]  # they import what the tests import
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *arguments: object) -> int:
        """The number of a new process that serves as a rank, with the arguments of `_serve`."""
        return self._ask("start", *arguments)

    def kill(self, process: int) -> None:
        """End one of them, and wait for that."""
        self._ask("kill", process)

    def _ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """No more forks."""
        self._process.communicate()


class Processes:
    """`ranks` processes with a process group of torch.distributed over gloo on loopback."""

    def __init__(self, ranks: int, forks: Forks) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        key = secrets.token_bytes(16)
        self._members: list[Any] = []
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            self._forks = forks
            processes = [forks.start(rank, ranks, port, listener.address[1], key.hex()) for rank in range(ranks)]
            pipes = {}
            for _ in range(ranks):
                pipe = listener.accept()
                pipes[pipe.recv()] = pipe
        self._members = [(process, pipes[rank]) for rank, process in enumerate(processes)]

    def run(self, function: Any, *args: Any) -> list[Any]:
        """What `function(*args)`, a function at the top level of a test's file, returns on each rank.

        The engine that the environment names here is that of the ranks.

        Raises:
            RuntimeError: it raised on some rank; all processes are ended then.
        """
        for _, pipe in self._members:
            pipe.send((function.__code__.co_filename, function.__name__, args, os.environ.get("TRISTEP_ENGINE", "")))
        answers: dict[int, Any] = {}
        pipes: Any = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        while len(answers) < len(pipes):
            ready = wait([pipe for pipe, rank in pipes.items() if rank not in answers], timeout=2 * SECONDS)
            if not ready:
                self.end()
                raise RuntimeError(f"only ranks {sorted(answers)} of {len(pipes)} answered within {2 * SECONDS} s")
            for pipe in ready:
                try:
                    failed, answers[pipes[pipe]] = pipe.recv()
                except EOFError:
                    failed, answers[pipes[pipe]] = True, "the process ended"
                if failed:
                    rank = pipes[pipe]
                    self.end()
                    raise RuntimeError(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in range(len(pipes))]

    def end(self) -> None:
        """End the processes. `run` is not to be called after that."""
        for process, pipe in self._members:
            self._forks.kill(process)
            pipe.close()
        self._members = []

    @property
    def alive(self) -> bool:
        """Whether the processes are there."""
        return bool(self._members)


def _serve(rank: int, ranks: int, port: int, address: int, key: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    warnings.simplefilter("error")
    pipe = Client(("127.0.0.1", address), authkey=bytes.fromhex(key))
    pipe.send(rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    while True:
        try:
            path, name, args, os.environ["TRISTEP_ENGINE"] = pipe.recv()
        except EOFError:  # the test's process is gone
            return
        try:
            answer = False, getattr(module_at(path), name)(*args)
        except BaseException:
            answer = True, traceback.format_exc()
        pipe.send(answer)


@cache
def module_at(path: str) -> Any:
    """The module of a test's file."""
    name = "test_in_process_" + os.path.basename(path)[:-3]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _fork() -> None:
    """Fork, or end a fork, for each line of the input."""
    sys.path[:] = sys.argv[1:]
    import pytest  # noqa: F401
    import torch._dynamo  # by torch.optim
    import torch.distributed.fsdp  # noqa: F401

    import tristep.trainer  # noqa: F401

    if importlib.util.find_spec("numba") is not None:
        import numba

        from tristep.kernels.backends.cpu import launch  # noqa: F401

        numba.njit(lambda: 0)()  # imports what compiling takes
    for line in sys.stdin:
        what, *numbers, last = line.split()
        if what == "kill":
            process = int(last)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        elif not (process := os.fork()):
            null = os.open(os.devnull, os.O_RDWR)
            for place, standard in ((null, 0), (2, 1)):  # the pipes to and from the test's process are not a rank's
                os.dup2(place, standard)
            _serve(*map(int, numbers), last)  # type: ignore[arg-type]
            return
        print(process, flush=True)


if __name__ == "__main__":
    _fork()
