"""Who runs a rule: triton on GPUs, numba on CPUs, eager torch anywhere. `Update` is one rule on a list of tensors.

The three engines share the table and the rule; this file decides which of them gets a group of tensors, and forms the
groups: tensors of one device and of the same types, aligned or not.
"""

from __future__ import annotations

import difflib
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .language import Rule, has_numba, has_triton
from .table import GRADIENT, TensorTable, compute_dtype, is_dense

__all__ = ["ENGINES", "Update", "choose_engine", "update"]

ENGINES = ("triton", "cpu", "eager")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_data_ptr = torch.Tensor.data_ptr


def choose_engine(device: torch.device, engine: str | None = None) -> str:
    """The engine for tensors on `device`.

    Args:
        device: where the tensors are.
        engine: "triton", "cpu", "eager", or None for the environment variable TRISTEP_ENGINE and, without that, the best
            there is: triton on a GPU, cpu (numba) on the CPU, eager elsewhere or where the library is missing.

    Raises:
        ValueError: no such engine, or it cannot work on this device.
        ModuleNotFoundError: the engine asked for needs a library that is not installed.
    """
    asked = engine or os.environ.get("TRISTEP_ENGINE") or None
    gpu = device.type in ("cuda", "xpu")
    if asked is None:
        if gpu and has_triton():
            return "triton"
        return "cpu" if device.type == "cpu" and has_numba() else "eager"
    if asked not in ENGINES:
        close = difflib.get_close_matches(asked, ENGINES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"engine={asked!r}: must be one of {', '.join(map(repr, ENGINES))}, or None.{hint}")
    if asked == "triton":
        if not has_triton():
            raise ModuleNotFoundError("engine='triton' needs the package triton, which has builds for Linux only")
        if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"engine='triton' needs tensors on a GPU, these are on {device}: move the model to a GPU, leave engine out, "
                "or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU"
            )
    if asked == "cpu":
        if device.type != "cpu":
            raise ValueError(f"engine='cpu' needs tensors on the CPU, these are on {device}: leave engine out")
        if not has_numba():
            raise ModuleNotFoundError("engine='cpu' needs the package numba: pip install numba, or engine='eager'")
    return asked


def update(
    rule: Rule,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    states: Sequence[Sequence[torch.Tensor]],
    hyper: Mapping[str, float] | Sequence[Mapping[str, float]],
    *,
    rescale_grad: float = 1.0,
    engine: str | None = None,
) -> None:
    """Apply `rule` once to every weight, in place. For repeated steps build an `Update` and keep it.

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout.
        gradients: for each weight its gradient, of the same shape and any floating-point type; None leaves it alone.
        states: for each weight its state tensors in the order of `rule.state`: float64 for a float64 weight, else float32.
        hyper: values by the names of `rule.hyper`, for all weights or one mapping for each. `one_minus_x` may be left
            out where `x` is given.
        rescale_grad: what gradients are multiplied by first.
        engine: as for `choose_engine`.

    Raises:
        TypeError, ValueError: something does not fit; nothing is changed then.

    Example:
        >>> import torch
        >>> from tristep.kernels import rules, update
        >>> w = torch.ones(3)
        >>> update(rules.sgd, [w], [torch.ones(3)], [()], {"lr": 0.5, "wd": 0.0, "clip": float("inf")})
        >>> w
        tensor([0.5000, 0.5000, 0.5000])
    """
    each = [hyper] * len(weights) if isinstance(hyper, Mapping) else list(hyper)
    if not len(each) == len(gradients) == len(states) == len(weights):
        raise ValueError(
            f"{len(weights)} weights came with {len(gradients)} gradients, {len(states)} states and {len(each)} sets of "
            "hyper-parameters: there must be as many of each"
        )
    run = Update(rule, weights, [tuple(row) for row in states], engine=engine)
    for i, values in enumerate(each):
        run.hyper[i] = [rescale_grad, *hyper_values(rule, values)]
    run.bind(gradients)
    run()


def hyper_values(rule: Rule, values: Mapping[str, float]) -> list[float]:
    """The rule's hyper-parameters in order; `one_minus_x` is computed from `x`, in float64, where it is not given."""
    row = []
    for name in rule.hyper:
        if name in values:
            row.append(float(values[name]))
        elif name.startswith("one_minus_") and name[10:] in values:
            row.append(1.0 - float(values[name[10:]]))
        else:
            raise TypeError(
                f"rule {rule.name!r} needs the hyper-parameter {name!r}; given were {', '.join(sorted(values)) or 'none'}"
            )
    return row


class Update:
    """One rule on a fixed list of weights: groups, tables and engines are made once and used at every step.

    Args:
        rule: the update rule.
        weights: floating-point tensors of any shape and layout. They are read anew when they have moved.
        states: for each weight its state tensors, in the order of `rule.state`.
        masters: for each weight its copy in the arithmetic's type, or None where there is none.
        engine: as for `choose_engine`.

    Attributes:
        hyper: float64 [n_weights, 1 + n_hyper]; rescale_grad and the rule's hyper-parameters. Write here before a step.
        launches: native calls or GPU launches of the last step.

    Raises:
        TypeError, ValueError: types or shapes that do not fit.
    """

    def __init__(
        self,
        rule: Rule,
        weights: Sequence[torch.Tensor],
        states: Sequence[tuple[torch.Tensor, ...]],
        masters: Sequence[torch.Tensor | None] | None = None,
        engine: str | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"rule must be made with @rule, got {type(rule).__name__}")
        self.rule = rule
        self.weights = list(weights)
        self.states = list(states)
        self.masters = [None] * len(self.weights) if masters is None else list(masters)
        self.engine = engine
        self.hyper = np.zeros((len(self.weights), 1 + len(rule.hyper)))
        self._addresses: list[int] = []
        self._groups: list[_Group] = []
        self._references: list[weakref.ref[torch.Tensor] | None] = []
        self._ids: list[int] = []
        self._lost = True
        self._keys: list[Any] = []
        self._bound_kinds: Any = None
        self._simple = False
        for i, (weight, row, master) in enumerate(zip(self.weights, self.states, self.masters, strict=True)):
            _check(rule, i, weight, row, master)
            choose_engine(weight.device, engine)

    @property
    def launches(self) -> int:
        return len(self._groups)

    def engines(self) -> list[str]:
        """The engines in use, each once."""
        return sorted({choose_engine(weight.device, self.engine) for weight in self.weights})

    def fits(self) -> bool:
        """Whether states and masters still match the weights' types and devices; a model may have been moved."""
        return all(
            tensor.device == weight.device and tensor.dtype == compute_dtype(weight.dtype)
            for weight, row, master in zip(self.weights, self.states, self.masters, strict=True)
            for tensor in (*row, *([] if master is None else [master]))
        )

    def holds(self, gradients: Sequence[Any]) -> bool:
        """Whether these very tensors are bound, and the weights are where they were. The quick question of every step."""
        # Identities are worth comparing only as long as none of the bound tensors has died, which sets `_lost`.
        return (
            not self._lost
            and list(map(id, gradients)) == self._ids
            and list(map(_data_ptr, self.weights)) == self._addresses
        )

    def bind(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take these gradients for the coming steps; None skips a weight. Checks everything, changes no weight.

        They are not kept alive. To step again with other gradients, or with ones that have moved, bind again.
        """
        if len(gradients) != len(self.weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self.weights)} weights: there must be as many")
        kinds = self._kinds(gradients)
        if kinds is None or kinds != self._bound_kinds or not self._rebind(gradients):
            self._bind(gradients)
            self._bound_kinds = kinds if self._simple else None

    def _rebind(self, gradients: Sequence[Any]) -> bool:
        """The quick way, for new tensors of the kinds that were bound before; whether it could be gone."""
        addresses = np.fromiter(map(_data_ptr, gradients), dtype=np.int64, count=len(gradients))
        if (addresses & 15).any() or list(map(_data_ptr, self.weights)) != self._addresses:
            return False
        references = self._remember(gradients)
        for group in self._groups:
            group.table.addresses[GRADIENT] = addresses[group.rows]
            group.table.gradients = [references[i] for i in group.indices]
        return True

    def _bind(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for i, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            if gradient is not None:
                _check_gradient(i, weight, gradient)
        addresses = list(map(_data_ptr, self.weights))
        keys = [_group_key(*each) for each in zip(self.weights, gradients, self.states, self.masters, strict=True)]
        if self._keys:  # a skipped weight stays in the group where it was
            keys = [old if gradient is None else new for old, new, gradient in zip(self._keys, keys, gradients, strict=True)]
        if addresses != self._addresses or keys != self._keys:
            members: dict[Any, list[int]] = {}
            for i, key in enumerate(keys):
                members.setdefault(key, []).append(i)
            self._groups = [_Group(self, key, indices) for key, indices in members.items()]
            self._addresses, self._keys = addresses, keys
        references = self._remember(gradients)
        for group in self._groups:
            group.bind(gradients, references)
        self._simple = all(group.table.aligned and not group.sources and not group.copied for group in self._groups)

    def _kinds(self, gradients: Sequence[torch.Tensor | None]) -> Any:
        """What, besides its address, decides how a gradient is read; None where some are missing or of a strange kind."""
        try:
            return (
                [gradient.dtype for gradient in gradients],  # type: ignore[union-attr]
                [gradient.stride() for gradient in gradients],  # type: ignore[union-attr]
                [gradient.shape for gradient in gradients],  # type: ignore[union-attr]
                [gradient.device for gradient in gradients],  # type: ignore[union-attr]
            )
        except (AttributeError, RuntimeError):
            return None

    def __call__(self) -> None:
        """Run one step with the bound gradients and the values in `hyper`."""
        for group in self._groups:
            group.run(self.hyper)

    def _remember(self, gradients: Sequence[torch.Tensor | None]) -> list[weakref.ref[torch.Tensor] | None]:
        method = weakref.WeakMethod(self._on_loss)  # a gradient must not keep this object alive either

        def on_loss(_: Any) -> None:
            if (alive := method()) is not None:
                alive()

        self._ids = list(map(id, gradients))
        self._references = [None if gradient is None else weakref.ref(gradient, on_loss) for gradient in gradients]
        self._lost = False
        return self._references

    def _on_loss(self) -> None:
        self._lost = True


class _Group:
    """Tensors that go into one launch. Weights with gaps are updated in a dense copy, which is then written back."""

    def __init__(self, owner: Update, key: Any, indices: list[int]) -> None:
        device, _, gradient_dtype, has_masters, aligned = key
        self.indices = indices
        self.rows = slice(None) if len(indices) == len(owner.weights) else np.array(indices)
        self.originals = [owner.weights[i] for i in indices]
        self.copied = [k for k, weight in enumerate(self.originals) if not is_dense(weight)]
        weights = [w if is_dense(w) else torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in self.originals]
        masters = [owner.masters[i] for i in indices] if has_masters else None
        states = [owner.states[i] for i in indices]
        engine = choose_engine(device, owner.engine)
        make, tile = _executor(engine)
        self.table = TensorTable(owner.rule, weights, gradient_dtype, states, masters, tile, aligned)  # type: ignore[arg-type]
        self.execute = make(self.table)
        self.sources: list[tuple[torch.Tensor, Any]] = []  # dense copies, and functions giving what to copy

    def bind(self, gradients: Sequence[torch.Tensor | None], references: Sequence[Any]) -> None:
        table = self.table
        self.sources = []
        for k, i in enumerate(self.indices):
            gradient, weight = gradients[i], table.weights[k]
            table.gradients[k] = references[i]
            if gradient is not None and gradient.stride() != weight.stride() and weight.numel() > 1:
                dense = torch.empty_strided(weight.shape, weight.stride(), dtype=gradient.dtype, device=gradient.device)
                self.sources.append((dense, references[i]))
                table.gradients[k] = partial(_itself, dense)
                gradient = dense
            table.addresses[GRADIENT, k] = 0 if gradient is None else gradient.data_ptr()

    def run(self, hyper: np.ndarray) -> None:
        table = self.table
        table.hyper[:] = hyper[self.rows]
        if self.sources or self.copied:
            with torch.no_grad():
                for dense, gradient in self.sources:
                    dense.copy_(gradient())
                for k in self.copied:
                    table.weights[k].copy_(self.originals[k])
                self.execute()
                for k in self.copied:
                    if table.gradients[k] is not None:
                        self.originals[k].copy_(table.weights[k])
        else:
            self.execute()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _executor(engine: str) -> tuple[Any, int]:
    """The class that runs a table, and its tile. Imported here, so that nobody pays for an engine that is not used."""
    if engine == "triton":
        from . import gpu as triton_engine

        return triton_engine.TritonUpdate, triton_engine.TILE
    if engine == "cpu":
        from . import native

        return native.NativeUpdate, native.TILE
    from . import eager

    return eager.EagerUpdate, eager.TILE


def _group_key(
    weight: torch.Tensor, gradient: torch.Tensor | None, states: tuple[torch.Tensor, ...], master: torch.Tensor | None
) -> tuple[Any, ...]:
    tensors = [weight, *states] + ([] if gradient is None else [gradient]) + ([] if master is None else [master])
    # Strides other than the weight's mean that a fresh copy is made, and fresh memory is aligned.
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return (
        weight.device,
        weight.dtype,
        weight.dtype if gradient is None else gradient.dtype,
        master is not None,
        aligned,
    )


def _check(rule: Rule, i: int, weight: Any, states: Sequence[Any], master: Any) -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weights[{i}] must be a tensor, got {type(weight).__name__}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"weights[{i}] is {weight.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if len(states) != len(rule.state):
        raise ValueError(
            f"states[{i}] has {len(states)} tensors: rule {rule.name!r} has {len(rule.state)} "
            f"({', '.join(rule.state) or 'none'})"
        )
    dtype = compute_dtype(weight.dtype)
    strides = weight.stride() if is_dense(weight) else torch.empty(weight.shape, device="meta").stride()
    for name, tensor in [*zip(rule.state, states, strict=True), *([("master", master)] if master is not None else [])]:
        if tensor.dtype != dtype or tensor.device != weight.device or tensor.shape != weight.shape:
            raise ValueError(
                f"{name} of weights[{i}] is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
                f"must be {dtype} {tuple(weight.shape)} on {weight.device}"
            )
        if tensor.stride() != strides and tensor.numel() > 1:
            raise ValueError(f"{name} of weights[{i}] has strides {tensor.stride()}: must have {strides}, the weight's")


def _check_gradient(i: int, weight: torch.Tensor, gradient: Any) -> None:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"gradients[{i}] must be a tensor or None, got {type(gradient).__name__}")
    if gradient.layout != torch.strided:
        raise TypeError(
            f"gradients[{i}] is sparse ({gradient.layout}), which rule updates do not take: "
            "use sparse=False in the layer, or gradient.to_dense()"
        )
    if gradient.dtype not in DTYPES:
        raise TypeError(f"gradients[{i}] is {gradient.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if gradient.shape != weight.shape or gradient.device != weight.device:
        raise ValueError(
            f"gradients[{i}] is {tuple(gradient.shape)} on {gradient.device}: "
            f"its weight is {tuple(weight.shape)} on {weight.device}"
        )
