"""Names that files, pictures and pages take for something else: they are shown as they are, or with escapes."""

import html
import json

import pytest
import torch
from matplotlib.text import Text

from tristep import viz
from tristep.viz import Recorder, Run, read_run


@pytest.mark.sample(2)
@pytest.mark.usefixtures("chosen_renderer")
@pytest.mark.parametrize("make", [viz.Dashboard, viz.LossView])
@pytest.mark.parametrize(
    "name", ["a$x$_b", "\\alpha$", "caf\udce9", "<b>&amp;"], ids=["formula", "half", "surrogate", "markup"]
)
def test_names_are_shown_as_they_are(tmp_path, name, make):
    net = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD([(name, net.weight)], lr=0.1)
    recorder = Recorder(optimizer, name=name, every=1, weights={name: 0})
    for step in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        recorder.step(**{"loss": 1.0 + step, name: 2.0 + step})
    shown = name.replace("\udce9", "\\udce9")
    view = make(recorder)
    figure = view.figure()
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and "$" in text.get_text()]
    assert not any(text.get_parse_math() for text in texts)
    assert shown in view.describe().encode().decode()
    assert json.dumps(view._repr_mimebundle_()[0], ensure_ascii=False).encode()
    # ipywidgets draw a frame for each value.
    for renderer in ("canvas", "ipywidgets") if make is viz.LossView else ("canvas",):
        viz.set_renderer(renderer)
        with view:
            view.widget()
    viz.set_renderer(None)
    page = view.html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.escape(shown) in page
    recorder.run.save(tmp_path / "run.safetensors")
    assert Run.load(tmp_path / "run.safetensors").parameters == [shown]


def test_names_that_no_file_can_have_come_from_json(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "caf\\udce9": 2.0}')
    assert list(read_run(path).scalars) == ["caf\\udce9"]
