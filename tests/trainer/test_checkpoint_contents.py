"""What a checkpoint may have in it: tensors of any form and name, extra states; and what it may not, with right sums."""

import json
import random
import zlib

import numpy as np
import pytest
import torch
from torch import nn

import tristep
from tristep import CheckpointManager, Trainer
from tristep.trainer.checkpoint.content import Training

safetensors = pytest.importorskip("safetensors", reason="files need it")
pytest.importorskip("safetensors.torch", reason="files need it")


class _Odd(nn.Module):
    """Weights and buffers of all forms, extra states of its own and of a part."""

    def __init__(self, value=0.0):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.full((3, 2), value).t())
        numbers = torch.arange(6.0).view(2, 3) + value
        self.register_buffer("transposed", numbers.t())
        self.register_buffer("every_other", numbers.repeat(1, 2)[:, ::2])
        self.register_buffer("expanded", torch.tensor([[value], [1.0]]).expand(2, 5))
        self.register_buffer("scalar_expanded", torch.tensor(value).expand(3))
        self.register_buffer("complex128", torch.complex(numbers.double(), -numbers.double()).t())
        self.register_buffer("complex64", torch.complex(numbers, 2 * numbers))
        self.register_buffer("conjugated", torch.complex(numbers, numbers).conj())
        self.register_buffer("one_complex128", torch.tensor(complex(value, 1.0), dtype=torch.complex128))
        self.register_buffer("nothing", torch.zeros(0, 3, dtype=torch.complex128))
        self.register_buffer("narrow", numbers.to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.tensor([abs(int(value)), 2**63], dtype=torch.uint64))
        self.register_buffer("part_of_a_weight", self.turned.data[:1])
        self.part = _Extra(value)


class _Extra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.seen = {"scale": value, "history": [torch.full((2,), value)]}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def _plain(state):
    """A state_dict, to be compared."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), repr(state.resolve_conj().tolist())
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return [_plain(each) for each in state] if isinstance(state, list) else state


def _stepped(net, **options):
    trainer = Trainer(net, "sgd", {"momentum": 0.9}, **options)
    for param in trainer.replicas[0].params:
        param.grad = torch.ones_like(param)
    trainer.step(1)
    return trainer


@pytest.mark.parametrize("asynchronous", [True, False])
def test_weights_buffers_and_extra_states_of_any_form(asynchronous, tmp_path):
    """The oracle is torch's own state_dict."""
    net = _Odd(3.0)
    manager = CheckpointManager(tmp_path, _stepped(net), net, asynchronous=asynchronous)
    manager.save()
    manager.close()
    expected = _plain(net.state_dict())
    other = _Odd(-1.0)
    strides = {name: tensor.stride() for name, tensor in other.named_buffers()}
    assert Trainer(other, "sgd", {"momentum": 0.9}).resume(tmp_path, other).step == 1
    assert _plain(other.state_dict()) == expected
    assert {name: tensor.stride() for name, tensor in other.named_buffers()} == strides
    assert other.part.seen["scale"] == 3.0


def _wide():
    net = _Odd(3.0)
    net.expanded = torch.arange(10.0).view(2, 5)
    return net


@pytest.mark.parametrize(
    ("make", "make_other", "message"),
    [
        (_wide, _Odd, "'expanded' is expanded here, so its elements share memory, but they differ"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), _Extra(1.0)),
            lambda: nn.Sequential(nn.Linear(2, 2)),
            "'1._extra_state' is in the checkpoint or in net, not in both",
        ),
    ],
)
def test_what_another_model_cannot_hold_is_refused(make, make_other, message, tmp_path, everything):
    net, other = make(), make_other()
    CheckpointManager(tmp_path, _stepped(net), net, asynchronous=False).save()
    trainer = _stepped(other)
    before = everything(trainer, other.parameters()), _plain(other.state_dict())
    with pytest.raises(ValueError, match=message):
        trainer.resume(tmp_path, other)
    assert (everything(trainer, other.parameters()), _plain(other.state_dict())) == before


class _Made(nn.Linear):
    """Its state_dict has a tensor that is not its own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "norm"] = self.weight.norm()


def test_what_cannot_be_saved_is_refused_when_the_manager_is_made(tmp_path):
    sparse, made = nn.Linear(2, 2), _Made(2, 2)
    sparse.register_buffer("mask", torch.eye(2).to_sparse())
    for net, message in (
        (sparse, "net's 'mask' is a tensor that is torch.sparse_coo: only dense tensors"),
        (made, "net has 'norm' in its state_dict, which is neither a parameter nor a buffer"),
    ):
        with pytest.raises(TypeError, match=message):
            CheckpointManager(tmp_path, Trainer(net, "sgd"), net)
    odd = nn.Sequential(nn.Linear(2, 2), _Extra(1.0))
    odd[1].seen = {1, 2}
    manager = CheckpointManager(tmp_path, _stepped(odd), odd)
    with pytest.raises(TypeError, match=r"\['1._extra_state'\] is a set: to be saved it must be"):
        manager.save()
    assert manager.all_checkpoints() == []


def test_names_that_the_format_does_not_have(tmp_path):
    names = ["__metadata__", '"__metadata__"', "from a file \udcff", json.dumps("from a file \udcff"), "z"]

    def params(value):
        return {name: nn.Parameter(torch.full((2,), value + k)) for k, name in enumerate(names)}

    saved, loaded = params(1.0), params(-9.0)
    trainer = _stepped(saved)
    CheckpointManager(tmp_path, trainer, asynchronous=False).save()
    other = Trainer(loaded, "sgd", {"momentum": 0.9})
    assert other.resume(tmp_path).step == 1
    for name in names:
        assert torch.equal(loaded[name], saved[name])
        assert torch.equal(other.state_dict()["state"][name]["mom"], trainer.state_dict()["state"][name]["mom"])
    plain = safetensors.torch.load_file(next(tmp_path.glob("step-*")) / "model.safetensors")
    assert len(plain) == len(names)
    assert torch.equal(plain["z"], saved["z"])


# ---- with right checksums, and other contents ------------------------------------------------------------------------


def _numpy_state(**changes):
    kind, words, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    found = {"kind": kind, "words": words, "position": position, "has_gauss": has_gauss, "gauss": gauss} | changes
    return lambda *_: tuple(found.values())


def _torch_state(left=None, following=None):
    """The generator has drawn 24 numbers; its 624 words are read at `following`, until `left` is 0."""
    generator = torch.Generator().manual_seed(1)
    torch.rand(24, generator=generator)
    before, state = generator.get_state(), None
    torch.rand(1, generator=generator)
    places = (generator.get_state() != before).nonzero().flatten().tolist()  # of what moves: one number falls, one rises
    state = before.clone()
    for place in places:
        falls = int(generator.get_state()[place]) < int(before[place])
        value = left if falls else following
        if value is not None:
            state[place : place + 2] = torch.tensor([value % 256, value // 256], dtype=torch.uint8)
    return lambda *_: state


def _python_state(words):
    version, own, _ = random.Random(1).getstate()
    return lambda: (version, words(own), None)


NUMPY, TORCH, PYTHON = "numpy.random.get_state", "torch.get_rng_state", "random.getstate"
HOSTILE = {
    "one too far": (NUMPY, lambda: _numpy_state(position=625)),
    "few words": (NUMPY, lambda: _numpy_state(words=np.zeros(5, np.uint32))),
    "torch reads too long": (TORCH, lambda: _torch_state(left=620)),
    "torch begins too late": (TORCH, lambda: _torch_state(following=600)),
    "torch's size": (TORCH, lambda: lambda: torch.zeros(16, dtype=torch.uint8)),
    "Python's position": (PYTHON, lambda: _python_state(lambda words: (*words[:-1], 700))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_states_of_generators_that_they_would_read_out_of_bounds(kind, tmp_path, monkeypatch, everything):
    (place, make), net = HOSTILE[kind], nn.Linear(2, 2)
    trainer, hostile = _stepped(net), make()
    with monkeypatch.context() as patch:
        patch.setattr(place, hostile)
        CheckpointManager(tmp_path, trainer, net, asynchronous=False).save()
    trainer.step(1, ignore_stale_grad=True)
    before = everything(trainer, net.parameters()), torch.rand(3).tolist(), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    expected = torch.rand(3).tolist(), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    with pytest.raises(ValueError, match=r"random numbers|generator"):
        trainer.resume(tmp_path, net)
    assert everything(trainer, net.parameters()) == before[0]
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected  # noqa: NPY002


@pytest.mark.parametrize("drawn", [0, 1, 624])
def test_generators_anywhere_among_their_words_are_resumed(drawn, tmp_path):
    net = nn.Linear(2, 2)
    trainer = _stepped(net)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002
    for _ in range(drawn):
        torch.rand(1), np.random.bytes(4), random.getrandbits(32)  # noqa: NPY002
    CheckpointManager(tmp_path, trainer, net, asynchronous=False).save()
    expected = torch.randn(700).tolist(), np.random.randn(700).tolist(), [random.gauss(0, 1) for _ in range(700)]  # noqa: NPY002
    trainer.resume(tmp_path, net)
    found = torch.randn(700).tolist(), np.random.randn(700).tolist(), [random.gauss(0, 1) for _ in range(700)]  # noqa: NPY002
    assert found == expected


def _nodes(value, path=()):
    """Where something is in a JSON text; of long lists some places."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nodes(item, (*path, key))
    elif isinstance(value, list):
        for key, item in enumerate(value[:3]):
            yield from _nodes(item, (*path, key))


def _changed(header, path, value):
    header = inner = json.loads(json.dumps({"root": header}))
    for key in ("root", *path)[:-1]:
        inner = inner[key]
    inner[("root", *path)[-1]] = value
    return header["root"]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:the checkpoint")  # has the states of other objects, or of more processes
@pytest.mark.parametrize("part", ["training", "trainer", "model"])
def test_fields_of_other_types_are_a_value_error(part, tmp_path, everything):
    """Each of a checkpoint's fields in turn, with checksums that are right; whatever is taken fits."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), _Extra(1.0))
    trainer = _stepped(net)
    CheckpointManager(tmp_path, trainer, net, asynchronous=False).save({"loss": 1.0}, {"epoch": 1})
    path = next(tmp_path.glob("step-*")) / f"{part}.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}  # which may map the file
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["tristep"])
    refused = 0
    values = [None, -1, 10**400, "x", {"tensor": "99"}, [[1]]]
    for k, node in enumerate(_nodes(header)):
        for value in (values[k % 6], values[(k + 1 + k // 6) % 6]):
            text = json.dumps(_changed(header, node, value))
            about = {"tristep": text, "tristep checksum": str(zlib.crc32(text.encode()))}
            safetensors.torch.save_file(tensors, path, about)
            before = everything(trainer, net.parameters())
            try:
                trainer.resume(tmp_path, net)
            except ValueError:
                refused += 1
                assert everything(trainer, net.parameters()) == before, (node, value)
    assert refused >= 10


class _Counter:
    """A user's object that takes any state."""

    def __init__(self):
        self.loaded = None

    def state_dict(self):
        return {"value": 1}

    def load_state_dict(self, state):
        self.loaded = state


BYTES = torch.zeros(16, dtype=torch.uint8)
ODD_RANKS = {  # by field of what each process saves: values, of which `collect` gives none
    "gpus": [[], [BYTES[:0]]],
    "buffers": [[], [{"a": 1.0}]],
    "extra": [[{}, {}]],
    "stateful": [[3]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ODD_RANKS.items() for value in values])
def test_odd_fields_of_a_process_are_refused(field, value, tmp_path, monkeypatch, everything):
    """Although there is an object that would take any state."""
    net, taker = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), _Counter()
    manager = CheckpointManager(tmp_path, _stepped(net), net, asynchronous=False, stateful=[taker])
    collect = Training.collect

    def odd(training):
        saved = collect(training)
        (saved["random"] if field == "gpus" else saved)[field] = value
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(Training, "collect", odd)
        manager.save()
    before, drawn = everything(manager.trainer, net.parameters()), torch.get_rng_state()
    with pytest.raises(ValueError, match="none of its 1 checkpoints can be read|replicas|buffer"):
        manager.resume()
    assert everything(manager.trainer, net.parameters()) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert taker.loaded is None


ODD_PLACES = {  # changes of the states of fit's own objects: the place in the data, the sums of an epoch
    "epoch": lambda place, sums: place.update(epoch=-1),
    "batch beyond the data": lambda place, sums: place.update(batch=5),
    "a short state of it": lambda place, sums: place.update(own=[BYTES]),
    "sums of another metric": lambda place, sums: sums.update(totals={"loss": 0.0, "accuracy": 1.0}),
}


@pytest.mark.parametrize("odd", ODD_PLACES)
def test_odd_states_of_fit_are_refused_before_anything_changes(odd, tmp_path, monkeypatch, everything):
    net = nn.Linear(2, 2)
    trainer, rng = _stepped(net), torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 2))
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=rng)

    def fitted(epochs):
        tristep.fit(net, nn.MSELoss(), loader, trainer=trainer, epochs=epochs, checkpoint=tmp_path, progress=False)

    collect = Training.collect

    def changed(training):
        saved = collect(training)
        ODD_PLACES[odd](*saved["stateful"])
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(Training, "collect", changed)
        fitted(1)
    before, drawn = everything(trainer, net.parameters()), (torch.get_rng_state().tolist(), rng.get_state().tolist())
    with pytest.raises(ValueError, match="place in the data|the checkpoint has|sums of|random numbers"):
        fitted(2)
    assert everything(trainer, net.parameters()) == before
    assert (torch.get_rng_state().tolist(), rng.get_state().tolist()) == drawn
