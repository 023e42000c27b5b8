"""One training of each kind that can be saved. tests/golden/earlier has its files, and how it went on; a test does so, too.

Gradients and first weights are drawn by Python's generator, whose numbers stay the same, and are multiples of 1 / 64.
"""

import copy
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from saved_states import Averaged, Cautious
from torch.nn import Parameter, ParameterDict

from tristep import CheckpointManager, Trainer, amp, initializer, kvstore, lr_scheduler, optim, optimizer
from tristep.trainer.optimizer import RuleOptimizer

FOLDER = Path(__file__).parents[2] / "golden" / "earlier"
SAVED, STEPS = 3, 5  # files are of the training after 3 steps, which goes on for 2
MATRICES = {"a": (3, 4), "b": (2, 3)}
ANY = {"a": (3, 4), "b": (5,), "c": ()}
LARGE = {"a": (64, 64), "b": (5,)}  # 8-bit and 4-bit states are of 4,096 elements or more
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SPIKE = {4: 8.0}
NEWTON = 4e-3  # the iteration of Newton and Schulz is in bfloat16, whose sums other processors round otherwise
ABOUT = {"loss": 0.5}, {"note": "metrics and metadata"}


class Row(NamedTuple):
    """What the training of a kind is made of.

    `optimizer` is a Trainer's optimizer, or a function that makes an optimizer of torch's interface for a module; `scales`
    are factors of the gradients by step. `close` is how close numbers of another machine must come, relative and, for
    weights near 0, absolute. It is the same for what is rounded to 16 bits and less: no number here is so near to the middle
    between two of these that float32's last bit would decide.
    """

    optimizer: Any
    arguments: Any = {}  # noqa: RUF012  # it is copied
    shapes: dict[str, tuple[int, ...]] = MATRICES
    dtype: torch.dtype = F32
    close: float = 1e-5
    scales: dict[int, float] = {}  # noqa: RUF012
    replicas: int = 1
    trainer: dict[str, Any] = {}  # noqa: RUF012
    scaler: bool = False

    @property
    def size(self):
        return sum(map(math.prod, self.shapes.values()))


class OfTrainer:
    """A training by `Trainer`, of one or several replicas."""

    suffix = ".states"

    def __init__(self, row, start=None):
        self.row = row
        weights = drawn(row.shapes, -1) if start is None else split(start, row.shapes)
        params = {name: Parameter(weight.to(row.dtype)) for name, weight in weights.items()}
        self.nets = [ParameterDict(copy.deepcopy(params)) for _ in range(row.replicas)]
        self.make()

    def make(self):
        row = self.row
        chosen, arguments = copy.deepcopy((row.optimizer, row.arguments))
        self.trainer = Trainer(self.nets if row.replicas > 1 else self.nets[0], chosen, arguments, **row.trainer)
        if isinstance(chosen, str):
            self.trainer.optimizer.set_lr_mult({"b": 0.5})  # multipliers are the model's, and not in files
        if row.scaler:
            amp.LossScaler(1024.0, scale_window=2).attach(self.trainer)

    def step(self, step):
        for k, net in enumerate(self.nets):
            for name, gradient in drawn(self.row.shapes, step, k).items():
                net[name].grad = (gradient * self.row.scales.get(step, 1.0)).to(self.row.dtype)
        self.update(step)

    def update(self, step):
        trainer = self.trainer
        if step == 2 and trainer.optimizer.lr_scheduler is None:
            trainer.set_learning_rate(trainer.learning_rate * 0.75)
        if not self.row.scaler:
            trainer.step(2)
            return
        with amp.scale_loss(torch.ones(()), trainer) as scale:
            for param in self.nets[0].values():
                param.grad *= scale
        trainer.step(2)

    def save(self, path):
        self.trainer.save_states(path)

    def load(self, path):
        self.trainer.load_states(path)

    def weights(self):
        return torch.cat([param.detach().flatten().double() for param in self.nets[-1].values()])

    def numbers(self):
        """Weights, of large ones some, or their masters and averages, and what the next step depends on besides states."""
        trainer, optimizer = self.trainer, self.trainer.optimizer
        found = list(self.nets[-1].values())
        if isinstance(optimizer, RuleOptimizer) and optimizer.multi_precision:
            found = list(trainer.float32_weights().values())
        numbers = some(found) + averages(trainer, self.nets[0].values())
        scaler = trainer.state_dict().get("loss_scaler", {})
        return numbers + [optimizer.num_update, trainer.learning_rate, *optimizer.counts.values(), *scaler.values()]


class OfOptim(OfTrainer):
    """A training by an optimizer of torch's interface. One that shows averages is saved while it does."""

    suffix = ".pt"

    def make(self):
        self.optimizer = self.row.optimizer(self.nets[0])
        self.shows = "ScheduleFree" in type(self.optimizer).__name__

    def update(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.75 if step == 2 else 1.0
        if self.shows:
            self.optimizer.train()
        self.optimizer.step()
        if self.shows and step == SAVED:
            self.optimizer.eval()

    def save(self, path):
        torch.save(self.optimizer.state_dict(), path)

    def load(self, path):
        self.optimizer.load_state_dict(torch.load(path, weights_only=True))

    def numbers(self):
        found = list(self.nets[0].values())
        if self.optimizer.param_groups[0].get("multi_precision"):
            found = list(self.optimizer.float32_weights().values())
        numbers = some(found) + averages(self.optimizer, self.nets[0].values())
        return numbers + [group["lr"] for group in self.optimizer.param_groups]


class OfStore(OfTrainer):
    """A store that updates what is in it, by keys that are numbers."""

    suffix = ".store"

    def make(self):
        self.store, self.keys = kvstore.create("local"), [3, 7]
        self.store.init(self.keys, [param.detach() for param in self.nets[0].values()])
        self.store.set_optimizer(optimizer.create(self.row.optimizer, **self.row.arguments))

    def update(self, step):
        self.store.push(self.keys, [param.grad for param in self.nets[0].values()])
        self.store.pull(self.keys, [param.data for param in self.nets[0].values()])

    def save(self, path):
        self.store.save_optimizer_states(path)

    def load(self, path):
        self.store.load_optimizer_states(path)

    def numbers(self):
        return some(self.nets[0].values())


class OfFolder(OfTrainer):
    """A folder of checkpoints: of a trainer of one parameter, and of an optimizer of torch's interface of the other."""

    suffix = ""

    def make(self):
        net = self.nets[0]
        self.trainer = Trainer({"a": net["a"]}, self.row.optimizer, self.row.arguments)
        self.other = optim.AdamW([net["b"]], lr=0.05)

    def update(self, step):
        super().update(step)
        self.other.step()

    def _manager(self, path):
        return CheckpointManager(path, self.trainer, self.nets[0], stateful=[self.other], asynchronous=False)

    def save(self, path):
        manager = self._manager(path)
        manager.save(*ABOUT)
        manager.close()
        (path / ".lock").unlink(missing_ok=True)

    def load(self, path):
        for param in self.nets[0].values():  # which the folder has
            param.data.zero_()
        about = self._manager(path).resume()
        assert (about.step, about.metrics, about.metadata) == (SAVED, *ABOUT)


def drawn(shapes, step, replica=0):
    """Weights (step -1) or gradients, by name; of large tensors only `some` are no zeros, so that files stay small."""
    made = {}
    for k, (name, shape) in enumerate(shapes.items()):
        generator = random.Random(1000 * (step + 2) + 10 * k + replica)
        made[name] = torch.zeros(shape)
        chosen = _some(made[name])
        chosen.copy_(torch.tensor([(int(generator.random() * 256) - 128) / 64 for _ in chosen]))
    return made


def split(flat, shapes):
    """Weights by name, of all weights one after the other."""
    parts = torch.as_tensor(flat).split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def some(tensors):
    """The elements of small tensors, and some 256 of each large one, as a list."""
    return [value for each in tensors for value in _some(each.detach().double()).tolist()]


def _some(tensor):
    return tensor.flatten()[:: 1 + tensor.numel() // 256]


def averages(of, parameters):
    """Some averaged weights of a trainer or an optimizer; none if it keeps none."""
    try:
        with of.averaged_weights():
            return some(parameters)
    except (AttributeError, ValueError):
        return []


def groups(net, **options):
    """Two parameter groups, the second with options of its own."""
    first, *others = net.values()
    return [{"params": [first]}, {"params": others, **options}]


def wrapped(name, **arguments):
    """A function that makes the optimizer of a class that `as_torch` makes."""
    return lambda net: optim.as_torch(optimizer.registered()[name])(groups(net, lr=0.05), lr=0.1, **arguments)


# All optimizers but SGLD, which has no states. Arguments are not the defaults where states had no effect in the last steps.
PLAIN = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "adan", "ademamix", "adopt", "asgd"),
    *("came", "dcasgd", "ftml", "ftrl", "grams", "groupadagrad", "lamb", "lans", "lars", "lion", "mars", "muon", "nadam"),
    *("nag", "normuon", "novograd", "prodigy", "radam", "rmsprop", "rprop", "schedulefreeadamw", "schedulefreesgd", "sgd"),
    *("signum", "soap", "sophia", "stableadamw", "tiger"),
)
MORE = {name: {"momentum": 0.9} for name in ("dcasgd", "lars", "nag", "sgd")} | {
    "asgd": {"t0": 1},
    "lion": {"beta2": 0.5},
    "prodigy": {"learning_rate": 1.0, "d0": 0.1},
    "radam": {"begin_num_update": 10},
    "soap": {"precondition_frequency": 3},
    "muon": {"steps": 1},
    "normuon": {"steps": 1},
}
CLOSE = dict.fromkeys(("muon", "normuon"), NEWTON)
FACTOR = lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1, warmup_steps=2)
ENTRIES = [("a", "muon", {"learning_rate": 0.1, "steps": 1}), ("*", "adamw", {"learning_rate": 0.1})]

TRAINERS = {
    name: Row(
        name,
        {"learning_rate": 0.1} | MORE.get(name, {}),
        MATRICES if name == "groupadagrad" else ANY,
        close=CLOSE.get(name, 1e-5),
    )
    for name in PLAIN
} | {
    "schedule": Row("sgd", {"momentum": 0.9, "wd": 0.1, "clip_gradient": 1.0, "lr_scheduler": FACTOR}, ANY),
    "float64": Row("adam", {"learning_rate": 0.1}, ANY, F64),
    "masters": Row("adamw", {"learning_rate": 0.1, "wd": 0.1, "multi_precision": True}, ANY, BF16),
    "remainder": Row("adamw", {"learning_rate": 0.1, "multi_precision": "remainder"}, ANY, BF16),
    "split8": Row("adamw", {"learning_rate": 0.1, "multi_precision": "split8"}, ANY, BF16),
    "kahan": Row("adamw", {"learning_rate": 0.1, "kahan": True}, ANY, BF16),
    "bfloat16": Row("adamw", {"learning_rate": 0.1, "state_dtype": "bfloat16"}, ANY),
    "8bit": Row("adamw", {"learning_rate": 0.1, "state_dtype": "8bit"}, LARGE, BF16),
    "4bit": Row("adamw", {"learning_rate": 0.1, "state_dtype": "4bit"}, LARGE, BF16),
    "rounded": Row("sgd", {"learning_rate": 0.1, "momentum": 0.9, "stochastic_rounding": True}, ANY, BF16),
    "zclip": Row("sgd", {"learning_rate": 0.1, "zclip": 2.0, "zclip_warmup": 2, "clip_norm": 9.0}, scales=SPIKE),
    "percentile": Row(
        "sgd", {"learning_rate": 0.1, "skip_percentile": 50.0, "skip_warmup": 2, "skip_norm": 99.0}, scales=SPIKE
    ),
    "lookahead": Row("adam", {"learning_rate": 0.1, "lookahead": 2}),
    "ema": Row("adam", {"learning_rate": 0.1, "ema_decay": 0.75}),
    "scaler": Row("adam", {"learning_rate": 0.1, "skip_nonfinite": True}, scales={2: math.inf}, scaler=True),
    "options": Row(
        "adam", {"learning_rate": 0.1, "wd": 0.1, "decoupled_wd": True, "cautious": True, "clip_norm": 1.0, "agc": 0.5}
    ),
    "several": Row(ENTRIES, {"clip_norm": 1.0, "skip_nonfinite": True, "wd": 0.1}, close=NEWTON),
    "several_scheduled": Row(
        [("a", "nadam", {"learning_rate": 0.1}), ("*", "sgd", {"momentum": 0.9, "ema_decay": 0.5})], {"lr_scheduler": FACTOR}
    ),
    "own": Row(Averaged(decay=0.75, learning_rate=0.1), None),
    "own_masters": Row(Averaged(decay=0.75, learning_rate=0.1, multi_precision=True), None, ANY, BF16),
    "own_rule": Row(Cautious(momentum=0.5, learning_rate=0.1), None),
    "replicas": Row("nadam", {"learning_rate": 0.1}, replicas=2, trainer={"update_on_kvstore": False}),
    "store": Row("nadam", {"learning_rate": 0.1}, replicas=2, trainer={"update_on_kvstore": True}),
}
TWO_BIT = {"kvstore": "device", "compression_params": {"type": "2bit", "threshold": 0.5}}
TRAINERS |= {
    f"compressed_{where}": Row(
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9},
        replicas=2,
        trainer={**TWO_BIT, "update_on_kvstore": where == "there"},
    )
    for where in ("here", "there")
}
OPTIMS = {
    "SGD": Row(lambda net: optim.SGD(groups(net, momentum=0.5), lr=0.1, momentum=0.9, weight_decay=0.1)),
    "AdamW": Row(lambda net: optim.AdamW(groups(net, lr=0.05, betas=(0.8, 0.9)), lr=0.1, amsgrad=True)),
    "AdamW_8bit": Row(lambda net: optim.AdamW(groups(net), lr=0.1, state_dtype="8bit"), None, LARGE, BF16),
    "NAdam": Row(lambda net: optim.NAdam(groups(net, lr=0.05), lr=0.1)),
    "Muon": Row(lambda net: optim.Muon(groups(net, lr=0.05), lr=0.1, ns_steps=1), close=NEWTON),
    "Lion": Row(lambda net: optim.Lion(groups(net, lr=0.05), lr=0.1, beta2=0.5)),
    "Prodigy": Row(lambda net: optim.Prodigy(groups(net, lr=0.5), lr=1.0, d0=0.1)),
    "ScheduleFreeAdamW": Row(lambda net: optim.ScheduleFreeAdamW(groups(net, lr=0.05), lr=0.1)),
    "of_Nadam": Row(wrapped("nadam")),
    "of_SGD_zclip": Row(wrapped("sgd", momentum=0.9, zclip=2.0, zclip_warmup=2), scales=SPIKE),
    "of_Adam_ema_decay": Row(wrapped("adam", ema_decay=0.75)),
    "of_Adam_masters": Row(wrapped("adam", multi_precision=True), None, ANY, BF16),
    "several": Row(
        lambda net: optim.MultiOptimizer(
            net.named_parameters(), [("a", "AdamW"), ("b", torch.optim.SGD, {"momentum": 0.9}), ("*", "Nadam")], lr=0.1
        ),
        None,
        ANY,
    ),
}
KINDS = {
    OfTrainer: TRAINERS,
    OfOptim: OPTIMS,
    OfStore: {"nadam": Row("nadam", {"learning_rate": 0.1})},
    OfFolder: {"checkpoints": Row("nadam", {"learning_rate": 0.1})},
}
FILES = {f"{name}{kind.suffix}": (kind, row) for kind, rows in KINDS.items() for name, row in rows.items()}

SCHEDULES = (
    FACTOR,
    lr_scheduler.MultiFactorScheduler([2, 4, 9], 0.5, base_lr=0.4),
    lr_scheduler.PolyScheduler(9, base_lr=0.4, final_lr=0.1, warmup_steps=3),
    lr_scheduler.CosineScheduler(9, base_lr=0.4),
    lr_scheduler.CosineRestartsScheduler(3, 2, base_lr=0.4),
    lr_scheduler.CyclicScheduler(3, 0.4, mode="triangular2"),
    lr_scheduler.ExponentialScheduler(0.9, base_lr=0.4),
    lr_scheduler.InterpolatedScheduler([2, 4, 9], [0.1, 0.4, 0.0]),
    lr_scheduler.InverseSquareRootScheduler(0.4, warmup_steps=4),
    lr_scheduler.OneCycleScheduler(9, base_lr=0.4),
    lr_scheduler.PiecewiseScheduler([3, 5], [0.4, 0.2]),
    lr_scheduler.WarmupStableDecayScheduler(9, 4, base_lr=0.4),
    lr_scheduler.sequence((lr_scheduler.CosineScheduler(4, base_lr=0.4), 4), lr_scheduler.PolyScheduler(9, base_lr=0.2)),
)
INITIALIZERS = (
    initializer.Bilinear(),
    initializer.Constant(0.5),
    initializer.MSRAPrelu(slope=0.1),
    initializer.Normal(0.02),
    initializer.One(),
    initializer.Orthogonal(scale=1.0),
    initializer.Uniform(0.1),
    initializer.Xavier("gaussian", "in", 2),
    initializer.Zero(),
)
