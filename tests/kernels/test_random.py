"""Random numbers by counting: Philox-4x32-10 against its authors' own answers, and normal numbers alike on every engine."""

# ruff: noqa: RUF059  # a rule names all its states, whether it needs them or not

import numpy as np
import pytest
import torch
import updates

from tristep import Trainer
from tristep.kernels import jit, random, reduction, rule, tl, update
from tristep.kernels.states import states_for
from tristep.optimizer import RuleOptimizer

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# A radius is a logarithm and a root, an angle a polynomial: an ulp or two each, whichever library computes them.
CLOSE = {"rtol": 6 * 2.0**-24, "atol": 1e-12}
LARGEST_KEY = 2**24 - 1

# Counter, key and result of "philox4x32 10" in kat_vectors of Random123 (Salmon et al. 2011).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@rule
def noise(w, g, state, hyper, index):
    """w <- a standard normal number."""
    key0, key1 = hyper
    return tl.normal(key0, key1, index) + 0.0 * g, state


def drawn(place, sizes, keys, dtype=F32):
    """The numbers for tensors of these sizes, each with its keys."""
    weights = [torch.zeros(size, dtype=dtype, device=place.device) for size in sizes]
    place.run(noise, weights, [torch.zeros_like(w) for w in weights], [()] * len(sizes), [[1.0, *pair] for pair in keys])
    return [weight.cpu().double().numpy() for weight in weights]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_judge_knows_the_authors_answers(counter, key, expected):
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    assert [int(word) for word in updates.philox(*words[:2])] == words[2]


def test_torchs_words_are_the_judges():
    """For counters of up to 62 bits, of which all carries happen, and keys of any 32."""
    rng = np.random.default_rng(0)
    index = np.concatenate([np.arange(1000), 2**32 + np.arange(-500, 500), rng.integers(0, 2**62, 1000)])
    halves = (index & 0xFFFFFFFF, index >> 32, 0 * index, 0 * index)
    for key in [(0, 0), (1, 0), (0, 1), (LARGEST_KEY, 3), (2**32 - 1, 2**32 - 1)]:
        expected = updates.philox(halves, key)
        for got, words in zip(random._philox(*key, torch.from_numpy(index)), expected, strict=True):
            assert np.array_equal(got.numpy().astype(np.uint64), words)
    assert [int(word) for word in random._philox(0, 0, torch.tensor([0]))][:2] == [0x6627E8D5, 0xE169C58D]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("keys", [(0, 0), (1, 0), (0, 1), (12_345, 678), (LARGEST_KEY, LARGEST_KEY)])
def test_normal_numbers_are_the_judges(place, keys, dtype):
    (got,) = drawn(place, [place.tile + 1000], [keys], dtype)
    expected = updates.normal(*keys, np.arange(got.size)).astype(np.float64)
    np.testing.assert_allclose(got, expected, **CLOSE)


def test_normal_numbers_have_the_moments_of_the_normal_distribution():
    """Each within four standard errors: for a million numbers, 1 / 1000 times the deviation of what is averaged."""
    x = random.normal(3, 4, torch.arange(1_000_000)).double()
    for power, mean, deviation in [(1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)]:
        assert float((x**power).mean()) == pytest.approx(mean, abs=4e-3 * deviation)
    for lag in (1, 2, 3, 4, 8, 1024):  # neighbours know nothing of each other
        assert float((x[lag:] * x[:-lag]).mean()) == pytest.approx(0, abs=4e-3)
        assert float(((x[lag:] ** 2 - 1) * (x[:-lag] ** 2 - 1)).mean()) == pytest.approx(0, abs=8e-3)
    for bound, share in [(1.0, 0.3173105), (2.0, 0.0455003), (3.0, 0.0026998)]:
        assert float((x.abs() > bound).double().mean()) == pytest.approx(share, abs=4e-3 * (share * (1 - share)) ** 0.5)
    assert 4.5 < float(x.abs().max()) < (2 * 24 * np.log(2)) ** 0.5  # the smallest number that the radius can be of is 2^-24


@pytest.mark.sample(1)
def test_numbers_depend_on_keys_and_index_only(place):
    """Not on the other tensors, on their order, on where tiles begin, nor on threads."""
    keys = [(5, k) for k in range(4)]
    sizes = [3 * place.tile + 5, 10, 1, 1000]
    together = drawn(place, sizes, keys)
    backwards = drawn(place, sizes[::-1], keys[::-1])[::-1]
    for got, other, size, pair in zip(together, backwards, sizes, keys, strict=True):
        assert np.array_equal(got, other)
        # A shorter tensor's last elements may be computed in another way, as the last of a tile that is not full.
        (shorter,) = drawn(place, [size - size // 3], [pair])
        np.testing.assert_allclose(shorter, got[: shorter.size], **CLOSE)


def test_no_number_is_drawn_from_torchs_generator(place):
    before = torch.get_rng_state()
    drawn(place, [100], [(1, 2)])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_index_is_the_elements_place_in_memory_order(place):
    """Of a transposed weight too, with states or without; and of the elements alone, where there are gaps between them."""

    @rule
    def numbered(w, g, state, hyper, index):
        (seen,) = state
        return index + 0.0 * w, (index + 0.0 * w,)

    for weight in (torch.zeros(5, 6).T, torch.zeros(6, 8)[:, ::2], torch.zeros(6, 5)):
        weight = weight.to(place.device)
        states = states_for(numbered, [weight])
        place.run(numbered, [weight], [torch.zeros_like(weight)], states, [[1.0]])
        count = torch.arange(float(weight.numel()))
        expected = count.reshape(weight.shape[::-1]).T if weight.T.is_contiguous() else count.reshape(weight.shape)
        assert torch.equal(weight.cpu(), expected)
        assert torch.equal(states[0][0].cpu(), expected)


def test_reductions_may_draw_too(place):
    w = torch.ones(3000, device=place.device)
    states = states_for(measured, [w])
    place.run(measured, [w], [torch.ones_like(w)], states, [[1.0, 8.0, 9.0]])
    x = updates.normal(8, 9, np.arange(3000))
    assert float(states[0][0][0]) == pytest.approx(float(np.sum(x**2)), rel=1e-5)


@jit
def drawn_by(first, second, index):
    return tl.normal(first, second, index)


@rule
def shaken(w, g, state, hyper, index):
    seed, t = hyper
    x = drawn_by(seed, t, index)
    return w + x, state


class Shaken(RuleOptimizer):
    rule = shaken

    def __init__(self, seed=0, **others):
        self.seed = seed
        super().__init__(**others)

    def hyper(self, t, lr, wd):
        return {"t": t}


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "ema_decay": 0.5}], ids=["", "with options"])
@pytest.mark.parametrize("seed", [0, 7, 2**24, 2**24 + 1, -1, -(2**40)])
def test_an_optimizer_makes_keys_for_each_tensor_and_step(place, options, seed):
    """Of whole numbers of any size, alike on every engine."""
    weights = [torch.nn.Parameter(torch.zeros(500, device=place.device)) for _ in range(2)]
    trainer = Trainer(weights, Shaken(seed, **options), engine=place.engine)
    before, steps = torch.zeros(2, 500), []
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        trainer.step(1)
        now = torch.stack([weight.detach().cpu() for weight in weights])
        steps += (now - before).unbind()
        before = now
    keys = [np.random.SeedSequence([seed % 2**64, i, t]).generate_state(2) >> 8 for t in (1, 2) for i in range(2)]
    for got, pair in zip(steps, keys, strict=True):
        np.testing.assert_allclose(got, updates.normal(*pair.tolist(), np.arange(500)), rtol=1e-4, atol=1e-6)
    correlated = np.corrcoef(torch.stack(steps)) - np.eye(4)
    assert np.abs(correlated).max() < 0.25  # five standard deviations


def test_a_second_key_may_be_a_literal(place):
    """For several numbers of each element."""

    @rule
    def twice(w, g, state, hyper, index):
        (second,) = state
        (key,) = hyper
        return w + drawn_by(key, 1, index), (tl.normal(key, 2.0, index),)

    w = torch.zeros(500, device=place.device)
    states = states_for(twice, [w])
    place.run(twice, [w], [torch.zeros_like(w)], states, [[1.0, 5.0]])
    for got, key1 in [(w, 1), (states[0][0], 2)]:
        np.testing.assert_allclose(got.cpu(), updates.normal(5, key1, np.arange(500)), **CLOSE)


@pytest.mark.parametrize("key", [-1, 0.5, 2**24, float("nan")])
def test_keys_that_engines_would_read_differently_are_refused(key):
    w = torch.zeros(3)
    with pytest.raises(ValueError, match=r"key0=.* is a key of tl.normal: must be a whole number, 0 to 2\^24 - 1"):
        update(noise, [w], [w.clone()], [()], {"key0": key, "key1": 0})
    if key == 0.5:
        with pytest.raises(TypeError, match="seed=0.5 is a key of tl.normal: must be a whole number"):
            Shaken(key).row(1, 0.1, 0.0, 0)


@reduction
def squares_of_noise(w, g, state, hyper, index):
    key0, key1 = hyper
    x = tl.normal(key0, key1, index)
    return (x * x,)


@rule(reduction=squares_of_noise)
def measured(w, g, state, hyper, sums):
    (seen,) = state
    key0, key1 = hyper
    (square,) = sums
    return w, (square + 0.0 * w,)
