"""The limits that filters cut at, against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from punica_jax.thresholds import kth_largest, nucleus, order_keys

WIDTH = 33
ROWS = arrays(
    np.float32,
    (2, WIDTH),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, 1.0])
    ),
)
_keys = jax.jit(order_keys)
_kth = jax.jit(kth_largest)
_nucleus = jax.jit(nucleus)


@given(values=ROWS)
def test_keys_are_ordered_as_values(values):
    keys = np.asarray(_keys(values))
    for row, key in zip(values, keys, strict=True):
        np.testing.assert_array_equal(key[:, None] < key, row[:, None] < row)
        np.testing.assert_array_equal(key[:, None] == key, row[:, None] == row)


@settings(deadline=None)
@given(values=ROWS, k=st.integers(1, WIDTH))
def test_kth_largest_is_that_of_sorting(values, k):
    keys = np.asarray(_keys(values))
    found = np.asarray(_kth(keys, np.full(2, k, np.int32)))
    np.testing.assert_array_equal(found, np.sort(keys, axis=1)[:, -k])


@settings(deadline=None)
@given(
    values=ROWS,
    # Whole numbers and shares of sixteenths: every sum is exact.
    weights=arrays(np.float32, (2, WIDTH), elements=st.integers(0, 1000)),
    share=st.integers(1, 16),
)
def test_nucleus_is_that_of_sorting(values, weights, share):
    weights[:, 0] += 1
    keys = np.asarray(_keys(values))
    found = np.asarray(_nucleus(keys, weights, np.full(2, share / 16, np.float32)))
    for row, weight, limit in zip(keys, weights, found, strict=True):
        reached = [
            key for key in row if weight[row >= key].sum() >= share / 16 * weight.sum()
        ]
        assert limit == max(reached)


def test_one_value_and_many():
    values = jnp.zeros((1, 1)), jnp.full((1, 70000), -jnp.inf)
    for row in values:
        keys = _keys(row)
        limit = _kth(keys, jnp.full(1, row.shape[1], jnp.int32))
        assert limit[0] == np.asarray(keys)[0, 0]
