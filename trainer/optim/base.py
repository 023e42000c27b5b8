"""FusedOptimizer: torch's optimizer interface on update rules; one call updates all parameters of all groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, islice
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...kernels import TensorRule, host_memory
from ...kernels.checks import DTYPES
from ...kernels.graphs import current_recording
from ...kernels.guards import MemberGuard
from ...kernels.layouts import wrappers
from ..optimizer.options import check_state_dtype
from ..serialization import Loaded, announce, check_fit
from ..step.capture import CapturedStep, check_engine, check_rule
from ..utils.interrupts import uninterrupted
from . import shards
from .full_precision import float32_weights, load_float32_weights
from .groups import Group, GroupOptimizer, copy_numbers, name_of, names_of, refuse_evaluated
from .plan import GroupPlan, check_shards, exchanges_of
from .saved import check_numbers, check_sizes, converted, fit_groups, on_host, shown_states


class FusedOptimizer(GroupOptimizer):
    """The base class of tristep's optimizers with torch's interface: a step is an update rule, fused over all parameters.

    A subclass defines the rule of a group (`_rule`), its hyper-parameters (`_hyper`), and the names of the rule's states in
    `state` (`_keys`). States of 16-bit parameters are float32, also after `load_state_dict`, unless the group has the option
    `state_dtype` of `tristep.optimizer.RuleOptimizer`. A group has this key, and `state_device`, only if it was given, so
    that torch's own class can load a `state_dict`. Each rank updates its own shards of DTensors, see shards.py; if the rule
    needs whole tensors, one rank updates each tensor, see contrib/owners.

    `capturable=True` is accepted where torch has it, and changes nothing: `capture` records a step in a
    CUDA graph with or without it. A step in a graph that is captured by other means raises an error.

    Raises:
        ValueError: `differentiable=True`, because a fused step records no graph; a sparse parameter; an unknown
            `state_dtype` or `state_device`, or one that does not fit the rule's states or a parameter.
        NotImplementedError: DTensors that the rule cannot update.
        TypeError: a parameter of a dtype that cannot be trained.
    """

    _plan: Plans | None = None
    _shapes: Sequence[tuple[Group, list[torch.Size]]] = ()  # of each group's parameters, when it was added

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: a function that evaluates the model again and returns the loss; or None.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter complex, which this optimizer does not support; nothing has
                been changed.
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
        """Return a callable that runs a training function as a CUDA graph, which saves its work on the host.

        Each call is one training step. The first calls run normally; then the graph is recorded, and from then on replayed.
        Options of the groups stay adjustable. On a device without CUDA graphs the function is simply called.

        Args:
            fn: a function of tensors that takes one step of this optimizer; see `tristep.Trainer.capture`.
            warmup: the number of calls that run normally, >= 2.

        Returns:
            A callable with the arguments and results of `fn`. The next call overwrites the tensors that it returns.

        Raises:
            TypeError: `fn` is not callable.
            ValueError: the rule of a group is of whole tensors and cannot be captured, as SOAP's cannot; Triton is missing,
                or TRISTEP_ENGINE is another engine.
        """
        for group in self.param_groups:
            check_rule(self, self._rule(group))
        device = self.param_groups[0]["params"][0].device
        check_engine(device)
        return CapturedStep(fn, device, warmup)

    @uninterrupted
    def _step(self) -> None:
        plan = self._plan
        if plan is None or not plan.is_valid():
            self._step_anew()
        elif plan.records_nothing:  # no_grad takes longer than some kernels
            plan.prepare(in_place=True)
            plan.run()
        else:
            with torch.no_grad():
                plan.prepare(in_place=True)
                plan.run()

    @torch.no_grad()
    def _step_anew(self) -> None:
        """Take a step with a new plan, and make missing states."""
        if current_recording.get() is not None:
            raise RuntimeError(
                "the captured function has changed parameters, states or options: it must do the same at every call"
            )
        self.refuse_flattened()
        # The rows and their items, in few lists: thousands of dictionaries would start the garbage collector.
        rows = list(self.state.items())
        keys = list(chain.from_iterable(self.state.values()))
        values = [value for row in self.state.values() for value in row.values()]
        lengths = list(map(len, self.state.values()))
        try:
            self._plan = Plans(self)
            if self._only_makes_states():
                return
            self._plan.prepare()
        except BaseException:  # a step that raises leaves no new states
            self._plan = None
            items = zip(keys, values, strict=True)
            for (_, row), length in zip(rows, lengths, strict=True):
                row.clear()
                row.update(islice(items, length))
            self.state.clear()
            self.state.update(rows)
            raise
        self._plan.run()

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as in torch, after a check that its parameters can be trained."""
        # torch's constructor, which calls this, does not know them
        self.defaults.update((name, value) for name, value in self._storage.items() if value is not None)
        if isinstance(param_group, Mapping) and "params" in param_group:
            options = {**self.defaults, **param_group}
            name = type(self).__name__
            if options.get("differentiable"):
                raise ValueError(
                    f"differentiable=True: the fused step of {name} records no graph; use torch.optim.{name} for that"
                )
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            for k, parameter in enumerate(added["params"]):
                self._check(name_of(added, k), parameter)
            if wrappers(added["params"]):
                check_shards(self, self._rule(added), added["params"])
            self._check_group(added)
        except Exception:
            self.param_groups.pop()
            raise
        self._shapes = [*self._shapes, (added, [parameter.shape for parameter in added["params"]])]
        self._plan = None

    def refuse_flattened(self) -> None:
        """Raise if a group's parameters were joined to a vector, as by ZeRO-1, and the rule uses their shapes or norms.

        Groups that `param_groups` does not have now count, too, once: DeepSpeed steps each group alone.
        """
        for added, shapes in self._shapes:
            if len(added["params"]) != 1:
                continue
            shape = added["params"][0].shape
            if len(shape) != 1 or shape in shapes or [len(before) for before in shapes] == [1]:
                continue
            rule = self._rule(added)
            if rule.reductions or (isinstance(rule, TensorRule) and not all(map(rule.elementwise, shapes))):
                raise ValueError(
                    f"{len(shapes)} parameters, as of shape {tuple(shapes[0])}, were replaced by a vector of {shape[0]}, as "
                    f"by DeepSpeed's ZeRO stages 1 to 3: {type(self).__name__} (rule {rule.name!r}) needs the shape or the "
                    "norm of each. Use ZeRO stage 0 or torch's fully_shard, which keep them, or an optimizer that updates "
                    "element by element, such as AdamW, without options such as clip_norm"
                )
        present = {id(group) for group in self.param_groups}
        if len(present) < len(self._shapes):
            self._shapes = [entry for entry in self._shapes if id(entry[0]) in present]

    def _check(self, name: str, parameter: torch.Tensor) -> None:
        """Raise if a parameter cannot be trained."""
        if (refusal := shards.refusal(parameter)) is not None:
            raise TypeError(f"{name} is a {type(parameter).__name__}, {refusal}")
        if parameter.layout != torch.strided:
            klass = type(self).__name__
            raise ValueError(f"{name} is sparse ({parameter.layout}): {klass} requires dense parameter tensors")
        dtype = parameter.real.dtype if parameter.is_complex() else parameter.dtype
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {parameter.dtype}: must be of type {', '.join(map(str, DTYPES))} or complex")

    def _check_group(self, group: Group) -> None:
        """Raise if a new group, filled with defaults, has an invalid value of an option that torch does not have."""
        if self._on_host(group):
            for k, parameter in enumerate(group["params"]):
                host_memory.check_device(name_of(group, k), parameter.device)
        if self._narrow(group) is None:
            return
        check_state_dtype(group["state_dtype"], type(self).__name__, self._rule(group))
        for k, parameter in enumerate(group["params"]):
            if parameter.is_complex() or parameter.dtype == torch.float64:
                raise ValueError(
                    f"state_dtype={group['state_dtype']!r}: {name_of(group, k)} is {parameter.dtype}; it must be None"
                )

    def float32_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the weights by parameter, in float32, in new tensors; complex64 for complex parameters.

        A 16-bit parameter with a master has the precision of its master; float64 is rounded. The weight of a DTensor is a
        DTensor with the same placement.

        Raises:
            RuntimeError: parameters have their averaged values, after `eval()`.
        """
        refuse_evaluated("float32_weights()", self.param_groups)
        return float32_weights(self)

    @uninterrupted
    def load_float32_weights(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Set weights and masters, rounded to their dtypes; states and step counts stay.

        Args:
            weights: for each parameter a floating-point tensor of its shape, with the same placement if it is a DTensor, as
                `float32_weights` returns them.

        Raises:
            ValueError, TypeError: `weights` does not fit the parameters; nothing has been changed.
            RuntimeError: parameters have their averaged values, after `eval()`.
        """
        refuse_evaluated("load_float32_weights()", self.param_groups)
        load_float32_weights(self, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states in torch's format. With sharded parameters that rules need whole, all ranks must call it.

        8-bit and 4-bit states become bfloat16 tensors with the shape and placement of the parameter, without loss, so that
        one process and any sharding can load them. The first step after loading packs them again: bit for bit if a block of
        values has the same elements as before, otherwise, because shards have blocks of their own, rounded to nearest.
        """
        with shown_states(self):
            return super().state_dict()

    @uninterrupted
    def load_state_dict(  # type: ignore[override]  # torch's has no strict
        self, state_dict: Any, *, strict: bool = True, settings: str = "file"
    ) -> Loaded | None:
        """Load groups and states, as in torch, but without a conversion of states to the parameters' dtypes.

        Options of the groups become the saved ones, `state_dtype` too; a group keeps its own if the saved group has none.
        `state_device` is a group's own. All ranks with shards (DTensor) must load; as in torch, they do not exchange
        errors.

        Args:
            state_dict: the result of `state_dict`, of this class or of torch's class with the same name.
            strict: whether groups must have as many parameters as the saved ones. False: a parameter gets the states and the
                step count that are saved under its name, if they have its shape; others start anew, with a count of 0. Names
                are known if here and there parameters were given as `module.named_parameters()`; otherwise the same place in
                the same group counts as the name. What was loaded is printed.
            settings: with `strict=False`, "file" for the saved options of groups, "mine" to keep those here.

        Returns:
            With `strict=False` the names of parameters: `loaded`, `anew` and `unused`; otherwise None.

        Raises:
            ValueError, TypeError: the groups differ, the states are another optimizer's, or a number is invalid for this
                optimizer; nothing has been changed. With `strict=False`: nothing fits, parameters are sharded (DTensor), or
                some cannot start anew, since the optimizer, such as Prodigy, keeps numbers of all parameters together.
        """
        check_fit(strict, settings)
        saved: dict[str, Any] = {}
        loaded: list[Loaded] = []

        def remember(_: Any, state_dict: Any) -> dict[str, Any]:
            if not strict:
                owners = [self] * len(self.param_groups)
                state_dict, found = fit_groups(self.param_groups, owners, state_dict, settings)
                loaded.append(found)
            check_sizes(self.param_groups, state_dict)
            check_numbers(self, state_dict, self._shown)
            saved.update(converted(self, state_dict))
            saved["state"] = on_host(self, saved)
            return saved

        def restore(optimizer: torch.optim.Optimizer) -> None:
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            rows = [optimizer.state.get(parameter, {}) for parameter in parameters]
            for key, row in zip(keys, rows, strict=True):
                for name, value in saved["state"].get(key, {}).items():
                    if name == "step" and not self._counts_exactly:  # torch has made it float32 where its step is fused
                        continue
                    if isinstance(value, torch.Tensor) and value.dtype != row[name].dtype:
                        is_new = host_memory.is_on_host(value)
                        row[name] = value if is_new else value.detach().to(row[name].device, copy=True)
            self._number_arrays = ()  # their tensors are no longer in `state`
            for name in {"step", *self._shown}:
                copy_numbers(self, name, rows)

        hooks = (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        for found in loaded:
            announce("states", found)
        return loaded[0] if loaded else None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | ({} if self._owners is None else {"_owners": self._owners})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._is_copy = None, True


class Plans:
    """The plans of an optimizer's step: one for all parameters, of any group, that share a rule and the storage of states.

    Missing numbers in the optimizer's `state` are made.
    """

    def __init__(self, optimizer: GroupOptimizer) -> None:
        self._optimizer = optimizer
        members: dict[Any, tuple[list[torch.Tensor], list[Group], list[str]]] = {}
        self._waiting: list[torch.Tensor] = []  # parameters without a gradient so far, and so without states
        seen: set[int] = set()
        exchanges, rows = exchanges_of(optimizer), optimizer.rows_by_id()
        for group in optimizer.param_groups:
            stored = optimizer._narrow(group), optimizer._on_host(group), optimizer._rounding(group)
            kind = optimizer._rule(group), *stored
            params, names = group["params"], names_of(group)
            ids = list(map(id, params))
            new: Sequence[int] = range(len(ids))
            if len(set(ids)) < len(ids) or not seen.isdisjoint(ids):  # torch only warns of duplicates
                new = sorted({ids[k]: k for k in reversed(new) if ids[k] not in seen}.values())
            seen.update(ids)
            active = [params[k].grad is not None or bool(rows.get(ids[k])) for k in new]
            self._waiting += [params[k] for k, is_active in zip(new, active, strict=True) if not is_active]
            at = list(compress(new, active))
            if not optimizer._takes_complex or group.get("fused"):
                _check_computable(optimizer, group, [k for k in at if params[k].grad is not None])
            by_exchange: dict[Any, list[int]] = {None: at} if at else {}
            if exchanges:
                by_exchange = {}
                for k in at:
                    by_exchange.setdefault(exchanges.get(params[k]), []).append(k)
            for exchange, places in by_exchange.items():
                parameters, groups, of_plan = members.setdefault((*kind, exchange), ([], [], []))
                parameters += [params[k] for k in places]
                groups += [group] * len(places)
                of_plan += [names[k] for k in places]
        self._plans: list[GroupPlan] = []
        arrays = []
        for (rule, *_, exchange), found in sorted(members.items(), key=lambda item: item[0][-1] is not None):
            make = GroupPlan if exchange is None else shards.whole_plan()
            self._plans.append(make(optimizer, rule, *found))
            arrays += [numbers.array for numbers in self._plans[-1].rows.tensors.values()]
        optimizer._number_arrays, optimizer._is_copy = arrays, False
        self._exchanging = [plan for plan in self._plans if plan.exchanges]
        self._sharded = [parameter for plan in self._plans for parameter in plan.sharded]
        self._groups = [(group, group["params"], optimizer._rule(group)) for group in optimizer.param_groups]
        self._parameters = [parameter for _, params, _ in self._groups for parameter in params]
        # Whether a step calls no operations that autograd would record.
        self.records_nothing = not (self._sharded or any(map(torch.Tensor.is_complex, self._parameters)))
        self._state = optimizer.state
        rows = optimizer.rows_by_id()
        self._rows = [row for row in map(rows.get, map(id, self._parameters)) if row is not None]
        self._guard = MemberGuard([params for _, params, _ in self._groups], [self._state, *self._rows])

    def is_valid(self) -> bool:
        """Return whether the plans are right for the next step: only gradients and options of groups have changed."""
        optimizer = self._optimizer
        if optimizer.state is not self._state or len(optimizer.param_groups) != len(self._groups):
            return False
        for (group, params, rule), now in zip(self._groups, optimizer.param_groups, strict=True):
            if group is not now or group["params"] is not params or optimizer._rule(group) is not rule:
                return False
        if not self._guard.passes():
            return False
        for plan in self._plans:
            if not plan.is_current(plan.update):
                return False
        return not self._waiting or all(parameter.grad is None for parameter in self._waiting)

    def prepare(self, in_place: bool = False) -> None:
        """Do everything of a step that may fail, without visible changes. `in_place`: `holds` has just returned True."""
        for plan in self._plans:
            plan.prepare(plan.gradients(), in_place=in_place)
            if plan.rows.write(plan.update) and plan.update.raising and not plan.exchanges:  # other ranks wait for those
                plan.update.compute_ahead()

    def run(self) -> None:
        """Update the parameters and then their numbers; ranks exchange tensors while other parameters are updated."""
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
            recording.owners.append((partial(self._is_in_use, active), partial(self.host_step, active)))

    def host_step(self, active: list[list[bool]]) -> None:
        """Do the host's part of a step that a CUDA graph replays; `active` has each plan's updated parameters."""
        for plan, active_of_plan in zip(self._plans, active, strict=True):
            plan.host_step(plan.update, active_of_plan)
        self._count_change()

    def _is_in_use(self, active: list[list[bool]]) -> bool:
        if self._optimizer._plan is not self or not self.is_valid():
            return False
        for plan, active_of_plan in zip(self._plans, active, strict=True):
            plan.look_ahead(plan.update, active_of_plan)
        return True

    def _count_change(self) -> None:
        """Increment the versions of DTensors, which autograd checks; updates have incremented their shards' only."""
        increment_version([parameter for parameter in self._sharded if parameter.grad is not None])


def _check_computable(optimizer: GroupOptimizer, group: Group, places: Sequence[int]) -> None:
    """Raise torch's errors, which it raises in the step, for parameters with a gradient that cannot be updated."""
    name = type(optimizer).__name__
    for k in places:
        parameter = group["params"][k]
        if parameter.is_complex() and not optimizer._takes_complex:
            raise RuntimeError(f"{name} does not support complex parameters: {name_of(group, k)} is {parameter.dtype}")
        if group.get("fused") and parameter.device.type == "meta":
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors with memory, but "
                f"{name_of(group, k)} is on the meta device: move the model to another device, or leave fused out to have "
                "the states made only"
            )


@torch.no_grad()
def _take_scale(optimizer: FusedOptimizer, found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None) -> None:
    """Let the kernels read GradScaler's scale and overflow flag from the device."""
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
