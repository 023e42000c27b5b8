"""Weights, gradients and states whose shape or memory changes in place: a step is refused by name, or right."""

import pytest
import torch

import tristep

pytestmark = pytest.mark.usefixtures("passes")
N, AT = 5, 3


def _as_leaf(change):
    """Do to a tensor what torch refuses for one that requires grad."""

    def changed(tensor):
        wanted = tensor.requires_grad
        change(tensor.requires_grad_(False))
        tensor.requires_grad_(wanted)

    return changed


def _data(make):
    return lambda tensor: setattr(tensor, "data", make(tensor.detach()))


CHANGES = {
    "fewer elements": _as_leaf(lambda tensor: tensor.resize_(2)),
    "more elements": _as_leaf(lambda tensor: tensor.resize_(64)),
    "a part by data": _data(lambda tensor: tensor[:2]),
    "a longer one by data": _data(lambda tensor: torch.zeros(64)),
    "a part by set_": _as_leaf(lambda tensor: tensor.set_(tensor.untyped_storage(), tensor.storage_offset(), (2,), (1,))),
    "a part by as_strided_": _as_leaf(lambda tensor: tensor.as_strided_((2,), (1,))),
    "a smaller storage": lambda tensor: tensor.untyped_storage().resize_(8),
    "a freed storage": lambda tensor: tensor.untyped_storage().resize_(0),
}
HARMLESS = {"a larger storage": lambda tensor: tensor.untyped_storage().resize_(4096)}


class _Training:
    def __init__(self, api, shape, engine, monkeypatch):
        self.weights = [torch.nn.Parameter(torch.randn(shape)) for _ in range(N)]
        if api == "trainer":
            trainer = tristep.Trainer(self.weights, "adam", engine=engine)
            self.step, self.state = lambda: trainer.step(1), lambda: trainer.replicas[0].updater.state[AT]["mean"]
        else:
            monkeypatch.setenv("TRISTEP_ENGINE", engine)
            optimizer = tristep.optim.Adam(self.weights)
            self.step, self.state = optimizer.step, lambda: optimizer.state[self.weights[AT]]["exp_avg"]
        self.judged = [torch.nn.Parameter(weight.detach().clone()) for weight in self.weights]
        self.judge = torch.optim.Adam(self.judged)
        for _ in range(3):
            self.write()
            self.step()
            self.judge.step()

    def write(self):
        for pair in zip(self.weights, self.judged, strict=True):
            gradient = torch.randn(pair[0].shape)
            for weight in pair:
                if weight.grad is None:
                    weight.grad = gradient.clone()
                else:
                    weight.grad.copy_(gradient)

    def change(self, which, change):
        """Write all gradients, and change one tensor, with another gradient for one weight if `which` is "others"."""
        weight = self.weights[AT]
        self.write()
        if which == "gradient among new ones":
            self.weights[0].grad = self.weights[0].grad.clone()
        change({"weight": weight, "state": self.state()}.get(which, weight.grad))


@pytest.mark.cover("api", "which", "change")
@pytest.mark.parametrize("shape", [(8,), (4, 2)])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["weight", "gradient", "gradient among new ones", "state"])
@pytest.mark.parametrize("api", ["trainer", "optim"])
def test_a_smaller_or_larger_tensor_is_refused(api, which, change, shape, engine, monkeypatch):
    training = _Training(api, shape, engine, monkeypatch)
    training.change(which, CHANGES[change])
    before = [weight.detach().clone() for weight in training.weights if weight is not training.weights[AT]]
    if api == "trainer" and which == "state" and "storage" not in change and change != "more elements":
        training.step()  # the step has the states' memory, which they still share
        training.judge.step()
        torch.testing.assert_close(training.weights, training.judged, rtol=1e-5, atol=1e-6)
        return
    name = "'[0-4]'" if api == "trainer" else r"params\[3\]"
    with pytest.raises(ValueError, match=name):  # a Trainer's states have one storage
        training.step()
    assert all(map(torch.equal, [weight for weight in training.weights if weight is not training.weights[AT]], before))


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("which", ["weight", "gradient", "gradient among new ones", "state"])
@pytest.mark.parametrize("api", ["trainer", "optim"])
def test_training_goes_on_with_more_memory(api, which, change, engine, monkeypatch):
    training = _Training(api, (4, 2), engine, monkeypatch)
    training.change(which, HARMLESS[change])
    for _ in range(2):
        training.step()
        training.judge.step()
        training.write()
    torch.testing.assert_close(training.weights, training.judged, rtol=1e-5, atol=1e-6)
