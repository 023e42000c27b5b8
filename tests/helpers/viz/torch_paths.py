"""What torch's optimizers do to a point of the plane, in float64."""

import torch


def torch_path(make, on, start, steps):
    """float64 [steps + 1, 2]: the way of the optimizer that `make` makes of [point], down `on`."""
    point = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer, path = make([point]), [point.detach().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        on(point).backward()
        optimizer.step()
        path.append(point.detach().clone())
    return torch.stack(path).numpy()
