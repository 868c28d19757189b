"""ZeRO in plans: spans of microbatches, joined reductions, bundled gathers, gathers for updates, and their rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traced_dags import LEAF_BYTES, chain, op, tied, traced

import piper_jax as piper
from piper_jax import PlanError, where
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Collective, Compute
from piper_jax.ir.rules import check
from piper_jax.planning import Plan


def one_group(plan: Plan, microbatches: int = 4) -> Plan:
    return plan.split(where(), num_microbatches=microbatches).place(where(), group=(0, 1))


def two_groups(plan: Plan, microbatches: int = 2) -> Plan:
    plan = plan.split(where(), num_microbatches=microbatches)
    return plan.place(where(PP=0), group=(0, 1)).place(where(PP=1), group=(2, 3))


def whole(plan: Plan, *buckets: str) -> Plan:
    """These buckets are not updated element by element."""
    changed = {name: replace(b, elementwise=name not in buckets) for name, b in plan.dag.buckets.items()}
    return replace(plan, dag=replace(plan.dag, buckets=changed))


def without_gradient(plan: Plan, bucket: str) -> Plan:
    data = tuple(e for e in plan.dag.data if f"gradient {bucket}" not in e.values)
    return replace(plan, dag=replace(plan.dag, data=data))


def collectives(plan: Plan, kind: str) -> list[str]:
    nodes = plan.check().complete().nodes.items()
    return [str(name) for name, node in nodes if isinstance(node, Collective) and node.kind == kind]


def rows(plan: Plan) -> list[list[str]]:
    return [[str(node) for node in slot.nodes] for slot in linearize(plan.check().complete())["d0-1"]]


def sources(plan: Plan, name: str) -> list[str]:
    return [str(e.src) for e in plan.complete().data if str(e.dst) == name]


def empty(plan: Plan, bucket: str) -> Plan:
    """The leaves of this bucket have no elements."""
    known = plan.dag.buckets[bucket]
    leaves = tuple(replace(leaf, shape=(0, 32), nbytes=0) for leaf in known.leaves)
    return replace(plan, dag=replace(plan.dag, buckets={**plan.dag.buckets, bucket: replace(known, leaves=leaves)}))


# -- reductions ----------
@pytest.mark.parametrize("sharded", [{}, {"shard_optimizer": True}, {"shard_params": True}])
def test_empty_state_is_neither_reduced_nor_gathered(sharded: dict[str, bool]) -> None:
    """Whoever owns it: one group, or several."""
    for plan, bucket in ((chain(2), "layers.1"), (tied(2), "embedding")):
        made = two_groups(empty(plan, bucket)).replicate(where(), **sharded)
        nodes = [n for n in made.check().complete().nodes.values() if isinstance(n, Collective)]
        moved = {value.partition(" ")[2] for node in nodes for value in node.values}
        assert moved == made.dag.buckets.keys() - {bucket}


@pytest.mark.parametrize(
    ("every", "ends"), [("step", [None]), ("microbatch", [0, 1, 2, 3]), (2, [1, 3]), (3, [2, 3]), (4, [3]), (9, [3])]
)
def test_spans_end_with_their_last_microbatch(every: str | int, ends: list[int | None]) -> None:
    plan = one_group(chain(1)).replicate(where(), shard_grads=True, reduce_every=every)
    names = [f"B{'' if mb is None else f'[MB={mb}]'} reduce_scatter gradient layers.0" for mb in ends]
    assert collectives(plan, "reduce_scatter") == names
    reduced = [source for name in names for source in sources(plan, name)]
    assert sorted(reduced) == [f"B[PP=0,MB={mb}] layers.0" for mb in range(4)]


def test_what_several_groups_own_is_reduced_once_per_step_whatever_the_span() -> None:
    plan = two_groups(tied(2)).replicate(where(), shard_grads=True, reduce_every="microbatch")
    names = collectives(plan, "reduce_scatter")
    assert [name for name in names if "embedding" in name] == ["B reduce_scatter gradient embedding"]
    assert len(names) == 1 + 2 * 2


@pytest.mark.parametrize("stream", ["compute", "reduce"])
def test_reductions_of_microbatches_join_their_own_backward_or_on_another_stream_the_next_slot(stream: str) -> None:
    plan = one_group(chain(1), 2).order([where(PASS=p, MB=mb) for mb in (0, 1) for p in ("F", "B")])
    plan = plan.replicate(where(), shard_grads=True, reduce_every="microbatch", reduce_stream=stream)
    first, last = (f"B[MB={mb}] reduce_scatter gradient layers.0" for mb in (0, 1))
    joined = [row for row in rows(plan) if {first, last}.intersection(row)]
    if stream == "reduce":
        assert joined == [[first, "F[PP=0,MB=1] layers.0"], [last]]
    else:
        assert joined == [["B[PP=0,MB=0] layers.0", first], ["B[PP=0,MB=1] layers.0", last]]


def test_neighbours_share_collectives_up_to_their_bytes() -> None:
    plan = one_group(chain(4).cut(stages=1), 1)
    plan = plan.replicate(where(), shard_params=True, bucket_bytes=2 * LEAF_BYTES)
    pairs = ["layers.0 and 1 more", "layers.2 and 1 more"]
    assert collectives(plan, "reduce_scatter") == [f"B reduce_scatter gradient {pair}" for pair in pairs]
    gathers = collectives(plan, "all_gather")
    assert gathers == [f"F[PP=0,MB=0] all_gather parameters {pair}" for pair in pairs]
    values = [n.values for n in plan.complete().nodes.values() if isinstance(n, Collective) and n.kind == "all_gather"]
    assert values[0] == ("parameters layers.0", "parameters layers.1")


def test_whole_and_elementwise_updates_share_no_collective() -> None:
    plan = whole(one_group(chain(3).cut(stages=1), 1), "layers.1")
    plan = plan.replicate(where(), shard_optimizer=True, bucket_bytes=10**6)
    assert collectives(plan, "reduce_scatter") == [f"B reduce_scatter gradient layers.{i}" for i in range(3)]


# -- gathers for updates of whole leaves ----------
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"shard_optimizer": True}, ("gradient", "state")),
        ({"shard_grads": True}, ("gradient", "state")),
        ({"shard_params": True}, ("gradient", "state", "parameters")),
    ],
)
def test_an_update_of_whole_leaves_gathers_what_is_in_shards(options: dict[str, bool], kinds: tuple[str, ...]) -> None:
    plan = whole(one_group(chain(1), 2), "layers.0").replicate(where(), reduce_every="step", **options)
    name = "B all_gather gradient layers.0"
    gather = next(n for n in plan.check().complete().nodes.values() if str(n.id) == name)
    assert isinstance(gather, Collective)
    assert gather.values == tuple(f"{kind} layers.0" for kind in kinds)
    assert sources(plan, name) == ["B reduce_scatter gradient layers.0"]
    assert name in sources(plan, "U update d0-1")
    assert not [name for name in collectives(plan, "all_gather") if name.startswith("U")]


def test_every_span_reaches_the_gather_for_the_update() -> None:
    plan = whole(one_group(chain(1)), "layers.0").replicate(where(), shard_grads=True, reduce_every=3)
    found = sources(plan, "B all_gather gradient layers.0")
    assert found == [f"B[MB={mb}] reduce_scatter gradient layers.0" for mb in (2, 3)]


# -- state without a gradient ----------
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("options", [{"shard_optimizer": True}, {"shard_params": True}], ids=str)
def test_shared_state_without_a_gradient(options: dict[str, bool], elementwise: bool) -> None:
    plan = without_gradient(two_groups(tied(2)), "embedding").replicate(where(), **options)
    plan = plan if elementwise else whole(plan, "embedding")
    of_embedding = {
        str(n.id): n.group
        for n in plan.check().complete().nodes.values()
        if isinstance(n, Collective) and any(v.endswith(" embedding") for v in n.values)
    }
    updated = "U all_gather parameters embedding" if elementwise else "B all_gather state embedding"
    wanted = {updated} if options == {"shard_optimizer": True} else {"F all_gather parameters embedding"}
    wanted |= set() if elementwise else {updated}
    assert of_embedding == dict.fromkeys(wanted, "d0-1+d2-3")
    assert "d0-1+d2-3" in plan.complete().groups


# -- rules ----------
def broken_rule(plan: Plan, lost: str) -> str:
    """The rule that a plan breaks without one of its collectives."""
    dag = plan.check().complete()
    name = next(n for n in dag.nodes if str(n) == lost)
    bridges = [
        replace(after, src=before.src, values=before.values)
        for before in dag.data
        for after in dag.data
        if before.dst == after.src == name
    ]
    faulty = replace(
        dag,
        nodes={n: node for n, node in dag.nodes.items() if n != name},
        data=(*(e for e in dag.data if name not in (e.src, e.dst)), *bridges),
        slots=tuple(replace(s, nodes=tuple(n for n in s.nodes if n != name)) for s in dag.slots if s.nodes != (name,)),
    )
    with pytest.raises(PlanError) as caught:
        check(faulty, slots=plan.dag.slots)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value.data["rule"])


@pytest.mark.parametrize(
    ("lost", "rule"),
    [
        ("B[MB=1] reduce_scatter gradient layers.0", "updated-on-every-owner"),
        ("B reduce_scatter gradient layers.1", "updated-on-every-owner"),
        ("U all_gather parameters layers.2", "shards-gathered"),
        ("B all_gather gradient layers.1", "shards-gathered"),
        ("F[PP=0,MB=0] all_gather parameters layers.0", "nothing-read-after-free"),
    ],
)
def test_a_lost_collective_is_caught(lost: str, rule: str) -> None:
    """Stages of ZeRO-3, of ZeRO-1 with whole updates, and of ZeRO-1."""
    plan = whole(one_group(chain(3), 2), "layers.1")
    plan = plan.replicate(where(PP=0), shard_params=True, reduce_every="microbatch", gather_distance=0)
    plan = plan.replicate(where(PP=(1, 2)), shard_optimizer=True)
    assert broken_rule(plan, lost) == rule


def test_a_gather_before_the_last_round_of_an_update_is_caught() -> None:
    plan = traced([op("a", 0)], [], couplings=1).place(where(), group=(0, 1)).replicate(where(), shard_optimizer=True)
    dag = plan.check().complete()
    gather = next(n for n in dag.nodes if str(n) == "U all_gather parameters a")
    first = next(n for n in dag.nodes if str(n) == "U update d0-1")
    data = tuple(replace(e, src=first) if e.dst == gather else e for e in dag.data)
    with pytest.raises(PlanError, match="shards-gathered: the parameters a are not gathered after the update of d0-1"):
        check(replace(dag, data=data))


def test_a_gather_that_misses_a_reduction_is_caught() -> None:
    plan = whole(one_group(chain(1)), "layers.0").replicate(where(), shard_grads=True, reduce_every=2)
    dag = plan.check().complete()
    lost = next(e for e in dag.data if "all_gather" in e.dst.op and e.src.MB == 1)
    with pytest.raises(PlanError, match=r"shards-gathered: .* does not wait for all reductions"):
        check(replace(dag, data=tuple(e for e in dag.data if e is not lost)))


@pytest.mark.parametrize("distance", [0, 1])
def test_a_gather_after_its_use_is_caught(distance: int) -> None:
    plan = one_group(chain(2), 1)
    plan = plan.order([where(PP=pp, PASS=p) for pp, p in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))])
    dag = plan.replicate(where(), shard_params=True, gather_distance=distance).check().complete()
    gather = next(n for n in dag.nodes if str(n) == "F[PP=1,MB=0] all_gather parameters layers.1")
    use = next(n for n, node in dag.nodes.items() if isinstance(node, Compute) and n.PASS == "F" and n.PP == 1)
    slots = [replace(s, nodes=tuple(n for n in s.nodes if n != gather)) for s in dag.slots]
    slots = [s for s in slots if s.nodes]
    at = next(i for i, s in enumerate(slots) if use in s.nodes)
    inside = [*slots[:at], replace(slots[at], nodes=(*slots[at].nodes, gather)), *slots[at + 1 :]]
    later = [*slots[: at + 1], replace(slots[at], nodes=(gather,)), *slots[at + 1 :]]
    for faulty, rule in ((inside, "members-in-order"), (later, "deadlock-free")):
        with pytest.raises(PlanError) as caught:
            check(replace(dag, slots=tuple(faulty)))
        assert caught.value.data["rule"] == rule


# -- by name ----------
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stage_of_zero_is_short_for_its_directive(zero: int) -> None:
    degrees = {"data_parallel": 2, "pipeline_parallel": 2}
    named = tied(4).apply(piper.Strategy(**degrees, directives=(piper.directive(f"ZeRO-{zero}"),)))
    assert tied(4).apply(piper.Strategy(**degrees, zero_stage=zero)) == named
    both = piper.Strategy(**degrees, zero_stage=zero, directives=(piper.directive(f"ZeRO-{zero}"),))
    assert tied(4).apply(both) == named
    with pytest.raises(piper.DirectiveError, match="contradicts"):
        tied(4).apply(replace(both, zero_stage=zero % 3 + 1))
