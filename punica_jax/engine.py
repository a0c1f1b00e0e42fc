"""Requests that come and go at any time, answered by one thread that never stops.

Knows requests, names of adapters and texts; what a step is and who sits where is the
loop's business, and where adapters are the residence's.
"""

import contextlib
import functools
import logging
import os
import queue
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import jax.numpy as jnp

from punica_jax.adapter_finder import AdapterFinder
from punica_jax.adapter_sources import AdapterSource, AdapterSources, checked_flags
from punica_jax.base_model import BaseModel
from punica_jax.chat import ChatOptions
from punica_jax.engine_config import EngineConfig
from punica_jax.engine_request import EngineClosedError, EngineRequest
from punica_jax.engine_thread import EngineThread
from punica_jax.jax_options import options_of_this_thread
from punica_jax.loop import StepLoop
from punica_jax.memory import bytes_text, host_adapter_bytes
from punica_jax.prompts import Prompts
from punica_jax.request import SamplingParams, Terms
from punica_jax.request_state import RequestState, check_state
from punica_jax.residence import MAX_STAGED, AdapterResidence
from punica_jax.sequence import DEFAULT_TERMS
from punica_jax.stats import EngineGauges, EngineStats, RequestProgress
from punica_jax.stream import Piece
from punica_jax.summary import summary
from punica_jax.tasks import Tasks
from punica_jax.versions import Version

_log = logging.getLogger(__name__)
NUM_SPARE = 1  # slots; one adapter is replaced at a time while all others are in use
_NUM_STAGED = MAX_STAGED + 1  # one is being written to its pages meanwhile


class Engine:
    """A base model and any number of LoRA adapters, serving requests as they come.

    One thread steps all requests together, each under its own adapter, and goes on
    while adapters are read and copied. Everything here may be called from any thread;
    what is `async` from any event loop. It serves until `close`, or until nobody refers
    to it any more; a request under way does.

    Attributes:
      config: how the model is served.
      tokenizer: the base model's.
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
    ):
        """Load a Hugging Face model, and start to serve.

        Args:
          model: a directory, or an id of the Hugging Face hub: `org/name` or
            `org/name@revision`. A directory that exists wins.
          adapters: name -> PEFT directory or id. Nothing is read before it is wanted.
          adapters_dir: a directory of PEFT directories; each is an adapter of its
            directory's name, also those that come later.
          config: how it is served; None is all defaults.

        Raises:
          ValueError: a name, a size or a file breaks a rule, or all of it does not fit
            the device.
        """
        self.config = config = config or EngineConfig()
        base = self._base = BaseModel(
            model, config, num_spare=NUM_SPARE, num_staged=_NUM_STAGED
        )
        self.tokenizer = base.tokenizer
        self.default_sampling = base.defaults.sampling
        self.max_model_len = base.sizes.max_model_len
        host_bytes = host_adapter_bytes(config.host_adapter_memory)
        self._sources = AdapterSources(base, adapters_dir)
        readers = self._sources.readers(adapters)
        self._runner = base.runner()
        if adapters or adapters_dir is not None:
            self._sources.empty = self._runner.adapters.lock(host_bytes)
        awake: queue.SimpleQueue[None] = queue.SimpleQueue()
        tasks = Tasks.threads(functools.partial(awake.put, None))
        self._table = base.table()
        self._residence = AdapterResidence(
            self._table,
            self._runner.adapters,
            tasks,
            host_bytes=host_bytes,
            num_spare=NUM_SPARE,
        )
        self._loop = StepLoop(self._runner, base.sizes, self._residence, config.policy)
        # Nothing that its thread holds may hold the engine: who drops it ends it.
        self._thread = EngineThread(
            self._loop,
            self._residence,
            config.max_waiting,
            awake,
            options_of_this_thread(),
        )
        weakref.finalize(self, self._thread.stop).atexit = False
        self._finder = AdapterFinder(self._sources, self._thread)
        self._prompts = Prompts(
            self.tokenizer,
            self._finder.find,
            base.config.vocab_size,
            self.max_model_len,
            base.sizes.page_size,
            max_samples=config.max_waiting + base.sizes.max_seats,
        )
        for name, reader in readers.items():
            self._residence.register(name, *reader)
        if config.warm_up:
            self._loop.warm_up(progress=config.progress)
        _log.info("%s", self)
        self._thread.start()

    def __repr__(self) -> str:
        residence = self._residence
        return summary(
            name=f"Engine {self._base.names[0]}",
            config=self._base.config,
            dtype=jnp.dtype(self._base.dtype).name,
            plan=self._base.plan,
            table=self._table,
            programs=self.programs,
            sampling=self.default_sampling,
            unused=self._base.defaults.unused,
            elsewhere=f"{len(residence)} known, {bytes_text(residence.host_bytes)} in "
            "host memory",
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def programs(self) -> list[str]:
        """Names of the programs compiled so far."""
        return self._runner.programs

    @property
    def adapters(self) -> Mapping[str, Version]:
        """The known adapters by name; in `adapters_dir` may be more."""
        return MappingProxyType(self._residence)

    async def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        terms: Terms = DEFAULT_TERMS,
        request_id: str | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt, piece by piece as it comes.

        Leaving the iterator before its end cancels the request.

        Args:
          prompt: a text, or a list of token ids.
          adapter: its adapter's name; None is the base alone.
          sampling: how tokens are chosen; None is `default_sampling`.
          terms: its priority, tenant, target and deadline.
          request_id: to cancel or export it by; None makes one.

        Yields:
          Pieces of text; the last of each of `n` completions carries it.

        Raises:
          ValueError: the prompt, the adapter or the sampling breaks its rule, or the
            adapter cannot be loaded.
          QueueFullError: more requests wait than may.
          DeadlineError: it was not answered in time.
          RequestError: its logits were not finite.
          EngineClosedError: the engine has ended.
        """
        sampling = self.default_sampling if sampling is None else sampling
        request = await EngineRequest.of(
            self._prompts, prompt, adapter, sampling, terms, request_id
        )
        async with contextlib.aclosing(self._thread.answers(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def resume(
        self, state: RequestState, *, request_id: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Go on with a request that another engine exported; see `generate`.

        Its base and its adapter must be the same there and here. The pieces are what
        is new; the completions are whole.

        Raises:
          ValueError: it is no `RequestState`, or contradicts itself, or the adapter of
            its name has other weights here: digests tell, as soon as they are known on
            both sides; until then it goes on. And as `generate`, but that no queue is
            too full for one that was let in elsewhere.
        """
        check_state(state)
        fields = state.prompt_token_ids, state.adapter, state.sampling, state.terms
        request = await EngineRequest.of(self._prompts, *fields, request_id)
        request.replay(state.samples, self._base.config.vocab_size)
        async with contextlib.aclosing(self._thread.answers(request)) as pieces:
            async for piece in pieces:
                yield piece

    def cancel(self, request_id: str) -> None:
        """End a request: its completions come as far as they are, "cancelled".

        What it holds is free after one step. An id that is not known any more, or was
        never, is nothing.
        """
        with contextlib.suppress(EngineClosedError):
            self._thread.do(self._thread.requests.end_named, request_id, "cancelled")

    async def export(self, request_id: str) -> RequestState:
        """Take a request out, whole, so that `resume` goes on with it elsewhere.

        Here it ends with completions that are "exported".

        Raises:
          ValueError: no request under way has that id; one that has failed, or has all
            its tokens, is not.
        """
        return await self._thread.ask(self._thread.requests.export, request_id)

    def register_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        allow_nan: bool = False,
        pin: bool | None = None,
        **fields: Any,
    ) -> None:
        """Make an adapter known; it is read when a request wants it.

        Where the name is known already, requests that began under the old weights end
        under them, and others get the new ones.

        Args:
          name: what requests call it.
          source: a PEFT directory, an id of the Hugging Face hub, or the weights:
            module -> (`A [rank, d_in]`, `B [d_out, rank]`), as for `save_adapter`;
            kept, and read again after an eviction: neither change nor donate them.
          allow_nan: take weights that are not finite.
          pin: keep it on the device, from when there is room; None is as before.
          **fields: with weights, those of `adapter_config.json`, such as `lora_alpha`.

        Raises:
          ValueError: the name is empty, or a flag neither True nor False.
        """
        options = checked_flags(allow_nan, pin)
        reader = self._sources.reader(name, source, fields)
        self._finder.may_find(name)
        self._thread.do(self._residence.register, name, *reader, **options)

    async def load_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        allow_nan: bool = False,
        pin: bool | None = None,
        **fields: Any,
    ) -> None:
        """Register an adapter when it is there and good; see `register_adapter`.

        Until then, and if anything is wrong with it, requests get what they got before.
        While all slots are in use it waits for one.

        Raises:
          ValueError: it cannot be read, does not fit the base, is too large, or is not
            finite.
        """
        options = checked_flags(allow_nan, pin)
        reader = self._sources.reader(name, source, fields)
        await self._thread.load(name, *reader, **options)
        self._finder.may_find(name)

    async def unload_adapter(self, name: str, *, cancel: bool = False) -> None:
        """Forget an adapter, and wait until nothing of it is left on host and device.

        Args:
          name: the adapter's, also one of `adapters_dir`; new requests for it are
            refused from now on, until it is registered.
          cancel: end its requests now; else they are waited for.

        Raises:
          UnknownAdapterError: no adapter has that name.
          ValueError: `cancel` is neither True nor False.
        """
        await self._finder.unload(name, cancel=cancel)

    async def pin_adapter(self, name: str, is_pinned: bool = True) -> None:
        """Bring an adapter to the device and keep it there, or let it go again.

        Does not wait for it: `stats` says where it is, and the log if it cannot come.

        Args:
          name: the adapter's.
          is_pinned: whether it stays there.

        Raises:
          UnknownAdapterError: no adapter has that name.
          ValueError: `is_pinned` is neither True nor False.
        """
        await self._finder.pin(name, is_pinned)

    def encode_chat(
        self, messages: Sequence[Any], **options: Unpack[ChatOptions]
    ) -> list[list[int]]:
        """Turn conversations into prompts of token ids, as `LLM` does; see `LLM`."""
        return self._base.encode_chat(messages, **options)

    def stats(self) -> EngineStats:
        """Return what there is and what was served, at this moment."""
        return self._thread.stats(self._base.sizes.num_slots)

    async def progress(self) -> dict[str, RequestProgress]:
        """Tell how far each request is, by its id.

        Those that have seats first, then the others in the order in which they are to
        get one. Without those whose tokens have all come, but for steps in flight.
        """
        return await self._thread.ask(self._thread.requests.progress)

    @property
    def gauges(self) -> EngineGauges:
        """A few numbers of this moment, of `stats` and beside it, at no cost."""
        return self._thread.gauges

    def close(self) -> None:
        """End: requests under way fail with `EngineClosedError`; waits for the thread.

        A second time does nothing.
        """
        self._thread.close()
