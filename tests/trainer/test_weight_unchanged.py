"""The share of weights that a step of a trainer leaves as they were, against torch on copies of them.

Each storage, and what is equal, is in kernels/test_weight_unchanged.py, which has no rules of whole tensors.
"""

import numpy as np
import pytest
import torch

import tristep


def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)).to(device)


STORAGE = {
    "master": ("adam", {"multi_precision": True, "learning_rate": 2e-8}),
    "matrices": ("muon", {"learning_rate": 1e-4}),
    "matrices with masters": ("muon", {"multi_precision": True, "learning_rate": 2e-8}),
}


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", STORAGE)
def test_weights_that_a_step_leaves_as_they_were(name, engine, device):
    """Both the weights and the master copies that the trainer would save, which there are from the first step on."""
    net, (optimizer, options) = model(device).to(torch.bfloat16), STORAGE[name]
    telemetry = tristep.Telemetry(metrics=["weight_unchanged"])
    trainer = tristep.Trainer(net, optimizer, options, engine=engine, telemetry=telemetry)

    def stored():
        states = trainer.state_dict()["state"]
        pairs = [(param, states.get(name, {}).get("master copy")) for name, param in net.named_parameters()]
        return [[each.detach().clone() for each in pair if each is not None] for pair in pairs]

    expected = []
    for k in range(4):
        before = stored()
        trainer.zero_grad()
        net(torch.full((5, 6), 0.5 + k, dtype=torch.bfloat16, device=device)).square().sum().backward()
        trainer.step(5)
        if k > 0:
            same = [
                torch.stack([a == b for a, b in zip(old, new, strict=True)]).all(dim=0)
                for old, new in zip(before, stored(), strict=True)
            ]
            expected.append([each.double().mean().item() for each in same])
    telemetry.flush()
    np.testing.assert_allclose(telemetry["weight_unchanged"][1:], expected, rtol=1e-12)
    assert 0 < np.mean(expected) < 1
