"""The code in docs/notebooks.md runs, from top to bottom, and its magics do what the page says."""

import re
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from tristep import trainer, viz

PAGE = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(?:python|ipython)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = ("%load_ext", "%opt_")  # blocks of magics: each line of them is a cell
SHORTER = {  # the same code in less time
    "steps=100, trials=8, seeds=5": "engine='eager', steps=20, trials=2, seeds=2",
    'savefig("paths.png", dpi=200)': 'savefig("paths.png")',
    "seeds=[0, 1], epochs=5,": 'seeds=[0, 1], epochs=1, engine="eager",',
    '"adam", {"learning_rate": 0.01})\nrecorder': '"adam", {"learning_rate": 0.01}, engine="eager")\nrecorder',
}


@pytest.mark.sample(0)  # the page is run by the full tier
@pytest.mark.usefixtures("chosen_renderer")
@pytest.mark.filterwarnings("ignore:tristep. compiling")
def test_all_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shell = InteractiveShell()  # not a terminal's, and not the one that other tests have
    shell.history_manager.enabled = False
    names, given = shell.user_ns, {}
    try:
        for block in BLOCKS:
            for long, short in SHORTER.items():
                block = block.replace(long, short)
            cells = block.splitlines() if block.startswith(LINES) else [block]
            for cell in cells:
                done = shell.run_cell(cell)
                done.raise_error()
                given[cell.split()[0] if cell.startswith("%") else cell] = done.result
    finally:
        viz.set_renderer(None)
        viz.live.stop_loops()
        if "tristep" in shell.extension_manager.loaded:
            shell.extension_manager.unload_extension("tristep")
    assert all(long in PAGE for long in SHORTER)
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"paths.png", "step.png", "paths.html", "run.csv", "run.jsonl", "race"}
    assert isinstance(given["%opt_compare"], viz.TrajectoryView)
    assert given["%opt_compare"].trajectories.names == ("adam", "lion", "sgd")
    assert names["loop"].status == "finished"
    assert isinstance(names["found"], trainer.Sweep)
