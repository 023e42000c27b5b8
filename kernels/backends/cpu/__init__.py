"""The CPU backend: numba compiles a rule into one native loop over the tensors.

Its modules are imported at the first step on CPU tensors, because importing numba takes a third of a second.
"""
