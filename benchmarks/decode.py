"""One decode step of a 7B- or 8B-shaped random model, with mixed adapters and without.

    python -m benchmarks.decode [--shape 7B] [--rows 32] [--out results.jsonl]

Device time: steps are enqueued without waiting, one wait at the end, medians of
repeats. The floor is the weights, the KV cache and the adapters' bytes, each read once
at 4.3 TB/s (the copy rate measured on an H200).
"""

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from punica_jax.batch import Batch, Buckets
from punica_jax.models import (
    MODULE_GROUPS,
    CachedAttention,
    Llama,
    LlamaConfig,
    LoraPools,
)
from punica_jax.pallas_kernels import segment_metadata
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES, Popularity, segment_sizes
from punica_jax.runner import Runner
from punica_jax.sequence import Chunk

COPY_BYTES_PER_S = 4.3e12
RANK = 16
PAGE_SIZE = 64
MAX_CONTEXT = 640
# What each repeat enqueues before it waits.
STEPS = 20
CASES: tuple[Popularity, ...] = ("identical", "uniform", "skewed", "distinct")


def make_config(shape_name: str) -> LlamaConfig:
    shape = MODEL_SHAPES[shape_name]
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
    )


def random_like(tree, scale: float, seed: int):
    """Return a tree with normal values in place of its floating-point leaves."""

    @jax.jit
    def draw(key, like):
        return scale * jax.random.normal(key, like.shape, like.dtype)

    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    filled = [
        leaf if jnp.issubdtype(leaf.dtype, jnp.integer) else draw(key, leaf)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, filled)


def fill_pools(runner: Runner, num_slots: int) -> None:
    """Give every slot one page of its own in every group."""
    pools = random_like(runner.pools, 0.02, seed=1)
    table = np.zeros((num_slots, pools.max_pages), np.int32)
    table[:, 0] = np.arange(num_slots)
    groups = {
        name: dataclasses.replace(
            pools.group(name),
            page_table=jnp.asarray(table),
            num_pages=tuple(jnp.ones_like(n) for n in pools.group(name).num_pages),
        )
        for name in MODULE_GROUPS
    }
    runner._pools = LoraPools(**groups)


def make_batch(rows: int, sizes: list[int], context: int) -> Batch:
    """Lay out one row a sequence; `sizes` are the adapters' rows, [] for none."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    if not sizes:
        slots = np.full(rows, -1)
    pages_per_seq = MAX_CONTEXT // PAGE_SIZE
    chunks = [
        Chunk(
            tokens=[int(rng.integers(1000))],
            kv_len=context,
            pages=range(i * pages_per_seq, (i + 1) * pages_per_seq),
            slot=int(slots[i]),
            temperature=0.0,
            seed=0,
        )
        for i in range(rows)
    ]
    return Batch.of(chunks, Buckets(rows, max(rows, 32)).of(chunks), pages_per_seq)


def time_steps(runner: Runner, batch: Batch, repeats: int = 9) -> tuple[float, float]:
    """Return seconds of device time a step, and of host time a launch."""
    runner.step(batch)
    device, host = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        launches = []
        for _ in range(STEPS):
            before = time.perf_counter()
            tokens = runner.launch(batch)
            launches.append(time.perf_counter() - before)
        jax.block_until_ready(tokens)
        device.append((time.perf_counter() - start) / STEPS)
        host.append(float(np.median(launches)))
    return float(np.median(device)), float(np.median(host))


def floor_bytes(config: LlamaConfig, weights: int, rows: int, adapters: int, ctx: int):
    kv = 2 * config.num_kv_heads * config.head_dim * config.num_layers * 2
    lora = sum(
        RANK * (len(modules) * config.d_in(group) + sum(config.d_outs(group)))
        for group, modules in MODULE_GROUPS.items()
    )
    return weights + rows * ctx * kv + adapters * lora * config.num_layers * 2


def logits_difference(runner: Runner, model: Llama, batch: Batch) -> float:
    """Return the kernels' logits against plain JAX's, as a part of their range."""

    def logits(model, cache, pools, batch, implementation):
        rows = batch.tokens.shape[0]
        attend = CachedAttention(cache, batch.seqs, rows, 1, implementation)
        segments = segment_metadata(
            batch.slots, num_slots=pools.num_slots, implementation=implementation
        )
        hidden = model(
            batch.tokens,
            batch.seqs.positions(rows),
            attend,
            pools,
            segments,
            implementation=implementation,
        )
        return model.logits(hidden)

    run = jax.jit(logits, static_argnums=4)
    names = (runner.implementation, "xla")
    device_batch = jax.tree.map(jnp.asarray, batch)
    ours, plain = (
        np.asarray(run(model, runner._cache, runner.pools, device_batch, name))
        for name in names
    )
    return float(np.abs(ours - plain).max() / (plain.max() - plain.min()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(MODEL_SHAPES), default="7B")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, help="fewer layers, to try it out")
    parser.add_argument("--commit", default="unknown", help="what is measured")
    parser.add_argument("--out", help="JSON lines are appended here")
    args = parser.parse_args()
    config = make_config(args.shape)
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    # The embedding is gathered, not read.
    weights -= model.embed.nbytes
    num_slots = max(32, *args.rows)
    runner = Runner(
        model,
        num_kv_pages=max(args.rows) * (MAX_CONTEXT // PAGE_SIZE),
        page_size=PAGE_SIZE,
        num_slots=num_slots,
        num_rank_pages=num_slots,
        max_rank=64,
    )
    fill_pools(runner, num_slots)
    runner._cache = random_like(runner._cache, 1.0, seed=2)
    pools = runner.pools
    console = Console(width=120)
    table = Table(title=f"{args.shape} decode step, context {args.context}, bf16")
    columns = ("rows", "adapters", "step ms", "over none", "floor ms", "x floor")
    for column in (*columns, "launch ms", "logits off"):
        table.add_column(column, justify="right")
    for rows in args.rows:
        base = None
        for popularity in (None, *CASES):
            sizes = segment_sizes(popularity, rows) if popularity else []
            batch = make_batch(rows, sizes, args.context)
            runner._pools = pools if popularity else None  # pyright: ignore
            seconds, launch = time_steps(runner, batch)
            base = base or seconds
            least = floor_bytes(config, weights, rows, len(sizes), args.context)
            record = {
                "benchmark": "decode",
                "shape": args.shape,
                "layers": config.num_layers,
                "rows": rows,
                "popularity": popularity or "none",
                "adapters": len(sizes),
                "context": args.context,
                "step_ms": seconds * 1e3,
                "backbone_ms": base * 1e3,
                "floor_ms": least / COPY_BYTES_PER_S * 1e3,
                "launch_ms": launch * 1e3,
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "commit": args.commit,
                "date": time.strftime("%Y-%m-%d"),
            }
            if popularity == "distinct":
                record["logits_off"] = logits_difference(runner, model, batch)
            table.add_row(
                str(rows),
                popularity or "none",
                f"{record['step_ms']:.3f}",
                f"{100 * (seconds / base - 1):+.1f} %",
                f"{record['floor_ms']:.3f}",
                f"{record['step_ms'] / record['floor_ms']:.2f}",
                f"{record['launch_ms']:.3f}",
                f"{record['logits_off']:.1e}" if "logits_off" in record else "",
            )
            print(json.dumps(record), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(record) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
