"""An expand whose programs take an adapter's tiles of a window gives the same bits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    _sgmv_config,
    lora,
    pack_adapters,
    segment_metadata,
)
from punica_jax.pallas_kernels._expand import expand
from punica_jax.pallas_kernels._segments import DEFAULT_BLOCK_ROWS, max_tiles
from punica_jax.pallas_kernels._sgmv_config import (
    ExpandConfig,
    expand_config,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink import shrink
from tests.sgmv_cases import TOLERANCE, make_case, rarely
from tests.test_lowering import lower

IMPLEMENTATIONS = [
    "pallas_interpret",
    pytest.param("pallas_triton", marks=pytest.mark.gpu),
]
# Of several modules: none, one page, two, three.
RANKS = [[16, 0], [7, 16], [20, 40], [40, 3], [0, 40]]
# Segments of many tiles, of one, of one row; windows begin within some, and within the
# idle rows.
SIZES = {0: 150, 1: 1, 2: 70, 3: 1, 4: 16, -1: 90}


def some_slots():
    return np.repeat(list(SIZES), list(SIZES.values())).astype(np.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("block_rows", "passes", "pages_at_once"),
    [
        (16, 1, 4),
        rarely(64, 1, 1),
        rarely(128, 1, 4),
        rarely(16, 2, 4),
        rarely(64, 2, 1),
    ],
)
def test_bits_are_those_of_tiles(block_rows, passes, pages_at_once, implementation):
    rng = np.random.default_rng(1)
    slots = np.stack([rng.permutation(some_slots()) for _ in range(passes)], axis=1)
    slots = slots[:, 0] if passes == 1 else slots
    weights = rng.uniform(0.5, 2, slots.shape).astype(np.float32)
    case = make_case(
        rows=len(slots), ranks=RANKS, d_in=40, d_outs=(330, 24), dtype="bfloat16"
    )
    segments = segment_metadata(
        jnp.asarray(slots),
        jnp.asarray(weights),
        num_slots=len(RANKS),
        block_rows=block_rows,
        implementation=implementation,
    )
    interpret = implementation == "pallas_interpret"
    y, width = jnp.asarray(case.y), case.y.shape[1]
    v = shrink(jnp.asarray(case.x), case.pool, segments, interpret=interpret)
    vectors = rng.standard_normal((2, len(RANKS), width)).astype(np.float32)
    residual = jnp.asarray(rng.standard_normal(y.shape), y.dtype)
    tiles = ExpandConfig(
        block_n=32, num_warps=4, num_blocks=3, pages_at_once=pages_at_once
    )
    windows = dataclasses.replace(tiles, windowed=True)

    def run(config, **options):
        return np.asarray(
            expand(
                *(y, v, case.pool, segments),
                **options,
                config=config,
                interpret=interpret,
            )
        )

    scale, bias = map(jnp.asarray, vectors)
    every = {"scale": scale, "bias": bias} if passes == 1 else {}
    for options in ({}, {"residual": residual, **every}):
        actual, expected = (run(config, **options) for config in (windows, tiles))
        np.testing.assert_array_equal(actual, expected)
        assert not np.array_equal(expected, case.y)


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lora_by_windows(implementation, monkeypatch):
    monkeypatch.setattr(_sgmv_config, "_WINDOWED_EXPAND_ROWS", 65)
    slots = np.random.default_rng(2).permutation(some_slots())
    d_outs = 8200, 40
    # Five splits, in groups of two, of which the last is shorter.
    assert shrink_config(2560, jnp.bfloat16).splits == 5
    case = make_case(
        rows=len(slots), ranks=RANKS, d_in=2560, d_outs=d_outs, dtype="bfloat16"
    )
    assert expand_config(d_outs, jnp.bfloat16, 3, len(slots)).windowed

    def run(rows):
        segments = segment_metadata(
            jnp.asarray(slots[rows]),
            num_slots=len(RANKS),
            implementation=implementation,
        )
        y, x = (jnp.asarray(array[rows]) for array in (case.y, case.x))
        function = jax.jit(lora, static_argnames="implementation")
        out = function(y, x, case.pool, segments, implementation=implementation)
        return np.asarray(out)

    actual = run(slice(None))
    np.testing.assert_allclose(
        actual.astype(np.float32),
        case.expected(slots).astype(np.float32),
        **TOLERANCE["bfloat16"],
    )
    if implementation == "pallas_triton":
        np.testing.assert_array_equal(actual[:64], run(slice(64)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rank", "other", "dtype"),
    [(16, 33, "bfloat16"), (60, 33, "bfloat16"), (20, 7, "float16")],
)
def test_row_is_bitwise_the_same_among_any_number(rank, other, dtype):
    counts = (1, 129, 512, 2048)
    ranks = [[rank], [other], [0], [1]]
    case = make_case(
        rows=counts[-1], ranks=ranks, d_in=4096, d_outs=(8208,), dtype=dtype
    )
    slots = np.random.default_rng(5).integers(-1, len(ranks), counts[-1])
    slots[0] = 0

    def run(count):
        segments = segment_metadata(
            jnp.asarray(slots[:count], jnp.int32), num_slots=len(ranks)
        )
        y, x = (jnp.asarray(array[:count]) for array in (case.y, case.x))
        return np.asarray(jax.jit(lora)(y, x, case.pool, segments))

    results = [run(count) for count in counts]
    for fewer, more in itertools.pairwise(results):
        np.testing.assert_array_equal(more[: len(fewer)], fewer)


def test_only_wide_expands_of_many_rows_and_several_pages_take_windows():
    def windowed(width, max_pages, rows, dtype=jnp.bfloat16):
        return expand_config((24, width), dtype, max_pages, rows).windowed

    assert windowed(11008, 4, 512) and windowed(11008, 2, 16384)
    assert not windowed(11008, 4, 511)
    assert not windowed(8192, 4, 512)
    assert not windowed(11008, 1, 512)
    assert not windowed(11008, 5, 512)  # not all multiplied at once
    assert not windowed(11008, 4, 512, jnp.float32)
    # A window's program has registers for four sums of its rows.
    assert not expand_config((11008,), jnp.bfloat16, 4, 512, num_sums=5).windowed

    config = shrink_config(4096, jnp.bfloat16)
    sizes = [
        config.part_size(512, whole=True, for_windows=own) for own in (False, True)
    ]
    assert sizes == [1, config.group_size] and config.num_groups <= 4


@pytest.mark.parametrize(
    ("rank", "tables", "num_sums"), [(16, (1, 3), 8), (64, (2, 3), 4)]
)
def test_launches_of_lora_by_windows(rank, tables, num_sums):
    rows, d_in, d_out = 512, 4096, 8200
    shapes = (3, rank, d_in), (3, d_out, rank), (rows, d_out), (rows, d_in)
    a, b, y, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def forward(y, x, a, b, slots):
        segments = segment_metadata(slots, num_slots=3, implementation="pallas_triton")
        pool = pack_adapters(a, b)
        return lora(y, x, pool, segments, implementation="pallas_triton")

    calls = lower(forward, y, x, a, b, jax.ShapeDtypeStruct((rows,), jnp.int32))
    types = dict(calls)["lora_expand"]
    sizes = rows, max_tiles(rows, 3, DEFAULT_BLOCK_ROWS)
    # Windows are told from each row's slot; by tiles nothing else is read.
    assert tuple(types.count(f"tensor<1x{n}xi32>") for n in sizes) == tables
    assert f"tensor<{num_sums}x{rows}x{rank}xf32>" in types
