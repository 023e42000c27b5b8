"""tristep.optim in skorch, which takes a class of optimizers and their arguments by name."""

import pytest
import torch

import tristep


def _trained(skorch, optimizer):
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    net = skorch.NeuralNetRegressor(
        torch.nn.Linear,
        module__in_features=4,
        module__out_features=1,
        optimizer=optimizer,
        optimizer__lr=0.05,
        optimizer__weight_decay=0.1,
        max_epochs=3,
        train_split=None,
        verbose=0,
    )
    net.fit(x.numpy(), x[:, :1].numpy())
    return net


def test_skorch():
    skorch = pytest.importorskip("skorch", reason="not installed")
    theirs, ours = (_trained(skorch, library.AdamW) for library in (torch.optim, tristep.optim))
    assert type(ours.optimizer_) is tristep.optim.AdamW
    torch.testing.assert_close(ours.module_.state_dict(), theirs.module_.state_dict(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.history[:, "train_loss"], theirs.history[:, "train_loss"], rtol=1e-4, atol=1e-6)
