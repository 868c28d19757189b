"""The primitive directives: functions from a DAG to a rewritten DAG and a forward map."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from piper_jax.ir.forward import Rewritten
from piper_jax.primitives.cutting import cut
from piper_jax.primitives.ordering import order
from piper_jax.primitives.placement import place
from piper_jax.primitives.rematerialization import remat
from piper_jax.primitives.replication import replicate
from piper_jax.primitives.sharding import shard
from piper_jax.primitives.splitting import split

PRIMITIVES: Mapping[str, Callable[..., Rewritten]] = {
    "cut": cut,
    "split": split,
    "place": place,
    "shard": shard,
    "replicate": replicate,
    "remat": remat,
    "order": order,
}
"""By name, in the order of their phases."""

__all__ = ["PRIMITIVES", "cut", "order", "place", "remat", "replicate", "shard", "split"]
