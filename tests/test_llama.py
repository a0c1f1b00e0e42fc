import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from punica_jax.models import (
    CachedAttention,
    KvCache,
    Llama,
    LlamaConfig,
    LoraLinear,
    LoraPools,
    RMSNorm,
    SeqTable,
    dense_causal_attention,
)
from punica_jax.models._layers import INIT_STDDEV, Unprojected, rotary_tables
from punica_jax.pallas_kernels import pack_adapters, segment_metadata
from punica_jax.pallas_kernels.reference import rotate

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_bias=True,
)
PAGE_SIZE = 16
NUM_PAGES = 12
ROWS = 64


def unit_variance(shape, seed=0) -> jax.Array:
    """Random numbers over the square root of the last axis."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32)


def table_of(seqs: list[tuple[list[int], int, int]]) -> SeqTable:
    """Make a table from (pages, rows, tokens) of each sequence; unused pages are -1."""
    pages_per_seq = max(len(pages) for pages, _, _ in seqs)
    table = np.full((len(seqs), pages_per_seq), -1, np.int32)
    for seq, (pages, _, _) in enumerate(seqs):
        table[seq, : len(pages)] = pages
    lens = np.array([rows for _, rows, _ in seqs])
    return SeqTable(
        page_table=jnp.asarray(table),
        bounds=jnp.asarray(np.concatenate([[0], lens.cumsum()]), jnp.int32),
        kv_lens=jnp.asarray([tokens for *_, tokens in seqs], jnp.int32),
    )


def random_cache(config=CONFIG, seed=0) -> KvCache:
    cache = KvCache.zeros(config, NUM_PAGES, PAGE_SIZE)
    keys = iter(jax.random.split(jax.random.key(seed), config.num_layers))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), cache)


@functools.partial(jax.jit, static_argnames="max_query_len")
def step(model, cache, tokens, table, max_query_len=ROWS):
    """Return the logits of all rows, and the cache."""
    attend = CachedAttention(cache, table, tokens.shape[0], max_query_len)
    hidden = model(tokens, table.positions(tokens.shape[0]), attend)
    return model.logits(hidden), attend.cache


@jax.jit
def dense_logits(model, tokens):
    """Return the logits of whole sequences, i32[seqs, seq_len]."""
    seqs, seq_len = tokens.shape
    positions = jnp.tile(jnp.arange(seq_len, dtype=jnp.int32), seqs)
    hidden = model(tokens.reshape(-1), positions, dense_causal_attention(seq_len))
    return model.logits(hidden).reshape(seqs, seq_len, -1)


def make_model(config: LlamaConfig = CONFIG) -> Llama:
    """Make weights large enough for attention to have something to do."""
    model = Llama(config, rngs=nnx.Rngs(0))
    return jax.tree.map(lambda leaf: leaf * 5 if leaf.ndim == 2 else leaf, model)


@pytest.fixture(scope="module")
def model() -> Llama:
    return make_model()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Three sequences of 21 tokens."""
    rng = np.random.default_rng(1)
    return rng.integers(0, CONFIG.vocab_size, (3, 21), dtype=np.int32)


@pytest.fixture(scope="module")
def expected(model, tokens) -> np.ndarray:
    """The logits of those, without a cache."""
    return np.asarray(dense_logits(model, tokens))


def padded(parts: list[np.ndarray], rows: int = ROWS) -> jax.Array:
    flat = np.concatenate(parts)
    return jnp.asarray(np.pad(flat, (0, rows - len(flat)), constant_values=7))


# Layers


def test_rms_norm_rounds_where_transformers_does():
    norm = RMSNorm(24, 1e-5, dtype=jnp.bfloat16)
    norm.weight.set_value((unit_variance((24,)) * 5).astype(jnp.bfloat16))
    x = unit_variance((7, 24), seed=1).astype(jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    expected = jnp.asarray(normed).astype(jnp.bfloat16) * norm.weight[...][None]
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    # At most one rounding of the quotient apart.
    np.testing.assert_allclose(
        np.float32(got), np.float32(expected), rtol=2**-7, atol=0
    )
    assert (np.asarray(got) == np.asarray(expected)).mean() > 0.95


def test_rms_norm_of_heads_is_that_of_rows():
    norm = RMSNorm(8, 1e-6, dtype=jnp.float32)
    norm.weight.set_value(unit_variance((8,)))
    x = unit_variance((5, 3, 8), seed=1)
    np.testing.assert_array_equal(norm(x).reshape(15, 8), norm(x.reshape(15, 8)))


def test_a_part_of_each_head_is_rotated_and_enlarged():
    x = unit_variance((5, 3, 12))
    positions = jnp.array([0, 1, 2, 700, 131071], jnp.int32)
    inv_freq = jnp.array([1.0, 0.25, 0.01, 1e-5], jnp.float32)
    plain = rotary_tables(positions, inv_freq, jnp.float32)
    larger = rotary_tables(positions, inv_freq, jnp.float32, 1.25)
    got = rotate(x, larger)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    whole = rotate(x[..., :8], plain)
    np.testing.assert_allclose(got[..., :8], 1.25 * whole, rtol=1e-6, atol=1e-7)


def test_rotation_is_a_complex_product():
    x = unit_variance((5, 3, 8))
    positions = np.array([0, 1, 2, 700, 131071], np.int32)
    inv_freq = np.array([1.0, 0.25, 0.01, 1e-5], np.float32)
    tables = rotary_tables(jnp.asarray(positions), jnp.asarray(inv_freq), jnp.float32)
    got = rotate(x, tables)
    angles = np.float32(positions[:, None] * inv_freq).astype(np.float64)
    pairs = np.asarray(x, np.float64)
    turned = (pairs[..., :4] + 1j * pairs[..., 4:]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_array_equal(got[0], x[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [False, True])
def test_linear_rounds_once(dtype, use_bias):
    layer = LoraLinear(40, (16, 8), use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
    layer.weight.set_value(unit_variance((24, 40)).astype(dtype))
    if use_bias:
        layer.bias.set_value(unit_variance((24,), seed=3).astype(dtype))
    x = unit_variance((9, 40), seed=1).astype(dtype)
    y = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert (y.dtype, y.shape) == (dtype, (9, 24))
    exact = np.float64(x) @ np.float64(layer.weight[...]).T
    if use_bias:
        exact += np.float64(layer.bias[...])
    # Half a unit in the last place of the result, and float32's sums.
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.float64(y), exact, rtol=half_ulp, atol=1e-6)
    q, k = layer.split(y)
    np.testing.assert_array_equal(q, y[:, :16])
    np.testing.assert_array_equal(k, y[:, 16:])


def test_linear_adds_each_rows_own_adapter():
    layer = LoraLinear(16, 24, rngs=nnx.Rngs(0))
    a, b = unit_variance((3, 4, 16)), unit_variance((3, 24, 4), seed=1)
    x = unit_variance((6, 16), seed=2)
    slots = np.array([2, -1, 0, 0, 1, 2])
    segments = segment_metadata(jnp.asarray(slots, jnp.int32), num_slots=3)
    pool = pack_adapters(a, b)
    got = jax.jit(lambda layer, *args: layer(*args))(layer, x, (pool, segments))
    expected = np.float64(x) @ np.float64(layer.weight[...]).T
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[row] += np.float64(b[slot]) @ (np.float64(a[slot]) @ x[row])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_parameters_and_nothing_else_are_state():
    model = nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model))
    assert len(leaves) == len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    weights, norms, biases = (64 + 32 + 80 + 40) * 32, 2 * 32, 80 + 32
    layers = 2 * (weights + norms + biases)
    assert sum(leaf.size for leaf in leaves) == layers + 2 * 48 * 32 + 32


def test_random_weights():
    first, second = (Llama(CONFIG, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    np.testing.assert_allclose(first.embed[...].std(), INIT_STDDEV, rtol=0.1)
    weights = first.layers[0].qkv.weight, first.layers[1].qkv.weight
    assert (np.asarray(weights[0]) != np.asarray(weights[1])).all()
    again = Llama(CONFIG, rngs=nnx.Rngs(0))
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (np.asarray(first.embed[...]) != np.asarray(second.embed[...])).all()
    half = nnx.eval_shape(lambda: Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


def test_tied_head_is_the_embedding():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    model = Llama(config, rngs=nnx.Rngs(0))
    assert model.lm_head is None
    hidden = unit_variance((3, 32))
    expected = np.float64(hidden) @ np.float64(model.embed[...]).T
    np.testing.assert_allclose(model.logits(hidden), expected, atol=1e-6)


def test_logits_of_a_half_precision_model_are_float32():
    model = Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden = unit_variance((3, 32)).astype(jnp.bfloat16)
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    expected = np.float64(hidden) @ np.float64(model.lm_head[...]).T
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_pools_and_segments_come_together(model):
    pools = LoraPools.zeros(CONFIG, num_slots=1, num_pages=1, max_rank=16)
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="together, got lora alone"):
        model(row, row, dense_causal_attention(1), pools)


def test_dense_attention_checks_its_rows():
    table = jnp.zeros((10, 8))
    unprojected = Unprojected(
        x=jnp.zeros((10, 16)),
        linear=LoraLinear(16, (32, 32, 32), rngs=nnx.Rngs(0)),
        lora=None,
        rotary=(table, table),
        norms=None,
        head_dim=8,
        implementation=None,
    )
    with pytest.raises(ValueError, match="multiple of seq_len 4, got 10"):
        dense_causal_attention(4)(0, unprojected)


def test_gradient_of_the_dense_form(tokens):
    """Against a central difference along the gradient itself."""
    model = make_model(dataclasses.replace(CONFIG, num_layers=1))
    batch = tokens[:, :8]

    def loss(model):
        seqs, seq_len = batch.shape
        positions = jnp.tile(jnp.arange(seq_len, dtype=jnp.int32), seqs)
        attend = dense_causal_attention(seq_len)
        logits = model.logits(model(jnp.asarray(batch).ravel(), positions, attend))
        targets = jnp.roll(jnp.asarray(batch), -1, axis=1).ravel()
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), targets[:, None], axis=1
        ).mean()

    graph, params = nnx.split(model)
    of_params = jax.jit(lambda params: loss(nnx.merge(graph, params)))
    grads = jax.jit(jax.grad(of_params))(params)
    norm_sq = sum(float((g**2).sum()) for g in jax.tree.leaves(grads))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    epsilon = 1e-2 / norm_sq**0.5
    ends = [
        float(of_params(jax.tree.map(lambda p, g, e=e: p + e * g, params, grads)))
        for e in (epsilon, -epsilon)
    ]
    slope = (ends[0] - ends[1]) / (2 * epsilon)
    np.testing.assert_allclose(slope, norm_sq, rtol=1e-2)


# The cache


@given(
    lens=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    past=st.lists(st.integers(0, 40), min_size=6, max_size=6),
)
def test_seq_table_against_a_loop(lens, past):
    table = table_of([([0], n, n + old) for n, old in zip(lens, past, strict=True)])
    rows = 33
    seqs = [seq for seq, n in enumerate(lens) for _ in range(n)]
    places = [past[seq] + i for seq, n in enumerate(lens) for i in range(n)]
    padding = rows - len(seqs)
    assert table.num_seqs == 6
    assert table.seq_of_row(rows).tolist() == seqs + [6] * padding
    assert table.positions(rows).tolist() == places + [0] * padding


def test_cache_shapes():
    cache = KvCache.zeros(CONFIG, 5, 16, jnp.bfloat16)
    assert (cache.num_pages, cache.page_size) == (5, 16)
    assert len(cache.kv) == 2
    assert cache.kv[0].shape == (2, 5, 2, 16, 8)
    assert cache.kv[1].dtype == jnp.bfloat16
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)}
    assert len(pointers) == 2
    with pytest.raises(ValueError, match="num_pages must be an integer of at least 1"):
        KvCache.zeros(CONFIG, 0, 16)


def test_ragged_prefill_equals_the_dense_form(model, tokens, expected):
    lens = [21, 1, 17]
    table = table_of([([3, 8], 21, 21), ([0], 1, 1), ([11, 5], 17, 17)])
    parts = [tokens[seq, :n] for seq, n in enumerate(lens)]
    logits, _ = step(model, random_cache(), padded(parts), table)
    first = 0
    for seq, n in enumerate(lens):
        got = logits[first : first + n]
        np.testing.assert_allclose(got, expected[seq, :n], atol=1e-4)
        first += n


def test_chunks_decode_rows_and_idle_sequences_in_one_batch(model, tokens, expected):
    """Sequence 0 in chunks of 3 and 14, 1 decodes beside it, 2 sits out, then comes."""
    pages = [[3, 8], [0, 6], [11, 5]]
    cache = random_cache(seed=3)
    plan = [  # first token and number of rows of each sequence, step by step
        [(0, 3), (0, 18), (0, 0)],
        [(3, 14), (18, 1), (0, 0)],
        [(17, 1), (19, 1), (0, 21)],
    ]
    for chunks in plan:
        table = table_of(
            [(pages[seq], n, first + n) for seq, (first, n) in enumerate(chunks)]
        )
        parts = [tokens[seq, at : at + n] for seq, (at, n) in enumerate(chunks)]
        logits, cache = step(model, cache, padded(parts), table)
        row = 0
        for seq, (first, n) in enumerate(chunks):
            got = logits[row : row + n]
            np.testing.assert_allclose(got, expected[seq, first : first + n], atol=1e-4)
            row += n


def test_decode_form_in_a_while_loop(model, tokens, expected):
    """Teacher-forced: the loop's logits are those of the whole sequence."""
    prompt_lens = jnp.array([16, 4, 9], jnp.int32)  # 16: the next token opens a page
    num_steps = 5
    page_table = jnp.array([[3, 8], [0, 6], [11, 5]], jnp.int32)
    table = table_of([([3, 8], 16, 16), ([0, 6], 4, 4), ([11, 5], 9, 9)])
    parts = [tokens[seq, :n] for seq, n in enumerate((16, 4, 9))]
    _, cache = step(model, random_cache(), padded(parts), table)

    @jax.jit
    def decode(model, cache, tokens):
        def body(state):
            index, cache, out = state
            table = SeqTable(
                page_table=page_table,
                bounds=jnp.arange(4, dtype=jnp.int32),
                kv_lens=prompt_lens + index + 1,
            )
            attend = CachedAttention(cache, table, 3, 1)
            positions = table.positions(3)
            row_tokens = tokens[jnp.arange(3), positions]
            logits = model.logits(model(row_tokens, positions, attend))
            return index + 1, attend.cache, out.at[:, index].set(logits)

        out = jnp.zeros((3, num_steps, CONFIG.vocab_size))
        state = (jnp.int32(0), cache, out)
        return jax.lax.while_loop(lambda state: state[0] < num_steps, body, state)[2]

    got = decode(model, cache, jnp.asarray(tokens))
    for seq, n in enumerate(prompt_lens.tolist()):
        want = expected[seq, n : n + num_steps]
        np.testing.assert_allclose(got[seq], want, atol=1e-4)


def test_only_the_rows_own_places_are_written(model, tokens):
    before = random_cache()
    table = table_of([([3, 8], 2, 17), ([0], 0, 5), ([5], 3, 3)])
    _, after = step(model, before, padded([tokens[0, :2], tokens[2, :3]]), table)
    written = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    written[3, 15] = written[8, 0] = True  # tokens 15 and 16
    written[5, :3] = True
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = (np.asarray(old) != np.asarray(new)).any(axis=(2, 4))
        np.testing.assert_array_equal(changed, [written, written])


def test_a_batch_of_padding_writes_nothing(model):
    before = random_cache()
    table = table_of([([3], 0, 0), ([0], 0, 5)])
    logits, after = step(model, before, padded([np.zeros(0, np.int32)]), table)
    assert np.isfinite(logits).all()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("max_query_len", [ROWS, 1])
def test_free_pages_and_free_places_may_hold_nan(model, tokens, max_query_len):
    lens = [17, 1, 3] if max_query_len > 1 else [1, 1, 1]
    pages = [[3, 8], [0], [5]]
    past = [3, 0, 12]
    table = table_of(
        [(p, n, n + old) for p, n, old in zip(pages, lens, past, strict=True)]
    )
    used = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    for seq_pages, old in zip(pages, past, strict=True):
        used[seq_pages[0], :old] = True
    mask = jnp.asarray(used)[:, None, :, None]
    clean = random_cache()
    dirty = jax.tree.map(lambda leaf: jnp.where(mask, leaf, jnp.nan), clean)
    rows = padded([tokens[seq, :n] for seq, n in enumerate(lens)])
    results = [
        step(model, cache, rows, table, max_query_len)[0][: sum(lens)]
        for cache in (clean, dirty)
    ]
    assert np.isfinite(results[1]).all()
    np.testing.assert_array_equal(*results)


def test_model_inside_another_jit(model, tokens, expected):
    outer = jax.jit(lambda model, tokens: dense_logits(model, tokens) * 2)
    np.testing.assert_allclose(outer(model, tokens), 2 * expected, atol=1e-4)


def test_the_implementation_is_the_callers_everywhere(model, monkeypatch):
    asked = set()

    def resolve(implementation):
        asked.add(implementation)
        return "xla"

    for name in ("_epilogues", "_norm", "_ops"):
        monkeypatch.setattr(f"punica_jax.pallas_kernels.{name}.resolve", resolve)
    tokens = jnp.zeros(6, jnp.int32)
    # A width of rows that no other test traces.
    model(tokens, tokens, dense_causal_attention(3), implementation="pallas_interpret")
    assert asked == {"pallas_interpret"}
