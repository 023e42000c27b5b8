"""How pictures look: colours that everybody can tell apart, line styles that do not repeat, PNGs for files and notebooks."""

import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from tristep.viz import TrajectoryView
from tristep.viz.render.matplotlib.figure import Figure
from tristep.viz.style import THEMES, line_style

# Linear RGB as seen without one kind of cone. Machado, Oliveira & Fernandes (2009), table 1, severity 1.
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_differ_for_every_kind_of_sight(theme, sight):
    seen = [_lab(np.clip(SIGHTS[sight] @ _linear(colour), 0, 1)) for colour in THEMES[theme].colours]
    nearest = min(np.linalg.norm(a - b) for a, b in combinations(seen, 2))
    assert nearest > 20


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", [*SIGHTS, "grey"])
def test_the_eight_optimizers_of_the_default_picture_are_told_apart(theme, sight):
    """By colour, or by dashes: grey is what a bad projector leaves, where 20 of L* are a fifth of all there is."""
    scene = TrajectoryView("beale", steps=2, factors=(1.0,)).scene()
    names = list(scene.legend(scene.panels))
    assert len(names) == 8
    looks = [line_style(style, theme) for _, style in names]
    for (one, a), (other, b) in combinations(zip(names, looks, strict=True), 2):
        seen = [SIGHTS.get(sight, np.eye(3)) @ _linear(look["color"]) for look in (a, b)]
        seen = [_lab(np.clip(each, 0, 1)) for each in seen]
        colours = abs(seen[0][0] - seen[1][0]) if sight == "grey" else np.linalg.norm(seen[0] - seen[1])
        assert colours > 20 or _dashes_apart(a["linestyle"], b["linestyle"]) > 0.3, (one, other)


# The contrast ratios that WCAG 2 asks of graphics and of words.
@pytest.mark.parametrize("theme", THEMES)
def test_lines_and_words_stand_out_from_the_background(theme):
    colours = THEMES[theme]
    assert min(_contrast(colour, colours.background) for colour in colours.colours) >= 3
    assert min(_contrast(colour, colours.background) for colour in (colours.ink, colours.quiet)) >= 4.5
    assert 1.1 < _contrast(colours.grid, colours.background) < 1.6


def test_a_line_keeps_its_hue_in_the_dark():
    for light, dark in zip(THEMES["light"].colours[:-1], THEMES["dark"].colours[:-1], strict=True):  # the last one is grey
        (_, *a), (_, *b) = _lab(_linear(light)), _lab(_linear(dark))
        assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.95


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


def _contrast(colour, background):
    """The contrast ratio of WCAG 2, from 1 to 21."""
    low, high = sorted(float(np.dot(_linear(each), [0.2126, 0.7152, 0.0722])) for each in (colour, background))
    return (high + 0.05) / (low + 0.05)


def _dashes_apart(one, other, length=24, fine=20):
    """Which share of a line one of them covers and the other does not, where they are shifted so that it is the least."""
    first, second = (_covered(dashes, 3 * length * fine, fine) for dashes in (one, other))
    n = length * fine
    return min(float((first[:n] != second[shift : shift + n]).mean()) for shift in range(0, n, 5))


def _covered(dashes, n, fine):
    """Of the first n places, so many in a line's width, whether they have ink."""
    if dashes == "-":
        return np.ones(n, bool)
    ends = np.cumsum(np.array(dashes[1]) * fine)
    return np.searchsorted(ends, np.arange(n) % ends[-1], side="right") % 2 == 0


def _linear(colour):
    """Linear RGB of "#rrggbb"; IEC 61966-2-1."""
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    """CIE L*a*b* of linear RGB, white point D65."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = (to_xyz @ linear) / np.sum(to_xyz, axis=1)
    f = [np.cbrt(v) if v > (6 / 29) ** 3 else v / (3 * (6 / 29) ** 2) + 4 / 29 for v in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
