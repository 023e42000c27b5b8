"""Measured figures are computed from benchmarks/results: README's, and those that docs/gpu.md says GPUs have shown."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README, GPU = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/gpu.md"))
SHOWN = GPU[GPU.index("## What two GPUs have shown") : GPU.index("## What has been tried")]
NOT_RECORDED = "not recorded"


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


CPU, H100, H200, H200_8BCBF44, TURNS = map(read, ("cpu", "gpu_h100", "gpu_h200", "gpu_h200_8bcbf44", "gpu_packed_turns"))

# The tables: the labels of their rows, and the rows of the files that these mean.
README_CPU = {
    "6 tensors of a small network": "6 tensors of an MLP",
    "148 tensors of 8 elements": "148 x 8",
    "10,000 tensors of 64": "10,000 x 64",
    "100 tensors of 100,000": "100 x 100,000",
    "ResNet-50, 161 tensors": "ResNet-50, 161 tensors",
    "one of 16.8 million": "1 x 16.8 M",
}
README_GPU = {
    "1,000 tensors of 1,024": "1,000 x 1,024",
    "ResNet-50, 161 tensors": "ResNet-50, 161 tensors",
    "GPT-2 124M, 148 tensors": "GPT-2 124M, 148 tensors",
    "one of 10^9": "1 x 1e9",
}
STEPS = {  # and whether the GPU is what takes long
    "148 x 8": ("148 x 8", False),
    "1,000 x 1,024": ("1,000 x 1,024", False),
    "10,000 x 64": ("10,000 x 64", False),
    "ResNet-50, 161 tensors": ("ResNet-50, 161 tensors", True),
    "GPT-2 124M, 148 tensors": ("GPT-2 124M, 148 tensors", True),
    "an eighth of Llama 3 8B, 291 tensors": ("Llama 3 8B / 8, 291 tensors", True),
    "1 x 10^9": ("1 x 1e9", True),
}
STORED = {
    ("float32", "float32"): "float32",
    ("float32", "bfloat16"): "float32, states bf16",
    ("float32", "8-bit"): "float32, states 8-bit",
    ("bfloat16", "bfloat16"): "bf16, states bf16",
    ("bfloat16", "bfloat16, stochastic"): "the same, stochastic",
    ("bfloat16, split master", "float32"): "bf16 and remainder",
    ("bfloat16, 24-bit master", "8-bit, stochastic"): "bf16 and 8 bits, states 8-bit",
    ("bfloat16, 24-bit master", "4-bit, stochastic"): "bf16 and 8 bits, states 4-bit",
    ("bfloat16", "8-bit, stochastic"): "bf16, states 8-bit, stochastic",
    ("bfloat16", "4-bit, stochastic"): "bf16, states 4-bit, stochastic",
    ("float32, torch fused", "float32"): "torch fused",
}
OURS, FUSED = "`Trainer`", "torch fused"
RATIOS = (  # label, what over what, part, row, and their names in the file
    ("new gradients at every step, 148 x 8", f"{FUSED} / {OURS}", "new", "148 x 8", FUSED, "tristep"),
    ("new gradients at every step, 1,000 x 1,024", f"{FUSED} / {OURS}", "new", "1,000 x 1,024", FUSED, "tristep"),
    ("new gradients at every step, 10,000 x 64", f"{FUSED} / {OURS}", "new", "10,000 x 64", FUSED, "tristep"),
    (
        "unscaling, looking for overflows, clipping, AdamW and an average of the weights, 1 x 10^9",
        f"torch's functions / {OURS}",
        "folded",
        "1 x 1e9",
        "torch",
        "tristep",
    ),
    ("training an MLP of 20 layers", "steps / steps in a CUDA graph", "graph", "MLP", "tristep", "tristep, graph"),
    ("telemetry, 148 x 8", "with it / without it", "telemetry", "148 x 8", "with telemetry", "tristep"),
    ("codes `2bit` of 2^28 gradients", "torch's operations / tristep", "compression", "2bit", "torch", "tristep"),
    ("codes `1bit` of 2^28 gradients", "torch's operations / tristep", "compression", "1bit", "torch", "tristep"),
    ("the first step of 3,000 tensors", f"{OURS} / {FUSED}", "changes", "first step", "Trainer", FUSED),
    ("the step of 3,000 tensors after loading", f"{OURS} / {FUSED}", "changes", "after loading", "Trainer", FUSED),
    ("every other gradient missing, by turns", f"{OURS} / {FUSED}", "changes", "gradients by turns", "Trainer", FUSED),
    ("200 optimizers of a tensor each", f"{OURS} / {FUSED}", "changes", "an optimizer each", "Trainer", FUSED),
)


def two_digits(number):
    """At least two."""
    return f"{number:,.{max(0, 1 - math.floor(math.log10(number)))}f}"


def readme_rows(labels, file, default, unit):
    for label, row in labels.items():
        us = file["steps"]["found"][row]["us"]
        times = [us[name] for name in ("tristep", "tristep.optim", "torch fused", default)]
        in_ms = unit == "ms" or times[0] >= 1000
        yield [label, *(f"{two_digits(time / 1000)} ms" if in_ms else f"{time:,.0f} µs" for time in times)]


def step_rows():
    for label, (row, waits_for_gpu) in STEPS.items():
        cells = [label]
        for file in (H200, H100):
            step, clipped = (file[part]["found"][row] for part in ("steps", "clip"))
            cells += [f"{step['us']['tristep']:,.0f}", f"{step['torch fused / tristep']:.2f}"]
            cells += [f"{step['of copy']:.2f}" if waits_for_gpu else "", f"{clipped['torch fused / tristep']:.2f}"]
        yield cells


def ratio_rows():
    for label, ratio, part, row, over, under in RATIOS:
        cells = [label, ratio]
        for file in (H200_8BCBF44 if row == "after loading" else H200, H100):  # one whose clock and commit are known
            us = file.get(part, {"found": {}})["found"].get(row, {}).get("us")
            cells.append(f"{us[over] / us[under]:.2f}" if us else "")
        yield cells


def stored_rows():
    for label, row in STORED.items():
        found = [file["stored"]["found"][row] for file in (H200, H100)]
        yield [*label, f"{found[0]['bytes an element']:.1f}", *(f"{each['of copy']:.2f}" for each in found)]


def packed_rows():
    for row, versions in TURNS["rows"].items():
        turns = versions["new"]["turns"]
        yield [row.removeprefix("AdamW, "), f"{statistics.median(turns):,.0f} ({min(turns):,.0f})"]


def file_rows():
    """What each file says of its runs; parts of which it says the same share a row."""
    for path in sorted(RESULTS.glob("gpu_h*.json")):
        in_name = re.search(r"_([0-9a-f]{7})$", path.stem)
        rows = {}
        for part, said in read(path.stem).items():
            if part != "machine":
                commit = said.get("commit") or (in_name and in_name[1])
                rows.setdefault((*conditions_of(said), commit or NOT_RECORDED), []).append(f"`{part}`")
        yield from ([f"`{path.name}`", ", ".join(parts), *cells] for cells, parts in rows.items())
    runs = [{"found": {"": run}, **run} for versions in TURNS["rows"].values() for run in versions.values()]
    (cells,) = {conditions_of(run) for run in runs}
    yield ["`gpu_packed_turns.json`", "", *cells, f"{', '.join(TURNS['old'])}, newest {TURNS.get('new') or NOT_RECORDED}"]


def conditions_of(part):
    """GPU, clock, hashes of kernels, and elements of a program, as the part of a file has them."""
    conditions = part.get("conditions", {})
    machine = part.get("machine") or "{gpu}, torch {torch}, triton {triton}".format(**conditions)
    assert "torch 2.11.0" in machine  # as both pages say
    assert "triton 3.6.0" in machine
    kernels = part.get("kernels", [])
    assert all(len(kernel["sha256"]) == 64 for kernel in kernels)
    rows = part["found"].values()
    tiles = {row.get("tile") for row in rows if isinstance(row, dict)} - {None}
    clock = conditions.get("SM clock, MHz")
    return (
        machine.split(",")[0].removeprefix("NVIDIA "),
        f"{clock:,}" if clock else NOT_RECORDED,
        "recorded" if kernels else NOT_RECORDED,
        ", ".join(f"{tile:,}" for tile in sorted(tiles)) or NOT_RECORDED,
    )


TABLES = {
    "README, CPU": (README, "compared with `torch.optim.AdamW`", lambda: readme_rows(README_CPU, CPU, "torch loop", "µs")),
    "README, GPU": (README, "On an H200", lambda: readme_rows(README_GPU, H200, "torch foreach", "ms")),
    "files": (SHOWN, "What these files say", file_rows),
    "steps": (SHOWN, "AdamW in float32", step_rows),
    "ratios": (SHOWN, "Other steps", ratio_rows),
    "stored": (SHOWN, "AdamW on 2^29 elements", stored_rows),
    "packed": (SHOWN, "AdamW with packed states", packed_rows),
}


@pytest.mark.parametrize(("page", "sentence", "rows"), TABLES.values(), ids=TABLES)
def test_tables_are_computed_from_the_files(page, sentence, rows):
    lines = page[page.index(sentence) :].partition("\n|")[2].partition("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == list(rows())


def sentences():
    """Those of docs/gpu.md with figures, as the files give them."""
    rules, old, h100 = (file["rules"]["found"] for file in (H200, H200_8BCBF44, H100))
    slow = {"adafactor", "came", "group_adagrad", "muon", "normuon"}
    copies = [[rule["of copy"] for name, rule in found.items() if name not in slow] for found in (rules, h100)]
    foreach = [
        rule["peers / tristep"]["torch foreach"]
        for found in (rules, h100)
        for name, rule in found.items()
        if name not in slow and "torch foreach" in rule["peers / tristep"]
    ]
    us = [found["novograd"]["us"] for found in (rules, old)]
    yield f"NovoGrad's step took {us[0]:,.0f} µs in one process and {us[1]:,.0f} in another"
    yield f"differences below {100 * (us[0] / us[1] - 1):.0f} %"
    (cold, cached), memory = H200["first"]["found"].values(), H200["memory"]["found"]["GPT-2 124M, 148 tensors"]
    assert memory["tristep"] == 0
    yield f"takes {cold:.1f} s, or {cached:.1f} s with compiled code"
    yield f"torch's foreach takes {memory['torch foreach']:.0f} MB"
    yield f"of {len(rules)} all but"
    yield f"with {min(copies[0]):.2f} to {max(copies[0]):.2f} of a copy's speed on the H200"
    yield f"with {min(copies[1]):.2f} to {max(copies[1]):.2f} on the H100"
    yield f"foreach takes {min(foreach):.1f} to {max(foreach):.1f} times as long"
    shares = [f"{rules[name]['of copy']:.2f}" for name in ("adafactor", "came", "group_adagrad", "novograd")]
    yield f"on the H200 {', '.join(shares[:3])} and {shares[3]} of a copy's speed"
    yield f"foreach Adafactor takes {rules['adafactor']['peers / tristep']['torch foreach']:.2f} times as long"
    yield f"NovoGrad reached {old['novograd']['of copy']:.2f} in another run"
    muons = [found["muon"]["peers / tristep"]["torch"] for found in (h100, rules)]
    yield f"torch's Muon takes {muons[0]:.2f} (H100) and {muons[1]:.2f} (H200) of the time for 16 of 2,048 x 2,048"
    matrices = {name: row["torch / tristep"] for name, row in H100["matrices"]["found"].items()}
    yield f"{matrices['8 x 1,024 x 1,024']:.1f} times as long for 8 of 1,024 x 1,024"
    yield f"{matrices['24 x 256 x 1,024']:.1f} for 24 of 256 x 1,024 and {matrices['200 x 32 x 64']:.1f} for 200 of 32 x 64"
    codes = [code["of copy"] for code in H100["compression"]["found"].values()]
    yield f"reach {min(codes):.2f} to {max(codes):.2f} of a copy's speed (H100)"
    smoke, tests = (read(name) for name in ("gpu_smoke", "gpu_tests"))
    cases = [smoke["parts"][part]["cases"] for part in ("rules", "optimizers", "storage")]
    assert smoke["parts"]["versions"]["gpu"] == "NVIDIA H200"
    assert all(part["passed"] for part in smoke["parts"].values())
    yield f"{cases[0]} cases of rules, {cases[1]} optimizers, {cases[2]} kinds of storage"
    assert {smoke["commit"], tests["commit"]} == {"8bcbf442"}
    yield "(commit 8bcbf442)"
    passed = [file["passed"] for file in tests["files"].values()]
    yield f"{sum(passed)} of {len(passed)} files pass"


def test_sentences_are_computed_from_the_files_and_no_figure_is_without_one():
    text = " ".join(re.sub(r"(?m)^\|.*$", "", SHOWN).split())
    for sentence in sentences():
        assert sentence in text
        text = text.replace(sentence, "")
    without_versions = re.sub(r"\d+\.\d+\.\d+", "", text)
    assert re.findall(r"\d+\.\d+|\d+ (?:%|µs|ms|s|MB)(?!\w)", without_versions) == []


def test_differences_that_carry_no_claim_are_those_between_equal_kernels():
    """README names the spread, too; all kernels of the shorter run are among the other's."""
    kernels, others = ({kernel["sha256"] for kernel in file["rules"]["kernels"]} for file in (H200_8BCBF44, H200))
    nothing = {kernel["sha256"] for kernel in H200["stored"]["kernels"] if kernel["kernel"] == "_nothing"}
    assert kernels - nothing <= others
    assert H200["rules"]["conditions"] == H200_8BCBF44["rules"]["conditions"]
    assert "differences below 25 %" in " ".join(README.split())


def test_storing_scales_by_each_thread_took_longer():
    row = TURNS["rows"]["AdamW, float32, states 8-bit"]
    assert f"{row['8bcbf44']['us'] / row['new']['us']:.2f} times the time with float32 weights" in " ".join(GPU.split())
