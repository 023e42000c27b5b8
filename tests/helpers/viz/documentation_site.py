"""The documentation site, built once for all processes of a test run."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[3]
ADDRESS = "https://docs.invalid/tristep/"  # of the site, for what needs one
LINKS = {"a": "href", "link": "href", "script": "src", "img": "src", "iframe": "src"}


def built(tmp_path_factory, *arguments) -> Path:
    """The folder of the site, by docs/site/build.py with these arguments."""
    pytest.importorskip("mkdocs")
    from filelock import FileLock

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    site = folder / "-".join(["site", *arguments]).replace("--", "")
    with FileLock(f"{site}.lock"):
        if not (site / "index.html").is_file():
            command = [sys.executable, ROOT / "docs" / "site" / "build.py", "--out", site, *arguments]
            environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "SITE_URL": ADDRESS}
            result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            assert result.returncode == 0, result.stdout + result.stderr
    return site


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found[name] or "" for name in ("id", "name") if name in found}
        link = found.get(LINKS.get(tag, ""))
        if link is not None and found.get("rel") != "canonical":
            self.links.append((tag, link))


def broken_links(site: Path) -> list[str]:
    """The links that lead nowhere, and what a page would load from another server."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    folder = urlsplit(ADDRESS).path  # 404.html, which a server shows for any address, has links that begin so
    broken = []
    for page in pages.values():
        for tag, link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                if tag != "a":
                    broken.append(f"{page.path.relative_to(site)} loads {link}")
                continue
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            place = page.path.parent / unquote(parts.path)
            if page.path.name == "404.html" and parts.path.startswith(folder):
                place = site / unquote(parts.path).removeprefix(folder)
            target = place.resolve() if parts.path else page.path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{page.path.relative_to(site)} -> {link}: no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{page.path.relative_to(site)} -> {link}: no such anchor")
    return broken
