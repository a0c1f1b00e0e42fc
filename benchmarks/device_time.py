"""Device time of small launches, one after the other, gaps included.

Knows nothing of what is launched.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from punica_jax.bench_model import NUM_UNHINDERED

# What floors count with, whatever `ceilings` reaches: what a large copy of one H200 was
# measured at when the goals were set.
PEAK_BYTES_PER_S = 4.3e12
# Twice the L2 of an H200: what lies between two launches that read the same bytes.
COLD_BYTES = 120e6
# A window's one wait costs about 0.1 ms: half a percent of it.
_WINDOW_S = 20e-3
_NUM_WINDOWS = 7

Carries = list[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A compiled program of `num_calls` launches: `step(carries, operands, shared)`."""

    compiled: Callable[..., Carries]
    num_calls: int

    def __call__(self, carries: Carries, operands: Sequence[Any], shared: Any):
        return self.compiled(carries, operands, shared)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one launch: until it has ended, and of the host's to enqueue it.

    The latter of the first programs after a wait: when about 14 are on their way, JAX
    holds up the host.
    """

    median_s: float
    launch_s: float

    def fields(self, prefix: str = "", *, floor_us: float) -> dict[str, float]:
        """Return a record's fields, in microseconds, and the time over its floor's."""
        us = 1e6 * self.median_s
        times = {"us": us, "launch_us": 1e6 * self.launch_s, "x_floor": us / floor_us}
        return {f"{prefix}{name}": value for name, value in times.items()}


def is_host_bound(time: float, launch: float) -> bool:
    """Tell whether a time says more of the host, which enqueues, than of the device."""
    return launch > 0.9 * time


def num_sets(bytes_per_launch: float, most: int = 512) -> int:
    """Return how many input sets make a rotation that the L2 cannot hold.

    Args:
      bytes_per_launch: what a launch reads that no other one does.
      most: for each set the host spends microseconds.
    """
    return min(most, 1 + math.ceil(COLD_BYTES / bytes_per_launch))


def compile_step(
    launch: Callable[..., Any],
    carries: Carries,
    operands: Sequence[Any],
    shared: Any = (),
) -> Step:
    """Compile a call of `launch` for each of `operands`, in order, as one program.

    Call `i` is `carries[i] = launch(carries[i], *operands[i], *shared)`, the carries'
    index modulo their number; carries are donated, so that nothing is copied. No two
    calls may share all of their operands' arrays: XLA would compute what they have in
    common once. The fewer arrays the better: the host spends microseconds on each.
    """
    traced_once = jax.jit(launch)

    def step(carries, operands, shared):
        carries = list(carries)
        for i, own in enumerate(operands):
            c = i % len(carries)
            carries[c] = traced_once(carries[c], *own, *shared)
        return carries

    # One launch after the other, as in a model step they depend on one another.
    options: dict[str, str | bool] = {
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"
    }
    lowered = jax.jit(step, donate_argnums=0).lower(carries, operands, shared)
    compiled = lowered.compile(options if jax.default_backend() == "gpu" else None)
    return Step(compiled=compiled, num_calls=len(operands))


def measure(
    step: Step, carries: Carries, operands: Sequence[Any], shared: Any = ()
) -> tuple[Times, Carries]:
    """Return the times of one launch, and the last carries.

    Steps are enqueued for about 20 ms, with one wait at the end; medians are over seven
    such windows.
    """

    def window(carries, num_steps):
        start = enqueued = time.perf_counter()
        for number in range(num_steps):
            carries = step(carries, operands, shared)
            if number < NUM_UNHINDERED:
                enqueued = time.perf_counter()
        jax.block_until_ready(carries)
        launch_s = (enqueued - start) / min(num_steps, NUM_UNHINDERED)
        return (time.perf_counter() - start) / num_steps, launch_s, carries

    *_, carries = window(carries, 1)
    step_s, _, carries = window(carries, 2)
    num_steps = max(2, math.ceil(_WINDOW_S / step_s))
    windows = []
    for _ in range(_NUM_WINDOWS):
        *times_s, carries = window(carries, num_steps)
        windows.append(times_s)
    medians = (
        statistics.median(times_s) / step.num_calls
        for times_s in zip(*windows, strict=True)
    )
    median_s, launch_s = medians
    return Times(median_s=median_s, launch_s=launch_s), carries
