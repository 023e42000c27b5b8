"""Initializers of recurrent networks: MXNet's vectors of fused networks, and torch's layers and cells."""

import doctest
import itertools
import math

import numpy as np
import pytest
import torch

from tristep import initializer as init
from tristep.contrib import initializers
from tristep.initializer import Constant, FusedRNN, InitDesc, Initializer, Load, LSTMBias, Orthogonal, Xavier

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test


def _filled(initializer, shape, name="fc_weight", dtype=torch.float32, **desc):
    arr = torch.full(shape, math.nan, dtype=dtype)
    initializer(InitDesc(name, **desc), arr)
    return arr


def test_the_forget_gate_of_a_bias_as_in_mxnet():
    """MXNet 1.9.1 and 2.0 gave these."""
    own = LSTMBias(3.0).dumps()
    assert _filled(Xavier(), (8,), "a_bias", attrs={"__init__": own}).tolist() == [0, 0, 3, 3, 0, 0, 0, 0]
    assert _filled(LSTMBias(2), (8, 2))[:, 1].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


class Numbered(Initializer):
    """Fills each tensor that it is given with the next integer, and keeps the names and shapes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, desc, arr):
        self.seen.append((str(desc), tuple(arr.shape)))
        arr.fill_(len(self.seen))


def _runs(vector):
    """(value, how often in a row) of each run."""
    edges = [0, *(np.flatnonzero(np.diff(vector)) + 1).tolist(), len(vector)]
    return [(int(vector[a]), b - a) for a, b in itertools.pairwise(edges)]


@pytest.mark.sample(1)
def test_a_fused_network_is_taken_apart_as_by_mxnet():
    """Names, shapes and places that MXNet 1.9.1 gave for two layers of 2, input 3, both directions."""
    inner, places = Numbered(), ("l0", "r0", "l1", "r1")
    vector = _filled(FusedRNN(inner, 2, 2, "rnn_tanh", bidirectional=True), (60,))
    weights = [
        (f"{place}_{source}_weight", (2, {"i2h": 3 if "0" in place else 4, "h2h": 2}[source]))
        for place in places
        for source in ("i2h", "h2h")
    ]
    assert inner.seen == weights + [(f"{place}_{source}_bias", (2,)) for place in places for source in ("i2h", "h2h")]
    lengths = [6, 4, 6, 4, 8, 4, 8, 4] + 8 * [2]
    assert _runs(vector) == list(enumerate(lengths, start=1))


def test_forget_gates_of_a_fused_lstm_as_in_mxnet():
    """MXNet 1.9.1 gave this for one layer of 2, input 3."""
    inner = Numbered()
    vector = _filled(FusedRNN(inner, 2, 1, "lstm", forget_bias=-5.0), (56,))
    assert [name for name, _ in inner.seen[:4]] == [f"l0_i2h_{gate}_weight" for gate in "ifco"]
    weights = [(i, 6) for i in (1, 2, 3, 4)] + [(i, 4) for i in (5, 6, 7, 8)]
    assert _runs(vector) == weights + [(9, 2), (-5, 2), (10, 2), (11, 2), (12, 2), (-5, 2), (13, 2), (14, 2)]
    assert [name for name, _ in inner.seen[8:]] == [
        f"l0_{source}_{gate}_bias" for source in ("i2h", "h2h") for gate in "ico"
    ]


def test_a_network_without_initializers_of_its_own_gets_the_models():
    vector = _filled(FusedRNN(None, 2, 1, "gru"), (42,), global_init=Constant(2))
    assert _runs(vector) == [(2, 30), (0, 12)]
    assert 0 < _filled(FusedRNN(None, 2, 1, "gru"), (42,)).abs().max() <= 0.07


# ---- torch's layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [LSTMBias(1.5), '["lstmbias", {"forget_bias": 1.5}]'])
def test_the_forget_gate_of_torchs_lstm_opens(own):
    """With all else zero, the forget gate is the only one that shows: the cell keeps sigmoid(1.5) of its state."""
    lstm = torch.nn.LSTM(3, 2)
    lstm.bias_ih_l0.init = own
    init.initialize(lstm, "zeros")
    cell = torch.ones(1, 2)
    _, (_, after) = lstm(torch.randn(1, 3), (torch.zeros(1, 2), cell))
    torch.testing.assert_close(after, torch.sigmoid(torch.tensor(1.5)) * cell)


def test_a_fused_initializer_fills_torchs_layers_gate_by_gate():
    lstm = torch.nn.LSTM(5, 3, 2, proj_size=2)
    init.initialize(lstm, FusedRNN(Orthogonal(scale=1), 3, 2, "lstm", forget_bias=4))
    for weight in (lstm.weight_ih_l0, lstm.weight_hh_l1):
        for gate in weight.detach().chunk(4):
            gram = gate @ gate.T if gate.shape[0] <= gate.shape[1] else gate.T @ gate
            torch.testing.assert_close(gram, torch.eye(len(gram)))
    torch.testing.assert_close(lstm.weight_hr_l0 @ lstm.weight_hr_l0.T, torch.eye(2))
    assert lstm.bias_hh_l1.tolist() == [0] * 3 + [4] * 3 + [0] * 6
    gru = torch.nn.GRUCell(5, 3)
    init.initialize(gru, FusedRNN("ones", 3, 1, "gru"))
    assert gru.bias_ih.tolist() == [0] * 9
    assert (gru.weight_ih == 1).all()


def test_docstring_examples():
    failed, attempted = doctest.testmod(initializers, extraglobs=vars(init))
    assert attempted > 2
    assert failed == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _filled(LSTMBias(), (30, 20), "1.weight"), r"'1.weight': has shape .*, but LSTMBias .*multiple of 4"),
        (lambda: _filled(FusedRNN(None, 6, 1, "gru"), (8, 3), "0.weight"), "'0.weight': has shape .*for 18 rows"),
        (lambda: _filled(FusedRNN("one", 2, 1, "gru"), (43,), "a_weight"), r"43 elements, .*\(24 plus a multiple of 6\)"),
        (lambda: FusedRNN("one", 0, 1, "gru"), "num_hidden=0: must be 1 or more"),
        (lambda: FusedRNN("one", 1, 1, "rnn"), "mode='rnn': Did you mean 'rnn_tanh' or 'rnn_relu'"),
        (lambda: FusedRNN(Load({}), 1, 1, "gru"), "init=Load.*: must be a name, .* or an Initializer, not Load"),
    ],
)
def test_misfits_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
