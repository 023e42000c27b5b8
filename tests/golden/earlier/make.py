"""Makes the files of this folder that are not there; README.md says how to run it, and what they are."""

import json
import os
import random

os.environ["TRISTEP_ENGINE"] = "eager"

import numpy as np
import torch
from earlier_trainings import FILES, FOLDER, INITIALIZERS, SAVED, SCHEDULES, STEPS
from test_files import RESULTS


def trained(name):
    """Train, and save on the way; return the weights at that point and the numbers after each later step, in one array."""
    kind, row = FILES[name]
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # a checkpoint has the states of all generators
        seed(0)
    training, found = kind(row), []
    for step in range(1, STEPS + 1):
        training.step(step)
        if step == SAVED:
            training.save(FOLDER / name)
            found += training.weights().tolist()
        elif step > SAVED:
            found += training.numbers()
    return np.array(found, np.float32)


def main():
    recorded = dict(np.load(FOLDER / "recorded.npz")) if (FOLDER / "recorded.npz").exists() else {}
    for name in FILES:
        if not (FOLDER / name).exists():
            recorded[name] = trained(name)
    np.savez_compressed(FOLDER / "recorded.npz", **recorded)
    for name, (make, save, _) in RESULTS.items():
        if not (FOLDER / f"{name}.safetensors").exists():
            save(make(), FOLDER / f"{name}.safetensors")
    if not (FOLDER / "texts.json").exists():
        schedules = []
        for schedule in SCHEDULES:
            schedule(5)  # some have a state then
            config = schedule.to_config()
            schedules.append({"config": config, "rates": [schedule(count) for count in range(6, 13)]})
        texts = {"schedules": schedules, "initializers": [each.dumps() for each in INITIALIZERS]}
        (FOLDER / "texts.json").write_text(json.dumps(texts) + "\n")


if __name__ == "__main__":
    main()
