"""Each line of code in docs/choosing.md runs, and each figure there is computed from a file of benchmarks/results."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch

import tristep

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
LINES = {
    title: re.findall(r"^\| (?!you).+? \| `([^`]+)`[^|]* \| .+ \|$", text, re.MULTILINE)
    for title, text in re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}
RUN = """
import torch, tristep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("gloo", init_method={where!r}, rank=0, world_size=1)
init_device_mesh("cpu", (1,))
for line in {lines!r}:
    net = nn.Linear(4, 2)
    ddp = nn.parallel.DistributedDataParallel(net)
    *first, last = line.split("; ")
    for each in first:
        exec(each)
    model = ddp if line == "kvstore=None" else net
    made = eval(last) if "(" in last else eval(f'tristep.Trainer(model, "adamw", {{last}})')
    before = [parameter.detach().clone() for parameter in net.parameters()]
    model(torch.ones(3, 4)).square().mean().backward()
    made.step(1) if isinstance(made, tristep.Trainer) else made.step()
    assert all((old != new).any() for old, new in zip(before, net.parameters())), line
torch.distributed.destroy_process_group()
"""


def made(arguments, dtype=torch.float32):
    """A trainer of a small network with these arguments, after a step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.embed, net.blocks, net.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    net.to(dtype)
    trainer = eval(f"tristep.Trainer(net, {arguments})", {"tristep": tristep, "net": net})
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net(torch.arange(8)).square().sum().backward()
    trainer.step(1)
    changed = [(old != new).any() for old, new in zip(before, net.parameters(), strict=True)]
    assert all(changed[1:])
    return trainer


def test_there_are_three_tables():
    assert {title: len(lines) for title, lines in LINES.items()} == {"Optimizer": 7, "Precision": 4, "Store": 4}


@pytest.mark.parametrize("line", [*LINES["Optimizer"], re.search(r"Trainer\(net, (.+)\)\n```", PAGE)[1]])
def test_the_optimizers_can_be_made(line):
    made(line)


@pytest.mark.parametrize("line", LINES["Precision"])
def test_the_precisions_are_arguments_of_optimizers(line):
    if line.startswith("tristep.amp"):
        trainer = made('"adamw"')
        exec(line, {"tristep": tristep, "trainer": trainer})
        return
    dtype = torch.bfloat16 if "multi" in line or "stochastic" in line else torch.float32
    made(f'"adamw", {{"learning_rate": 0.1, **{line}}}', dtype)


def test_the_stores_take_a_step(tmp_path):
    """In one process of a group; tests/trainer compares several."""
    script = RUN.format(where=(tmp_path / "group").as_uri(), lines=LINES["Store"])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def read(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def sentences():
    """Those with figures, as the files give them."""
    muon, adamw = (read("muon_quality_cpu")["found"][name] for name in ("Muon", "AdamW"))
    ends = [mean(each["equal steps"]["losses"]) for each in (muon, adamw)]
    yield f"ends at a loss of {ends[0]:.2f}, with AdamW at {ends[1]:.2f}, after as many steps"
    yield f"a step takes {muon['ms']['whole'] / adamw['ms']['whole']:.1f} times as long"
    yield f"after the time of AdamW's run it is at {mean(muon['equal time']['losses']):.2f}"
    stored = [read(name)["stored"]["found"] for name in ("gpu_h200", "cpu")]
    ratios = [found["float32, states 8-bit"]["us"] / found["float32"]["us"] for found in stored]
    yield f"on an H200 {ratios[0]:.2f} of the time, on a CPU {ratios[1]:.1f} times"
    quality = read("quality_cpu")
    tasks = [quality[task] for task in ("digits", "text", "sources")]
    above = {name: [100 * (task[name]["ratio"] - 1) for task in tasks] for name in tasks[0]}
    yield f"three small trainings ended at most {max(above['8-bit states']):.1f} % above float32's loss"
    yield f"at most {max(above['24-bit weights, 8-bit states']):.1f} % above"
    nearest = above["bfloat16, nearest"]
    yield f"at most {max(above['bfloat16, stochastic']):.1f} % above, where rounding to the nearest"
    yield f"ends {min(nearest):.1f} to {max(nearest):.1f} % above"
    sent = read("distributed_cpu")
    assert all(sent[net]["sharded"]["bytes_over_ring"] < 1.002 for net in ("mlp", "transformer"))
    yield f"sends {mean(sent[net]['torch ZeRO']['bytes_over_ring'] for net in ('mlp', 'transformer')):.1f} times as much"
    accuracy = read("compression_quality_cpu")["digits, adamw"]["accuracy"]
    yield f"accuracy on digits {100 * accuracy['int8']:.1f} %, and {100 * accuracy['uncompressed']:.1f} % without"
    # What docs/optimizers.md has in its table: what is kept for each element.
    yield "2.1 bytes for an element's states, in float32 8; "
    yield "3.1 bytes instead of 12 with float32 masters"


def test_figures_are_computed_from_the_files():
    text = " ".join(re.sub(r"`[^`]+`", "", re.sub(r"```.+?```", "", PAGE, flags=re.DOTALL)).split())
    for sentence in sentences():
        assert sentence in text
        text = text.replace(sentence, "", 1)
    assert re.findall(r"\d+\.\d+|\d+ (?:%|µs|ms|s|MB)(?!\w)", text) == []


def test_kept_bytes_are_those_of_the_table():
    table = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    for row in (
        "| float32 | none | 28 | 8 |",
        '| float32 | `state_dtype="8bit"` | 16.1 | 2.1 |',
        "| bfloat16 | `multi_precision=True` | 28 | 12 |",
        '| bfloat16 | `stochastic_rounding=True, state_dtype="bfloat16"` | 14 | 4 |',
    ):
        assert row in table
    assert re.search(r'"split8"` \| 24 \| 9 \|\n.+ the same with `state_dtype="8bit"` \| 12.1 \| 3.1 \|', table)
