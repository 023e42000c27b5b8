"""HTML tables of trainers, optimizers, schedules and runs, which notebooks show after ``%load_ext tristep``.

The classes do not depend on this module: it is registered with IPython's formatters, and unregistered again.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...trainer import Trainer, lr_scheduler, optim
from ...trainer.optimizer import MultiOptimizer, Optimizer
from ..record import Run
from ..record.runs import readable
from ..simulate.schedules import simulate_scheduler
from ..style import COLOURS

__all__ = ["mimebundle", "to_html"]

UPDATES = 2000  # the largest number of updates of a schedule in a picture
TYPES = (
    *(Trainer, Optimizer, lr_scheduler.LRScheduler, Run),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
)


def to_html(thing: Any) -> str:
    """Return HTML tables of a trainer, an optimizer, a schedule or a run.

    All text is escaped. The colours are JupyterLab's if the page defines them.

    Args:
        thing: an instance of one of `TYPES`: a `Trainer`, an `Optimizer`, an `LRScheduler`, a `Run`, or an optimizer or a
            schedule of torch.

    Raises:
        TypeError: `thing` is something else.

    Example:
        >>> import torch
        >>> from tristep.viz.views.reprs import to_html
        >>> "<caption" in to_html(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
        True
    """
    shows: tuple[Callable[[Any], str], ...]
    shows = _trainer, _rule_optimizer, _schedule, _run, _torch_optimizer, _torch_schedule
    for kind, show in zip(TYPES, shows, strict=True):
        if isinstance(thing, kind):
            return readable(show(thing))
    raise TypeError(f"thing is a {type(thing).__name__}: must be one of {', '.join(kind.__name__ for kind in TYPES)}")


def mimebundle(thing: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """Return the HTML of `to_html` as a MIME bundle for IPython, whose other formatters add the plain text."""
    return {"text/html": to_html(thing)}


def _trainer(trainer: Trainer) -> str:
    optimizer = trainer.optimizer
    params = list(optimizer.param_dict.values())
    states = [replica.updater.state for replica in trainer.replicas]
    facts = _facts(optimizer) | {
        "engine": trainer._updater.engine or "the best there is",
        "optimizer's state": _bytes(states),
    }
    names = trainer._names
    if isinstance(optimizer, MultiOptimizer):
        what = f"Trainer with {len(optimizer.optimizers)} optimizers"
        return _several(f"{what}: {len(params)} parameters, {_elements(params)} elements", optimizer, _rule_optimizer)
    by_multipliers: dict[tuple[float, float], list[int]] = {}
    for i in range(len(params)):
        by_multipliers.setdefault(optimizer.multipliers(i), []).append(i)
    groups = [
        (", ".join(names[i] for i in members), len(members), _elements(params[i] for i in members), f"{lr:g}", f"{wd:g}")
        for (lr, wd), members in by_multipliers.items()
    ]
    return _page(
        f"Trainer with {type(optimizer).__name__}: {len(params)} parameters, {_elements(params)} elements",
        _table("settings", (), facts.items()),
        _table("parameters", ("names", "parameters", "elements", "lr_mult", "wd_mult"), groups),
        _sparkline(optimizer.lr_scheduler, optimizer.num_update),
    )


def _rule_optimizer(optimizer: Optimizer) -> str:
    if isinstance(optimizer, MultiOptimizer):
        return _several(f"{len(optimizer.optimizers)} optimizers", optimizer, _rule_optimizer)
    picture = _sparkline(optimizer.lr_scheduler, optimizer.num_update)
    return _page(type(optimizer).__name__, _table("settings", (), _facts(optimizer).items()), picture)


def _several(title: str, optimizer: MultiOptimizer | optim.MultiOptimizer, show: Callable[[Any], str]) -> str:
    """Return a table of the parameters of each optimizer, followed by the optimizers themselves."""
    head, *rows = optimizer.table()
    return _page(title, _table("parameters", head, rows) if rows else "", *map(show, optimizer.optimizers))


def _facts(optimizer: Optimizer) -> dict[str, Any]:
    settings = optimizer.settings()
    facts = {"updates": optimizer.num_update, "learning rate": f"{optimizer.learning_rate:.6g}"}
    if optimizer.lr_scheduler is not None:
        facts["schedule"] = repr(optimizer.lr_scheduler)
        settings.pop("lr", None)  # the schedule overrides it
    elif "lr" in settings:
        facts.pop("learning rate")
    return facts | {name: _shown(value) for name, value in settings.items() if value is not None and value is not False}


def _schedule(schedule: lr_scheduler.LRScheduler) -> str:
    name, facts = type(schedule).__name__, {}
    try:
        facts = {key: _shown(value) for key, value in schedule.to_config()["kwargs"].items()}
    except TypeError:  # a user-defined class that cannot be saved
        facts = {key: _shown(value) for key, value in vars(schedule).items() if not key.startswith("_")}
    return _page(name, _table("settings", (), facts.items()), _sparkline(schedule, 0))


def _run(run: Run) -> str:
    rows = []
    for name, series in run.scalars.items():
        if not len(series):
            continue
        curve = series.curve()
        numbers = series.recent()[1][-1], np.fmin.reduce(curve.low), np.fmax.reduce(curve.high)
        rows.append((name, len(series), *(f"{value:.6g}" for value in numbers), int(curve.nonfinite.sum())))
    facts = {"last step": 0 if run.last_step is None else run.last_step, "parameters": len(run.parameters)} | run.notes
    recorded = [*run.tensors, *run.histograms]
    if recorded:
        facts["of each parameter"] = ", ".join(recorded)
    return _page(
        f"Run {run.name}",
        _table("about it", (), facts.items()),
        _table("numbers over its steps", ("name", "values", "last", "least", "largest", "not finite"), rows) if rows else "",
    )


def _torch_optimizer(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, optim.MultiOptimizer):
        return _several(f"{len(optimizer.optimizers)} optimizers", optimizer, _torch_optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    steps = [float(state["step"]) for state in optimizer.state.values() if isinstance(state, Mapping) and "step" in state]
    facts = {"steps": f"{max(steps):.0f}" if steps else "none yet, or not counted", "state": _bytes(optimizer.state)}
    hidden = ("params", "param_names")
    keys = list(dict.fromkeys(key for group in optimizer.param_groups for key in group if key not in hidden))
    rows = [
        (i, len(group["params"]), _elements(group["params"]), *(_shown(group.get(key)) for key in keys))
        for i, group in enumerate(optimizer.param_groups)
    ]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    if names:
        facts["names"] = ", ".join(names)
    # Settings as rows and groups as columns: there are usually few groups and many settings.
    head = ("group", "parameters", "elements", *keys)
    turned = list(zip(*([head, *rows]), strict=True))
    return _page(
        f"{type(optimizer).__name__}: {len(params)} parameters, {_elements(params)} elements",
        _table("state", (), facts.items()),
        _table("groups", turned[0], turned[1:]),
    )


def _torch_schedule(scheduler: torch.optim.lr_scheduler.LRScheduler) -> str:
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    facts = {
        "of": type(scheduler.optimizer).__name__,
        "epoch": scheduler.last_epoch,
        "rates now": ", ".join(f"{rate:.6g}" for rate in rates),
    }
    plain = (bool, int, float, str)
    settings = {key: value for key, value in vars(scheduler).items() if not key.startswith("_") and isinstance(value, plain)}
    facts |= {key: _shown(value) for key, value in settings.items() if key != "last_epoch"}
    picture = ""
    if not plateau:
        ends = [getattr(scheduler, key, None) for key in ("total_steps", "T_max", "total_iters")]
        end = next((each for each in ends if isinstance(each, int)), None)
        n = max(100, scheduler.last_epoch) if end is None else max(end - scheduler.last_epoch, 0)
        rates = simulate_scheduler(scheduler, min(n, UPDATES))
        picture = _picture(np.arange(len(rates)) + scheduler.last_epoch, rates, scheduler.last_epoch)
    return _page(type(scheduler).__name__, _table("settings", (), facts.items()), picture)


def _sparkline(schedule: Callable[[int], float] | None, now: int) -> str:
    if schedule is None:
        return ""
    reach = max(int(getattr(schedule, "max_update", 0) or max(100, 2 * now)), now)
    numbers = np.unique(np.linspace(1, reach, min(reach, UPDATES)).astype(int))
    return _picture(numbers, [float(schedule(int(number))) for number in numbers], now)


def _picture(numbers: np.ndarray, rates: Sequence[float], now: int) -> str:
    """Return a small picture of learning rates with a dot at update `now`, and a caption that describes it."""
    from ..render.matplotlib import Figure

    figure = Figure(2.4, 0.5)
    axes = figure.add_axes((0.02, 0.08, 0.96, 0.84))
    axes.set_axis_off()
    axes.plot(numbers, rates, color=COLOURS[5], linewidth=1.6)
    if now > 0:
        axes.plot([now], [np.interp(now, numbers, rates)], "o", color=COLOURS[1], markersize=5)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, transparent=True)
    data = base64.b64encode(file.getvalue()).decode()
    words = (
        f"learning rate from {rates[0]:.4g} at {int(numbers[0])} to {rates[-1]:.4g} at {int(numbers[-1])}, "
        f"at most {max(rates):.4g}"
    )
    return (
        f'<figure style="margin:6px 0"><img width="240" height="50" alt="{html.escape(words)}" '
        f'src="data:image/png;base64,{data}"/><figcaption style="{QUIET}">{html.escape(words)}</figcaption></figure>'
    )


INK = "color:var(--jp-ui-font-color1,inherit);font-family:var(--jp-ui-font-family,sans-serif);font-size:13px"
QUIET = "color:var(--jp-ui-font-color2,#63666f);font-size:12px;text-align:left"
CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--jp-border-color2,#e4e5ea)"


def _escaped(text: str) -> str:
    """Escape text for HTML, and dollar signs so that notebooks do not read formulas."""
    return html.escape(text).replace("$", "<span>$</span>")


def _page(title: str, *parts: str) -> str:
    return f'<div style="{INK}"><div style="font-weight:600;margin:2px 0">{_escaped(title)}</div>{"".join(parts)}</div>'


def _table(caption: str, head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    def cells(tag: str, row: Sequence[Any], rest: str) -> str:
        first = f'<{tag} scope="{"col" if tag == rest == "th" else "row"}" style="{CELL};font-weight:500">'
        return f"{first}{_escaped(str(row[0]))}</{tag}>" + "".join(
            f'<{rest}{" scope=col" if rest == "th" else ""} style="{CELL}">{_escaped(str(value))}</{rest}>'
            for value in row[1:]
        )

    top = f"<thead><tr>{cells('th', head, 'th')}</tr></thead>" if len(head) else ""
    body = "".join(f"<tr>{cells('th', row, 'td')}</tr>" for row in rows)
    return (
        f'<table style="border-collapse:collapse;margin:4px 0;{INK}">'
        f'<caption style="{QUIET};caption-side:top">{_escaped(caption)}</caption>{top}<tbody>{body}</tbody></table>'
    )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _elements(params: Iterable[torch.Tensor]) -> str:
    initialized = [param for param in params if not isinstance(param, torch.nn.UninitializedParameter)]
    return f"{sum(param.numel() for param in initialized):,}"


def _bytes(states: Any) -> str:
    """Return the number of bytes of all tensors in nested containers, in words."""
    return f"{_size(states):,} bytes"


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0
