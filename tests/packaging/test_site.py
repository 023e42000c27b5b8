"""The documentation site: its pages, and that every link leads somewhere."""

import sys
from pathlib import Path

import pytest
from documentation_site import broken_links, built

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


@pytest.mark.sample(0)
def test_every_link_leads_somewhere(site):
    """Within the site; pages load nothing from elsewhere."""
    assert broken_links(site) == []
