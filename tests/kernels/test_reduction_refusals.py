"""Reductions: what is refused, and rules that are written anew."""

import pytest
import torch
from reduction_rules import by_longest

from tristep.kernels import Update, reduction

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Functions that texts are made of.
R = "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
TWO = "@reduction\ndef r(w, g, state, hyper):\n    return g, w\n"
KEPT = "@reduction\ndef r(w, g, state, hyper, kept):\n    (k,) = kept\n    return (g * k,)\n"
U = "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w, state\n"
F = "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n"
M = "@r.finish\ndef f(sums, kept, hyper):\n    (m,) = kept\n    return (m,)\n"
REFUSED = {
    "a state that the rule has not": (
        "@reduction\ndef r(w, g, state, hyper):\n    (n,) = state\n    return (n,)\n"
        + "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (m,) = state\n    return w, (m,)\n",
        "reduction 'r' unpacks 'n' from state: rule 'u' has only m",
    ),
    "sums without a reduction": (
        "@rule\ndef u(w, g, state, hyper, sums):\n    (s,) = sums\n    return w * s, state\n",
        r"rule 'u' must take `sums` as an argument and name its reduction, @rule\(reduction=...\), or neither",
    ),
    "a reduction without sums": (
        R + "@rule(reduction=r)\ndef u(w, g, state, hyper):\n    return w, state\n",
        "rule 'u' must take `sums` as an argument",
    ),
    "sums that are no reduction": (
        "@jit\ndef r(w, g, state, hyper):\n    return (g,)\n" + U,
        "reduction of 'u' must be made with @reduction, got Function",
    ),
    "too few sums unpacked": (
        TWO + "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (s,) = sums\n    return w * s, state\n",
        r"rule 'u' unpacks 1 sums \(s\): reduction 'r' gives 2",
    ),
    "sums that are not unpacked": (
        R + "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w * sums, state\n",
        "'u' must unpack sums into names on a line of its own",
    ),
    "a reduction that returns no tuple": (
        "@reduction\ndef r(w, g, state, hyper):\n    return g * g\n",
        r"reduction 'r' must end by returning a tuple of values, such as `return \(g \* g,\)`",
    ),
    "a reduction that returns nothing": ("@reduction\ndef r(w, g, state, hyper):\n    return ()\n", "a tuple of values"),
    "a rule with kept": (
        "@rule\ndef u(w, g, state, hyper, kept):\n    (k,) = kept\n    return w * k, state\n",
        r"rule 'u' takes \(w, g, state, hyper, kept\): .* may have sums and index after them",
    ),
    "per-tensor states without a finish": (KEPT + U, "reduction 'r' takes kept, but keeps nothing: give it a @r.finish"),
    "per-tensor states of other names": (KEPT + F, "'f' unpacks kept into x: reduction 'r' has k"),
    "a finish of two arguments": (
        R + "@r.finish\ndef f(sums, kept):\n    (x,) = kept\n    return (x,)\n",
        r"'f' takes \(sums, kept\): it must be \(sums, kept, hyper\)",
    ),
    "a finish that keeps nothing": (
        R + "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = sums\n    return (x,)\n",
        "'f' must unpack kept into the names of one number or more",
    ),
    "a finish that gives too few": (
        R + "@r.finish\ndef f(sums, kept, hyper):\n    x, y = kept\n    return (x,)\n",
        r"'f' must unpack kept .* a tuple of as many, as in `return \(new_x, new_y,\)`",
    ),
    "a finish with too many sums": (
        R + "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    a, b = sums\n    return (a + b,)\n",
        r"'f' unpacks 2 sums \(a, b\): reduction 'r' gives 1",
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


def test_what_a_reduction_sums_over_is_one_of_two():
    with pytest.raises(ValueError, match="scope='rows': must be 'tensor' or 'global'"):
        reduction(scope="rows")


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
