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


@pytest.mark.cover("api", "engine")
@pytest.mark.parametrize("first", ["with gaps", "another stride"])
@pytest.mark.parametrize("api", ["trainer", "optim"])
def test_strides_of_an_axis_of_length_1_mean_nothing(api, first, engine, device, monkeypatch):
    start = torch.randn(1, 18, device=device)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    for param in (ours, theirs):
        param.data = param.data[:, ::2] if first == "with gaps" else param.data[:, :9].t().contiguous().t()
    step = _Ours(api, [ours], engine, monkeypatch).step
    judge = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for k in range(6):
        for param in (ours, theirs):
            if k in (2, 4):
                param.data = param.data.t().contiguous().t() if k == 2 else param.data.clone().as_strided((1, 9), (7, 1))
            gradient = torch.cos(k + torch.arange(9.0, device=device)).view(9, 1).t()
            param.grad = gradient if k % 2 else gradient.contiguous()
        step()
        judge.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Wrapper(torch.Tensor):
    """A tensor that only stands for another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("what", ["freed", "a wrapper", "made inside vmap"])
def test_a_gradient_without_memory_is_refused(what, when, engine, device):
    params = [torch.nn.Parameter(torch.ones(SHAPE, device=device)) for _ in range(3)]
    trainer = Trainer(params, "sgd", {"learning_rate": 0.1}, engine=engine)
    for k in range(when + 1):
        for param in params:
            param.grad = torch.full(SHAPE, 1.0 + k, device=device)
        if k < when:
            trainer.step(1)
    before = [param.detach().clone() for param in params]

    def step(x):
        if what == "freed":
            params[1].grad.untyped_storage().resize_(0)
        else:
            params[1].grad = Wrapper(params[1].grad) if what == "a wrapper" else x * params[1].grad
        trainer.step(1)
        return x

    with pytest.raises((TypeError, ValueError), match="the gradient of '1' (has no memory|is a Wrapper)"):
        torch.vmap(step)(torch.ones(3, device=device)) if what == "made inside vmap" else step(None)
    assert all(map(torch.equal, params, before))
    assert trainer.optimizer.num_update == when


@pytest.mark.parametrize("when", [0, 3])
def test_gradients_of_inference_mode_are_refused_by_a_trainer_and_taken_by_an_optimizer(when, engine, device, monkeypatch):
    """Torch counts no versions for them; what torch's own optimizers do with them ours do, too."""
    ours, theirs, of_trainer = ([torch.nn.Parameter(torch.ones(SHAPE, device=device)) for _ in range(3)] for _ in range(3))
    trainer = Trainer(of_trainer, "sgd", {"learning_rate": 0.1}, engine=engine)
    step, judge = _Ours("optim", ours, engine, monkeypatch).step, torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for k in range(when + 1):
        with torch.inference_mode(k == when):
            for param in (*ours, *theirs, *of_trainer):
                param.grad = torch.full(SHAPE, k + 1.0, device=device)
        step()
        judge.step()
        if k < when:
            trainer.step(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    before = [param.detach().clone() for param in of_trainer]
    with pytest.raises(ValueError, match=r"the gradient of '0' was made under torch.inference_mode\(\)"):
        trainer.step(1)
    assert all(map(torch.equal, of_trainer, before))


def test_weights_of_inference_mode_are_refused(device):
    with torch.inference_mode():
        params = [torch.nn.Parameter(torch.ones(SHAPE, device=device))]
    with pytest.raises(ValueError, match=r"'0' was made under torch.inference_mode\(\)"):
        Trainer(params, "sgd")
    params[0].grad = torch.ones(SHAPE, device=device)
    with pytest.raises(ValueError, match=r"params\[0\] was made under torch.inference_mode\(\)"):
        tristep.optim.SGD(params, lr=0.1).step()


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
