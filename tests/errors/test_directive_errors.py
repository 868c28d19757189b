"""What a user reads after a mistake in directives: the whole text."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
from traced_dags import chain, experts, op, traced

import piper_jax as piper
from piper_jax import Strategy, directive, where
from piper_jax.ir.nodes import DeviceGroup


def split_chain():
    return chain(2).split(where(), num_microbatches=2)


def placed_chain():
    return split_chain().place(where(PP=0), group=0).place(where(PP=1), group=1)


CASES = {}


def case(message):
    """The message, dedented; a line number of this file is written as LINE."""

    def register(function):
        CASES[function.__name__] = (function, textwrap.dedent(message).strip("\n"))
        return function

    return register


# -- filters ----------
@case("""
    place[0] at test_directive_errors.py:LINE: where(PP=7, PASS="F") matches nothing.
        PP is 0-1; nearest to 7 is 1
        PASS is F, B, U
    help: name coordinates that exist.
""")
def empty_match_names_what_exists():
    chain(2).place(where(PP=7, PASS="F"), group=0)


@case("""
    remat[0] at test_directive_errors.py:LINE: where(path="layer.1") matches nothing.
        paths near it: layers.1, layers.0
    help: name coordinates that exist.
""")
def a_mistyped_path_is_suggested():
    chain(2).remat(where("layer.1"))


@case("""
    place[0] at test_directive_errors.py:LINE: where(MB=0): there are no microbatches before split.
    help: call plan.split(where(), num_microbatches=...) first, or leave MB out.
""")
def microbatches_before_split():
    chain(2).place(where(MB=0), group=0)


@case("""
    where(PASS='U', MB=...): an update has no MB, it runs once per step.
    help: leave MB out of this filter.
""")
def microbatch_of_an_update():
    where(PASS="U", MB=0)


@case("""
    where(PB=...): unknown coordinate 'PB'.
    help: did you mean 'PP'?
""")
def unknown_tag():
    where(PB=0)


@case("""
    where(PASS='W'): unknown pass.
    help: did you mean 'BW'?
""")
def unknown_pass():
    where(PASS="W")


@case("""
    order[0] at test_directive_errors.py:LINE: 'F' is not a filter.
    help: write where(PP=0, PASS='F') or a combination of such.
""")
def a_string_is_no_filter():
    chain(2).order(["F"])


# -- cut, split, place ----------
@case("""
    cut[0] at test_directive_errors.py:LINE: the model has 2 units, too few for 4 stages.
    help: use 1 to 2 stages, or annotate more regions.
""")
def more_stages_than_units():
    chain(2).cut(stages=4)


@case("""
    cut[0] at test_directive_errors.py:LINE: stages [(0, 2), (1,)] are not the units 0-2 in order.
    help: list every unit once, ascending, at least one in each stage.
""")
def stages_out_of_order():
    chain(3).cut(stages=[(0, 2), (1,)])


@case("""
    cut[1] at test_directive_errors.py:LINE: cut comes before split.
    help: call plan.cut(...) before plan.split(...).
""")
def cut_after_split():
    split_chain().cut(stages=1)


@case("""
    split[0] at test_directive_errors.py:LINE: 64 rows of add.0 (64, 16) are not divisible by 12 microbatches.
    help: nearest legal numbers of microbatches: 4, 8, 16.
""")
def batch_that_does_not_divide():
    chain(2).split(where(), num_microbatches=12)


@case("""
    split[1] at test_directive_errors.py:LINE: the batch is divided into 2 microbatches already.
        by split(where(), num_microbatches=2, coordinate='MB') at test_directive_errors.py:LINE
        and split(where(), num_microbatches=4, coordinate='MB') at test_directive_errors.py:LINE
    help: call split once.
""")
def split_twice():
    split_chain().split(where(), num_microbatches=4)


@case("""
    split[0] at test_directive_errors.py:LINE: split covers everything from batch to loss, but where(PP=0) leaves out \
F[PP=1] layers.1.
    help: write split(where(), num_microbatches=...).
""")
def split_of_a_part():
    chain(2).split(where(PP=0), num_microbatches=2)


@case("""
    place[2] at test_directive_errors.py:LINE: F[PP=0,MB=1] layers.0 is on d0 already, and cannot be on d4 too.
        by place(where(PP=0), group=0, stream='compute') at test_directive_errors.py:LINE
        and place(where(MB=1), group=4, stream='compute') at test_directive_errors.py:LINE
    help: let each node be selected by one place directive; name MB to split microbatches between groups.
""")
def placed_twice():
    split_chain().place(where(PP=0), group=0).place(where(MB=1), group=4)


@case("""
    place[1] at test_directive_errors.py:LINE: group d1-2 (1, 2) clashes with group d0-1 (0, 1).
        shared devices: [1]
    help: groups are disjoint and have different names.
""")
def overlapping_groups():
    chain(2).place(where(PP=0), group=(0, 1)).place(where(PP=1), group=(1, 2))


@case("""
    place[0] at test_directive_errors.py:LINE: group g has 4 devices, but its axes data=2 x expert=3 need 6.
    help: let the product of the axes be the number of devices.
""")
def axes_that_do_not_multiply():
    group = DeviceGroup(name="g", devices=(0, 1, 2, 3), axes=(("data", 2), ("expert", 3)))
    chain(1).place(where(), group=group)


@case("""
    place[0] at test_directive_errors.py:LINE: where(PASS="U") selects an update; updates run where their state is used.
    help: leave PASS="U" out.
""")
def placing_an_update():
    chain(1).place(where(PASS="U"), group=0)


# -- replicate, shard, remat ----------
@case("""
    replicate[1] at test_directive_errors.py:LINE: state layers.0 is replicated in another way already.
        already: axes=('data',)
        now:     axes=('data',) shard_optimizer=True
        by replicate(where(), axes=('data',)) at test_directive_errors.py:LINE
        and replicate(where(PP=0), axes=('data',), shard_optimizer=True) at test_directive_errors.py:LINE
    help: let each parameter be selected by one replicate directive.
""")
def replicated_twice():
    chain(2).replicate(where()).replicate(where(PP=0), shard_optimizer=True)


@case("""
    replicate[0] at test_directive_errors.py:LINE: replicate has no option 'shard_param'.
    help: did you mean 'shard_params'?
""")
def unknown_option_of_replicate():
    chain(1).replicate(where(), shard_param=True)


@case("""
    replicate[0] at test_directive_errors.py:LINE: gradients that are whole on every device are reduced once per step.
    help: reduce_every="microbatch" needs shard_grads=True.
""")
def reducing_whole_gradients_per_microbatch():
    chain(1).replicate(where(), reduce_every="microbatch")


@case("""
    shard[0] at test_directive_errors.py:LINE: F[PP=0] layers.0.gate is not in an expert region.
    help: select expert regions, such as where(EP=...), or wrap the experts in piper.expert_region.
""")
def sharding_what_is_no_expert():
    experts(1).shard(where(PP=0))


@case("""
    remat[0] at test_directive_errors.py:LINE: unknown policy 'dots_savable'.
    help: did you mean 'dots_saveable'?
""")
def unknown_policy():
    chain(1).remat(where(), policy="dots_savable")


@case("""
    remat[1] at test_directive_errors.py:LINE: where(MB=0) selects 2 of the 4 nodes of layers.0.
    help: an operation is computed again in all its passes and microbatches: name PP, EP or a path alone.
""")
def remat_of_one_microbatch():
    chain(1).split(where(), num_microbatches=2).remat(where(MB=0))


# -- order ----------
@case("""
    order[3] at test_directive_errors.py:LINE: B[PP=0,MB=0] layers.0 before F[PP=0,MB=0] layers.0 closes a cycle.
        F[PP=0,MB=0] layers.0
          -> data  B[PP=0,MB=0] layers.0
        > -> order F[PP=0,MB=0] layers.0  (this directive)
    help: list F[PP=0,MB=0] layers.0 first.
""")
def backward_before_forward():
    placed_chain().order([where(PP=0, MB=0, PASS="B"), where(PP=0, MB=0, PASS="F")])


@case("""
    order[3] at test_directive_errors.py:LINE: one slot of B[PP=0,MB=0] layers.0 and F[PP=0,MB=0] layers.0 \
closes a cycle.
        F[PP=0,MB=0] layers.0
          -> data  F[PP=1,MB=0] layers.1
          -> data  B[PP=1,MB=0] layers.1
          -> data  B[PP=0,MB=0] layers.0
        > -> with  F[PP=0,MB=0] layers.0  (this directive)
    help: list them as separate slots.
""")
def a_slot_that_waits_for_itself():
    placed_chain().order([where(PP=0, MB=0)])


@case("""
    order[3] at test_directive_errors.py:LINE: B[PP=0,MB=0] layers.0 before F[PP=0,MB=1] layers.0 closes a cycle.
        F[PP=0,MB=1] layers.0
          -> data  F[PP=1,MB=1] layers.1
          -> order F[PP=1,MB=0] layers.1
          -> data  B[PP=1,MB=0] layers.1
          -> data  B[PP=0,MB=0] layers.0
        > -> order F[PP=0,MB=1] layers.0  (this directive)
    help: list F[PP=0,MB=1] layers.0 first.
""")
def a_cycle_over_two_groups():
    placed_chain().order(
        [
            where(PP=1, MB=1, PASS="F"),
            where(PP=1, MB=0, PASS="F"),
            where(PP=0, MB=0, PASS="B"),
            where(PP=0, MB=1, PASS="F"),
        ]
    )


@case("""
    order[3] at test_directive_errors.py:LINE: slot 1: F[PP=0,MB=0] layers.0 is in slot 0 already.
    help: list each node once.
""")
def a_node_listed_twice():
    placed_chain().order([where(PP=0, MB=0, PASS="F"), where(PP=0, PASS="F")])


@case("""
    order[4] at test_directive_errors.py:LINE: slot 0: F[PP=1,MB=0] layers.1 is in slot 1 of an earlier order already.
        by order([where(MB=0, PASS="F")]) at test_directive_errors.py:LINE
        and order([where(PP=1, PASS="F")]) at test_directive_errors.py:LINE
    help: list each node once.
""")
def a_node_ordered_twice():
    placed_chain().order([where(MB=0, PASS="F")]).order([where(PP=1, PASS="F")])


@case("""
    order[0] at test_directive_errors.py:LINE: slot 0: F[PP=0] layers.0 has no group yet.
    help: call plan.place(...) first.
""")
def ordering_before_placing():
    chain(2).order([where(PASS="F")])


@case("""
    order[3] at test_directive_errors.py:LINE: slot 0: its members are on different groups, so they cannot overlap.
        where(PP=0, MB=1, PASS="F") is on d0
        where(PP=1, MB=0, PASS="F") is on d1
    help: list them as separate slots, or place them on one group.
""")
def overlapping_on_different_groups():
    placed_chain().order([(where(PP=0, MB=1, PASS="F"), where(PP=1, MB=0, PASS="F"))])


@case("""
    order[1] at test_directive_errors.py:LINE: B[PP=0] fused: the backward of fused stays whole, so it has no BW.
        one kernel gives both
        defined at model.py:7
    help: list PASS="BI" of it too, in whose place all of it runs, or PASS="B".
""")
def a_backward_in_one_piece():
    fused = op("fused", 0, splittable=False, whole_because="one kernel gives both", source="model.py:7")
    traced([fused], []).place(where(), group=0).order([where(PASS="F"), where(PASS="BW")])


@case("""
    place[4] at test_directive_errors.py:LINE: place comes before order.
    help: call plan.place(...) before plan.order([...]).
""")
def placing_after_order():
    placed_chain().order([where(MB=0, PASS="F")]).place(where(PP=0), group=0)


# -- strategies ----------
@case("""
    there is no strategy 'Nonesuch'.
    help: known: HELP
""")
def unknown_strategy():
    chain(2).apply(Strategy(directives=(directive("Nonesuch"),)))


@case("""
    directive('1F1B', sheduel='flat'): option 'sheduel' means nothing to 1F1B.
        OPTIONS
    help: known: HELP
""")
def option_that_means_nothing():
    chain(2).apply(Strategy(directives=(directive("1F1B", sheduel="flat"),)))


@case("""
    directive('ZeRO-3', gather_distanse=2): option 'gather_distanse' means nothing to ZeRO-3.
        OPTIONS
    help: did you mean 'gather_distance'?
""")
def mistyped_option():
    chain(2).apply(Strategy(data_parallel=2, directives=(directive("ZeRO-3", gather_distanse=2),)))


@case("""
    two schedules: directive('GPipe') and directive('1F1B').
    help: a schedule orders everything; name one.
""")
def two_schedules():
    chain(2).apply(Strategy(directives=(directive("GPipe"), directive("1F1B"))))


@case("""
    zero_stage=1 contradicts directive('ZeRO-3').
    help: name one ZeRO stage.
""")
def two_zero_stages():
    chain(2).apply(Strategy(zero_stage=1, directives=(directive("ZeRO-3"),)))


@case("""
    cut[0] at one_f_one_b.py:LINE: the model has 2 units, too few for 4 stages.
    help: use 1 to 2 stages, or annotate more regions.
""")
def a_strategy_names_its_own_line():
    chain(2).apply(Strategy(pipeline_parallel=4))


# -- completion ----------
@case("""
    2 nodes have no group yet, the first is F[PP=1] layers.1.
    help: call plan.place(where(PP=1), group=...), or plan.apply(strategy).
""")
def completing_what_is_not_placed():
    chain(2).place(where(PP=0), group=0).complete()


@case("""
    state embedding is used on groups of different shapes, and g1 does not hold whole copies.
        g0: data=1
        g1: tensor=2
    help: give these groups equal axes, or replicate the state over all axes of each.
""")
def tied_state_on_groups_that_cannot_join():
    ops = [op("a", 0, reads=("embedding",)), op("b", 1, reads=("embedding",))]
    plan = traced(ops, [("a", "b", "x")]).place(where(PP=0), group=DeviceGroup(name="g0", devices=(0,)))
    plan.place(where(PP=1), group=DeviceGroup(name="g1", devices=(1, 2), axes=(("tensor", 2),))).complete()


@pytest.mark.parametrize("name", list(CASES))
def test_message(name):
    function, expected = CASES[name]
    with pytest.raises(piper.PiperError) as caught:
        function()
    text = str(caught.value)
    assert len(text.splitlines()) <= 12
    assert "Traceback" not in text
    shown = re.sub(r"(?<!model)\.py:\d+", ".py:LINE", text)
    shown = re.sub(r"known: .*", "known: HELP", shown)
    shown = re.sub(r"^    (communication_overlap|memory_optimization): .*$", "    OPTIONS", shown, flags=re.MULTILINE)
    assert shown == expected


def test_the_line_is_that_of_the_call():
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(piper.FilterError) as caught:
        chain(2).place(where(PP=9), group=0)
    assert f"test_directive_errors.py:{line}:" in str(caught.value)
