"""`punica-jax bench`: its tables, its sums and its errors."""

import functools
import io
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from typer.testing import CliRunner

from punica_jax import bench, bench_model, cli
from tests.benchmark_cases import TINY


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(bench, "_NUM_SETS", 2)


def test_products_agree_and_are_timed():
    times_s = bench.time_products(32, 3, jnp.float32, repeats=2)
    assert list(times_s) == ["punica-jax", "XLA gather"]
    assert all(0 < seconds < 5 for seconds in times_s.values())


def test_a_products_time_is_that_of_many_calls(monkeypatch):
    seconds = SimpleNamespace(perf_counter=functools.partial(next, itertools.count()))
    monkeypatch.setattr(bench, "time", seconds)
    times_s = bench.time_products(32, 3, jnp.float32, repeats=1)
    assert set(times_s.values()) == {1 / (20 * 2)}


def test_products_that_differ_are_no_figures(monkeypatch):
    gather = bench.gather_lora
    monkeypatch.setattr(
        bench, "gather_lora", lambda *words, **options: 1.1 * gather(*words, **options)
    )
    with pytest.raises(AssertionError, match="the two products differ by"):
        bench.time_products(32, 3, jnp.float32, repeats=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"shape_name": "9B"}, "--shape must be one of small, 7B, 8B, got '9B'"),
        ({"rows": 0}, "--rows must be at least 1, got 0"),
    ],
)
def test_bad_words(words, message):
    with pytest.raises(ValueError, match="--") as error:
        bench.main(**words)
    assert str(error.value) == message


@pytest.mark.slow
def test_command_prints_both_tables(monkeypatch):
    monkeypatch.setitem(bench_model.SHAPES, "tiny", TINY)
    console = Console(file=io.StringIO(), width=100)
    bench.main("tiny", rows=3, console=console)
    text = " ".join(console.file.getvalue().split())
    assert "One decode step: tiny shape, 1 layers, 3 rows, context 128" in text
    for line in ("none", "identical (1)", "distinct (3)", "punica-jax", "XLA gather"):
        assert line in text
    assert "cpu, JAX" in text and "float32" in text
    made = bench_model.BenchModel(
        bench_model.make_config(TINY),
        max_rows=3,
        max_context=128,
        ranks=[16] * 3,
        dtype=jnp.float32,
    )
    least = made.backbone_bytes(3, 128) + made.adapter_bytes([16] * 3)
    assert re.search(
        rf"distinct \(3\) │ [\d.]+ │ \S+ % │ \d+ │ {least / 1e9:.3f} │", text
    )


def test_command_line(monkeypatch):
    called = []
    monkeypatch.setattr(cli, "run_bench", lambda *words: called.append(words))
    result = CliRunner().invoke(cli.app, ["bench", "--shape", "7B", "--rows", "32"])
    assert result.exit_code == 0 and called == [("7B", 32)]
    monkeypatch.undo()
    result = CliRunner().invoke(cli.app, ["bench", "--rows", "0"])
    assert result.exit_code == 2
    assert result.stderr == "error: --rows must be at least 1, got 0\n"


def test_more_rows_than_the_device_holds(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhere")

    monkeypatch.setattr(bench, "_bench", full)
    with pytest.raises(ValueError) as found:
        bench.main(rows=10**5)
    assert str(found.value) == (
        "--rows must fit the device, with an adapter for each, got 100000: "
        "RESOURCE_EXHAUSTED: Out of memory"
    )
