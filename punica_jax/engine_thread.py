"""What an engine's thread does: commands, steps, answers.

Knows requests and the loop that steps them; nothing of files or prompts.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from punica_jax.engine_request import (
    EngineClosedError,
    EngineRequest,
    QueueFullError,
    count_end,
)
from punica_jax.loop import StepLoop
from punica_jax.placements import UnknownAdapterError
from punica_jax.request import FinishReason
from punica_jax.request_state import RequestState
from punica_jax.residence import AdapterResidence
from punica_jax.sequence import SequenceState
from punica_jax.stats import AdapterStats, EngineStats
from punica_jax.stream import Piece
from punica_jax.versions import HostAdapter, Version

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDLE_S = 0.02


class EngineThread:
    """One thread that answers requests, and goes on while adapters are loaded.

    Attributes:
      loop: steps the sequences.
      residence: has their adapters.
      base_stats: of requests without an adapter.
    """

    def __init__(
        self,
        loop: StepLoop,
        residence: AdapterResidence,
        max_waiting: int,
        awake: "queue.SimpleQueue[None]",
    ):
        """Make it; `start` starts it.

        Args:
          loop: steps the sequences.
          residence: has their adapters.
          max_waiting: sequences that may wait; requests that bring more are refused.
          awake: what wakes it; no `Event`: its lock would stop a finalizer.
        """
        self.loop = loop
        self.residence = residence
        self.base_stats = AdapterStats()
        self._max_waiting = max_waiting
        self._requests: dict[str, EngineRequest] = {}
        self._owners: dict[SequenceState, EngineRequest] = {}
        self._leaving: dict[str, Version] = {}
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
            await self.ask(self.begin, request)
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
                    self.do(self.end, request, "cancelled")

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
            base=self.base_stats.copy(),
            adapters={name: version.stats.copy() for name, version in versions.items()},
        )

    # What runs in the thread alone.

    def _serve(self) -> None:
        try:
            while True:
                while not self._awake.empty():
                    self._awake.get()
                if self._is_closing:  # after that: `close` wakes only once
                    break
                if not self._turn():
                    timeout_s = _IDLE_S if self.loop.busy else None  # for deadlines
                    with contextlib.suppress(queue.Empty):
                        self._awake.get(timeout=timeout_s)
        except BaseException as error:
            _log.exception("the engine has ended")
            self._error = error
        finally:
            with self._lock:
                self._has_ended = True
            for command in self._commands:
                with contextlib.suppress(Exception):  # those that ask get it
                    command()
            self.residence.give_up(self._ended)
            for request in list(self._requests.values()):
                request.fresh.append(self._ended())
            self._deliver()

    def _ended(self) -> EngineClosedError:
        """Return an asker's own error; see `own_copy`."""
        ended = EngineClosedError("the engine has ended")
        ended.__cause__ = self._error
        return ended

    def _turn(self) -> bool:
        """Do what was asked, and one step; return whether anything happened."""
        num_commands = len(self._commands)
        for _ in range(num_commands):
            self._commands.popleft()()
        self.residence.poll()
        for old, new in self.residence.take_renames():
            self.loop.rename(old, new)
        over = self.loop.step()
        for sequence in over:
            self._note_end(sequence)
        self._deliver()
        return bool(num_commands or over or self.loop.has_flight)

    def _deliver(self) -> None:
        """Hand over what has come: one call for each event loop, not for each token."""
        speaking: dict[asyncio.AbstractEventLoop, list[EngineRequest]] = {}
        for request in [one for one in self._requests.values() if one.fresh]:
            speaking.setdefault(request.loop, []).append(request)
            if not any(one in self._owners for one in request.sequences):
                del self._requests[request.name]
        for loop, requests in speaking.items():
            news = [(request.news, request.fresh.copy()) for request in requests]
            for request in requests:
                request.fresh.clear()
            try:
                loop.call_soon_threadsafe(_hand_over, news)
            except RuntimeError:  # it is closed: nobody listens any more
                for request in requests:
                    self.end(request, "cancelled")

    def begin(self, request: EngineRequest) -> None:
        """Let a request's sequences wait.

        Raises:
          UnknownAdapterError: no adapter has the name that it wants.
          ValueError: another one under way has its id.
          QueueFullError: too many wait already.
        """
        if (adapter := request.sequences[0].adapter) is not None:
            if self.residence[adapter] is self._leaving.get(adapter):
                raise UnknownAdapterError(f"adapter {adapter!r} is being unloaded")
        if request.name in self._requests:
            raise ValueError(f"a request with the id {request.name!r} is under way")
        scheduler, num = self.loop.scheduler, len(request.sequences)
        room = self._max_waiting + scheduler.num_free_seats
        if scheduler.num_waiting + num > room:
            most = self._max_waiting + scheduler.max_seats
            if num > most:
                raise ValueError(f"n must be at most {most} here, got {num}")
            raise QueueFullError(
                f"{scheduler.num_waiting} sequences wait already, and the request "
                f"would bring {num} more; {room} may now: max_waiting = "
                f"{self._max_waiting}, and {scheduler.num_free_seats} for free seats; "
                "try again later or raise max_waiting"
            )
        going = [sequence for sequence in request.sequences if not sequence.is_over]
        self.loop.add(going)  # a policy of the user's may raise
        self._requests[request.name] = request
        self._owners.update(dict.fromkeys(going, request))
        self._stats(adapter).num_requests += len(going)
        for sequence in request.sequences:
            if sequence.is_over:  # it ended where it came from
                request.end(sequence)

    def end(self, request: EngineRequest, reason: FinishReason) -> None:
        """End a request's completions, as far as they go."""
        for sequence in request.sequences:
            if sequence in self._owners:
                self.loop.cancel(sequence, reason)

    def end_named(self, name: str, reason: FinishReason) -> None:
        """The same by its id, if it is under way."""
        if isinstance(name, str) and name in self._requests:
            self.end(self._requests[name], reason)

    def export(self, name: str) -> RequestState:
        """Take a request out.

        Raises:
          ValueError: none under way has that id.
        """
        request = self._requests.get(name) if isinstance(name, str) else None
        if request is None or not request.can_go_on:
            raise ValueError(f"no request under way has the id {name!r}")
        state = request.state
        self.end(request, "exported")
        return state

    def unload(self, name: str, cancel: bool) -> Version:
        """Forget an adapter's name, as soon as its requests have ended.

        Args:
          name: the adapter's; new requests for it are refused.
          cancel: cancel those that there are.

        Raises:
          UnknownAdapterError: no adapter has that name.
        """
        version = self._leaving[name] = self.residence[name]
        for sequence in list(self._owners):
            if cancel and sequence.adapter == name:
                self.loop.cancel(sequence)
        self._let_leave(name)
        return version

    def _let_leave(self, name: str) -> None:
        if not any(sequence.adapter == name for sequence in self._owners):
            version = self._leaving.pop(name)
            if self.residence.get(name) is version:  # else it has been replaced
                self.residence.unregister(name)

    def _note_end(self, sequence: SequenceState) -> None:
        request = self._owners.pop(sequence)
        count_end(self._stats(sequence.adapter), sequence)
        request.end(sequence)
        if sequence.error is not None:
            self.end(request, "cancelled")  # its other completions
        if sequence.adapter in self._leaving:
            self._let_leave(sequence.adapter)

    def _stats(self, adapter: str | None) -> AdapterStats:
        if adapter is None:
            return self.base_stats
        if adapter not in self.residence:
            return AdapterStats()  # of a name that is forgotten: nobody will ask
        return self.residence[adapter].stats


def _hand_over(items: Iterable[tuple[asyncio.Queue, Any]]) -> None:
    for news, fresh in items:
        news.put_nowait(fresh)
