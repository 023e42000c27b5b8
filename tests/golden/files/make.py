"""Makes the files of this folder with MXNet 1.9.1; README.md says how to run it, and what they are.

Each run trains three parameters for 3 steps with Gluon's Trainer, saves, and goes on for 4 steps, which are recorded.
"""

import json
import pickle
import struct
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, lr_scheduler, nd

HERE = Path(__file__).parent
SHAPES = {"net_a": (2, 3), "net_b": (3,), "net_c": (2, 3)}
BEFORE, AFTER, BATCH = 3, 4, 2

# id: (optimizer, its arguments, others)
RUNS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.01}, {}),
    "sgd_momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.7}, {}),
    "sgd_float16": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}, {"dtype": "float16"}),
    "sgd_float16_plain": ("sgd", {"learning_rate": 0.1, "multi_precision": True}, {"dtype": "float16"}),
    "nag": ("nag", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, {}),
    "nag_float16": ("nag", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}, {"dtype": "float16"}),
    "signum": ("signum", {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.01}, {}),
    "adam": ("adam", {"learning_rate": 0.02, "wd": 0.01, "beta1": 0.8}, {}),
    "adam_float16": ("adam", {"learning_rate": 0.02, "multi_precision": True}, {"dtype": "float16"}),
    "adam_float64": ("adam", {"learning_rate": 0.02}, {"dtype": "float64"}),
    "adam_devices": ("adam", {"learning_rate": 0.02}, {"devices": 2, "update_on_kvstore": False}),
    "adam_store": ("adam", {"learning_rate": 0.02}, {"devices": 2, "update_on_kvstore": True}),
    "adam_np": ("adam", {"learning_rate": 0.02}, {"numpy": True}),
    "adam_shapes": ("adam", {"learning_rate": 0.02}, {"parameters": ["net_a", "net_b"]}),
    "adagrad": ("adagrad", {"learning_rate": 0.1, "wd": 0.01, "eps": 1e-5}, {}),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01, "wd": 0.01}, {}),
    "rmsprop_centered": ("rmsprop", {"learning_rate": 0.01, "centered": True, "clip_weights": 1.5}, {}),
    "adadelta": ("adadelta", {"rho": 0.8, "wd": 0.01}, {}),
    "ftrl": ("ftrl", {"learning_rate": 0.2, "lamda1": 0.02, "wd": 0.01}, {}),
    "ftml": ("ftml", {"learning_rate": 0.02}, {}),
    "lamb": ("lamb", {"learning_rate": 0.02, "wd": 0.01, "upper_bound": 3.0}, {}),
    "lars": ("lars", {"learning_rate": 0.1, "momentum": 0.9}, {"schedule": ("PolyScheduler", {"max_update": 9})}),
    "adamax": ("adamax", {"learning_rate": 0.02}, {}),
    "nadam": ("nadam", {"learning_rate": 0.02}, {}),
    "dcasgd": ("dcasgd", {"learning_rate": 0.1}, {}),
    "factor": ("sgd", {}, {"schedule": ("FactorScheduler", {"step": 2, "factor": 0.5, "base_lr": 0.4})}),
    "factor_set": ("sgd", {"learning_rate": 0.2}, {"schedule": ("FactorScheduler", {"step": 2, "factor": 0.5})}),
    "multifactor": (
        "sgd",
        {"momentum": 0.5},
        {"schedule": ("MultiFactorScheduler", {"step": [1, 2, 5], "factor": 0.5, "base_lr": 0.4, "warmup_steps": 1})},
    ),
    "poly": ("sgd", {}, {"schedule": ("PolyScheduler", {"max_update": 6, "base_lr": 0.4, "pwr": 3, "final_lr": 0.01})}),
    "cosine": (
        "adam",
        {"learning_rate": 0.05},
        {"schedule": ("CosineScheduler", {"max_update": 6, "base_lr": 0.05, "warmup_steps": 4, "warmup_begin_lr": 0.01})},
    ),
}  # fmt: skip


def run(name):
    kind, arguments, others = RUNS[name]
    random = np.random.RandomState(list(RUNS).index(name))
    shapes = {each: SHAPES[each] for each in others.get("parameters", SHAPES)}
    dtype, contexts = others.get("dtype", "float32"), [mx.cpu(i) for i in range(others.get("devices", 1))]
    params = gluon.ParameterDict()
    for parameter, shape in shapes.items():
        params.get(parameter, shape=shape, dtype=dtype, init=mx.init.Constant(0))
    params.initialize(ctx=contexts)
    array = mx.np.array if others.get("numpy") else nd.array
    for parameter, shape in shapes.items():
        params[parameter].set_data(array(random.normal(size=shape).astype(dtype), dtype=dtype))
    arguments = dict(arguments)
    if "schedule" in others:
        schedule, given = others["schedule"]
        arguments["lr_scheduler"] = getattr(lr_scheduler, schedule)(**given)
    options = {key: others[key] for key in ("update_on_kvstore",) if key in others}
    trainer = gluon.Trainer(params, kind, arguments, **options)
    gradients, weights = [], []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            trainer.save_states(str(HERE / f"{name}.states"))
            start = [p.data(contexts[0]).asnumpy() for p in params.values()]
        g = [random.normal(size=shape).astype(dtype) for shape in shapes.values()]
        losses = []
        for context in contexts:
            with autograd.record():
                pairs = zip(params.values(), g, strict=True)
                share = [
                    (p.data(context) * array(each / len(contexts), ctx=context, dtype=dtype)).sum() for p, each in pairs
                ]
                losses.append(share)
        for loss in losses:
            autograd.backward(loss)
        trainer.step(BATCH)
        if step >= BEFORE:
            gradients.append(g)
            weights.append([p.data(contexts[0]).asnumpy() for p in params.values()])
    found = {}
    for i in range(len(shapes)):
        found[f"{name}.start_{i}"] = start[i]
        found[f"{name}.g_{i}"] = np.stack([each[i] for each in gradients])
        found[f"{name}.w_{i}"] = np.stack([each[i] for each in weights])
    if name == "adam":
        updater = trainer._kvstore._updater if trainer._update_on_kvstore else trainer._updaters[0]
        trainer.load_states(str(HERE / "adam.states"))  # as it was
        updater = trainer._kvstore._updater if trainer._update_on_kvstore else trainer._updaters[0]
        for protocol in (0, 1, 2, 3, 5):
            text = pickle.dumps((updater.states, updater.optimizer), protocol)
            (HERE / f"adam_protocol{protocol}.states").write_bytes(text)
        (HERE / "adam_without_optimizer.states").write_bytes(updater.get_states(dump_optimizer=False))
    return found


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
    recorded = {}
    for name in RUNS:
        if RUNS[name][2].get("numpy"):
            mx.npx.set_np()
        recorded.update(run(name))
        mx.npx.reset_np()
    recorded.update(model())
    arrays()
    np.savez_compressed(HERE / "recorded.npz", **recorded)
    runs = {name: {"optimizer": kind, **others} for name, (kind, _, others) in RUNS.items()}
    (HERE / "runs.json").write_text(json.dumps(runs, indent=1) + "\n")
    print(f"made with MXNet {mx.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
