"""Random rounding of weights and states: to a neighbour, right on average, and the same on every engine.

The oracle is NumPy, comparing neighbours.
"""

import math

import numpy as np
import pytest
import torch
from low_precision import as_bfloat16, numbers, same, slowly, take

from tristep.kernels import Update
from tristep.kernels.states import states_for
from tristep.kernels.storage import CodesOnly, keys, random_bits

F64, F32, F16, BF16, I8 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8


def run_at_random(place, values, update_number=1, seed=0, repeat=1, states=None):
    weights = [torch.zeros(len(values), dtype=BF16, device=place.device) for _ in range(repeat)]
    states = states_for(take, weights, BF16)
    for row in states:
        row[0].fill_(1.0)
    run = Update(take, weights, states, engine=place.engine, seed=seed)
    run.hyper[:] = [1.0, update_number]
    gradients = [torch.tensor(values, device=place.device)] * repeat
    run.bind(gradients)
    run()
    return weights


@pytest.mark.sample(0, "triton")  # whose random bits are those of torch in a test below
def test_random_rounding_goes_to_a_neighbour_and_is_right_on_average(place):
    """With shares of 1/8 and so on between the neighbours; within 5 standard errors of the binomial distribution."""
    n = 10_000
    for share in (1 / 8, 1 / 2, 13 / 16):
        for unit in (2.0**-7, -(2.0**-7), 2.0**-100):
            value = np.float32(math.copysign(unit * 2.0**7, unit) + share * unit)
            (weight,) = run_at_random(place, np.full(n, value))
            got = weight.double().cpu().numpy()
            low = math.copysign(abs(unit) * 2.0**7, unit)
            high = low + unit
            assert set(got) == {low, high}
            error = math.sqrt(share * (1 - share) / n)
            assert abs((got == high).mean() - share) < 5 * error


@pytest.mark.cover("place")
def test_random_bits_are_alike_on_every_engine_and_in_any_tiles(place):
    """Those of storage.random_bits, in one piece; of the seed, of the number of the update and of the tensor."""
    values = numbers(2, (place.tile + 2000,))
    for weight, place_in_list in zip(run_at_random(place, values, 7, 5, repeat=2), range(2), strict=True):
        low, high = keys(5, np.array([7]), np.array([place_in_list]))[0]
        random = random_bits(low, high, torch.arange(len(values)), len(take.state)).numpy().astype(np.uint64) >> np.uint64(
            16
        )
        cut = ((values.view(np.uint32) + random) >> np.uint64(16)).astype(np.uint32) << np.uint32(16)
        same(weight, np.where(np.isnan(values), values, cut.view(np.float32)))


def test_random_bits_are_uniform_and_independent_of_their_neighbours():
    """Within 5 standard errors each: of an element, of its neighbours, of the next update, and of other slots."""
    low, high = keys(0, np.array([1]), np.array([0]))[0]
    index = torch.arange(1 << 17)
    bits = random_bits(low, high, index)
    first = bits.double() / 2**32 - 0.5
    error = 5 / math.sqrt(12 * len(index))
    assert abs(float(first.mean())) < error
    assert abs(float((first**2).mean()) - 1 / 12) < error
    counts = np.bincount(bits.numpy() >> 24, minlength=256)
    assert abs(((counts - 512) ** 2 / 512).sum() - 255) < 5 * math.sqrt(2 * 255)  # chi-squared
    for lag in (1, 2, 3, 4, 5, 32, 256, 1024, 4096, 65536):
        product = float((first[:-lag] * first[lag:]).mean()) * 12
        assert abs(product) < 5 / math.sqrt(len(index) - lag), lag
    after = keys(0, np.array([2]), np.array([0]))[0]
    others = {"next update": random_bits(*after, index)} | {
        slot: random_bits(low, high, index, slot) for slot in range(1, 6)
    }
    for name, other in others.items():
        for lag in range(4):  # the elements of a group have one hash
            value = other.double() / 2**32 - 0.5
            product = float((first[: len(index) - lag] * value[lag:]).mean()) * 12
            assert abs(product) < 5 / math.sqrt(len(index) - lag), (name, lag)
            pairs = (bits >> 28)[: len(index) - lag] * 16 + (other >> 28)[lag:]
            counts = np.bincount(pairs.numpy(), minlength=256)
            mean = (len(index) - lag) / 256
            assert abs(((counts - mean) ** 2 / mean).sum() - 255) < 5 * math.sqrt(2 * 255), (name, lag)


def test_random_rounding_of_states(place):
    weight = torch.zeros(40_000, device=place.device)
    states = states_for(slowly, [weight], BF16)
    run = Update(slowly, [weight], states, engine=place.engine, seed=3)
    run.hyper[:] = [1.0, 1]
    gradient = torch.full((40_000,), 1 + 2.0**-9, device=place.device)
    run.bind([gradient])
    run()
    got = states[0][0].double()
    assert set(got.tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(float((got > 1).double().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 40_000)
    assert bool((states[0][1] == gradient).all())  # float32


def test_a_weight_with_a_master_is_not_rounded_stochastically(place):
    values = numbers(1, (1030,))
    weight = torch.zeros(1030, dtype=BF16, device=place.device)
    master = torch.zeros(1030, device=place.device)
    run = Update(take, [weight], states_for(take, [weight], BF16), [master], engine=place.engine, seed=0)
    run.hyper[:] = [1.0, 1]
    gradient = torch.tensor(values, device=place.device)
    run.bind([gradient])
    run()
    same(weight, as_bfloat16(values))
    same(master, values)


@pytest.mark.cover("place")
def test_24_bit_masters_are_rounded_to_a_neighbour_and_right_on_average(place):
    """By the upper 8 of the bits of the slot after those of the states: the integers of the formula in storage/master.py."""
    share, n = 13 / 16, 10_000
    values = np.full(n, 1 + share * 2.0**-15, dtype=np.float32)
    values[:12] = numbers(0, 12)
    for seed, at_random in ((3, True), (CodesOnly(3), False)):
        weight, rest = torch.zeros(n, dtype=BF16, device=place.device), torch.zeros(n, dtype=I8, device=place.device)
        run = Update(take, [weight], states_for(take, [weight]), [rest], engine=place.engine, seed=seed)
        run.hyper[:] = [1.0, 7] if at_random else [1.0, 0]  # to the nearest where no state is packed
        run.bind([torch.tensor(values, device=place.device)])
        run()
        got = weight.cpu().float().numpy().view(np.int32) + (rest.cpu().numpy().astype(np.int32) << 8)
        low, high = keys(3, np.array([7]), np.array([0]))[0]
        bits = values.view(np.uint32).astype(np.int64)
        cut = random_bits(low, high, torch.arange(n), len(take.state)).numpy() >> 24 if at_random else 0x80
        expected = ((bits + cut) >> 8 << 8).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(got.view(np.float32), np.where(np.isnan(values), values, expected))
        up = (got.view(np.float32)[12:] > 1).mean()
        assert abs(up - share) < 5 * math.sqrt(share * (1 - share) / n) if at_random else up == 1


def test_keys_are_splitmix64():
    """Outputs of the published generator for two seeds (Steele, Lea & Flood 2014), as far as its last step leaves them."""
    published = {
        0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC],
        1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431],
    }
    for seed, outputs in published.items():
        found = keys(seed, np.arange(1, 5), np.zeros(4, np.int64)).astype(np.int64)
        assert found[:, 0].tolist() == [output >> 48 for output in outputs]
        assert (found[:, 1] >> 1).tolist() == [(output >> 33) & 0x7FFF for output in outputs]
    other = keys(0, np.ones(2, np.int64), np.arange(2)).astype(np.int64)  # a tensor's number is another start
    assert other[0].tolist() != other[1].tolist()
