"""Dion2 and NorDion2: Muon and NorMuon that orthogonalize a fraction of each matrix a step."""

from __future__ import annotations

from typing import Any

from ...kernels import TensorRule
from ...trainer.optimizer.muon import Muon, NorMuon
from ...trainer.optimizer.settings import Setting
from ...trainer.validation import number
from .rules import FRACTION, dion2_with, nordion2_with

__all__ = ["Dion2", "NorDion2"]


class Dion2(Muon):
    """Dion2 optimizer: Muon that orthogonalizes only a fraction of each matrix's rows or columns a step, the largest ones.

    The shorter dimension decides: rows if there are no more rows than columns, else columns. Their size is the 1-norm of the
    momentum. The momentum of the others is not applied and does not decay, so it grows until it is among the largest. With
    `fraction=1` the steps are those of `Muon(nesterov=False)`, to the bit where states are float32. Each block of
    `split`, and each matrix of a stack, has a selection of its own. Tensors that are not matrices take AdamW's steps.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        fraction: the share of rows or columns that a step orthogonalizes, rounded up, in (0, 1].
        nesterov: whether to orthogonalize, and select by, Nesterov's momentum, which the paper does not.
        **kwargs: arguments of `Muon`.

    Source: Ahn, Amsel & Langford (2025), "Dion2: A Simple Method to Shrink Matrix in Muon", arXiv 2512.16928; the 1-norm and
        the default fraction from its authors' code, microsoft/dion.
    """

    fraction = Setting(number, above=0, high=1, fixed=True)

    def __init__(
        self, learning_rate: float | None = None, fraction: float = FRACTION, nesterov: bool = False, **kwargs: Any
    ) -> None:
        self.fraction = fraction
        super().__init__(learning_rate, nesterov=nesterov, **kwargs)

    @property
    def rule(self) -> TensorRule:  # type: ignore[override]
        return dion2_with(self.orthogonalization, self.fraction)


class NorDion2(NorMuon):
    """NorDion2 optimizer: Dion2 with NorMuon's adaptive step size for each row of a matrix.

    A step selects rows, whatever the matrix's shape, and updates the running averages of these only. With `fraction=1` the
    steps are those of `NorMuon(nesterov=False)`, to the bit where states are float32.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        fraction: the share of rows that a step orthogonalizes, rounded up, in (0, 1].
        nesterov: whether to orthogonalize, and select by, Nesterov's momentum.
        **kwargs: arguments of `NorMuon`.

    Source: microsoft/dion, NorDion2, which is Ahn, Amsel & Langford (2025), arXiv 2512.16928, with Li et al. (2025), alg. 1.
    """

    fraction = Setting(number, above=0, high=1, fixed=True)

    def __init__(
        self, learning_rate: float | None = None, fraction: float = FRACTION, nesterov: bool = False, **kwargs: Any
    ) -> None:
        self.fraction = fraction
        super().__init__(learning_rate, nesterov=nesterov, **kwargs)

    @property
    def rule(self) -> TensorRule:  # type: ignore[override]
        return nordion2_with(self.orthogonalization, self.fraction)
