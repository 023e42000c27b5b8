"""What tests know of one rule and of the optimizer that it is for: the row that an oracle is marked with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["TABLE", "Peer", "Result", "Row", "clip", "moments", "norm_of", "row", "scaled", "sign", "sum_of"]


class Peer(NamedTuple):
    """Another library's optimizer, and the arguments with which 25 steps of it in float64 are those of ours.

    Attributes:
        arguments: ours. What both differ in is switched off on one side or the other.
        name, their_arguments: their class, and its arguments.
        library: the module of the class.
        dimensions: the tensors that it takes, by number of dimensions.
        close: how near the weights must come.
    """

    arguments: dict[str, Any]
    name: str
    their_arguments: dict[str, Any]
    library: str = "pytorch_optimizer"
    dimensions: tuple[int, ...] = (0, 1, 2)
    close: tuple[float, float] = (1e-9, 1e-11)


class Row(NamedTuple):
    """All that is special about a rule, and about the optimizer of the same name without underscores.

    Attributes:
        oracle: one step in NumPy, `(w, g, state, h) -> (new_w, new_state)`; None for rules that only have peers.
        peers: optimizers of other libraries, by the name of the test's case.
        options: arguments of the optimizer that are not its defaults, for tests of interfaces.
        hyper: hyper-parameters for the oracle where they are not `HYPER` of parity_steps.py, for tensors in turn.
        ranges: sizes of states where they are not `RANGES` of parity_steps.py.
        ulps: how far a step may be from the oracle's: farther where differences, or roots and quotients that were rounded on
            the way, up to nine times, are multiplied.
        along_gradient: whether each element goes down its gradient, whatever came before: `cautious` then changes nothing.
        packed_distance: how far 8-bit states may lead from float32 states in a few steps, in parts of the way.
        arrays: how many arrays a step reads and writes, those of its reductions twice; None: not tested.
        benchmarked: whether benchmarks/registry.py finds a peer, to be timed against it.
        registers: the most that a thread of the compiled rule may take.
        budget: the most time its arithmetic may take, in parts of the time that its memory accesses take.
        quick: whether its machine code is looked at in the quick tier.
    """

    oracle: Callable[..., Any] | None = None
    peers: dict[str, Peer] = {}  # noqa: RUF012  # never changed
    options: dict[str, Any] = {}  # noqa: RUF012
    hyper: tuple[dict[str, float], dict[str, float]] = ({}, {})
    ranges: dict[str, tuple[float, float]] = {}  # noqa: RUF012
    ulps: int = 2
    along_gradient: bool = False
    packed_distance: float = 0.1
    arrays: int | None = None
    benchmarked: bool = True
    registers: int = 64
    budget: float = 0.5
    quick: bool = False


TABLE: dict[str, Row] = {}  # by the name of the rule


def row(oracle: Any = None, **settings: Any) -> Any:
    """Decorator of an oracle, `@row` or `@row(ulps=3, ...)`: its row in the table is that of the rule of its name."""
    if oracle is None:
        return lambda oracle: row(oracle, **settings)
    assert oracle.__name__ not in TABLE
    TABLE[oracle.__name__] = Row(oracle, **settings)
    return oracle


# What oracles are made of.


class Result(NamedTuple):
    """A new weight or state, the size of the largest term of the sum that it is, and an error that is beyond the rule."""

    value: np.ndarray
    scale: np.ndarray
    slack: np.ndarray | float = 0.0


def sum_of(*terms):
    return Result(sum(terms), np.max([np.abs(term) for term in terms], axis=0))


def clip(x, bound):
    return np.minimum(np.maximum(x, -bound), bound)  # NaN stays NaN in both


def sign(x):
    # mshadow_op::sign: 0 for 0, and for NaN
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def moments(g, mean, var, h):
    return sum_of(h.beta1 * mean, h.one_minus_beta1 * g), sum_of(h.beta2 * var, h.one_minus_beta2 * g**2)


def norm_of(x):
    return np.sqrt(np.sum(x**2))


def scaled(w, rate, h, *terms):
    """w - rate (the sum of the terms), where the rate comes from a norm."""
    moved = sum_of(w, *(-rate * term for term in terms))
    return moved._replace(slack=h.sum_error * sum(np.abs(rate * term) for term in terms))
