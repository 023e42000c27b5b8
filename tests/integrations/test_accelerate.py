"""tristep.optim in Accelerate: short trainings on the CPU against torch.optim's."""

import pytest
import torch

import tristep

LIBRARIES = [torch.optim, tristep.optim]


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def _loader():
    torch.manual_seed(1)
    x = torch.randn(24, 4)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :2] * 2 - x[:, 2:]), batch_size=4)


@pytest.fixture
def accelerate():
    module = pytest.importorskip("accelerate", reason="not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield module
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _accelerated(accelerate, library, epochs, load=None, save=None):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _net()
    optimizer = library.Adam(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, _loader(), scheduler)
    if load is not None:
        accelerator.load_state(load)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    return accelerator.unwrap_model(net, keep_torch_compile=False)


def test_accelerate_trains_and_resumes(accelerate, tmp_path):
    theirs, ours = (_accelerated(accelerate, library, 4) for library in LIBRARIES)
    assert not torch.equal(ours[0].weight, _net()[0].weight)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    resumed = {}
    for started_by in LIBRARIES:
        _accelerated(accelerate, started_by, 2, save=tmp_path / started_by.__name__)
        resumed[started_by] = _accelerated(accelerate, tristep.optim, 2, load=tmp_path / started_by.__name__)
    torch.testing.assert_close(resumed[torch.optim].state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, ours.parameters(), resumed[tristep.optim].parameters()))
