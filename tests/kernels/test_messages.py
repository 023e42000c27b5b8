"""Messages about unknown names: what is meant comes first, and long lists are cut."""

import pytest

from tristep.kernels.messages import did_you_mean, one_of, there_are

NAMES = [f"n{i}" for i in range(33)]


@pytest.mark.parametrize(
    ("names", "end"),
    [
        ([], "There are none"),
        (NAMES[:2], "There are 'n0', 'n1'"),
        (NAMES[:10], ", 'n8', 'n9'"),
        (NAMES[:11], ", 'n8', 'n9' and 1 more"),
        (NAMES, ", 'n8', 'n9' and 23 more"),
    ],
)
def test_of_more_than_ten_names_the_first_ten_are_listed(names, end):
    assert there_are("zzz", names).endswith(end)


def test_what_is_meant_comes_first():
    names = ["learning_rate", "momentum"]
    assert there_are("learning_rat", names) == " Did you mean 'learning_rate'? There are 'learning_rate', 'momentum'"
    assert there_are("lr", names, "Write it out.") == " Write it out. There are 'learning_rate', 'momentum'"
    assert one_of("momentun", names) == " Did you mean 'momentum'? It must be one of 'learning_rate', 'momentum'"
    assert one_of("zzz", names) == " must be one of 'learning_rate', 'momentum'"
    assert one_of("lr", names, {"lr": "learning_rate"}).startswith(" Did you mean 'learning_rate'?")
    assert did_you_mean(3, names) == did_you_mean(("a", "list"), []) == ""
