"""What users may get wrong with a trainer and its optimizer, as tables, and the model that they do it to."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn import Parameter

from tristep import StaleGradientError, Trainer, lr_scheduler
from tristep.kvstore import LocalStore
from tristep.trainer.optimizer import Adam


class Bad(NamedTuple):
    """One mistake.

    Attributes:
        do: makes it, in a world as `world_in_training` makes it.
        error: the type that it raises.
        says: what the message contains: the argument, what came and what is allowed.
        before: what leads up to it.
    """

    do: object
    error: type
    says: tuple
    before: object


def bad(do, error, *says, before=None):
    return Bad(do, error, says, before)


def world_in_training(tmp_path):
    """A model in training: a trainer after one step, with gradients for the next."""
    params = {
        "embedding": Parameter(torch.randn(4, 2)),
        "weight": Parameter(torch.randn(2, 3).half()),
        "bias": Parameter(torch.randn(3)),
    }
    params["bias"].lr_mult = 0.5
    instance, schedule = Adam(beta1=0.8, multi_precision=True), lr_scheduler.FactorScheduler(2, base_lr=0.1)
    instance.lr_scheduler = schedule
    world = SimpleNamespace(params=params, instance=instance, schedule=schedule, path=tmp_path / "file")
    world.trainer = Trainer(params, instance)
    for _ in range(2):
        if world.params["bias"].grad is not None:
            world.trainer.step(2)
        for param in params.values():
            param.grad = torch.randn_like(param)
    return world


def new_trainer(optimizer="sgd", optimizer_params=None, **kwargs):
    """Make another trainer of the same parameters."""
    return lambda world: Trainer(world.params, optimizer, optimizer_params, **kwargs)


def trainer_of(make_params):
    """Make a trainer of other parameters; those of the world are at hand."""
    return lambda world: Trainer(make_params(world.params), "sgd")


def sgd(**arguments):
    return new_trainer("sgd", arguments)


def step_with(batch_size):
    return lambda world: world.trainer.step(batch_size)


def schedule(function):
    return lambda world: setattr(world.instance, "lr_scheduler", function)


def stale_bias(world):
    world.trainer.step(2)
    world.params["weight"].grad = torch.randn(2, 3).half()
    world.params["embedding"].grad = torch.randn(4, 2)


def missing_bias(world):
    world.params["bias"].grad = None


def sparse_gradient(world):
    weight = world.params["embedding"]
    weight.grad = None
    torch.nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse


def write_file(content):
    return lambda world: world.path.write_bytes(content)


def load_states(world):
    world.trainer.load_states(world.path)


def used_up(params):
    generator = iter(params.values())
    list(generator)
    return generator


class AddingStore(LocalStore):
    @classmethod
    def is_capable(cls, capability):
        return False


STORES = "'local', 'device', 'nccl', 'local_update_cpu'"

OF_TRAINERS = [
    # parameters
    bad(trainer_of(lambda params: []), ValueError, "params is empty", "nothing to train"),
    bad(trainer_of(used_up), ValueError, "params is empty", "a generator used up"),
    bad(
        trainer_of(lambda params: [("a", params["bias"]), ("a", params["embedding"])]),
        ValueError,
        "params: the names a stand for several parameters",
    ),
    bad(
        trainer_of(lambda params: [{"params": [params["bias"]], "lr": 0.1}]),
        ValueError,
        "params[0] has the key 'lr'",
        "'params', 'lr_mult', 'wd_mult'",
        "relative to the optimizer's learning_rate",
    ),
    bad(
        trainer_of(
            lambda params: [{"params": [params["bias"]], "lr_mult": 2.0}, {"params": [params["weight"]], "wd_mult": -1}]
        ),
        ValueError,
        "params[1]['wd_mult']=-1",
        "must be finite and 0 or more",
    ),
    bad(
        trainer_of(lambda params: [Parameter(torch.eye(3).to_sparse())]),
        TypeError,
        "params: '0' is sparse (torch.sparse_coo)",
        "must be dense",
    ),
    bad(
        trainer_of(lambda params: [params["bias"], Parameter(torch.ones(2, device="meta"))]),
        ValueError,
        "params are on different devices ('0' on cpu, '1' on meta)",
        "move the model to one device",
    ),
    bad(
        lambda world: Trainer([{"params": [world.params["weight"]], "lr_mult": 3.0}], "sgd", {"momentum": 2}),
        ValueError,
        "momentum=2",
        "less than 1",
    ),
    # stores
    bad(new_trainer(update_on_kvstore=True), ValueError, "update_on_kvstore=True with kvstore='device'", "leave it out"),
    # steps
    bad(step_with(0), ValueError, "batch_size=0", "must be finite and greater than 0"),
    bad(step_with(10**400), ValueError, "batch_size is an integer of 1,329 bits", "must be finite and greater than 0"),
    bad(
        step_with(2),
        StaleGradientError,
        "no fresh gradient since the last step for 'bias': call backward()",
        "ignore_stale_grad=True",
        before=stale_bias,
    ),
    bad(
        step_with(2),
        StaleGradientError,
        "no fresh gradient since the last step for 'bias' (no gradient): call backward()",
        "ignore_stale_grad=True",
        before=missing_bias,
    ),
    bad(
        lambda world: Trainer(world.params, "adagrad", {"wd": 0.1}).step(2),
        ValueError,
        "wd=0.1 for 'embedding', whose gradient is sparse",
        "use sparse=False in the layer",
        before=sparse_gradient,
    ),
    # files
    bad(load_states, FileNotFoundError, "fname='", "file'", "there is no such file"),
    bad(load_states, ValueError, "fname='", "file'", "not a state file of tristep", before=write_file(b"")),
]

OF_OPTIMIZERS = [
    # names
    bad(new_trainer(kvstore="devise"), ValueError, "kvstore='devise'", STORES, "Did you mean 'device' or 'dist'?"),
    # hyper-parameters
    bad(
        sgd(learning_rat=0.1),
        TypeError,
        "SGD has no argument 'learning_rat' (=0.1). Did you mean 'learning_rate'",
        "There are 'learning_rate', 'momentum', 'lazy_update'",
    ),
    bad(
        lambda world: Trainer({"bias": world.params["bias"]}, "groupadagrad").step(1),
        ValueError,
        "'bias': GroupAdaGrad updates matrices",
        "shape (3,)",
    ),
    bad(
        lambda world: Trainer(world.params, world.instance, {"beta1": 0.5}),
        ValueError,
        "optimizer_params={'beta1': 0.5}",
        "give them to Adam(...)",
        "optimizer='adam'",
    ),
    # rates
    bad(
        lambda world: world.trainer.set_learning_rate(0.2),
        UserWarning,
        "decided by FactorScheduler(step=2",
        "cannot be set to 0.2",
        "lr_scheduler = None first",
    ),
    bad(
        lambda world: world.trainer.set_learning_rate(-1),
        ValueError,
        "lr=-1",
        "must be finite and 0 or more",
        before=schedule(None),
    ),
]
