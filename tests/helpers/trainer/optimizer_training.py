"""Optimizers driven by hand, for tests."""

import torch

from tristep import Trainer
from tristep.trainer.optimizer import Optimizer


def random_tensor(shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype)


def train_by_hand(params, optimizer, gradients, engine=None):
    trainer = Trainer(params, optimizer, engine=engine)
    for row in gradients:
        for param, gradient in zip(params, row, strict=True):
            param.grad = gradient.clone()
        trainer.step(1)
    return trainer


SHAPES = [(3, 5), (), (70,), (0, 2)]


class ByHand(Optimizer):
    """Plain descent, in torch's operations."""

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight -= self._get_lr(index) * self.rescale_grad * grad


class PlainAdam(Optimizer):
    """Kingma and Ba's algorithm as its page has it, in MXNet's form."""

    def __init__(self, beta1=0.9, beta2=0.999, epsilon=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def create_state(self, index, weight):
        assert not torch.is_grad_enabled()
        return torch.zeros_like(weight), torch.zeros_like(weight)

    def update(self, index, weight, grad, state):
        assert not torch.is_grad_enabled()
        self._update_count(index)
        t = self.counts[index]
        mean, var = state
        grad = grad * self.rescale_grad
        if self.clip_gradient is not None:
            grad = grad.clamp(-self.clip_gradient, self.clip_gradient)
        grad = grad + self._get_wd(index) * weight
        mean.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
        var.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        root = (var / (1 - self.beta2**t)).sqrt() + self.epsilon
        weight.sub_(self._get_lr(index) * mean / (1 - self.beta1**t) / root)
