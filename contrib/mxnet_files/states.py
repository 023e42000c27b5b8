"""Reader of the files that `Trainer.save_states` of MXNet's Gluon wrote, for `tristep.Trainer`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...kernels.layouts import compute_dtype
from ...trainer import checkpoint
from ...trainer.checkpoint import files
from ...trainer.optimizer import RuleOptimizer
from ...trainer.optimizer.states import MASTER
from ...trainer.trainer import Trainer
from ...trainer.validation import instance
from .arrays import Cursor, read_array
from .pickles import ARRAYS, Record, read_pickle

# The optimizers whose states can be read. Their attributes have the names of our settings, except for `_RENAMED`.
_OPTIMIZERS = {
    *("sgd", "nag", "signum", "dcasgd", "adam", "adamax", "nadam", "adagrad", "rmsprop", "adadelta"),
    *("ftrl", "ftml", "lamb", "lars"),
}
_RENAMED = {"float_stable_eps": "eps", "cur_lr": "last_lr"}
_UNUSED = {  # attributes that are read elsewhere, or matter only to how MXNet computes
    *("lr_scheduler", "num_update", "_all_index_update_counts", "_index_update_count", "lr_mult", "wd_mult", "idx2name"),
    *("sym_info", "allow_np_array", "aggregate_num", "weight_previous", "skip", "last_lr", "param_dict"),
}
# Arguments of schedules, and the attributes that hold their values.
_BASE = {"warmup_steps": "warmup_steps", "warmup_begin_lr": "warmup_begin_lr", "warmup_mode": "warmup_mode"}
_SCHEDULES = {
    "FactorScheduler": {
        "step": "step",
        "factor": "factor",
        "stop_factor_lr": "stop_factor_lr",
        "base_lr": "warmup_final_lr",
    },
    "MultiFactorScheduler": {"step": "step", "factor": "factor", "base_lr": "warmup_final_lr"},
    "PolyScheduler": {"max_update": "max_update", "pwr": "power", "final_lr": "final_lr", "base_lr": "base_lr_orig"},
    "CosineScheduler": {"max_update": "max_update", "final_lr": "final_lr", "base_lr": "base_lr_orig"},
}


def load_mxnet_states(
    trainer: Trainer, fname: str | os.PathLike[str], names: Sequence[str] | Mapping[int, str] | None = None
) -> None:
    """Load a file that `Trainer.save_states` of MXNet's Gluon wrote into a trainer.

    Settings, schedule, update counts, states and master copies of the optimizer are loaded; weights are in another file,
    see `load_mxnet_params`. The file is a pickle, which is parsed without running it. Optimizers: SGD, NAG, Signum, DCASGD,
    Adam, Adamax, Nadam, AdaGrad, RMSProp, AdaDelta, Ftrl, FTML, LAMB and LARS of MXNet 1.x.

    Args:
        trainer: a trainer of the same model, with the same optimizer.
        fname: the path of the file.
        names: the trainer's name of each parameter in the file, which numbers them in the order of their sorted names in
            MXNet: a list of names in this order, without parameters that are not trained; or a dict from numbers to names.
            None assigns parameters by their order if the trainer's parameters have no names, and otherwise by their shapes,
            which must be different.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is of another kind or damaged, or does not fit the trainer; nothing has been changed.
        TypeError: `trainer` is no Trainer, or has several optimizers or a user-defined one.

    Warns:
        UserWarning: the file has multipliers, which are not loaded; or it has states without an optimizer and so without
            update counts, and this trainer has not counted any update.

    Source: MXNet 1.9.1, `gluon.Trainer.save_states` and `optimizer.Updater.get_states`.
    """
    instance("trainer", trainer, Trainer, "a Trainer")
    if not isinstance(trainer.optimizer, RuleOptimizer):
        raise TypeError(f"states of MXNet are those of one built-in optimizer, this trainer has {trainer.optimizer!r}")
    with files.contents("fname", fname, "a state file of MXNet, which can be loaded"):
        with open(fname, "rb") as file:
            contents = read_pickle(file)
        states, record = contents if isinstance(contents, tuple) and len(contents) == 2 else (contents, None)
        arrays = _Arrays(os.path.getsize(fname))
        flat = {_index(index): list(arrays.flatten(state)) for index, state in states.items()}
        about = None if record is None else _about(record)
    name = type(trainer.optimizer).__name__.lower()
    if about is not None and about["optimizer"] != name:
        raise ValueError(
            f"fname={str(fname)!r}: states of optimizer {about['optimizer']!r}, this trainer has {name!r}: make the trainer "
            f"with Trainer(params, {about['optimizer']!r}) to load them"
        )
    _warn(fname, trainer, record)
    trainer.load_state_dict(_converted(fname, trainer, flat, about, names))


class _Arrays:
    """Converts each pickled array to a tensor once. Together the tensors may not be larger than the file.

    Args:
        size: the size of the file, in bytes.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._known: dict[int, torch.Tensor] = {}

    def flatten(self, state: Any, depth: int = 0) -> Iterator[torch.Tensor | None]:
        """Yield the tensors of a nested state in order, and None for each None in it."""
        self._left -= 1
        if self._left < 0 or depth > 4:
            raise ValueError("its states are nested in a way that no optimizer makes")
        if state is None:
            yield None
        elif isinstance(state, (tuple, list)):
            for item in state:
                yield from self.flatten(item, depth + 1)
        elif isinstance(state, Record) and (state.module, state.name) in ARRAYS:
            yield self._tensor(state)
        else:
            raise ValueError(f"a state has a {type(state).__name__}")

    def _tensor(self, record: Record) -> torch.Tensor:
        if id(record) not in self._known:
            data = record.attributes["handle"]
            self._left -= len(data)
            data = data.encode("latin-1") if isinstance(data, str) and self._left >= 0 else data
            tensor = None if self._left < 0 else read_array(Cursor(data))
            if tensor is None:
                raise ValueError("a state has an array without a shape, or twice as many as the file")
            self._known[id(record)] = tensor
        return self._known[id(record)]


def _index(index: Any) -> int:
    if type(index) is not int:
        raise ValueError(f"states are of parameter {index!r}: parameters must be numbered")
    return index


def _about(record: Any) -> dict[str, Any]:
    """Return the name, settings, schedule and update counts of a pickled optimizer."""
    name = record.name.lower() if isinstance(record, Record) else repr(record)
    if name not in _OPTIMIZERS or not record.module.startswith("mxnet.optimizer"):
        raise ValueError(f"its optimizer is {name}; only {', '.join(sorted(_OPTIMIZERS))} can be read")
    attributes = record.attributes
    settings = {_RENAMED.get(key, key): value for key, value in attributes.items() if key not in _UNUSED}
    if settings.get("lr", 0) is None:  # a schedule decides
        del settings["lr"]
    if odd := [key for key, value in settings.items() if not isinstance(value, (bool, int, float, str, type(None)))]:
        raise ValueError(f"its optimizer has {odd[0]!r}, which is no number")
    counts = attributes.get("_all_index_update_counts", {0: attributes["_index_update_count"]})[0]
    return {
        "optimizer": name,
        "settings": settings,
        "lr_scheduler": None if attributes["lr_scheduler"] is None else _schedule(attributes["lr_scheduler"]),
        "num_update": attributes["num_update"],
        "counts": {_index(index): count for index, count in counts.items()},
        "begin": attributes["begin_num_update"],
    }


def _schedule(record: Any) -> dict[str, Any]:
    """Return the configuration of a pickled schedule, in the form of `LRScheduler.to_config`."""
    if not isinstance(record, Record) or record.module != "mxnet.lr_scheduler" or record.name not in _SCHEDULES:
        raise ValueError(f"its schedule must be one of {', '.join(_SCHEDULES)}")
    values = record.attributes
    config = {
        "class": record.name,
        "kwargs": {argument: values[attribute] for argument, attribute in {**_BASE, **_SCHEDULES[record.name]}.items()},
    }
    if record.name == "FactorScheduler":
        config["state"] = {"base_lr": values["base_lr"], "since": round(values["count"] / values["step"])}
    elif record.name == "MultiFactorScheduler":
        config["state"] = {"base_lr": values["base_lr"], "since": values["cur_step_ind"]}
    return config


def _warn(fname: Any, trainer: Trainer, record: Record | None) -> None:
    if record is None and not trainer.optimizer.num_update:
        warnings.warn(
            f"fname={str(fname)!r} has states without an optimizer, and so without update counts: bias corrections and "
            "schedules start again; set the trainer's settings as they were",
            stacklevel=3,
        )
    multipliers = [key for key in ("lr_mult", "wd_mult") if record is not None and record.attributes.get(key)]
    if multipliers:
        warnings.warn(
            f"fname={str(fname)!r} has {' and '.join(multipliers)}, which are not loaded: set them with set_lr_mult and "
            "set_wd_mult, or on the parameters",
            stacklevel=3,
        )


def _converted(
    fname: Any,
    trainer: Trainer,
    flat: Mapping[int, list[torch.Tensor | None]],
    about: Mapping[str, Any] | None,
    names: Sequence[str] | Mapping[int, str] | None,
) -> dict[str, Any]:
    """Return the file's state in the form of `Trainer.state_dict`."""
    optimizer: Any = trainer.optimizer
    saved, params = trainer.state_dict(), dict(zip(trainer.replicas[0].names, trainer.replicas[0].params, strict=True))
    if about is not None:
        if odd := sorted(set(about["settings"]) - set(saved["settings"])):
            raise ValueError(
                f"fname={str(fname)!r}: its optimizer has {', '.join(odd)}, unknown in MXNet 1.9.1: files of MXNet 2 cannot "
                "be read"
            )
        saved |= {key: about[key] for key in ("settings", "lr_scheduler", "num_update")}
    indices = sorted(flat) or sorted((about or {"counts": {}})["counts"])
    names_of = _names_of(fname, indices, flat, about, {name: tuple(param.shape) for name, param in params.items()}, names)
    if about is not None:
        saved["counts"] = {name: about["counts"].get(index, about["begin"]) for index, name in names_of.items()}
    slots = checkpoint.saved_rule(optimizer, saved["settings"]).slots
    keeps_master = saved["settings"].get("multi_precision", False)
    saved["state"] = {}
    for index in sorted(flat):
        name, tensors = names_of[index], [tensor for tensor in flat[index] if tensor is not None]
        weight, master = params[name], {}
        if keeps_master and weight.dtype == torch.float16 and tensors:
            master = {MASTER: tensors.pop(-1 if optimizer.master_comes_last else 0)}
        if len(tensors) != len(slots):
            raise ValueError(
                f"fname={str(fname)!r}: parameter {index} ({name!r}) has {len(tensors)} states, in this trainer it has "
                f"{len(slots)}: settings such as momentum, options and the types of weights must be as in MXNet"
            )
        state = {slot: _as_kept(tensor, weight) for slot, tensor in zip(slots, tensors, strict=True)}
        saved["state"][name] = state | master
    return saved


def _as_kept(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided and tensor.shape == weight.shape:
        tensor = tensor.to_dense()
    return tensor.to(compute_dtype(weight.dtype)) if tensor.dtype == torch.float16 else tensor


def _names_of(
    fname: Any,
    indices: Sequence[int],
    flat: Mapping[int, list[torch.Tensor | None]],
    about: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],
    names: Sequence[str] | Mapping[int, str] | None,
) -> dict[int, str]:
    """Return the trainer's parameter name for each parameter number in the file."""
    if not indices:
        return {}
    assigned: dict[int, str] = {}
    if isinstance(names, Mapping):
        assigned = dict(names)
    elif names is not None:
        assigned = dict(zip(indices, names, strict=False)) if len(names) == len(indices) else {}
    elif list(shapes) == [str(i) for i in range(len(indices))]:
        assigned = dict(zip(indices, shapes, strict=True))
    else:
        in_file = {index: {tuple(tensor.shape) for tensor in flat.get(index, ()) if tensor is not None} for index in indices}
        counts = {index: None if about is None else about["counts"].get(index) for index in indices}
        if not any(in_file.values()) and len(set(counts.values())) == 1:  # any order gives the same
            assigned = dict(zip(indices, shapes, strict=False))
        else:
            by_shape = {frozenset([shape]): name for name, shape in shapes.items()}
            assigned = {index: by_shape[frozenset(some)] for index, some in in_file.items() if frozenset(some) in by_shape}
    if sorted(assigned) != list(indices) or sorted(assigned.values()) != sorted(shapes):
        raise ValueError(
            f"fname={str(fname)!r} has states of parameters {', '.join(map(str, indices))}, this trainer has {len(shapes)} "
            f"parameters: give names={sorted(shapes)!r}, but in the order of their sorted names in MXNet"
        )
    return assigned
