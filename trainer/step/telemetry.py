"""Telemetry: statistics of weights, gradients and updates, computed by the update itself and kept for the last steps."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Metric, MetricsBuffer
from ...kernels import metrics as builtin
from ...kernels.messages import there_are
from ..optimizer import Optimizer, RuleOptimizer
from ..optimizer.multi import parts_of
from ..validation import choice, instance, integer

_Values = dict[str, np.ndarray]  # the measured values by name, each [n_steps, n_tensors]


def _root(name: str) -> Callable[[_Values, np.ndarray], np.ndarray]:
    return lambda values, sizes: np.sqrt(values[name])


def _itself(name: str) -> Callable[[_Values, np.ndarray], np.ndarray]:
    return lambda values, sizes: values[name]


def _ratio(values: _Values, sizes: np.ndarray) -> np.ndarray:
    return np.sqrt(values["update_square"]) / np.sqrt(values["weight_square"])


def _cosine(values: _Values, sizes: np.ndarray) -> np.ndarray:
    lengths = np.sqrt(values["gradient_square"]) * np.sqrt(values["update_square"])
    return values["gradient_times_update"] / lengths


def _share(name: str) -> Callable[[_Values, np.ndarray], np.ndarray]:
    return lambda values, sizes: values[name] / sizes


# For each quantity the values that the update measures, and the function from these values to the quantity.
_QUANTITIES: dict[str, tuple[tuple[str, ...], Callable[[_Values, np.ndarray], np.ndarray]]] = {
    "weight_norm": (("weight_square",), _root("weight_square")),
    "gradient_norm": (("gradient_square",), _root("gradient_square")),
    "update_norm": (("update_square",), _root("update_square")),
    "weight_absmax": (("weight_absmax",), _itself("weight_absmax")),
    "gradient_absmax": (("gradient_absmax",), _itself("gradient_absmax")),
    "update_absmax": (("update_absmax",), _itself("update_absmax")),
    "update_ratio": (("update_square", "weight_square"), _ratio),
    "cosine": (("gradient_square", "update_square", "gradient_times_update"), _cosine),
    "gradient_zeros": (("gradient_zeros",), _share("gradient_zeros")),
    "gradient_nonfinite": (("gradient_nonfinite",), _itself("gradient_nonfinite")),
    "weight_unchanged": (("weight_unchanged",), _share("weight_unchanged")),
}


class Telemetry:
    """Statistics of each parameter's weights, gradients and updates in the last steps of a `Trainer`.

    `telemetry[quantity]` is an array [n_steps, n_parameters]. The update computes it from values that it has loaded anyway,
    and the weights have the same bits as without it. On a GPU, results are copied to the host asynchronously: neither a step
    nor reading waits for them; reading returns the steps that have arrived, and `flush` waits for all.

    Quantities, for each parameter:

    - "weight_norm", "gradient_norm", "update_norm": the Euclidean norms of the weight before the step, of the gradient
      divided by the batch size, and of the update, which is the change of the weight;
    - "weight_absmax", "gradient_absmax", "update_absmax": the largest absolute values; NaN if an element is NaN;
    - "update_ratio": the norm of the update divided by the norm of the weight;
    - "cosine": the cosine of the angle between gradient and update, -1 for plain gradient descent, NaN if one of them is 0;
    - "gradient_zeros": the share of zeros among the gradient's elements;
    - "gradient_nonfinite": the number of infinite and NaN elements of the gradient;
    - "weight_unchanged": the share of elements whose stored value did not change, because the update was 0 or lost in
      rounding. It compares stored values after rounding: the weight with its split master, or the float32 master copy if
      there is one. 0.0 equals -0.0, and NaN counts as changed;
    - "weight_histogram", "gradient_histogram", "update_histogram": counts of values, [n_steps, n_parameters, 65].
      Bin 0 counts values below `edges[0]`, bin k values from `edges[k - 1]` to below `edges[k]`, and the last bin all larger
      values, infinity too. `edges` are the powers of 2 from 2^-28 to 4, their negatives, and 0 and 2^-126; bin 32, between
      the latter two, counts zeros. NaN is in no bin.

    The gradient is the input of the update rule, before clipping, decay and the like, which show in the update. Weights have
    the dtype of the arithmetic, from the master copy if there is one, and the update is taken before rounding to the
    weight's dtype, except in "weight_unchanged". All quantities are NaN for a parameter that a step skipped, or of which it
    updated only the rows of a sparse gradient. Squares are summed in float32 (float64 for float64 weights): sums are 0 for
    norms below 1e-22 and infinite above 1e19. Counts are exact up to 2^24 elements of a parameter.

    Args:
        every: record the first step and then every k-th one, >= 1; steps between cost nothing.
        size: the number of steps to keep, >= 1. Each takes up to 8 bytes for each parameter and quantity, 520 for each
            histogram.
        metrics: names of quantities, and your own metrics (see `tristep.kernels.metric`), whose sums or maxima become
            quantities.
        histograms: any of "weight", "gradient" and "update", to record histograms of. A step with a histogram takes up to
            several times as long: use a large `every`.

    Attributes:
        names: the names of the parameters, in the order of the arrays' columns; empty until a `Trainer` has it.
        quantities: the names of all recorded quantities.
        edges: the edges between the bins of histograms, float64 [64].
        is_recorders: whether a `viz.Recorder` has made it for itself; then a copy of the trainer is not recorded.

    Raises:
        TypeError, ValueError: an invalid argument, two quantities of one name, or nothing to record.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Linear(2, 1)
        >>> trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.5}, telemetry=tristep.Telemetry(every=2))
        >>> for _ in range(5):
        ...     trainer.zero_grad()
        ...     net(torch.ones(4, 2)).sum().backward()
        ...     trainer.step(batch_size=4)
        >>> trainer.telemetry.steps
        array([1, 3, 5])
        >>> trainer.telemetry["gradient_norm"]  # of weight, 2 ones, and bias, 1 one
        array([[1.41421354, 1.        ],
               [1.41421354, 1.        ],
               [1.41421354, 1.        ]])
    """

    QUANTITIES: tuple[str, ...] = tuple(_QUANTITIES)

    def __init__(
        self,
        every: int = 1,
        size: int = 1024,
        metrics: Iterable[str | Metric] = QUANTITIES,
        histograms: Iterable[str] = (),
    ) -> None:
        self.every = integer("every", every, 1)
        self.size = integer("size", size, 1)
        self._metrics = _checked_metrics(metrics)
        self._histograms = _checked_histograms(histograms)
        users = [metric for metric in self._metrics if isinstance(metric, Metric)]
        measured = [name for metric in self._metrics if isinstance(metric, str) for name in _QUANTITIES[metric][0]]
        parts = [getattr(builtin, name) for name in dict.fromkeys(measured)] + users
        parts += [builtin.histogram(what) for what in self._histograms]
        if not parts:
            raise ValueError("metrics and histograms are both empty: there is nothing to record")
        names = [[metric] if isinstance(metric, str) else metric.names for metric in self._metrics]
        self.quantities = (*itertools.chain(*names), *(f"{what}_histogram" for what in self._histograms))
        if twice := sorted({name for name in self.quantities if self.quantities.count(name) > 1}):
            raise ValueError(f"metrics: there are two quantities {twice[0]!r}: each needs a name of its own")
        self._measure = builtin.joined(*parts)
        self.names: list[str] = []
        self.edges = np.array(builtin.EDGES)
        self.is_recorders = False
        self._params: list[weakref.ref[torch.Tensor]] = []  # weak, so that a displayed run does not keep its model alive
        self._sizes = np.zeros(0)  # the numbers of elements of the parameters
        self._buffer: MetricsBuffer | None = None
        self._numbers = np.zeros(self.size + 1, dtype=np.int64)
        self._done = 0  # steps, recorded or not

    @property
    def steps(self) -> np.ndarray:
        """The optimizer's `num_update` after each recorded step that has arrived, int64 [n_steps]."""
        return self._step_numbers(self._arrived())

    def __len__(self) -> int:
        """The number of recorded steps that have arrived."""
        return len(self._arrived())

    def __getitem__(self, quantity: str) -> np.ndarray:
        """Return a quantity at the steps that have arrived, float64 [n_steps, n_parameters], or [..., 65] for a histogram.

        Raises:
            KeyError: the quantity is not recorded; the message lists the recorded ones.
        """
        if quantity not in self.quantities:
            raise KeyError(f"{quantity!r} is not recorded.{there_are(quantity, self.quantities)}")
        return self._all(self._arrived())[quantity]

    def read(self, after: int = 0) -> dict[str, np.ndarray]:
        """Return the arrays of all quantities, and "steps", consistently: all have the same steps.

        Args:
            after: leave out steps with numbers up to this one.
        """
        steps = self._arrived()
        first = int(np.searchsorted(self._step_numbers(steps), after, side="right"))
        return self._read(steps[first:])

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the quantities of the last step that has arrived, by name of the parameter; {} before the first step."""
        steps = self._arrived()[-1:]
        if not steps:
            return {}
        arrays = self._all(steps)
        return {
            name: {quantity: float(array[0, i]) if array.ndim == 2 else array[0, i] for quantity, array in arrays.items()}
            for i, name in enumerate(self.names)
        }

    @property
    def pending(self) -> bool:
        """Whether at least one recorded step is still on the device."""
        return self._buffer is not None and self._buffer.arrived().stop < self._buffer.count

    def flush(self) -> None:
        """Wait until all recorded steps have arrived."""
        if self._buffer is not None:
            self._buffer.arrived(wait=True)

    def __repr__(self) -> str:
        return f"Telemetry({len(self)} steps, {len(self.names)} parameters, {', '.join(self.quantities)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the settings without the steps. A copied trainer attaches the copy."""
        return Telemetry, (self.every, self.size, self._metrics, self._histograms)

    # Methods for the trainer, and for recorders.

    def _attach(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        attached = [ref() for ref in self._params]
        if attached and not (len(params) == len(attached) and all(map(operator.is_, params, attached))):
            raise ValueError("telemetry: this Telemetry belongs to another trainer; make one for each")
        self.names, self._params = list(names), [weakref.ref(param) for param in params]
        self._sizes = np.full(len(params), np.nan)

    def _begin(self) -> MetricsBuffer | None:
        """Return the buffer for the measurements of the coming step, or None if the step is not recorded."""
        if self._done % self.every:
            return None
        if self._buffer is None:
            self._buffer = MetricsBuffer(self._measure, len(self._params), self.size)
            self._measure_sizes()
        self._buffer.begin_step()
        return self._buffer

    def _end(self, into: MetricsBuffer | None, number: int) -> None:
        """End step number `number`, with the buffer that `_begin` returned."""
        if into is not None:
            place = into.count % len(self._numbers)
            if not into.end_step():
                return  # it updated nothing
            self._numbers[place] = number
        self._done += 1

    def _count(self) -> int:
        """The number of recorded steps so far, also those that have not arrived."""
        return 0 if self._buffer is None else self._buffer.count

    def _read_from(self, place: int) -> tuple[dict[str, np.ndarray], int]:
        """Return `read` of the recorded steps that have arrived, from number `place` on, and the place to read next.

        Places count from 0. Unlike the numbers of steps, they also grow when the trainer goes back to an earlier state.
        """
        arrived = self._arrived()
        steps = range(max(arrived.start, place), arrived.stop)
        return self._read(steps), max(place, arrived.stop)

    def _read(self, steps: range) -> dict[str, np.ndarray]:
        return {"steps": self._step_numbers(steps)} | self._all(steps)

    def _measure_sizes(self) -> None:
        for i, ref in enumerate(self._params):
            param = ref()
            if param is not None and not isinstance(param, torch.nn.UninitializedParameter):
                self._sizes[i] = param.numel()

    def _arrived(self) -> range:
        return range(0) if self._buffer is None else self._buffer.arrived()

    def _step_numbers(self, steps: range) -> np.ndarray:
        return self._numbers[np.arange(steps.start, steps.stop) % len(self._numbers)]

    def _all(self, steps: range) -> dict[str, np.ndarray]:
        names = self._measure.names
        if self._buffer is None:
            values = np.empty((0, len(self._params), len(names)))
        else:
            values = self._buffer.values(steps)
        by_name = {name: values[:, :, k] for k, name in enumerate(names)}
        self._measure_sizes()
        quantities = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for metric in self._metrics:
                if isinstance(metric, str):
                    quantities[metric] = _QUANTITIES[metric][1](by_name, self._sizes)
                else:
                    quantities |= {name: by_name[name] for name in metric.names}
        for what in self._histograms:
            first = names.index(f"{what}_from_0")
            quantities[f"{what}_histogram"] = builtin.bins_of(values[:, :, first : first + builtin.BINS])
        return quantities


def attached(
    telemetry: Any, optimizer: Optimizer, is_reported: bool, names: Sequence[str], params: Sequence[torch.Tensor]
) -> Telemetry | None:
    """Return a trainer's telemetry, attached to its parameters; None for None or False, a new one for True.

    `is_reported`: whether the updates see whole parameters. Raise if steps cannot be recorded; nothing has been changed.
    """
    attached: Any = Telemetry() if telemetry is True else telemetry
    if attached is None or attached is False:
        return None
    instance("telemetry", attached, Telemetry, "True, a Telemetry or None", shown=True)
    by_hand = [part for part in parts_of(optimizer) if not isinstance(part, RuleOptimizer)]
    if by_hand:
        raise TypeError(
            f"telemetry={telemetry!r} with {type(by_hand[0]).__name__}, which updates by hand: it needs an "
            "optimizer that is a rule, such as tristep's own; leave it out"
        )
    if not is_reported:
        raise ValueError(
            f"telemetry={telemetry!r} where each process updates its share of the weights, and sees pieces of them: "
            "make the trainer with update_on_kvstore=False"
        )
    attached._attach(names, params)
    return attached


def _checked_metrics(metrics: Any) -> tuple[str | Metric, ...]:
    if isinstance(metrics, (str, Metric)) or not isinstance(metrics, Iterable):
        raise TypeError(f"metrics={metrics!r}: must be a list of names and metrics")
    metrics = tuple(metrics)
    for metric in metrics:
        if not isinstance(metric, (str, Metric)):
            raise TypeError(f"metrics has {metric!r}: must be a name or made with @metric, not {type(metric).__name__}")
        if isinstance(metric, str):
            choice("metrics", metric, _QUANTITIES)
    return metrics


def _checked_histograms(histograms: Any) -> tuple[str, ...]:
    if isinstance(histograms, str) or not isinstance(histograms, Iterable):
        raise TypeError(f"histograms={histograms!r}: must be a list of names, such as ['gradient']")
    names = [choice("histograms", name, ("weight", "gradient", "update")) for name in histograms]
    return tuple(dict.fromkeys(names))
