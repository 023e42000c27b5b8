"""What a checkpoint of a training has: collected from a trainer and a model, and loaded into them; and `resume`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .. import dist_utils
from ..kvstore.sync import GradientSync
from ..params import modules_of
from ..random_state import check_random_state, random_state, set_random_state
from ..replica import Replica
from .check import plain_name
from .folder import Checkpoint, Content, is_checkpoint, list_checkpoints, read_checkpoint
from .state import load_read


class Trainer(Protocol):
    """What is needed here of a `Trainer`, whose module imports this one."""

    _sync: GradientSync
    _reduced_by_torch: bool

    @property
    def replicas(self) -> list[Replica]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


ALONE = "alone"  # what `group_of` gives for a process that trains by itself


def group_of(trainer: Trainer) -> Any:
    """The group of the processes that train together with this one, as torch.distributed takes it; or `ALONE`.

    Raises:
        ValueError: they train with a store whose checkpoints cannot be saved.
    """
    sync = trainer._sync
    if sync.in_step:
        return sync.group
    if trainer._reduced_by_torch:
        return None
    if sync.store is not None and sync.store.num_workers > 1:
        raise ValueError(
            f"checkpoints with a store of type {sync.store.type!r} are not supported, as its processes are at different "
            "steps: use kvstore='dist_sync', or save weights and states by yourself"
        )
    return ALONE


def rank_of(group: Any) -> int:
    """The number of this process in its group."""
    return 0 if group is ALONE else dist.get_rank(group)


def tensors_of(trainer: Trainer, net: Any) -> dict[str, list[torch.Tensor]]:
    """Weights and buffers by name, each with those of all replicas in this process.

    Raises:
        TypeError, ValueError: `net` is no model of these replicas.
    """
    replicas = trainer.replicas
    if net is None:
        return {name: list(same) for name, *same in zip(replicas[0].names, *(each.params for each in replicas), strict=True)}
    found: dict[str, list[torch.Tensor]] = {}
    for module, replica in zip(_modules(trainer, net), replicas, strict=True):
        own = _tensors_of_module(module)
        known = {id(tensor) for tensor in own.values()}
        for name, param in zip(replica.names, replica.params, strict=True):
            if id(param) not in known:
                raise ValueError(f"net does not have the parameter {name!r} of the trainer: give the model that it trains")
        for name, tensor in own.items():
            found.setdefault(name, []).append(tensor)
    return found


def extra_states_of(trainer: Trainer, net: Any) -> list[dict[str, torch.nn.Module]]:
    """The modules of each replica that have an extra state of their own (`get_extra_state`), by its name in state_dict."""
    return [] if net is None else [_with_extra_state(module) for module in _modules(trainer, net)]


def _modules(trainer: Trainer, net: Any) -> list[torch.nn.Module]:
    """The model of each replica."""
    modules = [net] if isinstance(net, torch.nn.Module) else modules_of(net)
    if len(modules) != len(trainer.replicas):
        raise TypeError(
            f"net must be the model, or the list of the trainer's {len(trainer.replicas)} replicas of it, got {net!r:.200}"
        )
    return [each.module if isinstance(each, torch.nn.parallel.DistributedDataParallel) else each for each in modules]


def _with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    default = torch.nn.Module.get_extra_state
    found = [(name, each) for name, each in module.named_modules() if type(each).get_extra_state is not default]
    return {plain_name(f"{name}._extra_state".removeprefix(".")): each for name, each in found}


def _tensors_of_module(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `state_dict` of a module has, each tensor once, without extra states."""
    own = {id(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
    extra = _with_extra_state(module)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, value in module.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if name in extra:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"net has {key!r}, a {type(value).__name__}, in its state_dict: only tensors can be saved")
        if id(value) not in own:
            raise TypeError(
                f"net has {key!r} in its state_dict, which is none of its parameters and buffers: it could not be loaded. "
                "Let the module have it as its extra state (get_extra_state, set_extra_state)"
            )
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def collect_rank(
    tensors: Mapping[str, Sequence[torch.Tensor]],
    extra: Sequence[Mapping[str, torch.nn.Module]],
    stateful: Sequence[Any],
) -> dict[str, Any]:
    """What a checkpoint has of each process; buffers, such as running means, are those of each replica."""
    count = len(next(iter(tensors.values())))
    return {
        "random": random_state(),
        "stateful": [each.state_dict() for each in stateful],
        "extra": [{name: module.get_extra_state() for name, module in modules.items()} for modules in extra],
        "buffers": [
            {name: same[r] for name, same in tensors.items() if not isinstance(same[r], torch.nn.Parameter)}
            for r in range(count)
        ],
    }


def check_weights(tensors: Mapping[str, Sequence[torch.Tensor]], saved: Mapping[str, torch.Tensor], net: Any) -> None:
    """Refuse weights that are not of this model.

    Raises:
        ValueError: they are of another one.
    """
    if other := sorted(set(tensors) ^ set(saved)):
        missing = [name for name in other if name in saved]
        hint = "give net, the model, as when it was saved" if missing and net is None else "it is of another model"
        raise ValueError(
            f"the checkpoint has {len(saved)} weights and buffers, here are {len(tensors)}: "
            f"{', '.join(map(repr, other[:5]))} {'is' if len(other) == 1 else 'are'} in one of them only: {hint}"
        )
    for name, tensor in saved.items():
        for mine in tensors[name]:
            if isinstance(mine, (torch.nn.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)):
                raise ValueError(f"{name!r} is not initialized yet: run the model once before a checkpoint is loaded")
            if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
                raise ValueError(
                    f"the checkpoint has {name!r} as {tensor.dtype} {tuple(tensor.shape)}, here it is {mine.dtype} "
                    f"{tuple(mine.shape)}"
                )
            once = tensor[_once(mine)]
            if once.shape != tensor.shape and not torch.equal(_bytes(once.expand_as(tensor)), _bytes(tensor)):
                raise ValueError(f"{name!r} is expanded here, with one element for several, which differ in the checkpoint")


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where each element of an expanded tensor is once: all of others."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(slice(1) if stride == 0 and size > 1 else slice(None) for stride, size in strides)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def load_content(
    trainer: Trainer,
    tensors: Mapping[str, Sequence[torch.Tensor]],
    extra: Sequence[Mapping[str, torch.nn.Module]],
    stateful: Sequence[Any],
    found: Content,
) -> None:
    """Load a checkpoint whose weights have been checked; random numbers last."""
    ranks, group = found.ranks, group_of(trainer)
    rank, count = rank_of(group), 1 if group is ALONE else dist.get_world_size(group)
    own = ranks[rank if rank < len(ranks) else 0]
    if own["stateful"] and not stateful:
        warnings.warn(
            f"the checkpoint has the states of {len(own['stateful'])} other objects, such as the place in the data of fit, "
            "which are not loaded",
            stacklevel=5,
        )
    elif len(own["stateful"]) != len(stateful):
        raise ValueError(
            f"the checkpoint has the states of {len(own['stateful'])} other objects (stateful), here are {len(stateful)}"
        )
    randoms, extras = own["random"], own["extra"] or [{}]
    extras = [extras[r if r < len(extras) else 0] for r in range(len(extra))]
    for modules, states in zip(extra, extras, strict=True):
        if other := sorted(set(modules) ^ set(states)):
            raise ValueError(f"{other[0]!r} is in the checkpoint or in net, not in both: it is of another model")
    alike = len(ranks) == count and len(own["buffers"]) == len(trainer.replicas)
    for r, buffers in enumerate(own["buffers"] if alike else ()):
        check_weights({name: [same[r]] for name, same in tensors.items() if name in buffers}, buffers, None)
    is_known = alike and (randoms["gpus"] is None or len(randoms["gpus"]) == torch.cuda.device_count())
    check_random_state(randoms, with_gpus=is_known)
    load_read(trainer.load_state_dict, found.states, f"checkpoint={str(found.about.path)!r}")
    with torch.no_grad():
        for name, tensor in found.model.items():
            for mine in tensors[name]:
                mine[_once(mine)].copy_(tensor[_once(mine)])
        for r, buffers in enumerate(own["buffers"] if alike else ()):
            for name, tensor in buffers.items():
                mine = tensors[name][r]
                mine[_once(mine)].copy_(tensor[_once(mine)])
    for modules, states in zip(extra, extras, strict=True):
        for name, module in modules.items():
            module.set_extra_state(states[name])
    for each, state in zip(stateful, own["stateful"], strict=False):  # as many, or none of them here
        each.load_state_dict(state)
    if is_known:
        set_random_state(randoms)
    else:
        warnings.warn(
            f"the checkpoint is of {len(ranks)} processes with {len(own['buffers'])} replicas, here are {count} with "
            f"{len(trainer.replicas)}, or other GPUs: random numbers go on otherwise than they would have",
            stacklevel=5,
        )


def agreed(group: Any, own: Any) -> Any:
    """What rank 0 has, on all ranks."""
    return own if group is ALONE else dist_utils.broadcast_object(own, group)


def resume(trainer: Trainer, folder: str | os.PathLike[str], net: Any = None, stateful: Sequence[Any] = ()) -> Checkpoint:
    """See `Trainer.resume`; `stateful` as for `CheckpointManager`."""
    tensors, extra, group = tensors_of(trainer, net), extra_states_of(trainer, net), group_of(trainer)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"folder={str(folder)!r}: this is a file, it must be a folder of checkpoints")
    found = _newest(folder)
    chosen = agreed(group, None if found is None else str(found.about.path))
    if chosen is None:
        return Checkpoint()
    if found is None or str(found.about.path) != chosen:
        found = read_checkpoint(Path(chosen))
    check_weights(tensors, found.model, net)
    load_content(trainer, tensors, extra, stateful, found)
    return found.about


def _newest(folder: str | os.PathLike[str]) -> Content | None:
    damaged: dict[Path, str] = {}
    paths = _paths(Path(folder))
    while paths:
        path = paths.pop()
        try:
            found = read_checkpoint(path)
        except (OSError, ValueError) as error:
            if path.exists():
                damaged[path] = f"{path.name}: {error}"
            else:  # somebody who saves here has removed it meanwhile: there is a newer one
                paths = [each for each in _paths(Path(folder)) if each not in damaged]
            continue
        if damaged:
            warnings.warn(
                f"folder={str(folder)!r}: {path.name} is resumed, newer ones are damaged. {next(iter(damaged.values()))}",
                stacklevel=5,
            )
        return found
    if damaged:
        raise ValueError(
            f"folder={str(folder)!r}: all of its {len(damaged)} checkpoints are damaged. {next(iter(damaged.values()))}"
        )
    return None


def _paths(folder: Path) -> list[Path]:
    """The one checkpoint that this is, or those in it."""
    return [folder] if is_checkpoint(folder) else list_checkpoints(folder)
