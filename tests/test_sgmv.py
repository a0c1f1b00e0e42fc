import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    _sgmv_config,
    _shrink,
    expand,
    lora,
    segment_metadata,
    shrink,
)
from punica_jax.pallas_kernels._launch import place_of_program
from punica_jax.pallas_kernels._sgmv_config import add_splits
from punica_jax.pallas_kernels.shapes import (
    POPULARITIES,
    TEST_DTYPES,
    TEST_RANKS,
    TEST_ROWS,
)
from tests.sgmv_cases import TOLERANCE, make_case, rarely, slots_of

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
IMPLEMENTATIONS = ["xla", "pallas_interpret", GPU]
INTERPRET_GRID = pytest.param("pallas_interpret", marks=pytest.mark.grid)


@functools.partial(jax.jit, static_argnames=("implementation", "block_rows"))
def apply(y, x, pool, slots, weights=None, *, implementation, block_rows=16):
    segments = segment_metadata(
        slots,
        weights,
        num_slots=pool.num_slots,
        block_rows=block_rows,
        implementation=implementation,
    )
    return lora(y, x, pool, segments, implementation=implementation)


def run_case(case, slots, implementation, **options):
    return np.asarray(
        apply(
            jnp.asarray(case.y),
            jnp.asarray(case.x),
            case.pool,
            jnp.asarray(slots),
            implementation=implementation,
            **options,
        )
    )


def assert_near(actual, expected, dtype):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(
        actual.astype(np.float32), expected.astype(np.float32), **TOLERANCE[dtype]
    )


def check_popularities(dtype, rank, rows, implementation):
    num_slots = max(rows, 2)
    ranks = [[rank, rank]] * num_slots
    case = make_case(rows=rows, ranks=ranks, dtype=dtype, seed=rank * rows)
    rng = np.random.default_rng(rows)
    for popularity in POPULARITIES:
        for num_idle in {0, rows // 3, rows}:
            slots = slots_of(
                popularity, rows, num_slots=num_slots, num_idle=num_idle, rng=rng
            )
            actual = run_case(case, slots, implementation)
            assert_near(actual, case.expected(slots), dtype)
            idle = slots < 0
            np.testing.assert_array_equal(actual[idle], case.y[idle])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "rank", "rows"),
    [
        ("float32", 16, 1),
        ("float32", 1, 7),
        ("float32", 24, 33),
        ("bfloat16", 8, 10),
        ("bfloat16", 64, 32),
        ("float16", 16, 3),
        ("float16", 96, 16),
        ("bfloat16", 16, 133),
    ],
)
def test_against_oracle(dtype, rank, rows, implementation):
    check_popularities(dtype, rank, rows, implementation)


@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("dtype", TEST_DTYPES)
@pytest.mark.parametrize("rank", TEST_RANKS)
@pytest.mark.parametrize("rows", TEST_ROWS)
def test_full_grid(dtype, rank, rows, implementation):
    check_popularities(dtype, rank, rows, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TEST_DTYPES)
@pytest.mark.parametrize("rank", TEST_RANKS)
@pytest.mark.parametrize("rows", TEST_ROWS)
def test_full_grid_gpu(dtype, rank, rows):
    check_popularities(dtype, rank, rows, "pallas_triton")


MIXED_RANKS = [[16, 4], [1, 33], [0, 17], [40, 0], [64, 64], [0, 0], [7, 128]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_ranks(dtype, implementation):
    # Every slot has its own ranks, one module may be absent, free pages are NaN.
    case = make_case(rows=37, ranks=MIXED_RANKS, dtype=dtype)
    slots = np.random.default_rng(0).integers(-1, len(MIXED_RANKS), 37).astype(np.int32)
    assert_near(run_case(case, slots, implementation), case.expected(slots), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ranks", [[[70, 80], [16, 33], [1, 65]], [[20, 48], [3, 0]]])
def test_pages_that_do_not_fill_a_load(ranks, implementation):
    # 16-bit kernels load four pages at once: here the table holds five, or three.
    case = make_case(rows=20, ranks=ranks, dtype="bfloat16")
    slots = np.random.default_rng(6).integers(-1, len(ranks), 20).astype(np.int32)
    actual = run_case(case, slots, implementation)
    assert_near(actual, case.expected(slots), "bfloat16")


@pytest.mark.parametrize("implementation", [INTERPRET_GRID, GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_of_all_modules_are_those_of_each(dtype, implementation, monkeypatch):
    # Two adapters a row; ranks of one page each, and of none to two.
    ranks = [[8, 16], [20, 0], [4, 4], [0, 32]]
    case = make_case(rows=150, ranks=ranks, d_in=264, d_outs=(40, 24), dtype=dtype)
    slots = np.random.default_rng(2).integers(-1, len(ranks), (150, 2)).astype(np.int32)
    weights = jnp.asarray(np.random.default_rng(3).random((150, 2), np.float32))

    def run():
        # Traced anew, for the border is no argument.
        function = functools.partial(apply.__wrapped__, implementation=implementation)
        operands = jnp.asarray(case.y), jnp.asarray(case.x), case.pool
        return np.asarray(jax.jit(function)(*operands, jnp.asarray(slots), weights))

    apart = run()
    monkeypatch.setattr(_sgmv_config, "_MANY_ROWS", 1)
    monkeypatch.setattr(_shrink, "JOINT_ROWS", 1)
    monkeypatch.setattr(_shrink, "WINDOWED_ROWS", 1)
    np.testing.assert_array_equal(run(), apart)


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize("block_rows", [16, rarely(64), 128])
def test_windows_of_tiles(block_rows, implementation, monkeypatch):
    # Segments of many tiles, of one, and of one row; some begin and end in a window.
    sizes = {0: 150, 1: 1, 3: 1, 4: 70, 5: 1, 6: 16, -1: 9}
    slots = np.repeat(list(sizes), list(sizes.values())).astype(np.int32)
    slots = np.random.default_rng(4).permutation(slots)
    case = make_case(rows=len(slots), ranks=MIXED_RANKS, d_in=264, dtype="float32")
    segments = segment_metadata(
        jnp.asarray(slots),
        num_slots=len(MIXED_RANKS),
        block_rows=block_rows,
        implementation=implementation,
    )

    pages = case.pool.num_pages[jnp.maximum(segments.slots[0], 0)]
    pages = jnp.where(segments.slots[0, :, None] >= 0, pages, 0)
    rank = jnp.arange(case.pool.max_rank)[None, None]
    used = (rank < 16 * pages[:, :, None]).reshape(len(slots), -1)

    def run():
        interpret = implementation == "pallas_interpret"
        # Anew: what was compiled with other borders is not this.
        launch = _shrink.shrink.__wrapped__
        v = launch(jnp.asarray(case.x), case.pool, segments, interpret=interpret)
        if interpret:  # what is not written is NaN
            np.testing.assert_array_equal(
                jnp.isnan(v), jnp.broadcast_to(~used, v.shape)
            )
        return jnp.where(used, add_splits(list(v)), 0)

    apart = run()
    monkeypatch.setattr(_sgmv_config, "_MANY_ROWS", 1)
    monkeypatch.setattr(_shrink, "JOINT_ROWS", 1)
    monkeypatch.setattr(_shrink, "WINDOWED_ROWS", 1)
    np.testing.assert_array_equal(run(), apart)
    assert jnp.abs(apart).max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 60, 90])
def test_row_is_bitwise_the_same_among_any_number(rank):
    # Few rows, some, many, and those whose shrink goes by windows.
    counts = (1, 129, 2048, 8192, 16384)
    ranks = [[rank, rank], [16, 3], [rank, 0], [1, 16]]
    case = make_case(rows=counts[-1], ranks=ranks, d_in=4096, dtype="bfloat16")
    slots = np.random.default_rng(5).integers(-1, len(ranks), counts[-1])
    slots[0] = 0

    def run(count):
        y, x = (jnp.asarray(array[:count]) for array in (case.y, case.x))
        made = jnp.asarray(slots[:count], jnp.int32)
        return np.asarray(apply(y, x, case.pool, made, implementation="pallas_triton"))

    results = [run(count) for count in counts]
    for fewer, more in itertools.pairwise(results):
        np.testing.assert_array_equal(more[: len(fewer)], fewer)


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID, GPU])
def test_row_is_bitwise_the_same_alone_and_among_others(implementation):
    for dtype in ("float32", "bfloat16"):
        case = make_case(rows=48, ranks=MIXED_RANKS, dtype=dtype, d_in=264)
        slots = np.random.default_rng(1).integers(0, 7, 48).astype(np.int32)
        slots[20:44] = 4  # a segment of more than one tile
        together = run_case(case, slots, implementation)
        for block_rows in (32, 64):
            wide = run_case(case, slots, implementation, block_rows=block_rows)
            np.testing.assert_array_equal(wide, together)
        for row in (0, 5, 21, 43, 47):
            alone = apply(
                jnp.asarray(case.y[row : row + 1]),
                jnp.asarray(case.x[row : row + 1]),
                case.pool,
                jnp.asarray(slots[row : row + 1]),
                implementation=implementation,
            )
            np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


@pytest.mark.parametrize("implementation", ["xla", GPU])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("d_in", "d_out", "rank"), [(64, 512, 16), (4096, 64, 20), (4096, 1024, 16)]
)
def test_row_alone_at_several_widths(d_in, d_out, rank, dtype, implementation):
    # A batch of one tile must sum as one of several does.
    case = make_case(
        rows=5, ranks=[[rank]] * 3, dtype=dtype, d_in=d_in, d_outs=(d_out,)
    )
    slots = np.asarray([0, 1, 2, 1, 0], np.int32)
    together = run_case(case, slots, implementation)
    y, x = jnp.asarray(case.y), jnp.asarray(case.x)
    for row in range(5):
        here = slice(row, row + 1)
        alone = apply(
            y[here],
            x[here],
            case.pool,
            jnp.asarray(slots[here]),
            implementation=implementation,
        )
        np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize(("d_in", "d_outs"), [(4096, (4096, 1024, 1024)), (8, (8,))])
@pytest.mark.parametrize("rows", [1, 33, 1024, 8192])
def test_large_gpu(d_in, d_outs, rows):
    ranks = [[r] * len(d_outs) for r in (16, 8, 64, 5)]
    case = make_case(rows=rows, ranks=ranks, dtype="bfloat16", d_in=d_in, d_outs=d_outs)
    slots = np.random.default_rng(2).integers(-1, 4, rows).astype(np.int32)
    for block_rows in (16, 64):
        actual = run_case(case, slots, "pallas_triton", block_rows=block_rows)
        assert_near(actual, case.expected(slots), "bfloat16")


@pytest.mark.parametrize("implementation", ["xla", GPU])
def test_many_rows(implementation):
    # 8192 rows of d_in = d_out = 8, rank 512.
    case = make_case(rows=8192, ranks=[[512], [3]], d_in=8, d_outs=(8,))
    slots = np.random.default_rng(3).integers(-1, 2, 8192).astype(np.int32)
    actual = run_case(case, slots, implementation)
    np.testing.assert_allclose(actual, case.expected(slots), rtol=1e-5, atol=3e-5)


# Of 110 rows a pass has more tiles than take turns at once.
@pytest.mark.parametrize("rows", [9, 110])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_and_several_adapters_a_row(implementation, rows):
    case = make_case(rows=rows, ranks=[[16, 8], [4, 20], [32, 32]])
    rng = np.random.default_rng(4)
    slots = rng.integers(-1, 3, (rows, 2)).astype(np.int32)
    weights = rng.random((rows, 2)).astype(np.float32)
    actual = run_case(case, slots, implementation, weights=jnp.asarray(weights))
    case.y = case.expected(slots[:, 0], weights[:, 0])
    assert_near(actual, case.expected(slots[:, 1], weights[:, 1]), "float32")


@pytest.mark.parametrize(
    ("num_tiles", "num_programs", "at_once"),
    [(1, 6, 8), (3, 5, 8), (8, 1, 8), (11, 1, 8), (16, 7, 8), (29, 6, 8), (9, 4, 3)],
)
def test_programs_of_eight_tiles_take_turns(num_tiles, num_programs, at_once):
    programs = jnp.arange(num_tiles * num_programs, dtype=jnp.int32)
    tile, own = place_of_program(programs, num_tiles, num_programs, at_once)
    assert list(zip(tile.tolist(), own.tolist(), strict=True)) == [
        (one, own)
        for first in range(0, num_tiles, at_once)
        for own in range(num_programs)
        for one in range(first, min(first + at_once, num_tiles))
    ]


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID, GPU])
def test_expand_scale_bias_residual(implementation):
    case = make_case(rows=35, ranks=[[16, 8], [4, 20], [0, 0]])
    rng = np.random.default_rng(5)
    slots = rng.integers(-1, 3, 35).astype(np.int32)
    d_out = case.pool.d_out
    scale, bias = rng.standard_normal((2, 3, d_out)).astype(np.float32)
    residual = rng.standard_normal((35, d_out)).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="names")
    def run(names):
        segments = segment_metadata(
            jnp.asarray(slots), num_slots=3, implementation=implementation
        )
        options = {"scale": scale, "bias": bias, "residual": residual}
        options = {name: jnp.asarray(options[name]) for name in names}
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        v = shrink(x, case.pool, segments, implementation=implementation)
        return expand(
            y, v, case.pool, segments, implementation=implementation, **options
        )

    busy = (slots >= 0)[:, None]
    base = case.expected(slots)
    scaled = np.where(busy, base * scale[slots], base)
    expected = {
        (): base,
        ("residual",): base + residual,
        ("scale",): scaled,
        ("bias",): np.where(busy, base + bias[slots], base),
        ("scale", "bias", "residual"): (
            np.where(busy, scaled + bias[slots], scaled) + residual
        ),
    }
    for names, value in expected.items():
        np.testing.assert_allclose(run(names), value, rtol=1e-5, atol=2e-5)
