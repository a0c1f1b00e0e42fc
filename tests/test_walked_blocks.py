"""Blocks of columns of one program, or rank pages at once, change no bit on a GPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import _fused, segment_metadata
from punica_jax.pallas_kernels._expand import expand
from punica_jax.pallas_kernels._fused import Shrunk, gated_expand, rotary_expand
from punica_jax.pallas_kernels._sgmv_config import (
    ExpandConfig,
    expand_config,
    gated_config,
    rotary_pages_at_once,
    walked_blocks,
)
from punica_jax.pallas_kernels._shrink import shrink
from tests.sgmv_cases import make_case, rarely

IMPLEMENTATIONS = [
    "pallas_interpret",
    pytest.param("pallas_triton", marks=pytest.mark.gpu),
]
RARELY_INTERPRETED = [
    pytest.param("pallas_interpret", marks=pytest.mark.grid),
    IMPLEMENTATIONS[1],
]
ROWS, PAGE_SIZE = 70, 16


def make_launch(d_outs, implementation, *, dtype="bfloat16", pages=1, passes=1):
    """Return y, what was shrunk for it, and whether launches are interpreted."""
    modules = len(d_outs)
    # Modules without an adapter, too, and of several pages, if there may be.
    ranks = [[16] * modules, [7] * modules, [0] + [16] * (modules - 1), [3] * modules]
    if pages > 1:
        many = 7 + 16 * (pages - 1)
        ranks[1:] = [[many] * modules, [0] + [many] * (modules - 1), [many, 0, 16]]
        ranks[3] = ranks[3][:modules]
    case = make_case(rows=ROWS, ranks=ranks, d_in=40, d_outs=d_outs, dtype=dtype)
    rng = np.random.default_rng(1)
    slots = rng.integers(-1, len(ranks), (ROWS, passes))
    weights = rng.uniform(0.5, 2, slots.shape) if passes > 1 else None
    segments = segment_metadata(
        jnp.asarray(slots if passes > 1 else slots[:, 0], jnp.int32),
        None if weights is None else jnp.asarray(weights, jnp.float32),
        num_slots=len(ranks),
        implementation=implementation,
    )
    interpret = implementation == "pallas_interpret"
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    v = shrink(x, case.pool, segments, interpret=interpret)
    return y, Shrunk(v, case.pool, segments), interpret


def assert_same_bits(run, counts):
    expected = jax.jit(lambda: run(1))()
    for count in counts:
        actual = jax.jit(lambda count=count: run(count))()
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("passes", "pages"), [(1, 1), rarely(1, 3), rarely(2, 1), rarely(2, 3)]
)
def test_expand(passes, pages, implementation):
    # Ten blocks and a part, one: a program's last ones may lie past a module's end.
    y, shrunk, interpret = make_launch(
        (330, 24), implementation, pages=pages, passes=passes
    )
    rng = np.random.default_rng(2)
    scale, bias = jnp.asarray(rng.standard_normal((2, 4, y.shape[1])), jnp.float32)
    residual = jnp.asarray(rng.standard_normal(y.shape), y.dtype)

    def run(num_blocks):
        return expand(
            y,
            shrunk.v,
            shrunk.pool,
            shrunk.segments,
            scale=scale if passes == 1 else None,
            bias=bias if passes == 1 else None,
            residual=residual,
            config=ExpandConfig(block_n=32, num_warps=4, num_blocks=num_blocks),
            interpret=interpret,
        )

    assert_same_bits(run, [2, 4])


@pytest.mark.parametrize("implementation", RARELY_INTERPRETED)
@pytest.mark.parametrize(
    ("width", "pages", "dtype"),
    [(330, 1, "bfloat16"), rarely(330, 3, "bfloat16"), rarely(256, 1, "float32")],
)
def test_gated(width, pages, dtype, implementation):
    y, shrunk, interpret = make_launch(
        (width, width), implementation, dtype=dtype, pages=pages
    )

    def run(num_blocks):
        config = ExpandConfig(block_n=32, num_warps=4, num_blocks=num_blocks)
        return gated_expand(y, shrunk, config=config, interpret=interpret)

    assert_same_bits(run, [3, 4])


@pytest.mark.parametrize("implementation", RARELY_INTERPRETED)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pages", "dtype"),
    [
        (8, 4, 32, 1, "bfloat16"),
        rarely(4, 4, 24, 3, "bfloat16"),
        rarely(6, 2, 24, 1, "float32"),
        rarely(3, 3, 16, 1, "float16"),
    ],
)
def test_rotary(heads, kv_heads, head_dim, pages, dtype, implementation):
    d_outs = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    y, shrunk, interpret = make_launch(d_outs, implementation, dtype=dtype, pages=pages)
    rng = np.random.default_rng(2)
    num_pages = 1 + ROWS // PAGE_SIZE
    angle = rng.uniform(0, 6, (ROWS, head_dim))
    rotary = jnp.asarray(np.cos(angle), y.dtype), jnp.asarray(np.sin(angle), y.dtype)
    shape = 2, num_pages, kv_heads, PAGE_SIZE, head_dim
    kv_pages = jnp.asarray(rng.standard_normal(shape), y.dtype)
    at = rng.permutation(num_pages * PAGE_SIZE)[:ROWS].astype(np.int32)
    page = at // PAGE_SIZE
    page[5] = num_pages  # a row that stores nothing

    def run(num_heads):
        return rotary_expand(
            y,
            shrunk,
            rotary,
            kv_pages,
            jnp.asarray(page),
            jnp.asarray(at % PAGE_SIZE),
            num_heads=num_heads,
            interpret=interpret,
        )

    together = math.gcd(heads, kv_heads)
    assert_same_bits(run, {2, together} if together % 2 == 0 else {together})


@pytest.mark.parametrize("implementation", RARELY_INTERPRETED)
@pytest.mark.parametrize(
    ("form", "pages"),
    [
        rarely("expand", 3),
        ("gated", 3),
        ("rotary", 3),
        rarely("expand", 6),
        rarely("gated", 6),
        rarely("rotary", 6),
    ],
)
def test_pages_multiplied_at_once(form, pages, implementation, monkeypatch):
    d_outs = {"expand": (330, 24), "gated": (330, 330), "rotary": (64, 32, 32)}[form]
    y, shrunk, interpret = make_launch(d_outs, implementation, pages=pages)
    cos = jnp.ones((ROWS, 16), y.dtype)
    kv_pages = jnp.zeros((2, ROWS, 2, 1, 16), y.dtype)
    row = jnp.arange(ROWS, dtype=jnp.int32)

    residual = jnp.asarray(np.random.default_rng(3).standard_normal(y.shape), y.dtype)
    scale = jnp.full((4, y.shape[1]), 1.5, jnp.float32)

    def run(at_once):
        # Two blocks, or heads: as where there are many rows.
        config = ExpandConfig(
            block_n=32, num_warps=4, num_blocks=2, pages_at_once=at_once
        )
        if form == "expand":
            return expand(
                y,
                shrunk.v,
                shrunk.pool,
                shrunk.segments,
                scale=scale,
                residual=residual,
                config=config,
                interpret=interpret,
            )
        if form == "gated":
            return gated_expand(y, shrunk, config=config, interpret=interpret)
        monkeypatch.setattr(_fused, "rotary_pages_at_once", lambda *_: at_once)
        return rotary_expand(
            y,
            shrunk,
            (cos, cos),
            kv_pages,
            row,
            0 * row,
            num_heads=2,
            interpret=interpret,
        )

    if not interpret:
        assert_same_bits(run, [2, 4])
        return
    # A CPU's product of more ranks may add them otherwise than one after the other.
    expected, actual = (jax.jit(lambda n=n: run(n))() for n in (1, 4))
    jax.tree.map(assert_close, actual, expected)


def assert_close(actual, expected):
    actual, expected = (np.asarray(a, np.float32) for a in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=2**-9)


def test_only_programs_of_many_rows_walk():
    assert [walked_blocks(rows, 9) for rows in (1, 2047, 2048, 16384)] == [1, 1, 4, 4]
    assert [walked_blocks(2048, most) for most in (1, 3, 4)] == [1, 3, 4]

    def num_blocks(max_pages, rows=2048):
        expands = expand_config((4096,), jnp.bfloat16, max_pages, rows)
        gated = gated_config(11008, jnp.bfloat16, max_pages, rows)
        return expands.num_blocks, gated.num_blocks

    assert num_blocks(1) == num_blocks(4) == (4, 4)
    assert num_blocks(1, rows=2047) == num_blocks(4, rows=2047) == (1, 1)
    # Blocks wait for their pages where an adapter may have many.
    assert num_blocks(5) == (1, 1)
    assert expand_config((4096,), jnp.float32, 2, 2048).num_blocks == 1
    assert gated_config(11008, jnp.float32, 2, 2048).num_blocks == 1
    assert gated_config(11008, jnp.bfloat16, None, 2048).num_blocks == 1


def test_expands_have_pages_at_once_where_registers_allow():
    def choices(max_pages, dtype=jnp.bfloat16):
        configs = [
            expand_config((4096,), dtype, max_pages, rows)
            for rows in (1, 128, 129, 2047, 2048)
        ]
        return [(config.block_n, config.pages_at_once) for config in configs]

    few, some, many = (128, 4), (256, 1), (128, 4)
    assert choices(1) == choices(4) == [few, few, some, some, many]
    assert choices(5) == [few, few, some, some, (128, 1)]
    assert {pages for _, pages in choices(4, jnp.float32)} == {1}
    assert expand_config((11008,), jnp.bfloat16, 1, 128).block_n == 512
    assert expand_config((11008,), jnp.bfloat16, 4, 128).block_n == 256
    assert gated_config(11008, jnp.bfloat16, 4, 2047).pages_at_once == 1
    assert gated_config(11008, jnp.bfloat16, 4, 2048).pages_at_once == 2
    assert rotary_pages_at_once(4, jnp.bfloat16, 128, 4) == 4
    for other in ((5, jnp.bfloat16, 128, 4), (4, jnp.float32, 128, 4)):
        assert rotary_pages_at_once(*other) == 1
    assert rotary_pages_at_once(4, jnp.bfloat16, 256, 4) == 1
    assert rotary_pages_at_once(4, jnp.bfloat16, 128, 1) == 1
