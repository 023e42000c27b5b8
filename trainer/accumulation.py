"""AccumulationWatch: warns about a missing zero_grad() if a backward pass adds to gradients that a step has used."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch


class AccumulationWatch:
    """Warns if the backward pass after the first step adds to the gradients that this step has used, as torch does.

    In MXNet it replaces them, so code from MXNet may lack `zero_grad()`.

    Args:
        params: the trainer's parameters.
        is_over: whether there is nothing to watch, as in a trainer that has taken steps before; also an attribute.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], is_over: bool = False) -> None:
        self._params, self.is_over = params, is_over
        self._hook: Any = None

    def after_step(self, applies: bool) -> None:
        """To be called after each step: the first call starts to watch, if `applies`, and the second call ends it."""
        if self._hook is not None:
            self._hook.remove()
            self._hook, self.is_over = None, True
            return
        self.is_over = True
        if not applies:
            return
        candidates = [param for param in self._params if param.requires_grad and param.grad is not None]
        if not candidates or vars(candidates[0]).get("grad_req") == "add":
            return
        gradient: Any = candidates[0].grad
        used, version = weakref.ref(gradient), gradient._version

        def arrived(param: torch.Tensor) -> None:
            now: Any = param.grad
            if now is not None and now._version == version + 1 and now is used():
                warnings.warn(
                    "this backward pass has added to the gradients of the step before, as torch does; in MXNet it replaces "
                    "them (grad_req='write'): call trainer.zero_grad() before each backward(), or set grad_req='add' of the "
                    "parameters if that is meant",
                    stacklevel=2,
                )

        self._hook, self.is_over = candidates[0].register_post_accumulate_grad_hook(arrived), False
