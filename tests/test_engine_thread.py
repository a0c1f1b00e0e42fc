"""Which commands an idle engine's thread takes before its next step; no model."""

import queue
from typing import Any

import pytest

from punica_jax import engine_thread
from punica_jax.engine_thread import EngineThread


class FakeLoop:
    """Counts the sequences that wait at each step, which all then have answers."""

    has_flight = False

    def __init__(self):
        self.num_waiting, self.steps = 0, []

    @property
    def busy(self):
        return self.num_waiting > 0

    def add(self):
        self.num_waiting += 1

    def step(self):
        self.steps.append(self.num_waiting)
        self.num_waiting = 0
        return []


class FakeResidence:
    def poll(self):
        pass

    def take_renames(self):
        return []

    def hasten(self):
        return False


@pytest.fixture
def loop():
    return FakeLoop()


@pytest.fixture
def thread(loop):
    """One that was not started: a test takes its turns."""
    residence: Any = FakeResidence()
    return EngineThread(loop, residence, 100, queue.SimpleQueue())


@pytest.fixture
def pauses(monkeypatch):
    """What happens during each pause, from the last to the first; then nothing."""
    happens: list[Any] = []
    seen = []

    def pause():
        seen.append(True)
        if happens:
            happens.pop()()

    monkeypatch.setattr(engine_thread, "_pause", pause)
    return happens, seen


def test_those_that_ask_at_one_time_share_a_step(thread, loop, pauses):
    happens, seen = pauses
    happens += [lambda: thread.do(loop.add)] * 3
    thread.do(loop.add)
    thread._turn()
    assert (loop.steps, len(seen)) == ([4], 4)


def test_one_that_is_alone_waits_for_one_pause(thread, loop, pauses):
    thread.do(loop.add)
    thread._turn()
    assert (loop.steps, len(pauses[1])) == ([1], 1)


def test_those_that_never_end_are_not_waited_for(thread, loop, pauses):
    happens, seen = pauses
    happens += [lambda: thread.do(loop.add)] * 1000
    thread.do(loop.add)
    thread._turn()
    assert loop.steps == [1 + engine_thread._MOST_PAUSES]
    assert len(seen) == engine_thread._MOST_PAUSES


@pytest.mark.parametrize("what", ["is busy", "has no sequence", "is closing"])
def test_there_is_no_pause_where_nobody_gains_by_it(thread, loop, pauses, what):
    if what == "is busy":
        loop.add()
    if what == "is closing":
        thread.stop()
    thread.do((lambda: None) if what == "has no sequence" else loop.add)
    thread._turn()
    assert len(loop.steps) == 1 and not pauses[1]
