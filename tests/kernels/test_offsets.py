"""No product of 32 bits is part of an address: of tensors of 2^28 elements and more such products may wrap around.

Read off what Triton's front end makes of each kernel (TTIR), so that neither a GPU nor memory of that size is needed.
"""

import re

import pytest

pytest.importorskip("triton", reason="Triton has builds for Linux only")

pytestmark = pytest.mark.slow

UPDATES = """
import torch
from triton.backends.compiler import GPUTarget
from tristep.kernels import rules
from tristep.kernels.backends.triton import compile as gpu
from tristep.trainer import Telemetry

options = arguments[0]
options = {name: Telemetry()._measure if name == "metric" else value for name, value in options.items()}
options = {name: getattr(torch, value) if name == "state_dtype" else value for name, value in options.items()}
result = gpu.compile_for(GPUTarget("cuda", 90, 32), rules.lamb, **options).asm["ttir"]
"""

CODES = """
import torch
from triton.backends.compiler import GPUTarget
from tristep.kernels import compress
from tristep.kernels.compress.triton import compile_for

name, reads, writes, ranks = arguments
types = {"messages": torch.uint8, "votes": torch.uint8, "values": torch.float32}
source, target = (torch.empty(2, 2, dtype=types[what]) for what in (reads, writes))
left = torch.empty(2) if writes == "messages" else None
job = compress.Job(compress.CODES[name], source, left, target, 5000, 4096, 0.5, ranks, reads, writes)
result = compile_for(GPUTarget("cuda", 90, 32), job).asm["ttir"]
"""

OTHERS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import torch
from tristep.kernels import rules
from tristep.kernels.backends.triton import ops, reduce

name, types, constants = arguments
constants = {each: tuple(value) if isinstance(value, list) else value for each, value in constants.items()}
if "FUNCTION" in constants:
    constants["FUNCTION"] = ops.bind(rules.novograd.reduction.finished, torch.float32)
kernel = getattr(reduce, name)
signature = {each: types.get(each, "constexpr" if each in constants else "i32") for each in kernel.arg_names}
source = ASTSource(kernel, signature=signature, constexprs=constants)
result = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
"""

KERNELS = {
    "update": (UPDATES, [{}]),
    "update with metrics": (UPDATES, [{"metric": True}]),
    "packed update": (UPDATES, [{"state_dtype": "uint8", "masters": True, "stochastic": True, "grad_scale_and_skip": True}]),
    "sums": (UPDATES, [{"stage": 0}]),
    "totals": (
        OTHERS,
        [
            "totals_kernel",
            {"partials": "*fp32", "firsts": "*i64", "rows": "*i64", "largest": "*i32", "totals": "*fp64"},
            {"BLOCK": 4096},
        ],
    ),
    "finished sums": (
        OTHERS,
        [
            "finish_sums_kernel",
            {"partials": "*fp32", "firsts": "*i64", "rows": "*i64", "largest": "*i32", "results": "*fp32"}
            | {"gradients": "*i64", "hyper": "*fp32", "kept": "*i64", "skipped": "*fp32"},
            {"FUNCTION": "novograd's", "HYPER": [6, 7, 8], "N_HYPER": 9, "OF_ALL": True}
            | {"N_VALUES": 1, "N_KEPT": 1, "N_OWN": 1, "N_RESULTS": 1, "BLOCK": 4096, "COPIES": 256},
        ],
    ),
    "int8": (CODES, ["int8", "values", "messages", 1]),
    "sums of int4": (CODES, ["int4", "messages", "messages", 4]),
    "values of sign": (CODES, ["sign", "messages", "values", 4]),
    "votes": (CODES, ["2bit", "messages", "votes", 4]),
    "values of votes": (CODES, ["2bit", "votes", "values", 4]),
}


def narrow_products(text):
    """The lines that make an address of a product of 32 bits.

    What is computed of such a product counts as one too, but for what is loaded or compared. What leaves a block (`yield`,
    `condition`) may be any result of the statement around it, and any of the values that a loop carries.
    """
    lines = [re.sub(r" loc\(.*", "", line).strip() for line in text.splitlines()]
    narrow, before = set(), None
    while before != len(narrow):
        before, around, found = len(narrow), [], []
        for line in lines:
            given, equals, rest = line.partition(" = ")
            results = re.findall(r"%[\w.]+", given) if equals and given.startswith("%") else []
            used = set(re.findall(r"%[\w.]+", rest if results else line))
            operation = (rest if results else line).split(" ")[0]
            if line.startswith("}") and around and not line.startswith(("} else", "} do")):
                around.pop()
            if line.endswith("{") and not line.startswith("}"):
                carried = re.findall(r"(%[\w.]+) = ", rest)
                around.append([*results, *carried])
            if line.startswith("^bb") and around:
                around[-1] += used
            if operation in ("scf.yield", "scf.condition") and used & narrow:
                narrow.update(around[-1])
            wide = operation.startswith(("tt.load", "arith.cmp"))
            product = operation in ("arith.muli", "arith.shli") and re.search(r": (tensor<[\dx]+x)?i32>?$", line)
            if product or (used & narrow and not wide):
                narrow.update(results)
            if operation == "tt.addptr" and re.findall(r"%[\w.]+", rest)[1] in narrow:
                found.append(line)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_product_of_32_bits_is_part_of_an_address(kernel, compiling):
    text = compiling.run(*KERNELS[kernel])
    assert text.count("tt.addptr") > 2
    assert narrow_products(text) == []
