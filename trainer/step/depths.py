"""`layer_groups`: learning rates that fall from a model's head to its input, as groups of parameters."""

from __future__ import annotations

import re
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...kernels.messages import instance, listed
from ..optimizer.patterns import Parameter, Pattern, assign, layers_of, matcher, table_text
from ..validation import integer, number
from .params import is_lazy, named_parameters

_JOINS_PREVIOUS = 99999  # the last number of a key in timm's `group_matcher` that belongs to the layer before it


class TrainerGroup(UserDict[str, Any]):
    """A group with multipliers; no dict, since a torch optimizer takes any dict, and would ignore the multipliers."""


class LayerGroups(list[MutableMapping[str, Any]]):
    """The groups of `layer_groups`; printed, a table with a row for each layer.

    Attributes:
        depths: the layer of each parameter, by name.
        factors: the factor of each layer's learning rate, by layer.
    """

    def __init__(
        self, groups: Iterable[MutableMapping[str, Any]], depths: dict[str, int], factors: dict[int, float]
    ) -> None:
        super().__init__(groups)
        self.depths, self.factors = depths, factors
        self._rows = self._table()  # of the names, which a torch optimizer takes out of the groups

    def table(self) -> list[tuple[str, ...]]:
        """Return the table as tuples of strings: a header, then a row for each layer.

        The columns are layer, factor of the learning rate, number of tensors, number of elements, number of tensors without
        weight decay, and the first one's name.
        """
        return list(self._rows)

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layer", "factor", "tensors", "elements", "undecayed", "parameters")]
        members = {name: (tensor.numel(), _is_undecayed(group)) for group in self for name, tensor in group["params"]}
        for layer, factor in self.factors.items():
            names = [name for name, depth in self.depths.items() if depth == layer]
            elements, undecayed = (sum(column) for column in zip(*map(members.__getitem__, names), strict=True))
            cells = (f"{factor:.4g}", str(len(names)), f"{elements:,}", str(undecayed), listed(names, 1))
            rows.append((str(layer), *cells))
        return rows

    def __repr__(self) -> str:
        return table_text(self._rows)


def layer_groups(
    net: nn.Module,
    decay: float = 0.75,
    *,
    depth: Callable[[str], int] | Sequence[Pattern] | None = None,
    no_decay: Pattern | None = "ndim<2",
    lr: float | None = None,
    weight_decay: float | None = None,
) -> LayerGroups:
    """Return a model's parameters in groups whose learning rates fall from the head to the input.

    A parameter of layer k gets the learning rate lr * decay ** (last - k): the last layer, the head, trains at the full
    rate, and layer 0, the input, at the lowest. Without `lr` the groups are for a `Trainer`: they have `lr_mult`, and
    `wd_mult`, which is 0 or 1. With `lr` they have `lr` and are for the classes of `torch.optim` and `tristep.optim`. The
    groups contain all parameters of the model by name, frozen ones too.

    Unless `depth` is given, the layers are those of

    1. `net.group_matcher`, which timm's models have: the layers of timm's `param_groups_layer_decay`;
    2. else the `ModuleList`s and `Sequential`s that repeat a class of block. Each block is a layer, numbered in the order of
       `net.named_parameters()`. If blocks contain such lists, and all blocks differ in shape, as the stages of a ConvNeXt
       do, the inner blocks are the layers. Parameters before the first block are layer 0, and so are embeddings outside of
       blocks; parameters between blocks belong to the next block, and parameters after the last block to the head. The
       towers of a model with several, such as CLIP, would follow each other: give `depth`.

    Args:
        net: the model; a DistributedDataParallel module has the parameter names of its inner module.
        decay: the factor from a layer to the one before it, 0 < decay <= 1.
        depth: a function from a parameter's name to the number of its layer, an int >= 0; or a list of patterns (see
            `tristep.optimizer.MultiOptimizer`), one for each layer from the input on: the first match decides, and
            parameters that match none are the head.
        no_decay: the pattern of the parameters without weight decay: vectors and scalars by default; None for none.
        lr: the learning rate of the last layer, >= 0; None for groups with multipliers.
        weight_decay: the weight decay of the other parameters, >= 0, only with `lr`; None for the default of the optimizer.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is not allowed, the model has no repeated blocks, a parameter is not initialized yet, or a
            pattern of `depth` gets no parameter.

    Example:
        >>> import torch, tristep
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> net = torch.nn.Sequential(torch.nn.Embedding(50, 8), encoder, torch.nn.Linear(8, 3))
        >>> groups = tristep.layer_groups(net, 0.5, no_decay="ndim<2|layer==Embedding")
        >>> groups
        layer  factor  tensors  elements  undecayed  parameters
        0       0.125        1       400          1  0.weight
        1        0.25       12       600          8  1.layers.0.self_attn.in_proj_weight and 11 more
        2         0.5       12       600          8  1.layers.1.self_attn.in_proj_weight and 11 more
        3           1        2        27          1  2.weight and 1 more
        >>> trainer = tristep.Trainer(groups, "adamw", {"learning_rate": 1e-3, "wd": 0.05})
        >>> groups = tristep.layer_groups(net, 0.5, lr=1e-3, weight_decay=0.05)
        >>> optimizer = torch.optim.AdamW(groups)

    Source: Clark et al. (2020), "ELECTRA", https://arxiv.org/abs/2003.10555, table 7; Bao et al. (2021), "BEiT: BERT
    Pre-Training of Image Transformers", https://arxiv.org/abs/2106.08254, and its `optim_factory.py`.
    """
    instance("net", net, nn.Module, "a torch.nn.Module", ", of whose modules the depth is read")
    decay = number("decay", decay, high=1, above=0)
    if lr is None and weight_decay is not None:
        raise ValueError(
            f"weight_decay={weight_decay!r}: is for groups with lr; a Trainer gets it in the optimizer's arguments, as wd"
        )
    lr = None if lr is None else number("lr", lr, low=0)
    weight_decay = None if weight_decay is None else number("weight_decay", weight_decay, low=0)
    if isinstance(net, DistributedDataParallel):
        net = net.module
    owners = layers_of(net)
    params = [Parameter(name, tensor, owners[id(tensor)]) for name, tensor, _ in named_parameters(net)]
    if not params:
        raise ValueError(f"net: this {type(net).__name__} has no parameters")
    if lazy := [repr(each.name) for each in params if is_lazy(each.tensor)]:
        raise ValueError(f"net: {listed(lazy)} are not initialized yet: run the model once before")
    undecayed = _undecayed(params, no_decay)
    depths = _depths(net, params, depth)
    last = max(depths)
    factors = {layer: decay ** (last - layer) for layer in sorted(set(depths))}
    members: dict[tuple[int, bool], list[tuple[str, torch.Tensor]]] = {}
    for each, layer, is_undecayed in zip(params, depths, undecayed, strict=True):
        members.setdefault((layer, is_undecayed), []).append((each.name, each.tensor))
    groups = [_group(members[key], factors[key[0]], key[1], lr, weight_decay) for key in sorted(members)]
    return LayerGroups(groups, {each.name: layer for each, layer in zip(params, depths, strict=True)}, factors)


def _group(
    params: list[tuple[str, torch.Tensor]], factor: float, undecayed: bool, lr: float | None, weight_decay: float | None
) -> MutableMapping[str, Any]:
    if lr is None:
        return TrainerGroup(params=params, lr_mult=factor, wd_mult=0.0 if undecayed else 1.0)
    wd = 0.0 if undecayed else weight_decay
    return {"params": params, "lr": lr * factor, **({} if wd is None else {"weight_decay": wd})}


def _is_undecayed(group: Mapping[str, Any]) -> bool:
    return group.get("wd_mult", group.get("weight_decay")) == 0


def _undecayed(params: Sequence[Parameter], no_decay: Pattern | None) -> list[bool]:
    if no_decay is None:
        return [False] * len(params)
    try:
        matches = matcher(no_decay)
    except (TypeError, ValueError) as error:
        raise type(error)(f"no_decay: {error}") from None
    return [matches(each) for each in params]


def _depths(net: nn.Module, params: Sequence[Parameter], depth: Any) -> list[int]:
    """Return the number of each parameter's layer."""
    names = [each.name for each in params]
    if callable(depth):
        return [integer(f"depth({name!r})", depth(name), low=0) for name in names]
    if depth is not None:
        if isinstance(depth, (str, Mapping)) or not isinstance(depth, Sequence) or not depth:
            raise TypeError(
                f"depth={depth!r}: must be a function from a parameter's name to the number of its layer, or a list of "
                "patterns, one for each layer"
            )
        try:
            return assign([*depth, "*"], names, [each.tensor for each in params], layers_of(net), {len(depth)}, advice="")
        except (TypeError, ValueError) as error:
            raise type(error)(f"depth: {error}") from None
    group_matcher: Any = getattr(net, "group_matcher", None)
    if group_matcher is not None:
        patterns = group_matcher(coarse=False)
        return _numbered([_timm_key(patterns, name) for name in names])
    blocks = _blocks(net, False) or _blocks(net, True)
    if not blocks:
        raise ValueError(
            f"net: this {type(net).__name__} has no ModuleList or Sequential of repeated blocks to read the depth from: "
            "give depth, a function from a parameter's name to the number of its layer, or a list of patterns"
        )
    return _from_blocks(params, blocks)


def _blocks(module: nn.Module, may_be_leaves: bool) -> list[nn.Module]:
    """Return the blocks of a model in order. `may_be_leaves`: whether modules without submodules count as blocks."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    inner = [block for child in children for block in _blocks(child, may_be_leaves)]
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return inner
    candidates = [child for child in children if may_be_leaves or any(True for _ in child.children())]
    if max(Counter(map(type, candidates)).values(), default=0) < 2:
        return inner
    # Blocks are alike, and lists inside, such as heads or experts, are side by side; stages differ in width.
    shapes = Counter((type(child), tuple(each.shape for each in child.parameters())) for child in candidates)
    return inner if inner and max(shapes.values()) == 1 else children


def _from_blocks(params: Sequence[Parameter], blocks: Sequence[nn.Module]) -> list[int]:
    block_of: dict[int, int] = {}
    for k, block in enumerate(blocks, 1):
        for tensor in block.parameters():
            block_of.setdefault(id(tensor), k)
    depths, following = [], len(blocks) + 1
    for each in reversed(params):
        own = block_of.get(id(each.tensor))
        following = following if own is None else own
        is_input = own is None and (following == 1 or isinstance(each.layer, (nn.Embedding, nn.EmbeddingBag)))
        depths.append(0 if is_input else following)
    return _numbered([(float(depth),) for depth in reversed(depths)])


def _timm_key(patterns: Any, name: str) -> tuple[float, ...]:
    """Return the numbers by which timm sorts a parameter into its layers."""
    if callable(patterns):
        key = patterns(name)
        return tuple(key) if isinstance(key, Iterable) else (key,)
    if not isinstance(patterns, Mapping):
        raise TypeError(f"net.group_matcher(coarse=False) is {patterns!r}, neither a dict nor a function: give depth")
    for place, entry in enumerate(patterns.values()):
        entries = [] if entry is None else entry if isinstance(entry, (list, tuple)) else [(entry, None)]
        for pattern, suffix in entries:
            if match := re.match(pattern, name):
                return (place, *(float(digits) for digits in match.groups()), *(suffix or ()))
    return (float("inf"),)  # the head


def _numbered(keys: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the place of each key among the different keys, from 0 on."""
    numbers: dict[tuple[float, ...], int] = {}
    layer = -1
    for key in sorted(set(keys)):
        layer += layer < 0 or key[-1] != _JOINS_PREVIOUS
        numbers[key] = layer
    return [numbers[key] for key in keys]
