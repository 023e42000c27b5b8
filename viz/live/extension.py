"""The IPython extension: ``%load_ext tristep`` adds magics, and shows trainers as tables; unloading removes both."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from ...trainer import LRFinder, Trainer, lr_find
from ...trainer.optimizer import Optimizer
from ..record import Recorder, Run
from ..render.notebook import has_front_end
from ..render.renderers import set_renderer
from ..views import Dashboard, LRFinderView, ScheduleView, TrajectoryView, View, reprs
from ..views.schedule import scheduler
from . import LiveLoop, stop_loops
from .cell_loops import numbers_of, split_at_loop, turns
from .doctor import doctor_report, show_ping
from .loop import MODES

__all__ = ["TristepMagics", "load", "unload"]

REPORTED = (Recorder, Run, LiveLoop)  # types with a dashboard
MODELS = (
    Trainer,
    Optimizer,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
)  # types of reprs.TYPES whose objects refer to a model


def load(shell: Any) -> None:
    """Register magics, formatters and events with an IPython shell. Loading again has no further effect."""
    unload(shell)
    magics = TristepMagics(shell)
    shell.register_magics(magics)
    formatter = shell.display_formatter.mimebundle_formatter
    magics.replaced = {kind: formatter.type_printers.get(kind) for kind in reprs.TYPES}
    for kind in reprs.TYPES:
        formatter.for_type(kind, reprs.mimebundle)
    shell.events.register("pre_run_cell", magics.before_cell)
    shell.events.register("post_run_cell", magics.after_cell)


def unload(shell: Any) -> None:
    magics = shell.magics_manager.registry.get(TristepMagics.__name__)
    if magics is None:
        return
    shell.events.unregister("pre_run_cell", magics.before_cell)
    shell.events.unregister("post_run_cell", magics.after_cell)
    formatter = shell.display_formatter.mimebundle_formatter
    for kind, before in magics.replaced.items():
        if before is not None:
            formatter.for_type(kind, before)
        elif formatter.type_printers.get(kind) is reprs.mimebundle:
            formatter.pop(kind)
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
    replaced: Mapping[type, Any]

    def before_cell(self, info: Any) -> None:
        """Stop the loop that this cell started when it ran before."""
        # Widgets' messages trigger this event, too, on other threads.
        if threading.current_thread() is threading.main_thread() and info.cell_id is not None:
            stop_loops(info.cell_id)

    def after_cell(self, result: Any) -> None:
        """Remove a trainer shown as a table from `Out`, which would otherwise keep a model for each run of the cell."""
        if isinstance(result.result, MODELS):
            self.shell.user_ns["Out"].pop(result.execution_count, None)
            self.shell.del_var(f"_{result.execution_count}", by_name=True)

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
    @argument("name", help="of a schedule, such as cosine, poly, factor or onecycle")
    @argument("--steps", type=int, default=1000, help="how many updates (1000); a schedule with an end ends there")
    @argument("--warmup", type=int, default=0, help="how many of them warm up (0)")
    @argument("--lr", type=float, help="the largest rate (the schedule's default)")
    @argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another argument, as often as needed")
    @line_magic
    def lr_schedule(self, line: str) -> Any:
        """Draw a schedule of learning rates, and print the code that makes it.

        Example: %lr_schedule cosine --steps 1000 --warmup 100 --set final_lr=0.001
        """
        args = parse_argstring(self.lr_schedule, line)
        arguments = dict(_setting(each) for each in args.set)
        arguments |= {"warmup_steps": args.warmup} if args.warmup else {}
        arguments |= {} if args.lr is None else {"base_lr": args.lr}
        try:
            schedule = scheduler(args.name, args.steps, **arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        print(f"tristep.lr_scheduler.{schedule!r}")
        return ScheduleView(schedule, args.steps)

    @magic_arguments()
    @argument("trainer", help="a Trainer or an optimizer, by its name in the notebook")
    @argument("data", help="a loader, or a function or iterator that takes a step and returns the loss")
    @argument("--net", default="net", help="with a loader: the model (net)")
    @argument("--loss", default="loss", help="with a loader: the loss function (loss)")
    @argument("--low", type=float, default=1e-7, help="the first rate (1e-7)")
    @argument("--high", type=float, default=10.0, help="the last rate (10)")
    @argument("-n", type=int, default=100, help="how many steps (100)")
    @line_magic
    def lr_find(self, line: str) -> float:
        """Try rising learning rates, show the losses, restore everything, and return the suggested rate.

        Example: %lr_find trainer loader --net net --loss loss_function
        """
        args = parse_argstring(self.lr_find, line)
        source, data = self._value(args.trainer), self._value(args.data)
        step = data
        if not callable(data) and not isinstance(data, Iterator):
            step = self._value(args.net), self._value(args.loss), data
        result: LRFinder = lr_find(source, step, low=args.low, high=args.high, n=args.n)
        display(LRFinderView(result))
        if result.nothing:
            raise UsageError(result.nothing)
        return result.value

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
        namespace[args.name] = loop
        loop.start()

    @magic_arguments()
    @argument("source", nargs="?", help="a Recorder, Run or LiveLoop (the one made last)")
    @line_magic
    def viz_dashboard(self, line: str) -> Any:
        """Show everything recorded of a run on one page."""
        args = parse_argstring(self.viz_dashboard, line)
        return Dashboard(self._value(args.source) if args.source else self._last(REPORTED, "Recorder, Run or LiveLoop"))

    @magic_arguments()
    @argument("file", help="the file: .html for a page that works by itself, .png, .svg or .pdf for a picture")
    @argument("view", nargs="?", help="the view (the last output, or the view made last)")
    @line_magic
    def viz_export(self, line: str) -> None:
        """Write a view to a file.

        Example: %viz_export losses.html
        """
        args = parse_argstring(self.viz_export, line)
        path = Path(args.file)
        if path.suffix not in (".html", ".png", ".svg", ".pdf"):
            raise UsageError(f"file={args.file!r}: must end in .html, .png, .svg or .pdf")
        last = self.shell.user_ns.get("_")
        if args.view:
            view = self._value(args.view)
        else:
            view = last if isinstance(last, View) else self._last((View,), "view")
        if isinstance(view, LiveLoop):
            view = view.view
        if not isinstance(view, View):
            raise UsageError(f"view={args.view!r} is a {type(view).__name__}: must be a view")
        if path.suffix == ".html":
            view.html(path)
        else:
            view.figure().savefig(path)

    @magic_arguments()
    @argument("renderer", help="auto, canvas, ipywidgets, matplotlib or text")
    @line_magic
    def viz_renderer(self, line: str) -> None:
        """Choose how views are shown from now on."""
        args = parse_argstring(self.viz_renderer, line)
        try:
            set_renderer(args.renderer)
        except ValueError as error:
            raise UsageError(str(error)) from error

    @magic_arguments()
    @line_magic
    def viz_doctor(self, line: str) -> None:
        """Print which packages and features of the notebook work, which are missing, and the commands that install them."""
        parse_argstring(self.viz_doctor, line)
        print("\n".join(doctor_report()))
        if has_front_end():
            show_ping()

    def _value(self, name: str) -> Any:
        try:
            return self.shell.ev(name)
        except Exception as error:
            raise UsageError(f"{name!r} is nothing that the notebook knows ({error!r})") from error

    def _candidate(self, name: str) -> Any:
        """Return the notebook's class, optimizer or function of this name; else {}, the arguments of a named one."""
        candidate = self.shell.user_ns.get(name)
        return candidate if isinstance(candidate, (type, Optimizer)) or (callable(candidate)) else {}

    def _last(self, kinds: tuple[type, ...], words: str) -> Any:
        for name, value in reversed(list(self.shell.user_ns.items())):
            if isinstance(value, kinds) and not name.startswith("_"):
                return value
        raise UsageError(f"there is no {words} in the notebook: give its name")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: must be NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _first(things: Sequence[Any], kinds: Any) -> Any:
    return next((each for each in things if isinstance(each, kinds)), None)
