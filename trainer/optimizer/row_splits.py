"""The argument `split` of Muon and NorMuon: which blocks of a parameter's rows are orthogonalized as separate matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NoReturn

import torch

from ...kernels.messages import did_you_mean, listed
from ...kernels.rules.muon import RowPattern
from ..validation import integer

Blocks = int | tuple[int, ...] | RowPattern  # a number of equal blocks, the rows of each, or where their rows are
_AXIS = re.compile(r"([A-Za-z_]\w*)(?:=(\d+))?")


def checked_blocks(argument: str, value: Any) -> Blocks:
    """Return checked blocks of rows: a number of equal blocks, the rows of each block, or a `RowPattern`."""
    if isinstance(value, str):
        return row_pattern(argument, value)
    if isinstance(value, (list, tuple)) and value:
        return tuple(integer(f"{argument}[{k}]", rows, low=1) for k, rows in enumerate(value))
    if isinstance(value, (list, tuple, Mapping)) or callable(value):
        raise TypeError(
            f"{argument}={value!r}: must be a number of equal blocks of rows, a list of the rows of each block, or a "
            "pattern of rows such as '(row part=2) -> part row'"
        )
    return integer(argument, value, low=1)


@cache
def row_pattern(argument: str, text: str) -> RowPattern:
    """Return the `RowPattern` of a string such as "(head=8 part=2 row) -> part (head row)".

    Left of the arrow stand the axes that number the rows of the fused matrix, the slowest first, each with its length but
    for one, which follows from the rows. Right of it stand the same axes: first those that number the separate matrices,
    and last the axis, or the axes in parentheses, of the rows of each.
    """
    left, arrow, right = text.partition("->")
    left, right = left.strip(), right.strip()
    composed = re.fullmatch(r"([^()]*?)(?:\(([^()]+)\)|([^()\s]+))", right)
    if not arrow or composed is None:
        raise ValueError(
            f"{argument}={text!r}: must be the axes of the rows, '->', the axes that number the matrices, and last the axis "
            "of the rows of each, as in '(row part=2) -> part row' or '(head=8 part=2 row) -> part (head row)'"
        )
    if left.startswith("(") and left.endswith(")"):
        left = left[1:-1]
    axes = [_AXIS.fullmatch(word) for word in left.split()]
    leading, rows = composed[1].split(), (composed[2] or composed[3]).split()
    names = [axis[1] for axis in axes if axis is not None]
    lengths = [int(axis[2]) if axis[2] else -1 for axis in axes if axis is not None]
    if None in axes or len(set(names)) < len(names) or 0 in lengths:
        raise ValueError(f"{argument}={text!r}: {left!r} must be different names, each with a length >= 1, as in 'head=8'")
    if lengths.count(-1) > 1:
        raise ValueError(f"{argument}={text!r}: {lengths.count(-1)} axes have no length; at most one may have none")
    if sorted(leading + rows) != sorted(names):
        raise ValueError(
            f"{argument}={text!r}: right of '->' must stand {', '.join(names)}, each once and without a length, not "
            f"{', '.join(leading + rows)}"
        )
    return RowPattern(tuple(lengths), tuple(map(names.index, leading + rows)), len(leading))


def check_rows(argument: str, blocks: Blocks, name: str, shape: Sequence[int], rows: int) -> None:
    """Raise ValueError if blocks do not add up to the rows of a matrix; `name` and `shape` are the parameter's."""
    if isinstance(blocks, int):
        if rows % blocks:
            raise ValueError(
                f"{argument}={blocks}: {name} has {rows} rows, shape {tuple(shape)}, which are not that many equal blocks: "
                "must divide them, or be a list of the rows of each block"
            )
    elif isinstance(blocks, RowPattern):
        given = math.prod(length for length in blocks.lengths if length > 0)
        if rows % given or (-1 not in blocks.lengths and rows != given):
            raise ValueError(
                f"{argument}: the lengths of its axes make {given} rows, but {name} has {rows}, shape {tuple(shape)}"
                f"{', which is no multiple of that' if -1 in blocks.lengths else ''}"
            )
    elif sum(blocks) != rows:
        raise ValueError(
            f"{argument}={list(blocks)}: these are {sum(blocks)} rows, but {name} has {rows}, shape {tuple(shape)}"
        )


def checked_split(name: str, value: Any) -> Any:
    """Return the argument `split`, checked: blocks, a mapping from patterns of names to blocks, or a function."""
    if not needs_names(value):
        blocks = checked_blocks(name, value)
        return value if isinstance(blocks, RowPattern) else blocks  # a string, as it is saved
    if isinstance(value, Mapping):
        if not value:
            raise ValueError(f"{name}={{}}: must have at least one pattern, or be None")
        for pattern, blocks in value.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{name} has the key {pattern!r}: must be a pattern of names, such as '*qkv.weight'")
            checked_blocks(f"{name}[{pattern!r}]", blocks)
    return value


def needs_names(split: Any) -> bool:
    return isinstance(split, Mapping) or callable(split)


def refuse_names(optimizer: Any) -> NoReturn:
    """Raise ValueError: the optimizer's `split` needs names, and it is under no Trainer."""
    raise ValueError(
        f"split={optimizer.split!r} needs the names of the parameters, which {type(optimizer).__name__} has under a Trainer "
        "only: elsewhere it must be a number of blocks or a list of their rows, in tristep.optim for each group"
    )


def blocks_by_parameter(
    split: Mapping[str, Any] | Callable[[str, torch.Size], Any],
    params: Sequence[torch.Tensor],
    names: Sequence[str],
    matrix_shape: Callable[[torch.Size], tuple[int, int] | None],
) -> list[Blocks]:
    """Return the blocks of each parameter, an empty tuple for parameters that are not split.

    Of a mapping the first matching pattern counts; raise ValueError if some pattern is never the first. `matrix_shape`
    returns (rows, columns) of a tensor as a matrix, or None if it cannot be split.
    """
    all_blocks: list[Blocks] = []
    used: set[str] = set()
    for param, name in zip(params, names, strict=True):
        blocks: Blocks = ()
        if matrix := matrix_shape(param.shape):
            argument, value = _blocks_of(split, name, param.shape)
            if value is not None:
                blocks = checked_blocks(argument, value)
                check_rows(argument, blocks, repr(name), param.shape, matrix[0])
                used.add(argument)
        all_blocks.append(blocks)
    matrices = [name for param, name in zip(params, names, strict=True) if matrix_shape(param.shape)]
    for pattern in split if isinstance(split, Mapping) else ():
        if _entry(pattern) not in used:
            raise ValueError(
                f"{_entry(pattern)}: is the first pattern of no matrix.{did_you_mean(pattern, matrices)} The matrices are "
                f"{listed(map(repr, matrices)) or 'none'}"
            )
    return all_blocks


def _blocks_of(split: Any, name: str, shape: torch.Size) -> tuple[str, Any]:
    """Return (argument name for messages, blocks or None) of a parameter."""
    if not isinstance(split, Mapping):
        return f"split({name!r}, {tuple(shape)})", split(name, shape)
    for pattern, blocks in split.items():
        if any(fnmatchcase(name, each.strip()) for each in pattern.split("|")):
            return _entry(pattern), blocks
    return "split", None


def _entry(pattern: str) -> str:
    return f"split[{pattern!r}]"
