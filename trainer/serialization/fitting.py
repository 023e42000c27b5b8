"""Load what fits: match the parameters of a saved state with those here, and leave the rest of it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..optimizer import MultiOptimizer, Optimizer, RuleOptimizer
from ..optimizer.multi import part_of, parts_of
from ..validation import boolean, choice
from .check import LR, OWN, SCHEDULES, check_class, check_form, few, saved_rule, shape_of

SETTINGS = ("file", "mine")


class Loaded(NamedTuple):
    """What a load with `strict=False` did, by the names of parameters.

    Attributes:
        loaded: names that fit, in the order here.
        anew: names here that start anew.
        unused: names in the saved state that were not used.
    """

    loaded: list[str]
    anew: list[str]
    unused: list[str]

    def __str__(self) -> str:
        parts = ("loaded", self.loaded), ("start anew", self.anew), ("saved but not used", self.unused)
        return "; ".join(f"{what}: {len(names)}" + (f", {few(names)}" if names else "") for what, names in parts)


def check_fit(strict: bool, settings: str) -> bool:
    """Return `strict`, or raise TypeError or ValueError if these are not allowed arguments of a load."""
    if choice("settings", settings, SETTINGS) == "mine" and strict:
        raise ValueError("settings='mine' needs strict=False: a strict load restores the saved settings")
    return boolean("strict", strict)


def match(what: str, names: Iterable[str], saved: Iterable[str], fits: Callable[[str], bool]) -> Loaded:
    """Match names here with saved ones, where the same name fits.

    Raises:
        ValueError: nothing fits; `what` are the things in its text.
    """
    names, saved = list(names), list(saved)
    known = set(saved)
    loaded = [name for name in names if name in known and fits(name)]
    if names and not loaded:
        raise ValueError(
            f"strict=False: none of the {len(saved)} saved {what}, {few(saved)}, fits one of the {len(names)} here, "
            f"{few(names)}"
        )
    used = set(loaded)
    anew, unused = ([name for name in each if name not in used] for each in (names, saved))
    return Loaded(loaded, anew, unused)


def announce(what: str, loaded: Loaded) -> None:
    """Print what was loaded; of several processes the first one prints."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        print(f"{what}: {loaded}")


def refuse_common(name: str, rule: Any, carries: bool, anew: Sequence[str]) -> None:
    """Raise ValueError if parameters cannot start anew beside others, since the optimizer counts something for all of them.

    Args:
        name: the optimizer's, for the message.
        rule: its rule, if it has one.
        carries: whether it has numbers that steps change and that are no parameter's.
        anew: the names of the parameters.
    """
    if anew and (carries or any(each.scope == "global" and each.kept for each in getattr(rule, "reductions", ()))):
        raise ValueError(
            f"strict=False: {name} keeps numbers of all parameters together, with which {few(anew)} cannot start anew "
            "beside the others: start the optimizer anew, or train those parameters with another optimizer"
        )


def fitted(
    optimizer: Optimizer,
    names: Sequence[str],
    params: Sequence[torch.Tensor],
    saved: Mapping[str, Any],
    settings: str = "file",
) -> tuple[dict[str, Any], Loaded]:
    """Return what of a saved state fits, as a state that `restore` loads, and the names.

    `settings`: "file" for the saved settings and schedules, "mine" for the optimizer's own.

    Raises:
        ValueError, TypeError: it is another optimizer's, or nothing of it fits, or parameters cannot start anew.
    """
    check_form(saved)
    check_class(optimizer, saved)
    parts = parts_of(optimizer)
    here = {name: parts.index(part_of(optimizer, i)) for i, name in enumerate(names)}
    there = dict.fromkeys(saved["parameters"], 0)
    described = list(saved.get("optimizers", ())) if isinstance(optimizer, MultiOptimizer) else [saved]
    if isinstance(optimizer, MultiOptimizer):
        there = {name: k for k, part in enumerate(described) for name in part["names"]}
        kinds, own = [part["optimizer"] for part in described], [type(part).__name__.lower() for part in parts]
        if kinds != own:
            raise ValueError(f"strict=False: the saved state is of the optimizers {kinds}, this trainer has {own}")
    shapes, own_shapes = saved["parameters"], dict(zip(names, map(shape_of, params), strict=True))

    def fits(name: str) -> bool:
        theirs, ours = shapes[name], own_shapes[name]
        return here[name] == there.get(name) and (theirs is None or ours is None or list(theirs) == ours)

    loaded = match("parameters", names, shapes, fits)
    known = set(loaded.loaded)
    fitting: dict[str, Any] = {**saved, "parameters": own_shapes, "anew": loaded.anew}
    for key in ("counts", "layout", "state", "residuals"):
        fitting[key] = {name: value for name, value in saved.get(key, {}).items() if name in known}
    if list(shapes) != list(names) or loaded.anew:  # how gradients were put together for their sums
        fitting = {key: value for key, value in fitting.items() if key not in ("buckets", "reducers")}
    if settings == "mine":
        described = [{**each, **_own(part, each)} for part, each in zip(parts, described, strict=True)]
    if isinstance(optimizer, MultiOptimizer):
        of_part = [[name for name in names if here[name] == k] for k in range(len(parts))]
        fitting["optimizers"] = [{**each, "names": of} for each, of in zip(described, of_part, strict=True)]
        if settings == "mine":
            fitting["settings"] = optimizer.limits()
    elif settings == "mine":
        fitting |= {key: described[0][key] for key in ("settings", LR, SCHEDULES)}
    for k, (part, each) in enumerate(zip(parts, described, strict=True)):
        anew = [name for name in loaded.anew if here[name] == k]
        rule = saved_rule(part, each["settings"]) if anew and isinstance(part, RuleOptimizer) else None
        refuse_common(type(part).__name__, rule, bool(part.host_state_names), anew)
    return fitting, loaded


def _own(part: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's own settings, except numbers of the saved states, and the mark of its schedules."""
    carried = {name: saved["settings"][name] for name in part.host_state_names if name in saved["settings"]}
    return {"settings": part.settings() | carried, LR: OWN, SCHEDULES: OWN}
