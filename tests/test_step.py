"""Promises of a whole step, bit for bit, on logits."""

import array
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from punica_jax.batch import Batch, Bucket, Buckets
from punica_jax.chunk import Chunk
from punica_jax.models import (
    MODULE_GROUPS,
    CachedAttention,
    KvCache,
    Llama,
    LoraPools,
    read_adapter,
    set_slot,
    slot_tables,
)
from punica_jax.pallas_kernels import segment_metadata
from punica_jax.step import run_step
from tests.adapter_cases import write_pages
from tests.tiny_checkpoint import CONFIG

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
IMPLEMENTATIONS = ["xla", GPU]
PAGE_SIZE = 16
KV_PAGES = 12
RANK_PAGES = 9
BUCKETS = Buckets(max_seqs=4, max_rows=32)


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))


def place(pools, slot, adapter, pages):
    """Write an adapter to given pages (a list for all groups) and show it."""
    owned = {}
    for group in MODULE_GROUPS:
        owned[group] = pages[: adapter.num_pages(group)]
    pools = write_pages(pools, adapter, owned)
    counts = {group: adapter.counts(group) for group in MODULE_GROUPS}
    tables = slot_tables(pools, owned, counts)
    return set_slot(pools, jnp.int32(slot), jax.tree.map(jnp.asarray, tables))


def make_pools(checkpoint, slots, pages):
    """Place adapters `a`, `b`, `c` at given slots and pages."""
    pools = LoraPools.zeros(CONFIG, num_slots=5, num_pages=RANK_PAGES, max_rank=64)
    for name in "abc":
        adapter = read_adapter(checkpoint / name, CONFIG, dtype=np.float32)
        pools = place(pools, slots[name], adapter, pages[name])
    return pools


@pytest.fixture(scope="module")
def run(model):
    """A jitted step that returns logits `[seqs, vocab]` and the cache."""

    def step(model, cache, pools, batch, implementation):
        result = run_step(model, cache, pools, batch, implementation=implementation)
        return result.logits, result.cache

    jitted = jax.jit(step, static_argnums=4)

    def call(cache, pools, chunks, implementation):
        batch = Batch.of(chunks, BUCKETS.of(chunks), pages_per_seq=3)
        batch = jax.tree.map(jnp.asarray, batch)
        logits, cache = jitted(model, cache, pools, batch, implementation)
        return np.asarray(logits), cache

    return call


def chunk(tokens, kv_len, pages, slot):
    return Chunk(tokens=array.array("i", tokens), kv_len=kv_len, pages=pages, slot=slot)


PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7] * 17]
SLOTS = {"a": 0, "b": 1, "c": 2}
PAGES = {"a": [0], "b": [1, 2], "c": [3, 4, 5, 6]}


def two_steps(run, cache, pools, order, kv_pages, slots, implementation):
    """Prefill then decode the prompts in some order; return logits in prompt order."""
    results = []
    for extra in (0, 1):
        chunks = []
        for i in order:
            prompt = PROMPTS[i]
            tokens = prompt if not extra else [3]
            slot = slots["abc"[i]]
            chunks.append(chunk(tokens, len(prompt) + extra, kv_pages[i], slot))
        logits, cache = run(cache, pools, chunks, implementation)
        results.append([logits[order.index(i)] for i in range(3)])
    return np.asarray(results)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def baseline(request, run, checkpoint):
    cache = KvCache.zeros(CONFIG, KV_PAGES, PAGE_SIZE)
    pools = make_pools(checkpoint, SLOTS, PAGES)
    kv_pages = [[0], [1], [2, 3]]
    args = (run, cache, pools, [0, 1, 2], kv_pages, SLOTS, request.param)
    return request.param, two_steps(*args)


def test_free_pages_of_nan_change_nothing(baseline, run, checkpoint):
    implementation, expected = baseline
    cache = KvCache.zeros(CONFIG, KV_PAGES, PAGE_SIZE)
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache)
    empty = LoraPools.zeros(CONFIG, num_slots=5, num_pages=RANK_PAGES, max_rank=64)
    poisoned = jax.tree.map(
        lambda leaf: (
            jnp.full_like(leaf, jnp.nan)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        ),
        empty,
    )
    for name in "abc":
        adapter = read_adapter(checkpoint / name, CONFIG, dtype=np.float32)
        poisoned = place(poisoned, SLOTS[name], adapter, PAGES[name])
    kv_pages = [[0], [1], [2, 3]]
    actual = two_steps(run, cache, poisoned, [0, 1, 2], kv_pages, SLOTS, implementation)
    np.testing.assert_array_equal(actual, expected)


def test_neighbours_pages_and_slots_permuted(baseline, run, checkpoint):
    implementation, expected = baseline
    slots = {"a": 4, "b": 0, "c": 3}
    pages = {"a": [8], "b": [2, 0], "c": [7, 1, 5, 3]}
    actual = two_steps(
        run,
        KvCache.zeros(CONFIG, KV_PAGES, PAGE_SIZE),
        make_pools(checkpoint, slots, pages),
        [2, 0, 1],
        [[11], [5], [9, 0]],
        slots,
        implementation,
    )
    np.testing.assert_array_equal(actual, expected)


def test_a_neighbour_of_nan_harms_nobody(baseline, run, checkpoint):
    implementation, expected = baseline
    pools = make_pools(checkpoint, SLOTS, PAGES)
    # Its first page in every layer.
    pages = np.arange(CONFIG.num_layers) * RANK_PAGES + PAGES["b"][0]
    bad = dataclasses.replace(pools.qkv, a=pools.qkv.a.at[pages].set(jnp.nan))
    actual = two_steps(
        run,
        KvCache.zeros(CONFIG, KV_PAGES, PAGE_SIZE),
        dataclasses.replace(pools, qkv=bad),
        [0, 1, 2],
        [[0], [1], [2, 3]],
        SLOTS,
        implementation,
    )
    np.testing.assert_array_equal(actual[:, [0, 2]], expected[:, [0, 2]])
    assert np.isnan(actual[:, 1]).all()


def test_chunks_of_a_prompt_equal_the_whole(baseline, run, checkpoint):
    implementation, expected = baseline
    cache = KvCache.zeros(CONFIG, KV_PAGES, PAGE_SIZE)
    pools = make_pools(checkpoint, SLOTS, PAGES)
    prompt, start = PROMPTS[2], 0
    for end in (3, 4, 16, 17):
        part = chunk(prompt[start:end], end, [2, 3], SLOTS["c"])
        logits, cache = run(cache, pools, [part], implementation)
        start = end
    np.testing.assert_allclose(logits[0], expected[0][2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "has_adapters", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [
        pytest.param([20], Bucket(32, 1, 32), id="one", marks=pytest.mark.slow),
        pytest.param([9, 2], Bucket(32, 4, 32), id="two, and two idle ones"),
        pytest.param([3, 17, 1, 5], Bucket(32, 4, 32), id="four"),
        pytest.param(
            [2, 1],
            Bucket(4, 4, 4),
            id="as many sequences as rows",
            marks=pytest.mark.slow,
        ),
        pytest.param([2], Bucket(2, 4, 2), id="more sequences than rows"),
        pytest.param([1, 1, 1], Bucket(4, 4, 1), id="decode"),
    ],
)
def test_logits_are_those_of_the_whole_model(
    model, checkpoint, lengths, bucket, has_adapters
):
    """Whatever a step leaves out behind the last attention changes none of them."""
    chunks = [
        chunk([7 + i, *range(length - 1)], length, [2 * i, 2 * i + 1], i % 3)
        for i, length in enumerate(lengths)
    ]
    batch = jax.tree.map(jnp.asarray, Batch.of(chunks, bucket, pages_per_seq=3))
    cache = KvCache.zeros(CONFIG, KV_PAGES, PAGE_SIZE)
    pools = make_pools(checkpoint, SLOTS, PAGES) if has_adapters else None

    @jax.jit
    def whole(cache):
        attend = CachedAttention(cache, batch.seqs, bucket.rows, bucket.max_query_len)
        segments = None
        if pools is not None:
            segments = segment_metadata(batch.slots, num_slots=pools.num_slots)
        positions = batch.seqs.positions(bucket.rows)
        hidden = model(batch.tokens, positions, attend, pools, segments)
        return model.logits(hidden)[batch.logit_rows]

    wanted = np.asarray(whole(cache))[: len(chunks)]
    result = jax.jit(run_step)(model, cache, pools, batch)
    got = np.asarray(result.logits)[: len(chunks)]
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(result.likely[: len(chunks)], wanted.argmax(1))
