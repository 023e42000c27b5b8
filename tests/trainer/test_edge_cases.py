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
    with pytest.raises(
        ValueError, match="'0' and '1' have one gradient in one place in memory, which zero_grads would clear"
    ):
        trainer.step(1)
    assert all((param == 1).all() for param in params)
    assert (params[0].grad == 1).all()


@pytest.mark.sample(6)
@pytest.mark.sample(1, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb", "muon", "prodigy", "adafactor"])
def test_a_default_device_does_not_matter(optimizer, engine, device):
    results = []
    for default in (None, "meta"):
        net = torch.nn.Linear(3, 2).to(device)
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(0.5)
        trainer = Trainer(net, optimizer, engine=engine)
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        torch.set_default_device(default)
        try:
            trainer.step(1)
        finally:
            torch.set_default_device(None)
        results.append([param.detach().clone() for param in net.parameters()])
    assert all(map(torch.equal, *results))


def test_a_forked_process_gets_threads_of_its_own(monkeypatch):
    """The first step with several threads may be in the child, which has none of those that torch has started before."""
    threads = pytest.importorskip("tristep.kernels.backends.cpu.threads")
    asked = []
    monkeypatch.setattr(threads, "openmp", lambda: asked.append(1))
    monkeypatch.setattr(threads, "forked", [True])
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, engine="cpu")
    weight.grad = torch.ones(1 << 20)
    trainer.step(1)
    assert not asked
    assert (weight == 0).all()
