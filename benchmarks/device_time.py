"""Device time of small launches: cold caches, launch gaps included.

Knows nothing of what is launched.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

# Measured on one H200: bytes read plus bytes written by a large copy.
PEAK_BYTES_PER_S = 4.3e12
# Twice the L2 of an H200: what lies between two launches that read the same bytes.
COLD_BYTES = 120e6
# A window's one wait costs about 0.1 ms: half a percent of it.
_WINDOW_S = 20e-3
_NUM_WINDOWS = 7

Step = Callable[[Sequence[Array], Sequence[Any], Any], list[Array]]


def num_sets(bytes_per_launch: float, most: int = 256) -> int:
    """Return how many input sets make a rotation that the L2 cannot hold.

    At least 24, so that a step outlasts its own dispatch; at most `most`, for every
    set is unrolled in the program.
    """
    return min(most, max(24, math.ceil(COLD_BYTES / bytes_per_launch)))


def compile_step(
    launch: Callable[..., Array],
    outs: Sequence[Array],
    operands: Sequence[Any],
    shared: Any = (),
) -> Step:
    """Compile `[launch(out, *own, *shared) for out, own in zip(outs, operands)]`.

    The outputs take the place of `outs` (donated), so that nothing is copied and
    addresses stay, as CUDA graphs like it.
    """
    traced_once = jax.jit(launch)

    def step(outs, operands, shared):
        return [
            traced_once(out, *own, *shared)
            for out, own in zip(outs, operands, strict=True)
        ]

    lowered = jax.jit(step, donate_argnums=0, keep_unused=True).lower(
        outs, operands, shared
    )
    return lowered.compile()


def measure(
    step: Step, outs: Sequence[Array], operands: Sequence[Any], shared: Any = ()
) -> tuple[float, list[Array]]:
    """Return the median seconds of one launch, and the last outputs.

    Steps are enqueued for about 20 ms, with one wait at the end; the median is over
    seven such windows.
    """

    def window(outs, num_steps):
        start = time.perf_counter()
        for _ in range(num_steps):
            outs = step(outs, operands, shared)
        jax.block_until_ready(outs)
        return time.perf_counter() - start, outs

    _, outs = window(outs, 2)
    elapsed_s, outs = window(outs, 4)
    num_steps = max(2, math.ceil(4 * _WINDOW_S / elapsed_s))
    times_s = []
    for _ in range(_NUM_WINDOWS):
        elapsed_s, outs = window(outs, num_steps)
        times_s.append(elapsed_s)
    seconds = statistics.median(times_s) / (num_steps * len(outs))
    return seconds, list(outs)
