"""A thread that takes requests out of one engine, for another to go on with.

Knows engines, and the members' plans; nothing of how they come to these.
"""

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from punica_jax.engine_request import EngineClosedError
from punica_jax.members import Members
from punica_jax.request_state import RequestState
from punica_jax.stats import RequestProgress
from punica_jax.tickets import Ticket

_log = logging.getLogger(__name__)
# How often it looks who has no room, and asks engines for their requests whatever it
# sees, while any are under way.
_LOOK_S, _ASK_S = 0.1, 1.0
# How long it waits for an engine's answer: a few of the longest steps.
_PATIENCE_S = 1.0


class Source(Protocol):
    """What is asked of an engine here; see `Engine`."""

    async def export(self, request_id: str) -> RequestState: ...

    async def progress(self) -> Mapping[str, RequestProgress]: ...

    def cancel(self, request_id: str) -> None: ...


class Mover:
    """Looks at the engines from time to time, and moves what the members say.

    A request is computed again where it goes: its prompt and what came of it (Punica,
    section 5.3). Who reads its pieces goes on with it, by `Members.state_of`.
    """

    def __init__(self, engines: Sequence[Source], members: Members):
        self._engines = engines
        self._members = members
        self._gathered_s = self._asked_s = time.monotonic()
        self._is_closing = self._is_idle = False
        self._awake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._moves: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._run, name="punica-jax-mover", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.close)

    def note_request(self) -> None:
        """Have it begin to look, if it does not."""
        if self._is_idle:
            self.wake()

    def wake(self) -> None:
        """Have it look at once."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._awake.set)

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
            asyncio.run(self._serve())
        finally:
            atexit.unregister(self.close)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._is_closing:
            try:
                await self._look()
            except Exception:
                _log.exception("requests stay where they are")
            await self._wait()
        if self._moves:  # what an engine was asked for comes, or that it has ended
            await asyncio.wait(self._moves)

    async def _wait(self) -> None:
        """Wait for a moment, and where nobody is under way until somebody comes."""
        self._is_idle = True  # first: who comes from here on wakes it
        timeout_s = _LOOK_S if len(self._members) else None
        self._is_idle = timeout_s is None
        if not self._is_closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), timeout_s)
        self._awake.clear()

    async def _look(self) -> None:
        alive, now_s = self._members.alive, time.monotonic()
        every_s = self._members.placement.every_s
        gathers = every_s is not None and now_s - self._gathered_s >= every_s
        gathers = gathers and len(alive) > 1
        asks = now_s - self._asked_s >= _ASK_S
        if not len(self._members) or not (
            gathers or asks or self._members.may_relieve()
        ):
            return
        self._asked_s = now_s
        answers = await asyncio.gather(*map(self._progress, alive))
        if self._is_closing:
            return
        known = {place: own for place, own in answers if own is not None}
        for place, here in self._members.note_progress(known):
            self._engines[place].cancel(here)
        plan = self._members.relieved(known)
        if gathers and not plan:
            self._gathered_s = now_s
            plan = self._members.gathered(known)
        for one in plan:
            task = asyncio.create_task(self._move(*one))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)

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

    async def _move(
        self, ticket: Ticket, target: int, moving: "Future[RequestState | None]"
    ) -> None:
        """Take a request out, unless it has ended or somebody else was sooner."""
        (place, here), state = ticket.at, None
        try:
            with contextlib.suppress(ValueError, EngineClosedError):
                state = await self._engines[place].export(here)
        finally:
            self._members.move(ticket, None if state is None else target)
            moving.set_result(state)
