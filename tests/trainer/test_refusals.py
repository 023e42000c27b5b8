"""What is refused: the error, what its message says, that nothing has been changed, and that training goes on."""

import re

import pytest
import torch
from bad_trainer_input import OF_OPTIMIZERS, OF_TRAINERS, world_in_training
from refused_calls import (
    CREATED,
    OF_ENSEMBLES,
    OF_OTHERS,
    OF_PATTERNS,
    OF_TORCH,
    several_layers,
)

from tristep import Trainer, lr_scheduler
from tristep.trainer.optimizer import Optimizer, create


@pytest.mark.parametrize("bad", [*OF_TRAINERS, *OF_OPTIMIZERS], ids=lambda bad: re.sub(r"\W+", " ", bad.says[0])[:40])
def test_a_mistake_in_a_training_changes_nothing(bad, everything, tmp_path):
    """The next step, if nothing has led up to the mistake, is that of a training without it."""
    torch.manual_seed(1)
    world = world_in_training(tmp_path)
    if bad.before is not None:
        bad.before(world)
    trainer, params = world.trainer, list(world.params.values())
    before, multipliers = everything(trainer, params), dict(trainer.optimizer.param_dict)
    with pytest.raises(bad.error) as caught:
        bad.do(world)
    assert caught.type is bad.error
    for words in bad.says:
        assert words in str(caught.value)
    assert everything(trainer, params) == before
    assert trainer.optimizer.param_dict == multipliers
    assert world.schedule == lr_scheduler.FactorScheduler(2, base_lr=0.1)
    if bad.before is None:
        torch.manual_seed(1)
        other = world_in_training(tmp_path)
        for each in (world, other):
            each.trainer.step(2)
        assert all(map(torch.equal, params, other.params.values()))


def _rows(table):
    """One case for each row, named by its place and by the beginning of its message."""
    names = (re.sub(r"\W+", " ", row[-1])[:40] for row in table)
    return [pytest.param(*row, id=f"{number} {name}") for number, (row, name) in enumerate(zip(table, names, strict=True))]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), _rows(CREATED))
def test_an_optimizer_is_not_made(name, arguments, error, message):
    with pytest.raises(error, match=message):
        create(name, **arguments)


@pytest.mark.parametrize(("call", "error", "message"), _rows([*OF_TORCH, *OF_ENSEMBLES, *OF_OTHERS]))
def test_a_call_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("entries", "error", "message"), _rows(OF_PATTERNS))
def test_patterns_are_refused(entries, error, message):
    with pytest.raises(error, match=message):
        Trainer(several_layers(), entries)


def test_sparse_gradients_reach_optimizers_in_mxnets_form():
    """Their update may know what to do with them."""

    class SparseSGD(Optimizer):
        def create_state(self, index, weight):
            return None

        def update(self, index, weight, grad, state):
            self._update_count(index)
            weight.add_(grad, alpha=-self._get_lr(index) * self.rescale_grad)

    layer = torch.nn.Embedding(4, 2, sparse=True)
    before = layer.weight.detach().clone()
    trainer = Trainer(layer, SparseSGD(learning_rate=1.0))
    layer(torch.tensor([1, 3, 3])).sum().backward()
    assert layer.weight.grad.is_sparse
    trainer.step(2)
    moved = torch.tensor([0.0, 0.5, 0.0, 1.0])[:, None].expand(4, 2)
    torch.testing.assert_close(layer.weight.detach(), before - moved)
