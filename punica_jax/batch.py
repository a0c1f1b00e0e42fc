"""One step's batch as data: flat rows of many sequences, padded to a bucket.

Plain numpy on the host. Knows tokens, pages, slots and seats as numbers; nothing of
requests, text or the model.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from punica_jax.chunk import Chunk
from punica_jax.models import SeqTable
from punica_jax.pallas_kernels import MAX_PROJECT_ROWS

_DECODE_ONLY = 1
_FIRST_BY_TWOS = 256
# Rows of one program for prompts' log-probabilities: 33 MB of logits at a vocabulary
# of 128k.
BLOCK_ROWS = 64


class Bucket(NamedTuple):
    """The static sizes of a step: one compiled program each.

    Attributes:
      rows: rows of the flat batch.
      seqs: sequences.
      max_query_len: most rows of one sequence; 1 is the decode form.
    """

    rows: int
    seqs: int
    max_query_len: int

    @property
    def is_decode(self) -> bool:
        """Whether no sequence has more than one row."""
        return self.max_query_len == _DECODE_ONLY

    @property
    def name(self) -> str:
        if self.is_decode:
            return f"decode[{self.seqs}]"
        return f"prefill[{self.rows} rows, {self.seqs} seqs]"


class Buckets:
    """The one place that chooses padded sizes.

    Decode takes 1, 4, 16 and so on up to `max_seqs` sequences: a step's time is the
    weights' at first, which padding does not read twice. Beyond 256, where it is the
    rows', sizes go by twos. Prefill takes 64, 128, 512, 1024 and so on up to `max_rows`
    rows, with the least of decode's numbers of sequences that such rows can be, so that
    what draws from its logits needs no further programs. At defaults (32 sequences,
    2048 rows) these are 9 programs.
    """

    def __init__(self, max_seqs: int, max_rows: int):
        self.max_rows = max_rows
        self._max_seqs = max_seqs
        self._decode_seqs = _ladder([1], max_seqs)
        # Layers of the fewest rows have fewer launches on a GPU.
        self._prefill_rows = _ladder([MAX_PROJECT_ROWS, 128], max_rows)

    def choose(self, num_rows: int, num_seqs: int) -> Bucket:
        """Return the least bucket that holds `num_rows` rows of `num_seqs` sequences.

        As many rows as sequences is decode: no sequence has fewer than one row.
        """
        if num_rows == num_seqs:
            seqs = _least(self._decode_seqs, num_seqs)
            return Bucket(seqs, seqs, _DECODE_ONLY)
        return self._prefill(_least(self._prefill_rows, num_rows))

    def of(self, chunks: Sequence[Chunk]) -> Bucket:
        """Return the least bucket that holds `chunks`."""
        return self.choose(sum(len(chunk.tokens) for chunk in chunks), len(chunks))

    def __iter__(self) -> Iterator[Bucket]:
        """Yield every bucket that `choose` can return."""
        for seqs in self._decode_seqs:
            yield Bucket(seqs, seqs, _DECODE_ONLY)
        for rows in self._prefill_rows:
            if rows > 1:  # a row alone is decode
                yield self._prefill(rows)

    def _prefill(self, rows: int) -> Bucket:
        seqs = _least(self._decode_seqs, min(rows, self._max_seqs))
        return Bucket(rows, seqs, rows)


def _ladder(first: Sequence[int], most: int) -> list[int]:
    """Return what comes of `first` by fours, from 256 on by twos, and `most`."""
    sizes = list(first)
    while sizes[-1] < most:
        sizes.append(sizes[-1] * (4 if sizes[-1] < _FIRST_BY_TWOS else 2))
    return [*(size for size in sizes if size < most), most]


def _least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of one step, padded to a bucket.

    Attributes:
      tokens: `i32[rows]`.
      slots: `i32[rows]`, each row's adapter, -1 for none and for padding.
      seqs: pages, row bounds and lengths of the sequences.
      logit_rows: `i32[seqs]`, the row of each sequence that its next token is of.
      max_query_len: most rows of one sequence (static).
    """

    tokens: np.ndarray | Array
    slots: np.ndarray | Array
    seqs: SeqTable
    logit_rows: np.ndarray | Array
    max_query_len: int = dataclasses.field(metadata={"static": True})

    @property
    def bucket(self) -> Bucket:
        return Bucket(
            self.tokens.shape[0], self.logit_rows.shape[0], self.max_query_len
        )

    @classmethod
    def of(cls, chunks: Sequence[Chunk], bucket: Bucket, pages_per_seq: int) -> "Batch":
        """Lay out chunks, one sequence each, in a bucket that holds them."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        used = len(chunks)
        tokens = np.zeros(bucket.rows, np.int32)
        slots = np.full(bucket.rows, -1, np.int32)
        page_table = np.zeros((bucket.seqs, pages_per_seq), np.int32)
        bounds = np.full(bucket.seqs + 1, sum(lengths), np.int32)
        bounds[: used + 1] = np.cumsum([0, *lengths])
        kv_lens = np.zeros(bucket.seqs, np.int32)
        # All rows at a time: an assignment for each is most of a step's host time.
        num_rows = bounds[used]
        told = b"".join([chunk.tokens for chunk in chunks])
        tokens[:num_rows] = np.frombuffer(told, np.int32)
        slots[:num_rows] = np.repeat(
            np.array([chunk.slot for chunk in chunks], np.int32), lengths
        )
        kv_lens[:used] = [chunk.kv_len for chunk in chunks]
        for i, chunk in enumerate(chunks):
            page_table[i, : len(chunk.pages)] = chunk.pages
        return cls(
            tokens=tokens,
            slots=slots,
            seqs=SeqTable(page_table, bounds, kv_lens),
            logit_rows=np.maximum(bounds[1:] - 1, 0),
            max_query_len=bucket.max_query_len,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
    """Where a step's tokens come from and go to, beside the host.

    The newest token of each seat stays on the device, so that a step can be launched
    before the one that gives its tokens has been read.

    Attributes:
      seats: `i32[seqs]`, the seat that keeps each sequence's next token, -1 for none.
      kept: `i32[seqs]`, 1 where a sequence's last row is the token that its seat keeps.
    """

    seats: np.ndarray | Array
    kept: np.ndarray | Array

    @classmethod
    def of(cls, chunks: Sequence[Chunk], bucket: Bucket) -> "Feed":
        """Lay out chunks in a bucket that holds them; none feed nothing."""
        seats = np.full(bucket.seqs, -1, np.int32)
        kept = np.zeros(bucket.seqs, np.int32)
        for i, chunk in enumerate(chunks):
            if chunk.ends:
                seats[i] = chunk.seat
            kept[i] = chunk.is_kept
        return cls(seats, kept)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a step is to give beyond the most likely tokens; the default is nothing.

    Attributes:
      rows: `i32[2, seqs]`, each sequence's seat, -1 for one that takes its most likely
        token, and its new token's place in its sequence; None where all are -1.
      logprobs: whether the new tokens' log-probabilities are wanted.
      targets: number of a block of `BLOCK_ROWS` rows -> `i32[BLOCK_ROWS]`, the tokens
        after its rows whose log-probabilities are wanted, 0 elsewhere.
    """

    rows: np.ndarray | None = None
    logprobs: bool = False
    targets: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Sequence[Chunk], bucket: Bucket) -> "Wanted":
        """Collect what the chunks of a batch want."""
        rows = None
        if any(chunk.draws for chunk in chunks):
            rows = np.full((2, bucket.seqs), -1, np.int32)
            for i, chunk in enumerate(chunks):
                rows[:, i] = chunk.seat if chunk.draws else -1, chunk.kv_len
        num_blocks = -(-bucket.rows // BLOCK_ROWS)
        rows_targets = np.zeros((num_blocks, BLOCK_ROWS), np.int32)
        blocks: set[int] = set()
        first = 0
        for chunk in chunks:
            if num_targets := len(chunk.targets):
                end = first + num_targets
                rows_targets.reshape(-1)[first:end] = chunk.targets
                blocks.update(range(first // BLOCK_ROWS, -(-end // BLOCK_ROWS)))
            first += len(chunk.tokens)
        targets = {block: rows_targets[block] for block in sorted(blocks)}
        wants_logprobs = any(chunk.wants_logprobs for chunk in chunks)
        return cls(rows=rows, logprobs=wants_logprobs, targets=targets)
