"""What every test runs under, and the compiled things that tests share."""

import gc
import itertools
import os
import pathlib

import hypothesis
import jax
import pytest

# A first example compiles; and a machine may stand still for longer than 0.2 s.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Programs are traced of millions of small objects, which all go by themselves: looking
# for those that do not took 7 % of the time. Were it more, tests of memory would find
# what is left lying.
gc.set_threshold(3_000, 20, 50)

# Two CPU devices, for the tests under shard_map.
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config):
    """Compile a program once for all workers, and for all runs (`--cache-clear`).

    Unless tests for GPUs are chosen, programs are not optimised: most of a test's time
    is compiling what runs once or twice, and the whole run takes three quarters of the
    time so; where JAX still has the older way to compile fusions, half. `XLA_FLAGS=
    pytest` tests what users run, as `.ci/run` does where whole models run, steps are
    many, bits and tokens must be equal, or documents say what is printed.
    """
    if "not gpu" in config.option.markexpr:
        flags = ["--xla_backend_optimization_level=0"]
        if jax.__version_info__ < (0, 11):  # later ones end at a flag that is unknown
            flags.append("--xla_cpu_use_fusion_emitters=false")
        os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = str(config.cache.mkdir("programs"))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


# Of the 65,530 pieces of memory that Linux allows a process unless told otherwise.
_MANY_MAPS = 20_000
_num_tests = itertools.count(1)


def pytest_runtest_teardown():
    """Let go of what tests compiled before its memory is mapped in too many pieces.

    XLA's CPU programs map about ten each, and the compiler that gets no more ends the
    process.
    """
    if next(_num_tests) % 20:
        return
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()


class CompileCounter:
    """Counts what XLA compiles inside a `with` block."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, duration, **_):
        self.count += event == self._EVENT


@pytest.fixture
def compiles():
    return CompileCounter()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A random tiny Llama directory, adapters `a`, `b`, `c`, `d` beside it."""
    from tests import tiny_checkpoint as tiny

    root = tmp_path_factory.mktemp("checkpoint")
    tiny.write_model(root / "model")
    tiny.write_adapter(root / "a", 4, seed=1)
    tiny.write_adapter(root / "b", 20, ("q_proj", "v_proj"), seed=2)
    tiny.write_adapter(root / "c", 64, seed=3)
    tiny.write_adapter(root / "d", 8, ("down_proj",), seed=4)
    return root


@pytest.fixture(scope="session")
def llm(checkpoint):
    """An LLM with adapters `a`, `b` and `c`; tests leave these as they were."""
    import punica_jax as pj

    return pj.LLM(
        checkpoint / "model",
        {name: checkpoint / name for name in "abc"},
        max_seats=4,
        num_slots=5,
        page_size=16,
        progress=False,
    )
