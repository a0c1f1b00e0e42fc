"""How a kernel becomes a launch: as Pallas has it, but for integers and for meshes.

Knows nothing of what kernels do.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

_LIBRARY: Any = jax  # its stubs lack some of what is used of it here


def pallas_call(
    kernel: Callable[..., None], *, out_shape: Any, **options: Any
) -> Callable[..., Any]:
    """Return `pl.pallas_call` of a kernel, traced without `jax_enable_x64`.

    With it a loop counts and a sum adds in 64 bits, while rows, slots and pages have
    32: those do not mix. What it returns varies over a mesh's axes as its operands do,
    see `varying_alike`. It has no derivative, and says so: functions that have one have
    a rule of their own.
    """

    def narrow(*refs: Any) -> None:
        with _LIBRARY.enable_x64(False):
            kernel(*refs)

    @jax.custom_jvp
    def launch(*operands: Any) -> Any:
        operands = varying_alike(*operands)
        axes = _LIBRARY.typeof(operands[0]).manual_axis_type
        shapes = jax.tree.map(
            lambda shape: shape.update(manual_axis_type=axes), out_shape
        )
        return pl.pallas_call(narrow, out_shape=shapes, **options)(*operands)

    launch.defjvp(_refuse)
    return launch


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "a kernel has no derivative, and was asked for one: lora's functions and norms "
        "have first derivatives only, paged attention has none; with "
        "implementation='xla' jax.grad can be applied again"
    )


def varying_alike(*operands: Any) -> tuple[Any, ...]:
    """Return pytrees whose arrays all vary over the axes that one of them varies over.

    Inside `jax.shard_map` with its checks a kernel's operands must, and so must those
    of a function with a gradient of its own: a replicated one's gradient is then summed
    over the mesh, where it is cast. Elsewhere nothing varies, and nothing is cast.
    """
    leaves, tree = jax.tree.flatten(operands)
    own = [_LIBRARY.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    axes = frozenset().union(*own)
    leaves = [
        lax.pcast(leaf, tuple(sorted(axes - had)), to="varying") if axes - had else leaf
        for leaf, had in zip(leaves, own, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)
