"""Where weights live: see :mod:`graphplan.passes.placement.residence`."""

from graphplan.passes.placement.problem import cpu_key
from graphplan.passes.placement.residence import follow, reside

__all__ = ["cpu_key", "follow", "reside"]
