"""The collectives by one set of names, in real processes."""

import pytest
import torch
import torch.distributed as dist

from tristep.trainer.utils import distributed


def _gather_and_scatter():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathered, part = torch.zeros(2 * ranks), torch.zeros(2)
    distributed.all_gather(gathered, torch.tensor([rank, 10.0]))
    distributed.reduce_scatter(part, torch.arange(2.0 * ranks) + rank)
    sent = torch.full((ranks,), rank, dtype=torch.uint8)
    got = torch.zeros(ranks, dtype=torch.uint8)
    distributed.all_to_all(got, sent, async_op=True).wait()
    return gathered.tolist(), part.tolist(), got.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_collective_does_what_it_says(processes, ranks):
    shift = sum(range(ranks))
    for rank, (gathered, part, got) in enumerate(processes(ranks).run(_gather_and_scatter)):
        assert gathered == [value for r in range(ranks) for value in (r, 10.0)]
        assert part == [ranks * 2 * rank + shift, ranks * (2 * rank + 1) + shift]
        assert got == list(range(ranks))


def _fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("as wanted")
    dist.barrier()


def test_a_failure_on_one_rank_ends_all_and_the_next_test_gets_new_ones(processes):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*ValueError: as wanted"):
        processes(2).run(_fail, 1)
    assert len(processes(2).run(_gather_and_scatter)) == 2
