"""What an operand must be, in one sentence for all of them.

Kernels load without a check: what is too short would be read past its end.
"""

from collections.abc import Sequence
from typing import Any

from jax import Array


def require(name: str, operand: Array, shape: Sequence[int], dtype: Any) -> None:
    """Raise `ValueError` unless an operand has this shape and dtype."""
    if operand.shape != tuple(shape) or operand.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype}{list(shape)}, got "
            f"{operand.dtype}{list(operand.shape)}"
        )
