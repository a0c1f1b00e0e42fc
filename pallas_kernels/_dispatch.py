"""Which implementation of an operation runs.

Knows devices; knows nothing of the operations themselves.
"""

from typing import Any, Literal, cast, get_args

import jax

Implementation = Literal["pallas_triton", "pallas_interpret", "xla"]

# The first architecture with the asynchronous copies and bfloat16 tensor cores that
# the kernels are written for (Ampere). A T4 (7.5) runs the XLA form.
_MIN_COMPUTE_CAPABILITY = 8.0


def resolve(implementation: Implementation | str | None) -> Implementation:
    """Return the implementation to run.

    Args:
      implementation: `"pallas_triton"` (NVIDIA GPU kernels), `"pallas_interpret"`
        (the same kernels interpreted, for tests), `"xla"` (plain `jax.numpy`, any
        device), or None to choose from the default device: `"pallas_triton"` on an
        NVIDIA GPU of compute capability 8.0 or newer, else `"xla"`.

    Raises:
      ValueError: the name is none of these.
    """
    if implementation is None:
        return _default_implementation()
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation must be one of {get_args(Implementation)} or None, "
            f"got {implementation!r}"
        )
    return cast(Implementation, implementation)


def shared_bytes() -> int:
    """Return the shared memory that a kernel's program may take.

    That of the default device; where it is no GPU, of the one that kernels are tuned
    for.
    """
    capability = _compute_capability()
    if capability is None or 9.0 <= capability < 12.0:
        return 227 * 1024  # H100, H200, B200
    return (163 if capability == 8.0 else 99) * 1024  # an A100; all others


def has_warpgroups() -> bool:
    """Whether kernels for the warp groups of Hopper run.

    On the default device; where it is no GPU, on the one that kernels are tuned for.
    Before JAX 0.11 they lack what such a kernel needs, and CUDA 12.8 to 12.9.0 compile
    a causal mask wrongly, for which JAX's own attention refuses them.
    """
    if jax.__version_info__ < (0, 11):
        return False
    if _default_device().platform != "gpu":
        return True
    return _compute_capability() == 9.0 and not 12080 <= _cuda_version() < 12091


def multiprocessors() -> int:
    """Return the default device's; an H200's where it is no GPU."""
    return getattr(_default_device(), "core_count", 132)


def _default_implementation() -> Implementation:
    capability = _compute_capability()
    new_enough = capability is not None and capability >= _MIN_COMPUTE_CAPABILITY
    return "pallas_triton" if new_enough else "xla"


def _compute_capability() -> float | None:
    """Return the default device's, None if it is no NVIDIA GPU."""
    device = _default_device()
    if device.platform != "gpu":
        return None
    # ROCm devices report names such as "gfx942" here.
    try:
        return float(getattr(device, "compute_capability", ""))
    except ValueError:
        return None


def _cuda_version() -> int:
    """Return that of CUDA's runtime, as 13000 for 13.0; 0 if it is not known."""
    try:
        # Nothing public tells; JAX's kernels ask the same.
        from jax._src.lib import cuda_versions
    except ImportError:
        return 0
    return 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def _default_device() -> Any:
    # Read by name: JAX 0.10's types do not know the attribute.
    device = getattr(jax.config, "jax_default_device") or jax.devices()[0]  # noqa: B009
    return jax.devices(device)[0] if isinstance(device, str) else device
