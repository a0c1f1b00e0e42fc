"""Device time of paged attention: `python -m benchmarks.attention [--sweep] [NAME...]`.

Every launch reads other pages than the one before it, so that more than the 60 MB of
L2 lie between two launches that share some. `kernels` adds the medians of a launch's
kernels as the profiler saw them; `wall` is the time of many launches, enqueued before
one wait, over their number, gaps and all. Results are checked before they are timed.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

from benchmarks.attention_configs import decode_configs, prefill_configs
from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.provenance import Log
from benchmarks.timeline import record
from punica_jax.pallas_kernels import _attention_reference, paged_attention, resolve
from punica_jax.pallas_kernels._attention_decode import decode_attention
from punica_jax.pallas_kernels._attention_parts import (
    PartsConfig,
    parts_attention,
    parts_config,
)
from punica_jax.pallas_kernels._attention_prefill import (
    PrefillConfig,
    prefill_attention,
)
from punica_jax.pallas_kernels._attention_prefill import (
    default_config as prefill_config,
)
from punica_jax.pallas_kernels._decode_config import DecodeConfig, config_of
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES, ModelShape

# What floors count with, whatever `ceilings` reaches: see `device_time`.
PEAK_FLOPS_PER_S = 0.79e15
COLD_BYTES = 256e6

Operands = tuple[Array, ...]
# None: what `paged_attention` chooses.
Config = DecodeConfig | PartsConfig | PrefillConfig | None
Step = Callable[[Sequence[Operands]], list[Array]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape. Each of `seqs` sequences has `query_len` rows and `kv_len` tokens.

    But for the first `num_long`, which have `long_len` tokens; and the last is a whole
    prompt of `prompt_len` tokens, if that is not 0.
    """

    name: str
    seqs: int
    query_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 64
    num_long: int = 0
    long_len: int = 0
    prompt_len: int = 0

    @property
    def kv_lens(self) -> list[int]:
        lens = [self.long_len] * self.num_long
        return self._and_prompt(lens + [self.kv_len] * (self.seqs - self.num_long))

    @property
    def query_lens(self) -> list[int]:
        return self._and_prompt([self.query_len] * self.seqs)

    def _and_prompt(self, lens: list[int]) -> list[int]:
        return [*lens[:-1], self.prompt_len] if self.prompt_len else lens

    @property
    def rows(self) -> int:
        return sum(self.query_lens)

    @property
    def pages_per_seq(self) -> int:
        return -(-max(self.kv_lens) // self.page_size)

    @property
    def num_bytes(self) -> int:
        """Least traffic: each key, value, query and output once, in bfloat16."""
        cache = 2 * sum(self.kv_lens) * self.kv_heads
        return 2 * self.head_dim * (cache + 2 * self.rows * self.heads)

    @property
    def num_sets(self) -> int:
        """Operands that launches take in turn: more bytes than the L2 has."""
        return int(min(64, max(2, -(-COLD_BYTES // self.num_bytes))))

    @property
    def num_flops(self) -> int:
        pairs = zip(self.query_lens, self.kv_lens, strict=True)
        seen = sum(rows * (2 * kv_len - rows + 1) for rows, kv_len in pairs)
        return 4 * self.head_dim * self.heads * (seen // 2)

    @property
    def floor_s(self) -> float:
        return max(self.num_bytes / PEAK_BYTES_PER_S, self.num_flops / PEAK_FLOPS_PER_S)


def cases_of(shape: ModelShape) -> list[Case]:
    """Return sequences that decode, by tokens of each, whole prompts, and both."""
    decode = {512: (1, 8, 32, 64, 128), 500: (32,), 4096: (1, 16, 32)}
    sizes = [(seqs, 1, kv_len) for kv_len, many in decode.items() for seqs in many]
    cases = [
        Case(
            name=f"{shape.name.lower()}-{seqs}x{query_len}-{kv_len}",
            seqs=seqs,
            query_len=query_len,
            kv_len=kv_len,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        for seqs, query_len, kv_len in [*sizes, (1, 2048, 2048), (4, 512, 512)]
    ]
    [many] = [one for one in cases if one.name.endswith("-32x1-500")]
    name = f"{many.name}-2x8189"
    cases.append(dataclasses.replace(many, name=name, num_long=2, long_len=8189))
    for prompt_len in (33, 993, 2017):  # rows of a step's sizes, none of them padding
        name = f"{many.name}-with-{prompt_len}"
        cases.append(dataclasses.replace(many, name=name, prompt_len=prompt_len))
    return cases


CASES = [case for shape in MODEL_SHAPES.values() for case in cases_of(shape)]


def make_operands(case: Case, seed: int) -> Operands:
    """Random bfloat16 operands; pages lie in the pool in a random order."""
    pages = case.seqs * case.pages_per_seq
    q_key, kv_key = jax.random.split(jax.random.key(seed))
    shape = (2, pages, case.kv_heads, case.page_size, case.head_dim)
    table = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    return (
        jax.random.normal(q_key, (case.rows, case.heads, case.head_dim), jnp.bfloat16),
        jax.random.normal(kv_key, shape, jnp.bfloat16),
        jnp.asarray(table.reshape(case.seqs, case.pages_per_seq)),
        jnp.asarray(np.cumsum([0, *case.query_lens]), jnp.int32),
        jnp.asarray(case.kv_lens, jnp.int32),
    )


def default_config(case: Case) -> Config:
    if case.prompt_len:
        return None
    if case.query_len > 1:
        return prefill_config(
            group=case.heads // case.kv_heads,
            head_dim=case.head_dim,
            itemsize=2,
            max_query_len=case.query_len,
        )
    shapes = jax.eval_shape(lambda: make_operands(case, 0))[:3]
    return parts_config(*shapes) or config_of(*shapes)


def sweep_configs(case: Case) -> list[Config]:
    """Configurations worth trying; the default comes first."""
    if case.prompt_len:
        others = []
    elif case.query_len > 1:
        others = prefill_configs(case.heads // case.kv_heads)
    else:
        others = decode_configs(case.seqs * case.kv_heads, case.kv_len)
    return [default_config(case), *others]


def attend(case: Case, config: Config, operands: Operands) -> Array:
    if config is None:
        return paged_attention(*operands, max_query_len=case.rows)
    options: dict[str, Any] = {
        "scale": case.head_dim**-0.5,
        "config": config,
        "interpret": resolve(None) != "pallas_triton",
    }
    if isinstance(config, DecodeConfig):
        return decode_attention(*operands, **options)
    if isinstance(config, PartsConfig):
        return parts_attention(*operands, **options)
    return prefill_attention(*operands, max_query_len=case.query_len, **options)


def check(case: Case, config: Config, operands: Operands) -> float:
    """Return the relative error (2-norm) against the reference."""
    got = jax.jit(functools.partial(attend, case, config))(operands)
    reference = functools.partial(
        _attention_reference.paged_attention, max_query_len=max(case.query_lens)
    )
    expected = jax.jit(reference)(*operands).astype(jnp.float32)
    error = jnp.linalg.norm((got.astype(jnp.float32) - expected).ravel())
    return float(error / jnp.linalg.norm(expected.ravel()))


def compile_step(case: Case, config: Config, sets: Sequence[Operands]) -> Step:
    # Traced and lowered once for all sets.
    launch = jax.jit(functools.partial(attend, case, config))

    def step(sets: Sequence[Operands]) -> list[Array]:
        return [launch(operands) for operands in sets]

    return jax.jit(step).lower(sets).compile()


def measure_wall_s(step: Step, sets: Sequence[Operands]) -> float:
    """Return the median seconds of one launch, from many enqueued at once."""
    num_calls = max(2, 64 // len(sets))
    times_s = []
    for _ in range(10):
        start = time.perf_counter()
        outs = [step(sets) for _ in range(num_calls)]
        jax.block_until_ready(outs)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s) / (num_calls * len(sets))


def measure_kernels_s(
    steps: Sequence[tuple[Config, Step]], sets: Sequence[Operands]
) -> list[dict[str, float]]:
    """Return each step's median seconds by kernel, from one profile of all steps."""
    num_repeats = 6

    def run() -> None:
        for _, step in steps:
            for _ in range(num_repeats):
                jax.block_until_ready(step(sets))

    if resolve(None) != "pallas_triton":  # interpreted: there are no kernels
        return [{} for _ in steps]
    events = [e for e in record(run) if e.name.startswith("paged_attention")]
    results = []
    for config, _ in steps:
        has_splits = isinstance(config, DecodeConfig) and config.splits > 1
        kernels = 2 if has_splits or config is None else 1
        count = num_repeats * len(sets) * kernels
        mine, events = events[:count], events[count:]
        times_ns: dict[str, list[float]] = {}
        for event in mine:
            times_ns.setdefault(event.name, []).append(event.duration_ns)
        if sorted(map(len, times_ns.values())) != [count // kernels] * kernels:
            raise RuntimeError(
                f"the profile has {len(mine)} of {count} kernels of {describe(config)}"
            )
        results.append(
            {name: statistics.median(t) * 1e-9 for name, t in times_ns.items()}
        )
    return results


def report(
    case: Case, config: Config, kernels_s: dict[str, float], wall_s: float, log: Log
) -> None:
    seconds = sum(kernels_s.values()) or wall_s
    log.add(
        {
            "benchmark": "attention",
            "case": case.name,
            "seqs": case.seqs,
            "query_len": case.query_len,
            "kv_len": case.kv_len,
            "num_long": case.num_long,
            "long_len": case.long_len,
            "prompt_len": case.prompt_len,
            "config": describe(config),
            "us": seconds * 1e6,
            "kernels_us": {name: s * 1e6 for name, s in kernels_s.items()},
            "wall_us": wall_s * 1e6,
            "bytes": case.num_bytes,
            "flops": case.num_flops,
            "floor_us": case.floor_s * 1e6,
            "x_floor": seconds / case.floor_s,
        }
    )


def table_of(records: Sequence[dict[str, Any]]) -> Table:
    columns = ("case", "kernels us", "us", "wall us", "TB/s", "TFLOP/s", "x floor")
    table = Table(*columns, "configuration")
    for r in records:
        kernels = " + ".join(f"{us:.1f}" for us in r["kernels_us"].values())
        rates = r["bytes"] / r["us"] * 1e-6, r["flops"] / r["us"] * 1e-6
        figures = (r["us"], r["wall_us"], *rates, r["x_floor"])
        cells = (f"{figure:.2f}" for figure in figures)
        table.add_row(r["case"], kernels, *cells, r["config"])
    return table


def describe(config: Config) -> str:
    if config is None:
        return "as chosen"
    fields = dataclasses.asdict(config)
    fields |= fields.pop("decode", {})  # of a long sequence's parts
    return " ".join(f"{name}={int(value)}" for name, value in fields.items())


def run_case(case: Case, log: Log, *, sweep: bool) -> None:
    sets = [make_operands(case, seed) for seed in range(case.num_sets)]
    configs = sweep_configs(case) if sweep else [default_config(case)]
    error = check(case, configs[0], sets[0])
    if not error < 1e-2:
        raise SystemExit(f"{case.name}: relative error {error:.1e}")
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda c: try_compile(case, c, sets), configs))
    steps = []
    for config, step in zip(configs, compiled, strict=True):
        if isinstance(step, Exception):
            print(f"{case.name:16s} failed: {describe(config)}: {str(step)[:80]!r}")
        else:
            jax.block_until_ready(step(sets))
            steps.append((config, step))
    times_s = measure_kernels_s(steps, sets)
    for (config, step), kernels_s in zip(steps, times_s, strict=True):
        report(case, config, kernels_s, measure_wall_s(step, sets), log)


def try_compile(case: Case, config: Config, sets: Sequence[Operands]):
    """Compile; a configuration that asks for too much shared memory returns why."""
    try:
        return compile_step(case, config, sets)
    except jax.errors.JaxRuntimeError as error:
        return error


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases, all by default")
    parser.add_argument("--sweep", action="store_true", help="try configurations")
    Log.add_options(parser)
    args = parser.parse_args(words)
    unknown = set(args.names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}")
    log = Log(args)
    for case in CASES:
        if not args.names or case.name in args.names:
            run_case(case, log, sweep=args.sweep)
    Console(width=150).print(table_of(log.records))


if __name__ == "__main__":
    main()
