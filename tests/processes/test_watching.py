"""What processes tell each other: lost and stuck ones are named, all stop after the same step, facts must be equal."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_jax.errors import ProcessFault
from piper_jax.processes.coordination import Coordination
from piper_jax.processes.stopping import StopAgreement
from piper_jax.processes.watchdog import Position, Watchdog


class Store:
    """The key-value store of process 0, in this process."""

    def __init__(self, count: int):
        self.values: dict[str, str] = {}
        self.barrier = threading.Barrier(count)
        self.gone = False

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        if self.gone:
            raise ConnectionError("gone")
        self.values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder + "/")]

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        self.barrier.wait(milliseconds / 1000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def processes(count: int, store: Store | None = None) -> list[Coordination]:
    store = store or Store(count)
    return [Coordination(process=p, count=count, _client=store) for p in range(count)]


def watched(count: int, at: list[Position], clock: Clock, store: Store) -> list[Watchdog]:
    return [
        Watchdog(coordination=c, position=lambda k=k: at[k], lost_limit=5.0, step_limit=20.0, clock=clock)
        for k, c in enumerate(processes(count, store))
    ]


def test_a_silent_process_is_lost_and_the_message_says_where_all_are() -> None:
    clock, store = Clock(), Store(3)
    at = [
        Position(step=7, what="transfer F[PP=0,MB=1]"),
        Position(step=7, what="waiting"),
        Position(step=6, what="data"),
    ]
    dogs = watched(3, at, clock, store)
    assert [dog.look() for dog in dogs] == [None] * 3
    for clock.now in (2.0, 4.0, 6.0, 8.0):
        faults = [dog.look() for dog in dogs[:2]]
    assert all(fault is not None and fault.what == "process 2 is lost: no sign of life for 5 s." for fault in faults)
    assert faults[0] is not None
    assert "process 0: step 7, transfer F[PP=0,MB=1] (for 8 s)" in str(faults[0])
    assert "process 2: step 6, data (for 6 s)" in str(faults[0])


def test_processes_that_live_but_do_not_go_on_are_stuck() -> None:
    clock, store = Clock(), Store(2)
    at = [Position(step=3, what="exchange 0"), Position(step=3, what="compute F[PP=1]")]
    dogs = watched(2, at, clock, store)
    for clock.now in range(0, 20, 2):
        assert [dog.look() for dog in dogs] == [None, None]
    at[1] = Position(step=3, what="compute F[PP=1,MB=1]")
    for clock.now in range(20, 38, 2):
        assert [dog.look() for dog in dogs] == [None, None]
    for clock.now in (40.0, 42.0, 44.0):
        faults = [dog.look() for dog in dogs]
    assert faults[0] is not None
    assert faults[0].what == "no process has gone on for 20 s."


def test_without_process_0_the_others_end() -> None:
    clock, store = Clock(), Store(2)
    dog = watched(2, [Position(step=1, what="x")] * 2, clock, store)[1]
    assert dog.look() is None
    store.gone = True
    clock.now = 4.0
    assert dog.look() is None
    clock.now = 6.0
    fault = dog.look()
    assert fault is not None
    assert fault.what.startswith("process 0 is lost")


def test_one_process_alone_is_watched_too() -> None:
    clock = Clock()
    dog = Watchdog(
        coordination=None, position=lambda: Position(step=2, what="data"), lost_limit=5, step_limit=20, clock=clock
    )
    assert dog.look() is None
    clock.now = 30.0
    fault = dog.look()
    assert fault is not None
    assert "process 0: step 2, data (for 30 s)" in str(fault)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_all_stop_after_the_same_step(data: Any) -> None:
    """Processes go on in any order that their steps allow: none begins one before all have begun the one two before."""
    count = data.draw(st.integers(2, 4))
    agreements = [StopAgreement(c) for c in processes(count)]
    asked_at = {p: data.draw(st.integers(0, 6)) for p in data.draw(st.sets(st.integers(0, count - 1), min_size=1))}
    done, stopped = [0] * count, [False] * count
    for _ in range(400):
        able = [p for p in range(count) if not stopped[p] and done[p] - 2 < min(done)]
        if not able:
            break
        p = data.draw(st.sampled_from(able))
        if agreements[p].is_over(done[p], done[p] >= asked_at.get(p, 10**6)):
            stopped[p] = True
        else:
            done[p] += 1
    assert all(stopped)
    assert len(set(done)) == 1


def _each(count: int, call: Any) -> list[Exception | None]:
    """Calls in threads of their own; what each raised."""
    raised: list[Exception | None] = [None] * count

    def run(k: int) -> None:
        try:
            call(k)
        except ProcessFault as error:
            raised[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_facts_that_differ_are_named_with_the_processes() -> None:
    several = processes(2)
    raised = _each(2, lambda k: several[k].agree({"jax": f"0.10.{k}", "flax": "0.12"}, 10))
    for error in raised:
        assert error is not None
        assert "jax: 0.10.0 in process 0, 0.10.1 in process 1" in str(error)
        assert "flax" not in str(error)


def test_a_barrier_names_who_did_not_come() -> None:
    several = processes(3)
    raised = _each(2, lambda k: several[k].meet("compiled", 0.2))
    for error in raised:
        assert error is not None
        assert "process 2 did not come to the barrier 'compiled' within 0.2 s" in str(error)


def test_processes_meet_again_and_again() -> None:
    several = processes(2)
    assert _each(2, lambda k: [several[k].meet("step", 10) for _ in range(3)]) == [None, None]


def test_the_thread_ends_the_process_once() -> None:
    ended: list[Any] = []
    done = threading.Event()

    def end(fault: Any) -> None:
        ended.append(fault)
        done.set()

    dog = Watchdog(
        coordination=None, position=lambda: Position(step=1, what="data"), lost_limit=1, step_limit=0.05, interval=0.01,
        end=end,
    )  # fmt: skip
    with dog:
        assert done.wait(20)
    assert len(ended) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_alone_a_process_stops_when_it_is_asked(asked: bool) -> None:
    assert StopAgreement(None).is_over(5, asked) is asked
