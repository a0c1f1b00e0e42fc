"""The loop that steps sequences until they end: schedule, run, collect, emit.

Knows sequences as rows of steps; who sits where is the scheduler's business, what a
step computes the runner's, and prompts, names and texts are others'.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from punica_jax.batch import BLOCK_ROWS, Batch, Buckets, Feed, Wanted
from punica_jax.chunk import Chunk
from punica_jax.claims import Adapters
from punica_jax.forward import NO_TOKEN
from punica_jax.logprobs import Logprobs
from punica_jax.pages import KvPages
from punica_jax.policies import FirstComeFirstServed, Policy
from punica_jax.progress import compiling
from punica_jax.request import (
    DeadlineError,
    FinishReason,
    RequestError,
    TokenLogprobs,
)
from punica_jax.runner import Launched, Output, Runner
from punica_jax.scheduler import Scheduler
from punica_jax.seats import SeatRow
from punica_jax.sequence import SequenceState
from punica_jax.sizes import Sizes


class _Flight(NamedTuple):
    """A step that is launched and not collected."""

    rows: list[tuple[SequenceState, Chunk]]
    num_prompt_rows: int
    launched: Launched


class StepLoop:
    """Sequences in flight on one runner.

    A step is launched before the one before it is read: the tokens that the host does
    not know yet are on the device. A sequence whose end is found late has one row too
    many in the step that is then in flight; nothing of it counts, and its seat and
    pages are free when that step is through.

    Attributes:
      num_steps: steps launched so far.
      num_step_sequences, num_step_rows: of the newest one; 0 while there is none.
    """

    def __init__(
        self,
        runner: Runner,
        sizes: Sizes,
        adapters: Adapters,
        policy: Callable[[], Policy] = FirstComeFirstServed,
    ):
        """Begin with nobody.

        Args:
          runner: runs the steps.
          sizes: what it was made with.
          adapters: where adapters come from.
          policy: makes the queue of those that wait.
        """
        self._runner = runner
        self._sizes = sizes
        self._adapters = adapters
        self._policy = policy
        self._buckets = Buckets(sizes.max_seats, sizes.max_rows)
        self.num_steps = self.num_step_sequences = self.num_step_rows = 0
        self.reset()

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs, or a step has not been collected."""
        return self._flight is not None or self.scheduler.busy

    @property
    def has_flight(self) -> bool:
        """Whether a step has not been collected."""
        return self._flight is not None

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Let sequences wait for a seat."""
        sequences = list(sequences)
        self.scheduler.add(sequences)
        for one in sequences:
            if one.terms.deadline_s is not None:
                due_s = one.arrived_s + one.terms.deadline_s
                heapq.heappush(self._timed, (due_s, one.arrival, one))

    def cancel(
        self, sequence: SequenceState, reason: FinishReason = "cancelled"
    ) -> None:
        """End a sequence; all it holds is free when the next `step` returns."""
        if not sequence.is_over:
            sequence.cancel(reason)
            self._ending.append(sequence)

    def clear(self) -> None:
        """Forget all sequences between two steps; known prefixes stay."""
        left = RequestError("its caller has left it")
        for sequence in self.scheduler.sequences:
            sequence.fail(left)
        self._collect()
        for sequence in self.scheduler.sequences:
            self.scheduler.release(sequence)
        self._ending, self._over, self._timed = [], [], []

    def reset(self) -> None:
        """Forget all sequences and prefixes, wherever a step was interrupted."""
        policy = self._policy()
        if not isinstance(policy, Policy):
            raise ValueError(f"policy must make a Policy, got {policy!r}")
        self.pages = KvPages(self._sizes.num_kv_pages, self._sizes.page_size)
        self.scheduler = Scheduler(
            self.pages,
            self._adapters,
            max_seats=self._sizes.max_seats,
            max_rows=self._buckets.max_rows,
            policy=policy,
        )
        self._flight: _Flight | None = None
        self._ending: list[SequenceState] = []
        self._over: list[SequenceState] = []
        self._timed: list[tuple[float, int, SequenceState]] = []  # a heap
        self._collected_s = time.monotonic()

    def warm_up(self, *, progress: bool = False) -> None:
        """Compile every program that a step can need; show which, if so."""
        runner, pages_per_seq = self._runner, self._sizes.pages_per_seq
        buckets = list(self._buckets)
        with compiling(len(buckets) + 1, progress) as note:
            for bucket, seconds in runner.compile(buckets, pages_per_seq):
                note(bucket.name, seconds)
            start_s = time.monotonic()
            runner.warm_up(buckets, pages_per_seq)
            steps = {bucket.name for bucket in buckets}
            others = [name for name in runner.programs if name not in steps]
            note("\n".join(others), time.monotonic() - start_s)

    def step(self) -> list[SequenceState]:
        """Launch a step, collect the one before it, and tell sequences their tokens.

        Returns:
          Those that are over, and hold nothing any more.
        """
        self._emit()
        flight = self._run(self._schedule())
        self._collect()
        self._flight = flight
        self._emit()
        over, self._over = self._over, []
        return over

    def _schedule(self) -> list[tuple[SequenceState, int]]:
        scheduled = self.scheduler.schedule(may_preempt=self._flight is None)
        if scheduled is None:
            # Who loses its seat must not be written to by a step in flight.
            self._collect()
            self._emit()
            scheduled = self.scheduler.schedule(may_preempt=True)
            assert scheduled is not None
        self._ending += self.scheduler.refused
        self.scheduler.refused.clear()
        return scheduled

    def _run(self, scheduled: list[tuple[SequenceState, int]]) -> _Flight | None:
        self.num_step_sequences = len(scheduled)
        self.num_step_rows = sum(num_rows for _, num_rows in scheduled)
        if not scheduled:
            return None
        rows, num_prompt_rows = [], 0
        for sequence, num_rows in scheduled:
            if sequence.draws and not sequence.has_drawn:
                self._write_seat(sequence)
            rows.append((sequence, sequence.launch(num_rows)))
            num_prompt_rows += num_rows if num_rows > 1 else 0
        chunks = [chunk for _, chunk in rows]
        bucket = self._buckets.of(chunks)
        launched = self._runner.launch(
            Batch.of(chunks, bucket, self._sizes.pages_per_seq),
            Wanted.of(chunks, bucket),
            Feed.of(chunks, bucket),
        )
        # Behind the launch: the device is at work meanwhile.
        for sequence, _ in rows:
            self._publish(sequence)
        self.num_steps += 1
        return _Flight(rows, num_prompt_rows, launched)

    def _collect(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            self._collected_s = time.monotonic()
            return
        output = self._runner.collect(flight.launched)
        before_s, self._collected_s = self._collected_s, time.monotonic()
        if any(len(chunk.tokens) == 1 for _, chunk in flight.rows):
            step_s = self._collected_s - before_s
            self.scheduler.observe(flight.num_prompt_rows, step_s)
        first = 0
        tokens = output.tokens.tolist()
        for i, (sequence, chunk) in enumerate(flight.rows):
            token = tokens[i]
            error = self.scheduler.error_of(sequence)
            if error is None and chunk.ends and token == NO_TOKEN:
                adapter = sequence.adapter
                error = RequestError(
                    "the model's logits are not finite after token "
                    f"{chunk.kv_len} of a sequence"
                    + (f" with adapter {adapter!r}" if adapter is not None else "")
                )
            if error is not None:
                self.pages.forget(sequence.pages)
                sequence.fail(error)
            if chunk.wants_logprobs or chunk.targets:
                rows = range(first, first + len(chunk.targets))
                wanted = _logprobs(sequence, chunk, output, i, rows)
                sequence.collect(chunk, token, *wanted)
            else:
                sequence.collect(chunk, token)
            first += len(chunk.tokens)
        self._ending += self._ended(sequence for sequence, _ in flight.rows)

    def _ended(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        known = set(self._ending)
        return [one for one in sequences if one.is_over and one not in known]

    def _emit(self) -> None:
        """Release those that are over and in no step."""
        if self._timed:
            self._end_late()
        over = [one for one in self._ending if not one.num_in_flight]
        if over:
            self._ending = [one for one in self._ending if one.num_in_flight]
            for sequence in over:
                self.scheduler.release(sequence)
            self._over += over
            self._forget_punctual()

    def _forget_punctual(self) -> None:
        """Keep those that ended in time no longer than there are as many others."""
        num_left = self.scheduler.num_waiting + len(self.scheduler.running)
        if len(self._timed) > 2 * num_left:
            self._timed = [entry for entry in self._timed if not entry[-1].is_over]
            heapq.heapify(self._timed)

    def _end_late(self) -> None:
        now_s = time.monotonic()
        while self._timed and self._timed[0][0] < now_s:
            _, _, sequence = heapq.heappop(self._timed)
            if not sequence.is_over:
                sequence.fail(
                    DeadlineError(
                        "a request was not answered within its deadline of "
                        f"{sequence.terms.deadline_s:g} s; "
                        f"{len(sequence.new_tokens)} tokens had come"
                    )
                )
                self._ending.append(sequence)

    def _publish(self, sequence: SequenceState) -> None:
        """Let others find the pages that a sequence fills, before they are written.

        Steps run one after the other: who reads them does so in a later one. (Within
        one a row's key may be written while others attend: see `lora_attention`.)
        """
        num_full = sequence.num_known_cached // self.pages.page_size
        if num_full > sequence.num_published:
            digests, weights = sequence.page_digests, sequence.weights
            self.pages.publish(sequence.pages, digests, num_full, weights)
            sequence.num_published = num_full

    def _write_seat(self, sequence: SequenceState) -> None:
        self._runner.write_seat(
            sequence.seat,
            SeatRow.of(
                sequence.sampling,
                seed=sequence.seed,
                prompt=sequence.tokens[: sequence.num_prompt],
                output=sequence.new_tokens,
                stop_ids=sequence.stop_ids,
                vocab_size=self._runner.vocab_size,
                max_len=self._sizes.max_tokens,
            ),
        )
        sequence.has_drawn = True


def _logprobs(
    sequence: SequenceState, chunk: Chunk, output: Output, i: int, rows: Iterable[int]
) -> tuple[TokenLogprobs | None, list[TokenLogprobs]]:
    """Return those of a chunk's new token and of its prompt's, as far as wanted."""
    logprobs = None
    if chunk.wants_logprobs and output.logprobs is not None:
        logprobs = output.logprobs.of(i, sequence.sampling.logprobs or 0)
    num_top = sequence.sampling.prompt_logprobs or 0
    return logprobs, _prompt_logprobs(output.prompt_logprobs, rows, num_top)


def _prompt_logprobs(
    blocks: Mapping[int, Logprobs], rows: Iterable[int], num_top: int
) -> list[TokenLogprobs]:
    return [blocks[row // BLOCK_ROWS].of(row % BLOCK_ROWS, num_top) for row in rows]
