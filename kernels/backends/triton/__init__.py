"""The Triton backend: one launch, whatever the rule and the number of tensors.

Its modules are imported only when a rule first runs on it. With TRITON_INTERPRET=1 it works on CPU tensors.
"""
