"""The IPython extension: ``%load_ext tristep`` adds magics; unloading removes them."""

from __future__ import annotations

import ast
import threading
from collections.abc import Sequence
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ...trainer import Trainer
from ...trainer.optimizer import Optimizer
from ..record import Recorder
from ..views import TrajectoryView
from . import LiveLoop, stop_loops
from .cell_loops import numbers_of, split_at_loop, turns
from .loop import MODES
from .names import TrainedNames

__all__ = ["TristepMagics", "load", "unload"]


def load(shell: Any) -> None:
    """Register magics and an event with an IPython shell. Loading again has no further effect."""
    unload(shell)
    magics = TristepMagics(shell)
    shell.register_magics(magics)
    shell.events.register("pre_run_cell", magics.before_cell)


def unload(shell: Any) -> None:
    magics = shell.magics_manager.registry.get(TristepMagics.__name__)
    if magics is None:
        return
    shell.events.unregister("pre_run_cell", magics.before_cell)
    manager = shell.magics_manager
    del manager.registry[TristepMagics.__name__]
    for kind, functions in magics.magics.items():
        for name, function in functions.items():
            if manager.magics[kind].get(name) == function:
                del manager.magics[kind][name]
    shell.configurables.remove(magics)


@magics_class
class TristepMagics(Magics):
    """The magics of tristep. ``%opt_compare?`` shows the help of one."""

    shell: Any

    def before_cell(self, info: Any) -> None:
        """Stop the loop that this cell started when it ran before."""
        # Widgets' messages trigger this event, too, on other threads.
        if threading.current_thread() is threading.main_thread() and info.cell_id is not None:
            stop_loops(info.cell_id)

    @magic_arguments()
    @argument("optimizers", nargs="+", help="names of optimizers, or of your own rules and optimizers in the notebook")
    @argument("--on", default="rosenbrock", help="a function's name or an expression of x and y, without spaces")
    @argument("--steps", type=int, default=200, help="how many updates (200)")
    @argument("--start", nargs=2, type=float, metavar=("X", "Y"), help="where all begin (the function's own start)")
    @line_magic
    def opt_compare(self, line: str) -> Any:
        """Compare optimizers on a function of two variables, and show their paths.

        Example: %opt_compare adam lion sgd --on rosenbrock
        """
        args = parse_argstring(self.opt_compare, line)
        candidates = {name: self._candidate(name) for name in args.optimizers}
        return TrajectoryView(args.on, candidates, start=args.start, steps=args.steps)

    @magic_arguments()
    @argument("--fps", type=float, default=4.0, help="redraw at most this many times a second (4)")
    @argument("--mode", choices=MODES, default="auto", help="what runs the loop: the mode of LiveLoop (auto)")
    @argument("--trainer", help="the Trainer or optimizer (the first one that the cell names)")
    @argument("--show", nargs="+", default=["loss"], metavar="NAME", help="numbers to record after each step (loss)")
    @argument("--name", default="loop", help="variable that gets the LiveLoop (loop)")
    @cell_magic
    def train(self, line: str, cell: str) -> None:
        """Run the training loop in this cell, unchanged, as a LiveLoop.

        Code before the first for or while loop runs at once, the loop and the code after it step by step. A step is one
        iteration of the innermost loop that calls a method `step` directly in its body; without one, of the outermost loop.
        Names that the cell sets are set in the notebook, as always.

        Limits: the loop cannot contain await or yield, a bare expression at the end is not shown, and the code after the
        loop does not run if the loop is stopped.

        Example:

            %%train --fps 10
            for batch, labels in loader:
                trainer.zero_grad()
                loss = loss_function(net(batch), labels)
                loss.backward()
                trainer.step(1)
        """
        args = parse_argstring(self.train, line)
        shell, namespace = self.shell, self.shell.user_ns
        source = "\n" + shell.transform_cell(cell)  # an empty line in place of the magic, so that line numbers agree
        filename = shell.compile.cache(source, shell.execution_count, raw_code=f"%%train {line}\n{cell}")
        before, steps = split_at_loop(shell.transform_ast(ast.parse(source, filename)))
        exec(shell.compile(before, filename, "exec"), namespace)
        with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
            code = shell.compile(steps, filename, "exec")
        named = [namespace[node.id] for node in ast.walk(steps) if isinstance(node, ast.Name) and node.id in namespace]
        named = list({id(each): each for each in named}.values())
        trainer = self._value(args.trainer) if args.trainer else _first(named, (Trainer, torch.optim.Optimizer))
        recorder = _first(named, Recorder)
        stateful_types = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
        loop = LiveLoop(
            turns(lambda: eval(code, namespace), lambda: numbers_of(namespace, args.show)),
            trainer=trainer,
            recorder=recorder,
            stateful=[each for each in named if isinstance(each, stateful_types) and each is not trainer],
            mode=args.mode,
            frames_per_second=args.fps,
        )
        loop.names = TrainedNames(code, namespace, trainer)
        namespace[args.name] = loop
        loop.start()

    def _value(self, name: str) -> Any:
        try:
            return self.shell.ev(name)
        except Exception as error:
            raise UsageError(f"{name!r} is nothing that the notebook knows ({error!r})") from error

    def _candidate(self, name: str) -> Any:
        """Return the notebook's class, optimizer or function of this name; else {}, the arguments of a named one."""
        candidate = self.shell.user_ns.get(name)
        return candidate if isinstance(candidate, (type, Optimizer)) or (callable(candidate)) else {}


def _first(things: Sequence[Any], kinds: Any) -> Any:
    return next((each for each in things if isinstance(each, kinds)), None)
