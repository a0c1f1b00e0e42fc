"""What every test runs under."""

import jax

# Two CPU devices, for the tests under shard_map.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
