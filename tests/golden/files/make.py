"""Makes the files of this folder with MXNet 1.9.1; README.md says how to run it, and what they are."""

import struct
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

HERE = Path(__file__).parent


def model():
    """A model with its output, saved in the two ways of Gluon and exported."""
    net = gluon.nn.HybridSequential(prefix="model_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(3, 3, in_channels=2), gluon.nn.BatchNorm(in_channels=3), gluon.nn.Activation("relu"))
        net.add(gluon.nn.Flatten(), gluon.nn.Dense(4, in_units=48))
    mx.random.seed(0)
    net.initialize(mx.init.Normal(0.3))
    x = nd.random.normal(shape=(2, 2, 6, 6))
    with autograd.record():
        net(x)  # so that the running means are no zeros
    net.hybridize()
    y = net(x)
    net.save_parameters(str(HERE / "model.params"))
    net.collect_params().save(str(HERE / "model_collected.params"))
    net.export(str(HERE / "model_exported"))
    (HERE / "model_exported-symbol.json").unlink()
    return {"model.x": x.asnumpy(), "model.y": y.asnumpy()}


def arrays():
    """Arrays of all types and kinds of storage."""
    found = {}
    for dtype in ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool"):
        found[dtype] = nd.array([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    found["rows"] = nd.array([[0, 0], [1, 2], [0, 0], [3, 4]]).tostype("row_sparse")
    found["csr"] = nd.array([[0, 0, 5], [1, 0, 2]]).tostype("csr")
    nd.save(str(HERE / "arrays.params"), found)
    nd.save(str(HERE / "list.params"), [nd.array([1.0, 2.0]), nd.array([3])])
    text = struct.pack("<QQQ", 0x112, 0, 2)
    for head in (struct.pack("<II2q", 0xF993FAC8, 2, 1, 2), struct.pack("<I2I", 2, 1, 2)):  # of releases before 1.0
        text += head + struct.pack("<iii2f", 1, 0, 0, 1.5, -2.0)
    (HERE / "old.params").write_bytes(text + struct.pack("<QQ3sQ3s", 2, 3, b"one", 3, b"two"))
    for value in nd.load(str(HERE / "old.params")).values():  # MXNet reads what it no longer writes
        assert value.asnumpy().tolist() == [[1.5, -2.0]]
    mx.npx.set_np()
    mx.npx.save(str(HERE / "np.params"), {"scalar": mx.np.array(2.5), "none": mx.np.zeros((0, 2)), "vector": mx.np.ones(3)})
    mx.npx.reset_np()


def main():
    np.savez_compressed(HERE / "recorded.npz", **model())
    arrays()
    print(f"made with MXNet {mx.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
