"""Parses the PTX that Triton's compiler writes: one kernel, cut into basic blocks of instructions."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Block", "Instruction", "Kernel", "Operand", "unknown"]

_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\.(?:req|max)ntid (\d+).*?\n\{", re.S)
_CONSTANT = re.compile(r"^\.global \.align \d+ \.b8 ([\w$]+)\[\d+\] = \{([\d, ]*)\};$", re.M)
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ENDS = ("bra", "ret", "exit", "bar", "barrier")  # of a block: control may go elsewhere, or threads wait for each other


class Operand(NamedTuple):
    """An operand of an instruction.

    Attributes:
        kind: "register", "special" (a register such as %tid.x), "integer", "float" (its bits), "symbol", "memory" (the
            operand whose value is the address) or "vector" (of operands).
        value: the name, the number, or the operands.
        bits: of a register or a float; 1 of a predicate.
        offset: of memory, in bytes.
    """

    kind: str
    value: Any
    bits: int = 0
    offset: int = 0


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
        name: with its types, such as "ld.global.v4.b32".
        parts: of the name, between the points.
        guard: the predicate register that decides whether a thread executes it, or None.
        negated: whether it executes where the guard is false.
        operands: in order, the target first if there is one.
        line: of the PTX, from 1.
    """

    name: str
    parts: list[str]
    guard: str | None
    negated: bool
    operands: tuple[Operand, ...]
    line: int


class Block(NamedTuple):
    """Instructions that are executed one after the other.

    Attributes:
        body: all but the end.
        end: a branch, `ret`, `bar.sync`, or None, from which control goes on to the next block.
        target: the number of the block that a branch leads to.
        counts: how many instructions of each name, the end included.
    """

    body: list[Instruction]
    end: Instruction | None
    target: int
    counts: Counter[str]


class Kernel:
    """A kernel.

    Args:
        text: the PTX.
        shared: bytes of shared memory of a CTA.

    Attributes:
        text, shared: as given.
        name: of the entry.
        threads: of a CTA.
        local: bytes of memory of each thread's own.
        parameters: their names in order.
        constants: bytes in global memory, by name.
        blocks: in the order of the text.

    Raises:
        ValueError: there is no entry, or a line that is no instruction.
    """

    def __init__(self, text: str, shared: int) -> None:
        self.text, self.shared = text, shared
        entry = _ENTRY.search(text)
        if entry is None:
            raise ValueError("the PTX has no entry with a number of threads")
        self.name, self.threads = entry[1], int(entry[3])
        self.parameters = re.findall(r"(\w+)\s*(?:,|$)", entry[2].strip(), re.M)
        self.constants = {name: np.array(given.split(","), dtype=np.uint8) for name, given in _CONSTANT.findall(text)}
        self.local = 0
        self._bits: dict[str, int] = {}  # of registers, by name or by prefix
        self.blocks = self._blocks(text[entry.end() : text.index("\n}", entry.end())], text.count("\n", 0, entry.end()) + 1)

    def line(self, number: int) -> str:
        """A line of the PTX."""
        return self.text.split("\n")[number - 1].strip() if number else ""

    def _blocks(self, body: str, first: int) -> list[Block]:
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        unfinished = ""
        for line, raw in enumerate(body.split("\n"), first):
            code = raw.split("//")[0].strip()
            while (label := re.match(r"(\$?\w+):\s*", code)) is not None:
                labels[label[1]], code = len(instructions), code[label.end() :]
            if (declared := re.fullmatch(r"\.local .*\[(\d+)\];", code)) is not None:
                self.local += int(declared[1])
            code = re.sub(r"^\{\s*(?=\.reg)|^[{}]$|(?<=;)\s*\}$", "", code)  # braces of a scope
            if code.startswith((".loc", ".pragma")):
                continue
            *statements, unfinished = f"{unfinished} {code}".split(";")
            for statement in map(str.strip, statements):
                if (declared := re.fullmatch(r"\.reg\s+\.(pred|[bsuf]\d+)\s+(.*)", statement)) is not None:
                    bits = 1 if declared[1] == "pred" else int(declared[1][1:])
                    self._bits |= dict.fromkeys(re.sub(r"<\d+>|\s", "", declared[2]).split(","), bits)
                elif not statement.startswith(".param"):  # of a function that is called
                    instructions.append(self._instruction(statement, line))
        return _cut(instructions, labels)

    def _instruction(self, text: str, line: int) -> Instruction:
        found = _INSTRUCTION.fullmatch(text)
        if found is None:
            raise ValueError(f"line {line} of the PTX is no instruction: {text!r}")
        negated, guard, name, operands = found.groups()
        every = tuple(self._operand(each.strip()) for each in _OPERANDS.findall(operands))
        return Instruction(name, name.split("."), guard, bool(negated), every, line)

    def _operand(self, text: str) -> Operand:
        if text[0] == "{" or "|" in text:  # several registers, or the two predicates of a comparison of pairs
            return Operand("vector", tuple(self._operand(each.strip()) for each in re.split(r"[,|]", text.strip("{}"))))
        if text[0] == "[":
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            return Operand("memory", self._operand(base), 0, int(offset or "0", 0))
        if text[0] == "%" or text in self._bits:
            bits = self._bits.get(text) or self._bits.get(re.sub(r"\d+$", "", text))
            return Operand("special", text, 32) if bits is None else Operand("register", text, bits)
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16}", text):
            return Operand("float", int(text[2:], 16), 4 * len(text) - 8)
        if re.fullmatch(r"-?(\d+|0x[0-9a-fA-F]+)U?", text):
            return Operand("integer", int(text.rstrip("U"), 0))
        return Operand("symbol", text)


def _cut(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    ends = {k for k, each in enumerate(instructions) if each.parts[0] in _ENDS}
    targets = {k: labels[instructions[k].operands[0].value] for k in ends if instructions[k].parts[0] == "bra"}
    starts = sorted({0, *targets.values(), *(k + 1 for k in ends)} & set(range(len(instructions))))
    blocks = []
    for start, stop in zip(starts, [*starts[1:], len(instructions)], strict=True):
        members, last = instructions[start:stop], stop - 1
        counts = Counter(each.name for each in members)
        target = starts.index(targets[last]) if last in targets else -1
        blocks.append(
            Block(members[:-1] if last in ends else members, members[-1] if last in ends else None, target, counts)
        )
    return blocks


def unknown(each: Instruction) -> NotImplementedError:
    """What is raised at an instruction that the emulator does not know."""
    return NotImplementedError(f"the emulator does not know {each.name!r} in this form, line {each.line} of the PTX")
