"""Features that fewer people need, built on public names of the core only; each folder has a README.

The core looks a name up in the table below when it is first used, and imports nothing else of this package.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.contrib'; import it by that name (imported as {__name__!r})")

# By kind: the name that a user gives, and the object that it stands for, as "module:name".
NAMES = {
    "compressors": {
        "topk": "tristep.contrib.compression.sparse:TopK",
    },
    "initializers": {
        "fusedrnn": "tristep.contrib.initializers:FusedRNN",
        "lstmbias": "tristep.contrib.initializers:LSTMBias",
    },
    "optim": {
        "dion2": "tristep.contrib.dion.optim:Dion2",
        "nordion2": "tristep.contrib.dion.optim:NorDion2",
        "sam": "tristep.contrib.sam:SAM",
    },
    "optimizers": {
        "ccsgd": "tristep.contrib.optimizers:ccSGD",
        "dion2": "tristep.contrib.dion:Dion2",
        "lbsgd": "tristep.contrib.optimizers:LBSGD",
        "nordion2": "tristep.contrib.dion:NorDion2",
        "test": "tristep.contrib.optimizers:Test",
    },
    "plans": {
        "whole_dtensors": "tristep.contrib.owners:OwnedPlan",
    },
    "stores": {
        "dist_async": "tristep.contrib.server:ServerStore",
        "dist_device_async": "tristep.contrib.server:ServerStore",
    },
    "viz": {
        "Exercises": "tristep.contrib.exercises:Exercises",
        "RaceView": "tristep.contrib.racing.race_view:RaceView",
        "read_run": "tristep.contrib.imported_runs:read_run",
    },
}
