"""Adafactor and CAME: averages of squares are kept of rows and columns only, in the last two dimensions.

Each is one of three rules, by the weight's shape: for matrices; for matrices of a single element, of which rows and columns
are elements, too; and for vectors, with one average for each element.
"""

from ..language import jit, reduction, rule, rule_by_shape, tl
from .common import clipped, norm_of, weighted


@jit
def average(old, share, square, added):
    """Return the average with another square, already multiplied by its share, plus a number. Shazeer & Stern, alg. 4."""
    return (1.0 - share) * old + (square + share * added)


@jit
def shared_square(g, share):
    """Return share g^2, where g^2 alone may overflow."""
    return g * share * g


@jit
def rms(square, count):
    return norm_of(square / count)


@reduction(op="mean", scope=("row", "column"), means=("row",))
def adafactor_squares(w, g, state, hyper):
    clip, new = hyper
    square = shared_square(clipped(g, clip), new)
    return square, square


@adafactor_squares.finish
def adafactor_averages(sums, kept, hyper):
    """Return the new averages, and the roots of those of columns."""
    row_square, column_square = sums
    row, column = kept
    (new,) = hyper
    column = average(column, new, column_square, 0.0)
    return average(row, new, row_square, 0.0), column, tl.sqrt(column)


@jit
def adafactor_direction(g, root, epsilon1):
    """Return the gradient over this root, which is at least epsilon1, and at least 2^-63, whose square float32 has."""
    return g / tl.maximum(root, tl.maximum(epsilon1, 1.0842021724855044e-19))


@jit
def factored_direction(g, row, column_root, row_mean, epsilon1):
    """Return the gradient over the root of the factored average."""
    return adafactor_direction(g, tl.sqrt(row / tl.maximum(row_mean, epsilon1)) * column_root, epsilon1)


@jit
def adafactor_step(w, step, lr, decay, epsilon2, limit, w2, step2, count):
    """Return the new weight. Shazeer & Stern (2018), alg. 5."""
    rate = lr * tl.maximum(rms(w2, count), epsilon2) / tl.maximum(rms(step2, count) / limit, 1.0)
    return w - (rate * step + weighted(decay, w))


@reduction(reduction=adafactor_squares, feeds_next=True)
def adafactor_norms(w, g, state, hyper, sums):
    clip, epsilon1 = hyper
    row, _column, column_root, row_mean = sums
    step = factored_direction(clipped(g, clip), row, column_root, row_mean, epsilon1)
    return w * w, step * step, 1.0


@rule(reduction=adafactor_norms)
def adafactor_of_matrices(w, g, state, hyper, sums):
    """Adafactor for matrices."""
    lr, decay, clip, epsilon1, epsilon2, limit = hyper
    w2, step2, count, row, _column, column_root, row_mean = sums
    step = factored_direction(clipped(g, clip), row, column_root, row_mean, epsilon1)
    return adafactor_step(w, step, lr, decay, epsilon2, limit, w2, step2, count), state


@jit
def adafactor_of_one(g, row, column, new, epsilon1):
    """Return the direction for a matrix of one element, and its new averages."""
    square = shared_square(g, new)
    row, column = average(row, new, square, 0.0), average(column, new, square, 0.0)
    return factored_direction(g, row, tl.sqrt(column), row, epsilon1), row, column


@reduction
def adafactor_norms_of_elements(w, g, state, hyper):
    row, column = state
    clip, new, epsilon1 = hyper
    step, row, column = adafactor_of_one(clipped(g, clip), row, column, new, epsilon1)
    return w * w, step * step, 1.0


@rule(reduction=adafactor_norms_of_elements, full_precision=("row", "column"), nonnegative=("row", "column"))
def adafactor_of_elements(w, g, state, hyper, sums):
    """Adafactor for matrices of one element, as kernels of 1 x 1 have."""
    row, column = state
    lr, decay, clip, new, epsilon1, epsilon2, limit = hyper
    w2, step2, count = sums
    step, row, column = adafactor_of_one(clipped(g, clip), row, column, new, epsilon1)
    return adafactor_step(w, step, lr, decay, epsilon2, limit, w2, step2, count), (row, column)


@reduction
def adafactor_norms_of_vectors(w, g, state, hyper):
    (var,) = state
    clip, new, epsilon1 = hyper
    g = clipped(g, clip)
    step = adafactor_direction(g, tl.sqrt(average(var, new, shared_square(g, new), 0.0)), epsilon1)
    return w * w, step * step, 1.0


@rule(reduction=adafactor_norms_of_vectors, full_precision=("var",), nonnegative=("var",))
def adafactor_of_vectors(w, g, state, hyper, sums):
    """Adafactor for vectors and scalars."""
    (var,) = state
    lr, decay, clip, new, epsilon1, epsilon2, limit = hyper
    w2, step2, count = sums
    g = clipped(g, clip)
    var = average(var, new, shared_square(g, new), 0.0)
    step = adafactor_direction(g, tl.sqrt(var), epsilon1)
    return adafactor_step(w, step, lr, decay, epsilon2, limit, w2, step2, count), (var,)


@rule_by_shape(adafactor_of_matrices, adafactor_of_elements, adafactor_of_vectors, state=("row", "column", "var"))
def adafactor(shape):
    """Adafactor: steps relative to the RMS of the weights, by a factored average. Shazeer & Stern (2018), alg. 4 and 5.

    `lr` is min(lr, 1 / sqrt(t)); `new` is the share of this gradient in the averages, t^-0.8 in the paper.
    """
    if len(shape) < 2:
        return adafactor_of_vectors
    return adafactor_of_elements if tuple(shape[-2:]) == (1, 1) else adafactor_of_matrices


@reduction(op="mean", scope=("row", "column"), means=("row",))
def came_squares(w, g, state, hyper):
    clip, one_minus_beta2 = hyper
    square = shared_square(clipped(g, clip), one_minus_beta2)
    return square, square


@came_squares.finish
def came_averages(sums, kept, hyper):
    """Return the new averages, and the inverse roots of those of columns."""
    row_square, column_square = sums
    row, column = kept
    one_minus_beta2, epsilon1 = hyper
    column = average(column, one_minus_beta2, column_square, epsilon1)
    return average(row, one_minus_beta2, row_square, epsilon1), column, 1.0 / tl.sqrt(column)


@jit
def over_root(x, row, column_factor, row_mean):
    """Return x over the root of a factored average. Its two factors are applied one after the other: they may be tiny."""
    return x * (1.0 / tl.sqrt(row / row_mean)) * column_factor


@reduction(reduction=came_squares, feeds_next=True)
def came_norms(w, g, state, hyper, sums):
    (clip,) = hyper
    row, _column, column_factor, row_mean = sums
    step = over_root(clipped(g, clip), row, column_factor, row_mean)
    return step * step, 1.0


@jit
def came_mean(step, mean, beta1, one_minus_beta1, limit, step2, count):
    """Return the step, limited by its root mean square, and the momentum with it."""
    step = step / tl.maximum(rms(step2, count) / limit, 1.0)
    return step, beta1 * mean + one_minus_beta1 * step


@reduction(op="mean", scope=("row", "column"), means=("unstable_row",), reduction=came_norms, feeds_next=True)
def came_instability(w, g, state, hyper, sums):
    """Average the squares of the differences of step and momentum over rows and columns."""
    (mean,) = state
    clip, beta1, one_minus_beta1, one_minus_beta3, limit = hyper
    step2, count, row, _column, column_factor, row_mean = sums
    step = over_root(clipped(g, clip), row, column_factor, row_mean)
    step, mean = came_mean(step, mean, beta1, one_minus_beta1, limit, step2, count)
    square = shared_square(step - mean, one_minus_beta3)
    return square, square


@came_instability.finish
def came_instabilities(sums, kept, hyper):
    """Return the new averages, and the inverse roots of those of columns."""
    row_square, column_square = sums
    unstable_row, unstable_column = kept
    one_minus_beta3, epsilon2 = hyper
    column = average(unstable_column, one_minus_beta3, column_square, epsilon2)
    return average(unstable_row, one_minus_beta3, row_square, epsilon2), column, 1.0 / tl.sqrt(column)


@rule(reduction=came_instability)
def came_of_matrices(w, g, state, hyper, sums):
    """CAME for matrices."""
    (mean,) = state
    lr, decay, clip, beta1, one_minus_beta1, limit = hyper
    (
        unstable_row, _unstable_column, unstable_factor, unstable_mean, step2, count, row, _column, column_factor, row_mean,
    ) = sums  # fmt: skip
    step = over_root(clipped(g, clip), row, column_factor, row_mean)
    step, mean = came_mean(step, mean, beta1, one_minus_beta1, limit, step2, count)
    direction = over_root(mean, unstable_row, unstable_factor, unstable_mean)
    return w - (lr * direction + weighted(decay, w)), (mean,)


@reduction
def came_norms_of_elements(w, g, state, hyper):
    (column,) = state
    clip, one_minus_beta2, epsilon1 = hyper
    g = clipped(g, clip)
    step = g / tl.sqrt(average(column, one_minus_beta2, shared_square(g, one_minus_beta2), epsilon1))
    return step * step, 1.0


@rule(
    reduction=came_norms_of_elements,
    full_precision=("row", "column", "unstable_row", "unstable_column"),
    nonnegative=("row", "column", "unstable_row", "unstable_column"),
)
def came_of_elements(w, g, state, hyper, sums):
    """CAME for matrices of one element, as kernels of 1 x 1 have, where rows are their own means."""
    mean, row, column, unstable_row, unstable_column = state
    (
        lr, decay, clip, beta1, one_minus_beta1, one_minus_beta2, one_minus_beta3, epsilon1, epsilon2, limit,
    ) = hyper  # fmt: skip
    step2, count = sums
    g = clipped(g, clip)
    square = shared_square(g, one_minus_beta2)
    row = average(row, one_minus_beta2, square, epsilon1)
    column = average(column, one_minus_beta2, square, epsilon1)
    step, mean = came_mean(g / tl.sqrt(column), mean, beta1, one_minus_beta1, limit, step2, count)
    square = shared_square(step - mean, one_minus_beta3)
    unstable_row = average(unstable_row, one_minus_beta3, square, epsilon2)
    unstable_column = average(unstable_column, one_minus_beta3, square, epsilon2)
    w = w - (lr * (mean / tl.sqrt(unstable_column)) + weighted(decay, w))
    return w, (mean, row, column, unstable_row, unstable_column)


@reduction
def came_norms_of_vectors(w, g, state, hyper):
    (var,) = state
    clip, one_minus_beta2, epsilon1 = hyper
    g = clipped(g, clip)
    step = g / tl.sqrt(average(var, one_minus_beta2, shared_square(g, one_minus_beta2), epsilon1))
    return step * step, 1.0


@rule(reduction=came_norms_of_vectors, full_precision=("var", "unstable_var"), nonnegative=("var",))
def came_of_vectors(w, g, state, hyper, sums):
    """CAME for vectors and scalars, which are as steady as any; `unstable_var` is there because files have it."""
    mean, var, unstable_var = state
    lr, decay, clip, beta1, one_minus_beta1, one_minus_beta2, epsilon1, limit = hyper
    step2, count = sums
    g = clipped(g, clip)
    var = average(var, one_minus_beta2, shared_square(g, one_minus_beta2), epsilon1)
    _step, mean = came_mean(g / tl.sqrt(var), mean, beta1, one_minus_beta1, limit, step2, count)
    return w - (lr * mean + weighted(decay, w)), (mean, var, unstable_var)


@rule_by_shape(
    came_of_matrices,
    came_of_elements,
    came_of_vectors,
    state=("mean", "row", "column", "var", "unstable_row", "unstable_column", "unstable_var"),
)
def came(shape):
    """CAME: an average of Adafactor's steps, divided by the root of a factored average of (step - average)^2.

    Vectors skip the division. Luo et al. (2023), alg. 2.
    """
    if len(shape) < 2:
        return came_of_vectors
    return came_of_elements if tuple(shape[-2:]) == (1, 1) else came_of_matrices
