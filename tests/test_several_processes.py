"""The script for several processes runs under torchrun, as its first lines say, and says what is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[1] / "tutorials" / "several_processes.py"


def _printed(folder, processes, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--log-dir",
        str(folder),
        "--nproc_per_node",
        str(processes),
        str(SCRIPT),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sample(0)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ((), "2 processes, each updates its share of the weights, gradients sent as they are"),
        (("--replicate", "--compression", "int8"), "2 processes, each updates all weights, gradients sent int8"),
    ],
    ids=["shares", "replicated, int8"],
)
def test_synchronous_processes_learn_and_end_with_the_same_weights(tmp_path, arguments, how):
    lines = _printed(tmp_path, 2, *arguments, "--states", "states").splitlines()
    accuracy = re.fullmatch(r"accuracy on images not trained on: (\d+\.\d)%", lines[1])
    assert lines[0] == how
    assert float(accuracy[1]) > 90
    assert lines[2] == "weights of all processes are the same bits: True"
    assert (tmp_path / "states").stat().st_size > 10_000


@pytest.mark.sample(0)
@pytest.mark.slow
def test_workers_that_do_not_wait_learn_by_a_server(tmp_path):
    lines = _printed(tmp_path, 3, "--store", "dist_async").splitlines()
    assert lines[0] == "2 workers, 1 server"
    assert float(re.fullmatch(r"accuracy on images not trained on: (\d+\.\d)%", lines[1])[1]) > 90
    assert re.fullmatch(r"updates by others between a pull and the push after it: \d+\.\d\d, at most \d+", lines[2])
