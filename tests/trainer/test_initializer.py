"""Initializers: MXNet's numbers, names and JSON; distributions, generators, types; user-defined initializers."""

import copy
import doctest
import importlib
import json
import math
import pickle
import pkgutil

import numpy as np
import pytest
import torch

import tristep
from tristep.trainer import initializer as init
from tristep.trainer.initializer import (
    Bilinear,
    Constant,
    FusedRNN,
    InitDesc,
    Initializer,
    LSTMBias,
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


def _filled(initializer, shape, name="fc_weight", dtype=torch.float32, **desc):
    arr = torch.full(shape, math.nan, dtype=dtype)
    initializer(InitDesc(name, **desc), arr)
    return arr


def _values(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _assert_unchanged(module, before):
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# ---- MXNet's numbers -------------------------------------------------------------------------------------------------


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
        *((f"bn_{end}", 0.0) for end in ("bias", "beta", "min", "bias_quantize", "running_mean", "moving_mean")),
        *((f"bn_{end}", 0.0) for end in ("moving_inv_var", "moving_avg")),
        *((f"bn_{end}", 1.0) for end in ("gamma", "max", "running_var", "moving_var")),
    ],
)
def test_the_ending_of_the_name_decides(name, value):
    assert _filled(Constant(7), (3,), name).tolist() == [value] * 3


def test_quantized_weights_are_one_random_integer():
    drawn = torch.stack([_filled(Xavier(), (4,), "fc_weight_quantize") for _ in range(2000)])
    assert (drawn == drawn[:, :1]).all()
    assert (drawn.round() == drawn).all()
    assert drawn.min() == -127  # of 2000 draws from 254 numbers all but one in thousands hold it
    assert drawn.max() == 126


@pytest.mark.parametrize(
    "desc", [{"role": "gamma"}, *({"attrs": {"__init__": own}} for own in ("one", '["one", {}]', One()))], ids=str
)
def test_role_and_own_initializer_precede_the_name(desc):
    assert _filled(Constant(7), (2,), "norm.bias", **desc).tolist() == [1.0, 1.0]


# ---- distributions ---------------------------------------------------------------------------------------------------


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


def test_the_default_is_gluons():
    net = torch.nn.Linear(100, 100)
    initialize(net)
    assert 0.069 < net.weight.abs().max() <= 0.07
    assert (net.bias == 0).all()


# ---- generators, types, gradients ------------------------------------------------------------------------------------


def _net():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(20, 30), torch.nn.LSTM(4, 5))


class InPlace(Initializer):
    def _init_weight(self, name, arr):
        arr.view(-1).normal_(generator=name.generator)


@pytest.mark.parametrize("initializer", ["uniform", "normal", "xavier", "msraprelu", "orthogonal", InPlace()])
def test_a_generator_makes_results_repeatable(initializer):
    first, second, third = _net(), _net(), _net()
    initialize(first, initializer, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    initialize(second, initializer, torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), untouched)
    initialize(third, initializer, torch.Generator().manual_seed(6))
    _assert_unchanged(first, _values(second))
    assert not torch.equal(first[1].weight, third[1].weight)
    for net in (first, second):
        torch.manual_seed(8)
        initialize(net, initializer)  # from torch's global generator
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


# ---- user-defined initializers ---------------------------------------------------------------------------------------


def test_a_custom_initializer(clean_registry):
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

        def _init_default(self, name, arr):
            arr.fill_(4)

    net = torch.nn.Linear(2, 2)
    net.cls_token = torch.nn.Parameter(torch.zeros(2))
    initialize(net, create("ramp", step=0.5))
    assert net.weight.tolist() == [[0.0, 0.5], [1.0, 1.5]]
    assert net.bias.tolist() == [4.0, 4.0]
    assert net.cls_token.tolist() == [4.0, 4.0]
    assert create("slope") == Slope(1.0) != Slope(2.0)
    assert create(Slope(3.0).dumps()) == Slope(3.0)


def test_a_custom_initializer_that_returns_values_is_told_so():
    class Returning(Initializer):
        def _init_weight(self, name, arr):
            return torch.ones_like(arr)

    net = torch.nn.Linear(2, 2)
    before = _values(net)
    with pytest.raises(TypeError, match=r"'weight': Returning._init_weight returned Tensor.*fill arr in place"):
        initialize(net, Returning())
    _assert_unchanged(net, before)


# ---- by name ---------------------------------------------------------------------------------------------------------


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
    assert tristep.initializer.__all__ == tristep.init.__all__ == init.__all__


@pytest.mark.parametrize("made", EVERY, ids=repr)
def test_json_and_repr_make_an_equal_one(made):
    assert create(made.dumps()) == made
    assert eval(repr(made), vars(init)) == made
    assert pickle.loads(pickle.dumps(made)) == made
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


def test_register_and_alias_refuse_what_they_do_not_take(clean_registry):
    with pytest.raises(TypeError, match="subclass of Initializer, got <class 'dict'>"):
        register(dict)
    with pytest.raises(TypeError, match=r"@alias takes names, strings, got .*write @alias\('other_name'\)"):
        alias(Zero)
    with pytest.raises(ValueError, match="is not registered: put @alias above @register"):
        alias("x")(type("Unknown", (Initializer,), {}))
    other = type("Zero", (Initializer,), {})
    with pytest.warns(UserWarning, match="initializer 'zero' now means") as caught:
        register(other)
    with pytest.warns(UserWarning, match="initializer 'ones' now means") as caught_by_alias:
        alias("ones")(other)
    assert {warning.filename for warning in [*caught, *caught_by_alias]} == {__file__}
    assert type(create("zero")) is type(create("ones")) is other


@pytest.mark.parametrize("name", [*init.__all__, "_size"])
def test_pickles_of_the_former_module_load(name):
    """Pickles name classes by module; all of them were in the file initializer.py once."""
    assert pickle.loads(f"ctristep.trainer.initializer\n{name}\n.".encode()) is getattr(init, name)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(init.__path__)])
def test_docstring_examples(name, clean_registry):
    module = importlib.import_module(f"tristep.trainer.initializer.{name}")
    failed, attempted = doctest.testmod(module, extraglobs=vars(init))
    assert attempted > 2
    assert failed == 0
