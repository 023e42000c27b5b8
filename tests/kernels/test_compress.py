"""Gradient codes: MXNet's bytes, packing by NumPy, errors within their bounds, and the same bits on every engine."""

import re
from functools import cache

import numpy as np
import pytest
import torch

from tristep.kernels import compress
from tristep.kernels.compress import BLOCK, CODES, TILE

NARROW = ("2bit", "1bit", "int8", "int4", "sign")
SCALED = ("int8", "int4", "sign")


def encoded(code, values, residual, parameter=0.5, engine=None, chunks=1):
    """The messages, in memory that held something else before."""
    size = code.size(code.chunk(values.numel(), chunks))
    messages = torch.full((chunks, size), 0xA5, dtype=torch.uint8, device=values.device)
    compress.encode(code, values, residual, messages, parameter, engine)
    return messages


def decoded(code, messages, n, parameter=0.5, engine=None, dtype=torch.float32):
    values = torch.full((n,), 77.0, dtype=dtype, device=messages.device)
    compress.decode(code, messages, values, parameter, engine)
    return values


def same(found, expected):
    """Bit by bit, but that every NaN is like another."""
    if found.is_floating_point():
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(found.cpu(), expected.cpu())


def gradients(n, wild=True):
    """Of all sizes, with zeros, a block of zeros, subnormal numbers and, in one block each, non-finite values."""
    values = torch.randn(n) * torch.exp(2 * torch.randn(n))
    values[: min(n, 130)] = 0.0
    values[131:260:2] = 1e-41
    if wild:
        for place, value in ((700, "nan"), (1500, "inf"), (2000, "-inf")):
            values[place : place + 1] = float(value)
    return values


@pytest.mark.sample(2, "cpu", "triton")
@pytest.mark.golden("gradient_compression")
@pytest.mark.golden("gradient_compression_1bit", version=2)
def test_messages_and_residuals_are_mxnets(golden, place):
    config, arrays = golden
    code, threshold = CODES[config["type"]], config["threshold"]
    n = int(np.prod(config["shape"]))
    residuals = torch.zeros(config["devices"], n, device=place.device)
    for step in range(config["steps"]):
        for d in range(config["devices"]):
            gradient = torch.from_numpy(arrays["g"][step][d].reshape(-1)).to(place.device)
            message = encoded(code, gradient, residuals[d], threshold, place.engine)
            recorded = arrays["packed"][step][d]
            np.testing.assert_array_equal(message[0, : len(recorded)].cpu(), recorded)
            assert not message[0, len(recorded) :].any()
            found = decoded(code, message, n, threshold, place.engine)
            np.testing.assert_array_equal(found.cpu(), arrays["dequantised"][step][d].reshape(-1))
        np.testing.assert_array_equal(residuals.cpu(), arrays["residual"][step].reshape(config["devices"], n))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["2bit", "1bit", "sign", "int4", "int8"])
def test_the_first_value_lies_in_the_highest_bits(name, place):
    """Against NumPy's `packbits`, of codes computed in float64."""
    code, n = CODES[name], 3 * TILE
    x = torch.randn(n)
    packed = encoded(code, x.to(place.device), None, 0.5, place.engine).cpu().numpy()[0, : n * code.bits // 8]
    wide = x.double().numpy()
    largest = np.abs(wide).reshape(-1, BLOCK).max(axis=1).repeat(BLOCK)
    codes = {
        "2bit": np.where(wide >= 0.5, 3, np.where(wide <= -0.5, 2, 0)),
        "1bit": wide > 0.5,
        "sign": wide >= 0,
        "int4": np.floor(wide / largest * 7 + 0.5) + 8,
        "int8": np.floor(wide / largest * 127 + 0.5) + 128,
    }[name]
    shifts = np.arange(code.bits)[::-1]
    expected = np.packbits((codes.astype(np.uint8)[:, None] >> shifts) & 1)
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CODES),
        *(("2bit", torch.bfloat16), ("int8", torch.float16), ("fp16", torch.bfloat16)),
    ],
    ids=str,
)
def test_engines_find_the_same_bits(name, dtype, compiled_place):
    """Of messages, residuals, values and sums, in chunks the last of which is not full; two steps."""
    code, n, chunks, ranks = CODES[name], 2 * TILE + 700, 2, 3
    gradient, residual = gradients(n), 0.3 * torch.randn(n)
    chunk = code.chunk(n, chunks)
    found = []
    for engine, device in (("eager", "cpu"), compiled_place):
        values, left = gradient.to(device, dtype), residual.clone().to(device)
        first = encoded(code, values, left, 0.3, engine, chunks)
        second = encoded(code, -2 * values, left, 0.3, engine, chunks)
        received = torch.stack([first[0], second[0], first[1]])
        part, server = torch.full_like(first[:1], 0xA5), torch.linspace(-1, 1, chunk).to(device)
        compress.reduce(code, received, server, part, chunk - 50, 0.3, engine)
        total = torch.full((chunk - 50,), 77.0, device=device)
        compress.reduce(code, received, None, total, None, 0.3, engine)
        floats = [left, decoded(code, second, n, 0.3, engine, dtype), server, total]
        messages = [first, second, part]
        if code.dtype is not None:  # a NaN of one engine may have other bits than that of another
            messages = [each.view(code.dtype) for each in messages]
        if code.vote is not None:
            votes = torch.full((1, code.votes_size(chunk, ranks)), 0xA5, dtype=torch.uint8, device=device)
            compress.reduce_votes(code, received, votes, engine)
            messages.append(votes)
            floats.append(torch.full((chunk - 50,), 77.0, device=device))
            compress.decode_votes(code, ranks, votes, floats[-1], 0.3, engine)
        found.append([*messages, *floats])
    for expected, each in zip(*found, strict=True):
        same(each, expected)


@pytest.mark.sample(3)
@pytest.mark.sample(2, "cpu", "triton")
@pytest.mark.parametrize("name", ["2bit", "1bit"])
@pytest.mark.parametrize(("ranks", "bits"), [(1, (2, 1)), (2, (3, 2)), (3, (3, 2)), (4, (4, 3)), (8, (5, 4)), (9, (5, 4))])
def test_votes_are_the_exact_sum_in_the_fewest_bits(name, ranks, bits, place):
    code, threshold = CODES[name], 0.5
    gradient = torch.randn(ranks, TILE, device=place.device)
    gradient[:, :8], gradient[:, 8:16] = 5.0, -5.0  # all ranks agree: the largest sums there are
    messages = torch.cat([encoded(code, each, None, threshold, place.engine) for each in gradient])
    width = bits[name == "1bit"]
    assert code.votes_size(TILE, ranks) == TILE // 8 * width
    votes = torch.zeros(1, TILE // 8 * width, dtype=torch.uint8, device=place.device)
    compress.reduce_votes(code, messages, votes, place.engine)
    found = torch.zeros(TILE, device=place.device)
    compress.decode_votes(code, ranks, votes, found, threshold, place.engine)
    x = gradient.cpu().double().numpy()
    sent = np.where(x > threshold, 1, -1) if name == "1bit" else threshold * ((x >= threshold) * 1.0 - (x <= -threshold))
    np.testing.assert_array_equal(found.cpu(), sent.sum(axis=0))
    assert abs(found).max() == ranks * (1 if name == "1bit" else threshold)


@pytest.mark.parametrize(("name", "steps"), [("int8", 127), ("int4", 7)])
def test_steps_are_those_of_the_largest_of_a_block(name, steps, place):
    """The error is at most half a step, but for float32's own rounding."""
    code, n = CODES[name], 2 * TILE
    x = gradients(n, wild=False)
    residual = torch.zeros(n, device=place.device)
    message = encoded(code, x.to(place.device), residual, engine=place.engine)
    found = decoded(code, message, n, engine=place.engine).cpu().double().numpy()
    wide = x.double().numpy()
    largest = np.abs(wide).reshape(-1, BLOCK).max(axis=1).repeat(BLOCK)
    error = np.abs(found - wide)
    assert (error <= largest / (2 * steps) * (1 + 1e-5) + 1e-38).all()
    assert (error / np.maximum(largest, 1e-30)).max() > 0.49 / steps  # and it is not much less
    np.testing.assert_allclose(residual.cpu(), wide - found, rtol=1e-6, atol=1e-6 * largest.max())
    top = np.abs(wide) == largest
    np.testing.assert_allclose(found[top], wide[top], rtol=1e-6, atol=1e-38)


def test_a_sign_is_scaled_by_the_mean_of_its_block(place):
    code, n = CODES["sign"], 2 * TILE
    x = gradients(n, wild=False)
    found = decoded(code, encoded(code, x.to(place.device), None, engine=place.engine), n, engine=place.engine).cpu()
    blocks = x.double().abs().view(-1, BLOCK)
    error = found.double().abs().view(-1, BLOCK) - blocks.mean(dim=1, keepdim=True)
    # The mean is summed in parts of 2^-17 of the largest.
    assert (error.abs() <= 2.0**-18 * blocks.amax(dim=1, keepdim=True) * 1.01 + 1e-38).all()
    there = found != 0
    assert torch.equal(found[there] < 0, x[there] < 0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CODES)
def test_nothing_is_lost_but_by_rounding(name, place):
    """What was sent in all steps and what is left are together what came in; exactly where thresholds make it so."""
    code, n, steps = CODES[name], TILE + 100, 6
    gradient = torch.randint(-512, 512, (steps, n)) / 256.0  # sums of these have no rounding errors
    residual = torch.zeros(n, device=place.device)
    sent = np.zeros(n)
    for each in gradient:
        message = encoded(code, each.to(place.device), residual, 0.25, place.engine)
        sent += decoded(code, message, n, 0.25, place.engine).cpu().double().numpy()
    total = gradient.double().sum(dim=0).numpy()
    np.testing.assert_allclose(
        sent + residual.cpu().double().numpy(), total, rtol=0, atol=0 if name.endswith("bit") else 1e-5
    )
    assert residual.any() or name == "fp16"  # whose digits are enough for these


@pytest.mark.parametrize(("name", "nan", "infinite"), [("2bit", 0.0, 0.5), ("1bit", -1.0, 1.0)])
def test_nonfinite_values_stay_as_in_mxnet(name, nan, infinite, place):
    code = CODES[name]
    x = torch.tensor([float("nan"), float("inf"), -float("inf")], device=place.device)
    residual = torch.zeros(3, device=place.device)
    for _ in range(3):
        message = encoded(code, x, residual, 0.5, place.engine)
        assert decoded(code, message, 3, 0.5, place.engine).tolist() == [nan, infinite, -infinite]
        x.zero_()
    assert residual.isnan()[0]
    assert residual[1:].tolist() == [float("inf"), -float("inf")]


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_nonfinite_value_makes_its_block_nan_once(name, bad, place):
    code = CODES[name]
    x, residual = torch.ones(TILE, device=place.device), torch.ones(TILE, device=place.device)
    x[BLOCK + 3] = float(bad)
    found = decoded(code, encoded(code, x, residual, engine=place.engine), TILE, engine=place.engine)
    assert found.isnan().nonzero().flatten().tolist() == list(range(BLOCK, 2 * BLOCK))
    assert found[:BLOCK].tolist() == [2.0] * BLOCK
    assert residual.abs().max() <= 1e-6  # of the block, too: nothing is kept
    x.fill_(1.0)
    assert decoded(code, encoded(code, x, residual, engine=place.engine), TILE, engine=place.engine).isfinite().all()


@pytest.mark.parametrize("name", SCALED)
def test_messages_with_nan_are_the_same_bytes_whatever_its_bits(name, place):
    """Those of a GPU's own NaN are others than those of a CPU's."""
    found = []
    for bits in (0x7FC00000, 0x7FFFFFFF, -1):
        x = torch.ones(TILE)
        x[5:6] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        x[BLOCK] = float("inf")
        found.append(encoded(CODES[name], x.to(place.device), None, engine=place.engine).cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    scales = found[0][0, TILE * CODES[name].bits // 8 :].view(torch.int32)
    assert scales[:2].tolist() == [0x7FC00000] * 2


@pytest.mark.parametrize(("name", "value", "sent"), [("fp16", 1e6, float("inf")), ("bf16", float("nan"), None)])
def test_halves_that_are_not_finite_keep_nothing(name, value, sent, place):
    code, residual = CODES[name], torch.zeros(2, device=place.device)
    x = torch.tensor([value, 1.0 + 2.0**-12], device=place.device)
    found = decoded(code, encoded(code, x, residual, engine=place.engine), 2, engine=place.engine)
    assert found[0].item() == sent if sent is not None else found[0].isnan()
    assert residual.tolist() == [0.0, 2.0**-12]


def test_large_buffers_are_shared_out_among_threads():
    """Of the cpu engine: more values than one thread takes."""
    code, n = CODES["2bit"], 300_001
    x = torch.randn(n)
    found, left = [], []
    for engine in ("eager", "cpu"):
        left.append(torch.ones(n))
        found.append(encoded(code, x, left[-1], 0.5, engine, chunks=3))
    assert torch.equal(*found)
    assert torch.equal(*left)


CODE, X = CODES["int8"], torch.zeros(10)
MESSAGE = torch.zeros(1, CODE.size(TILE), dtype=torch.uint8)
REFUSED = {
    "a float message": (lambda: compress.encode(CODE, X, None, MESSAGE.float()), TypeError, "messages is torch.float32"),
    "a short message": (lambda: compress.encode(CODE, X, None, MESSAGE[:, :-4].clone()), ValueError, "a multiple of 1056"),
    "float64": (lambda: compress.encode(CODE, X.double(), None, MESSAGE), TypeError, "values is torch.float64"),
    "gaps": (lambda: compress.encode(CODE, torch.zeros(20)[::2], None, MESSAGE), TypeError, "contiguous"),
    "too many": (lambda: compress.encode(CODE, torch.zeros(1025), None, MESSAGE), ValueError, "values has 1025 elements"),
    "a half residual": (lambda: compress.encode(CODE, X, X.half(), MESSAGE), TypeError, "residual is torch.float16"),
    "a short residual": (lambda: compress.encode(CODE, X, X[:9], MESSAGE), ValueError, "residual has 9 elements"),
    "a residual of a sum": (lambda: compress.reduce(CODE, MESSAGE, X, X), ValueError, "residual goes with a message"),
    "another target": (
        lambda: compress.reduce(CODE, MESSAGE, None, MESSAGE.repeat(2, 1)), ValueError, r"must be \(1, 1056\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


# What the compiler makes of the kernel for an H100, read off the machine code as in test_codegen.py.

COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from tristep.kernels import compress
from tristep.kernels.compress.triton import compile_for

name, reads, writes, dtype, residual, ranks = arguments
types = {"messages": torch.uint8, "votes": torch.uint8, "values": getattr(torch, dtype)}
source, target = (torch.empty(2, 2, dtype=types[what]) for what in (reads, writes))
left = torch.empty(2) if residual else None
job = compress.Job(compress.CODES[name], source, left, target, 5000, 4096, 0.5, ranks, reads, writes)
compiled = compile_for(GPUTarget("cuda", 90, 32), job)
result = compiled.asm["sass"], usage(compiled), compiled.metadata.num_warps
"""

ENCODING = [(name, "values", "messages", dtype, True, 1) for name in CODES for dtype in ("float32", "bfloat16")]
REDUCING = [(name, "messages", "messages", "float32", True, 4) for name in CODES]
DECODING = [(name, "messages", "values", "float32", False, 1) for name in CODES]
VOTING = [
    case
    for name in ("2bit", "1bit")
    for case in ((name, "messages", "votes", "float32", False, 4), (name, "votes", "values", "float32", False, 4))
]
JOBS = ENCODING + REDUCING + DECODING + VOTING
QUICK = (ENCODING[1], ENCODING[4])  # what the two tests of the quick tier look at, so that it is compiled once


def of_jobs(jobs):
    given = [pytest.param(job, marks=() if job in QUICK else pytest.mark.sample(0)) for job in jobs]
    return pytest.mark.parametrize("job", given, ids=lambda job: "-".join(map(str, job)))


@pytest.fixture(scope="module")
def code(compiling):
    """A function from a job to its machine code: text, resource usage, warps."""
    return cache(lambda job: compiling.run(COMPILE, job))


@pytest.mark.slow
@of_jobs(JOBS)
def test_no_spills_no_float64_few_registers(job, code):
    text, usage, _ = code(job)
    used = {what: int(re.search(rf"\b{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK", "LOCAL", "SHARED")}
    assert used["STACK"] == used["LOCAL"] == 0
    assert not re.search(r"\t(LDL|STL|D(ADD|MUL|FMA|SETP)|\w+\.F64)\b", text)
    assert used["REG"] <= 48
    assert used["SHARED"] <= 1024


@pytest.mark.slow
@of_jobs(ENCODING)
def test_a_full_tile_moves_what_it_must_and_nothing_else(job, code):
    """12 bytes and a code for each value: float32 by accesses of 128 bits, and all codes that a thread has by one."""
    text, _, warps = code(job)
    name, dtype = job[0], job[3]
    assert TILE // (warps * 32) == 4
    wide = re.findall(r"(?m)^[^\t\n]*\t(@!?\w+ )?((?:LDG|STG)\.E\.(?:64|128))", text)
    assert not any(predicate for predicate, _ in wide)
    halves = ["STG.E.64"] * 2 if name in ("fp16", "bf16") else []  # of this path, and the message of one that is not full
    read = ["LDG.E.128"] * 2 if dtype == "float32" else ["LDG.E.128", "LDG.E.64"]
    assert sorted(access for _, access in wide) == sorted([*read, "STG.E.128", *halves])
    if name in SCALED:  # whose path is no single stretch of code
        return
    (path,) = (part for part in re.split(r"(?m)^\S*LBB\d+:$", text) if "STG.E.128" in part)
    accesses = re.findall(r"(?m)^[^\t\n]*\t(?:@!?\w+ )?((?:LDG|STG)[\w.]*)", path)
    code_store = {"2bit": "STG.E.U8", "1bit": "STG.E.U8"}.get(name, "STG.E.64")
    assert sorted(accesses) == sorted([*read, "STG.E.128", code_store])
