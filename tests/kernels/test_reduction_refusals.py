"""Reductions: what is refused, and rules that are written anew."""

import pytest
import torch
from reduction_rules import by_longest

from tristep.kernels import Update

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Functions that texts are made of.
R = "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
TWO = "@reduction\ndef r(w, g, state, hyper):\n    return g, w\n"
U = "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w, state\n"
F = "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n"
M = "@r.finish\ndef f(sums, kept, hyper):\n    (m,) = kept\n    return (m,)\n"
REFUSED = {
    "a state that the rule has not": (
        "@reduction\ndef r(w, g, state, hyper):\n    (n,) = state\n    return (n,)\n"
        + "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (m,) = state\n    return w, (m,)\n",
        "reduction 'r' unpacks 'n' from state: rule 'u' has only m",
    ),
    "too few sums unpacked": (
        TWO + "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (s,) = sums\n    return w * s, state\n",
        r"rule 'u' unpacks 1 sums \(s\): reduction 'r' gives 2",
    ),
    "a second finish": (
        R + F + "@r.finish\ndef h(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n",
        "reduction 'r' cannot be given 'h' to finish it: it has one, 'f'",
    ),
    "a finish that comes too late": (R + U + F, "reduction 'r' cannot be given 'f' to finish it: 'u' uses it already"),
    "a per-tensor state with a state's name": (
        R + M + "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (m,) = state\n    return w, (m,)\n",
        "rule 'u': the names of its states and per-tensor states must all differ",
    ),
    "two per-tensor states of one name": (
        R
        + M
        + "@reduction(reduction=r)\ndef q(w, g, state, hyper, sums):\n    return (g,)\n"
        + "@q.finish\ndef h(sums, kept, hyper):\n    (m,) = kept\n    return (m,)\n"
        + "@rule(reduction=q)\ndef u(w, g, state, hyper, sums):\n    return w, state\n",
        "rule 'u': the names of its states and per-tensor states must all differ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(write_rules, what):
    text, message = REFUSED[what]
    with pytest.raises(TypeError, match=message):
        write_rules(text)


def test_per_tensor_state_of_another_shape_or_type_is_refused():
    w = torch.zeros(3)
    with pytest.raises(ValueError, match=r"steps of weights\[0\] is torch.float32 \(1,\) .*must be torch.float32 \(\)"):
        Update(by_longest, [w], [(torch.zeros(()), torch.zeros(1))])
    with pytest.raises(ValueError, match=r"norm of weights\[0\] is torch.float64"):
        Update(by_longest, [w], [(torch.zeros((), dtype=F64), torch.zeros(()))])


TEXT = """
@reduction
def sums_of(w, g, state, hyper):
    return (2.0 * g,)

@rule(reduction=sums_of)
def stepped(w, g, state, hyper, sums):
    (s,) = sums
    return w - s * g, state
"""


def test_a_reduction_written_anew_takes_effect(place, write_rules):
    """The same names, and the same rule: only the reduction differs, by one figure."""
    for factor in (2.0, 3.0):
        w = torch.ones(4, device=place.device)
        module = write_rules(TEXT.replace("2.0", str(factor)))
        place.run(module.stepped, [w], [torch.ones_like(w)], [()], [[1.0]])
        assert w.tolist() == [1.0 - factor * 4.0] * 4
