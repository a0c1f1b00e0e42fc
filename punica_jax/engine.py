"""The loop that steps sequences until they end: schedule, run, collect, emit.

Knows sequences, seats and pages; what a step computes is the runner's business, and
prompts, names and texts are others'.
"""

from collections import deque
from collections.abc import Iterable

from punica_jax.batch import Batch, Buckets
from punica_jax.pages import KvPages
from punica_jax.runner import Runner
from punica_jax.scheduler import schedule
from punica_jax.sequence import SequenceState
from punica_jax.sizes import Sizes

_MAX_ROWS_PER_STEP = 2048


class Engine:
    """Sequences in flight on one runner.

    A sequence that sits has a seat and pages for all tokens that it can ever have, so
    it never has to wait again. The others wait in order.
    """

    def __init__(self, runner: Runner, sizes: Sizes):
        self._runner = runner
        self._sizes = sizes
        self._buckets = Buckets(
            sizes.max_seats, max(sizes.max_seats, _MAX_ROWS_PER_STEP)
        )
        self.clear()

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Let sequences wait for a seat."""
        self._waiting.extend(sequences)

    def clear(self) -> None:
        """Forget all sequences: every seat and page is free."""
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._free_seats = list(range(self._sizes.max_seats))
        self._pages = KvPages(self._sizes.num_kv_pages, self._sizes.page_size)

    def warm_up(self) -> None:
        """Compile every program that a step can need."""
        self._runner.warm_up(self._buckets, self._sizes.pages_per_seq)

    def step(self) -> None:
        """Seat who can sit, run one step, and tell the sequences their tokens."""
        self._admit()
        scheduled = schedule(self._running, self._buckets.max_rows)
        chunks = [sequence.chunk(rows) for sequence, rows in scheduled]
        bucket = self._buckets.of(chunks)
        batch = Batch.of(chunks, bucket, self._sizes.pages_per_seq)
        tokens = self._runner.step(batch)
        for (sequence, rows), token in zip(scheduled, tokens, strict=False):
            sequence.advance(rows, int(token))
            if sequence.finish_reason is not None:
                self._dismiss(sequence)

    def _admit(self) -> None:
        while self._waiting and self._free_seats:
            sequence = self._waiting[0]
            if not self._pages.can_allocate(sequence.max_len):
                break
            self._waiting.popleft()
            pages = self._pages.allocate(sequence.max_len)
            sequence.sit(self._free_seats.pop(), pages)
            self._running.append(sequence)

    def _dismiss(self, sequence: SequenceState) -> None:
        self._running.remove(sequence)
        self._free_seats.append(sequence.seat)
        self._pages.free(sequence.pages)
