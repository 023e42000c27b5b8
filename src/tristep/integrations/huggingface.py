"""Hugging Face's Trainer: tristep's optimizers, one or several, and a callback that records and shows the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..trainer.optim import MultiOptimizer
from ..trainer.optim.multi import checked_entry, optimizer_class

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tristep.integrations.huggingface needs transformers, which is missing: pip install transformers accelerate",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from ..viz import Recorder, Run, View

__all__ = ["TristepCallback", "optimizer_cls_and_kwargs"]


def optimizer_cls_and_kwargs(
    args: transformers.TrainingArguments,
    optimizer: str | type[torch.optim.Optimizer] | Iterable[Sequence[Any]] = "AdamW",
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return the argument `optimizer_cls_and_kwargs` of `transformers.Trainer`, for an optimizer of `tristep.optim`.

    As with all optimizers of the Trainer, weight decay leaves out biases and the weights of norms
    (`Trainer.get_decay_parameter_names`).

    Args:
        args: the Trainer's arguments. `learning_rate` and `weight_decay` hold for all parameters, unless `optimizer` or
            `options` have "lr" or "weight_decay"; `adam_beta1`, `adam_beta2` and `adam_epsilon` hold for Adam and AdamW.
        optimizer: the name of a class in `tristep.optim`, in any case, or a class; or the entries of a
            `tristep.optim.MultiOptimizer`, (pattern, optimizer) or (pattern, optimizer, arguments): a parameter gets the
            optimizer of the first pattern that it matches.
        **options: arguments of the optimizer, or of all optimizers whose entries do not give them.

    Returns:
        A class or function, and its keyword arguments.

    Raises:
        TypeError, ValueError: there is no such optimizer. Arguments that do not fit the model raise when the Trainer
            creates the optimizer, before the first step.

    Example:
        >>> import transformers
        >>> from tristep.integrations.huggingface import optimizer_cls_and_kwargs
        >>> args = transformers.TrainingArguments(learning_rate=0.001, use_cpu=True)
        >>> cls, kwargs = optimizer_cls_and_kwargs(args, "lion", beta1=0.95)
        >>> cls.__name__, kwargs
        ('Lion', {'lr': 0.001, 'beta1': 0.95})
    """
    if isinstance(optimizer, (str, type)):
        klass = optimizer_class(optimizer)
        if "weight_decay" not in options:  # the Trainer passes its own weight decay, and ignores this one
            return klass, {"lr": args.learning_rate, **_of_adam(args, klass), **options}
        optimizer = [("*", optimizer)]
    entries = []
    for k, entry in enumerate(optimizer):
        pattern, klass, arguments = checked_entry(k, entry)
        common = {"lr": args.learning_rate, **_of_adam(args, klass)}
        if "weight_decay" in inspect.signature(klass).parameters:
            common["weight_decay"] = args.weight_decay
        entries.append((pattern, klass, {**common, **options, **arguments}))
    # The Trainer calls a function without arguments, and its result with the model and the keyword arguments.
    return (lambda: _several), {"entries": entries}


def _of_adam(args: transformers.TrainingArguments, klass: type[torch.optim.Optimizer]) -> dict[str, Any]:
    if not issubclass(klass, torch.optim.Adam):
        return {}
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _several(model: torch.nn.Module, entries: list[Any]) -> MultiOptimizer:
    """Make a `MultiOptimizer` for a model, without weight decay for parameters that the Trainer does not decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    optimizer = MultiOptimizer(named if frozen else model, entries)
    # The method uses the model only, so that it needs no Trainer.
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    undecayed = {id(parameter) for name, parameter in named if name not in decayed}
    for part in optimizer.optimizers:
        for group in list(part.param_groups):
            if group.get("weight_decay"):
                _split_off(part, group, undecayed)
    return optimizer


def _split_off(optimizer: torch.optim.Optimizer, group: dict[str, Any], undecayed: set[int]) -> None:
    """Move the parameters with these ids from a group into a new group without weight decay."""
    pairs = list(zip(group["param_names"], group["params"], strict=True))
    moved = [pair for pair in pairs if id(pair[1]) in undecayed]
    if len(moved) == len(pairs):
        group["weight_decay"] = 0.0
    elif moved:
        remaining = [pair for pair in pairs if id(pair[1]) not in undecayed]
        group["param_names"], group["params"] = map(list, zip(*remaining, strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        optimizer.add_param_group({**options, "params": moved, "weight_decay": 0.0})


class TristepCallback(transformers.TrainerCallback):
    """A callback that records a training of `transformers.Trainer`, and shows it live in a notebook.

    Numbers that the Trainer logs are recorded with the step before. The logged loss is a mean since the last log;
    `TrainingArguments(logging_steps=1)` logs each step's. The learning rate is recorded at each step; norms of gradients
    are taken after clipping, except the Trainer's own "grad_norm". Skipped steps, as with float16, are not recorded. After
    a resumed checkpoint, steps have the Trainer's numbers.

    Args:
        name: the name of the run.
        every: record the parameters at the first step and then at every k-th, which reads all weights and gradients.
        view: the view in a notebook: "live" for a `tristep.viz.Dashboard`, a function or class that makes a `View` of the
            `tristep.viz.Recorder`, or None.

    Raises:
        TypeError: `view` is something else.
    """

    def __init__(
        self, name: str = "run", *, every: int = 16, view: Callable[[Recorder], View] | str | None = "live"
    ) -> None:
        from .recording import FollowedTraining  # needs the `notebook` extra

        self._followed = FollowedTraining(name, every, view)
        self._logged: dict[str, float] = {}

    @property
    def run(self) -> Run:
        """The recorded `tristep.viz.Run`. Raises RuntimeError before training has begun."""
        return self._followed.run

    @property
    def view(self) -> View | None:
        """The `View` in the notebook, or None."""
        return self._followed.view

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._logged = {}
        optimizer = others["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the optimizer
        self._followed.begin(optimizer, others["model"], state.global_step, state.is_world_process_zero)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._note()  # everything about the last step has been logged by now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self._logged |= {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float)) and name != "learning_rate" and not name.endswith(_ABOUT_THE_MACHINE)
        }

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._note()
        self._followed.end()

    def _note(self) -> None:
        recorder = self._followed.recorder
        if recorder is not None and recorder.due:
            self._followed.step(**self._logged)
            self._logged = {}


_ABOUT_THE_MACHINE = ("_runtime", "_per_second", "_flos", "train_loss")  # the last is the mean of all losses
