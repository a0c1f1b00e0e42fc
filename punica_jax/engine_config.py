"""What an engine, or an LLM, is made with.

Plain values; what they mean for a model and a device is worked out elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from punica_jax.policies import FirstComeFirstServed, Policy
from punica_jax.request import is_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is served.

    Attributes:
      dtype: float32, bfloat16 or float16, of the weights, the cache and the adapters;
        None means bfloat16; on a CPU float32, and float16 on NVIDIA GPUs that have no
        bfloat16.
      max_model_len: most tokens of a sequence, prompt and output; None means what the
        model was made for, at most 2048.
      max_seats: sequences in flight at one time.
      max_step_rows: most rows of a step; longer prompts come in chunks. Of 4096 or more
        a multiple of 256 lets Hopper use a faster gate and up (16 bits, JAX 0.11).
      num_slots: adapters on the device at one time.
      max_rank: greatest rank of an adapter, at most 512.
      page_size: tokens of a KV page, a power of two of at least 16.
      kv_memory: most memory of the KV cache: bytes, or as a float up to 1.0 a fraction
        of the device's. Sequences wait while it is full. None: room for `max_seats`
        sequences of `max_model_len`, as far as the device has it.
      adapter_memory: the same for the adapters. None: room for `num_slots` of
        `max_rank`, and one more, so that any of them can be replaced.
      host_adapter_memory: most host memory of adapters, in bytes or as a fraction of
        the machine's; None is a quarter of it. Up to four that are being read, and four
        from the hub, come on top of it, and arrays that were given to
        `register_adapter` are kept beside it. On a GPU a half, at most 2 GiB, is
        page-locked from the start, if the engine is made with adapters; what nobody has
        of that comes on top, too.
      max_waiting: sequences (`n` of a request) that may wait; more are refused.
      policy: makes the queue of those that wait: `FirstComeFirstServed`,
        `LatencyTargets`, `FairShare`, or a function that returns one with arguments.
      implementation: see `pallas_kernels.resolve`.
      warm_up: compile every program before the first request.
      progress: show progress bars while fetching, loading and compiling.

    Raises:
      ValueError: a field breaks its rule. Those that depend on a model or a device are
        checked when there is one.
    """

    dtype: Any = None
    max_model_len: int | None = None
    max_seats: int = 32
    max_step_rows: int = 2048
    num_slots: int = 32
    max_rank: int = 64
    page_size: int = 64
    kv_memory: float | None = None
    adapter_memory: float | None = None
    host_adapter_memory: float | None = None
    max_waiting: int = 4096
    policy: Callable[[], Policy] = FirstComeFirstServed
    implementation: str | None = None
    warm_up: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        if not is_integer(self.max_waiting) or self.max_waiting < 1:
            raise ValueError(
                "max_waiting must be an integer of at least 1, got "
                f"{self.max_waiting!r}"
            )
        object.__setattr__(self, "max_waiting", int(self.max_waiting))
        if not callable(self.policy):
            raise ValueError(
                "policy must be a function that makes a queue, such as "
                f"FirstComeFirstServed, got {self.policy!r}"
            )


def checked_config(config: Any) -> EngineConfig:
    """Return a config, all defaults for None; raise ValueError if it is none."""
    config = EngineConfig() if config is None else config
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config must be an EngineConfig, got {config!r}")
    return config
