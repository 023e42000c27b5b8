"""Optimizers of recent papers against `pytorch_optimizer` and `torch.optim`, on every engine, in float64."""

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer

reference = pytest.importorskip("pytorch_optimizer", reason="not installed")

SHAPES = ((5, 3), (7,), (4, 4), ())
STEPS = 25

# Our name and arguments; their class and arguments. What they differ in is switched off on one side or the other.
PEERS = {
    "lion": (
        ("lion", {"learning_rate": 0.01, "wd": 0.1}),
        ("Lion", {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "weight_decouple": True}),
    ),
    "adan": (
        ("adan", {"learning_rate": 0.01, "wd": 0.1}),
        (
            "Adan",
            {
                "lr": 0.01,
                "betas": (0.98, 0.92, 0.99),
                "weight_decay": 0.1,
                "weight_decouple": False,  # which there means the proximal form
                "max_grad_norm": 0.0,
                "eps": 1e-8,
            },
        ),
    ),
    "ademamix": (
        ("ademamix", {"learning_rate": 0.01, "wd": 0.1}),
        ("AdEMAMix", {"lr": 0.01, "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.1, "weight_decouple": True, "eps": 1e-8}),
    ),
    "ademamix, warm-up": (
        ("ademamix", {"learning_rate": 0.01, "warmup": 20, "alpha": 3.0}),
        (
            "AdEMAMix",
            {"lr": 0.01, "betas": (0.9, 0.999, 0.9999), "alpha": 3.0, "t_alpha_beta3": 20, "weight_decay": 0.0, "eps": 1e-8},
        ),
    ),
    "adopt": (
        ("adopt", {"learning_rate": 0.01}),
        # There the limit is that of the next update.
        ("ADOPT", {"lr": 0.01, "betas": (0.9, 0.9999), "eps": 1e-6, "clip_lambda": lambda step: (step - 1) ** 0.25}),
    ),
    "stable adamw": (
        ("stableadamw", {"learning_rate": 0.01, "wd": 0.1}),
        (
            "StableAdamW",
            {
                "lr": 0.01,
                "betas": (0.9, 0.99),
                "weight_decay": 0.1,
                "weight_decouple": True,
                "eps": 1e-6,
                "kahan_sum": False,
            },
        ),
    ),
    "mars": (
        ("mars", {"learning_rate": 0.01, "wd": 0.1, "epsilon": 1e-300}),
        (
            "MARS",
            {
                "lr": 0.01,
                "betas": (0.95, 0.99),
                "gamma": 0.025,
                "weight_decay": 0.1,
                "weight_decouple": True,
                "eps": 1e-300,
                "optimize_1d": True,
                "lr_1d": 0.01,
                "betas_1d": (0.95, 0.99),
                "weight_decay_1d": 0.1,
            },
        ),
    ),
    "came": (
        ("came", {"learning_rate": 0.01, "wd": 0.1}),
        (
            "CAME",
            {
                "lr": 0.01,
                "betas": (0.9, 0.999, 0.9999),
                "weight_decay": 0.1,
                "weight_decouple": True,
                "eps1": 1e-30,
                "eps2": 1e-16,
                "clip_threshold": 1.0,
            },
        ),
    ),
    "novograd": (
        ("novograd", {"learning_rate": 0.01, "wd": 0.1}),
        ("NovoGrad", {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1, "weight_decouple": False, "eps": 1e-8}),
    ),
}


EPSILON = torch.finfo(torch.float64).eps
# As above, with classes of torch.optim, and which tensors they take, by number of dimensions.
TORCH_PEERS = {
    "muon": (("muon", {"learning_rate": 0.01, "wd": 0.1}), ("Muon", {"lr": 0.01, "weight_decay": 0.1}), (2,)),
    "muon in AdamW's size": (
        ("muon", {"learning_rate": 0.01, "momentum": 0.8, "nesterov": False, "match_adamw": True}),
        (
            "Muon",
            {"lr": 0.01, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
        ),
        (2,),
    ),
    "muon's companion": (
        ("muon", {"learning_rate": 0.01, "adam_learning_rate": 0.002, "wd": 0.1}),
        ("AdamW", {"lr": 0.002, "weight_decay": 0.1}),
        (0, 1),
    ),
    "radam": (
        ("radam", {"learning_rate": 0.01, "wd": 0.1}),
        ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
        (0, 1, 2),
    ),
    "radam, coupled": (
        ("radam", {"learning_rate": 0.01, "wd": 0.1, "beta2": 0.9, "decoupled": False}),
        ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.9)}),
        (0, 1, 2),
    ),
    "asgd": (
        ("asgd", {"learning_rate": 0.05, "wd": 0.1, "lambd": 0.1}),
        ("ASGD", {"lr": 0.05, "weight_decay": 0.1, "lambd": 0.1, "t0": 1e6}),
        (0, 1, 2),
    ),
    "rprop": (("rprop", {"learning_rate": 0.01}), ("Rprop", {"lr": 0.01}), (0, 1, 2)),
    "adafactor": (
        ("adafactor", {"learning_rate": 0.1, "wd": 0.1, "epsilon1": EPSILON}),
        ("Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
        (0, 1, 2),
    ),
}


def _parameters(device, dimensions=(0, 1, 2)):
    torch.manual_seed(0)
    shapes = [shape for shape in SHAPES if len(shape) in dimensions]
    return [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(device)) for shape in shapes]


def _train(params, step):
    torch.manual_seed(1)
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, dtype=torch.float64).to(param.device)
        step()


@pytest.mark.parametrize("name", [*PEERS, *TORCH_PEERS])
def test_many_steps_like_the_reference(name, engine, device):
    library = reference if name in PEERS else torch.optim
    (ours, arguments), (theirs, their_arguments), *dimensions = (PEERS | TORCH_PEERS)[name]
    params = _parameters(device, *dimensions)
    trainer = Trainer(params, ours, arguments, engine=engine)
    _train(params, lambda: trainer.step(1))
    expected = _parameters(device, *dimensions)
    _train(expected, getattr(library, theirs)(expected, **their_arguments).step)
    for ours, theirs, start in zip(params, expected, _parameters(device, *dimensions), strict=True):
        close = {"rtol": 1e-7, "atol": 1e-8} if name == "asgd" else {"rtol": 1e-9, "atol": 1e-11}  # its rates are float32
        torch.testing.assert_close(ours, theirs, **close)
        assert not torch.equal(ours, start)


@pytest.mark.parametrize("theirs", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_schedule_free_weights_and_their_average_like_the_reference(theirs, engine, device):
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, theirs, {"learning_rate": 0.05, "wd": 0.1, "warmup": 5}, engine=engine)
    peer = getattr(reference, theirs)(expected, lr=0.05, weight_decay=0.1, warmup_steps=5)
    peer.train()
    _train(params, lambda: trainer.step(1))
    _train(expected, peer.step)
    trained = [param.detach().clone() for param in params]
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
    peer.eval()
    with trainer.averaged_weights():
        torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
        assert not torch.equal(params[0], trained[0])
    assert all(torch.equal(param, weight) for param, weight in zip(params, trained, strict=True))


def test_averaged_weights_leave_master_copies_alone(engine, device):
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16, device=device))
    trainer = Trainer([param], "schedulefreesgd", {"learning_rate": 0.1, "multi_precision": True}, engine=engine)
    for _ in range(3):
        param.grad = torch.full_like(param, 0.5)
        trainer.step(1)
    before = trainer.state_dict()["state"]["0"]["master copy"].clone()
    with trainer.averaged_weights():
        pass
    assert torch.equal(trainer.state_dict()["state"]["0"]["master copy"], before)


def test_averaged_weights_before_the_first_step_are_the_weights(device):
    param = torch.nn.Parameter(torch.arange(3.0, device=device))
    trainer = Trainer([param], "schedulefreesgd")
    with trainer.averaged_weights():
        assert param.tolist() == [0.0, 1.0, 2.0]


def test_an_optimizer_without_average_says_so(device):
    trainer = Trainer([torch.nn.Parameter(torch.ones(1, device=device))], "sgd")
    with pytest.raises(ValueError, match="SGD keeps no averaged weights"), trainer.averaged_weights():
        pass


def test_sophia_estimates_curvature_in_steps_of_their_own(engine, device):
    """Against algorithm 3 of its paper, in NumPy."""
    beta1, beta2, rho, lr, wd, tokens = 0.9, 0.95, 2.0, 0.1, 0.01, 32.0
    rng = np.random.default_rng(0)
    start = rng.standard_normal(50)
    param = torch.nn.Parameter(torch.tensor(start, device=device))
    arguments = {"learning_rate": lr, "wd": wd, "beta1": beta1, "beta2": beta2, "rho": rho}
    trainer = Trainer([param], "sophia", arguments, engine=engine)
    w, m, h = start.copy(), np.zeros(50), np.zeros(50)
    for step in range(12):
        if step % 4 == 0:
            sampled = 0.3 * rng.standard_normal(50)
            param.grad = torch.tensor(sampled, device=device)
            with trainer.optimizer.estimating(scale=tokens):
                trainer.step(1)
            h = beta2 * h + (1 - beta2) * tokens * sampled**2
        g = rng.standard_normal(50)
        param.grad = torch.tensor(g, device=device)
        trainer.step(1)
        m = beta1 * m + (1 - beta1) * g
        step_size = np.clip(m / np.maximum(rho * h, 1e-15), -1, 1)
        assert 0 < (np.abs(step_size) == 1).sum() < 50
        w = w - lr * wd * w - lr * step_size
    np.testing.assert_allclose(param.detach().cpu(), w, rtol=1e-9, atol=1e-11)
    assert trainer.optimizer.num_update == 12


@pytest.mark.parametrize("adaptive", [False, True])
def test_sharpness_aware_steps_like_the_reference(adaptive, engine, device):
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, "sgd", {"learning_rate": 0.1}, engine=engine)
    peer = reference.SAM(expected, torch.optim.SGD, rho=0.3, adaptive=adaptive, lr=0.1)

    def backward(weights):
        for weight in weights:
            weight.grad = None
        sum(weight.cos().sum() for weight in weights).backward()

    for _ in range(5):
        backward(params)
        trainer.ascend(0.3, adaptive=adaptive)
        backward(params)
        trainer.step(1)
        backward(expected)
        peer.first_step(zero_grad=True)
        backward(expected)
        peer.second_step(zero_grad=True)
    torch.testing.assert_close(params, expected, rtol=1e-7, atol=1e-9)  # the reference's norm is float32


def test_an_ascent_uses_gradients_up_and_is_not_repeated(device):
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0], device=device))
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0})
    with pytest.raises(tristep.StaleGradientError):
        trainer.ascend()
    (param**2).sum().backward()
    trainer.ascend(0.5)
    assert param.tolist() == pytest.approx([3.3, 4.4])
    with pytest.raises(RuntimeError, match="take a step"):
        trainer.ascend()
    with pytest.raises(tristep.StaleGradientError):
        trainer.step(1)
    assert param.tolist() == pytest.approx([3.3, 4.4])
    param.grad = torch.ones_like(param)
    trainer.step(1)
    assert param.tolist() == [2.0, 3.0]


def test_averages_of_asgd_like_torch(engine, device):
    params, expected = _parameters(device), _parameters(device)
    trainer = Trainer(params, "asgd", {"learning_rate": 0.05, "t0": 5}, engine=engine)
    peer = torch.optim.ASGD(expected, lr=0.05, t0=5)
    _train(params, lambda: trainer.step(1))
    _train(expected, peer.step)
    with trainer.averaged_weights():
        torch.testing.assert_close([param.detach() for param in params], [peer.state[param]["ax"] for param in expected])
        assert not torch.equal(params[0], expected[0])
