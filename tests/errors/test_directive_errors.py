"""What a user reads after a mistake in directives that set attributes: the whole text."""

from __future__ import annotations

import pytest
from expected import Expected
from traced_dags import chain, experts

import piper_jax as piper
from piper_jax import where
from piper_jax.ir.nodes import DeviceGroup


def split_chain():
    return chain(2).split(where(), num_microbatches=2)


def placed_chain():
    return split_chain().place(where(PP=0), group=0).place(where(PP=1), group=1)


expected = Expected(__file__)


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


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
