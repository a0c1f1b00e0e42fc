"""What an operand must be, in one sentence for all of them.

Kernels load without a check: what is too short would be read past its end.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def require(name: str, operand: Array, shape: Sequence[int], dtype: Any) -> None:
    """Raise `ValueError` unless an operand has this shape and dtype."""
    if operand.shape != tuple(shape) or operand.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype}{list(shape)}, got "
            f"{operand.dtype}{list(operand.shape)}"
        )


def is_count(value: Any, least: int = 1) -> bool:
    """Tell whether a value is an integer, and not below the least."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= least


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Raise `ValueError` unless a value is an integer, and not below the least."""
    if not is_count(value, least):
        raise ValueError(
            f"{name} must be an integer of at least {least}, got {value!r}"
        )


def as_slots(slots: Array, num_slots: int) -> Array:
    """Return `i32` slots, -1 for none: of 64 bits, what is no slot could become one."""
    if slots.dtype.itemsize > 4:
        slots = jnp.where((slots >= 0) & (slots < num_slots), slots, -1)
    return slots.astype(jnp.int32)


def as_array(name: str, value: Any) -> Array:
    """Return a value as an array; raise `ValueError` if it is none.

    Integers that JAX would cut to 32 bits become the nearest ones that have those.
    """
    kind = type(value).__name__
    try:
        if isinstance(value, list | tuple):
            # Other lists are JAX's to read: they may hold arrays that are being traced.
            if all(type(leaf) is int for leaf in jax.tree.leaves(value)):
                value = np.asarray(value)
        if isinstance(value, np.ndarray) and value.dtype == np.int64:
            span = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
            value = np.clip(value, span.min, span.max)
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array, got {kind}: {error}") from None
