"""A random model with random adapters, and its decode steps timed.

For `punica-jax bench` and the repository's `benchmarks/`. Knows shapes, ranks and rows;
nothing of requests, text or files.
"""

import array
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from punica_jax.batch import Batch, Buckets
from punica_jax.models import MODULE_GROUPS, Llama, LlamaConfig, LoraPools
from punica_jax.pallas_kernels import RANK_PAGE
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES, ModelShape
from punica_jax.runner import Runner
from punica_jax.sequence import Chunk

PAGE_SIZE = 64
# A few seconds on a CPU, of the same proportions as the large ones.
SMALL = ModelShape(
    name="small",
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
)
SHAPES = {SMALL.name: SMALL, **MODEL_SHAPES}
Slots = Sequence[int] | np.ndarray
# Values that are drawn sooner than a program for their shape compiles.
_MOST_FROM_HOST = 2**20
# Of an array of all layers, so that a piece is at most a layer's.
_MOST_PIECES = 2**8
# Programs that can be enqueued after a wait before JAX holds up the host: on an H200
# about 14 are ahead of the device.
NUM_UNHINDERED = 8
# Adapters change what a layer computes by about half: a wrong one shows.
_ADAPTER_SCALE = 0.06


def make_config(shape: ModelShape) -> LlamaConfig:
    fields = dataclasses.asdict(shape)
    del fields["name"]
    return LlamaConfig(**fields)


def random_like(tree: Any, scale: float, seed: int) -> Any:
    """Replace a tree's floating-point arrays by normal values; takes them over."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # Piece by piece: to draw values takes several times their space.
        pieces = math.gcd(shape[0], _MOST_PIECES)
        shape_of_piece = (shape[0] // pieces, *shape[1:])
        drawn = jax.lax.map(
            lambda key: scale * jax.random.normal(key, shape_of_piece, dtype),
            jax.random.split(key, pieces),
        )
        return drawn.reshape(shape)

    host = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        # Freed first: the pools of 1000 adapters fit a device once.
        leaf.delete()
        if leaf.size <= _MOST_FROM_HOST:
            values = scale * host.standard_normal(leaf.shape, np.float32)
            leaves[i] = jnp.asarray(values.astype(leaf.dtype))
        else:
            key = jax.random.fold_in(jax.random.key(seed), i)
            leaves[i] = draw(key, leaf.shape, leaf.dtype)
    return jax.tree.unflatten(structure, leaves)


def num_rank_pages(rank: int) -> int:
    return -(-rank // RANK_PAGE)


def set_ranks(pools: LoraPools, ranks: Sequence[int]) -> LoraPools:
    """Give slot `i` an adapter of rank `ranks[i]` on every module; pages as they are.

    Their values are random whatever the rank: lanes past a rank count like others.
    """
    counts = np.asarray([num_rank_pages(rank) for rank in ranks], np.int32)
    table = np.full((pools.num_slots, pools.max_pages), -1, np.int32)
    used = np.zeros(pools.num_slots, np.int32)
    used[: len(counts)] = counts
    ends = np.cumsum(counts)
    assert ends[-1] <= pools.num_pages, (ends[-1], pools.num_pages)
    for slot, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table[slot, :count] = np.arange(end - count, end)
    groups = {}
    for name, modules in MODULE_GROUPS.items():
        group = pools.group(name)
        per_module = np.tile(used[:, None], (pools.num_layers, len(modules)))
        groups[name] = dataclasses.replace(
            group,
            page_table=jnp.asarray(table),
            num_pages=jnp.asarray(per_module),
        )
    return LoraPools(**groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one pass over some batches: of the device, and of the host's calls."""

    median_s: float
    low_s: float
    high_s: float
    launch_s: float


class BenchModel:
    """A random model with random adapters in its pools and a full cache.

    Attributes:
      pools: slot `i` holds an adapter of rank `ranks[i]`.
      weight_bytes: what a step reads of the weights (the embedding is gathered).
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        max_rows: int,
        max_context: int,
        ranks: Sequence[int],
        num_pages: int | None = None,
        max_rank: int = 64,
        num_seats: int = 1,
        dtype: Any = jnp.bfloat16,
        adapt: Callable[[Llama], None] | None = None,
        make_runner: Callable[..., Runner] = Runner,
    ):
        """Allocate and fill everything.

        Args:
          config: the model's sizes.
          max_rows: most sequences of a batch, one row each.
          max_context: most tokens of a sequence.
          ranks: each slot's adapter's rank.
          num_pages: rank pages of each group, as many as `ranks` need by default.
          max_rank: greatest rank that the tables have room for.
          num_seats: sequences that draw tokens; one is enough for forwards alone.
          dtype: of the weights, the cache and the adapters.
          adapt: changes the model before it is compiled.
          make_runner: makes the runner.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
        if adapt is not None:
            adapt(model)
        self.model = model
        leaves = jax.tree.leaves(nnx.state(model))
        self.weight_bytes = sum(leaf.nbytes for leaf in leaves)
        if model.lm_head is not None:
            self.weight_bytes -= model.embed.nbytes
        self._pages_per_seq = -(-max_context // PAGE_SIZE)
        self.runner = make_runner(
            model,
            num_kv_pages=max_rows * self._pages_per_seq,
            page_size=PAGE_SIZE,
            num_seats=num_seats,
            num_slots=len(ranks),
            num_rank_pages=num_pages or sum(map(num_rank_pages, ranks)),
            max_rank=max(max_rank, *ranks),
        )
        # Bound to the device as a runner's own are: what a step returns is, and the
        # program for arrays that are not would be another one.
        bind = functools.partial(jax.device_put, device=leaves[0].sharding)
        self.runner._cache = bind(random_like(self.runner._cache, 1.0, seed=2))
        pools = random_like(self.runner.adapters.pools, _ADAPTER_SCALE, seed=1)
        self.pools = self.runner.adapters.pools = bind(set_ranks(pools, ranks))

    def batch(
        self, slots: Slots, context: int, *, query_len: int = 1, first_seq: int = 0
    ) -> Batch:
        """Lay out a chunk for each of `slots`, in sequences of `context` tokens.

        Args:
          slots: each sequence's adapter.
          context: tokens of each sequence, those of its chunk included.
          query_len: rows of a chunk, 1 to `context`: 1 is decode, more are prefill.
          first_seq: they are sequences `first_seq` and on, each with pages of its own.
        """
        rng, vocab_size = np.random.default_rng(0), self.config.vocab_size
        per_seq = self._pages_per_seq
        chunks = [
            Chunk(
                tokens=array.array("i", rng.integers(vocab_size, size=query_len)),
                kv_len=context,
                pages=range(i * per_seq, (i + 1) * per_seq),
                slot=int(slot),
            )
            for i, slot in enumerate(slots, first_seq)
        ]
        buckets = Buckets(len(chunks), max(len(chunks) * query_len, 32))
        return Batch.of(chunks, buckets.of(chunks), per_seq)

    def time(
        self,
        batches: Sequence[Batch],
        adapters: Any,
        *,
        num_steps: int = 20,
        repeats: int = 9,
    ) -> Times:
        """Time passes over `batches`, enqueued without waiting, one wait at the end.

        The clock starts when a step before them has ended: its launch is the only one
        that the device has to wait for (1.8 ms for a 7B on an H200).

        Args:
          batches: one step each, in order.
          adapters: the pools that the steps get, None for the backbone alone.
          num_steps: least steps of a repeat.
          repeats: how many times; the median counts.
        """
        # The step takes whatever pools the model's layers understand.
        self.runner.adapters.pools = adapters
        for batch in {batch.bucket: batch for batch in batches}.values():
            self.runner.step(batch)
        passes = max(1, math.ceil(num_steps / len(batches)))
        device, host = [], []
        for _ in range(repeats):
            launches, start = [], 0.0
            tokens = before_all = self.runner.forward(batches[-1]).likely
            for number in range(passes * len(batches)):
                before = time.perf_counter()
                tokens = self.runner.forward(batches[number % len(batches)]).likely
                if number < NUM_UNHINDERED:
                    launches.append(time.perf_counter() - before)
                if number == 0:  # the device has this one to go on with
                    jax.block_until_ready(before_all)
                    start = time.perf_counter()
            jax.block_until_ready(tokens)
            device.append((time.perf_counter() - start) / passes)
            host.append(statistics.mean(launches) * len(batches))
        return Times(
            median_s=statistics.median(device),
            low_s=min(device),
            high_s=max(device),
            launch_s=statistics.median(host),
        )

    def adapter_bytes(self, ranks: Sequence[int]) -> int:
        """Return the bytes of the A and B of adapters of these ranks."""
        config = self.config
        per_rank = sum(
            len(modules) * config.d_in(group) + sum(config.d_outs(group))
            for group, modules in MODULE_GROUPS.items()
        )
        return sum(ranks) * per_rank * config.num_layers * self.dtype.itemsize

    def backbone_bytes(self, rows: int, context: float) -> float:
        """Return the bytes of the weights and of the rows' keys and values."""
        config = self.config
        kv = 2 * config.num_kv_heads * config.head_dim * config.num_layers
        return self.weight_bytes + rows * context * kv * self.dtype.itemsize
