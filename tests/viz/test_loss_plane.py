"""The loss over a plane of weights: values against NumPy in float64, directions against its singular value decomposition."""

import numpy as np
import pytest
import torch
from drawn_scenes import words_of
from torch import nn

import tristep
from tristep.viz import LossPlaneView, WeightPath, loss_plane
from tristep.viz.scene import Heatmap, Line, level_lines, surface_layers


@pytest.fixture
def regression():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64) + 0.3


def _linear():
    torch.manual_seed(1)
    return nn.Linear(4, 1).double()


def _expected(weights, data):
    inputs, labels = (each.numpy() for each in data)
    outputs = inputs @ weights[..., :4].T + weights[..., 4]
    return ((outputs - labels) ** 2).mean(axis=0)


def _trained(name, data, steps=40, every=1, **settings):
    net = _linear()
    trainer, path = tristep.Trainer(net, name, settings), WeightPath(net, name, every)
    path.step()
    for _ in range(steps):
        trainer.zero_grad()
        nn.functional.mse_loss(net(data[0]), data[1]).backward()
        trainer.step(1)
        path.step()
    return path


@pytest.fixture
def paths(regression):
    return [_trained("sgd", regression, learning_rate=0.05), _trained("adam", regression, every=3, learning_rate=0.1)]


def test_values_are_those_of_the_weights_there(regression, paths):
    plane = loss_plane(_linear(), nn.MSELoss(), regression, paths, n=7)
    x, y = np.meshgrid(plane.x, plane.y)
    weights = plane.origin.astype(float) + np.stack([x.ravel(), y.ravel()], axis=1) @ plane.directions.astype(float)
    np.testing.assert_allclose(plane.values.ravel(), _expected(weights, regression), rtol=1e-5)
    for path in paths:
        np.testing.assert_allclose(plane.losses[path.name], _expected(path.points.astype(float), regression), rtol=1e-10)
        assert plane.steps[path.name].tolist() == list(range(0, 41, 1 if path.name == "sgd" else 3))


def test_directions_are_the_principal_ones(regression, paths):
    plane = loss_plane(_linear(), nn.MSELoss(), regression, paths, n=3)
    points = np.concatenate([path.points for path in paths]).astype(float)
    _, sizes, directions = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(np.abs((plane.directions * directions[:2]).sum(axis=1)), 1, atol=1e-6)
    np.testing.assert_allclose(plane.explained, sizes[:2] ** 2 / (sizes**2).sum(), rtol=1e-9)
    for path in paths:  # what is on the plane and what is off it make the whole way
        distance = np.linalg.norm(path.points - points.mean(axis=0), axis=1)
        found = np.hypot(np.linalg.norm(plane.paths[path.name], axis=1), plane.off[path.name])
        np.testing.assert_allclose(found, distance, rtol=1e-6)


def test_a_way_of_two_weights_lies_on_its_plane(regression):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.point = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))

        def forward(self, x):
            return x * self.point

    net = Two()
    path = WeightPath(net)
    for step in range(5):
        with torch.no_grad():
            net.point.copy_(torch.tensor([1.0 - 0.2 * step, -1.0 + 0.1 * step**2]))
        path.step()
    data = torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    plane = loss_plane(net, nn.MSELoss(), data, path, n=5)
    assert np.abs(plane.off["run"]).max() < 1e-6
    assert sum(plane.explained) == pytest.approx(1)
    back = plane.origin + plane.paths["run"] @ plane.directions
    np.testing.assert_allclose(back, path.points, atol=1e-6)


def test_a_way_along_a_line_has_a_plane(regression):
    net, data = _linear(), regression
    path = WeightPath(net)
    for _ in range(4):
        path.step()
        with torch.no_grad():
            net.weight += torch.tensor([[1.0, 0.0, 2.0, 0.0]])
    plane = loss_plane(net, nn.MSELoss(), data, path, n=3)
    assert plane.explained[0] == pytest.approx(1)
    np.testing.assert_allclose(plane.directions @ plane.directions.T, np.eye(2), atol=1e-6)


def test_random_filters_are_as_long_as_the_models():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16, 4))
    data = torch.randn(5, 2, 6, 6), torch.randint(4, (5,))
    plane = loss_plane(net, nn.CrossEntropyLoss(), data, directions="filter", n=3, seed=4)
    again = loss_plane(net, nn.CrossEntropyLoss(), data, directions="filter", n=3, seed=4)
    assert plane.directions.tobytes() == again.directions.tobytes()
    assert plane.values.tobytes() == again.values.tobytes()
    vector, start = torch.from_numpy(plane.directions), 0
    for parameter in net.parameters():
        part = vector[:, start : start + parameter.numel()].reshape(2, *parameter.shape)
        start += parameter.numel()
        for direction in part:
            if parameter.ndim < 2:
                assert not direction.any()
            else:
                torch.testing.assert_close(direction.flatten(1).norm(dim=1), parameter.detach().flatten(1).norm(dim=1))
    # The middle of the grid is the model itself, in evaluation mode.
    with torch.no_grad():
        expected = nn.functional.cross_entropy(net.eval()(data[0]), data[1])
    assert plane.values[1, 1] == pytest.approx(expected.item(), rel=1e-5)


def test_the_model_is_left_as_it_was():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[2].eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    loss_plane(net, nn.CrossEntropyLoss(), (torch.randn(6, 3), torch.randint(2, (6,))), directions="filter", n=4)
    assert [module.training for module in net] == [True, True, False, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_a_long_trajectory_is_downsampled():
    net = nn.Linear(2, 1)
    path = WeightPath(net, every=2)
    for _ in range(1500):
        path.step()
    steps = path.steps
    assert 128 <= len(steps) <= 256
    assert len(path.points) == len(steps)
    assert set(np.diff(steps)) == {steps[1]}
    assert steps[0] == 0
    assert 1500 - steps[-1] <= 2 * steps[1]


def test_the_picture_shows_ways_and_heights(regression, paths):
    plane = loss_plane(_linear(), nn.MSELoss(), regression, paths, n=9)
    view = LossPlaneView(plane)
    scene = view.scene()
    surface, curves = scene.panels
    (image,) = [layer for layer in surface.layers if isinstance(layer, Heatmap)]
    np.testing.assert_allclose(image.values, np.maximum(plane.values - plane.values.min(), image.limits[0]), rtol=1e-6)
    ways = {layer.name: layer for layer in surface.layers if isinstance(layer, Line) and layer.name}
    assert list(ways) == ["sgd", "adam"] == [line.name for line in curves.layers]
    middle = scene.state(step=20)
    for name, steps in (("sgd", 21), ("adam", 7)):  # adam was looked at every third step
        x, y = scene.drawn(ways[name], middle)
        assert np.isfinite(x).sum() == steps
        np.testing.assert_allclose(np.stack([x, y], axis=1)[:steps], plane.paths[name][:steps], rtol=1e-6)
    assert [text.get_text() for text in words_of(view.figure())].count("adam") == 1  # one legend for both panels
    words = view.describe()
    assert f"{plane.losses['adam'][-1]:.4g}" in words
    assert f"{plane.values.min():.4g}" in words


def test_level_lines_are_where_the_values_are():
    side = np.linspace(-3, 3, 121)
    values = side[:, None] ** 2 + 4 * side**2
    x, y = level_lines(side, side, values, [1.0, 4.0])
    there = np.isfinite(x)
    heights = y[there] ** 2 + 4 * x[there] ** 2
    assert np.minimum(np.abs(heights - 1), np.abs(heights - 4)).max() < 0.01
    assert (np.abs(heights - 1) < 0.5).any()
    assert (np.abs(heights - 4) < 0.5).any()


def test_a_surface_with_holes_and_a_flat_one():
    side = np.linspace(-1, 1, 11)
    values = side[:, None] + side
    values[3, 4] = np.inf
    image, lines = surface_layers(side, side, values)
    assert not np.isfinite(image.values[3, 4])
    assert np.isfinite(image.values).sum() == 120
    assert np.isfinite(lines.x).any()
    flat, lines = surface_layers(side, side, np.ones((11, 11)))
    assert np.isfinite(flat.values).all()
    assert not np.isfinite(lines.x).any()
