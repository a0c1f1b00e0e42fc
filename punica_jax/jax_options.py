"""JAX's options, which a thread does not have of the one that made it.

Knows those that say where arrays are, and which programs are traced for them.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

_NAMES = (
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
)


def options_of_this_thread() -> AbstractContextManager[None]:
    """Return what the calling thread has set, to be entered once in another."""
    values = {name: getattr(jax.config, f"jax_{name}") for name in _NAMES}

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        library: Any = jax  # its stubs lack some of them
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(getattr(library, name)(value))
            yield

    return entered()
