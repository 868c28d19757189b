"""The event engine: runs a program against a clock.

Rules. A slot starts when everything that its nodes need from outside is finished and the slots before it on its streams
have ended; it ends with its last node, and only then are its results visible outside (it is one program). Inside a
slot, computations on one stream run one after another and communication overlaps them. A transfer occupies the outgoing
link of its sender and the incoming link of its receiver, a collective both links of every member; first come, first
served. Sends are buffered: a transfer does not wait for its Recv to be posted, but a Recv holds its stream from when it
is posted until its data has arrived. Ties are broken by node number, so equal inputs give equal results.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from piper_jax.errors import PlanError
from piper_jax.ir.nodes import Compute, Update
from piper_jax.simulation.costs.base import Cost, Link
from piper_jax.simulation.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When each node and slot ran. ``cause`` is the slot whose end let a slot start, -1 at the very start."""

    node_start: list[float]
    node_end: list[float]
    slot_start: list[float]
    slot_end: list[float]
    cause: list[int]


def run_program(program: Program, costs: Sequence[Cost], concurrency: float | None = None) -> Times:
    """Runs ``program``; ``costs[i]`` is that of node i.

    Args:
      concurrency: how many computations run at full speed at once; beyond it all slow down equally. None: any number.

    Raises:
      PlanError: some nodes can never start, because what they wait for waits for them.
    """
    run = _Run(program, costs, concurrency)
    run.run()
    if run.num_ended < len(program.slots):
        raise _stuck(program, run.slot_end)
    return Times(
        node_start=run.node_start,
        node_end=run.node_end,
        slot_start=run.slot_start,
        slot_end=run.slot_end,
        cause=run.cause,
    )


class _Run:
    """The state of one run."""

    def __init__(self, program: Program, costs: Sequence[Cost], concurrency: float | None):
        num_nodes, num_slots = len(program.nodes), len(program.slots)
        self.program, self.costs, self.concurrency = program, costs, concurrency
        self.is_compute = [isinstance(node, Compute | Update) for node in program.nodes]
        self.node_start, self.node_end = [0.0] * num_nodes, [-1.0] * num_nodes
        self.slot_start, self.slot_end = [0.0] * num_slots, [-1.0] * num_slots
        self.cause = [-1] * num_slots
        self.waits = list(program.num_waits)
        self.unfinished = [len(members) for members in program.slots]
        self.inner_waits: dict[int, int] = {}
        self.engines: dict[tuple[int, str], list[int] | None] = {}
        self.queues: dict[Link, deque[int]] = {}
        self.num_ended, self.now = 0, 0.0
        self.events: list[tuple[float, int]] = []
        self.shared: list[tuple[float, int]] = []
        self.work = 0.0
        self.finished: deque[int] = deque()

    def run(self) -> None:
        for slot, waits in enumerate(self.program.num_waits):
            if not waits:
                self.start_slot(slot, -1)
        while True:
            while self.finished:
                self.finish_node(self.finished.popleft())
            if not self.advance():
                return

    def advance(self) -> bool:
        """Moves the clock to the next node that ends; False if there is none."""
        if self.shared:
            rate = min(1.0, (self.concurrency or 1.0) / len(self.shared))
            shared_end = self.now + (self.shared[0][0] - self.work) / rate
            if not self.events or shared_end <= self.events[0][0]:
                self.work, node = heapq.heappop(self.shared)
                self.now = shared_end
                self.finished.append(node)
                return True
            self.work += (self.events[0][0] - self.now) * rate
        if not self.events:
            return False
        self.now, node = heapq.heappop(self.events)
        self.finished.append(node)
        return True

    def start_slot(self, slot: int, cause: int) -> None:
        self.slot_start[slot], self.cause[slot] = self.now, cause
        members = self.program.slots[slot]
        if len(members) == 1:
            self.launch(members[0])
            return
        inside = set(members)
        for member in members:
            for after in self.program.inner.get(member, ()):
                if after in inside:
                    self.inner_waits[after] = self.inner_waits.get(after, 0) + 1
        for member in members:
            if not self.inner_waits.get(member):
                self.ready_inside(member)

    def ready_inside(self, node: int) -> None:
        """A node of a slot of several: computations of one stream take turns, communication goes ahead."""
        if not self.is_compute[node]:
            self.launch(node)
            return
        key = (self.program.node_slot[node], self.program.nodes[node].stream)
        waiting = self.engines.get(key)
        if waiting is None:
            self.engines[key] = []
            self.launch(node)
        else:
            heapq.heappush(waiting, node)

    def launch(self, node: int) -> None:
        duration, links = self.costs[node]
        if not links or duration <= 0.0:
            self.start_node(node, duration)
            return
        for link in links:
            self.queues.setdefault(link, deque()).append(node)
        self.try_links(node)

    def try_links(self, node: int) -> None:
        """Starts a communication that is first in the queue of each of its links."""
        duration, links = self.costs[node]
        if all(self.queues[link][0] == node for link in links):
            self.start_node(node, duration)

    def start_node(self, node: int, duration: float) -> None:
        self.node_start[node] = self.now
        if duration <= 0.0:
            self.finished.append(node)
        elif self.concurrency is not None and self.is_compute[node]:
            heapq.heappush(self.shared, (self.work + duration, node))
        else:
            heapq.heappush(self.events, (self.now + duration, node))

    def finish_node(self, node: int) -> None:
        self.node_end[node] = self.now
        duration, links = self.costs[node]
        if links and duration > 0.0:
            self.free_links(links)
        slot = self.program.node_slot[node]
        self.unfinished[slot] -= 1
        if len(self.program.slots[slot]) > 1:
            self.continue_slot(slot, node)
        if not self.unfinished[slot]:
            self.finish_slot(slot)

    def free_links(self, links: Sequence[Link]) -> None:
        for link in links:
            self.queues[link].popleft()
        for head in dict.fromkeys(self.queues[link][0] for link in links if self.queues[link]):
            self.try_links(head)

    def continue_slot(self, slot: int, node: int) -> None:
        for after in self.program.inner.get(node, ()):
            self.inner_waits[after] -= 1
            if not self.inner_waits[after]:
                self.ready_inside(after)
        if self.is_compute[node]:
            key = (slot, self.program.nodes[node].stream)
            waiting = self.engines[key]
            if waiting:
                self.launch(heapq.heappop(waiting))
            else:
                self.engines[key] = None

    def finish_slot(self, slot: int) -> None:
        self.slot_end[slot] = self.now
        self.num_ended += 1
        waits = self.waits
        for after in self.program.successors[slot]:
            waits[after] -= 1
            if not waits[after]:
                self.start_slot(after, slot)


def _stuck(program: Program, slot_end: Sequence[float]) -> PlanError:
    waiting = [program.nodes[program.slots[slot][0]].id for slot, end in enumerate(slot_end) if end < 0]
    return PlanError(
        f"simulation is stuck: {len(waiting)} of {len(slot_end)} slots wait for each other.",
        detail=map(str, waiting),
        help="check the plan: its order has a cycle.",
        waiting=tuple(waiting),
    )
