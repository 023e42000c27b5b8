"""Optimizers, schedules, initializers, stores and compressors treat names that are taken alike."""

import warnings

import pytest

from tristep import initializer, kvstore, lr_scheduler, optimizer

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
