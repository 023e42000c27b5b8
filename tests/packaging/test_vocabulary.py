"""One term per concept, the field's: what CONTRIBUTING.md's table of words refuses is found nowhere.

Phrases are refused in all text, in any case and across line breaks, and in names written with underscores. Names, which
stand in backticks in the table, are refused where Python code uses them and where text has them in backticks.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {  # with the suffixes of what is read in them
    "kernels": (".py",),
    "trainer": (".py",),
    "viz": (".py", ".js"),
    "src": (".py",),
    "tests": (".py",),
    "benchmarks": (".py",),
    "tutorials": (".py",),
    "docs": (".py", ".md"),
}
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "Makefile")
BETWEEN = r"""[\s_#*/"'-]+"""  # words of a phrase: also from one line of a comment or of a string to the next


def _section(text):
    """The section "Words" of CONTRIBUTING.md."""
    return re.search(r"^## Words\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)[1]


def _table(text):
    """What to write, by what not to: by the phrases, and by the names."""
    phrases, names = {}, {}
    for line in _section(text).splitlines():
        if line.startswith("|"):
            write, refused = (cell.strip() for cell in line.strip("|").split("|"))
            for term in refused.split(", "):
                (names if term.startswith("`") else phrases)[term.strip("`")] = write
    for kind in (phrases, names):
        for header in ("not", "---"):
            kind.pop(header, None)
    return phrases, names


PHRASES, NAMES = _table((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def _pattern(phrase):
    words = BETWEEN.join(re.escape(word).replace("'", "['_]") for word in phrase.split())
    return re.compile(rf"(?<![^\W_]){words}s?(?![^\W_])", re.IGNORECASE)


PATTERNS = {phrase: _pattern(phrase) for phrase in PHRASES}


def _names(tree):
    """Each name in Python code, with its line."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield name, getattr(node, "lineno", 1)


def _found(where, text):
    """What a text has that the table refuses, with where it is and what to write."""
    hits, lower = [], text.lower()
    for phrase, pattern in PATTERNS.items():
        if not all(word.split("'")[0] in lower for word in phrase.split()):
            continue  # much faster than the pattern
        hits += [(text.count("\n", 0, match.start()) + 1, phrase, PHRASES[phrase]) for match in pattern.finditer(text)]
    for match in re.finditer(r"`([^`\n]+)`", text):
        line = text.count("\n", 0, match.start()) + 1
        hits += [(line, name, NAMES[name]) for name in re.findall(r"\w+", match[1]) if name in NAMES]
    if where.endswith(".py") and any(name in text for name in NAMES):
        hits += [(line, name, NAMES[name]) for name, line in _names(ast.parse(text)) if name in NAMES]
    return [f"{where}:{line}: {term!r}: write {write}" for line, term, write in sorted(hits)]


def _files():
    yield from (ROOT / name for name in FILES)
    for folder, suffixes in FOLDERS.items():
        yield from sorted(
            path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts
        )


def test_texts_use_the_terms_of_the_table():
    hits = []
    for path in _files():
        text = path.read_text(encoding="utf-8")
        if path.name == "CONTRIBUTING.md":  # as many lines as before
            rows = re.compile(r"^\|.*$", re.MULTILINE)
            text = text.replace(_section(text), rows.sub("", _section(text)))
        hits += _found(path.relative_to(ROOT).as_posix(), text)
    assert not hits, "terms of our own, see Words in CONTRIBUTING.md:\n" + "\n".join(hits)


@pytest.mark.parametrize("refused", [*PHRASES, *NAMES])
def test_what_the_table_refuses_is_found(refused):
    """However it is written: in a comment, over a line's end, in a name, in code, in backticks."""
    spaced, joined = refused.replace(" ", "\n    # "), refused.replace(" ", "_").replace("'", "_")
    texts = [f"# Text.\n# A {refused} of {spaced}.\n"] if refused in PHRASES else [f"\n# As `x.{refused}`.\n"]
    texts += [f"\ndef test_{joined}(): ...\n"] if refused in PHRASES else [f"\nx.{refused}(1)\n", f"\nf({refused}=1)\n"]
    for text in texts:
        hits = _found("x.py", text)
        assert hits[0].startswith(f"x.py:2: {refused!r}: write "), hits


def test_ordinary_words_are_not_refused():
    text = "# Integers kept in numbers. The step is left as it is; begin_step with many `copies`.\nmany = rate * kept\n"
    assert _found("x.py", text) == []
