"""The free list of KV pages, under any order of taking and giving back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_jax.pages import KvPages


@given(
    num_pages=st.integers(1, 40),
    page_size=st.sampled_from([1, 16, 64]),
    requests=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5)), max_size=40),
)
def test_no_page_has_two_owners(num_pages, page_size, requests):
    pages = KvPages(num_pages, page_size)
    owned = []
    for num_tokens, which in requests:
        if pages.can_allocate(num_tokens):
            taken = pages.allocate(num_tokens)
            assert len(taken) * page_size >= num_tokens
            assert (len(taken) - 1) * page_size < num_tokens
            owned.append(taken)
        else:
            assert pages.num_needed(num_tokens) > pages.num_free
        if which < len(owned):
            pages.free(owned.pop(which))
        held = [page for taken in owned for page in taken]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(num_pages))
        assert pages.num_free == num_pages - len(held)


def test_more_than_there_is_cannot_be_taken():
    pages = KvPages(2, 16)
    assert pages.can_allocate(32)
    assert not pages.can_allocate(33)
    with pytest.raises(AssertionError):
        pages.allocate(33)
    assert pages.num_free == 2
