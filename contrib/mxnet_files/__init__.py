"""Readers of MXNet's files: arrays that `nd.save` or Gluon wrote, and states of Gluon's Trainer. Nothing is unpickled."""

from .params import load_mxnet_params
from .states import load_mxnet_states

__all__ = ["load_mxnet_params", "load_mxnet_states"]
