"""Everything on the device: weights, KV cache, adapter pools, compiled programs.

Knows batches, pages and slots as numbers. Knows nothing of requests, text, names of
adapters, or which pages and slots are free.
"""

import functools
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from punica_jax.batch import BLOCK_ROWS, Batch, Bucket, Feed, Wanted
from punica_jax.device_pools import DevicePools
from punica_jax.forward import Forward, SpentForwards, flat_forward, no_tokens
from punica_jax.logprobs import Logprobs, token_logprobs
from punica_jax.models import Attended, KvCache, Llama, LoraPools
from punica_jax.packing import pack, unpack
from punica_jax.pallas_kernels import MAX_PROJECT_ROWS, resolve
from punica_jax.request import SamplingParams
from punica_jax.seats import SeatRow, Seats, draw, write_seat
from punica_jax.step import token_logits

_GPU_SCHEDULING = "xla_gpu_command_buffer_scheduling_mode"
# Of many rows, which XLA multiplies: a 7B's layer takes 443 us so for 128 rows of 12
# adapters (by tiles), and 450 where its autotuning may mix Triton's products with
# cuBLAS's (one H200); of 8192 without adapters 5.09 ms, not 5.20, for cuBLAS adds the
# residual in its product; with 16 adapters as long either way.
_CUBLAS_ALONE = {"xla_gpu_enable_triton_gemm": False}

# Programs compiled at a time: each takes some host memory.
_MAX_COMPILING = 8


class Launched(NamedTuple):
    """A step on its way, on the device: one array for each copy to the host.

    Attributes:
      tokens: `i32[seqs]`; with log-probabilities `i32[seqs, 1 + columns]`, the tokens
        beside what `Logprobs.pack` gives.
      prompt_logprobs: number of a block of rows -> `i32[BLOCK_ROWS, columns]`.
    """

    tokens: jax.Array
    prompt_logprobs: dict[int, jax.Array]


class Output(NamedTuple):
    """What a step gave, on the host.

    Attributes:
      tokens: `i32[seqs]`, the next token of each sequence of the bucket.
      logprobs: theirs, if wanted.
      prompt_logprobs: number of a block of rows -> those of its targets, if wanted.
    """

    tokens: np.ndarray
    logprobs: Logprobs | None
    prompt_logprobs: Mapping[int, Logprobs]


class Runner:
    """Runs steps; owns all device state.

    The model is split once into a flat list of arrays: `nnx.jit` would walk the module
    on every call (50 ms a step for 32 layers against 0.5 ms so).

    Attributes:
      implementation: which one runs; see `pallas_kernels.resolve`.
      adapters: the adapters on the device, and the way there.
      vocab_size: the model's.
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_kv_pages: int,
        page_size: int,
        num_seats: int,
        num_slots: int,
        num_rank_pages: int,
        max_rank: int,
        implementation: str | None = None,
    ):
        """Allocate the cache and the pools beside a model.

        Args:
          model: taken over: its arrays are passed to every step.
          num_kv_pages: KV pages of each layer.
          page_size: tokens of a KV page.
          num_seats: sequences in flight at one time.
          num_slots: adapters on the device at one time.
          num_rank_pages: rank pages of each module group, for all adapters.
          max_rank: greatest rank of an adapter.
          implementation: see `pallas_kernels.resolve`.
        """
        self.implementation = resolve(implementation)
        weights, self._structure = jax.tree.flatten(nnx.split(model))
        # Bound to a device: other arrays would follow `jax.default_device` of whoever
        # calls a step, by a copy each time.
        bind = functools.partial(
            jax.device_put, device=next(iter(weights[0].devices()))
        )
        self._weights = bind(weights)
        self._cache = bind(
            KvCache.zeros(model.config, num_kv_pages, page_size, model.dtype)
        )
        pools = LoraPools.zeros(
            model.config,
            num_slots=num_slots,
            num_pages=num_rank_pages,
            max_rank=max_rank,
            dtype=model.dtype,
        )
        self.adapters = DevicePools(bind(pools))
        self.vocab_size = model.config.vocab_size
        self._seats = bind(Seats.zeros(num_seats, self.vocab_size))
        self._counts = bind(jnp.zeros((num_seats, self.vocab_size), jnp.int32))
        self._newest = bind(jnp.zeros(num_seats, jnp.int32))  # token of each seat
        on_gpu = self.implementation == "pallas_triton"
        fixed = self._structure, self.implementation
        make_step = functools.partial(
            jax.jit,
            functools.partial(flat_forward, *fixed),
            donate_argnums=(1, 2, 3, 4),
            static_argnums=7,
            keep_unused=True,  # what is spent is written to, and not read
        )
        # By whether launches run beside each other, and whether the rows are many.
        kinds = itertools.product((False, True), repeat=2)
        self._steps_by = dict.fromkeys(kinds, make_step())
        if on_gpu:
            for overlaps, many in self._steps_by:
                options = {_GPU_SCHEDULING: "CONCURRENT" if overlaps else "LHS"}
                options |= _CUBLAS_ALONE if many else {}
                self._steps_by[overlaps, many] = make_step(compiler_options=options)
        # Apart from the step: a step of most likely tokens alone runs nothing else, and
        # a condition inside of it would make a GPU's host wait.
        self._write_seat = jax.jit(
            _flat_write_seat, donate_argnums=(0, 1), static_argnums=4
        )
        self._draw = jax.jit(
            functools.partial(draw, implementation=self.implementation),
            donate_argnums=(1, 2),
        )
        self._logprobs = jax.jit(_tokens_with_logprobs)
        self._prompt_logprobs = jax.jit(
            functools.partial(_flat_prompt_logprobs, *fixed)
        )
        self._spent = SpentForwards(model.config, model.dtype, bind)
        self._steps: dict[Bucket, None] = {}
        self._samplers: dict[str, None] = {}

    @property
    def dtype(self) -> Any:
        return self.adapters.pools.dtype

    @property
    def programs(self) -> list[str]:
        """Names of the compiled programs, one each."""
        steps = (bucket.name for bucket in self._steps)
        return [*self.adapters.programs, *steps, *self._samplers]

    def step(
        self, batch: Batch, wanted: Wanted | None = None, feed: Feed | None = None
    ) -> Output:
        """Run a step and wait for its tokens, and what else is wanted."""
        return self.collect(self.launch(batch, wanted, feed))

    def launch(
        self, batch: Batch, wanted: Wanted | None = None, feed: Feed | None = None
    ) -> Launched:
        """Run a step without waiting.

        Args:
          batch: the rows.
          wanted: what it gives beyond the most likely tokens; None is nothing.
          feed: which tokens stay on the device; None is none.
        """
        wanted = wanted or Wanted()
        tokens, logits, blocks = self.forward(batch, feed)
        num_seqs = tokens.shape[0]
        prompt_logprobs = {}
        if wanted.rows is not None:
            tokens, self._counts, self._newest = self._draw(
                self._seats, self._counts, self._newest, logits, tokens, wanted.rows
            )
            self._samplers[f"draw[{num_seqs}]"] = None
        if wanted.logprobs:
            tokens = self._logprobs(logits, tokens)
            self._samplers[f"logprobs[{num_seqs}]"] = None
        for block, targets in wanted.targets.items():
            own = batch.slots[block * BLOCK_ROWS :][:BLOCK_ROWS]
            slots = np.full(BLOCK_ROWS, -1, np.int32)
            slots[: len(own)] = own
            prompt_logprobs[block] = self._prompt_logprobs(
                self._weights, self.adapters.pools, blocks[block], slots, targets
            )
            self._samplers["prompt_logprobs"] = None
        launched = Launched(tokens, prompt_logprobs)
        for array in jax.tree.leaves(launched):
            array.copy_to_host_async()
        return launched

    def collect(self, launched: Launched) -> Output:
        """Wait for what a step gives."""
        tokens, blocks = jax.device_get(tuple(launched))
        logprobs = None
        if tokens.ndim == 2:
            tokens, logprobs = tokens[:, 0], Logprobs.unpack(tokens[:, 1:])
        blocks = {block: Logprobs.unpack(packed) for block, packed in blocks.items()}
        return Output(tokens, logprobs, blocks)

    def forward(self, batch: Batch, feed: Feed | None = None) -> Forward:
        """Run the decoder without waiting; nothing is drawn.

        A decode step writes its logits and blocks where the last one of its bucket did,
        whose own are gone then.
        """
        step, bucket = self._step_of(batch.bucket), batch.bucket
        self._newest, result, self._cache = step(*self._arguments(batch, feed))
        self._spent.keep(bucket, result)
        self._steps[bucket] = None
        return result

    def overlaps(self, bucket: Bucket) -> bool:
        """Tell whether launches of a bucket's steps should run beside each other.

        The shrink beside the base product, where each is a launch: 64 rows of 8
        adapters took 9.6 ms so while they were two launches, and 10.1 one after the
        other (a 7B on one H200). Not in prefill:
        with JAX 0.11.2 the launch of such a step waits for the step before it; of the
        time of 32 requests at once the device was known to be busy for 66 % so, and for
        99 % without.
        """
        return bucket.is_decode and bucket.rows > MAX_PROJECT_ROWS

    def _step_of(self, bucket: Bucket) -> Any:
        return self._steps_by[self.overlaps(bucket), bucket.rows > MAX_PROJECT_ROWS]

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Return a batch's program before it is compiled, to look at."""
        return self._step_of(batch.bucket).lower(*self._arguments(batch, None))

    def _arguments(self, batch: Batch, feed: Feed | None) -> tuple[Any, ...]:
        feed = Feed.of([], batch.bucket) if feed is None else feed
        written = self._newest, self._spent.of(batch.bucket), no_tokens(batch.bucket)
        arrays = self._weights, self._cache, *written, self.adapters.pools
        return (*arrays, *pack((batch, feed)))

    def write_seat(self, seat: int, row: SeatRow) -> None:
        """Set how a seat's tokens are drawn; nothing of what it held is left."""
        packed, layout = pack(row)
        self._seats, self._counts = self._write_seat(
            self._seats, self._counts, np.int32(seat), packed, layout
        )
        self._samplers["write_seat"] = None

    def compile(
        self, buckets: Iterable[Bucket], pages_per_seq: int
    ) -> Iterator[tuple[Bucket, float]]:
        """Compile the steps of some buckets, beside each other.

        Yields:
          Each bucket once its program is there, and the seconds that it took.
        """

        def compile_one(bucket: Bucket, lowered: jax.stages.Lowered, start_s: float):
            lowered.compile()
            return bucket, time.monotonic() - start_s

        # XLA takes most of the time, and no lock of Python's. Lowered here, since a
        # thread of its own would not know the caller's configuration of JAX.
        pool = ThreadPoolExecutor(min(_MAX_COMPILING, os.cpu_count() or 1))
        jobs = []
        try:
            for bucket in buckets:
                start_s = time.monotonic()
                lowered = self.lower(Batch.of([], bucket, pages_per_seq))
                jobs.append(pool.submit(compile_one, bucket, lowered, start_s))
            for job in as_completed(jobs):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def warm_up(self, buckets: Iterable[Bucket], pages_per_seq: int) -> None:
        """Run the programs of some buckets without a live row, all that there are.

        Nobody may sit: seat 0 is written.
        """
        params = SamplingParams()
        row = SeatRow.of(
            params,
            seed=0,
            prompt=(),
            stop_ids=(),
            vocab_size=self.vocab_size,
            max_len=pages_per_seq * self._cache.page_size,
        )
        self.write_seat(0, row)
        targets = {0: np.zeros(BLOCK_ROWS, np.int32)}
        for bucket in buckets:
            rows = np.full((2, bucket.seqs), -1, np.int32)
            wanted = Wanted(rows=rows, logprobs=True, targets=targets)
            self.step(Batch.of([], bucket, pages_per_seq), wanted)


def _flat_write_seat(seats, counts, seat, packed, layout):
    return write_seat(seats, counts, seat, unpack(packed, layout))


def _flat_prompt_logprobs(
    structure, implementation, weights, pools, block, slots, targets
):
    model = nnx.merge(*jax.tree.unflatten(structure, weights))
    attended = Attended.split(block, model.config.hidden_size)
    logits = token_logits(model, pools, attended, slots, implementation=implementation)
    return token_logprobs(logits, targets).pack()


def _tokens_with_logprobs(logits, tokens):
    packed = token_logprobs(logits, tokens).pack()
    return jnp.concatenate([tokens[:, None], packed], axis=1)
