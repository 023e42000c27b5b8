"""Uses that nobody has in mind at first: each works, or is an error that names the argument."""

import pytest
import torch

from tristep import Trainer


def _net():
    return torch.nn.Linear(2, 1)


def test_a_compiled_model_has_the_names_of_the_model():
    compiled = torch.nn.Sequential(torch.compile(torch.nn.Sequential(_net()), backend="eager"))
    trainer = Trainer(compiled, "sgd", {"momentum": 0.9})
    assert list(trainer.state_dict()["parameters"]) == ["0.0.weight", "0.0.bias"]


def test_zeroed_gradients_must_not_be_shared(engine, device):
    params = [torch.nn.Parameter(torch.ones(4, device=device)) for _ in range(2)]
    trainer = Trainer(params, "sgd", engine=engine, zero_grads=True)
    params[0].grad = params[1].grad = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="the gradient of '0' and the gradient of '1' share memory"):
        trainer.step(1)
    assert all((param == 1).all() for param in params)
    assert (params[0].grad == 1).all()
