"""All rules as cases of a test, for engines that compile them and for the eager one."""

import pytest

from tristep.kernels import rules

RULES = [pytest.param(getattr(rules, name), id=name) for name in rules.__all__]
# One for each mechanism that an engine compiles: states, branches, signs, random numbers, sums and numbers of tensors, means
# over parts of them, and whole tensors. The quick tier compiles these alone: what equations they are makes no difference to
# that, and all of them run eagerly.
MECHANISMS = ("sgd", "adamw", "adan", "ftrl", "rprop", "sgld", "lamb", "novograd", "group_adagrad", "muon")
COMPILED_RULES = [
    pytest.param(getattr(rules, name), id=name, marks=() if name in MECHANISMS else pytest.mark.sample(0))
    for name in rules.__all__
]
