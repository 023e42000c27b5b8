"""Initializers of recurrent networks: for biases of LSTMs, and for all parameters of a network at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...trainer.initializer import InitDesc, Initializer, Uniform, Zero
from ...trainer.initializer.base import as_initializer
from ...trainer.validation import boolean, choice, int_or_float, integer

__all__ = ["FusedRNN", "LSTMBias", "RNNFused"]

_GATES = {  # as MXNet names them, in the order of MXNet, cuDNN and torch
    "rnn_relu": ("",),
    "rnn_tanh": ("",),
    "lstm": ("_i", "_f", "_c", "_o"),
    "gru": ("_r", "_z", "_o"),
}
_SOURCES = {"ih": "i2h", "hh": "h2h", "hr": "h2r"}  # torch's names and MXNet's
_PARTS = ("i2h_weight", "h2h_weight", "i2h_bias", "h2h_bias", "h2r_weight")


class LSTMBias(Initializer):
    """Initializer for a bias of an LSTM: 0, and `forget_bias` for the forget gate.

    The forget gate is the second quarter, in MXNet (i, f, c, o) and in torch (i, f, g, o). Biases get 0 by default, whatever
    the model's initializer, so set this one on the parameter: `lstm.bias_ih_l0.init = LSTMBias(1.0)`. LSTMs of torch and
    MXNet have two biases, whose sum counts.

    Args:
        forget_bias: the value for the forget gate, default 1.

    Raises:
        ValueError: the parameter's first dimension is no multiple of 4.

    Source: Jozefowicz, Zaremba and Sutskever, "An empirical exploration of recurrent network architectures" (2015);
    MXNet 1.9.1, `LSTMBias`.

    >>> lstm = torch.nn.LSTM(3, 1)
    >>> lstm.bias_ih_l0.init = LSTMBias(1.0)
    >>> initialize(lstm, "xavier")
    >>> lstm.bias_ih_l0.tolist(), lstm.bias_hh_l0.tolist()
    ([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(self, forget_bias: float = 1.0) -> None:
        self.forget_bias = int_or_float("forget_bias", forget_bias)
        super().__init__(forget_bias=self.forget_bias)

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        if arr.dim() == 0 or arr.shape[0] % 4:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, but LSTMBias needs four gates, a first dimension "
                "that is a multiple of 4: give it to biases of LSTMs only"
            )
        arr.zero_()
        quarter = arr.shape[0] // 4
        arr[quarter : 2 * quarter] = self.forget_bias


class FusedRNN(Initializer):
    """Initializer for all parameters of a recurrent network, which fills the matrix and bias of each gate separately.

    A flat parameter is taken for MXNet's vector of a fused network: weights by layer, direction and source (input, hidden),
    then biases in the same order. Parameters of torch's recurrent layers and cells, which hold the same matrices separately,
    are told by their names; `num_layers` and `bidirectional` have no effect on them.

    Args:
        init: the initializer of the matrices and biases, or its name or JSON; None means the whole model's initializer, or
            else Uniform(0.07). Biases of an LSTM's forget gates are `forget_bias` in any case.
        num_hidden: size of the hidden state.
        num_layers: number of layers.
        mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        bidirectional: whether there are two directions.
        forget_bias: the value of an LSTM's forget gates in each of its two biases, so that their sum is twice this, as in
            MXNet.

    Raises:
        ValueError: a parameter has a shape that none has in a network of these sizes.

    Source: MXNet 1.9.1, `FusedRNN`.

    >>> lstm = torch.nn.LSTM(3, 1)
    >>> initialize(lstm, FusedRNN("orthogonal", num_hidden=1, num_layers=1, mode="lstm"))
    >>> lstm.bias_ih_l0.tolist()
    [0.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        init: str | Initializer | None,
        num_hidden: int,
        num_layers: int,
        mode: str,
        bidirectional: bool = False,
        forget_bias: float = 1.0,
    ) -> None:
        self.init = None if init is None else as_initializer("init", init)
        self.num_hidden = integer("num_hidden", num_hidden, low=1)
        self.num_layers = integer("num_layers", num_layers, low=1)
        self.mode = choice("mode", mode, _GATES)
        self.bidirectional = boolean("bidirectional", bidirectional)
        self.forget_bias = int_or_float("forget_bias", forget_bias)
        super().__init__(
            init=None if self.init is None else self.init.dumps(),
            num_hidden=self.num_hidden,
            num_layers=self.num_layers,
            mode=mode,
            bidirectional=bidirectional,
            forget_bias=self.forget_bias,
        )

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.zeros_like(arr, memory_format=torch.contiguous_format)
        if arr.dim() == 1:
            sizes = _Sizes(self.mode, self.num_layers, self.num_hidden, self.bidirectional)
            for piece, part in sizes.split(name, values):
                self._fill(name, f"{piece.layer}_{piece.source}", piece.kind, part)
        elif _part_of(name) == "h2r_weight":
            self._fill_gate(name, name, values, "weight")
        else:
            self._check_rows(name, values)
            self._fill(name, name, "weight", values)
        arr.copy_(values)

    def _init_bias(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.zeros_like(arr, memory_format=torch.contiguous_format)
        self._check_rows(name, values)
        self._fill(name, name, "bias", values)
        arr.copy_(values)

    def _check_rows(self, name: InitDesc, values: torch.Tensor) -> None:
        rows = len(_GATES[self.mode]) * self.num_hidden
        if values.dim() == 0 or values.shape[0] != rows:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(values.shape)}, but {self!r} is for {rows} rows: use it for "
                "that network only, by Mixed or by parameter.init"
            )

    def _fill(self, name: InitDesc, prefix: str, kind: str, values: torch.Tensor) -> None:
        gates = _GATES[self.mode]
        for gate, part in zip(gates, values.chunk(len(gates)), strict=True):
            if self.mode == "lstm" and (gate, kind) == ("_f", "bias"):
                part.fill_(self.forget_bias)
            else:
                self._fill_gate(name, f"{prefix}{gate}_{kind}", part, kind)

    def _fill_gate(self, name: InitDesc, gate: str, values: torch.Tensor, kind: str) -> None:
        init = self.init or _global_init(name, FusedRNN)
        init(InitDesc(gate, None, name.global_init, role=kind, generator=name.generator), values)


class RNNFused(Initializer):
    """Initializer for all parameters of a recurrent network, with an initializer for each kind of matrix and bias.

    A flat parameter is taken for MXNet's vector of a fused network: weights by layer, direction and source (input, hidden,
    projection), then biases in the same order. Parameters of torch's recurrent layers and cells are told by their names;
    `num_layers`, `state_size`, `bidirectional` and `projection_size` have no effect on them.

    Args:
        mode: "rnn_relu", "rnn_tanh", "lstm" or "gru".
        num_layers: number of layers.
        state_size: size of the hidden state.
        bidirectional: whether there are two directions.
        projection_size: size of the projection of an LSTM's state; None means no projection.
        i2h_weight_initializer, h2h_weight_initializer, h2r_weight_initializer: the initializers of the matrices from input
            to hidden, from hidden to hidden, and to the projection, each with all gates in one matrix. None means the whole
            model's initializer, or else Uniform(0.07).
        i2h_bias_initializer, h2h_bias_initializer: the initializers of the biases, such as "lstmbias"; None means zeros.

    Raises:
        ValueError: `projection_size` is given for another mode than "lstm", or a parameter does not belong to a recurrent
            network of these sizes.

    Source: MXNet 2.0, `RNNFused`; it passes matrices on as vectors, so that Xavier does not work there.

    >>> w = torch.ones(2 * (3 + 2 + 2))
    >>> RNNFused("rnn_tanh", 1, 2, i2h_weight_initializer="zeros", h2h_weight_initializer="ones")("rnn_weight", w)
    >>> w.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        mode: str,
        num_layers: int,
        state_size: int,
        bidirectional: bool = False,
        projection_size: int | None = None,
        i2h_weight_initializer: str | Initializer | None = None,
        h2h_weight_initializer: str | Initializer | None = None,
        i2h_bias_initializer: str | Initializer | None = None,
        h2h_bias_initializer: str | Initializer | None = None,
        h2r_weight_initializer: str | Initializer | None = None,
    ) -> None:
        self.mode = choice("mode", mode, _GATES)
        self.num_layers = integer("num_layers", num_layers, low=1)
        self.state_size = integer("state_size", state_size, low=1)
        self.bidirectional = boolean("bidirectional", bidirectional)
        self.projection_size = None if projection_size is None else integer("projection_size", projection_size, low=1)
        if self.projection_size and mode != "lstm":
            raise ValueError(f"projection_size={projection_size!r}: only an LSTM has a projection, so it must be None")
        initializers: tuple[Any, ...] = (
            *(i2h_weight_initializer, h2h_weight_initializer),
            *(i2h_bias_initializer, h2h_bias_initializer, h2r_weight_initializer),
        )
        self._of = {
            part: None if init is None else as_initializer(f"{part}_initializer", init)
            for part, init in zip(_PARTS, initializers, strict=True)
        }
        super().__init__(
            mode=mode,
            num_layers=self.num_layers,
            state_size=self.state_size,
            bidirectional=bidirectional,
            projection_size=self.projection_size,
            **{f"{part}_initializer": None if init is None else init.dumps() for part, init in self._of.items()},
        )

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.zeros_like(arr, memory_format=torch.contiguous_format)
        if arr.dim() == 1:
            sizes = _Sizes(self.mode, self.num_layers, self.state_size, self.bidirectional, self.projection_size)
            for piece, part in sizes.split(name, values):
                self._fill(name, f"{piece.source}_{piece.kind}", part)
        else:
            self._fill(name, _part_of(name), values)
        arr.copy_(values)

    def _init_bias(self, name: InitDesc, arr: torch.Tensor) -> None:
        self._fill(name, _part_of(name), arr)

    def _fill(self, name: InitDesc, part: str | None, values: torch.Tensor) -> None:
        if part is None:
            raise ValueError(
                f"parameter {str(name)!r}: RNNFused is for parameters of recurrent layers (weight_ih..., bias_hh... and so "
                "on): use it for that network only, by Mixed or by parameter.init"
            )
        init = self._of[part] or (Zero() if part.endswith("bias") else _global_init(name, RNNFused))
        init(InitDesc(f"{name}:{part}", None, name.global_init, role="weight", generator=name.generator), values)


class _Piece(NamedTuple):
    """One matrix or bias in the vector of a fused recurrent network."""

    layer: str  # direction and layer: "l0", "r0", "l1", ...
    source: str  # "i2h", "h2h" or "h2r"
    kind: str  # "weight" or "bias"
    shape: tuple[int, ...]


class _Sizes(NamedTuple):
    """The sizes of a recurrent network, except its input size."""

    mode: str
    layers: int
    hidden: int
    bidirectional: bool
    projection: int | None = None

    def split(self, name: str, vector: torch.Tensor) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """Return the pieces of a fused network's vector, each with its view of the vector."""
        directions = 2 if self.bidirectional else 1
        rows = len(_GATES[self.mode]) * self.hidden
        fixed = sum(math.prod(piece.shape) for piece in self._pieces(0))
        inputs, remainder = divmod(vector.numel() - fixed, rows * directions)
        if remainder or inputs < 1:
            raise ValueError(
                f"parameter {str(name)!r}: has {vector.numel()} elements, which no network with mode={self.mode!r}, "
                f"{self.layers} layers of {self.hidden}, {directions} directions and projection {self.projection} has "
                f"({fixed} plus a multiple of {rows * directions}): make the initializer with the network's sizes"
            )
        pieces = self._pieces(inputs)
        parts = vector.split([math.prod(piece.shape) for piece in pieces])
        return ((piece, part.view(piece.shape)) for piece, part in zip(pieces, parts, strict=True))

    def _pieces(self, inputs: int) -> list[_Piece]:
        directions = "lr" if self.bidirectional else "l"
        rows, out = len(_GATES[self.mode]) * self.hidden, self.projection or self.hidden
        weights, biases = [], []
        for k in range(self.layers):
            for layer in (f"{direction}{k}" for direction in directions):
                weights.append(_Piece(layer, "i2h", "weight", (rows, inputs if k == 0 else out * len(directions))))
                weights.append(_Piece(layer, "h2h", "weight", (rows, out)))
                if self.projection:
                    weights.append(_Piece(layer, "h2r", "weight", (self.projection, self.hidden)))
                biases += [_Piece(layer, source, "bias", (rows,)) for source in ("i2h", "h2h")]
        return weights + biases


def _part_of(name: str) -> str | None:
    """Return the kind of a parameter of torch's recurrent layers, such as "i2h_weight"; None for other parameters."""
    match = re.match(r"(?:(weight)_(ih|hh|hr)|(bias)_(ih|hh))(_l\d+)?(_reverse)?$", name.rsplit(".", 1)[-1])
    return f"{_SOURCES[match[2] or match[4]]}_{match[1] or match[3]}" if match else None


def _global_init(name: InitDesc, asking: type[Initializer]) -> Initializer:
    """Return the whole model's initializer, or the default one if there is none or it would call itself again."""
    init = name.global_init
    return Uniform() if init is None or isinstance(init, asking) else init
