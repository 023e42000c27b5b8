"""Join the modules in static/ into the one that front ends take, which have no place for several files.

Modules import from each other by `import { a, b } from "./other.js";` on one line, under the same names. The joined module
has all of them in one scope, each after those that it imports, without these lines, without `export`, and without comments
that stand on lines of their own. static/scene.js is the last; what it exports, the joined module exports.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = ["scene_module"]

STATIC = Path(__file__).parent / "static"
IMPORT = re.compile(r'^import \{ [\w, ]+ \} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT_FROM = re.compile(r'^(export \{ [\w, ]+ \}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORTED = re.compile(r"^export (?=(?:async )?function|class|const)", re.MULTILINE)
COMMENT = re.compile(r"^ *(?://[^\n]*|/\*\*.*?\*/)\n", re.MULTILINE | re.DOTALL)


@cache
def scene_module() -> str:
    """Return the text of the joined module, which draws scenes in a browser."""
    texts: dict[str, str] = {}
    _add("scene", texts)
    return "".join(f"// {name}.js\n{text}\n" for name, text in texts.items())


def _add(name: str, texts: dict[str, str]) -> None:
    text = (STATIC / f"{name}.js").read_text(encoding="utf-8")
    for imported in [*IMPORT.findall(text), *(module for _, module in EXPORT_FROM.findall(text))]:
        if imported not in texts:
            _add(imported, texts)
    for pattern, plain in ((COMMENT, ""), (IMPORT, ""), (EXPORTED, ""), (EXPORT_FROM, r"\1;")):
        text = pattern.sub(plain, text)
    texts[name] = text.strip() + "\n"
