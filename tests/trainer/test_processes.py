"""The processes of tests: what fails in one of them."""

import pytest
import torch.distributed as dist


def _rank():
    return dist.get_rank()


def _fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("as wanted")
    dist.barrier()


def test_a_failure_on_one_rank_ends_all_and_the_next_test_gets_new_ones(processes):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*ValueError: as wanted"):
        processes(2).run(_fail, 1)
    assert processes(2).run(_rank) == [0, 1]
