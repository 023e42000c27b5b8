"""`sqrt`: square roots of torch tensors that are rounded correctly."""

from __future__ import annotations

import numpy as np
import torch


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the square root rounded as IEEE 754 demands, as in compiled loops: NumPy's is the processor's instruction.

    On a CPU torch may take MKL's, which on some processors is off by an ulp for one float32 number in six.
    """
    if x.device.type != "cpu" or x.requires_grad or type(x) is not torch.Tensor:
        return torch.sqrt(x)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))
