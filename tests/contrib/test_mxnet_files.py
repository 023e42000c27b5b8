"""Files of arrays of MXNet 1.9.1, which tests/golden/files/README.md describes."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tristep import load_mxnet_params

FILES = Path(__file__).parents[1] / "golden" / "files"
RECORDED = np.load(FILES / "recorded.npz")


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


def _bfloat16_npy(values):
    """A .npy of bfloat16 as MXNet 2 writes it: src/serialization/cnpy.cc, `dtype_descr`."""
    bits = torch.tensor(values, dtype=torch.bfloat16).view(torch.uint16).numpy()
    return bits.view([("bfloat16", "<u2")])


def test_an_npz_of_mxnet_2(tmp_path):
    arrays = {"arg:0.weight": np.ones((3, 2), np.float32), "aux:scale": np.float64(2.5), "half": _bfloat16_npy([1.5, -2.0])}
    arrays |= {"order": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)), "none": np.zeros((0, 2), np.int8)}
    arrays |= {"other bytes": np.array([1.5], ">f4")}
    for save in (np.savez, np.savez_compressed):  # libzip compresses, NumPy does not
        save(tmp_path / "a.npz", **arrays)
        found = load_mxnet_params((tmp_path / "a.npz").rename(tmp_path / "a.params"))
        assert {name: (each.dtype, each.tolist()) for name, each in found.items()} == {
            "0.weight": (torch.float32, 3 * [[1.0, 1.0]]),
            "scale": (torch.float64, 2.5),
            "half": (torch.bfloat16, [1.5, -2.0]),
            "order": (torch.int64, [[0, 1, 2], [3, 4, 5]]),
            "none": (torch.int8, []),
            "other bytes": (torch.float32, [1.5]),
        }
        assert found["none"].shape == (0, 2)
    np.savez(tmp_path / "list.npz", np.ones(2), np.zeros(1))
    assert list(load_mxnet_params(tmp_path / "list.npz")) == ["0", "1"]


def test_a_model_takes_an_npz(tmp_path):
    arrays = {name.replace("1.weight", "1.gamma"): each for name, each in _model().state_dict().items()}
    del arrays["1.num_batches_tracked"]
    np.savez(tmp_path / "model.npz", **arrays)
    net = _model()
    load_mxnet_params(tmp_path / "model.npz", net)
    assert all(torch.equal(net.get_parameter(name), arrays[name]) for name, _ in net.named_parameters() if name in arrays)
    assert torch.equal(net[1].weight, arrays["1.gamma"])


def _zeros(path):
    np.savez_compressed(path, zeros=np.zeros(1 << 24))  # inflates to a thousand times as much


def _pickled(path):
    np.savez(path, objects=np.array([{}], dtype=object))


def _sparse(path):
    np.savez(path, **{"rows/data": np.ones(2)})


def _cut(path):
    np.savez(path, whole=np.ones(1000))
    path.write_bytes(path.read_bytes()[:4000] + path.read_bytes()[4100:])


@pytest.mark.parametrize("write", [_zeros, _pickled, _sparse, _cut])
def test_an_npz_that_is_damaged_too_large_or_of_another_kind_is_refused(tmp_path, write):
    write(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="not a file of arrays of MXNet"):
        load_mxnet_params(tmp_path / "a.npz")
