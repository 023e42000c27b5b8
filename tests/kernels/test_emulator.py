"""The compiled kernels of all rules and gradient codes, executed by the emulator in tests/gpu_emulator.

What they compute is what the cpu engine computes, whose loops another compiler has made. Each access to memory is inside a
tensor and aligned, and no two threads race. That the emulator would notice is shown by defects that are planted.
"""

import importlib.util
from pathlib import Path

import pytest
from optimizer_table import TABLE

from tristep.kernels.backends import has_numba

pytest.importorskip("triton", reason="Triton has builds for Linux only")
if not has_numba():
    pytest.skip("needs numba, whose loops are what the kernels are compared with", allow_module_level=True)

from gpu_emulator.cases import CodeCase, RuleCase, cases

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]

SET_UP = """
import sys
sys.path[:0] = [arguments, arguments + "/oracles"]
import torch
from gpu_emulator.driver import install
torch.set_num_threads(1)
install()
result = None
"""

COMPARE = """
from gpu_emulator import cases
from gpu_emulator.driver import install

emulator = install()
emulator.defects.clear()
kind, fields = arguments
case = getattr(cases, kind)(*fields)
result = *cases.largest_difference(case.run("cpu"), case.run("triton")), emulator.defects
"""

PLANTED = """
from gpu_emulator import planted

result = planted.EXPECTED, planted.find_all()
"""


@pytest.fixture(scope="module")
def emulated():
    """An interpreter whose GPU is the emulator."""
    path = Path(__file__).parent / "compiling.py"
    spec = importlib.util.spec_from_file_location("compiling", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    process = module.Compiling()
    process.run(SET_UP, str(TESTS))
    yield process
    process.end()


def _in_quick_tier(case):
    """Rules that are least alike in their plainest form, all storage of one rule, and of each code all that it does."""
    if isinstance(case, CodeCase):
        return case.n == 5000 and not case.special
    plain = TABLE[case.rule].quick and case == RuleCase(case.rule)
    return plain or case.rule == "adamw" or case == RuleCase("lamb", metrics=True)


CASES = [pytest.param(each, id=str(each), marks=() if _in_quick_tier(each) else pytest.mark.sample(0)) for each in cases()]


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_the_cpu_engine_does(case, emulated):
    difference, where, defects = emulated.run(COMPARE, [type(case).__name__, list(case)])
    assert not defects, "\n".join(defects)
    assert difference <= case.limit, f"{difference:g} ulps at {where}"


def test_planted_defects_are_found(emulated):
    expected, found = emulated.run(PLANTED)
    assert found.pop("nothing") == []
    assert found.keys() == expected.keys()
    missed = {name: found[name][:3] for name, words in expected.items() if not any(words in each for each in found[name])}
    assert not missed
