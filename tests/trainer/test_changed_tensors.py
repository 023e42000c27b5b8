"""What may happen to one of a Trainer's tensors between steps: training goes on as with torch.optim.SGD, or is refused."""

import pytest
import torch

import tristep
from tristep import StaleGradientError

pytestmark = pytest.mark.usefixtures("passes")
N, AT = 5, 3


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


def _inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


def _turned(tensor):
    return tensor.t().contiguous().t()


def _negative(tensor):
    return torch.view_as_complex(torch.stack([tensor * 0, -tensor], dim=-1)).conj().imag


def _replaced(make):
    def change(weight):
        weight.grad = make(weight.grad)

    return change


def _moved(of, make):
    def change(weight):
        tensor = of(weight)
        tensor.data = make(tensor.detach())

    return change


def _gradient(weight):
    return weight.grad


def _weight(weight):
    return weight


# What is done to a weight with a fresh gradient.
CHANGES = {
    "nothing": lambda weight: None,
    "another gradient": _replaced(torch.clone),
    "another gradient in other order": _replaced(_turned),
    "another gradient with gaps": _replaced(lambda grad: torch.stack([grad, grad], dim=-1)[..., 0]),
    "another gradient with the negative bit": _replaced(_negative),
    "another gradient of a subclass": _replaced(lambda grad: grad.as_subclass(Tagged)),
    "another gradient that is sparse": _replaced(torch.Tensor.to_sparse),
    "the gradient in other memory": _moved(_gradient, torch.clone),
    "the gradient in other order": _moved(_gradient, _turned),
    "the weight in other memory": _moved(_weight, torch.clone),
    "the weight in other order": _moved(_weight, _turned),
}
REFUSALS = {
    "no gradient": (_replaced(lambda grad: None), StaleGradientError, "no fresh gradient since the last step for '3'"),
    "the gradient of the last step": (None, StaleGradientError, "no fresh gradient since the last step for '3'"),
    "an inference gradient": (_replaced(_inference), ValueError, "was made under torch.inference_mode"),
}


def _weights():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 3, generator=generator)) for _ in range(N)]


def _write(weights, number, new=False):
    for i, weight in enumerate(weights):
        values = torch.randn(3, 3, generator=torch.Generator().manual_seed(100 * number + i))
        if weight.grad is None or new:
            weight.grad = values
        else:
            weight.grad.copy_(values)


def _trainer(weights, engine):
    return tristep.Trainer(weights, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, engine=engine)


@pytest.mark.parametrize("change", CHANGES)
def test_training_goes_on_as_with_torch(change, engine):
    ours, theirs = _weights(), _weights()
    trainer, optimizer = _trainer(ours, engine), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for number in range(6):
        for weights, step in ((ours, lambda: trainer.step(1)), (theirs, optimizer.step)):
            _write(weights, number, new=number == 5)
            if number == 3:
                CHANGES[change](weights[AT])
            step()
            if number == 3:
                weights[AT].grad = None  # which may be sparse
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


def test_a_frozen_weight_is_left_alone_until_it_is_trained_again(engine):
    weights = _weights()
    trainer = _trainer(weights, engine)
    for number in range(6):
        frozen = number == 3
        weights[AT].requires_grad_(not frozen)
        before = [weight.detach().clone() for weight in weights]
        _write(weights, number)
        trainer.step(1)
        changed = [not torch.equal(a, b) for a, b in zip(weights, before, strict=True)]
        assert changed == [i != AT or not frozen for i in range(N)]


@pytest.mark.parametrize("change", REFUSALS)
def test_a_step_is_refused(change, engine):
    make, error, message = REFUSALS[change]
    weights = _weights()
    trainer = _trainer(weights, engine)
    for number in range(3):
        _write(weights, number)
        trainer.step(1)
    _write(weights if make else [*weights[:AT], *weights[AT + 1 :]], 3)
    if make:
        make(weights[AT])
    before = [weight.detach().clone() for weight in weights]
    with pytest.raises(error, match=message):
        trainer.step(1)
    assert all(map(torch.equal, weights, before))
