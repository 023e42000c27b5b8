"""Measures the outputs of a module's layers, by hooks on its forward pass."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn

from .copies import Copies
from .runs import Run

__all__ = ["ActivationProbe"]

ACTIVATIONS = ("activation_mean", "activation_std", "activation_zeros")
# Their outputs are their inputs, in another shape or with zeros of chance.
_UNTOLD = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class ActivationProbe:
    """Measures the layers' outputs in the last forward pass before a step, for the first step and then every k-th."""

    def __init__(self, module: nn.Module, every: int) -> None:
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if next(layer.children(), None) is None and not isinstance(layer, _UNTOLD)
        }
        if not layers:
            raise ValueError(f"activations={type(module).__name__}(...) has no layer whose outputs could be measured")
        self.names = [f"{name} ({type(layer).__name__})".lstrip() for name, layer in layers.items()]
        self._every = every
        self._rows = Copies()
        self._has_said = False
        self._hooks = [layer.register_forward_hook(_hook(weakref.ref(self), i)) for i, layer in enumerate(layers.values())]
        self.start()

    def start(self) -> None:
        """Begin again with the next step."""
        self._steps, self.is_due = 0, True
        self._now: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def measure(self, layer: int, output: Any) -> None:
        """Take the output of a layer's forward pass: a tensor, or a tuple or list that begins with one."""
        tensor = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
            return
        values = tensor.detach().float()
        deviation, mean = torch.std_mean(values, correction=0)
        self._now[layer] = torch.stack([mean, deviation, (values == 0).float().mean()])

    def after_step(self, number: int) -> None:
        """Keep what has been measured since the last step as the row of step `number`."""
        if self.is_due:
            if self._now:
                nothing = next(iter(self._now.values())).new_full((len(ACTIVATIONS),), torch.nan)
                rows = [self._now.get(i, nothing).to(nothing.device) for i in range(len(self.names))]
                self._rows.add(number, torch.stack(rows))
            elif not self._has_said:
                self._has_said = True
                warnings.warn(
                    f"activations: no layer was seen before step {number}: what runs forward must be this module, in "
                    "training mode, neither compiled by torch nor in a CUDA graph that is replayed",
                    stacklevel=4,
                )
        self._steps += 1
        self.is_due, self._now = self._steps % self._every == 0, {}

    @property
    def pending(self) -> bool:
        return bool(self._rows)

    def read_into(self, run: Run) -> None:
        """Move what has arrived on the host into the run of layers."""
        for number, row in self._rows.arrived():
            values = row.numpy()
            run.add_tensors([number], {name: values[None, :, k] for k, name in enumerate(ACTIVATIONS)})

    def flush(self) -> None:
        self._rows.wait()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _hook(probe: weakref.ref[ActivationProbe], layer: int) -> Any:
    def measure(module: nn.Module, _: Any, output: Any) -> None:
        measuring = probe()
        if measuring is None or not measuring.is_due or not module.training or torch.compiler.is_compiling():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        measuring.measure(layer, output)

    return measure
