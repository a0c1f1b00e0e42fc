"""Gate and up in one launch: whose rows are where, and on a GPU their bits."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from punica_jax.pallas_kernels import _gated_product, lora_gated, segment_metadata
from punica_jax.pallas_kernels._fused import Shrunk, gated_expand
from punica_jax.pallas_kernels._sgmv_config import ExpandConfig
from punica_jax.pallas_kernels._shrink import shrink
from punica_jax.pallas_kernels._window_adapters import (
    adapter_operands,
    slots_of_windows,
)
from tests.attention_cases import assert_same
from tests.sgmv_cases import make_case
from tests.warpgroup_cases import H200, HOPPER, in_second_layer

NUM_SLOTS = 6
ROWS = 768
# Slot and rows: prompts that begin anywhere, whole windows, rows alone, idle ones.
RUNS = [(0, 128), (1, 5), (3, 300), (-1, 3), (2, 128), (1, 1), (4, 1), (1, 1), (3, 70)]
# Of gate and up; pages of 16.
RANKS = [[16, 16], [7, 0], [0, 16], [40, 40], [3, 33], [48, 16]]


def slots_of(runs, rows=ROWS):
    slots = [slot for slot, count in runs for _ in range(count)][:rows]
    return np.array(slots + [5] * (rows - len(slots)), np.int32)


slots_of_all = jax.jit(slots_of_windows)


@hypothesis.given(
    runs=st.lists(
        st.tuples(
            st.integers(-1, NUM_SLOTS - 1),
            st.one_of(st.integers(1, 40), st.integers(1, 300)),
        ),
        max_size=24,
    ),
    shuffled=st.booleans(),
)
@hypothesis.settings(max_examples=80)
def test_windows_have_the_slots_of_their_rows(runs, shuffled):
    slots = slots_of(runs)
    if shuffled:
        slots = np.random.default_rng(0).permutation(slots)
    segments = segment_metadata(jnp.asarray(slots), num_slots=NUM_SLOTS)
    row_slots, entries, windows, counts = map(np.asarray, slots_of_all(segments))
    np.testing.assert_array_equal(row_slots, slots)
    np.testing.assert_array_equal(
        np.asarray(segments.rows[0])[entries], np.arange(ROWS)
    )
    for own, found, count in zip(slots.reshape(-1, 128), windows, counts, strict=True):
        assert len(set(found[:count])) == count
        assert set(found[:count]) == set(own[own >= 0])


def test_windows_may_have_a_slot_for_each_row():
    slots = jnp.arange(ROWS, dtype=jnp.int32) % 200
    segments = segment_metadata(slots, num_slots=200)
    _, _, windows, counts = map(np.asarray, slots_of_all(segments))
    np.testing.assert_array_equal(counts, 128)
    np.testing.assert_array_equal(windows, slots.reshape(-1, 128))


def make_layer(slots, *, width=384, dtype="bfloat16", weighted=False, d_in=64):
    """Rows and weights of small integers: their sums are exact, in any order."""
    rng = np.random.default_rng(1)
    case = make_case(
        rows=len(slots), ranks=RANKS, d_in=d_in, d_outs=(width, width), dtype=dtype
    )
    weights = rng.uniform(0.5, 2, (len(slots), 1))
    segments = segment_metadata(
        jnp.asarray(slots[:, None]),
        jnp.asarray(weights, jnp.float32) if weighted else None,
        num_slots=NUM_SLOTS,
    )
    x = jnp.asarray(rng.integers(-2, 3, (len(slots), d_in)), dtype)
    weight = jnp.asarray(rng.integers(-1, 2, (2 * width, d_in)), dtype)
    return x, weight, case.pool, segments


def of_one_launch(x, weight, pool, segments):
    return _gated_product.gated(x, weight, (pool, segments))


def of_two(x, weight, pool, segments, *, interpret=False):
    """XLA's product, and the expand by tiles."""
    config = ExpandConfig(block_n=32, num_warps=4)

    def run():
        y = jnp.dot(x, weight.T, preferred_element_type=jnp.float32).astype(x.dtype)
        v = shrink(x, pool, segments, interpret=interpret)
        shrunk = Shrunk(v, pool, segments)
        return gated_expand(y, shrunk, config=config, interpret=interpret)

    return jax.jit(run)()


@pytest.mark.gpu
@HOPPER
class TestBits:
    """They are those of two launches, of every row."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("width", [128, 384, 3072])
    def test_ranks_and_runs(self, width, dtype):
        layer = make_layer(slots_of(RUNS), width=width, dtype=dtype)
        assert_same(of_one_launch(*layer), of_two(*layer))

    @pytest.mark.parametrize(
        "slots",
        [
            np.full(ROWS, -1, np.int32),
            np.arange(ROWS, dtype=np.int32) % (NUM_SLOTS + 1) - 1,
            np.random.default_rng(0).integers(-1, NUM_SLOTS, ROWS, dtype=np.int32),
            np.zeros(256, np.int32),
            np.arange(5 * 2048 + 512, dtype=np.int32) // 700 % NUM_SLOTS,
        ],
        ids=["idle", "in turn", "shuffled", "one", "several parts"],
    )
    def test_slots(self, slots):
        layer = make_layer(slots)
        assert_same(of_one_launch(*layer), of_two(*layer))

    def test_weights(self):
        layer = make_layer(slots_of(RUNS), weighted=True)
        assert_same(of_one_launch(*layer), of_two(*layer))

    def test_splits(self):
        x, weight, pool, segments = make_layer(slots_of(RUNS), d_in=4096)
        assert len(jax.eval_shape(shrink, x, pool, segments)) > 1
        layer = x, weight, pool, segments
        assert_same(of_one_launch(*layer), of_two(*layer))

    def test_another_layer(self):
        x, weight, pool, segments = make_layer(slots_of(RUNS))
        layered = in_second_layer(pool, first_count=3)
        expected = of_two(x, weight, pool, segments)
        assert_same(of_one_launch(x, weight, layered, segments), expected)

    def test_without_adapters(self):
        x, weight, _, _ = make_layer(slots_of(RUNS))
        y = jnp.dot(x, weight.T, preferred_element_type=jnp.float32).astype(x.dtype)
        assert_same(_gated_product.gated(x, weight), gated_expand(y, None))

    @pytest.mark.parametrize("shuffled", [False, True])
    def test_nan_stays_in_its_rows(self, shuffled):
        slots = slots_of(RUNS)
        if shuffled:
            slots = np.random.default_rng(0).permutation(slots)
        x, weight, pool, segments = make_layer(slots)
        # What a module has no pages for is not written of v: it may be anything.
        pages = np.repeat(-(-np.array(RANKS) // 16), 3, axis=1) > np.tile(range(3), 2)
        entry_slots = np.asarray(segments.slots[0])
        written = np.repeat(
            pages[entry_slots] & (entry_slots >= 0)[:, None], 16, axis=1
        )
        v = jnp.where(jnp.asarray(written), shrink(x, pool, segments), jnp.nan)
        b = pool.b.at[np.asarray(pool.page_table[3, :3])].set(jnp.nan)
        bad = dataclasses.replace(pool, b=b)
        operands = adapter_operands(v, bad, segments)
        actual = _gated_product._launch(x, weight, operands)
        expected = of_two(x, weight, pool, segments)
        own = slots == 3
        assert np.isnan(np.asarray(actual[own], np.float32)).all()
        assert_same(actual[~own], expected[~own])


@HOPPER
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "expected"),
    [
        (16384, 384, "bfloat16", True),
        (16384, 384, "float16", True),
        (4096, 384, "bfloat16", True),
        (2048, 384, "bfloat16", False),
        (4224, 384, "bfloat16", False),
        (16384, 320, "bfloat16", False),
        (16384, 384, "float32", False),
    ],
)
def test_many_rows_go_to_warp_groups(rows, width, dtype, expected):
    case = make_case(rows=2, ranks=RANKS, d_in=64, d_outs=(width, width), dtype=dtype)
    slots, x = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 64), dtype)
    weight = jnp.zeros((2 * width, 64), dtype)

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
        assert ("lora_gated_expand" in text) != expected


@HOPPER
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"lora": False}, True),
        ({"bias": True}, False),
        ({"residual": True}, False),
        ({"passes": 2}, False),
        ({"d_in": 40}, False),
        ({"implementation": "xla"}, False),
    ],
    ids=str,
)
def test_what_it_lacks_goes_elsewhere(change, expected):
    rows, width, d_in = 4096, 128, change.get("d_in", 64)
    case = make_case(
        rows=2, ranks=RANKS, d_in=d_in, d_outs=(width, width), dtype="bfloat16"
    )
    slots = jnp.zeros((rows, change.get("passes", 1)), jnp.int32)
    segments = segment_metadata(slots, num_slots=NUM_SLOTS)
    options: dict = {
        "lora": (case.pool, segments) if change.get("lora", True) else None,
        "implementation": change.get("implementation", "pallas_triton"),
    }
    if "bias" in change:
        options["bias"] = jnp.zeros(2 * width, jnp.bfloat16)
    if "residual" in change:
        options["residual"] = jnp.zeros((rows, 2 * width), jnp.bfloat16)
    weight = jnp.zeros((2 * width, d_in), jnp.bfloat16)
    x = jnp.zeros((rows, d_in), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda x: lora_gated(x, weight, **options)).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("@mosaic_gpu" in text) == expected


@HOPPER
def test_gradients_under_shard_map_with_its_checks():
    case = make_case(rows=2, ranks=RANKS, d_in=64, d_outs=(128, 128), dtype="bfloat16")
    mesh = AbstractMesh(
        (2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200.abstract_device
    )
    weight = jnp.zeros((256, 64), jnp.bfloat16)

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

        operands = jnp.zeros((rows, 64), jnp.bfloat16), jnp.zeros(rows, jnp.int32)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(jax.grad(loss)).trace(*operands)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return "@mosaic_gpu" in text, text.count("all_reduce")

    assert count(2 * 4096) == (True, count(2 * 2048)[1])
    assert not count(2 * 2048)[0]
