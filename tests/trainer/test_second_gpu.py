"""What works on tensors of a GPU other than the current one does it there, and does not make the host wait in a step.

There need be no GPU: it is simulated by simulated_gpus.py, and kernels are run by the emulator in gpu_emulator, in a process
of its own. The tests say where a wait is meant.
"""

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
from simulated_gpus import SimulatedGpus

import tristep
from tristep.trainer.kvstore.allreduce import AllReduceSync

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a real GPU none is simulated")


RUN = """
import gpu_ranks
import gpu_scenarios
name, *given = arguments
result = getattr(gpu_ranks if name in ("ranks", "owners") else gpu_scenarios, name)(*given)
"""


# Why the host waits after the set-up.
SCENARIOS = {
    "options": [],
    "low_precision": [],
    "host_states": [],
    "loss_scale": [],
    "norms": [],
    "ascent": [],
    "capture": [],
    "products": [],
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


@pytest.mark.sample(1)
@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", tristep.optimizer.registered())
def test_every_optimizer_steps_on_its_tensors_device_and_does_not_wait(name, emulated):
    assert emulated.run(RUN, ["optimizer", name, row_of(name).options]) == []


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


@no_gpu
@pytest.mark.parametrize("ignore_stale_grad", [False, True])
def test_settings_are_compared_late_whether_or_not_gradients_may_be_missing(ignore_stale_grad, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    params = [torch.nn.Parameter(torch.ones(2))]
    sync = AllReduceSync(None, SimpleNamespace(params=params, names=["a"]), None, None, None)
    with SimulatedGpus():
        # Rank 0 sent 1 and 1, the other rank 2 and 4.
        numbers = [torch.tensor(each, pin_memory=True).to("cuda:1", non_blocking=True) for each in ([2.0], [3.0, 5.0])]
        assert sync._counts([True], *numbers, ignore_stale_grad) == [2]
        with pytest.raises(RuntimeError, match="requires_grad or other settings differed between ranks"):
            sync._counts([True], *numbers, ignore_stale_grad)
