"""Training steps that `Trainer.capture` makes a CUDA graph of, replayed on the emulator with other numbers at each step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tristep import Trainer, lr_scheduler
from tristep.kernels.language.ops import TorchOps

from .driver import install
from .stream import late

__all__ = ["CASES", "find_captured"]

_STEPS, _WARMUP = 7, 2
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {"clip_gradient": 0.5}),
    "schedule": ("sgd", {"momentum": 0.9, "lr_scheduler": lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}),
    "clipped": ("adamw", {"clip_norm": 0.5, "skip_nonfinite": True, "ema_decay": 0.9}),
    "guarded": ("adamw", {"agc": 0.1, "skip_norm": 0.2, "cautious": True}),
    "low precision": ("adamw", {"state_dtype": "bfloat16", "stochastic_rounding": True}),
    "norms of tensors": ("lamb", {}),
    "matrices": ("muon", {}),
}


# As on a GPU: NumPy, which takes the roots of CPU tensors, would not be captured.
@mock.patch.object(TorchOps, "sqrt", lambda self, x: torch.sqrt(self._tensor(x)))
def find_captured(case: str) -> list[str]:
    """What differs after steps that are captured from what it is after steps that are not."""
    emulator = install()
    emulator.defects.clear()
    expected = _train(case, captured=False)
    try:
        with late(emulator) as stream:
            found = _train(case, captured=True)
            stream.run()
    except RuntimeError as error:
        return [str(error)]
    pairs = zip(found, expected, strict=True)
    return [*emulator.defects, *(f"tensor {k} differs" for k, pair in enumerate(pairs) if not torch.equal(*pair))]


def _train(case: str, captured: bool) -> list[torch.Tensor]:
    """Weights and states after the last step, and what that returned. Nothing waits in between."""
    name, options = CASES[case]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30))
    batches = [torch.randn(6, 4) for _ in range(_STEPS)]
    trainer = Trainer(net, name, dict(options), engine="triton")

    def train(x: torch.Tensor) -> torch.Tensor:
        trainer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        trainer.step(2)
        return loss

    step = trainer.capture(train, warmup=_WARMUP) if captured else train
    for k, x in enumerate(batches):
        if trainer.optimizer.lr_scheduler is None:
            trainer.set_learning_rate(0.02 / (k + 1))
        trainer.optimizer.wd = 0.01 * k
        loss = step(x)
        assert not captured or step.is_recorded == (k >= _WARMUP)
    states = [state for row in trainer._updater.states.values() for state in row]
    return [*net.parameters(), *states, loss]
