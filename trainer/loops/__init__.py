"""Loops over batches on top of a `Trainer`: `fit`, `lr_find`, `sweep`, ensembles and checkpoints of a training."""
