"""Host time of choosing a step's rows: `python -m benchmarks.scheduling`.

Nothing is computed: sequences decode, others wait, and the scheduler is asked again and
again. Time is the thread's own, whoever else uses the core; the garbage collector is
off, for it walks all that a process has. `schedule_ms` is to be under 1 ms; `step_ms`
is all that the host does for a step but for its arrays: rows are chosen and taken, and
their tokens noted. `look_ms` is how fast Python is here and now, between the steps: a
look at as many objects as there are sequences. It differs severalfold between machines
of one name, and by the hour: compare runs by what they take in looks.
"""

import argparse
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
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
CASES = {
    "full": "no seat is free",
    "tenants": "nor here, and each sequence is of a tenant of its own",
    "missing": "half of the seats are free, and nobody who waits gets its adapter, "
    "each another one: the whole queue is asked",
    "shared": "half of the seats are free; all that wait share a beginning and an "
    "adapter, sit down as rows are left, and go with one token; where fewer wait than "
    "are to, a quarter as many come at once",
}
GOAL_MS = 1.0
SHARED_LEN = 7000
_PAGE_SIZE = 64
_PROMPT_LEN = 100
_NUM_NEW = 4096
_OWN_LEN = 20  # tokens of a prompt after those that are shared
_MAX_ROWS = 2048
_WORDS = {str(number): number for number in range(1000)}
_TOKENIZER = Tokenizer(tokenizers.Tokenizer(models.WordLevel(_WORDS, "0")))


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

    def share(self, resident: Resident) -> Resident:
        return resident

    def release(self, resident: Resident) -> None:
        pass

    def forgo(self, name: str) -> None:
        pass


class _Other:
    """What Python takes a look at, of nobody's code."""

    def __init__(self, number: int):
        self.number = number
        self.rest = {number: [number]}


def _look(others: Sequence[_Other]) -> int:
    total = 0
    for other in others:
        if other.number in other.rest:
            total += len(other.rest[other.number])
    return total


class Bench:
    """A scheduler whose sequences decode, one row each.

    Attributes:
      scheduler: the scheduler.
      tenants: among whom all are spread.
    """

    def __init__(
        self, case: str, policy: Policy, running: int, waiting: int, tenants: int = 1
    ):
        """Seat the ones that run, and let the others come.

        Args:
          case: one of `CASES`.
          policy: the queue.
          running: sequences that decode, and do not end.
          waiting: sequences that wait, at least.
          tenants: how many there are, unless the case says it.
        """
        self._case, self._waiting = case, waiting
        self.tenants = running + waiting if case == "tenants" else tenants
        has_free_seats = case in ("missing", "shared")
        max_seats = 2 * running if has_free_seats else running
        max_len = SHARED_LEN + _PROMPT_LEN + _NUM_NEW
        self._pages = KvPages(max_seats * -(-max_len // _PAGE_SIZE), _PAGE_SIZE)
        self.scheduler = Scheduler(
            self._pages,
            _Adapters(running),
            max_seats=max_seats,
            max_rows=max(_MAX_ROWS, 2 * max_seats),
            policy=policy,
        )
        self._numbers = itertools.count()
        first = [self._sequence() for _ in range(running)]
        self.scheduler.add(first)
        while any(sequence.num_left > 1 for sequence in first):
            self.step()
        self._come(waiting)

    def refill(self) -> None:
        """Let more come if fewer wait than are to."""
        while self.scheduler.num_waiting < self._waiting:
            self._come(-(-self._waiting // 4))

    def step(self) -> float:
        """Go one step on; returns the seconds in which its rows were chosen."""
        start = time.thread_time()
        scheduled = self.scheduler.schedule(may_preempt=True)
        chosen_s = time.thread_time() - start
        assert scheduled is not None
        rows = [(sequence, sequence.launch(rows)) for sequence, rows in scheduled]
        for sequence, _ in rows:
            num_full = sequence.num_known_cached // _PAGE_SIZE
            if num_full > sequence.num_published:
                digests, weights = sequence.page_digests, sequence.weights
                self._pages.publish(sequence.pages, digests, num_full, weights)
                sequence.num_published = num_full
        for sequence, chunk in rows:
            sequence.collect(chunk, 1)
            if sequence.is_over:
                self.scheduler.release(sequence)
        return chosen_s

    def _come(self, num_new: int) -> None:
        shares = self._case == "shared"
        self.scheduler.add([self._sequence(shares=shares) for _ in range(num_new)])

    def _sequence(self, *, shares: bool = False) -> SequenceState:
        number = next(self._numbers)
        prompt = [number % 1000] * (_OWN_LEN if shares else _PROMPT_LEN)
        if shares:
            prompt = [*(n % 1000 for n in range(SHARED_LEN)), *prompt]
        return SequenceState(
            index=number,
            prompt_index=number,
            sample_index=0,
            prompt=prompt,
            adapter="0" if shares else str(number),
            sampling=SamplingParams(
                max_new_tokens=1 if shares else _NUM_NEW, ignore_eos=True
            ),
            tokenizer=_TOKENIZER,
            max_model_len=len(prompt) + _NUM_NEW,
            page_size=_PAGE_SIZE,
            on_token=None,
            terms=Terms(tenant=str(number % self.tenants)),
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
            sizes = {"running": args.running, "waiting": args.waiting}
            bench = Bench(case, make(), **sizes, tenants=args.tenants)
            sizes["tenants"] = bench.tenants
            record = {"benchmark": "scheduling", "policy": policy, "case": case}
            log.add({**record, **sizes, **measure(bench, args.steps), "cpu": _cpu()})


def measure(bench: Bench, steps: int) -> dict[str, Any]:
    """Return what steps take: the median, what nine in ten are below, and the most."""
    chosen_ms, step_ms, look_ms = [], [], []
    num_sequences = len(bench.scheduler.running) + bench.scheduler.num_waiting
    others = [_Other(number) for number in range(num_sequences)]
    gc.collect()  # what is left of other cases
    gc.disable()
    try:
        for _ in range(steps):
            bench.refill()
            start = time.thread_time()
            chosen_ms.append(bench.step() * 1e3)
            step_ms.append((time.thread_time() - start) * 1e3)
            start = time.thread_time()
            _look(others)
            look_ms.append((time.thread_time() - start) * 1e3)
    finally:
        gc.enable()
    return {
        name + suffix: value
        for name, times in (
            ("schedule", chosen_ms),
            ("step", step_ms),
            ("look", look_ms),
        )
        for suffix, value in (
            ("_ms", statistics.median(times)),
            ("_p90_ms", statistics.quantiles(times, n=10, method="inclusive")[-1]),
            ("_max_ms", max(times)),
        )
    }


def _cpu() -> str:
    """Return what the processor calls itself."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
