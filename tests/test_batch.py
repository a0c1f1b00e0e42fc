import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from punica_jax.batch import Batch, Bucket, Buckets
from punica_jax.sequence import Chunk


def test_default_programs_are_few():
    buckets = list(Buckets(max_seqs=32, max_rows=2048))
    assert len(buckets) == len(set(buckets)) <= 24
    assert len({bucket.name for bucket in buckets}) == len(buckets)


@given(
    max_seqs=st.integers(1, 300),
    max_rows=st.integers(300, 9000),
    data=st.data(),
)
def test_every_choice_is_listed_and_large_enough(max_seqs, max_rows, data):
    buckets = Buckets(max_seqs, max_rows)
    seqs = data.draw(st.integers(1, max_seqs))
    rows = data.draw(st.integers(seqs, max_rows))
    lengths = [rows - seqs + 1] + [1] * (seqs - 1)
    chunks = [
        Chunk(tokens=[0] * n, kv_len=n, pages=[], slot=-1, temperature=0.0, seed=0)
        for n in lengths
    ]
    bucket = buckets.of(chunks)
    assert bucket in set(buckets)
    assert bucket.rows >= rows and bucket.seqs >= seqs
    assert (bucket.max_query_len == 1) == (rows == seqs)


def test_layout():
    def chunk(tokens, kv_len, pages, slot):
        return Chunk(
            tokens=tokens,
            kv_len=kv_len,
            pages=pages,
            slot=slot,
            temperature=0.5,
            seed=2**32 - 1,
        )

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
    assert batch.seeds[0] == 2**32 - 1 and batch.seeds.dtype == np.uint32


def test_packing_is_exact():
    chunk = Chunk(
        tokens=[7, 8], kv_len=2, pages=[1], slot=-1, temperature=0.7, seed=2**32 - 1
    )
    batch = Batch.of([chunk] * 3, Bucket(8, 4, 8), pages_per_seq=2)
    packed, layout = batch.pack()
    assert packed.dtype == np.int32 and packed.ndim == 1
    again = Batch.unpack(jnp.asarray(packed), layout)
    assert again.bucket == batch.bucket
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(batch), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert hash(layout) == hash(batch.pack()[1]) and layout == batch.pack()[1]


def test_a_batch_without_chunks_is_idle():
    batch = Batch.of([], Bucket(8, 4, 8), pages_per_seq=2)
    assert (batch.slots == -1).all()
    assert not np.asarray(batch.seqs.bounds).any()
    assert batch.bucket == (8, 4, 8)
