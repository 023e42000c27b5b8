"""What users may get wrong: the error, what its message says, and that nothing has been changed."""

import pytest
import torch
from bad_optimizer_input import OF_OPTIMIZERS
from bad_trainer_input import OF_TRAINERS, world_in_training
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler
from tristep.trainer.optimizer import Optimizer, create, registered

BAD = [*OF_TRAINERS, *OF_OPTIMIZERS]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_a_mistake_is_named_and_changes_nothing(bad, everything, tmp_path):
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


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.before is None], ids=lambda bad: bad.what)
def test_after_a_mistake_training_goes_on_as_if_it_had_not_been_made(bad, tmp_path):
    ends = []
    for mistaken in (True, False):
        torch.manual_seed(1)
        world = world_in_training(tmp_path)
        if mistaken:
            with pytest.raises(bad.error):
                bad.do(world)
        world.trainer.step(2)
        ends.append(list(world.params.values()))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("kvstore", [None, "local", "device", "nccl", "Device"])
def test_stores_of_one_process_are_accepted(kvstore):
    weight = Parameter(torch.ones(2))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kvstore, update_on_kvstore=False)
    weight.grad = torch.ones(2)
    trainer.step(1)
    assert weight.tolist() == [0.0, 0.0]


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


def test_every_optimizer_refuses_rates_and_decays_that_are_no_numbers():
    for name in registered():
        for argument in ("learning_rate", "wd"):
            with pytest.raises(TypeError, match=f"{argument}='1': must be a number, not str"):
                create(name, **{argument: "1"})
            with pytest.raises(ValueError, match=f"{argument}=-1: must be finite and (0 or more|greater than 0)"):
                create(name, **{argument: -1})
