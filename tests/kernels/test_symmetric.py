"""Products whose result is symmetric: what is above the diagonal, against float64, and mirrored; and their machine code."""

import re

import pytest
import torch

symmetric = pytest.importorskip("tristep.kernels.backends.triton.symmetric", reason="Triton has builds for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16 = torch.bfloat16, torch.float16


def numbers(*shape, dtype=F16, turned=False):
    found = torch.randn(*shape[:-2], *shape[:-3:-1] if turned else shape[-2:], device=DEVICE).to(dtype)
    return found.mT if turned else found


def by_tile(monkeypatch, tile):
    """Products are computed with this tile."""
    monkeypatch.setattr(symmetric, "_tiles_of", lambda device: (tile,))
    monkeypatch.setattr(symmetric, "_calls", {})


@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
@pytest.mark.parametrize("turned", ["nt", "tn", "nn"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (130, 70), (2, 257, 65), (256, 64)], ids=str)
def test_triton_products(shape, dtype, turned, added):
    """As float64's, but for a rounding of each sum in float32, and one of the result; of any two factors."""
    *stack, rows, depth = shape
    left = numbers(*shape, dtype=dtype, turned=turned[0] == "t")
    right = numbers(*stack, depth, rows, dtype=dtype, turned=turned[1] == "t")
    other = numbers(*stack, rows, rows, dtype=dtype)
    other = other.triu() + other.triu(1).mT if added else None
    found = symmetric.symmetric_product(other, left, right, alpha=2.0, beta=-0.5)
    wide, more = [left.double(), right.double()], torch.zeros((), device=DEVICE) if other is None else other.double()
    exact, size = 2 * wide[0] @ wide[1] - more / 2, 2 * wide[0].abs() @ wide[1].abs() + more.abs() / 2
    most = (depth + 3) * 2.0**-24 * size + torch.finfo(dtype).eps / 2 * (exact.abs() + 1e-6 * size)
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= most).triu().logical_or(torch.ones_like(found).tril(-1) != 0).all())
    assert torch.equal(found, found.mT)
    again = torch.full_like(found, float("nan"))
    assert symmetric.symmetric_product(other, left, right, alpha=2.0, beta=-0.5, out=again) is again
    assert torch.equal(again, found)


@pytest.mark.parametrize("rows", [64, 1000, pytest.param(1100, marks=pytest.mark.sample(0))])
def test_triton_bits_do_not_depend_on_the_tile(rows, monkeypatch):
    """So ranks that have chosen other tiles stay equal. Numbers of blocks are odd and even, up to more than a band has."""
    left, right = numbers(rows, 16), numbers(16, rows)
    found = []
    for tile in (symmetric.TILES[0], symmetric.TILES[-1]):
        by_tile(monkeypatch, tile)
        found.append(symmetric.symmetric_product(None, left, right, out=torch.full((rows, rows), 7.0).to(left)))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].triu(), (left.float() @ right.float()).to(F16).triu(), rtol=2e-3, atol=2e-3)


def test_triton_nan_stays_where_it_belongs():
    x = numbers(200, 64)
    x[130, 3] = float("nan")
    bad = symmetric.symmetric_product(None, x, x.mT).isnan()
    assert bad[130].all()
    assert bad[:, 130].all()
    assert int(bad.sum()) == 2 * 200 - 1


def test_triton_nothing_to_do():
    assert symmetric.symmetric_product(None, numbers(0, 5), numbers(5, 0)).shape == (0, 0)
    assert symmetric.symmetric_product(None, numbers(2, 3, 0), numbers(2, 0, 3)).tolist() == [[[0.0] * 3] * 3] * 2


def test_other_types_and_larger_matrices_are_refused():
    x = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(TypeError, match=r"torch.float32: factors and result must be torch.bfloat16, or all torch.float16"):
        symmetric.symmetric_product(None, x, x)
    with pytest.raises(TypeError, match=r"torch.bfloat16: factors"):
        symmetric.symmetric_product(None, x.to(F16), x.to(BF16))
    large = torch.empty(2**16, 2**15, dtype=F16, device="meta")
    with pytest.raises(ValueError, match=r"matrices of \(65536, 32768\): too large for addresses of 32 bits, use torch.mat"):
        symmetric.symmetric_product(None, large, large.mT)


def test_the_fastest_tile_is_found_once_and_never_while_a_graph_is_captured(monkeypatch):
    """With times of our own, as of a GPU."""
    timed, made = [], []
    for name, value in {"is_asynchronous": True, "is_capturing": False}.items():
        monkeypatch.setattr(symmetric.streams, name, lambda device, value=value: value)
    monkeypatch.setattr(symmetric, "_tiles_of", lambda device: symmetric.TILES)
    monkeypatch.setattr(symmetric, "_calls", {})
    monkeypatch.setattr(symmetric, "_made", lambda tile, *factors: lambda *given: made.append(tile))

    def time_of(call, arguments):
        call(*arguments)
        timed.append(made.pop())
        return 2.0 if timed[-1] != symmetric.TILES[2] else 1.0

    monkeypatch.setattr(symmetric, "_time_of", time_of)
    for capturing, expected in ((True, 0), (False, 2), (True, 2), (False, 2)):
        monkeypatch.setattr(symmetric.streams, "is_capturing", lambda device, capturing=capturing: capturing)
        symmetric.symmetric_product(None, numbers(32, 16), numbers(16, 32))
        assert made == [symmetric.TILES[expected]]
        made.clear()
    assert timed == list(symmetric.TILES)


CODE = """
from gpu_emulator.cases import ProductCase
from gpu_emulator.sweep import TARGETS, compile_product

compiled = compile_product(ProductCase(*arguments), TARGETS["sm_90"])
result = {"text": compiled.asm["sass"], "usage": usage(compiled)}
"""


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nt", "tn", "nn"])
@pytest.mark.parametrize("tile", range(len(symmetric.TILES)))
def test_machine_code_for_hopper(tile, layout, compiling):
    """Tensor cores fed from shared memory that is filled ahead, nothing spilled, and wide stores."""
    code = compiling.run(CODE, [[2, 256, 256], "float16", layout, layout == "nn", tile])
    assert re.search(r"\bHGMMA\b", code["text"])
    assert re.search(r"\bLDGSTS\.E\.BYPASS[\w.]*\.128\b", code["text"])
    assert not re.search(r"\b(LDL|STL)\b", code["text"])
    assert set(re.findall(r"\bSTG\.E[\w.]*", code["text"])) == {"STG.E.128"}
    assert re.search(r"STACK:0\b.*LOCAL:0\b", code["usage"])
