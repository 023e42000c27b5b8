"""What goes over a parameter server's wire: all that an optimizer consists of, and nothing that runs."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch

from tristep import kvstore, lr_scheduler, optimizer
from tristep.contrib.server.transport import Body, Message
from tristep.contrib.server.wire import decode, encode
from tristep.kernels import rules

pytestmark = pytest.mark.sample(0)  # the quick tier runs four tests of servers


def sent(value):
    return decode(encode(value))


def halved(number):
    return 0.5**number


def stepped(torchs):
    return torch.optim.lr_scheduler.StepLR(torchs, step_size=2)


class Sampling(optimizer.Optimizer):
    """One of a user's own, with attributes of all kinds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = {(0, "a"): [1, None], 3: {True, 2.5}}
        self.sizes, self.table = torch.Size([2, 3]), np.arange(6, dtype=np.int16).reshape(2, 3)
        self.half, self.kind = torch.tensor([[0.1], [-0.0]], dtype=torch.bfloat16), torch.float16
        self.rule, self.function, self.count = rules.adam, halved, np.float32(1.5)


@pytest.fixture(autouse=True)
def _registered(clean_registry):
    lr_scheduler.register(halved)
    lr_scheduler.register(stepped)
    optimizer.register(Sampling)


@pytest.mark.parametrize("value", [None, True, 3, 2**70, 0.1, math.inf, "ä\0", b"".decode(), [1, (2, "3")], {1: {"1": ()}}])
def test_plain_values(value):
    found = sent(value)
    assert found == value
    assert repr(found) == repr(value)  # types and order, too
    assert math.isnan(sent(math.nan))


def test_attributes_of_an_optimizer_of_ones_own():
    made = Sampling(learning_rate=0.3, lr_scheduler=lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.3))
    found = sent(made)
    assert type(found) is Sampling
    assert (found.seen, found.sizes, found.kind, found.count) == (made.seen, (2, 3), torch.float16, 1.5)
    assert found.table.dtype == np.int16
    assert np.array_equal(found.table, made.table)
    assert found.half.dtype == torch.bfloat16
    assert torch.equal(found.half.view(torch.int16), made.half.view(torch.int16))
    assert found.rule is rules.adam
    assert found.function is halved
    assert found.lr_scheduler == made.lr_scheduler
    found.table[0, 0] = 9  # its own memory, to be written to
    assert found.settings() == made.settings()


@pytest.mark.parametrize("name", sorted(optimizer.registered()))
def test_each_optimizer_trains_on_as_the_one_that_was_sent(name):
    made = optimizer.create(name, learning_rate=0.1)
    weights = [torch.linspace(-1, 1, 12).reshape(3, 4) for _ in range(2)]
    for each, weight in zip((made, sent(made)), weights, strict=True):
        torch.manual_seed(0)
        optimizer.Updater(each, "eager")(0, torch.linspace(-2, 1, 12).reshape(3, 4), weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    "schedule",
    [
        lr_scheduler.CosineScheduler(10, base_lr=0.5, warmup_steps=3),
        lr_scheduler.FunctionScheduler(halved, base_lr=0.5),
        lr_scheduler.from_torch("StepLR", step_size=2, base_lr=0.5),
        lr_scheduler.from_torch(stepped, base_lr=0.5),
        lr_scheduler.sequence([lr_scheduler.PolyScheduler(4, base_lr=0.5), 4], lr_scheduler.FactorScheduler(2, 0.1)),
        halved,
    ],
    ids=["cosine", "function", "torch", "torch by a function", "sequence", "plain function"],
)
def test_schedules(schedule):
    found = sent(schedule)
    assert [found(n) for n in range(1, 12)] == [schedule(n) for n in range(1, 12)]


def adding(key, pushed, stored):
    stored.add_(pushed)


def test_functions_and_classes_must_be_registered():
    """What the sender may not name, the receiver does not take either."""

    def named(value):
        return json.dumps({"name": [value.__module__, value.__qualname__]}).encode()

    class Local(optimizer.SGD):
        pass

    optimizer.register(Local)
    for value in (adding, Unregistered, Local, torch.hub._load_local, torch.hub.load, kvstore.create, pytest.main):
        with pytest.raises(TypeError, match="registered|rule"):
            encode(value)
        with pytest.raises(ValueError, match="is no rule, and no optimizer, schedule or function that .* has registered"):
            decode(named(value))
    assert sent(halved) is halved  # which is registered


class Unregistered(optimizer.SGD):
    """Not for servers."""


@pytest.mark.parametrize("value", [object(), print, lambda n: n, json.loads, int, 1j, torch.nn.ReLU(), np.array(["a"])])
def test_what_is_no_plain_data_is_refused(value):
    with pytest.raises(TypeError):
        encode({"a": [value]})


@pytest.mark.parametrize(
    "text",
    [
        '{"name": ["os", "system"]}',
        '{"name": ["subprocess", "call"]}',
        f'{{"name": ["{__name__}", "json.loads"]}}',  # through an attribute of this module
        '{"name": ["tristep.trainer.serialization.files", "os.path.join"]}',
        '{"name": ["subprocess", "Popen"]}',
        '{"name": ["never_imported_module", "f"]}',
        '{"object": [["subprocess", "Popen"], {"dict": []}]}',
        '{"object": [["torch.nn.modules.linear", "Linear"], {"dict": []}]}',
        '{"dtype": "nn"}',
        '{"array": ["|O", [1], "AAAAAAAAAAA="]}',
        '{"array": ["<f4", [4], "AAAA"]}',
        '{"tensor": [1, 2]}',
        '{"other": 1}',
        '{"dict": [[1]]}',
        "{}",
        "[" * 100_000,
        "no JSON",
    ],
)
def test_what_would_run_something_else_is_an_error(text):
    with pytest.raises(ValueError, match="a message that cannot be read"):
        decode(text.encode())


PIECES = [
    None, True, -1, 2**70, 1.5, math.nan, "", "f4", "float32", "nn", "<f4", "|O", "AAAA", "A", [], [[]], {}, [1, 2], [-1],
    ["torch", "Tensor"], ["os", 3], ["<f4", [1], "AAAAAA=="], [{"dtype": "int64"}, [2**40], 1], [["a", "b"], {"dict": []}],
    ["a"], [["tristep.trainer.optimizer.gradient_descent", "SGD"], {"list": 3}],
    [{"dtype": "complex64"}, [3], {"array": ["|u1", [9], "AAAAAAAAAAAA"]}],
]  # fmt: skip


@pytest.mark.sample(1)
def test_every_message_is_plain_data_or_a_value_error():
    """Thousands of messages of right and wrong pieces, and of right messages with a byte changed."""
    random = np.random.default_rng(0)
    tags = ["tuple", "set", "dict", "dtype", "array", "tensor", "object", "name", "other"]

    def piece(depth):
        kind = random.integers(4 if depth else 1)
        if kind == 1:
            return {tags[random.integers(len(tags))]: piece(depth - 1)}
        if kind == 2:
            return [piece(depth - 1) for _ in range(random.integers(4))]
        return PIECES[random.integers(len(PIECES))]

    messages = [json.dumps(piece(4)).encode() for _ in range(3000)]
    whole = [bytearray(encode(each)) for each in (optimizer.SGD(), [torch.ones(3), np.arange(4), {1: (torch.float32,)}])]
    for _ in range(1500):
        for each in whole:
            changed = bytearray(each)
            changed[random.integers(len(changed))] = random.integers(256)
            messages.append(bytes(changed))
    refused = 0
    for message in messages:
        with contextlib.suppress(ValueError):
            decode(message)
            continue
        refused += 1
    assert 0 < refused < len(messages)


@pytest.mark.parametrize(
    "layout",
    [
        *('[[[1000], "float32"]]', '[[[-1], "float32"]]', '[[[2], "nn"]]', '[[[2], "load"]]', "[[[2], 3]]"),
        *('[[2, "float32"]]', '[["ab", "float32"]]', "3", "no JSON"),
    ],
)
def test_a_layout_that_does_not_fit_its_message_is_an_error(layout):
    body = Body(128, pinned=False)
    body.bytes[: len(layout)] = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        Message(body, 0, len(layout)).tensors()
