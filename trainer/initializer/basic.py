"""Initializers that need only the shape of a weight: constants, random distributions, Xavier, bilinear, ..."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..validation import choice, int_or_float, number
from .base import InitDesc, Initializer, alias, draw, needs, register


@alias("zeros")
@register
class Zero(Initializer):
    """Initializer that fills weights with 0.

    Source: MXNet 1.9.1, `Zero`.

    >>> w = torch.ones(2)
    >>> Zero()("fc_weight", w)
    >>> w
    tensor([0., 0.])
    """

    def __init__(self) -> None:
        super().__init__()

    _init_weight = Initializer._init_zero


@alias("ones")
@register
class One(Initializer):
    """Initializer that fills weights with 1.

    Source: MXNet 1.9.1, `One`.

    >>> w = torch.zeros(2)
    >>> One()("fc_weight", w)
    >>> w
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        super().__init__()

    _init_weight = Initializer._init_one


@register
class Constant(Initializer):
    """Initializer that fills weights with a given number or array.

    Args:
        value: a number; or a tensor, NumPy array or nested list of numbers, broadcast to the weight's shape.

    Raises:
        TypeError: `value` does not consist of numbers.
        ValueError: when called, `value` cannot be broadcast to the shape of the weight.

    Source: MXNet 1.9.1, `Constant`.

    >>> w = torch.zeros(2, 3)
    >>> Constant([1, 2, 3])("fc_weight", w)
    >>> w
    tensor([[1., 2., 3.],
            [1., 2., 3.]])
    """

    def __init__(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().double().numpy()
        if np.ndim(value):
            array = np.asarray(value)
            if array.dtype.kind not in "fiu":
                raise TypeError(f"value={value!r}: must be a number or an array of numbers")
            value = array.tolist()
        else:
            value = int_or_float("value", value)
        super().__init__(value=value)
        self.value = value

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        values = torch.as_tensor(self.value, dtype=torch.float64)
        try:
            expanded = values.expand(arr.shape)
        except RuntimeError:
            raise ValueError(
                f"parameter {str(name)!r}: has shape {tuple(arr.shape)}, to which a value of shape {tuple(values.shape)} "
                "does not expand: give Constant a number, or an array of the parameter's shape"
            ) from None
        arr.copy_(expanded)


@register
class Uniform(Initializer):
    """Initializer that draws weights uniformly between -scale and scale; the default of `initialize`.

    Args:
        scale: the largest absolute value of a weight, >= 0.

    Source: MXNet 1.9.1, `Uniform`.

    >>> w = torch.zeros(100)
    >>> Uniform(0.5)("fc_weight", w)
    >>> bool(w.abs().max() <= 0.5)
    True
    """

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = int_or_float("scale", scale, low=0)
        super().__init__(scale=self.scale)

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        arr.copy_(draw(name, arr, arr.shape, "uniform", self.scale))


@register
class Normal(Initializer):
    """Initializer that draws weights from the normal distribution with mean 0.

    Args:
        sigma: the standard deviation of the distribution, >= 0.

    Source: MXNet 1.9.1, `Normal`.

    >>> w = torch.zeros(100)
    >>> Normal(sigma=2)("fc_weight", w)
    >>> 1 < float(w.std()) < 3
    True
    """

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = int_or_float("sigma", sigma, low=0)
        super().__init__(sigma=self.sigma)

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        arr.copy_(draw(name, arr, arr.shape, "normal", self.sigma))


@register
class Orthogonal(Initializer):
    """Initializer that draws weights with orthogonal rows, or orthogonal columns where there are fewer columns.

    The weight is treated as a matrix W with shape[0] rows. If it has at most as many rows as columns, W W^T = scale^2 I,
    otherwise W^T W = scale^2 I. W is `scale` times the factor U or V of the singular value decomposition U S V of a random
    matrix, with random signs. (Without random signs, as in MXNet, all 2 × 2 matrices would be reflections.) The time grows
    with the cube of the shorter side: about a second for 1000.

    Args:
        scale: the norm of each orthogonal row or column.
        rand_type: distribution of the random matrix, "uniform" between -1 and 1, or "normal".

    Raises:
        ValueError: when called, the weight has no dimension.

    Source: Saxe, McClelland and Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks" (2014); MXNet 1.9.1, `Orthogonal`.

    >>> w = torch.zeros(2, 3)
    >>> Orthogonal(scale=1)("fc_weight", w)
    >>> torch.allclose(w @ w.T, torch.eye(2), atol=1e-6)
    True
    """

    def __init__(self, scale: float = 1.414, rand_type: str = "uniform") -> None:
        self.scale = int_or_float("scale", scale)
        self.rand_type = choice("rand_type", rand_type, ("uniform", "normal"))
        super().__init__(scale=self.scale, rand_type=rand_type)

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        needs(arr.dim() > 0, name, arr, "but Orthogonal needs rows: give it another initializer")
        if arr.numel() == 0:
            return
        shape = (arr.shape[0], arr.numel() // arr.shape[0])
        matrix = draw(name, arr, shape, self.rand_type, 1.0)
        if matrix.device.type != "mps":  # which has no float64
            matrix = matrix.double()
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        signs = torch.where(draw(name, arr, (min(shape),), "uniform", 1.0) < 0, -self.scale, self.scale)
        arr.copy_((left * signs if left.shape == shape else right * signs[:, None]).reshape(arr.shape))


@register
class Xavier(Initializer):
    """Initializer that draws weights at a scale that preserves the variance of activations and gradients across layers.

    The distribution is, with magnitude and factor chosen by the arguments, ::

        uniform     U(-s, s)     s = sqrt(magnitude / factor)
        gaussian    N(0, s^2)
        factor      (fan_in + fan_out) / 2, fan_in or fan_out, for "avg", "in" and "out"
        fan_in      shape[1] * product of shape[2:]
        fan_out     shape[0] * product of shape[2:]

    These formulas fit linear and convolution layers, whose weights have the shape (out, in, ...) in torch and in MXNet.
    Transposed convolutions have the shape (in, out, ...) in both, so for them the two fans are swapped.

    Args:
        rnd_type: the distribution, "uniform" or "gaussian".
        factor_type: what the variance is divided by: "avg" for the mean of both fans, "in" for fan_in, "out" for fan_out.
        magnitude: multiplier of the variance, > 0. The paper has 3 with "uniform", and 1 with "gaussian".

    Raises:
        ValueError: when called, the weight has fewer than two dimensions.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks" (2010),
    equation 16; MXNet 1.9.1, `Xavier`.

    >>> w = torch.zeros(6, 4)
    >>> Xavier(factor_type="in", magnitude=1)("fc_weight", w)
    >>> bool(w.abs().max() <= 0.5)
    True
    """

    def __init__(self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3) -> None:
        self.rnd_type = choice("rnd_type", rnd_type, ("uniform", "gaussian"))
        self.factor_type = choice("factor_type", factor_type, ("avg", "in", "out"))
        self.magnitude = number("magnitude", magnitude, above=0)
        super().__init__(rnd_type=rnd_type, factor_type=factor_type, magnitude=int_or_float("magnitude", magnitude))

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        what = f"but {type(self).__name__} needs two dimensions or more, to know how many inputs and outputs there are"
        needs(arr.dim() > 1, name, arr, f"{what}: give the parameter an initializer of its own (parameter.init = 'uniform')")
        if arr.numel() == 0:
            return
        size = math.prod(arr.shape[2:])
        fan_out, fan_in = (side * size for side in arr.shape[:2])
        factor = {"avg": (fan_in + fan_out) / 2, "in": fan_in, "out": fan_out}[self.factor_type]
        kind = "uniform" if self.rnd_type == "uniform" else "normal"
        arr.copy_(draw(name, arr, arr.shape, kind, math.sqrt(self.magnitude / factor)))


@register
class MSRAPrelu(Xavier):
    """He initializer for layers followed by ReLU or PReLU: :class:`Xavier` "gaussian" with magnitude 2 / (1 + slope^2).

    Args:
        factor_type: what the variance is divided by: "avg" for the mean of fan_in and fan_out, "in" or "out" for one.
        slope: the initial slope of PReLU for negative inputs; 0 stands for ReLU.

    Raises:
        ValueError: when called, the weight has fewer than two dimensions.

    Source: He et al., "Delving deep into rectifiers" (2015), equation 15; MXNet 1.9.1, `MSRAPrelu`.

    >>> MSRAPrelu(slope=0).magnitude
    2.0
    """

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2.0 / (1 + number("slope", slope) ** 2))
        self.slope = int_or_float("slope", slope)
        self._kwargs = {"factor_type": factor_type, "slope": self.slope}


@register
class Bilinear(Initializer):
    """Initializer that makes a transposed convolution upsample images by bilinear interpolation.

    At row y and column x of every plane, the weight is ::

        (1 - |x / f - c|) * (1 - |y / f - c|)
        f = ceil(width / 2),  c = (2 f - 1 - f mod 2) / (2 f)

    Raises:
        ValueError: when called, the weight is not four-dimensional.

    Source: MXNet 1.9.1, `Bilinear`, which uses f and c of the width for both axes; Long, Shelhamer and Darrell, "Fully
    convolutional networks for semantic segmentation" (2015), section 3.3.

    >>> w = torch.zeros(1, 1, 1, 4)
    >>> Bilinear()("up_weight", w)
    >>> w.flatten().tolist()
    [0.0625, 0.1875, 0.1875, 0.0625]
    """

    def __init__(self) -> None:
        super().__init__()

    def _init_weight(self, name: InitDesc, arr: torch.Tensor) -> None:
        what = "but Bilinear is for four dimensions, as in a 2-d (transposed) convolution"
        needs(arr.dim() == 4, name, arr, f"{what}: give other parameters another one, by Mixed or by parameter.init")
        half = math.ceil(arr.shape[3] / 2)
        if half == 0:
            return
        centre = (2 * half - 1 - half % 2) / (2.0 * half)
        rows, columns = (1 - np.abs(np.arange(side) / half - centre) for side in arr.shape[2:])
        arr.copy_(torch.from_numpy(rows[:, None] * columns))
