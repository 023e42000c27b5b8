"""The generic GPU kernel: load, rescale, rule, store; one launch per table, whatever the rule and the number of tensors.

Imported only when a rule first runs on the triton engine. With TRITON_INTERPRET=1 it works on CPU tensors.

Two things make every access 128 bits wide: the hint that addresses are multiples of 16 bytes, and a branch for full
tiles, which need no mask (a hint alone leaves all accesses scalar).
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from .language import Rule
from .table import GRADIENT, TensorTable

__all__ = ["TritonUpdate", "compile_for", "launch_options"]

TILE = 1024  # elements of one program
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


# What rules get for `tl`: Triton's own words, except for those that would drop a NaN. They are looked up anew every time,
# because the interpreter exchanges them while a kernel runs.
_words = types.ModuleType("tristep_words")
vars(_words).update(maximum=_maximum, minimum=_minimum, __getattr__=partial(getattr, tl))


def _compiled(fn: types.FunctionType) -> Any:
    fn.__globals__["_language"] = tl  # the interpreter insists on seeing it
    return triton.jit(fn)


@triton.jit
def _load(address, offsets, n, TYPE: tl.constexpr, COMPUTE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=offsets < n)
    return value.to(COMPUTE)


@triton.jit
def _round_to_bfloat16(value):
    # In integers, to the nearest and to even, because the interpreter's own conversion truncates.
    bits = value.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _store(address, value, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if tl.bfloat16 == TYPE:
        value = _round_to_bfloat16(value)
    else:
        value = value.to(TYPE)
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=offsets < n)


@triton.jit
def _load_states(
    addresses,
    tensor,
    n_tensors,
    offsets,
    n,
    N_STATES: tl.constexpr,
    COMPUTE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    states = ()
    for k in tl.static_range(N_STATES):
        address = tl.load(addresses + (2 + k) * n_tensors + tensor)
        states = states + (_load(address, offsets, n, COMPUTE, COMPUTE, FULL, ALIGNED),)  # type: ignore[assignment]
    return states


@triton.jit
def _load_hyper(hyper, N_HYPER: tl.constexpr):
    values = ()
    for k in tl.static_range(N_HYPER):
        values = values + (tl.load(hyper + 1 + k),)  # type: ignore[assignment]
    return values


@triton.jit
def _update_tile(
    addresses,
    gradient,
    hyper,
    tensor,
    n_tensors,
    offsets,
    n,
    RULE: tl.constexpr,
    N_STATES: tl.constexpr,
    N_HYPER: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASTERS: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    hyper += tensor * (1 + N_HYPER)
    weight = tl.load(addresses + tensor)
    if MASTERS:
        master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        w = _load(master, offsets, n, COMPUTE, COMPUTE, FULL, ALIGNED)
    else:
        w = _load(weight, offsets, n, WEIGHT_TYPE, COMPUTE, FULL, ALIGNED)
    g = _load(gradient, offsets, n, GRADIENT_TYPE, COMPUTE, FULL, ALIGNED) * tl.load(hyper)
    states = _load_states(addresses, tensor, n_tensors, offsets, n, N_STATES, COMPUTE, FULL, ALIGNED)
    w, states = RULE(w, g, states, _load_hyper(hyper, N_HYPER))
    if MASTERS:
        _store(master, w, offsets, n, COMPUTE, FULL, ALIGNED)
    _store(weight, w, offsets, n, WEIGHT_TYPE, FULL, ALIGNED)
    for k in tl.static_range(N_STATES):
        _store(tl.load(addresses + (2 + k) * n_tensors + tensor), states[k], offsets, n, COMPUTE, FULL, ALIGNED)


# Compiled once, whatever the number of tensors, on which the alignment of `hyper` depends too.
@triton.jit(
    do_not_specialize=["n_tensors"], do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles"]
)
def _update_kernel(
    addresses,  # int64 [rows, n_tensors]
    gradients,  # int64 [n_tensors]; 0 skips the tensor
    hyper,  # compute type [n_tensors, 1 + N_HYPER]
    sizes,  # int64 [n_tensors]
    tiles,  # int32 [n_programs, 2]
    n_tensors,
    RULE: tl.constexpr,
    N_STATES: tl.constexpr,
    N_HYPER: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASTERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    tensor = tl.load(tiles + 2 * tl.program_id(0))
    start = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * TILE
    gradient = tl.load(gradients + tensor)
    if gradient != 0:
        n = tl.load(sizes + tensor)
        offsets = start + tl.arange(0, TILE)
        if start + TILE <= n:
            _update_tile(
                addresses, gradient, hyper, tensor, n_tensors, offsets, n,
                RULE, N_STATES, N_HYPER, WEIGHT_TYPE, GRADIENT_TYPE, COMPUTE, MASTERS, True, ALIGNED,
            )  # fmt: skip
        else:
            _update_tile(
                addresses, gradient, hyper, tensor, n_tensors, offsets, n,
                RULE, N_STATES, N_HYPER, WEIGHT_TYPE, GRADIENT_TYPE, COMPUTE, MASTERS, False, ALIGNED,
            )  # fmt: skip


def launch_options(
    weight_dtype: torch.dtype, gradient_dtype: torch.dtype, dtype: torch.dtype, n_states: int
) -> dict[str, Any]:
    """Options of the compiler: 8 elements a thread, or 4.

    Mixed widths get 4, or layouts would be exchanged through shared memory; and so do rules of three states, which with 8
    need 72 registers a thread instead of 48.
    """
    mixed = len({weight_dtype.itemsize, gradient_dtype.itemsize, dtype.itemsize}) > 1
    return {"num_warps": 8 if mixed or n_states > 2 else 4, "enable_fp_fusion": True}


def _constants(
    rule: Rule, weight_dtype: torch.dtype, gradient_dtype: torch.dtype, dtype: torch.dtype, masters: bool, aligned: bool
) -> dict[str, Any]:
    return {
        "RULE": rule.bind("triton", _words, _compiled),
        "N_STATES": len(rule.state),
        "N_HYPER": len(rule.hyper),
        "WEIGHT_TYPE": _TYPES[weight_dtype],
        "GRADIENT_TYPE": _TYPES[gradient_dtype],
        "COMPUTE": _TYPES[dtype],
        "MASTERS": masters,
        "ALIGNED": aligned,
        "TILE": TILE,
    }


class TritonUpdate:
    """Runs one table on a GPU: keeps its arrays on the device, copies over what changed, launches once."""

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._upload = _Uploader(table)
        arrays = table.addresses, table.sizes, table.tiles
        addresses, sizes, tiles = (torch.from_numpy(array).to(table.device, copy=True) for array in arrays)
        self._arguments = (addresses, self._upload.gradients, self._upload.hyper, sizes, tiles, len(table.weights))
        self._constants = _constants(
            table.rule, table.weight_dtype, table.gradient_dtype, table.dtype, table.masters is not None, table.aligned
        )
        self._grid = (len(table.tiles), 1, 1)
        self._elsewhere = table.device.type == "cuda" and torch.cuda.device_count() > 1
        self._launch = self._first_launch

    def __call__(self) -> None:
        """Launch on the current stream of the table's device. Never waits for the device."""
        if not self._grid[0]:
            return
        if self._elsewhere and self.table.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.table.device):
                self._upload()
                self._launch()
        else:
            self._upload()
            self._launch()

    def _first_launch(self) -> None:
        table = self.table
        options = launch_options(table.weight_dtype, table.gradient_dtype, table.dtype, len(table.rule.state))
        kernel = _update_kernel[self._grid](*self._arguments, **self._constants, **options)
        # From now on every argument is what it was, so nothing is left for the JIT's launcher to find out, at 20 µs a time.
        if isinstance(kernel, CompiledKernel):
            self._launch = partial(kernel[self._grid], *self._arguments, *self._constants.values())


class _Uploader:
    """Keeps what may change from step to step, gradients' addresses and hyper-parameters, as it is in the table.

    It is one buffer and one asynchronous copy out of a ring of page-locked buffers, so the host never waits, unless it is
    a whole ring ahead of the device.

    Attributes:
        gradients: int64 [n_tensors], on the device.
        hyper: [n_tensors, 1 + n_hyper] in the table's type, on the device.
    """

    RING = 8

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._split = table.addresses[GRADIENT].nbytes
        size = self._split + table.hyper.nbytes
        pinned = table.device.type == "cuda" and torch.cuda.is_available()
        self._ring = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(self.RING)]
        self._views = [buffer.numpy() for buffer in self._ring]
        self._events = [torch.cuda.Event() for _ in range(self.RING)] if pinned else None
        self._slot = 0
        self._sent: tuple[bytes, bytes] | None = None
        self._device = torch.empty(size, dtype=torch.uint8, device=table.device)
        self.gradients = self._device[: self._split].view(torch.int64)
        self.hyper = self._device[self._split :].view(table.dtype)

    def __call__(self) -> None:
        """Copy over what changed since the last call, if anything did, on the current stream."""
        now = self.table.addresses[GRADIENT].tobytes(), self.table.hyper.tobytes()
        if now == self._sent:
            return
        slot, self._slot = self._slot, (self._slot + 1) % self.RING
        if self._events is not None:
            self._events[slot].synchronize()  # of a copy that is a whole ring old: over, in practice
        self._views[slot].data[:] = b"".join(now)
        self._device.copy_(self._ring[slot], non_blocking=True)
        if self._events is not None:
            self._events[slot].record()
        self._sent = now


def compile_for(
    target: Any,
    rule: Rule,
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    masters: bool = False,
    aligned: bool = True,
) -> Any:
    """The compiled kernel of a rule for a `triton.backends.compiler.GPUTarget`; needs no GPU. For looking at its code."""
    from triton.compiler import ASTSource

    dtype = torch.float64 if weight_dtype == torch.float64 else torch.float32
    real = {torch.float32: "*fp32", torch.float64: "*fp64"}[dtype]
    constants = _constants(rule, weight_dtype, gradient_dtype, dtype, masters, aligned)
    signature = {"addresses": "*i64", "gradients": "*i64", "hyper": real, "sizes": "*i64", "tiles": "*i32"}
    signature |= {"n_tensors": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(_update_kernel, signature=signature, constexprs=constants)
    options = launch_options(weight_dtype, gradient_dtype, dtype, len(rule.state))
    return triton.compile(source, target=target, options=options)
