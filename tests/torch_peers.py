"""Optimizers of torch and their counterparts in tristep.optim, for tests."""

import inspect

import pytest
import torch

import tristep

common_optimizers = pytest.importorskip("torch.testing._internal.common_optimizers", reason="needs the package expecttest")

INFOS = {
    info.optim_cls.__name__: info for info in common_optimizers.optim_db if hasattr(tristep.optim, info.optim_cls.__name__)
}

CLOSE = {"rtol": 1e-9, "atol": 1e-11}

CLOSE_IN_FLOAT32 = {"rtol": 2e-5, "atol": 2e-6}


def classes_with_argument(argument):
    return [name for name in INFOS if argument in inspect.signature(getattr(torch.optim, name)).parameters]


def small_net(dtype=torch.float64):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)
    net.scale = torch.nn.Parameter(torch.tensor(1.0, dtype=dtype))
    return net


def plain_data(value):
    """Data that can be compared for being the same to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain_data(item) for key, item in value.items()}
    return [plain_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def all_data_of(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return plain_data([parameters, optimizer.state_dict()])
