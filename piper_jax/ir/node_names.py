"""Finding the one computation node that a user names, as plans print it: ``F[PP=1,MB=0]``."""

from __future__ import annotations

import difflib
import re

from piper_jax.errors import FilterError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute
from piper_jax.ir.selection import select

_NAME = re.compile(r"\s*(?P<PASS>\w+)\s*(?:\[(?P<at>[^\]]*)\])?\s*(?P<op>.*?)\s*")
_AT = re.compile(r"\s*(PP|EP|MB)\s*=\s*(\d+)\s*", re.IGNORECASE)
_MAX_LISTED = 4


def node_named(dag: Dag, name: NodeId | Filter | str) -> NodeId:
    """The computation node that ``name`` stands for.

    Args:
      dag: the plan's DAG, completed or not.
      name: a node's id; its text, such as ``"F[PP=1,MB=0]"`` or ``"F[PP=1,MB=0] layers.4"`` where a stage has several
        operations; or a filter that selects it alone.

    Raises:
      FilterError: no node, or several; the message has the nearest name.
    """
    found = _candidates(dag, name)
    shown = repr(name) if isinstance(name, str) else str(name)
    if len(found) == 1:
        return found[0]
    if not found:
        other = _in_its_place(dag, name)
        suggestion = f"did you mean '{_shortest(dag, other)}'?" if other is not None else _nearest(dag, str(name))
        raise FilterError(f"there is no node {shown}.", detail=_why(dag, name, other), help=suggestion)
    more = [f"... and {len(found) - _MAX_LISTED} more"] if len(found) > _MAX_LISTED else []
    raise FilterError(
        f"{shown} is {len(found)} nodes, not one.",
        detail=[*map(str, found[:_MAX_LISTED]), *more],
        help=f"name one of them, such as '{_shortest(dag, found[0])}'.",
    )


def _candidates(dag: Dag, name: NodeId | Filter | str) -> list[NodeId]:
    if isinstance(name, NodeId):
        return [name] if isinstance(dag.nodes.get(name), Compute) else []
    if not isinstance(name, str):
        return [node for node in select(dag, name) if isinstance(dag.nodes[node], Compute)]
    parsed = _parsed(name)
    return [node for node, found in dag.nodes.items() if isinstance(found, Compute) and _is_named(node, parsed)]


def _parsed(name: str) -> tuple[str, dict[str, int], str] | None:
    match = _NAME.fullmatch(name)
    parts = [part for part in (match["at"] or "").split(",") if part.strip()] if match else []
    numbers = [_AT.fullmatch(part) for part in parts]
    if match is None or not all(numbers):
        return None
    return match["PASS"], {found[1].upper(): int(found[2]) for found in numbers if found}, match["op"]


def _is_named(node: NodeId, name: tuple[str, dict[str, int], str] | None) -> bool:
    if name is None:
        return False
    PASS, at, op = name
    return node.PASS == PASS and op in ("", node.op) and all(getattr(node, key) == value for key, value in at.items())


def _in_its_place(dag: Dag, name: NodeId | Filter | str) -> NodeId | None:
    """The same backward in another form: BI of one that is split, or B of one that is whole."""
    parsed = _parsed(str(name))
    if parsed is None or not parsed[1]:
        return None
    form = {"B": "BI", "BI": "B", "BW": "B"}.get(parsed[0], "")
    return next((node for node in dag.nodes if _is_named(node, (form, *parsed[1:]))), None)


def _why(dag: Dag, name: NodeId | Filter | str, other: NodeId | None) -> list[str]:
    parsed = _parsed(str(name))
    if name in dag.nodes or (parsed is not None and parsed[0] == "U"):
        return ["updates and communication do not run alone"]
    if other is None:
        return []
    if other.PASS == "BI":
        return [f"this backward is split: {other} and {other._replace(PASS='BW')}"]
    because = dag.ops[other.op].whole_because
    return [f"this backward is whole: {other}" + (f" ({because})" if because else "")]


def _nearest(dag: Dag, name: str) -> str:
    """A suggestion: the node of the same pass with the nearest coordinates, else of the most similar text."""
    nodes = [node for node, found in dag.nodes.items() if isinstance(found, Compute)]
    parsed = _parsed(name)
    if parsed is not None and parsed[1]:
        PASS, at, op = parsed[0].upper(), parsed[1], parsed[2]
        near = [n for n in nodes if n.PASS == PASS] or [n for n in nodes if (n.PASS or "")[:1] == PASS[:1]] or nodes
        near = [n for n in near if n.op == op] or near
        far = {n: sum(abs((getattr(n, key) or 0) - value) for key, value in at.items()) for n in near}
        nodes = [min(far, key=lambda n: far[n])] if far else []
    found = difflib.get_close_matches(name, map(str, nodes), n=1, cutoff=0.6) if len(nodes) > 1 else map(str, nodes)
    best = next((n for f in found for n in nodes if str(n) == f), None)
    if best is not None:
        return f"did you mean '{_shortest(dag, best)}'?"
    return (
        f"write it as plans print it, such as '{_shortest(dag, nodes[0])}'." if nodes else "this plan computes nothing."
    )


def _shortest(dag: Dag, node: NodeId) -> str:
    """The text of a node, without its operation where that is the only one at its coordinates."""
    at = str(node._replace(op="")).rstrip()
    alone = sum(n[1:] == node[1:] for n, found in dag.nodes.items() if isinstance(found, Compute)) == 1
    return at if alone and "[" in at else str(node)
