"""The rows, columns and slices of a launch's tensors: the vectors of their means, and their states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .language import Rule

MATRICES, ROWS, COLUMNS = range(3)  # columns of `sizes`
_MULTIPLE = 4  # of which each tensor's start in a vector is one, so that GPUs load 16 bytes at once


class Parts:
    """The parts of tensors that the means of a rule are over, and vectors with a number for each part of all tensors.

    Elements of a tensor are those of matrices, one after the other, each row by row. A tensor whose slices are averaged is
    one matrix with a row for each slice. The weights must be walked in C's order; `states` has for each its states, then
    those that the rule's reductions keep.

    Attributes:
        sizes: int64 [n_tensors, 3], numbers of matrices, of their rows, and of their columns; no matrices without elements.
        counts: for "row", "column" and "matrix" the number of parts of each tensor, int64 [n_tensors].
        starts: for each of these the place of each tensor's first part in a vector.
        vectors: the results of the rule's reductions that are vectors, in order, as the rule gets them.
        scopes: for each of these "row", "column" or "matrix".
        means: for each reduction the means of its values, before they are finished; [] for other reductions.
        kept: for each reduction the states that it keeps, by tensor; [] for other reductions.
    """

    def __init__(
        self, rule: Rule, weights: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
    ) -> None:
        device = weights[0].device
        self.sizes = np.array([matrices_of(weight.shape, rule.parts) for weight in weights], dtype=np.int64)
        matrices = self.sizes[:, MATRICES]
        self.counts = {
            "row": matrices * self.sizes[:, ROWS],
            "column": matrices * self.sizes[:, COLUMNS],
            "matrix": matrices,
        }
        rooms = {scope: -(-counts // _MULTIPLE) * _MULTIPLE for scope, counts in self.counts.items()}
        self.starts = {scope: np.cumsum(room) - room for scope, room in rooms.items()}
        self.scopes: list[str] = []
        self.vectors: list[torch.Tensor] = []
        self.means: list[list[torch.Tensor]] = []
        self.kept: list[list[list[torch.Tensor]]] = []
        totals = {scope: int(room.sum()) for scope, room in rooms.items()}
        place = len(rule.state)
        for reduction in rule.reductions:
            kept = [list(row[place : place + len(reduction.kept)]) for row in states]
            place += len(reduction.kept)
            scopes = [walked_as(scope) for scope in reduction.own_scopes if scope != "tensor"]
            vectors = [torch.zeros(totals[scope], dtype=dtype, device=device) for scope in scopes]
            means = vectors
            if reduction.finished is not None and scopes:
                means = [torch.zeros(totals[walked_as(scope)], dtype=dtype, device=device) for scope in reduction.scope]
            self.scopes += scopes
            self.vectors += vectors
            self.means.append(means)
            self.kept.append(kept if scopes else [])

    def addresses_in(self, vector: torch.Tensor, scope: str) -> np.ndarray:
        """Return the address of each tensor's first number in a vector, int64 [n_tensors]."""
        return vector.data_ptr() + self.starts[scope] * vector.element_size()

    def addresses(self) -> np.ndarray:
        """Return further rows of the table of addresses, int64 [2 + n_vectors, n_tensors].

        They are the sizes of rows and of matrices in elements, and the addresses of the vectors.
        """
        rows = [self.sizes[:, COLUMNS], self.sizes[:, ROWS] * self.sizes[:, COLUMNS]]
        return np.stack([*rows, *(self.addresses_in(*pair) for pair in zip(self.vectors, self.scopes, strict=True))])


def walked_as(scope: str) -> str:
    """Return the scope that a part has in a matrix: slices are rows."""
    return "row" if scope == "slice" else scope


def matrices_of(shape: torch.Size, parts: str | None) -> tuple[int, int, int]:
    """Return the numbers of matrices, rows and columns that a tensor is for a rule with means over these `parts`."""
    if not shape.numel():
        return 0, 1, 1
    if parts == "slice":
        return 1, shape[0] if shape else 1, shape[1:].numel()
    return math.prod(shape[:-2]), shape[-2], shape[-1]
