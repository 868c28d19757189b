"""What a user reads after a mistake in filters and in directives that set attributes: the whole text."""

from __future__ import annotations

import inspect

import pytest
from expected import Expected
from traced_dags import chain, experts, op, stacked, traced

import piper_jax as piper
from piper_jax import where
from piper_jax.ir.nodes import DeviceGroup


def split_chain():
    return chain(2).split(where(), num_microbatches=2)


def placed_chain():
    return split_chain().place(where(PP=0), group=0).place(where(PP=1), group=1)


expected = Expected(__file__)


# -- stages by path ----------
@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[0]='layers.0, layer.1': no unit has 'layer.1'.
    help: such as layers.1, layers.3, layers.2.
""",
)
def stages_of_a_path_that_does_not_exist():
    chain(4).cut(stages=["layers.0, layer.1", "layers.2-3"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: unit 2 (layers.2) is in no stage.
    help: list every unit in one stage; print(plan) shows them.
""",
)
def stages_that_leave_a_unit_out():
    chain(4).cut(stages=["layers.0-1", "layers.3"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[0] has layers.1, but stages[1] has layers.0, which comes before it in the model.
    help: list stages in the order of the model, each of neighbouring units; print(plan) shows them.
""",
)
def stages_by_path_out_of_order():
    chain(4).cut(stages=["layers.1, layers.3", "layers.0, layers.2"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[1]='params.layers.3-1': layers.3-1 runs backwards.
    help: write layers.1-3.
""",
)
def stages_with_a_range_that_runs_backwards():
    chain(4).cut(stages=["layers.0", "params.layers.3-1"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[1]=' , ' names no unit.
    help: name modules, such as layers.0, layers.1; or leave the stage out.
""",
)
def a_stage_without_a_path():
    chain(2).cut(stages=["layers.0-1", " , "])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[1]='embed' has no unit that is in no stage before it.
    help: name another module in it, or leave the stage out; print(plan) shows the units.
""",
)
def a_stage_of_tied_parameters_alone():
    ops = [op("embed", 0, reads=("table",)), op("embed#2", 1, reads=("table",))]
    traced(ops, [("embed", "embed#2", "x")]).cut(stages=["embed*", "embed"])


@expected(
    piper.DirectiveError,
    """
    Strategy at FILE.py:LINE: cut[0] at FILE.py:LINE: stages is empty.
    help: list the units of each stage, or leave stages out.
""",
)
def no_stages_at_all():
    chain(2).apply(piper.Strategy(stages=()))


@expected(
    piper.DirectiveError,
    """
    Strategy at FILE.py:LINE: stages lists 2, but 1F1B has 1.
    help: list 1 stage, or leave stages out.
""",
)
def stages_of_another_number_than_the_schedules():
    chain(4).apply(piper.Strategy(stages=("layers.0", "layers.1-3")))


# -- filters ----------
@expected(
    piper.FilterError,
    """
    place[0] at FILE.py:LINE: where(PP=7, PASS="F") matches nothing.
        PP is 0-1; nearest to 7 is 1
        PASS is F, B
    help: name coordinates that exist.
""",
)
def empty_match_names_what_exists():
    chain(2).place(where(PP=7, PASS="F"), group=0)


@expected(
    piper.FilterError,
    """
    place[1] at FILE.py:LINE: where(PP=(0, 7)): there is no PP=7.
        PP is 0-1
    help: name coordinates that exist.
""",
)
def one_of_several_stages_that_is_none():
    split_chain().place(where(PP=(0, 7)), group=0)


@expected(
    piper.FilterError,
    """
    remat[0] at FILE.py:LINE: where(path="layer.1") matches nothing.
        paths near it: layers.1, layers.0
    help: name coordinates that exist.
""",
)
def a_mistyped_path_is_suggested():
    chain(2).remat(where("layer.1"))


@expected(
    piper.FilterError,
    """
    place[0] at FILE.py:LINE: where(MB=0): there are no microbatches before split.
    help: call plan.split(where(), num_microbatches=...) first, or leave MB out.
""",
)
def microbatches_before_split():
    chain(2).place(where(MB=0), group=0)


@expected(
    piper.FilterError,
    """
    where(PASS='U', MB=...): an update has no MB, it runs once per step for each state.
    help: leave MB out; PASS is F, B, BI or BW with it, and path names the state of an update.
""",
)
def microbatch_of_an_update():
    where(PASS="U", MB=0)


@expected(
    piper.FilterError,
    """
    where(PASS='U', PP=...): an update has no PP, it runs once per step for each state.
    help: leave PP out; PASS is F, B, BI or BW with it, and path names the state of an update.
""",
)
def stage_of_an_update():
    where(PP=0, PASS="U")


@expected(
    piper.FilterError,
    """
    place[0] at FILE.py:LINE: where(PP=1, PASS="BI") matches nothing.
        PP is 0-1
        PASS is F, B
        B has no halves before an order names BI and BW
    help: name coordinates that exist.
""",
)
def half_of_a_backward_that_is_whole():
    chain(2).place(where(PP=1, PASS="BI"), group=0)


@expected(
    piper.FilterError,
    """
    where(PB=...): unknown coordinate 'PB'.
    help: did you mean 'PP'?
""",
)
def unknown_tag():
    where(PB=0)


@expected(
    piper.FilterError,
    """
    where(PASS='W'): unknown pass.
        "F": forward
        "B": backward, whole or both halves of it
        "BI": backward for inputs, once an order names it
        "BW": backward for weights, once an order names it
        "U": update, of parameters and optimizer state, once per step
    help: did you mean 'BW'?
""",
)
def unknown_pass():
    where(PASS="W")


@expected(
    piper.FilterError,
    """
    order[0] at FILE.py:LINE: 'F' is not a filter.
    help: write where(PP=0, PASS='F') or a combination of such.
""",
)
def a_string_is_no_filter():
    chain(2).order(["F"])


# -- cut, split, place ----------
@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: the model has 2 units, too few for 4 stages.
    help: use 1 to 2 stages, or annotate more regions.
""",
)
def more_stages_than_units():
    chain(2).cut(stages=4)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages [(0, 2), (1,)] are not the units 0-2 in order.
    help: list every unit once, ascending, at least one in each stage.
""",
)
def stages_out_of_order():
    chain(3).cut(stages=[(0, 2), (1,)])


@expected(
    piper.DirectiveError,
    """
    cut[1] at FILE.py:LINE: cut comes before split.
    help: call plan.cut(...) before plan.split(...).
""",
)
def cut_after_split():
    split_chain().cut(stages=1)


@expected(
    piper.DirectiveError,
    """
    split[0] at FILE.py:LINE: 64 rows of add.0 (64, 16) are not divisible by 12 microbatches.
    help: nearest legal numbers of microbatches: 4, 8, 16.
""",
)
def batch_that_does_not_divide():
    chain(2).split(where(), num_microbatches=12)


@expected(
    piper.DirectiveError,
    """
    split[1] at FILE.py:LINE: the batch is divided into 2 microbatches already.
        by split(where(), num_microbatches=2, coordinate='MB') at FILE.py:LINE
        and split(where(), num_microbatches=4, coordinate='MB') at FILE.py:LINE
    help: call split once.
""",
)
def split_twice():
    split_chain().split(where(), num_microbatches=4)


@expected(
    piper.DirectiveError,
    """
    split[0] at FILE.py:LINE: split covers everything from batch to loss, but where(PP=0) leaves out \
F[PP=1] layers.1.
    help: write split(where(), num_microbatches=...).
""",
)
def split_of_a_part():
    chain(2).split(where(PP=0), num_microbatches=2)


@expected(
    piper.DirectiveError,
    """
    place[2] at FILE.py:LINE: F[PP=0,MB=1] layers.0 is on d0 already, and cannot be on d4 too.
        by place(where(PP=0), group=0, stream='compute') at FILE.py:LINE
        and place(where(MB=1), group=4, stream='compute') at FILE.py:LINE
    help: let each node be selected by one place directive; name MB to split microbatches between groups.
""",
)
def placed_twice():
    split_chain().place(where(PP=0), group=0).place(where(MB=1), group=4)


@expected(
    piper.DirectiveError,
    """
    place[1] at FILE.py:LINE: group d1-2 (1, 2) clashes with group d0-1 (0, 1).
        shared devices: [1]
    help: groups are disjoint and have different names.
""",
)
def overlapping_groups():
    chain(2).place(where(PP=0), group=(0, 1)).place(where(PP=1), group=(1, 2))


@expected(
    piper.DirectiveError,
    """
    place[0] at FILE.py:LINE: group g has 4 devices, but its axes data=2 x expert=3 need 6.
    help: let the product of the axes be the number of devices.
""",
)
def axes_that_do_not_multiply():
    group = DeviceGroup(name="g", devices=(0, 1, 2, 3), axes=(("data", 2), ("expert", 3)))
    chain(1).place(where(), group=group)


@expected(
    piper.DirectiveError,
    """
    place[0] at FILE.py:LINE: where(PASS="U") selects an update; updates run where their state is used.
    help: leave PASS="U" out.
""",
)
def placing_an_update():
    chain(1).place(where(PASS="U"), group=0)


# -- replicate, shard, remat ----------
@expected(
    piper.DirectiveError,
    """
    replicate[1] at FILE.py:LINE: state layers.0 is replicated in another way already.
        already: axes=('data',)
        now:     axes=('data',) shard_optimizer=True
        by replicate(where(), axes=('data',)) at FILE.py:LINE
        and replicate(where(PP=0), axes=('data',), shard_optimizer=True) at FILE.py:LINE
    help: let each parameter be selected by one replicate directive.
""",
)
def replicated_twice():
    chain(2).replicate(where()).replicate(where(PP=0), shard_optimizer=True)


@expected(
    piper.DirectiveError,
    """
    replicate[0] at FILE.py:LINE: replicate has no option 'shard_param'.
    help: did you mean 'shard_params'?
""",
)
def unknown_option_of_replicate():
    chain(1).replicate(where(), shard_param=True)


@expected(
    piper.DirectiveError,
    """
    replicate[0] at FILE.py:LINE: gradients that are whole on every device are reduced once per step.
    help: reduce_every="microbatch" needs shard_grads=True.
""",
)
def reducing_whole_gradients_per_microbatch():
    chain(1).replicate(where(), reduce_every="microbatch")


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: F[PP=0] layers.0.gate is not in an expert region.
    help: select expert regions, such as where(EP=...), or wrap the experts in piper.expert_region.
""",
)
def sharding_what_is_no_expert():
    experts(1).shard(where(PP=0))


@expected(
    piper.DirectiveError,
    """
    remat[0] at FILE.py:LINE: unknown policy 'dots_savable'.
    help: did you mean 'dots_saveable'?
""",
)
def unknown_policy():
    chain(1).remat(where(), policy="dots_savable")


@expected(
    piper.DirectiveError,
    """
    remat[1] at FILE.py:LINE: where(MB=0) selects 2 of the 4 nodes of layers.0.
    help: an operation is computed again in all its passes and microbatches: name PP, EP or a path alone.
""",
)
def remat_of_one_microbatch():
    chain(1).split(where(), num_microbatches=2).remat(where(MB=0))


# -- the tensor axis ----------
@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: no parameter has a dimension for the tensor axis.
        names of dimensions: none
        rules: mlp
    help: name them (with_partitioning), or give rules={"mlp": "tensor"} or dims={"*.up.kernel": 1}.
""",
)
def names_that_no_parameter_has():
    chain(2).shard(where(), axis="tensor", rules={"mlp": "tensor"})


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: dims: no parameter's path matches '*.kernle'.
    help: did you mean 'layers.1.kernel'?
""",
)
def a_path_of_the_tensor_axis_that_is_none():
    chain(2).shard(where(), axis="tensor", dims={"*.kernle": 1})


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: layers.kernel has no dimension 3.
    help: its shape is [2, 32, 32]; '*.kernel' gives 3.
""",
)
def a_dimension_that_a_stack_has_not():
    stacked(2).shard(where(), axis="tensor", dims={"*.kernel": 3})


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: dimension 0 of layers.kernel [2, 32, 32] are its layers, which stages divide.
    help: give '*.kernel' another dimension.
""",
)
def the_dimension_of_the_layers_of_a_stack():
    stacked(2).shard(where(), axis="tensor", dims={"*.kernel": 0})


@expected(
    piper.DirectiveError,
    """
    shard: rules='mlp' is no mapping.
    help: such as {"mlp": "tensor"}, or pairs.
""",
)
def rules_that_are_no_mapping():
    chain(2).shard(where(), axis="tensor", rules="mlp")


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)


def test_the_line_is_that_of_the_call():
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(piper.FilterError) as caught:
        chain(2).place(where(PP=9), group=0)
    assert f"test_directive_errors.py:{line}:" in str(caught.value)
