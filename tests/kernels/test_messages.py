"""Messages about unknown names: what is meant comes first, and long lists are cut."""

from tristep.kernels.messages import did_you_mean, one_of, there_are


def test_what_is_meant_comes_first():
    names = ["learning_rate", "momentum"]
    assert there_are("learning_rat", names) == " Did you mean 'learning_rate'? There are 'learning_rate', 'momentum'"
    assert there_are("lr", names, "Write it out.") == " Write it out. There are 'learning_rate', 'momentum'"
    assert one_of("momentun", names) == " Did you mean 'momentum'? It must be one of 'learning_rate', 'momentum'"
    assert one_of("zzz", names) == " must be one of 'learning_rate', 'momentum'"
    assert one_of("lr", names, {"lr": "learning_rate"}).startswith(" Did you mean 'learning_rate'?")
    assert did_you_mean(3, names) == did_you_mean(("a", "list"), []) == ""
