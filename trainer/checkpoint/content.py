"""Training: collects the state of a training in each process for a checkpoint, and loads it; and `resume`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..kvstore.sync import GradientSync
from ..serialization import HINT, Loaded, announce, check_fit, load_read, mapping, match, plain_name
from ..step.params import modules_of
from ..step.replica import Replica
from ..utils import distributed
from ..utils.random_state import check_random_state, random_state, set_random_state
from ..validation import absolute_path, instance
from .folder import Checkpoint, Content, is_checkpoint, newest, read_checkpoint

_LAZY = (torch.nn.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)


class Trainer(Protocol):
    """The part of `Trainer` that this module needs, which imports it."""

    _sync: GradientSync
    _reduced_by_torch: bool

    @property
    def replicas(self) -> list[Replica]: ...

    def _load(
        self,
        state_dict: Mapping[str, Any],
        strict: bool,
        settings: str,
        all_or_none: Callable[[], AbstractContextManager[None]],
    ) -> Loaded | None: ...


class Ranks:
    """The processes that train together with this one; all of them call each method here, in the same order.

    Attributes:
        alone: whether this process trains without others. In a group of one process it does not.
    """

    def __init__(self, trainer: Trainer) -> None:
        sync = trainer._sync
        together = sync.in_step or trainer._reduced_by_torch
        if not together and sync.store is not None and sync.store.num_workers > 1:
            raise ValueError(
                f"checkpoints with a store of type {sync.store.type!r} are not supported, as its processes are at different "
                "steps: use kvstore='dist_sync', or save weights and states by yourself"
            )
        sync.check_saves()
        self._group = sync.group if sync.in_step else None  # None means all processes in torch.distributed
        self.rank, self.count = (dist.get_rank(self._group), dist.get_world_size(self._group)) if together else (0, 1)
        self.alone, self._trainer = not together, trainer

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.alone else distributed.all_gather_objects(value, self._group)

    def largest(self, value: int) -> int:
        if self.alone:
            return value
        values = torch.tensor([value], device=self._trainer.replicas[0].params[0].device)
        distributed.all_reduce(values, dist.ReduceOp.MAX, self._group)
        return int(values)

    def wait(self) -> None:
        if not self.alone:
            distributed.barrier(self._group)

    def all_or_none(self) -> AbstractContextManager[None]:
        """As `GradientSync.all_or_none`, also with DistributedDataParallel."""
        device = self._trainer.replicas[0].params[0].device
        return nullcontext() if self.alone else distributed.all_or_none(self._group, device)


class Training:
    """Everything of a training that checkpoints save, in this process.

    Args:
        net: the model, or the list of its replicas. None: only the trainer's parameters are saved.
        stateful: other objects with `state_dict` and `load_state_dict`.
    """

    def __init__(self, trainer: Trainer, net: Any, stateful: Sequence[Any] = ()) -> None:
        self._trainer, self._net, self._stateful = trainer, net, stateful
        replicas, modules = trainer.replicas, _modules(trainer, net)
        params_of_replicas = [dict(zip(replica.names, replica.params, strict=True)) for replica in replicas]
        by_replica = params_of_replicas if net is None else [_tensors_of(module) for module in modules]
        for tensors, params in zip(by_replica, params_of_replicas, strict=True):
            ids = {id(tensor) for tensor in tensors.values()}
            if missing := [name for name, param in params.items() if id(param) not in ids]:
                raise ValueError(
                    f"net does not have the parameter {missing[0]!r} of the trainer: give the model that it trains"
                )
        # By name, each weight and buffer of all replicas in this process.
        self.tensors = {name: [tensors[name] for tensors in by_replica] for name in by_replica[0]}
        self._extra = [_with_extra_state(module) for module in modules]

    def collect(self) -> dict[str, Any]:
        """Return what a checkpoint saves for each process: random generators, other objects, extra states, buffers."""
        return {
            "random": random_state(),
            "stateful": [_state_of(i, each) for i, each in enumerate(self._stateful)],
            "extra": [{name: module.get_extra_state() for name, module in modules.items()} for modules in self._extra],
            "buffers": [
                {name: same[r] for name, same in self.tensors.items() if not isinstance(same[r], torch.nn.Parameter)}
                for r in range(len(self._trainer.replicas))
            ],
        }

    def check(self, content: Content, ranks: Ranks, strict: bool, settings: str) -> Callable[[], Checkpoint]:
        """Return a function that loads a checkpoint and returns its description; it sets the random generators last.

        Raise ValueError if weights, buffers or other objects' states are of another training. The returned function checks
        the trainer's states before it changes anything. Warn if the states of other objects, or random numbers, are not
        restored. `strict` and `settings` are those of `Trainer.resume`.
        """
        model, weights = content.model, None
        saved = content.ranks[ranks.rank if ranks.rank < len(content.ranks) else 0]
        if check_fit(strict, settings):
            self._check_weights(model)
        else:
            weights = match("weights and buffers", self.tensors, model, lambda name: self._has_shape(name, model[name]))
            model = {name: model[name] for name in weights.loaded}
            fitting = [{n: each for n, each in of.items() if self._has_shape(n, each)} for of in saved["buffers"]]
            saved = {**saved, "buffers": fitting}
        if saved["stateful"] and not self._stateful:
            warnings.warn(
                f"the checkpoint has the states of {len(saved['stateful'])} other objects, such as the place in the data of "
                "fit, which are not loaded",
                stacklevel=5,
            )
        elif len(saved["stateful"]) != len(self._stateful):
            raise ValueError(
                f"the checkpoint has the states of {len(saved['stateful'])} other objects (stateful), here are "
                f"{len(self._stateful)}"
            )
        replicas, randoms, extras = self._trainer.replicas, saved["random"], saved["extra"] or [{}]
        extras = [extras[r if r < len(extras) else 0] for r in range(len(self._extra))]
        for modules, states in zip(self._extra, extras, strict=True):
            if strict and (other := sorted(set(modules) ^ set(states))):
                raise ValueError(f"{other[0]!r} is in the checkpoint or in net, not in both: it is of another model; {HINT}")
        pairs = [(name, mine, tensor) for name, tensor in model.items() for mine in self.tensors[name]]
        alike = len(content.ranks) == ranks.count and len(saved["buffers"]) == len(replicas)
        if alike:  # the first replica's buffers are in the model; each replica also has its own
            for r, buffers in enumerate(saved["buffers"]):
                if unknown := sorted(set(buffers) - set(self.tensors)):
                    raise ValueError(f"the checkpoint has the buffer {unknown[0]!r}, which net does not have")
                pairs += [(name, self.tensors[name][r], tensor) for name, tensor in buffers.items()]
        for name, mine, tensor in pairs:
            _check_fits(name, mine, tensor)
        is_known = alike and (randoms["gpus"] is None or len(randoms["gpus"]) == torch.cuda.device_count())
        check_random_state(randoms, with_gpus=is_known)
        for each, state in zip(self._stateful, saved["stateful"], strict=False):  # as many, or none of them here
            if callable(check := getattr(each, "check_state_dict", None)):
                check(state)

        def load() -> Checkpoint:
            load_states = partial(self._trainer._load, strict=strict, settings=settings, all_or_none=ranks.all_or_none)
            loaded = load_read(load_states, content.states, f"checkpoint={str(content.about.path)!r}")
            with torch.no_grad():
                for _, mine, tensor in pairs:
                    mapping.copy(mine[_once(mine)], tensor[_once(mine)])
            for modules, states in zip(self._extra, extras, strict=True):
                for name, module in modules.items():
                    if name in states:
                        module.set_extra_state(states[name])
            for each, state in zip(self._stateful, saved["stateful"], strict=False):
                each.load_state_dict(state)
            if is_known:
                set_random_state(randoms)
            else:
                warnings.warn(
                    f"the checkpoint is of {len(content.ranks)} processes with {len(saved['buffers'])} replicas, here are "
                    f"{ranks.count} with {len(replicas)}, or other GPUs: random numbers go on otherwise than they "
                    "would have",
                    stacklevel=5,
                )
            if weights is not None:
                announce("weights and buffers", weights)
            return content.about._replace(weights=weights, states=loaded)

        return load

    def _has_shape(self, name: str, saved: torch.Tensor) -> bool:
        """Return whether there is a weight or buffer of this name, and of this shape if its shape is known yet."""
        mine = self.tensors.get(name)
        return mine is not None and (isinstance(mine[0], _LAZY) or mine[0].shape == saved.shape)

    def _check_weights(self, saved: Mapping[str, torch.Tensor]) -> None:
        if other := sorted(set(self.tensors) ^ set(saved)):
            missing = [name for name in other if name in saved]
            hint = (
                "give net, the model, as when it was saved"
                if missing and self._net is None
                else f"it is of another model; {HINT}"
            )
            raise ValueError(
                f"the checkpoint has {len(saved)} weights and buffers, here are {len(self.tensors)}: "
                f"{', '.join(map(repr, other[:5]))} {'is' if len(other) == 1 else 'are'} in one of them only: {hint}"
            )


def resume(
    trainer: Trainer,
    folder: str | os.PathLike[str],
    net: Any = None,
    stateful: Sequence[Any] = (),
    strict: bool = True,
    settings: str = "file",
) -> Checkpoint:
    """Do what `Trainer.resume` does, also for other objects with a `state_dict`."""
    check_fit(strict, settings)
    ranks = Ranks(trainer)
    with ranks.all_or_none():
        training, path = Training(trainer, net, stateful), absolute_path("folder", folder)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"folder={str(folder)!r}: this is a file, it must be a folder of checkpoints")
        content = newest(path)
    name = None if content is None or content.about.path is None else content.about.path.name
    # Not its path, as each process may have the folder elsewhere.
    found = ranks.gather((name, None if content is None else content.identity))
    chosen, identity = found[0]
    if chosen is None:
        if other := next((f"rank {rank} has {each}" for rank, (each, _) in enumerate(found) if each is not None), None):
            raise ValueError(
                f"folder={str(folder)!r}: rank 0 has no checkpoint there, {other}: all must read the same folder"
            )
        return Checkpoint()
    with ranks.all_or_none():
        if content is None or name != chosen:
            content = read_checkpoint(path if path.name == chosen and is_checkpoint(path) else path / chosen)
        if content.identity != identity:
            raise ValueError(
                f"folder={str(folder)!r}: its {chosen} is another checkpoint than rank 0's: all must read the same folder"
            )
        load = training.check(content, ranks, strict, settings)
    return load()


def _modules(trainer: Trainer, net: Any) -> list[torch.nn.Module]:
    """Return the model of each replica; an empty list without `net`."""
    if net is None:
        return []
    modules = [net] if isinstance(net, torch.nn.Module) else modules_of(net)
    if len(modules) != len(trainer.replicas):
        raise TypeError(
            f"net must be the model, or the list of the trainer's {len(trainer.replicas)} replicas of it, got {net!r:.200}"
        )
    return [each.module if isinstance(each, torch.nn.parallel.DistributedDataParallel) else each for each in modules]


def _state_of(i: int, stateful: Any) -> dict[str, Any]:
    state = stateful.state_dict()
    instance(f"stateful[{i}]: what state_dict() of {type(stateful).__name__} returns", state, Mapping, "a dict")
    return dict(state)


def _with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that define `get_extra_state`, by the name of that state in `state_dict`."""
    default = torch.nn.Module.get_extra_state
    modules = [(name, each) for name, each in module.named_modules() if type(each).get_extra_state is not default]
    return {plain_name(f"{name}._extra_state".removeprefix(".")): each for name, each in modules}


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in a module's `state_dict`, each once, without extra states."""
    tensor_ids = {id(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
    extra = _with_extra_state(module)
    by_id: dict[int, tuple[str, torch.Tensor]] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if name in extra:
            continue
        instance(f"net has {key!r} in its state_dict, which", value, torch.Tensor, "a tensor to be saved")
        if id(value) not in tensor_ids:
            raise TypeError(
                f"net has {key!r} in its state_dict, which is neither a parameter nor a buffer: it could not be "
                "loaded. Let the module have it as its extra state (get_extra_state, set_extra_state)"
            )
        by_id.setdefault(id(value), (name, value))
    return dict(by_id.values())


def _check_fits(name: str, mine: torch.Tensor, saved: torch.Tensor) -> None:
    """Raise if a saved tensor cannot be copied to `mine`."""
    if isinstance(mine, _LAZY):
        raise ValueError(f"{name!r} is not initialized yet: run the model once before a checkpoint is loaded")
    if saved.shape != mine.shape or saved.dtype != mine.dtype:
        raise ValueError(
            f"the checkpoint has {name!r} as {saved.dtype} {tuple(saved.shape)}, here it is {mine.dtype} {tuple(mine.shape)}"
            + (f"; {HINT}" if saved.shape != mine.shape else "")
        )
    once = saved[_once(mine)]
    if once.shape != saved.shape and not torch.equal(_bytes(once.expand_as(saved)), _bytes(saved)):
        raise ValueError(f"{name!r} is expanded here, so its elements share memory, but they differ in the checkpoint")


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return an index of each element of a tensor once: expanded dimensions have the same elements several times."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(slice(1) if stride == 0 and size > 1 else slice(None) for stride, size in strides)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
