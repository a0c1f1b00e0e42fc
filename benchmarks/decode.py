"""One decode step of a 7B- or 8B-shaped random model, with mixed adapters and without.

    python -m benchmarks.decode [--shape 7B] [--rows 1 32] [--contexts 512 512..640]
        [--methods ours gather ...] [--ranks 16 8,16,64] [--out results/FILE.jsonl]

Device time: steps are enqueued without waiting, one wait at the end, medians of
repeats. All methods run in one process on one model, cache and set of adapters; the
backbone alone is the same program without LoRA. A plan of mixed ranks is compared with
one of its least rank alone, which is measured too. `group_swap` answers one adapter's
rows after the other's, the largest group first, with our kernels and resident adapters.
A context of `a..b` is the mean over steps at contexts a to b, every fourth one.

The floor is the weights, the KV cache and the adapters' bytes, each read once at the
copy rate measured on an H200. What a LoRA step may cost is its own backbone step, its
adapters' bytes at that rate, and a little more (`decode_goals`).
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command_words import parse_contexts, parse_count, parse_ranks
from benchmarks.decode_goals import judge, judge_ranks
from benchmarks.decode_rivals import LAUNCHES, AnyRunner, Stacks, adapt
from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.provenance import Log
from punica_jax.batch import Batch
from punica_jax.bench_model import (
    SHAPES,
    BenchModel,
    make_config,
    num_rank_pages,
    set_ranks,
)
from punica_jax.models import CachedAttention
from punica_jax.pallas_kernels import RANK_PAGE, segment_metadata
from punica_jax.pallas_kernels.shapes import Popularity, segment_sizes

POPULARITIES: tuple[Popularity, ...] = ("identical", "uniform", "skewed", "distinct")
METHODS = ("ours", *LAUNCHES, "group_swap")
# The page table has room for this at least, so that contexts share their programs.
LEAST_MAX_CONTEXT = 640
# What bfloat16's rounding in 32 layers stays under, and a row's wrong adapter does not.
_MAX_LOGITS_OFF = 0.3

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch: who uses which adapter, and how long the sequences are."""

    rows: int
    contexts: tuple[int, ...]
    query_len: int = 1  # more in prefill: `rows` sequences, of so many rows each
    popularity: Popularity | None = None
    ranks: tuple[int, ...] = (16,)  # of adapter i: ranks[i % len(ranks)]

    @property
    def sizes(self) -> list[int]:
        """Rows of each adapter; none without adapters."""
        return segment_sizes(self.popularity, self.rows) if self.popularity else []

    @property
    def adapter_ranks(self) -> list[int]:
        return list(itertools.islice(itertools.cycle(self.ranks), len(self.sizes)))

    @property
    def slots(self) -> np.ndarray:
        """Each row's slot, in a random order."""
        if not self.sizes:
            return np.full(self.rows, -1)
        rng = np.random.default_rng(0)
        return rng.permutation(np.repeat(np.arange(len(self.sizes)), self.sizes))

    @property
    def context_label(self) -> int | str:
        first, last = self.contexts[0], self.contexts[-1]
        return first if first == last else f"{first}..{last}"


def batches_of(bench: BenchModel, case: Case, method: str) -> list[Batch]:
    """Return the steps that give every row a token at every context."""
    batch = functools.partial(bench.batch, query_len=case.query_len)
    if method != "group_swap":
        return [batch(case.slots, context) for context in case.contexts]
    batches = []
    for context in case.contexts:
        first = 0
        for slot, size in sorted(enumerate(case.sizes), key=lambda pair: -pair[1]):
            batches.append(batch([slot] * size, context, first_seq=first))
            first += size
    return batches


def adapters_of(bench: BenchModel, case: Case, method: str) -> Any:
    """Return what takes the pools' place in a step."""
    if not case.sizes:
        return None
    if method in LAUNCHES:
        stacks = Stacks.of(bench.pools, method, len(case.sizes))
        return stacks.for_rows(np.repeat(case.slots, case.query_len))
    return bench.pools


def measure(
    bench: BenchModel, case: Case, method: str, num_steps: int, repeats: int
) -> Record:
    """Time one case by one method; returns the record's fields."""
    batches = batches_of(bench, case, method)
    times = bench.time(
        batches,
        adapters_of(bench, case, method),
        num_steps=num_steps,
        repeats=repeats,
    )
    tokens = len(case.contexts)  # of each row
    adapter_s = bench.adapter_bytes(case.adapter_ranks) / PEAK_BYTES_PER_S
    context = statistics.mean(case.contexts)
    floor_s = bench.backbone_bytes(case.rows, context) / PEAK_BYTES_PER_S + adapter_s
    return {
        "benchmark": "decode",
        "layers": bench.config.num_layers,
        "rows": case.rows,
        "popularity": case.popularity or "none",
        "adapters": len(case.sizes),
        "ranks": sorted(set(case.adapter_ranks)),
        "context": case.context_label,
        "method": method,
        "step_ms": times.median_s / tokens * 1e3,
        "low_ms": times.low_s / tokens * 1e3,
        "high_ms": times.high_s / tokens * 1e3,
        "launch_ms": times.launch_s / tokens * 1e3,
        "overlaps": bench.runner.overlaps(batches[0].bucket),
        "floor_ms": floor_s * 1e3,
        "x_floor": times.median_s / tokens / floor_s,
        "adapters_ms": adapter_s * 1e3,
        "tokens_per_s": case.rows * tokens / times.median_s,
        "from_second_step": True,  # older records count the first one's launch
    }


def pages_ms(bench: BenchModel, case: Case) -> float:
    """Return the time of the adapters' bytes as they are stored, in whole pages."""
    stored = [RANK_PAGE * num_rank_pages(rank) for rank in case.adapter_ranks]
    return bench.adapter_bytes(stored) / PEAK_BYTES_PER_S * 1e3


class Logits:
    """Logits of the same batch by one method and another, on the same adapters."""

    def __init__(self, bench: BenchModel):
        self._bench = bench

        def logits(model, cache, adapters, batch, implementation):
            rows = batch.tokens.shape[0]
            attend = CachedAttention(cache, batch.seqs, rows, 1, implementation)
            segments = segment_metadata(
                batch.slots, num_slots=adapters.num_slots, implementation=implementation
            )
            hidden = model(
                batch.tokens,
                batch.seqs.positions(rows),
                attend,
                adapters,
                segments,
                implementation=implementation,
            )
            return model.logits(hidden), attend.cache

        # With many rows there is no room for a second cache; each run writes the rows'
        # own keys and values again.
        self._jitted = jax.jit(logits, static_argnums=4, donate_argnums=1)

    def difference(self, case: Case, method: str) -> float:
        """Return a method's difference from plain JAX's, the worst row's, relative."""
        bench = self._bench
        batch = jax.tree.map(jnp.asarray, bench.batch(case.slots, case.contexts[0]))
        ours = adapters_of(bench, case, "ours")
        theirs = adapters_of(bench, case, method)
        plain = self._run(ours, batch, "xla")
        got = self._run(theirs, batch, bench.runner.implementation)
        off = np.linalg.norm(got - plain, axis=1) / np.linalg.norm(plain, axis=1)
        return float(off.max())

    def _run(self, adapters: Any, batch: Batch, implementation: str) -> np.ndarray:
        model, runner = self._bench.model, self._bench.runner
        logits, runner._cache = self._jitted(
            model, runner._cache, adapters, batch, implementation
        )
        return np.asarray(logits)


def run_cases(
    bench: BenchModel,
    shape: str,
    cases: Sequence[Case],
    methods: Sequence[str],
    *,
    num_steps: int,
    repeats: int,
) -> Iterable[Record]:
    """Yield the records of all cases that share rows and contexts, backbone first."""
    logits = Logits(bench)
    rows, contexts = cases[0].rows, cases[0].contexts
    bare = measure(
        bench, Case(rows=rows, contexts=contexts), "backbone", num_steps, repeats
    )
    bare["shape"] = shape
    yield judge(bare, bare)
    of_one_rank: dict[tuple[Any, int], Record] = {}
    # Where rows differ most.
    checked = max(cases, key=lambda case: len(case.sizes)).popularity
    for case in cases:
        bench.pools = set_ranks(bench.pools, case.adapter_ranks)
        for method in methods:
            record = measure(bench, case, method, num_steps, repeats)
            record |= {"shape": shape, "pages_ms": pages_ms(bench, case)}
            if case.popularity == checked and method != "group_swap":
                off = record["logits_off"] = logits.difference(case, method)
                if not off < _MAX_LOGITS_OFF:
                    raise SystemExit(f"{method}: logits are off by {off:.1e}: {case}")
            record = judge(record, bare)
            if method == "ours" and len(case.ranks) == 1:
                of_one_rank[case.popularity, case.ranks[0]] = record
            elif method == "ours" and len(set(case.adapter_ranks)) > 1:
                least = of_one_rank[case.popularity, min(case.ranks)]
                record = judge_ranks(record, least)
            yield record


def table_of(records: Sequence[Record], title: str) -> Table:
    table = Table(title=title)
    columns = ("rows", "context", "adapters", "ranks", "method", "step ms", "over none")
    judged = ("allowed", "met", "floor ms", "x floor", "launch ms", "logits off")
    for column in (*columns, *judged):
        table.add_column(column, justify="right")
    for record in records:
        name, count = record["popularity"], record["adapters"]
        allowed = record.get("rank_allowed_ms", record.get("allowed_ms"))
        met = record.get("rank_met", record.get("met"))
        table.add_row(
            str(record["rows"]),
            str(record["context"]),
            f"{name} ({count})" if count else name,
            ",".join(map(str, record["ranks"])),
            record["method"],
            f"{record['step_ms']:.3f}",
            f"{100 * (record['step_ms'] / record['backbone_ms'] - 1):+.1f} %",
            "" if allowed is None else f"{allowed:.3f}",
            {True: "yes", False: "no", None: ""}[met],
            f"{record['floor_ms']:.3f}",
            f"{record['x_floor']:.2f}",
            f"{record['launch_ms']:.3f}",
            f"{record['logits_off']:.1e}" if "logits_off" in record else "",
        )
    return table


def make_bench(
    shape: str, layers: int | None, rows: Iterable[int], max_context: int, **options
) -> BenchModel:
    """Make a model of a named shape; fewer layers to try things out."""
    config = make_config(SHAPES[shape])
    if layers:
        config = dataclasses.replace(config, num_layers=layers)
    max_context = max(max_context, LEAST_MAX_CONTEXT)
    return BenchModel(
        config,
        max_rows=max(rows),
        max_context=max_context,
        adapt=adapt,
        make_runner=AnyRunner,
        **options,
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7B")
    parser.add_argument("--layers", type=int, help="fewer layers, to try it out")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--rows", type=parse_count, nargs="+", default=[1, 32])
    parser.add_argument(
        "--contexts", type=parse_contexts, nargs="+", default=[(512,)], help="N or N..M"
    )
    parser.add_argument("--popularity", nargs="+", choices=POPULARITIES)
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument(
        "--ranks", type=parse_ranks, nargs="+", default=[(16,)], help="N or N,N,..."
    )
    parser.add_argument(
        "--steps", type=parse_count, default=20, help="enqueued at a time"
    )
    parser.add_argument(
        "--repeats", type=parse_count, default=9, help="the median counts"
    )
    Log.add_options(parser)
    args = parser.parse_args(words)
    rank_plans = [*args.ranks, *((min(plan),) for plan in args.ranks)]
    # A plan of one rank comes first: mixed ones are compared with it.
    rank_plans = sorted(set(rank_plans), key=lambda plan: (len(plan), plan))
    log = Log(args)
    for rows in args.rows:
        plans = [
            Case(rows=rows, contexts=(512,), popularity="distinct", ranks=ranks)
            for ranks in rank_plans
        ]
        most = max(plans, key=lambda plan: sum(map(num_rank_pages, plan.adapter_ranks)))
        bench = make_bench(
            args.shape,
            args.layers,
            [rows],
            max(map(max, args.contexts)),
            ranks=most.adapter_ranks,
            max_rank=max(64, *itertools.chain(*rank_plans)),
        )
        for span in args.contexts:
            cases = [
                Case(rows=rows, contexts=span, popularity=popularity, ranks=ranks)
                for ranks in rank_plans
                for popularity in args.popularity or POPULARITIES
            ]
            # With few rows cases may say the same: the first stands for all.
            same = {str((c.sizes, c.adapter_ranks)): c for c in reversed(cases)}
            cases = [case for case in cases if case in same.values()]
            for record in run_cases(
                bench,
                args.shape,
                cases,
                args.methods or METHODS,
                num_steps=args.steps,
                repeats=args.repeats,
            ):
                log.add(record)
        # A module is freed by the collector alone, and the next one needs its memory.
        del bench
        gc.collect()
    title = f"{args.shape} decode step, {log.records[0]['layers']} layers, bf16"
    Console(width=150).print(table_of(log.records, title))


if __name__ == "__main__":
    main()
