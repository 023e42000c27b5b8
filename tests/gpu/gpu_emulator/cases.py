"""Rules and gradient codes on the emulator and on the cpu engine, which must agree; and products of matrices.

Rules without sums agree to the bit, since neither engine fuses operations. Sums are added up in another order, and what
follows from them differs by rounding. Products are compared with those of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from parity_steps import draw, hyper_row

from tristep.kernels import MetricsBuffer, Rule, ShapedRule, Update, compress, rules, storage, transforms
from tristep.kernels.backends.triton import pieces
from tristep.kernels.layouts import compute_dtype
from tristep.kernels.states import states_for
from tristep.trainer import Telemetry

__all__ = [
    "SHAPES",
    "SIZES",
    "CodeCase",
    "ProductCase",
    "RuleCase",
    "ShapedCase",
    "cases",
    "difference",
    "largest_difference",
]

# Below, at and above a block of packed states (128) and a tile (1,024), and several tiles.
SIZES = (0, 1, 3, 127, 128, 1023, 1024, 1025, 5000, 2048, 129)
# For means: several matrices in a tile, some cut across their rows or columns, of one element, and tensors that are none;
# matrices in pieces of rows, with and without a part that is not there, and with rows that begin anywhere.
SHAPES = ((3, 5), (4, 3, 3), (2, 3, 1, 1), (300, 7), (6, 10), (5, 301), (2, 70, 130), (1, 1), (1100,), (), (0, 3))
SHAPES += ((2, 37, 264), (21, 256))
SHAPES_OF_LARGE = (*SHAPES, (30, 5, 16))  # with lines of several matrices below each other
_WITHOUT_GRADIENT = 4
_EXTENSIVE = ("adamw", "sgd_momentum", "adan", "lamb")  # rules that go through all storage and all that is folded in
# Rules, and the transforms that are applied to them.
_TRANSFORMED = ("adamw+cautious_weight_decay", "adamw+cautious", "lamb+agc+skipping+jointly")
_OF_ALL = ("clip_norm_of_all", "skip_square_of_all")
_TRANSFORMS: dict[str, Callable[[Any], Any]] = {name: getattr(transforms, name) for name in transforms.__all__} | {
    "skipping": partial(transforms.limited, skips=True),
    "jointly": partial(transforms.limited, skips=True, hyper=_OF_ALL),
}
_OF_TRANSFORMS = {"agc": 0.1, "clip_norm": 10.0, "skip_square": 1e9}
_OF_TRANSFORMS |= dict(zip(_OF_ALL, (20.0, 1e9), strict=True))
_MOST_ULPS = {"exact": 0, "sums": 8, "means": 16, "metrics": 64}

Tensors = dict[str, list[torch.Tensor]]


class RuleCase(NamedTuple):
    """Two steps of a rule on tensors of `SIZES`, one of which has no gradient.

    Attributes:
        rule: its name, or that of a staged rule and its part; after it, each behind a "+", transforms in `_TRANSFORMS`.
        weight, gradient, master, state: names of types; gradients' default is the weights', the others' is none.
        offset: elements by which tensors are off a multiple of 64 bytes.
        seed: of stochastic rounding.
        control: what gradients are multiplied by, and whether steps are skipped.
        zero_grads: fill gradients with zeros in the same pass.
        metrics: compute what telemetry does.
        small: gradients whose squares are subnormal.
    """

    rule: str
    weight: str = "float32"
    gradient: str | None = None
    master: str | None = None
    state: str | None = None
    offset: int = 0
    seed: int | None = None
    control: tuple[float, float] | None = None
    zero_grads: bool = False
    metrics: bool = False
    small: bool = False

    @property
    def limit(self) -> int:
        """The largest difference in ulps."""
        kind = "metrics" if self.metrics else "sums" if self.made.reductions else "exact"
        return _MOST_ULPS[kind]

    @property
    def base(self) -> Rule:
        """The rule without transforms."""
        found: Rule = attrgetter(self.rule.partition("+")[0])(rules)
        return found

    @property
    def made(self) -> Rule:
        """The rule with them."""
        names = self.rule.split("+")[1:]
        return reduce(lambda rule, name: _TRANSFORMS[name](rule), names, self.base)

    def __str__(self) -> str:
        given = {k: v for k, v in self._asdict().items() if k != "rule" and v != self._field_defaults[k]}
        return "-".join([self.rule, *(k if v is True else f"{k}={v}".replace(" ", "") for k, v in given.items())])

    def compare(self) -> tuple[float, str]:
        """The largest difference of the engines in ulps, and where it is."""
        return largest_difference(self.run("cpu"), self.run("triton"))

    def run(self, engine: str, sizes: tuple[int, ...] = SIZES, edit: Callable[[Update], None] | None = None) -> Tensors:
        """All tensors afterwards, by name. `edit` is called before each step with the update that is about to run."""
        base, rule, rng = self.base, self.made, np.random.default_rng(5)
        given = self.weight, self.gradient or self.weight, self.master, self.state
        weight, gradient, master, state = (None if name is None else getattr(torch, name) for name in given)
        dtype = compute_dtype(weight)
        wide = [torch.as_tensor(draw(rng, base, "weight", n)).to(dtype) for n in sizes]
        weights = [_placed(values, weight, self.offset) for values in wide]
        masters: list[torch.Tensor | None] = [None] * len(sizes)
        if master is not None:
            pairs = zip(weights, wide, strict=True)
            exact = [values if master == dtype else storage.master_for(w, values, master) for w, values in pairs]
            masters = [_placed(values, master, self.offset) for values in exact]
        states = []
        for n in sizes:
            row = [self._state(rng, base, name, n, dtype, state) for name in rule.state]
            states.append((*row, *(torch.tensor(0.7, dtype=dtype) for _ in rule.kept)))
        into = MetricsBuffer(Telemetry()._measure, len(sizes), 4) if self.metrics else None
        control = None if self.control is None else torch.tensor(self.control)
        names = [f"tensor {i}" for i in range(len(sizes))]
        update = Update(rule, weights, states, masters, engine, names, self.seed, control, self.zero_grads)
        every = []
        for step in range(2):
            gradients = [self._gradient(rng, base, n, gradient) for n in sizes]
            for i in range(len(sizes)):
                row_of = 0 if self.rule == "prodigy" else 1 if self.small else i % 2  # Prodigy has one for all tensors
                row = hyper_row(base, row_of, dtype) | _OF_TRANSFORMS
                values = [row[name] for name in ("rescale_grad", *rule.hyper)]
                update.hyper[i] = [*values, *([] if self.seed is None else [7 + step])]
            update.bind([None if i == _WITHOUT_GRADIENT else each for i, each in enumerate(gradients)])
            if edit is not None:
                edit(update)
            if into is not None:
                into.begin_step()
            update(into)
            if into is not None:
                into.end_step()
            every += gradients
        found = {"gradient": every, "weight": weights, "master": [each for each in masters if each is not None]}
        found |= {name: [row[k] for row in states] for k, name in enumerate(rule.slots)}
        if into is not None:  # sums of float32, whatever the buffer's type
            found["metrics"] = [torch.from_numpy(into.values(into.arrived(wait=True))).to(dtype)]
        return found

    def _state(self, rng: Any, rule: Rule, name: str, n: int, dtype: Any, state: torch.dtype | None) -> torch.Tensor:
        values = torch.as_tensor(draw(rng, rule, name, n)) * (not self.small)
        kind = dtype if state is None or name in rule.full_precision else state
        if not storage.is_packed(kind):
            return _placed(values, kind, self.offset)
        packed = torch.zeros(storage.packed_size(n, kind), dtype=kind)
        return _placed(storage.copy(packed, values.float(), values.shape, name in rule.nonnegative), kind)

    def _gradient(self, rng: Any, rule: Rule, n: int, gradient: torch.dtype) -> torch.Tensor:
        values = torch.as_tensor(draw(rng, rule, "gradient", n)) * (2e-22 if self.small else 1.0)
        return _placed(values, gradient, self.offset)


class ShapedCase(NamedTuple):
    """Two steps of a rule that is chosen by the weight's shape, on tensors of `SHAPES`, one of which has no gradient.

    Attributes:
        rule: its name.
        weight, state: names of types; the states' default is the weights'.
        offset: elements by which tensors are off a multiple of 64 bytes.
        skips: limit the norm of all gradients, and skip the second step, whose gradients are large.
        master: the name of the masters' type; None for none.
        seed: of stochastic rounding.
        folded: with a scale of gradients, which are filled with zeros, and with what telemetry computes.
        large: with programs as of large tensors.
    """

    rule: str
    weight: str = "float32"
    state: str | None = None
    offset: int = 0
    skips: bool = False
    master: str | None = None
    seed: int | None = None
    folded: bool = False
    large: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return SHAPES_OF_LARGE if self.large else SHAPES

    @property
    def limit(self) -> int:
        """The largest difference in ulps."""
        return _MOST_ULPS["metrics" if self.folded else "means"]

    def __str__(self) -> str:
        given = {k: v for k, v in self._asdict().items() if k != "rule" and v != self._field_defaults[k]}
        return "-".join([self.rule, *(k if v is True else f"{k}={v}" for k, v in given.items())])

    @property
    def base(self) -> ShapedRule:
        """The rule without a limit."""
        return getattr(rules, self.rule)

    @property
    def made(self) -> ShapedRule:
        """The rule as it is stepped."""
        return transforms.limited(self.base, True) if self.skips else self.base

    def compare(self) -> tuple[float, str]:
        """The largest difference of the engines in ulps, and where it is."""
        with mock.patch.object(pieces, "ENOUGH", 1 if self.large else pieces.ENOUGH):
            return largest_difference(self.run("cpu"), self.run("triton"))

    def run(self, engine: str) -> Tensors:
        """All tensors afterwards, by name."""
        base, rule, rng = self.base, self.made, np.random.default_rng(5)
        weight, state = (None if name is None else getattr(torch, name) for name in (self.weight, self.state))
        dtype = compute_dtype(weight)

        def drawn(name: str, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
            return _placed(torch.as_tensor(draw(rng, base, name, shape)), kind, self.offset)

        weights = [drawn("weight", shape, weight) for shape in self.shapes]
        masters: list[torch.Tensor | None] = [None] * len(self.shapes)
        if self.master is not None:
            kind = getattr(torch, self.master)
            exact = [each.to(dtype) if kind == dtype else storage.master_for(each, each.to(dtype), kind) for each in weights]
            masters = [_placed(values, kind, self.offset) for values in exact]
        states = states_for(rule, weights, state)
        for name, *column in zip(rule.state, *states, strict=True):
            for each in column:
                if each.dtype not in (torch.uint8, torch.int8):  # codes start from zeros
                    each.copy_(torch.as_tensor(draw(rng, base, name, each.shape)))
        names, control = [f"tensor {i}" for i in range(len(self.shapes))], torch.tensor([0.5, 0.0]) if self.folded else None
        into = MetricsBuffer(Telemetry()._measure, len(self.shapes), 4) if self.folded else None
        update = Update(rule, weights, states, masters, engine, names, self.seed, control, self.folded)
        every = []
        for step in range(2):
            size = 1e6 if self.skips and step else 1.0
            gradients = [drawn("gradient", shape, weight).mul_(size) for shape in self.shapes]
            for i in range(len(self.shapes)):
                row = hyper_row(base, i % 2, dtype) | {"clip_norm": 1e3, "skip_square": 1e8}
                values = [row[name] for name in ("rescale_grad", *rule.hyper)]
                update.hyper[i] = [*values, *([] if self.seed is None else [7 + step])]
            update.bind([None if i == _WITHOUT_GRADIENT else each for i, each in enumerate(gradients)])
            if into is not None:
                into.begin_step()
            update(into)
            if into is not None:
                into.end_step()
            every += gradients
        found = {"weight": weights, "gradient": every, "master": [each for each in masters if each is not None]}
        found |= {name: [row[k] for row in states] for k, name in enumerate(rule.state)}
        if into is not None:
            found["metrics"] = [torch.from_numpy(into.values(into.arrived(wait=True))).to(dtype)]
        return found


class CodeCase(NamedTuple):
    """All that a gradient code does with n values: encode, decode, sum up to a message and to values, and votes.

    Attributes:
        code: its name.
        n: values.
        dtype: the name of their type.
        residual: whether what is left over is kept.
        ranks: whose messages are summed up.
        special: with NaN, infinity and a subnormal number; bytes of messages are not compared then.
    """

    code: str
    n: int
    dtype: str = "float32"
    residual: bool = True
    ranks: int = 1
    special: bool = False
    limit = 0

    def __str__(self) -> str:
        left = "-residual" if self.residual else ""
        return f"{self.code}-{self.n}-{self.dtype}{left}-ranks={self.ranks}{'-special' if self.special else ''}"

    def compare(self) -> tuple[float, str]:
        """The largest difference of the engines, and where it is."""
        return largest_difference(self.run("cpu"), self.run("triton"))

    def run(self, engine: str) -> Tensors:
        """All tensors afterwards, by name."""
        code, dtype, rng = compress.CODES[self.code], getattr(torch, self.dtype), np.random.default_rng(3)
        found: Tensors = {}

        def new(name: str, values: Any, kind: torch.dtype = torch.uint8) -> torch.Tensor:
            tensor = _placed(torch.as_tensor(values), kind)
            found.setdefault(name, []).append(tensor)
            return tensor

        def left(n: int) -> torch.Tensor | None:
            return new("residual", rng.normal(size=n), torch.float32) if self.residual else None

        n, threshold = self.n, 0.5
        for chunks in (1, 3):
            chunk, every = code.chunk(n, chunks), []
            for _ in range(self.ranks):
                values = rng.normal(size=n)
                if self.special:
                    values[[3, 150, 260]] = np.nan, np.inf, 1e-41
                given, residual = new("values", values, dtype), left(n)
                every.append(new("messages", np.full((chunks, code.size(chunk)), 205)))
                for _ in range(2):
                    compress.encode(code, given, residual, every[-1], threshold, engine)
                compress.decode(code, every[-1], new("decoded", np.zeros(n), dtype), threshold, engine)
            for k in range(chunks):
                together = new("received", torch.stack([each[k] for each in every]))
                length = min(max(n - k * chunk, 0), chunk)
                total = new("total", np.full((1, code.size(chunk)), 205))
                compress.reduce(code, together, left(chunk), total, length, threshold, engine)
                compress.reduce(code, together, None, new("sum", np.zeros(length), dtype), None, threshold, engine)
                if code.vote is not None:
                    votes = new("votes", np.full((1, code.votes_size(chunk, self.ranks)), 205))
                    compress.reduce_votes(code, together, votes, engine)
                    voted = new("voted", np.zeros(length), dtype)
                    compress.decode_votes(code, self.ranks, votes, voted, threshold, engine)
        return {name: tensors for name, tensors in found.items() if not self.special or tensors[0].is_floating_point()}


class ProductCase(NamedTuple):
    """2 x y, or with a matrix added 2 x y - added / 2: what is above the diagonal, mirrored.

    Attributes:
        shape: of x.
        dtype: the name of its type.
        layout: "nt", "tn" or "nn": whether each of the factors is transposed in memory.
        added: whether a matrix is added.
        tile: which of the kernel's tiles is taken.
    """

    shape: tuple[int, ...]
    dtype: str = "float16"
    layout: str = "nt"
    added: bool = False
    tile: int = 0
    limit = 1

    def __str__(self) -> str:
        given = {k: v for k, v in self._asdict().items() if k != "shape" and v != self._field_defaults[k]}
        return "-".join(["product", "x".join(map(str, self.shape)), *(k if v is True else f"{v}" for k, v in given.items())])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Both factors, and what is added or None."""
        rng, dtype = np.random.default_rng(7), getattr(torch, self.dtype)
        *stack, rows, depth = self.shape

        def drawn(rows: int, columns: int, turned: bool) -> torch.Tensor:
            size = (columns, rows) if turned else (rows, columns)
            values = torch.as_tensor(rng.normal(size=(*stack, *size)))
            found = _placed(values, dtype)
            return found.mT if turned else found

        left, right = drawn(rows, depth, self.layout[0] == "t"), drawn(depth, rows, self.layout[1] == "t")
        matrix = drawn(rows, rows, False)
        return left, right, (matrix.triu() + matrix.triu(1).mT).contiguous() if self.added else None

    def compare(self) -> tuple[float, str]:
        """The largest error as a share of what rounding each sum and the result may give, and where it is."""
        from tristep.kernels.backends.triton import symmetric

        left, right, added = self.tensors()
        tiles = mock.patch.object(symmetric, "_tiles_of", return_value=(symmetric.TILES[self.tile],))
        with tiles, mock.patch.dict(symmetric._calls, clear=True):
            result = symmetric.symmetric_product(added, left, right, alpha=2.0, beta=-0.5)
        if not torch.equal(result, result.mT):
            return float("inf"), "the result, which is not symmetric"
        found, x, y = (each.double() for each in (result, left, right))
        other = torch.zeros(()) if added is None else added.double()
        exact, size = 2 * x @ y - other / 2, 2 * x.abs() @ y.abs() + other.abs() / 2
        info, depth = torch.finfo(result.dtype), self.shape[-1]
        sums = (depth + 3) * 2.0**-24 * size  # products are exact; so many roundings, of at most that size each
        shares = ((found - exact).abs() / (sums + info.eps / 2 * (exact.abs() + sums).clamp(min=info.tiny))).triu()
        worst = int(shares.nan_to_num(float("inf")).argmax())
        return float(shares.flatten()[worst]), f"element {worst}"


def cases() -> Iterator[RuleCase | ShapedCase | CodeCase | ProductCase]:
    """All cases: each rule in each type, and those of `_EXTENSIVE` with all storage; each code; products of matrices."""
    for name in rules.__all__:
        rule = getattr(rules, name)
        if isinstance(rule, ShapedRule):
            yield ShapedCase(name)
            yield ShapedCase(name, "bfloat16")
            yield ShapedCase(name, "float16", offset=1)
            yield ShapedCase(name, "float64", offset=1)
            yield ShapedCase(name, "bfloat16", "uint8")
            yield ShapedCase(name, state="int8")
            yield ShapedCase(name, skips=True)
            yield ShapedCase(name, large=True)
        if name == "came":  # all that there is: two reductions to means, a sum, and a state as large as the weight
            yield ShapedCase(name, "bfloat16", master="int16", folded=True)
            yield ShapedCase(name, "bfloat16", master="float32", offset=1)
            yield ShapedCase(name, "bfloat16", "uint8", master="int8", seed=3)
            yield ShapedCase(name, "bfloat16", "bfloat16", seed=3, large=True)
        if name == "muon":  # 16-bit matrices are weights in the first of its parts, and gradients in the last
            yield RuleCase("muon.normalized", "float16", "float32")
            yield RuleCase("muon.normalized", "bfloat16", "bfloat16", state="bfloat16", seed=3, zero_grads=True)
            yield RuleCase("muon.normalized+skipping", "float16", "bfloat16", control=(0.5, 0.0), offset=1)
            yield RuleCase("muon.after", "float32", "float16")
            yield RuleCase("muon.after", "bfloat16", "bfloat16", "int16", control=(1.0, 1.0))
        if not isinstance(rule, Rule):
            continue
        yield RuleCase(name)
        yield RuleCase(name, "bfloat16")
        yield RuleCase(name, "float16", offset=1)
        yield RuleCase(name, "float64", offset=1)
        if rule.reductions:  # on GPUs roots of subnormal sums are 0
            yield RuleCase(name, small=True)
        if name in _EXTENSIVE:
            yield RuleCase(name, "bfloat16", "bfloat16", "float32")
            yield RuleCase(name, "float16", "float16", "float32")
            yield RuleCase(name, "bfloat16", "bfloat16", "int16")
            yield RuleCase(name, "bfloat16", "bfloat16", "int8")
            yield RuleCase(name, "bfloat16", "bfloat16", "int8", offset=1, seed=3)
            yield RuleCase(name, "float32", "bfloat16", state="bfloat16", seed=3)
            yield RuleCase(name, "bfloat16", "bfloat16", state="bfloat16", seed=3)
            for offset in (0, 1):
                yield RuleCase(name, state="uint8", offset=offset)
                yield RuleCase(name, state="uint8", seed=3, offset=offset)
                yield RuleCase(name, "bfloat16", "bfloat16", "int16", "uint8", offset, 3)
            yield RuleCase(name, "bfloat16", "bfloat16", "int8", "uint8", seed=3)
            for offset in (0, 1):
                yield RuleCase(name, state="int8", offset=offset)
                yield RuleCase(name, "bfloat16", "bfloat16", "int8", "int8", offset, 3)
            yield RuleCase(name, control=(0.125, 0.0), zero_grads=True)
            yield RuleCase(name, control=(1.0, 1.0), zero_grads=True, offset=1)
            yield RuleCase(name, metrics=True)
    for name in _TRANSFORMED:
        yield RuleCase(name)
        yield RuleCase(name, "bfloat16", "bfloat16", "float32", "uint8", 1, 3)
        yield RuleCase(name, metrics=True, control=(0.125, 0.0))
    for master in ("float32", "int16", "int8"):  # with which unchanged stored weights are counted in other ways
        yield RuleCase("adamw", "bfloat16", "bfloat16", master, metrics=True)
    yield RuleCase("adamw", "bfloat16", "bfloat16", seed=3, metrics=True)
    for name in compress.CODES:
        yield CodeCase(name, 1, ranks=2)
        yield CodeCase(name, 1024, "bfloat16")
        yield CodeCase(name, 1025, "float16", residual=False)
        yield CodeCase(name, 5000, ranks=3)
        yield CodeCase(name, 5000, "bfloat16", residual=False, ranks=3, special=True)
    for k, layout in enumerate(("nt", "tn", "nn")):
        for tile in range(4):
            dtype, added = ("float16", "bfloat16")[(k + tile) % 2], (k + tile // 2) % 2 == 0
            yield ProductCase((256, 64), dtype, layout, added, tile)  # no masks
            yield ProductCase((2, 144, 208), dtype, layout, added, tile)  # rows of 16 bytes, and a part of a block
            yield ProductCase((2, 130, 70), dtype, layout, added, tile)  # rows that begin anywhere
    for layout in ("nt", "tn"):
        yield ProductCase((1, 1), "bfloat16", layout, True)
        yield ProductCase((3, 300), "float16", layout)
        yield ProductCase((300, 3), "bfloat16", layout)


def largest_difference(expected: Tensors, found: Tensors) -> tuple[float, str]:
    """The largest difference in ulps, and where it is."""
    pairs = [
        (difference(a, b), f"{name}[{k}]")
        for name in found
        for k, (a, b) in enumerate(zip(found[name], expected[name], strict=True))
    ]
    return max(pairs, key=lambda pair: pair[0])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of elements, in ulps of the larger one or of the root mean square of all; NaN equals NaN."""
    if not a.numel():
        return 0.0
    if not a.is_floating_point():
        return float((a.double() - b.double()).abs().max())
    info, (x, y) = torch.finfo(a.dtype), (tensor.detach().double() for tensor in (a, b))
    same = (x == y) | (x.isnan() & y.isnan())
    size = torch.maximum(torch.maximum(x.abs(), y.abs()), x.nan_to_num(0, 0, 0).square().mean().sqrt())
    ulp = torch.exp2(torch.floor(torch.log2(size.clamp(min=info.tiny)))) * info.eps
    return float(torch.where(same, 0.0, ((x - y).abs() / ulp).nan_to_num(float("inf"))).max())


def _placed(values: torch.Tensor, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A tensor so many elements behind a multiple of 64 bytes, with room around it that belongs to nobody."""
    memory = torch.empty(values.numel() + 192 + offset, dtype=dtype)
    start = (-memory.data_ptr() % 64 + 64) // dtype.itemsize + offset
    return memory[start : start + values.numel()].view(values.shape).copy_(values.to(dtype))
