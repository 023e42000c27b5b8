"""Learning rates of torch's schedulers that are still to come."""

from __future__ import annotations

import copy
import warnings

import torch

__all__ = ["simulate_scheduler"]


def simulate_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, n: int) -> list[float]:
    """The first group's learning rates of a scheduler of torch from now on, without a change to it or its optimizer.

    Args:
        scheduler: of any kind that needs no losses. A copy of it is stepped.
        n: how many steps, >= 0.

    Returns:
        The present rate and those after each step, at most n + 1: fewer if the scheduler comes to its end.
    """
    optimizer = scheduler.optimizer
    dummy = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in optimizer.param_groups], lr=0.1)
    for group, own in zip(dummy.param_groups, optimizer.param_groups, strict=True):
        group.update({key: copy.deepcopy(value) for key, value in own.items() if key not in ("params", "param_names")})
    dummy.defaults = dict(optimizer.defaults)
    twin = copy.deepcopy(scheduler, {id(optimizer): dummy})
    rates = [float(dummy.param_groups[0]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses optimizer.step(), of which there is nothing to do
        for _ in range(n):
            try:
                twin.step()
            except ValueError:  # it has come to its end
                break
            rates.append(float(dummy.param_groups[0]["lr"]))
    return rates
