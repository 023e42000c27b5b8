"""Calls that are refused whatever else there is, as tables: what is called, the error, and what its message must say."""

import copy
import math

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter

import tristep
from tristep import Trainer, kvstore, optim, optimizer
from tristep.kvstore import CompressedAllReduce
from tristep.trainer import Ensemble
from tristep.trainer.loops.sweeping.train import Batches
from tristep.trainer.optimizer import registered

# Arguments of optimizers, which `optimizer.create` refuses: the optimizer's name, arguments, the error, its message.
CREATED = [
    # names
    ("RMS_Prop", {}, ValueError, "optimizer='RMS_Prop': no optimizer is registered.*Did you mean .*'rmsprop'"),
    ("zzz", {}, ValueError, f"There are 'adabelief', 'adadelta', .* and {len(registered()) - 10} more"),
    (None, {}, TypeError, "must be a name, such as 'sgd', or an Optimizer"),
    (optimizer.SGD, {}, TypeError, "must be a name, such as 'sgd', or an Optimizer"),
    (optimizer.SGD(), {"momentum": 0.9, "wd": 0.1}, TypeError, "with an optimizer instance: momentum, wd; give them to SGD"),
    ("lamb", {"look_ahead": 5}, TypeError, "LAMB has no argument 'look_ahead'.*Did you mean 'lookahead'"),
    # how states are stored
    ("adam", {"state_dtype": "int8"}, ValueError, "='int8': Did you mean '8bit'"),
    ("sgd", {"state_dtype": "8bit"}, ValueError, "state_dtype='8bit': must be None for SGD, as it has no states"),
    ("adagrad", {"state_dtype": "4bit"}, ValueError, "must be None for AdaGrad, as all its states are weights or sums"),
    ("adafactor", {"state_dtype": "bfloat16"}, ValueError, "must be None for Adafactor, none of whose states"),
    ("adam", {"multi_precision": "split"}, TypeError, "multi_precision='split': Did you mean 'split8'"),
    # options and rules that do not go together
    ("muon", {"agc": 0.01, "cautious": True}, TypeError, "agc=0.01, cautious=True: Muon has a rule of whole tensors"),
    ("adafactor", {"lookahead": 5}, TypeError, "lookahead=5: Adafactor has a rule of whole tensors"),
    ("radam", {"decoupled_wd": True}, ValueError, "RAdam decays the weights apart from the gradient already"),
    ("signum", {"momentum": 0.0, "decoupled_wd": True}, ValueError, "Signum decays the weights apart"),
    ("rprop", {"decoupled_wd": True}, ValueError, "decoupled_wd=True: Rprop has no weight decay, so it must be False"),
    ("sgd", {"cautious_wd": True}, ValueError, "SGD adds its weight decay to the gradient; .* give decoupled_wd=True, too"),
    ("rprop", {"cautious_wd": True}, ValueError, "cautious_wd=True: Rprop has no weight decay; it must be False"),
    ("groupadagrad", {"wd": 0.1}, ValueError, "wd=0.1.* no weight decay.* must be 0"),
    ("ftrl", {"learning_rate": 0}, ValueError, "learning_rate=0: must be finite and greater than 0"),
    ("ftml", {"learning_rate": 0}, ValueError, "learning_rate=0: must be finite and greater than 0"),
    # Muon's iterations, and rows of fused matrices
    ("muon", {"coefficients": "polar"}, ValueError, "coefficients='polar': Did you mean 'polar_express'"),
    ("muon", {"coefficients": (3.4, -4.7, 2.0)}, TypeError, "must be one of .* or a list of triples"),
    ("muon", {"coefficients": []}, ValueError, r"coefficients=\[\]: must be one of"),
    ("muon", {"coefficients": [(2, -1.5, 0.5), (1.5, -0.5)]}, ValueError, r"coefficients\[1\]=\(1.5, -0.5\): must be"),
    ("muon", {"coefficients": [(2, -1.5, math.inf)]}, ValueError, r"coefficients\[0\]\[2\]=inf: must be finite"),
    ("muon", {"coefficients": "deepseekv4", "steps": 5}, ValueError, "steps=5: coefficients='deepseekv4' has 10 steps"),
    ("muon", {"coefficients": [(2, -1, 0)] * 3, "steps": 2}, ValueError, "steps=2: your list .* has 3 steps"),
    (
        "muon",
        {"learning_rate": 0, "adam_learning_rate": 0.1},
        ValueError,
        "adam_learning_rate=0.1 with a learning rate of 0",
    ),
    ("muon", {"split": "qkv"}, ValueError, "split='qkv': must be the axes of the rows, '->'"),
    ("muon", {"split": "(a=2 a) -> a a"}, ValueError, "'a=2 a' must be different names"),
    ("muon", {"split": "(a=0 b) -> a b"}, ValueError, "each with a length >= 1"),
    ("muon", {"split": "(a b c=2) -> a b c"}, ValueError, "2 axes have no length"),
    ("muon", {"split": "(a=2 b) -> a c"}, ValueError, "must stand a, b, each once and without a length, not a, c"),
    ("muon", {"split": "(a=2 b=3 c) -> (a b) c"}, ValueError, "must be the axes of the rows"),
    ("muon", {"split": {"*": 0}}, ValueError, r"split\['\*'\]=0: must be 1 or more"),
    ("muon", {"split": {}}, ValueError, "split={}: must have at least one pattern"),
]


def several_layers():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


# Lists of optimizers by patterns, for the parameters of `several_layers`, which a Trainer refuses.
OF_PATTERNS = [
    ([("nowhere*", "adam"), ("*", "sgd")], ValueError, r"'nowhere\*' gets no parameter: no parameter matches it"),
    ([("*", "adam"), ("0.*", "sgd")], ValueError, r"'0.\*' gets no parameter: earlier patterns take all .* '0.weight'"),
    ([("0.*", "adam")], ValueError, "no pattern takes '1.weight'"),
    ([("ndim<two", "adam")], ValueError, r"optimizer\[0\].*compared with an integer"),
    ([("ndims<2", "adam"), ("*", "sgd")], ValueError, "'ndims' is no size. Did you mean 'ndim'"),
    ([("a||b", "adam")], ValueError, "nothing on one side"),
    ([("!" * 3000, "adam")], ValueError, "nothing on one side"),
    ([(3, "adam")], TypeError, "pattern=3: must be a string"),
    ([("*", "adam", {"momentum": 1})], TypeError, r"optimizer\[0\]: Adam has no argument 'momentum'"),
    ([("*", "adm")], ValueError, r"optimizer\[0\].*adam"),
    ([("*",)], TypeError, r"must be \(pattern, optimizer\)"),
    ([], ValueError, "at least one"),
    ([("*", [("*", "sgd")])], TypeError, "is a list of optimizers inside the list"),
    ([("*", "sgd", {"begin_num_update": 3})], ValueError, "begin_num_update=3 is for all"),
]
# As many that `tristep.optim.MultiOptimizer` refuses.
OF_PATTERNS_IN_TORCHS_INTERFACE = [
    ([("nowhere", "Adam"), ("*", "SGD")], ValueError, "'nowhere' gets no parameter"),
    ([("*", "Adem")], ValueError, r"entries\[0\].*adam"),
    ([("*", "AdamW", {"lr": -1.0})], ValueError, r"entries\[0\], '\*': "),
    ([("*", nn.Linear)], TypeError, "must be a name"),
    ([], ValueError, "at least one"),
]


def parameter(*shape, dtype=torch.float32):
    return Parameter(torch.ones(shape, dtype=dtype))


def of_torch(name, *shape, dtype=torch.float32, **arguments):
    """Make an optimizer with torch's interface, of one parameter with the name "layer"."""
    return lambda: getattr(optim, name)([("layer", parameter(*(shape or (2, 2)), dtype=dtype))], **arguments)


def add_group(name, group, **arguments):
    return lambda: getattr(optim, name)([parameter(2, 2)], **arguments).add_param_group(group)


def averaged(made):
    with made.averaged_weights():
        pass


# With torch's interface: the call, the error, its message.
OF_TORCH = [
    (of_torch("Lion", beta_1=0.9), TypeError, r"Lion has no argument 'beta_1' \(=0.9\). Did you mean 'beta1'"),
    (of_torch("Lion", beta2=0.5, betas=(0.9, 0.99)), ValueError, r"beta2=0.5 and betas=\(0.9, 0.99\): they must agree"),
    (of_torch("Lion", betas=0.5), ValueError, "betas=0.5: must be a tuple of beta1, beta2"),
    (of_torch("NAG", lr=0.1, betas=(0.9, 0.99)), TypeError, "NAG has no argument 'betas'"),
    (
        add_group("Muon", {"params": [parameter(2)]}),
        ValueError,
        r"Muon only supports 2D parameters, but .* has shape \(2,\)",
    ),
    (
        lambda: optim.MultiOptimizer(linear(), [("ndim<2", "AdamW"), ("*", "SGD")]).add_param_group(
            {"params": [("more", parameter(2))]}
        ),
        RuntimeError,
        "add_param_group",
    ),
    (lambda: averaged(optim.Lion([parameter(2)])), ValueError, "Lion keeps no averaged weights"),
    (lambda: optim.as_torch(torch.optim.SGD), TypeError, "klass=.*must be a subclass of tristep.optimizer.RuleOptimizer"),
    (of_torch("CAME", dtype=torch.complex64), RuntimeError, "'layer' is torch.complex64: CAME does not support complex"),
    (of_torch("AdamW", dtype=torch.float64, state_dtype="8bit"), ValueError, "'layer' is torch.float64; it must be None"),
    (of_torch("Adam", dtype=torch.complex64, state_dtype="8bit"), ValueError, "'layer' is torch.complex64; it must be None"),
    (of_torch("SGD", state_dtype="8bit"), ValueError, "must be None for SGD, as it has no states"),
    (of_torch("SGD", state_dtype=8), TypeError, "state_dtype=8: must be a string, one of"),
    (
        of_torch("Lion", dtype=torch.complex64, state_dtype="bfloat16"),
        ValueError,
        "state_dtype='bfloat16': 'layer' is complex",
    ),
    (
        lambda: optim.SGD([parameter(2)]).load_float32_weights({parameter(2): torch.zeros(2)}),
        ValueError,
        "weights .*has unknown 'a Parameter that is none of its parameters'",
    ),
]


def ensemble(rows, *rates, stacked=False):
    """Trainings by plain SGD with these rates."""
    return Ensemble([optimizer.SGD(learning_rate=rate) for rate in rates], rows, stacked=stacked)


def pair():
    return ensemble([[torch.ones(1)], [torch.ones(1)]], 0.1, 0.2)


def stack():
    return ensemble([torch.ones(2, 2)], 0.1, 0.2, stacked=True)


ONE = optimizer.SGD(0.1)
OF_ENSEMBLES = [
    (lambda: ensemble([[torch.ones(1)]], 0.1, 0.1), ValueError, "2 optimizers for weights of 1"),
    (lambda: Ensemble([ONE, ONE], [[torch.ones(1)], [torch.ones(1)]]), ValueError, "occurs twice"),
    (lambda: ensemble([[]], 0.1), ValueError, r"weights\[0\] is empty"),
    (lambda: Ensemble(["sgd"], [[torch.ones(1)]]), TypeError, "must be an Optimizer"),
    (lambda: pair().step([[torch.ones(1)]]), ValueError, "gradients of 1 trainings for 2"),
    (lambda: pair().step([[torch.ones(1)], [torch.ones(1), torch.ones(1)]]), ValueError, r"gradients\[1\] are 2, weights 1"),
    (lambda: pair().step([[torch.ones(1)], [torch.ones(2)]]), ValueError, r"weights\[1\]\[0\]"),
    (lambda: pair().step(), RuntimeError, "there was no step"),
    (
        lambda: ensemble([torch.ones(3, 2)], 0.1, 0.2, stacked=True),
        ValueError,
        r"weights\[0\] is \(3, 2\): must be \[2, \.\.\.\]",
    ),
    (
        lambda: ensemble([[torch.ones(2), torch.ones(2)]], 0.1, 0.2, stacked=True),
        TypeError,
        r"weights\[0\] must be a tensor.*got list",
    ),
    (lambda: ensemble([], 0.1, 0.2, stacked=True), ValueError, "is empty"),
    (lambda: stack().step([torch.ones(2, 2), torch.ones(2, 2)]), ValueError, "2 stacks of gradients for 1"),
    (lambda: stack().step([torch.ones(2, 3)]), ValueError, r"gradients\[0\] is \(2, 3\): must be \(2, 2\)"),
]

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))]


def linear():
    return nn.Linear(2, 1)


def all_reduce(numel, **arguments):
    return lambda: CompressedAllReduce({"type": "int8"}, numel, **arguments)


OF_OTHERS = [
    (lambda: Trainer(linear(), "sgd", engine=5), TypeError, "engine=5: must be one of 'triton', 'cpu', 'eager', or None"),
    (
        lambda: Trainer([{"params": 5}], "sgd"),
        TypeError,
        r"params\[0\]\['params'\] must be a parameter or a list of parameters",
    ),
    (
        lambda: Trainer(linear(), "sgd", {"param_idx2name": {0: "bias", 1: "weight"}}),
        ValueError,
        r"param_idx2name\[0\]='bias': parameter 0 of this Trainer is 'weight'",
    ),
    (
        lambda: Trainer(linear(), "sgd", {"param_idx2name": {2: "weight"}}),
        ValueError,
        r"param_idx2name\[2\]='weight': there is no such parameter; indices are 0 to 1",
    ),
    (
        lambda: Trainer(list(linear().parameters()), [("layer==Linear", "adam"), ("*", "sgd")]),
        ValueError,
        "give params as a module",
    ),
    (lambda: copy.deepcopy(Trainer([linear(), linear()], "sgd")), TypeError, "cannot be copied or pickled: use state_dict"),
    (lambda: averaged(Trainer(linear(), "sgd")), ValueError, "SGD keeps no averaged weights: give it ema_decay"),
    (lambda: tristep.clip_global_norm([], 1.0), ValueError, "arrays is empty"),
    (lambda: tristep.clip_global_norm(torch.ones(1), 1.0), TypeError, "arrays must be a list of tensors, got Tensor"),
    (lambda: tristep.clip_global_norm([np.ones(3)], 1.0), TypeError, r"arrays\[0\] must be a tensor, got ndarray"),
    (lambda: tristep.clip_global_norm([torch.ones(2)], -1), ValueError, "max_norm=-1: must be finite and 0 or more"),
    (lambda: tristep.clip_global_norm([torch.ones(1)], 1.0, 1), TypeError, "check_isfinite=1: must be True or False"),
    (lambda: tristep.fit(linear(), nn.MSELoss(), DATA, trainer=5), TypeError, "trainer must be a Trainer, got int"),
    (lambda: tristep.sweep(linear, nn.MSELoss(), DATA, grid=5), TypeError, "grid=5: must be a dict of names"),
    (lambda: tristep.sweep(linear, nn.MSELoss(), DATA, seeds=5), TypeError, "seeds=5: must be integers"),
    (lambda: Batches(DATA, None, None), ValueError, "epochs=None together with steps=None: give one of them"),
    (
        lambda: kvstore.create("device").set_gradient_compression({"type": "int8"}),
        ValueError,
        "in one process compression is '2bit' or '1bit', with error feedback",
    ),
    (all_reduce(4, parts=[3]), ValueError, r"parts=\[3\] must have numel=4 elements together"),
    (all_reduce(4, parts=[2, 2]), ValueError, r"parts=\[2, 2\]: must have one number for each of 1 ranks"),
    (all_reduce(4, parts=[4], exchange="all_gather"), ValueError, "exchange='all_gather' with parts"),
    (lambda: all_reduce(4, parts=[4])().start(torch.zeros(4)), ValueError, "out is missing"),
]
