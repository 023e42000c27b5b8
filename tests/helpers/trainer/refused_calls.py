"""Calls that are refused whatever else there is, as tables: what is called, the error, and what its message must say."""

import copy

import torch
from torch import nn
from torch.nn import Parameter

import tristep
from tristep import Trainer, kvstore, optim, optimizer
from tristep.kvstore import CompressedAllReduce
from tristep.trainer import Ensemble

# Arguments of optimizers, which `optimizer.create` refuses: the optimizer's name, arguments, the error, its message.
CREATED = [
    # names
    (optimizer.SGD(), {"momentum": 0.9, "wd": 0.1}, TypeError, "with an optimizer instance: momentum, wd; give them to SGD"),
    # how states are stored
    ("sgd", {"state_dtype": "8bit"}, ValueError, "state_dtype='8bit': must be None for SGD, as it has no states"),
    ("adagrad", {"state_dtype": "4bit"}, ValueError, "must be None for AdaGrad, as all its states are weights or sums"),
    ("adafactor", {"state_dtype": "bfloat16"}, ValueError, "must be None for Adafactor, none of whose states"),
    ("adam", {"state_device": "cuda"}, ValueError, "state_device='cuda'"),
    # options and rules that do not go together
    ("muon", {"agc": 0.01, "cautious": True}, TypeError, "agc=0.01, cautious=True: Muon has a rule of whole tensors"),
    ("radam", {"decoupled_wd": True}, ValueError, "RAdam decays the weights apart from the gradient already"),
    ("rprop", {"decoupled_wd": True}, ValueError, "decoupled_wd=True: Rprop has no weight decay, so it must be False"),
    ("sgd", {"cautious_wd": True}, ValueError, "SGD adds its weight decay to the gradient; .* give decoupled_wd=True, too"),
    ("groupadagrad", {"wd": 0.1}, ValueError, "wd=0.1.* no weight decay.* must be 0"),
    ("ftrl", {"learning_rate": 0}, ValueError, "learning_rate=0: must be finite and greater than 0"),
    # Muon's iterations, and rows of fused matrices
    ("muon", {"coefficients": "deepseekv4", "steps": 5}, ValueError, "steps=5: coefficients='deepseekv4' has 10 steps"),
    (
        "muon",
        {"learning_rate": 0, "adam_learning_rate": 0.1},
        ValueError,
        "adam_learning_rate=0.1 with a learning rate of 0",
    ),
    ("muon", {"split": "(a=2 b) -> a c"}, ValueError, "must stand a, b, each once and without a length, not a, c"),
]


def several_layers():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


# Lists of optimizers by patterns, for the parameters of `several_layers`, which a Trainer refuses.
OF_PATTERNS = [
    ([("nowhere*", "adam"), ("*", "sgd")], ValueError, r"'nowhere\*' gets no parameter: no parameter matches it"),
    ([("*", "adam"), ("0.*", "sgd")], ValueError, r"'0.\*' gets no parameter: earlier patterns take all .* '0.weight'"),
    ([("0.*", "adam")], ValueError, "no pattern takes '1.weight'"),
    ([("*", "sgd", {"begin_num_update": 3})], ValueError, "begin_num_update=3 is for all"),
]


def parameter(*shape, dtype=torch.float32):
    return Parameter(torch.ones(shape, dtype=dtype))


def of_torch(name, dtype=torch.float32, **arguments):
    """Make an optimizer with torch's interface, of one parameter with the name "layer"."""
    return lambda: getattr(optim, name)([("layer", parameter(2, 2, dtype=dtype))], **arguments)


# With torch's interface: the call, the error, its message.
OF_TORCH = [
    (of_torch("Lion", beta2=0.5, betas=(0.9, 0.99)), ValueError, r"beta2=0.5 and betas=\(0.9, 0.99\): they must agree"),
    (
        lambda: optim.Muon([parameter(2, 2)]).add_param_group({"params": [parameter(2)]}),
        ValueError,
        r"Muon only supports 2D parameters, but .* has shape \(2,\)",
    ),
    (of_torch("AdamW", dtype=torch.float64, state_dtype="8bit"), ValueError, "'layer' is torch.float64; it must be None"),
]


def pair(*shape):
    """Two trainings by plain SGD."""
    return Ensemble([optimizer.SGD(0.1), optimizer.SGD(0.2)], [torch.ones(shape)])


ONE = optimizer.SGD(0.1)
OF_ENSEMBLES = [
    (lambda: Ensemble([ONE, ONE], [torch.ones(2, 1)]), ValueError, "occurs twice"),
    (lambda: pair(3, 2), ValueError, r"weights\[0\] is \(3, 2\): must be \[2, \.\.\.\]"),
    (lambda: pair(2, 2).step([torch.ones(2, 3)]), ValueError, r"gradients\[0\] is \(2, 3\): must be \(2, 2\)"),
    (lambda: pair(2, 2).step([None]), TypeError, r"gradients\[0\]"),
    (lambda: pair(2, 2).step([torch.ones(2, 2).to_sparse(1)]), TypeError, r"gradients\[0\] is .*: must be dense"),
]


def linear():
    return nn.Linear(2, 1)


OF_OTHERS = [
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
    (lambda: tristep.clip_global_norm([torch.ones(2)], -1), ValueError, "max_norm=-1: must be finite and 0 or more"),
    (
        lambda: kvstore.create("device").set_gradient_compression({"type": "int8"}),
        ValueError,
        "in one process compression is '2bit' or '1bit', with error feedback",
    ),
    (
        lambda: CompressedAllReduce({"type": "int8"}, 4, parts=[3]),
        ValueError,
        r"parts=\[3\] must have numel=4 elements together",
    ),
]
