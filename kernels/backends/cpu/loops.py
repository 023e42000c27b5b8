"""The loop that computes a rule on a piece of a tile: its source text, generated, and its compilation.

The source depends on the number of states, so it is generated, with the rule's own function called in its middle.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numba
import numpy as np
import torch

from ... import storage
from ...language import Reduction, Rule
from ...launch import FIRST_STATE, GRADIENT, WEIGHT, Launch
from ...metrics import RuleWithMetric
from ...storage import MasterKind, Storage
from . import low_precision
from .disk_cache import compiling, engine_text, entry, import_generated
from .driver import (
    ADDRESSES,
    FLOAT64,
    HYPER,
    INT64,
    N_HYPER,
    N_SUMS,
    N_TENSORS,
    N_VALUES,
    PARTIALS,
    SIZES,
    SUMS,
    TILE,
    pointer,
)
from .intrinsics import REORDERED, TO, double_of_bits, float_of_bits, larger_of_double, larger_of_float, same
from .low_precision import LOAD, MEMORY, PACKING, ROUNDS_TO, STORE, equal
from .means import finish_of_sums, finish_source, first_row, loop_by_rows, sum_lines, vector
from .ops import bind

BLOCK = (
    4096  # elements that are summed in the arithmetic's type; longer sums of low-precision numbers drift by parts in 10^5
)
# A tile of means begins anywhere, packed states are unpacked from the start of a block on.
LEAD = f"\n    lead = start % {storage.BLOCK}\n    start -= lead\n    n += lead"
UNPACKED = 8192  # elements whose packed states are unpacked at a time; they stay in the second-level cache
loops: dict[tuple[Any, ...], Any] = {}
compile_lock = threading.Lock()


def compiled_loop(launch: Launch, function: Rule | Reduction | RuleWithMetric, finishes: bool = False) -> Any:
    """Return the loop over a piece of a tile or, if it `finishes`, the one that finishes means, for some matrices."""
    zero_grads = launch.zero_grads and not isinstance(function, Reduction)
    key: Any = (function, launch.rule, launch.weight_dtype, launch.gradient_dtype, launch.storage, zero_grads, finishes)
    with compile_lock:
        if key not in loops:
            with compiling():
                loops[key] = _compile(*key)
        return loops[key]


def _compile(
    function: Rule | Reduction | RuleWithMetric,
    rule: Rule,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    stored: Storage,
    zero_grads: bool,
    finishes: bool,
) -> Any:
    dtype = torch.float64 if weight_dtype == torch.float64 else torch.float32
    scalar = np.float64 if dtype == torch.float64 else np.float32
    bound: Any = function
    sums = not isinstance(function, Rule)
    if finishes:
        assert isinstance(function, Reduction)
        sums, bound = function.op == "mean", function.finished
        source = finish_source(function, rule, bool(stored.master)) if sums else finish_of_sums(function, rule)
    else:
        source = _loop_source(function, rule, weight_dtype, stored, zero_grads)
    names = {
        **{name: value for name, value in vars(low_precision).items() if name[0] != "_"},
        "function": None if bound is None else bind(bound, scalar),
        "real": scalar,
        "load_weight": LOAD.get(weight_dtype, same),
        "store_weight": STORE.get(weight_dtype, same),
        "rounds_to": ROUNDS_TO.get(weight_dtype, equal),
        "load_gradient": LOAD.get(gradient_dtype, TO[scalar]),
        **{
            name + _kind_of_code(*kind): function
            for kind, functions in PACKING.items()
            for name, function in zip(("unpack", "pack", "pack_at_random"), functions, strict=True)
        },
        "empty": np.empty,
        "float32": np.float32,
        "pointer": pointer,
        "carray": numba.carray,
        "INT64": INT64,
        "FLOAT64": FLOAT64,
        "WEIGHT": np.empty(0, dtype=MEMORY[weight_dtype]),
        "GRADIENT": np.empty(0, dtype=MEMORY[gradient_dtype]),
        "REAL": np.empty(0, dtype=MEMORY[dtype]),
        "HALF": np.empty(0, dtype="u2"),
        "BYTE": np.empty(0, dtype="u1"),
        "FLAG": np.empty(0, dtype="f4"),
        "ZERO": scalar(0),
        "ONE": scalar(1),
        "NOTHING": np.dtype(f"u{scalar(0).itemsize}").type(0),
        "larger": larger_of_double if dtype == torch.float64 else larger_of_float,
        "number": double_of_bits if dtype == torch.float64 else float_of_bits,
        "maximum": np.maximum,
        "entry": entry(*[numba.types.int64] * 4, fastmath=REORDERED if sums else False),
    }
    # numba's cache does not see the functions that a cached one calls: everything that decides goes into the file name.
    text = function.source if bound is None else bound.source
    key = repr((source, text, str(weight_dtype), str(gradient_dtype), stored, engine_text()))
    name = f"{function.name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return import_generated(name, source, names)


def _stored_as(stored: Storage, rule: Rule, name: str) -> torch.dtype:
    return stored.states[rule.state.index(name)]


def _multipliers(slot: int) -> tuple[int, ...]:
    return tuple(storage.multiplier(slot, element) for element in range(4))


def _stores(rule: Rule, weight_dtype: torch.dtype, stored: Storage, states: list[str], halves: list[str]) -> list[str]:
    stochastic = stored.stochastic and not stored.codes_only

    def at_random(value: str, slot: int, store: str = "store_at_random") -> str:
        return f"{store}({value}, key_of(key0, key1), start, i, {_multipliers(slot)})"

    if stored.master == MasterKind.SPLIT:
        lines = ["w[i] = high_bits(value)", "m[i] = low_bits(value)"]
    elif stored.master == MasterKind.SPLIT8:
        rounded = at_random("value", len(rule.state), "at_random24") if stochastic else "nearest24(value)"
        lines = [f"bits = {rounded}", "w[i] = high_of24(bits)", "m[i] = low_of24(bits)"]
    elif stochastic and weight_dtype == torch.bfloat16 and not stored.master:
        lines = [f"w[i] = {at_random('value', len(rule.state))}"]
    else:
        lines = ["w[i] = store_weight(value)"]
    for k, name in enumerate(rule.state):
        if name in rule.changed:
            new = f"new[{k}]"
            if states[k] in halves:
                new = at_random(new, k) if stochastic else f"store_bfloat16({new})"
            lines.append(f"{states[k]}[i] = {new}")
    return [*lines, "m[i] = value"] if stored.master == MasterKind.FULL else lines


def _address(row: int) -> str:
    return f"addresses[{row} * shared[{N_TENSORS}] + t]"


def _kind_of_code(dtype: torch.dtype, unsigned: bool) -> str:
    return "_unsigned" * unsigned + f"_{storage.CODES[dtype][0].bits}"


def _where_packed(row: int, dtype: torch.dtype) -> tuple[str, str]:
    """Return expressions for the codes and the scales, from element `start` on, of the state in this row of addresses."""
    codes, per_byte = _address(row), 8 // storage.CODES[dtype][0].bits  # elements
    room = f"((pointer(shared[{SIZES}], INT64)[t] + {per_byte - 1}) // {per_byte} + 15) // 16 * 16"
    scales = f"{codes} + {room} + start // {storage.BLOCK} * 4"
    return (
        f"carray(pointer({codes} + start // {per_byte}, BYTE), (n + {per_byte - 1}) // {per_byte})",
        f"carray(pointer({scales}, REAL), (n + {storage.BLOCK - 1}) // {storage.BLOCK})",
    )


def _unpack_lines(
    rule: Rule, stored: Storage, names: dict[str, str], packed: list[str], row: dict[str, int]
) -> tuple[str, str]:
    """Return the lines that allocate memory for unpacked states, and the lines that unpack the states."""
    room = unpack = ""
    for s in packed:
        room += f"\n    {s} = empty(n, float32)"
        dtype = _stored_as(stored, rule, names[s])
        codes, scales = _where_packed(row[s], dtype)
        kind = _kind_of_code(dtype, names[s] in rule.nonnegative)
        unpack += f"\n    unpack{kind}({codes}, {scales}, {s})"
    return room, unpack


def _pack_lines(
    rule: Rule, stored: Storage, states: list[str], packed: list[str], row: dict[str, int], key: int | None
) -> str:
    """Return the lines that pack changed states. `key`: the place of the key in `hyper`; None rounds to nearest."""
    lines = ""
    for k, name in enumerate(rule.state):
        if states[k] in packed and name in rule.changed:
            codes, scales = _where_packed(row[states[k]], stored.states[k])
            kind = "_at_random" * (key is not None) + _kind_of_code(stored.states[k], name in rule.nonnegative)
            given = "0, 0" if key is None else f"key_of(hyper[{key}], hyper[{key + 1}]), {_multipliers(k)}"
            lines += f"\n    pack{kind}({states[k]}, {codes}, {scales}, {given}, start)"
    return lines


def block_size(function: Rule | Reduction | RuleWithMetric, stored: Storage) -> int:
    if any(map(storage.is_packed, stored.states)) and not isinstance(function, Reduction):
        return UNPACKED
    return TILE if isinstance(function, Rule) else BLOCK


def _gathered_by(function: Reduction | RuleWithMetric) -> tuple[str, ...]:
    return function.metric.by if isinstance(function, RuleWithMetric) else (function.op,) * function.n_values


def _loop_source(
    function: Rule | Reduction | RuleWithMetric,
    rule: Rule,
    weight_dtype: torch.dtype,
    stored: Storage,
    zero_grads: bool = False,
) -> str:
    """Return the source of the function that computes `n` elements, from `start` on, of tensor `t` in the `j`-th tile."""
    states = [f"s{k}" for k in range(len(function.state))]
    arrays = ["w", "g", *states] + (["m"] if stored.master else [])
    kinds = {s: _stored_as(stored, rule, name) for s, name in zip(states, function.state, strict=True)}
    halves = [s for s in states if kinds[s] == torch.bfloat16]
    packed = [s for s in states if storage.is_packed(kinds[s])]
    like = {"w": "WEIGHT", "g": "GRADIENT", **dict.fromkeys(halves, "HALF")}
    if stored.master == MasterKind.SPLIT:
        like["m"] = "HALF"
    elif stored.master == MasterKind.SPLIT8:
        like["m"] = "BYTE"
    row = {"w": WEIGHT, "g": GRADIENT, "m": FIRST_STATE + len(rule.state)}
    row |= {s: FIRST_STATE + rule.state.index(name) for s, name in zip(states, function.state, strict=True)}
    given = "".join(
        f"\n    {a} = pointer({_address(row[a])} + start * {like.get(a, 'REAL')}.itemsize, {like.get(a, 'REAL')})"
        for a in arrays
        if a not in packed
    )
    averages = isinstance(function, Reduction) and function.op == "mean"
    hyper = "".join(f"h{k}, " for k in range(len(function.own_hyper)))
    given += "".join(f"\n    h{k} = hyper[{1 + rule.hyper.index(name)}]" for k, name in enumerate(function.own_hyper))
    places = function.numbers
    if any(scope == "tensor" for scope, _ in places):
        given += f"\n    sums = pointer(shared[{SUMS}] + t * shared[{N_SUMS}] * REAL.itemsize, REAL)"
    for k, (scope, place) in enumerate(places):
        address = f"pointer({vector(place, rule, bool(stored.master))}, REAL)"
        given += f"\n    sum{k} = sums[{place}]" if scope == "tensor" else f"\n    v{k} = {address}"
    sums = "".join(f"v{k}[i + shift], " if scope == "column" else f"sum{k}, " for k, (scope, _) in enumerate(places))
    weight = {
        MasterKind.FULL: "(m[i] if rounds_to(m[i], w[i]) else load_weight(w[i]))",
        MasterKind.SPLIT: "joined(w[i], m[i])",
        MasterKind.SPLIT8: "joined24(w[i], m[i])",
    }.get(stored.master, "load_weight(w[i])")
    read = "".join(f"load_bfloat16({s}[i]), " if s in halves else f"{s}[i], " for s in states)
    values = (
        f"{weight}, load_gradient(g[i]) * rescale, ({read}), ({hyper})"
        + (f", ({sums})" if function.n_numbers else "")
        + (", start + i" if "index" in function.extras else "")
    )
    n = 1 + len(rule.hyper)  # the place of the random key
    if stored.stochastic and not isinstance(function, Reduction):
        given += f"\n    key0, key1 = hyper[{n}], hyper[{n + 1}]"
    before = after = ""
    lines = [] if isinstance(function, Reduction) else _stores(rule, weight_dtype, stored, states, halves)
    if isinstance(function, Rule):
        lines.insert(0, f"value, new = function({values})")
    elif isinstance(function, Reduction) and averages:
        lines = [f"each = function({values})", *sum_lines(function)]
    else:
        result = "each" if isinstance(function, Reduction) else "value, new, each"
        lines.insert(0, f"{result} = function({values})")
        largest = [by == "max" for by in _gathered_by(function)]
        before = "".join(f"\n    a{k} = {'NOTHING' if most else 'ZERO'}" for k, most in enumerate(largest))
        updates = [f"a{k} = larger(a{k}, each[{k}])" if most else f"a{k} += each[{k}]" for k, most in enumerate(largest)]
        if isinstance(function, RuleWithMetric) and function.metric.counts_unchanged:
            lines.insert(0, f"old = {weight}")
            updates[-1] = f"a{len(largest) - 1} += ONE if {weight} == old else ZERO"  # NaN counts as changed
        lines += updates
        after = f"\n    partials = pointer(shared[{PARTIALS}] + j * shared[{N_VALUES}] * FLOAT64.itemsize, FLOAT64)"
        for k, most in enumerate(largest):
            together = f"maximum(partials[{k}], number(a{k}))" if most else f"partials[{k}] + a{k}"
            after += f"\n    partials[{k}] = {together}"
    lines += ["g[i] = 0"] * zero_grads
    if averages or any(scope != "tensor" for scope, _ in places):
        loop = loop_by_rows(function, lines, first_row(rule, bool(stored.master)), averages and bool(packed))
    else:
        loop = "\n        ".join(["    for i in range(n):", *lines])
    key = n if stored.stochastic else None
    pack = "" if isinstance(function, Reduction) else _pack_lines(rule, stored, states, packed, row, key)
    room, unpack = _unpack_lines(rule, stored, dict(zip(states, function.state, strict=True)), packed, row)
    lead = LEAD if averages and packed else ""
    return f'''"""Generated by tristep from {function.kind} {function.name}; safe to delete."""


@entry
def compute(shared, t, j, start, n):
    addresses = pointer(shared[{ADDRESSES}], INT64)
    hyper = pointer(shared[{HYPER}] + t * shared[{N_HYPER}] * REAL.itemsize, REAL){lead}
    rescale = hyper[0]{given}{room}{unpack}{before}
{loop}{after}{pack}
'''
