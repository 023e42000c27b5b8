"""What users may get wrong with a trainer and its optimizer, as tables, and the model that they do it to."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import Parameter

from tristep import StaleGradientError, Trainer, lr_scheduler
from tristep.kvstore import LocalStore
from tristep.trainer.optimizer import SGD, Adam


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


NUMBERS = "must be a number, not {}"
FLOATS = "torch.float64, torch.float32, torch.float16, torch.bfloat16"
STORES = "'local', 'device', 'nccl', 'local_update_cpu'"

OF_TRAINERS = [
    # parameters
    bad(trainer_of(lambda params: []), ValueError, "params is empty", "nothing to train"),
    bad(trainer_of(lambda params: torch.nn.ReLU()), ValueError, "params is empty", "nothing to train"),
    bad(trainer_of(used_up), ValueError, "params is empty", "a generator used up"),
    bad(trainer_of(lambda params: params["bias"]), TypeError, "params must be a module, or a list", "got Parameter"),
    bad(trainer_of(lambda params: None), TypeError, "params must be a module, or a list", "got NoneType"),
    bad(
        trainer_of(lambda params: [params["bias"], torch.ones(3)]),
        TypeError,
        "params: '1' must be a torch.nn.Parameter, got Tensor",
        "wrap it in torch.nn.Parameter",
    ),
    bad(
        trainer_of(lambda params: [params["bias"], "weight"]), TypeError, "params: '1' must be a torch.nn.Parameter, got str"
    ),
    bad(
        trainer_of(lambda params: {"layer": torch.nn.Linear(1, 1)}),
        TypeError,
        "params: 'layer' must be a torch.nn.Parameter, got Linear",
    ),
    bad(trainer_of(lambda params: [(1, params["bias"])]), TypeError, "params: names must be strings, got 1 (int)"),
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
    bad(trainer_of(lambda params: [{"lr_mult": 0.1}]), ValueError, "params[0] has no 'params'", "a dict with 'params'"),
    bad(
        trainer_of(
            lambda params: [{"params": [params["bias"]], "lr_mult": 2.0}, {"params": [params["weight"]], "wd_mult": -1}]
        ),
        ValueError,
        "params[1]['wd_mult']=-1",
        "must be finite and 0 or more",
    ),
    bad(
        trainer_of(lambda params: [params["bias"], Parameter(torch.ones(2, dtype=torch.complex64))]),
        TypeError,
        "params: '1' is torch.complex64",
        "complex weights cannot be trained",
        FLOATS,
    ),
    bad(
        trainer_of(lambda params: [("codes", Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))]),
        TypeError,
        "params: 'codes' is torch.int64",
        "weights of this type cannot be trained",
        FLOATS,
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
    bad(new_trainer(update_on_kvstore="no"), TypeError, "update_on_kvstore='no'", "must be True or False"),
    bad(new_trainer(compression_params="2bit"), TypeError, "compression_params must be a dict, got str"),
    bad(
        new_trainer(compression_params={"type": "2bits"}),
        ValueError,
        "compression_params['type']='2bits'",
        "'1bit', '2bit'",
        "Did you mean '2bit'",
    ),
    bad(new_trainer(zero_grads=1), TypeError, "zero_grads=1: must be True or False"),
    # steps
    bad(step_with(0), ValueError, "batch_size=0", "must be finite and greater than 0"),
    bad(step_with(0.0), ValueError, "batch_size=0.0", "must be finite and greater than 0"),
    bad(step_with(-4), ValueError, "batch_size=-4", "must be finite and greater than 0"),
    bad(lambda world: world.trainer.step(2, "no"), TypeError, "ignore_stale_grad='no': must be True or False, not str"),
    bad(lambda world: world.trainer.step(2, np.True_), TypeError, "ignore_stale_grad="),
    bad(step_with(math.nan), ValueError, "batch_size=nan", "must be finite and greater than 0"),
    bad(step_with(math.inf), ValueError, "batch_size=inf", "must be finite and greater than 0"),
    bad(step_with("4"), TypeError, "batch_size='4'", NUMBERS.format("str")),
    bad(step_with(True), TypeError, "batch_size=True", NUMBERS.format("bool")),
    bad(step_with(np.True_), TypeError, "batch_size=", NUMBERS.format("bool")),
    bad(step_with(None), TypeError, "batch_size=None", NUMBERS.format("NoneType")),
    bad(step_with([4]), TypeError, "batch_size=[4]", NUMBERS.format("list")),
    bad(step_with(np.array([4.0])), TypeError, "batch_size=array", NUMBERS.format("ndarray")),
    bad(step_with(torch.ones(2)), TypeError, "batch_size=tensor", NUMBERS.format("Tensor")),
    bad(lambda world: world.trainer.update(-1), ValueError, "batch_size=-1", "greater than 0"),
    bad(
        lambda world: world.trainer.zero_grad(torch.ones(2)),
        TypeError,
        "set_to_none=tensor([1., 1.])",
        "must be True or False, not Tensor",
    ),
    bad(
        lambda world: world.trainer.zero_grad(list(world.params.values())),
        TypeError,
        "set_to_none=[Parameter",
        "must be True or False, not list",
    ),
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
        step_with(2),
        StaleGradientError,
        "'bias' (no gradient), 'embedding' (no gradient), 'weight' (no gradient)",
        before=lambda world: world.trainer.zero_grad(),
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
    bad(load_states, ValueError, "fname='", "file'", "not a state file of tristep", before=write_file(b"weights " * 99)),
    bad(lambda world: world.trainer.load_state_dict({}), ValueError, "format None", "reads format 1"),
]

OF_OPTIMIZERS = [
    # names
    bad(new_trainer(kvstore="devise"), ValueError, "kvstore='devise'", STORES, "Did you mean 'device' or 'dist'?"),
    bad(new_trainer(kvstore=3), TypeError, "kvstore=3", "must be None or a name", STORES),
    bad(new_trainer(kvstore=LocalStore), TypeError, "kvstore=<class ", "must be None or a name", "or a KVStore"),
    bad(
        new_trainer(kvstore=AddingStore(), update_on_kvstore=True),
        ValueError,
        "update_on_kvstore=True with kvstore=",
        "cannot hold an optimizer",
        "must be False or None",
    ),
    bad(
        new_trainer(kvstore="dist_async", update_on_kvstore=False),
        ValueError,
        "update_on_kvstore=False with kvstore='dist_async'",
        "leave it out",
    ),
    bad(
        lambda world: world.trainer.load_state_dict(world.trainer.state_dict() | {"residuals": {"w": {}}}),
        ValueError,
        "saved state: 'w' has residuals",
        "not among this trainer's parameters",
    ),
    bad(new_trainer(kvstore="dist_sync"), RuntimeError, "kvstore='dist_sync' needs several processes", "torchrun"),
    bad(sgd(lr_scheduler="cosine"), TypeError, "lr_scheduler='cosine'", "CosineScheduler(...)"),
    bad(new_trainer(engine="tritn"), ValueError, "engine='tritn'", "'triton', 'cpu', 'eager'", "Did you mean 'triton'?"),
    # hyper-parameters
    bad(
        sgd(learning_rat=0.1),
        TypeError,
        "SGD has no argument 'learning_rat' (=0.1). Did you mean 'learning_rate'",
        "There are 'learning_rate', 'momentum', 'lazy_update'",
    ),
    bad(new_trainer("adam", {"momentum": 0.9}), TypeError, "Adam has no argument 'momentum'"),
    bad(sgd(lr=0.1), TypeError, "SGD has no argument 'lr'", "Did you mean 'learning_rate', as in MXNet"),
    bad(sgd(weight_decay=0.1), TypeError, "SGD has no argument 'weight_decay'", "Did you mean 'wd', as in MXNet"),
    bad(sgd(learning_rate="0.1"), TypeError, "learning_rate='0.1'", NUMBERS.format("str")),
    bad(sgd(learning_rate=True), TypeError, "learning_rate=True", NUMBERS.format("bool")),
    bad(sgd(learning_rate=np.True_), TypeError, "learning_rate=", NUMBERS.format("bool")),
    bad(sgd(learning_rate=np.array([0.1])), TypeError, "learning_rate=array", NUMBERS.format("ndarray")),
    bad(sgd(learning_rate=torch.ones(2)), TypeError, "learning_rate=tensor", NUMBERS.format("Tensor")),
    bad(sgd(learning_rate=torch.ones(1)), TypeError, "learning_rate=tensor", NUMBERS.format("Tensor")),
    bad(sgd(learning_rate=1j), TypeError, "learning_rate=1j", NUMBERS.format("complex")),
    bad(sgd(learning_rate=-0.1), ValueError, "learning_rate=-0.1", "must be finite and 0 or more"),
    bad(sgd(learning_rate=math.nan), ValueError, "learning_rate=nan", "must be finite and 0 or more"),
    bad(sgd(learning_rate=math.inf), ValueError, "learning_rate=inf", "must be finite and 0 or more"),
    bad(sgd(learning_rate=10**400), ValueError, "learning_rate=1000", "must be finite and 0 or more"),
    bad(sgd(wd=-1), ValueError, "wd=-1", "must be finite and 0 or more"),
    bad(sgd(wd=[0.1]), TypeError, "wd=[0.1]", NUMBERS.format("list")),
    bad(sgd(momentum=None), TypeError, "momentum=None", NUMBERS.format("NoneType")),
    bad(sgd(momentum=1.0), ValueError, "momentum=1.0", "must be finite and 0 or more and less than 1"),
    bad(new_trainer("adam", {"beta1": 1.0}), ValueError, "beta1=1.0", "must be finite and 0 or more and less than 1"),
    bad(new_trainer("adamw", {"beta2": -0.1}), ValueError, "beta2=-0.1", "must be finite and 0 or more and less than 1"),
    bad(new_trainer("rmsprop", {"gamma1": 1.5}), ValueError, "gamma1=1.5", "must be finite and 0 or more and less than 1"),
    bad(new_trainer("adam", {"epsilon": -1e-8}), ValueError, "epsilon=-1e-08", "must be finite and 0 or more"),
    bad(new_trainer("groupadagrad", {"wd": 0.1}), ValueError, "wd=0.1", "no weight decay", "must be 0"),
    bad(new_trainer("groupadagrad", {"eps": -1}), ValueError, "eps=-1", "must be finite and 0 or more"),
    bad(
        lambda world: Trainer({"bias": world.params["bias"]}, "groupadagrad").step(1),
        ValueError,
        "'bias': GroupAdaGrad updates matrices",
        "shape (3,)",
    ),
    bad(new_trainer("adadelta", {"rho": 1}), ValueError, "rho=1", "must be finite and 0 or more and less than 1"),
    bad(new_trainer("adadelta", {"epsilon": 0}), ValueError, "epsilon=0", "must be finite and greater than 0"),
    bad(new_trainer("adamax", {"beta2": 1}), ValueError, "beta2=1", "0 or more and less than 1"),
    bad(new_trainer("adamax", {"epsilon": 1e-8}), TypeError, "Adamax has no argument 'epsilon'", "beta1"),
    bad(new_trainer("nadam", {"schedule_decay": -1}), ValueError, "schedule_decay=-1", "0 or more"),
    bad(new_trainer("adabelief", {"correct_bias": 1}), TypeError, "correct_bias=1", "True or False"),
    bad(new_trainer("sgld", {"seed": 0.5}), TypeError, "seed=0.5", "must be an integer, not float"),
    bad(new_trainer("sgld", {"seed": -1}), ValueError, "seed=-1", "must be 0 or more"),
    bad(new_trainer("dcasgd", {"lamda": -1}), ValueError, "lamda=-1", "must be finite and 0 or more"),
    bad(new_trainer("dcasgd", {"lambda": 1}), TypeError, "DCASGD has no argument 'lambda'", "Did you mean 'lamda'"),
    bad(new_trainer("ftrl", {"lamda1": -1}), ValueError, "lamda1=-1", "must be finite and 0 or more"),
    bad(new_trainer("ftrl", {"learning_rate": 0}), ValueError, "learning_rate=0", "greater than 0"),
    bad(new_trainer("ftml", {"learning_rate": 0}), ValueError, "learning_rate=0", "greater than 0"),
    bad(new_trainer("ftml", {"beta1": math.nan}), ValueError, "beta1=nan", "0 or more and less than 1"),
    bad(new_trainer("lars", {"eta": 0}), ValueError, "eta=0", "must be finite and greater than 0"),
    bad(new_trainer("lars", {"eps": "0"}), TypeError, "eps='0'", NUMBERS.format("str")),
    bad(new_trainer("lars", {"momentum_correction": "no"}), TypeError, "momentum_correction='no'"),
    bad(new_trainer("lamb", {"lower_bound": -1}), ValueError, "lower_bound=-1", "must be finite and 0 or more"),
    bad(new_trainer("lans", {"upper_bound": math.inf}), ValueError, "upper_bound=inf", "must be finite"),
    bad(new_trainer("lans", {"bias_correction": True}), TypeError, "LANS has no argument 'bias_correction'"),
    bad(new_trainer("lamb", {"bias_correction": None}), TypeError, "bias_correction=None", "True or False"),
    bad(
        new_trainer("lbsgd", {"warmup_strategy": "linaer"}),
        ValueError,
        "warmup_strategy='linaer'",
        "'linear', 'power2', 'sqrt', 'lars'",
        "Did you mean 'linear'",
    ),
    bad(new_trainer("lbsgd", {"batch_scale": 0}), ValueError, "batch_scale=0", "must be 1 or more"),
    bad(new_trainer("lbsgd", {"warmup_epochs": 0.5}), TypeError, "warmup_epochs=0.5", "must be an integer"),
    bad(new_trainer("lbsgd", {"updates_per_epoch": 0}), ValueError, "updates_per_epoch=0", "1 or more"),
    bad(new_trainer("lbsgd", {"momentum": 1.0}), ValueError, "momentum=1.0", "less than 1"),
    bad(sgd(clip_gradient="no"), TypeError, "clip_gradient='no'", NUMBERS.format("str")),
    bad(sgd(rescale_grad=math.inf), ValueError, "rescale_grad=inf", "must be finite"),
    bad(sgd(multi_precision=1), TypeError, "multi_precision=1", "must be True or False, not int"),
    bad(sgd(lazy_update="yes"), TypeError, "lazy_update='yes'", "must be True or False, not str"),
    bad(new_trainer("rmsprop", {"centered": "yes"}), TypeError, "centered='yes'", "must be True or False, not str"),
    bad(sgd(begin_num_update=1.5), TypeError, "begin_num_update=1.5", "must be an integer, not float"),
    bad(sgd(begin_num_update=-1), ValueError, "begin_num_update=-1", "must be 0 or more"),
    bad(sgd(param_idx2name=["a"]), TypeError, "param_idx2name must map indices to names, got list"),
    bad(
        lambda world: Trainer(world.params, world.instance, {"beta1": 0.5}),
        ValueError,
        "optimizer_params={'beta1': 0.5}",
        "give them to Adam(...)",
        "optimizer='adam'",
    ),
    bad(new_trainer("sgd", "momentum"), TypeError, "optimizer_params='momentum'", "must be a dict or pairs"),
    bad(new_trainer("sgd", 0.1), TypeError, "optimizer_params=0.1", "must be a dict or pairs"),
    bad(
        lambda world: SGD(
            learning_rate=0.1, lr_scheduler=lr_scheduler.PolyScheduler(9, base_lr=0.1, warmup_steps=2, warmup_begin_lr=0.2)
        ),
        ValueError,
        "warmup_begin_lr=0.2",
        "must not exceed base_lr=0.1",
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
