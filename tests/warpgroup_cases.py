"""What tests of the kernels for Hopper's warp groups share."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from punica_jax.pallas_kernels._dispatch import has_warpgroups

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
HOPPER = pytest.mark.skipif(
    not has_warpgroups(), reason="warp groups need Hopper, JAX 0.11"
)


def in_second_layer(pool, *, first_count):
    """Return the pool of two layers: a first one of NaN and such counts, and `pool`."""
    return dataclasses.replace(
        pool,
        a=jnp.concatenate([pool.a * jnp.nan, pool.a]),
        b=jnp.concatenate([pool.b * jnp.nan, pool.b]),
        num_pages=jnp.concatenate([pool.num_pages * 0 + first_count, pool.num_pages]),
        layer=jnp.ones(1, jnp.int32),
    )
