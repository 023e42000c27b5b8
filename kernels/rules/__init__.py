"""Update rules by family, each citing its source. Arithmetic on values and nothing else.

The functions' first lines name their state tensors and hyper-parameters; `lr` and `wd` arrive with the
parameter's multipliers in them, `one_minus_x` is formed in float64 from `x`, and an infinite `clip` is none.
"""

from .adadelta import adadelta
from .adagrad import adagrad, group_adagrad
from .adam import adabelief, adam, adamax, adamw, amsgrad, nadam
from .compression import one_bit, two_bit  # noqa: F401
from .ftrl import ftml, ftrl
from .layerwise import lamb, lans, lars, lars_momentum
from .matrix import adafactor, came, muon, soap, soap_up_to  # noqa: F401
from .modern import (
    adan,
    ademamix,
    adopt,
    asgd,
    averaged,
    lion,
    mars,
    novograd,
    radam,
    rprop,
    sophia,
    sophia_curvature,
    stable_adamw,
)
from .prodigy import prodigy  # noqa: F401
from .rmsprop import rmsprop, rmsprop_centered, rmsprop_momentum, rmsprop_variance
from .schedule_free import schedule_free_adamw, schedule_free_sgd, toward
from .sgd import (
    dcasgd,
    dcasgd_momentum,
    heavy_ball,
    lbsgd,
    lbsgd_lars,
    nag,
    sgd,
    sgd_momentum,
    sgld,
    sign_sgd,
    signum,
    test,
)
from .sharpness import ascent

__all__ = [
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adan",
    "ademamix",
    "adopt",
    "amsgrad",
    "ascent",
    "asgd",
    "averaged",
    "came",
    "dcasgd",
    "dcasgd_momentum",
    "ftml",
    "ftrl",
    "group_adagrad",
    "heavy_ball",
    "lamb",
    "lans",
    "lars",
    "lars_momentum",
    "lbsgd",
    "lbsgd_lars",
    "lion",
    "mars",
    "muon",
    "nadam",
    "nag",
    "novograd",
    "radam",
    "rmsprop",
    "rmsprop_centered",
    "rmsprop_momentum",
    "rmsprop_variance",
    "rprop",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sgd",
    "sgd_momentum",
    "sgld",
    "sign_sgd",
    "signum",
    "sophia",
    "sophia_curvature",
    "stable_adamw",
    "test",
    "toward",
]
