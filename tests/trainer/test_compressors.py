"""Compressors: what they send, those of users, and what is refused."""

import copy
import warnings

import pytest
import torch
from compressed_sums import Thirds

from tristep import kvstore
from tristep.kvstore import CompressedAllReduce, create_compressor

# In one process.


def test_one_rank_compresses_too():
    """As a store of one device does in MXNet."""
    reduce = CompressedAllReduce({"type": "2bit"}, 3)
    bucket = torch.tensor([0.7, -2.0, 0.1])
    reduce.start(bucket).wait()
    assert bucket.tolist() == [0.5, -0.5, 0.0]
    assert (reduce.ranks, reduce.bytes_sent) == (1, 0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", sorted(kvstore.registered_compressors()))
def test_which_sums_show_an_overflow(kind, value):
    reduce = CompressedAllReduce({"type": kind}, 4096)
    for step in range(3):
        bucket = torch.randn(4096)
        if step == 1:
            bucket[4095] = value
        reduce.start(bucket).wait()
        assert bool(bucket.isfinite().all()) == (step != 1 or not reduce.compressor.keeps_nonfinite)


def test_topk_sends_the_largest():
    values = torch.tensor([0.1, -5.0, 0.0, 3.0, 0.2, -0.3])
    compressor = create_compressor({"type": "topk", "ratio": 0.3})
    assert compressor.decode(compressor.encode(values), 6).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0, 0.0]


class Wrong(Thirds):
    def decode(self, message, n):
        return message


class Longer(Thirds):
    count = 0

    def encode(self, values):
        Longer.count += 1
        return super().encode(values).repeat(Longer.count)

    def decode(self, message, n):
        return super().decode(message[:n], n)


def _make(**params):
    return lambda: create_compressor(params)


def _reduce(*arguments, **options):
    return lambda: CompressedAllReduce({"type": "int8"}, *arguments, **options)


def _twice(reduce, bucket):
    for _ in range(2):
        reduce.start(bucket).wait()


REFUSED = {
    "an unknown key": (_make(type="2bit", treshold=1.0), ValueError, "'treshold' for '2bit'. Did you mean 'threshold'"),
    "a key of another": (_make(type="int8", threshold=1.0), ValueError, "for 'int8'. There are 'type', 'error_feedback'"),
    "another bucket": (lambda: _reduce(5)().start(torch.zeros(6)), ValueError, "bucket has 6 elements"),
    "another type's state": (
        lambda: _reduce(5)().load_state_dict(CompressedAllReduce({"type": "sign"}, 5).state_dict()),
        ValueError, "state has type='sign': this all-reduce has 'int8'",
    ),
    "another size's state": (
        lambda: _reduce(5)().load_state_dict(_reduce(6)().state_dict()), ValueError, "state has numel=6",
    ),
    "wrong values": (lambda: CompressedAllReduce(Wrong(), 5), ValueError, "decode gave torch.int8"),
    "longer messages": (
        lambda: _twice(CompressedAllReduce(Longer(), 5), torch.ones(5)), ValueError, "must have equal dtypes and shapes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_a_state_is_a_copy():
    reduce = CompressedAllReduce({"type": "int8"}, 300)
    reduce.start(torch.randn(300)).wait()
    state = reduce.state_dict()
    before = copy.deepcopy(state)
    reduce.start(torch.randn(300)).wait()
    assert torch.equal(state["worker"], before["worker"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce.load_state_dict(state)
    assert torch.equal(reduce.state_dict()["worker"], before["worker"])
