"""Sliders, choices, buttons, playing, and the legend, by mouse and by keyboard, with and without Python."""

import base64
import io
from dataclasses import replace

import numpy as np
from PIL import Image
from scene_cases import DOWN, ENTER, LEFT, LIGHT, RIGHT, colour_at, one, swept

from tristep.viz.scene import Axis, Button, Control, Line, Note, Panel, Points, RunTable, Scene, Text


def test_a_key_on_the_slider_changes_the_picture_and_back_gives_the_same(stage):
    scene = swept()
    stage.show(scene)
    slider = stage.browser.find("input[type=range]")
    assert slider.accessible_name == "learning rate"
    assert slider.get_attribute("aria-valuetext") == "2"
    before = stage.browser.digest()
    stage.browser.keys(slider, RIGHT)
    assert stage.browser.digest() != before
    assert slider.get_attribute("aria-valuetext") == "4"
    assert stage.browser.find("output").text == "4"
    pixels = stage.browser.pixels()
    assert colour_at(pixels, stage.place(scene, 5, 4)) == LIGHT.colours[0]
    assert colour_at(pixels, stage.place(scene, 5, 2)) == LIGHT.grid
    stage.browser.keys(slider, LEFT)
    assert stage.browser.digest() == before
    assert stage.sent("control")[0] == {"kind": "control", "name": "rate", "index": 2}


def test_python_gets_the_last_of_many_changes(stage):
    stage.show(swept())
    stage.browser.keys(stage.browser.find("input[type=range]"), LEFT, RIGHT, RIGHT, RIGHT, LEFT, RIGHT)
    stage.browser.until(lambda: stage.sent("control")[-1]["index"] == 3, "the last change")
    assert stage.sent("control")[0]["index"] == 0


def test_a_choice(stage):
    c = Control("f", "function", ["bowl", "saddle"], kind="choice")
    scene = one(Line([0, 10], [[2, 2], [8, 8]], by=("f",), style=0, width=3), controls=[c])
    stage.show(scene)
    choice = stage.browser.find("select")
    assert choice.accessible_name == "function"
    stage.browser.keys(choice, DOWN)
    assert colour_at(stage.browser.pixels(), stage.place(scene, 5, 8)) == LIGHT.colours[0]
    assert stage.sent("control") == [{"kind": "control", "name": "f", "index": 1}]


def test_play_begins_when_asked_goes_to_the_end_and_stops(stage):
    stage.show(swept("play", seconds=0.2))
    button = stage.browser.find("button[data-play]")
    stage.browser.pixels()
    stage.browser.pixels()
    assert (button.accessible_name, stage.browser.find("output").text) == ("Play learning rate", "2")
    button.click()
    assert button.accessible_name == "Pause learning rate" or stage.browser.find("output").text == "8"
    stage.browser.until(lambda: stage.browser.find("output").text == "8", "the end")
    assert button.accessible_name == "Play learning rate"


def test_what_only_python_acts_on_is_there_only_with_python(stage):
    controls = [Control("rate", "rate", [1, 2], remote=True), Control("step", "step", [1, 2])]
    scene = one(Line([0, 1], [0, 1]), controls=controls, buttons=[Button("pause", "Pause")])
    stage.show(scene, remote=False)
    assert [each.accessible_name for each in stage.browser.driver.find_elements("css selector", "input")] == ["step"]
    assert stage.browser.driver.find_elements("css selector", ".tristep-controls button") == []
    stage.show(scene)
    assert [each.accessible_name for each in stage.browser.driver.find_elements("css selector", "input")] == ["rate", "step"]
    stage.browser.find("button[data-button=pause]").click()
    assert stage.sent("button") == [{"kind": "button", "name": "pause"}]


def test_the_legend_hides_and_shows_by_mouse_and_keyboard(stage):
    scene = one(
        Line([0, 10], [3, 3], style=0, width=3, name="SGD"),
        Points([5], [8], style=0, size=12, name="SGD"),
        Line([0, 10], [6, 6], style=15, width=3, name="Adam"),
    )
    stage.show(scene)
    before = stage.browser.digest()
    entries = stage.browser.driver.find_elements("css selector", ".tristep-legend button")
    assert [entry.text for entry in entries] == ["SGD", "Adam"]
    entries[0].click()
    pixels = stage.browser.pixels()
    assert colour_at(pixels, stage.place(scene, 5, 3)) == LIGHT.background
    assert colour_at(pixels, stage.place(scene, 5, 8)) == LIGHT.grid
    assert colour_at(pixels, stage.place(scene, 5, 6)) == LIGHT.colours[7]
    entry = stage.browser.find(".tristep-legend button")
    assert entry.get_attribute("aria-pressed") == "false"
    stage.browser.keep("legend")
    entry.send_keys(ENTER)
    assert stage.browser.digest() == before
    assert stage.browser.run("return document.activeElement.textContent") == "SGD"


# Time passes when a test says so: each interval and each wait for an answer is called by hand.
BY_HAND = """
const now = performance.now.bind(performance), wait = window.setTimeout.bind(window);
window.later = 0;
performance.now = () => now() + window.later;
window.setInterval = (call) => { window.interval = call; return 0; };
window.setTimeout = (call, time) => (time === 3000 ? (window.patience = call, 1) : wait(call, time));
"""


def test_silence_of_python_is_told_until_it_answers(stage):
    stage.browser.run(BY_HAND)
    stage.show(swept(remote=True))
    silence = stage.browser.find(".tristep-silence")
    stage.browser.keys(stage.browser.find("input"), RIGHT)
    assert not silence.is_displayed()
    stage.browser.run("patience()")
    assert silence.is_displayed()
    assert "the kernel has ended or been restarted" in silence.text
    stage.browser.run("shown.answered()")
    assert not silence.is_displayed()


def test_what_a_page_without_python_says_of_a_loop_is_said_to_be_past(stage):
    stage.browser.run(BY_HAND)
    scene = swept(remote=True)
    status = Panel(
        Axis("", 0, 1), Axis("", 0, 1), [Text("run: running, 485 steps/s", 0, 0.5, name="status")], frame=False, row=1
    )
    stage.show(replace(scene, panels=[*scene.panels, status]))

    def says():
        stage.browser.frame()
        return [words for words, *_ in stage.written() if "485" in words]

    assert says() == ["run: running, 485 steps/s"]
    stage.browser.keys(stage.browser.find("input"), RIGHT)
    stage.browser.run("patience()")
    assert says() == ["when last heard: run: running, 485 steps/s"]
    stage.browser.run("shown.answered()")
    assert says() == ["run: running, 485 steps/s"]


def _live_scene(live=True):
    """Of a running loop: a slider of the browser's, one that Python acts on, and a button."""
    powers = Control("power", "power", [1, 2], 0), Control("rate", "rate", [0.1, 0.2], 0, remote=True)
    line = Line([0, 1], [[0, 1], [0, 2]], by=("power",))
    panel = Panel(Axis("x", 0, 1), Axis("y", 0, 2), [line])
    return Scene([panel], controls=powers, buttons=[Button("pause", "Pause")], live=live)


def _asked(stage):
    stage.browser.run("later += 6000; interval()")
    return len(stage.sent("waiting"))


def _lost(stage):
    """What a person sees: whether it is said, whether the button is grey, and whether the remote slider is."""
    run = stage.browser.run
    pale = run("return getComputedStyle(document.querySelector('.tristep-remote')).opacity < 1")
    return (
        stage.browser.find(".tristep-silence").is_displayed(),
        stage.browser.find(".tristep-buttons button").get_attribute("aria-disabled") == "true",
        pale,
    )


def test_a_running_picture_that_gets_no_more_says_so(stage):
    stage.browser.run(BY_HAND)
    stage.show(_live_scene())
    picture = stage.browser.digest(".tristep-picture canvas")
    stage.browser.run("interval()")
    assert stage.sent("waiting") == []  # something has just come
    assert _asked(stage) == _asked(stage) == 1
    assert _lost(stage) == (False, False, False)
    stage.browser.run("patience()")
    assert _lost(stage) == (True, True, True)
    stage.browser.find(".tristep-buttons button").click()
    assert stage.sent("button") == []
    assert stage.browser.digest(".tristep-picture canvas") == picture
    stage.update(_live_scene())  # another sign than an answer: it was busy
    assert _lost(stage) == (False, False, False)
    assert _asked(stage) == 2
    stage.browser.run("patience(); shown.answered()")
    assert _lost(stage) == (False, False, False)
    stage.update(_live_scene(live=False))  # one that waits for a person
    assert _asked(stage) == 2


def test_what_cannot_be_sent_is_said_at_once(stage):
    stage.browser.run(BY_HAND)
    stage.show(_live_scene(live=False))
    stage.browser.run("sent.push = () => { throw new Error('Cannot send'); }")
    stage.browser.find(".tristep-buttons button").click()
    assert _lost(stage) == (True, True, True)


def test_an_update_keeps_what_is_set_unless_the_scene_sets_it_and_the_slider_under_the_hand(stage):
    def updated(index, *values, texts=None):
        control = Control("rate", "learning rate", values, index, texts=texts)
        stage.update(one(Line([0, 10], [[v, v] for v in values], by=("rate",), style=0, width=3), controls=[control]))
        return stage.browser.find("output").text

    stage.show(swept())
    slider = stage.browser.find("input[type=range]")
    stage.browser.keys(slider, RIGHT, RIGHT)
    scene = swept()
    stage.update(scene)
    assert stage.browser.find("output").text == "8"
    assert colour_at(stage.browser.pixels(), stage.place(scene, 5, 8)) == LIGHT.colours[0]
    assert stage.browser.run("return document.activeElement === arguments[0]", slider)
    assert updated(0, 1, 2, 4, 8) == "1"
    assert updated(4, 1, 2, 4, 8, 9) == "9"
    # Also where as many values become others.
    assert updated(1, 0, 50, texts=["none", "50 steps"]) == "50 steps"
    slider = stage.browser.find("input[type=range]")
    assert updated(1, 0, 100, texts=["none", "100 steps"]) == "100 steps"
    stage.browser.keys(slider, LEFT)
    assert stage.browser.find("output").text == "none"


def test_a_note_leads_to_what_it_tells_of(stage):
    rows = Control("layer", "tensor", ["a", "b", "c"], 0, "choice")
    line = Line([0, 10], [[2, 2], [5, 5], [8, 8]], by=("layer",), name="norm")
    notes = ["as it is", Note("c: its gradient is 0", {"layer": 2}), Note("loss: not finite at step 5", x=5.0)]
    scene = Scene([Panel(Axis("x", 0, 10), Axis("y", 0, 10), [line])], controls=[rows], notes=notes)
    stage.show(scene)
    assert stage.browser.find(".tristep-notes").text == "as it is\nc: its gradient is 0\nloss: not finite at step 5"
    tensor, step = stage.browser.driver.find_elements("css selector", ".tristep-notes button")
    stage.update(scene)
    stage.browser.keys(tensor, ENTER)  # the same button, also after another frame
    assert stage.browser.find("select").get_attribute("value") == "2"
    assert stage.sent("control") == [{"kind": "control", "name": "layer", "index": 2}]
    stage.browser.keys(step, ENTER)
    spoken = stage.browser.run("return document.querySelector('[aria-live].tristep-hidden').textContent")
    assert "x 5" in spoken


def test_a_choice_of_many_is_searched(stage):
    names = [f"block{i // 8}.{('weight', 'bias')[i % 2]}{i % 8}" for i in range(80)]
    layer = Control("layer", "tensor", names, 0, "choice")
    lines = Line([0, 10], [[i / 8, i / 8] for i in range(80)], by=("layer",))
    stage.show(one(lines, controls=[layer]))
    field = stage.browser.find("input[list]")
    assert field.accessible_name == "tensor"
    assert field.get_attribute("value") == "block0.weight0"
    assert len(stage.browser.driver.find_elements("css selector", "datalist option")) == 80
    stage.browser.keys(field, "K7.BIAS3", ENTER)
    assert stage.sent("control") == [{"kind": "control", "name": "layer", "index": 59}]
    assert field.get_attribute("value") == "block7.bias3"
    stage.browser.keys(field, "nothing", ENTER)
    assert field.get_attribute("value") == "block7.bias3"  # what is drawn, with the focus still in the field
    stage.browser.run("document.activeElement.blur()")
    assert field.get_attribute("value") == "block7.bias3"
    assert len(stage.sent("control")) == 1


def _table_of(n=12):
    lines = [Line([0, 1], [k, k], name=f"run {k}", style=k, run=k, width=4) for k in range(n)]
    losses = [float((5 * k) % n) for k in range(n)]
    losses[3] = float("nan")
    made = one(*lines, x=Axis("step", 0, 1), y=Axis("loss", -1, n))
    table = RunTable([f"run {k}" for k in range(n)], {"loss": losses, "rule": ["adam", "sgd"] * (n // 2)}, [0, 1])
    return Scene(made.panels, runs=table)


def test_a_table_of_runs_is_searched_and_sorted_and_chooses_what_is_drawn(stage):
    stage.show(_table_of())
    browser = stage.browser
    rows = "[...document.querySelectorAll('.tristep-runs tbody tr:not([hidden]) label')]"
    listed = f"return {rows}.map((label) => label.innerText.trim())"
    search, status = browser.find(".tristep-runs input[type=search]"), browser.find(".tristep-runs [role=status]")
    assert (search.accessible_name, status.text) == ("Search runs", "2 of 12 drawn")
    assert browser.run("return document.querySelector('.tristep-legend').innerText") == ""  # they are in the table
    before = browser.digest()
    box = browser.find("input[data-run='4']")
    assert (box.accessible_name, box.is_selected()) == ("run 4", False)
    browser.keys(box, " ")
    browser.until(lambda: browser.digest() != before, "another line")
    assert stage.sent("runs")[-1] == {"kind": "runs", "shown": [0, 1, 4]}
    browser.keys(box, " ")
    browser.until(lambda: browser.digest() == before, "the same picture")
    browser.keys(box, DOWN)
    assert browser.run("return document.activeElement.dataset.run") == "5"
    search.send_keys("sgd 1")  # in any column: losses are 5 k modulo 12
    assert browser.run(listed) == ["run 1", "run 5", "run 7", "run 11"]
    assert status.text == "2 of 12 drawn, 4 found"
    every = browser.find("input[aria-label='Draw all runs found']")
    every.click()
    assert stage.sent("runs")[-1]["shown"] == [0, 1, 5, 7, 11]
    search.clear()
    search.send_keys(" ")
    heading = browser.find(".tristep-runs th:nth-child(2) button")
    for sign, state in ((1, "ascending"), (-1, "descending")):
        heading.click()
        expected = sorted((k for k in range(12) if k != 3), key=lambda k: sign * ((5 * k) % 12)) + [3]
        assert browser.run(listed) == [f"run {k}" for k in expected]
        assert browser.find(".tristep-runs th:nth-child(2)").get_attribute("aria-sort") == state
    browser.keep("runs-table")
    # A later scene with more runs keeps what was chosen.
    stage.update(_table_of(14))
    assert status.text == "5 of 14 drawn"


def test_a_slider_is_seen_where_a_system_gives_all_colours(stage):
    features = [{"name": "forced-colors", "value": "active"}]
    stage.browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        stage.show(swept())
        shot = Image.open(io.BytesIO(stage.browser.find("input[type=range]").screenshot_as_png)).convert("L")
        pixels = np.asarray(shot).astype(int)
        across = pixels[pixels.shape[0] // 2]
        assert (np.abs(across - pixels[0, 0]) > 100).mean() > 0.9  # the track, or the thumb on it
        assert np.unique(across).size > 2
    finally:
        stage.browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_field_keeps_the_focus_in_a_shadow(stage):
    """As in marimo, where controls are made anew while somebody types; and a page, or a shadow, has our rules once."""
    fields = [one(controls=[Control("rate", "rate", [1] * n, remote=True, typed=True)]) for n in (2, 3)]
    stage.show(fields[0])
    found = stage.browser.driver.execute_async_script(
        "const [first, second, done] = arguments;"
        "const host = document.body.appendChild(document.createElement('div'));"
        "const shadow = host.attachShadow({mode: 'open'});"
        "const place = () => shadow.appendChild(document.createElement('div'));"
        "const views = [0, 1].map(() => mount(place(), bytes(first), {send: () => {}}));"
        "shadow.querySelector('[data-typed]').focus();"
        "views[0].update(bytes(second));"
        "requestAnimationFrame(() => requestAnimationFrame(() => {"
        "  const rules = [shadow, document].map((each) => each.querySelectorAll('.tristep-rules').length);"
        "  done([shadow.activeElement?.dataset.typed, shadow.querySelector('input[type=range]').max, ...rules]);"
        "  views.forEach((each) => each.destroy()); host.remove(); }))",
        *[base64.b64encode(scene.to_bytes()).decode() for scene in fields],
    )
    assert found == ["rate", "2", 1, 1]
