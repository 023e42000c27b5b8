"""Estimates who orthogonalizes what, what is sent, and how long a step of Muon takes, on 8, 64 and 1,000 GPUs.

    python benchmarks/owners.py                  print the tables of docs/scaling.md
    python benchmarks/owners.py --json FILE      write the figures there, too

Nothing is trained. Owners are those that the library chooses, by its own functions, for the hidden matrices of each model in
float32. Times are estimates:

- Operations are those of `rule.cost`, at the rate that Muon's whole update reached on an H100, in results/gpu_h100.json.
- Everything else of an update takes its bytes over the memory's bandwidth, and a message its bytes over the link's and the
  latency, as in `tristep.estimate_cost`. The link is NVLink for 8 ranks, and 400 Gb/s InfiniBand for each GPU above.
- Nothing overlaps: a step takes the sum, so these are upper bounds for the owners' ways.

"Everyone all" is an update of all matrices on every rank. What training without owners sends as well is left out: the
all-reduce of the gradients, FSDP's own messages, and of ZeRO-1's as much as a ring takes. Bytes are those that an owner
sends or receives for the update, whichever are more, on the rank with the most.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tristep import optimizer as optimizers
from tristep.contrib.cost_model import LINKS
from tristep.contrib.cost_model.update import UpdateCost
from tristep.kernels.backends.eager import STACKS_ELSEWHERE
from tristep.trainer.kvstore.partition import costs_of, owners_of
from tristep.trainer.kvstore.sharing import STAGE_BYTES

RANKS = 8, 64, 1000
# Name and arguments of each rule, and the share of each matrix that is orthogonalized.
RULES: dict[str, tuple[str, dict[str, Any], float]] = {
    "Muon": ("muon", {}, 1.0),
    "Dion2, 1/4": ("dion2", {"fraction": 0.25}, 0.25),
}
BYTES = 4  # of an element of a weight or a gradient
BUCKET_BYTES = 25 * 2**20  # of gradients in a bucket of ZeRO-1
RESULT_BYTES = 2  # of an element of what ranks share with an all-reduce
Shape = tuple[int, int]


def _attention(width: int, keys: int) -> list[Shape]:
    return [(width, width), (keys, width), (keys, width), (width, width)]


def _gated(width: int, hidden: int) -> list[Shape]:
    return [(hidden, width), (hidden, width), (width, hidden)]


# The hidden matrices; embeddings, heads and vectors take AdamW's steps. Queries, keys and values of GPT-2 are one matrix,
# which `split` takes apart.
MODELS: dict[str, list[Shape]] = {
    # Radford et al. (2019), "Language Models are Unsupervised Multitask Learners", table 2
    "GPT-2, 124 M": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    # Llama Team (2024), "The Llama 3 Herd of Models", table 3
    "Llama 3, 8 B": [*_attention(4096, 1024), *_gated(4096, 14336)] * 32,
    # Jiang et al. (2024), "Mixtral of Experts", table 1; each expert has matrices of its own
    "Mixtral, 8 x 7 B": [*_attention(4096, 1024), (8, 4096), *(_gated(4096, 14336) * 8)] * 32,
}
FUSED = {(2304, 768): 3}  # blocks of rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    rate = _measured_rate()
    rows = [_row(model, rule, ranks, rate) for model in MODELS for rule in RULES for ranks in RANKS]
    print(f"Estimates, none measured but the rate of {rate / 1e12:.0f} TFLOP/s.\n")
    print(_loads(rows))
    print(_times(rows))
    if arguments.json:
        found = {"estimates": True, "operations per second": rate, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _measured_rate() -> float:
    """The operations per second of Muon's update of 16 matrices of 2,048 x 2,048 on an H100, all of its time counted."""
    path = Path(__file__).parent / "results" / "gpu_h100.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["rules"]["found"]["muon"]
    assert measured["workload"] == "16 x 2,048 x 2,048"
    (cost,) = costs_of(optimizers.create("muon"), [torch.empty(2048, 2048, device="meta")])
    return 16 * cost / (measured["us"] * 1e-6)


def _row(model: str, rule: str, ranks: int, rate: float) -> dict[str, Any]:
    name, options, fraction = RULES[rule]
    shapes = MODELS[model]
    params = [torch.empty(shape, device="meta") for shape in shapes]
    optimizer = optimizers.create(name, **options, split={"fused*": 3, "*": 1} if shapes[0] in FUSED else None)
    optimizer.use_parameters(params, [f"{'fused' if shape in FUSED else 'other'}{i}" for i, shape in enumerate(shapes)])
    costs, sizes = np.array(costs_of(optimizer, params)), np.array([math.prod(shape) for shape in shapes], dtype=float)
    network = LINKS["nvlink" if ranks == 8 else "ib400"]
    update = UpdateCost(shapes, name, options, "float32", "h100")
    bound = max(costs.sum() / ranks, costs.max())
    owners = owners_of(costs.tolist(), ranks)
    owned, loads = np.bincount(owners, sizes, ranks), np.bincount(owners, costs, ranks)
    in_turn = np.bincount(np.arange(len(shapes)) % ranks, costs, ranks)
    by_size = np.bincount(owners_of(sizes.tolist(), ranks), costs, ranks)
    compute = float(loads.max()) / rate

    def sent(most: float, messages: float) -> float:
        return most / network.bandwidth + messages * network.latency

    total = float(sizes.sum())
    share = float(owned.max()) / total  # of the elementwise part, of the owner with the most elements
    stacks = _stacks(shapes, costs)
    shared_costs = np.array([cost for _, cost in stacks])
    shared_owners = np.array(owners_of(shared_costs.tolist(), ranks))
    elements = np.array([size for size, _ in stacks])
    shared = float(np.bincount(shared_owners, shared_costs, ranks).max()) / rate
    results = RESULT_BYTES * fraction * total
    messages = _messages(RESULT_BYTES * fraction * elements, shared_owners, STAGE_BYTES)
    hops = math.ceil(math.log2(ranks))
    # Gradients are reduced to their owners, and weights broadcast, a message each; a ring sends all but 1/N of their bytes.
    parts = _messages(BYTES * sizes[::-1], owners[::-1], BUCKET_BYTES)
    beyond = sent(2 * BYTES * total / ranks, 2 * parts * hops)
    # Shards of weights and gradients to the owners, and weights back.
    out, back = (b * (ranks - 1) / ranks * max(float(owned.max()), total / ranks) for b in (2 * BYTES, BYTES))
    everyone = float(costs.sum()) / rate
    return {
        "model": model,
        "rule": rule,
        "ranks": ranks,
        "matrices": len(shapes),
        "elements": total,
        "operations": float(costs.sum()),
        "ranks with a matrix": int((loads > 0).sum()),
        "largest load / least possible": {
            "by cost": float(loads.max() / bound),
            "by size": float(by_size.max() / bound),
            "in turn": float(in_turn.max() / bound),
        },
        "everyone all": {"seconds": everyone + update.seconds(), "computing": everyone, "bytes": 0.0},
        "all-reduce": {
            "seconds": shared + update.seconds() + sent(results, messages * hops),
            "computing": shared,
            "bytes": results,
        },
        "ZeRO-1": {
            "seconds": compute + update.seconds(share) + beyond,
            "computing": compute,
            "bytes": 2 * BYTES * total,
        },
        "FSDP2": {
            "seconds": compute + update.seconds(share) + sent(out + back, 2 * (ranks - 1)),
            "computing": compute,
            "bytes": out + back,
        },
    }


def _stacks(shapes: Sequence[Shape], costs: Sequence[float]) -> list[tuple[float, float]]:
    """Elements and operations of what ranks share with an all-reduce: a matrix, or on a GPU a stack of small ones."""
    stacks: list[tuple[float, float]] = []
    open_stacks: dict[Shape, list[float]] = {}
    for shape, cost in zip(shapes, costs, strict=True):
        size = math.prod(shape)
        if size > STACKS_ELSEWHERE.tensor:
            stacks.append((float(size), float(cost)))
            continue
        members = open_stacks.setdefault(shape, [])
        members.append(float(cost))
        if (len(members) + 1) * size > STACKS_ELSEWHERE.stack:
            stacks.append((float(size * len(members)), sum(open_stacks.pop(shape))))
    return stacks + [(float(math.prod(shape) * len(members)), sum(members)) for shape, members in open_stacks.items()]


def _messages(sizes: Sequence[float], owners: Sequence[int], limit: int) -> int:
    """The number of messages: one for each owner in a stage, or bucket, of about `limit` bytes."""
    messages, stage, filled = 0, set[int](), 0.0
    for size, owner in zip(sizes, owners, strict=True):
        if filled >= limit:
            messages, stage, filled = messages + len(stage), set(), 0.0
        stage.add(int(owner))
        filled += size
    return messages + len(stage)


def _loads(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| | matrices | ranks | of them with a matrix | by cost | by size | in turn |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["rule"] == "Muon":
            found = row["largest load / least possible"]
            cells = [row["model"], row["matrices"], f"{row['ranks']:,}", row["ranks with a matrix"]]
            cells += [f"{found[way]:.2f}" for way in ("by cost", "by size", "in turn")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def _times(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| | rule | ranks | everyone all | all-reduce | ZeRO-1 | FSDP2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{_time(row['everyone all']['seconds'])}"]
        cells += [f"{_time(row[way]['seconds'])}, {_size(row[way]['bytes'])}" for way in ("all-reduce", "ZeRO-1", "FSDP2")]
        lines.append(f"| {row['model']} | {row['rule']} | {row['ranks']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 0.9995e9 else f"{count / 1e6:.3g} MB"


if __name__ == "__main__":
    main()
