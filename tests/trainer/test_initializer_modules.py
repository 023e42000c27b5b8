"""`initialize`: which rule each parameter of a module gets, Load and Mixed, and what is refused."""

import logging

import numpy as np
import pytest
import torch

from tristep.trainer.initializer import (
    Constant,
    FusedRNN,
    InitDesc,
    Initializer,
    Load,
    Mixed,
    MSRAPrelu,
    Normal,
    One,
    Orthogonal,
    RNNFused,
    Uniform,
    Xavier,
    Zero,
    create,
    initialize,
)

safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")


def _values(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _assert_unchanged(module, before):
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def _net():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(20, 30), torch.nn.LSTM(4, 5))


# ---- which rule ------------------------------------------------------------------------------------------------------


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


def test_the_padding_row_of_an_embedding_is_zero():
    net = torch.nn.Sequential(torch.nn.Embedding(4, 2, padding_idx=1), torch.nn.EmbeddingBag(4, 2, padding_idx=3))
    initialize(net, Constant(5))
    assert net[0].weight.sum(1).tolist() == [10, 0, 10, 10]
    assert net[1].weight.sum(1).tolist() == [10, 10, 10, 0]
    initialize(net, Load({"0.weight": np.full((4, 2), 3), "1.weight": np.full((4, 2), 3)}))
    assert (net[0].weight == 3).all()


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


# ---- Load and Mixed --------------------------------------------------------------------------------------------------


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


# ---- what is refused -------------------------------------------------------------------------------------------------


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
        (_net, Mixed(["0", "2"], ["one", "one"]), ValueError, r"'1.weight': none of the patterns \['0', '2'\] matches"),
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
        (
            lambda: Initializer()("a_weight", torch.zeros(2)),
            NotImplementedError,
            r"must define _init_weight\(self, name, arr\)",
        ),
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
        (lambda: FusedRNN(Load({}), 1, 1, "gru"), TypeError, "init=Load.*: must be a name, .* or an Initializer, not Load"),
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
        (lambda: Mixed(["a"], []), ValueError, "must have equal lengths, got 1 and 0"),
        (lambda: Mixed(["("], ["one"]), ValueError, r"patterns\[0\]='\(': is not a regular expression"),
        (lambda: Mixed([3], ["one"]), TypeError, r"patterns\[0\]=3: must be a regular expression"),
        (lambda: create(Zero(), a=1), TypeError, "arguments with an instance: a; give them to Zero"),
        (lambda: create('["zero", {}]', a=1), TypeError, "arguments with JSON: a"),
        (lambda: create("uniform", size=1), TypeError, "size"),
        (
            lambda: Zero()(InitDesc("a_bias", {"__init__": Load({})}), torch.zeros(1)),
            TypeError,
            "'a_bias': init=Load.*: must be a name, .* or an Initializer, not Load",
        ),
        (lambda: Zero().set_verbosity(1), TypeError, "verbose=1: must be True or False"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
