"""Several engines of one base model as one: Punica, section 5.

Knows engines as a caller does; who goes where is the members' business, and taking a
request out the mover's.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

import jax

from punica_jax.adapter_sources import AdapterSource
from punica_jax.chat import ChatOptions
from punica_jax.consolidation import Consolidate, Need, Placement
from punica_jax.engine import Engine
from punica_jax.engine_config import EngineConfig, checked_config
from punica_jax.engine_request import EngineClosedError, request_name
from punica_jax.jax_options import options_of_this_thread
from punica_jax.journey import Start, journey, resumed
from punica_jax.members import Members
from punica_jax.memory import host_adapter_bytes
from punica_jax.mover import Mover
from punica_jax.request import SamplingParams, Terms
from punica_jax.request_state import RequestState, check_state
from punica_jax.sequence import DEFAULT_TERMS
from punica_jax.stats import ClusterStats
from punica_jax.stream import Piece

_POLL_S = 0.01
_ON_ITS_WAY_S = 1.0  # more than a request is at no engine, if its caller reads it
_LONG = 1 << 14  # characters; milliseconds


class Cluster:
    """A base model on several devices, an engine each, and any number of adapters.

    A request goes to an engine that has room for it, with its tokens so far to another
    one where it finds none, and its caller notices nothing but a pause. Everything here
    may be called from any thread; what is `async` from any event loop.

    Attributes:
      engines: one for each device; ask them nothing that the cluster can be asked.
      default_sampling: what requests get that say nothing of sampling.
      max_model_len: most tokens of a sequence, prompt and output.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        adapters_dir: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        devices: Sequence[Any] | None = None,
        placement: Placement | None = None,
    ):
        """Load a Hugging Face model onto several devices, and start to serve.

        Args:
          model: see `Engine`, and for `adapters` and `adapters_dir`.
          config: how each engine serves; host memory for adapters is divided among
            them. None is all defaults.
          devices: one for each engine; None is all of this process.
          placement: who goes where; None is `Consolidate()`.

        Raises:
          ValueError: as `Engine`; there are no devices, or `placement` is none.
        """
        devices = jax.local_devices() if devices is None else list(devices)
        if not devices:
            raise ValueError("devices must be at least one, got none")
        placement = Consolidate() if placement is None else placement
        if not isinstance(placement, Placement):
            raise ValueError(
                "placement must be a Placement, such as Consolidate() or Spread(), got "
                f"{placement!r}"
            )
        make = functools.partial(Engine, model, adapters, adapters_dir=adapters_dir)
        self.engines = _made(make, checked_config(config), devices)
        first = self.engines[0]
        self.tokenizer = first.tokenizer
        self.default_sampling = first.default_sampling
        self.max_model_len = first.max_model_len
        self._members = Members(self.engines, placement)
        self._mover = Mover(self.engines, self._members)
        self._naming = threading.Lock()
        weakref.finalize(self, self._mover.stop).atexit = False
        self._mover.start()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        terms: Terms = DEFAULT_TERMS,
        request_id: str | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt, piece by piece as it comes; see `Engine`."""
        sampling = self.default_sampling if sampling is None else sampling
        if isinstance(prompt, str) and prompt:
            prompt = await self._encoded(prompt)
        num = sampling.n if isinstance(sampling, SamplingParams) else 1
        length = len(prompt) if isinstance(prompt, Sized) else 0  # it is refused
        need = self._need(adapter, num, num * self._num_pages(length))

        def start(
            engine: Engine, here: str, left: Terms
        ) -> AsyncGenerator[Piece, None]:
            return engine.generate(
                prompt, adapter, sampling, terms=left, request_id=here
            )

        pieces = self._journey(request_id, need, terms, start)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def resume(
        self, state: RequestState, *, request_id: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Go on with a request that was exported; see `Engine`."""
        check_state(state)
        num_prompt, samples = len(state.prompt_token_ids), state.samples
        num_pages = sum(
            self._num_pages(num_prompt + len(sample.token_ids)) for sample in samples
        )
        need = self._need(state.adapter, len(samples), num_pages)
        pieces = self._journey(request_id, need, state.terms, resumed(state))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    def cancel(self, request_id: str) -> None:
        """End a request; see `Engine`."""
        if ticket := self._members.find(request_id):
            ticket.is_cancelled = True
            place, here = ticket.at
            self.engines[place].cancel(here)

    async def export(self, request_id: str) -> RequestState:
        """Take a request out, whole; see `Engine`.

        Raises:
          ValueError: no request under way has that id.
        """
        end_s = time.monotonic() + _ON_ITS_WAY_S
        while ticket := self._members.find(request_id):
            state = await self._members.state_of(ticket)
            (place, here), has_begun = ticket.at, ticket.has_begun
            if state is None:
                with contextlib.suppress(ValueError):
                    state = await self.engines[place].export(here)
            if state is not None:
                self._members.leave(ticket)  # its reader gets the end of it
                return dataclasses.replace(state, terms=ticket.terms)
            is_over = ticket.at[1] == here and has_begun and ticket.moving is None
            if is_over or time.monotonic() > end_s:
                break
            await asyncio.sleep(_POLL_S)  # it is on its way
        raise ValueError(f"no request under way has the id {request_id!r}")

    def register_adapter(
        self, name: str, source: AdapterSource, **options: Any
    ) -> None:
        """Make an adapter known to all engines; see `Engine`.

        A request under other weights that moves between engines at this very moment
        fails with `RequestError`.
        """
        with self._members.frozen(name), self._naming:
            self._register(self._alive(), name, source, options)

    async def load_adapter(
        self, name: str, source: AdapterSource, **options: Any
    ) -> None:
        """Register an adapter when it is on one device and good; see `Engine`.

        Until then, and if anything is wrong with it, requests get what they got before.
        The other engines read it when a request wants it.
        """
        with self._members.frozen(name):
            await self._settle(name)
            version = self._members.version_of(name)
            first = await self._loaded(name, source, options)
            with self._naming:
                others = [engine for engine in self._alive() if engine is not first]
                if version != self._members.version_of(name):
                    others.append(first)  # somebody came between: the last one counts
                self._register(others, name, source, options)

    async def unload_adapter(self, name: str, *, cancel: bool = False) -> None:
        """Forget an adapter on all engines; see `Engine`.

        Raises:
          UnknownAdapterError: no adapter has that name.
        """
        with self._members.frozen(name):
            await self._settle(name)
            every = (one.unload_adapter(name, cancel=cancel) for one in self._alive())
            for result in await asyncio.gather(*every, return_exceptions=True):
                if isinstance(result, BaseException):
                    if not isinstance(result, EngineClosedError):
                        raise result

    async def pin_adapter(self, name: str, is_pinned: bool = True) -> None:
        """Keep an adapter on all devices, or let it go; see `Engine`."""
        for engine in self._alive():
            with contextlib.suppress(EngineClosedError):
                await engine.pin_adapter(name, is_pinned)

    async def drain(self, place: int) -> None:
        """Give an engine no more requests, and have it hand on those that it has.

        Returns when it has none: its device may be used for something else then, and
        be given back by `engines[place].close()`.

        Args:
          place: the engine's, among `engines`.

        Raises:
          ValueError: no engine has that place, or it is the last that takes requests.
        """
        self._members.set_open(self._place(place), False)
        self._mover.wake()
        while self._members.hands_on(place):
            await asyncio.sleep(_POLL_S)

    def undrain(self, place: int) -> None:
        """Give an engine requests again."""
        self._members.set_open(self._place(place), True)

    def encode_chat(
        self, messages: Sequence[Any], **options: Unpack[ChatOptions]
    ) -> list[list[int]]:
        """Turn conversations into prompts of token ids, as `LLM` does; see `LLM`."""
        return self.engines[0].encode_chat(messages, **options)

    def stats(self) -> ClusterStats:
        """Return what there is and what was served, at this moment."""
        return ClusterStats(
            engines=tuple(engine.stats() for engine in self.engines),
            loads=tuple(self._members.loads()),
            num_moves=self._members.num_moves,
        )

    def close(self) -> None:
        """End all engines: requests under way fail with `EngineClosedError`."""
        self._mover.close()
        for engine in self.engines:
            engine.close()

    def _journey(
        self, request_id: str | None, need: Need, terms: Terms, start: Start
    ) -> AsyncGenerator[Piece, None]:
        ticket = self._members.enter(request_name(request_id), need, terms)
        self._mover.note_request()
        return journey(ticket, self.engines, self._members, start)

    async def _encoded(self, prompt: str) -> list[int]:
        encode = functools.partial(self.tokenizer.encode, prompt)
        return await asyncio.to_thread(encode) if len(prompt) > _LONG else encode()

    def _need(self, adapter: object, num_sequences: int, num_pages: int) -> Need:
        return Need(
            num_sequences=num_sequences,
            num_kv_pages=num_pages,
            adapter=adapter if isinstance(adapter, str) else None,
        )

    def _num_pages(self, num_tokens: int) -> int:
        """Return the KV pages of a sequence's tokens and the next one."""
        return -(-(num_tokens + 1) // self.engines[0].config.page_size)

    async def _loaded(
        self, name: str, source: AdapterSource, options: Mapping[str, Any]
    ) -> Engine:
        """Have one engine load an adapter; return it."""
        while True:
            engine = self._alive()[0]
            try:
                await engine.load_adapter(name, source, **options)
                return engine
            except EngineClosedError:
                pass  # it has ended: the next one
            except asyncio.CancelledError:
                self._members.note_other_weights(name)  # it may be there
                raise

    def _register(
        self,
        engines: Sequence[Engine],
        name: str,
        source: AdapterSource,
        options: Mapping[str, Any],
    ) -> None:
        for engine in engines:
            with contextlib.suppress(EngineClosedError):
                engine.register_adapter(name, source, **options)
        self._members.note_other_weights(name)

    async def _settle(self, name: str) -> None:
        """Wait for an adapter's requests that are at no engine, if they are read."""
        end_s = time.monotonic() + _ON_ITS_WAY_S
        while self._members.is_between(name) and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)

    def _alive(self) -> list[Engine]:
        alive = [self.engines[place] for place in self._members.alive]
        if not alive:
            raise EngineClosedError("all engines of the cluster have ended")
        return alive

    def _place(self, place: int) -> int:
        if place not in range(len(self.engines)):
            raise ValueError(
                f"place must be from 0 to {len(self.engines) - 1}, got {place!r}"
            )
        return place


def _made(
    make: Callable[..., Engine], config: EngineConfig, devices: Sequence[Any]
) -> tuple[Engine, ...]:
    """Make an engine on each device, beside each other; none if one cannot be made."""
    num = len(devices)
    share = host_adapter_bytes(config.host_adapter_memory) // num
    config = dataclasses.replace(config, host_adapter_memory=share)
    # A terminal has room for one's progress.
    quiet = dataclasses.replace(config, progress=False)
    options = [options_of_this_thread() for _ in devices]

    def make_one(place: int) -> Engine:
        with options[place], jax.default_device(devices[place]):
            return make(config=quiet if place else config)

    with ThreadPoolExecutor(num) as pool:
        jobs = [pool.submit(make_one, place) for place in range(num)]
    errors = [error for job in jobs if (error := job.exception())]
    if errors:
        for job in jobs:
            if not job.exception():
                job.result().close()
        raise errors[0]
    return tuple(job.result() for job in jobs)
