"""Engines on several devices, in one process: `python -m benchmarks.cluster`.

    [--shape 7B] [--devices 2] [--new 384] [--out results/FILE.jsonl]

A random model and adapters are written as files, and served by a `Cluster`.

- `scaling`: a full batch for each engine, every request under an adapter of its own;
  one engine, then all of them. Tokens per second while all seats are taken.
- `move`: the requests of the first engine, all its seats, go on at the second one,
  computed again there: how long their callers wait for the next piece.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import punica_jax as pj
from benchmarks.decode import add_model_options
from benchmarks.provenance import Log
from benchmarks.serving_adapters import RANK, write_adapters
from benchmarks.serving_model import word_tokenizer
from punica_jax.bench_model import PAGE_SIZE, SHAPES, make_config
from punica_jax.models import Llama, save_model

_PROMPT_LEN = 32


def write_files(folder: Path, args: argparse.Namespace) -> None:
    """Write a random model, whose tokens are words, and an adapter for each seat."""
    config = make_config(SHAPES[args.shape])
    if args.layers:
        config = replace(config, num_layers=args.layers)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    save_model(Llama(config, dtype=dtype, rngs=nnx.Rngs(0)), folder / "model")
    tokenizer = word_tokenizer(config.vocab_size)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    write_adapters(folder / "adapters", config, dtype, args.seats)


def make_cluster(folder: Path, args: argparse.Namespace) -> pj.Cluster:
    config = pj.EngineConfig(
        max_model_len=-(-(_PROMPT_LEN + args.new) // PAGE_SIZE) * PAGE_SIZE,
        max_seats=args.seats,
        num_slots=args.seats,
        max_rank=RANK,
        max_step_rows=args.step_rows,
        progress=False,
    )
    devices = jax.devices()[: args.devices]
    # With fewer, engines share them: to try it out.
    devices = [devices[place % len(devices)] for place in range(args.devices)]
    return pj.Cluster(
        folder / "model",
        adapters_dir=folder / "adapters",
        config=config,
        devices=devices,
        placement=pj.Spread(),
    )


class Bench:
    """Requests of a cluster, and when what came of them."""

    def __init__(self, cluster: pj.Cluster, args: argparse.Namespace):
        self._cluster = cluster
        self._new, self._seats = args.new, args.seats
        self._rng = np.random.default_rng(0)

    async def _answer(self, number: int) -> list[float]:
        """Answer one request; return when each piece came."""
        sampling = pj.SamplingParams(max_new_tokens=self._new, ignore_eos=True)
        vocab_size = self._cluster.tokenizer.vocab_size
        prompt = self._rng.integers(vocab_size, size=_PROMPT_LEN).tolist()
        adapter = f"a{number % self._seats}"
        times = []
        async for _ in self._cluster.generate(prompt, adapter, sampling):
            times.append(time.monotonic())
        return times

    def _begin(self, count: int) -> list["asyncio.Task[list[float]]"]:
        return [asyncio.create_task(self._answer(number)) for number in range(count)]

    def _num_steps(self) -> int:
        return sum(engine.num_steps for engine in self._cluster.stats().engines)

    async def _all_run(
        self, tasks: "Sequence[asyncio.Task[list[float]]]", least: int
    ) -> None:
        """Wait until all have seats, and their engines have made some further steps."""

        def num_running() -> int:
            assert not any(task.done() for task in tasks), "--new is too small"
            return sum(one.num_running for one in self._cluster.stats().engines)

        while num_running() < len(tasks):
            await asyncio.sleep(0.005)
        end = self._num_steps() + least
        while self._num_steps() < end and num_running():
            await asyncio.sleep(0.005)

    async def scaling(self, num_engines: int) -> dict[str, Any]:
        """Fill so many engines; return what they give while all seats are taken."""
        tasks = self._begin(num_engines * self._seats)
        await self._all_run(tasks, 8 * num_engines)
        first, start_s = self._num_steps(), time.monotonic()
        # Nobody has ended by then, whoever began first.
        await self._all_run(tasks, num_engines * self._new // 2)
        steps, spent_s = self._num_steps() - first, time.monotonic() - start_s
        await asyncio.gather(*tasks)
        return {
            "engines": num_engines,
            "step_ms": 1e3 * spent_s * num_engines / steps,
            "tokens_per_s": steps * self._seats / spent_s,
        }

    async def move(self) -> dict[str, Any]:
        """Move all requests of the first engine amid their answers."""
        for place in range(1, len(self._cluster.engines)):
            await self._cluster.drain(place)
        tasks = self._begin(self._seats)
        await self._all_run(tasks, self._new // 2)
        self._cluster.undrain(1)
        start_s = time.monotonic()
        await self._cluster.drain(0)
        every = await asyncio.gather(*tasks)
        gaps = [
            max(b - a for a, b in itertools.pairwise(times) if b > start_s)
            for times in every
        ]
        usual = [b - a for times in every for a, b in itertools.pairwise(times)]
        return {
            "requests": len(every),
            "tokens": _PROMPT_LEN + self._new // 2,
            "median_ms": 1e3 * statistics.median(gaps),
            "slowest_ms": 1e3 * max(gaps),
            "usual_ms": 1e3 * statistics.median(usual),
        }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--devices", type=int, default=2, help="an engine each")
    parser.add_argument("--seats", type=int, default=32, help="of an engine")
    parser.add_argument("--new", type=int, default=384, help="tokens of a request")
    parser.add_argument("--step-rows", type=int, default=512, help="of a step, at most")
    Log.add_options(parser)
    args = parser.parse_args(words)
    if args.devices < 2:
        parser.error(f"--devices must be at least 2, got {args.devices}")
    log = Log(args)
    where = {"shape": args.shape, "layers": args.layers, "seats": args.seats}

    with tempfile.TemporaryDirectory(prefix="punica-jax-") as name:
        write_files(Path(name), args)
        with make_cluster(Path(name), args) as cluster:
            bench = Bench(cluster, args)
            asyncio.run(bench.scaling(args.devices))  # adapters come to the devices
            for place in range(1, args.devices):
                asyncio.run(cluster.drain(place))
            fields = [asyncio.run(bench.scaling(1))]
            for place in range(1, args.devices):
                cluster.undrain(place)
            fields.append(asyncio.run(bench.scaling(args.devices)))
            for one in fields:
                log.add({"benchmark": "cluster_scaling", **where, **one})
            log.add({"benchmark": "cluster_move", **where, **asyncio.run(bench.move())})


if __name__ == "__main__":
    main()
