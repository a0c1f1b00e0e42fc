"""Log-probabilities against float64, and the search for the largest values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.logprobs import Logprobs, largest, token_logprobs
from punica_jax.request import MAX_LOGPROBS, TokenLogprobs


def by_sorting(values, count):
    places = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(values, places, 1), places


@pytest.mark.parametrize("width", [20, 512, 513, 1201, 128256])
def test_largest_is_a_stable_sort(width):
    rng = np.random.default_rng(width)
    values = rng.normal(size=(6, width)).astype(np.float32)
    values[1] = np.round(values[1])  # ties everywhere
    values[2] = 0
    values[3, rng.permutation(width)[: width - 5]] = -np.inf  # few left
    values[4] = np.sort(values[4])
    values[5] = -np.inf
    values += 0.0  # no -0.0: lax.top_k has it below 0.0
    top, places = jax.jit(largest, static_argnums=1)(values, 20)
    expected, expected_places = by_sorting(values, 20)
    np.testing.assert_array_equal(top, expected)
    np.testing.assert_array_equal(places, expected_places)


def test_sorts_nothing_long():
    text = (
        jax.jit(largest, static_argnums=1).lower(jnp.zeros((4, 128256)), 20).as_text()
    )
    assert "top_k" in text
    assert not [
        line
        for line in text.splitlines()
        if "top_k(" in line and "128256" in line.split("->")[0]
    ]


def test_against_float64():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 1000)).astype(np.float32) * 4
    logits[1] += 1e4
    logits[2, ::2] = -np.inf
    logits[3] = np.round(logits[3])
    tokens = np.array([3, 999, 1, 7, 500], np.int32)
    packed = jax.jit(lambda *of: token_logprobs(*of).pack())(logits, tokens)
    result = Logprobs.unpack(np.asarray(packed))
    wide = logits.astype(np.float64)
    exact = wide - wide.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    row = np.arange(5)
    # float32 holds 1e4 to within 1e-3.
    tolerance = np.array([1e-5, 2e-3, 1e-5, 1e-5, 1e-5])
    assert (np.abs(result.chosen - exact[row, tokens]) < tolerance).all()
    np.testing.assert_array_equal(
        result.rank, 1 + (logits > logits[row, tokens][:, None]).sum(1)
    )
    values, places = by_sorting(exact, MAX_LOGPROBS)
    np.testing.assert_array_equal(result.top_tokens, places)
    assert (np.abs(result.top - values) < tolerance[:, None]).all()
    entry = result.of(4, 2)
    assert isinstance(entry, TokenLogprobs)
    assert entry.logprob == result.chosen[4] and entry.rank == result.rank[4]
    assert list(entry.top) == places[4, :2].tolist()
    assert result.of(4, 0).top == {}


def test_zeros_tie_whatever_their_sign():
    logits = jnp.asarray([[-0.0, 0.0, -1.0]])
    result = token_logprobs(logits, jnp.asarray([1], jnp.int32))
    assert result.top_tokens.tolist() == [[0, 1, 2]] and result.rank.tolist() == [1]


def test_a_vocabulary_below_twenty():
    logits = jnp.asarray([[0.0, 2.0, 1.0]])
    result = token_logprobs(logits, jnp.asarray([2], jnp.int32))
    assert result.top_tokens.tolist() == [[1, 2, 0]]
    assert list(result.of(0, 20).top) == [1, 2, 0]
