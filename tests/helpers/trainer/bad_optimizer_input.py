"""What users may get wrong with names, hyper-parameters and learning rates, as a table."""

import math

import numpy as np
import torch
from bad_trainer_input import NUMBERS, STORES, AddingStore, Bad, new_trainer, sgd, step_with, trainer_of, two_layers

from tristep import Trainer, lr_scheduler
from tristep.kvstore import LocalStore
from tristep.trainer.optimizer import SGD

OF_OPTIMIZERS = [
    # names
    Bad(
        "unknown optimizer",
        new_trainer("adamm"),
        ValueError,
        ("optimizer='adamm'", "There are adabelief, adadelta, ", "Did you mean 'adam'"),
    ),
    Bad(
        "optimizer of torch",
        new_trainer(torch.optim.SGD),
        TypeError,
        ("optimizer=", "must be a name, such as 'sgd', or an Optimizer"),
    ),
    Bad("no optimizer", new_trainer(None), TypeError, ("optimizer=None", "must be a name, such as 'sgd', or an Optimizer")),
    Bad(
        "unknown store",
        new_trainer(kvstore="devise"),
        ValueError,
        ("kvstore='devise'", STORES, "Did you mean 'device' or 'dist'?"),
    ),
    Bad("store of another type", new_trainer(kvstore=3), TypeError, ("kvstore=3", "must be None or a name", STORES)),
    Bad(
        "a class of stores",
        new_trainer(kvstore=LocalStore),
        TypeError,
        ("kvstore=<class ", "must be None or a name", "or a KVStore"),
    ),
    Bad(
        "a store that cannot update",
        new_trainer(kvstore=AddingStore(), update_on_kvstore=True),
        ValueError,
        ("update_on_kvstore=True with kvstore=", "cannot hold an optimizer", "must be False or None"),
    ),
    Bad(
        "workers without a common gradient",
        new_trainer(kvstore="dist_async", update_on_kvstore=False),
        ValueError,
        ("update_on_kvstore=False with kvstore='dist_async'", "leave it out"),
    ),
    Bad(
        "copies that differ",
        trainer_of(lambda params: [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)]),
        ValueError,
        ("params[1] is no copy of params[0]", "'weight' is torch.float32 (1, 3), in params[0] it is torch.float32 (1, 2)"),
    ),
    Bad(
        "a copy given twice",
        trainer_of(lambda params: [torch.nn.Linear(2, 1)] * 2),
        ValueError,
        ("params[1] and params[0] share parameters", "tristep.replicate(module, devices)"),
    ),
    Bad(
        "compression where there is none",
        lambda world: Trainer(two_layers(), "sgd", kvstore="local", compression_params={"type": "2bit"}),
        ValueError,
        ("compression_params={'type': '2bit'} with kvstore='local'", "use 'device', or leave it out"),
    ),
    Bad(
        "residuals of another model",
        lambda world: world.trainer.load_state_dict(world.trainer.state_dict() | {"residuals": {"w": {}}}),
        ValueError,
        ("saved state: 'w' has residuals", "not among this trainer's parameters"),
    ),
    Bad(
        "dist store",
        new_trainer(kvstore="dist_sync"),
        RuntimeError,
        ("kvstore='dist_sync' needs several processes", "torchrun"),
    ),
    Bad(
        "unknown scheduler",
        lambda world: lr_scheduler.create("cosin", max_update=3),
        ValueError,
        ("name='cosin'", "There are cosine, ", "Did you mean 'cosine'"),
    ),
    Bad("scheduler by name", sgd(lr_scheduler="cosine"), TypeError, ("lr_scheduler='cosine'", "CosineScheduler(...)")),
    Bad(
        "unknown argument of a scheduler",
        lambda world: lr_scheduler.create("cosine", max_updates=3),
        TypeError,
        ("max_updates", "max_update"),
    ),
    Bad(
        "unknown engine",
        new_trainer(engine="tritn"),
        ValueError,
        ("engine='tritn'", "'triton', 'cpu', 'eager'", "Did you mean 'triton'?"),
    ),
    # hyper-parameters
    Bad(
        "unknown hyper-parameter",
        sgd(learning_rat=0.1),
        TypeError,
        (
            "SGD has no argument 'learning_rat' (=0.1)",
            "learning_rate, momentum, lazy_update",
            "Did you mean 'learning_rate'",
        ),
    ),
    Bad(
        "hyper-parameter of another optimizer",
        new_trainer("adam", {"momentum": 0.9}),
        TypeError,
        ("Adam has no argument 'momentum'",),
    ),
    Bad("rate as text", sgd(learning_rate="0.1"), TypeError, ("learning_rate='0.1'", NUMBERS.format("str"))),
    Bad("rate as bool", sgd(learning_rate=True), TypeError, ("learning_rate=True", NUMBERS.format("bool"))),
    Bad("rate as NumPy's bool", sgd(learning_rate=np.True_), TypeError, ("learning_rate=", NUMBERS.format("bool"))),
    Bad("rate as array", sgd(learning_rate=np.array([0.1])), TypeError, ("learning_rate=array", NUMBERS.format("ndarray"))),
    Bad("rate as tensor", sgd(learning_rate=torch.ones(2)), TypeError, ("learning_rate=tensor", NUMBERS.format("Tensor"))),
    Bad(
        "rate as tensor of one",
        sgd(learning_rate=torch.ones(1)),
        TypeError,
        ("learning_rate=tensor", NUMBERS.format("Tensor")),
    ),
    Bad("complex rate", sgd(learning_rate=1j), TypeError, ("learning_rate=1j", NUMBERS.format("complex"))),
    Bad("negative rate", sgd(learning_rate=-0.1), ValueError, ("learning_rate=-0.1", "must be finite and 0 or more")),
    Bad(
        "rate that is no number",
        sgd(learning_rate=math.nan),
        ValueError,
        ("learning_rate=nan", "must be finite and 0 or more"),
    ),
    Bad("infinite rate", sgd(learning_rate=math.inf), ValueError, ("learning_rate=inf", "must be finite and 0 or more")),
    Bad(
        "rate beyond floats", sgd(learning_rate=10**400), ValueError, ("learning_rate=1000", "must be finite and 0 or more")
    ),
    Bad("negative decay", sgd(wd=-1), ValueError, ("wd=-1", "must be finite and 0 or more")),
    Bad("decay as list", sgd(wd=[0.1]), TypeError, ("wd=[0.1]", NUMBERS.format("list"))),
    Bad("no momentum", sgd(momentum=None), TypeError, ("momentum=None", NUMBERS.format("NoneType"))),
    Bad("momentum of 1", sgd(momentum=1.0), ValueError, ("momentum=1.0", "must be finite and 0 or more and less than 1")),
    Bad(
        "beta of 1",
        new_trainer("adam", {"beta1": 1.0}),
        ValueError,
        ("beta1=1.0", "must be finite and 0 or more and less than 1"),
    ),
    Bad(
        "negative beta",
        new_trainer("adamw", {"beta2": -0.1}),
        ValueError,
        ("beta2=-0.1", "must be finite and 0 or more and less than 1"),
    ),
    Bad(
        "gamma above 1",
        new_trainer("rmsprop", {"gamma1": 1.5}),
        ValueError,
        ("gamma1=1.5", "must be finite and 0 or more and less than 1"),
    ),
    Bad(
        "negative epsilon",
        new_trainer("adam", {"epsilon": -1e-8}),
        ValueError,
        ("epsilon=-1e-08", "must be finite and 0 or more"),
    ),
    Bad(
        "decay that has no effect",
        new_trainer("groupadagrad", {"wd": 0.1}),
        ValueError,
        ("wd=0.1", "no weight decay", "must be 0"),
    ),
    Bad("negative eps", new_trainer("groupadagrad", {"eps": -1}), ValueError, ("eps=-1", "must be finite and 0 or more")),
    Bad(
        "a parameter that is no matrix",
        lambda world: Trainer({"bias": world.params["bias"]}, "groupadagrad").step(1),
        ValueError,
        ("'bias': GroupAdaGrad updates matrices", "shape (3,)"),
    ),
    Bad(
        "rho of 1",
        new_trainer("adadelta", {"rho": 1}),
        ValueError,
        ("rho=1", "must be finite and 0 or more and less than 1"),
    ),
    Bad(
        "epsilon of 0",
        new_trainer("adadelta", {"epsilon": 0}),
        ValueError,
        ("epsilon=0", "must be finite and greater than 0"),
    ),
    Bad("beta of Adamax", new_trainer("adamax", {"beta2": 1}), ValueError, ("beta2=1", "0 or more and less than 1")),
    Bad(
        "epsilon of Adamax",
        new_trainer("adamax", {"epsilon": 1e-8}),
        TypeError,
        ("Adamax has no argument 'epsilon'", "beta1"),
    ),
    Bad("negative schedule", new_trainer("nadam", {"schedule_decay": -1}), ValueError, ("schedule_decay=-1", "0 or more")),
    Bad(
        "correction as number", new_trainer("adabelief", {"correct_bias": 1}), TypeError, ("correct_bias=1", "True or False")
    ),
    Bad("seed of 0.5", new_trainer("sgld", {"seed": 0.5}), TypeError, ("seed=0.5", "must be an integer, not float")),
    Bad("negative seed", new_trainer("sgld", {"seed": -1}), ValueError, ("seed=-1", "must be 0 or more")),
    Bad("negative lamda", new_trainer("dcasgd", {"lamda": -1}), ValueError, ("lamda=-1", "must be finite and 0 or more")),
    Bad(
        "lambda",
        new_trainer("dcasgd", {"lambda": 1}),
        TypeError,
        ("DCASGD has no argument 'lambda'", "Did you mean 'lamda'"),
    ),
    Bad("negative penalty", new_trainer("ftrl", {"lamda1": -1}), ValueError, ("lamda1=-1", "must be finite and 0 or more")),
    Bad("rate of 0", new_trainer("ftrl", {"learning_rate": 0}), ValueError, ("learning_rate=0", "greater than 0")),
    Bad("rate of 0 too", new_trainer("ftml", {"learning_rate": 0}), ValueError, ("learning_rate=0", "greater than 0")),
    Bad("beta of FTML", new_trainer("ftml", {"beta1": math.nan}), ValueError, ("beta1=nan", "0 or more and less than 1")),
    Bad("trust of 0", new_trainer("lars", {"eta": 0}), ValueError, ("eta=0", "must be finite and greater than 0")),
    Bad("eps as text", new_trainer("lars", {"eps": "0"}), TypeError, ("eps='0'", NUMBERS.format("str"))),
    Bad("correction as text", new_trainer("lars", {"momentum_correction": "no"}), TypeError, ("momentum_correction='no'",)),
    Bad(
        "negative bound",
        new_trainer("lamb", {"lower_bound": -1}),
        ValueError,
        ("lower_bound=-1", "must be finite and 0 or more"),
    ),
    Bad("infinite bound", new_trainer("lans", {"upper_bound": math.inf}), ValueError, ("upper_bound=inf", "must be finite")),
    Bad(
        "correction of LANS",
        new_trainer("lans", {"bias_correction": True}),
        TypeError,
        ("LANS has no argument 'bias_correction'",),
    ),
    Bad(
        "correction as None",
        new_trainer("lamb", {"bias_correction": None}),
        TypeError,
        ("bias_correction=None", "True or False"),
    ),
    Bad(
        "unknown warm-up",
        new_trainer("lbsgd", {"warmup_strategy": "linaer"}),
        ValueError,
        ("warmup_strategy='linaer'", "'linear', 'power2', 'sqrt', 'lars'", "Did you mean 'linear'"),
    ),
    Bad("batch scale of 0", new_trainer("lbsgd", {"batch_scale": 0}), ValueError, ("batch_scale=0", "must be 1 or more")),
    Bad(
        "half an epoch", new_trainer("lbsgd", {"warmup_epochs": 0.5}), TypeError, ("warmup_epochs=0.5", "must be an integer")
    ),
    Bad(
        "epochs of nothing", new_trainer("lbsgd", {"updates_per_epoch": 0}), ValueError, ("updates_per_epoch=0", "1 or more")
    ),
    Bad("momentum of LBSGD", new_trainer("lbsgd", {"momentum": 1.0}), ValueError, ("momentum=1.0", "less than 1")),
    Bad("limit as text", sgd(clip_gradient="no"), TypeError, ("clip_gradient='no'", NUMBERS.format("str"))),
    Bad("infinite rescaling", sgd(rescale_grad=math.inf), ValueError, ("rescale_grad=inf", "must be finite")),
    Bad("switch as number", sgd(multi_precision=1), TypeError, ("multi_precision=1", "must be True or False, not int")),
    Bad("switch as text", sgd(lazy_update="yes"), TypeError, ("lazy_update='yes'", "must be True or False, not str")),
    Bad(
        "centered as text",
        new_trainer("rmsprop", {"centered": "yes"}),
        TypeError,
        ("centered='yes'", "must be True or False, not str"),
    ),
    Bad("count of 1.5", sgd(begin_num_update=1.5), TypeError, ("begin_num_update=1.5", "must be an integer, not float")),
    Bad("negative count", sgd(begin_num_update=-1), ValueError, ("begin_num_update=-1", "must be 0 or more")),
    Bad("names as list", sgd(param_idx2name=["a"]), TypeError, ("param_idx2name must map indices to names, got list",)),
    Bad(
        "arguments together with an optimizer",
        lambda world: Trainer(world.params, world.instance, {"beta1": 0.5}),
        ValueError,
        ("optimizer_params={'beta1': 0.5}", "give them to Adam(...)", "optimizer='adam'"),
    ),
    Bad(
        "arguments as text",
        new_trainer("sgd", "momentum"),
        TypeError,
        ("optimizer_params='momentum'", "must be a dict or pairs"),
    ),
    Bad("arguments as a number", new_trainer("sgd", 0.1), TypeError, ("optimizer_params=0.1", "must be a dict or pairs")),
    Bad(
        "a rate below the warm-up's",
        lambda world: SGD(
            learning_rate=0.1, lr_scheduler=lr_scheduler.PolyScheduler(9, base_lr=0.1, warmup_steps=2, warmup_begin_lr=0.2)
        ),
        ValueError,
        ("warmup_begin_lr=0.2", "must not exceed base_lr=0.1"),
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
        step_with(2),
        TypeError,
        ("lr_scheduler(2)='slow'", NUMBERS.format("str")),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: "slow"),
    ),
    Bad(
        "a schedule that gives nothing",
        step_with(2),
        TypeError,
        ("lr_scheduler(2)=None", NUMBERS.format("NoneType")),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: None),
    ),
    Bad(
        "a schedule that falls below 0",
        step_with(2),
        ValueError,
        ("lr_scheduler(2)=-0.5", "must be finite and 0 or more"),
        lambda world: setattr(world.instance, "lr_scheduler", lambda num_update: 0.5 - 0.5 * num_update),
    ),
    Bad(
        "a schedule that gives no number",
        step_with(2),
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
]
