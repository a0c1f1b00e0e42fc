"""KV pages under any order of taking, sharing and giving back."""

import array
import time

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

from punica_jax.pages import KvPages, extend_digests

SIZE = 2


def digests_of(tokens):
    digests = []
    extend_digests(digests, array.array("i", tokens), SIZE)
    return digests


def known(pages, tokens, weights):
    """Return the pages of the longest known prefix."""
    digests = digests_of(tokens)
    num_known = pages.num_known(digests, len(digests), weights)
    return pages.find(digests, num_known, weights)


def publish(pages, taken, tokens, weights):
    digests = digests_of(tokens)
    pages.publish(taken, digests, len(digests), weights)


class PagesMachine(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, share, and leave.

    `contents` is what a device's pages would hold: for each token its whole history.
    Weights are versions, of which every other one is the same; each has a name of its
    own until it is found out which it is.
    """

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.pages = KvPages(num_pages, SIZE)
        self.names = {version: ("version", version) for version in range(4)}
        self.contents = {}
        self.running = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        extra=st.integers(0, 4),
        version=st.integers(0, 3),
    )
    def arrive(self, tokens, extra, version):
        shared = known(self.pages, tokens[:-1], self.names[version])
        cached = len(shared) * SIZE
        assert cached < len(tokens)
        for index in range(cached):
            slot = shared[index // SIZE], index % SIZE
            assert self.contents[slot] == (version % 2, tokens[: index + 1])
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
                    "version": version,
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
            self.contents[slot] = (sequence["version"] % 2, history)
        sequence["cached"] = end
        tokens, name = sequence["tokens"][:end], self.names[sequence["version"]]
        publish(self.pages, sequence["pages"], tokens, name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.pages.free(sequence["pages"])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_bad(self, data):
        sequence = data.draw(st.sampled_from(self.running))
        self.pages.forget(sequence["pages"])
        for name in self.names.values():
            found = known(self.pages, sequence["tokens"], name)
            assert not set(found) & set(sequence["pages"])

    @rule(version=st.integers(0, 3))
    def find_out(self, version):
        old, self.names[version] = self.names[version], ("digest", version % 2)
        if old != self.names[version]:
            self.pages.rename(old, self.names[version])

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
TestPages.settings = settings(max_examples=100, stateful_step_count=40)


def test_more_than_there_is_cannot_be_taken():
    pages = KvPages(2, 16)
    assert pages.can_allocate(32)
    assert not pages.can_allocate(33)
    with pytest.raises(AssertionError):
        pages.allocate(33)
    assert pages.num_free == 2


def test_the_prefix_unused_for_longest_is_forgotten_first():
    pages = KvPages(4, 2)
    one, two = [1, 1, 9, 9], [2, 2, 9, 9]
    for tokens in (one, two):
        taken = pages.allocate(4)
        publish(pages, taken, tokens, "base")
        pages.free(taken)
        assert known(pages, tokens, "base") == taken
    assert pages.num_free == 4
    pages.allocate(1)
    # The end of the older one is gone, not its beginning.
    assert len(known(pages, one, "base")) == 1
    assert len(known(pages, two, "base")) == 2
    pages.allocate(1)
    assert known(pages, one, "base") == ()
    assert len(known(pages, two, "base")) == 2


def test_other_weights_never_match():
    pages = KvPages(4, 2)
    taken, tokens = pages.allocate(4), [1, 2, 3, 4, 5]
    publish(pages, taken, tokens, ("legal", 1))
    assert known(pages, tokens, ("legal", 1)) == taken
    assert known(pages, tokens, ("legal", 2)) == ()
    assert known(pages, tokens, None) == ()


def test_what_goes_on_from_a_bad_page_is_bad():
    pages = KvPages(4, 2)
    bad, tokens = pages.allocate(2), [1, 2, 3, 4]
    publish(pages, bad, tokens[:2], "base")
    longer = pages.allocate(4, bad)
    publish(pages, longer, tokens, "base")
    assert known(pages, tokens, "base") == longer
    pages.forget(bad)
    publish(pages, pages.allocate(2), tokens[:2], "base")
    assert len(known(pages, tokens, "base")) == 1


def test_weights_under_a_new_name_are_shared_unless_that_is_in_use():
    pages = KvPages(4, 2)
    first, second = pages.allocate(2), pages.allocate(2)
    publish(pages, first, [1, 2], "version 1")
    publish(pages, second, [3, 4], "version 2")
    pages.rename("version 1", "digest")
    assert known(pages, [1, 2], "digest") == first
    assert known(pages, [1, 2], "version 1") == ()
    pages.rename("version 2", "digest")
    assert known(pages, [3, 4], "digest") == ()
    pages.check_integrity()
    for taken in (first, second):
        pages.free(taken)
    pages.allocate(8)
    pages.check_integrity()


def test_a_page_stands_for_all_tokens_up_to_its_end():
    digests = digests_of([1, 2, 3, 4, 5])
    assert len(digests) == 2
    assert digests_of([1, 2, 3, 4]) == digests
    assert digests_of([2, 2, 3, 4])[1] != digests[1]
    # Nor do two tokens' bytes run into each other.
    assert digests_of([1, 0]) != digests_of([0, 1]) != digests_of([256, 0])
    grown = digests_of([1, 2, 3])
    extend_digests(grown, array.array("i", [1, 2, 3, 4, 5]), SIZE)
    assert grown == digests


def test_many_kept_pages_are_pushed_out_quickly():
    """The first key of a dict whose first keys are gone takes long to find."""
    num_pages = 100_000
    pages = KvPages(num_pages, SIZE)
    taken = pages.allocate(num_pages * SIZE)
    publish(pages, taken, range(num_pages * SIZE), "base")
    pages.free(taken)
    start_s = time.process_time()
    pages.allocate(num_pages * SIZE)
    assert time.process_time() - start_s < 0.8
