"""How a kernel becomes a launch: as Pallas has it, but for the width of its integers.

Knows nothing of what kernels do.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl


def pallas_call(kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """Return `pl.pallas_call` of a kernel, traced without `jax_enable_x64`.

    With it a loop counts and a sum adds in 64 bits, while rows, slots and pages have
    32: those do not mix.
    """

    def narrow(*refs: Any) -> None:
        library: Any = jax  # its stubs lack it
        with library.enable_x64(False):
            kernel(*refs)

    return pl.pallas_call(narrow, **options)
