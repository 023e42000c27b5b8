"""The command line: `demo` trains a small network, `doctor` checks this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

import tristep
from tristep.kernels import ENGINES, choose_engine

ABOUT = """\
Gluon's Trainer for PyTorch: a whole model's update is one fused call, every update rule is written once, and a rule
typed in a notebook cell is compiled like those that come with the package.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; None means the program's arguments. Return the exit status: 0, or 1 if the command failed."""
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
        help="train a small network with several optimizers, and plot their losses",
        description="Check one step of SGD by hand, then train a small network on handwritten digits with several "
        "optimizers, from the same start and on the same batches; print a table and draw a picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--epochs", type=int, default=15, metavar="N", help="passes over the 1,347 training images")
    demo.add_argument("--out", default="tristep-demo.png", metavar="FILE", help="the file of the picture")
    demo.add_argument(
        "--engine", choices=ENGINES, default=argparse.SUPPRESS, help="the engine of the updates; by default the fastest"
    )
    demo.add_argument(
        "--optimizers", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="the optimizers to train; by default all"
    )
    commands.add_parser(
        "doctor",
        help="versions, engines, caches, and what is missing",
        description="Print the versions of packages, the engine of each device and whether a step with it is right, the "
        "caches of compiled code, and what is missing. The exit status is 1 if tristep cannot work.",
    )
    options = vars(parser.parse_args(arguments))

    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
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


def _here() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    try:
        updates = f"updates on {name} by engine {choose_engine(device)!r}."
    except (ValueError, ModuleNotFoundError) as error:  # from TRISTEP_ENGINE
        updates = str(error)
    return f"Here: tristep {tristep.__version__}, torch {torch.__version__}; {updates}"


def _piped() -> int:
    """Run `main`; end silently if the reader of the output has gone, as with `| head`."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it ends
        return 141  # the exit status of a program that SIGPIPE ended


if __name__ == "__main__":
    sys.exit(_piped())
