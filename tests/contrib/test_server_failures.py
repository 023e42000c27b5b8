"""The parameter server: different models, lost processes, and whole programs."""

import math
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from server_jobs import SECONDS, pulled_value

from tristep import kvstore, lr_scheduler, optimizer
from tristep.contrib.server.job import Roles
from tristep.contrib.server.transport import Opcode

pytestmark = pytest.mark.sample(0)  # the quick tier runs four tests of servers


def _different_models(store):
    if store.rank:
        with pytest.raises(ValueError, match=r"value of key 'a' is \(3,\), torch.float32; on rank 0 it is \(2,\)"):
            store.init("a", torch.zeros(3))
    else:
        store.init("a", torch.zeros(2))
    store.barrier()
    if store.rank:
        return None
    with pytest.raises(RuntimeError, match="worker 1 has closed its store"):
        store.barrier()
    return "left alone"


def test_workers_must_have_one_model_and_nobody_waits_for_those_who_left(run_job):
    assert run_job(_different_models, 2) == ["left alone", None]


def _errors_wait(store):
    """A worker that goes on pushing what a server refuses holds nobody up, and is told in the end."""
    store.set_optimizer(optimizer.SGD(learning_rate=1.0, momentum=0.5, state_dtype="bfloat16"))
    store.init([1, 2], [torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
    if store.rank == 0:
        store.push(1, torch.zeros(1))
        store.push(2, torch.ones(1, dtype=torch.float64))
        store.push(1, torch.ones(1))
        dist.recv(torch.ones(1), 1)
        with pytest.raises(ValueError, match="torch.float64"):
            store.barrier()
        return pulled_value(store, 1, torch.zeros(1)).item()
    for _ in range(20):
        last = pulled_value(store, 1, torch.zeros(1)).item()
    dist.send(torch.ones(1), 0)
    store.barrier()
    return last


@pytest.mark.sample(1)
def test_a_worker_with_errors_holds_nobody_up(run_job):
    found = run_job(_errors_wait, 2)
    assert found[0] == -1.0
    assert found[1] in (0.0, -1.0)


def _bad_messages(store):
    """What a worker's messages ask for in vain; pushes go on."""
    store.set_optimizer(optimizer.SGD(learning_rate=1.0))
    store.init([1, 2], [torch.zeros(1), torch.zeros(2)])
    push = lambda **changes: (Opcode.PUSH, ([1], changes, None))  # noqa: E731
    bad = [
        (99, None),
        (Opcode.PUSH, "no push"),
        (Opcode.PUSH, ([1, 3], {}, None)),
        (Opcode.OPTIMIZER, no_optimizer),
        (Opcode.OPTIMIZER, 3),
        push(settings={"lr": math.nan}),
        push(settings={"rescale_grad": math.inf}),
        push(settings={"another": 1}),
        push(lr_scheduler=3),
        push(schedules=3),
        push(schedules={"wd": 3}),
        push(multipliers={1: (1.0, -1.0)}),
        push(multipliers={1: 3}),
        (Opcode.PUSH, ([2], {}, None)),  # of another shape
    ]
    for number, (opcode, value) in enumerate(bad if store.rank else (), 9):
        store._client.request(opcode, value, [torch.ones(1)], number=number)
        with pytest.raises((ValueError, TypeError), match="server: ") as caught:
            store._client.finish()
    if store.rank:
        assert r"value of key 2 is (1,), the stored value is (2,)" in str(caught.value)
    store.barrier()
    store.push(1, torch.ones(1))
    store.barrier()
    return pulled_value(store, 1, torch.zeros(1)).item()


@lr_scheduler.register
def no_optimizer(number):
    """A function that is registered, as a schedule."""


def test_messages_that_do_not_fit_are_refused_and_nobody_is_held_up(run_job):
    assert run_job(_bad_messages, 2) == [-2.0, -2.0]


def _hangs(seconds):
    if dist.get_rank() == 2:
        with pytest.raises(TimeoutError, match=r"worker \d has not been heard of for 1 s"):
            kvstore.serve(timeout=seconds)
        for worker in range(2):
            dist.send(torch.ones(1), worker)
        return True
    store = kvstore.create("dist_async", timeout=SECONDS)
    dist.recv(torch.ones(1), 2)
    with pytest.raises(RuntimeError, match=r"the server \(rank 2\) is gone"):
        store.barrier()
    store.close()
    return True


def test_a_server_does_not_wait_forever(processes):
    assert processes(3).run(_hangs, 1) == [True] * 3


def _no_server(name):
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="rank 0 is a worker: of 3 processes the last one serves"):
            kvstore.serve(name)
        return True
    roles = Roles.of_this_job(SECONDS)
    roles.leave()
    return True


def test_a_worker_does_not_serve(processes):
    assert all(processes(3).run(_no_server, "DIST_ASYNC"))


def test_the_environment_is_checked(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="torchrun --nproc_per_node 2"):
        kvstore.create("dist_async")
    with pytest.raises(ValueError, match="did you mean|must be one of"):
        kvstore.create("dist_asink")
    with pytest.raises(ValueError, match="timeout=0"):
        kvstore.create("dist_async", timeout=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="one process is too few for a server and a worker: .* --nproc_per_node 2"):
        kvstore.create("dist_async")
    monkeypatch.setenv("DMLC_NUM_SERVER", "2")
    with pytest.raises(ValueError, match="DMLC_NUM_SERVER='2': one server is supported, .*; set it to 1, or unset it"):
        kvstore.create("dist_async")


# MXNet's variable may be there, and say one.
SETTINGS = {"DMLC_NUM_SERVER": "1", "TRISTEP_ENGINE": "eager", "OMP_NUM_THREADS": "1"}
PROGRAM = """
import os, sys, warnings
warnings.simplefilter("error")
import torch
import torch.distributed as dist
from tristep import kvstore, optimizer

@optimizer.register
class Mine(optimizer.RuleOptimizer):
    rule = optimizer.SGD().rule

if "own" in sys.argv:
    dist.init_process_group("gloo")
store = kvstore.create("dist_async")
weight = torch.zeros(3)
store.set_optimizer(Mine(learning_rate=1.0))
store.init("w", weight)
for _ in range(5):
    store.pushpull("w", torch.ones(3), weight)
store.barrier()
store.pull("w", weight)
os.write(1, f"worker {store.rank} {weight.tolist()}\\n".encode())  # whole, where print may write word by word
if "own" in sys.argv:
    dist.destroy_process_group()
"""

FAULTS = """
import os, sys, warnings
import torch
from tristep import kvstore, optimizer

@optimizer.register
class Adding(optimizer.Optimizer):
    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        if index == "end":
            os._exit(7)
        weight.add_(grad)

store = kvstore.create("dist_async", timeout=30)
store.set_optimizer(Adding())
store.init(["w", "end"], [torch.zeros(1), torch.zeros(1)])
if store.rank == 1:
    os._exit(8)
try:
    store.barrier()
except RuntimeError as error:
    print("barrier:", error)
weight = torch.zeros(1)
store.pushpull("w", torch.ones(1), weight)
print("goes on:", weight.item())
try:
    store.pushpull("end", torch.ones(1), weight)
except RuntimeError as error:
    print("pull:", error)
try:
    store.pull("w", weight)
except RuntimeError as error:
    print("again:", error)
"""


def test_a_program_under_torchrun_ends_cleanly(tmp_path):
    """Every process ends by itself with status 0 and without a warning, even if the program destroys its process groups."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    options = ["--standalone", "--log-dir", str(tmp_path), "--nproc_per_node", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "program.py", "own"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"worker {rank} [-10.0, -10.0, -10.0]" for rank in (0, 1))]
    assert "Warning" not in done.stderr
    assert "terminate" not in done.stderr


def test_a_program_without_a_process_group_gets_one(tmp_path):
    codes, outputs, errors = _started(tmp_path, PROGRAM)
    assert codes == [0, 0, 0], errors
    assert outputs == ["worker 0 [-10.0, -10.0, -10.0]\n", "worker 1 [-10.0, -10.0, -10.0]\n", ""]
    assert errors == ["", "", ""]


def test_a_lost_worker_and_a_lost_server_are_noticed(tmp_path):
    """The others go on without a worker, but cannot wait for it; without a server there is an error that says so."""
    codes, outputs, errors = _started(tmp_path, FAULTS)
    assert codes == [0, 8, 7], errors
    lines = outputs[0].splitlines()
    assert [line.split(":")[0] for line in lines] == ["barrier", "goes on", "pull", "again"]
    assert "worker 1 is gone" in lines[0]
    assert lines[1] == "goes on: 1.0"
    assert "the server (rank 2) is gone" in lines[2]
    assert "the server (rank 2) is gone" in lines[3]


def _started(folder, program):
    """Exit statuses, outputs and errors of two workers and a server that run this program."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "3"}
    (folder / "program.py").write_text(program, encoding="utf-8")
    command, given = [sys.executable, "program.py"], os.environ | SETTINGS | address
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, cwd=folder, env=given | {"RANK": str(rank)}, **pipes) for rank in range(3)]
    try:
        texts = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    outputs, errors = zip(*texts, strict=True)
    return [process.returncode for process in running], list(outputs), list(errors)


def test_the_time_limit_of_a_store_by_name(monkeypatch):
    asked = []
    monkeypatch.setattr(kvstore.ServerStore, "open", lambda *arguments: asked.append(arguments))
    kvstore.create("dist_async")
    kvstore.create("Dist_Device_Async", timeout=300)
    assert asked == [("dist_async", None), ("dist_device_async", 300)]
    for name in ("device", "dist_sync", "teststore"):
        with pytest.raises(ValueError, match="timeout=300 with name=.*: only stores such as 'dist_async' take it"):
            kvstore.create(name, timeout=300)
