"""The loop that steps sequences until they end: schedule, run, collect, emit.

Knows sequences, seats and pages; what a step computes is the runner's business, and
prompts, names and texts are others'.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from punica_jax.batch import BLOCK_ROWS, Batch, Buckets, Wanted
from punica_jax.logprobs import Logprobs
from punica_jax.pages import KvPages
from punica_jax.request import TokenLogprobs
from punica_jax.runner import Runner
from punica_jax.scheduler import schedule
from punica_jax.seats import SeatRow
from punica_jax.sequence import SequenceState
from punica_jax.sizes import Sizes


class Engine:
    """Sequences in flight on one runner.

    A sequence that sits has a seat and pages for all tokens that it can ever have, so
    it never has to wait again. The others wait in order. Full pages of a prompt that an
    earlier sequence has computed under the same weights are shared, not computed again.
    """

    def __init__(self, runner: Runner, sizes: Sizes):
        self._runner = runner
        self._sizes = sizes
        self._buckets = Buckets(sizes.max_seats, sizes.max_rows)
        self.reset()

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Let sequences wait for a seat."""
        self._waiting.extend(sequences)

    def clear(self) -> None:
        """Forget all sequences between two steps; known prefixes stay."""
        for sequence in self._running:
            self._pages.free(sequence.pages)
        self._waiting: deque[SequenceState] = deque()
        self._running = []
        self._free_seats = list(range(self._sizes.max_seats))

    def reset(self) -> None:
        """Forget all sequences and prefixes, wherever a step was interrupted."""
        self._pages = KvPages(self._sizes.num_kv_pages, self._sizes.page_size)
        self._running: list[SequenceState] = []
        self.clear()

    def warm_up(self) -> None:
        """Compile every program that a step can need."""
        self._runner.warm_up(self._buckets, self._sizes.pages_per_seq)

    def step(self) -> None:
        """Seat who can sit, run one step, and tell the sequences their tokens."""
        self._admit()
        scheduled = schedule(self._running, self._buckets.max_rows)
        assert scheduled, "nobody waits for room that will never be there"
        chunks = [sequence.chunk(rows) for sequence, rows in scheduled]
        bucket = self._buckets.of(chunks)
        batch = Batch.of(chunks, bucket, self._sizes.pages_per_seq)
        output = self._runner.step(batch, Wanted.of(chunks, bucket))
        first = 0
        for i, (sequence, rows) in enumerate(scheduled):
            logprobs, prompt_logprobs = None, ()
            if chunks[i].wants_logprobs and output.logprobs is not None:
                logprobs = output.logprobs.of(i, sequence.sampling.logprobs or 0)
            if chunks[i].targets:
                prompt_logprobs = _prompt_logprobs(
                    output.prompt_logprobs,
                    range(first, first + len(chunks[i].targets)),
                    sequence.sampling.prompt_logprobs or 0,
                )
            first += rows
            token = int(output.tokens[i])
            sequence.advance(rows, token, logprobs, prompt_logprobs)
            if sequence.num_cached % self._pages.page_size < rows:
                # A page has become full.
                self._pages.publish(sequence.pages, sequence.cached, sequence.weights)
            if sequence.finish_reason is not None:
                self._dismiss(sequence)

    def _admit(self) -> None:
        while self._waiting and self._free_seats:
            sequence = self._waiting[0]
            shared = ()
            if sequence.sampling.prompt_logprobs is None:
                shared = self._pages.match(sequence.prompt, sequence.weights)
                if self._is_computing_more(sequence, len(shared)):
                    break
            if not self._pages.can_allocate(sequence.max_len, shared):
                break
            self._waiting.popleft()
            pages = self._pages.allocate(sequence.max_len, shared)
            num_cached = len(shared) * self._pages.page_size
            sequence.sit(self._free_seats.pop(), pages, num_cached)
            self._running.append(sequence)
            if sequence.draws:
                self._runner.write_seat(
                    sequence.seat,
                    SeatRow.of(
                        sequence.sampling,
                        seed=sequence.seed,
                        prompt=sequence.prompt,
                        stop_ids=sequence.stop_ids,
                        vocab_size=self._runner.vocab_size,
                    ),
                )

    def _is_computing_more(self, sequence: SequenceState, num_shared: int) -> bool:
        """Tell whether waiting would let a sequence share one more page at least."""
        computing = [
            other
            for other in self._running
            if other.num_left > 1 and other.weights == sequence.weights
        ]
        end = (num_shared + 1) * self._pages.page_size
        beginning = sequence.prompt[:end] if computing else []
        return len(sequence.prompt) > end and any(
            other.prompt[:end] == beginning for other in computing
        )

    def _dismiss(self, sequence: SequenceState) -> None:
        self._running.remove(sequence)
        self._free_seats.append(sequence.seat)
        self._pages.free(sequence.pages)


def _prompt_logprobs(
    blocks: Mapping[int, Logprobs], rows: Iterable[int], num_top: int
) -> list[TokenLogprobs]:
    return [blocks[row // BLOCK_ROWS].of(row % BLOCK_ROWS, num_top) for row in rows]
