"""The iteration of Newton and Schulz: published lists of coefficients, the form on the products of rows, blocks of rows."""

import math
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tristep.kernels import Update, rules
from tristep.kernels.backends import computed_by
from tristep.kernels.states import states_for

muon = import_module("tristep.kernels.rules.muon")  # the family, which is named like its rule

LISTS = muon.COEFFICIENTS
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def through(values, triples):
    """What the published polynomials make of singular values, by NumPy."""
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values


def with_values(values, rows, columns, seed=0):
    """A float64 matrix [rows, columns] with these singular values, and its singular vectors."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, len(values))))[0] for n in (rows, columns))
    return torch.from_numpy((left * values) @ right.T), left, right


@pytest.mark.parametrize("gram", [False, True], ids=["", "gram"])
@pytest.mark.parametrize("name", LISTS)
def test_singular_values_go_through_the_polynomials(name, gram):
    values = np.logspace(0, -3, 24)
    values /= np.linalg.norm(values)
    x, left, right = with_values(values, 24, 60)
    found = (muon.iterated_on_gram if gram else muon.iterated)(x, LISTS[name])  # overwrites x
    expected = (left * through(values, LISTS[name])) @ right.T
    assert np.linalg.norm(found.numpy() - expected) < 1e-10 * np.linalg.norm(expected)


# What the papers say of singular values between 10^-3 and 1: none, but one of cubic5, is farther from 1 than this.
BANDS = {"quintic": (0.1, 1.21), "polar_express": (0.98, 1.001), "cubic5": (0.03, 1.31), "deepseekv4": (0.99, 1.01)}


@pytest.mark.parametrize("name", BANDS)
def test_what_each_list_makes_of_singular_values(name):
    low, high = BANDS[name]
    values = through(np.logspace(0, -3, 10_000), LISTS[name])
    assert low < values.min()
    assert values.max() < high
    assert through(1e-4, LISTS[name]) > 0.0


def test_polar_express_is_algorithm_1_of_its_paper():
    """Amsel et al. (2025): coefficients over powers of 1.01, except for the last, and 1.01 times the norm."""
    published = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    ]
    values = np.linspace(0.0, 1.0, 101)
    expected = values / 1.01
    for a, b, c in published:
        expected = (a / 1.01) * expected + (b / 1.01**3) * expected**3 + (c / 1.01**5) * expected**5
    expected = 1.875 * expected - 1.25 * expected**3 + 0.375 * expected**5
    np.testing.assert_allclose(through(values, LISTS["polar_express"]), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("shape", [(1, 32, 96), (2, 96, 32)], ids=str)
def test_sixteen_bits_on_the_products_of_rows(shape, name):
    """As exact as the plain form in bfloat16, of matrices whose singular values are 10^-2 and more of the largest."""
    rows, columns = shape[1:]
    values = np.logspace(0, -2, 32)
    stack = torch.stack([with_values(values, rows, columns, seed)[0] for seed in range(shape[0])])
    exact = through_the_polynomials(stack, LISTS[name])
    errors = []
    for gram in (False, True):
        found = muon.orthogonalized(stack.float(), LISTS[name], 1e-7, gram)
        assert found.shape == shape
        errors.append(float((found.double() - exact).norm() / exact.norm()))
    assert errors[1] < 2.0 * errors[0] < 0.1


@pytest.mark.parametrize("name", LISTS)
def test_float16_on_the_products_of_rows(name):
    """As on a GPU: more exact than the plain form in bfloat16, also of singular values down to 10^-3 of the largest."""
    x, _, _ = with_values(np.logspace(0, -3, 32), 32, 96)
    exact = through_the_polynomials(x, LISTS[name])
    plain, found = (muon.orthogonalized(x[None], LISTS[name], 1e-7, *how) for how in [(False, BF16), (True, F16)])
    assert float((found.double() - exact).norm()) < 0.75 * float((plain.double() - exact).norm())


def through_the_polynomials(x, triples):
    """The exact result, in float64."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    return (left * torch.from_numpy(through(values.numpy(), triples))[..., None, :]) @ right


def drawn(kind, rows, columns):
    """Random matrices, some with singular values down to 10^-6, some of low rank and noise."""
    torch.manual_seed(0)
    if kind == "graded":
        return with_values(np.logspace(0, -6, min(rows, columns)), rows, columns)[0]
    if kind == "rows of many sizes":
        return torch.randn(rows, columns, dtype=F64) * torch.logspace(0, -6, rows, dtype=F64)[:, None]
    x = torch.randn(rows, columns, dtype=F64)
    return x if kind == "random" else 1e-3 * x + torch.randn(rows, 4, dtype=F64) @ torch.randn(4, columns, dtype=F64)


# The largest errors as shares of torch's: in float16, in bfloat16, and in bfloat16 on the products of rows.
LARGEST = {
    "random": (0.5, 1.1, 2.0),
    "graded": (0.5, 1.1, 0.8),
    "low rank": (0.5, 1.1, 0.8),
    "rows of many sizes": (1.5, 1.5, 4.0),
}


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (64, 256), (192, 64)], ids=str)
@pytest.mark.parametrize("kind", LARGEST)
def test_defaults_are_as_accurate_as_torch(kind, shape):
    """float16, as on a GPU, and bfloat16, as on a CPU."""
    x = drawn(kind, *shape)
    exact = through_the_polynomials(x, LISTS["quintic"])
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = x.float()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    torchs = -weight.detach() / max(1.0, shape[0] / shape[1]) ** 0.5
    results = [torchs, *(muon.orthogonalized(x.float()[None], LISTS["quintic"], 1e-7, None, dtype) for dtype in (F16, None))]
    error, of_float16, on_cpu = (float((result.double() - exact).norm() / exact.norm()) for result in results)
    assert of_float16 < LARGEST[kind][0] * error
    assert on_cpu < LARGEST[kind][1 + muon.uses_gram(*shape, BF16)] * error


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (64, 256), (192, 64)], ids=str)
@pytest.mark.parametrize("kind", LARGEST)
def test_triton_halves_are_as_accurate_as_whole_products(kind, shape, monkeypatch):
    """But for what summing in another order makes, and in the Gram form for rounding what is symmetric without it."""
    pytest.importorskip("triton", reason="Triton has builds for Linux only")
    x = drawn(kind, *shape)
    exact = through_the_polynomials(x, LISTS["quintic"])
    errors = []
    for by_half in (False, True):
        monkeypatch.setattr(muon, "halves_pay", lambda x, by_half=by_half: by_half)
        found = muon.orthogonalized(x.float()[None].to(DEVICE), LISTS["quintic"], 1e-7, None, F16)[0].cpu()
        errors.append(float((found.double() - exact).norm()))
    assert errors[1] < 1.25 * errors[0]


class Counted(FlopCounterMode):
    """Operations of all products: those of torch, and those of symmetric ones, by their blocks."""

    by_half = 0

    def symmetric_product(self, added, left, right, *, beta=1.0, alpha=1.0, out=None):
        symmetric = import_module("tristep.kernels.backends.triton.symmetric")
        block = symmetric.TILES[0].block
        *stack, rows, depth = left.shape
        self.by_half += 2 * math.prod(stack) * symmetric.n_programs(rows, block) * block**2 * depth
        return left.new_empty((*stack, rows, rows)) if out is None else out


# By the longer side over the shorter: whether the Gram form is taken; in cubes of the shorter, whole products, and halves.
COUNTS = {1: (False, 30, 20), 2: (True, 44, 26), 4: (True, 60, 38)}


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("times", COUNTS)
def test_operations_of_five_steps(times, turned, monkeypatch):
    """Counted by torch, and by blocks. With the blocks on the diagonal it is a little more than half."""
    symmetric = pytest.importorskip("tristep.kernels.backends.triton.symmetric", reason="Triton has builds for Linux only")
    n, gram, *expected = 2**14, *COUNTS[times]
    shape = (times * n, n) if turned else (n, times * n)
    assert gram == muon.uses_gram(*shape, F16)
    for by_half, most in zip((False, True), expected, strict=True):
        monkeypatch.setattr(muon, "halves_pay", lambda x, by_half=by_half: by_half)
        with Counted(display=False) as counted:
            monkeypatch.setattr(symmetric, "symmetric_product", counted.symmetric_product)
            muon.orthogonalized(torch.empty(1, *shape, device="meta"), LISTS["quintic"], 1e-7, gram, F16)
        found = (counted.get_total_flops() + counted.by_half) / n**3
        assert most <= found <= (1.01 if by_half else 1.0) * most


# Shapes, what the GPU can do, the engine that was asked for, and whether Triton makes no fence.
PAYS = [((512, 512), (9, 0), None, True), ((4096, 1024), (8, 0), "triton", True), ((512, 512), (10, 0), None, False)]
PAYS_NOT = [
    *(((496, 4096), (9, 0), None, False), ((1024, 1000), (9, 0), None, False), ((2**15, 2**16), (9, 0), None, False)),
    *(((1024, 1024), (7, 5), None, False), ((1024, 1024), (9, 0), "eager", False), ((512, 512), (10, 0), None, True)),
]


@pytest.mark.parametrize("given", [*PAYS, *PAYS_NOT], ids=str)
def test_half_of_the_blocks_of_large_matrices_on_gpus_with_triton(given, monkeypatch):
    symmetric = pytest.importorskip("tristep.kernels.backends.triton.symmetric", reason="Triton has builds for Linux only")
    shape, capability, engine, unfenced = given
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(muon, "choose_engine", lambda device, asked: asked or "triton")
    monkeypatch.setattr(symmetric, "UNFENCED", unfenced)
    symmetric.works_on.cache_clear()
    x = SimpleNamespace(shape=(2, *shape), device=torch.device("cuda", 0))
    assert computed_by(engine, muon.halves_pay, x) == (given in PAYS)
    symmetric.works_on.cache_clear()
    assert not muon.halves_pay(SimpleNamespace(shape=shape, device=torch.device("cpu")))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_matrices_of_any_size_are_divided_by_their_norms(size, dtype):
    """Squares of their elements are 0 or infinite in float32; each matrix of a stack has its own size."""
    x = torch.stack([drawn("random", 16, 24), drawn("random", 16, 24)])
    expected = x / torch.linalg.matrix_norm(x, keepdim=True)
    expected[1] *= size > 0.0
    found = muon.normalized(
        (x * torch.tensor([1.0, size])[:, None, None]).float(), 1e-37, muon.Orthogonalization(dtype=dtype)
    )
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=1e-6)


# By shape whether the Gram form is taken, in float16 and bfloat16; the last matrix has too small elements for float16.
CHOICES = {(96, 128): (False, False), (96, 144): (True, False), (192, 96): (True, False), (97, 32): (True, True)}


@pytest.mark.parametrize("shape", [*CHOICES, (8192, 8193)], ids=str)
def test_the_type_and_the_form_go_by_device_and_shape(shape, monkeypatch):
    forms = []
    for name in ("iterated", "iterated_on_gram"):
        form = getattr(muon, name)
        monkeypatch.setattr(muon, name, lambda *of, name=name, form=form: forms.append(name) or form(*of))
    found = muon.orthogonalized(torch.empty(1, *shape, device="meta"), LISTS["quintic"], 1e-7)
    assert found.shape == (1, *shape)
    assert found.dtype == (F16 if shape in CHOICES else BF16)
    if shape in CHOICES:
        muon.orthogonalized(torch.ones(1, *shape), LISTS["quintic"], 1e-7)
        assert [form == "iterated_on_gram" for form in forms] == list(CHOICES[shape])


@pytest.mark.parametrize("blocks", [3, (2, 4), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("trailing", [(5,), (3, 2, 2)], ids=["matrix", "kernel"])
def test_blocks_of_rows_are_matrices_of_their_own(blocks, trailing):
    """A step with blocks is that of the blocks alone, each with the ratio of its shape."""
    torch.manual_seed(0)
    rule = muon.muon_with(muon.Orthogonalization(flatten=True, splits=((), blocks)))
    w, g = torch.randn(2, 6, *trailing).unbind()
    row = {**dict.fromkeys(rule.hyper, 0.25), "lr": 0.1, "clip": 9.0, "epsilon": 1e-7, "scale": 0.0, "split": 1.0}
    mean, var = torch.randn(w.shape), torch.zeros(0)
    new_w, (new_mean, _) = rule(w, g, (mean, var), tuple(row.values()))
    sizes = (2, 2, 2) if blocks == 3 else blocks
    for piece, w_, g_, mean_ in zip(new_w.split(sizes), w.split(sizes), g.split(sizes), mean.split(sizes), strict=True):
        alone, _ = rule(w_, g_, (mean_, var), tuple((row | {"split": 0.0}).values()))
        torch.testing.assert_close(piece, alone, rtol=0.0, atol=2e-3)  # bfloat16, summed in another order
    torch.testing.assert_close(new_mean, 0.25 * mean + 0.25 * g)


def test_flattened_kernels_are_matrices_of_all_inputs():
    torch.manual_seed(0)
    w, g = torch.randn(2, 4, 3, 2, 2).unbind()
    rule = muon.muon_with(muon.Orthogonalization(flatten=True))
    row = {**dict.fromkeys(rule.hyper, 0.25), "clip": 9.0, "epsilon": 1e-7, "split": 0.0}
    assert rule.shapes(w.shape) == [w.shape, (0,)]
    flat, _ = rule(w.flatten(1), g.flatten(1), (w.flatten(1), torch.zeros(0)), tuple(row.values()))
    for memory in (torch.contiguous_format, torch.channels_last):
        kernel = w.contiguous(memory_format=memory)
        found, _ = rule(kernel, g, (kernel, torch.zeros(0)), tuple(row.values()))
        assert torch.equal(found.flatten(1), flat)
    plain, (_, var) = muon.muon(w, g, (w, torch.ones_like(w)), tuple(row.values()))
    assert var.shape == w.shape  # AdamW's step
    assert not torch.equal(plain, found)


def test_vectors_of_muon_are_in_one_launch_of_the_engine(place):
    """With AdamW's bits, and the states of weights that go from one rule to the other."""
    weights = [torch.randn(shape, device=place.device) for shape in [(4, 3), (5,), (300,), (2, 2, 2, 2), (3, 3)]]
    gradients = [torch.randn_like(weight) for weight in weights]
    shared = {"decay": 0.1, "clip": 0.5, "beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.99, "one_minus_beta2": 0.01}
    own = {"adam_lr": 0.01, "adam_decay": 0.02, "adam_epsilon": 1e-8}
    values = dict.fromkeys(rules.muon.hyper, 0.5) | shared | own | {"split": 0.0}
    vectors = [weight.clone() for weight in weights if weight.dim() != 2]
    expected = Update(rules.adamw, vectors, states_for(rules.adamw, vectors), engine=place.engine)
    adamw = shared | {"lr": 0.01, "decay": 0.02, "epsilon": 1e-8}
    expected.hyper[:] = [1.0, *(adamw[name] for name in rules.adamw.hyper)]
    states = states_for(rules.muon, weights)
    run = Update(rules.muon, weights, states, engine=place.engine)
    run.hyper[:] = [1.0, *(values[name] for name in rules.muon.hyper)]
    for _ in range(2):
        run.bind(gradients)
        run()
        expected.bind([gradient for gradient in gradients if gradient.dim() != 2])
        expected()
    assert run.launches == 2
    assert run.engines() == [place.engine]
    found = [(weight, *row) for weight, row in zip(weights, states, strict=True) if weight.dim() != 2]
    for row, vector, others in zip(found, vectors, expected.states, strict=True):
        assert all(map(torch.equal, row, (vector, *others)))


def test_stages_on_an_engine_are_those_in_torch(place):
    """Of stacks, blocks of rows, matrices at odd addresses, rows that are apart, and with a gradient missing in a step."""
    apart = muon.RowPattern((-1, 2), (1, 0), 1)
    rule = muon.normuon_with(muon.Orthogonalization(splits=((), (4, 8), 3, apart)))
    shapes, splits = [(3, 8, 8), (12, 8), (5, 5), (5, 5), (12, 8), (12, 8), (5, 7), (6,)], (0, 1, 0, 0, 2, 3, 0, 0)
    own = {"lr": 0.1, "clip": 2.0, "epsilon": 1e-7, "momentum": 0.9, "one_minus_momentum": 0.1, "scale": 0.2, "split": 0.0}
    found = []
    for engine in (place.engine, "eager"):
        torch.manual_seed(0)
        weights = [torch.randn(shape).to(place.device) for shape in shapes]
        states = states_for(rule, weights)
        run = Update(rule, weights, states, engine=engine, zero_grads=True)
        run.hyper[:] = [1.0, *(own.get(name, 0.25) for name in rule.hyper)]
        run.hyper[:, 1 + rule.hyper.index("split")] = splits
        for step in range(3):
            gradients = [torch.randn(shape).to(place.device) for shape in shapes]
            run.bind([None if (step, k) == (1, 3) else gradient for k, gradient in enumerate(gradients)])
            run()
            assert [bool(gradient.any()) for gradient in gradients] == [(step, k) == (1, 3) for k in range(len(shapes))]
        found.append([*weights, *(state for row in states for state in row)])
    torch.testing.assert_close(*found, rtol=0.0, atol=2e-3)  # where a direction is rounded the other way
