"""Sampling: the greedy rule, the distribution, and what a row's numbers depend on."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.sampling import kept_tokens, sample

LOGITS = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -3.0], np.float32)


def _sample(logits, temperature, seeds, positions):
    """`sample` under jit on numpy values, scalars spread over the rows."""
    rows = len(logits)
    return np.asarray(
        jax.jit(sample)(
            jnp.asarray(logits, jnp.float32),
            jnp.asarray(np.broadcast_to(np.float32(temperature), rows)),
            jnp.asarray(np.broadcast_to(np.uint32(seeds), rows)),
            jnp.asarray(np.broadcast_to(np.int32(positions), rows)),
        )
    )


def _softmax(logits, temperature):
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def _fits(tokens, probabilities):
    """Tell whether draws agree with a distribution: chi-square, upper 0.1 % point."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    assert expected[kept].min() >= 5  # the statistic's own condition
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation: 2 % above the exact 20.5 at 5 degrees.
    spread = 2 / (9 * freedom)
    return statistic < freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


class TestGreedy:
    def test_takes_the_largest(self):
        logits = np.random.default_rng(0).normal(size=(16, 101))
        tokens = _sample(logits, 0, 7, 0)
        np.testing.assert_array_equal(
            tokens, logits.astype(np.float32).argmax(1).astype(np.int32)
        )
        assert tokens.dtype == np.int32

    def test_tie_goes_to_the_first(self):
        logits = np.array([[1, 3, 3, 3], [2, 2, 2, 2], [-np.inf, 0, -0.0, 0]])
        np.testing.assert_array_equal(_sample(logits, 0, 0, 0), [1, 0, 1])
        # Of halves: in the second alone, in the first behind it, and in an odd row.
        logits = np.array([[1, 2, 3, 3], [0, 3, 3, 1]])
        np.testing.assert_array_equal(_sample(logits, 0, 0, 0), [2, 1])
        logits = np.array([[-np.inf] * 3, [0, -1, 2]])
        np.testing.assert_array_equal(_sample(logits, 0, 0, 0), [0, 2])

    def test_beside_sampled_rows_is_the_same(self):
        # The first two differ by a subnormal, which the CPU flushes to zero.
        close = np.array([[1.2e-38, 1.3e-38, 0.0], [1e8, 1e8 + 8, 0]], np.float32)
        alone = _sample(close, 0, 3, 5)
        mixed = _sample(np.concatenate([close, close]), np.array([0, 0, 1, 50]), 3, 5)
        np.testing.assert_array_equal(alone, close.argmax(1))
        np.testing.assert_array_equal(mixed[:2], alone)


class TestDistribution:
    # The seeds are fixed, so a test that passes keeps passing.
    @pytest.mark.parametrize("temperature", [0.8, 1.0, 3.0])
    def test_is_softmax_over_positions(self, temperature):
        tokens = _sample(np.tile(LOGITS, (16384, 1)), temperature, 11, np.arange(16384))
        assert _fits(tokens, _softmax(LOGITS, temperature))

    def test_is_softmax_over_seeds(self):
        tokens = _sample(np.tile(LOGITS, (16384, 1)), 1.0, np.arange(16384), 3)
        assert _fits(tokens, _softmax(LOGITS, 1.0))

    def test_wide_vocabulary(self):
        logits = np.random.default_rng(1).normal(size=64)
        tokens = _sample(np.tile(logits, (16384, 1)), 1.5, 4, np.arange(16384))
        assert _fits(tokens, _softmax(logits, 1.5))

    def test_large_common_offset_changes_nothing(self):
        # 2**24 holds the integers of LOGITS exactly; adding noise to it would not.
        logits = np.array([0, 2, -2, 4, 6, -4], np.float32) / 2
        offset = logits * 2 + 2.0**23
        plain = _sample(np.tile(logits * 2, (4096, 1)), 2.0, 5, np.arange(4096))
        moved = _sample(np.tile(offset, (4096, 1)), 2.0, 5, np.arange(4096))
        np.testing.assert_array_equal(plain, moved)

    def test_minus_infinity_is_never_drawn(self):
        logits = LOGITS.copy()
        logits[3] = -np.inf
        tokens = _sample(np.tile(logits, (16384, 1)), 1.0, 3, np.arange(16384))
        assert _fits(tokens, _softmax(logits, 1.0))

    @pytest.mark.parametrize("vocab", [2, 3, 33])
    def test_halves_of_any_vocabulary(self, vocab):
        logits = np.linspace(-0.5, 0.5, vocab, dtype=np.float32)
        tokens = _sample(np.tile(logits, (16384, 1)), 1.0, 1, np.arange(16384))
        assert _fits(tokens, _softmax(logits, 1.0))

    def test_tokens_of_one_hash_are_independent(self):
        # Of four tokens 0 and 2 share hashes, and so do 1 and 3: who wins between the
        # first two says nothing about who is ahead of whom between the other two.
        low = np.array([0, -np.inf, 0, -np.inf], np.float32)
        first, second = (
            _sample(np.tile(logits, (16384, 1)), 1.0, 8, np.arange(16384))
            for logits in (low, low[::-1])
        )
        assert _fits(first + (second - 1) // 2, np.full(4, 0.25))

    @pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
    def test_one_token_left(self, temperature):
        logits = np.full((256, 33), -np.inf)
        logits[:, 20] = -1e30
        tokens = _sample(logits, temperature, 2, np.arange(256))
        np.testing.assert_array_equal(tokens, np.full(256, 20, np.int32))

    def test_largest_magnitudes(self):
        big = np.finfo(np.float32).max
        logits = np.tile([-big, 0.0, big, -np.inf], (256, 1))
        np.testing.assert_array_equal(
            _sample(logits, 100.0, 0, np.arange(256)), np.full(256, 2, np.int32)
        )

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
    def test_tiny_temperature_is_greedy(self, temperature):
        logits = np.random.default_rng(2).normal(size=(64, 50)) * 30
        np.testing.assert_array_equal(
            _sample(logits, temperature, 9, np.arange(64)),
            logits.astype(np.float32).argmax(1).astype(np.int32),
        )


class TestRandomNumbers:
    @pytest.mark.parametrize("vocab", [2, 100])
    def test_are_those_of_whole_hashes(self, vocab):
        # What jax.random makes of a key where a hash's two words are two numbers.
        rng = np.random.default_rng(2)
        logits = rng.normal(size=(64, vocab)).astype(np.float32)
        with jax.threefry_partitionable(False):
            keys = [
                jax.random.fold_in(jax.random.key(9, impl="threefry2x32"), i)
                for i in range(64)
            ]
            noise = np.stack([jax.random.gumbel(key, (vocab,)) for key in keys])
        expected = (logits + np.float32(0.7) * noise).argmax(1)
        np.testing.assert_array_equal(
            _sample(logits, 0.7, 9, np.arange(64)), expected.astype(np.int32)
        )

    def test_depend_on_seed_and_position_alone(self):
        rng = np.random.default_rng(3)
        logits = rng.normal(size=(13, 40)).astype(np.float32)
        seeds = rng.integers(0, 2**32, 13, np.uint32)
        positions = rng.integers(0, 4096, 13).astype(np.int32)
        temperature = rng.uniform(0.5, 2, 13).astype(np.float32)
        whole = _sample(logits, temperature, seeds, positions)
        for row in range(13):
            one = slice(row, row + 1)
            alone = _sample(logits[one], temperature[one], seeds[one], positions[one])
            np.testing.assert_array_equal(alone, whole[one])
        order = rng.permutation(13)
        padded = [
            np.concatenate([array[order], np.zeros((3, *array.shape[1:]), array.dtype)])
            for array in (logits, temperature, seeds, positions)
        ]
        np.testing.assert_array_equal(_sample(*padded)[:13], whole[order])

    def test_change_with_position_and_with_seed(self):
        logits = np.zeros((64, 1000), np.float32)
        by_position = _sample(logits, 1.0, 1, np.arange(64))
        by_seed = _sample(logits, 1.0, np.arange(64), 1)
        # 64 draws of 1000 collide a few times; a constant would give 1.
        assert len(set(by_position.tolist())) > 50
        assert len(set(by_seed.tolist())) > 50
        assert by_position[1] == by_seed[1]

    def test_do_not_follow_the_configured_generator(self):
        args = (
            jnp.zeros((8, 1000)),
            jnp.full(8, 1.0),
            jnp.ones(8, jnp.uint32),
            jnp.arange(8, dtype=jnp.int32),
        )
        plain = sample(*args)
        # Not under jit, whose cache does not know of this setting.
        with jax.default_prng_impl("rbg"):
            np.testing.assert_array_equal(sample(*args), plain)

    def test_seed_uses_all_32_bits(self):
        logits = np.zeros((2, 100000), np.float32)
        low, high = _sample(logits, 1.0, np.array([1, 2**31 + 1]), 0)
        assert low != high

    def test_same_without_jit(self):
        args = (
            jnp.tile(jnp.asarray(LOGITS), (32, 1)),
            jnp.full(32, 1.0),
            jnp.zeros(32, jnp.uint32),
            jnp.arange(32, dtype=jnp.int32),
        )
        np.testing.assert_array_equal(sample(*args), jax.jit(sample)(*args))


def _kept_by_sorting(logits, temperature, k, p, min_p):
    """The filters' definition on one row, by sorting; None where float32 may differ."""
    logits = np.asarray(logits, np.float64)
    weights = _softmax(logits, temperature)
    keep = np.ones(len(logits), bool)
    if k > 0:
        keep = logits >= np.sort(logits)[-min(k, len(logits))]
    if p < 1:
        rest = np.where(keep, weights, 0) / weights[keep].sum()
        # A token stays if those that are more likely do not hold the share yet.
        above = np.array([rest[logits > value].sum() for value in logits])
        if (np.abs(above - p) < 1e-5 * p).any():
            return None
        keep &= above < p
    ratio = weights / weights.max()
    if (np.abs(ratio - min_p) < 1e-5 * min_p)[ratio < 1].any():
        return None
    return keep & (ratio >= min_p)


def _rows(vocab):
    """Rows of every awkward kind."""
    rng = np.random.default_rng(8)
    normal = rng.normal(size=(8, vocab)).astype(np.float32) * 3
    some_left = np.where(rng.random((4, vocab)) < 0.1, normal[:4], -np.inf)
    some_left[:, 7] = 0.5
    one_left = np.full((1, vocab), -np.inf)
    one_left[0, 3] = -2
    parts = [
        normal,
        np.asarray(jnp.asarray(normal).astype(jnp.bfloat16).astype(jnp.float32)),
        np.round(normal),  # many ties
        np.zeros((2, vocab)),
        np.full((2, vocab), -7.25),
        some_left,
        one_left,
        normal[:3] * 1e-7,
        normal[:3] * 1e-39,  # subnormal
        normal[:3] * 1e30,
        normal[:3] + 1e6,
    ]
    return np.concatenate(parts).astype(np.float32)


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (5000, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.9, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (20, 0.8, 0.0),
    (20, 0.8, 0.05),
    (3, 0.3, 0.9),
    (0, 1e-45, 0.0),
]


@jax.jit
def _kept(logits, temperature, k, p, m):
    return kept_tokens(logits, temperature, top_k=k, top_p=p, min_p=m)


class TestFilters:
    @pytest.mark.parametrize("temperature", [0.7, 2.0])
    def test_keep_what_sorting_keeps(self, temperature):
        logits = _rows(101)
        unsure = 0
        t = np.full(len(logits), temperature, np.float32)
        for k, p, m in FILTERS:
            filters = (np.int32(k), np.float32(p), np.float32(m))
            kept = _kept(logits, t, *(np.broadcast_to(f, len(logits)) for f in filters))
            for row, actual in zip(logits, np.asarray(kept), strict=True):
                expected = _kept_by_sorting(row, temperature, k, np.float32(p), m)
                assert actual[row.argmax()]
                if expected is None:
                    unsure += 1
                    continue
                # Nobody draws a token without weight, whether a filter names it or not.
                alive = _softmax(row, temperature) > 1e-37
                np.testing.assert_array_equal(actual[alive], expected[alive])
        assert unsure < 0.05 * len(FILTERS) * len(logits)

    @pytest.mark.parametrize(
        "implementation",
        ["pallas_interpret", pytest.param("pallas_triton", marks=pytest.mark.gpu)],
    )
    def test_kernels_keep_what_plain_code_keeps(self, implementation):
        logits = _rows(101)
        rows = np.arange(len(logits))
        filters = {
            "top_k": (rows % 9 * 7).astype(np.int32),  # some off
            "top_p": np.float32([0.5, 0.83, 1.0, 0.97])[rows % 4],
            "min_p": np.float32([0.0, 0.02])[rows % 2],
        }
        temperature = np.float32([0.7, 1e-6, 2.0])[rows % 3]
        plain, kernels = (
            jax.jit(functools.partial(kept_tokens, implementation=name))(
                logits, temperature, **filters
            )
            for name in ("xla", implementation)
        )
        np.testing.assert_array_equal(kernels, plain)

    def test_a_share_that_float32_sums_hardly_reach(self):
        logits = np.random.default_rng(3).normal(size=_rows(101).shape) * 9
        logits = logits.astype(np.float32)
        one = np.ones(len(logits), np.float32)
        off = np.zeros(len(logits), np.int32)
        kept = np.asarray(_kept(logits, one, off, one - 2.0**-24, 0 * one))
        for row, keep in zip(logits, kept, strict=True):
            assert keep[row.argmax()] and _softmax(row, 1.0)[~keep].sum() < 1e-5

    def test_a_vocabulary_of_128k(self):
        rng = np.random.default_rng(9)
        logits = rng.normal(size=(2, 128256)).astype(np.float32) * 2
        logits[1] = np.round(logits[1], 1)
        kept = _kept(
            logits,
            np.ones(2, np.float32),
            np.array([1000, 30000], np.int32),
            np.array([0.7, 0.6], np.float32),
            np.array([0, 1e-3], np.float32),
        )
        for row, actual, k, p, m in zip(
            logits, np.asarray(kept), (1000, 30000), (0.7, 0.6), (0, 1e-3), strict=True
        ):
            order = np.argsort(-row, kind="stable")
            weights = _softmax(row, 1.0)
            within = row >= row[order[k - 1]]
            share = np.where(within, weights, 0)[order].cumsum() / weights[within].sum()
            last = row[order[np.searchsorted(share, p)]]
            expected = (row >= last) & (weights >= m * weights.max())
            # A float32 sum of 30000 weights may end a token sooner or later.
            assert abs(int(actual.sum()) - int(expected.sum())) <= 2
            assert (row[actual].min() >= row[~actual].max()) or m

    # One program for all of them, as an LLM has it.
    @pytest.mark.parametrize("filters", [FILTERS[i] for i in (2, 4, 5, 7, 9, 10)])
    def test_draws_are_the_renormalised_softmax(self, filters):
        k, p, m = filters
        logits = np.random.default_rng(10).normal(size=24).astype(np.float32) * 1.5
        logits[5] = logits[9]
        keep = _kept_by_sorting(logits, 1.3, k, p, m)
        expected = np.where(keep, _softmax(logits, 1.3), 0)
        rows = np.tile(logits, (16384, 1))
        tokens = _filtered(
            rows, 1.3, np.arange(16384), k, p, m, seed=FILTERS.index(filters)
        )
        expected /= expected.sum()
        # Where an unlikely token is kept, chi-square's condition wants them together.
        rare = (expected * 16384 < 5) & keep
        assert expected[rare].sum() < 0.01
        common = ~np.isin(tokens, np.flatnonzero(rare))
        expected[rare] = 0
        assert _fits(tokens[common], expected / expected.sum())

    def test_off_is_as_without(self):
        rng = np.random.default_rng(11)
        logits = np.tile(rng.normal(size=(1, 24)), (16384, 1)).astype(np.float32)
        plain = _sample(logits, 1.0, 6, np.arange(16384))
        for k in (0, -1, 24, 1000):
            off = _filtered(logits, 1.0, np.arange(16384), k, 1.0, 0.0, seed=6)
            np.testing.assert_array_equal(off, plain)

    def test_greedy_rows_take_the_largest(self):
        logits = np.random.default_rng(12).normal(size=(16384, 24)).astype(np.float32)
        tokens = _filtered(logits, 0.0, np.arange(16384), 3, 0.5, 0.1, seed=6)
        np.testing.assert_array_equal(tokens, logits.argmax(1))


def _filtered(logits, temperature, positions, k, p, m, *, seed):
    """`sample` with all filters, scalars spread over the rows."""
    rows = len(logits)
    filters = [
        np.broadcast_to(value, rows)
        for value in (np.int32(k), np.float32(p), np.float32(m))
    ]
    return np.asarray(
        _jitted(
            logits,
            np.full(rows, temperature, np.float32),
            np.full(rows, seed, np.uint32),
            positions.astype(np.int32),
            *filters,
        )
    )


@jax.jit
def _jitted(logits, temperature, seeds, positions, k, p, m):
    return sample(logits, temperature, seeds, positions, top_k=k, top_p=p, min_p=m)
