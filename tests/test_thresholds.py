"""The limits that filters cut at, against sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from punica_jax.pallas_kernels import kth_largest, nucleus, order_keys
from punica_jax.pallas_kernels._digit_buckets import (
    LEAST_KEY,
    Tile,
    Weighing,
    folded,
)
from punica_jax.pallas_kernels._digit_config import DigitConfig
from punica_jax.pallas_kernels._digit_search import largest_reaching

WIDTH = 33
VALUES = st.one_of(
    st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, 1.0])
)
ROWS = arrays(np.float32, (2, WIDTH), elements=VALUES)
every = pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("pallas_interpret", marks=pytest.mark.grid),
        pytest.param("pallas_triton", marks=pytest.mark.gpu),
    ],
)
# Vocabularies of one value, part of a chunk, one chunk, and some; every interpreted
# search of a shape compiles for two seconds.
EVERY_SIZE = [
    *(("xla", vocab) for vocab in (1, 8, 33, 600, 4096, 9001)),
    ("pallas_interpret", 5000),
    *(
        pytest.param("pallas_interpret", vocab, marks=pytest.mark.grid)
        for vocab in (1, 8, 33, 600, 4096, 9001)
    ),
    # Of so many the rounded sums leave a limit between two values.
    pytest.param("pallas_interpret", 128256, marks=pytest.mark.slow),
    *(
        pytest.param("pallas_triton", vocab, marks=pytest.mark.gpu)
        for vocab in (1, 8, 33, 600, 4096, 9001, 128256)
    ),
]
every_size = pytest.mark.parametrize(("implementation", "vocab"), EVERY_SIZE)

_keys = jax.jit(order_keys)


@functools.cache
def _kth(implementation):
    return jax.jit(functools.partial(kth_largest, implementation=implementation))


@functools.cache
def _nucleus(implementation):
    return jax.jit(functools.partial(nucleus, implementation=implementation))


def _awkward(vocab):
    """Rows of every awkward kind, most of them with ties."""
    rng = np.random.default_rng(vocab)
    normal = rng.normal(size=(4, vocab)).astype(np.float32) * 3
    some_left = np.where(rng.random(vocab) < 0.1, normal[0], -np.inf)
    one_left = np.full(vocab, -np.inf)
    some_left[vocab // 2] = one_left[vocab - 1] = -2.5
    zeros = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    rows = [
        *normal,
        -np.abs(normal[0]),
        np.round(normal[1]),
        np.asarray(jnp.asarray(normal[2]).astype(jnp.bfloat16).astype(jnp.float32)),
        np.full(vocab, -7.25),
        zeros,
        some_left,
        one_left,
        normal[0] * 1e-39,  # subnormal
        normal[1] * 1e37,
        np.sign(normal[2]) * np.finfo(np.float32).max,
    ]
    return np.stack(rows).astype(np.float32)


def _weights(row, temperature, limit=-np.inf):
    """What a row's values weigh, in float64."""
    row = row.astype(np.float64)
    scaled = np.maximum((row - row.max()) / np.float64(temperature), -1e3)
    return np.where(row >= limit, np.exp(scaled), 0)


@given(values=ROWS)
def test_keys_are_ordered_as_values(values):
    keys = np.asarray(_keys(values))
    for row, key in zip(values, keys, strict=True):
        np.testing.assert_array_equal(key[:, None] < key, row[:, None] < row)
        np.testing.assert_array_equal(key[:, None] == key, row[:, None] == row)
    assert keys.min() > LEAST_KEY


@given(values=ROWS, k=st.integers(1, WIDTH))
def test_kth_largest_is_that_of_sorting(values, k):
    keys = np.asarray(_keys(values))
    found = np.asarray(_kth("xla")(values, np.full(2, k, np.int32)))
    np.testing.assert_array_equal(found, np.sort(keys, axis=1)[:, -k])


@every_size
def test_kth_largest_of_awkward_rows(implementation, vocab):
    values = _awkward(vocab)
    keys = np.asarray(_keys(values))
    for k in {1, 2, 7, vocab // 2 + 1, vocab - 1, vocab}:
        if not 1 <= k <= vocab:
            continue
        found = _kth(implementation)(values, np.full(len(values), k, np.int32))
        np.testing.assert_array_equal(found, np.sort(keys, axis=1)[:, -k])


@every
def test_what_is_off_cuts_nothing(implementation):
    values = _awkward(100)[:6]
    k = np.array([0, -1, 101, 2**30, 100, 3], np.int32)
    found = np.asarray(_kth(implementation)(values, k))
    assert (found[:4] == LEAST_KEY).all()
    keys = np.sort(_keys(values), axis=1)
    assert (found[4], found[5]) == (keys[4, 0], keys[5, -3])
    share = np.array([1.0, 1.5, 1.0, 0.5, 1.0, 1e-45], np.float32)
    found = np.asarray(_nucleus(implementation)(values, share, np.ones(6, np.float32)))
    assert (found[[0, 1, 2, 4]] == LEAST_KEY).all()
    # A share that float32 takes for nothing is the most likely one's.
    assert found[5] == keys[5, -1] and LEAST_KEY < found[3] <= keys[3, -1]


@given(
    # Of two values, one weighs 1 and one nothing: every sum is exact.
    heavy=arrays(bool, (2, WIDTH)),
    share=st.integers(1, 15),
)
def test_nucleus_of_exact_weights(heavy, share):
    heavy[:, 0] = True
    order = np.arange(WIDTH, dtype=np.float32)
    # Distances of 1e30 weigh nothing, those that float32 drops weigh 1.
    values = np.where(heavy, order, -1e30 - 1e25 * order).astype(np.float32)
    hot = np.full(2, 1e20, np.float32)
    found = np.asarray(_nucleus("xla")(values, np.full(2, share / 16, np.float32), hot))
    for row, key, limit in zip(values, np.asarray(_keys(values)), found, strict=True):
        count = -(-int((row >= 0).sum()) * share // 16)
        assert limit == np.sort(key)[-count]


@every_size
@pytest.mark.parametrize("k", [None, pytest.param(20, marks=pytest.mark.slow)])
def test_nucleus_is_that_of_sorting(implementation, vocab, k):
    values = _awkward(vocab)
    rows = len(values)
    keys = np.asarray(_keys(values))
    floor = None
    if k is not None:
        floor = np.sort(keys, axis=1)[:, -min(k, vocab)].copy()
    for share, temperature in [(0.9, 0.8), (0.5, 2.0), (0.999, 1.0), (1e-6, 1.0)]:
        found = np.asarray(
            _nucleus(implementation)(
                values,
                np.full(rows, share, np.float32),
                np.full(rows, temperature, np.float32),
                floor=floor,
            )
        )
        for i, (row, key, limit) in enumerate(zip(values, keys, found, strict=True)):
            weights = _weights(row, temperature)
            if floor is not None:
                weights = np.where(key >= floor[i], weights, 0)
            # The values from it on reach the share, those beyond the least do not.
            limit = key[key >= limit].min()
            reached = weights[key >= limit].sum() / weights.sum()
            beyond = weights[key > limit].sum() / weights.sum()
            slack = 1e-5 * np.float32(share)
            assert beyond < np.float32(share) + slack, (share, i)
            assert reached >= np.float32(share) - slack, (share, i)


def _values_of(keys):
    """The values whose `order_keys` these are."""
    bits = np.where(keys < 0, LEAST_KEY - keys, keys)
    return bits.astype(np.int64).astype(np.int32).view(np.float32)


@pytest.mark.parametrize(
    "implementation",
    ["xla", "pallas_interpret", pytest.param("pallas_triton", marks=pytest.mark.gpu)],
)
def test_nucleus_from_a_floor_at_any_distance(implementation):
    # Of so hot a row all values weigh 1, and every sum is exact.
    rng = np.random.default_rng(8)
    top = int(_keys(jnp.float32(8)[None])[0])
    spans = [0, 1, 31, 32, 2**10, 2**15 - 1, 2**19, 2**23, 2**26 + 5, 2 * top, 40, 40]
    keys = top - rng.integers(0, np.array(spans)[:, None] + 1, (len(spans), 600))
    keys[:, 1], keys[:, 2] = np.subtract(top, spans), top
    # Subnormal numbers, of which the greatest is taken for 0 where these are flushed.
    keys = np.concatenate([rng.integers(-(2**19), 2**22, (1, 600)), keys])
    floor = keys.min(axis=1)
    keys[:, 3::3] -= rng.integers(1, 2**20, (len(keys), 199))
    values = _values_of(keys)
    np.testing.assert_array_equal(_keys(values), keys)
    share = rng.integers(1, 16, len(keys)).astype(np.float32) / 16
    share[-2:] = 1.0, 1.5  # off
    find = _nucleus(implementation)
    hot = np.full(len(keys), 1e38, np.float32)
    found = np.asarray(find(values, share, hot, floor=floor.astype(np.int32)))
    for key, least, part, limit in zip(keys, floor, share, found, strict=True):
        kept = np.sort(key[key >= least])
        count = int(np.ceil(kept.size * np.float64(part)))
        assert limit == (least if part >= 1 else kept[-count]), part


@pytest.mark.parametrize("live", [0, 1, 5, 40])
def test_fold_has_what_lanes_have(live):
    # Of 4 tiles of 16 lanes, all inside of the row but the last 8 values.
    rng = np.random.default_rng(live)
    values = rng.normal(size=64).astype(np.float32)
    digits = np.where(
        rng.random(64) < 0.5, -rng.integers(1, 9, 64), 8 + values.argsort()
    )
    digits[-8:] = 3
    here = rng.permutation(56)[:live]
    digits[here] = rng.integers(0, 8, live)
    inside = (np.arange(64) < 56).reshape(4, 1, 16)
    tiles = [
        (jnp.asarray(digit, jnp.int32), Tile(jnp.asarray(value), jnp.asarray(mask)))
        for digit, value, mask in zip(
            digits.reshape(4, 1, 16), values.reshape(4, 1, 16), inside, strict=True
        )
    ]
    (digit, (value, mask)), fits = folded(tiles, 8)
    lanes = here % 16
    assert bool(fits) == (np.unique(lanes).size == live)
    assert mask is None
    if fits:
        idle = np.setdiff1d(np.arange(16), lanes)
        assert np.all(digit[0, idle] >= 8)
        np.testing.assert_array_equal(digit[0, lanes], digits[here])
        np.testing.assert_array_equal(value[0, lanes], values[here])


@every
@pytest.mark.parametrize("temperature", [1e38, 3.4e38])
def test_a_huge_temperature_leaves_what_weighs_enough(implementation, temperature):
    # The greatest one weighs 1, the others e^-3.4 or e^-1 each, or nothing.
    values = np.float32([[3.4e38, -np.inf, -np.inf, -np.inf], [3.4e38, 0, 1, 2]])
    share, hot = np.float32([0.5, 0.4]), np.full(2, temperature, np.float32)
    found = _nucleus(implementation)(values, share, hot)
    np.testing.assert_array_equal(found, _keys(values)[:, 0])


@every
@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_leaves_the_largest(implementation, temperature):
    values = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32) * 30
    values[2, :50] = -np.inf
    share = np.full(3, 0.999, np.float32)
    found = _nucleus(implementation)(values, share, np.full_like(share, temperature))
    np.testing.assert_array_equal(found, np.asarray(_keys(values)).max(axis=1))


@every
def test_neighbours_change_no_bit(implementation):
    rng = np.random.default_rng(4)
    width = 128256 if implementation == "pallas_triton" else 600
    values = (rng.normal(size=(5, width)) * 3).astype(np.float32)
    # Whatever they hold: also what no weights come of.
    values[3], values[4, 7] = -np.inf, np.nan
    k = np.array([9, 400, 0, 3, 1], np.int32)
    share = np.array([0.3, 0.95, 0.7, 0.5, 0.2], np.float32)
    temperature = np.array([0.7, 1.5, 1.0, 0.0, 1.0], np.float32)
    find, cut = _kth(implementation), _nucleus(implementation)
    floor = np.asarray(find(values, k))
    together = np.asarray(cut(values, share, temperature, floor=floor))
    for i in range(3):
        one = slice(i, i + 1)
        assert find(values[one], k[one])[0] == floor[i]
        alone = cut(values[one], share[one], temperature[one], floor=floor[one])
        assert alone[0] == together[i]


@every
def test_one_value_and_many(implementation):
    values = jnp.zeros((1, 1)), jnp.full((1, 5000), -jnp.inf)
    for row in values:
        limit = _kth(implementation)(row, jnp.full(1, row.shape[1], jnp.int32))
        assert limit[0] == np.asarray(_keys(row))[0, 0]


@pytest.mark.gpu
def test_a_vocabulary_of_128k():
    rng = np.random.default_rng(5)
    values = (rng.normal(size=(32, 128256)) * 2.5).astype(np.float32)
    values[1::2] = np.round(values[1::2], 1)
    k = np.tile(np.array([1, 50, 1000, 128256], np.int32), 8)
    ordered = np.sort(np.asarray(_keys(values)), axis=1)
    found = np.asarray(_kth("pallas_triton")(values, k))
    np.testing.assert_array_equal(found, ordered[np.arange(32), -k])
    share = np.linspace(0.1, 0.95, 32, dtype=np.float32)
    temperature = np.linspace(0.5, 2, 32, dtype=np.float32)
    limits = [
        np.asarray(_nucleus(name)(values, share, temperature, floor=found))
        for name in ("xla", "pallas_triton")
    ]
    # Sums in other orders may end a token sooner or later.
    for row, *both in zip(ordered, *limits, strict=True):
        first, second = (np.searchsorted(np.unique(row), key) for key in both)
        assert abs(first - second) <= 2


CONFIGS = [
    # Sixteen steps of a thread; launches that wait and that read ahead.
    DigitConfig(digits=(3, 4, 5, 5, 5, 5, 5), chunk=2048, num_warps=1, num_eager=1),
    *(
        pytest.param(config, marks=pytest.mark.grid)
        for config in (
            DigitConfig(digits=(6, 6, 6, 6, 6, 2), chunk=32, num_eager=0),
            DigitConfig(digits=(1, 3, 4) * 4, chunk=64, num_eager=12),
            DigitConfig(digits=(1,) * 32, chunk=128, num_warps=8),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_any_cut_finds_the_same(config):
    assert config.shifts[-1] == 0 and config.shifts[0] + config.digits[0] == 32
    values = _awkward(200)[:11]  # no subnormals: a CPU takes their distances for 0
    rows = len(values)
    keys = np.sort(np.asarray(_keys(values)), axis=1)
    search = jax.jit(
        functools.partial(largest_reaching, name="cut", config=config, interpret=True)
    )
    k = np.linspace(1, 200, rows).astype(np.int32)
    found = search(values, k)
    np.testing.assert_array_equal(found, keys[np.arange(rows), -k])
    tiny = Weighing(jnp.asarray(values.max(axis=1)), jnp.full(rows, 1e-45))
    found = search(values, np.full(rows, 0.5, np.float32), tiny)
    np.testing.assert_array_equal(found, keys[:, -1])
    # From floors on, of so hot a row that all weigh 1.
    values = np.random.default_rng(6).normal(size=values.shape).astype(np.float32)
    keys = np.sort(np.asarray(_keys(values)), axis=1)
    floor = keys[np.arange(rows), -k]
    hot = Weighing(values.max(axis=1), np.full(rows, 1e38, np.float32), floor)
    found = search(values, np.full(rows, 0.5, np.float32), hot)
    np.testing.assert_array_equal(found, keys[np.arange(rows), -((k + 1) // 2)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"digits": (4,) * 7}, "digits must be 1 to 6 bits each, 32 in all, got .4, 4"),
        ({"digits": (7, 5, 5, 5, 5, 5)}, "digits must be 1 to 6 bits each, .* got .7"),
        ({"digits": (*(4,) * 8, 0)}, "digits must be 1 to 6 bits each, .* 4, 0."),
        ({"chunk": 3000}, "chunk must be a power of two, got 3000"),
        ({"chunk": 65536}, "chunk must be at most 32768, got 65536"),
        ({"num_warps": 0}, "num_warps must be a power of two, got 0"),
    ],
)
def test_a_config_that_no_kernel_has(fields, message):
    with pytest.raises(ValueError, match=message):
        DigitConfig(**{"digits": (4,) * 8} | fields)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_operands_that_do_not_fit(implementation):
    values, ones = np.ones((3, 9), np.float32), np.ones(3, np.float32)
    for bad, got in (
        (values[0], r"float32\[9\]"),
        (values[:0], r"float32\[0, 9\]"),
        (values.astype(np.int32), r"int32\[3, 9\]"),
    ):
        with pytest.raises(ValueError, match=f"values must be float32.* got {got}"):
            _kth(implementation)(bad, np.ones(3, np.int32))
    for bad in (np.ones(2, np.int32), ones):
        with pytest.raises(ValueError, match=r"k must be int32\[3\], got"):
            _kth(implementation)(values, bad)
    find = functools.partial(nucleus, implementation=implementation)
    given = {"share": ones, "temperature": ones, "floor": np.ones(3, np.int32)}
    for name, good in given.items():
        message = rf"{name} must be {good.dtype}\[3\], got {good.dtype}\[2\]"
        with pytest.raises(ValueError, match=message):
            find(values, **given | {name: good[:2]})
