"""What an engine's thread does: commands, steps, answers.

Knows requests and the loop that steps them; nothing of files or prompts.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from punica_jax.engine_request import EngineClosedError, EngineRequest
from punica_jax.loop import StepLoop
from punica_jax.request_table import RequestTable
from punica_jax.residence import AdapterResidence
from punica_jax.stats import EngineGauges, EngineStats
from punica_jax.stream import Piece
from punica_jax.versions import HostAdapter, Version

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDLE_S = 0.02
# Prompts of token ids come every 0.1 ms from one event loop, which gives this thread
# the interpreter's lock after 5: of 128 at once all 12 bursts were one step so, none
# without; of 32 all 36 either way. Who takes longer, to encode each text, say, is not
# waited for.
_pause = functools.partial(time.sleep, 0.0001)
_MOST_PAUSES = 64


class EngineThread:
    """One thread that answers requests, and goes on while adapters are loaded.

    Attributes:
      loop: steps the sequences.
      residence: has their adapters.
      requests: those under way; for the thread alone.
    """

    def __init__(
        self,
        loop: StepLoop,
        residence: AdapterResidence,
        max_waiting: int,
        awake: "queue.SimpleQueue[None]",
        options: AbstractContextManager[None] | None = None,
    ):
        """Make it; `start` starts it.

        Args:
          loop: steps the sequences.
          residence: has their adapters.
          max_waiting: sequences that may wait; requests that bring more are refused.
          awake: what wakes it; no `Event`: its lock would stop a finalizer.
          options: what all of its steps run under.
        """
        self.loop = loop
        self.residence = residence
        self._options = options
        self.requests = RequestTable(loop, residence, max_waiting)
        self._commands: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._awake = awake
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._serve, name="punica-jax-engine", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        # The interpreter's end amid a step would end the process by a signal.
        atexit.register(self.close)

    def stop(self) -> None:
        """Have the thread end, and all requests with `EngineClosedError`."""
        self._is_closing = True
        self._awake.put(None)

    def close(self) -> None:
        """Do so, and wait for it."""
        self.stop()
        self._thread.join()

    def do(self, command: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Have the thread call something between two steps; in any thread.

        Raises:
          EngineClosedError: it has ended.
        """
        with self._lock:
            if self._has_ended:
                raise self._ended()
            self._commands.append(functools.partial(command, *args, **kwargs))
        self._awake.put(None)

    def ask(
        self, question: Callable[..., _T], *args: Any, **kwargs: Any
    ) -> "asyncio.Future[_T]":
        """Do so, and return what to await for what it returns or raises."""
        answer: Future[_T] = Future()
        answer.set_running_or_notify_cancel()  # whoever asked may leave; it comes

        def command() -> None:
            try:
                answer.set_result(question(*args, **kwargs))
            except Exception as error:
                answer.set_exception(error)

        self.do(command)
        return asyncio.wrap_future(answer)

    async def answers(self, request: EngineRequest) -> AsyncGenerator[Piece, None]:
        """Hand a request to the engine's thread, and yield what comes of it."""
        left = len(request.sequences)
        try:
            # Nobody asks whether it has begun: a burst's answers to that would keep the
            # interpreter's lock from the thread while it should launch their step.
            self.do(self._begin, request)
            while left:
                for item in await request.news.get():
                    if isinstance(item, Exception):
                        left = 0
                        raise item
                    left -= item.completion is not None
                    yield item
        finally:
            if left:
                with contextlib.suppress(EngineClosedError):
                    self.do(self.requests.end, request, "cancelled")

    async def load(
        self,
        name: str,
        read: Callable[[], HostAdapter],
        is_remote: bool,
        *,
        allow_nan: bool,
        is_pinned: bool | None,
    ) -> None:
        """Bring an adapter to the device, and register it when it is found to be good.

        Raises:
          ValueError: it is not; nothing has changed then.
        """
        prepared: list[Version] = []

        def prepare() -> Version:
            version = self.residence.prepare(name, read, is_remote, allow_nan=allow_nan)
            prepared.append(version)
            self.residence.want(version)
            return version

        try:
            version = await self.ask(prepare)
            await asyncio.wrap_future(version.loaded)
            if error := await asyncio.to_thread(version.verify):
                raise error
            await self.ask(self.residence.adopt, version, is_pinned=is_pinned)
        except BaseException:
            with contextlib.suppress(EngineClosedError):
                # It is called after `prepare`, also where nobody waited for that.
                self.do(lambda: [self.residence.discard(one) for one in prepared])
            raise

    def stats(self, num_slots: int) -> EngineStats:
        """Return what there is and what was served; in any thread."""
        versions = self.residence.snapshot()
        scheduler = self.loop.scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_steps=self.loop.num_steps,
            num_step_sequences=self.loop.num_step_sequences,
            num_step_rows=self.loop.num_step_rows,
            num_preempted=scheduler.num_preempted,
            num_kv_pages=self.loop.pages.num_pages,
            num_free_kv_pages=self.loop.pages.num_free,
            num_slots=num_slots,
            num_on_device=self.residence.num_on_device,
            num_rank_pages=self.residence.num_rank_pages,
            num_free_rank_pages=self.residence.num_free_rank_pages,
            num_adapters=len(versions),
            host_adapter_bytes=self.residence.host_bytes,
            nbytes={name: version.nbytes for name, version in versions.items()},
            tiers={name: version.tier for name, version in versions.items()},
            base=self.requests.base_stats.copy(),
            adapters={name: version.stats.copy() for name, version in versions.items()},
        )

    @property
    def gauges(self) -> EngineGauges:
        """A few numbers of this moment; in any thread."""
        scheduler = self.loop.scheduler
        return EngineGauges(
            num_waiting=scheduler.num_waiting,
            num_open_kv_pages=scheduler.num_open_pages,
            has_ended=self._has_ended,
        )

    # What runs in the thread alone.

    def _serve(self) -> None:
        try:
            with self._options or contextlib.nullcontext():
                self._take_turns()
        except BaseException as error:
            _log.exception("the engine has ended")
            self._error = error
        finally:
            atexit.unregister(self.close)
            with self._lock:
                self._has_ended = True
            for command in self._commands:
                with contextlib.suppress(Exception):  # those that ask get it
                    command()
            self.residence.give_up(self._ended)
            for request in self.requests:
                request.fresh.append(self._ended())
            self._deliver()

    def _take_turns(self) -> None:
        while True:
            while not self._awake.empty():
                self._awake.get()
            if self._is_closing:  # after that: `close` wakes only once
                break
            if not self._turn():
                timeout_s = _IDLE_S if self.loop.busy else None  # for deadlines
                with contextlib.suppress(queue.Empty):
                    self._awake.get(timeout=timeout_s)

    def _ended(self) -> EngineClosedError:
        """Return an asker's own error; see `own_copy`."""
        ended = EngineClosedError("the engine has ended")
        ended.__cause__ = self._error
        return ended

    def _turn(self) -> bool:
        """Do what was asked, and one step; return whether anything happened."""
        was_idle = not self.loop.busy
        num_commands = self._do_commands()
        if was_idle:
            num_commands += self._gather()
        self.residence.poll()
        for old, new in self.residence.take_renames():
            self.requests.rename(old, new)
        over = self.loop.step()
        for sequence in over:
            self.requests.note_end(sequence)
        self._deliver()
        if num_commands or over or self.loop.has_flight:
            return True
        # Nobody could sit down: no other row would have to wait for the copy, too.
        return self.residence.hasten()

    def _begin(self, request: EngineRequest) -> None:
        try:
            self.requests.begin(request)
        except Exception as error:
            fresh: list[Piece | Exception] = [error]
            with contextlib.suppress(RuntimeError):  # nobody listens any more
                request.loop.call_soon_threadsafe(request.news.put_nowait, fresh)

    def _do_commands(self) -> int:
        num_commands = len(self._commands)
        for _ in range(num_commands):
            self._commands.popleft()()
        return num_commands

    def _gather(self) -> int:
        """Let sequences that come at the same time get into the same step.

        The first of them would have one of its own, for which all others wait.
        """
        num_commands = 0
        for _ in range(_MOST_PAUSES):
            if self._is_closing or not self.loop.busy:
                break
            _pause()
            if not self._commands:
                break
            num_commands += self._do_commands()
        return num_commands

    def _deliver(self) -> None:
        """Hand over what has come: one call for each event loop, not for each token."""
        speaking: dict[asyncio.AbstractEventLoop, list[EngineRequest]] = {}
        for request in [one for one in self.requests if one.fresh]:
            speaking.setdefault(request.loop, []).append(request)
            self.requests.forget(request)
        for loop, requests in speaking.items():
            news = [(request.news, request.fresh.copy()) for request in requests]
            for request in requests:
                request.fresh.clear()
            try:
                loop.call_soon_threadsafe(_hand_over, news)
            except RuntimeError:  # it is closed: nobody listens any more
                for request in requests:
                    self.requests.end(request, "cancelled")


def _hand_over(items: Iterable[tuple[asyncio.Queue, Any]]) -> None:
    for news, fresh in items:
        news.put_nowait(fresh)
