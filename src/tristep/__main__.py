"""The command line: `demo` trains something small, `cost` estimates a step on many GPUs, `doctor` says what works here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

import tristep
from tristep.kernels import ENGINES, choose_engine
from tristep.trainer import cost_model

ABOUT = """\
Gluon's Trainer for PyTorch: a whole model's update is one fused call, every update rule is written once, and a rule
typed in a notebook cell is compiled like those that come with the package.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 1 where it failed; 2 and a message for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tristep",
        description=ABOUT,
        epilog=_here(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tristep {tristep.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="")
    demo = commands.add_parser(
        "demo",
        help="train a small network with several optimizers and draw what they did",
        description="Check one step of SGD by hand, then train a small network on handwritten digits with several "
        "optimizers, from the same start and on the same batches; print a table and draw a picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--epochs", type=int, default=15, metavar="N", help="passes over the 1,347 training images")
    demo.add_argument("--out", default="tristep-demo.png", metavar="FILE", help="where to put the picture")
    demo.add_argument(
        "--engine", choices=ENGINES, default=argparse.SUPPRESS, help="who computes; the best there is if left out"
    )
    demo.add_argument("--optimizers", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="which; all if left out")
    cost = _add_cost(commands)
    commands.add_parser(
        "doctor",
        help="versions, engines, caches, and what is missing",
        description="Say which versions there are, which engine each device has, whether a step with it is right, where "
        "compiled code is kept, and what is missing. The exit status is 1 where tristep cannot work.",
    )
    options = vars(parser.parse_args(arguments))

    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
    if command == "cost":
        try:
            return _cost(**options)
        except (ValueError, TypeError, RuntimeError) as error:
            cost.error(str(error))
    if command == "doctor":
        from tristep.doctor import report

        lines, works = report()
        print("\n".join(lines))
        return 0 if works else 1
    try:
        from tristep.demo import check, run
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("matplotlib", "sklearn"):
            raise
        print(f"The demo needs {missing}, which is missing: pip install 'tristep[demo]'", file=sys.stderr)
        return 1
    settings = {"engine": None, "optimizers": ()} | options
    try:
        check(**settings)
    except (ValueError, ModuleNotFoundError) as error:
        demo.error(str(error))
    return run(**settings)


def _add_cost(commands: Any) -> argparse.ArgumentParser:
    cost = commands.add_parser(
        "cost",
        help="bytes on the wire, memory and time of a step on many GPUs, by a model",
        description="What a step costs with each strategy: bytes that a rank sends, its memory, and the time by a model of "
        "latency and bandwidth. Memory follows from the optimizer's own rule. See docs/scaling.md.",
    )
    names = ", ".join(cost_model.LINKS)
    cost.add_argument("--params", type=float, required=True, metavar="N", help="parameters, such as 8e9")
    cost.add_argument("--gpus", type=int, metavar="N", help="ranks; with --measure as many as there are, if left out")
    link = cost.add_mutually_exclusive_group(required=True)
    link.add_argument("--link", metavar="LINK", help=f"between them: {names}, or GB/s[,latency], such as 12.5,30us")
    link.add_argument("--measure", action="store_true", help="measure the link of the processes that torchrun has started")
    cost.add_argument("--gpus-per-node", type=int, metavar="N", help="where nodes have a faster link inside")
    cost.add_argument("--inner", default="nvlink", metavar="LINK", help="that link (default: nvlink)")
    cost.add_argument("--optimizer", default="adam", metavar="NAME", help="(default: adam)")
    cost.add_argument("--state", metavar="TYPE", help="how states are stored: bfloat16, 8bit or 4bit")
    cost.add_argument("--weights", default="float32", metavar="TYPE", help="of weights and gradients (default: float32)")
    cost.add_argument(
        "--master", choices=("float32", "remainder", "split8"), help="the master of 16-bit weights; none by default"
    )
    memories = ", ".join(cost_model.MEMORIES)
    cost.add_argument("--memory", default="h100", metavar="GPU", help=f"whose memory: {memories}, or GB/s (default: h100)")
    cost.add_argument(
        "--compute-ms", type=float, metavar="T", help="of forward and backward, behind which communication hides"
    )
    cost.add_argument("--servers", type=int, default=1, metavar="N", help="of the parameter server (default: 1)")
    cost.add_argument("--json", action="store_true", help="print the rows as JSON, in bytes and seconds")
    return cost


def _cost(
    params: float,
    gpus: int | None,
    link: str | None,
    measure: bool,
    optimizer: str,
    state: str | None,
    weights: str,
    master: str | None,
    memory: str,
    **others: Any,
) -> int:
    as_json, rank = others.pop("json"), 0
    options: dict[str, Any] = {}
    if state is not None:
        options["state_dtype"] = {"bf16": "bfloat16"}.get(state, state)
    if master is not None:
        options["multi_precision"] = True if master == "float32" else master
    weights = cost_model.OTHER_NAMES.get(weights, weights)
    if measure:
        if others["gpus_per_node"] is not None:
            raise ValueError("--measure finds one link for all, so there is none for --gpus-per-node: leave one of them out")
        found, rank, ranks = _measured()
        gpus = ranks if gpus is None else gpus
    else:
        assert link is not None
        found = cost_model.parse_link(link, "--link")
        if gpus is None:
            raise ValueError("--gpus is missing: how many ranks there are to be")
    rows = cost_model.estimate_cost(
        params,
        gpus,
        found,
        optimizer=optimizer,
        optimizer_params=options,
        weights=weights,
        memory=memory,
        **others,
    )
    if rank:
        return 0
    if as_json:
        made = [dataclasses.asdict(row) | {"memory": row.memory} for row in rows]
        print(json.dumps({"params": params, "gpus": gpus, "link": found._asdict(), "strategies": made}, indent=2))
        return 0
    figures = (
        "the link has been measured, other figures are nominal" if found.measured else "with nominal figures, none measured"
    )
    print(
        f"By a model, {figures}.\n{params:,.0f} parameters on {gpus} GPUs over {found.name}: "
        f"{found.bandwidth / 1e9:.4g} GB/s, {found.latency * 1e6:.3g} us a message. "
        "Sent and kept by each rank, for a step:\n"
    )
    print(cost_model.table(rows))
    return 0


def _measured() -> tuple[cost_model.Link, int, int]:
    """The link of the processes there are, this one's rank and their number."""
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise RuntimeError("--measure needs several processes: torchrun --nproc_per_node 2 -m tristep cost --measure ...")
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        return cost_model.measure_link(), dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _here() -> str:
    """One line about this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    try:
        updates = f"updates on {name} by engine {choose_engine(device)!r}."
    except (ValueError, ModuleNotFoundError) as error:  # from TRISTEP_ENGINE
        updates = str(error)
    return f"Here: tristep {tristep.__version__}, torch {torch.__version__}; {updates}"


def _piped() -> int:
    """`main`, which ends without words where nobody reads on, as in `| head`."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes when it ends
        return 141  # as shells tell of SIGPIPE


if __name__ == "__main__":
    sys.exit(_piped())
