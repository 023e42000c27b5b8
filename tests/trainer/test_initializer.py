"""Initializers: MXNet's numbers, names and JSON; distributions, generators, types; which rule a parameter gets; refusals."""

import doctest
import importlib
import json
import math
import pkgutil

import numpy as np
import pytest
import torch

from tristep import initializer as init
from tristep.initializer import Constant, InitDesc, Initializer, Load, Mixed, MSRAPrelu, One, Orthogonal, Xavier, Zero

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

EVERY = [
    Zero(),
    One(),
    Constant(2.5),
    Constant([1.0, 2.0]),
    init.Uniform(),
    init.Normal(sigma=2),
    Orthogonal(rand_type="normal"),
    Xavier("gaussian", "in", 2),
    MSRAPrelu("out", 0),
    init.Bilinear(),
    init.LSTMBias(3.0),
    init.FusedRNN(Xavier(), 4, 2, "lstm", bidirectional=True, forget_bias=2),
    init.FusedRNN(None, 4, 1, "gru"),
]


def _filled(initializer, shape, name="fc_weight", dtype=torch.float32, **desc):
    arr = torch.full(shape, math.nan, dtype=dtype)
    initializer(InitDesc(name, **desc), arr)
    return arr


def _seeded(number):
    return torch.Generator().manual_seed(number)


def _net():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(20, 30), torch.nn.LSTM(4, 5))


def _values(module):
    """What a module holds that can be compared."""
    state = module.state_dict().items()
    return {n: t.clone() for n, t in state if not torch.nn.parameter.is_lazy(t) and not t.is_meta}


def _equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


# ---- MXNet's numbers -------------------------------------------------------------------------------------------------


@pytest.mark.golden("initializers")
def test_equals_mxnet(golden):
    config, arrays = golden
    made = init.create(config["initializer"], **config["kwargs"])
    for name in (InitDesc(config["name"]), config["name"]):
        arr = torch.full(config["shape"], math.nan)
        made(name, arr)
        np.testing.assert_allclose(arr.numpy(), arrays["value"], rtol=1e-12, atol=0)


@pytest.mark.golden("initializers_random")
def test_random_numbers_are_distributed_as_mxnets(golden):
    """Moments of two samples of n differ by a few standard errors; fourth moments bound those of the deviation."""
    config, _ = golden
    made = init.create(config["initializer"], **config["kwargs"])
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
    theirs, empty = torch.nn.init, torch.empty(layer.weight.shape)
    init.initialize(layer, "xavier", _seeded(3))
    expected = theirs.xavier_uniform_(empty, generator=_seeded(3))
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-6, atol=1e-8)
    init.initialize(layer, MSRAPrelu("in", slope=0.1), _seeded(3))
    expected = theirs.kaiming_normal_(empty, a=0.1, mode="fan_in", generator=_seeded(3))
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


def test_the_default_is_gluons():
    net = torch.nn.Linear(100, 100)
    init.initialize(net)
    assert 0.069 < net.weight.abs().max() <= 0.07
    assert (net.bias == 0).all()


# ---- generators, types, gradients ------------------------------------------------------------------------------------


class InPlace(Initializer):
    def _init_weight(self, name, arr):
        arr.view(-1).normal_(generator=name.generator)


@pytest.mark.parametrize("initializer", ["uniform", "normal", "xavier", "orthogonal", InPlace()])
def test_a_generator_makes_results_repeatable(initializer):
    first, second, third = _net(), _net(), _net()
    init.initialize(first, initializer, _seeded(5))
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    init.initialize(second, initializer, _seeded(5))
    assert torch.equal(torch.get_rng_state(), untouched)
    init.initialize(third, initializer, _seeded(6))
    assert _equal(_values(first), _values(second))
    assert not torch.equal(first[1].weight, third[1].weight)
    for net in (first, second):
        torch.manual_seed(8)
        init.initialize(net, initializer)  # from torch's global generator
    assert _equal(_values(first), _values(second))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["uniform", "normal", "xavier", "orthogonal", "bilinear", "ones"])
def test_any_type_and_device(name, dtype, device):
    """Numbers are drawn in float32 and rounded, so that all types hold the same ones; float64 has more digits."""
    net = torch.nn.Conv2d(4, 6, 3).to(device, dtype)
    init.initialize(net, name, _seeded(2))
    assert net.weight.dtype == dtype
    if dtype == torch.float64:
        assert name in ("bilinear", "ones") or not torch.equal(net.weight, net.weight.float().double())
    else:
        plain = torch.nn.Conv2d(4, 6, 3)
        init.initialize(plain, name, _seeded(2))
        torch.testing.assert_close(net.weight.detach().cpu(), plain.weight.detach().to(dtype), rtol=0, atol=0)


def test_the_layout_in_memory_does_not_matter():
    plain, last = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    for initializer in ("xavier", InPlace()):
        for net in (plain, last):
            init.initialize(net, initializer, _seeded(2))
        assert last.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(plain.weight, last.weight)


def test_nothing_is_recorded_and_gradients_stay():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    net[1].weight.requires_grad_(False)
    net(torch.ones(1, 3)).sum().backward()
    gradient = net[0].weight.grad
    kept, identity = gradient.clone(), [id(p) for p in net.parameters()]
    init.initialize(net, "xavier")
    assert all(p.is_leaf and p.grad_fn is None for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, True]
    assert [id(p) for p in net.parameters()] == identity
    assert net[0].weight.grad is gradient
    assert torch.equal(gradient, kept)
    Xavier()("fc_weight", net[0].weight)  # in place on a leaf, called directly
    assert net[0].weight.is_leaf


# ---- which rule a parameter gets -------------------------------------------------------------------------------------


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
    init.initialize(net, Constant(5))
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
    net.register_buffer("moving_mean", torch.full((2,), 9.0))
    init.initialize(net, Constant(5))
    assert net[0].weight.tolist() == [1.0] * 3
    assert (net[1].weight == 5).all()
    assert net.moving_mean.tolist() == [9.0, 9.0]  # a buffer, but no running statistics of a norm


def test_the_padding_row_of_an_embedding_is_zero():
    net = torch.nn.Sequential(torch.nn.Embedding(4, 2, padding_idx=1), torch.nn.EmbeddingBag(4, 2, padding_idx=3))
    init.initialize(net, Constant(5))
    assert net[0].weight.sum(1).tolist() == [10, 0, 10, 10]
    assert net[1].weight.sum(1).tolist() == [10, 10, 10, 0]
    init.initialize(net, Load({"0.weight": np.full((4, 2), 3), "1.weight": np.full((4, 2), 3)}))
    assert (net[0].weight == 3).all()


def test_a_parameters_own_initializer_comes_first():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net.cls_token = torch.nn.Parameter(torch.zeros(3))
    net.cls_token.init = "ones"
    net[0].bias.init = Constant(0.5)
    net[1].weight.init = '{"initializer": "constant", "value": 3}'
    for initializer in ("zeros", Mixed([".*"], ["zeros"]), Load({}, "zeros")):
        init.initialize(net, initializer)
        assert net.cls_token.tolist() == [1] * 3
        assert net[0].bias.tolist() == [0.5] * 2
        assert net[1].weight.tolist() == [3.0] * 2


def test_mixed_goes_by_the_first_pattern_and_then_by_the_ending():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[2].weight = net[0].weight  # filled once, under its first name
    init.initialize(net, Mixed([r"0\.", "weight", ".*"], [Constant(1), Constant(2), Constant(3)]))
    assert (net[0].weight == 1).all()
    assert (net[1].weight == 3).all()  # "weight" does not begin the name
    assert (net[0].bias == 0).all()  # the ending decides, as in MXNet


# ---- loaded values ---------------------------------------------------------------------------------------------------


def test_loaded_values_and_a_default_for_the_rest():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    param = {
        "arg:0.weight": np.arange(4).reshape(2, 2),
        "1.running_mean": [3.0, 4.0],
        "aux:1.num_batches_tracked": 7,
        "elsewhere": 1,
    }
    init.initialize(net, Load(param, default_init=Constant(9)))
    assert net[0].weight.tolist() == [[0, 1], [2, 3]]
    assert net[0].bias.tolist() == [0, 0]
    assert net[1].running_mean.tolist() == [3, 4]
    assert net[1].running_var.tolist() == [1, 1]
    assert net[1].num_batches_tracked == 7


def _safetensors(values, path):
    from safetensors.torch import save_file

    save_file(values, path)


KINDS = {
    "safetensors": _safetensors,
    "npz": lambda values, path: np.savez(path, **{name: value.numpy() for name, value in values.items()}),
    "pt": torch.save,
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_from_a_file(kind, tmp_path):
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path, damaged = tmp_path / f"weights.{kind}", tmp_path / f"damaged.{kind}"
    KINDS[kind](_values(source), path)
    for given in (path, str(path)):
        init.initialize(target, Load(given))
        assert _equal(_values(target), _values(source))
    damaged.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=f"damaged.{kind}': cannot be read"):
        Load(damaged)


def test_a_file_that_would_run_code_is_not_read(tmp_path):
    torch.save({"weight": _net()}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="cannot be read"):  # a pickle that would run code
        Load(tmp_path / "code.pt")


# ---- user-defined initializers, and by name --------------------------------------------------------------------------


def test_a_custom_initializer(clean_registry):
    @init.alias("ramp")
    @init.register
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
    init.initialize(net, init.create("ramp", step=0.5))
    assert net.weight.tolist() == [[0.0, 0.5], [1.0, 1.5]]
    assert net.bias.tolist() == [4.0, 4.0]
    assert net.cls_token.tolist() == [4.0, 4.0]
    assert init.create("slope") == Slope(1.0) != Slope(2.0)
    assert init.create(Slope(3.0).dumps()) == Slope(3.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zeros", Zero()),
        ("Ones", One()),
        ('["xavier", {"magnitude": 2}]', Xavier(magnitude=2)),
        ('{"initializer": "xavier", "magnitude": 2}', Xavier(magnitude=2)),
    ],
)
def test_create_by_any_spelling(name, expected):
    assert init.create(name) == expected
    assert init.create(expected) is expected


@pytest.mark.parametrize("made", EVERY, ids=repr)
def test_json_makes_an_equal_one(made):
    assert init.create(made.dumps()) == made
    assert sum(made == other for other in EVERY) == 1


def test_json_is_mxnets():
    """As both versions of MXNet write it."""
    assert json.loads(MSRAPrelu().dumps()) == ["msraprelu", {"factor_type": "avg", "slope": 0.25}]
    assert Constant(torch.ones(2)).dumps() == '["constant", {"value": [1.0, 1.0]}]'
    assert init.Bilinear().dumps() == '["bilinear", {}]'
    xavier = '[\\"xavier\\", {\\"rnd_type\\": \\"uniform\\", \\"factor_type\\": \\"avg\\", \\"magnitude\\": 3}]'
    assert init.FusedRNN(Xavier(), 2, 2, "lstm").dumps() == (
        f'["fusedrnn", {{"init": "{xavier}", "num_hidden": 2, "num_layers": 2, "mode": "lstm", "bidirectional": false, '
        '"forget_bias": 1.0}]'
    )


PACKAGE = "tristep.trainer.initializer"


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__)])
def test_docstring_examples(name, clean_registry):
    names = {name: getattr(init, name) for name in init.__all__}
    failed, attempted = doctest.testmod(importlib.import_module(f"{PACKAGE}.{name}"), extraglobs=names)
    assert attempted > 2
    assert failed == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


class Returning(Initializer):
    def _init_weight(self, name, arr):
        return torch.ones_like(arr)


def _with(name, tensor):
    net = torch.nn.Linear(2, 2)
    setattr(net, name, tensor)
    return net


@pytest.mark.parametrize(
    ("make", "initializer", "error", "message"),
    [
        (lambda: _with("token", torch.nn.Parameter(torch.ones(2))), "one", ValueError, "'token': no rule .*parameter.init"),
        (lambda: _with("a_weight", torch.nn.Parameter(torch.ones(2))), "xavier", ValueError, "'a_weight': .*two dimensions"),
        (_net, Mixed(["0", "2"], ["one", "one"]), ValueError, r"'1.weight': none of the patterns \['0', '2'\] matches"),
        (_net, Load({"0.weigth": 1}), ValueError, "'0.weight': has no value .*Did you mean '0.weigth'.*default_init"),
        (_net, Load({"1.bias": [1]}, "one"), ValueError, r"'1.bias': has shape \(30,\), its value in param \(1,\)"),
        (_net, Returning(), TypeError, r"'0.weight': Returning._init_weight returned Tensor.*fill arr in place"),
        (lambda: torch.nn.LazyLinear(2), "one", ValueError, "without a shape yet: 'weight', 'bias': run the model once"),
        (
            lambda: _with("tail", torch.nn.Linear(2, 2, device="meta")),
            "one",
            ValueError,
            r"'tail.weight': is on the meta device.*to_empty\(device",
        ),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(make, initializer, error, message):
    net = make()
    before = _values(net)
    with pytest.raises(error, match=message):
        init.initialize(net, initializer)
    assert _equal(_values(net), before)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mixed(["a"], []), ValueError, "must have equal lengths, got 1 and 0"),
        (lambda: init.create('["zero", {}]', a=1), TypeError, "arguments with JSON: a"),
        (
            lambda: Zero()(InitDesc("a_bias", {"__init__": Load({})}), torch.zeros(1)),
            TypeError,
            "'a_bias': init=Load.*: must be a name, .* or an Initializer, not Load",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_dumps_warns_of_an_argument_that_the_base_class_does_not_know():
    class Forgetful(Initializer):
        def __init__(self, low=0.0, high=1.0):
            super().__init__(low=low)

    with pytest.warns(UserWarning, match="Forgetful: high will be lost"):
        assert json.loads(Forgetful(high=3.0).dumps())[1] == {"low": 0.0}
