"""The documentation site: its pages, and that every link leads somewhere."""

import re
import sys
from pathlib import Path

import pytest
from documentation_site import broken_links, built

from tristep.trainer.optimizer import registered

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


@pytest.mark.sample(0)
def test_each_optimizer_has_a_page_with_its_rule(site):
    names = [name for name, cls in registered().items() if cls.__module__.startswith("tristep.")]
    assert len(names) > 40
    for name in names:
        text = re.sub(r"<[^>]+>", "", (site / "optimizers" / f"{name}.html").read_text(encoding="utf-8"))
        assert all(part in text for part in ("Source", "What it keeps and moves", "Rule"))
    adam = re.sub(r"<[^>]+>", "", (site / "optimizers" / "adam.html").read_text(encoding="utf-8"))
    assert "def adam(w, g, state, hyper)" in adam
    assert "Kingma &amp; Ba" in adam
    assert (site / "optimizers" / "adam.png").is_file()


@pytest.mark.sample(0)
def test_folded_answers_are_text_with_formulas(site):
    page = (site / "tutorials" / "02_optimizers_compared.html").read_text(encoding="utf-8")
    answers = re.findall(r"<details[^>]*>(.+?)</details>", page, re.DOTALL)
    assert len(answers) >= 4
    assert all("<p>" in answer or "<ol>" in answer for answer in answers)
    assert all("<math" in answer and "$" not in answer for answer in answers)


@pytest.mark.sample(0)
def test_tutorials_that_are_run_have_pages_for_their_views(tmp_path_factory):
    site = built(tmp_path_factory, "--live", "13", "--optimizers", "none")
    page = (site / "tutorials" / "13_what_muon_does.html").read_text(encoding="utf-8")
    views = re.findall(r'<iframe[^>]*src="([^"]+)"', page)
    assert views
    assert broken_links(site) == []
