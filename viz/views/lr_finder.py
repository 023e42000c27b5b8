"""LRFinderView: the results of `tristep.lr_find`: losses over learning rates, and suggested rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...trainer import LRFinder
from ...trainer.loops.lr_finder import SUGGESTERS
from ...trainer.validation import instance, nonempty
from ..scene import Axis, Control, Layer, Line, Panel, Points, Scene
from .view import View

__all__ = ["LRFinderView"]


class LRFinderView(View):
    """Losses over learning rates from one or several learning-rate range tests.

    One test has all suggested rates marked on its curve. Several tests have the rate that a selected rule suggests.

    Args:
        results: an `LRFinder`, as `tristep.lr_find` returns it, or a dict of them by name.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `results` is or contains something else.
        ValueError: `results` is empty.

    Example:
        >>> import torch, tristep
        >>> from tristep.viz import LRFinderView
        >>> net, data = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> def tried(optimizer):
        ...     return tristep.lr_find(tristep.Trainer(net, optimizer), (net, torch.nn.MSELoss(), data))
        >>> view = LRFinderView({name: tried(name) for name in ("sgd", "adam")})
    """

    def __init__(self, results: LRFinder | Mapping[str, LRFinder], **settings: Any) -> None:
        instance("results", results, (LRFinder, Mapping), "what tristep.lr_find returned, or several by name")
        named = {results.name: results} if isinstance(results, LRFinder) else dict(results)
        for name, each in named.items():
            instance(f"results[{name!r}]", each, LRFinder, "what tristep.lr_find returned")
        self.results: dict[str, LRFinder] = nonempty("results", named, ": there is nothing to draw")
        super().__init__(**settings)

    def scene(self) -> Scene:
        results = list(self.results.items())
        layers: list[Layer] = []
        heights = []
        for i, (name, finder) in enumerate(results):
            layers.append(Line(finder.rates, finder.losses, style=i, width=0.6, alpha=0.4))
            layers.append(Line(finder.rates, finder.smoothed, style=i, name=name if len(results) > 1 else "loss, averaged"))
            heights.append(_interesting(finder))
        controls = []
        if len(results) == 1:
            finder = results[0][1]
            for i, (rule, rate) in enumerate(finder.suggestions.items()):
                mark = Points([rate], [_height(finder, rate)], size=10, style=i + 1, name=f"{rule} {rate:.2g}", words=[rule])
                layers.append(mark)
        else:
            rules = [rule for rule in SUGGESTERS if any(rule in finder.suggestions for _, finder in results)]
            if rules:
                controls.append(Control("rule", "suggestion", rules, 0, "choice"))
            for i, (_, finder) in enumerate(results):
                rates = [finder.suggestions.get(rule, float("nan")) for rule in rules]
                if rules and np.isfinite(rates).any():
                    y = [[_height(finder, rate)] for rate in rates]
                    layers.append(Points([[rate] for rate in rates], y, size=10, style=i, by=("rule",)))
        every = np.concatenate([finder.rates for _, finder in results])
        across = Axis("learning rate", float(every.min()), float(every.max()), "log")
        vertical = Axis.over("loss", *heights, margin=0.06)
        panel, words = Panel(across, vertical, layers), self.describe()
        return Scene([panel], controls=controls, height=4.0, description=words, notes=self._notes())

    def describe(self) -> str:
        """Return a line about each test, with its range of learning rates and its suggestions."""
        lines = []
        for name, finder in self.results.items():
            rules = ", ".join(f"{rule} {rate:.2g}" for rule, rate in finder.suggestions.items()) or "none"
            end = "the loss became too large" if finder.diverged else "all rates were tried"
            lines.append(
                f"{name}: {len(finder.rates)} learning rates from {finder.rates[0]:.2g} to {finder.rates[-1]:.2g}, {end}; "
                f"suggestions: {rules}"
            )
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        return [f"{name}: {finder.nothing}." for name, finder in self.results.items() if finder.nothing]


def _interesting(finder: LRFinder) -> np.ndarray:
    """Return limits of the loss axis, from the least loss to slightly above the loss before its fall."""
    best = int(finder.smoothed.argmin())
    low, high = float(finder.smoothed[best]), float(finder.smoothed[: best + 1].max())
    fall = (high - low) or abs(high) or 1.0
    return np.array([low, min(float(finder.smoothed.max()), high + 0.4 * fall)])


def _height(finder: LRFinder, rate: float) -> float:
    return float(np.interp(np.log(rate), np.log(finder.rates), finder.smoothed)) if np.isfinite(rate) else float("nan")
