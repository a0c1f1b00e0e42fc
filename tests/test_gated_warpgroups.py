"""Gate and up for warp groups: their windows on the host, their bits on a GPU."""

import dataclasses
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from punica_jax.pallas_kernels import _gated_warpgroups, lora_gated, segment_metadata
from punica_jax.pallas_kernels._dispatch import has_warpgroups
from punica_jax.pallas_kernels._fused import Shrunk, gated_expand
from punica_jax.pallas_kernels._gated_warpgroups import _divided
from punica_jax.pallas_kernels._sgmv import shrink
from punica_jax.pallas_kernels._sgmv_config import ExpandConfig
from tests.attention_cases import assert_same
from tests.sgmv_cases import make_case

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
NUM_SLOTS = 6
ROWS = 776
# Slot and rows: prompts that begin anywhere, whole windows, rows alone, idle ones.
RUNS = [(0, 128), (1, 5), (3, 300), (-1, 3), (2, 128), (1, 1), (4, 1), (1, 1), (3, 70)]
# Of gate and up; pages of 16.
RANKS = [[16, 16], [7, 0], [0, 16], [40, 40], [3, 33], [48, 16]]


def slots_of(runs, rows=ROWS):
    slots = [slot for slot, count in runs for _ in range(count)][:rows]
    return np.array(slots + [5] * (rows - len(slots)), np.int32)


divided = jax.jit(_divided)


@hypothesis.given(
    runs=st.lists(
        st.tuples(
            st.integers(-1, NUM_SLOTS - 1),
            st.one_of(st.integers(1, 40), st.integers(1, 300)),
        ),
        max_size=24,
    )
)
@hypothesis.settings(max_examples=80, deadline=None)
def test_each_entry_is_in_a_window_or_a_tile(runs):
    slots = slots_of(runs)
    segments = segment_metadata(jnp.asarray(slots), num_slots=NUM_SLOTS)
    table, count, tile_end = divided(segments)
    assert int(count[0]) <= len(table)
    rows, entry_slots = np.asarray(segments.rows[0]), np.asarray(segments.slots[0])
    in_windows = []
    for slot, first, begin, end, entry in np.asarray(table)[: int(count[0])]:
        assert first % 8 == 0
        assert entry >= -7
        assert 0 <= begin < end <= 128
        for nth in range(begin, end):
            assert rows[entry + nth] == first + nth
            assert entry_slots[entry + nth] == slot
            in_windows.append(entry + nth)
    assert in_windows == sorted(set(in_windows))
    tiles = zip(
        np.asarray(segments.tile_first[0]), np.asarray(tile_end[0]), strict=True
    )
    in_tiles = {entry for first, end in tiles for entry in range(first, end)}
    assert in_tiles | set(in_windows) == set(range(ROWS))
    # Long runs are in windows, and a tile without others is empty.
    edges = np.flatnonzero((np.diff(entry_slots) != 0) | (np.diff(rows) != 1)) + 1
    all_runs = np.split(np.arange(ROWS), edges)
    long = {entry for run in all_runs if len(run) >= 16 for entry in run}
    assert set(in_windows) == long
    for first, end in zip(
        np.asarray(segments.tile_first[0]),
        np.asarray(segments.tile_end[0]),
        strict=True,
    ):
        own = set(range(first, end))
        assert own <= in_tiles if own - long else not own & in_tiles


def make_launch(slots, *, width=384, dtype="bfloat16", weighted=False, d_in=40):
    case = make_case(
        rows=len(slots), ranks=RANKS, d_in=d_in, d_outs=(width, width), dtype=dtype
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
    fits = mock.patch.object(_gated_warpgroups, "fits", lambda *_: True)
    with fits:
        return jax.jit(lambda: gated_expand(y, shrunk))()


def of_tiles(y, shrunk):
    config = ExpandConfig(block_n=32, num_warps=4)
    return jax.jit(lambda: gated_expand(y, shrunk, config=config))()


@pytest.mark.gpu
@pytest.mark.skipif(not has_warpgroups(), reason="warp groups need Hopper, JAX 0.11")
class TestBits:
    """They are those of the form for tiles, of every row."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("width", [128, 384, 3072])
    def test_ranks_and_runs(self, width, dtype):
        launch = make_launch(slots_of(RUNS), width=width, dtype=dtype)
        assert_same(of_warpgroups(*launch), of_tiles(*launch))

    @pytest.mark.parametrize(
        "slots",
        [
            np.full(ROWS, -1, np.int32),
            np.arange(ROWS, dtype=np.int32) % (NUM_SLOTS + 1) - 1,
            np.random.default_rng(0).integers(-1, NUM_SLOTS, ROWS, dtype=np.int32),
            np.zeros(8, np.int32),
            np.zeros(24, np.int32),
        ],
        ids=["idle", "in turn", "shuffled", "few", "one window"],
    )
    def test_slots(self, slots):
        launch = make_launch(slots)
        assert_same(of_warpgroups(*launch), of_tiles(*launch))

    def test_weights(self):
        launch = make_launch(slots_of(RUNS), weighted=True)
        assert_same(of_warpgroups(*launch), of_tiles(*launch))

    def test_splits(self):
        launch = make_launch(slots_of(RUNS), d_in=4096)
        assert len(launch[1].v) > 1
        assert_same(of_warpgroups(*launch), of_tiles(*launch))

    def test_another_layer(self):
        y, shrunk = make_launch(slots_of(RUNS))
        pool = shrunk.pool
        layered = dataclasses.replace(
            pool,
            a=jnp.concatenate([pool.a * jnp.nan, pool.a]),
            b=jnp.concatenate([pool.b * jnp.nan, pool.b]),
            num_pages=jnp.concatenate([pool.num_pages * 0 + 3, pool.num_pages]),
            layer=jnp.ones(1, jnp.int32),
        )
        second = Shrunk(shrunk.v, layered, shrunk.segments)
        assert_same(of_warpgroups(y, second), of_tiles(y, shrunk))

    def test_nan_stays_in_its_rows(self):
        slots = slots_of(RUNS)
        y, shrunk = make_launch(slots)
        # What a module has no pages for is not written of v: it may be anything.
        pages = np.repeat(-(-np.array(RANKS) // 16), 3, axis=1) > np.tile(range(3), 2)
        entry_slots = np.asarray(shrunk.segments.slots[0])
        written = np.repeat(
            pages[entry_slots] & (entry_slots >= 0)[:, None], 16, axis=1
        )
        v = jnp.where(jnp.asarray(written), shrunk.v, jnp.nan)
        b = shrunk.pool.b.at[np.asarray(shrunk.pool.page_table[3])].set(jnp.nan)
        bad = Shrunk(v, dataclasses.replace(shrunk.pool, b=b), shrunk.segments)
        expected, actual = of_tiles(y, shrunk), of_warpgroups(y, bad)
        own = slots == 3
        assert np.isnan(np.asarray(actual[own], np.float32)).all()
        assert_same(actual[~own], expected[~own])


@pytest.mark.skipif(not has_warpgroups(), reason="warp groups need Hopper, JAX 0.11")
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
    slots, x = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 8), dtype)
    weight = jnp.zeros((2 * width, 8), dtype)

    def run(x):
        segments = segment_metadata(
            slots, num_slots=NUM_SLOTS, implementation="pallas_triton"
        )
        return lora_gated(
            x, weight, (case.pool, segments), implementation="pallas_triton"
        )

    for x64 in (False, True):
        with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(H200):
            lowered = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        assert ("@mosaic_gpu" in text) == expected
        assert "lora_gated_expand" in text


@pytest.mark.skipif(not has_warpgroups(), reason="warp groups need Hopper, JAX 0.11")
def test_gradients_under_shard_map_with_its_checks():
    case = make_case(rows=2, ranks=RANKS, d_in=8, d_outs=(128, 128), dtype="bfloat16")
    mesh = AbstractMesh(
        (2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200.abstract_device
    )
    weight = jnp.zeros((256, 8), jnp.bfloat16)

    def count(rows):
        def layer(x, slots):
            segments = segment_metadata(
                slots, num_slots=NUM_SLOTS, implementation="pallas_triton"
            )
            h = lora_gated(
                x, weight, (case.pool, segments), implementation="pallas_triton"
            )
            assert jax.typeof(h).manual_axis_type.varying == {"x"}
            return h

        def loss(x, slots):
            sharded = jax.shard_map(
                layer, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x")
            )
            return jnp.square(sharded(x, slots).astype(jnp.float32)).sum()

        operands = jnp.zeros((rows, 8), jnp.bfloat16), jnp.zeros(rows, jnp.int32)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(jax.grad(loss)).trace(*operands)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return "@mosaic_gpu" in text, text.count("all_reduce")

    assert count(2 * 16384) == (True, count(2 * 8192)[1])
    assert not count(2 * 8192)[0]
