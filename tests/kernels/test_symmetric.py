"""The product of a matrix with its own transpose, against NumPy's in float64; and its machine code."""

import re
from importlib import import_module

import numpy as np
import pytest
import torch

symmetric = pytest.importorskip("tristep.kernels.backends.triton.symmetric", reason="Triton has builds for Linux only")

muon = import_module("tristep.kernels.rules.muon")  # the family, which is named like its rule
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _triton_numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def _float64(tensor):
    return tensor.double().cpu().numpy()


@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 64), (130, 70), (3, 300), (300, 3), (2, 257, 65), (3, 16, 32)])
def test_triton_products(shape, dtype):
    x = _triton_numbers(*shape, dtype=dtype)
    found = symmetric.symmetric_product(x)
    exact = _float64(x) @ np.swapaxes(_float64(x), -1, -2)
    assert found.dtype == dtype
    # Rounding of the result, and what summing in float32 loses.
    np.testing.assert_allclose(_float64(found), exact, rtol=DIGITS[dtype], atol=1e-4 * shape[-1] ** 0.5)
    block = torch.arange(shape[-2], device=DEVICE) // symmetric.ROWS
    written_twice = block[:, None] != block[None, :]
    assert torch.equal(found[..., written_twice], found.mT[..., written_twice])


@pytest.mark.parametrize("turned", [False, True])
def test_triton_sums_of_products(turned):
    """As Newton and Schulz use it, with strides of all kinds."""
    x = _triton_numbers(2, 70, 140)[:, :, ::2]
    if turned:
        x = _triton_numbers(2, 70, 70).mT
    other = symmetric.symmetric_product(_triton_numbers(2, 70, 33))
    found = symmetric.symmetric_product(x, added=other, alpha=2.0, beta=-0.5)
    exact = 2.0 * _float64(x) @ np.swapaxes(_float64(x), -1, -2) - 0.5 * _float64(other)
    np.testing.assert_allclose(_float64(found), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 48, 80), (1, 80, 48), (2, 32, 32)])
def test_triton_muon_with_half_of_the_products(shape, monkeypatch):
    """The same singular vectors, in bfloat16."""
    arguments = muon.COEFFICIENTS["quintic"], 1e-7
    g = torch.randn(shape, device=DEVICE)
    expected = muon.orthogonalized(g, *arguments)
    assert not muon.takes_symmetric_products(g)  # before a GPU has shown that it pays
    monkeypatch.setattr(muon, "takes_symmetric_products", lambda x: True)
    found = muon.orthogonalized(g, *arguments)
    assert found.shape == expected.shape
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.02


def test_triton_nan_stays_where_it_belongs():
    x = _triton_numbers(200, 64)
    x[130, 3] = float("nan")
    bad = symmetric.symmetric_product(x).isnan()
    assert bad[130].all()
    assert bad[:, 130].all()
    assert int(bad.sum()) == 2 * 200 - 1


def test_triton_nothing_to_do():
    assert symmetric.symmetric_product(_triton_numbers(0, 5)).shape == (0, 0)
    assert symmetric.symmetric_product(_triton_numbers(2, 3, 0)).tolist() == [[[0.0] * 3] * 3] * 2


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"x is torch.float32: must be torch.bfloat16 or torch.float16"):
        symmetric.symmetric_product(torch.ones(2, 2))


def test_every_block_is_computed_once():
    for n in (1, 2, 8, 9, 20):
        pairs = symmetric.block_pairs(n, torch.device("cpu"))
        assert len(pairs) == n * (n + 1) // 2
        assert len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
        assert bool((pairs[:, 0] >= pairs[:, 1]).all())


CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tristep.kernels.backends.triton import symmetric

kernel = symmetric.symmetric_kernel
constants = {"ROWS": symmetric.ROWS, "DEPTH": symmetric.DEPTH, "ADDED": True, "WIDE": False}
constants |= {"x_column": 1, "added_column": 1}
signature = {"x": "*bf16", "added": "*bf16", "out": "*bf16", "pairs": "*i32", "alpha": "fp32", "beta": "fp32"}
signature |= {name: "i32" for name in kernel.arg_names if name not in signature} | dict.fromkeys(constants, "constexpr")
signature = {name: signature[name] for name in kernel.arg_names}
multiples = [name for name, kind in signature.items() if kind not in ("constexpr", "fp32")]
hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
options = symmetric.options_for(GPUTarget("cuda", 90, 32), 227 * 1024)
source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=hints)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
result = {"text": compiled.asm["sass"], "usage": usage(compiled), "shared": compiled.metadata.shared}
"""


@pytest.mark.sample(0)
@pytest.mark.slow
def test_machine_code_for_hopper(compiling):
    """Tensor cores fed from shared memory that is filled ahead, nothing spilled, and wide stores."""
    code = compiling.run(CODE)
    assert re.search(r"\bHGMMA\b", code["text"])
    assert re.search(r"\bLDGSTS\b", code["text"])
    assert not re.search(r"\b(LDL|STL)\b", code["text"])
    stores = re.findall(r"\bSTG\.E[\w.]*", code["text"])
    assert stores
    assert set(stores) == {"STG.E.128"}
    assert code["shared"] <= 227 * 1024
    assert re.search(r"STACK:0\b.*LOCAL:0\b", code["usage"])
