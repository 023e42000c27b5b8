"""Costs of matrix updates in floating-point operations, by which the work is divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

TURNED_EVERY = 10  # steps between updates of the bases: SOAP's default


def newton_schulz_cost(rows: int, columns: int, steps: int, squares: int, gram: bool | None = None) -> float:
    """Return the number of floating-point operations that orthogonalizing a matrix by Newton-Schulz steps takes.

    With m <= n, each step takes two products of 2 m^2 n operations, and one of 2 m^3 if its polynomial has a fifth power, as
    `squares` of the steps have. The Gram form (`gram` None: if n >= 1.5 m) takes two products of 2 m^2 n, and two more at
    each restart; its other products take 2 m^3.

    Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks", section "Runtime analysis";
    Zhang et al. (2026), "Gram Newton-Schulz".
    """
    m, n = sorted((rows, columns))
    if not (2 * n >= 3 * m if gram is None else gram):  # on every device, as ranks must agree
        return 4.0 * steps * m * m * n + 2.0 * squares * m**3
    restarts = len(range(2, steps, 3))  # as often as float16 needs them
    stretches = 1 + restarts  # of steps between restarts: all but the first change Q, and all but the last change G twice
    short = squares + 3 * (steps - stretches)
    return 4.0 * stretches * m * m * n + 2.0 * short * m**3


def bases_cost(shape: Sequence[int], sides: Sequence[int]) -> float:
    """Return the average number of floating-point operations that a SOAP step of a tensor takes.

    Per dimension with a basis, of side s > 0: the gradient, its mean and the step are rotated, and the Gram matrix is
    formed, which takes four products of 2 s operations per element. Every `TURNED_EVERY` steps a product and a QR
    decomposition with Q, about (2 + 8/3) s^3 operations, update the basis.

    Source: Vyas et al. (2024), alg. 3 and 4; Golub & Van Loan (2013), "Matrix Computations", section 5.2.
    """
    turns = (2.0 + 8.0 / 3.0) / TURNED_EVERY
    return sum(8.0 * math.prod(shape) * side + turns * side**3 for side in sides)
