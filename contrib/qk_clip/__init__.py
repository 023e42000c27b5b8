"""QKClip: scales the query and key weights of attention heads whose logits become too large, as MuonClip does."""

from .clip import QKClip
from .heads import HeadRows

__all__ = ["HeadRows", "QKClip"]
