"""QKClip: watches the logits of a model's attention, and clips them by its weights after a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ...kernels.layouts import is_wrapper
from ...trainer.utils.interrupts import uninterrupted
from ...trainer.validation import number
from .heads import HeadRows, largest_logits, rows_found


class QKClip:
    """Scales the query and key weights of attention heads whose largest logit exceeds `tau`, after a step.

    The largest logit S of each head is taken over all forward passes in training mode since the last `step`. A head with
    S > tau gets the factor tau / S: half of it, by its square root, for its queries, half for its keys. Keys that several
    heads share are left alone, and the queries take the whole factor; so do the rotary queries of MLA. Momenta stay as they
    are. Heads whose S is not finite are left alone.

    Ranks of a process group take the largest S of all, so that copies of a model stay equal.

    Args:
        model: the model. Modules of these kinds are found: `torch.nn.MultiheadAttention`; modules with linear layers
            `q_proj` and `k_proj`; MLA with `q_b_proj` or `q_proj`, `kv_b_proj` and `qk_nope_head_dim`.
        tau: the limit of logits, > 0; 100 in the paper.
        modules: descriptions of other modules: the `HeadRows` of each by a pattern of module names, such as
            {"*.attn": [HeadRows("qkv.weight", rows=(0, 64)), HeadRows("qkv.weight", rows=(64, 128))]}.
        skip: patterns of the names of modules that are left out.
        trainer: the `Trainer`, or optimizer of `tristep.optim`, of the weights; needed if it has masters of 16-bit weights,
            which are scaled, too. None: the weights alone are scaled.
        group: the process group; None means all processes, if torch.distributed is in use.

    Attributes:
        names: the names of the modules that are watched.

    Raises:
        TypeError, ValueError: an argument is invalid, no attention is found, a pattern matches no module, or rows do not
            fit the weights.
        NotImplementedError: a weight is a DTensor.

    Example:
        >>> import torch, tristep
        >>> from tristep.contrib.qk_clip import QKClip
        >>> net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> trainer, clip = tristep.Trainer(net, "muon"), QKClip(net, tau=100)
        >>> net(torch.randn(2, 5, 8)).square().mean().backward()
        >>> trainer.step(1)
        >>> sorted(clip.step())
        ['self_attn']

    Source: Kimi Team (2025), "Kimi K2: Open Agentic Intelligence", arXiv 2507.20534, section 2.1, alg. 1.
    """

    def __init__(
        self,
        model: nn.Module,
        tau: float = 100.0,
        *,
        modules: Mapping[str, Sequence[HeadRows]] | None = None,
        skip: Sequence[str] = (),
        trainer: Any = None,
        group: Any = None,
    ) -> None:
        self.tau = number("tau", tau, above=0)
        self._trainer, self._group = trainer, group
        self._rows: dict[str, Sequence[HeadRows]] = {}
        self._modules, self._parameters = dict(model.named_modules()), list(model.named_parameters())
        patterns, unused = dict(modules or {}), set(modules or ()) | set(skip)
        for name, module in self._modules.items():
            if leaves_out := [pattern for pattern in skip if fnmatchcase(name, pattern)]:
                unused -= set(leaves_out)
                continue
            matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
            unused -= set(matching)
            rows = patterns[matching[0]] if matching else rows_found(module)
            if rows is not None:
                self._rows[name] = [_checked(name, module, each) for each in rows]
        if unused:
            raise ValueError(f"{sorted(unused)} of modules= or skip=: matches no module of the model")
        if not self._rows:
            raise ValueError(
                "model: no attention is found in it; describe its modules by modules={pattern: [HeadRows(...)]}"
            )
        self.names = tuple(self._rows)
        self._largest: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []
        for name in self.names:
            self._watch(name, self._modules[name])

    def remove(self) -> None:
        """Stop watching: remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @uninterrupted
    @torch.no_grad()
    def step(self) -> dict[str, torch.Tensor]:
        """Clip the weights; call it after each step of the optimizer.

        Returns:
            The largest logits before clipping by the name of the module, float32 [heads]; -inf for heads without a pair.

        Raises:
            RuntimeError: a module has not been seen to compute attention since the last `step`; nothing has been changed.
        """
        unmeasured = [name for name in self.names if name not in self._largest]
        if unmeasured:
            raise RuntimeError(
                f"no attention has been seen in {', '.join(map(repr, unmeasured))} since the last step: a module must run "
                "in training mode, and call torch.nn.functional.scaled_dot_product_attention (Hugging Face: "
                'attn_implementation="sdpa"); leave a module out by skip='
            )
        largest, self._largest = self._largest, {}
        if dist.is_available() and dist.is_initialized():
            together = torch.cat([largest[name] for name in self.names])
            dist.all_reduce(together, dist.ReduceOp.MAX, group=self._group)
            parts = together.split([len(largest[name]) for name in self.names])
            largest = dict(zip(self.names, parts, strict=True))
        factors = {name: _factors(logits, self.tau) for name, logits in largest.items()}
        if self._trainer is None:
            self._scale(factors, {})
        elif any(bool((each < 1).any()) for each in factors.values()):
            whole = self._trainer.float32_weights()  # by name, or by parameter
            found = {
                parameter: whole[key] for name, parameter in self._parameters for key in (name, parameter) if key in whole
            }
            self._scale(factors, found)
            self._trainer.load_float32_weights(whole)
        return largest

    def _scale(self, factors: Mapping[str, torch.Tensor], wholes: Mapping[Any, torch.Tensor]) -> None:
        """Scale weights, or what `wholes` has instead of them."""
        for name, by_head in factors.items():
            for rows in self._rows[name]:
                for parameter, dim in rows.parameters(self._modules[name]):
                    view = rows.rows_of_heads(wholes.get(parameter, parameter), dim, len(by_head))
                    shape = [1] * view.dim()
                    shape[dim] = -1
                    view.mul_(by_head.pow(rows.power).view(shape).to(view.dtype))

    def _watch(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            self._handles.append(module.register_forward_hook(self._see_multihead(name), with_kwargs=True))
            return
        modes: list[_Watching] = []

        def before(module: nn.Module, args: Any) -> None:
            modes.append(_Watching(self, name, module.training))
            modes[-1].__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if modes:
                modes.pop().__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _see_multihead(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
            if module.training:
                self._note(name, _of_multihead(module, *args, **kwargs))

        return hook

    def _note(self, name: str, largest: torch.Tensor) -> None:
        before = self._largest.get(name)
        self._largest[name] = largest if before is None else torch.maximum(before, largest)


class _Watching(TorchFunctionMode):
    """Notes the logits of each call of `scaled_dot_product_attention`."""

    def __init__(self, clip: QKClip, name: str, training: bool) -> None:
        super().__init__()
        self._clip, self._name, self._training = clip, name, training

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and self._training:
            with torch.no_grad():
                self._clip._note(self._name, _of_sdpa(*args, **kwargs))
        return func(*args, **kwargs)


def _of_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the largest logits of a call of `scaled_dot_product_attention` with these arguments."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    largest: torch.Tensor = largest_logits(query, key, scale, attn_mask, is_causal)
    return largest


def _of_multihead(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: Any = None,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return the largest logits of a call of torch's `MultiheadAttention`, where True in a mask leaves a pair out."""
    if query.dim() == 2:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    size, heads = module.embed_dim, module.num_heads
    if module.in_proj_weight is None:
        weights: Any = (module.q_proj_weight, module.k_proj_weight)
    else:
        weights = module.in_proj_weight[:size], module.in_proj_weight[size : 2 * size]
    biases: Any = (None, None)
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias[:size], module.in_proj_bias[size : 2 * size]
    linear = nn.functional.linear
    query, key = (linear(x, w, b) for x, w, b in zip((query, key), weights, biases, strict=True))
    queries, keys = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key))
    allowed = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)
    if key_padding_mask is not None:
        allowed = allowed & _counts(key_padding_mask)[:, None, None, :]
    if attn_mask is not None:
        pairs = _counts(attn_mask)
        allowed = allowed & (pairs if pairs.dim() == 2 else pairs.unflatten(0, (-1, heads)))
    if module.bias_k is not None:
        more = module.bias_k.view(1, 1, heads, -1).transpose(1, 2)
        keys = torch.cat([keys, more.expand(len(keys), -1, -1, -1)], dim=2)
        allowed = torch.cat([allowed, allowed.new_ones((*allowed.shape[:-1], 1))], dim=-1)
    largest: torch.Tensor = largest_logits(queries, keys, 1.0 / math.sqrt(size // heads), allowed)
    return largest


def _counts(mask: torch.Tensor) -> torch.Tensor:
    return ~mask if mask.dtype == torch.bool else mask > -torch.inf


def _factors(largest: torch.Tensor, tau: float) -> torch.Tensor:
    return torch.where(largest.isfinite() & (largest > tau), tau / largest, torch.ones_like(largest))


def _checked(name: str, module: nn.Module, rows: HeadRows) -> HeadRows:
    if not isinstance(rows, HeadRows):
        raise TypeError(f"modules: {rows!r} of {name!r}: must be a HeadRows")
    try:
        parameters = rows.parameters(module)
    except AttributeError:
        raise ValueError(f"{rows} of {name!r}: {type(module).__name__} has no parameter {rows.weight!r}") from None
    if any(is_wrapper(parameter) for parameter, _ in parameters):
        raise NotImplementedError(f"{rows.weight!r} of {name!r} is made of shards: QKClip needs plain tensors")
    return rows
