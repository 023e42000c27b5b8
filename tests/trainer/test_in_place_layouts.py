"""Weights and gradients whose layout changes where they are in memory: their strides count, as in torch's own optimizers."""

import pytest
import torch

import tristep
from tristep import Trainer

SHAPE = (4, 4)


def _transposed_weight(param):
    param.data = param.data.t()


def _transposed_gradient(param):
    param.grad.t_()


def _both(param):
    _transposed_weight(param)
    _transposed_gradient(param)


def _cut_out(param):
    """Another view of the same memory, by `set_`."""
    param.data.set_(param.data.untyped_storage(), 0, SHAPE, (1, 4))


CHANGES = [_transposed_weight, _transposed_gradient, _both, _cut_out]


class _Ours:
    """A trainer, or an optimizer of tristep.optim."""

    def __init__(self, api, params, engine, monkeypatch):
        if api == "trainer":
            trainer = Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, engine=engine)
            self.step = lambda: trainer.step(1)
        else:
            monkeypatch.setenv("TRISTEP_ENGINE", engine)
            self.step = tristep.optim.SGD(params, lr=0.1, momentum=0.9).step


@pytest.mark.cover("api", "engine")
@pytest.mark.parametrize("new", [False, True], ids=["kept gradients", "new gradients"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("api", ["trainer", "optim"])
def test_states_stay_with_their_elements(api, change, new, engine, device, monkeypatch):
    ours = [torch.nn.Parameter(torch.randn(SHAPE, device=device)) for _ in range(3)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    step = _Ours(api, ours, engine, monkeypatch).step
    judge = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for k in range(9):
        for param, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(SHAPE, device=device)
            for each in (param, other):
                if new or each.grad is None:
                    each.grad = gradient.clone()
                else:
                    each.grad.copy_(gradient)
        if k in (4, 6):
            change(ours[1])
            change(theirs[1])
        step()
        judge.step()
        for param, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


def test_a_step_may_be_taken_in_any_gradient_mode(engine, device):
    params = [torch.nn.Parameter(torch.ones(SHAPE, device=device)) for _ in range(2)]
    judged = [torch.nn.Parameter(param.detach().clone()) for param in params]
    trainer = Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, engine=engine)
    judge = torch.optim.SGD(judged, lr=0.1, momentum=0.9)
    for k in range(4):
        for param in (*params, *judged):
            param.grad = torch.full(SHAPE, k + 1.0, device=device)
        with (torch.inference_mode(), torch.no_grad(), torch.enable_grad())[k % 3]:
            trainer.step(1)
        judge.step()
    torch.testing.assert_close(params, judged, rtol=1e-5, atol=1e-6)
