"""Files of MXNet 1.9.1, which tests/golden/files/README.md describes: read, and training continued as MXNet continued it."""

import json
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, load_mxnet_params, load_mxnet_states

FILES = Path(__file__).parents[1] / "golden" / "files"
RUNS = json.loads((FILES / "runs.json").read_text(encoding="utf-8"))
RECORDED = np.load(FILES / "recorded.npz")
NAMES = ["net_a", "net_b", "net_c"]
CLOSE = {np.float16: {"rtol": 2e-3, "atol": 2e-3}, np.float32: {"rtol": 1e-5, "atol": 1e-6}}

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test


def _params(run):
    starts = {name: RECORDED[f"{run}.start_{i}"] for i, name in enumerate(_names(run))}
    return {name: torch.nn.Parameter(torch.from_numpy(start.copy())) for name, start in starts.items()}


def _names(run):
    return RUNS[run].get("parameters", NAMES)


def _trainer(run, params=None, **options):
    arguments = {"centered": True} if run == "rmsprop_centered" else {}
    return Trainer(_params(run) if params is None else params, RUNS[run]["optimizer"], arguments | options)


def _check_continued(run, trainer, params):
    for step in range(4):
        for i, param in enumerate(params):
            param.grad = torch.from_numpy(RECORDED[f"{run}.g_{i}"][step].copy())
        trainer.step(2)
        for i, param in enumerate(params):
            expected = RECORDED[f"{run}.w_{i}"][step]
            close = CLOSE.get(expected.dtype.type, {"rtol": 1e-5, "atol": 1e-6})  # MXNet rounds settings to float32
            np.testing.assert_allclose(param.detach().numpy(), expected, **close)


@pytest.mark.sample(1)
@pytest.mark.parametrize("file", [*RUNS, *(f"adam_protocol{protocol}" for protocol in (0, 1, 2, 3, 5))])
def test_training_goes_on_as_in_mxnet(file):
    run = file.partition("_protocol")[0]
    params = _params(run)
    trainer = _trainer(run, params)
    load_mxnet_states(trainer, FILES / f"{file}.states", _names(run))
    assert trainer.optimizer.num_update == 3
    assert set(trainer.optimizer.counts.values()) == {3}
    _check_continued(run, trainer, list(params.values()))


def test_states_without_an_optimizer_warn_and_leave_settings():
    params = _params("adam")
    trainer = _trainer("adam", params, learning_rate=0.02, wd=0.01, beta1=0.8)
    with pytest.warns(UserWarning, match="states without an optimizer, and so without update counts"):
        load_mxnet_states(trainer, FILES / "adam_without_optimizer.states", NAMES)
    assert trainer.optimizer.num_update == 0
    trainer.optimizer.num_update = 3
    trainer.optimizer.step_counts.values[trainer.optimizer.slots(range(3))] = 3
    _check_continued("adam", trainer, list(params.values()))


def test_which_parameter_is_which():
    """By names, by numbers, by the order of a list; by shapes, if these say it; else it is refused, and nothing changed."""
    for run, names, mine in [
        ("adam", NAMES, lambda params: dict(reversed(params.items()))),
        ("adam", dict(enumerate(NAMES)), lambda params: dict(reversed(params.items()))),
        ("adam", None, lambda params: list(params.values())),
        ("adam_shapes", None, lambda params: dict(reversed(params.items()))),
        ("sgd", None, dict),  # which has no states: all parameters are the same
    ]:
        params = _params(run)
        trainer = _trainer(run, mine(params))
        load_mxnet_states(trainer, FILES / f"{run}.states", names)
        _check_continued(run, trainer, list(params.values()))
    trainer = _trainer("adam")
    for names in (None, NAMES[:2], [*NAMES[:2], "net_d"], {0: "net_a"}):
        with pytest.raises(ValueError, match=r"states of parameters 0, 1, 2, this trainer has 3 .*give names=\['net_a'"):
            load_mxnet_states(trainer, FILES / "adam.states", names)
    assert trainer.optimizer.num_update == 0


MISFITS = {
    "another kind of file": (lambda: _trainer("adam"), "arrays.params", "not a state file of MXNet"),
    "optimizer": (lambda: _trainer("sgd"), "adam.states", "states of optimizer 'adam', this trainer has 'sgd'"),
    "shapes": (
        lambda: _trainer("adam", [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(3)]),
        "adam.states",
        r"mean of '0' has shape \(2, 3\)",
    ),
    "options": (lambda: _trainer("adam", ema_decay=0.9), "adam.states", "'net_a'.* has 2 states, in this trainer it has 3"),
    "missing": (lambda: _trainer("adam"), "none.states", "there is no such file"),
}


@pytest.mark.parametrize("misfit", list(MISFITS))
def test_what_does_not_fit_is_refused(misfit, everything):
    make, file, message = MISFITS[misfit]
    trainer = make()
    params = trainer.replicas[0].params
    before = everything(trainer, params)
    names = trainer.replicas[0].names
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_mxnet_states(trainer, FILES / file, names)
    assert everything(trainer, params) == before


def test_load_states_says_who_reads_such_a_file():
    with pytest.raises(ValueError, match=r"tristep\.load_mxnet_states reads those of MXNet"):
        _trainer("adam").load_states(FILES / "adam.states")


class _Runs:
    """Its pickle runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def _hostile(tmp_path):
    """Pickles that would do, or take, what they must not."""
    yield "call", pickle.dumps({0: _Runs(tmp_path / "made")})
    yield "call in old protocols", pickle.dumps({0: _Runs(tmp_path / "made")}, 0)
    yield "class", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
    yield "instance", b"(S'true'\nios\nsystem\n."
    yield "persistent", b"\x80\x02K\x01Q."
    yield "extension", b"\x80\x02\x82\x01."
    yield "optimizer called", b"\x80\x02cmxnet.optimizer.optimizer\nAdam\n)R."
    yield "array of a name", b"\x80\x02cmxnet.ndarray.ndarray\nNDArray\nX\x01\x00\x00\x00a\x85R."
    yield "attribute of a module", b"\x80\x04\x8c\x19mxnet.optimizer.optimizer\x8c\x0eos.system.Adam\x93."
    yield "no object", b"\x80\x02}K\x01}b."
    itself = []
    itself.append(itself)
    yield "itself", pickle.dumps({0: itself})
    nested, doubled = [], (None,)
    for _ in range(60):
        nested, doubled = [nested], (doubled, doubled)
    yield "nested", pickle.dumps({0: nested})
    yield "doubled", pickle.dumps({0: doubled})
    yield "many of one text", _many_of_one_text()
    large, deep = (None,), ()
    for _ in range(20):  # in full, two million values
        large = large, large
    for _ in range(101):
        deep = (deep,)
    for what in (large, deep, (itself,)):
        yield "for an optimizer", pickle.dumps(({}, what))
        yield "for an index", pickle.dumps(({"a": what}, None))
        adam = b"cmxnet.optimizer.optimizer\nAdam\n)\x81}X\x02\x00\x00\x00lr" + pickle.dumps(what, 2)[2:-1] + b"sb"
        yield "an attribute", b"\x80\x02}" + adam + b"\x86."


def _many_of_one_text():
    """An array of 1 MB, which a file of 6 MB has 200,000 times."""
    array = struct.pack("<IiIqiii", 0xF993FAC9, 0, 1, 250_000, 1, 0, 0) + bytes(10**6)
    text = array.decode("latin-1").encode()
    start = b"\x80\x02cmxnet.ndarray.ndarray\nNDArray\nq\x00c_codecs\nencode\nq\x01X" + struct.pack("<I", len(text)) + text
    one = b"h\x00N\x85R}X\x06\x00\x00\x00handleh\x01h\x02h\x03\x86Rsb"
    return start + b"q\x02X\x06\x00\x00\x00latin1q\x03000" + b"0}K\x00(" + one * 200_000 + b"ls."


def test_hostile_pickles_are_refused(tmp_path, everything):
    trainer = _trainer("adam")
    params = trainer.replicas[0].params
    before = everything(trainer, params)
    for what, data in _hostile(tmp_path):
        (tmp_path / "hostile").write_bytes(data)
        with pytest.raises(ValueError, match="not a state file of MXNet") as error:
            load_mxnet_states(trainer, tmp_path / "hostile", NAMES)
        assert len(str(error.value)) < 1000, what
        assert not (tmp_path / "made").exists(), what
    assert everything(trainer, params) == before


@pytest.mark.parametrize(
    "file",
    ["adam.states", *(pytest.param(f"{run}.states", marks=pytest.mark.sample(0)) for run in ("lars", "adam_protocol0"))],
)
def test_a_damaged_pickle_is_refused_or_harmless(file, tmp_path):
    """It has no checksum, so that other numbers are read as such; nothing else comes of it."""
    whole = (FILES / file).read_bytes()
    run = file.partition("_")[0].partition(".")[0]
    for place in range(0, len(whole), 5):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]):
            (tmp_path / "a").write_bytes(data)
            try:
                load_mxnet_states(_trainer(run), tmp_path / "a", NAMES)
            except (ValueError, TypeError) as error:
                assert not isinstance(error, UnicodeError)  # noqa: PT017  # most must raise, some need not


def test_arrays_of_all_types():
    found = load_mxnet_params(FILES / "arrays.params")
    for name in ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool"):
        assert found[name].dtype == getattr(torch, name)
        assert found[name].tolist() == [[0, 1, 1], [1, 0, 1]]
    assert (found["rows"].layout, found["csr"].layout) == (torch.sparse_coo, torch.sparse_csr)
    assert found["rows"].to_dense().tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    assert found["csr"].to_dense().tolist() == [[0, 0, 5], [1, 0, 2]]
    for file, expected in {
        "list.params": {"0": [1.0, 2.0], "1": [3.0]},
        "old.params": {"one": [[1.5, -2.0]], "two": [[1.5, -2.0]]},
    }.items():
        assert {name: each.tolist() for name, each in load_mxnet_params(FILES / file).items()} == expected
    found = load_mxnet_params(FILES / "np.params")
    assert (found["scalar"].shape, found["scalar"].item(), found["none"].shape) == ((), 2.5, (0, 2))


def _model():
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3, eps=1e-5), torch.nn.ReLU(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(48, 4)).eval()


NAMED = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight", "4.bias"]


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("model.params", lambda found: None),
        ("model.params", lambda found: NAMED),
        *(
            (f"model_{way}.params", lambda found: {name: _torchs(name) for name in found})
            for way in ("collected", "exported-0000")
        ),
    ],
    ids=["in order", "by a list of names", "collected", "exported"],
)
def test_a_model_gives_mxnets_outputs(file, names):
    net = _model()
    load_mxnet_params(FILES / file, net, names(load_mxnet_params(FILES / file)))
    with torch.no_grad():
        y = net(torch.from_numpy(RECORDED["model.x"]))
    np.testing.assert_allclose(y.numpy(), RECORDED["model.y"], rtol=1e-4, atol=1e-5)


def _torchs(name):
    """The name in torch of a parameter of one of the layers conv0, batchnorm0 and dense0."""
    layer, last = re.fullmatch(r"(?:model_)?(conv0|batchnorm0|dense0)_(.*)", name).groups()
    place = {"conv0": 0, "batchnorm0": 1, "dense0": 4}[layer]
    last = {"gamma": "weight", "beta": "bias"}.get(last, last)
    return f"{place}.{last}"


@pytest.mark.parametrize(
    ("net", "names", "message"),
    [
        (_model, NAMED[:-1], "the file has 8 arrays, .* give names"),
        (_model, [*NAMED[:-1], "4.weight"], "the file has 8 arrays"),
        (_model, {"5.weight": "4.weight"}, "names: '5.weight' not among the file's arrays"),
        (lambda: torch.nn.Linear(3, 4), None, "net has 2 parameters and buffers"),
        (lambda: _model().double(), None, "'0.weight' is torch.float32 .* of net is torch.float64"),
        (_model, ["0.bias", "0.weight", *NAMED[2:]], r"'0.weight' is torch.float32 \(3, 2, 3, 3\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(net, names, message):
    net = net()
    before = {name: each.clone() for name, each in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_mxnet_params(FILES / "model.params", net, names)
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())


@pytest.mark.parametrize("file", ["model.params", "arrays.params", "np.params", "old.params"])
def test_a_cut_or_lengthened_file_of_arrays_is_refused(file, tmp_path):
    """Or one that claims to be large, for which no memory is taken."""
    whole, path = (FILES / file).read_bytes(), tmp_path / "a"
    for data in [*(whole[:length] for length in range(0, len(whole), 7)), whole + b"\0"]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not a file of arrays of MXNet, or a damaged one"):
            load_mxnet_params(path)
    array = struct.pack("<IiIqqiii", 0xF993FAC9, 0, 2, 2**40, 2**20, 1, 0, 0)
    for data in (struct.pack("<QQQ", 0x112, 0, 2**60), struct.pack("<QQQ", 0x112, 0, 1) + array):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="it ends too early"):
            load_mxnet_params(path)


def test_trainers_that_mxnet_has_no_states_for():
    several = Trainer(_params("sgd"), [("*", "sgd")])
    with pytest.raises(TypeError, match="states of MXNet are those of one built-in optimizer"):
        load_mxnet_states(several, FILES / "sgd.states")
    with pytest.raises(TypeError, match="trainer must be a Trainer"):
        load_mxnet_states(tristep.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), FILES / "sgd.states")
