"""The documentation site: its pages, and that every link leads somewhere."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from documentation_site import ADDRESS, broken_links, built

import tristep
from tristep import viz

ROOT = Path(__file__).parents[2]
QUICK = ("--live", "none", "--optimizers", "adam")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return built(tmp_path_factory, *QUICK)


def test_each_text_has_a_place(tmp_path, monkeypatch):
    """A new section of the guide, or file in docs/, that is in no page of the site raises ValueError."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "site"), *sys.path])
    import text_pages

    chapters = text_pages.write(ROOT, tmp_path)
    targets = [target for entries in chapters.values() for entry in entries for target in entry.values()]
    assert len(targets) > 15
    assert all((tmp_path / target).is_file() for target in targets)


@pytest.mark.parametrize("address", [None, "https://docs.invalid/"])
def test_addresses_are_those_that_somebody_has_said(address, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "site"), *sys.path])
    monkeypatch.delitem(sys.modules, "build", raising=False)  # a package has that name, too
    import build

    del sys.modules["build"]
    for name in ("SITE_URL", "REPO_URL"):
        monkeypatch.delenv(name, raising=False) if address is None else monkeypatch.setenv(name, address)
    settings = build.settings_of(Path("pages"), {}, *build.addresses())
    assert settings.get("site_url") == address
    assert settings.get("repo_url") == (address and address.rstrip("/"))
    assert tristep.__version__ in settings["site_name"]
    import hooks

    page = SimpleNamespace(meta={"source": "docs/gpu.md"}, edit_url="another")
    hooks.on_page_context({}, page, SimpleNamespace(repo_url=settings.get("repo_url")), None)
    assert page.edit_url == (address and f"{address}edit/main/docs/gpu.md")


@pytest.mark.sample(0)
def test_a_search_finds_the_changelog_last(site):
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in entries}
    assert boosts.pop("changelog.html") < min(boosts.values())


@pytest.mark.sample(0)
def test_the_map_has_all_pages(site):
    places = re.findall(r"<loc>(.+?)</loc>", (site / "sitemap.xml").read_text(encoding="utf-8"))
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    views = {page for page in pages if re.fullmatch(r"tutorials/\w+/view-\d+.html", page)}
    assert {place.removeprefix(ADDRESS) or "index.html" for place in places} == pages - views


@pytest.mark.sample(0)
def test_the_gallery_has_each_view(site):
    kinds = [getattr(viz, name) for name in viz.__all__]
    views = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, viz.View)} - {"View"}
    assert {path.stem for path in (site / "gallery").glob("*.png")} == views


@pytest.mark.sample(0)
def test_every_link_leads_somewhere(site):
    """Within the site; pages load nothing from elsewhere."""
    assert broken_links(site) == []
