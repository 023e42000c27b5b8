"""Reader of MXNet's files of arrays, which `nd.save` or Gluon wrote."""

from .params import load_mxnet_params

__all__ = ["load_mxnet_params"]
