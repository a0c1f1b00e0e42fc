"""JAX's configuration, which a thread does not have of the one that made it.

Knows the options that change where arrays are and which programs compute them.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax


def configuration() -> AbstractContextManager[None]:
    """Return what the calling thread has set, to be entered once in another."""
    config: Any = jax.config  # JAX's stubs lack its options
    device = config.jax_default_device
    precision = config.jax_default_matmul_precision

    @contextlib.contextmanager
    def same() -> Iterator[None]:
        with jax.default_device(device), jax.default_matmul_precision(precision):
            yield

    return same()
