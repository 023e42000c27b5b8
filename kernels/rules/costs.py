"""What the updates of rules of whole matrices cost, in floating-point operations, by which ranks share the work."""

from __future__ import annotations

import math
from collections.abc import Sequence

TURNED_EVERY = 10  # steps: SOAP's default


def newton_schulz_cost(rows: int, columns: int, steps: int, squares: int, gram: bool | None = None) -> float:
    """That of orthogonalizing a matrix.

    With m <= n, each step takes two products of 2 m^2 n operations, and one of 2 m^3 where its polynomial has a fifth power.
    In the Gram form the long products are two, and two more at each restart; the others are of 2 m^3.

    Args:
        rows, columns: of the matrix.
        steps: of the iteration.
        squares: how many of these have a fifth power.
        gram: whether on the products of rows; None means where n > 2 m.

    Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks", section "Runtime analysis";
    Zhang et al. (2026), "Gram Newton-Schulz".
    """
    m, n = sorted((rows, columns))
    if not (n > 2 * m if gram is None else gram):
        return 4.0 * steps * m * m * n + 2.0 * squares * m**3
    restarts = len(range(2, steps, 3))  # as float16 needs them
    begun = 1 + restarts  # stretches of steps: in each, all but the first change Q, and all but the last change G twice
    short = squares + 3 * (steps - begun)
    return 4.0 * begun * m * m * n + 2.0 * short * m**3


def bases_cost(shape: Sequence[int], sides: Sequence[int]) -> float:
    """That of SOAP's step for a tensor of this shape.

    Per dimension with a basis of side s: the gradient, its mean and the step are turned, and the Gram matrix is formed, four
    products of 2 s operations per element; every so many steps the basis follows by a product and a QR decomposition with Q,
    about (2 + 8/3) s^3.

    Args:
        shape: that of the tensor.
        sides: of each dimension the side of its basis, 0 where it has none.

    Source: Vyas et al. (2024), alg. 3 and 4; Golub & Van Loan (2013), "Matrix Computations", section 5.2.
    """
    turns = (2.0 + 8.0 / 3.0) / TURNED_EVERY
    return sum(8.0 * math.prod(shape) * side + turns * side**3 for side in sides)
