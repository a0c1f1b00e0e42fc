"""Which implementation of an operation runs.

Knows devices; knows nothing of the operations themselves.
"""

from typing import Literal, cast, get_args

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


def _default_implementation() -> Implementation:
    # Read by name: JAX 0.10's types do not know the attribute.
    device = getattr(jax.config, "jax_default_device") or jax.devices()[0]  # noqa: B009
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device.platform != "gpu":
        return "xla"
    # ROCm devices report names such as "gfx942" here.
    capability = str(getattr(device, "compute_capability", ""))
    try:
        new_enough = float(capability) >= _MIN_COMPUTE_CAPABILITY
    except ValueError:
        return "xla"
    return "pallas_triton" if new_enough else "xla"
