"""Loss scaling, as in MXNet's amp: losses are multiplied so that gradients in float16 do not vanish, steps divide again.

    tristep.amp.init()
    tristep.amp.init_trainer(trainer)
    with torch.autocast("cuda", torch.float16):
        loss = loss_function(net(x), y)
    with tristep.amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    trainer.step(1)

The scale, the count of good steps and the overflow flag stay on the device: nothing waits for it. `torch.autocast`
decides which operations run in which type.

Source: MXNet 1.9.1, `mxnet.contrib.amp`; Micikevicius et al. (2018), "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels import Rule, global_norm
from .optimizer import Optimizer, RuleOptimizer
from .optimizer.sparse import is_sparse
from .trainer import Trainer
from .validation import choice, integer, number

__all__ = ["LossScaler", "init", "init_trainer", "scale_loss", "unscale"]

_target_dtype: str | None = None


def init(target_dtype: str = "float16") -> None:
    """Get ready for `init_trainer`. To be called once, before it.

    Args:
        target_dtype: "float16", or "bfloat16", whose gradients do not vanish: the scale is 1 then, and stays so, but steps
            whose gradients are not finite are left out, too.
    """
    global _target_dtype
    _target_dtype = choice("target_dtype", target_dtype, ("float16", "bfloat16"))


def init_trainer(trainer: Any, loss_scaler: LossScaler | None = None) -> None:
    """Give a trainer a loss scaler, a new one by default. Steps with non-finite gradients then change nothing.

    Raises:
        RuntimeError: before `init`, or for a trainer that has one.
        TypeError: something else than a trainer, or than a scaler.
    """
    if not isinstance(trainer, Trainer):
        hint = ": give the Trainer that has it" if isinstance(trainer, Optimizer) else ""
        raise TypeError(f"trainer must be a tristep.Trainer, got {type(trainer).__name__}{hint}")
    if _target_dtype is None:
        raise RuntimeError("amp.init_trainer() before amp.init(): call tristep.amp.init() first")
    if trainer._loss_scaler is not None:
        raise RuntimeError("amp.init_trainer(): this trainer has a loss scaler already")
    if loss_scaler is None:
        loss_scaler = LossScaler() if _target_dtype == "float16" else LossScaler(1.0, max_scale=1.0)
    elif not isinstance(loss_scaler, LossScaler):
        raise TypeError(f"loss_scaler must be a tristep.amp.LossScaler, got {type(loss_scaler).__name__}")
    loss_scaler.attach(trainer)


@contextmanager
def scale_loss(loss: Any, trainer: Trainer) -> Iterator[Any]:
    """A context that returns the loss, or each of a list of losses, multiplied by the current scale; call backward on these.

    The next step of the trainer divides gradients by it. The loss must be float32, as `torch.autocast` makes it, or its own
    gradient overflows already.

    Raises:
        RuntimeError: the trainer has no loss scaler: call `init_trainer` first.
    """
    scaler = _scaler_of(trainer)
    scaler.follow(trainer)
    scaler.begin()
    if isinstance(loss, torch.Tensor):
        yield loss * scaler.scale.to(loss.device)
    else:
        yield [each * scaler.scale.to(each.device) for each in loss]


@torch.no_grad()
def unscale(trainer: Trainer) -> None:
    """Divide all gradients by the scale, in place, to inspect or clip them; the next step does not divide again.

    Raises:
        RuntimeError: the trainer has no loss scaler.
    """
    scaler = _scaler_of(trainer)
    for params in (replica.params for replica in trainer.replicas):
        gradients = [parameter.grad for parameter in params if parameter.grad is not None]
        if gradients:
            factor = scaler.control[0].to(gradients[0].device)
            torch._foreach_mul_([g._values() if is_sparse(g) else g for g in gradients], factor)
    scaler.control[:1].fill_(1.0)


class LossScaler:
    """A dynamic loss scale: it decreases when gradients overflow, and increases after a number of steps without overflow.

    Args:
        init_scale: where it begins, > 0.
        scale_factor: what it is divided by after a step that overflowed, and multiplied by after good ones, > 1.
        scale_window: after so many good steps in a row, >= 1.
        max_scale: it does not grow beyond that.

    Attributes:
        scale: float32 [], on the device of the parameters.
        good_steps: int32 [], how many there have been since the scale has changed, or a step has overflowed.
        control: float32 [2], what gradients are multiplied by, and whether the current step is skipped, if that is known
            before it.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        max_scale: float = 2.0**24,
    ) -> None:
        init_scale = number("init_scale", init_scale, above=0)
        self.scale_factor = number("scale_factor", scale_factor, above=1)
        self.scale_window = integer("scale_window", scale_window, low=1)
        self.max_scale = number("max_scale", max_scale, low=init_scale)
        self.scale = torch.tensor(init_scale, dtype=torch.float32, device="cpu")
        self.good_steps = torch.tensor(0, dtype=torch.int32, device="cpu")
        self.control = torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu")
        self._found_by_rule = False

    @property
    def loss_scale(self) -> float:
        """The scale as a number. Waits for the device."""
        return float(self.scale)

    def attach(self, trainer: Trainer) -> None:
        """Become the scaler of this trainer."""
        trainer._use_control(self.control)  # which may refuse it
        optimizer = trainer.optimizer
        if isinstance(optimizer, RuleOptimizer) and isinstance(optimizer.rule, Rule):
            optimizer._skips_overflow = self._found_by_rule = True
        trainer._loss_scaler = self
        self.follow(trainer)

    def follow(self, trainer: Trainer) -> None:
        """Go where the parameters are."""
        device = trainer._params[0].device
        if self.scale.device != device:
            self.scale, self.good_steps = self.scale.to(device), self.good_steps.to(device)
            self.control = self.control.to(device)
            trainer._use_control(self.control)

    @torch.no_grad()
    def begin(self) -> None:
        """The loss is about to be scaled: let the next step divide by it."""
        torch.reciprocal(self.scale.view(1), out=self.control[:1])

    @torch.no_grad()
    def look(self, *copies: Sequence[torch.Tensor | None], always: bool = False) -> None:
        """Before a step: find out whether it is to be left out, where its rule cannot find that out by itself.

        Args:
            *copies: the gradients of each copy of the model.
            always: even if the rule can.
        """
        if self._found_by_rule and not always:
            return
        norms = []
        for gradients in copies:
            found = [g.coalesce().values() if is_sparse(g) else g for g in gradients if g is not None]
            norms.append(global_norm(found, float("inf")).to(self.control.device))
        self.control[1:].copy_(~torch.stack(norms).isfinite().all())

    @torch.no_grad()
    def end(self, total: torch.Tensor | None) -> None:
        """After a step: change the scale, by whether the sum of squares of all gradients, or what `look` saw, is finite."""
        overflow = self.control[1] if total is None else (~total.isfinite()).to(self.scale.device, torch.float32)
        torch._amp_update_scale_(
            self.scale, self.good_steps, overflow, self.scale_factor, 1.0 / self.scale_factor, self.scale_window
        )
        self.scale.clamp_(max=self.max_scale)
        self.control.zero_()
        self.control[:1].fill_(1.0)

    def state_dict(self) -> dict[str, float]:
        """Scale and count, as numbers. Waits for the device."""
        return {"loss_scale": self.loss_scale, "good_steps": int(self.good_steps)}

    @staticmethod
    def check(saved: Any) -> None:
        """Refuse what `state_dict` did not give."""
        if not isinstance(saved, Mapping) or set(saved) != {"loss_scale", "good_steps"}:
            raise ValueError(f"saved state: loss_scaler is {saved!r}: must be a dict of loss_scale and good_steps")
        number("saved state: loss_scale", saved["loss_scale"], above=0)
        integer("saved state: good_steps", saved["good_steps"], low=0)

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.check(saved)
        self.scale.fill_(saved["loss_scale"])
        self.good_steps.fill_(saved["good_steps"])

    def __repr__(self) -> str:
        return f"LossScaler(scale_factor={self.scale_factor}, scale_window={self.scale_window}, max_scale={self.max_scale})"


def _scaler_of(trainer: Any) -> LossScaler:
    scaler = getattr(trainer, "_loss_scaler", None)
    if scaler is None:
        raise RuntimeError(f"this {type(trainer).__name__} has no loss scaler: call tristep.amp.init_trainer(trainer) first")
    return scaler
