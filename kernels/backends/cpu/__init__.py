"""The CPU backend: a rule compiled by numba into one native loop over the tensors.

Its modules are imported only at the first step on CPU tensors, because numba takes a third of a second to import.
"""
