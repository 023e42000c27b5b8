"""AccumulationWatch: warns about a missing zero_grad() if a step uses gradients added to those of the step before."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..optimizer.settings import stacklevel_of_caller


class AccumulationWatch:
    """Warns if the second step uses gradients that backward passes have added to the gradients of the first step.

    In MXNet a backward pass replaces them, so code from MXNet may lack `zero_grad()`. What a step does not use is of no
    concern: the backward pass of a GAN's generator adds to the discriminator's gradients, which are then zeroed. `is_over`:
    there is nothing to watch, as in a trainer that has taken steps before.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], is_over: bool = False) -> None:
        self._params, self.is_over = params, is_over
        self._hook: Any = None
        self._watched: torch.nn.Parameter | None = None
        self._gradient: Any = None  # a weak reference to the gradient that the first step has used
        self._version: int | None = None  # its version while it has only been added to; None: it has been written otherwise
        self._is_added = False

    def before_use(self) -> None:
        """Warn if gradients that are about to be used were added to gradients that a step has used."""
        if self._watched is not None and self._is_added and self._watched.grad is self._gradient():
            self._end()
            warnings.warn(
                "this step uses gradients that backward() has added to the gradients of the step before, as torch does; in "
                "MXNet it replaces them (grad_req='write'): call trainer.zero_grad() before each backward(), or set "
                "grad_req='add' of the parameters if that is meant",
                stacklevel=stacklevel_of_caller(),
            )

    def after_step(self, applies: bool) -> None:
        """To be called after each step: the first call starts to watch, if `applies`, and the second call ends it."""
        if self._hook is not None:
            self._end()
            return
        self.is_over = True
        if not applies:
            return
        candidates = [param for param in self._params if param.requires_grad and param.grad is not None]
        if not candidates or vars(candidates[0]).get("grad_req") == "add":
            return
        self._watched = candidates[0]
        gradient: Any = self._watched.grad
        self._gradient, self._version = weakref.ref(gradient), gradient._version
        # The parameter holds its hooks where the garbage collector does not look, so that a hook must not hold it.
        hook = partial(_on_gradient, weakref.ref(self))
        self._hook, self.is_over = self._watched.register_post_accumulate_grad_hook(hook), False

    def arrived(self, param: torch.Tensor) -> None:
        """Note whether the watched parameter's new gradient was added to the one that the first step has used."""
        now: Any = param.grad
        if now is None or self._version is None or now is not self._gradient() or now._version != self._version + 1:
            self._version, self._is_added = None, False  # another tensor, or zeros were written to it before
        else:
            self._version, self._is_added = now._version, True

    def _end(self) -> None:
        self._hook.remove()
        self._hook, self._watched, self.is_over = None, None, True


def _on_gradient(watch: weakref.ref[AccumulationWatch], param: torch.Tensor) -> None:
    if (live := watch()) is not None:
        live.arrived(param)
