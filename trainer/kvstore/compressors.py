"""Gradient compression over several processes: compressors by name, and the all-reduce that sends their messages.

A bucket is a flat tensor of gradients, cut into as many chunks as there are ranks:

    each rank encodes its bucket, with what was left of earlier ones        (residual of the worker)
    all-to-all: rank r gets the messages of chunk r
    rank r adds them up in the ranks' order and encodes the sum, likewise   (residual of the server)
    all-gather: all ranks get the messages of all sums, and decode them

So every rank ends with the same bits, and sends 2 (N - 1) / N b n bytes for n values of b bytes each. Of "2bit" and "1bit"
the second message is the exact sum of the votes, in a few more bits, and nothing is left of it. With two ranks, or few
values, all messages are gathered instead: there one collective is enough, and there is no second error. "topk" is always
gathered, since ranks choose different places; "randomk" and "powersgd" send by all-reduces what can be added up as it is.

Sources: Seide et al. (2014), "1-bit stochastic gradient descent" (error feedback); Tang et al. (2019), "DoubleSqueeze" (both
ways); MXNet 1.9.1 and 2.0, `gradient_compression` ("2bit", "1bit"); Bernstein et al. (2018), "signSGD", and Karimireddy et
al. (2019), "Error feedback fixes SignSGD" ("sign"); Stich et al. (2018), "Sparsified SGD with memory" ("topk", "randomk");
Vogels et al. (2019), "PowerSGD".
"""

from __future__ import annotations

import abc
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from ...kernels import choose_engine, compress
from ..arguments import choice, did_you_mean, flag, real, whole
from ..registry import Registry
from . import collectives

__all__ = [
    "CompressedAllReduce",
    "Compressor",
    "Handle",
    "create_compressor",
    "register_compressor",
    "registered_compressors",
    "wait_all",
]

_NAME = "compression_params[{!r}]".format
_OTHER_NAMES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "8bit": "int8", "4bit": "int4", "signsgd": "sign",
    "top_k": "topk", "top-k": "topk", "random_k": "randomk", "random-k": "randomk", "power_sgd": "powersgd",
}  # fmt: skip


_Class = TypeVar("_Class", bound="type[Compressor]")


class Compressor(abc.ABC):
    """What is sent in the place of values. A subclass marked with `register_compressor` is known by its `type`.

    Two functions make one; what a message leaves out is kept and added to the next values by those who call them. The other
    entries of `compression_params` are arguments of the subclass's `__init__`.

    Attributes:
        registry: the registered classes by type.
        type: its name in `compression_params`; by default that of the class, in lower case.
        error_feedback: whether what a message leaves out is kept back for the next one.
        exchange: "all_to_all" if ranks may encode a chunk each, and the sums of chunks again; "all_gather" for what is
            decided over the whole bucket, whose messages all ranks get from all.

    Example:
        >>> import torch
        >>> from tristep import kvstore
        >>> @kvstore.register_compressor
        ... class Halved(kvstore.Compressor):
        ...     def encode(self, values):
        ...         return values.to(torch.float16)
        ...     def decode(self, message, n):
        ...         return message.to(torch.float32)
        >>> kvstore.create_compressor({"type": "halved"}).encode(torch.ones(3))
        tensor([1., 1., 1.], dtype=torch.float16)
    """

    registry: ClassVar[Registry[type[Compressor]]]
    type = ""
    error_feedback = True
    exchange = "all_to_all"

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Class decorator: make a compressor known by its `type`.

        Another class of that type is replaced, with a warning.
        """
        Compressor.registry.check(klass)
        if "type" not in vars(klass):
            klass.type = klass.__name__.lower()
        return Compressor.registry.register(klass, klass.type, stacklevel=3)

    @abc.abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """A message, one tensor of any type whose size follows from that of the values, float32 [n]."""

    @abc.abstractmethod
    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        """The n values, float32 [n], that a message of `encode` says."""

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"<compressor {self.type!r}{''.join(f', {name}={value!r}' for name, value in settings.items())}>"

    def _way(self, place: _Place) -> _Way:
        return _Messages(self, place)

    def _message(self, values: torch.Tensor, residual: torch.Tensor | None, step: int) -> torch.Tensor:
        """The message to one receiver, the one of this number, with what was left of earlier ones; `residual` is kept up."""
        x = values if residual is None else values + residual
        message = self._encode(x, step)
        if residual is not None:
            _keep(x, self._decode(message, x.numel(), step), residual)
        return message

    def _encode(self, values: torch.Tensor, step: int) -> torch.Tensor:
        return self.encode(values)

    def _decode(self, message: torch.Tensor, n: int, step: int) -> torch.Tensor:
        return self.decode(message, n)


Compressor.registry = Registry("compressor", Compressor, ignore_case=False)
register_compressor = Compressor.register


def registered_compressors() -> dict[str, type[Compressor]]:
    """The compressors by type."""
    return dict(Compressor.registry)


def create_compressor(compression_params: Mapping[str, Any]) -> Compressor:
    """The compressor that `compression_params` asks for.

    Args:
        compression_params: "type", and what that type takes besides:
            "2bit": `threshold`, above 0, default 0.5. "1bit": `threshold`, default 0.5.
            "fp16", "bf16", "int8", "int4", "sign": nothing.
            "topk": `ratio`, above 0 and at most 1, default 0.01: the share of values that is sent, the largest.
            "randomk": `ratio`; `seed`, default 0, by which all ranks choose the same.
            "powersgd": `rank`, default 4, of the matrices that are sent; `seed`, default 0, of the first ones.
            All: `error_feedback`, default True.

    Raises:
        TypeError, ValueError: they do not fit. (MXNet takes "2bit" and "1bit", and ignores what it does not know.)
    """
    if not isinstance(compression_params, Mapping):
        raise TypeError(f"compression_params must be a dict, got {type(compression_params).__name__}")
    if "type" not in compression_params:
        raise ValueError(f"compression_params needs 'type', one of {', '.join(map(repr, Compressor.registry))}")
    registry = Compressor.registry
    klass = registry[choice(_NAME("type"), compression_params["type"], registry, other_names=_OTHER_NAMES)]
    known = ["type", "error_feedback", *inspect.signature(klass).parameters]
    for key in compression_params:
        if key not in known:
            hint = did_you_mean(key, known) if isinstance(key, str) else ""
            allowed = ", ".join(map(repr, known))
            raise ValueError(f"compression_params has the key {key!r}: {klass.type!r} takes {allowed}.{hint}")
    feedback = flag(_NAME("error_feedback"), compression_params.get("error_feedback", True))
    made = klass(**{key: value for key, value in compression_params.items() if key not in ("type", "error_feedback")})
    made.error_feedback = feedback
    return made


class _OfCodes(Compressor):
    """One of the kernels' codes. See `tristep.kernels.compress`."""

    _parameter = 0.0

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return self._message(values, None, 0)

    def _message(self, values: torch.Tensor, residual: torch.Tensor | None, step: int) -> torch.Tensor:
        message = torch.empty(1, self.code.size(self.code.chunk(values.numel())), dtype=torch.uint8, device=values.device)
        compress.encode(self.code, values.contiguous(), residual, message, self._parameter)
        return message[0]

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        values = torch.empty(n, device=message.device)
        compress.decode(self.code, message[None], values, self._parameter)
        return values

    @property
    def code(self) -> compress.Code:
        """How values are coded."""
        return compress.CODES[self.type]

    def _way(self, place: _Place) -> _Way:
        return _Codes(self, place)


class _WithThreshold(_OfCodes):
    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = self._parameter = real(_NAME("threshold"), threshold, **self._limits)

    _limits: dict[str, float] = {}  # noqa: RUF012  # it is not changed


@register_compressor
class _TwoBit(_WithThreshold):
    type = "2bit"
    _limits = {"above": 0.0}  # noqa: RUF012


@register_compressor
class _OneBit(_WithThreshold):
    type = "1bit"


@register_compressor
class _Float16(_OfCodes):
    type = "fp16"


@register_compressor
class _BFloat16(_OfCodes):
    type = "bf16"


@register_compressor
class _Int8(_OfCodes):
    type = "int8"


@register_compressor
class _Int4(_OfCodes):
    type = "int4"


@register_compressor
class _Sign(_OfCodes):
    type = "sign"


@register_compressor
class _TopK(Compressor):
    """The values of the largest size, NaN before all, and their places: 8 bytes each."""

    type, exchange = "topk", "all_gather"

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = real(_NAME("ratio"), ratio, above=0.0, high=1.0)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        places = values.abs().topk(_share(values.numel(), self.ratio), sorted=False).indices
        return torch.cat([places.to(torch.int32).view(torch.uint8), values[places].view(torch.uint8)])

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        values = torch.zeros(n, device=message.device)
        self._add(message, values)
        return values

    def _add(self, message: torch.Tensor, total: torch.Tensor) -> None:
        places, values = message.view(2, -1)
        total.index_add_(0, places.view(torch.int32), values.view(torch.float32))


@register_compressor
class _RandomK(Compressor):
    """The values at places that all ranks draw alike, one of each of as many equal stretches."""

    type, exchange = "randomk", "all_reduce"

    def __init__(self, ratio: float = 0.01, seed: int = 0) -> None:
        self.ratio = real(_NAME("ratio"), ratio, above=0.0, high=1.0)
        self.seed = whole(_NAME("seed"), seed)

    def places(self, step: int, n: int, device: torch.device) -> torch.Tensor:
        """The places of this step's values, int64, ascending."""
        count = _share(n, self.ratio)
        ends = torch.arange(count + 1) * n // count
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % 2**63)
        # float64, whose rounding never reaches the next stretch's first
        drawn = ends[:-1] + (torch.rand(count, generator=generator, dtype=torch.float64) * ends.diff()).long()
        return drawn.to(device, non_blocking=True)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return self._encode(values, 0)

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        return self._decode(message, n, 0)

    def _encode(self, values: torch.Tensor, step: int) -> torch.Tensor:
        return values[self.places(step, values.numel(), values.device)]

    def _decode(self, message: torch.Tensor, n: int, step: int) -> torch.Tensor:
        return torch.zeros(n, device=message.device).index_copy_(0, self.places(step, n, message.device), message)

    def _way(self, place: _Place) -> _Way:
        return _ChosenPlaces(self, place)


@register_compressor
class _PowerSGD(Compressor):
    """Each matrix as a product of two of few columns, found by one step of the power iteration from the last one's."""

    type, exchange = "powersgd", "all_reduce"

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        self.rank = whole(_NAME("rank"), rank, 1)
        self.seed = whole(_NAME("seed"), seed)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        raise TypeError("'powersgd' is for matrices over several ranks: make a CompressedAllReduce with their shapes")

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        return self.encode(message)

    def _way(self, place: _Place) -> _Way:
        return _Factors(self, place)


class Handle:
    """A sum that is under way. Ranks must advance theirs in the same order."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps: Iterator[Any] | None = steps
        self._work: Any = None
        self._next()

    def advance(self) -> bool:
        """Wait for the collective that is under way, and start the next one; whether all is over."""
        if self._steps is not None:
            if self._work is not None:
                self._work.wait()
            self._next()
        return self.done

    def wait(self) -> None:
        """Bring it to its end: then the bucket holds the sum."""
        while not self.advance():
            pass

    @property
    def done(self) -> bool:
        """Whether the bucket holds the sum."""
        return self._steps is None

    def _next(self) -> None:
        steps, self._steps = self._steps, None  # an error ends it
        try:
            self._work = next(steps)  # type: ignore[arg-type]  # not None
        except StopIteration:
            return
        self._steps = steps


def wait_all(handles: Sequence[Handle]) -> None:
    """Bring several to their ends, the second collectives of all being under way together."""
    running = list(handles)
    while running:
        running = [handle for handle in running if not handle.advance()]


class CompressedAllReduce:
    """Sums a flat bucket over the ranks of a group by compressed messages. All ranks get the same bits.

    Args:
        compression_params: as for `create_compressor`, or a compressor.
        numel: the bucket's elements; at least 1.
        shapes: those of the tensors that lie in the bucket one after the other; "powersgd" needs them, others ignore them.
        device: the bucket's.
        group: the process group; None for the default one or, where torch.distributed has not been started, for one rank.
        engine: as for `tristep.kernels.choose_engine`.
        exchange: "all_to_all" or "all_gather", for compressors that can do both; None for the one that sends less.

    Attributes:
        compressor: the compressor.
        rank, ranks: this process's number in the group, and how many there are.
        exchange: "all_to_all", "all_gather" or "all_reduce".
        bytes_sent: what each rank sends for one bucket, in bytes, headers of the network not counted.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Example:
        >>> import torch
        >>> from tristep.kvstore import CompressedAllReduce
        >>> reduce = CompressedAllReduce({"type": "2bit", "threshold": 0.5}, 3)
        >>> bucket = torch.tensor([0.7, -2.0, 0.1])
        >>> reduce.start(bucket).wait()  # of one rank
        >>> bucket, reduce.state_dict()["worker"]
        (tensor([ 0.5000, -0.5000,  0.0000]), tensor([ 0.2000, -1.5000,  0.1000]))
    """

    def __init__(
        self,
        compression_params: Mapping[str, Any] | Compressor,
        numel: int,
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        engine: str | None = None,
        exchange: str | None = None,
    ) -> None:
        made = isinstance(compression_params, Compressor)
        self.compressor: Compressor = compression_params if made else create_compressor(compression_params)  # type: ignore[assignment,arg-type]
        place = _Place(whole("numel", numel, 1), shapes, torch.device(device), group, engine, exchange)
        choose_engine(place.device, engine)
        self.rank, self.ranks, self.numel, self.device = place.rank, place.ranks, place.numel, place.device
        self._way = self.compressor._way(place)
        self.exchange, self.bytes_sent = self._way.exchange, self._way.bytes_sent
        self._handle: Handle | None = None

    def start(self, bucket: torch.Tensor) -> Handle:
        """Encode the bucket and start the first collective. The bucket is to be left alone until the handle is done.

        Args:
            bucket: float32, float16 or bfloat16 [numel], contiguous; gets the sum, computed in float32.

        Raises:
            TypeError, ValueError: a bucket that does not fit; nothing has been changed.
            RuntimeError: the last one is still under way.
        """
        if bucket.dtype not in compress.VALUES or bucket.dim() != 1 or not bucket.is_contiguous():
            kinds = ", ".join(map(str, compress.VALUES))
            raise TypeError(f"bucket is {bucket.dtype} {tuple(bucket.shape)}: must be one of {kinds}, [n], contiguous")
        if bucket.numel() != self.numel or bucket.device != self.device:
            raise ValueError(
                f"bucket has {bucket.numel()} elements on {bucket.device}: "
                f"this all-reduce is for {self.numel} on {self.device}"
            )
        self._check_done()
        self._handle = Handle(self._way.steps(bucket.detach()))
        return self._handle

    def finish(self) -> None:
        """Wait for what was started last, if anything was."""
        if self._handle is not None:
            self._handle.wait()

    def state_dict(self) -> dict[str, Any]:
        """What the next sums depend on, for this rank: tensors, which are copies, and integers.

        Raises:
            RuntimeError: a bucket is under way.
        """
        self._check_done()
        settings = {"type": self.compressor.type, "rank": self.rank, "ranks": self.ranks, "numel": self.numel}
        return settings | {name: _copied(value) for name, value in self._way.state().items()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `state_dict` gave.

        Args:
            state: of this rank; or a list of all ranks' states, of any number of ranks. Where the number of ranks has
                changed, what all of them kept back is added up and each rank goes on with an equal part of it. Of a single
                state of another number of ranks nothing is taken over but what all ranks have in common, with a warning.

        Raises:
            TypeError, ValueError: it does not fit; nothing has been changed.
            RuntimeError: a bucket is under way.
        """
        self._check_done()
        states = [state] if isinstance(state, Mapping) else list(state)
        for each in states:
            for name, own in (("type", self.compressor.type), ("numel", self.numel)):
                if not isinstance(each, Mapping) or each.get(name) != own:
                    found = each.get(name) if isinstance(each, Mapping) else each
                    raise ValueError(f"state has {name}={found!r}: this all-reduce has {own!r}")
        if not states:
            raise ValueError("state is an empty list: must be one state, or those of all ranks")
        ranks = states[0]["ranks"]
        own_state = [each for each in states if each["ranks"] == self.ranks and each["rank"] == self.rank]
        if own_state:
            kept = dict(own_state[0])
        elif sorted(each["rank"] for each in states) == list(range(ranks)):
            total = _all_kept(states, self.numel)
            kept = {**states[0], "worker": None if total is None else total / self.ranks, "server": None}
        else:
            if ranks == self.ranks:
                raise ValueError(f"state is of rank {states[0]['rank']}: this is rank {self.rank}")
            warnings.warn(
                f"what was kept back on {ranks} ranks is dropped, this group has {self.ranks}: "
                "hand over a list of all ranks' states to keep it",
                stacklevel=2,
            )
            kept = {**states[0], "worker": None, "server": None}
        self._way.load(kept)

    def _check_done(self) -> None:
        if self._handle is not None and not self._handle.done:
            raise RuntimeError("the last bucket is still under way: wait for its handle first")

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compressor!r}, {self.numel}, {self.exchange}, rank {self.rank} of {self.ranks})"


def _all_kept(states: Sequence[Mapping[str, Any]], numel: int) -> torch.Tensor | None:
    """What all ranks kept back together, of the whole bucket."""
    total = None
    for each in sorted(states, key=lambda state: state["rank"]):
        if each.get("worker") is not None:
            total = each["worker"].clone() if total is None else total + each["worker"]
        if each.get("server") is not None and total is not None:
            chunk = each["server"].numel()
            part = total[each["rank"] * chunk : (each["rank"] + 1) * chunk]
            part += each["server"][: part.numel()].to(part.device)
    assert total is None or total.numel() == numel
    return total


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _share(n: int, ratio: float) -> int:
    """How many of n values are that share of them; at least one."""
    return min(max(math.ceil(ratio * n), 1), n)


class _Place:
    """What buckets are summed, and between whom."""

    def __init__(self, numel: int, shapes: Any, device: torch.device, group: Any, engine: str | None, exchange: Any) -> None:
        self.numel, self.shapes, self.device, self.group, self.engine = numel, shapes, device, group, engine
        together = group is not None or (dist.is_available() and dist.is_initialized())
        self.rank = dist.get_rank(group) if together else 0
        self.ranks = dist.get_world_size(group) if together else 1
        self.exchange = None if exchange is None else choice("exchange", exchange, ("all_to_all", "all_gather"))

    def gathers(self, compressor: Compressor) -> bool:
        """Whether all ranks get all messages, of which there is then only one kind."""
        if self.exchange is not None and compressor.exchange != "all_to_all" and self.exchange != compressor.exchange:
            raise ValueError(f"exchange={self.exchange!r}: {compressor.type!r} goes by {compressor.exchange!r}")
        if compressor.exchange not in ("all_to_all", "all_gather"):
            raise ValueError(f"{compressor!r} has exchange={compressor.exchange!r}: must be 'all_to_all' or 'all_gather'")
        if self.exchange is not None or compressor.exchange == "all_gather":
            return (self.exchange or compressor.exchange) == "all_gather"
        return self.ranks <= 2 or self.numel <= self.ranks * compress.TILE

    def all_reduce(self, values: torch.Tensor) -> Any:
        return None if self.ranks == 1 else collectives.all_reduce(values, group=self.group, async_op=True)

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> Any:
        return collectives.all_gather(output.view(-1), own.view(-1), self.group, async_op=True)

    def all_to_all(self, output: torch.Tensor, own: torch.Tensor) -> Any:
        return collectives.all_to_all(output.view(-1), own.view(-1), self.group, async_op=True)


class _Way(abc.ABC):
    """How the sum of buckets is found, and what is kept from one to the next.

    Attributes:
        worker: float32 [numel], what is left of the own bucket; None without error feedback.
        server: float32 [chunk], what is left of the sums of the own chunk; None where nothing is.
    """

    exchange = "all_reduce"
    bytes_sent = 0.0
    server: torch.Tensor | None = None

    def __init__(self, compressor: Compressor, place: _Place) -> None:
        self.place = place
        self.worker = self._zeros(place.numel) if compressor.error_feedback else None

    @abc.abstractmethod
    def steps(self, bucket: torch.Tensor) -> Iterator[Any]:
        """Turn the bucket into the sum; yields what is to be waited for before it goes on."""

    def state(self) -> dict[str, Any]:
        return {"worker": self.worker, "server": self.server}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this over, after checking it; None where there is something to keep is zeros."""
        pairs = [(name, getattr(self, name), state.get(name)) for name in ("worker", "server")]
        for name, own, new in pairs:
            if new is not None and own is not None and new.shape != own.shape:
                raise ValueError(f"state has {name} of shape {tuple(new.shape)}: this all-reduce has {tuple(own.shape)}")
            if new is not None and own is None and new.any():
                raise ValueError(f"state has a residual of the {name}: this all-reduce keeps none, so it would be lost")
        for _, own, new in pairs:
            if own is not None:
                own.zero_() if new is None else own.copy_(new)

    def _zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n, device=self.place.device)

    def _with_residual(self, bucket: torch.Tensor) -> torch.Tensor:
        """The bucket in float32 and what was left, in memory of its own."""
        x = bucket.to(torch.float32, copy=True)
        return x if self.worker is None else x.add_(self.worker)


def _keep(x: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor) -> None:
    """Keep what was left out, nothing where that is not finite, so that an overflow does not stay for ever."""
    torch.sub(x, sent, out=residual).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _all_reduce_bytes(ranks: int, n: int) -> float:
    return 2 * (ranks - 1) / ranks * 4 * n


class _Codes(_Way):
    """Codes of the kernels, each pass in one launch."""

    def __init__(self, compressor: _OfCodes, place: _Place) -> None:
        super().__init__(compressor, place)
        self.code, self.parameter = compressor.code, compressor._parameter
        self.one_hop = place.gathers(compressor) or place.ranks == 1
        self.exchange = "all_gather" if self.one_hop else "all_to_all"
        code, ranks = self.code, place.ranks
        self.chunk = code.chunk(place.numel, 1 if self.one_hop else ranks)
        size = code.size(self.chunk)
        self.votes = not self.one_hop and code.vote is not None
        second = code.votes_size(self.chunk, ranks) if self.votes else size
        if compressor.error_feedback and not self.one_hop and not self.votes:
            self.server = self._zeros(self.chunk)
        self.bytes_sent = (ranks - 1) * (size if self.one_hop else size + second)
        self.own = self._room(1 if self.one_hop else ranks, size)
        self.received = self.own if ranks == 1 else self._room(ranks, size)
        if not self.one_hop:
            self.part, self.parts = self._room(1, second), self._room(ranks, second)

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor) -> Iterator[Any]:
        code, place, last = self.code, self.place, (self.parameter, self.place.engine)
        compress.encode(code, bucket, self.worker, self.own, *last)
        if self.one_hop:
            if place.ranks > 1:
                yield place.all_gather(self.received, self.own)
            compress.reduce(code, self.received, None, bucket, None, *last)
            return
        yield place.all_to_all(self.received, self.own)
        if self.votes:
            compress.reduce_votes(code, self.received, self.part, place.engine)
        else:
            there = min(max(place.numel - place.rank * self.chunk, 0), self.chunk)
            compress.reduce(code, self.received, self.server, self.part, there, *last)
        yield place.all_gather(self.parts, self.part)
        if self.votes:
            compress.decode_votes(code, place.ranks, self.parts, bucket, *last)
        else:
            compress.decode(code, self.parts, bucket, *last)

    def _room(self, n: int, size: int) -> torch.Tensor:
        return torch.zeros(n, size, dtype=torch.uint8, device=self.place.device)


class _Messages(_Way):
    """Messages of any compressor, by its two functions."""

    def __init__(self, compressor: Compressor, place: _Place) -> None:
        super().__init__(compressor, place)
        self.compressor = compressor
        self.one_hop = place.gathers(compressor) or place.ranks == 1
        self.exchange = "all_gather" if self.one_hop else "all_to_all"
        self.chunk = place.numel if self.one_hop else -(-place.numel // place.ranks)
        if compressor.error_feedback and not self.one_hop:
            self.server = self._zeros(self.chunk)
        # Once, to see that the class does as it should, and how long its messages are.
        with torch.no_grad():
            message = compressor.encode(self._zeros(self.chunk))
        if not isinstance(message, torch.Tensor) or message.device != place.device:
            raise TypeError(f"{compressor!r}: encode gave {message!r}, must be a tensor on {place.device}")
        self.dtype, self.shape = message.dtype, message.shape
        self._decoded(message)
        self.bytes_sent = (1 if self.one_hop else 2) * (place.ranks - 1) * message.numel() * message.element_size()

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor) -> Iterator[Any]:
        place, x = self.place, self._with_residual(bucket)
        if self.one_hop:
            own = self._encoded(x, self.worker)
            received = own[None]
            if place.ranks > 1:
                received = own.new_empty(place.ranks, *own.shape)
                yield place.all_gather(received, own)
            bucket.copy_(self._sum(received))
            return
        x = torch.nn.functional.pad(x, (0, place.ranks * self.chunk - place.numel)).view(place.ranks, -1)
        left = None if self.worker is None else torch.zeros_like(x)
        own = torch.stack([self._encoded(each, None if left is None else left[r]) for r, each in enumerate(x)])
        if self.worker is not None and left is not None:
            self.worker.copy_(left.view(-1)[: place.numel])
        received = torch.empty_like(own)
        yield place.all_to_all(received, own)
        total = self._sum(received)
        part = self._encoded(total if self.server is None else total.add_(self.server), self.server)
        yield place.all_gather(received, part)
        values = torch.cat([self._decoded(self._message(each)) for each in received])
        bucket.copy_(values[: place.numel])

    def _encoded(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The message as bytes."""
        message = self.compressor.encode(x)
        if message.dtype != self.dtype or message.shape != self.shape:
            raise ValueError(
                f"{self.compressor!r}: encode gave {message.dtype} {tuple(message.shape)} and, of as many values, "
                f"{self.dtype} {tuple(self.shape)} before: ranks must know how long messages are"
            )
        if residual is not None:
            _keep(x, self._decoded(message), residual)
        return message.contiguous().view(-1).view(torch.uint8)

    def _message(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self.dtype).view(self.shape)

    def _decoded(self, message: torch.Tensor) -> torch.Tensor:
        values = self.compressor.decode(message, self.chunk)
        if not isinstance(values, torch.Tensor) or values.shape != (self.chunk,) or values.dtype != torch.float32:
            found = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, torch.Tensor) else repr(values)
            raise ValueError(f"{self.compressor!r}: decode gave {found}, must be torch.float32 ({self.chunk},)")
        return values

    def _sum(self, received: torch.Tensor) -> torch.Tensor:
        """In the order of the ranks, in memory of its own."""
        total = self._zeros(self.chunk)
        add = getattr(self.compressor, "_add", None)
        for each in received:
            if add is None:
                total += self._decoded(self._message(each))
            else:
                add(self._message(each), total)
        return total


class _ChosenPlaces(_Way):
    """Values at places that are the same on all ranks."""

    def __init__(self, compressor: _RandomK, place: _Place) -> None:
        super().__init__(compressor, place)
        self.compressor, self.step = compressor, 0
        self.bytes_sent = _all_reduce_bytes(place.ranks, _share(place.numel, compressor.ratio))

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor) -> Iterator[Any]:
        places = self.compressor.places(self.step, self.place.numel, bucket.device)
        self.step += 1
        if self.worker is None:
            sent = bucket[places].to(torch.float32)
        else:
            self.worker += bucket
            sent = self.worker[places]
            self.worker[places] = 0.0
        yield self.place.all_reduce(sent)
        bucket.zero_()
        bucket[places] = sent.to(bucket.dtype)

    def state(self) -> dict[str, Any]:
        return super().state() | {"step": self.step}

    def load(self, state: Mapping[str, Any]) -> None:
        step = whole("step", state.get("step"), 0)
        super().load(state)
        self.step = step


class _Factors(_Way):
    """PowerSGD: M is near to P Q^T, where P has orthonormal columns near to those of M Q, and Q = M^T P.

    Both are sums over ranks of what each computes of its own M, so two all-reduces are enough. What a rank keeps back is its
    own M less its own part of the product, M - P (M^T P)^T. Tensors that two factors would not make smaller, vectors above
    all, are sent as they are with the first.
    """

    def __init__(self, compressor: _PowerSGD, place: _Place) -> None:
        super().__init__(compressor, place)
        if place.shapes is None:
            raise ValueError("'powersgd' needs the shapes of the bucket's tensors: CompressedAllReduce(..., shapes=[...])")
        shapes = [torch.Size(shape) for shape in place.shapes]
        if sum(shape.numel() for shape in shapes) != place.numel:
            raise ValueError(f"shapes {list(map(tuple, shapes))} have other than numel={place.numel} elements together")
        self.matrices: list[tuple[slice, int, int, int]] = []  # where it lies, rows, columns, rank
        self.others: list[slice] = []
        start = 0
        for shape in shapes:
            stretch = slice(start, start := start + shape.numel())
            rows, columns = (shape[0], shape.numel() // shape[0]) if len(shape) > 1 and shape.numel() else (1, shape.numel())
            rank = min(compressor.rank, rows, columns)
            if rank * (rows + columns) < rows * columns:
                self.matrices.append((stretch, rows, columns, rank))
            else:
                self.others.append(stretch)
        generator = torch.Generator().manual_seed(compressor.seed % 2**63)
        draw = [torch.randn(columns, rank, generator=generator) for _, _, columns, rank in self.matrices]
        self.first = [each.to(place.device) for each in draw]
        self.q = [each.clone() for each in self.first]
        sent = sum(rank * (rows + columns) for _, rows, columns, rank in self.matrices)
        sent += sum(stretch.stop - stretch.start for stretch in self.others)
        self.bytes_sent = _all_reduce_bytes(place.ranks, sent)

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor) -> Iterator[Any]:
        x = self._with_residual(bucket)
        matrices = [x[stretch].view(rows, columns) for stretch, rows, columns, _ in self.matrices]
        p = [matrix @ q for matrix, q in zip(matrices, self.q, strict=True)]
        first = torch.cat([each.reshape(-1) for each in (*p, *(x[stretch] for stretch in self.others))])
        yield self.place.all_reduce(first)
        parts = first.split([*(each.numel() for each in p), *(stretch.stop - stretch.start for stretch in self.others)])
        p = [torch.linalg.qr(part.view_as(each)).Q for part, each in zip(parts, p, strict=False)]
        own = [matrix.mT @ each for matrix, each in zip(matrices, p, strict=True)]
        if self.worker is not None:
            sent = x.clone()
            for (stretch, *_), left, right in zip(self.matrices, p, own, strict=True):
                sent[stretch] = (left @ right.mT).view(-1)
            _keep(x, sent, self.worker)
        if own:
            second = torch.cat([each.reshape(-1) for each in own])
            yield self.place.all_reduce(second)
            found = second.split([each.numel() for each in own])
            own = [part.view_as(each) for part, each in zip(found, own, strict=True)]
        for (stretch, *_), left, right in zip(self.matrices, p, own, strict=True):
            bucket[stretch] = (left @ right.mT).view(-1).to(bucket.dtype)
        for stretch, values in zip(self.others, parts[len(p) :], strict=True):
            bucket[stretch] = values.to(bucket.dtype)
        # The next iteration starts where this one ended, unless that is NaN, or nothing at all.
        for q, new, drawn in zip(self.q, own, self.first, strict=True):
            q.copy_(torch.where(new.isfinite().all() & new.any(), new, drawn))

    def state(self) -> dict[str, Any]:
        return super().state() | {"q": self.q}

    def load(self, state: Mapping[str, Any]) -> None:
        new = list(state.get("q", ()))
        if [each.shape for each in new] != [each.shape for each in self.q]:
            raise ValueError(
                f"state has q of shapes {[tuple(each.shape) for each in new]}: "
                f"this all-reduce has {[tuple(each.shape) for each in self.q]}"
            )
        super().load(state)
        for own, each in zip(self.q, new, strict=True):
            own.copy_(each)
