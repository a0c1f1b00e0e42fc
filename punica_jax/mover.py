"""A thread that takes requests out of one engine, for another to go on with.

Knows engines, and the members' plans; nothing of how they come to these.
"""

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from punica_jax.engine_request import EngineClosedError
from punica_jax.members import Members, Ticket
from punica_jax.request_state import RequestState
from punica_jax.stats import RequestProgress

_log = logging.getLogger(__name__)
# How often it looks who has no room, while requests are under way.
_LOOK_S = 0.1
# How long it waits for an engine: a few of the longest steps.
_PATIENCE_S = 1.0


class Source(Protocol):
    """What is asked of an engine here; see `Engine`."""

    async def export(self, request_id: str) -> RequestState: ...

    async def progress(self) -> Mapping[str, RequestProgress]: ...


class Mover:
    """Looks at the engines from time to time, and moves what the members say.

    A request is computed again where it goes: its prompt and what came of it (Punica,
    section 5.3). Who reads its pieces goes on with it, by `Ticket.state`.
    """

    def __init__(self, engines: Sequence[Source], members: Members):
        self._engines = engines
        self._members = members
        self._gathered_s = time.monotonic()
        self._is_closing = False
        self._awake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="punica-jax-mover", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.close)

    def wake(self) -> None:
        """Have it look soon."""
        self._awake.put(None)

    def stop(self) -> None:
        """Have it end."""
        self._is_closing = True
        self.wake()

    def close(self) -> None:
        """Do so, and wait for it."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                while not self._is_closing:
                    try:
                        runner.run(self._look())
                    except Exception:
                        _log.exception("requests stay where they are")
                    self._wait()
        finally:
            atexit.unregister(self.close)

    def _wait(self) -> None:
        """Wait for a moment; where nobody can move, until somebody comes."""
        if self._can_move():
            time.sleep(0 if self._is_closing else _LOOK_S)
        else:
            self._awake.get()
        while not self._awake.empty():
            self._awake.get()

    def _can_move(self) -> bool:
        return len(self._members.alive) > 1 and len(self._members) > 0

    async def _look(self) -> None:
        if not self._can_move():
            return
        every_s, now_s = self._members.placement.every_s, time.monotonic()
        gathers = every_s is not None and now_s - self._gathered_s >= every_s
        if gathers:
            self._gathered_s = now_s
        progress = await asyncio.gather(*map(self._progress, self._members.alive))
        known = {place: own for place, own in progress if own is not None}
        plan = self._members.plan(known, gathers=gathers)
        await asyncio.gather(*(self._move(*one) for one in plan))

    async def _progress(
        self, place: int
    ) -> tuple[int, Mapping[str, RequestProgress] | None]:
        """Return an engine's place and progress; None if it does not answer.

        One that has ended is found out by who asks it for something.
        """
        asked = self._engines[place].progress()
        with contextlib.suppress(EngineClosedError, TimeoutError):
            return place, await asyncio.wait_for(asked, _PATIENCE_S)
        return place, None

    async def _move(self, ticket: Ticket, target: int) -> None:
        moving: Future[RequestState | None] = Future()
        ticket.state = moving
        state = None
        try:
            # Not under way any more: it has ended, or somebody else took it out.
            with contextlib.suppress(ValueError, EngineClosedError):
                state = await self._engines[ticket.place].export(ticket.here)
                self._members.move(ticket, target, state)
        finally:
            ticket.state = None if state is None else moving
            moving.set_result(state)
