"""Optimizers of torch and their counterparts in tristep.optim, for tests."""

import inspect

import torch

DECAY, MAXIMIZE = {"weight_decay": 0.1}, {"weight_decay": 0.1, "maximize": True}
# What each is made with in the tests. The longest one is that of which most arguments work together.
ARGUMENTS = {
    "Adadelta": [{}, {"lr": 0.01}, DECAY, {"maximize": True}, MAXIMIZE, {"rho": 0.95, "eps": 1e-5, **MAXIMIZE}],
    "Adafactor": [{}, {"lr": 0.02, **DECAY}, MAXIMIZE, {"beta2_decay": -1.0}, {"d": 1.5, "beta2_decay": -0.6, **MAXIMIZE}],
    "Adagrad": [
        *({}, {"lr": 0.1}, {"lr": torch.tensor(0.001)}, DECAY, MAXIMIZE, {"initial_accumulator_value": 0.1, **DECAY}),
        {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.2, **MAXIMIZE},
    ],
    "Adam": [{}, {"lr": 0.01}, DECAY, MAXIMIZE, {"betas": (0.8, 0.99), "eps": 1e-6, "amsgrad": True, **MAXIMIZE}],
    "Adamax": [{}, {"lr": 0.1}, DECAY, {"maximize": True}, {"betas": (0.8, 0.99), "eps": 1e-6, **MAXIMIZE}],
    "AdamW": [{}, {"lr": 0.01}, DECAY, MAXIMIZE, {"betas": (0.8, 0.99), "eps": 1e-6, "amsgrad": True, **MAXIMIZE}],
    "ASGD": [{}, {"lambd": 0.1}, {"lr": 0.02}, {"t0": 3}, {"maximize": True}, DECAY, {"alpha": 0.6, "t0": 100, **MAXIMIZE}],
    "Muon": [
        *({}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"weight_decay": 0.2}, {"momentum": 0.8}, {"nesterov": False}),
        {"ns_coefficients": (3.4, -4.7, 2.0), "ns_steps": 6, "adjust_lr_fn": "match_rms_adamw"},
    ],
    "NAdam": [
        *({}, {"lr": 0.001}, {"momentum_decay": 0.006}, DECAY, {"momentum_decay": 0.006, **DECAY}, MAXIMIZE),
        {"momentum_decay": 0.006, "decoupled_weight_decay": True, **MAXIMIZE},
    ],
    "RAdam": [{}, {"lr": 0.002}, {"eps": 1e-6}, DECAY, MAXIMIZE, {"decoupled_weight_decay": True, **MAXIMIZE}],
    "RMSprop": [
        *({}, {"lr": 0.001}, DECAY, {"maximize": True}, MAXIMIZE, {"centered": True, **DECAY}, {"momentum": 0.1, **DECAY}),
        {"alpha": 0.9, "centered": True, "momentum": 0.1, **MAXIMIZE},
    ],
    "Rprop": [{}, {"lr": 0.0002}, {"etas": (0.5, 1.5)}, {"maximize": True}, {"step_sizes": (2e-6, 100), "etas": (0.4, 1.3)}],
    "SGD": [
        *({}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"weight_decay": 0.5}, {"momentum": 0.9}, MAXIMIZE),
        *({"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, **DECAY}, {"momentum": 0.9, "nesterov": True, **MAXIMIZE}),
    ],
    "SparseAdam": [{}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"maximize": True, "betas": (0.8, 0.99)}],
}

CLOSE = {"rtol": 1e-9, "atol": 1e-11}

CLOSE_IN_FLOAT32 = {"rtol": 2e-5, "atol": 2e-6}


def classes_with_argument(argument):
    return [name for name in ARGUMENTS if argument in inspect.signature(getattr(torch.optim, name)).parameters]


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
