"""What `benchmarks.serving` runs, one case after the other; each gives a record.

Knows requests, adapters and a server's steps; nothing of goals or of files of results.
"""

import asyncio
import functools
import itertools
import math
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapter_copies import copies
from benchmarks.serving_adapters import (
    AllThere,
    LargestGroup,
    OneAtATime,
    on_disk,
)
from benchmarks.serving_goals import vllm
from benchmarks.serving_model import Answer, Server, Step, middle, summary
from benchmarks.serving_trace import (
    Law,
    Request,
    drawn_names,
    popular_names,
    requests_for,
    under_way,
)
from punica_jax.bench_model import BenchModel
from punica_jax.memory import host_adapter_bytes
from punica_jax.models import EmptyBuffer
from punica_jax.pallas_kernels.shapes import Popularity
from punica_jax.sizes import Sizes
from punica_jax.tasks import Tasks

Record = dict[str, Any]
_POLL_S = 0.01
# Odd, so that one of them is the middle one.
_BATCH_RUNS = 3
# Requests of their own kind, beyond the numbers of others.
_COLD_NUMBER = 1 << 20
# Steps of the baseline before those that count: its first prompt.
_SWAP_WARM_UP = 10


class Cases:
    """One model, and what is asked of it."""

    def __init__(
        self,
        bench: BenchModel,
        sizes: Sizes,
        *,
        seconds: float,
        swap_steps: int,
        num_requests: int,
    ):
        """Take a model whose programs are compiled.

        Args:
          bench: its runner is a `WatchedRunner`.
          sizes: what it is served with.
          seconds: of a steady window.
          swap_steps: of the baseline's window.
          num_requests: of a trace.
        """
        self.bench, self.sizes = bench, sizes
        self._seats = sizes.max_seats
        self._seconds = seconds
        self._swap_steps = swap_steps
        self._num_requests = num_requests

    @functools.cached_property
    def _empty(self) -> EmptyBuffer:
        """Makes memory for adapters as an engine has it; locking takes seconds."""
        return self.bench.runner.adapters.lock(host_adapter_bytes(None))

    def trace(self, popularity: Popularity | None, *, whole: bool) -> Record:
        """Serve the paper's workload, for a while or from its start to its end."""
        requests = self._requests(popular_names(popularity, self._num_requests))
        server = self._all_there(requests, AllThere(self.sizes.num_slots))
        if whole:
            start_s = time.monotonic()
            asyncio.run(server.serve(iter(requests), self._seats))
            steps = [_mark(start_s), *server.steps]
        else:
            steps, _ = self._steady(server, under_way(requests, self._seats))
        fields = summary(self.bench, steps)
        return {"popularity": popularity or "none", "whole": whole, **fields}

    def group_swap(self, popularity: Popularity) -> Record:
        """The same where only one adapter's requests run at a time."""
        requests = self._requests(popular_names(popularity, self._num_requests))
        adapters = OneAtATime(self.sizes.num_slots)
        server = self._all_there(
            requests, adapters, policy=lambda: LargestGroup(adapters)
        )
        end = _SWAP_WARM_UP + self._swap_steps
        until = _until(lambda: len(server.steps) >= end)
        asyncio.run(server.serve(under_way(requests, self._seats), self._seats, until))
        fields = summary(self.bench, server.steps[_SWAP_WARM_UP - 1 : end])
        return {"popularity": popularity, "whole": False, **fields}

    def batch(
        self, popularity: Popularity | None, prompt_len: int, num_new: int, shape: str
    ) -> Record:
        """Serve as many requests as there are seats, at once, start to end.

        Several times, for one run alone may wait for the host or for the card's power:
        the record is of the one that took the middle time, and says how far the others
        are from it.
        """
        requests = [
            Request(
                number=number, prompt_len=prompt_len, num_new=num_new, adapter=name
            ).with_tokens(self.bench.config.vocab_size)
            for number, name in enumerate(popular_names(popularity, self._seats))
        ]
        runs = []
        for _ in range(_BATCH_RUNS):
            server = self._all_there(requests, AllThere(self.sizes.num_slots))
            start_s = time.monotonic()
            asyncio.run(server.serve(iter(requests), self._seats))
            fields = summary(self.bench, [_mark(start_s), *server.steps])
            first_s = max(answer.first_s for answer in server.answers) - start_s
            runs.append(fields | {"all_first_ms": 1e3 * first_s})
        name = popularity or "none"
        record = {
            "popularity": name,
            "rows": self._seats,
            "prompt_len": prompt_len,
            "num_new": num_new,
            **middle(runs),
        }
        if (prompt_len, num_new) == (512, 128):
            record |= vllm(shape, self._seats, name)
        return record

    def copy(self, folder: Path) -> Record:
        """Time an adapter's way from host memory to the device, and plain copies."""
        return copies(self.bench, folder / "a0", self._empty)

    def cold(self, folder: Path, count: int, beside: int) -> Iterator[Record]:
        """Ask for adapters that are on disk, then for the same ones on the host.

        Args:
          folder: has adapters `a0` and on.
          count: how many are asked for.
          beside: requests that decode meanwhile, each under another adapter.
        """
        others = [f"a{count + number}" for number in range(beside)]
        names = [f"a{number}" for number in range(count)]
        every = [*others, *names]
        awake: queue.SimpleQueue[None] = queue.SimpleQueue()
        tasks = Tasks.threads(functools.partial(awake.put, None))
        residence = on_disk(
            self.bench,
            folder,
            every,
            tasks,
            num_slots=beside + 1,
            host_bytes=math.inf,
            empty=self._empty,
        )
        for name in others:
            residence.pin(name)
        server = Server(self.bench, self.sizes, residence, awake=awake)
        loads: list[tuple[Answer, float, float]] = []

        async def ask() -> None:
            await _until(lambda: len(server.answers) >= beside)
            for number, name in enumerate([*names, *names]):
                await _until(lambda: not tasks)
                load_s = residence[name].stats.load_s
                before_s = load_s.total_s
                answer = await server.answer(
                    Request(
                        number=_COLD_NUMBER + number,
                        prompt_len=1,
                        num_new=1,
                        adapter=name,
                    )
                )
                await _until(lambda: not tasks)
                # An idle server gives a seat before the copy is through.
                seat_s = answer.seated_s - answer.asked_s
                usable_s = max(seat_s, load_s.total_s - before_s)
                loads.append((answer, usable_s, time.monotonic()))

        try:
            asyncio.run(server.serve(self._decoding(others), beside, ask()))
        finally:
            tasks.shutdown()
        for tier in ("disk", "host"):
            found = [load for load in loads if load[0].tier == tier]
            times = [1e3 * usable_s for _, usable_s, _ in found]
            windows = [(one.asked_s, end_s) for one, _, end_s in found]
            yield {
                "tier": tier,
                "beside": beside,
                "loads": len(found),
                "ms": statistics.median(times),
                "slowest_load_ms": max(times),
                **(_decode_during(server.steps, windows) if beside else {}),
            }

    def churn(
        self, folder: Path | None, law: Law, num_adapters: int, num_slots: int
    ) -> Record:
        """Serve the paper's lengths under many adapters.

        Args:
          folder: where they are; None if nothing needs to be loaded.
          law: how popular they are.
          num_adapters: how many there are.
          num_slots: how many the device has.
        """
        names = drawn_names(law, self._num_requests, num_adapters)
        trace = self._requests(names)
        requests = under_way(trace, self._seats)
        if folder is None:
            server = self._all_there(trace, AllThere(num_slots))
            steps, answers = self._steady(server, requests)
        else:
            awake: queue.SimpleQueue[None] = queue.SimpleQueue()
            tasks = Tasks.threads(functools.partial(awake.put, None))
            residence = on_disk(
                self.bench,
                folder,
                [f"a{number}" for number in range(num_adapters)],
                tasks,
                num_slots=num_slots,
                host_bytes=host_adapter_bytes(None),
                empty=self._empty,
            )
            server = Server(self.bench, self.sizes, residence, awake=awake)
            try:
                steps, answers = self._steady(server, requests)
            finally:
                tasks.shutdown()
        # The first ones began with what others had generated.
        new = [one for one in answers if one.request.number >= self._seats]
        record = {
            "law": law,
            "method": "all_there" if folder is None else "loaded",
            "adapters": num_adapters,
            "slots": num_slots,
            **summary(self.bench, steps),
        }
        cold = [one for one in new if one.tier in ("disk", "host")]
        warm = [one for one in new if one not in cold]
        for name, found in (("warm", warm), ("cold", cold)):
            record[f"num_{name}"] = len(found)
            times = [1e3 * (one.first_s - one.asked_s) for one in found]
            for percent in (50, 99):
                value = float(np.percentile(times, percent)) if times else None
                record[f"{name}_p{percent}_ms"] = value
        return record

    def _all_there(
        self, requests: Sequence[Request], adapters: AllThere, **options: Any
    ) -> Server:
        """Serve with adapters that need no loading."""
        names = {one.adapter for one in requests if one.adapter is not None}
        residence = on_disk(
            self.bench,
            Path(),  # nothing is read
            names,
            Tasks.threads(lambda: None),
            num_slots=1,
            host_bytes=0,
        )
        return Server(self.bench, self.sizes, residence, adapters=adapters, **options)

    def _requests(self, names: Sequence[str | None]) -> list[Request]:
        return requests_for(names, self.sizes.max_model_len)

    def _decoding(self, names: Sequence[str]) -> Iterator[Request]:
        """Yield requests that decode for as long as they can.

        The first ones begin evenly far on, those that follow with one token: a step has
        about as many tokens at any time, and its time does not grow.
        """
        most = self.sizes.max_model_len
        for number in itertools.count():
            is_first = number < len(names)
            prompt_len = 1 + (most - 1) * number // len(names) if is_first else 1
            yield Request(
                number=number,
                prompt_len=prompt_len,
                num_new=most - prompt_len,
                adapter=names[number % len(names)],
            )

    def _steady(
        self, server: Server, requests: Iterator[Request]
    ) -> tuple[list[Step], list[Answer]]:
        """Serve for the window's seconds, or a step, from when all seats have begun."""
        window: list[tuple[float, int]] = []

        async def until() -> None:
            await _until(lambda: len(server.answers) >= self._seats)
            first = len(server.steps)
            window.append((time.monotonic(), first - 1))
            await asyncio.sleep(self._seconds)
            await _until(lambda: len(server.steps) > first)  # a slow step takes longer
            window.append((time.monotonic(), len(server.steps)))

        asyncio.run(server.serve(requests, self._seats, until()))
        (start_s, first), (end_s, last) = window
        answers = [one for one in server.answers if start_s < one.first_s <= end_s]
        return server.steps[max(first, 0) : last], answers


def _decode_during(
    steps: Sequence[Step], windows: Sequence[tuple[float, float]]
) -> Record:
    """Return the slowest decode step in some windows, and the median outside."""
    inside, outside = [], []
    for before, step in itertools.pairwise(steps):
        if step.decodes and before.decodes:
            is_inside = any(
                before.end_s < end_s and step.end_s > start_s
                for start_s, end_s in windows
            )
            spent_ms = 1e3 * (step.end_s - before.end_s)
            (inside if is_inside else outside).append(spent_ms)
    median = statistics.median(outside or inside)
    slowest = max(inside)
    return {
        "median_ms": median,
        "slowest_ms": slowest,
        "slowest_over_median": slowest / median,
    }


def _mark(time_s: float) -> Step:
    """Return a step of nothing, which ended then."""
    return Step(
        end_s=time_s,
        waited_s=0.0,
        was_ready=False,
        decodes=False,
        num_seqs=0,
        num_new=0,
        kv_tokens=0,
        num_adapters=0,
    )


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(_POLL_S)
