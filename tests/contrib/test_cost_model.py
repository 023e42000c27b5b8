"""The model of training on many GPUs: its bytes against formulas and counted ones, its memory against real states."""

import contextlib
import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_training import train
from sent_bytes import bytes_sent, needs_counters

import tristep
from tristep.contrib import cost_model
from tristep.contrib.cost_model import automatic

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test

GPT2 = 124.4e6


class ByHand(tristep.optimizer.Optimizer):
    """An optimizer of a user who updates by hand."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight -= self.learning_rate * grad


def _row(rows, name):
    (found,) = [row for row in rows if row.name == name]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "ring", "half", "int8"), [(8, 871, 435, 218), (64, 980, 490, 245)])
def test_bytes_on_the_wire_are_those_of_the_formulas(ranks, ring, half, int8):
    rows = tristep.estimate_cost(GPT2, ranks, "nvlink")
    assert round(_row(rows, "all-reduce").wire / 1e6) == ring
    assert round(_row(rows, "ZeRO-1").wire / 1e6) == ring  # its two halves
    assert round(_row(rows, "ZeRO-3 (FSDP)").wire / 1e6) == pytest.approx(1.5 * ring, abs=1)
    assert round(_row(rows, "bf16").wire / 1e6) == half
    assert round(_row(rows, "int8").wire / (1 + 4 / 128) / 1e6) == int8  # without scales
    assert round(_row(rows, "topk 1%").wire / 1e6) == round((ranks - 1) * 8 * 0.01 * GPT2 / 1e6)
    assert _row(rows, "parameter server (1)").wire == 4 * GPT2
    share = (ranks - 1) / ranks * GPT2 / 8
    assert _row(rows, "2bit").wire == pytest.approx(share * (2 + np.ceil(np.log2(2 * ranks + 1))))  # codes, then exact sums
    assert _row(rows, "1bit").wire == pytest.approx(share * (1 + np.ceil(np.log2(ranks + 1))))
    assert _row(rows, "sign").wire == pytest.approx(2 * share * (1 + 32 / 128))


def test_nodes_keep_most_of_a_plain_collective_inside():
    flat, of_nodes = tristep.estimate_cost(GPT2, 64, "ib400"), tristep.estimate_cost(GPT2, 64, "ib400", gpus_per_node=8)
    for name in ("all-reduce", "ZeRO-1", "ZeRO-3 (FSDP)"):
        plain, row = _row(flat, name), _row(of_nodes, name)
        phases = round(plain.wire / (63 / 64 * 4 * GPT2))
        assert row.wire == pytest.approx(phases * 7 / 8 * 4 * GPT2 / 8)  # between 8 nodes, an eighth for each
        assert row.inner == pytest.approx(phases * 7 / 8 * 4 * GPT2)
        assert row.communication < plain.communication
    # Compressed messages go straight to their rank, 7 of 63 within the node.
    row = _row(of_nodes, "int8")
    assert row.inner / row.wire == pytest.approx(7 / 56)
    assert row.inner + row.wire == pytest.approx(_row(flat, "int8").wire)


def test_time_is_latency_and_bytes_over_bandwidth():
    link = cost_model.Link(bandwidth=1e9, latency=1e-3)
    rows = tristep.estimate_cost(1_000_000, 4, link, optimizer="sgd", memory=100.0)
    plain = rows[0]
    assert plain.communication == pytest.approx(6 * 1e-3 + 2 * 3 / 4 * 4e6 / 1e9)
    assert plain.update == pytest.approx(12e6 / 100e9)  # weight and gradient read, weight written
    assert plain.step == pytest.approx(plain.communication + plain.update)
    assert plain.codes == 0
    served = _row(tristep.estimate_cost(1_000_000, 4, link, servers=2), "parameter server (2)")
    assert served.communication == pytest.approx(2 * (2 * 1e-3 + 2 * 4e6 / 1e9))
    sharded = _row(rows, "ZeRO-1")
    assert sharded.update == pytest.approx(plain.update / 4)
    # Backward, two thirds of forward and backward, hides the gradients' half of it.
    hidden = _row(tristep.estimate_cost(1_000_000, 4, link, optimizer="sgd", compute_ms=3.0), "ZeRO-1")
    assert hidden.exposed == pytest.approx(sharded.communication - 2e-3)
    long = tristep.estimate_cost(1_000_000, 4, link, compute_ms=1e3)
    assert long[0].exposed == 0
    assert _row(long, "ZeRO-1").exposed == pytest.approx(sharded.communication / 2)
    assert long[0].step == pytest.approx(1.0 + long[0].update)


@pytest.mark.parametrize(
    ("optimizer", "options", "weights", "per_parameter"),
    [  # bytes that an update reads and writes, counted by hand
        ("adam", {}, "float32", 28),
        ("sgd", {"momentum": 0.9}, "float32", 20),
        ("lion", {}, "float32", 20),
        ("adamw", {"multi_precision": True}, "bfloat16", 28),
        ("adamw", {"multi_precision": "remainder"}, "bfloat16", 26),
        ("adamw", {"multi_precision": "split8", "state_dtype": "8bit"}, "bfloat16", 12.125),
        ("adamw", {"stochastic_rounding": True, "state_dtype": "4bit"}, "bfloat16", 8.125),
        ("adamw", {"multi_precision": "split8", "state_dtype": "4bit"}, "bfloat16", 10.125),
        ("adam", {}, "bfloat16", 22),
        ("adam", {"state_dtype": "8bit"}, "float32", 12 + 4 * (1 + 4 / 128)),
        ("adam", {"clip_norm": 1.0}, "float32", 32),
        ("lamb", {}, "float32", 28 + 16),
    ],
)
def test_an_update_moves_the_bytes_of_its_rule(optimizer, options, weights, per_parameter):
    n = 2**24
    rows = tristep.estimate_cost(n, 1, "nvlink", optimizer=optimizer, optimizer_params=options, weights=weights, memory=1.0)
    assert rows[0].update * 1e9 / n == pytest.approx(per_parameter, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "options", "dtype"),
    [
        ("adam", {}, torch.float32),
        ("adamw", {"multi_precision": True}, torch.bfloat16),
        ("lion", {"state_dtype": "8bit", "multi_precision": "split8"}, torch.bfloat16),
        ("lion", {"state_dtype": "4bit", "multi_precision": "split8"}, torch.bfloat16),
        ("adam", {"state_dtype": "bfloat16", "ema_decay": 0.9}, torch.float32),
        ("novograd", {}, torch.float64),
        ("adafactor", {}, torch.float32),
        ("muon", {}, torch.float32),
    ],
)
def test_memory_of_states_is_what_a_trainer_allocates(optimizer, options, dtype):
    net = torch.nn.Sequential(torch.nn.Linear(600, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3)).to(dtype)
    trainer = tristep.Trainer(net, optimizer, options)
    net(torch.ones(2, 600, dtype=dtype)).sum().backward()
    trainer.step(1)
    updater = trainer._updater
    kept = [tensor for row in updater.states.values() for tensor in row] + list(updater.masters.values())
    row = tristep.estimate_cost(net, 1, "nvlink", optimizer=optimizer, optimizer_params=options)[0]
    assert row.states == sum(tensor.nbytes for tensor in kept)
    assert row.weights == row.gradients == sum(parameter.nbytes for parameter in net.parameters())
    assert row.memory == row.weights + row.gradients + row.states
    # One of four ranks has a quarter, up to the ends of blocks and numbers that are kept of each tensor.
    quarter = _row(tristep.estimate_cost(net, 4, "nvlink", optimizer=optimizer, optimizer_params=options), "ZeRO-1").states
    assert quarter == pytest.approx(row.states / 4, rel=0.02)


def test_compression_pays_on_a_slow_link_only():
    slow = _row(tristep.estimate_cost(GPT2, 8, "1,50us"), "int8")
    assert slow.verdict.startswith("saves ")
    assert slow.residuals > 4 * GPT2
    fast = tristep.estimate_cost(GPT2, 8, cost_model.Link(5e12, 0.0))
    assert {row.verdict for row in fast[4:]} == {"on this link compression costs more than it saves"}
    assert not any(row.verdict for row in fast[:4])
    alone = tristep.estimate_cost(GPT2, 1, "nvlink")
    assert all(row.communication == row.wire == 0 for row in alone if "server" not in row.name)


def test_matrices_are_sent_as_two_of_few_columns():
    rows = tristep.estimate_cost([(100, 50), (7,), torch.empty(3, 3)], 2, "nvlink")
    assert _row(rows, "powersgd 4").wire == 4 * (4 * 150 + 7 + 9)  # of 3 x 3 nothing would be saved
    assert rows[0].wire == 4 * (5000 + 7 + 9)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"params": "8e9"}, TypeError, "params='8e9': must be a number, a module, or tensors or shapes"),
        ({"params": 0.5}, ValueError, "params=0.5: must be"),
        ({"params": 1e6 + 0.5}, ValueError, "must be an integer number of parameters"),
        ({"params": []}, ValueError, "params is empty"),
        ({"params": [3]}, TypeError, r"params\[0\]=3: must be a tensor or a shape"),
        ({"gpus": 0}, ValueError, "gpus=0: must be 1 or more"),
        ({"gpus": 2.0}, TypeError, "gpus=2.0: must be an integer"),
        ({"link": "ib40"}, ValueError, "link='ib40': Did you mean 'ib400'"),
        ({"link": "12,fast"}, ValueError, "link='12,fast': must be one of"),
        ({"link": -1.0}, ValueError, "link=-1.0"),
        ({"link": "5,-3us"}, ValueError, "the latency"),
        ({"inner": "nvlnk"}, ValueError, r"inner='nvlnk': .* Did you mean 'nvlink'\?"),
        ({"gpus_per_node": 3}, ValueError, "gpus_per_node=3: must be a divisor of gpus=4"),
        ({"memory": "h10"}, ValueError, "memory='h10': must be one of"),
        ({"weights": "bf16"}, ValueError, r"weights='bf16': .* Did you mean 'bfloat16'\?"),
        ({"compute_ms": -1}, ValueError, "compute_ms=-1: must be"),
        ({"servers": 0}, ValueError, "servers=0"),
        ({"optimizer": "adan", "optimizer_params": {"state_dtype": "2bit"}}, ValueError, "state_dtype='2bit'"),
        ({"optimizer": ByHand()}, TypeError, "must be one that is a rule, since memory follows"),
        ({"optimizer_params": {"state_dtype": "8bit"}, "weights": "float64"}, ValueError, r"='8bit': params\[0\]"),
    ],
)
def test_bad_arguments(changed, error, message):
    arguments = {"params": 1e6, "gpus": 4, "link": "nvlink"} | changed
    with pytest.raises(error, match=message):
        tristep.estimate_cost(**arguments)


LINKS = {
    "NVLink": (360e9, 3.4e-6),
    "12.5": (12.5e9, 0),
    "12.5,30us": (12.5e9, 30e-6),
    "1, 2 ms": (1e9, 2e-3),
    "1,5": (1e9, 5e-6),
}


@pytest.mark.parametrize("text", LINKS)
def test_links_are_given_by_name_or_by_numbers(text):
    link = cost_model.parse_link(text)
    assert link[:2] == pytest.approx(LINKS[text])
    assert not link.measured


SHAPES = [(1024, 1023), (1024,)]  # whole tiles for each of 4 ranks


def _sent_by_a_step(arguments):
    """Bytes that this process sends for each of three steps of a trainer with these arguments, with all messages."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    trainer = tristep.Trainer(params, "sgd", {"learning_rate": 0.01}, **arguments)
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


ROWS = {  # what a rank sends on 4 ranks, in units of the parameters: three quarters of codes, there and back, and of weights
    "all-reduce": (1.5, None),
    "ZeRO-1": (1.5, None),
    "2bit": (0.75 * (2 + 4) / 32, 0.75 * (1 + 2 / 32)),
    "1bit": (0.75 * (1 + 3) / 32, 0.75 * (1 + 1 / 32)),
    "int8": (1.5 * 8.25 / 32, 0.75 * (1 + 8.25 / 32)),
    "int4": (1.5 * 4.25 / 32, 0.75 * (1 + 4.25 / 32)),
    "sign": (1.5 * 1.25 / 32, 0.75 * (1 + 1.25 / 32)),
    "fp16": (0.75, 1.125),
    "bf16": (0.75, 1.125),
    "topk 1%": (3 * 2 * 0.01, 0.75 + 3 * 2 * 0.01),
    "powersgd 4": (1.5 * (4 * 2047 + 1024) / 2**20, 0.75 + 1.5 * (4 * 2047 + 1024) / 2**20),
}


# In the quick tier the code that is least work to compile.
OF_ROWS = [pytest.param(name, marks=() if name == "fp16" else pytest.mark.sample(0)) for name in ROWS]


@needs_counters
@pytest.mark.sample(2)
@pytest.mark.parametrize("update_on_kvstore", [False, True], ids=["all-reduce", "ZeRO-1"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_training_with_the_arguments_of_a_row_sends_its_bytes(processes, name, update_on_kvstore):
    row = _row(tristep.estimate_cost(SHAPES, 4, "eth100", update_on_kvstore=update_on_kvstore), name)
    expected = ROWS[name][update_on_kvstore] or ROWS[name][0]
    size = 4 * 2**20
    assert row.wire / size == pytest.approx(expected, rel=2e-4)
    arguments = eval(f"dict({row.kvstore})")
    counted = np.mean(processes(4).run(_sent_by_a_step, arguments))
    assert counted / size == pytest.approx(row.wire / size, rel=0.002, abs=0.003)  # and 8 kB for counts and headers


def _sent_by_a_worker(arguments):
    """The same of a worker whose steps a server takes; None from the server."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    try:
        trainer = tristep.Trainer(params, "sgd", {"learning_rate": 0.01}, **arguments)
    except SystemExit:
        return None
    for step in range(4):
        if step == 1:
            trainer._sync.store.barrier()
            before = bytes_sent()
        for param in params:
            param.grad = torch.ones(param.shape)
        trainer.step(1)
    trainer._sync.store.barrier()
    sent = bytes_sent() - before
    trainer._sync.store.close()
    return sent / 3


@needs_counters
def test_a_worker_of_a_parameter_server_sends_the_bytes_of_its_row(processes):
    row = _row(tristep.estimate_cost(SHAPES, 4, "eth100"), "parameter server (1)")
    assert row.environment == ""  # one server is the default
    two = _row(tristep.estimate_cost(SHAPES, 4, "eth100", servers=2), "parameter server (2)")
    assert two.environment == "TRISTEP_NUM_SERVERS=2"
    *workers, server = processes(5).run(_sent_by_a_worker, eval(f"dict({row.kvstore})"))
    assert server is None
    assert np.mean(workers) == pytest.approx(row.wire, rel=0.002, abs=12e3)


def _said_by_compressors(shape):
    n = int(np.prod(shape))
    types = ["2bit", "1bit", "fp16", "bf16", "int8", "int4", "sign", "topk", "powersgd"]
    return {kind: tristep.kvstore.CompressedAllReduce({"type": kind}, n, [shape]).bytes_sent for kind in types}


@pytest.mark.parametrize("ranks", [2, 3])
def test_compressed_bytes_are_those_of_the_compressors(processes, ranks):
    shape = (384, 512)  # whole tiles for each rank
    rows = tristep.estimate_cost([shape], ranks, "eth100")[4:]
    for said in processes(ranks).run(_said_by_compressors, shape):
        assert {row.name.split()[0] for row in rows} == said.keys()
        for row in rows:
            assert row.wire == pytest.approx(said[row.name.split()[0]], rel=0.002), row.name


def _measured():
    return cost_model.measure_link(sizes=(2**10, 2**16, 2**22), repeats=2)


def test_a_measured_link_is_the_same_on_all_ranks(processes):
    first, second = processes(2).run(_measured)
    assert first == second
    assert first.measured
    assert first.bandwidth > 0
    assert first.latency >= 0


def _made_up(times):
    """The link that is found if all-reduces take these times."""
    clock = iter([reading for k, spent in enumerate(times) for reading in (10.0 * k, 10.0 * k + spent)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model.links.time, "perf_counter", lambda: next(clock))
        return cost_model.measure_link(sizes=(2**12, 2**20, 2**22), repeats=1)


def test_least_squares_find_latency_and_bandwidth(processes):
    sizes = (2**12, 2**20, 2**22)
    exact = [2 * 20e-6 + size / 5e9 for size in sizes]  # two ranks: 2 messages, and half of it twice
    times = [time for each in exact for time in (1.0, each)]  # the first of each size makes connections
    for link in processes(2).run(_made_up, times):
        assert link.latency == pytest.approx(20e-6)
        assert link.bandwidth == pytest.approx(5e9)


def test_there_is_no_link_to_measure_in_one_process():
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        cost_model.measure_link()


def test_the_table_has_all_rows_and_verdicts():
    rows = tristep.estimate_cost(GPT2, 16, "eth100", gpus_per_node=8, compute_ms=100)
    text = cost_model.table(rows)
    lines = text.splitlines()
    memory = "strategy sent in node weights grads states buffers residuals memory"
    assert lines[0].split() == f"{memory} wire exposed codes update step".split()
    assert len({len(line) for line in lines[:14]}) == 1
    assert len(lines) == 1 + 13 + 1 + 13
    for row, line in zip(rows, lines[15:], strict=True):
        assert line.startswith(row.name)
        assert (row.kvstore or "fully_shard(net)") in line
        assert line.endswith(row.verdict or row.kvstore or "tristep.optim")


def _automatic(link, update_on_kvstore):
    """What "auto" takes on a link that is said to be measured, or on the real one, what it prints, and trained weights."""
    store = {"kvstore": "dist_sync", "update_on_kvstore": update_on_kvstore, "compression_params": {"type": "auto"}}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        if link is not None:
            patch.setattr(automatic, "measure_link", lambda group: cost_model.Link(*link, measured=True))
            patch.setattr(automatic, "_copy_speed", lambda device: 20e9)
        weights, _, trainer = train("sgd", {"learning_rate": 0.01}, dtype=torch.float32, **store)
    chosen = trainer._sync._compression_params
    return chosen, printed.getvalue(), weights


MIDDLE = 3e9  # bytes per second


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("link", "update_on_kvstore", "chosen", "says"),
    [
        ((1e6, 0.0), True, {"type": "int4"}, "int4 is taken"),
        ((1e6, 0.0), False, {"type": "int4"}, "int4 is taken"),
        ((MIDDLE, 0.0), True, None, "compression costs more than it saves"),  # it saves half of what it saves below
        ((MIDDLE, 0.0), False, {"type": "int4"}, "int4 is taken"),
        ((1e15, 0.0), None, None, "compression costs more than it saves"),
        (None, None, ..., "were measured"),
    ],
)
def test_what_pays_on_the_link_is_taken(processes, link, update_on_kvstore, chosen, says):
    (first, printed, weights), (other, silent, same) = processes(2).run(_automatic, link, update_on_kvstore)
    assert first == other
    assert chosen is ... or first == chosen
    np.testing.assert_array_equal(weights, same)
    assert says in printed
    assert not silent


def test_the_automatic_choice_has_no_options():
    params = {"type": "auto", "threshold": 1.0}
    with pytest.raises(ValueError, match="has the key 'threshold': 'auto' takes 'type' alone"):
        tristep.Trainer(torch.nn.Linear(2, 1), "sgd", kvstore="dist_sync", compression_params=params)
