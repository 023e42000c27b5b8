"""OrthogonalizationView: how Muon's coefficients change singular values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.rules.muon import COEFFICIENTS, Triple, orthogonalized
from ...trainer.optimizer.muon import checked_coefficients, triples_of
from ...trainer.validation import integer, nonempty, number
from ..scene import Axis, Control, Layer, Line, Panel, RefLine, Scene
from .view import View

__all__ = ["OrthogonalizationView", "SingularValues"]

POINTS = 800


class SingularValues(NamedTuple):
    """The singular values after Muon's Newton-Schulz steps with one list of coefficients.

    Attributes:
        name: the name of the list.
        steps: the number of steps.
        products: the number of matrix products in these steps.
        spectrum: the smallest and the largest result for singular values from `low` to 1, computed exactly.
        gaussian: the smallest and the largest singular value after orthogonalizing random Gaussian matrices in 16 bits,
            as Muon does.
    """

    name: str
    steps: int
    products: int
    spectrum: tuple[float, float]
    gaussian: tuple[float, float]


class OrthogonalizationView(View):
    """Plot of singular values before (x axis) and after (y axis) Muon's Newton-Schulz steps, for lists of coefficients.

    Args:
        lists: names of Muon's lists of coefficients, or a dict from names to values of Muon's `coefficients`, such as lists
            of triples (a, b, c). Default: None, all of Muon's lists.
        steps: the number of steps with each list, >= 1. Default: None, the number of triples in the list.
        low: the lower end of the horizontal axis, in (0, 1); the upper end is 1. Default: 0.001.
        shape: the shape of the random matrices, (rows, columns).
        seed: the seed of the random matrices.
        **settings: `name`, `theme` and `budget` of `View`.

    Attributes:
        found: a `SingularValues` for each list.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, or `lists` is empty.

    Example:
        >>> from tristep.viz import OrthogonalizationView
        >>> view = OrthogonalizationView(["quintic", "polar_express"], shape=(32, 64))
        >>> [round(row.spectrum[1], 2) for row in view.found]
        [1.2, 1.12]
    """

    def __init__(
        self,
        lists: Sequence[str] | Mapping[str, Any] | None = None,
        steps: int | None = None,
        *,
        low: float = 1e-3,
        shape: tuple[int, int] = (128, 512),
        seed: int = 0,
        **settings: Any,
    ) -> None:
        named = dict.fromkeys(COEFFICIENTS) if lists is None else lists
        if not isinstance(named, Mapping):
            if isinstance(named, str) or not all(isinstance(each, str) for each in named):
                raise TypeError(f"lists={lists!r}: must be names of lists, or a dict of lists of triples by name")
            named = dict.fromkeys(named)
        self.low = number("low", low, above=0, below=1)
        rows, columns = (integer(f"shape[{k}]", side, low=1) for k, side in enumerate(shape))
        self._triples: dict[str, tuple[Triple, ...]] = {}
        for name, triples in nonempty("lists", named, ": there is nothing to draw; None means all").items():
            checked = checked_coefficients(
                "lists" if triples is None else f"lists[{name!r}]", name if triples is None else triples
            )
            self._triples[name] = triples_of(checked, None if steps is None else integer("steps", steps, low=1))
        x = torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(integer("seed", seed, low=0)))
        self.found = [self._values_of(name, x) for name in self._triples]
        super().__init__(**settings)

    def table(self) -> str:
        """Return a Markdown table of the smallest and the largest singular values for each list."""
        lines = [
            f"| list | steps | products | {self.low:g} to 1 become | random matrices, in 16 bits |",
            "|---|---|---|---|---|",
        ]
        for row in self.found:
            spans = (f"{least:.3f} to {largest:.3f}" for least, largest in (row.spectrum, row.gaussian))
            lines.append(f"| {row.name} | {row.steps} | {row.products} | {' | '.join(spans)} |")
        return "\n".join(lines)

    def scene(self) -> Scene:
        values = np.geomspace(self.low, 1.0, POINTS)
        most = max(map(len, self._triples.values()))
        step = Control("steps", "after steps", list(range(most + 1)), index=most)
        layers: list[Layer] = [RefLine([1.0], axis="y", style="quiet", label="1")]
        highest = 1.0
        for i, (name, triples) in enumerate(self._triples.items()):
            curves = [values]
            for k in range(most):
                curves.append(_polynomials(curves[-1], triples[k : k + 1]))
            highest = max(highest, float(np.max(curves)))
            layers.append(Line(values, np.array(curves), name=f"{name}, {len(triples)} steps", style=i, by=("steps",)))
        panel = Panel(
            Axis("singular value before", self.low, 1.0, scale="log"),
            Axis("singular value after", 0.0, 1.05 * highest),
            layers,
        )
        title = "What Muon's coefficients make of singular values"
        return Scene([panel], title, controls=[step], width=8.0, height=4.6, description=self.describe())

    def describe(self) -> str:
        """Return a sentence for each list with its smallest and largest singular value."""
        parts = [f"Singular values from {self.low:g} to 1 after the steps of each list."]
        for row in self.found:
            least, largest = row.spectrum
            parts.append(f"{row.name}: {least:.3f} to {largest:.3f} after {row.steps} steps of {row.products} products.")
        return "\n".join(parts)

    def _values_of(self, name: str, x: torch.Tensor) -> SingularValues:
        triples = self._triples[name]
        exact = _polynomials(np.geomspace(self.low, 1.0, 20_001), triples)
        values = torch.linalg.svdvals(orthogonalized(x, triples, 1e-7).double())
        products = sum(3 if c else 2 for _, _, c in triples)
        spans = ((float(each.min()), float(each.max())) for each in (exact, values))
        return SingularValues(name, len(triples), products, *spans)


def _polynomials(values: np.ndarray, triples: Sequence[Triple]) -> np.ndarray:
    """Apply the polynomials a x + b x^3 + c x^5 one after the other."""
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values
