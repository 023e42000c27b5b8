"""The Trainer: which gradients were written since the last step."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from trainer_cases import backward_with, fails_and_changes_nothing, reach_both, values_of

from tristep import StaleGradientError, Trainer, replicate


def test_the_error_is_gluons_and_a_runtime_error():
    assert issubclass(StaleGradientError, UserWarning)
    assert issubclass(StaleGradientError, RuntimeError)


def test_after_a_refused_step_training_goes_on_as_if_it_had_not_been(params, engine):
    twins = [Parameter(param.detach().clone()) for param in params]
    one, other = (Trainer(those, "adam", {"wd": 0.1}, engine=engine) for those in (params, twins))
    for step in range(4):
        gradients = [torch.randn_like(param) for param in params]
        for trainer, those in ((one, params), (other, twins)):
            trainer.zero_grad(set_to_none=step % 2 == 0)
            if trainer is one:
                with pytest.raises(StaleGradientError):
                    trainer.step(100)
                backward_with(those[:1], gradients[:1])
                with pytest.raises(StaleGradientError):
                    trainer.step(100)
                backward_with(those[1:], gradients[1:])
            else:
                backward_with(those, gradients)
            trainer.step(2)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_a_refused_first_step_takes_no_copies_of_weights(device, engine):
    """A master copy from then would undo what happens to the weight until the first real step."""
    weight = Parameter(torch.ones(4, device=device, dtype=torch.float16))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0, "multi_precision": True}, engine=engine)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    with torch.no_grad():
        weight.fill_(3.0)
    weight.grad = torch.ones_like(weight)
    trainer.step(1)
    assert weight.tolist() == [2.0] * 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_forgetting_gradients_does_not_make_them_fresh(net, trainer, everything, set_to_none):
    for _ in range(2):
        reach_both(net)
        trainer.step(1)
        trainer.zero_grad(set_to_none=set_to_none)
        assert all(param.grad is None if set_to_none else not param.grad.any() for param in net.parameters())
        fails_and_changes_nothing(trainer, net.parameters(), everything, "'head.bias'")


def test_a_fresh_gradient_that_is_zeroed_stays_fresh(net, trainer):
    reach_both(net)
    trainer.zero_grad(set_to_none=False)
    before = net["body"].bias.detach().clone()
    trainer.step(1)
    assert torch.allclose(net["body"].bias, before * (1 - 0.1 * 0.1))  # only the decay acts


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch cannot add up in another type")
@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_of_16_bits_may_add_up_in_float32(in_backward, engine, device):
    """512 of them: in bfloat16 the sum would stay at 2, where 2 + 2^-7 is a tie that goes down."""
    weight = Parameter(torch.ones(5, device=device, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    trainer = Trainer([weight], "sgd", {"learning_rate": 0.125}, engine=engine)
    for _ in range(511):
        (weight * 2**-7).sum().backward()
    assert weight.grad.dtype == torch.float32
    if in_backward:
        with trainer.step_in_backward(1):
            (weight * 2**-7).sum().backward()
    else:
        (weight * 2**-7).sum().backward()
        trainer.step(1)
    assert weight.tolist() == [0.5] * 5


def test_new_gradients_are_fresh_even_where_the_old_ones_lay(params, gradients):
    """Freed memory and Python's ids are used again, so that a new gradient may look like the old one."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before, seen = values_of(*params), set()
    for _ in range(50):
        trainer.zero_grad()
        backward_with(params, gradients)
        seen.add((id(params[0].grad), params[0].grad.data_ptr()))
        trainer.step(50)
    assert len(seen) < 50  # else nothing was shown
    for weight, old, gradient in zip(values_of(*params), before, values_of(*gradients), strict=True):
        np.testing.assert_allclose(weight, old - gradient, rtol=1e-4, atol=1e-5)


AFTER_NEW_GRADIENTS = {
    "all used before": lambda params, used: [setattr(param, "grad", old) for param, old in zip(params, used, strict=True)],
    "one used before": lambda params, used: setattr(params[1], "grad", used[1]),
    "one missing": lambda params, used: setattr(params[2], "grad", None),
    "the same ones": lambda params, used: None,
}


@pytest.mark.parametrize("what", AFTER_NEW_GRADIENTS)
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_stale_gradients_after_several_new_ones(params, gradients, everything, what, rounds):
    """The quick way for new gradients keeps less in mind of them; it must not take a stale one, whatever came before."""
    trainer = Trainer(params, "adam")
    for _ in range(rounds):
        trainer.zero_grad()
        backward_with(params, gradients)
        trainer.step(1)
    used = [param.grad for param in params]
    if what != "the same ones":
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
    AFTER_NEW_GRADIENTS[what](params, used)
    before = everything(trainer, params)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    assert everything(trainer, params) == before
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {rounds + 1}


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_gradient_written_by_hand_is_fresh(params, gradients, steps_before):
    """Gluon only looks at backward; here whatever writes to the gradient counts."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    for _ in range(steps_before):
        backward_with(params, gradients)
        trainer.step(1)
    before = values_of(*params)
    for param in params:
        param.grad = torch.ones_like(param)
    trainer.step(1)
    for param in params:
        param.grad.add_(1.0)
    trainer.step(1)
    for param in params:
        param.grad.data = torch.full_like(param, 4.0)  # another memory in the same tensor
        param.grad.mul_(1.0)
    trainer.step(1)
    for weight, old in zip(values_of(*params), before, strict=True):
        np.testing.assert_allclose(weight, old - 1 - 2 - 4, rtol=1e-5, atol=1e-6)


def test_torchs_zeroing_counts_as_writing(net, trainer):
    """net.zero_grad(set_to_none=False) cannot be told from a gradient that somebody set; Trainer.zero_grad can."""
    reach_both(net)
    trainer.step(1)
    net.zero_grad(set_to_none=False)
    trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {2}


@pytest.mark.parametrize("between", ["nothing", "clipping", "a second backward pass", "allreduce_grads and update"])
def test_the_step_that_uses_added_gradients_is_warned(between, recwarn):
    net = torch.nn.Linear(2, 1)
    nets = replicate(net, ["cpu", "cpu"]) if between == "allreduce_grads and update" else [net]
    trainer = Trainer(nets if len(nets) > 1 else net, "sgd", update_on_kvstore=False if len(nets) > 1 else None)

    def backward():
        for each in nets:
            each(torch.ones(1, 2)).sum().backward()

    backward()
    trainer.step(1)
    backward()
    if between == "clipping":
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    elif between == "a second backward pass":
        backward()
    assert not recwarn.list
    before = net.weight.detach().clone()
    warnings.simplefilter("error")
    use = trainer.allreduce_grads if between == "allreduce_grads and update" else lambda: trainer.step(1)
    with pytest.raises(UserWarning, match=r"this step uses gradients that backward\(\) has added"):
        use()
    assert torch.equal(net.weight, before)
    use()  # it is said once
