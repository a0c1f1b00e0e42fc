"""A few rows' shrink and expand in one launch: the bits of two, whoever has what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    LoraPool,
    _expand,
    _pair,
    _shrink,
    lora,
    segment_metadata,
)
from punica_jax.pallas_kernels._expand_tile import ExpandTile
from punica_jax.pallas_kernels._sgmv_config import (
    MAX_PROJECT_ROWS,
    Crowd,
    ExpandConfig,
)
from tests.attention_cases import assert_same
from tests.sgmv_cases import make_case, rarely
from tests.warpgroup_cases import in_second_layer

INTERPRET = "pallas_interpret"
GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
BOTH = pytest.mark.parametrize("implementation", [INTERPRET, GPU])
GRID = pytest.param(INTERPRET, marks=pytest.mark.grid)
GRID_BOTH = pytest.mark.parametrize("implementation", [GRID, GPU])
D_OUTS = (136, 72)
# Modules without a page, with one and several; an adapter of nothing.
RANKS = [[16, 16], [64, 5], [0, 33], [40, 0], [0, 0], [3, 64]]


def operands_of(rows, *, dtype="bfloat16", d_outs=D_OUTS, ranks=RANKS, slots=None):
    """Return y, x, a pool whose layer is the second of two, and the rows' slots."""
    ranks = [own[: len(d_outs)] for own in ranks]
    case = make_case(rows=rows, ranks=ranks, d_in=1096, d_outs=d_outs, dtype=dtype)
    if slots is None:
        slots = np.random.default_rng(rows).integers(-1, len(ranks), rows)
    pool = in_second_layer(case.pool, first_count=1)
    slots = jnp.asarray(slots, jnp.int32)
    return jnp.asarray(case.y), jnp.asarray(case.x), pool, slots


def segments_of(slots, implementation, weights=None, **options):
    slots = slots if weights is None else slots[:, None]
    return segment_metadata(
        slots,
        weights,
        num_slots=len(RANKS),
        implementation=implementation,
        **options,
    )


def in_one(y, x, pool, segments, *, implementation):
    # Anew: what was compiled with other constants of the module is not this.
    launch = _pair.shrink_and_expand.__wrapped__
    return launch(y, x, pool, segments, interpret=implementation == INTERPRET)


def in_two(y, x, pool, segments, *, implementation):
    options = {"interpret": implementation == INTERPRET}
    v = _shrink.shrink.__wrapped__(x, pool, segments, **options)
    return _expand.expand.__wrapped__(y, v, pool, segments, **options)


def check_bits(y, x, pool, segments, implementation):
    operands = y, x, pool, segments
    actual = in_one(*operands, implementation=implementation)
    assert_same(actual, in_two(*operands, implementation=implementation))


@BOTH
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (21, "bfloat16"),
        (MAX_PROJECT_ROWS, "float32"),
        pytest.param(1, "bfloat16", marks=pytest.mark.grid),
        pytest.param(1, "float32", marks=pytest.mark.grid),
        pytest.param(21, "float32", marks=pytest.mark.grid),
        pytest.param(MAX_PROJECT_ROWS, "bfloat16", marks=pytest.mark.grid),
    ],
)
def test_bits_are_those_of_two_launches(rows, dtype, implementation):
    y, x, pool, slots = operands_of(rows, dtype=dtype)
    segments = segments_of(slots, implementation)
    assert _pair.fits(segments)
    run = functools.partial(lora, implementation=implementation)
    actual = jax.jit(run)(y, x, pool, segments)
    assert_same(actual, in_two(y, x, pool, segments, implementation=implementation))
    assert not np.array_equal(actual, y) or rows == 1


@BOTH
def test_short_launches_give_the_bits_of_others(implementation, monkeypatch):
    y, x, pool, slots = operands_of(21)
    segments = segments_of(slots, implementation)
    run = functools.partial(in_one, y, x, pool, segments, implementation=implementation)
    assert _pair._is_short(pool, segments, _pair._config(pool, segments))
    short = run()
    monkeypatch.setattr(_pair, "_MOST_SHORT_TILES", 0)
    assert not _pair._is_short(pool, segments, _pair._config(pool, segments))
    assert_same(run(), short)


def test_which_launches_are_short():
    def is_short(rows, num_slots, max_rank, block_rows=16, d_out=4096):
        pool = LoraPool(
            a=jax.ShapeDtypeStruct((1, 1, 16, 4096), jnp.bfloat16),
            b=jax.ShapeDtypeStruct((1, 16, d_out), jnp.bfloat16),
            page_table=jax.ShapeDtypeStruct((num_slots, max_rank // 16), jnp.int32),
            num_pages=jax.ShapeDtypeStruct((num_slots, 1), jnp.int32),
            d_outs=(d_out,),
        )
        slots = jnp.zeros(rows, jnp.int32)
        segments = segment_metadata(slots, num_slots=num_slots, implementation="xla")
        segments = dataclasses.replace(segments, block_rows=block_rows)
        return _pair._is_short(pool, segments, _pair._config(pool, segments))

    assert is_short(1, 64, 16) and is_short(8, 64, 64) and is_short(64, 4, 64)
    assert not is_short(9, 64, 16) and not is_short(8, 64, 128)
    # Wider tiles are fewer, but their copies would not fit a smaller GPU's memory.
    assert not is_short(64, 4, 16, block_rows=32)
    # Eight of many columns may be a crowd.
    assert not is_short(8, 64, 64, d_out=49152)


@GRID_BOTH
@pytest.mark.parametrize("block_rows", [32, 128])
def test_wide_tiles(block_rows, implementation):
    y, x, pool, slots = operands_of(64)
    segments = segments_of(slots, implementation, block_rows=block_rows)
    check_bits(y, x, pool, segments, implementation)


@GRID_BOTH
@pytest.mark.parametrize("slots", [[-1] * 19, [4] * 19, [1] * 40, list(range(6)) * 4])
def test_whoever_shares_what(slots, implementation):
    y, x, pool, slots = operands_of(len(slots), slots=slots)
    segments = segments_of(slots, implementation)
    check_bits(y, x, pool, segments, implementation)


@GRID_BOTH
@pytest.mark.parametrize("d_outs", [(136,), (1024, 136)])
def test_weights_and_tiles_of_many_rows(d_outs, implementation):
    y, x, pool, slots = operands_of(33, d_outs=d_outs)
    weights = jnp.linspace(0.5, 2, 33, dtype=jnp.float32)[:, None]
    segments = segments_of(slots, implementation, weights, block_rows=32)
    check_bits(y, x, pool, segments, implementation)


# Of 656 columns, five blocks and a part, a program of a crowd takes three.
WIDE = (656, 72)


@pytest.fixture
def crowd(monkeypatch):
    """A crowd from five tiles on, where a tile has three programs; by half blocks."""
    monkeypatch.setattr(_pair, "_LEAST_PROGRAMS", 5 * 3)
    monkeypatch.setattr(_pair, "_MAX_CROWD_BLOCK_N", 64)
    monkeypatch.setattr(_pair, "_FEW_COLUMNS", 700)


def crowds():
    """Yield 64 rows' slots, and of how many tiles they are."""
    rng = np.random.default_rng(1)
    slots = [0], [0, 1, 3, 4], [0, 1, 2, 3, 4], range(-1, 6)
    for some, num_tiles in zip(slots, (4, 4, 5, 6), strict=True):
        yield jnp.asarray(rng.permutation(np.resize(some, 64)), jnp.int32), num_tiles


@BOTH
@pytest.mark.parametrize(
    ("dtype", "d_outs", "ranks", "weighted"),
    [
        ("bfloat16", WIDE, RANKS, False),
        pytest.param("bfloat16", (768, 128), RANKS, True, marks=pytest.mark.grid),
        pytest.param("float16", WIDE, [[16, 5]] * 6, True, marks=pytest.mark.grid),
    ],
)
def test_crowds(crowd, dtype, d_outs, ranks, weighted, implementation):
    y, x, pool, _ = operands_of(64, dtype=dtype, d_outs=d_outs, ranks=ranks)
    weights = jnp.linspace(0.5, 2, 64, dtype=jnp.float32)[:, None] if weighted else None
    for slots, _ in crowds():
        segments = segments_of(slots, implementation, weights)
        block_n = 128 if pool.page_table.shape[1] == 1 else 64
        expected = Crowd(shares=3, least_tiles=5, block_n=block_n)
        assert _pair._config(pool, segments).crowd == expected
        check_bits(y, x, pool, segments, implementation)


@GRID_BOTH
def test_crowds_of_few_columns(crowd, implementation):
    # Six blocks, of which a program takes two.
    y, x, pool, _ = operands_of(64, d_outs=(656,))
    for slots, _ in crowds():
        segments = segments_of(slots, implementation)
        expected = Crowd(shares=2, least_tiles=5, block_n=64)
        assert _pair._config(pool, segments).crowd == expected
        check_bits(y, x, pool, segments, implementation)


def test_where_a_crowd_begins(crowd, monkeypatch):
    def wait(tile, lanes):
        del lanes
        tile.wait()

    monkeypatch.setattr(ExpandTile, "_add_in_turn", wait)
    # Modules of a page each, so that a crowd adds nothing now.
    y, x, pool, _ = operands_of(64, d_outs=WIDE, ranks=[[16, 16]] * 6)
    for slots, num_tiles in crowds():
        segments = segments_of(slots, INTERPRET)
        assert int((segments.tile_slot >= 0).sum()) == num_tiles
        if num_tiles < 5:
            check_bits(y, x, pool, segments, INTERPRET)
        else:
            assert_same(in_one(y, x, pool, segments, implementation=INTERPRET), y)


def test_how_many_tiles_are_a_crowd():
    def least_tiles(d_outs, max_rank, dtype="bfloat16"):
        case = make_case(rows=64, ranks=[[1] * len(d_outs)], d_in=16, d_outs=d_outs)
        pool = dataclasses.replace(
            case.pool,
            a=jnp.zeros((1, len(d_outs), 16, 16), dtype),
            b=jnp.zeros((1, 16, sum(d_outs)), dtype),
            page_table=jnp.zeros((64, max_rank // 16), jnp.int32),
        )
        segments = segments_of(jnp.zeros(64, jnp.int32), "xla")
        crowd = _pair._config(pool, segments).crowd
        return crowd and (crowd.shares, crowd.least_tiles, crowd.block_n)

    assert least_tiles((4096,), 16) == (2, 37, 128)
    assert least_tiles((4096,), 64) == (2, 25, 128)
    assert least_tiles((4096,) * 3, 64) == (3, 13, 128)
    assert least_tiles((11008,), 16) == (3, 27, 256)
    assert least_tiles((11008,) * 2, 64) == (3, 14, 128)
    assert least_tiles((4096,), 16, "float32") is None
    assert least_tiles((4096,), 128) is None


@pytest.mark.parametrize(("block_n", "windowed"), [(96, False), (64, True)])
def test_blocks_that_a_crowd_cannot_have(block_n, windowed):
    crowd = Crowd(shares=3, least_tiles=5, block_n=block_n)
    with pytest.raises(ValueError, match="must divide a program's columns"):
        ExpandConfig(block_n=128, num_warps=4, windowed=windowed, crowd=crowd)


@BOTH
def test_launches_of_one_program_share_their_segments(implementation):
    y, x, pool, slots = operands_of(21)
    several = [dataclasses.replace(pool, b=pool.b * scale) for scale in (1, -3)]

    @functools.partial(jax.jit, static_argnames="launch")
    def run(y, x, pools, slots, launch):
        segments = segments_of(slots, implementation)
        add = functools.partial(launch, implementation=implementation)
        apart = [add(y, x, pool, segments) for pool in pools]
        for pool in pools:
            y = add(y, x, pool, segments)
        return [*apart, y]

    expected = run(y, x, several, slots, in_two)
    for _ in range(20 if implementation == "pallas_triton" else 1):
        actual = run(y, x, several, slots, in_one)
        for own, other in zip(actual, expected, strict=True):
            assert_same(own, other)


@BOTH
def test_batches_do_not_meet(implementation):
    y, x, pool, slots = operands_of(21)
    segments = segments_of(slots, implementation)
    ys, xs = jnp.stack([y, y + 1, -y]), jnp.stack([x, -x, 2 * x])
    run = functools.partial(in_one, implementation=implementation)
    actual = jax.vmap(run, in_axes=(0, 0, None, None))(ys, xs, pool, segments)
    alone = [run(*own, pool, segments) for own in zip(ys, xs, strict=True)]
    assert_same(actual, jnp.stack(alone))


@pytest.mark.grid
def test_each_row_of_a_batch_has_segments_of_its_own():
    y, x, pool, slots = operands_of(21)
    many = jnp.stack([slots, slots[::-1], slots * 0])

    def loss(x, slots):
        segments = segments_of(slots, "xla")
        out = lora(y, x, pool, segments, implementation=INTERPRET)
        return jnp.square(out.astype(jnp.float32)).sum()

    run = jax.value_and_grad(loss)
    actual, gradients = jax.vmap(run, in_axes=(None, 0))(x, many)
    for number, slots in enumerate(many):
        expected, gradient = run(x, slots)
        np.testing.assert_allclose(actual[number], expected, rtol=1e-6)
        np.testing.assert_allclose(
            np.float32(gradients[number]), np.float32(gradient), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize(
    ("dtype", "d_outs", "ranks", "weighted"),
    [
        ("bfloat16", D_OUTS, RANKS, False),
        rarely("bfloat16", D_OUTS, [[5, 16]] * 6, True),
        rarely("float32", (136,), RANKS, True),
        rarely("bfloat16", (136,), [[128], [16], [0], [100], [33], [17]], False),
        rarely("bfloat16", WIDE, RANKS, False),
        ("float16", WIDE, [[5, 16]] * 6, True),
    ],
)
def test_counts_are_zeros_again(crowd, monkeypatch, dtype, d_outs, ranks, weighted):
    """Whoever waits does so once, or a count would stay, and the next launch err."""
    y, x, pool, slots = operands_of(40, dtype=dtype, d_outs=d_outs, ranks=ranks)
    weights = jnp.linspace(0.5, 2, 40)[:, None] if weighted else None
    segments = segments_of(slots, "xla", weights)
    seen = look_at_launches(monkeypatch)
    actual = _pair._launch(y, x, pool, segments, interpret=True)
    assert_same(actual, in_two(y, x, pool, segments, implementation=INTERPRET))
    [(_, counts)] = seen
    assert counts.shape[0] == segments.num_tiles and not counts.any()


def test_short_launches_read_and_write_their_own_pages_alone(monkeypatch):
    """Also of a module without one; and what is no page's number may look like one."""
    case = make_case(rows=8, ranks=RANKS, d_in=1096, d_outs=D_OUTS, dtype="bfloat16")
    # As if slot 1's first page were the pool's.
    swap = np.arange(case.pool.a.shape[0])
    own = int(case.pool.page_table[1, 0])
    swap[[0, own]] = own, 0
    numbers = np.asarray(case.pool.page_table)
    is_page = numbers < len(swap)
    table = jnp.asarray(np.where(is_page, swap[numbers * is_page], 0), jnp.int32)
    pool = dataclasses.replace(case.pool, a=case.pool.a[swap], b=case.pool.b[swap])
    pool = dataclasses.replace(pool, page_table=table)
    slots = jnp.asarray([1, 2, 0, 1, 3, -1, 5, 4], jnp.int32)
    segments = segments_of(slots, "xla")
    y, x = jnp.asarray(case.y), jnp.asarray(case.x)
    seen = look_at_launches(monkeypatch)
    actual = _pair._launch(y, x, pool, segments, interpret=True)
    assert_same(actual, in_two(y, x, pool, segments, implementation=INTERPRET))
    [(v, counts)] = seen
    known = segments.slots[0]
    pages = jnp.where(known[:, None] >= 0, pool.num_pages[jnp.maximum(known, 0)], 0)
    used = np.arange(pool.max_rank) < 16 * np.asarray(pages)[:, :, None]
    used = np.broadcast_to(used.reshape(len(known), -1), v.shape)
    np.testing.assert_array_equal(np.isnan(v), ~used)  # NaN is what was not written
    assert not counts.any()


def look_at_launches(monkeypatch):
    """Return a list that gets each launch's v, and the counts that it leaves."""
    call, seen = _pair.pallas_call, []

    def call_and_look(kernel, *, out_shape, input_output_aliases, **options):
        def counting(*refs):
            *refs, counts_ref = refs
            kernel(*refs[:4], counts_ref, *refs[5:])

        def run(*operands):
            counts = jax.ShapeDtypeStruct(operands[4].shape, jnp.int32)
            run = call(
                counting,
                out_shape=[*out_shape, counts],
                input_output_aliases=input_output_aliases | {4: len(out_shape)},
                **options,
            )
            *outs, counts = run(*operands)
            seen.append((np.asarray(outs[1]), np.asarray(counts)))
            return outs

        return run

    monkeypatch.setattr(_pair, "pallas_call", call_and_look)
    return seen


@GRID_BOTH
@pytest.mark.parametrize(
    ("d_outs", "ranks"),
    [((11008,), [[16]] * 6), ((136,), [[128], [16], [0], [100], [33], [17]])],
)
def test_wide_modules_and_many_pages(d_outs, ranks, implementation):
    y, x, pool, slots = operands_of(12, d_outs=d_outs, ranks=ranks)
    segments = segments_of(slots, implementation)
    check_bits(y, x, pool, segments, implementation)


def test_more_rows_take_two_launches():
    fits = []
    for rows in (MAX_PROJECT_ROWS, MAX_PROJECT_ROWS + 1):
        segments = segments_of(jnp.zeros(rows, jnp.int32), "xla")
        fits.append(_pair.fits(segments))
    several = segment_metadata(jnp.zeros((4, 2), jnp.int32), num_slots=2)
    assert (*fits, _pair.fits(several)) == (True, False, False)
