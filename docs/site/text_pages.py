"""Pages of text: the README, the sections of the guide, the files in docs/, and those about the project."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from pathlib import Path

__all__ = ["WIDE", "linked", "page", "write"]

GUIDE = "docs/guide.md"
HOW_TOS = {  # file, title, the guide's sections, further pages
    "from-mxnet": ("From MXNet", ("Coming from MXNet",), ("differences.md", "tutorials/11_from_mxnet.md")),
    "from-torch": (
        "From torch.optim",
        ("Coming from torch.optim", "Engines", "Speed"),
        ("integrations.md", "tutorials/12_from_torch_optim.md"),
    ),
    "several-optimizers": ("Several optimizers", ("Several optimizers in one",), ("optimizers/muon.md",)),
    "schedules": (
        "Schedules of any number",
        ("Schedules of any number",),
        ("tutorials/03_learning_rate_schedules.md", "optimizers/index.md"),
    ),
    "rates-by-layer": ("Rates by layer", ("Rates by layer",), ("optimizers/index.md",)),
    "fused-matrices": (
        "Parts of fused matrices",
        ("Parts of fused matrices",),
        ("optimizers/muon.md", "tutorials/13_what_muon_does.md"),
    ),
    "own-rule": (
        "Your own rule",
        ("Writing your own rule",),
        ("tutorials/07_your_own_optimizer.md", "rules.md", "contributing.md"),
    ),
    "low-precision": (
        "Low precision",
        ("Half precision", "Very large and very small gradients"),
        ("optimizers/index.md", "tutorials/08_clipping_precision_low_bits.md"),
    ),
    "cuda-graphs": ("CUDA graphs", ("CUDA graphs",), ("gpu.md", "scaling.md")),
    "checkpoints": ("Checkpoints", ("Checkpoints",), ("checkpoints.md", "reliability.md")),
    "telemetry": ("What each layer does", ("What each layer does",), ("notebooks.md", "tutorials/06_watching_weights.md")),
    "everything": ("What there is", ("What there is",), ("optimizers/index.md",)),
}
FIRST = ("docs/choosing.md", "docs/errors.md")  # for newcomers
TEXTS = {  # of the repository: where it is in the site, and what the contents call it
    "docs/choosing.md": ("choosing.md", "Which optimizer, precision, store"),
    "docs/errors.md": ("errors.md", "Errors and remedies"),
    "docs/notebooks.md": ("notebooks.md", "In a notebook"),
    "docs/checkpoints.md": ("checkpoints.md", "Checkpoints"),
    "docs/integrations.md": ("integrations.md", "In other training libraries"),
    "docs/rules.md": ("rules.md", "Rules of your own"),
    "docs/plugins.md": ("plugins.md", "Your own package"),
    "docs/scaling.md": ("scaling.md", "Many GPUs, many machines"),
    "docs/differences.md": ("differences.md", "Differences from MXNet"),
    "docs/reliability.md": ("reliability.md", "Reliability"),
    "docs/gpu.md": ("gpu.md", "What is proven of the GPU code"),
    "CONTRIBUTING.md": ("contributing.md", "Architecture and contributing"),
    "CHANGELOG.md": ("changelog.md", "Changelog"),
    "SECURITY.md": ("security.md", "Security"),
    "docs/release.md": ("release.md", "Release checklist"),
}
MOVED = {source: target for source, (target, _) in TEXTS.items()} | {
    "README.md": "index.md",
    "docs/optimizers.md": "optimizers/index.md",
}
WIDE = "hide: [toc]"
LOOKS = {  # what the theme is told of a page
    "CHANGELOG.md": "search: {boost: 0.01}",  # it names everything, and explains nothing
    "docs/choosing.md": "hide: [navigation, toc]",  # it should fit on a screen
}
BUTTONS = re.compile(r"^\[[^\n]+\]\([^)\n]+\)(?: · \[[^\]\n]+\]\([^)\n]+\))+$", re.MULTILINE)  # links on a line of their own
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def write(root: Path, pages: Path) -> dict[str, list[dict[str, str]]]:
    """Write the pages; the contents, by chapter."""
    home = linked((root / "README.md").read_text(encoding="utf-8"), "README.md", "index.md", root, pages)
    home = BUTTONS.sub(lambda match: _buttons(match[0]), home, count=1)
    (pages / "index.md").write_text(page(home, "README.md"), encoding="utf-8")
    sections = _sections((root / GUIDE).read_text(encoding="utf-8"))
    used = {part for _, parts, _ in HOW_TOS.values() for part in parts}
    files = {f"docs/{path.name}" for path in (root / "docs").glob("*.md")} - {GUIDE, "docs/package.md"}  # for an index
    if missing := [*({*sections} - used), *(files - {*MOVED})]:
        raise ValueError(f"{', '.join(missing)}: say in HOW_TOS or TEXTS where it is in the site")
    (pages / "how-to").mkdir()
    how_tos = []
    for name, (title, parts, further) in HOW_TOS.items():
        target = f"how-to/{name}.md"
        text = f"# {title}\n" + "".join(f"{'' if part == title else f'## {part}'}\n{sections[part]}" for part in parts)
        text = linked(text, GUIDE, target, root, pages)
        more = "\n".join(f"- [{_title_of(page)}](../{page})" for page in further)
        (pages / target).write_text(page(f"{text}\n## See also\n\n{more}\n", GUIDE), encoding="utf-8")
        how_tos.append({title: target})
    chapters: dict[str, list[dict[str, str]]] = {"Home": [{"tristep": "index.md"}], "How to": how_tos, "Guides": []}
    for source, (target, title) in TEXTS.items():
        text = linked((root / source).read_text(encoding="utf-8"), source, target, root, pages)
        if source == "docs/choosing.md":
            heading, _, rest = text.partition("\n")
            text = f'{heading}\n\n<div class="compact" markdown="1">\n{rest}\n</div>\n'
        (pages / target).write_text(page(text, source, LOOKS.get(source)), encoding="utf-8")
        chapters["Home" if source in FIRST else "Guides"].append({title: target})
    return chapters


def page(text: str, source: str, look: str | None = None) -> str:
    """A page made of this file of the repository; `look` is a line for the theme, such as `WIDE`."""
    return "\n".join(["---", f"source: {source}", *([look] if look else []), "---", "", text])


def _buttons(line: str) -> str:
    links = "\n".join(f"{link}{{ .md-button }}" for link in line.split(" · "))
    return f'<div class="start" markdown="1">\n\n{links}\n\n</div>'


def linked(text: str, source: str, target: str, root: Path, pages: Path) -> str:
    """A text of the repository with its links as the site has them.

    What has no page is named and not linked, as there is nothing to show; pictures are copied.
    """

    def changed(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        if "://" in link or (link.startswith("#") and source != GUIDE):  # sections of the guide are on several pages
            return match[0]
        link, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) if link else GUIDE
        if path.endswith(".ipynb"):
            there = path.removesuffix(".ipynb") + ".md"
        elif path == GUIDE:
            there, anchor = next(name for name, (_, parts, _) in HOW_TOS.items() if anchor in map(_anchor, parts)), ""
            there = f"how-to/{there}.md"
        elif path in MOVED:
            there = MOVED[path]
        elif path.endswith((".png", ".json")) and (root / path).is_file():
            there = f"files/{posixpath.basename(path)}"
            (pages / "files").mkdir(exist_ok=True)
            shutil.copyfile(root / path, pages / there)
        elif (root / path).exists():
            return label if label.startswith("`") else f"{label} (`{path}`)"
        else:
            raise FileNotFoundError(f"{source} links to {link}, which is not there")
        relative = os.path.relpath(there, posixpath.dirname(target) or ".").replace(os.sep, "/")
        return f"{mark}[{label}]({relative}{f'#{anchor}' if anchor else ''})"

    codes: list[str] = []

    def aside(match: re.Match[str]) -> str:
        codes.append(match[0])
        return f"\0{len(codes) - 1}\0"

    without = re.sub(r"^```.*?^```$", aside, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\0(\d+)\0", lambda match: codes[int(match[1])], LINK.sub(changed, without))


def _sections(text: str) -> dict[str, str]:
    """The sections by title."""
    _, *rest = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def _anchor(title: str) -> str:
    """What links to a section of this title end in, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _title_of(page: str) -> str:
    for target, title in TEXTS.values():
        if target == page:
            return title
    name = page.split("/")[-1].removesuffix(".md")
    if page == "optimizers/index.md":
        return "All optimizers, and how they are stored"
    return f"Tutorial {name[:2]}: {name[3:].replace('_', ' ')}" if name[:2].isdigit() else name.capitalize()
