"""The Trainer: a step, and copies of optimizers."""

import copy
import re

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from trainer_cases import CLOSE, backward_with, values_of

import tristep
from tristep import Trainer


def test_the_gradient_is_divided_by_the_batch_size_of_its_step(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 0.3, "rescale_grad": 2.0})
    for batch_size in (1, 4, 0.5, np.int64(3), np.float32(2.5), torch.tensor(8)):
        before = values_of(*params)
        trainer.zero_grad()
        backward_with(params, gradients)
        trainer.step(batch_size)
        assert trainer.optimizer.rescale_grad == pytest.approx(2.0 / float(batch_size))
        for weight, old, gradient in zip(params, before, values_of(*gradients), strict=True):
            np.testing.assert_allclose(values_of(weight)[0], old - 0.3 * 2.0 / float(batch_size) * gradient, **CLOSE)


def test_backward_through_a_graph_from_before_the_step_is_refused(params, engine):
    """As with torch.optim: autograd must notice that a weight has changed."""
    loss = sum(param.square().sum() for param in params)
    loss.backward(retain_graph=True)
    Trainer(params, "sgd", engine=engine).step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch looks at it
@pytest.mark.parametrize("what", ["training function", "step"])
def test_where_torch_compiles_a_trainer_steps_as_it_does_elsewhere(what):
    """As torch.optim does, whose weights are the judge."""
    ours, theirs = (torch.nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    trainer = Trainer(ours, "adam", {"learning_rate": 0.02})
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.02)
    step = torch.compile(trainer.step, backend="eager") if what == "step" else trainer.step

    def train(x):
        trainer.zero_grad()
        loss = ours(x).square().sum()
        loss.backward()
        step(1)
        return loss

    if what == "training function":
        train = torch.compile(train, backend="eager")
    for k in range(4):
        x = torch.full((2, 3), 0.5 + k)
        train(x)
        optimizer.zero_grad()
        theirs(x).square().sum().backward()
        optimizer.step()
    for weight, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)


def test_an_optimizer_belongs_to_the_last_trainer_that_was_given_it():
    """MXNet takes one for two without a word, and both count on it."""
    optimizer = tristep.optimizer.Adam()
    first, second = (torch.nn.Linear(2, 1) for _ in range(2))
    one, two = Trainer(first, optimizer), Trainer(second, optimizer)
    for net in (first, second):
        net(torch.ones(1, 2)).sum().backward()
    before = first.weight.detach().clone()
    for call in (one.step, one.update, lambda size, trainer=one: trainer.step_in_backward(size).__enter__()):
        with pytest.raises(RuntimeError, match="the Adam of this Trainer has been given to another Trainer since"):
            call(1)
    assert torch.equal(first.weight, before)
    two.step(1)
    assert optimizer.num_update == 1
    with pytest.warns(UserWarning, match="Adam has counted 1 updates for another Trainer, and counts on"):
        Trainer(first, optimizer)


NO_ATTRIBUTES = {
    "lr": "call trainer.set_learning_rate",
    "learning_rate": "call trainer.set_learning_rate",
    "momentum": "its optimizer has it, trainer.optimizer.momentum",
    "weight_decay": "its optimizer has it, trainer.optimizer.wd",
    "lr_scheduler": "its optimizer has it, trainer.optimizer.lr_scheduler",
}


def test_settings_of_the_optimizer_are_no_attributes_of_its_trainer():
    trainer = Trainer([Parameter(torch.ones(2))], "sgd", {"momentum": 0.5})
    several = Trainer([Parameter(torch.ones(2))], [("*", "sgd")])
    for name, words in NO_ATTRIBUTES.items():
        for each in (trainer, several):
            before = dict(vars(each))
            expected = words
            if each is several and name in ("momentum", "weight_decay"):
                expected = words.replace("trainer.optimizer.", "trainer.optimizer.optimizers[0].")
            with pytest.raises(AttributeError, match=re.escape(f"{name} of a Trainer cannot be set: {expected}")):
                setattr(each, name, 0.5)
            assert vars(each) == before


def test_a_trainer_of_ones_own_has_attributes_of_its_own():
    class Logging(Trainer):
        lr = None  # its own meaning

        def __init__(self, *args, **kwargs):
            self.losses = []
            super().__init__(*args, **kwargs)
            self.lr, self.epoch = 3, 0

        def step(self, *args):
            super().step(*args)
            self.epoch += 1

    weight = Parameter(torch.ones(2))
    trainer = Logging([weight], "sgd", {"learning_rate": 0.25})
    weight.grad = torch.ones(2)
    trainer.step(1)
    copied = copy.deepcopy(trainer)
    assert (copied.lr, copied.epoch, copied.losses, weight.tolist()) == (3, 1, [], [0.75, 0.75])
