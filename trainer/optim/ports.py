"""torch.optim's optimizers with fused steps: arguments, defaults, numbers and `state_dict` are torch's.

Each class derives from torch's, with another `step`; the rule and its hyper-parameters follow from a group's options and the
step counts of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ...kernels import Rule, TensorRule, rules
from ...kernels.rules.muon import Orthogonalization
from ..optimizer.adam_variants import rectified
from ..optimizer.adaptive import bias_correction, nesterov_momentum
from ..optimizer.muon import DTYPES, checked_coefficients, dtype_of, triples_of
from ..optimizer.row_splits import check_rows, checked_blocks
from ..validation import choice
from .base import FusedOptimizer
from .groups import Group, Numbers, name_of

_TorchAdam = torch.optim.Adam  # by another name, because a user may set `torch.optim.Adam` to the class below


class _NoMuon(torch.optim.Optimizer):
    """The base of `Muon` where torch has none."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise RuntimeError(
            f"tristep.optim.Muon is torch.optim.Muon, which torch 2.9 brought, and this is torch {torch.__version__}: "
            "update torch, or use tristep.optim.as_torch(tristep.optimizer.Muon)"
        )


if TYPE_CHECKING:
    from torch.optim import Muon as _TorchMuon
else:
    _TorchMuon = getattr(torch.optim, "Muon", _NoMuon)

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
]


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with a fused step. Without momentum and decay, sparse gradients update their rows only.

    Args:
        state_dtype: the storage of the momentum: None or "float32", "bfloat16", "8bit" or "4bit"; see
            `tristep.optimizer.RuleOptimizer`. A group may have its own.
        state_device: "cpu" keeps the momentum of a GPU's parameters in memory of the host; see there. A group may have its
            own. Other arguments are torch's.
    """

    _keys: ClassVar = {"mom": "momentum_buffer"}
    _shown = ()
    _takes_sparse = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str | None = None,
        state_device: str | None = None,
    ) -> None:
        self._storage = {"state_dtype": state_dtype, "state_device": state_device}
        switches: Any = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **switches)

    def _rule(self, group: Group) -> Rule:
        return rules.heavy_ball if group["momentum"] else rules.sgd

    def _initial_numbers(self, group: Group, parameters: Sequence[torch.Tensor]) -> Mapping[str, float | Sequence[float]]:
        rows = [self.state.get(parameter, {}) for parameter in parameters]
        return {"step": [0.0 if row.get("momentum_buffer") is None else 1.0 for row in rows]}

    def _by_row(self, group: Group) -> bool:
        return not group["momentum"] and not group["weight_decay"]

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        return {
            "lr": float(group["lr"]),
            "wd": float(group["weight_decay"]),
            "momentum": momentum,
            "share": 1.0 if numbers["step"] == 1 else 1.0 - group["dampening"],
            "of_gradient": float(nesterov),
            "of_momentum": momentum if nesterov else 1.0,
        }


class Adam(FusedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with a fused step.

    Averages of bfloat16 and float16 parameters are float32, where torch's have the parameters' dtype. The parameters
    themselves are rounded to nearest as torch's are, so an update of less than half their last digit is lost;
    `as_torch(tristep.optimizer.Adam)` has options against that, such as `multi_precision` and `stochastic_rounding`.

    Args:
        state_dtype: the storage of the averages: None or "float32", "bfloat16", "8bit" or "4bit"; see
            `tristep.optimizer.RuleOptimizer`. A group may have its own.
        state_device: "cpu" keeps the averages of a GPU's parameters in memory of the host; see there. A group may have its
            own. Other arguments are torch's.
    """

    _keys: ClassVar = {"mean": "exp_avg", "var": "exp_avg_sq", "largest": "max_exp_avg_sq"}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: str | None = None,
        state_device: str | None = None,
    ) -> None:
        self._storage = {"state_dtype": state_dtype, "state_device": state_device}
        switches: Any = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused}
        switches |= {"capturable": capturable, "decoupled_weight_decay": decoupled_weight_decay}
        _TorchAdam.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, **switches)  # AdamW's, too

    def _rule(self, group: Group) -> Rule:
        if group["amsgrad"]:
            return rules.amsgrad
        return rules.adamw if group["decoupled_weight_decay"] else rules.adam

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, (beta1, beta2), t = float(group["lr"]), map(float, group["betas"]), int(numbers["step"])
        root = math.sqrt(1.0 - beta2**t)
        return {
            "lr": lr * (root / (1.0 - beta1**t)),
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": group["eps"] * root,  # torch adds it to the corrected root; here the learning rate has the correction
            **_decay(group, lr),
        }


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with a fused step.

    Averages of bfloat16 and float16 parameters are float32, where torch's have the parameters' dtype. The parameters
    themselves are rounded to nearest as torch's are, so an update of less than half their last digit is lost;
    `as_torch(tristep.optimizer.AdamW)` has options against that, such as `multi_precision` and `stochastic_rounding`.

    Args:
        state_dtype: the storage of the averages: None or "float32", "bfloat16", "8bit" or "4bit"; see
            `tristep.optimizer.RuleOptimizer`. A group may have its own.
        state_device: "cpu" keeps the averages of a GPU's parameters in memory of the host; see there. A group may have its
            own. Other arguments are torch's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str | None = None,
        state_device: str | None = None,
    ) -> None:
        switches: Any = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused}
        more: Any = {"capturable": capturable, "decoupled_weight_decay": True}
        more |= {"state_dtype": state_dtype, "state_device": state_device}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **switches, **more)


class SparseAdam(FusedOptimizer, torch.optim.SparseAdam):
    """`torch.optim.SparseAdam` with a fused step, which updates only the rows of a sparse gradient."""

    _keys: ClassVar = Adam._keys
    _counts_exactly = True
    _takes_sparse = True

    def _rule(self, group: Group) -> Rule:
        return rules.adam

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        (beta1, beta2), t = map(float, group["betas"]), int(numbers["step"])
        rate = float(group["lr"]) * bias_correction(beta1, beta2, t)
        return {"lr": rate, "wd": 0.0, "beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}

    def step(self, closure: Any = None) -> Any:
        """Update the rows of all parameters that have a sparse gradient, as torch's `SparseAdam` does.

        Args:
            closure: a function that evaluates the model again and returns the loss; or None.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: a gradient is dense; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for k, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    raise RuntimeError(
                        f"the gradient of {name_of(group, k)} is dense, which SparseAdam does not support: use Adam for it"
                    )
        super().step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states in torch's format, with integer step counts: with tensors torch computes in float32."""
        saved = super().state_dict()
        for key, row in saved.get("state", {}).items():  # hooks may have changed all of it
            if isinstance(row, dict) and "step" in row:
                saved["state"][key] = {**row, "step": int(row["step"])}
        return saved


class NAdam(FusedOptimizer, torch.optim.NAdam):
    """`torch.optim.NAdam` with a fused step."""

    _keys: ClassVar = Adam._keys
    _shown = ("step", "mu_product")

    def _rule(self, group: Group) -> Rule:
        return rules.nadam

    def _initial_numbers(self, group: Group, parameters: Sequence[torch.Tensor]) -> Mapping[str, float | Sequence[float]]:
        return {"step": 0.0, "mu_product": 1.0}

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, (beta1, beta2), t = float(group["lr"]), map(float, group["betas"]), int(numbers["step"])
        now, following = (nesterov_momentum(beta1, group["momentum_decay"], n) for n in (t, t + 1))
        numbers["mu_product"] = numbers["mu_product"] * now
        product = float(numbers["mu_product"])
        return {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": group["eps"],
            "of_gradient": (1.0 - now) / (1.0 - product),
            "of_mean": following / (1.0 - product * following),
            **_decay(group, lr),
        }


class RAdam(FusedOptimizer, torch.optim.RAdam):
    """`torch.optim.RAdam` with a fused step."""

    _keys: ClassVar = Adam._keys

    def _rule(self, group: Group) -> Rule:
        return rules.radam

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, (beta1, beta2), t = float(group["lr"]), map(float, group["betas"]), int(numbers["step"])
        averages = {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}
        return rectified(lr, beta1, beta2, t) | averages | _decay(group, lr)


class Adamax(FusedOptimizer, torch.optim.Adamax):
    """`torch.optim.Adamax` with a fused step."""

    _keys: ClassVar = {"mean": "exp_avg", "largest": "exp_inf"}

    def _rule(self, group: Group) -> Rule:
        return rules.adamax

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        beta1, beta2 = map(float, group["betas"])
        rate = float(group["lr"]) / (1.0 - beta1 ** int(numbers["step"]))
        return {"lr": rate, "wd": group["weight_decay"], "beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad` with a fused step. Sparse gradients update their rows only."""

    _keys: ClassVar = {"history": "sum"}
    _takes_sparse = True

    def _rule(self, group: Group) -> Rule:
        return rules.adagrad

    def _by_row(self, group: Group) -> bool:
        if group["weight_decay"]:
            raise RuntimeError(
                f"weight_decay={group['weight_decay']}: Adagrad does not decay parameters whose gradients are sparse, so "
                "it must be 0"
            )
        return True

    def _initialize_states(self, group: Group, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        states["history"].fill_(group["initial_accumulator_value"])

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        rate = float(group["lr"]) / (1.0 + (float(numbers["step"]) - 1.0) * group["lr_decay"])
        wd, eps = group["weight_decay"], group["eps"]
        return {"lr": rate, "wd": wd, "decay": 0.0, "epsilon": 0.0, "epsilon_outside": eps}


class Adadelta(FusedOptimizer, torch.optim.Adadelta):
    """`torch.optim.Adadelta` with a fused step."""

    _keys: ClassVar = {"square": "square_avg", "step_square": "acc_delta"}

    def _rule(self, group: Group) -> Rule:
        return rules.adadelta

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, wd = float(group["lr"]), group["weight_decay"]
        return {"lr": lr, "wd": wd, "decay": 0.0, "rho": group["rho"], "epsilon": group["eps"]}


class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with a fused step."""

    _keys: ClassVar = {"n": "square_avg", "mean": "grad_avg", "delta": "momentum_buffer"}

    def _rule(self, group: Group) -> Rule:
        if group["momentum"] > 0:
            return rules.rmsprop_centered if group["centered"] else rules.rmsprop_momentum
        return rules.rmsprop_variance if group["centered"] else rules.rmsprop

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr = float(group["lr"])
        return {
            "lr": lr,
            "wd": group["weight_decay"],
            "gamma1": group["alpha"],
            "epsilon": 0.0,
            "epsilon_outside": group["eps"],
            "clip_weights": math.inf,
            "gamma2": group["momentum"],
            "of_gradient": 1.0,
            "of_delta": -lr,
        }


class ASGD(FusedOptimizer, torch.optim.ASGD):
    """`torch.optim.ASGD` with a fused step. As in torch, a changed learning rate takes effect one step later."""

    _keys: ClassVar = {"average": "ax"}
    _shown = ("step", "eta", "mu")

    def _rule(self, group: Group) -> Rule:
        return rules.asgd

    def _initial_numbers(self, group: Group, parameters: Sequence[torch.Tensor]) -> Mapping[str, float | Sequence[float]]:
        return {"step": 0.0, "eta": float(group["lr"]), "mu": 1.0}

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, lambd, t = float(group["lr"]), group["lambd"], float(numbers["step"])
        rate, share = float(numbers["eta"]), float(numbers["mu"])
        numbers["eta"] = lr / (1.0 + lambd * lr * t) ** group["alpha"]
        numbers["mu"] = 1.0 / max(1.0, t - group["t0"])
        return {"lr": rate, "wd": group["weight_decay"], "decay": rate * lambd, "share": share}


class Rprop(FusedOptimizer, torch.optim.Rprop):
    """`torch.optim.Rprop` with a fused step."""

    _keys: ClassVar = {"previous": "prev", "size": "step_size"}

    def _rule(self, group: Group) -> Rule:
        return rules.rprop

    def _initialize_states(self, group: Group, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        states["size"].fill_(float(group["lr"]))

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        (shrink, grow), (smallest, largest) = group["etas"], group["step_sizes"]
        # torch takes steps at a rate of 0, too.
        return {"lr": 1.0, "shrink": shrink, "grow": grow, "smallest": smallest, "largest": largest}


class Adafactor(FusedOptimizer, torch.optim.Adafactor):
    """`torch.optim.Adafactor` on tristep's rule."""

    _keys: ClassVar = {"row": "row_var", "column": "col_var", "var": "variance"}
    _takes_complex = False

    def _rule(self, group: Group) -> TensorRule:
        return rules.adafactor

    def _initial_numbers(self, group: Group, parameters: Sequence[torch.Tensor]) -> Mapping[str, float | Sequence[float]]:
        return {"step": 0.0, "epsilon": [torch.finfo(parameter.dtype).eps for parameter in parameters]}

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, t, (epsilon1, epsilon2) = float(group["lr"]), float(numbers["step"]), group["eps"]
        return {
            "lr": min(lr, 1.0 / math.sqrt(t)),
            "decay": lr * group["weight_decay"],
            "new": t ** group["beta2_decay"],
            "epsilon1": float(numbers["epsilon"]) if epsilon1 is None else epsilon1,
            "epsilon2": epsilon2,
            "limit": group["d"],
        }


class Muon(FusedOptimizer, _TorchMuon):
    """`torch.optim.Muon` on tristep's rule, for matrices only; `tristep.optimizer.Muon` takes all tensors.

    `ns_coefficients` may also be the name of a list, such as "polar_express", or a list of triples, one for each step;
    `ns_steps` may be None, for as many steps as the list has. A group may have options that torch does not have, see
    `tristep.optimizer.Muon`: "gram", by default False, and "iteration_dtype", by default "bfloat16", with which numbers are
    torch's up to rounding (None chooses the fastest, or most accurate, for each matrix); "split", a number of equal blocks
    of rows, a list of their rows, or a pattern of rows; "state_dtype" and "state_device".
    """

    _keys: ClassVar = {"mean": "momentum_buffer"}
    _shown = ()
    _takes_complex = False

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        orthogonalization = _orthogonalization(group)
        for k, parameter in enumerate(group["params"]):
            if (blocks := orthogonalization.splits[0]) != () and parameter.dim() == 2:
                check_rows("split", blocks, name_of(group, k), parameter.shape, len(parameter))

    def _check(self, name: str, parameter: torch.Tensor) -> None:
        super()._check(name, parameter)
        if parameter.dim() != 2:
            shape = tuple(parameter.shape)
            raise ValueError(f"Muon only supports 2D parameters, but {name} has shape {shape}: use AdamW for the others")

    def _rule(self, group: Group) -> TensorRule:
        return rules.muon_with(_orthogonalization(group))

    def _hyper(self, group: Group, numbers: Numbers) -> dict[str, float]:
        lr, momentum, nesterov = float(group["lr"]), group["momentum"], group["nesterov"]
        unused = dict.fromkeys(("adam_lr", "adam_decay", "beta1", "beta2", "adam_epsilon"), 0.0)  # for other tensors
        return unused | {
            "lr": lr,
            "decay": lr * group["weight_decay"],
            "momentum": momentum,
            "of_gradient": 1.0 - momentum if nesterov else 0.0,
            "of_mean": momentum if nesterov else 1.0,
            "epsilon": group["eps"],
            "scale": 0.2 if group["adjust_lr_fn"] == "match_rms_adamw" else 0.0,
            "split": 0.0,
        }


def _orthogonalization(group: Group) -> Orthogonalization:
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    if not isinstance(coefficients, str) and all(isinstance(number, (int, float)) for number in coefficients):
        coefficients = (coefficients,)  # torch's form, one triple for all steps
    coefficients = checked_coefficients("ns_coefficients", coefficients)
    split, dtype = group.get("split"), group.get("iteration_dtype", "bfloat16")
    if dtype is not None:
        choice("iteration_dtype", dtype, DTYPES)
    return Orthogonalization(
        triples_of(coefficients, steps),
        group.get("gram", False),  # torch's numbers
        splits=((),) if split is None else (checked_blocks("split", split),),
        dtype=dtype_of(dtype),
    )


def _decay(group: Group, lr: float) -> dict[str, float]:
    """Return a rule's `wd`, which is added to the gradient, and `decay`, which is decoupled from it."""
    wd = float(group["weight_decay"])
    return {"wd": 0.0, "decay": lr * wd} if group["decoupled_weight_decay"] else {"wd": wd, "decay": 0.0}
