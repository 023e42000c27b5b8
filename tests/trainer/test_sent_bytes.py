"""The table of bytes in docs/scaling.md: what ranks send in a step, as the kernel counts it, is what the table says."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sent_bytes import bytes_sent, needs_counters, rows_of_page

import tristep
from tristep.trainer.compression.base import registered_compressors

SHAPES = [(1024, 1023), (1024,)]  # whole tiles for each of 4 ranks
N_PARAMETERS = 2**20
OF_SHAPES = {"p": (4 * 2047 + 1024) / 2**20}  # the vector is sent whole
ROWS = rows_of_page()


def _sent_by_a_step(arguments):
    """Bytes that this process sends for each of three steps of a trainer with these arguments, with all messages."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    trainer = tristep.Trainer(params, "sgd", {"learning_rate": 0.01}, kvstore="dist_sync", **arguments)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        if step == 1:  # connections and buckets are made
            dist.barrier()
            before = bytes_sent()
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        trainer.step(1)
    dist.barrier()
    return (bytes_sent() - before) / 3


# In the quick tier the code that is least work to compile.
OF_ROWS = [pytest.param(name, marks=() if name == "fp16" else pytest.mark.sample(0)) for name in ROWS]


@needs_counters
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("zero1", "ranks"), [*(pytest.param(each, 4, marks=pytest.mark.sample(0)) for each in (False, True)), (False, 3)]
)
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_step_sends_the_bytes_of_the_table(processes, name, zero1, ranks):
    row = ROWS[name]
    said = row.sent(ranks, zero1, **OF_SHAPES)
    assert ranks != 4 or row.on_four[zero1] == round(said, 2)
    arguments = {"update_on_kvstore": zero1, "compression_params": row.params}
    counted = np.mean(processes(ranks).run(_sent_by_a_step, arguments)) / N_PARAMETERS
    assert counted == pytest.approx(said, rel=0.003, abs=0.012)  # 12 kB for counts and headers


def test_the_table_has_every_compression():
    ours = {kind for kind, made in registered_compressors().items() if made.__module__.startswith("tristep.")}
    assert set(ROWS) == {"uncompressed", *ours}
