"""`initialize`: the parameters of a whole module, each by what its layer uses it for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..validation import boolean
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
    """Fill the parameters of a module, and the running statistics of its norms.

    All values are computed before the first is written: an error leaves the module unchanged, and memory holds the
    parameters twice for a moment. `backward` sees nothing of it, and gradients stay. A shared parameter is filled once,
    under its first name.

    ==================================================================  ==================================================
    parameter                                                           value
    ==================================================================  ==================================================
    weight: any shape, as of linear, convolution and embedding layers   the initializer's own rule
    weight and bias of norms: batch, layer, group, instance, RMS, and   1 and 0
    other modules with "norm" in the name of their class whose weight
    has at most one dimension
    bias                                                                0
    running mean, running variance, count of batches of norms           0, 1, 0
    recurrent layers and cells: `weight_...`, `bias_...`                the initializer's own rule, 0
    `bias_k`, `bias_v` of MultiheadAttention                            0
    weight of PReLU                                                     0.25
    row `padding_idx` of an embedding                                   0, unless it is loaded
    others                                                              as their names end; see :class:`Initializer`
    ==================================================================  ==================================================

    A parameter's attribute `init`, a name or an :class:`Initializer`, is its own initializer: its weight rule fills the
    parameter, whatever the name ends in, as arguments such as `bias_initializer` of Gluon's layers do.

    Args:
        module: the module, with all its submodules.
        initializer: a name, such as "xavier", an instance, or a :class:`Mixed` or :class:`Load`; by default Uniform(0.07).
        generator: the source of random numbers; None means the global generator of each parameter's device. With a
            generator, on the CPU for instance, values do not depend on the parameters' device. Numbers are drawn in
            float32 (float64 for float64 parameters), parameter by parameter in the order of `named_parameters`.
        init: Gluon's name of `initializer`, instead of it.
        force_reinit: must be True, because the values of torch's parameters are always replaced.

    Raises:
        TypeError: an argument of a wrong type; a parameter that is not of a floating-point type.
        ValueError: no initializer has that name; a parameter has no shape yet, no memory, no rule for its name, or a shape
            that the rule does not fit. The message names it. Nothing has been changed.

    Source: MXNet 1.9.1, `Block.initialize` of Gluon.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    >>> initialize(net, Xavier(magnitude=2), torch.Generator().manual_seed(1))
    >>> net[0].bias.tolist(), net[1].weight.tolist()
    ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; for one tensor, call the initializer: "
            "create('xavier')(name, tensor)"
        )
    if init is not None:
        if initializer != "uniform":
            raise TypeError(f"init={init!r} and initializer={initializer!r}: both name the initializer, give one of them")
        initializer = init
    if not boolean("force_reinit", force_reinit):
        raise ValueError(
            "force_reinit=False: torch's parameters have values from the start, which are always replaced: leave it out, "
            "and call initialize() once"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator={generator!r}: must be a torch.Generator or None, not {type(generator).__name__}")
    chosen = create(initializer)
    # Mixed and Load choose initializers, which are then the global ones themselves.
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
        attrs = {} if target.own is None else {"__init__": target.own}
        chosen(InitDesc(target.name, attrs, global_init, target.role, generator), values)
        if target.padding_idx is not None and not isinstance(chosen, Load):
            values[target.padding_idx] = 0
        results.append(values)
    with torch.no_grad():
        for target, values in zip(targets, results, strict=True):
            target.tensor.copy_(values)


class _Target(NamedTuple):
    """A parameter or buffer to fill."""

    name: str
    tensor: torch.Tensor
    role: str | None
    own: Any = None  # its own initializer
    padding_idx: int | None = None


def _targets(module: torch.nn.Module) -> Iterator[_Target]:
    """The tensors of a module that `initialize` fills, each once."""
    seen = set()
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        embeds = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for leaf, tensor in child.named_parameters(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                own = vars(tensor).get("init")
                if own is None and leaf == "weight" and isinstance(child, torch.nn.PReLU):
                    own = Constant(0.25)
                padding_idx = child.padding_idx if embeds and leaf == "weight" else None
                yield _Target(dot + leaf, tensor, _role(child, leaf, tensor), own, padding_idx)
        if isinstance(child, _NORMS):
            for leaf, tensor in child.named_buffers(recurse=False):
                if leaf in ("running_mean", "running_var", _COUNT) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Target(dot + leaf, tensor, leaf)


def _role(child: torch.nn.Module, leaf: str, tensor: torch.Tensor) -> str | None:
    """The ending that says what a parameter is, where its name does not."""
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
    lazy = [repr(target.name) for target in targets if torch.nn.parameter.is_lazy(target.tensor)]
    if lazy:
        few = ", ".join(lazy[:8]) + (f" and {len(lazy) - 8} more" if len(lazy) > 8 else "")
        raise ValueError(f"parameters without a shape yet: {few}: run the model once on an example before initialize")
    for name, tensor, role, *_ in targets:
        if tensor.is_meta:
            raise ValueError(
                f"parameter {name!r}: is on the meta device, so has no memory: call module.to_empty(device=...) first"
            )
        if tensor.is_inference():
            raise ValueError(
                f"parameter {name!r}: was made in inference mode, and cannot be written to: make the module outside"
            )
        if role != _COUNT and not tensor.is_floating_point():
            raise TypeError(
                f"parameter {name!r}: is {tensor.dtype}, but initializers fill floating-point parameters: initialize the "
                "submodules that have these"
            )
