"""What the callbacks of training libraries have in common: when they record, and when they show it."""

import IPython.display
import pytest
import torch

from tristep.integrations import recording
from tristep.viz import Dashboard, LossView


@pytest.fixture
def shown(monkeypatch):
    """In a notebook that somebody has open: the views that it is given."""
    views = []
    monkeypatch.setattr(recording, "in_notebook", lambda: True)
    monkeypatch.setattr(recording, "has_front_end", lambda: True)
    monkeypatch.setattr(IPython.display, "display", views.append)
    return views


def _begun(view="live", shows=True):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    followed = recording.FollowedTraining("net", 1, view)
    followed.begin(optimizer, net, 5, shows)
    return net, optimizer, followed


def _step(net, optimizer, followed):
    loss = net(torch.ones(3, 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    followed.step(loss=loss)
    return loss.item()


def test_a_dashboard_is_shown_at_once_and_follows(shown):
    net, optimizer, followed = _begun()
    assert shown == [followed.view]
    assert isinstance(followed.view, Dashboard)
    drawn = []
    followed.view.refresh = lambda: drawn.append(followed.run.last_step)
    losses = [_step(net, optimizer, followed) for _ in range(3)]
    assert drawn == [6, 7, 8]
    assert followed.run.scalars["loss"].recent()[1].tolist() == losses
    followed.end()
    assert shown == [followed.view]


def test_without_a_front_end_the_picture_is_that_of_the_end(shown, monkeypatch):
    monkeypatch.setattr(recording, "has_front_end", lambda: False)
    net, optimizer, followed = _begun(LossView)
    _step(net, optimizer, followed)
    assert shown == []
    followed.end()
    assert shown == [followed.view]
    assert "1 step" not in followed.view.describe()
    assert followed.view.run.scalars["loss"].last_step == 6
    followed.end()
    assert len(shown) == 1


def test_a_picture_that_fails_does_not_end_the_training(shown):
    net, optimizer, followed = _begun()

    def refresh():
        raise ZeroDivisionError("on purpose")

    followed.view.refresh = refresh
    with pytest.warns(RuntimeWarning, match=r"cannot be drawn \(ZeroDivisionError\('on purpose'\)\)"):
        _step(net, optimizer, followed)
    _step(net, optimizer, followed)
    followed.end()
    assert followed.run.last_step == 7


def test_a_second_training_is_a_run_of_its_own(shown):
    net, optimizer, followed = _begun(None)
    _step(net, optimizer, followed)
    first = followed.run
    followed.begin(optimizer, net, 0, True)
    _step(net, optimizer, followed)
    assert followed.run is not first
    assert (first.last_step, followed.run.last_step) == (6, 1)
