"""Checkpoints of a training: the folder that they are in, and what each has beside the trainer."""
