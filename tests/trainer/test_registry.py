"""The registry, and that optimizers, schedules, initializers, stores and compressors treat names alike."""

import warnings

import pytest

from tristep import initializer, kvstore, lr_scheduler, optimizer
from tristep.trainer.registry import Registry

PUBLIC = {
    "optimizer": (optimizer.register, optimizer.Optimizer, optimizer.registered),
    "Optimizer": (optimizer.Optimizer.register, optimizer.Optimizer, optimizer.registered),
    "scheduler": (lr_scheduler.register, lr_scheduler.LRScheduler, lambda: lr_scheduler.LRScheduler.registry),
    "initializer": (initializer.register, initializer.Initializer, initializer.registered),
    "store": (kvstore.register, kvstore.KVStore, kvstore.registered),
    "KVStoreBase": (kvstore.KVStoreBase.register, kvstore.KVStore, kvstore.registered),
    "compressor": (kvstore.register_compressor, kvstore.Compressor, kvstore.registered_compressors),
    "Compressor": (kvstore.Compressor.register, kvstore.Compressor, kvstore.registered_compressors),
}


class Base:
    pass


@pytest.fixture
def registry():
    return Registry("shape", Base, argument="form", suffix="shape", hint="Write a class")


@pytest.mark.parametrize("name", ["round", "Round", "roundshape", "ROUNDSHAPE"])
def test_lookup_ignores_case_and_suffix(registry, name):
    @registry.register
    class RoundShape(Base):
        pass

    assert registry.lookup(name) is registry["roundshape"] is RoundShape
    assert registry.names() == ["round"]


def test_whole_name_precedes_name_without_suffix(registry):
    class Round(Base):
        pass

    class RoundShape(Base):
        pass

    registry.register(RoundShape)
    registry.register(Round)
    assert registry.lookup("round") is Round
    assert registry.lookup("roundshape") is RoundShape


def test_an_unknown_name_is_refused_with_what_is_meant_before_what_there_is(registry):
    with pytest.raises(
        ValueError, match="^form='round': no shape is registered by that name. Write a class. There are none$"
    ):
        registry.lookup("round")
    registry.register(type("RoundShape", (Base,), {}))
    registry.register(type("Square", (Base,), {}))
    with pytest.raises(ValueError, match=r" Did you mean 'round'\? Write a class. There are 'round', 'square'$"):
        registry.lookup("roumd")


@pytest.mark.parametrize("key", PUBLIC)
def test_every_register_treats_a_taken_name_alike(key, clean_registry):
    """The same definition replaces the former one silently; another one with a warning at the decorator, as in MXNet."""
    register, base, registered = PUBLIC[key]

    def cell():
        class Again(base):
            pass

        return Again

    first, second = cell(), cell()
    other = type("Again", (base,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert register(first) is first
        assert register(second) is second is registered()["again"]
    with pytest.warns(UserWarning, match=f"'again' now means {other!r}, before .*cell.*Again") as caught:
        register(other)
    assert [warning.filename for warning in caught] == [__file__]
    assert registered()["again"] is other
    for wrong in (3, int, "again"):
        with pytest.raises(
            TypeError, match=f"{wrong!r}.*subclass of {base.__name__}|subclass of {base.__name__}, got {wrong!r}"
        ):
            register(wrong)
    assert registered()["again"] is other
