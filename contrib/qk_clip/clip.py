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
from .heads import HeadRows, counts, largest_logits, rows_found
from .masters import Wholes, holders

Part = tuple[HeadRows, nn.Parameter, int]  # rows, a parameter that has them, and the dimension of the rows

_GROWTH = 4.0  # of the logits in a check; its powers 0.5 and 1 are exact


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
        trainer: the `Trainer`, or optimizer of `tristep.optim`, of the weights, `MultiOptimizer` and `SAM` too; needed if it
            has masters of 16-bit weights, which are scaled, too. Optimizers whose next step would undo a clip, because they
            keep another copy of the weights, are refused: `lookahead`, schedule-free ones, FTML and Ftrl. None: the weights
            alone are scaled, and the optimizer must be none of these.
        group: the process group; None means all processes, if torch.distributed is in use.

    Attributes:
        names: the names of the modules that are watched.

    Raises:
        TypeError, ValueError: an argument is invalid, no attention is found, a pattern matches no module, or some of a
            module's scaled weights are frozen, but not all. In the first forward pass: rows do not fit the weights, or the
            logits do not follow them, as with a norm between projections and logits.
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
        self._group = group
        self._rows: dict[str, Sequence[HeadRows]] = {}
        self._modules = dict(model.named_modules())
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
        for name in self.names:
            self._parts(name)
        scaled = {parameter for name in self.names for _, parameter, _ in self._listed(name)}
        self._holders = holders(trainer, {each: name for name, each in model.named_parameters() if each in scaled})
        self._largest: dict[str, torch.Tensor] = {}
        self._heads = dict.fromkeys(self.names, 0)  # the number of heads, as all ranks know it; 0 if none does yet
        self._has_stepped = False
        self._checked: set[str] = set()  # the modules whose logits follow their weights
        self._probe: list[torch.Tensor] | None = None  # takes logits, instead of `_largest`, while a module is checked
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
            RuntimeError: a module has not been seen to compute attention since the last `step`, on any rank; or a store in
                another process has the masters. Nothing has been changed.
            ValueError: some of a module's scaled weights have been frozen since, but not all; nothing has been changed.
            TypeError: `trainer` has a user-defined optimizer with `multi_precision`; nothing has been changed.
        """
        largest = self._largest_of_all_ranks()
        parts = {name: self._parts(name) for name in self.names}
        factors = {name: _factors(logits, self.tau) for name, logits in largest.items()}
        if not self._holders:
            self._scale(parts, factors, {})
        elif any(bool((each < 1).any()) for each in factors.values()):
            wholes = Wholes(self._holders)
            self._scale(parts, factors, wholes.by_parameter())
            wholes.put_back()
        elif not self._has_stepped:
            Wholes(self._holders)  # what cannot be read raises in the first step, not in the first that clips
        self._largest, self._has_stepped = {}, True
        return largest

    def _largest_of_all_ranks(self) -> dict[str, torch.Tensor]:
        """Return the largest logits by module; the same collectives run on all ranks, whatever they have seen."""
        largest, ranks = self._largest, dist.is_available() and dist.is_initialized()
        unseen = [name for name in self.names if name not in largest]
        if ranks:
            device = next(parameter.device for _, parameter, _ in self._listed(self.names[0]))
            if not all(self._heads.values()):
                heads = [len(largest.get(name, ())) or self._heads[name] for name in self.names]
                numbers = torch.tensor(heads, device=device)
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
                self._heads = dict(zip(self.names, numbers.tolist(), strict=True))
            seen = torch.tensor([float(name in largest) for name in self.names], device=device)
            nothing = {name: torch.full((n,), -torch.inf, device=device) for name, n in self._heads.items()}
            together = torch.cat([seen, *({**nothing, **largest}[name].to(device) for name in self.names)])
            dist.all_reduce(together, dist.ReduceOp.MAX, group=self._group)
            seen, *parts = together.split([len(self.names), *self._heads.values()])
            largest = dict(zip(self.names, parts, strict=True))
            unseen = [name for name, each in zip(self.names, seen.tolist(), strict=True) if not each]
        if unseen:
            raise RuntimeError(
                f"no attention has been seen in {', '.join(map(repr, unseen))} since the last step: a module must run "
                "in training mode, and call torch.nn.functional.scaled_dot_product_attention (Hugging Face: "
                'attn_implementation="sdpa"); leave a module out by skip='
            )
        return largest

    def _listed(self, name: str) -> list[Part]:
        return [(rows, *each) for rows in self._rows[name] for each in rows.parameters(self._modules[name])]

    def _parts(self, name: str) -> list[Part]:
        """Return the rows of a module with their parameters and dimensions; none if all are frozen."""
        parts = self._listed(name)
        frozen = [rows.weight for rows, parameter, _ in parts if not parameter.requires_grad]
        if frozen and len(frozen) < len(parts):
            some = ", ".join(sorted(set(map(repr, frozen))))
            raise ValueError(
                f"{some} of {name!r}, or its bias, is frozen (requires_grad=False), but not all that is scaled: leave the "
                f"module out by skip=, or list what is trained, as by modules={{{name!r}: [HeadRows('q_proj.weight', 1.0)]}}"
            )
        return [] if frozen else parts

    def _scale(
        self,
        parts: Mapping[str, Sequence[Part]],
        factors: Mapping[str, torch.Tensor],
        wholes: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        """Scale weights, or what `wholes` has instead of them."""
        for name, by_head in factors.items():
            for rows, parameter, dim in parts[name]:
                view = rows.rows_of_heads(wholes.get(parameter, parameter), dim, len(by_head))
                shape = [1] * view.dim()
                shape[dim] = -1
                view.mul_(by_head.pow(rows.power).view(shape).to(view))

    @torch.no_grad()
    def _check(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Raise if the logits of a module do not grow with its weights; without any logit, the next pass checks it."""
        given = {key: None if "past_key_value" in key else value for key, value in kwargs.items()}  # a cache would grow
        parts = self._parts(name)
        plain = self._logits(module, {}, args, given) if parts else None
        if plain is None:
            return
        names: dict[torch.Tensor, str] = {parameter: key for key, parameter in module.named_parameters()}
        scaled: dict[torch.Tensor, torch.Tensor] = {parameter: parameter.detach().clone() for _, parameter, _ in parts}
        self._scale({name: parts}, {name: torch.full_like(plain, _GROWTH)}, scaled)
        grown = self._logits(module, {names[parameter]: each for parameter, each in scaled.items()}, args, given)
        tried = plain.isfinite() & (plain.abs() > 1e-6)
        if grown is None or not bool(tried.any()):
            return
        if bool((tried & (grown.abs() < _GROWTH**0.75 * plain.abs())).any()):
            weights = ", ".join(sorted(repr(names[parameter]) for parameter in scaled))
            raise ValueError(
                f"the logits of {name!r} do not grow with {weights}, so that clipping would shrink these without end: is "
                "there a norm between, or a weight that modules= does not list? Leave the module out by skip=, or list its "
                "weights by modules="
            )
        self._checked.add(name)

    def _logits(
        self, module: nn.Module, weights: dict[str, torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Run a module up to its first logits, with other weights, and return the largest of each head."""
        self._probe = []
        try:
            with torch.random.fork_rng(sorted({p.device.index for p in module.parameters() if p.is_cuda})):
                torch.func.functional_call(module, weights, args, kwargs)
        except _Seen:
            pass
        finally:
            probe, self._probe = self._probe, None
        return probe[0] if probe else None

    def _watch(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            self._handles.append(module.register_forward_hook(self._see_multihead(name), with_kwargs=True))
            return
        modes: list[_Watching] = []

        def before(module: nn.Module, args: Any) -> None:
            modes.append(_Watching(self, name, module.training))
            modes[-1].__enter__()

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not modes:
                return
            modes.pop().__exit__(None, None, None)
            if self._probe is None and name in self._largest and name not in self._checked and output is not None:
                self._check(name, module, args, kwargs)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _see_multihead(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
            if module.training and self._probe is None:
                self._note(name, _of_multihead(module, *args, **kwargs))

        return hook

    def _note(self, name: str, largest: torch.Tensor) -> None:
        if self._probe is not None:
            self._probe.append(largest)
            raise _Seen
        if self._heads[name] not in (0, len(largest)):
            raise RuntimeError(f"{name!r} has {len(largest)} heads, and had {self._heads[name]} before: make a new QKClip")
        before = self._largest.get(name)
        self._largest[name] = largest if before is None else torch.maximum(before, largest)


class _Seen(Exception):  # ends a check
    """The logits have been seen."""


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
        allowed = allowed & _allowed(key_padding_mask)[:, None, None, :]
    if attn_mask is not None:
        pairs = _allowed(attn_mask)
        allowed = allowed & (pairs if pairs.dim() == 2 else pairs.unflatten(0, (-1, heads)))
    if module.bias_k is not None:
        more = module.bias_k.view(1, 1, heads, -1).transpose(1, 2)
        keys = torch.cat([keys, more.expand(len(keys), -1, -1, -1)], dim=2)
        allowed = torch.cat([allowed, allowed.new_ones((*allowed.shape[:-1], 1))], dim=-1)
    largest: torch.Tensor = largest_logits(queries, keys, 1.0 / math.sqrt(size // heads), allowed)
    return largest


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    return ~mask if mask.dtype == torch.bool else counts(mask)


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
