"""FusedOptimizer: torch's optimizer interface on update rules. One call updates all parameters of all groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...kernels import Rule
from ...kernels.checks import DTYPES
from ...kernels.graphs import current_recording
from ...kernels.layouts import is_wrapper
from ..capture import CapturedStep
from ..interrupts import uninterrupted
from ..optimizer.options import check_state_dtype
from . import shards
from .full_precision import float32_weights, load_float32_weights
from .groups import Group, GroupOptimizer, name_of, refuse_evaluated
from .plan import GroupPlan, check_shards, exchanges_of
from .saved import check_numbers, converted, shown_states


class FusedOptimizer(GroupOptimizer):
    """A `torch.optim.Optimizer` whose step is an update rule, fused over all parameters.

    A subclass says which rule a group takes (`_rule`) and with what hyper-parameters (`_hyper`), and how the rule's states
    are called in `state` (`_keys`). States of 16-bit parameters are float32, also after `load_state_dict`, unless the group
    has a `state_dtype`, which means the same as that of `tristep.optimizer`. A group has this key only where it was given,
    so that `state_dict` fits torch's own class. Of DTensors each rank updates its own shards, see shards.py; where the rule
    needs whole tensors, one rank updates each, see contrib/owners.

    Raises:
        ValueError: `differentiable=True`, as no graph is recorded through a fused step; a parameter that is sparse; a
            `state_dtype` that is none, or that the rule's states or a parameter cannot be stored in.
        NotImplementedError: `capturable=True`; `capture` makes graphs. DTensors that the rule cannot update.
        TypeError: a parameter of a type that cannot be trained.
        RuntimeError: a complex parameter for Adafactor or Muon.
    """

    _plan: Plans | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is then returned here.

        Raises:
            RuntimeError: a gradient is sparse and this optimizer takes none; nothing has been changed.
        """
        loss, step = None, self._step
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                msg="a step of tristep.optim is compiled already, and is no part of a graph: use torch.compile without "
                "fullgraph=True for a function that steps, or compile only the model and the loss"
            )
            step = torch.compiler.disable(step)
        found_inf = getattr(self, "found_inf", None)  # torch.amp.GradScaler leaves it here, and `grad_scale`
        on_host = found_inf is None or _is_on_host(found_inf)
        if found_inf is not None and on_host and found_inf.item():
            return loss
        if not on_host or self._control is not None:
            _take_scale(self, found_inf, getattr(self, "grad_scale", None))
        step()
        return loss

    def capture(self, fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """As `tristep.Trainer.capture`: a function that trains with this optimizer, as a CUDA graph.

        Raises:
            TypeError: `fn` is not callable.
            ValueError: a group whose rule is none of single elements.
        """
        for group in self.param_groups:
            if not isinstance(self._rule(group), Rule):
                raise ValueError(
                    f"capture() with {type(self).__name__}: its step is torch operations with numbers from the host, which "
                    "a graph would repeat as they were; use an optimizer with an elementwise rule"
                )
        return CapturedStep(fn, self.param_groups[0]["params"][0].device, warmup)

    @uninterrupted
    def _step(self) -> None:
        plan = self._plan
        if plan is not None and plan.holds():
            with _NO_CONTEXT if plan.records_nothing else torch.no_grad():  # which takes longer than some kernels
                plan.prepare(in_place=True)
                plan.run()
        else:
            self._step_anew()

    @torch.no_grad()
    def _step_anew(self) -> None:
        """A step with a new plan, and states where there are none."""
        if current_recording.get() is not None:
            raise RuntimeError("the captured function must do at every call what it does at the first ones")
        rows = {parameter: copy.copy(row) for parameter, row in self.state.items()}
        try:
            self._plan = Plans(self)
            if self._only_makes_states():
                return
            self._plan.prepare()
        except BaseException:  # a step that is refused leaves no states behind
            self._plan = None
            self.state.clear()
            self.state.update(rows)
            raise
        self._plan.run()

    def add_param_group(self, param_group: Group) -> None:
        """As torch's; refuses what cannot be trained before anything is added."""
        if self._state_dtype is not None:  # torch's constructor, which calls this, does not know it
            self.defaults["state_dtype"] = self._state_dtype
        if isinstance(param_group, Mapping) and "params" in param_group:
            options = {**self.defaults, **param_group}
            name = type(self).__name__
            if options.get("differentiable"):
                raise ValueError(
                    f"differentiable=True: the fused step of {name} records no graph; use torch.optim.{name} for that"
                )
            if options.get("capturable"):
                raise NotImplementedError(
                    f"capturable=True: {name} cannot be captured in a CUDA graph by itself; optimizer.capture(function) "
                    "does that, with all hyper-parameters live"
                )
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            for k, parameter in enumerate(added["params"]):
                self._check(name_of(added, k), parameter)
            if any(map(is_wrapper, added["params"])):
                check_shards(self, self._rule(added), added["params"])
            self._check_group(added)
        except Exception:
            self.param_groups.pop()
            raise
        self._plan = None

    def _check(self, name: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter that cannot be trained."""
        if (refusal := shards.refusal(parameter)) is not None:
            raise TypeError(f"{name} is a {type(parameter).__name__}, {refusal}")
        if parameter.layout != torch.strided:
            raise ValueError(f"{name} is sparse ({parameter.layout}): must be dense")
        if parameter.is_complex() and not self._takes_complex:
            raise RuntimeError(f"{name} is {parameter.dtype}: {type(self).__name__} does not support complex parameters")
        dtype = parameter.real.dtype if parameter.is_complex() else parameter.dtype
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {parameter.dtype}: must be of type {', '.join(map(str, DTYPES))} or complex")

    def _check_group(self, group: Group) -> None:
        """Refuse options of a new group, which are complete now, that torch's constructor knows nothing of."""
        narrow = self._narrow(group)
        if narrow is None:
            return
        check_state_dtype(group["state_dtype"], type(self).__name__, self._rule(group))
        for k, parameter in enumerate(group["params"]):
            if parameter.is_complex() or parameter.dtype == torch.float64:
                raise ValueError(
                    f"state_dtype={group['state_dtype']!r}: {name_of(group, k)} is {parameter.dtype}; it must be None"
                )

    def float32_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """As `tristep.Trainer.float32_weights`, by parameter; of a DTensor it is one that is placed as that.

        Complex parameters give complex64.
        """
        refuse_evaluated("float32_weights()", self.param_groups)
        return float32_weights(self)

    @uninterrupted
    def load_float32_weights(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """As `tristep.Trainer.load_float32_weights`, by parameter; those of DTensors are placed as these.

        Raises:
            ValueError, TypeError: it does not fit the parameters; nothing has been changed.
        """
        refuse_evaluated("load_float32_weights()", self.param_groups)
        load_float32_weights(self, weights)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. All ranks are to call it where owners have the states of cut parameters.

        Packed states are bfloat16 in it, exactly, of the parameter's shape and placed as it: one format for one process and
        for shards, which can be cut otherwise. The next step after loading packs them again: where blocks have the same
        elements as before, as the same numbers, to the bit; elsewhere, since blocks are counted within a shard, rounded to
        the nearest.
        """
        with shown_states(self):
            return super().state_dict()

    @uninterrupted
    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's, but states keep the type that they were saved in, where that is the one they are kept in.

        As all options of the groups, `state_dtype` is that of the file, or the group's own where the file has none.

        Raises:
            ValueError, TypeError: there are other groups, states of another optimizer, or numbers that this optimizer's
                constructor would refuse, or that no training leads to; nothing has been changed.
        """
        given: dict[str, Any] = {}

        def remember(_: Any, state_dict: Any) -> dict[str, Any]:
            check_numbers(self, state_dict, self._shown)
            given.update(converted(self, state_dict))
            return given

        def restore(optimizer: torch.optim.Optimizer) -> None:
            saved = [key for group in given["param_groups"] for key in group["params"]]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for key, parameter in zip(saved, parameters, strict=True):
                for name, value in given["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor) and value.dtype != optimizer.state[parameter][name].dtype:
                        device = optimizer.state[parameter][name].device
                        optimizer.state[parameter][name] = value.detach().to(device, copy=True)
                row = optimizer.state.get(parameter, {})
                for name in {"step", *self._shown}:  # a step counts in these, not in those of `state_dict`
                    if isinstance(row.get(name), torch.Tensor):
                        row[name] = row[name].detach().clone()

        hooks = (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | ({} if self._owners is None else {"_owners": self._owners})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._is_copy = None, True


class Plans:
    """The plans of an optimizer: one for all parameters that share a rule and how states are stored, of whatever groups.

    Attributes:
        records_nothing: whether a step calls no operations that autograd would record.
    """

    def __init__(self, optimizer: GroupOptimizer) -> None:
        self._optimizer = optimizer
        members: dict[Any, list[tuple[Group, int]]] = {}
        self._waiting: list[torch.Tensor] = []  # those that have had no gradient yet, and so have no state
        seen: set[int] = set()
        exchanges = exchanges_of(optimizer)
        for group in optimizer.param_groups:
            kind = optimizer._rule(group), optimizer._narrow(group), optimizer._rounding(group)
            for k, parameter in enumerate(group["params"]):
                if id(parameter) in seen:  # torch only warns of duplicates
                    continue
                seen.add(id(parameter))
                if group.get("fused") and parameter.device.type == "meta" and parameter.grad is not None:
                    raise RuntimeError(
                        f"fused=True: {name_of(group, k)} is on the meta device, where nothing can be computed: move the "
                        "model to another device, or leave fused out to have the states made only"
                    )
                if parameter.grad is None and not optimizer.state.get(parameter):
                    self._waiting.append(parameter)
                else:
                    members.setdefault((*kind, exchanges.get(parameter)), []).append((group, k))
        self._plans: list[GroupPlan] = []
        arrays = []
        for (rule, *_, exchange), those in sorted(members.items(), key=lambda each: each[0][-1] is not None):
            groups, parameters = [group for group, _ in those], [group["params"][k] for group, k in those]
            make = GroupPlan if exchange is None else shards.whole_plan()
            self._plans.append(make(optimizer, rule, parameters, groups, [name_of(*each) for each in those]))
            arrays += [shown.array for shown in self._plans[-1].rows.tensors.values()]
        optimizer._number_arrays, optimizer._is_copy = arrays, False
        self._exchanging = [plan for plan in self._plans if plan.exchanges]
        self._sharded = [parameter for plan in self._plans for parameter in plan.sharded]
        self._groups = [(group, group["params"], optimizer._rule(group)) for group in optimizer.param_groups]
        self._parameters = [parameter for _, params, _ in self._groups for parameter in params]
        self.records_nothing = not (self._sharded or any(parameter.is_complex() for parameter in self._parameters))
        self._state = optimizer.state
        self._rows = [row for row in map(optimizer.state.get, self._parameters) if row is not None]
        self._objects = self._objects_now()

    def holds(self) -> bool:
        """Whether a step needs nothing but new gradients and options."""
        optimizer = self._optimizer
        if optimizer.state is not self._state or len(optimizer.param_groups) != len(self._groups):
            return False
        for (group, params, rule), now in zip(self._groups, optimizer.param_groups, strict=True):
            if group is not now or group["params"] is not params or optimizer._rule(group) is not rule:
                return False
        objects = self._objects_now()
        if len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
            return False
        for plan in self._plans:
            if not plan.is_current(plan.update):
                return False
        return not self._waiting or all(parameter.grad is None for parameter in self._waiting)

    def _objects_now(self) -> list[Any]:
        """The parameters in the groups, the rows of `state`, and what is in these."""
        parameters = chain.from_iterable([params for _, params, _ in self._groups])
        return [*parameters, *self._state.values(), *chain.from_iterable(map(dict.values, self._rows))]

    def prepare(self, in_place: bool = False) -> None:
        """All that may fail. Changes nothing that a user sees. `in_place`: that `holds` was asked just now."""
        for plan in self._plans:
            plan.prepare(plan.gradients(), in_place=in_place)
            plan.rows.write(plan.update)

    def run(self) -> None:
        """Update the parameters and, if that went well, their numbers. Exchanges go on during the updates of others."""
        for plan in self._exchanging:
            plan.start()
        for plan in self._plans:
            if plan.exchanges:
                plan.arrive()
                plan.launch()
                plan.send_back()
            else:
                plan.launch()
        for plan in self._exchanging:
            plan.finish()
        if self._sharded:
            self._count_change()
        if (recording := current_recording.get()) is not None:
            active = [list(plan.rows.active) for plan in self._plans]
            recording.owners.append((self._is_in_use, partial(self.host_step, active)))

    def host_step(self, active: list[list[bool]]) -> None:
        """The host half of a step of these parameters, whose kernels are replayed by a CUDA graph."""
        for plan, each in zip(self._plans, active, strict=True):
            plan.host_step(plan.update, each)
        self._count_change()

    def _is_in_use(self) -> bool:
        return self._optimizer._plan is self and self.holds()

    def _count_change(self) -> None:
        """Of DTensors, at whose version autograd looks: the updates have counted their shards'."""
        increment_version([parameter for parameter in self._sharded if parameter.grad is not None])


_NO_CONTEXT = nullcontext()


@torch.no_grad()
def _take_scale(optimizer: FusedOptimizer, found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None) -> None:
    """Tell the kernels about it, where only the device knows."""
    if optimizer._control is None:
        assert found_inf is not None
        optimizer._control = torch.zeros(2, dtype=torch.float32, device=found_inf.device)
        optimizer._plan = None
    if grad_scale is None:
        optimizer._control[:1].fill_(1.0)
    else:
        torch.reciprocal(grad_scale.view(1), out=optimizer._control[:1])
    if found_inf is None:
        optimizer._control[1:].zero_()
    else:
        optimizer._control[1:].copy_(found_inf.view(1))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
