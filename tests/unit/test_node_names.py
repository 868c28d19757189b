"""Naming one node as plans print it, and what a wrong name is told."""

from __future__ import annotations

import pytest
from traced_dags import chain, experts, op, traced

from piper_jax import FilterError, where
from piper_jax.ir.ids import NodeId
from piper_jax.ir.node_names import node_named


def pipeline():
    """Three layers, two microbatches, halves; the backward of the middle layer is in one piece."""
    ops = [op(f"layers.{i}", i, splittable=i != 1, whole_because="a kernel") for i in range(3)]
    plan = traced(ops, [("layers.0", "layers.1", "x"), ("layers.1", "layers.2", "y")])
    plan = plan.split(where(), num_microbatches=2).place(where(), group=0)
    return plan.order([where(PASS="F"), *(where(PASS=p, PP=s) for s in (2, 1, 0) for p in ("BI", "BW"))])


@pytest.mark.parametrize(
    "name",
    [
        "BW[PP=2,MB=1]",
        " BW [ mb=1, PP=2 ]",
        "BW[PP=2,MB=1] layers.2",
        where(PP=2, MB=1, PASS="BW"),
        where("layers.2", MB=1, PASS="BW"),
        NodeId("layers.2", "BW", 2, None, 1),
    ],
)
def test_text_filters_and_ids_name_a_node(name):
    plan = pipeline()
    assert node_named(plan.complete(), name) == NodeId("layers.2", "BW", 2, None, 1)
    assert node_named(plan.dag, name) == NodeId("layers.2", "BW", 2, None, 1)


def test_every_node_is_named_by_its_own_text():
    for plan in (pipeline(), experts(2).place(where(), group=0)):
        dag = plan.complete()
        for node in plan.dag.nodes:
            if node.PASS != "U":
                assert node_named(dag, str(node)) == node


WRONG = {
    "F[PP=3,MB=0]": "there is no node 'F[PP=3,MB=0]'.\nhelp: did you mean 'F[PP=2,MB=0]'?",
    "F[PP=1,MB=7]": "there is no node 'F[PP=1,MB=7]'.\nhelp: did you mean 'F[PP=1,MB=1]'?",
    "f[PP=1,MB=1]": "there is no node 'f[PP=1,MB=1]'.\nhelp: did you mean 'F[PP=1,MB=1]'?",
    "F[PP=1,MB=0] layers.2": "there is no node 'F[PP=1,MB=0] layers.2'.\nhelp: did you mean 'F[PP=2,MB=0]'?",
    "BW[PP=1,MB=0]": "there is no node 'BW[PP=1,MB=0]'.\n"
    "    this backward is whole: B[PP=1,MB=0] layers.1 (a kernel)\n"
    "help: did you mean 'B[PP=1,MB=0]'?",
    "B[PP=0,MB=1]": "there is no node 'B[PP=0,MB=1]'.\n"
    "    this backward is split: BI[PP=0,MB=1] layers.0 and BW[PP=0,MB=1] layers.0\n"
    "help: did you mean 'BI[PP=0,MB=1]'?",
    "forward of layer 1": "there is no node 'forward of layer 1'.\n"
    "help: write it as plans print it, such as 'F[PP=0,MB=0]'.",
    "U": "there is no node 'U'.\n"
    "    updates and communication do not run alone\n"
    "help: write it as plans print it, such as 'F[PP=0,MB=0]'.",
    "F[PP=2]": "'F[PP=2]' is 2 nodes, not one.\n"
    "    F[PP=2,MB=0] layers.2\n"
    "    F[PP=2,MB=1] layers.2\n"
    "help: name one of them, such as 'F[PP=2,MB=0]'.",
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_names(name):
    with pytest.raises(FilterError) as caught:
        node_named(pipeline().complete(), name)
    assert str(caught.value) == WRONG[name]


def test_where_a_stage_has_several_operations_they_are_listed():
    with pytest.raises(FilterError) as caught:
        node_named(experts(1).place(where(), group=0).dag, "F[PP=0]")
    assert str(caught.value) == (
        "'F[PP=0]' is 3 nodes, not one.\n"
        "    F[PP=0] layers.0.gate\n"
        "    F[PP=0,EP=0] layers.0.experts\n"
        "    F[PP=0] layers.0.combine\n"
        "help: name one of them, such as 'F[PP=0] layers.0.gate'."
    )


def test_a_filter_that_selects_nothing_says_what_there_is():
    with pytest.raises(FilterError, match="matches nothing"):
        node_named(chain(2).dag, where(PP=5, PASS="F"))
