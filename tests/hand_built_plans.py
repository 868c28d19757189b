"""Plans that use what is hardest in the IR, built by hand."""

from __future__ import annotations

from traced_dags import chain, experts, tied

from piper_jax import where
from piper_jax.ir.filters import Filter
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.planning import Plan


def _group(rank: int, **axes: int) -> DeviceGroup:
    size = 1
    for extent in axes.values():
        size *= extent
    return DeviceGroup(name=f"g{rank}", devices=tuple(range(rank * size, (rank + 1) * size)), axes=tuple(axes.items()))


def two_way_dualpipe_with_tied_state_and_zero_3() -> Plan:
    """Two groups, each with both stages: microbatches 0 and 1 go one way, 2 and 3 the other (DeepSeek-V3's DualPipe).

    Every bucket is owned by both groups, the embedding by both stages too; all of it is sharded over all four devices.
    """
    plan = tied(2).split(where(), num_microbatches=4)
    for rank in (0, 1):
        down, up = where(PP=rank, MB=(0, 1)), where(PP=1 - rank, MB=(2, 3))
        plan = plan.place(down | up, group=_group(rank, data=2))
    plan = plan.replicate(where(), axes=("data",), shard_params=True, reduce_every="microbatch")
    slots: list[Filter | tuple[Filter, ...]] = []
    for first, second in (((0, 1), (2, 3)), ((2, 3), (0, 1))):
        (a, b), (c, d) = first, second
        slots += [where(PP=0, MB=a, PASS="F"), where(PP=0, MB=b, PASS="F"), where(PP=1, MB=c, PASS="F")]
        slots += [(where(PP=1, MB=d, PASS="F"), where(PP=1, MB=c, PASS="B"))]
        slots += [(where(PP=1, MB=d, PASS="BI"), where(PP=0, MB=a, PASS="BI"))]
        slots += [where(PP=1, MB=d, PASS="BW"), where(PP=0, MB=a, PASS="BW"), where(PP=0, MB=b, PASS="B")]
    return plan.order(slots)


def experts_inside_an_overlap_slot() -> Plan:
    """One group of 2 x 2 devices; the forward of one microbatch overlaps the backward of the one before.

    Inside the slot the all_to_alls of one microbatch may hide under the compute of the other.
    """
    plan = experts(1).split(where(), num_microbatches=2).place(where(), group=_group(0, data=2, expert=2))
    plan = plan.shard(where(EP=...), axis="expert", stream="exchange").replicate(where(), axes=("data", "expert"))
    overlapped = (where(MB=1, PASS="F"), where(MB=0, PASS="B"))
    return plan.order([where(MB=0, PASS="F"), overlapped, where(MB=1, PASS="B")])


def a_group_of_one_feeding_a_group_of_four() -> Plan:
    """Groups of different sizes: the transfer between them changes the sharding."""
    plan = chain(2).split(where(), num_microbatches=2)
    plan = plan.place(where(PP=0), group=0).place(where(PP=1), group=(1, 2, 3, 4))
    plan = plan.replicate(where(PP=1), axes=("data",), shard_optimizer=True)
    return plan.order([where(MB=0, PASS="F"), where(MB=1, PASS="F"), where(MB=0, PASS="B"), where(MB=1, PASS="B")])


HAND_BUILT = (
    two_way_dualpipe_with_tied_state_and_zero_3,
    experts_inside_an_overlap_slot,
    a_group_of_one_feeding_a_group_of_four,
)
