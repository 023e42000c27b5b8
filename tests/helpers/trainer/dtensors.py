"""DTensors put together, and what they send, for tests."""

import torch

from tristep.trainer.optim import shards


def whole_tensors(tensors):
    return [(each.full_tensor() if shards.is_dtensor(each) else each).detach().clone() for each in tensors]


def sent_by(value):
    """As it can be sent to the test's process: with arrays instead of tensors."""
    if isinstance(value, torch.Tensor):
        return value.double().numpy()
    if isinstance(value, dict):
        return {key: sent_by(each) for key, each in value.items()}
    return type(value)(map(sent_by, value)) if isinstance(value, (list, tuple)) else value
