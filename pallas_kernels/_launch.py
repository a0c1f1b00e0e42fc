"""How a kernel becomes a launch: as Pallas has it, but for integers and for meshes.

And which part of a launch a program takes. Knows nothing of what kernels do.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LIBRARY: Any = jax  # its stubs lack some of what is used of it here
# The axes of a launch for warp groups.
PROGRAM, CLUSTER, GROUP = "program", "cluster", "group"
Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def pallas_call(
    kernel: Callable[..., None], *, out_shape: Any, **options: Any
) -> Callable[..., Any]:
    """Return `pl.pallas_call` of a kernel, traced without `jax_enable_x64`.

    With it a loop counts and a sum adds in 64 bits, while rows, slots and pages have
    32: those do not mix. What it returns varies over a mesh's axes as its operands do,
    see `varying_alike`. It has no derivative, and says so: functions that have one have
    a rule of their own.
    """
    return _launch(
        lambda shapes: pl.pallas_call(_narrow(kernel), out_shape=shapes, **options),
        out_shape,
    )


def compiled_once(launcher: Launcher) -> Launcher:
    """Compile a launcher once for all calls outside of `jax.jit` that are alike.

    Each launch is a function of its own to JAX, which would trace and compile it every
    time. Calls on an array that is being traced stay as they are: what traces them is
    compiled, and shares nothing with others that saw other constants of a module.

    Args:
      launcher: takes arrays, in pytrees too, and what else can be hashed.
    """

    def launch(tree: Any, others: tuple[Any, ...], *arrays: Array) -> Any:
        left = iter(arrays)
        leaves = [next(left) if leaf is None else leaf for leaf in others]
        operands, options = jax.tree.unflatten(tree, leaves)
        return launcher(*operands, **options)

    launch.__name__ = launcher.__name__  # what JAX calls the program
    compiled = jax.jit(launch, static_argnums=(0, 1))

    @functools.wraps(launcher)
    def call(*operands: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((operands, options))
        if any(isinstance(leaf, _LIBRARY.core.Tracer) for leaf in leaves):
            return launcher(*operands, **options)
        # No leaf is None: to JAX that is structure.
        others = tuple(
            None if isinstance(leaf, Array | np.ndarray) else leaf for leaf in leaves
        )
        arrays = (
            leaf for leaf, other in zip(leaves, others, strict=True) if other is None
        )
        return compiled(tree, others, *arrays)

    return cast(Launcher, call)


def warpgroup_call(
    kernel: Callable[..., None],
    *,
    out_shape: Any,
    scratch_types: Any,
    num_programs: int,
    num_groups: int,
    name: str,
    cluster_size: int = 1,
) -> Callable[..., Any]:
    """Return a launch of a kernel for warp groups; else as `pallas_call`.

    Args:
      kernel: takes the operands' refs, the results' and the scratch's. It knows its
        program and its group by the axes `PROGRAM` and `GROUP`, and which of a
        cluster's programs it is by `CLUSTER`.
      out_shape: of the results.
      scratch_types: what a program has for itself.
      num_programs: of the launch; of clusters, if they have several programs.
      num_groups: warp groups of a program.
      name: of the launch.
      cluster_size: programs that run beside each other, and may share what they load.
    """
    body = _narrow(kernel)
    body.__name__ = name  # what the launch is named by

    cluster: Any = {}
    if cluster_size > 1:
        cluster = {"cluster": (cluster_size,), "cluster_names": (CLUSTER,)}

    def call(shapes: Any) -> Callable[..., Any]:
        return plgpu.kernel(
            body,
            out_type=shapes,
            scratch_types=scratch_types,
            grid=(num_programs,),
            grid_names=(PROGRAM,),
            **cluster,
            num_threads=num_groups,
            thread_name=GROUP,
            # Approximate as Triton has it, for equal bits. Lanes: there a kernel says
            # itself how its memory is tiled.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
        )

    return _launch(call, out_shape)


def _narrow(kernel: Callable[..., None]) -> Callable[..., None]:
    def narrow(*refs: Any) -> None:
        with _LIBRARY.enable_x64(False):
            kernel(*refs)

    return narrow


def _launch(call: Callable[[Any], Any], out_shape: Any) -> Callable[..., Any]:
    @jax.custom_jvp
    def launch(*operands: Any) -> Any:
        operands = varying_alike(*operands)
        axes = _LIBRARY.typeof(operands[0]).manual_axis_type
        shapes = jax.tree.map(
            lambda shape: shape.update(manual_axis_type=axes), out_shape
        )
        return jax.tree.map(
            lambda out: _varying(out, axes.varying), call(shapes)(*operands)
        )

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
    leaves = [_varying(leaf, axes) for leaf in leaves]
    return jax.tree.unflatten(tree, leaves)


def _varying(leaf: Array, axes: frozenset[str]) -> Array:
    """Return an array that varies over some axes at least."""
    missing = axes - _LIBRARY.typeof(leaf).manual_axis_type.varying
    return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


def given(**options: Array | None) -> dict[str, Array]:
    """Return those of a launch's options that there are, by their names."""
    return {name: array for name, array in options.items() if array is not None}


def place_of_program(
    program: Array, num_tiles: int, num_programs: int, at_once: int
) -> tuple[Array, Array]:
    """Return which tile a program of a launch takes, and which of the tile's it is.

    Some tiles take turns, one program each, until all of theirs had one; then the next
    tiles do.

    Args:
      program: `i32[]`, below `num_tiles * num_programs`.
      num_tiles: of the launch.
      num_programs: of a tile.
      at_once: tiles that take turns; the last ones may be fewer.
    """
    at_once = min(at_once, num_tiles)
    # By constants: a program waits for this before its first load.
    turn, within = split_number(program, at_once * num_programs)
    own, tile = split_number(within, at_once)
    if num_last := num_tiles % at_once:
        is_last = turn == num_tiles // at_once
        last = split_number(within, num_last)
        pairs = zip(last, (own, tile), strict=True)
        own, tile = (jnp.where(is_last, *pair) for pair in pairs)
    return turn * at_once + tile, own


def split_number(number: Array, size: Any) -> tuple[Array, Array]:
    """Return how many times `size` a number is, and what is left of it."""
    # The sign corrections of // and % would hide from Triton that neighbours lie side
    # by side, and its loads would be 2 bytes wide.
    size = jnp.int32(size)
    return lax.div(number, size), lax.rem(number, size)
