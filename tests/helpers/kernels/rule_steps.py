"""One step of a rule on given numbers, for tests."""

import torch

F32, F64 = torch.float32, torch.float64


def run_rule(place, rule, w, g, hyper=(), state=(), dtype=F32):
    """The new weight, and the new states, after one step from these numbers."""
    weight, gradient = place.tensor(w, dtype), place.tensor(g, dtype)
    states = [tuple(place.tensor(values, dtype) for values in state)]
    place.run(rule, [weight], [gradient], states, [[1.0, *hyper]])
    return weight.cpu().double().numpy(), [tensor.cpu().double().numpy() for tensor in states[0]]
