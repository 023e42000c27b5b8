"""Pages of the documentation site as a person sees them."""

import pytest
from documentation_site import built

PICTURES = "return [...document.querySelectorAll('article img')]"
PAGES = (
    *("index", "choosing", "errors", "gallery", "how-to/from-torch", "optimizers/adam", "tutorials/01_first_steps"),
    *("reference/tristep", "reference/viz-runs"),
)
BUTTONS = {
    "From torch.optim": "how-to/from-torch.html",
    "From MXNet": "how-to/from-mxnet.html",
    "In a notebook": "notebooks.html",
}


@pytest.mark.sample(0)
def test_pages_can_be_read(browser, tmp_path_factory):
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
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen_has_ways_in_and_code_above_the_picture(browser, tmp_path_factory, width, height):
    site = built(tmp_path_factory, "--live", "none", "--optimizers", "adam")
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        for page in PAGES:
            browser.driver.get((site / f"{page}.html").as_uri())
            browser.keep(f"site-{width}-{page.replace('/', '-')}")
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth"), page
        browser.driver.get((site / "index.html").as_uri())
        links = browser.run("return [...document.querySelectorAll('.md-button')].map((e) => [e.innerText, e.href])")
        assert {text: link.partition(f"{site.name}/")[2].partition("#")[0] for text, link in links} == BUTTONS
        ends = browser.run(
            "return [...document.querySelectorAll('article .md-button, article pre')].slice(0, 5)"
            ".map((each) => each.getBoundingClientRect().bottom)"
        )
        (picture,) = browser.run(f"{PICTURES}.slice(0, 1).map((each) => each.getBoundingClientRect().top)")
        assert max(ends) < min(picture, height)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.sample(0)
def test_formulas_are_drawn_without_a_script(browser, tmp_path_factory):
    site = built(tmp_path_factory, "--live", "none", "--optimizers", "adam")
    browser.driver.get((site / "optimizers" / "adam.html").as_uri())
    heights = browser.run(
        "return [...document.querySelectorAll('.formula math')].map((e) => e.getBoundingClientRect().height)"
    )
    assert len(heights) == 4
    assert max(heights[:3]) < heights[3]  # of the fraction


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
