import array
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import punica_jax as pj
from punica_jax.batch import BLOCK_ROWS, Batch, Bucket, Buckets, Wanted
from punica_jax.chunk import Chunk
from punica_jax.packing import pack, unpack
from punica_jax.pallas_kernels import MAX_PROJECT_ROWS
from punica_jax.runner import Runner


def ints(values) -> "array.array[int]":
    return array.array("i", values)


@pytest.mark.slow
def test_default_programs_are_few(checkpoint, monkeypatch):
    llm = pj.LLM(checkpoint / "model", progress=False)
    runner = llm._loop._runner

    def traced(program):
        """What a program gives is not looked at: it need not be compiled."""

        def call(*operands):
            shapes = program.eval_shape(*operands)
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)

        return call

    programs = {k: v for k, v in vars(runner).items() if hasattr(v, "eval_shape")}
    for name, program in programs.items():
        monkeypatch.setattr(runner, name, traced(program))
    monkeypatch.setattr(runner, "compile", lambda *_: ())
    llm.warm_up()
    found = llm.programs
    steps = [bucket.name for bucket in llm._loop._buckets]
    assert {*steps, "write_seat", "set_slot", "draw[32]", "logprobs[1]"} <= set(found)
    assert len(set(found)) == len(found) <= 24, found


@given(max_seqs=st.integers(1, 1200), data=st.data())
def test_every_choice_is_listed_and_large_enough(max_seqs, data):
    most = st.one_of(st.integers(max_seqs, max_seqs + 200), st.integers(max_seqs, 9000))
    max_rows = data.draw(most)
    buckets = Buckets(max_seqs, max_rows)
    seqs = data.draw(st.integers(1, max_seqs))
    rows = data.draw(st.integers(seqs, max_rows))
    lengths = [rows - seqs + 1] + [1] * (seqs - 1)
    chunks = [Chunk(tokens=ints([0] * n), kv_len=n, pages=[], slot=-1) for n in lengths]
    bucket = buckets.of(chunks)
    assert bucket in set(buckets)
    assert bucket.rows >= rows and bucket.seqs >= seqs
    # Where a step's time is its rows', at most half of them are padding.
    assert bucket.rows < 2 * rows or rows <= 2048
    assert bucket.rows < 2 * rows or bucket.rows <= 512
    assert (bucket.max_query_len == 1) == (rows == seqs)


@pytest.mark.parametrize(
    ("max_seqs", "max_rows", "expected"),
    [
        (32, 2048, [(64, 32), (128, 32), (512, 32), (1024, 32), (2048, 32)]),
        (256, 300, [(64, 64), (128, 256), (300, 256)]),
        (600, 700, [(64, 64), (128, 256), (512, 512), (700, 600)]),
        (100, 100, [(64, 64), (100, 100)]),
        (1, 64, [(64, 1)]),
        (1, 1, []),
        (4, 8, [(8, 4)]),
    ],
)
def test_prefill_sizes(max_seqs, max_rows, expected):
    buckets = list(Buckets(max_seqs, max_rows))
    assert [bucket[:2] for bucket in buckets if bucket.max_query_len > 1] == expected
    # What draws from a decode step's logits draws from a prefill's, too.
    decodes = {bucket.seqs for bucket in buckets if bucket.max_query_len == 1}
    assert {seqs for _, seqs in expected} <= decodes
    assert len(set(buckets)) == len(buckets)


def test_few_rows_are_those_of_fewer_launches():
    assert next(b.rows for b in Buckets(32, 2048) if b.max_query_len > 1) == (
        MAX_PROJECT_ROWS
    )


def test_launches_overlap_where_shrinks_are_launches_of_their_own():
    overlaps = functools.partial(Runner.overlaps, cast(Any, None))
    found = [bucket.name for bucket in Buckets(256, 2048) if overlaps(bucket)]
    assert found == ["decode[256]"]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("draws", [False, True])
def test_a_step_takes_over_its_state_and_gives_one_array(llm, draws, logprobs):
    runner, bucket = llm._loop._runner, next(iter(llm._loop._buckets))
    batch = Batch.of([], bucket, llm._loop._sizes.pages_per_seq)
    rows = np.full((2, bucket.seqs), -1, np.int32) if draws else None
    state = [*jax.tree.leaves(runner._cache), runner._newest]
    if draws:
        state.append(runner._counts)
    launched = runner.launch(batch, Wanted(rows=rows, logprobs=logprobs))
    assert all(array.is_deleted() for array in state)
    assert len(jax.tree.leaves(launched)) == 1
    assert (runner.collect(launched).logprobs is not None) == logprobs


def test_layout():
    def chunk(tokens, kv_len, pages, slot):
        return Chunk(tokens=ints(tokens), kv_len=kv_len, pages=pages, slot=slot)

    batch = Batch.of(
        [chunk([7, 8, 9], 5, [3], 1), chunk([4], 20, [0, 2], -1)],
        Bucket(8, 4, 8),
        pages_per_seq=2,
    )
    assert batch.bucket == (8, 4, 8)
    np.testing.assert_array_equal(batch.tokens, [7, 8, 9, 4, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.slots, [1, 1, 1, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(batch.seqs.bounds, [0, 3, 4, 4, 4])
    np.testing.assert_array_equal(batch.seqs.kv_lens, [5, 20, 0, 0])
    np.testing.assert_array_equal(
        batch.seqs.page_table, [[3, 0], [0, 2], [0, 0], [0, 0]]
    )
    np.testing.assert_array_equal(batch.logit_rows[:2], [2, 3])


def test_packing_is_exact():
    chunk = Chunk(tokens=ints([7, 8]), kv_len=2, pages=[1], slot=-1)
    batch = Batch.of([chunk] * 3, Bucket(8, 4, 8), pages_per_seq=2)
    packed, layout = pack(batch)
    assert packed.dtype == np.int32 and packed.ndim == 1
    again = unpack(jnp.asarray(packed), layout)
    assert again.bucket == batch.bucket
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(batch), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert hash(layout) == hash(pack(batch)[1]) and layout == pack(batch)[1]


def test_a_batch_without_chunks_is_idle():
    batch = Batch.of([], Bucket(8, 4, 8), pages_per_seq=2)
    assert (batch.slots == -1).all()
    assert not np.asarray(batch.seqs.bounds).any()
    assert batch.bucket == (8, 4, 8)


def test_nothing_is_wanted_of_plain_chunks():
    chunks = [Chunk(tokens=ints([7, 8]), kv_len=2, pages=[1], slot=-1)] * 3
    wanted = Wanted.of(chunks, Bucket(8, 4, 8))
    assert (wanted.rows, wanted.logprobs, wanted.targets) == (None, False, {})


def test_what_is_wanted_is_laid_out_by_row():
    long = range(100, 100 + BLOCK_ROWS)
    chunks = [
        Chunk(tokens=ints([1]), kv_len=9, pages=[1], slot=-1, seat=3, draws=True),
        Chunk(tokens=ints(long), kv_len=80, pages=[1], slot=-1, targets=list(long)),
        Chunk(tokens=ints([5, 6]), kv_len=2, pages=[2], slot=-1, wants_logprobs=True),
    ]
    wanted = Wanted.of(chunks, Bucket(128, 4, 128))
    assert wanted.rows is not None and wanted.logprobs
    assert wanted.rows[0].tolist() == [3, -1, -1, -1]
    assert wanted.rows[1, 0] == 9
    # The second chunk's rows are 1 to 64: all but one in the first block.
    assert wanted.targets.keys() == {0, 1}
    assert wanted.targets[0].tolist() == [0, *long[:-1]]
    assert wanted.targets[1].tolist() == [long[-1]] + [0] * (BLOCK_ROWS - 1)
