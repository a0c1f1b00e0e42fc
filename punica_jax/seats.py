"""How each seat's tokens are drawn, on the device: filters, penalties, counts.

Knows seats, logits and tokens as numbers. Knows nothing of who sits where, nor of
batches: a row names its seat.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from punica_jax.batch import Batch, Feed
from punica_jax.request import MAX_LOGIT_BIAS, SamplingParams
from punica_jax.sampling import sample

# What a token is to a sequence: bits of `Seats.marks`.
_IN_PROMPT = 1
_STOPS = 2
# A smaller penalty would take tokens as far from the others, or to x / 0 and -inf * 0.
_LEAST_REPETITION = 1e-20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seats:
    """The sampling parameters of the sequences in flight, by seat.

    What a seat holds stays until the next sequence that draws is written to it; a
    sequence of most likely tokens alone never looks at its seat.

    Attributes:
      temperature, top_p, min_p: `f32[seats]`.
      top_k: `i32[seats]`.
      seed: `u32[seats]`.
      min_position: `i32[seats]`, the first place in the sequence where a token that
        stops may come.
      repetition, presence, frequency: `f32[seats]`, the penalties.
      bias: `f32[seats, vocab]`.
      marks: `u8[seats, vocab]`, whether a token is in the prompt, and whether it stops.
    """

    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    seed: Array
    min_position: Array
    repetition: Array
    presence: Array
    frequency: Array
    bias: Array
    marks: Array

    @classmethod
    def zeros(cls, num_seats: int, vocab_size: int) -> "Seats":
        dtypes = {"top_k": jnp.int32, "seed": jnp.uint32, "min_position": jnp.int32}
        fields = {
            field.name: jnp.zeros(num_seats, dtypes.get(field.name, jnp.float32))
            for field in dataclasses.fields(cls)
        }
        shape = (num_seats, vocab_size)
        fields["bias"] = jnp.zeros(shape, jnp.float32)
        fields["marks"] = jnp.zeros(shape, jnp.uint8)
        return cls(**fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeatRow:
    """One seat's parameters on the host.

    Attributes:
      bias_tokens: `i32[MAX_LOGIT_BIAS]`, the vocabulary's size for none.
      bias: `f32[MAX_LOGIT_BIAS]`.
      marks: `i32[ceil(vocab / 4)]`, four bytes of `Seats.marks` each.
      output: `i32[max_len]`, the tokens that came already; the vocabulary's size for
        none.
      others: of shape (), as in `Seats`.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    seed: np.ndarray
    min_position: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    bias_tokens: np.ndarray
    bias: np.ndarray
    marks: np.ndarray
    output: np.ndarray

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        stop_ids: Iterable[int],
        vocab_size: int,
        max_len: int,
    ) -> "SeatRow":
        """Lay out a request's parameters.

        Args:
          params: tokens below the vocabulary's size.
          seed: of the random numbers; the parameters' own may be None.
          prompt: its tokens.
          output: the tokens that came already, where a sequence goes on.
          stop_ids: all tokens that end it; a model cannot say those beyond its
            vocabulary, which a tokenizer may have.
          vocab_size: the model's.
          max_len: most tokens of a sequence.
        """
        biases = params.logit_bias or {}
        bias_tokens = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
        bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
        bias_tokens[: len(biases)] = list(biases)
        bias[: len(biases)] = list(biases.values())
        marks = np.zeros(-(-vocab_size // 4) * 4, np.uint8)
        marks[np.asarray(prompt, np.int32)] |= _IN_PROMPT
        stops = [token for token in stop_ids if token < vocab_size]
        marks[np.asarray(stops, np.int32)] |= _STOPS
        repetition = max(params.repetition_penalty, _LEAST_REPETITION)
        min_len = len(prompt) + params.min_new_tokens
        padded = np.full(max_len, vocab_size, np.int32)
        padded[: len(output)] = output
        return cls(
            output=padded,
            temperature=np.asarray(params.temperature, np.float32),
            top_p=np.asarray(params.top_p, np.float32),
            min_p=np.asarray(params.min_p, np.float32),
            top_k=np.asarray(min(params.top_k or 0, vocab_size), np.int32),
            seed=np.asarray(seed, np.uint32),
            min_position=np.asarray(min(min_len, max_len), np.int32),
            repetition=np.asarray(repetition, np.float32),
            presence=np.asarray(params.presence_penalty, np.float32),
            frequency=np.asarray(params.frequency_penalty, np.float32),
            bias_tokens=bias_tokens,
            bias=bias,
            marks=marks.view(np.int32),
        )


def write_seat(
    seats: Seats, counts: Array, seat: Array, row: SeatRow
) -> tuple[Seats, Array]:
    """Replace everything of a seat; its counts are those of what came already.

    Args:
      seats: donate them.
      counts: `i32[seats, vocab]`, how often each token is in the output; donate them.
      seat: `i32[]`.
      row: what to write; arrays may be traced.
    """
    vocab = counts.shape[1]
    bias = jnp.zeros(vocab, jnp.float32)
    bias = bias.at[row.bias_tokens].set(jnp.asarray(row.bias), mode="drop")
    marks = jax.lax.bitcast_convert_type(jnp.asarray(row.marks), jnp.uint8)
    fields = {
        field.name: getattr(row, field.name) for field in dataclasses.fields(Seats)
    }
    fields |= {"bias": bias, "marks": marks.reshape(-1)[:vocab]}
    written = {
        name: getattr(seats, name).at[seat].set(value) for name, value in fields.items()
    }
    count = jnp.zeros(vocab, jnp.int32).at[row.output].add(1, mode="drop")
    return Seats(**written), counts.at[seat].set(count)


def adjusted_logits(
    seats: Seats, counts: Array, logits: Array, seat: Array, positions: Array
) -> Array:
    """Add the bias, take off the penalties, and hold back what may not stop yet.

    Args:
      seats, counts: of all seats.
      logits: `f32[rows, vocab]`.
      seat: `i32[rows]`, each row's, in range.
      positions: `i32[rows]`, the new token's place in its sequence.
    """

    def of_rows(values: Array) -> Array:
        return values[seat][:, None]

    x = logits + seats.bias[seat]
    marks, count = seats.marks[seat], counts[seat]
    repetition = of_rows(seats.repetition)
    seen = (count > 0) | (marks & _IN_PROMPT > 0)
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x -= of_rows(seats.frequency) * count.astype(jnp.float32)
    x = jnp.where(count > 0, x - of_rows(seats.presence), x)
    early = positions[:, None] < of_rows(seats.min_position)
    return jnp.where(early & (marks & _STOPS > 0), -jnp.inf, x)


def fed_tokens(newest: Array, batch: Batch, feed: Feed) -> Array:
    """Return a batch's tokens, `i32[rows]`, those that seats keep filled in.

    Args:
      newest: `i32[seats]`, the newest token of each seat.
      batch: arrays may be traced, as those of `feed`; `logit_rows` are last rows.
      feed: which rows' tokens are kept.
    """
    tokens = jnp.asarray(batch.tokens)
    kept = jnp.where(feed.kept > 0, newest[jnp.maximum(feed.seats, 0)], -1)
    # Rows ask their sequences, so that XLA looks tokens up where it embeds them; a
    # scatter is a copy and a launch of its own. Padding rows ask the last sequence,
    # whose last row they are not, or which is idle and keeps nothing.
    seq = batch.seqs.seq_of_row(len(tokens))
    own, last = (
        jnp.asarray(of_seq).at[seq].get(mode="clip")
        for of_seq in (kept, batch.logit_rows)
    )
    row = jnp.arange(len(tokens), dtype=jnp.int32)
    return jnp.where((own >= 0) & (row == last), own, tokens)


def keep_tokens(newest: Array, seat: Array, tokens: Array) -> Array:
    """Return each seat's newest token after a step.

    Args:
      newest: `i32[seats]`; donate it.
      seat: `i32[rows]`, where a row's token is kept; -1 for nowhere.
      tokens: `i32[rows]`.
    """
    seat = jnp.where(seat >= 0, seat, newest.shape[0])
    return newest.at[seat].set(tokens, mode="drop")


def draw(
    seats: Seats,
    counts: Array,
    newest: Array,
    logits: Array,
    likely: Array,
    rows: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Choose the tokens of a step by their seats, count them and keep them.

    Args:
      seats: of all seats.
      counts: `i32[seats, vocab]`; donate them.
      newest: `i32[seats]`, the newest token of each seat; donate it.
      logits: `f32[rows, vocab]`.
      likely: `i32[rows]`, the most likely tokens; below 0 where there is no token.
      rows: `i32[2, rows]`: each row's seat, -1 for one that takes its most likely
        token; and its token's place in its sequence.
      implementation: see `pallas_kernels.resolve`.

    Returns:
      `i32[rows]`, the counts, and the seats' newest tokens.
    """
    seat, positions = rows
    drawn = (seat >= 0) & (likely >= 0)
    at = jnp.where(drawn, seat, 0)
    tokens = sample(
        adjusted_logits(seats, counts, logits, at, positions),
        # Nothing is searched for a row that takes its most likely token.
        jnp.where(drawn, seats.temperature[at], jnp.float32(0)),
        seats.seed[at],
        positions,
        top_k=seats.top_k[at],
        top_p=seats.top_p[at],
        min_p=seats.min_p[at],
        implementation=implementation,
    )
    tokens = jnp.where(drawn, tokens, likely)
    past_end = jnp.where(drawn, seat, counts.shape[0])
    counts = counts.at[past_end, tokens].add(1, mode="drop")
    return tokens, counts, keep_tokens(newest, jnp.where(drawn, seat, -1), tokens)
