"""Gate and up for warp groups: their windows on the host, their bits on a GPU."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import segment_metadata
from punica_jax.pallas_kernels._dispatch import has_warpgroups
from punica_jax.pallas_kernels._fused import Shrunk, gated_expand
from punica_jax.pallas_kernels._gated_warpgroups import (
    _window_table,
    fits,
    warpgroup_gated,
)
from punica_jax.pallas_kernels._sgmv import shrink
from punica_jax.pallas_kernels._sgmv_config import ExpandConfig
from tests.sgmv_cases import make_case

NUM_SLOTS = 6
ROWS = 776
# Slot and rows: prompts that begin anywhere, whole windows, rows alone, idle ones.
RUNS = [(0, 128), (1, 5), (3, 300), (-1, 3), (2, 128), (1, 1), (4, 1), (1, 1), (3, 70)]
# Of gate and up; pages of 16.
RANKS = [[16, 16], [7, 0], [0, 16], [40, 40], [3, 33], [48, 16]]


def slots_of(runs, rows=ROWS):
    slots = [slot for slot, count in runs for _ in range(count)][:rows]
    return np.array(slots + [5] * (rows - len(slots)), np.int32)


window_table = jax.jit(_window_table)


@hypothesis.given(
    runs=st.lists(
        st.tuples(st.integers(-1, NUM_SLOTS - 1), st.integers(1, 300)), max_size=12
    )
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_windows_hold_each_entry_once(runs):
    slots = slots_of(runs)
    segments = segment_metadata(jnp.asarray(slots), num_slots=NUM_SLOTS)
    table, count = window_table(segments)
    rows, entry_slots = np.asarray(segments.rows[0]), np.asarray(segments.slots[0])
    seen = []
    for slot, first, begin, end, entry in np.asarray(table)[: int(count[0])]:
        assert first % 8 == 0
        assert entry >= -8
        assert 0 <= begin < end <= 128
        for nth in range(begin, end):
            assert rows[entry + nth] == first + nth
            assert entry_slots[entry + nth] == slot
            seen.append(entry + nth)
    assert seen == list(range(len(slots)))
    # Only what a run's length and its first row make necessary.
    first = np.append(0, np.flatnonzero(np.diff(slots)) + 1)
    last = np.append(first[1:], len(slots))
    assert int(count[0]) <= (-(-(last - first // 8 * 8) // 128)).sum()


def make_launch(slots, *, width=384, dtype="bfloat16", weighted=False):
    case = make_case(
        rows=len(slots), ranks=RANKS, d_in=40, d_outs=(width, width), dtype=dtype
    )
    weights = np.random.default_rng(1).uniform(0.5, 2, (len(slots), 1))
    segments = segment_metadata(
        jnp.asarray(slots[:, None]),
        jnp.asarray(weights, jnp.float32) if weighted else None,
        num_slots=NUM_SLOTS,
        implementation="pallas_triton",
    )
    v = shrink(jnp.asarray(case.x), case.pool, segments)
    return jnp.asarray(case.y), Shrunk(v, case.pool, segments)


def of_warpgroups(y, shrunk):
    return warpgroup_gated(y, shrunk.v, shrunk.pool, shrunk.segments)


def of_tiles(y, shrunk):
    config = ExpandConfig(block_n=32, num_warps=4)
    return jax.jit(lambda: gated_expand(y, shrunk, config=config))()


def bits(array):
    return np.asarray(array).view(np.uint16)


@pytest.mark.gpu
@pytest.mark.skipif(not has_warpgroups(), reason="warp groups need Hopper, JAX 0.11")
class TestBits:
    """They are those of the form for tiles, of every row."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("width", [128, 384, 3072])
    def test_ranks_and_runs(self, width, dtype):
        launch = make_launch(slots_of(RUNS), width=width, dtype=dtype)
        np.testing.assert_array_equal(
            bits(of_warpgroups(*launch)), bits(of_tiles(*launch))
        )

    @pytest.mark.parametrize(
        "slots",
        [
            np.full(ROWS, -1, np.int32),
            np.arange(ROWS, dtype=np.int32) % (NUM_SLOTS + 1) - 1,
            np.zeros(8, np.int32),
        ],
        ids=["idle", "mixed", "few"],
    )
    def test_slots(self, slots):
        launch = make_launch(slots)
        np.testing.assert_array_equal(
            bits(of_warpgroups(*launch)), bits(of_tiles(*launch))
        )

    def test_weights(self):
        launch = make_launch(slots_of(RUNS), weighted=True)
        np.testing.assert_array_equal(
            bits(of_warpgroups(*launch)), bits(of_tiles(*launch))
        )

    def test_nan_stays_in_its_rows(self):
        slots = slots_of(RUNS)
        y, shrunk = make_launch(slots)
        pages = np.asarray(shrunk.pool.page_table[3])
        b = shrunk.pool.b.at[pages].set(jnp.nan)
        v = jnp.where(jnp.isfinite(shrunk.v), shrunk.v, 0)
        bad = Shrunk(v, dataclasses.replace(shrunk.pool, b=b), shrunk.segments)
        expected, actual = of_warpgroups(y, shrunk), of_warpgroups(y, bad)
        own = slots == 3
        assert np.isnan(np.asarray(actual[own], np.float32)).all()
        np.testing.assert_array_equal(bits(actual)[~own], bits(expected)[~own])
        assert_near(expected, jax.nn.silu(y[:, :384]) * y[:, 384:], own=slots == -1)


def assert_near(actual, expected, own):
    actual, expected = (
        np.asarray(part, np.float32)[own] for part in (actual, expected)
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="need JAX 0.11")
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "expected"),
    [
        (16384, 384, "bfloat16", True),
        (16384, 384, "float16", True),
        (8192, 384, "bfloat16", False),
        (16388, 384, "bfloat16", False),
        (16384, 320, "bfloat16", False),
        (16384, 384, "float32", False),
    ],
)
def test_many_rows_go_to_warp_groups(rows, width, dtype, expected):
    case = make_case(rows=2, ranks=RANKS, d_in=8, d_outs=(width, width), dtype=dtype)
    segments = segment_metadata(jnp.zeros(2, jnp.int32), num_slots=NUM_SLOTS)
    y = jax.ShapeDtypeStruct((rows, 2 * width), jnp.dtype(dtype))
    assert fits(y, case.pool, segments) == expected
