"""Device time of choosing tokens: `python -m benchmarks.sampling [--out FILE]`.

What follows a step's logits, beside a step: the most likely tokens; draws with each
filter alone and with all; the whole of what an `LLM` runs for a batch in which any
sequence draws (bias, penalties, filters, counts), whatever it asks for; and the
log-probabilities. Every launch reads logits that the caches do not hold, which a
step's launch would find there in part. What it may take of a step says `decode_goals`.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.device_time import (
    PEAK_BYTES_PER_S,
    Times,
    compile_step,
    measure,
    num_sets,
)
from benchmarks.provenance import Log
from punica_jax.logprobs import token_logprobs
from punica_jax.request import SamplingParams
from punica_jax.sampling import most_likely, sample
from punica_jax.seats import SeatRow, Seats, draw, write_seat

PARAMS = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={7: 1.0},
)


class Case(NamedTuple):
    """What is timed: `launch(carry, logits, *shared)` gives the next carry."""

    carry: Any
    shared: tuple[Any, ...]
    launch: Callable[..., Any]


def filter_case(rows: int, names: tuple[str, ...]) -> Case:
    """Draw with some filters compiled in, none of the others."""
    types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    filters = {
        name: jnp.full(rows, getattr(PARAMS, name), types[name]) for name in names
    }
    temperature = jnp.full(rows, PARAMS.temperature, jnp.float32)
    seeds = jnp.arange(rows, dtype=jnp.uint32)

    def launch(tokens, logits, temperature, seeds, filters):
        # The last tokens stand for positions: no launch begins before the last ends.
        return sample(logits, temperature, seeds, tokens, **filters)

    return Case(jnp.zeros(rows, jnp.int32), (temperature, seeds, filters), launch)


def greedy_case(rows: int) -> Case:
    def launch(tokens, logits):
        # No token is below zero: zeros, for which XLA has to wait.
        waited = jnp.minimum(tokens, 0)[:, None].astype(logits.dtype)
        return most_likely(logits + waited)

    return Case(jnp.zeros(rows, jnp.int32), (), launch)


def llm_case(rows: int, vocab: int) -> Case:
    """Draw by seats, as an `LLM` does."""
    write = jax.jit(write_seat, donate_argnums=(0, 1))
    state = Seats.zeros(rows, vocab), jnp.zeros((rows, vocab), jnp.int32)
    prompt = list(range(min(512, vocab)))
    for seat in range(rows):
        row = SeatRow.of(
            PARAMS,
            seed=seat,
            prompt=prompt,
            stop_ids=(2,),
            vocab_size=vocab,
            max_len=2048,
        )
        state = write(*state, np.int32(seat), row)
    seats, counts = state
    order = jnp.asarray(np.random.default_rng(0).permutation(rows), jnp.int32)

    def launch(carry, logits, seats, order):
        tokens, counts, newest = carry
        rows = jnp.stack([order, tokens])
        return draw(seats, counts, newest, logits, tokens, rows)

    tokens, newest = jnp.zeros((2, rows), jnp.int32)
    return Case((tokens, counts, newest), (seats, order), launch)


def logprobs_case(rows: int) -> Case:
    def launch(carry, logits):
        tokens, sums = carry
        result = token_logprobs(logits, tokens)
        # Of all of it something stays, and the next launch needs the rank.
        return result.rank - 1, jax.tree.map(jnp.add, sums, result)

    tokens = jnp.zeros(rows, jnp.int32)
    shape = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    empty = jax.eval_shape(token_logprobs, shape, tokens)
    return Case((tokens, jax.tree.map(jnp.zeros_like, empty)), (), launch)


def cases(rows: int, vocab: int) -> dict[str, Callable[[], Case]]:
    filters = {
        "temperature": (),
        "top_k": ("top_k",),
        "top_p": ("top_p",),
        "min_p": ("min_p",),
        "all filters": ("top_k", "top_p", "min_p"),
    }
    return {
        "greedy": lambda: greedy_case(rows),
        **{
            name: lambda names=names: filter_case(rows, names)
            for name, names in filters.items()
        },
        "draw": lambda: llm_case(rows, vocab),
        "logprobs": lambda: logprobs_case(rows),
    }


def run_case(case: Case, rows: int, vocab: int) -> Times:
    """Return the times of a launch."""

    @jax.jit
    def random_logits(seed):
        # About as peaked as a model's: the nucleus of 0.9 has some hundred tokens.
        return 2.5 * jax.random.normal(jax.random.key(seed), (rows, vocab))

    operands = [(random_logits(i),) for i in range(num_sets(4 * rows * vocab))]
    carries = [case.carry]
    step = compile_step(case.launch, carries, operands, case.shared)
    times, _ = measure(step, carries, operands, case.shared)
    return times


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocab", type=int, default=128256)
    names = list(cases(1, 1))
    parser.add_argument("--cases", nargs="+", choices=names, help="all by default")
    Log.add_options(parser)
    args = parser.parse_args(argv)
    log = Log(args)
    table = Table(title=f"choosing tokens, vocabulary of {args.vocab}")
    for column in ("rows", "what", "us"):
        table.add_column(column, justify="right")
    for rows in args.rows:
        for name, make in cases(rows, args.vocab).items():
            if args.cases and name not in args.cases:
                continue
            num_bytes = 4 * rows * args.vocab  # the logits, read once
            floor_us = num_bytes / PEAK_BYTES_PER_S * 1e6
            times = run_case(make(), rows, args.vocab).fields(floor_us=floor_us)
            about = {"case": name, "rows": rows, "vocab": args.vocab}
            about |= {"bytes": num_bytes, "floor_us": floor_us}
            log.add({"benchmark": "sampling", **about, **times})
            table.add_row(str(rows), name, f"{times['us']:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
