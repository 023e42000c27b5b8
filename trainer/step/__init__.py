"""What a step of a `Trainer` is made of: replicas and their parameters, capture, updates in backward, telemetry."""
