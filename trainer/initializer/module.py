"""`initialize`, which fills all parameters of a module, each according to its role in its layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.messages import listed
from ..validation import boolean, instance
from .base import InitDesc, Initializer
from .basic import Constant
from .by_name import Load, Mixed, create

_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)
_COUNT = "num_batches_tracked"


def initialize(
    module: torch.nn.Module,
    initializer: str | Initializer | Mixed | Load = "uniform",
    generator: torch.Generator | None = None,
    *,
    init: str | Initializer | Mixed | Load | None = None,
    force_reinit: bool = True,
) -> None:
    """Fill all parameters of a module, and the running statistics of its norms, in place.

    All values are computed before the first is written, so an error leaves the module unchanged, and memory briefly holds
    the parameters twice. Autograd does not record it, and gradients stay. A shared parameter is filled once, under its first
    name.

    ==================================================================  ==================================================
    parameter                                                           value
    ==================================================================  ==================================================
    weight of any shape: linear, convolution, embedding layers, ...     the initializer's own rule
    weight and bias of norms: batch, layer, group, instance, RMS, and   1 and 0
    other modules with "norm" in the name of their class whose weight
    has at most one dimension
    bias                                                                0
    running mean, running variance, count of batches of norms           0, 1, 0
    recurrent layers and cells: `weight_...`, `bias_...`                the initializer's own rule, 0
    `bias_k`, `bias_v` of MultiheadAttention                            0
    weight of PReLU                                                     0.25
    row `padding_idx` of an embedding                                   0, unless loaded by :class:`Load`
    any other                                                           by its name's ending; see :class:`Initializer`
    ==================================================================  ==================================================

    A parameter may have its own initializer in an attribute `init`, a name or an :class:`Initializer`. Its weight rule then
    fills the parameter, whatever the name ends in, like the arguments `bias_initializer` and so on of Gluon's layers.

    Args:
        module: the module to fill, with all its submodules.
        initializer: a name such as "xavier", an :class:`Initializer`, or a :class:`Mixed` or :class:`Load`; the default is
            Uniform(0.07).
        generator: the torch.Generator to draw from; None means the global generator of each parameter's device. With a CPU
            generator, values do not depend on the parameters' device. Numbers are drawn in float32 (float64 for float64
            parameters), parameter by parameter in the order of `named_parameters`.
        init: Gluon's name for the argument `initializer`; give only one of the two.
        force_reinit: must be True, because the values of torch's parameters are always replaced.

    Raises:
        TypeError: an argument has the wrong type, or a parameter is not of a floating-point type.
        ValueError: no initializer is registered under that name; or a parameter, named in the message, has no shape yet, no
            memory, no rule for its name, or a shape that its rule does not accept. Nothing has been changed.

    Source: MXNet 1.9.1, `Block.initialize` of Gluon.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    >>> initialize(net, Xavier(magnitude=2), torch.Generator().manual_seed(1))
    >>> net[0].bias.tolist(), net[1].weight.tolist()
    ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    """
    hint = "; for one tensor, call the initializer: create('xavier')(name, tensor)"
    instance("module", module, torch.nn.Module, "a torch.nn.Module", hint)
    if init is not None:
        if initializer != "uniform":
            raise TypeError(f"init={init!r} and initializer={initializer!r}: both name the initializer, give one of them")
        initializer = init
    if not boolean("force_reinit", force_reinit):
        raise ValueError(
            "force_reinit=False: torch's parameters have values from the start, which are always replaced: leave it out, "
            "and call initialize() once"
        )
    instance("generator", generator, (torch.Generator, type(None)), "a torch.Generator or None", shown=True)
    chosen = create(initializer)
    # Mixed and Load delegate to initializers, each of which then counts as the global one.
    global_init = chosen if isinstance(chosen, Initializer) else None
    targets = list(_targets(module))
    _check(targets)
    results = []
    for target in targets:
        if target.role == _COUNT:
            result = chosen.param.get(target.name, target.tensor) if isinstance(chosen, Load) else 0
            results.append(torch.as_tensor(result, device=target.tensor.device))
            continue
        values = target.tensor.detach().clone(memory_format=torch.contiguous_format)
        attrs = {} if target.init is None else {"__init__": target.init}
        chosen(InitDesc(target.name, attrs, global_init, target.role, generator), values)
        if target.padding_idx is not None and not isinstance(chosen, Load):
            values[target.padding_idx] = 0
        results.append(values)
    with torch.no_grad():
        for target, values in zip(targets, results, strict=True):
            target.tensor.copy_(values)


class _Target(NamedTuple):
    """Parameter or buffer to fill; `role` is the ending that selects its rule, None if that is its name's."""

    name: str
    tensor: torch.Tensor
    role: str | None
    init: Any = None  # the parameter's own initializer
    padding_idx: int | None = None


def _targets(module: torch.nn.Module) -> Iterator[_Target]:
    """Yield each parameter and buffer of a module that `initialize` fills, once."""
    seen = set()
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        embeds = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for leaf, tensor in child.named_parameters(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                init = vars(tensor).get("init")
                if init is None and leaf == "weight" and isinstance(child, torch.nn.PReLU):
                    init = Constant(0.25)
                padding_idx = child.padding_idx if embeds and leaf == "weight" else None
                yield _Target(dot + leaf, tensor, _rule_name(child, leaf, tensor), init, padding_idx)
        if isinstance(child, _NORMS):
            for leaf, tensor in child.named_buffers(recurse=False):
                if leaf in ("running_mean", "running_var", _COUNT) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Target(dot + leaf, tensor, leaf)


def _rule_name(child: torch.nn.Module, leaf: str, tensor: torch.Tensor) -> str | None:
    """Return the ending that selects a parameter's rule ("gamma", "bias", ...), or None if its own name does."""
    norm = isinstance(child, _NORMS)
    if norm or "norm" in type(child).__name__.lower():
        if leaf == "weight" and (norm or torch.nn.parameter.is_lazy(tensor) or tensor.dim() <= 1):
            return "gamma"
        if leaf == "bias":
            return "beta"
    if isinstance(child, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
        return leaf.split("_")[0]
    if isinstance(child, torch.nn.MultiheadAttention) and leaf in ("bias_k", "bias_v"):
        return "bias"
    return None


def _check(targets: Sequence[_Target]) -> None:
    """Raise if a target cannot be filled: it has no shape or memory, is an inference tensor, or is not floating-point."""
    lazy = [repr(target.name) for target in targets if torch.nn.parameter.is_lazy(target.tensor)]
    if lazy:
        raise ValueError(
            f"parameters without a shape yet: {listed(lazy)}: run the model once on an example before initialize"
        )
    for name, tensor, role, *_ in targets:
        for wrong, error, words in (
            (tensor.is_meta, ValueError, "is on the meta device, so has no memory: call module.to_empty(device=...) first"),
            (
                tensor.is_inference(),
                ValueError,
                "was made in inference mode, so it cannot be changed: make the module outside",
            ),
            (
                role != _COUNT and not tensor.is_floating_point(),
                TypeError,
                f"is {tensor.dtype}, but initializers fill floating-point parameters only: initialize the other submodules",
            ),
        ):
            if wrong:
                raise error(f"parameter {name!r}: {words}")
