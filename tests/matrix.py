"""Which cases of the parametrised tests run: all of them, the quick tier, the rest, or a slice of the rest.

The quick tier covers factors, not products of factors: of each parametrised test so many cases that every value of every
parameter occurs at least once, each value about as often as the others of its parameter. The two engines that compile, cpu
and triton, take turns: one test has cases of the one, the next of the other. Two marks change that for a test:

    @pytest.mark.cover("rule", "engine")   every combination of these parameters occurs, with all engines
    @pytest.mark.sample(2)                 only this many of its cases run; 0 for a test of the full tier alone
    @pytest.mark.sample(2, "triton")       at most so many of those with this word in their name, "[...-triton-...]";
                                           so many of each, if there are several words

A value of a parameter given as `pytest.param(..., marks=pytest.mark.sample(0))` is one of the full tier alone.

The choice depends on nothing but the names of the cases, so it is the same on every machine and in every worker.
"""

from __future__ import annotations

import heapq
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest

TAKE_TURNS = ("cpu", "triton")
EAGER = "eager_in_quick_tier"  # the fixture of tests/conftest.py
HELP = "which cases of parametrised tests run: quick (each value of each parameter), full (all), rest (all but quick), i/n"


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in `items` the cases that `--cases` asks for. Tests named on the command line by `::` always run."""
    asked = config.getoption("--cases")
    if asked == "full" or any("::" in argument for argument in config.args):
        return
    quick = quick_tier(items)
    # Cases that the quick tier runs on the eager engine run on the best one, too.
    rest = {item for item in items if item not in quick or EAGER in getattr(item, "fixturenames", ())}
    if asked == "quick":
        chosen = quick
    elif asked == "rest":
        chosen = rest
    else:
        slice_, n = _slice(asked)
        chosen = {item for place, item in _places(rest) if place % n == slice_}
    left_out = [item for item in items if item not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in chosen]


def quick_tier(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The items of the quick tier."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return {item for cases in tests.values() for item in _quick(sorted(cases, key=lambda case: case.nodeid))}


def _places(items: Iterable[pytest.Item]) -> Iterator[tuple[int, pytest.Item]]:
    """Each item with its place in the order of slices, which cases of one test are in one after the other."""
    begins: dict[str, int] = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        test = item.nodeid.partition("[")[0]
        begins[test] = begins.get(test, zlib.crc32(test.encode())) + 1
        yield begins[test], item


def _slice(asked: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", asked)
    if not match or int(match[2]) == 0:
        raise pytest.UsageError(f"--cases={asked}: must be quick, full, rest, or a slice of the rest such as 3/8")
    return int(match[1]) % int(match[2]), int(match[2])


def _quick(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    cases = [case for case in cases if not _has_value_of_full_tier(case)]
    if not cases:
        return []
    samples = [mark.args for mark in cases[0].iter_markers("sample")]
    covered = [mark.args for mark in cases[0].iter_markers("cover")]
    if not samples and not covered:
        cases = _take_turns(cases)
        if len(cases) == 1:
            return list(cases)
    values = [_values(case) for case in cases]
    if unknown := {name for names in covered for name in names} - set(values[0]):
        raise pytest.UsageError(
            f"{cases[0].nodeid}: mark cover names {sorted(unknown)}, which are no parameters of the test"
        )
    factors = [*covered, *_given_together(cases[0]), *((name,) for name in values[0])]
    numbers: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}  # of each factor and value
    met = {
        case: [numbers.setdefault((factor, tuple(own[name] for name in factor)), len(numbers)) for factor in factors]
        for case, own in zip(cases, values, strict=True)
    }
    limits = {word: most for most, *words in samples for word in words}
    words = {case: limits.keys() & _words(case) for case in cases}
    order = {case: zlib.crc32(case.nodeid.encode()) for case in cases}
    used, met_words = [0] * len(numbers), Counter[str]()
    chosen: dict[pytest.Item, None] = {}

    def choose(candidates: Iterable[pytest.Item]) -> None:
        allowed = [case for case in candidates if all(met_words[word] < limits[word] for word in words[case])]
        if allowed:
            # What occurs least often so far comes first, new values above all.
            best = min(allowed, key=lambda case: (sum(map(used.__getitem__, met[case])), order[case]))
            chosen[best] = None
            met_words.update(words[best])
            for number in met[best]:
                used[number] += 1

    if counts := [args[0] for args in samples if len(args) == 1]:
        # What `choose` compares only grows, so whoever is first with what it is by now is so before all others.
        queue = [(0, order[case], place) for place, case in enumerate(cases)]
        heapq.heapify(queue)
        while queue and len(chosen) < counts[0]:  # of the mark that is nearest to the test
            occurred, _, place = queue[0]
            now = sum(map(used.__getitem__, met[cases[place]]))
            if now > occurred:
                heapq.heapreplace(queue, (now, order[cases[place]], place))
                continue
            heapq.heappop(queue)
            choose([cases[place]])
        return list(chosen)
    # The factors of most values first: in choosing their cases, those of few values are met in turn.
    with_value: dict[int, list[pytest.Item]] = defaultdict(list)
    for case in cases:
        for number in met[case]:
            with_value[number].append(case)
    sizes = Counter(factor for factor, _ in numbers)
    for _, number in sorted((-sizes[factor], number) for (factor, _), number in numbers.items()):
        if not used[number]:
            choose(with_value[number])
    return list(chosen)


def _has_value_of_full_tier(case: pytest.Item) -> bool:
    callspec = getattr(case, "callspec", None)
    return callspec is not None and any(mark.name == "sample" and mark.args == (0,) for mark in callspec.marks)


def _take_turns(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """The cases without those of one of the two engines, where there are cases of both."""
    of = {engine: {case for case in cases if engine in _words(case)} for engine in TAKE_TURNS}
    if not all(of.values()):
        return cases
    left_out = TAKE_TURNS[zlib.crc32(cases[0].nodeid.partition("[")[0].encode()) % 2]
    return [case for case in cases if case not in of[left_out]]


def _words(case: pytest.Item) -> set[str]:
    return set(re.split(r"[-\[\]]", case.nodeid))


def _values(case: pytest.Item) -> dict[str, int]:
    """Of each parameter of a case which value it has: cases of the same value share the object."""
    callspec = getattr(case, "callspec", None)
    return {} if callspec is None else {name: id(value) for name, value in callspec.params.items()}


def _given_together(case: pytest.Item) -> list[tuple[str, ...]]:
    """Parameters that one `parametrize` gives in pairs, triples, ...: these are values of one factor."""
    given = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [tuple(re.split(r"\s*,\s*", each)) if isinstance(each, str) else tuple(each) for each in given]
    return [each for each in names if len(each) > 1]
