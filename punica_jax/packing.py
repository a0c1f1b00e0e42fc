"""Many small host arrays as one: a copy to the device costs the same for each.

Knows trees of arrays of 4 bytes an element; nothing of what they mean.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax


class Layout(NamedTuple):
    """How a packed tree is cut up again; hashable.

    Attributes:
      structure: the tree.
      arrays: shape and dtype of each leaf, all of 4 bytes an element.
    """

    structure: Any
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]


def pack(tree: Any) -> tuple[np.ndarray, Layout]:
    """Return all of a tree's arrays as one `i32` vector, and what `unpack` needs."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    packed = np.concatenate([leaf.ravel().view(np.int32) for leaf in leaves])
    return packed, Layout(structure, arrays)


def unpack(packed: Array, layout: Layout) -> Any:
    """Return the tree that was packed; traceable, `layout` static."""
    leaves, start = [], 0
    for shape, dtype in layout.arrays:
        end = start + math.prod(shape)
        part = lax.bitcast_convert_type(packed[start:end], dtype)
        leaves.append(part.reshape(shape))
        start = end
    return jax.tree.unflatten(layout.structure, leaves)
