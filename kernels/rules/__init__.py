"""Update rules by family, each citing its source. Arithmetic on values and nothing else.

The functions' first lines name their state tensors and hyper-parameters; `lr` and `wd` arrive with the
parameter's multipliers in them, `one_minus_x` is formed in float64 from `x`, and an infinite `clip` is none.
"""

from .adadelta import adadelta
from .adagrad import adagrad, group_adagrad
from .adam import adabelief, adam, adamax, adamw, nadam
from .ftrl import ftml, ftrl
from .layerwise import lamb, lans, lars, lars_momentum
from .rmsprop import rmsprop, rmsprop_centered
from .sgd import dcasgd, dcasgd_momentum, lbsgd, lbsgd_lars, nag, sgd, sgd_momentum, sgld, sign_sgd, signum, test

__all__ = [
    "adabelief",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "dcasgd",
    "dcasgd_momentum",
    "ftml",
    "ftrl",
    "group_adagrad",
    "lamb",
    "lans",
    "lars",
    "lars_momentum",
    "lbsgd",
    "lbsgd_lars",
    "nadam",
    "nag",
    "rmsprop",
    "rmsprop_centered",
    "sgd",
    "sgd_momentum",
    "sgld",
    "sign_sgd",
    "signum",
    "test",
]
