"""How pictures look: colours that everybody can tell apart, line styles that do not repeat, PNGs for files and notebooks."""

import io

import numpy as np
from PIL import Image

from tristep.viz.render.matplotlib.figure import Figure
from tristep.viz.style import THEMES, line_style


def test_sixty_four_lines_look_different():
    assert len({str(line_style(i)) for i in range(64)}) == 64
    assert line_style(64) == line_style(0)
    assert len({str(line_style(i, "dark")) for i in range(64)}) == 64


def test_png_has_the_size_asked_for_and_a_palette_and_a_notebook_the_space_that_it_takes():
    image = Image.open(io.BytesIO(Figure(3, 2).png(dpi=50)))
    assert (image.format, image.mode, image.size) == ("PNG", "P", (150, 100))
    png, space = Figure(3, 2)._repr_png_()
    assert space == {"width": 300, "height": 200}
    width, height = Image.open(io.BytesIO(png)).size
    assert width > 300
    assert width / height == 1.5


def test_a_palette_has_room_for_thin_lines_on_a_large_shaded_surface():
    figure = Figure(4, 3)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    x, y = np.meshgrid(np.linspace(0, 1, 400), np.linspace(0, 1, 300))
    axes.imshow(np.stack([0.7 + 0.2 * x, 0.7 + 0.2 * y, 0.9 - 0.1 * x * y], axis=-1), extent=(0, 1, 0, 1), aspect="auto")
    colours = THEMES["light"].colours[:-1]
    for i, colour in enumerate(colours):
        axes.plot([0.3, 0.4], [0.1 * i + 0.1] * 2, color=colour, linewidth=1)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    wanted, shown = (
        np.asarray(Image.open(file).convert("RGB")).astype(int) for file in (drawn, io.BytesIO(figure.png(dpi=150)))
    )
    error = np.abs(wanted - shown).max(axis=-1)
    assert error.max() < 40  # of the lines
    assert error.mean() < 6  # of the surface


def test_a_picture_of_few_colours_is_as_it_was_drawn():
    figure = Figure(3, 2)
    figure.add_axes((0, 0, 1, 1)).imshow(np.arange(200).reshape(10, 20), cmap="gray", aspect="auto")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    wanted, shown = (Image.open(file).convert("RGB") for file in (drawn, io.BytesIO(figure.png(dpi=100))))
    assert np.abs(np.asarray(wanted).astype(int) - np.asarray(shown)).max() <= 2
