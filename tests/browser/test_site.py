"""Pages of the documentation site as a person sees them."""

import pytest
from documentation_site import built

PICTURES = "return [...document.querySelectorAll('article img')]"
PAGES = ("index", "how-to/from-torch", "optimizers/adam", "tutorials/01_first_steps", "reference/tristep")


@pytest.mark.sample(0)
def test_five_pages_can_be_read(browser, tmp_path_factory):
    """From the disk: headings, pictures that have been loaded, nothing wider than the window, no errors in the console."""
    site = built(tmp_path_factory, "--live", "none", "--optimizers", "adam")
    for page in PAGES:
        browser.driver.get((site / f"{page}.html").as_uri())
        browser.keep(f"site-{page.replace('/', '-')}")
        assert browser.run("return document.querySelector('article h1').innerText.trim()")
        assert browser.run("return document.querySelectorAll('nav a').length") > 30
        browser.until(lambda: browser.run(f"{PICTURES}.every((each) => each.complete)"), page)
        assert browser.run(f"{PICTURES}.filter((each) => each.complete && !each.naturalWidth).length") == 0
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
        loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert [name for name in loaded if not name.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.sample(0)
def test_a_view_in_a_tutorial_answers_to_its_slider(browser, tmp_path_factory):
    site = built(tmp_path_factory, "--live", "13", "--optimizers", "none")
    browser.driver.get((site / "tutorials" / "13_what_muon_does.html").as_uri())
    frame = browser.find("iframe.view")
    browser.run("arguments[0].scrollIntoView()", frame)
    browser.driver.switch_to.frame(frame)
    slider = browser.find("input[type=range]")
    before = browser.digest()
    browser.keys(slider, "\ue012")  # the left arrow: it is at its end
    browser.until(lambda: browser.digest() != before, "another picture")
    browser.driver.switch_to.default_content()
