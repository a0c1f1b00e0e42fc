import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_jax.pallas_kernels import segment_metadata
from punica_jax.pallas_kernels.shapes import POPULARITIES, segment_sizes


def check(segments, slots, weights=None):
    """Assert what `Segments` promises, against plain loops over `slots`."""
    rows, num_slots = len(slots), segments.num_slots
    order = np.asarray(segments.rows[0])
    known = np.where((slots >= 0) & (slots < num_slots), slots, num_slots)
    np.testing.assert_array_equal(order, np.argsort(known, kind="stable"))
    sorted_slots = np.where(known == num_slots, -1, known)[order]
    np.testing.assert_array_equal(segments.slots[0], sorted_slots)
    if weights is not None:
        np.testing.assert_array_equal(segments.weights[0], weights[order])
    bounds = np.asarray(segments.bounds[0])
    for slot in range(num_slots):
        members = order[bounds[slot] : bounds[slot + 1]]
        np.testing.assert_array_equal(members, np.flatnonzero(known == slot))
    covered = []
    for slot, first, end in zip(
        np.asarray(segments.tile_slot[0]),
        np.asarray(segments.tile_first[0]),
        np.asarray(segments.tile_end[0]),
        strict=True,
    ):
        assert 0 <= end - first <= segments.block_rows
        if first == end:
            assert slot == -1
            continue
        assert set(sorted_slots[first:end]) == {slot}
        covered += range(first, end)
    assert covered == list(range(rows))
    # No more tiles than the sizes need, and none between them that is not needed.
    is_used = np.asarray(segments.tile_end > segments.tile_first)[0]
    used = int(is_used.sum())
    assert is_used[:used].all()
    sizes = np.bincount(known, minlength=num_slots + 1)
    assert used == sum(-(-size // segments.block_rows) for size in sizes)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("rows", [1, 7, 33, 133])
@pytest.mark.parametrize("num_slots", [6, 300])
def test_metadata(implementation, rows, num_slots):
    build = jax.jit(
        lambda slots, weights: segment_metadata(
            slots, weights, num_slots=num_slots, implementation=implementation
        )
    )
    rng = np.random.default_rng(rows)
    draws = [rng.integers(-1, num_slots, rows) for _ in range(4)]
    draws += [np.full(rows, -1), np.full(rows, 5), np.full(rows, 0)]
    draws += [rng.integers(-3, num_slots + 3, rows)]  # out of range is idle
    draws += [rng.choice([2, num_slots - 1], rows)]  # slots far apart
    for slots in draws:
        slots = slots.astype(np.int32)
        weights = rng.random(rows).astype(np.float32)
        check(build(slots, weights), slots, weights)


@given(data=st.data())
@settings(max_examples=60)
def test_metadata_property(data):
    slots = np.asarray(
        data.draw(st.lists(st.integers(-1, 4), min_size=40, max_size=40)), np.int32
    )
    segments = segment_metadata(
        jnp.asarray(slots), num_slots=5, block_rows=16, implementation="xla"
    )
    check(segments, slots)


@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("rows", [512, 1023, 1024, 1025, 8193])
@pytest.mark.parametrize("block_rows", [16, 64])
def test_metadata_long(implementation, rows, block_rows):
    rng = np.random.default_rng(rows)
    slots = rng.integers(-1, 40, rows).astype(np.int32)
    segments = segment_metadata(
        jnp.asarray(slots),
        num_slots=40,
        block_rows=block_rows,
        implementation=implementation,
    )
    check(segments, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 32, 133, 512, 1023, 1025, 8192, 8193])
def test_metadata_gpu(rows):
    rng = np.random.default_rng(rows)
    for num_slots in (1, 32, 1000):
        slots = rng.integers(-1, num_slots, rows).astype(np.int32)
        weights = rng.random(rows).astype(np.float32)
        segments = segment_metadata(
            jnp.asarray(slots),
            jnp.asarray(weights),
            num_slots=num_slots,
            implementation="pallas_triton",
        )
        check(segments, slots, weights)


def test_several_passes():
    slots = np.asarray([[0, 2], [1, -1], [-1, 0], [0, 1]], np.int32)
    for implementation in ("xla", "pallas_interpret"):
        segments = segment_metadata(
            jnp.asarray(slots), num_slots=3, implementation=implementation
        )
        assert segments.num_passes == 2
        np.testing.assert_array_equal(segments.slots, [[0, 0, 1, -1], [0, 1, 2, -1]])
        np.testing.assert_array_equal(segments.rows, [[0, 3, 1, 2], [2, 3, 0, 1]])


@pytest.mark.parametrize(
    ("slots", "options", "message"),
    [
        (jnp.zeros((2, 2, 2), jnp.int32), {}, r"i32\[rows\] or i32\[rows, k\]"),
        (jnp.zeros((0,), jnp.int32), {}, r"at least 1, got \(0,\)"),
        (jnp.zeros((3, 0), jnp.int32), {}, r"at least 1, got \(3, 0\)"),
        (jnp.zeros((3,), jnp.float32), {}, "signed integers, got float32"),
        (jnp.zeros((3,), jnp.int32), {"block_rows": 24}, "power of two .* got 24"),
        (jnp.zeros((3,), jnp.int32), {"num_slots": 0}, "at least 1, got 0"),
        (jnp.zeros((3,), jnp.int32), {"num_slots": 4.0}, "an integer of .* got 4.0"),
        (jnp.zeros((3,), jnp.int32), {"num_slots": "4"}, "an integer of .* got '4'"),
        (jnp.zeros((3,), jnp.int32), {"block_rows": "16"}, "power of two .* got '16'"),
        (
            jnp.zeros((3,), jnp.int32),
            {"weights": jnp.ones((2,))},
            r"shape of slots \(3,\), got \(2,\)",
        ),
        (
            jnp.zeros((3,), jnp.int32),
            {"implementation": "cuda"},
            "implementation must be one of .* got 'cuda'",
        ),
    ],
)
def test_bad_arguments(slots, options, message):
    with pytest.raises(ValueError, match=message):
        segment_metadata(slots, **{"num_slots": 2, **options})


def test_slots_of_any_kind():
    plain = [1, -1, 1]
    for slots in (plain, np.array(plain), jnp.asarray(plain)):
        segments = segment_metadata(slots, num_slots=2)
        np.testing.assert_array_equal(segments.rows, [[0, 2, 1]])


def test_weights_of_any_kind():
    for weights in ([0.5, 2], np.array([0.5, 2]), jnp.asarray([0.5, 2])):
        segments = segment_metadata([1, 0], weights, num_slots=2)
        np.testing.assert_array_equal(segments.weights, [[2, 0.5]])


def test_popularity_is_punicas():
    assert segment_sizes("skewed", 64) == [1, 1, 2, 3, 5, 7, 11, 17, 17]
    assert segment_sizes("uniform", 32) == [6, 6, 5, 5, 5, 5]
    for popularity in POPULARITIES:
        for rows in (1, 2, 7, 64, 133):
            sizes = segment_sizes(popularity, rows)
            assert sum(sizes) == rows and min(sizes) >= 1
    with pytest.raises(ValueError, match="got 'zipf'"):
        segment_sizes("zipf", 3)  # pyright: ignore[reportArgumentType]
