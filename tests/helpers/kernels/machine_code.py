"""The machine code of kernels, compiled for GPUs in an interpreter of its own, for tests.

Of the NVIDIA code (SASS) it knows: a label or its end closes a stretch of code, and `@` starts an instruction that only
some threads execute.
"""

import re
from functools import cache
from typing import NamedTuple

from optimizer_table import TABLE

from tristep.kernels import Rule, rules
from tristep.kernels.language import OPS

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# The rules, and how many states each changes; the others are not written.
RULES = {name: len(found.changed) for name in rules.__all__ if isinstance(found := getattr(rules, name), Rule)}
FLOAT64 = r"D(ADD|MUL|FMA|SETP|MNMX)\b.*|.*\.F64\b.*|MUFU\.\w*64H"  # instructions
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Case(NamedTuple):
    """One kernel to compile: of a rule, or of its reduction with this number.

    `masters` may be the type of the master weights, `state` is that of the states. `measured` is with all that telemetry
    measures by default.
    """

    target: str = "sm_90"
    rule: str = "adam"
    weight: str = "float32"
    gradient: str = "float32"
    masters: bool | str = False
    aligned: bool = True
    stage: int | None = None
    state: str | None = None
    stochastic: bool = False
    measured: bool = False

    @property
    def name(self):
        return "-".join(map(str, self))


CELL = """
from tristep.kernels import jit, rule, tl

@jit
def halved(x: float, factor=0.5):
    return x * factor

@rule
def in_a_cell(w: "a block", g, state: tuple, hyper) -> tuple:
    (mean,) = state
    (lr,) = hyper
    mean = halved(mean) + halved(g, 0.25)
    return w - tl.sqrt(lr) * tl.abs(mean), (mean,)
"""

COMPILE = """
import torch
from triton.backends.compiler import GPUTarget

from tristep.kernels import rules
from tristep.kernels.backends.triton import compile as gpu
from tristep.trainer import Telemetry

target, rule, weight, gradient, masters, aligned, stage, state, stochastic, measured = arguments
types = getattr(torch, weight), getattr(torch, gradient)
rule = {**vars(rules), **globals()}[rule]
masters = getattr(torch, masters) if isinstance(masters, str) else masters
state = None if state is None else getattr(torch, state)
measure = Telemetry()._measure if measured else None
compiled = gpu.compile_for(GPUTarget(*target), rule, *types, masters, aligned, stage, state, stochastic, measure)
warps = compiled.metadata.num_warps
result = {"warps": warps, "threads": warps * target[2]}
if target[0] == "hip":
    result["text"] = compiled.asm["amdgcn"]
elif target[1] == 90:
    result["usage"] = usage(compiled)
    result["text"], result["ptx"] = compiled.asm["sass"], compiled.asm["ptx"]
"""


class Code:
    """The machine code of one kernel."""

    def __init__(self, code):
        self.warps, self.threads = code["warps"], code["threads"]
        self.text, self.usage, self.ptx = code.get("text", ""), code.get("usage", ""), code.get("ptx", "")

    @property
    def instructions(self):
        """(whether only some threads execute it, what it is called) of each, for SASS."""
        return instructions(self.text)

    def count(self, pattern):
        return sum(re.fullmatch(pattern, name) is not None for _, name in self.instructions)

    @property
    def full_tile_path(self):
        """The instructions of the one stretch of code that stores several elements, of 32 bits or fewer, at once."""
        return self.stretch_with(r"STG\.E\.(64|128)")

    def stretch_with(self, pattern):
        """The instructions of the one stretch of code in which this is found."""
        found = [part for part in re.split(r"(?m)^\S*LBB\d+:$", self.text) if re.search(pattern, part)]
        assert len(found) == 1, f"{len(found)} stretches of code with {pattern}, of:\n{self.text}"
        return instructions(found[0])

    def used(self, what):
        """An amount from the resource usage: REG, STACK, SHARED or LOCAL."""
        return int(re.search(rf"\b{what}:(\d+)", self.usage).group(1))


def instructions(text):
    found = re.findall(r"(?m)^[^\t\n]*\t(@!?\w+ )?([A-Z][\w.]*)", text)
    return [(bool(predicate), name) for predicate, name in found]


def compiled_code(compiling):
    """A function from a case to its code."""

    @cache
    def compiled(case):
        own = {"in_a_cell": CELL}.get(case.rule) or (_every_word(case.rule) if case.rule.startswith("every_word") else "")
        return Code(compiling.run(own + COMPILE, [TARGETS[case.target], *case[1:]]))

    return compiled


def _every_word(name):
    """The text of a rule that uses all ops of the language, or all but two."""
    calls = dict.fromkeys(OPS, "(w)") | {"where": "(w > g, w, 0.5)", "maximum": "(w, 0.5)", "minimum": "(w, 0.5)"}
    calls["clamp"] = "(w, -0.5, g)"
    calls["normal"] = "(low, high, index)"
    left_out = ("sin", "cos") if name == "every_word_but_sin_and_cos" else ()
    text = " + ".join(f"tl.{word}{calls[word]}" for word in OPS if word not in left_out)
    return (
        f"from tristep.kernels import rule, tl\n\n@rule\ndef {name}(w, g, state, hyper, index):\n    low, high = hyper\n"
        f"    return {text}, state\n"
    )


SHARED = r"(LDS|STS|LDSM|STSM|BAR)\b"


def spills_nothing(case, code):
    kernel = code(case)
    assert kernel.count(r"(LDL|STL)\b.*") == kernel.used("STACK") == kernel.used("LOCAL") == 0
    assert not [name for _, name in kernel.full_tile_path if re.match(SHARED, name)]  # others put threads' elements in order
    assert kernel.count(FLOAT64) == 0
    assert 16 <= kernel.used("REG") <= (TABLE[case.rule].registers if kernel.threads == 256 else 96)  # of 4 elements, of 8


def fuses_nothing(case, code):
    assert " fma." not in code(case).ptx.replace("\t", " ")
    assert re.search(r"\bmul\.rn\.f32|\badd\.rn\.f32|\bsub\.rn\.f32", code(case).ptx) or case.rule == "averaged"
