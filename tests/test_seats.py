"""Drawing by seat: bias, penalties, early stops, counts, what a seat forgets."""

import array
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.batch import Batch, Bucket, Feed
from punica_jax.chunk import Chunk
from punica_jax.packing import pack, unpack
from punica_jax.request import SamplingParams
from punica_jax.seats import (
    SeatRow,
    Seats,
    adjusted_logits,
    draw,
    fed_tokens,
    write_seat,
)
from tests.test_lowering import H200

VOCAB = 50  # no multiple of 4: the marks' last bytes are padding
NUM_SEATS = 3
SORTS = r'"stablehlo\.sort"|chlo\.top_k'
_write = jax.jit(write_seat)
_draw = jax.jit(draw)
NEWEST = np.zeros(NUM_SEATS, np.int32)
_adjusted = jax.jit(adjusted_logits)


def seat_row(params, prompt=(), stop_ids=(), seed=0, output=()):
    return SeatRow.of(
        params,
        seed=seed,
        prompt=prompt,
        output=output,
        stop_ids=stop_ids,
        vocab_size=VOCAB,
        max_len=16,
    )


@pytest.fixture
def state():
    counts = jnp.zeros((NUM_SEATS, VOCAB), jnp.int32)
    return Seats.zeros(NUM_SEATS, VOCAB), counts


def penalised(logits, params, prompt, output):
    """The parameters' definition, token by token."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        count = output.count(token)
        if count or token in prompt:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= params.frequency_penalty * count
        x[token] -= params.presence_penalty * (count > 0)
    return x


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.75},
        {"logit_bias": {0: -100, 49: 3.5, 8: 2}},
        {
            "repetition_penalty": 1.1,
            "presence_penalty": -2,
            "frequency_penalty": 0.3,
            "logit_bias": {7: 1.0, 8: -4},
        },
    ],
)
def test_logits_are_those_of_the_definition(state, fields):
    params = SamplingParams(**fields)
    prompt, output = [7, 8, 8, 49], [3, 8, 3, 3]
    seats, counts = _write(*state, np.int32(1), seat_row(params, prompt))
    logits = np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32) * 3
    counts = counts.at[1].add(np.bincount(output, minlength=VOCAB).astype(np.int32))
    actual = _adjusted(seats, counts, logits, np.array([1]), np.array([9]))
    expected = penalised(logits[0], params, prompt, output)
    np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-5)


def test_neutral_parameters_change_no_bit(state):
    seats, counts = _write(*state, np.int32(2), seat_row(SamplingParams(), [1, 2, 3]))
    logits = np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32)
    logits[0, :3] = -np.inf, np.inf, 1e-30
    counts = counts.at[2, 4].set(3)
    actual = _adjusted(seats, counts, logits, np.array([2]), np.array([9]))
    np.testing.assert_array_equal(actual, logits)


@pytest.mark.parametrize("penalty", [1e-30, 1e-39, 1e-46])
def test_a_tiny_penalty_leaves_the_draw_to_what_it_favours(state, penalty):
    logits = np.full((NUM_SEATS, VOCAB), 2.0, np.float32)
    logits[:, 5:7] = -2.0, -np.inf
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty)
    state = _write(*state, 1, seat_row(params, prompt=[3, 4, 5, 6]))
    likely, drawn = np.zeros(NUM_SEATS, np.int32), set()
    for position in range(8, 24):
        rows = np.array([[-1, 1, -1], [position] * 3], np.int32)
        tokens, *_ = _draw(*state, NEWEST, logits, likely, rows)
        drawn.add(int(tokens[1]))
    assert drawn == {3, 4}
    logits[:, 4] = 3.0
    [adjusted] = _adjusted(*state, logits[:1], rows[0, 1:2], rows[1, 1:2])
    assert adjusted.argmax() == 4 and np.isinf(adjusted).nonzero()[0].tolist() == [6]


def test_stops_are_held_back_until_they_may_come(state):
    params = SamplingParams(min_new_tokens=2)
    row = seat_row(params, prompt=[1, 2, 3], stop_ids={4, 49})
    seats, counts = _write(*state, np.int32(0), row)
    logits = np.zeros((1, VOCAB), np.float32)
    for position in (3, 4, 5):
        x = _adjusted(seats, counts, logits, np.array([0]), np.array([position]))
        held = np.flatnonzero(np.isneginf(np.asarray(x[0])))
        assert held.tolist() == ([4, 49] if position < 5 else [])


def test_drawn_tokens_are_counted_and_others_not(state):
    greedy = SamplingParams(frequency_penalty=2.0)
    seats, counts = _write(*state, np.int32(1), seat_row(greedy))
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 5], logits[:, 6] = 1.5, 1.0
    likely = np.full(4, 5, np.int32)
    seen = []
    for position in range(4):
        rows = np.array([[-1, 1, -1, -1], [3, position, 0, 0]], np.int32)
        tokens, counts, _ = _draw(seats, counts, NEWEST, logits, likely, rows)
        assert np.asarray(tokens)[[0, 2, 3]].tolist() == [5, 5, 5]
        seen.append(int(tokens[1]))
    # 5 (1.5 -> -0.5), 6 (1 -> -1), then two of the zeros.
    assert seen == [5, 6, 0, 1]
    assert np.asarray(counts).sum(1).tolist() == [0, 4, 0]


def test_a_seat_forgets_who_sat_there(state):
    greedy = SamplingParams()
    everything = SamplingParams(
        temperature=2.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={3: 9.0},
        min_new_tokens=5,
        max_new_tokens=9,
    )
    fresh = _write(*state, np.int32(1), seat_row(greedy, [9], [8], seed=4))
    used = _write(*state, np.int32(1), seat_row(everything, [1, 2], [3], seed=7))
    used = (used[0], used[1].at[1].set(6))
    again = _write(*used, np.int32(1), seat_row(greedy, [9], [8], seed=4))
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(left, right)


def test_rows_do_not_depend_on_neighbours(state):
    seats, counts = state
    for seat, fields in enumerate(
        [
            {"temperature": 0.8, "top_p": 0.7, "repetition_penalty": 1.2},
            {"temperature": 1.5, "top_k": 9, "presence_penalty": 1.0},
            {"temperature": 1.0, "min_p": 0.05, "logit_bias": {1: 3.0}},
        ]
    ):
        row = seat_row(SamplingParams(**fields), [1, 2, seat], seed=seat)
        seats, counts = _write(seats, counts, np.int32(seat), row)
    logits = np.random.default_rng(2).normal(size=(4, VOCAB)).astype(np.float32)
    likely = logits.argmax(1).astype(np.int32)
    rows = np.array([[2, 0, -1, 1], [7, 5, 0, 6]], np.int32)
    together, counted, _ = _draw(seats, counts, NEWEST, logits, likely, rows)
    for i in range(4):
        one = slice(i, i + 1)
        alone, counts_alone, newest = _draw(
            seats, counts, NEWEST, logits[one], likely[one], rows[:, one]
        )
        assert alone[0] == together[i]
        if (seat := rows[0, i]) >= 0:
            np.testing.assert_array_equal(counts_alone[seat], counted[seat])
            assert newest[seat] == alone[0]


def test_packing_is_exact():
    params = SamplingParams(temperature=0.1, logit_bias={3: -1.5}, top_k=7)
    row = seat_row(params, [1, 49], [2], seed=2**32 - 1)
    packed, layout = pack(row)
    assert packed.dtype == np.int32 and packed.ndim == 1
    again = unpack(jnp.asarray(packed), layout)
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(row), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    # Of one size whatever is asked for: one program writes every seat.
    other = seat_row(SamplingParams(), list(range(40)))
    assert pack(other)[1] == layout and hash(layout) == hash(pack(other)[1])


@pytest.mark.parametrize("implementation", ["xla", "pallas_triton"])
def test_no_vocabulary_is_sorted(implementation):
    vocab, rows = 128256, 32
    args = jax.eval_shape(
        lambda: (
            Seats.zeros(rows, vocab),
            jnp.zeros((rows, vocab), jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((rows, vocab), jnp.float32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((2, rows), jnp.int32),
        )
    )
    choose = functools.partial(draw, implementation=implementation)
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(choose).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not re.search(SORTS, text)
    for sorts in (jnp.sort, lambda x: jax.lax.top_k(x, 600)):
        one = jax.jit(sorts).trace(args[3]).lower(lowering_platforms=("cuda",))
        assert re.search(SORTS, one.as_text())
    # Nor is there a loop, which a GPU's host would have to drive.
    assert "stablehlo.while" not in text


def test_no_condition_is_left(state):
    # Which of the two forms of a search is meant is known when it is compiled.
    rows, likely = np.zeros((2, 4), np.int32), np.zeros(4, np.int32)
    logits = np.zeros((4, VOCAB), np.float32)
    lowered = _draw.lower(*state, NEWEST, logits, likely, rows)
    text = lowered.compile().as_text()
    assert "while(" in text and "conditional(" not in text


def test_a_stop_id_beyond_the_vocabulary_never_comes(state):
    params = SamplingParams(min_new_tokens=3, temperature=1.0)
    row = seat_row(params, stop_ids=[VOCAB + 2, 7])
    seats, _ = _write(*state, np.int32(1), row)
    assert np.flatnonzero(seats.marks[1]).tolist() == [7]


def test_top_k_beyond_all_integers_keeps_all(state):
    row = seat_row(SamplingParams(temperature=1.0, top_k=2**40))
    seats, _ = _write(*state, np.int32(0), row)
    assert int(seats.top_k[0]) == VOCAB


def test_a_sequence_that_goes_on_counts_what_came_already(state):
    params = SamplingParams(frequency_penalty=0.5)
    row = seat_row(params, [1, 2], output=[3, 8, 3, VOCAB - 1])
    _, counts = _write(*state, np.int32(1), row)
    expected = np.bincount([3, 8, 3, VOCAB - 1], minlength=VOCAB)
    np.testing.assert_array_equal(counts[1], expected)
    assert not counts[0].any() and not counts[2].any()


def test_what_has_no_finite_logits_is_not_drawn(state):
    seats, counts = _write(
        *state, np.int32(1), seat_row(SamplingParams(temperature=1.0))
    )
    logits = np.full((2, VOCAB), np.nan, np.float32)
    rows = np.array([[1, -1], [5, 5]], np.int32)
    likely = np.array([-1, -1], np.int32)
    tokens, counts, newest = _draw(seats, counts, NEWEST, logits, likely, rows)
    assert tokens.tolist() == [-1, -1] and not counts.any() and not newest.any()


@pytest.mark.parametrize("lengths", [[], [1, 1, 1, 1], [3, 1, 1, 2], [1, 8, 1], [12]])
@pytest.mark.parametrize("idle", [None, 0, 1])
def test_the_tokens_that_seats_keep_are_filled_in(lengths, idle):
    rng = np.random.default_rng(len(lengths))
    newest = rng.permutation(100)[:6].astype(np.int32)
    chunks = [
        Chunk(
            tokens=array.array("i", rng.integers(100, 200, length).tolist()),
            kv_len=20,
            pages=[i],
            slot=-1,
            seat=seat,
            is_kept=i != 1,
        )
        for i, (length, seat) in enumerate(zip(lengths, (4, 0, 5, 2), strict=False))
    ]
    if idle is not None:  # among the others
        chunks[idle:idle] = [Chunk(array.array("i"), kv_len=0, pages=[], slot=-1)]
    decodes = max(lengths, default=1) == 1
    bucket = Bucket(5, 5, 1) if decodes else Bucket(12, 5, 12)
    expected, row = np.zeros(bucket.rows, np.int32), 0
    for chunk in chunks:
        expected[row : row + len(chunk.tokens)] = chunk.tokens
        row += len(chunk.tokens)
        if chunk.is_kept:
            expected[row - 1] = newest[chunk.seat]
    packed, layout = pack((Batch.of(chunks, bucket, 1), Feed.of(chunks, bucket)))
    feed = jax.jit(lambda newest, packed: fed_tokens(newest, *unpack(packed, layout)))
    np.testing.assert_array_equal(feed(newest, packed), expected)
