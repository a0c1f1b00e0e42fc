"""Runs kernels for warp groups without a GPU: JAX's interpreter, and what it lacks."""

import contextlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# A thread that waits for another one holds one of XLA's: of too few none is left.
INTERPRETER = pytest.mark.skipif(
    jax.__version_info__ < (0, 12) or int(os.environ.get("PJRT_NPROC", "0")) < 64,
    reason="needs JAX 0.12, and PJRT_NPROC=64 in the environment",
)


@contextlib.contextmanager
def interpreted(*, finds_races=False):
    """Run kernels by the interpreter, their threads, copies and barriers too.

    A product is done when it is asked for, and what it reads is then ordered before
    later copies. So what is given away before `wgmma_wait`, or lacks a fence before a
    product, is not found.

    Args:
      finds_races: whether to fail where one thread reads or writes what another one
        writes, and no barrier or fence orders them.
    """
    cores = _TensorCores()
    params = plgpu.InterpretGPUParams(detect_races=finds_races)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", cores.multiply)
        patch.setattr(plgpu, "wgmma_wait", lambda _: None)
        patch.setattr(plgpu, "WGMMAAccumulatorRef", _Accumulator)
        patch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
        patch.setattr(plgpu, "layout_cast", lambda value, _: value)
        patch.setattr(pl, "run_scoped", cores.run_scoped)
        patch.setattr(pl, "run_state", cores.run_state)
        patch.setattr(lax, "fori_loop", cores.loop)
        with plgpu.force_gpu_interpret_mode(params):
            yield


class _Sum:
    """What products are added to, as a value."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, _: Any) -> Any:
        return self.value


class _Accumulator:
    def __new__(cls, shape: Any, dtype: Any) -> Any:
        return _Sum(jnp.zeros(shape, dtype))

    init = _Sum


class _TensorCores:
    """Their products as `jnp.dot`'s, whose sums loops carry: these are no refs here."""

    def __init__(self):
        self._live: list[_Sum] = []
        self._fori_loop = lax.fori_loop

    @staticmethod
    def multiply(acc, a, b):
        a, b = (operand[...].astype(jnp.float32) for operand in (a, b))
        acc.value = acc.value + jnp.dot(a, b)
        plgpu.commit_smem()  # what a product reads needs no fence before a copy

    def run_scoped(self, run, *sums):
        own = [_Sum(acc.value) for acc in sums]
        self._live.extend(own)
        out = run(*own)
        del self._live[len(self._live) - len(own) :]
        return out

    @staticmethod
    def run_state(run):
        def state(acc):
            run(acc)
            return acc.value

        return state

    def loop(self, lower, upper, body, init):
        if not self._live:
            return self._fori_loop(lower, upper, body, init)

        def step(i, carry):
            carry, values = carry
            self._set(values)
            carry = body(i, carry)
            return carry, self._values()

        out, values = self._fori_loop(lower, upper, step, (init, self._values()))
        self._set(values)
        return out

    def _values(self):
        return [acc.value for acc in self._live]

    def _set(self, values):
        for acc, value in zip(self._live, values, strict=True):
            acc.value = value
