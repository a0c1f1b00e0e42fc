"""Host time of choosing a step's rows: `python -m benchmarks.scheduling`.

Nothing is computed: sequences decode, others wait, and the scheduler is asked again and
again. In `full` no seat is free; in `missing` half of the seats are, and nobody who
waits gets its adapter, each another one, so that the whole queue is asked. Time is the
thread's own, whoever else uses the core. `schedule_ms` is to be under 1 ms; `step_ms`
is all that the host does for a step but for its arrays: rows are chosen and taken, and
their tokens noted.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import models

from benchmarks.provenance import Log
from punica_jax.claims import Resident
from punica_jax.pages import KvPages
from punica_jax.placements import Held
from punica_jax.policies import (
    FairShare,
    FirstComeFirstServed,
    LatencyTargets,
    Policy,
)
from punica_jax.request import SamplingParams, Terms
from punica_jax.scheduler import Scheduler
from punica_jax.sequence import SequenceState
from punica_jax.tokenizer import Tokenizer

POLICIES: dict[str, Callable[[], Policy]] = {
    "first_come": FirstComeFirstServed,
    "latency": lambda: LatencyTargets(token_s=0.05),
    "fair_share": FairShare,
}
CASES = ("full", "missing")
_PAGE_SIZE = 64
_PROMPT_LEN = 100
_NUM_NEW = 4096
_MAX_ROWS = 2048
_TOKENIZER = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 1}, "a")))


class _Adapters:
    """So many adapters are there; no other finds room."""

    def __init__(self, num_there: int):
        self._there = {str(slot): Held(slot, slot + 1) for slot in range(num_there)}

    def claim(self, name: str | None) -> Resident | None:
        return self._there.get(name or "0")

    def is_here(self, name: str | None) -> bool:
        return (name or "0") in self._there

    def lacks_room(self, name: str | None) -> bool:
        return not self.is_here(name)

    def release(self, resident: Resident) -> None:
        pass


class Bench:
    """A scheduler whose sequences decode, one row each, and do not end.

    Attributes:
      scheduler: the scheduler.
    """

    def __init__(
        self, case: str, policy: Policy, running: int, waiting: int, tenants: int = 1
    ):
        """Seat the ones that run, and let the others come.

        Args:
          case: one of `CASES`.
          policy: the queue.
          running: sequences that decode.
          waiting: sequences that wait, each for an adapter of its own.
          tenants: among whom they are spread.
        """
        num_tokens = _PROMPT_LEN + _NUM_NEW
        self._pages = KvPages(running * -(-num_tokens // _PAGE_SIZE), _PAGE_SIZE)
        self.scheduler = Scheduler(
            self._pages,
            _Adapters(running),
            max_seats=running if case == "full" else 2 * running,
            max_rows=max(_MAX_ROWS, 2 * running),
            policy=policy,
        )
        sequences = [_sequence(n, n % tenants) for n in range(running + waiting)]
        self.scheduler.add(sequences[:running])
        while any(sequence.num_left > 1 for sequence in sequences[:running]):
            self.step()
        self.scheduler.add(sequences[running:])

    def step(self) -> float:
        """Go one step on; returns the seconds in which its rows were chosen."""
        start = time.thread_time()
        scheduled = self.scheduler.schedule(may_preempt=True)
        chosen_s = time.thread_time() - start
        assert scheduled is not None
        rows = [(sequence, sequence.launch(rows)) for sequence, rows in scheduled]
        for sequence, chunk in rows:
            if sequence.num_known_cached % _PAGE_SIZE < len(chunk.tokens):
                known = sequence.tokens[: sequence.num_known_cached]
                self._pages.publish(sequence.pages, known, sequence.weights)
        for sequence, chunk in rows:
            sequence.collect(chunk, 1)
        return chosen_s


def _sequence(number: int, tenant: int) -> SequenceState:
    return SequenceState(
        index=number,
        prompt_index=number,
        sample_index=0,
        prompt=[number] * _PROMPT_LEN,
        adapter=str(number),
        sampling=SamplingParams(max_new_tokens=_NUM_NEW, ignore_eos=True),
        tokenizer=_TOKENIZER,
        max_model_len=_PROMPT_LEN + _NUM_NEW,
        on_token=None,
        terms=Terms(tenant=str(tenant)),
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    Log.add_options(parser)
    args = parser.parse_args(words)
    log = Log(args)
    for policy, make in POLICIES.items():
        for case in CASES:
            sizes = {
                "running": args.running,
                "waiting": args.waiting,
                "tenants": args.tenants,
            }
            bench = Bench(case, make(), **sizes)
            record = {"benchmark": "scheduling", "policy": policy, "case": case}
            log.add({**record, **sizes, **measure(bench, args.steps)})


def measure(bench: Bench, steps: int) -> dict[str, Any]:
    """Return the medians of some steps' times, and what nine in ten are below."""
    chosen_ms, step_ms = [], []
    for _ in range(steps):
        start = time.thread_time()
        chosen_ms.append(bench.step() * 1e3)
        step_ms.append((time.thread_time() - start) * 1e3)
    return {
        "schedule_ms": statistics.median(chosen_ms),
        "schedule_p90_ms": statistics.quantiles(chosen_ms, n=10)[-1],
        "step_ms": statistics.median(step_ms),
    }


if __name__ == "__main__":
    main()
