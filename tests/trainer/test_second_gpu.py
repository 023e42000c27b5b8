"""What works on tensors of a GPU other than the current one does it there, and does not make the host wait in a step.

There need be no GPU: it is simulated by simulated_gpus.py, and kernels are run by the emulator in gpu_emulator, in a process
of its own. The tests say where a wait is meant.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_smoke
import pytest
import torch
import torch.distributed as dist
from optimizer_table import row_of
from simulated_gpus import SimulatedGpus, WrongDevice

import tristep
from tristep.trainer.kvstore.allreduce import AllReduceSync

SECOND = "cuda:1"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a real GPU none is simulated")


# What the simulation notices.

WRONG = {
    "an event on the current device": (lambda x: torch.cuda.Event().record(), "an event on cuda:0"),
    "a stream": (lambda x: torch.cuda.Stream(), "a stream on cuda:0"),
    "a graph": (lambda x: torch.cuda.CUDAGraph(), "a graph that is made on cuda:0"),
    "memory on the current device": (lambda x: torch.empty(3, device="cuda"), "an allocation by torch.empty on cuda:0"),
    "memory on a third device": (lambda x: x.new_zeros(3, device="cuda:2"), "on cuda:2"),
    "the CPU's memory in an operation": (lambda x: x + torch.ones(3), "one of \\(3,\\) on the CPU"),
    "a copy to the host": (lambda x: x.cpu(), "waits: to\\(\\)"),
    "a copy to memory that is not pinned": (lambda x: torch.empty(3).copy_(x, non_blocking=True), "waits: copy_"),
    "a copy from the host": (lambda x: torch.ones(3).to(SECOND), "waits: to\\(\\)"),
    "a copy from memory that is not pinned": (lambda x: x.copy_(torch.ones(3), non_blocking=True), "waits: copy_"),
    "a copy from pinned memory that waits": (lambda x: x.copy_(torch.ones(3, pin_memory=True)), "waits: copy_"),
    "a value from the host": (lambda x: torch.tensor([1.0], device=SECOND), "waits: torch.tensor"),
    "item": (lambda x: x.sum().item(), "waits: _local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "waits: tolist"),
    "a condition": (lambda x: bool(x.sum() > 0), "waits: _local_scalar_dense"),
    "a mask as an index": (lambda x: x[x > 0], "waits: index"),
    "a synchronisation": (lambda x: torch.cuda.synchronize(SECOND), "waits: torch.cuda.synchronize"),
}


@no_gpu
@pytest.mark.parametrize("what", WRONG)
def test_what_is_done_elsewhere_or_waited_for_is_noticed(what):
    work, words = WRONG[what]
    gpus = SimulatedGpus()
    with gpus:
        x = torch.ones(3, device=SECOND)
        with pytest.raises(WrongDevice, match=words):
            work(x)
        assert len(gpus.found) == 1
        gpus.found.clear()


@no_gpu
def test_what_is_caught_is_reported_at_the_end():
    gpus = SimulatedGpus()
    gpus.__enter__()
    with contextlib.suppress(AssertionError):
        torch.cuda.Event().record()
    with pytest.raises(WrongDevice, match="an event on cuda:0"):
        gpus.__exit__(None, None, None)


@no_gpu
def test_what_is_right_is_not_noticed():
    with SimulatedGpus() as gpus:
        x = torch.ones(3, pin_memory=True).to(SECOND, non_blocking=True)
        host = torch.empty(3, pin_memory=True).copy_(x * 2, non_blocking=True)
        with torch.cuda.device(SECOND):
            torch.cuda.Event().record()
            torch.cuda.CUDAGraph()
        assert torch.cuda.current_device() == 0
        assert host.tolist() == [2.0, 2.0, 2.0]
        assert (x.device, x.sum().device, x.is_cuda, host.is_cuda) == (
            torch.device(SECOND),
            torch.device(SECOND),
            True,
            False,
        )
        assert gpus.waits_for == []
        with gpus.waits("the result is wanted"):
            assert x.sum().item() == 3.0
        assert gpus.waits_for == ["the result is wanted"]


# The product.

RUN = """
import gpu_ranks
import gpu_scenarios
name, *given = arguments
result = getattr(gpu_ranks if name in ("ranks", "owners") else gpu_scenarios, name)(*given)
"""

PLANTED = """
from unittest import mock
import torch
import gpu_ranks
import gpu_scenarios
from tristep.kernels import guards, streams

planted = [
    (streams, "staged", lambda tensor, device: tensor, gpu_scenarios.norms),
    (streams, "record_event", lambda device: torch.cuda.current_stream().record_event(), gpu_scenarios.recorders),
    (streams, "on_device", lambda device: torch.cuda.device(0), gpu_scenarios.norms),
    (guards, "increment_version", lambda tensors: None, gpu_ranks.ranks),
]
result = {}
for module, name, function, scenario in planted:
    try:
        with mock.patch.object(module, name, function):
            scenario()
        result[name] = "nothing"
    except BaseException as error:
        result[name] = str(error)
"""


# Why the host waits after the set-up.
SCENARIOS = {
    "options": [],
    "low_precision": [],
    "loss_scale": [],
    "norms": [],
    "ascent": [],
    "capture": [],
    "in_backward": [],
    "recorders": [],
    "ensemble": [],
    "replicas": ["the store 'local' adds up on the CPU"] * 2,
    "sparse": ["how many rows there are is found out by coalesce(), in each step"],
    "ranks": ["weights that are used by one rank alone, of which all ranks have to know"],
    "owners": [],
}


QUICK = ("norms", "sparse")
NAMES = [each if each in QUICK else pytest.param(each, marks=pytest.mark.sample(0)) for each in SCENARIOS]


@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_done_on_the_tensors_device_and_do_not_wait(name, emulated):
    assert emulated.run(RUN, [name]) == SCENARIOS[name]


@pytest.mark.sample(2)
@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", tristep.optimizer.registered())
def test_every_optimizer_steps_on_its_tensors_device_and_does_not_wait(name, emulated):
    assert emulated.run(RUN, ["optimizer", name, row_of(name).options]) == []


@no_gpu
@pytest.mark.slow
def test_defects_that_are_planted_are_noticed(emulated):
    found = emulated.run(PLANTED)
    assert "the host waits: copy_ of (2, 5) from the CPU" in found["staged"]
    assert "an event on cuda:0" in found["record_event"]
    assert "a kernel is launched on cuda:0 with a tensor on cuda:1" in found["on_device"]
    assert "the host waits: tolist() of a tensor on cuda:1" in found["increment_version"]


@pytest.mark.sample(0)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_script_for_several_gpus_passes_over_gloo(ranks, tmp_path):
    out, script = tmp_path / "found.json", Path(gpu_smoke.__file__).with_name("gpu_multi.py")
    command = [sys.executable, script, "--cpu", "--ranks", str(ranks), "--out", out]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(out.read_text())
    assert (found["ranks"], found["backend"]) == (ranks, "gloo")
    assert list(found["parts"]) == ["equal", "unequal", "capture", "overlap", "bytes"]


@pytest.mark.parametrize(("late", "missing"), [([2.0, 0.0, 2.0], None), ([2.0, 0.0, 1.0], "'c'")])
def test_late_counts_tell_of_missing_gradients_of_what_is_trained(late, missing, monkeypatch):
    parameters = [torch.nn.Parameter(torch.ones(2), requires_grad=trained) for trained in (True, False, True)]
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    sync = AllReduceSync(None, SimpleNamespace(params=parameters, names=["a", "b", "c"]), None, None, None)
    sync._late = (
        torch.tensor(late + [0.0] * 4),
        SimpleNamespace(synchronize=lambda: None),
        torch.tensor([True, False, True]),
    )
    counts, sums = torch.tensor([2.0, 2.0, 2.0]), torch.zeros(4)

    def step():
        return sync._counts([True, False, True], counts, sums, False)

    if missing is None:
        assert step() == [2, 2, 2]
    else:
        with pytest.raises(RuntimeError, match=f"another rank had no fresh gradient for {missing}, so "):
            step()
