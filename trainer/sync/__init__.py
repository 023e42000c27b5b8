"""Gradient synchronization: none, through a `KVStore`, by all-reduce during the backward pass, or sharded (ZeRO-1)."""
