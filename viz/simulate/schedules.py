"""Future learning rates of torch's schedulers."""

from __future__ import annotations

import copy
import warnings

import torch

__all__ = ["simulate_scheduler"]


def simulate_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, n: int) -> list[float]:
    """Return the future learning rates of a torch scheduler, without changing it or its optimizer: a copy is stepped.

    The list has the first parameter group's present rate and its rate after each step: n + 1 rates, or fewer if the schedule
    ends.
    """
    optimizer = scheduler.optimizer
    dummy = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in optimizer.param_groups], lr=0.1)
    for group, original in zip(dummy.param_groups, optimizer.param_groups, strict=True):
        group.update({key: copy.deepcopy(value) for key, value in original.items() if key not in ("params", "param_names")})
    dummy.defaults = dict(optimizer.defaults)
    twin = copy.deepcopy(scheduler, {id(optimizer): dummy})
    rates = [float(dummy.param_groups[0]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that optimizer.step() was not called
        for _ in range(n):
            try:
                twin.step()
            except ValueError:  # the schedule has ended
                break
            rates.append(float(dummy.param_groups[0]["lr"]))
    return rates
