"""Initializers: MXNet's numbers, which rule a parameter gets, torch's modules, reproducibility, and what is refused."""

import copy
import doctest
import itertools
import json
import logging
import math

import numpy as np
import pytest
import safetensors.torch
import torch

import tristep
from tristep.trainer import initializer as init
from tristep.trainer.initializer import (
    Bilinear,
    Constant,
    FusedRNN,
    InitDesc,
    Initializer,
    Load,
    LSTMBias,
    Mixed,
    MSRAPrelu,
    Normal,
    One,
    Orthogonal,
    RNNFused,
    Uniform,
    Xavier,
    Zero,
    alias,
    create,
    initialize,
    register,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

EVERY = [
    Zero(),
    One(),
    Constant(2.5),
    Constant([1.0, 2.0]),
    Uniform(),
    Normal(sigma=2),
    Orthogonal(rand_type="normal"),
    Xavier("gaussian", "in", 2),
    MSRAPrelu("out", 0),
    Bilinear(),
    LSTMBias(3.0),
    FusedRNN(Xavier(), 4, 2, "lstm", bidirectional=True, forget_bias=2),
    FusedRNN(None, 4, 1, "gru"),
    RNNFused("lstm", 2, 4, True, 3, "xavier", Normal(2), None, "lstmbias", One()),
]


@pytest.fixture
def own_registry(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(init, "_registry", dict(init._registry))


def _filled(initializer, shape, name="fc_weight", dtype=torch.float32, **desc):
    arr = torch.full(shape, math.nan, dtype=dtype)
    initializer(InitDesc(name, **desc), arr)
    return arr


def _values(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _assert_unchanged(module, before):
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# MXNet's numbers


@pytest.mark.golden("initializers")
def test_equals_mxnet(golden):
    config, arrays = golden
    made = create(config["initializer"], **config["kwargs"])
    for name in (InitDesc(config["name"]), config["name"]):
        arr = torch.full(config["shape"], math.nan)
        made(name, arr)
        np.testing.assert_allclose(arr.numpy(), arrays["value"], rtol=1e-12, atol=0)


@pytest.mark.golden("initializers_random")
def test_random_numbers_are_distributed_as_mxnets(golden):
    """Moments of two samples of n differ by a few standard errors; fourth moments bound those of the deviation."""
    config, _ = golden
    made = create(config["initializer"], **config["kwargs"])
    values = _filled(made, config["shape"]).double().numpy().ravel()
    n = config["count"]
    assert values.size == n
    std, mean = values.std(), values.mean()
    kurtosis = ((values - mean) ** 4).mean() / std**4 - 3
    if "gram_side" in config:
        matrix = values.reshape(config["shape"][0], -1)
        gram = matrix @ matrix.T if config["gram_side"] == "rows" else matrix.T @ matrix
        np.testing.assert_allclose(gram, config["gram_diagonal"] * np.eye(len(gram)), rtol=1e-6, atol=1e-6)
        assert std**2 + mean**2 == pytest.approx(config["std"] ** 2 + config["mean"] ** 2, rel=1e-6)
    else:
        assert abs(std / config["std"] - 1) < 5 * math.sqrt(2) * math.sqrt((config["excess_kurtosis"] + 2) / (4 * n))
    assert abs(mean - config["mean"]) < 5 * math.sqrt(2 / n) * config["std"]
    assert abs(kurtosis - config["excess_kurtosis"]) < 5 * math.sqrt(2 * 24 / n)
    if config["excess_kurtosis"] < -1:  # uniform: no value lies outside
        assert abs(values).max() < math.sqrt(3) * config["std"] * 1.02


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fc_weight", 7.0),
        ("fc_bias", 0.0),
        ("bn_gamma", 1.0),
        ("bn_beta", 0.0),
        ("q_min", 0.0),
        ("q_max", 1.0),
        ("fc_bias_quantize", 0.0),
        ("bn_running_mean", 0.0),
        ("bn_moving_mean", 0.0),
        ("bn_running_var", 1.0),
        ("bn_moving_var", 1.0),
        ("bn_moving_inv_var", 0.0),
        ("bn_moving_avg", 0.0),
    ],
)
def test_the_ending_of_the_name_decides(name, value):
    assert _filled(Constant(7), (3,), name).tolist() == [value] * 3


def test_quantized_weights_are_one_random_whole_number():
    drawn = torch.stack([_filled(Xavier(), (4,), "fc_weight_quantize") for _ in range(2000)])
    assert (drawn == drawn[:, :1]).all()
    assert (drawn.round() == drawn).all()
    assert drawn.min() == -127  # of 2000 draws from 254 numbers all but one in thousands hold it
    assert drawn.max() == 126


def test_a_role_decides_instead_of_the_name():
    assert _filled(Constant(7), (2,), "norm.weight", role="gamma").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("own", ["one", '["one", {}]', One()])
def test_a_parameters_own_initializer_ignores_its_name(own):
    assert _filled(Constant(7), (2,), "fc_bias", attrs={"__init__": own}).tolist() == [1.0, 1.0]


def test_the_forget_gate_of_a_bias_as_in_mxnet():
    """MXNet 1.9.1 and 2.0 gave these."""
    own = LSTMBias(3.0).dumps()
    assert _filled(Xavier(), (8,), "a_bias", attrs={"__init__": own}).tolist() == [0, 0, 3, 3, 0, 0, 0, 0]
    assert _filled(LSTMBias(2), (8, 2))[:, 1].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


class Numbered(Initializer):
    """Fills each tensor that it is given with the next integer, and keeps the names and shapes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, desc, arr):
        self.seen.append((str(desc), tuple(arr.shape)))
        arr.fill_(len(self.seen))


def _runs(vector):
    """(value, how often in a row) of each run."""
    edges = [0, *(np.flatnonzero(np.diff(vector)) + 1).tolist(), len(vector)]
    return [(int(vector[a]), b - a) for a, b in itertools.pairwise(edges)]


def test_a_fused_network_is_taken_apart_as_by_mxnet():
    """Names, shapes and places that MXNet 1.9.1 gave for two layers of 2, input 3, both directions."""
    inner = Numbered()
    vector = _filled(FusedRNN(inner, 2, 2, "rnn_tanh", bidirectional=True), (60,))
    assert inner.seen == [
        ("l0_i2h_weight", (2, 3)),
        ("l0_h2h_weight", (2, 2)),
        ("r0_i2h_weight", (2, 3)),
        ("r0_h2h_weight", (2, 2)),
        ("l1_i2h_weight", (2, 4)),
        ("l1_h2h_weight", (2, 2)),
        ("r1_i2h_weight", (2, 4)),
        ("r1_h2h_weight", (2, 2)),
        *((f"{place}_{source}_bias", (2,)) for place in ("l0", "r0", "l1", "r1") for source in ("i2h", "h2h")),
    ]
    lengths = [6, 4, 6, 4, 8, 4, 8, 4] + 8 * [2]
    assert _runs(vector) == list(enumerate(lengths, start=1))


def test_forget_gates_of_a_fused_lstm_as_in_mxnet():
    """MXNet 1.9.1 gave this for one layer of 2, input 3."""
    inner = Numbered()
    vector = _filled(FusedRNN(inner, 2, 1, "lstm", forget_bias=-5.0), (56,))
    assert [name for name, _ in inner.seen[:4]] == [f"l0_i2h_{gate}_weight" for gate in "ifco"]
    weights = [(i, 6) for i in (1, 2, 3, 4)] + [(i, 4) for i in (5, 6, 7, 8)]
    assert _runs(vector) == weights + [(9, 2), (-5, 2), (10, 2), (11, 2), (12, 2), (-5, 2), (13, 2), (14, 2)]
    assert [name for name, _ in inner.seen[8:]] == [
        f"l0_{source}_{gate}_bias" for source in ("i2h", "h2h") for gate in "ico"
    ]


@pytest.mark.parametrize(
    ("arguments", "lengths"),  # as MXNet 2.0 gave them for two layers of 2, input 3
    [
        (("lstm", 2, 2), [24, 16, 16, 16, 8, 8, 8, 8]),
        (("lstm", 2, 2, True), [24, 16, 24, 16, 32, 16, 32, 16] + 8 * [8]),
        (("lstm", 2, 2, False, 1), [24, 8, 2, 8, 8, 2] + 4 * [8]),
        (("lstm", 2, 2, True, 1), [24, 8, 2, 24, 8, 2, 16, 8, 2, 16, 8, 2] + 8 * [8]),
        (("gru", 2, 2, True), [18, 12, 18, 12, 24, 12, 24, 12] + 8 * [6]),
    ],
)
def test_the_vector_of_a_network_with_an_initializer_for_each_kind(arguments, lengths):
    inner = Numbered()
    parts = ("i2h_weight", "h2h_weight", "i2h_bias", "h2h_bias", "h2r_weight")
    rule = RNNFused(*arguments, **{f"{part}_initializer": inner for part in parts})
    assert _runs(_filled(rule, (sum(lengths),))) == list(enumerate(lengths, start=1))


def test_biases_of_a_network_with_an_initializer_for_each_kind_as_in_mxnet():
    """MXNet 2.0 gave these 104 values."""
    rule = RNNFused("lstm", 2, 2, False, None, "one", "one", "lstmbias", Constant(7))
    assert _runs(_filled(rule, (104,))) == [(1, 72)] + 2 * [(0, 2), (1, 2), (0, 4), (7, 8)]


def test_a_network_without_initializers_of_its_own_gets_the_models():
    vector = _filled(FusedRNN(None, 2, 1, "gru"), (42,), global_init=Constant(2))
    assert _runs(vector) == [(2, 30), (0, 12)]
    vector = _filled(RNNFused("gru", 1, 2), (42,), global_init=Constant(2))
    assert _runs(vector) == [(2, 30), (0, 12)]
    assert 0 < _filled(RNNFused("gru", 1, 2), (42,)).abs().max() <= 0.07


# torch's modules


def test_every_kind_of_parameter_gets_its_rule():
    net = torch.nn.ModuleDict(
        {
            "linear": torch.nn.Linear(3, 4),
            "conv": torch.nn.Conv2d(2, 4, 3),
            "up": torch.nn.ConvTranspose1d(2, 4, 3),
            "batch": torch.nn.BatchNorm2d(3),
            "instance": torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            "layer": torch.nn.LayerNorm((2, 3)),
            "group": torch.nn.GroupNorm(2, 4),
            "rms": torch.nn.RMSNorm(4),
            "embedding": torch.nn.Embedding(5, 2),
            "bag": torch.nn.EmbeddingBag(5, 2),
            "lstm": torch.nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
            "gru": torch.nn.GRUCell(3, 4),
            "attention": torch.nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "apart": torch.nn.MultiheadAttention(4, 2, kdim=3, vdim=3),
            "prelu": torch.nn.PReLU(),
            "bilinear": torch.nn.Bilinear(2, 3, 4),
        }
    )
    for tensor in net.state_dict().values():
        tensor.fill_(9)
    initialize(net, Constant(5))
    norms = ("batch", "instance", "layer", "group", "rms")
    for name, value in net.state_dict().items():
        layer, leaf = name.split(".", 1)
        if layer == "prelu":
            expected = 0.25
        elif layer in norms:
            expected = 1.0 if leaf in ("weight", "running_var") else 0.0
        else:
            expected = 0.0 if "bias" in leaf else 5.0
        assert (value == expected).all(), name


def test_norms_of_other_libraries_are_known_by_their_class():
    class LlamaRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

    class NormalisedLinear(torch.nn.Linear):
        pass

    net = torch.nn.Sequential(LlamaRMSNorm(), NormalisedLinear(3, 2))
    initialize(net, Constant(5))
    assert net[0].weight.tolist() == [1.0] * 3
    assert (net[1].weight == 5).all()


def test_buffers_other_than_running_statistics_are_left_alone():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net.register_buffer("moving_mean", torch.full((2,), 9.0))
    initialize(net, "zeros")
    assert net.moving_mean.tolist() == [9.0, 9.0]


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Linear(30, 20),
        torch.nn.Conv1d(4, 6, 5),
        torch.nn.Conv2d(4, 6, (3, 5), groups=2),
        torch.nn.Conv3d(2, 3, 3),
        torch.nn.ConvTranspose2d(4, 6, 3),
        torch.nn.Embedding(10, 7),
    ],
    ids=repr,
)
def test_fans_are_torchs(layer):
    initialize(layer, "xavier", torch.Generator().manual_seed(3))
    expected = torch.nn.init.xavier_uniform_(torch.empty(layer.weight.shape), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-6, atol=1e-8)
    initialize(layer, MSRAPrelu("in", slope=0.1), torch.Generator().manual_seed(3))
    expected = torch.nn.init.kaiming_normal_(
        torch.empty(layer.weight.shape), a=0.1, mode="fan_in", generator=torch.Generator().manual_seed(3)
    )
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 2, 3), (5,), (0, 3)])
def test_orthogonal_of_any_shape(shape):
    w = _filled(Orthogonal(scale=0.5), shape, dtype=torch.float64)
    matrix = w.reshape(shape[0], -1) if w.numel() else w
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    torch.testing.assert_close(gram, 0.25 * torch.eye(len(gram), dtype=torch.float64))


@pytest.mark.parametrize("rand_type", ["uniform", "normal"])
def test_no_direction_is_preferred_by_orthogonal_weights(rand_type):
    """Of 2 × 2 matrices, half are reflections, and every element has mean 0 and mean square 1/2."""
    initializer = Orthogonal(1, rand_type)
    drawn = torch.stack([_filled(initializer, (2, 2), dtype=torch.float64) for _ in range(2000)])
    assert abs(torch.linalg.det(drawn).mean()) < 5 / math.sqrt(2000)
    assert drawn.mean(0).abs().max() < 5 * math.sqrt(0.5 / 2000)
    assert (drawn.square().mean(0) - 0.5).abs().max() < 5 * math.sqrt(1 / 8 / 2000)


def test_enlarging_by_bilinear_weights_interpolates():
    up = torch.nn.ConvTranspose2d(1, 1, 4, stride=2, padding=1, bias=False)
    initialize(up, "bilinear")
    image = torch.arange(5.0).expand(1, 1, 5, 5)
    enlarged = torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(up(image)[..., 2:-2, 2:-2], enlarged[..., 2:-2, 2:-2])


def test_the_padding_row_of_an_embedding_is_zero():
    net = torch.nn.Sequential(torch.nn.Embedding(4, 2, padding_idx=1), torch.nn.EmbeddingBag(4, 2, padding_idx=3))
    initialize(net, Constant(5))
    assert net[0].weight.sum(1).tolist() == [10, 0, 10, 10]
    assert net[1].weight.sum(1).tolist() == [10, 10, 10, 0]
    initialize(net, Load({"0.weight": np.full((4, 2), 3), "1.weight": np.full((4, 2), 3)}))
    assert (net[0].weight == 3).all()


@pytest.mark.parametrize("own", [LSTMBias(1.5), '["lstmbias", {"forget_bias": 1.5}]'])
def test_the_forget_gate_of_torchs_lstm_opens(own):
    """With all else zero, the forget gate is the only one that shows: the cell keeps sigmoid(1.5) of its state."""
    lstm = torch.nn.LSTM(3, 2)
    lstm.bias_ih_l0.init = own
    initialize(lstm, "zeros")
    cell = torch.ones(1, 2)
    _, (_, after) = lstm(torch.randn(1, 3), (torch.zeros(1, 2), cell))
    torch.testing.assert_close(after, torch.sigmoid(torch.tensor(1.5)) * cell)


def test_a_fused_initializer_fills_torchs_layers_gate_by_gate():
    lstm = torch.nn.LSTM(5, 3, 2, proj_size=2)
    initialize(lstm, FusedRNN(Orthogonal(scale=1), 3, 2, "lstm", forget_bias=4))
    for weight in (lstm.weight_ih_l0, lstm.weight_hh_l1):
        for gate in weight.detach().chunk(4):
            gram = gate @ gate.T if gate.shape[0] <= gate.shape[1] else gate.T @ gate
            torch.testing.assert_close(gram, torch.eye(len(gram)))
    torch.testing.assert_close(lstm.weight_hr_l0 @ lstm.weight_hr_l0.T, torch.eye(2))
    assert lstm.bias_hh_l1.tolist() == [0] * 3 + [4] * 3 + [0] * 6
    gru = torch.nn.GRUCell(5, 3)
    initialize(gru, FusedRNN("ones", 3, 1, "gru"))
    assert gru.bias_ih.tolist() == [0] * 9
    assert (gru.weight_ih == 1).all()


def test_each_kind_of_a_recurrent_layers_parameters():
    lstm = torch.nn.LSTM(5, 3, proj_size=2, bidirectional=True)
    parts = {"i2h_weight": 1, "h2h_weight": 2, "h2r_weight": 3, "i2h_bias": 4, "h2h_bias": 5}
    initialize(lstm, RNNFused("lstm", 1, 3, True, 2, **{f"{k}_initializer": Constant(v) for k, v in parts.items()}))
    for suffix in ("_l0", "_l0_reverse"):
        found = [getattr(lstm, name + suffix) for name in ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")]
        assert [p.unique().tolist() for p in found] == [[1], [2], [3], [4], [5]]


def test_a_parameters_own_initializer_comes_first():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net.cls_token = torch.nn.Parameter(torch.zeros(3))
    net.cls_token.init = "ones"
    net[0].bias.init = Constant(0.5)
    net[1].weight.init = '{"initializer": "constant", "value": 3}'
    for initializer in ("zeros", Mixed([".*"], ["zeros"]), Load({}, "zeros")):
        initialize(net, initializer)
        assert net.cls_token.tolist() == [1] * 3
        assert net[0].bias.tolist() == [0.5] * 2
        assert net[1].weight.tolist() == [3.0] * 2


def test_shared_parameters_are_filled_once_under_the_first_name():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    initialize(net, Mixed([r"0\.", ".*"], [Constant(1), Constant(2)]))
    assert (net[0].weight == 1).all()


def test_the_default_is_gluons():
    net = torch.nn.Linear(100, 100)
    initialize(net)
    assert 0.069 < net.weight.abs().max() <= 0.07
    assert (net.bias == 0).all()


# Reproducibility, types, gradients


def _net():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(20, 30), torch.nn.LSTM(4, 5))


@pytest.mark.parametrize("name", ["uniform", "normal", "xavier", "msraprelu", "orthogonal"])
def test_a_generator_makes_results_repeatable(name):
    first, second, third = _net(), _net(), _net()
    initialize(first, name, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    initialize(second, name, torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), untouched)
    initialize(third, name, torch.Generator().manual_seed(6))
    _assert_unchanged(first, _values(second))
    assert not torch.equal(first[1].weight, third[1].weight)


def test_the_global_generator_is_torchs():
    first, second = _net(), _net()
    for net in (first, second):
        torch.manual_seed(8)
        initialize(net, "xavier")
    _assert_unchanged(first, _values(second))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["uniform", "normal", "xavier", "orthogonal", "bilinear", "ones"])
def test_any_type_and_device(name, dtype, device):
    """Numbers are drawn in float32 and rounded, so that all types hold the same ones; float64 has more digits."""
    net = torch.nn.Conv2d(4, 6, 3).to(device, dtype)
    initialize(net, name, torch.Generator().manual_seed(2))
    assert net.weight.dtype == dtype
    if dtype == torch.float64:
        assert name in ("bilinear", "ones") or not torch.equal(net.weight, net.weight.float().double())
    else:
        plain = torch.nn.Conv2d(4, 6, 3)
        initialize(plain, name, torch.Generator().manual_seed(2))
        torch.testing.assert_close(net.weight.detach().cpu(), plain.weight.detach().to(dtype), rtol=0, atol=0)


def test_the_layout_in_memory_does_not_matter():
    plain, last = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    class InPlace(Initializer):
        def _init_weight(self, name, arr):
            arr.view(-1).normal_(generator=name.generator)

    for initializer in ("xavier", InPlace()):
        for net in (plain, last):
            initialize(net, initializer, torch.Generator().manual_seed(2))
        assert last.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(plain.weight, last.weight)


def test_nothing_is_recorded_and_gradients_stay():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    net[1].weight.requires_grad_(False)
    net(torch.ones(1, 3)).sum().backward()
    gradient = net[0].weight.grad
    kept, identity = gradient.clone(), [id(p) for p in net.parameters()]
    initialize(net, "xavier")
    assert all(p.is_leaf and p.grad_fn is None for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, True]
    assert [id(p) for p in net.parameters()] == identity
    assert net[0].weight.grad is gradient
    assert torch.equal(gradient, kept)
    Xavier()("fc_weight", net[0].weight)  # in place on a leaf, called directly
    assert net[0].weight.is_leaf


# Initializers of one's own


def test_a_custom_initializer(own_registry):
    @alias("ramp")
    @register
    class Slope(Initializer):
        def __init__(self, step=1.0):
            super().__init__(step=step)
            self.step = step

        def _init_weight(self, name, arr):
            arr[:] = self.step * torch.arange(arr.numel(), dtype=arr.dtype).reshape(arr.shape)

        def _init_bias(self, name, arr):
            arr[:] = len(name)

    net = torch.nn.Linear(2, 2)
    initialize(net, create("ramp", step=0.5))
    assert net.weight.tolist() == [[0.0, 0.5], [1.0, 1.5]]
    assert net.bias.tolist() == [4.0, 4.0]
    assert create("slope") == Slope(1.0) != Slope(2.0)
    assert create(Slope(3.0).dumps()) == Slope(3.0)


def test_a_custom_initializer_draws_from_the_generator():
    class Wide(Initializer):
        def _init_weight(self, name, arr):
            arr.uniform_(-9, 9, generator=name.generator)

    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for net in (first, second):
        initialize(net, Wide(), torch.Generator().manual_seed(1))
    assert torch.equal(first.weight, second.weight)


def test_a_custom_initializer_that_returns_values_is_told_so():
    class Returning(Initializer):
        def _init_weight(self, name, arr):
            return torch.ones_like(arr)

    net = torch.nn.Linear(2, 2)
    before = _values(net)
    with pytest.raises(TypeError, match=r"'weight': Returning._init_weight returned Tensor.*fill arr in place"):
        initialize(net, Returning())
    _assert_unchanged(net, before)


def test_the_base_class_has_no_rule():
    with pytest.raises(NotImplementedError, match=r"must define _init_weight\(self, name, arr\)"):
        Initializer()("fc_weight", torch.zeros(2))


def test_a_custom_rule_for_other_names():
    class Anything(Zero):
        def _init_default(self, name, arr):
            arr.fill_(4)

    net = torch.nn.Linear(1, 1)
    net.cls_token = torch.nn.Parameter(torch.zeros(2))
    initialize(net, Anything())
    assert net.cls_token.tolist() == [4.0, 4.0]


# Making them by name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zero", Zero()),
        ("zeros", Zero()),
        ("Ones", One()),
        ("XAVIER", Xavier()),
        ("MSRAPrelu", MSRAPrelu()),
        ("lstmbias", LSTMBias()),
        ('["xavier", {"magnitude": 2}]', Xavier(magnitude=2)),
        ('{"initializer": "xavier", "magnitude": 2}', Xavier(magnitude=2)),
    ],
)
def test_create_by_any_spelling(name, expected):
    assert create(name) == expected
    assert create(expected) is expected


def test_all_of_mxnets_names_are_registered():
    names = "zero zeros one ones constant uniform normal orthogonal xavier msraprelu bilinear lstmbias fusedrnn rnnfused"
    assert set(names.split()) <= set(init.registered())
    assert tristep.initializer is tristep.init is init


@pytest.mark.parametrize("made", EVERY, ids=repr)
def test_json_and_repr_make_an_equal_one(made):
    assert create(made.dumps()) == made
    assert eval(repr(made), vars(init)) == made
    assert hash(copy.deepcopy(made)) == hash(made)
    assert sum(made == other for other in EVERY) == 1


def test_json_is_mxnets():
    """As both versions of MXNet write it."""
    assert json.loads(MSRAPrelu().dumps()) == ["msraprelu", {"factor_type": "avg", "slope": 0.25}]
    assert Constant(torch.ones(2)).dumps() == '["constant", {"value": [1.0, 1.0]}]'
    assert Bilinear().dumps() == '["bilinear", {}]'
    xavier = '[\\"xavier\\", {\\"rnd_type\\": \\"uniform\\", \\"factor_type\\": \\"avg\\", \\"magnitude\\": 3}]'
    assert FusedRNN(Xavier(), 2, 2, "lstm").dumps() == (
        f'["fusedrnn", {{"init": "{xavier}", "num_hidden": 2, "num_layers": 2, "mode": "lstm", "bidirectional": false, '
        '"forget_bias": 1.0}]'
    )


def test_register_and_alias_say_what_they_take(own_registry):
    with pytest.raises(TypeError, match="subclass of Initializer, got <class 'dict'>"):
        register(dict)
    with pytest.raises(TypeError, match=r"@alias takes names, strings, got .*write @alias\('other_name'\)"):
        alias(Zero)
    with pytest.raises(ValueError, match="is not registered: put @alias above @register"):
        alias("x")(type("Unknown", (Initializer,), {}))
    with pytest.warns(UserWarning, match="'zero' now means"):
        register(type("Zero", (Initializer,), {}))


def test_a_line_is_logged_for_each_tensor(caplog):
    caplog.set_level(logging.INFO)
    net = torch.nn.Linear(2, 2)
    initialize(net, Constant(3).set_verbosity(True))
    assert [record.getMessage() for record in caplog.records] == [
        "initialized weight as weight: 3.0",
        "initialized bias as bias: 0.0",
    ]
    caplog.clear()
    initialize(net, One().set_verbosity(True, print_func=lambda arr: tuple(arr.shape)))
    assert caplog.messages[0] == "initialized weight as weight: (2, 2)"
    caplog.clear()
    initialize(net, Load({"weight": torch.zeros(2, 2)}, "ones", verbose=True))
    assert caplog.messages == ["weight loaded", "bias initialized by default"]


# Load and Mixed


def test_loaded_values_and_a_default_for_the_rest():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    param = {
        "arg:0.weight": np.arange(4).reshape(2, 2),
        "1.running_mean": [3.0, 4.0],
        "aux:1.num_batches_tracked": 7,
        "elsewhere": 1,
    }
    initialize(net, Load(param, default_init=Constant(9)))
    assert net[0].weight.tolist() == [[0, 1], [2, 3]]
    assert net[0].bias.tolist() == [0, 0]
    assert net[1].running_mean.tolist() == [3, 4]
    assert net[1].running_var.tolist() == [1, 1]
    assert net[1].num_batches_tracked == 7


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
def test_values_from_a_file(kind, tmp_path):
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        safetensors.torch.save_file(source.state_dict(), path)
    elif kind == "npz":
        np.savez(path, **{name: value.numpy() for name, value in source.state_dict().items()})
    else:
        torch.save(source.state_dict(), path)
    initialize(target, Load(path))
    _assert_unchanged(target, _values(source))
    initialize(target, Load(str(path)))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Load(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="must end in .safetensors"):
        Load("weights.params")
    for kind in ("safetensors", "npz", "pt"):
        damaged = tmp_path / f"damaged.{kind}"
        damaged.write_bytes(b"no such thing")
        with pytest.raises(ValueError, match=f"damaged.{kind}': cannot be read"):
            Load(damaged)
    code = tmp_path / "code.pt"
    torch.save({"weight": _net()}, code)
    with pytest.raises(ValueError, match="cannot be read"):  # a pickle that would run code
        Load(code)


def test_mixed_goes_by_the_first_pattern_and_then_by_the_ending():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    initialize(net, Mixed([r"0\.", "weight", ".*"], [Constant(1), Constant(2), Constant(3)]))
    assert (net[0].weight == 1).all()
    assert (net[1].weight == 3).all()  # "weight" does not begin the name
    assert (net[0].bias == 0).all()  # the ending decides, as in MXNet


# What is refused


def _with(name, tensor):
    net = torch.nn.Linear(2, 2)
    setattr(net, name, tensor)
    return net


def _inference_mode():
    with torch.inference_mode():
        return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "initializer", "error", "message"),
    [
        (
            lambda: _with("token", torch.nn.Parameter(torch.ones(2))),
            "one",
            ValueError,
            "'token': no rule .*parameter.init =",
        ),
        (lambda: _with("a_weight", torch.nn.Parameter(torch.ones(2))), "xavier", ValueError, "'a_weight': .*two dimensions"),
        (_net, "bilinear", ValueError, r"'1.weight': has shape \(30, 20\), but Bilinear is for four"),
        (_net, "lstmbias", ValueError, r"'1.weight': has shape \(30, 20\), but LSTMBias .*multiple of 4"),
        (_net, Constant([1, 2]), ValueError, r"'0.weight': has shape .*a value of shape \(2,\) does not expand"),
        (_net, Mixed(["0", "2"], ["one", "one"]), ValueError, r"'1.weight': none of the patterns \['0', '2'\] fits"),
        (
            _net,
            Load({"0.weigth": 1}),
            ValueError,
            "'0.weight': has no value in param. Did you mean '0.weigth'.*default_init",
        ),
        (_net, Load({"1.bias": [1]}, "one"), ValueError, r"'1.bias': has shape \(30,\), its value in param \(1,\)"),
        (_net, FusedRNN(None, 6, 1, "gru"), ValueError, r"'0.weight': has shape .*is for 18 rows: use it for that"),
        (_net, RNNFused("lstm", 1, 5), ValueError, "'0.weight': is none of a recurrent layer"),
        (lambda: torch.nn.LazyLinear(2), "one", ValueError, "without a shape yet: 'weight', 'bias': run the model once"),
        (lambda: torch.nn.LazyBatchNorm1d(), "one", ValueError, "'running_mean', 'running_var': run the model once"),
        (
            lambda: _with("tail", torch.nn.Linear(2, 2, device="meta")),
            "one",
            ValueError,
            r"'tail.weight': is on the meta device.*to_empty\(device",
        ),
        (_inference_mode, "one", ValueError, "'weight': was made in inference mode"),
        (
            lambda: _with("codes_weight", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)),
            "one",
            TypeError,
            "'codes_weight': is torch.int8, but",
        ),
        (_net, "xavir", ValueError, r"initializer='xavir': no .*; there are bilinear, .*Did you mean 'xavier'\?"),
        (_net, 3, TypeError, "initializer=3: must be a name, such as 'xavier'"),
        (_net, Xavier, TypeError, r"write Xavier\(\) for an instance"),
        (_net, "[1, 2]", ValueError, r"must be \[name, arguments\]"),
        (_net, "[1", ValueError, "is not JSON"),
        (_net, '["xavier", {"size": 2}]', TypeError, "size"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(make, initializer, error, message):
    net = make()
    sound = [(name, t) for name, t in net.state_dict().items() if not torch.nn.parameter.is_lazy(t) and not t.is_meta]
    before = [t.clone() for _, t in sound]
    with pytest.raises(error, match=message):
        initialize(net, initializer)
    assert all(torch.equal(t, old) for (_, t), old in zip(sound, before, strict=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: initialize(torch.zeros(2)), TypeError, "module must be a torch.nn.Module, got Tensor"),
        (lambda: initialize(_net(), "one", 3), TypeError, "generator=3: must be a torch.Generator"),
        (lambda: Xavier()("fc_weight", np.zeros((2, 2))), TypeError, "'fc_weight': must be a torch tensor, got ndarray"),
        (lambda: Xavier()(3, torch.zeros(2, 2)), TypeError, "name=3: must be a parameter's name"),
        (lambda: Uniform(-1), ValueError, "scale=-1: must be finite and 0 or more"),
        (lambda: Normal("1"), TypeError, "sigma='1': must be a number"),
        (lambda: Constant("1"), TypeError, "value='1': must be a number"),
        (lambda: Constant(["a"]), TypeError, r"value=\['a'\]: must be a number or an array"),
        (lambda: Orthogonal(rand_type="gaussian"), ValueError, "rand_type='gaussian': must be one of 'uniform', 'normal'"),
        (lambda: Orthogonal()("a_weight", torch.tensor(1.0)), ValueError, "'a_weight': has no dimension"),
        (lambda: Xavier(rnd_type="normal"), ValueError, "rnd_type='normal': must be one of"),
        (lambda: Xavier(factor_type="both"), ValueError, "factor_type='both': must be one of"),
        (lambda: Xavier(magnitude=0), ValueError, "magnitude=0: must be finite and greater than 0"),
        (lambda: MSRAPrelu(slope=None), TypeError, "slope=None: must be a number"),
        (lambda: FusedRNN("one", 0, 1, "gru"), ValueError, "num_hidden=0: must be 1 or more"),
        (lambda: FusedRNN("one", 1, 1, "rnn"), ValueError, "mode='rnn': must be one of 'rnn_relu'"),
        (lambda: FusedRNN(Load({}), 1, 1, "gru"), TypeError, "init=.*: must be an Initializer or its name, not Load"),
        (
            lambda: FusedRNN("one", 2, 1, "gru")("a_weight", torch.zeros(43)),
            ValueError,
            r"'a_weight': has 43 elements, .*\(24 plus a multiple of 6\)",
        ),
        (lambda: RNNFused("gru", 1, 1, projection_size=2), ValueError, "projection_size=2: only an LSTM"),
        (lambda: RNNFused("gru", 1, 1, h2h_bias_initializer="on"), ValueError, "initializer='on': .*Did you mean 'one'"),
        (lambda: Load(3), TypeError, "param must be a mapping from names to values, or a file's path, got int"),
        (lambda: Load({3: 1}), TypeError, r"param: names must be strings, got 3"),
        (lambda: Load({"a": object()}), TypeError, r"param\['a'\]: must be a tensor or an array, got object"),
        (lambda: Mixed("a", ["one"]), TypeError, "patterns='a': must be a list or tuple"),
        (lambda: Mixed(["a"], []), ValueError, "must be as many, got 1 and 0"),
        (lambda: Mixed(["("], ["one"]), ValueError, r"patterns\[0\]='\(': is no regular expression"),
        (lambda: Mixed([3], ["one"]), TypeError, r"patterns\[0\]=3: must be a regular expression"),
        (lambda: create(Zero(), a=1), TypeError, "arguments beside an instance: a; give them to Zero"),
        (lambda: create('["zero", {}]', a=1), TypeError, "arguments beside JSON: a"),
        (lambda: create("uniform", size=1), TypeError, "size"),
        (
            lambda: Zero()(InitDesc("a_bias", {"__init__": Load({})}), torch.zeros(1)),
            TypeError,
            "'a_bias': its own initializer must be an Initializer, got Load",
        ),
        (lambda: Zero().set_verbosity(1), TypeError, "verbose=1: must be True or False"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_docstring_examples(own_registry):
    failed, attempted = doctest.testmod(init)
    assert attempted > 30
    assert failed == 0
