"""Every operation of the language on values of every type, against NumPy: numbers, literals, comparisons and the index."""

import itertools

import numpy as np
import pytest
import torch

from tristep.kernels import language

F32, F64 = torch.float32, torch.float64
OPERANDS = {
    "w": "w",
    "a hyper-parameter": "h",  # without dimensions, or a plain number
    "a comparison": "(g > 0.5)",
    "a comparison of numbers": "(h < 1.0)",
    "a float": "0.1",
    "a whole number": "3",
    "a number beyond int32": "3000000000",
    "the index": "index",
}
COMPARISONS = [text for text in OPERANDS.values() if text[0] == "("]
OPERATORS = ["+", "-", "*", "/", "<", "<=", "==", "!=", ">=", ">", "&", "|"]
JUDGES = {
    "-": np.negative, "~": np.logical_not, "&": np.logical_and, "|": np.logical_or, "maximum": np.maximum,
    "minimum": np.minimum, "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high), "where": np.where,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip


def _expressions(operation):
    """The texts of an operation on operands of all types, and for each the function and the operands."""
    if operation in OPERATORS:
        texts = {f"{a} {operation} {b}": (a, b) for a, b in itertools.product(OPERANDS.values(), repeat=2)}
    elif operation in ("unary -", "~"):
        texts = {f"{operation[-1]}{a}": (a,) for a in OPERANDS.values()}
    elif operation == "where":
        texts = {f"tl.where({c}, {a}, {b})": (c, a, b) for c, a, b in itertools.product(OPERANDS.values(), repeat=3)}
        texts = dict(list(texts.items())[:: 7 if len(texts) > 100 else 1])
    elif operation in ("maximum", "minimum"):
        texts = {f"tl.{operation}({a}, {b})": (a, b) for a, b in itertools.product(OPERANDS.values(), repeat=2)}
    elif operation == "clamp":  # NumPy takes limits in any order, and rules do not
        texts = {f"tl.clamp({a}, {low}, {high})": (a, low, high) for a in OPERANDS.values() for low, high in _LIMITS}
    else:
        texts = {f"tl.{operation}({a})": (a,) for a in OPERANDS.values()}
    return texts


_LIMITS = [("0.1", "3"), ("h", "3000000000"), ("(h > 1.0)", "(h < 1.0)"), ("w", "3000000000")]
OPERATIONS = [*OPERATORS, "unary -", "~", *(word for word in language.OPS if word != "normal")]


def _is_refused(operation, operands):
    """Whether the operation needs comparisons and has others, or compares literals."""
    if operation[0] in "<>=!":
        return all(each[0].isdigit() for each in operands)
    needed = {"where": operands[:1], "&": operands, "|": operands, "~": operands}.get(operation, ())
    return not set(needed) <= set(COMPARISONS)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_on_every_type_is_numpys(place, write_rules, operation, dtype):
    """Comparisons are 1 and 0 in arithmetic; where they are needed, what is none is refused when the rule is defined."""
    numpy_type = np.float32 if dtype == F32 else np.float64
    w, g = (np.random.default_rng(seed).uniform(-2, 2, 40).astype(numpy_type) for seed in (3, 4))
    h = numpy_type(0.7)
    values = {"w": w, "g": g, "h": h, "index": np.arange(40)}
    texts = _expressions(operation)
    good = [text for text, operands in texts.items() if not _is_refused(operation, operands)]
    if (
        operation in ("&", "|") and place.engine == "triton"
    ):  # its interpreter cannot mix comparisons of numbers and of tensors
        good = [text for text in good if len(set(texts[text])) == 1]
    names = [f"s{k}" for k in range(len(good))]
    module = write_rules(
        "@rule\ndef computed(w, g, state, hyper, index):\n"
        f"    ({', '.join(names)},) = state\n    (h,) = hyper\n    return w, ({', '.join(good)},)\n"
    )
    states = tuple(torch.zeros(40, dtype=dtype, device=place.device) for _ in good)
    place.run(module.computed, [place.tensor(w, dtype)], [place.tensor(g, dtype)], [states], [[1.0, h]])
    for text, got in zip(good, states, strict=True):
        operands = [np.asarray(eval(each, {}, values)) for each in texts[text]]
        if operation in ("~", "&", "|"):
            expected = JUDGES[operation](*operands)
        else:
            numbers = [each.astype(numpy_type).astype(float) for each in operands]
            if operation in OPERATORS:
                expected = eval(f"a {operation} b", {"a": numbers[0], "b": numbers[1]})
            else:
                word = operation.removeprefix("unary ")
                numbers[0] = operands[0] if word == "where" else numbers[0]
                expected = JUDGES.get(word, getattr(np, word, None))(*numbers)
        rtol = 2e-6 if dtype == F32 else 1e-14
        np.testing.assert_allclose(got.cpu(), np.broadcast_to(expected, 40).astype(numpy_type), rtol, 1e-7, err_msg=text)
    refused = [text for text, operands in texts.items() if _is_refused(operation, operands)]
    for text in refused[:: max(len(refused) // 12, 1)]:
        with pytest.raises(TypeError, match="'refused' contains .*: it must (be a comparison, such as|compare values)"):
            write_rules(
                f"@rule\ndef refused(w, g, state, hyper, index):\n    (h,) = hyper\n    return ({text}) + w, state\n"
            )


CONVERTED = """
import sys, torch
from triton.backends.compiler import GPUTarget
from tristep.kernels.backends.triton.compile import compile_for
sys.path.insert(0, arguments[0])
from converted import every_kind
result = [len(compile_for(GPUTarget("cuda", 90, 32), every_kind, dtype, dtype).asm["cubin"])
          for dtype in (torch.float32, torch.float64)]
"""
TEXT = """
@jit
def above(x, limit=0.5):
    return x > limit

@rule
def every_kind(w, g, state, hyper, index):
    a, b = state
    lr, key = hyper
    sign = (g > 0.0) - (g < 0.0)
    chosen = tl.where(above(g) & (lr > 0.1), 0.1, 0.2)
    return w - lr * sign + tl.sqrt(2) * chosen + tl.normal(key, 1, index), (0.5, index + above(g, lr))
"""


def test_what_is_converted_compiles_for_a_gpu(compiling, write_rules, tmp_path):
    """Which the interpreter does not tell: it computes in Python and NumPy."""
    write_rules(TEXT, "converted")
    assert min(compiling.run(CONVERTED, [str(tmp_path)])) > 1000
