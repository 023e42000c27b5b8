"""`python -m tristep cost`: what it prints, and that the documents show that."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tristep
from tristep.__main__ import main

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test

ROOT = Path(__file__).parents[2]


@pytest.mark.sample(1)
def test_the_page_shows_what_it_prints(capsys):
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?ms)^```text\n\$ python -m tristep (.+?)(?: \| head -n (\d+))?\n(.*?)^```$", text)
    assert shown
    for arguments, lines, expected in shown:
        assert main(arguments.split()) == 0
        printed = capsys.readouterr().out.splitlines(keepends=True)
        assert "".join(printed[: int(lines)] if lines else printed) == expected


def test_it_says_that_nothing_was_measured_and_what_was_assumed(capsys):
    assert main(["cost", "--params", "8e9", "--gpus", "64", "--link", "12.5,30us"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "By a model, with nominal figures, none measured."
    assert second.startswith("8,000,000,000 parameters on 64 GPUs over 12.5,30us: 12.5 GB/s, 30 us a message.")


def test_json_has_the_rows_of_estimate_cost(capsys):
    given = "--params 1e6 --gpus 16 --link ib400 --memory 2000 --optimizer lion --state 8bit --weights bf16 --master split8"
    assert main(["cost", *given.split(), "--gpus-per-node", "8", "--json"]) == 0
    found, params = json.loads(capsys.readouterr().out), {"state_dtype": "8bit", "multi_precision": "split8"}
    others = {"weights": "bfloat16", "gpus_per_node": 8, "memory": 2000.0}
    rows = tristep.estimate_cost(1e6, 16, "ib400", optimizer="lion", optimizer_params=params, **others)
    assert found["link"]["measured"] is False
    names = ("name", "wire", "states", "memory", "step")
    assert [[row[name] for name in names] for row in found["strategies"]] == [
        [getattr(row, n) for n in names] for row in rows
    ]


def test_rows_of_compression_are_of_the_all_reduce_or_of_sharded_updates(capsys):
    for option, update in (([], False), (["--update-on-kvstore"], True)):
        assert main([*["cost", "--params", "1e6", "--gpus", "4", "--link", "eth100", "--json"], *option]) == 0
        *_, last = json.loads(capsys.readouterr().out)["strategies"]
        expected = f"kvstore='dist_sync', update_on_kvstore={update}, compression_params={{'type': 'powersgd', 'rank': 4}}"
        assert last["kvstore"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--link nvlink", "--params"),
        ("--params 1e6 --gpus 2", "--link --measure is required"),
        ("--params 1e6 --link nvlink", "--gpus is missing"),
        ("--params 1e6 --gpus 2 --link nvlnk", "Did you mean 'nvlink'?"),
        ("--params 1e6 --gpus 2 --link ib400 --measure", "not allowed with"),
        ("--params 1e6 --gpus 2 --link ib400 --optimizer adamm", "adamm"),
        ("--params 1e6 --gpus 2 --link ib400 --state 2bit", "state_dtype='2bit'"),
        ("--params 1e6 --gpus 2 --link ib400 --memory h1", "memory='h1'"),
        ("--params 1e6 --measure", "--measure needs several processes: torchrun"),
        ("--params 1e6 --measure --gpus-per-node 2", "leave one of them out"),
    ],
)
def test_wrong_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["cost", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_it_measures_the_link_of_a_torchrun_job(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--log-dir", str(tmp_path), "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, *["-m", "tristep", "cost", "--params", "1e6", "--measure", "--json"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one of the two prints
    assert found["gpus"] == 2
    assert found["link"]["measured"] is True
    assert found["link"]["bandwidth"] > 0


def test_it_ends_without_words_where_nobody_reads_on():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tristep", "cost", "--params", "1e6", "--gpus", "2", "--link", "ib400"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
