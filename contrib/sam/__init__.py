"""SAM: sharpness-aware minimization around an optimizer with torch's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels import Update, rules
from ...kernels.layouts import is_wrapper
from ...trainer.optim.groups import Group, as_real, name_of, refuse_evaluated
from ...trainer.optim.joined import JoinedOptimizers
from ...trainer.optim.multi import optimizer_class
from ...trainer.utils.interrupts import uninterrupted
from ...trainer.validation import boolean, number

__all__ = ["SAM"]


class SAM(JoinedOptimizers):
    """Sharpness-aware minimization: another optimizer's step, with gradients of a point where the loss is higher.

    A step moves the weights by `rho` along their gradients, computes the gradients there, moves the weights back bit for
    bit, and lets the base optimizer step with these gradients. BatchNorm and other layers that average over batches see each
    batch twice.

    Groups, their options and `state` are those of the base optimizer, so that schedulers work as with it alone; each group
    also has `rho` and `adaptive`, which may be its own and may change between steps. The norm is that of all groups.

    Args:
        params: parameters, or groups, as for the base optimizer.
        base: the base optimizer: the name of a class of `tristep.optim`, in any case, or a class with torch's interface,
            whose `step` needs no closure.
        rho: the distance, as a 2-norm over all weights, > 0, default 0.05.
        adaptive: measure the distance relative to each weight, as ASAM does; use a `rho` about ten times as large.
        **arguments: the arguments of the base optimizer.

    Attributes:
        base: the base optimizer.

    Raises:
        TypeError, ValueError: an argument is invalid, or refused by the base optimizer.
        NotImplementedError: a parameter is a DTensor, whose norm would need all ranks.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = tristep.optim.SAM(net.parameters(), "SGD", rho=0.05, lr=0.1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = net(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)

    Source: Foret et al. (2021), "Sharpness-Aware Minimization", alg. 1; Kwon et al. (2021), "ASAM".
    """

    def __init__(
        self,
        params: Any,
        base: str | type[torch.optim.Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        **arguments: Any,
    ) -> None:
        number("rho", rho, above=0)
        boolean("adaptive", adaptive)
        klass: Any = optimizer_class(base)
        self.optimizers = [klass(params, **arguments)]
        self._aside: dict[torch.Tensor, tuple[torch.Tensor, tuple[int, int]]] = {}  # weight before `ascend`, mark after
        self._own = {"rho": rho, "adaptive": adaptive}
        self._complete_groups()
        super().__init__()
        self.defaults.update(self._own)

    @property
    def base(self) -> torch.optim.Optimizer:
        """The base optimizer."""
        (base,) = self.optimizers
        return base

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as in torch."""
        if not self._agreed:  # the constructor of the base class calls this, too
            super().add_param_group(param_group)
            return
        self.share()
        self.base.add_param_group(param_group)
        try:
            self._complete_groups()
        except BaseException:
            self.base.param_groups.pop()
            raise

    @torch.no_grad()
    def ascend(self) -> None:
        """Move the weights that have a gradient by `rho` along it; the next `step` first moves them back.

            loss(net(x), y).backward()
            optimizer.ascend()
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()

        A loss scale changes nothing here, since only directions count. If a `GradScaler` may have skipped the step, call
        `restore()` after it.

        Raises:
            RuntimeError: there has been no step since the last `ascend`, no parameter has a gradient, a gradient is sparse,
                or parameters have their averaged values; nothing has been changed.
            TypeError, ValueError: `rho` or `adaptive` of a group is invalid.
        """
        self._refuse_ascended("ascend()")
        self.share()
        refuse_evaluated("ascend()", self.param_groups)
        self._complete_groups()
        names, parameters, rows = [], [], []
        for group in self.param_groups:
            for k, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided:
                    raise RuntimeError(f"the gradient of {name_of(group, k)} is sparse: SAM needs dense gradients")
                names.append(name_of(group, k))
                parameters.append(parameter)
                rows.append([1.0, float(group["rho"]), float(group["adaptive"])])
        if not parameters:
            raise RuntimeError("ascend() without gradients: call backward() first")
        weights = list(map(as_real, parameters))
        run = Update(rules.ascent, weights, [()] * len(weights), names=names)
        run.hyper[:] = rows
        run.bind([as_real(parameter.grad.resolve_conj()) for parameter in parameters])
        self._move(run, parameters)

    @uninterrupted
    def _move(self, run: Update, parameters: list[torch.Tensor]) -> None:
        before = [parameter.detach().clone() for parameter in parameters]
        run()
        pairs = zip(parameters, before, strict=True)
        self._aside = {parameter: (weight, _mark(parameter)) for parameter, weight in pairs}

    @uninterrupted
    @torch.no_grad()
    def restore(self) -> None:
        """Move the weights back to where `ascend` began, without a step; they stay if no `ascend` is pending.

        Raises:
            RuntimeError: weights were written to since `ascend`; all weights stay as they are.
        """
        aside, self._aside = self._aside, {}
        if any(_mark(parameter) != mark for parameter, (_, mark) in aside.items()):
            raise RuntimeError(
                "parameters were written to between ascend() and step(): the weights stay as written, instead of returning "
                "to where ascend() began; compute gradients there, and call ascend() again"
            )
        for parameter, (weight, _) in aside.items():
            parameter.copy_(weight)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: a function that evaluates the model, calls `backward` and returns the loss. It is called twice, and the
                gradients of its first call are removed in between. None: the gradients are those after `ascend`.

        Returns:
            The loss at the weights from which the step is taken, the first result of `closure`; None without it.

        Raises:
            RuntimeError: there is neither a closure nor an `ascend` before, or both; or weights were written to since
                `ascend`.
        """
        loss = None
        if closure is not None:
            self._refuse_ascended("step(closure)")
            with torch.enable_grad():
                loss = closure()
            try:
                try:
                    self.ascend()
                    self.zero_grad()  # the closure may leave that to its caller
                    with torch.enable_grad():
                        closure()
                finally:
                    self.restore()
            except KeyboardInterrupt:  # it may have come before `restore` let interrupts wait
                self.restore()
                raise
        elif not self._aside and any(float(group.get("lr", 1.0)) for group in self.param_groups):
            # At a rate of 0 torch.distributed.checkpoint only makes states.
            raise RuntimeError("step() without ascend(): call ascend() and backward() before, or give step() a closure")
        else:
            self.restore()
        super().step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's groups and states, with `rho` and `adaptive` in each group.

        Raises:
            RuntimeError: it is called between `ascend` and `step`.
        """
        self._refuse_ascended("state_dict()")
        self.share()
        return self.base.state_dict()

    @uninterrupted
    def load_state_dict(self, state_dict: Any, **options: Any) -> Any:
        """Load what `state_dict` returned, of this class or of the base optimizer, whose groups keep `rho` and `adaptive`.

        Args:
            state_dict: the saved state.
            **options: `strict` and `settings`, if the base optimizer is of `tristep.optim`; see `FusedOptimizer`.

        Returns:
            What the base optimizer returns.

        Raises:
            RuntimeError: it is called between `ascend` and `step`.
            ValueError, TypeError: the base optimizer refuses it.
        """
        self._refuse_ascended("load_state_dict()")
        self.share()
        own = [{name: group[name] for name in self._own} for group in self.param_groups]
        loaded = self.base.load_state_dict(state_dict, **options)
        for group, values in zip(self.base.param_groups, own, strict=True):
            for name, value in values.items():
                group.setdefault(name, value)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_ascended("a copy of SAM")
        return super().__getstate__() | {"_own": self._own, "_aside": {}}

    def _complete_groups(self) -> None:
        """Give the groups `rho` and `adaptive`, and check them."""
        for group in self.base.param_groups:
            for name, value in self._own.items():
                group.setdefault(name, value)
            number("rho", group["rho"], above=0)
            boolean("adaptive", group["adaptive"])
            for k, parameter in enumerate(group["params"]):
                if is_wrapper(parameter):
                    raise NotImplementedError(
                        f"{name_of(group, k)} is a {type(parameter).__name__}: SAM needs the norm of all gradients, so "
                        "parameters must be plain tensors"
                    )

    def _refuse_ascended(self, what: str) -> None:
        if self._aside:
            raise RuntimeError(
                f"{what} between ascend() and step(), while the weights are displaced: call step(), or restore(), before"
            )


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()
