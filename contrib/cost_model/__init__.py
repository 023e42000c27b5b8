"""A cost model of training on many GPUs: bytes on the wire, memory and time of a step, for each strategy.

A message takes the link's latency and its bytes over the bandwidth (the alpha-beta model); a kernel takes the bytes that it
reads and writes over the memory's bandwidth. Memory follows from the optimizer's own rule and storage. `estimate_cost` gives
the rows of a table, `table` formats them, and `measure_link` measures latency and bandwidth between running processes.

Not modelled: a network under load, the latency of each bucket, activations; and of rules of whole matrices their arithmetic,
and what ranks send of it with an all-reduce.

Sources: Thakur et al. (2005), "Optimization of collective communication operations in MPICH" (the costs of collectives);
Rajbhandari et al. (2020), "ZeRO" (what is stored where).
"""

from .links import LINKS, Link, measure_link, parse_link
from .model import estimate_cost
from .strategy import Strategy, table
from .update import MEMORIES, OTHER_NAMES

__all__ = ["LINKS", "MEMORIES", "OTHER_NAMES", "Link", "Strategy", "estimate_cost", "measure_link", "parse_link", "table"]
