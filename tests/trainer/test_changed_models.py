"""The Trainer: models that change between steps, in type, shape, memory or device."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from trainer_cases import backward_with, one_step_rates, values_of

import tristep
from tristep import Trainer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_state_follows_a_model_to_another_type(dtype, engine, device):
    weight = Parameter(torch.randn(5, 3, device=device))
    layer = torch.nn.ParameterList([weight])
    trainer = Trainer(layer, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, engine=engine)
    w, m = values_of(weight)[0], 0.0
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-7
    for step in range(6):
        if step in (2, 4):
            layer.to(dtype if step == 2 else torch.float32)
            (state,) = trainer._updater.states[0]
            w = values_of(layer[0])[0]  # rounded by the conversion, not by us
        gradient = torch.ones_like(layer[0]) * (step + 1)
        trainer.zero_grad()
        backward_with([layer[0]], [gradient])
        trainer.step(1)
        m = 0.9 * m - 0.1 * (step + 1)
        w = w + m
        (state,) = trainer._updater.states[0]
        assert state.dtype == (torch.float64 if layer[0].dtype == torch.float64 else torch.float32)
        assert layer[0].dtype == (dtype if step in (2, 3) else torch.float32)
        np.testing.assert_allclose(values_of(state)[0], np.full((5, 3), m), rtol=1e-5)
        np.testing.assert_allclose(values_of(layer[0])[0], w, rtol=4 * eps, atol=4 * eps)


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_master_copy_keeps_steps_that_the_weight_is_too_coarse_for(dtype, engine, device):
    coarse, fine = (Parameter(torch.ones(3, device=device, dtype=dtype)) for _ in range(2))
    for param, multi_precision in ((coarse, False), (fine, True)):
        trainer = Trainer([param], "sgd", {"learning_rate": 1e-4, "multi_precision": multi_precision}, engine=engine)
        for _ in range(50):
            param.grad = torch.ones_like(param)
            trainer.step(1)
    assert coarse.tolist() == [1.0] * 3
    assert fine.tolist() == [torch.tensor(0.995, dtype=dtype).item()] * 3


def test_weights_may_move_in_memory(params, gradients, engine):
    twins = [Parameter(param.detach().clone()) for param in params]
    moving, resting = (Trainer(those, "adam", {"wd": 0.1}, engine=engine) for those in (params, twins))
    abandoned = []
    for step in range(5):
        for trainer, those in ((moving, params), (resting, twins)):
            trainer.zero_grad(set_to_none=step > 2)
            backward_with(those, gradients)
            trainer.step(1)
        for param in params:
            abandoned.append((param.data, param.data.clone()))
            param.data = param.data.clone()
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))
    assert all(torch.equal(old, copied) for old, copied in abandoned)  # nothing is written where they were


def test_a_parameter_cut_where_it_lies_is_refused(params, gradients, everything, engine):
    """Pruning by a view: nothing has moved, but the state and what lies behind the weight belong to the old size."""
    trainer = Trainer(params, "sgd", {"momentum": 0.9}, engine=engine)
    backward_with(params, gradients)
    trainer.step(1)
    trainer.zero_grad()
    whole = params[1].data
    params[1].data = whole[:4]
    assert params[1].data_ptr() == whole.data_ptr()
    gradients[1] = torch.ones_like(params[1])
    backward_with(params, gradients)
    before, old = everything(trainer, params), whole.clone()
    with pytest.raises(ValueError, match=r"'1' has shape \(4,\), its state \(7,\)"):
        trainer.step(1)
    assert everything(trainer, params) == before
    assert torch.equal(whole, old)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("multi_precision", [False, True])
def test_the_state_follows_a_model_to_another_device(multi_precision):
    layer = torch.nn.Linear(3, 2).half()
    twin = copy.deepcopy(layer)
    kwargs = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": multi_precision}
    moving, resting = Trainer(layer, "sgd", kwargs), Trainer(twin, "sgd", kwargs)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        layer.to(device)
        for trainer, those in ((moving, layer), (resting, twin)):
            for param in those.parameters():
                param.grad = torch.ones_like(param)
            trainer.step(1)
        assert all(tensor.device.type == device for state in moving._updater.states.values() for tensor in state)
    torch.testing.assert_close(layer.cpu().weight, twin.weight)


def test_lazy_parameters_are_trained_once_they_exist(device):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(1, bias=False)).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    assert "0 elements" in repr(trainer)
    for ignore in (False, True):
        with pytest.raises(
            ValueError, match="'0.weight', '0.bias', '1.weight' of params not initialized yet: run the model"
        ):
            trainer.step(1, ignore_stale_grad=ignore)
    net(torch.ones(2, 3, device=device))
    assert one_step_rates(trainer, list(net.parameters())) == pytest.approx([1, 1, 1], rel=1e-5)
    assert one_step_rates(trainer, list(net.parameters())) == pytest.approx([1.5, 1.5, 1.5], rel=1e-5)
    assert set(trainer.state_dict()["state"]) == {"0.weight", "0.bias", "1.weight"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("face", ["Trainer", "as_torch", "Updater"])
def test_a_weight_of_another_type_at_the_same_address_gets_a_master(face, device, engine, monkeypatch):
    """1e-4 is lost in a bfloat16 weight of 1, and 200 of them make 0.98 in its master."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight = Parameter(torch.ones(64, device=device))
    if face == "Trainer":
        trainer = Trainer([weight], "sgd", {"learning_rate": 1e-4, "multi_precision": True}, engine=engine)
        step = functools.partial(trainer.step, 1)
    elif face == "as_torch":
        step = tristep.optim.as_torch(tristep.optimizer.SGD)([weight], lr=1e-4, multi_precision=True).step
    else:
        updater = tristep.optimizer.get_updater(tristep.optimizer.SGD(1e-4, multi_precision=True))
        step = lambda: updater([0], [torch.ones(64, device=device)], [weight])  # noqa: E731
    weight.grad = torch.zeros(64, device=device)
    step()
    with torch.no_grad():
        weight.fill_(1.0)
    address, storage = weight.data_ptr(), weight.untyped_storage()
    narrow = torch.empty(0, dtype=torch.bfloat16, device=device).set_(storage, 0, (64,))
    weight.data = narrow.fill_(1.0)
    assert weight.data_ptr() == address
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        step()
    assert weight.float().mean().item() == pytest.approx(0.98, abs=2**-8)
