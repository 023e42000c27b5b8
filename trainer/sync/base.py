"""GradientSync: what happens to gradients between the backward pass and the update."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...kernels.metrics import MetricsBuffer

__all__ = ["GradientSync", "Residuals"]

Residuals = dict[str, dict[str, torch.Tensor]]  # by parameter and by source


class GradientSync(abc.ABC):
    """How replicas of a model, in this process and in others, train as one.

    A step of the trainer is the following, in this order and in one thread. All processes come to the same calls, since what
    decides about them is the same in all; but one in which a gradient does not fit its weight raises an error before 4.,
    which the others learn of by their time limit.

    1. `start()`, once, and never before the first step, `allreduce_grads`, `update`, or saving or loading of states.
       All parameters exist then.
    2. `count_fresh(fresh)`. Where a parameter that is trained (`requires_grad` of the first replica) is fresh in fewer than
       `num_replicas` replicas, StaleGradientError follows, and nothing else; with ignore_stale_grad=True parameters are
       chosen that are fresh in any replica, so that all processes choose the same.
    3. `follow_weights()`. The optimizer's `rescale_grad` is set for this step. All its attributes are live: learning rate,
       schedule, decay and multipliers may be others at every step; where updates happen elsewhere, they are sent there.
    4. Where it `updates`: `update(chosen, fresh, into)`. Otherwise `reduce(chosen, fresh)`, after which `parameter.grad` of
       every chosen parameter in every replica here is the sum over all replicas, in place, or a view of a larger tensor;
       then the trainer updates the replicas here with these, and calls `end_step()`.

    `allreduce_grads()` of the trainer is 1, 2 without the error, and `reduce`; `update()` is 3 and the update alone. When a
    step that has failed after `reduce` is repeated, that is called without the parameters whose gradients are sums already.

    Gradients that were added up by several backward passes are reduced as they are. One that starts to reduce while backward
    runs has to wait with that in `accumulate()`. It may know better than `fresh` which gradients are fresh, from hooks,
    and ignore that argument.

    Attributes:
        updates: whether it updates the weights of all replicas itself (update_on_kvstore); valid after `start`. Then it has
            the states, and `state_dict` gives them.
        reduces: whether replicas have common gradients. Without, each is updated with its own.
        num_replicas: how many replicas there are in all processes; valid after `start`.
        writes: whether this process is the one that writes files of states; all get what is in them.
        reports_metrics: whether updates can tell what they do to each parameter.
    """

    updates: bool = False
    reduces: bool = True
    num_replicas: int = 1
    writes: bool = True
    reports_metrics: bool = True

    @abc.abstractmethod
    def start(self) -> None:
        """Give every replica the first one's weights, in place. Raises where the store cannot do what is asked of it."""

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        """Of each parameter in how many replicas it is fresh. No weight is changed.

        Args:
            fresh: by replica in this process and by parameter, whether its gradient has been written to since it was used.
            ignore_stale_grad: whether a parameter that is not fresh in some replicas is no error.
        """
        return list(map(sum, zip(*fresh, strict=True)))

    def follow_weights(self) -> None:  # noqa: B027  # there may be nothing to do
        """Let the weights of the first replica here be those of all: anybody may have written to them since the last step.

        Raises:
            RuntimeError: they have been changed where a store cannot take others; nothing has been changed.
        """

    def reduce(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]]) -> None:  # noqa: B027  # as above
        """Make the gradients of the chosen parameters the sums of all fresh ones, in every replica."""

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        """Update the chosen parameters in every replica with the sums of all fresh gradients, which stay as they are.

        Where it fails, no weight has changed, if it is in its power. `into` is where the updates are to put what they
        measure, in rows by index of parameter; what is updated elsewhere leaves it.
        """
        raise NotImplementedError

    def end_step(self) -> None:  # noqa: B027  # as above
        """The trainer has updated the replicas here."""

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which backward passes are only to add up gradients, with nothing sent."""
        return nullcontext()

    def use_control(self, control: torch.Tensor) -> None:
        """Take a loss scaler's control for updates from now on, as `Updater.control`; where the trainer updates, nothing.

        Raises:
            RuntimeError: it cannot do so; nothing has been changed.
        """
        if self.updates:
            raise RuntimeError("a loss scaler with a store that updates elsewhere: use update_on_kvstore=False")

    def total(self) -> torch.Tensor | None:
        """Where it updates, `Updater.total()` of the last update, the same in all processes."""
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """Where it updates, what `checkpoint.collect` gives, of whole parameters by their names; otherwise None."""
        return None

    def end_save(self) -> None:  # noqa: B027  # as above
        """The process that writes has written a file of states: let the others wait for that."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where it updates, take that over, as `checkpoint.restore` does, with all checks first."""
        raise NotImplementedError

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        """Where it updates, the masters of whole parameters, by index; with `new` these are replaced first, and returned.

        Before the first step there are none, but for new ones.

        Raises:
            RuntimeError: they are elsewhere; nothing has been changed.
        """
        raise RuntimeError(
            "the store updates the weights elsewhere, where their masters are: float32 weights can be had and loaded with "
            "update_on_kvstore=False, or with a store that updates in this process, such as 'device' or 'dist_sync'"
        )

    def residuals(self) -> Residuals:
        """What compression has kept back, of whole parameters, by name and source."""
        return {}

    def load_residuals(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:  # noqa: B027  # as above
        """Take that over; if there are other sources than here, their sum. Those that are not saved become 0."""

    def apply(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        """Where it updates, `Updater.apply` with its states, to the weights of all replicas, of the parameters `indices`.

        Raises:
            RuntimeError: the states are elsewhere; nothing has been changed.
        """
        raise RuntimeError("the store keeps the states elsewhere: averaged weights need update_on_kvstore=False")
