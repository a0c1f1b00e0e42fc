"""KV pages under any order of taking, sharing and giving back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from punica_jax.pages import KvPages

SIZE = 2


class PagesMachine(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, share, and leave.

    `contents` is what a device's pages would hold: for each token its whole history.
    """

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.pages = KvPages(num_pages, SIZE)
        self.contents = {}
        self.running = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        extra=st.integers(0, 4),
        weights=st.integers(0, 2),
    )
    def arrive(self, tokens, extra, weights):
        shared = self.pages.match(tokens, weights)
        cached = len(shared) * SIZE
        assert cached < len(tokens)
        for index in range(cached):
            slot = shared[index // SIZE], index % SIZE
            assert self.contents[slot] == (weights, tokens[: index + 1])
        num_tokens = len(tokens) + extra
        needed = self.pages.num_needed(num_tokens)
        if self.pages.can_allocate(num_tokens, shared):
            pages = self.pages.allocate(num_tokens, shared)
            assert len(pages) == len(set(pages)) == needed
            assert pages[: len(shared)] == shared
            for sequence in self.running:
                both = set(sequence["pages"]) & set(pages)
                assert both <= set(shared)
            self.running.append(
                {
                    "tokens": tokens,
                    "pages": pages,
                    "cached": cached,
                    "weights": weights,
                }
            )
        else:
            unused = set(range(self.pages.num_pages))
            unused -= {page for seq in self.running for page in seq["pages"]}
            assert needed - len(shared) > len(unused - set(shared))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data, count):
        sequence = data.draw(st.sampled_from(self.running))
        end = min(sequence["cached"] + count, len(sequence["tokens"]))
        for index in range(sequence["cached"], end):
            slot = sequence["pages"][index // SIZE], index % SIZE
            history = sequence["tokens"][: index + 1]
            self.contents[slot] = (sequence["weights"], history)
        sequence["cached"] = end
        self.pages.publish(
            sequence["pages"], sequence["tokens"][:end], sequence["weights"]
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.pages.free(sequence["pages"])

    @invariant()
    def every_page_is_in_one_place(self):
        if hasattr(self, "pages"):
            self.pages.check_integrity()
            used = {page for seq in self.running for page in seq["pages"]}
            assert self.pages.num_free == self.pages.num_pages - len(used)

    def teardown(self):
        if hasattr(self, "pages"):
            for sequence in self.running:
                self.pages.free(sequence["pages"])
            assert self.pages.num_free == self.pages.num_pages


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_more_than_there_is_cannot_be_taken():
    pages = KvPages(2, 16)
    assert pages.can_allocate(32)
    assert not pages.can_allocate(33)
    with pytest.raises(AssertionError):
        pages.allocate(33)
    assert pages.num_free == 2


def test_the_prefix_unused_for_longest_is_forgotten_first():
    pages = KvPages(4, 2)
    sequences = {name: [name, name, 9, 9] for name in (1, 2)}
    for tokens in sequences.values():
        taken = pages.allocate(4)
        pages.publish(taken, tokens, "base")
        pages.free(taken)
        assert len(pages.match([*tokens, 0], "base")) == 2
    assert pages.num_free == 4
    pages.allocate(1)
    # The end of the older one is gone, not its beginning.
    assert len(pages.match([*sequences[1], 0], "base")) == 1
    assert len(pages.match([*sequences[2], 0], "base")) == 2
    pages.allocate(1)
    assert pages.match([*sequences[1], 0], "base") == ()
    assert len(pages.match([*sequences[2], 0], "base")) == 2


def test_other_weights_never_match():
    pages = KvPages(4, 2)
    taken = pages.allocate(4)
    pages.publish(taken, [1, 2, 3, 4], ("legal", 1))
    assert pages.match([1, 2, 3, 4, 5], ("legal", 1)) == taken
    assert pages.match([1, 2, 3, 4, 5], ("legal", 2)) == ()
    assert pages.match([1, 2, 3, 4, 5], None) == ()


def test_the_last_token_is_never_matched():
    pages = KvPages(4, 2)
    taken = pages.allocate(4)
    pages.publish(taken, [1, 2, 3, 4], None)
    assert pages.match([1, 2, 3, 4], None) == taken[:1]
    assert pages.match([1, 2], None) == ()
