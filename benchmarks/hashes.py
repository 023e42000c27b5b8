"""Hashes of some thousand short trainings, to compare before and after code has been moved.

    python benchmarks/hashes.py before.json
    python benchmarks/hashes.py after.json          # on the changed tree
    python benchmarks/hashes.py --compare before.json after.json

A training's entry is a hash of its weights and saved states after each step, or the error that it raises. The trainings are
optimizers x types of weights, x options, x ways of stepping, and torch's classes. They run eagerly, those with float32 and
no options also in the CPU's compiled loop. On one machine and one version of torch, equal code gives equal hashes.
"""

import argparse
import hashlib
import inspect
import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import torch

import tristep
from tristep.trainer.optimizer.options import OPTIONS

SHAPES = ((5, 3), (7,), (4, 4), (2, 3, 2), ())
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
STEPS = 5
VALUES = {
    "agc": 0.1,
    "clip_norm": 0.7,
    "cautious": True,
    "decoupled_wd": True,
    "cautious_wd": True,
    "lookahead": 2,
    "ema_decay": 0.9,
    "skip_norm": 3.0,
    "skip_nonfinite": True,
}
VARIED = {
    "bf16 states": {"state_dtype": "bfloat16"},
    "8bit": {"state_dtype": "8bit"},
    "4bit": {"state_dtype": "4bit"},
    "rounded": {"stochastic_rounding": True, "rounding_seed": 3},
    "masters": {"multi_precision": True},
    "split": {"multi_precision": "remainder"},
    "24": {"multi_precision": "split8"},
    "wd": {"wd": 0.1},
    "clip": {"clip_gradient": 0.3},
    "several": {"clip_norm": 0.7, "ema_decay": 0.9, "wd": 0.1, "cautious": True},
    "wd decoupled": {"wd": 0.1, "decoupled_wd": True},
}


def parameters(dtype, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(params, generator):
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def add(digest, value):
    """Puts nested states, arrays and numbers into the hash."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            value = value.to_dense()
        value = value.detach().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(bytes(value.reshape(-1).view(torch.uint8).tolist()) if value.numel() else b"")
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            add(digest, value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            add(digest, each)
    else:
        digest.update(repr(value).encode())


def optimizers():
    registry = tristep.optimizer.Optimizer.opt_registry
    return [name for name in sorted({*registry, "lbsgd", "ccsgd", "test"}) if name != "multioptimizer"]


def shapes_of(name):
    """Those that the optimizer takes."""
    return [shape for shape in SHAPES if len(shape) == 2] if name.lower() in ("groupadagrad", "muon", "normuon") else SHAPES


class Training:
    def __init__(self):
        self.digest = hashlib.sha256()

    def trainer(self, name, arguments, dtype=torch.float32, way="step", engine="eager", **others):
        params = parameters(dtype, shapes=shapes_of(name))
        arguments = {"learning_rate": 0.05, **arguments}
        if way == "replicas":
            net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)
            generator = torch.Generator().manual_seed(1)
            for param in net.parameters():
                param.data.copy_(torch.randn(param.shape, generator=generator).to(dtype))
            nets = tristep.replicate(net, ["cpu", "cpu"])
            trainer = tristep.Trainer(nets, name, arguments, engine=engine, **others)
            params = [param for net in nets for param in net.parameters()]
        else:
            trainer = tristep.Trainer(params, name, arguments, engine=engine, **others)
        if way == "multipliers":
            trainer.optimizer.set_lr_mult({"0": 0.5, "1": 0.0})
            trainer.optimizer.set_wd_mult({"2": 3.0})
        generator = torch.Generator().manual_seed(5)
        for step in range(STEPS):
            if way == "ignored":
                give(params[1:], generator)
                if step == 0:
                    give(params[:1], generator)
                trainer.step(2, ignore_stale_grad=True)
            elif way == "reduced":
                give(params, generator)
                trainer.allreduce_grads()
                trainer.update(3)
            elif way == "rates":
                give(params, generator)
                trainer.set_learning_rate(0.05 / (step + 1))
                trainer.step(1)
            elif way == "resumed":
                give(params, generator)
                trainer.step(2)
                state = trainer.state_dict()
                trainer = tristep.Trainer(params, name, arguments, engine=engine, **others)
                trainer.load_state_dict(state)
            elif way == "backward":
                if step == 0:
                    trainer.step_in_backward(2)
                loss = sum((param.float() * torch.randn(param.shape, generator=generator)).sum() for param in params)
                loss.backward()
            else:
                give(params, generator)
                trainer.step(2)
            add(self.digest, params)
        add(self.digest, trainer.state_dict())

    def updater(self, name, arguments, dtype):
        params = parameters(dtype, shapes=shapes_of(name))
        optimizer = tristep.optimizer.create(name, learning_rate=0.05, **arguments)
        updater = tristep.optimizer.get_updater(optimizer)
        generator = torch.Generator().manual_seed(5)
        for _ in range(STEPS):
            give(params, generator)
            updater(list(range(len(params))), [param.grad for param in params], [param.data for param in params])
            add(self.digest, params)

    def as_torch(self, name, arguments, dtype):
        cls = tristep.optim.as_torch(type(tristep.optimizer.create(name)))
        params = parameters(dtype, shapes=shapes_of(name))
        self.stepped(params, cls(params, lr=0.05, **arguments))

    def stepped(self, params, optimizer):
        generator = torch.Generator().manual_seed(5)
        for _ in range(STEPS):
            give(params, generator)
            optimizer.step()
            add(self.digest, params)
        add(self.digest, optimizer.state_dict()["state"])

    def optim(self, name, arguments, dtype):
        cls = getattr(tristep.optim, name)
        params = parameters(dtype, shapes=shapes_of(name))
        arguments = dict(arguments)
        if "lr" in inspect.signature(cls).parameters:
            arguments.setdefault("lr", 0.05)
        self.stepped(params, cls(params, **arguments))

    def ensemble(self, name, arguments, dtype):
        models = [[each.detach() for each in parameters(dtype, seed, shapes_of(name))] for seed in range(3)]
        made = [tristep.optimizer.create(name, learning_rate=rate, **arguments) for rate in (0.1, 0.05, 0.01)]
        stacks = [torch.stack(each) for each in zip(*models, strict=True)]
        ensemble = tristep.trainer.Ensemble(made, stacks, "eager")
        generator = torch.Generator().manual_seed(5)
        for _ in range(STEPS):
            given = [[torch.randn(each.shape, generator=generator).to(dtype) for each in model] for model in models]
            ensemble.step([torch.stack(each) for each in zip(*given, strict=True)])
            add(self.digest, [list(each) for each in zip(*stacks, strict=True)])


WAYS = (
    "ignored",
    "reduced",
    "rates",
    "resumed",
    "backward",
    "replicas",
    "replicas kept",
    "replicas local",
    "schedule",
    "zeroed",
    "multipliers",
)


def others(way):
    if way == "schedule":
        return "step", {"lr_scheduler": tristep.lr_scheduler.CosineScheduler(4, base_lr=0.05, warmup_steps=2)}, {}
    if way == "replicas kept":
        return "replicas", {}, {"update_on_kvstore": False}
    if way == "replicas local":
        return "replicas", {}, {"kvstore": "local"}
    if way == "zeroed":
        return "step", {}, {"zero_grads": True}
    return way, {}, {}


def trainings():
    """Pairs of a name and a function that fills a `Training`."""
    names = optimizers()
    for name, (kind, dtype) in itertools.product(names, DTYPES.items()):
        yield f"{name} {kind}", lambda t, n=name, d=dtype: t.trainer(n, {}, d)
        yield f"{name} {kind} updater", lambda t, n=name, d=dtype: t.updater(n, {}, d)
        yield f"{name} {kind} torch", lambda t, n=name, d=dtype: t.as_torch(n, {}, d)
    for name in names:
        yield f"{name} f32 cpu", lambda t, n=name: t.trainer(n, {}, engine="cpu")
        yield f"{name} ensemble", lambda t, n=name: t.ensemble(n, {}, torch.float32)
        for way in WAYS:
            way_, arguments, rest = others(way)
            yield f"{name} {way}", lambda t, n=name, w=way_, a=arguments, r=rest: t.trainer(n, a, way=w, **r)
    options = {option.name: {option.name: VALUES[option.name]} for option in OPTIONS if option.name in VALUES}
    for name, (label, arguments) in itertools.product(names, (options | VARIED).items()):
        yield f"{name} {label}", lambda t, n=name, a=arguments: t.trainer(n, a)
        kind = torch.bfloat16 if hash_of(name + label) % 2 else torch.float16
        yield f"{name} {label} narrow", lambda t, n=name, a=arguments, d=kind: t.trainer(n, a, d)
        kind = (*WAYS, "updater", "torch", "ensemble")[hash_of(label + name) % (len(WAYS) + 3)]
        if kind in WAYS:
            way_, more, rest = others(kind)
            yield (
                f"{name} {label} {kind}",
                lambda t, n=name, w=way_, a={**arguments, **more}, r=rest: t.trainer(n, a, way=w, **r),
            )
        else:
            do = {"torch": Training.as_torch}.get(kind) or getattr(Training, kind)
            yield f"{name} {label} {kind}", lambda t, n=name, a=arguments, f=do: f(t, n, a, torch.float32)
    for name in sorted(tristep.optim.__all__):
        if not isinstance(cls := getattr(tristep.optim, name), type) or not issubclass(cls, torch.optim.Optimizer):
            continue
        for (kind, dtype), arguments in itertools.product(
            DTYPES.items(),
            (
                {},
                {"weight_decay": 0.1},
                {"maximize": True},
                {"state_dtype": "8bit"},
                {"amsgrad": True},
                {"momentum": 0.9},
                {"ema_decay": 0.9},
                {"max_norm": 0.5},
            ),
        ):
            label = " ".join(f"{key}={value}" for key, value in arguments.items())
            yield f"optim.{name} {kind} {label}", lambda t, n=name, a=arguments, d=dtype: t.optim(n, a, d)


def hash_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what to write; or with --compare, the two files")
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(file.read_text()) for file in arguments.files)
        both = sorted(set(before) & set(after))
        unlike = [name for name in both if before[name].split(":")[0] != after[name].split(":")[0]]  # messages may change
        for name in unlike[:40]:
            print(name, before[name], after[name])
        print(f"compared {len(both)}, in one only {len(set(before) ^ set(after))}, different {len(unlike)}")
        sys.exit(bool(unlike))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started, results = time.time(), {}
    for name, fill in trainings():
        torch.manual_seed(0)
        training = Training()
        try:
            fill(training)
            results[name] = training.digest.hexdigest()[:16]
        except (TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError) as error:
            results[name] = f"{type(error).__name__}: {str(error)[:80]}"
    with tempfile.NamedTemporaryFile("w", dir=arguments.files[0].parent, delete=False) as file:
        json.dump(results, file, indent=0, sort_keys=True)
    os.replace(file.name, arguments.files[0])
    errors = sum(": " in value for value in results.values())
    print(f"{len(results)} trainings, {errors} of them refused, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
