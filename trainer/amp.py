"""Loss scaling, as in MXNet's amp: losses are multiplied so that float16 gradients do not underflow, and steps divide again.

    tristep.amp.init()
    tristep.amp.init_trainer(trainer)
    with torch.autocast("cuda", torch.float16):
        loss = loss_function(net(x), y)
    with tristep.amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    trainer.step(1)

The scale, the count of good steps and the overflow flag stay on the device, so that the host never waits for them.
`torch.autocast` decides which operations run in which dtype.

Source: MXNet 1.9.1, `mxnet.contrib.amp`; Micikevicius et al. (2018), "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels import global_norm
from .optimizer import Optimizer, RuleOptimizer
from .optimizer.multi import parts_of
from .optimizer.sparse import is_sparse
from .trainer import Trainer
from .validation import choice, instance, integer, number

__all__ = ["LossScaler", "init", "init_trainer", "scale_loss", "unscale"]

_target_dtype: str | None = None


def init(target_dtype: str = "float16") -> None:
    """Choose the low-precision dtype for loss scaling; call it once, before `init_trainer`.

    Args:
        target_dtype: "float16", or "bfloat16", whose gradients do not underflow: the scale then stays 1, and only steps with
            non-finite gradients are skipped.

    Raises:
        TypeError, ValueError: another `target_dtype`.
    """
    global _target_dtype
    _target_dtype = choice("target_dtype", target_dtype, ("float16", "bfloat16"))


def init_trainer(trainer: Any, loss_scaler: LossScaler | None = None) -> None:
    """Attach a loss scaler to a trainer; from then on steps with non-finite gradients are skipped.

    Args:
        trainer: a `tristep.Trainer`.
        loss_scaler: a `LossScaler`; None makes one with its defaults, for bfloat16 with the constant scale 1.

    Raises:
        RuntimeError: `init` has not been called, or the trainer has a loss scaler already.
        TypeError: `trainer` is no Trainer, or `loss_scaler` no LossScaler.
    """
    hint = ": give the Trainer that has it" if isinstance(trainer, Optimizer) else ""
    instance("trainer", trainer, Trainer, "a tristep.Trainer", hint)
    if _target_dtype is None:
        raise RuntimeError("amp.init_trainer() before amp.init(): call tristep.amp.init() first")
    if trainer._loss_scaler is not None:
        raise RuntimeError("amp.init_trainer(): this trainer has a loss scaler already")
    if loss_scaler is None:
        loss_scaler = LossScaler() if _target_dtype == "float16" else LossScaler(1.0, max_scale=1.0)
    instance("loss_scaler", loss_scaler, LossScaler, "a tristep.amp.LossScaler")
    loss_scaler.attach(trainer)


@contextmanager
def scale_loss(loss: Any, trainer: Trainer) -> Iterator[Any]:
    """Multiply a loss by the trainer's current loss scale: `with scale_loss(loss, trainer) as scaled: scaled.backward()`.

    The next step of the trainer divides gradients by the scale.

    Args:
        loss: a tensor, or a list of tensors, in float32, as `torch.autocast` makes it: a float16 loss overflows when scaled.
        trainer: a trainer with a loss scaler, see `init_trainer`.

    Returns:
        A context manager, which gives the scaled loss, or the list of scaled losses.

    Raises:
        RuntimeError: the trainer has no loss scaler: call `init_trainer` first.
    """
    scaler = _scaler_of(trainer)
    scaler.follow(trainer)
    scaler.begin()
    if isinstance(loss, torch.Tensor):
        yield loss * scaler.scale.to(loss.device)
    else:
        yield [one_loss * scaler.scale.to(one_loss.device) for one_loss in loss]


@torch.no_grad()
def unscale(trainer: Trainer) -> None:
    """Divide a trainer's gradients by its loss scale, in place, to inspect or clip them; the next step does not divide.

    Raises:
        RuntimeError: the trainer has no loss scaler.
    """
    scaler = _scaler_of(trainer)
    for replica in trainer.replicas:
        gradients = [parameter.grad for parameter in replica.params if parameter.grad is not None]
        if gradients:
            factor = scaler.control[0].to(gradients[0].device)
            torch._foreach_mul_([g._values() if is_sparse(g) else g for g in gradients], factor)
    scaler.control[:1].fill_(1.0)


class LossScaler:
    """A dynamic loss scale: it decreases when gradients overflow, and increases after a number of steps without overflow.

    Args:
        init_scale: the first scale, > 0.
        scale_factor: the divisor of the scale after a step that overflowed, and its factor after good steps, > 1.
        scale_window: the number of good steps in a row after which the scale grows, >= 1.
        max_scale: the largest scale, >= init_scale.

    Attributes:
        scale: the scale, float32 [], on the device of the parameters.
        good_steps: the number of steps since the last overflow or change of the scale, int32 [].
        control: float32 [2], read by the update kernels: the factor of the gradients, and 1 if the current step is to be
            skipped, as far as that is known before the step.
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
        self._rule_detects_overflow = False

    @property
    def loss_scale(self) -> float:
        """The present scale as a float. Waits for the device."""
        return float(self.scale)

    def attach(self, trainer: Trainer) -> None:
        """Become the loss scaler of this trainer. `init_trainer` calls it."""
        trainer._use_control(self.control)  # raises if the trainer does not support it
        optimizer = trainer.optimizer
        if all(isinstance(part, RuleOptimizer) for part in parts_of(optimizer)):
            optimizer._skips_overflow = self._rule_detects_overflow = True  # type: ignore[attr-defined]
        trainer._loss_scaler = self
        self.follow(trainer)

    def follow(self, trainer: Trainer) -> None:
        """Move the scale to the device of the trainer's parameters."""
        device = trainer._params[0].device
        if self.scale.device != device:
            self.scale, self.good_steps = self.scale.to(device), self.good_steps.to(device)
            self.control = self.control.to(device)
            trainer._use_control(self.control)

    @torch.no_grad()
    def begin(self) -> None:
        """Prepare the next step, which divides gradients by the present scale: write its reciprocal into `control`."""
        torch.reciprocal(self.scale.view(1), out=self.control[:1])

    @torch.no_grad()
    def detect_overflow(self, *copies: Sequence[torch.Tensor | None], always: bool = False) -> None:
        """Before a step, mark it as skipped if a gradient of any replica is not finite.

        Nothing is done if the update rule detects that by itself, unless `always`.
        """
        if self._rule_detects_overflow and not always:
            return
        norms = []
        for gradients in copies:
            values = [g.coalesce().values() if is_sparse(g) else g for g in gradients if g is not None]
            norms.append(global_norm(values, float("inf")).to(self.control.device))
        self.control[1:].copy_(~torch.stack(norms).isfinite().all())

    @torch.no_grad()
    def end(self, total: torch.Tensor | None) -> None:
        """After a step, decrease the scale if it overflowed, or count a good step.

        `total`: the sum of squares of all gradients, which is finite without overflow; None: `detect_overflow` has decided.
        """
        overflow = self.control[1] if total is None else (~total.isfinite()).to(self.scale.device, torch.float32)
        torch._amp_update_scale_(
            self.scale, self.good_steps, overflow, self.scale_factor, 1.0 / self.scale_factor, self.scale_window
        )
        self.scale.clamp_(max=self.max_scale)
        self.control.zero_()
        self.control[:1].fill_(1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the count of good steps, as numbers. Waits for the device."""
        return {"loss_scale": self.loss_scale, "good_steps": int(self.good_steps)}

    @staticmethod
    def check(saved: Any) -> None:
        """Raise TypeError or ValueError if `saved` is no result of `state_dict`."""
        if not isinstance(saved, Mapping) or set(saved) != {"loss_scale", "good_steps"}:
            raise ValueError(f"saved state: loss_scaler is {saved!r}: must be a dict of loss_scale and good_steps")
        number("saved state: loss_scale", saved["loss_scale"], above=0)
        integer("saved state: good_steps", saved["good_steps"], low=0)

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set the scale and the count of good steps from a result of `state_dict`."""
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
