"""Initializers of recurrent networks: for biases of LSTMs, and for all parameters of a network at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...trainer.initializer import InitDesc, Initializer, Uniform
from ...trainer.initializer.base import as_initializer, needs
from ...trainer.validation import boolean, choice, int_or_float, integer

__all__ = ["FusedRNN", "LSTMBias"]

_GATES = {  # as MXNet names them, in the order of MXNet, cuDNN and torch
    "rnn_relu": ("",),
    "rnn_tanh": ("",),
    "lstm": ("_i", "_f", "_c", "_o"),
    "gru": ("_r", "_z", "_o"),
}
_PROJECTION = re.compile(r"(.*\.)?weight_hr(_l\d+)?(_reverse)?")  # torch's name of the matrix that projects an LSTM's state


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
        what = "but LSTMBias needs four gates, a first dimension that is a multiple of 4: give it to biases of LSTMs only"
        needs(arr.dim() > 0 and arr.shape[0] % 4 == 0, name, arr, what)
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
        elif _PROJECTION.fullmatch(name):
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
        what = f"but {self!r} is for {rows} rows: use it for that network only, by Mixed or by parameter.init"
        needs(values.dim() > 0 and values.shape[0] == rows, name, values, what)

    def _fill(self, name: InitDesc, prefix: str, kind: str, values: torch.Tensor) -> None:
        gates = _GATES[self.mode]
        for gate, part in zip(gates, values.chunk(len(gates)), strict=True):
            if self.mode == "lstm" and (gate, kind) == ("_f", "bias"):
                part.fill_(self.forget_bias)
            else:
                self._fill_gate(name, f"{prefix}{gate}_{kind}", part, kind)

    def _fill_gate(self, name: InitDesc, gate: str, values: torch.Tensor, kind: str) -> None:
        init = self.init or name.global_init
        if init is None or (self.init is None and isinstance(init, FusedRNN)):  # which would call itself again
            init = Uniform()
        init(InitDesc(gate, None, name.global_init, role=kind, generator=name.generator), values)


class _Piece(NamedTuple):
    """One matrix or bias in the vector of a fused recurrent network."""

    layer: str  # direction and layer: "l0", "r0", "l1", ...
    source: str  # "i2h" or "h2h"
    kind: str  # "weight" or "bias"
    shape: tuple[int, ...]


class _Sizes(NamedTuple):
    """The sizes of a recurrent network, except its input size."""

    mode: str
    layers: int
    hidden: int
    bidirectional: bool

    def split(self, name: str, vector: torch.Tensor) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """Return the pieces of a fused network's vector, each with its view of the vector."""
        directions = 2 if self.bidirectional else 1
        rows = len(_GATES[self.mode]) * self.hidden
        fixed = sum(math.prod(piece.shape) for piece in self._pieces(0))
        inputs, remainder = divmod(vector.numel() - fixed, rows * directions)
        if remainder or inputs < 1:
            raise ValueError(
                f"parameter {str(name)!r}: has {vector.numel()} elements, which no network with mode={self.mode!r}, "
                f"{self.layers} layers of {self.hidden} and {directions} directions has "
                f"({fixed} plus a multiple of {rows * directions}): make the initializer with the network's sizes"
            )
        pieces = self._pieces(inputs)
        parts = vector.split([math.prod(piece.shape) for piece in pieces])
        return ((piece, part.view(piece.shape)) for piece, part in zip(pieces, parts, strict=True))

    def _pieces(self, inputs: int) -> list[_Piece]:
        directions = "lr" if self.bidirectional else "l"
        rows = len(_GATES[self.mode]) * self.hidden
        weights, biases = [], []
        for k in range(self.layers):
            for layer in (f"{direction}{k}" for direction in directions):
                weights.append(_Piece(layer, "i2h", "weight", (rows, inputs if k == 0 else self.hidden * len(directions))))
                weights.append(_Piece(layer, "h2h", "weight", (rows, self.hidden)))
                biases += [_Piece(layer, source, "bias", (rows,)) for source in ("i2h", "h2h")]
        return weights + biases
