"""Sampling: the greedy rule, the distribution, and what a row's numbers depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.sampling import sample

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


def _chi_square(tokens, probabilities):
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    assert expected[kept].min() >= 5  # the statistic's own condition
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


def _primitives(jaxpr, *, into_cond):
    """Names of all primitives; branches of a cond only when asked."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name == "cond" and not into_cond:
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names |= _primitives(inner, into_cond=into_cond)
    return names


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

    def test_beside_sampled_rows_is_the_same(self):
        # The first two differ by a subnormal, which the CPU flushes to zero.
        close = np.array([[1.2e-38, 1.3e-38, 0.0], [1e8, 1e8 + 8, 0]], np.float32)
        alone = _sample(close, 0, 3, 5)
        mixed = _sample(np.concatenate([close, close]), np.array([0, 0, 1, 50]), 3, 5)
        np.testing.assert_array_equal(alone, close.argmax(1))
        np.testing.assert_array_equal(mixed[:2], alone)

    def test_draws_nothing_outside_the_conditional(self):
        traced = jax.make_jaxpr(sample)(
            jnp.zeros((4, 9)),
            jnp.zeros(4),
            jnp.zeros(4, jnp.uint32),
            jnp.zeros(4, jnp.int32),
        ).jaxpr
        always = _primitives(traced, into_cond=False)
        everywhere = _primitives(traced, into_cond=True)
        random = {"random_bits", "random_fold_in", "random_seed", "threefry2x32"}
        assert everywhere & random
        assert not always & random
        (conditional,) = [e for e in traced.eqns if e.primitive.name == "cond"]
        idle, _ = conditional.params["branches"]  # index 0 is the False branch
        assert not idle.jaxpr.eqns


class TestDistribution:
    # Upper 0.1 % points of chi-square with 5, 4 and 63 degrees of freedom. The seeds
    # are fixed, so a test that passes keeps passing.
    @pytest.mark.parametrize("temperature", [0.8, 1.0, 3.0])
    def test_is_softmax_over_positions(self, temperature):
        tokens = _sample(np.tile(LOGITS, (16384, 1)), temperature, 11, np.arange(16384))
        assert _chi_square(tokens, _softmax(LOGITS, temperature)) < 20.515

    def test_is_softmax_over_seeds(self):
        tokens = _sample(np.tile(LOGITS, (16384, 1)), 1.0, np.arange(16384), 3)
        assert _chi_square(tokens, _softmax(LOGITS, 1.0)) < 20.515

    def test_wide_vocabulary(self):
        logits = np.random.default_rng(1).normal(size=64)
        tokens = _sample(np.tile(logits, (16384, 1)), 1.5, 4, np.arange(16384))
        assert _chi_square(tokens, _softmax(logits, 1.5)) < 103.442

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
        tokens = _sample(np.tile(logits, (16384, 1)), 1.0, 2, np.arange(16384))
        assert _chi_square(tokens, _softmax(logits, 1.0)) < 18.467

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
