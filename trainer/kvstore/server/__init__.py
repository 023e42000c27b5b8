"""The parameter server (dist_async): workers push gradients and pull weights without waiting for each other."""

from .compression import compressor_of
from .start import connect, serve
from .store import ServerStore, Staleness

__all__ = ["ServerStore", "Staleness", "compressor_of", "connect", "serve"]
