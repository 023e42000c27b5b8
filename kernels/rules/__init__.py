"""Update rules by family, each citing its source. Arithmetic on values and nothing else.

The functions' first lines name their state tensors and hyper-parameters; `lr` and `wd` arrive with the
parameter's multipliers in them, `one_minus_x` is formed in float64 from `x`, and an infinite `clip` is none.
"""

from .adagrad import adagrad
from .adam import adam, adamw
from .rmsprop import rmsprop, rmsprop_centered
from .sgd import nag, sgd, sgd_momentum, sign_sgd, signum

__all__ = [
    "adagrad",
    "adam",
    "adamw",
    "nag",
    "rmsprop",
    "rmsprop_centered",
    "sgd",
    "sgd_momentum",
    "sign_sgd",
    "signum",
]
