"""Features that fewer people need, built on public names of the core only; each folder has a README.

The core never imports this package. The names below are imported when they are first used, like plugins of other packages.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.contrib'; import it by that name (imported as {__name__!r})")

# By group, as in entry points of other packages: the name that a user gives, and the object that it stands for.
PLUGINS = {
    "tristep.compressors": {
        "powersgd": "tristep.contrib.compression.powersgd:PowerSGD",
        "randomk": "tristep.contrib.compression.sparse:RandomK",
        "topk": "tristep.contrib.compression.sparse:TopK",
    },
    "tristep.compression_choices": {
        "auto": "tristep.contrib.cost_model.automatic:choose_compression",
    },
    "tristep.initializers": {
        "fusedrnn": "tristep.contrib.initializers:FusedRNN",
        "lstmbias": "tristep.contrib.initializers:LSTMBias",
        "rnnfused": "tristep.contrib.initializers:RNNFused",
    },
    "tristep.optim": {
        "dion2": "tristep.contrib.dion.optim:Dion2",
        "nordion2": "tristep.contrib.dion.optim:NorDion2",
        "sam": "tristep.contrib.sam:SAM",
    },
    "tristep.optimizers": {
        "ccsgd": "tristep.contrib.optimizers:ccSGD",
        "dion2": "tristep.contrib.dion:Dion2",
        "lbsgd": "tristep.contrib.optimizers:LBSGD",
        "nordion2": "tristep.contrib.dion:NorDion2",
        "test": "tristep.contrib.optimizers:Test",
    },
    "tristep.plans": {
        "whole_dtensors": "tristep.contrib.owners:OwnedPlan",
    },
    "tristep.stores": {
        "dist_async": "tristep.contrib.server:ServerStore",
        "dist_device_async": "tristep.contrib.server:ServerStore",
    },
    "tristep.viz": {
        "RaceView": "tristep.contrib.racing.race_view:RaceView",
        "read_run": "tristep.contrib.imported_runs:read_run",
    },
}
