"""What users may get wrong, in one table: the error, what its message says, and that nothing has been changed."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tristep import StaleGradientError, Trainer, lr_scheduler
from tristep.kvstore import LocalStore
from tristep.trainer.optimizer import SGD, Adam, Optimizer, create, registered


class Bad(NamedTuple):
    """One mistake.

    Attributes:
        what: its name in the table.
        do: makes it, in a world as `_world` makes it.
        error: the type that it raises.
        says: what the message contains: the argument, what came and what is allowed.
        before: what leads up to it.
    """

    what: str
    do: object
    error: type
    says: tuple
    before: object = None


def _world(tmp_path):
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


def _new(optimizer="sgd", optimizer_params=None, **kwargs):
    """Make another trainer of the same parameters."""
    return lambda world: Trainer(world.params, optimizer, optimizer_params, **kwargs)


def _of(make_params):
    """Make a trainer of other parameters; those of the world are at hand."""
    return lambda world: Trainer(make_params(world.params), "sgd")


def _sgd(**arguments):
    return _new("sgd", arguments)


def _step(batch_size):
    return lambda world: world.trainer.step(batch_size)


def _stale_bias(world):
    world.trainer.step(2)
    world.params["weight"].grad = torch.randn(2, 3).half()
    world.params["embedding"].grad = torch.randn(4, 2)


def _missing_bias(world):
    world.params["bias"].grad = None


def _sparse_gradient(world):
    weight = world.params["embedding"]
    weight.grad = None
    torch.nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse


def _write(content):
    return lambda world: world.path.write_bytes(content)


def _load(world):
    world.trainer.load_states(world.path)


def _used_up(params):
    generator = iter(params.values())
    list(generator)
    return generator


class _Adding(LocalStore):
    @classmethod
    def is_capable(cls, capability):
        return False


def _two_layers():
    return [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]


NUMBERS = "must be a number, not {}"
FLOATS = "torch.float64, torch.float32, torch.float16, torch.bfloat16"
STORES = "'local', 'device', 'nccl', 'dist_sync'"

BAD = [
    # names
    Bad(
        "unknown optimizer",
        _new("adamm"),
        ValueError,
        ("optimizer='adamm'", "there are adabelief, adadelta, ", "Did you mean 'adam'"),
    ),
    Bad(
        "optimizer of torch",
        _new(torch.optim.SGD),
        TypeError,
        ("optimizer=", "must be a name, such as 'sgd', or an Optimizer"),
    ),
    Bad("no optimizer", _new(None), TypeError, ("optimizer=None", "must be a name, such as 'sgd', or an Optimizer")),
    Bad(
        "unknown store", _new(kvstore="devise"), ValueError, ("kvstore='devise'", STORES, "Did you mean 'device' or 'dist'?")
    ),
    Bad("store of another type", _new(kvstore=3), TypeError, ("kvstore=3", "must be None or a name", STORES)),
    Bad(
        "a class of stores",
        _new(kvstore=LocalStore),
        TypeError,
        ("kvstore=<class ", "must be None or a name", "or a KVStore"),
    ),
    Bad(
        "a store that cannot update",
        _new(kvstore=_Adding(), update_on_kvstore=True),
        ValueError,
        ("update_on_kvstore=True with kvstore=", "cannot hold an optimizer", "must be False or None"),
    ),
    Bad(
        "workers without a common gradient",
        _new(kvstore="dist_async", update_on_kvstore=False),
        ValueError,
        ("update_on_kvstore=False with kvstore='dist_async'", "leave it out"),
    ),
    Bad(
        "copies that differ",
        _of(lambda params: [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)]),
        ValueError,
        ("params[1] is no copy of params[0]", "'weight' is torch.float32 (1, 3), in params[0] it is torch.float32 (1, 2)"),
    ),
    Bad(
        "a copy given twice",
        _of(lambda params: [torch.nn.Linear(2, 1)] * 2),
        ValueError,
        ("params[1] and params[0] share parameters", "tristep.replicate(module, devices)"),
    ),
    Bad(
        "compression where there is none",
        lambda world: Trainer(_two_layers(), "sgd", kvstore="local", compression_params={"type": "2bit"}),
        ValueError,
        ("compression_params={'type': '2bit'} with kvstore='local'", "use 'device', or leave it out"),
    ),
    Bad(
        "residuals of another model",
        lambda world: world.trainer.load_state_dict(world.trainer.state_dict() | {"residuals": {"w": {}}}),
        ValueError,
        ("saved state: 'w' has residuals", "not among this trainer's parameters"),
    ),
    Bad("dist store", _new(kvstore="dist_sync"), RuntimeError, ("kvstore='dist_sync' needs several processes", "torchrun")),
    Bad(
        "unknown scheduler",
        lambda world: lr_scheduler.create("cosin", max_update=3),
        ValueError,
        ("name='cosin'", "there are cosine, ", "Did you mean 'cosine'"),
    ),
    Bad("scheduler by name", _sgd(lr_scheduler="cosine"), TypeError, ("lr_scheduler='cosine'", "CosineScheduler(...)")),
    Bad(
        "unknown argument of a scheduler",
        lambda world: lr_scheduler.create("cosine", max_updates=3),
        TypeError,
        ("max_updates", "max_update"),
    ),
    Bad(
        "unknown engine",
        _new(engine="tritn"),
        ValueError,
        ("engine='tritn'", "'triton', 'cpu', 'eager'", "Did you mean 'triton'?"),
    ),
    # hyper-parameters
    Bad(
        "unknown hyper-parameter",
        _sgd(learning_rat=0.1),
        TypeError,
        (
            "SGD has no argument 'learning_rat' (=0.1)",
            "learning_rate, momentum, lazy_update",
            "Did you mean 'learning_rate'",
        ),
    ),
    Bad(
        "hyper-parameter of another optimizer",
        _new("adam", {"momentum": 0.9}),
        TypeError,
        ("Adam has no argument 'momentum'",),
    ),
    Bad("rate as text", _sgd(learning_rate="0.1"), TypeError, ("learning_rate='0.1'", NUMBERS.format("str"))),
    Bad("rate as bool", _sgd(learning_rate=True), TypeError, ("learning_rate=True", NUMBERS.format("bool"))),
    Bad("rate as NumPy's bool", _sgd(learning_rate=np.True_), TypeError, ("learning_rate=", NUMBERS.format("bool"))),
    Bad("rate as array", _sgd(learning_rate=np.array([0.1])), TypeError, ("learning_rate=array", NUMBERS.format("ndarray"))),
    Bad("rate as tensor", _sgd(learning_rate=torch.ones(2)), TypeError, ("learning_rate=tensor", NUMBERS.format("Tensor"))),
    Bad(
        "rate as tensor of one",
        _sgd(learning_rate=torch.ones(1)),
        TypeError,
        ("learning_rate=tensor", NUMBERS.format("Tensor")),
    ),
    Bad("complex rate", _sgd(learning_rate=1j), TypeError, ("learning_rate=1j", NUMBERS.format("complex"))),
    Bad("negative rate", _sgd(learning_rate=-0.1), ValueError, ("learning_rate=-0.1", "must be finite and 0 or more")),
    Bad(
        "rate that is no number",
        _sgd(learning_rate=math.nan),
        ValueError,
        ("learning_rate=nan", "must be finite and 0 or more"),
    ),
    Bad("infinite rate", _sgd(learning_rate=math.inf), ValueError, ("learning_rate=inf", "must be finite and 0 or more")),
    Bad(
        "rate beyond floats", _sgd(learning_rate=10**400), ValueError, ("learning_rate=1000", "must be finite and 0 or more")
    ),
    Bad("negative decay", _sgd(wd=-1), ValueError, ("wd=-1", "must be finite and 0 or more")),
    Bad("decay as list", _sgd(wd=[0.1]), TypeError, ("wd=[0.1]", NUMBERS.format("list"))),
    Bad("no momentum", _sgd(momentum=None), TypeError, ("momentum=None", NUMBERS.format("NoneType"))),
    Bad("momentum of 1", _sgd(momentum=1.0), ValueError, ("momentum=1.0", "must be finite and 0 or more and less than 1")),
    Bad(
        "beta of 1", _new("adam", {"beta1": 1.0}), ValueError, ("beta1=1.0", "must be finite and 0 or more and less than 1")
    ),
    Bad(
        "negative beta",
        _new("adamw", {"beta2": -0.1}),
        ValueError,
        ("beta2=-0.1", "must be finite and 0 or more and less than 1"),
    ),
    Bad(
        "gamma above 1",
        _new("rmsprop", {"gamma1": 1.5}),
        ValueError,
        ("gamma1=1.5", "must be finite and 0 or more and less than 1"),
    ),
    Bad(
        "negative epsilon", _new("adam", {"epsilon": -1e-8}), ValueError, ("epsilon=-1e-08", "must be finite and 0 or more")
    ),
    Bad(
        "decay that has no effect", _new("groupadagrad", {"wd": 0.1}), ValueError, ("wd=0.1", "no weight decay", "must be 0")
    ),
    Bad("negative eps", _new("groupadagrad", {"eps": -1}), ValueError, ("eps=-1", "must be finite and 0 or more")),
    Bad(
        "a parameter that is no matrix",
        lambda world: Trainer({"bias": world.params["bias"]}, "groupadagrad").step(1),
        ValueError,
        ("'bias': GroupAdaGrad updates matrices", "shape (3,)"),
    ),
    Bad("rho of 1", _new("adadelta", {"rho": 1}), ValueError, ("rho=1", "must be finite and 0 or more and less than 1")),
    Bad("epsilon of 0", _new("adadelta", {"epsilon": 0}), ValueError, ("epsilon=0", "must be finite and greater than 0")),
    Bad("beta of Adamax", _new("adamax", {"beta2": 1}), ValueError, ("beta2=1", "0 or more and less than 1")),
    Bad("epsilon of Adamax", _new("adamax", {"epsilon": 1e-8}), TypeError, ("Adamax has no argument 'epsilon'", "beta1")),
    Bad("negative schedule", _new("nadam", {"schedule_decay": -1}), ValueError, ("schedule_decay=-1", "0 or more")),
    Bad("correction as number", _new("adabelief", {"correct_bias": 1}), TypeError, ("correct_bias=1", "True or False")),
    Bad("seed of 0.5", _new("sgld", {"seed": 0.5}), TypeError, ("seed=0.5", "must be an integer, not float")),
    Bad("negative seed", _new("sgld", {"seed": -1}), ValueError, ("seed=-1", "must be 0 or more")),
    Bad("negative lamda", _new("dcasgd", {"lamda": -1}), ValueError, ("lamda=-1", "must be finite and 0 or more")),
    Bad("lambda", _new("dcasgd", {"lambda": 1}), TypeError, ("DCASGD has no argument 'lambda'", "Did you mean 'lamda'")),
    Bad("negative penalty", _new("ftrl", {"lamda1": -1}), ValueError, ("lamda1=-1", "must be finite and 0 or more")),
    Bad("rate of 0", _new("ftrl", {"learning_rate": 0}), ValueError, ("learning_rate=0", "greater than 0")),
    Bad("rate of 0 too", _new("ftml", {"learning_rate": 0}), ValueError, ("learning_rate=0", "greater than 0")),
    Bad("beta of FTML", _new("ftml", {"beta1": math.nan}), ValueError, ("beta1=nan", "0 or more and less than 1")),
    Bad("trust of 0", _new("lars", {"eta": 0}), ValueError, ("eta=0", "must be finite and greater than 0")),
    Bad("eps as text", _new("lars", {"eps": "0"}), TypeError, ("eps='0'", NUMBERS.format("str"))),
    Bad("correction as text", _new("lars", {"momentum_correction": "no"}), TypeError, ("momentum_correction='no'",)),
    Bad("negative bound", _new("lamb", {"lower_bound": -1}), ValueError, ("lower_bound=-1", "must be finite and 0 or more")),
    Bad("infinite bound", _new("lans", {"upper_bound": math.inf}), ValueError, ("upper_bound=inf", "must be finite")),
    Bad(
        "correction of LANS", _new("lans", {"bias_correction": True}), TypeError, ("LANS has no argument 'bias_correction'",)
    ),
    Bad("correction as None", _new("lamb", {"bias_correction": None}), TypeError, ("bias_correction=None", "True or False")),
    Bad(
        "unknown warm-up",
        _new("lbsgd", {"warmup_strategy": "linaer"}),
        ValueError,
        ("warmup_strategy='linaer'", "'linear', 'power2', 'sqrt', 'lars'", "Did you mean 'linear'"),
    ),
    Bad("batch scale of 0", _new("lbsgd", {"batch_scale": 0}), ValueError, ("batch_scale=0", "must be 1 or more")),
    Bad("half an epoch", _new("lbsgd", {"warmup_epochs": 0.5}), TypeError, ("warmup_epochs=0.5", "must be an integer")),
    Bad("epochs of nothing", _new("lbsgd", {"updates_per_epoch": 0}), ValueError, ("updates_per_epoch=0", "1 or more")),
    Bad("momentum of LBSGD", _new("lbsgd", {"momentum": 1.0}), ValueError, ("momentum=1.0", "less than 1")),
    Bad("limit as text", _sgd(clip_gradient="no"), TypeError, ("clip_gradient='no'", NUMBERS.format("str"))),
    Bad("infinite rescaling", _sgd(rescale_grad=math.inf), ValueError, ("rescale_grad=inf", "must be finite")),
    Bad("switch as number", _sgd(multi_precision=1), TypeError, ("multi_precision=1", "must be True or False, not int")),
    Bad("switch as text", _sgd(lazy_update="yes"), TypeError, ("lazy_update='yes'", "must be True or False, not str")),
    Bad(
        "centered as text",
        _new("rmsprop", {"centered": "yes"}),
        TypeError,
        ("centered='yes'", "must be True or False, not str"),
    ),
    Bad("count of 1.5", _sgd(begin_num_update=1.5), TypeError, ("begin_num_update=1.5", "must be an integer, not float")),
    Bad("negative count", _sgd(begin_num_update=-1), ValueError, ("begin_num_update=-1", "must be 0 or more")),
    Bad("names as list", _sgd(param_idx2name=["a"]), TypeError, ("param_idx2name must map indices to names, got list",)),
    Bad(
        "arguments together with an optimizer",
        lambda world: Trainer(world.params, world.instance, {"beta1": 0.5}),
        ValueError,
        ("optimizer_params={'beta1': 0.5}", "give them to Adam(...)", "optimizer='adam'"),
    ),
    Bad("arguments as text", _new("sgd", "momentum"), TypeError, ("optimizer_params='momentum'", "must be a dict or pairs")),
    Bad("arguments as a number", _new("sgd", 0.1), TypeError, ("optimizer_params=0.1", "must be a dict or pairs")),
    Bad(
        "a rate below the warm-up's",
        lambda world: SGD(
            learning_rate=0.1, lr_scheduler=lr_scheduler.PolyScheduler(9, base_lr=0.1, warmup_steps=2, warmup_begin_lr=0.2)
        ),
        ValueError,
        ("warmup_begin_lr=0.2", "must not exceed base_lr=0.1"),
    ),
    # parameters
    Bad("no parameters", _of(lambda params: []), ValueError, ("params is empty", "nothing to train")),
    Bad("a module without any", _of(lambda params: torch.nn.ReLU()), ValueError, ("params is empty", "nothing to train")),
    Bad("a generator used up", _of(_used_up), ValueError, ("params is empty", "a generator used up")),
    Bad(
        "one parameter",
        _of(lambda params: params["bias"]),
        TypeError,
        ("params must be a module, or a list", "got Parameter"),
    ),
    Bad("no params at all", _of(lambda params: None), TypeError, ("params must be a module, or a list", "got NoneType")),
    Bad(
        "a tensor among parameters",
        _of(lambda params: [params["bias"], torch.ones(3)]),
        TypeError,
        ("params: '1' must be a torch.nn.Parameter, got Tensor", "wrap it in torch.nn.Parameter"),
    ),
    Bad(
        "a name among parameters",
        _of(lambda params: [params["bias"], "weight"]),
        TypeError,
        ("params: '1' must be a torch.nn.Parameter, got str",),
    ),
    Bad(
        "a module among parameters",
        _of(lambda params: {"layer": torch.nn.Linear(1, 1)}),
        TypeError,
        ("params: 'layer' must be a torch.nn.Parameter, got Linear",),
    ),
    Bad(
        "a name that is a number",
        _of(lambda params: [(1, params["bias"])]),
        TypeError,
        ("params: names must be strings, got 1 (int)",),
    ),
    Bad(
        "a name twice",
        _of(lambda params: [("a", params["bias"]), ("a", params["embedding"])]),
        ValueError,
        ("params: the names a stand for several parameters",),
    ),
    Bad(
        "torch's rate in a group",
        _of(lambda params: [{"params": [params["bias"]], "lr": 0.1}]),
        ValueError,
        ("params[0] has the key 'lr'", "'params', 'lr_mult', 'wd_mult'", "relative to the optimizer's learning_rate"),
    ),
    Bad(
        "a group of nothing",
        _of(lambda params: [{"lr_mult": 0.1}]),
        ValueError,
        ("params[0] has no 'params'", "a dict with 'params'"),
    ),
    Bad(
        "a negative multiplier after a good one",
        _of(lambda params: [{"params": [params["bias"]], "lr_mult": 2.0}, {"params": [params["weight"]], "wd_mult": -1}]),
        ValueError,
        ("params[1]['wd_mult']=-1", "must be finite and 0 or more"),
    ),
    Bad(
        "complex weights",
        _of(lambda params: [params["bias"], Parameter(torch.ones(2, dtype=torch.complex64))]),
        TypeError,
        ("params: '1' is torch.complex64", "complex weights cannot be trained", FLOATS),
    ),
    Bad(
        "integer weights",
        _of(lambda params: [("codes", Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))]),
        TypeError,
        ("params: 'codes' is torch.int64", "weights of this type cannot be trained", FLOATS),
    ),
    Bad(
        "sparse weights",
        _of(lambda params: [Parameter(torch.eye(3).to_sparse())]),
        TypeError,
        ("params: '0' is sparse (torch.sparse_coo)", "must be dense"),
    ),
    Bad(
        "several devices",
        _of(lambda params: [params["bias"], Parameter(torch.ones(2, device="meta"))]),
        ValueError,
        ("params are on different devices ('0' on cpu, '1' on meta)", "move the model to one device"),
    ),
    Bad(
        "a multiplier given while another optimizer argument is wrong",
        lambda world: Trainer([{"params": [world.params["weight"]], "lr_mult": 3.0}], "sgd", {"momentum": 2}),
        ValueError,
        ("momentum=2", "less than 1"),
    ),
    # stores
    Bad(
        "a store that updates",
        _new(update_on_kvstore=True),
        ValueError,
        ("update_on_kvstore=True with kvstore='device'", "leave it out"),
    ),
    Bad(
        "update_on_kvstore as text",
        _new(update_on_kvstore="no"),
        TypeError,
        ("update_on_kvstore='no'", "must be True or False"),
    ),
    Bad("compression as text", _new(compression_params="2bit"), TypeError, ("compression_params must be a dict, got str",)),
    Bad(
        "unknown compression",
        _new(compression_params={"type": "2bits"}),
        ValueError,
        ("compression_params['type']='2bits'", "'2bit', '1bit'", "Did you mean '2bit'"),
    ),
    Bad(
        "compression without type",
        _new(compression_params={}),
        ValueError,
        ("compression_params needs 'type'", "'2bit', '1bit'"),
    ),
    Bad(
        "threshold of 0",
        _new(compression_params={"type": "2bit", "threshold": 0}),
        ValueError,
        ("compression_params['threshold']=0", "greater than 0"),
    ),
    Bad(
        "unknown key of compression",
        _new(compression_params={"type": "2bit", "treshold": 1}),
        ValueError,
        ("compression_params has the key 'treshold'", "Did you mean 'threshold'?"),
    ),
    # steps
    Bad("batch of 0", _step(0), ValueError, ("batch_size=0", "must be finite and greater than 0")),
    Bad("batch of 0.0", _step(0.0), ValueError, ("batch_size=0.0", "must be finite and greater than 0")),
    Bad("negative batch", _step(-4), ValueError, ("batch_size=-4", "must be finite and greater than 0")),
    Bad("batch that is no number", _step(math.nan), ValueError, ("batch_size=nan", "must be finite and greater than 0")),
    Bad("infinite batch", _step(math.inf), ValueError, ("batch_size=inf", "must be finite and greater than 0")),
    Bad("batch as text", _step("4"), TypeError, ("batch_size='4'", NUMBERS.format("str"))),
    Bad("batch as bool", _step(True), TypeError, ("batch_size=True", NUMBERS.format("bool"))),
    Bad("batch as NumPy's bool", _step(np.True_), TypeError, ("batch_size=", NUMBERS.format("bool"))),
    Bad("no batch", _step(None), TypeError, ("batch_size=None", NUMBERS.format("NoneType"))),
    Bad("batch as list", _step([4]), TypeError, ("batch_size=[4]", NUMBERS.format("list"))),
    Bad("batch as array", _step(np.array([4.0])), TypeError, ("batch_size=array", NUMBERS.format("ndarray"))),
    Bad("batch as tensor of two", _step(torch.ones(2)), TypeError, ("batch_size=tensor", NUMBERS.format("Tensor"))),
    Bad("batch of update", lambda world: world.trainer.update(-1), ValueError, ("batch_size=-1", "greater than 0")),
    Bad(
        "a stale gradient",
        _step(2),
        StaleGradientError,
        ("no fresh gradient since the last step for 'bias': call backward()", "ignore_stale_grad=True"),
        _stale_bias,
    ),
    Bad(
        "a missing gradient",
        _step(2),
        StaleGradientError,
        ("no fresh gradient since the last step for 'bias' (no gradient): call backward()", "ignore_stale_grad=True"),
        _missing_bias,
    ),
    Bad(
        "no gradients",
        _step(2),
        StaleGradientError,
        ("'bias' (no gradient), 'embedding' (no gradient), 'weight' (no gradient)",),
        lambda world: world.trainer.zero_grad(),
    ),
    Bad(
        "a sparse gradient",
        lambda world: Trainer(world.params, "adamw").step(2),
        TypeError,
        ("the gradient of 'embedding' is sparse (torch.sparse_coo)", "use sparse=False in the layer"),
        _sparse_gradient,
    ),
    # rates
    Bad(
        "a rate together with a scheduler",
        lambda world: world.trainer.set_learning_rate(0.2),
        UserWarning,
        ("decided by FactorScheduler(step=2", "cannot be set to 0.2", "lr_scheduler = None first"),
    ),
    Bad(
        "a negative rate",
        lambda world: world.trainer.set_learning_rate(-1),
        ValueError,
        ("lr=-1", "must be finite and 0 or more"),
        lambda world: setattr(world.instance, "lr_scheduler", None),
    ),
    Bad(
        "a schedule that gives text",
        _step(2),
        TypeError,
        ("lr_scheduler(2)='slow'", NUMBERS.format("str")),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: "slow"),
    ),
    Bad(
        "a schedule that gives nothing",
        _step(2),
        TypeError,
        ("lr_scheduler(2)=None", NUMBERS.format("NoneType")),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: None),
    ),
    Bad(
        "a schedule that falls below 0",
        _step(2),
        ValueError,
        ("lr_scheduler(2)=-0.5", "must be finite and 0 or more"),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: 0.5 - 0.5 * num_update),
    ),
    Bad(
        "a schedule that gives no number",
        _step(2),
        ValueError,
        ("lr_scheduler(2)=nan", "must be finite and 0 or more"),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: math.nan),
    ),
    Bad(
        "reading a rate that is none",
        lambda world: world.trainer.learning_rate,
        ValueError,
        ("lr_scheduler(1)=-1.0", "must be finite and 0 or more"),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: -1.0),
    ),
    # files
    Bad("no file", _load, FileNotFoundError, ("fname='", "file'", "there is no such file")),
    Bad("an empty file", _load, ValueError, ("fname='", "file'", "not a state file of tristep"), _write(b"")),
    Bad("another file", _load, ValueError, ("fname='", "file'", "not a state file of tristep"), _write(b"weights " * 99)),
    Bad("another dict", lambda world: world.trainer.load_state_dict({}), ValueError, ("format None", "reads format 1")),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_a_mistake_is_named_and_changes_nothing(bad, everything, tmp_path):
    world = _world(tmp_path)
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
        world = _world(tmp_path)
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
