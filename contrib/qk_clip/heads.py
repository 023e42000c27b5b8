"""Which rows of which weights make the queries and keys of each head."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn

_NORM = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
_MASKED = -9000.0  # what a mask adds to a pair that it takes out, at most: -1e4 is -9984 in bfloat16


class HeadRows(NamedTuple):
    """Rows of a weight, and of the bias beside it, that are scaled by a power of each head's factor.

    The rows are those of all heads, one head after the other, with equally many rows each. The logits of a head are
    multiplied by its factor if the powers of its queries and of its keys add up to 1.

    Attributes:
        weight: the name of the weight in the module, such as "qkv.weight"; a name that ends in "weight" stands also for the
            bias of the same name, if there is one.
        power: the power of the factor, such as 0.5 for queries and for keys that belong to one head each.
        rows: the first row and the end of the rows of all heads; None means all rows.
        of_head: the first row and the end of the scaled rows of each head, counted from the head's first; None means all.
        dim: the dimension of the rows; 1 for layers that store weights as [in, out], such as Hugging Face's `Conv1D`.
    """

    weight: str
    power: float = 0.5
    rows: tuple[int, int] | None = None
    of_head: tuple[int, int] | None = None
    dim: int = 0

    def parameters(self, module: nn.Module) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters of the module that have these rows, each with the dimension of the rows.

        Raises:
            AttributeError: the module has no such weight.
        """
        found = [(module.get_parameter(self.weight), self.dim)]
        stem, bias = self.weight.removesuffix("weight"), dict(module.named_parameters())
        if stem != self.weight and stem + "bias" in bias:
            found.append((bias[stem + "bias"], 0))
        return found

    def rows_of_heads(self, parameter: torch.Tensor, dim: int, heads: int) -> torch.Tensor:
        """Return a view of a parameter with the dimension of the rows split into [heads, rows of a head that are scaled].

        Raises:
            ValueError: the rows are not as many for each head.
        """
        start, end = self.rows or (0, parameter.shape[dim])
        if not 0 <= start < end <= parameter.shape[dim] or (end - start) % heads:
            raise ValueError(
                f"{self}: {parameter.shape[dim]} rows, of which {end - start} are for {heads} heads; rows of {heads} heads "
                "must be equally many each. Keys that several heads share have no rows of each: leave them as they are, and "
                "give the queries power=1"
            )
        rows = parameter.narrow(dim, start, end - start).unflatten(dim, (heads, -1))
        first, last = self.of_head or (0, rows.shape[dim + 1])
        return rows.narrow(dim + 1, first, last - first)


def rows_found(module: Any) -> list[HeadRows] | None:
    """Return the rows of a module that is known to be attention; None for other modules.

    Raises:
        ValueError: the module normalizes queries or keys after their projections, which scaling would not change.
    """
    if isinstance(module, nn.MultiheadAttention):
        size = module.embed_dim
        pieces = [(0, size), (size, 2 * size)]
        rows = [HeadRows("q_proj_weight"), HeadRows("k_proj_weight")]
        if "in_proj_weight" in dict(module.named_parameters()):
            rows = [HeadRows("in_proj_weight", rows=piece) for piece in pieces]
        rows += [HeadRows("in_proj_bias", rows=piece) for piece in pieces if module.in_proj_bias is not None]
        return rows + [HeadRows("bias_k", dim=2)] * (module.bias_k is not None)
    if hasattr(module, "qk_nope_head_dim") and hasattr(module, "kv_b_proj"):
        nope, rope = module.qk_nope_head_dim, module.qk_rope_head_dim
        layer = "q_proj" if isinstance(getattr(module, "q_proj", None), nn.Linear) else "q_b_proj"
        return [
            HeadRows(f"{layer}.weight", 0.5, of_head=(0, nope)),
            HeadRows(f"{layer}.weight", 1.0, of_head=(nope, nope + rope)),
            HeadRows("kv_b_proj.weight", 0.5, of_head=(0, nope)),
        ]
    query, key = (getattr(module, name, None) for name in ("q_proj", "k_proj"))
    if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
        children = module.named_children()
        if any(_NORM.fullmatch(name) and not isinstance(child, nn.Identity) for name, child in children):
            raise ValueError(
                f"{type(module).__name__} normalizes queries or keys after their projections, so scaling these changes no "
                "logit; such logits are bounded: leave the module out by skip="
            )
        if key.out_features == query.out_features:
            return [HeadRows("q_proj.weight"), HeadRows("k_proj.weight")]
        return [HeadRows("q_proj.weight", 1.0)]  # heads share keys, and one head's clipping should not change another's
    return None


def counts(mask: torch.Tensor) -> torch.Tensor:
    """Return for numbers that a mask adds to logits whether the pairs count: -inf, -1e4 and below take pairs out."""
    return mask > _MASKED


def largest_logits(query: torch.Tensor, key: torch.Tensor, scale: float, mask: Any = None, causal: bool = False) -> Any:
    """Return the largest scaled product of a query and a key of each head, [heads], in float32.

    Pairs that a mask takes out, see `counts`, do not count; what a mask adds to logits does not, either.

    Args:
        query: [..., heads, queries, size].
        key: [..., heads, keys, size], or with fewer heads, each shared by equally many in succession.
        scale: the factor of the products.
        mask: True, or a number that `counts`, for each pair that counts, broadcast to [..., heads, queries, keys]; or None.
        causal: whether each query has only the keys up to its own place.
    """
    heads, n, n_keys = query.shape[-3], query.shape[-2], key.shape[-2]
    if key.shape[-3] != heads:
        key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
    if mask is not None and mask.dtype != torch.bool:
        mask = counts(mask)
    largest = torch.full((heads,), -torch.inf, device=query.device)
    at_once = max(1, 2**24 // max(1, query[..., 0, 0].numel() * n_keys))  # queries, so that memory stays small
    for start in range(0, n, at_once):
        end = min(start + at_once, n)
        logits = (query[..., start:end, :].float() @ key.float().mT) * scale
        if mask is not None:
            part = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., start:end, :]
            logits = logits.masked_fill(~part, -torch.inf)
        if causal:
            allowed = torch.ones(n, n_keys, dtype=torch.bool, device=query.device).tril()[start:end]
            logits = logits.masked_fill(~allowed, -torch.inf)
        by_head = logits.movedim(-3, 0).reshape(heads, -1)
        if by_head.shape[1]:
            largest = torch.maximum(largest, by_head.amax(dim=1))
    return largest
