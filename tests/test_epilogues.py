"""LoRA products with what follows them, against the same steps one by one."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import lora_gated, lora_rotary, segment_metadata
from tests.sgmv_cases import TOLERANCE, make_case, slots_of

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
GRID = pytest.param("pallas_interpret", marks=pytest.mark.grid)
XLA_GRID = pytest.param("xla", marks=pytest.mark.grid)
WIDTH = 72  # of gate and of up: no power of two
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 24, 16
# Modules without an adapter, of one page and of several.
RANKS = [[16, 16], [8, 40], [0, 16], [16, 0], [5, 3]]
ROWS = 21


def gated_case(dtype, max_rank=None):
    return make_case(
        rows=ROWS,
        ranks=RANKS if max_rank is None else [[16, 16]] * 5,
        d_in=40,
        d_outs=(WIDTH, WIDTH),
        dtype=dtype,
        max_rank=max_rank,
    )


def rotary_case(dtype):
    d_outs = tuple(heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS))
    ranks = [[a, b, a] for a, b in RANKS]
    return make_case(rows=ROWS, ranks=ranks, d_in=40, d_outs=d_outs, dtype=dtype)


class Cache(NamedTuple):
    """What `lora_rotary` takes beside `lora`'s operands."""

    rotary: tuple
    k_pages: jax.Array
    v_pages: jax.Array
    page: jax.Array
    offset: jax.Array


def make_cache(dtype, rows):
    rng = np.random.default_rng(2)
    num_pages = 1 + rows // PAGE_SIZE
    angle = rng.uniform(0, 6, (rows, HEAD_DIM // 2)).astype(np.float32)
    angle = jnp.asarray(np.concatenate([angle, angle], axis=1))
    pages = rng.standard_normal((2, num_pages, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    k_pages, v_pages = jnp.asarray(pages, dtype)
    at = rng.permutation(num_pages * PAGE_SIZE)[:rows]
    page = at // PAGE_SIZE
    page[rows // 2] = num_pages + rows  # a row that stores nothing
    return Cache(
        rotary=(jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)),
        k_pages=k_pages,
        v_pages=v_pages,
        page=jnp.asarray(page, jnp.int32),
        offset=jnp.asarray(at % PAGE_SIZE, jnp.int32),
    )


def segments_of(case, slots, implementation, **options):
    return segment_metadata(
        jnp.asarray(slots),
        num_slots=case.pool.num_slots,
        implementation=implementation,
        **options,
    )


@functools.partial(jax.jit, static_argnames="implementation")
def run_gated(y, x, pool, segments, *, implementation):
    return lora_gated(y, x, pool, segments, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def run_rotary(y, x, pool, segments, cache, *, implementation):
    return lora_rotary(y, *cache, x, pool, segments, implementation=implementation)


def some_slots(case, rows=ROWS):
    rng = np.random.default_rng(1)
    num_slots = case.pool.num_slots
    return slots_of("uniform", rows, num_slots=num_slots, num_idle=4, rng=rng)


def assert_near(actual, expected, dtype):
    assert actual.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, **TOLERANCE[dtype]
    )


def expected_gated(y):
    gate, up = np.split(np.asarray(y, np.float32), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def expected_rotary(y, cache):
    """Return q, k and v of every row as float32."""
    y = np.asarray(y, np.float32).reshape(len(y), -1, HEAD_DIM)
    low, high = np.split(y, 2, axis=-1)
    cos, sin = (np.asarray(t, np.float32)[:, None] for t in cache.rotary)
    rotated = y * cos + np.concatenate([-high, low], axis=-1) * sin
    q, k, _ = np.split(rotated, [HEADS, HEADS + KV_HEADS], axis=1)
    return q, k, y[:, HEADS + KV_HEADS :]


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        ("float32", "xla"),
        ("float32", "pallas_interpret"),
        pytest.param("bfloat16", "xla", marks=pytest.mark.grid),
        pytest.param("float16", "xla", marks=pytest.mark.grid),
        pytest.param("bfloat16", "pallas_interpret", marks=pytest.mark.grid),
        pytest.param("float16", "pallas_interpret", marks=pytest.mark.grid),
        pytest.param("float32", "pallas_triton", marks=pytest.mark.gpu),
        pytest.param("bfloat16", "pallas_triton", marks=pytest.mark.gpu),
        pytest.param("float16", "pallas_triton", marks=pytest.mark.gpu),
    ],
)
class TestAgainstTheStepsOneByOne:
    def test_gated(self, dtype, implementation):
        case = gated_case(dtype)
        slots = some_slots(case)
        segments = segments_of(case, slots, implementation)
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        actual = run_gated(y, x, case.pool, segments, implementation=implementation)
        assert_near(actual, expected_gated(case.expected(slots)), dtype)
        base = run_gated(y, None, None, None, implementation=implementation)
        assert_near(base, expected_gated(case.y), dtype)
        # Rows without an adapter are what they are in a batch without any.
        np.testing.assert_array_equal(actual[slots < 0], base[slots < 0])
        assert not np.array_equal(actual, base)

    def test_rotary(self, dtype, implementation):
        case = rotary_case(dtype)
        slots = some_slots(case)
        segments = segments_of(case, slots, implementation)
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        cache = make_cache(dtype, ROWS)
        stored = np.asarray(cache.page) < cache.k_pages.shape[0]
        at = (cache.page[stored], slice(None), cache.offset[stored])
        for lora in ((x, case.pool, segments), (None, None, None)):
            q, k_pages, v_pages = run_rotary(
                y, *lora, cache, implementation=implementation
            )
            sums = case.y if lora[0] is None else case.expected(slots)
            want_q, want_k, want_v = expected_rotary(sums, cache)
            assert_near(q, want_q, dtype)
            for pages, old, want in (
                (k_pages, cache.k_pages, want_k),
                (v_pages, cache.v_pages, want_v),
            ):
                assert_near(pages[at], want[stored], dtype)
                # All else is as it was, to the bit.
                np.testing.assert_array_equal(pages.at[at].set(0), old.at[at].set(0))


@pytest.mark.parametrize("implementation", [XLA_GRID, GRID, GPU])
def test_a_row_is_bitwise_the_same_alone(implementation):
    gated, rotary = gated_case("bfloat16"), rotary_case("bfloat16")
    cache = make_cache("bfloat16", ROWS)
    slots = some_slots(gated)

    def run(rows):
        out = []
        for case in (gated, rotary):
            segments = segments_of(case, slots[rows], implementation)
            y, x = jnp.asarray(case.y[rows]), jnp.asarray(case.x[rows])
            lora = (y, x, case.pool, segments)
            if case is gated:
                out.append(run_gated(*lora, implementation=implementation))
            else:
                tables = tuple(table[rows] for table in cache.rotary)
                part = cache._replace(
                    rotary=tables, page=cache.page[rows], offset=cache.offset[rows]
                )
                out.append(run_rotary(*lora, part, implementation=implementation)[0])
        return out

    together = run(np.arange(ROWS))
    for row in (0, 7, 20):
        for one, all_ in zip(run(np.array([row])), together, strict=True):
            np.testing.assert_array_equal(one[0], all_[row])


@pytest.mark.parametrize("implementation", ["xla", GRID, GPU])
def test_several_adapters_on_a_row(implementation):
    case = gated_case("float32")
    slots = np.stack([some_slots(case), np.roll(some_slots(case), 3)], axis=1)
    weights = np.random.default_rng(0).uniform(0.5, 2, slots.shape).astype(np.float32)
    segments = segment_metadata(
        jnp.asarray(slots),
        jnp.asarray(weights),
        num_slots=case.pool.num_slots,
        implementation=implementation,
    )
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    actual = run_gated(y, x, case.pool, segments, implementation=implementation)
    sums = case.y.astype(np.float32)
    for passes in range(2):
        sums += case.expected(slots[:, passes], weights[:, passes]) - case.y
    assert_near(actual, expected_gated(sums), "float32")


@pytest.mark.parametrize("implementation", [GRID, GPU])
@pytest.mark.parametrize("max_rank", [16, 128])
def test_one_adapter_of_one_page_in_tables_of_any_width(max_rank, implementation):
    case = gated_case("float32", max_rank)
    slots = some_slots(case)
    weights = np.linspace(0.5, 2, ROWS, dtype=np.float32)
    segments = segment_metadata(
        jnp.asarray(slots),
        jnp.asarray(weights),
        num_slots=case.pool.num_slots,
        implementation=implementation,
    )
    actual = run_gated(
        jnp.asarray(case.y),
        jnp.asarray(case.x),
        case.pool,
        segments,
        implementation=implementation,
    )
    assert_near(actual, expected_gated(case.expected(slots, weights)), "float32")


@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_the_gradient_is_that_of_the_steps(implementation):
    case = gated_case("float32")
    slots = some_slots(case)
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal((ROWS, WIDTH)))

    def gradients(implementation):
        segments = segments_of(case, slots, implementation)

        def loss(y, x, a, b):
            pool = case.pool.__class__(
                a, b, case.pool.page_table, case.pool.num_pages, case.pool.d_outs
            )
            h = lora_gated(y, x, pool, segments, implementation=implementation)
            return (h * cotangent.astype(h.dtype)).sum()

        arrays = (jnp.asarray(case.y), jnp.asarray(case.x), case.pool.a, case.pool.b)
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)

    for ours, plain in zip(gradients(implementation), gradients("xla"), strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_tables_of_numpy_have_gradients():
    case = gated_case("float32")
    segments = segments_of(case, some_slots(case), "xla")
    tables = {
        name: np.asarray(getattr(case.pool, name))
        for name in ("page_table", "num_pages")
    }

    @jax.jit
    def gradient(a, tables):
        def loss(a):
            pool = dataclasses.replace(case.pool, a=a, **tables)
            x, y = jnp.asarray(case.x), jnp.asarray(case.y)
            return lora_gated(y, x, pool, segments, implementation="xla").sum()

        return jax.grad(loss)(a)

    constant = jax.jit(lambda a: gradient.__wrapped__(a, tables))(case.pool.a)
    np.testing.assert_array_equal(constant, gradient(case.pool.a, tables))


def test_operands_that_do_not_fit():
    case, cache = gated_case("float32"), make_cache("float32", ROWS)
    segments = segments_of(case, some_slots(case), "xla")
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    with pytest.raises(ValueError, match=r"y must be \[rows, 2 \* width\]"):
        lora_gated(y[:, :7])
    with pytest.raises(ValueError, match="two modules as wide as y's halves"):
        lora_gated(y[:, :80], x, case.pool, segments)
    with pytest.raises(ValueError, match="x, pool and segments must be given together"):
        lora_gated(y, x, case.pool)
    with pytest.raises(ValueError, match="x must be"):
        lora_gated(y, x[:3], case.pool, segments)
    with pytest.raises(ValueError, match=r"y must be \[rows, \(heads \+ 2"):
        lora_rotary(y[:, :95], *cache)
    wide = jnp.zeros((ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM))
    with pytest.raises(ValueError, match="the cosine must be"):
        lora_rotary(wide, *cache._replace(rotary=(x, x)))
    with pytest.raises(ValueError, match="the pool's modules must be"):
        lora_rotary(wide, *cache, x, case.pool, segments)
