"""Hugging Face's Trainer: any of tristep's optimizers, or several, and a callback that records and shows the training."""

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
    """What `transformers.Trainer` takes as `optimizer_cls_and_kwargs`, with the rate and the weight decay of its arguments.

    Weight decay spares what it spares with any optimizer of the Trainer: biases and the weights of norms
    (`Trainer.get_decay_parameter_names`).

    Args:
        args: those of the Trainer. `learning_rate` and `weight_decay` are for all parameters, unless `optimizer` or
            `options` have "lr" or "weight_decay"; `adam_beta1`, `adam_beta2` and `adam_epsilon` are for Adam and AdamW.
        optimizer: the name of one of `tristep.optim`, in any case, or a class; or the entries of a
            `tristep.optim.MultiOptimizer`: (pattern, optimizer) or (pattern, optimizer, arguments), of which the first whose
            pattern matches gets the parameter.
        **options: arguments of the optimizer, or of each where its entry does not have them.

    Raises:
        TypeError, ValueError: there is no such optimizer. What does not fit the model is refused when the Trainer creates
            the optimizer, before the first step.

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
        if "weight_decay" not in options:  # which the Trainer would not look at
            return klass, {"lr": args.learning_rate, **_of_adam(args, klass), **options}
    given = [("*", optimizer)] if isinstance(optimizer, (str, type)) else optimizer
    entries = []
    for k, entry in enumerate(given):
        pattern, klass, own = checked_entry(k, entry)
        common = {"lr": args.learning_rate, **_of_adam(args, klass)}
        if "weight_decay" in inspect.signature(klass).parameters:
            common["weight_decay"] = args.weight_decay
        entries.append((pattern, klass, {**common, **options, **own}))
    # The Trainer calls what is not a class twice: without arguments, and what that returns with the model.
    return (lambda: _several), {"entries": entries}


def _of_adam(args: transformers.TrainingArguments, klass: type[torch.optim.Optimizer]) -> dict[str, Any]:
    if not issubclass(klass, torch.optim.Adam):
        return {}
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _several(model: torch.nn.Module, entries: list[Any]) -> MultiOptimizer:
    """The optimizers of these entries for a model, without weight decay where the Trainer has none."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    optimizer = MultiOptimizer(named if frozen else model, entries)
    # The method looks at the model alone; a Trainer is not at hand here.
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    spared = {id(parameter) for name, parameter in named if name not in decayed}
    for each in optimizer.optimizers:
        for group in list(each.param_groups):
            if group.get("weight_decay"):
                _spare(each, group, spared)
    return optimizer


def _spare(optimizer: torch.optim.Optimizer, group: dict[str, Any], spared: set[int]) -> None:
    """Move the spared parameters of a group into one without weight decay."""
    pairs = list(zip(group["param_names"], group["params"], strict=True))
    apart = [pair for pair in pairs if id(pair[1]) in spared]
    if len(apart) == len(pairs):
        group["weight_decay"] = 0.0
    elif apart:
        rest = [pair for pair in pairs if id(pair[1]) not in spared]
        group["param_names"], group["params"] = [name for name, _ in rest], [parameter for _, parameter in rest]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        optimizer.add_param_group({**options, "params": apart, "weight_decay": 0.0})


class TristepCallback(transformers.TrainerCallback):
    """Records a training of `transformers.Trainer`, and shows it live in a notebook.

    What the Trainer logs is recorded with the step before it, such as the loss, which is a mean since the last time:
    `TrainingArguments(logging_steps=1)` gives each step's. The learning rate is that of each step; norms of the gradients
    are those after clipping, but for the Trainer's own "grad_norm". A step that is skipped, as with float16, is not
    recorded. After a checkpoint the steps go on with the Trainer's number.

    Args:
        name: of the run.
        every: record the parameters at the first step and then at each k-th; it costs reading all weights and gradients.
        view: what is shown in a notebook: "live" for a `tristep.viz.Dashboard`, a function or class that makes a `View` of
            the `tristep.viz.Recorder`, or None.

    Attributes:
        run: the `tristep.viz.Run`, from the beginning of the training on.
        view: the `View` on show; None where there is none.

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
        return self._followed.run

    @property
    def view(self) -> View | None:
        return self._followed.view

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._logged = {}
        optimizer = others["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # which Accelerate has put into one of its own
        self._followed.begin(optimizer, others["model"], state.global_step, state.is_world_process_zero)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._note()  # the last step, of which all has been logged by now

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


_ABOUT_THE_MACHINE = ("_runtime", "_per_second", "_flos", "train_loss")  # and the mean of all losses, at the end
