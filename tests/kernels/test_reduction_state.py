"""Reductions: per-tensor state, several reductions in a rule, and their hyper-parameters.

The judge is NumPy in more digits. A sum may differ from it by the rounding of adding in another order.
"""

# ruff: noqa: RUF059  # a rule names all its states and sums, whether it needs them or not

import math

import pytest
import torch
from reduction_rules import everywhere, tensors

from tristep.kernels import Update, reduction, rule, tl, transforms
from tristep.kernels.states import states_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@reduction
def kept_first(w, g, state, hyper):
    return (g * g,)


@kept_first.finish
def first_finish(sums, kept, hyper):
    (square,) = sums
    (average,) = kept
    return (0.5 * average + 0.5 * square,)


@reduction(reduction=kept_first, scope="global")
def kept_second(w, g, state, hyper, sums):
    (average,) = sums
    return (g * g / average,)


@kept_second.finish
def second_finish(sums, kept, hyper):
    """The last two ratios; what is passed on, but not kept, is the one that is forgotten."""
    (ratio,) = sums
    previous, last = kept
    return last, ratio, previous


@rule(reduction=kept_second)
def doubly_kept(w, g, state, hyper, sums):
    (seen,) = state
    previous, last, forgotten = sums
    return w, (everywhere(w, last + forgotten),)


@pytest.mark.parametrize("how", ["alone", "over ranks", "limited"])
def test_two_reductions_may_both_keep_numbers_and_pass_on_another(how, place):
    """`over ranks`: the results of one rank alone; `limited`: the second step is skipped."""
    assert (doubly_kept.state, doubly_kept.kept) == (("seen",), ("average", "previous", "last"))
    assert doubly_kept.slots == ("seen", "average", "previous", "last")
    assert doubly_kept.shapes(torch.Size([2, 3])) == [torch.Size([2, 3]), *[torch.Size()] * 3]
    weights, gradients = tensors(place, [(4,), (6,)], F32)
    made = transforms.limited(doubly_kept, skips=True) if how == "limited" else doubly_kept
    states = states_for(made, weights)
    update = Update(made, weights, states, engine=place.engine)
    if how == "over ranks":
        update.all_reduce_global = update.all_reduce_per_tensor = lambda totals, by: None
    update.bind(gradients)
    averages, last, previous = [0.0, 0.0], 0.0, 0.0
    for t in range(5):
        is_skipped = how == "limited" and t == 1
        update.hyper[:] = [1.0, math.inf, 0.0 if is_skipped else math.inf][: 1 + len(made.hyper)]
        update()
        if is_skipped:
            continue
        squares = [float((g.double() ** 2).sum()) for g in gradients]
        averages = [0.5 * a + 0.5 * s for a, s in zip(averages, squares, strict=True)]
        forgotten, previous, last = previous, last, sum(s / a for s, a in zip(squares, averages, strict=True))
        for row, average in zip(states, averages, strict=True):
            found = [float(row[0][0]), *map(float, row[1:])]
            assert found == pytest.approx([last + forgotten, average, previous, last], rel=2e-6)


@reduction(scope="global")
def since(w, g, state, hyper, kept, index):
    (lr,) = hyper
    level, steps = kept
    return lr * (g - level), tl.where(index == 0, steps, 0.0)


@since.finish
def level_since(sums, kept, hyper):
    change, steps_seen = sums
    level, steps = kept
    (fading,) = hyper
    return fading * level + change, steps_seen + 1.0, level


@rule(reduction=since)
def by_level(w, g, state, hyper, sums):
    (lr,) = hyper
    level, steps, before = sums
    return w - lr * (level - 0.5 * before), state


@pytest.mark.sample(2)
def test_a_reduction_may_read_what_it_has_kept(place):
    """Numbers of all tensors together are the same for all: of other types, without gradient, of other rates."""
    kinds = [(F32, 3), (F64, 5), (F32, 1500), (BF16, 2)]
    weights = [torch.zeros(size, dtype=dtype, device=place.device) for dtype, size in kinds]
    states = states_for(by_level, weights)
    update = Update(by_level, weights, states, engine=place.engine)
    rates = [0.5, 0.25, 0.125, 1.0]
    level, steps, moved = 0.0, 0.0, [0.0] * 4
    for t in range(4):
        gradients = [torch.full_like(weight, 1.0 + i - t) for i, weight in enumerate(weights)]
        left_out = {0: [0, 1], 2: [2, 3], 3: [0, 1, 2, 3]}.get(t, [])
        for i in left_out:
            gradients[i] = None
        for i, rate in enumerate(rates):  # a tensor that is left out may have any hyper-parameters
            update.hyper[i] = [1.0, *([math.nan] * 2 if i in left_out else [rate, 0.5])]
        update.bind(gradients)
        update()
        there = [i for i in range(4) if i not in left_out]
        if there:
            before = level
            change = sum(rates[i] * weights[i].numel() * (1.0 + i - t - level) for i in there)
            level, steps = 0.5 * level + change, len(there) * steps + 1.0
        for i in there:
            moved[i] -= rates[i] * (level - 0.5 * before)
        for row in states:
            assert [float(number) for number in row] == pytest.approx([level, steps], rel=1e-6)
    for weight, expected in zip(weights, moved, strict=True):
        assert weight[0].item() == weight[-1].item() == pytest.approx(expected, rel=1e-2 if weight.dtype == BF16 else 1e-5)


@reduction
def first_sum(w, g, state, hyper):
    return g, 1.0


@reduction(reduction=first_sum, feeds_next=True)
def with_the_first(w, g, state, hyper, sums):
    total, count = sums
    return ((g - total / count) * (g - total / count),)


@reduction(reduction=with_the_first, feeds_next=True)
def with_both(w, g, state, hyper, sums):
    square, total, count = sums
    return (w,)


@with_both.finish
def weight_sums(sums, kept, hyper):
    (w_sum,) = sums
    (sum_of_weights,) = kept
    return (sum_of_weights + w_sum,)


@rule(reduction=with_both)
def by_all_of_them(w, g, state, hyper, sums):
    a, b, c, d = state
    w_sum, square, total, count = sums
    return w, (everywhere(w, w_sum), everywhere(w, square), everywhere(w, total), everywhere(w, count))


@pytest.mark.sample(2)
def test_reductions_may_pass_on_what_came_before_them(place):
    assert (with_both.n_results, by_all_of_them.kept) == (4, ("sum_of_weights",))
    weights, gradients = tensors(place, [(5,), (place.tile + 3,)], F64)
    states = states_for(by_all_of_them, weights)
    for t in (1, 2):
        place.run(by_all_of_them, weights, gradients, states, [[1.0]] * 2)
        for w, g, row in zip(weights, gradients, states, strict=True):
            w, g = w.cpu().double(), g.cpu().double()
            expected = [t * w.sum(), ((g - g.mean()) ** 2).sum(), g.sum(), g.numel()]
            assert [float(state[-1]) for state in row[:4]] == pytest.approx([float(x) for x in expected], rel=1e-9)


@reduction
def flagged(w, g, state, hyper):
    return (g * g,)


@flagged.finish
def with_constants(sums, kept, hyper):
    (square,) = sums
    seen, many, rate = kept
    (lr,) = hyper
    return 1.0, square > 5.0, lr


@rule(reduction=flagged)
def by_flags(w, g, state, hyper, sums):
    (lr,) = hyper
    seen, many, rate = sums
    return w - rate * seen * (1.0 + many), state


def test_per_tensor_state_may_be_constants_comparisons_and_hyper_parameters(place):
    weights = [torch.zeros(n, device=place.device) for n in (3, 10)]
    states = states_for(by_flags, weights)
    place.run(by_flags, weights, [torch.ones_like(w) for w in weights], states, [[1.0, 0.5], [1.0, 0.25]])
    assert [[float(number) for number in row] for row in states] == [[1.0, 0.0, 0.5], [1.0, 1.0, 0.25]]
    assert [w[0].item() for w in weights] == [-0.5, -0.5]


@reduction
def some_names(w, g, state, hyper, index):
    third, first = state
    c, a = hyper
    return tl.where(index < 3, third * c, 0.0), first * a, tl.where(index == 0, w, 0.0)


@rule(reduction=some_names)
def all_names(w, g, state, hyper, sums, index):
    first, second, third = state
    a, b, c = hyper
    x, y, z = sums
    return w + tl.where(index == 1, b, 0.0), (everywhere(w, x), second, everywhere(w, z + y))


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [4, 5000])
def test_a_reduction_may_name_some_of_the_rules_values_in_any_order(place, size):
    w = torch.arange(size, dtype=F32, device=place.device) + 7.0
    state = tuple(torch.full((size,), value, device=place.device) for value in (1.0, 2.0, 4.0))
    place.run(all_names, [w], [torch.ones_like(w)], [state], [[1.0, 10.0, 0.5, 1000.0]])
    assert w[:3].tolist() == [7.0, 8.5, 9.0]
    assert [float(values[-1]) for values in state] == [3 * 4.0 * 1000.0, 2.0, 7.0 + size * 10.0]


@reduction
def scaled_sum(w, g, state, hyper):
    beta, scale = hyper
    return (scale * g,)


@scaled_sum.finish
def scaled_average(sums, kept, hyper):
    (found,) = sums
    (average,) = kept
    fresh, beta = hyper
    return (beta * average + fresh * found,)


@rule(reduction=scaled_sum)
def by_average(w, g, state, hyper, sums):
    lr, scale = hyper
    (average,) = sums
    return w - lr * scale * average, state


@pytest.mark.sample(2)
def test_hyper_parameters_of_reductions_alone_follow_the_rules_own(place):
    """Weights with different ones, which lie in one table, one of them on two tiles."""
    assert by_average.own_hyper == ("lr", "scale")
    assert by_average.hyper == ("lr", "scale", "beta", "fresh")
    weights = [torch.zeros(size, device=place.device) for size in (4, place.tile + 1)]
    states = states_for(by_average, weights)
    rows = [[1.0, 0.5, 2.0, 0.25, 3.0], [1.0, 0.25, 4.0, 0.5, 0.125]]
    for _ in range(2):
        place.run(by_average, weights, [torch.ones_like(w) for w in weights], states, rows)
    for w, (average,), (_, lr, scale, beta, fresh) in zip(weights, states, rows, strict=True):
        first = fresh * scale * w.numel()
        assert float(average) == pytest.approx((1.0 + beta) * first)
        assert w[0].item() == w[-1].item() == pytest.approx(-lr * scale * (2.0 + beta) * first)


@pytest.mark.parametrize("stored", ["interleaved", "of another array", "apart"])
def test_per_tensor_states_are_stored_where_they_were_given(place, stored):
    """In one array, in which those of two groups take turns, since weights are of two types; or in other memory."""
    kinds = [BF16 if i in (1, 4, 5) else F32 for i in range(7)]
    weights = [torch.zeros(i + 1, dtype=kind, device=place.device) for i, kind in enumerate(kinds)]
    numbers = torch.zeros(7, 3, device=place.device)
    states = {
        "interleaved": states_for(by_flags, weights),
        "of another array": [tuple(numbers[i].unbind()) for i in (3, 0, 6, 1, 5, 2, 4)],
        "apart": [tuple(torch.zeros((), device=place.device) for _ in range(3)) for _ in weights],
    }[stored]
    before = [number.data_ptr() for row in states for number in row]
    place.run(by_flags, weights, [torch.ones_like(w) for w in weights], states, [[1.0, 0.5 + i] for i in range(7)])
    assert [[float(number) for number in row] for row in states] == [[1.0, float(i >= 5), 0.5 + i] for i in range(7)]
    assert [w[-1].item() for w in weights] == [-(0.5 + i) * (1.0 + (i >= 5)) for i in range(7)]
    assert [number.data_ptr() for row in states for number in row] == before
