"""Layers without adapters whose product and what follows it are one launch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import NormedRows, lora_gated, lora_rotary

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
GRID = pytest.mark.grid
D_IN = 600  # three blocks of a product, the last not full


def operands_of(rows: int, d_out: int, dtype: str, *, normed: bool):
    """Return x, a weight, a bias and a residual, random."""
    rng = np.random.default_rng(rows + d_out)

    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    x = draw(rows, D_IN)
    if normed:
        squares = np.float32(rng.uniform(50, 100, (3, rows)))
        x = NormedRows(x=x, squares=jnp.asarray(squares), eps=1e-5)
    weight = draw(d_out, D_IN, scale=D_IN**-0.5)
    return x, weight, {"bias": draw(d_out), "residual": draw(rows, d_out)}


def in_float64(x, weight, options):
    """Return the layer's sums, rounded where every form rounds them."""
    scale = 1.0
    if isinstance(x, NormedRows):
        mean = np.float64(x.squares).sum(axis=0) / D_IN
        x, scale = x.x, 1 / np.sqrt(mean + x.eps)[:, None]
    sums = np.float64(x) @ np.float64(weight).T * scale
    sums += np.float64(options["bias"]) + np.float64(options["residual"])
    return np.float64(jnp.asarray(sums, weight.dtype))


def assert_near(actual, expected):
    off = np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)
    # Rounded twice in bfloat16; a wrong column or row is off by more than one.
    assert off < 6e-3, off


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "normed"),
    [
        (21, 72, "bfloat16", False),
        (37, 40, "bfloat16", True),
        pytest.param(1, 344, "bfloat16", True, marks=GRID),
        pytest.param(64, 24, "float16", False, marks=GRID),
    ],
)
def test_gated(rows, width, dtype, normed, implementation):
    x, weight, options = operands_of(rows, 2 * width, dtype, normed=normed)
    h = jax.jit(
        lambda: lora_gated(x, weight, **options, implementation=implementation)
    )()
    gate, up = np.split(in_float64(x, weight, options), 2, axis=1)
    assert h.dtype == jnp.dtype(dtype)
    assert_near(h, gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "normed"),
    [
        (21, 4, 2, 24, True),
        (5, 2, 2, 96, False),
        pytest.param(1, 4, 1, 128, True, marks=GRID),
        pytest.param(64, 2, 1, 6, False, marks=GRID),
    ],
)
def test_rotary(rows, heads, kv_heads, head_dim, normed, implementation):
    d_out = (heads + 2 * kv_heads) * head_dim
    x, weight, options = operands_of(rows, d_out, "bfloat16", normed=normed)
    rng = np.random.default_rng(0)
    num_pages, page_size = rows // 2 + 1, 16
    shape = (2, num_pages, kv_heads, page_size, head_dim)
    kv_pages = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    angles = np.float32(rng.uniform(0, 6, (rows, head_dim // 2)))
    tables = [np.tile(turn(angles), 2) for turn in (np.cos, np.sin)]
    # Two rows a page, of which the last row's is none.
    page = np.arange(rows, dtype=np.int32) // 2
    offset = np.arange(rows, dtype=np.int32) % 2 + 3
    page[-1] = num_pages
    q, stored = jax.jit(
        lambda: lora_rotary(
            x,
            weight,
            tuple(map(jnp.asarray, tables)),
            kv_pages,
            jnp.asarray(page),
            jnp.asarray(offset),
            **options,
            implementation=implementation,
        )
    )()
    sums = in_float64(x, weight, options).reshape(rows, -1, head_dim)
    low, high = np.split(sums, 2, axis=2)
    turned = np.concatenate([-high, low], axis=2)
    rotated = sums * tables[0][:, None] + turned * tables[1][:, None]
    assert_near(q, rotated[:, :heads])
    expected = np.float64(kv_pages)
    for row in range(rows - 1):
        at = (page[row], slice(None), offset[row])
        expected[(0, *at)] = rotated[row, heads : heads + kv_heads]
        expected[(1, *at)] = sums[row, heads + kv_heads :]
    assert_near(stored, expected)
    # What no row stores to is as it was.
    same = np.ones(shape, bool)
    same[:, page[:-1], :, offset[:-1]] = False
    np.testing.assert_array_equal(np.asarray(stored)[same], np.asarray(kv_pages)[same])
