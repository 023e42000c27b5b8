"""Telemetry: what each step did to each parameter, computed by the update itself and stored for the last steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels import Metric, MetricsBuffer
from ..kernels import metrics as known
from .optimizer import Optimizer, RuleOptimizer
from .optimizer.multi import parts_of
from .validation import choice, did_you_mean, integer

_Values = dict[str, np.ndarray]  # by the names of measured values, each [n_steps, n_tensors]


def _root(name: str) -> Callable[[_Values, np.ndarray], np.ndarray]:
    return lambda found, sizes: np.sqrt(found[name])


def _itself(name: str) -> Callable[[_Values, np.ndarray], np.ndarray]:
    return lambda found, sizes: found[name]


def _ratio(found: _Values, sizes: np.ndarray) -> np.ndarray:
    return np.sqrt(found["update_square"]) / np.sqrt(found["weight_square"])


def _cosine(found: _Values, sizes: np.ndarray) -> np.ndarray:
    lengths = np.sqrt(found["gradient_square"]) * np.sqrt(found["update_square"])
    return found["gradient_times_update"] / lengths


def _share(name: str) -> Callable[[_Values, np.ndarray], np.ndarray]:
    return lambda found, sizes: found[name] / sizes


# What is measured for each quantity, and how it is made of that.
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
    """What the last steps of a `Trainer` did to each parameter, as arrays of [n_steps, n_parameters].

    The update computes it from the weights, gradients and new weights that it has loaded; nothing is read a second
    time, and the weights have the same bits as without it. On a GPU results are copied to the host asynchronously: a step
    never waits for them, and neither does reading, which returns what has arrived. `flush` waits for all.

    Quantities, for each parameter:

    - "weight_norm", "gradient_norm", "update_norm": Euclidean norms of the weight before the step, of the gradient divided
      by the batch size, and of what the step added to the weight;
    - "weight_absmax", "gradient_absmax", "update_absmax": the largest absolute values of these; NaN if one of them is that;
    - "update_ratio": the norm of the update over that of the weight;
    - "cosine": of the angle between gradient and update, -1 for a plain step of gradient descent, NaN if one of them is 0;
    - "gradient_zeros": the share of zeros among the gradient's elements;
    - "gradient_nonfinite": how many of these are infinite or NaN;
    - "weight_unchanged": the share of elements that are stored as they were, because the update was 0 or lost in rounding.
      Compared is what is in memory, after rounding: the weight together with a split master or Kahan's compensation; if
      there is a float32 master copy, that copy. 0.0 and -0.0 are equal, and NaN counts as changed;
    - "weight_histogram", "gradient_histogram", "update_histogram": counts of values, [n_steps, n_parameters, 65].
      Bin 0 has those below `edges[0]`, bin k those from `edges[k - 1]` to below `edges[k]`, and the last one the rest,
      infinities too. `edges` are the powers of 2 from 2^-28 to 4, those with a minus before them, and 0 and 2^-126: between
      these is bin 32, the one of zeros. NaN is in none.

    The gradient is the rule's input: clipping, decay and the like come later and show in the update. Weights are in the
    arithmetic's type, those of the master copy if there is one, and the update is taken before rounding to the weight's
    type, but for "weight_unchanged". All is NaN for a parameter that a step skipped, or of whose sparse gradient it used
    rows only. Sums of squares are added up in float32 (float64 for float64 weights): they are 0 for norms below 1e-22 and
    infinite above 1e19. Counts are exact up to 2^24 elements of a parameter.

    Args:
        every: record the first step and then each k-th; those between cost nothing.
        size: steps to keep. Each takes up to 8 bytes for each parameter and quantity, 520 for each histogram.
        metrics: names of quantities, and your own metrics (see `tristep.kernels.metric`), whose values' sums or
            maxima are quantities then.
        histograms: which of "weight", "gradient" and "update" to have a histogram of. A step that computes one takes up to
            several times as long: record only some.

    Attributes:
        names: of the parameters, in the order of the arrays' columns; empty before it is given to a `Trainer`.
        quantities: the names of all that is recorded.
        edges: float64 [64], between the bins of histograms.
        is_recorders: whether a `viz.Recorder` has made it for itself; a copy of the trainer is not recorded then.

    Raises:
        TypeError, ValueError: an argument that does not fit.

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
        self._wanted = _wanted(metrics)
        self._histograms = _histograms(histograms)
        own = [measure for measure in self._wanted if isinstance(measure, Metric)]
        basic = [name for wanted in self._wanted if isinstance(wanted, str) for name in _QUANTITIES[wanted][0]]
        parts = [getattr(known, name) for name in dict.fromkeys(basic)] + own
        parts += [known.histogram(what) for what in self._histograms]
        if not parts:
            raise ValueError("metrics and histograms are both empty: there is nothing to record")
        named = [wanted if isinstance(wanted, str) else wanted.names for wanted in self._wanted]
        self.quantities = tuple(name for each in named for name in ([each] if isinstance(each, str) else each))
        self.quantities += tuple(f"{what}_histogram" for what in self._histograms)
        if twice := sorted({name for name in self.quantities if self.quantities.count(name) > 1}):
            raise ValueError(f"metrics: there are two quantities {twice[0]!r}: each needs a name of its own")
        self._measure = known.joined(*parts)
        self.names: list[str] = []
        self.edges = np.array(known.EDGES)
        self.is_recorders = False
        self._params: list[weakref.ref[torch.Tensor]] = []  # what is displayed of a run must not keep its model
        self._sizes = np.zeros(0)  # of the parameters
        self._found: MetricsBuffer | None = None
        self._numbers = np.zeros(self.size + 1, dtype=np.int64)
        self._done = 0  # steps, recorded or not

    @property
    def steps(self) -> np.ndarray:
        """int64 [n_steps]: which steps were recorded, by the optimizer's `num_update` after each, of those that arrived."""
        return self._step_numbers(self._arrived())

    def __len__(self) -> int:
        """How many steps can be read now."""
        return len(self._arrived())

    def __getitem__(self, quantity: str) -> np.ndarray:
        """float64 [n_steps, n_parameters], or [n_steps, n_parameters, 65] of a histogram, of the steps that arrived.

        Raises:
            KeyError: it is not recorded; the message says what is.
        """
        if quantity not in self.quantities:
            hint = did_you_mean(str(quantity), self.quantities)
            raise KeyError(f"{quantity!r} is not recorded: these are {', '.join(map(repr, self.quantities))}.{hint}")
        return self._all(self._arrived())[quantity]

    def read(self, after: int = 0) -> dict[str, np.ndarray]:
        """All arrays by quantity, and "steps", of one moment: a step that arrives meanwhile is in none of them.

        Args:
            after: leave out the steps up to this one, which have been read before, say.
        """
        steps = self._arrived()
        numbers = self._step_numbers(steps)
        known = int(np.searchsorted(numbers, after, side="right"))
        return {"steps": numbers[known:]} | self._all(steps[known:])

    def latest(self) -> dict[str, dict[str, Any]]:
        """The quantities of the last step that arrived, by name of the parameter; empty before the first."""
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
        """Whether steps that were recorded have not arrived yet."""
        return self._found is not None and self._found.arrived().stop < self._found.count

    def flush(self) -> None:
        """Wait until all recorded steps have arrived."""
        if self._found is not None:
            self._found.arrived(wait=True)

    def __repr__(self) -> str:
        return f"Telemetry({len(self)} steps, {len(self.names)} parameters, {', '.join(self.quantities)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as of a trainer that is pickled, has the settings and no steps. The trainer attaches it."""
        return Telemetry, (self.every, self.size, self._wanted, self._histograms)

    # What follows is for the trainer.

    def _attach(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        known = [ref() for ref in self._params]
        if known and not (len(params) == len(known) and all(map(operator.is_, params, known))):
            raise ValueError("telemetry: this Telemetry belongs to another trainer; make one for each")
        self.names, self._params = list(names), [weakref.ref(param) for param in params]
        self._sizes = np.full(len(params), np.nan)

    def _begin(self) -> MetricsBuffer | None:
        """Where the coming step is to put what it measures, or None if it is not to be recorded."""
        if self._done % self.every:
            return None
        if self._found is None:
            self._found = MetricsBuffer(self._measure, len(self._params), self.size)
            self._measure_sizes()
        self._found.begin_step()
        return self._found

    def _end(self, into: MetricsBuffer | None, number: int) -> None:
        """The step is over; `number` is its number."""
        if into is not None:
            place = into.count % len(self._numbers)
            if not into.end_step():
                return  # it updated nothing
            self._numbers[place] = number
        self._done += 1

    def _measure_sizes(self) -> None:
        for i, ref in enumerate(self._params):
            param = ref()
            if param is not None and not isinstance(param, torch.nn.UninitializedParameter):
                self._sizes[i] = param.numel()

    def _arrived(self) -> range:
        return range(0) if self._found is None else self._found.arrived()

    def _step_numbers(self, steps: range) -> np.ndarray:
        return self._numbers[np.arange(steps.start, steps.stop) % len(self._numbers)]

    def _all(self, steps: range) -> dict[str, np.ndarray]:
        names = self._measure.names
        if self._found is None:
            values = np.empty((0, len(self._params), len(names)))
        else:
            values = self._found.values(steps)
        found = {name: values[:, :, k] for k, name in enumerate(names)}
        self._measure_sizes()
        sizes = self._sizes
        result = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for wanted in self._wanted:
                if isinstance(wanted, str):
                    result[wanted] = _QUANTITIES[wanted][1](found, sizes)
                else:
                    result |= {name: found[name] for name in wanted.names}
        for what in self._histograms:
            first = names.index(f"{what}_from_0")
            result[f"{what}_histogram"] = known.bins_of(values[:, :, first : first + known.BINS])
        return result


def attached(
    telemetry: Any, optimizer: Optimizer, is_reported: bool, names: Sequence[str], params: Sequence[torch.Tensor]
) -> Telemetry | None:
    """The telemetry that a trainer asks for, attached to its parameters.

    Args:
        telemetry: True, a `Telemetry`, or None or False for none.
        optimizer, names, params: those of the trainer.
        is_reported: whether its updates see whole parameters.

    Raises:
        TypeError, ValueError: it cannot be; nothing has been changed.
    """
    wanted: Any = Telemetry() if telemetry is True else telemetry
    if wanted is None or wanted is False:
        return None
    if not isinstance(wanted, Telemetry):
        raise TypeError(f"telemetry={wanted!r}: must be True, a Telemetry or None, not {type(wanted).__name__}")
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
    wanted._attach(names, params)
    return wanted


def _wanted(metrics: Any) -> tuple[str | Metric, ...]:
    if isinstance(metrics, (str, Metric)) or not isinstance(metrics, Iterable):
        raise TypeError(f"metrics={metrics!r}: must be a list of names and metrics")
    wanted = tuple(metrics)
    for each in wanted:
        if not isinstance(each, (str, Metric)):
            raise TypeError(f"metrics has {each!r}: must be a name or made with @metric, not {type(each).__name__}")
        if isinstance(each, str):
            choice("metrics", each, _QUANTITIES)
    return wanted


def _histograms(histograms: Any) -> tuple[str, ...]:
    if isinstance(histograms, str) or not isinstance(histograms, Iterable):
        raise TypeError(f"histograms={histograms!r}: must be a list of names, such as ['gradient']")
    names = [choice("histograms", each, ("weight", "gradient", "update")) for each in histograms]
    return tuple(dict.fromkeys(names))
