"""Which KV pages are free, which are shared, and which hold a prefix worth keeping.

Plain bookkeeping; knows page numbers and what stands for tokens, nothing of devices. A
page is shared only when it is full: its tokens, all tokens before it and the weights
that read them are then the same for whoever uses it.
"""

import array
import bisect
import collections
import dataclasses
import hashlib
from collections.abc import Hashable, Sequence


def extend_digests(
    digests: list[bytes], tokens: "array.array[int]", page_size: int
) -> None:
    """Add a digest for each full page that has none yet: a hash chain.

    A page's digest is of its tokens and of the digest before it, and so of all tokens
    up to its end. Whoever has the same digest is taken to have the same tokens: 256
    bits of BLAKE2b, so that nobody who tries finds two beginnings that share one.

    Args:
      digests: of the first pages of `tokens`; more are appended.
      tokens: all of the sequence's, an array of type code "i".
      page_size: tokens of a page.
    """
    assert tokens.typecode == "i", tokens.typecode
    for start in range(
        len(digests) * page_size, len(tokens) - page_size + 1, page_size
    ):
        page = tokens[start : start + page_size].tobytes()
        before = digests[-1] if digests else b""
        digests.append(hashlib.blake2b(before + page, digest_size=32).digest())


@dataclasses.dataclass(eq=False, slots=True)
class _Family:
    """The prefixes that some weights have read.

    Attributes:
      weights: see `KvPages.num_known`.
      pages: digest -> page.
      found: the digest and the pages of the one that was found last.
    """

    weights: Hashable
    pages: dict[bytes, int] = dataclasses.field(default_factory=dict)
    found: tuple[bytes, tuple[int, ...]] = b"", ()


@dataclasses.dataclass(eq=False, slots=True)
class _Prefix:
    """What is known of a page that can be found."""

    family: _Family
    digest: bytes
    parent: "_Prefix | None"  # of the page before it; None of a first page
    children: "dict[_Prefix, None]" = dataclasses.field(default_factory=dict)


class KvPages:
    """The KV pages of one device.

    A page is free, used by one or more sequences, or unused but kept: it holds a prefix
    that a later sequence may share, until a page is needed and it is the one that has
    been unused for longest.

    Where a page can be found, all pages before it can: the longest known prefix of n
    pages is found in log(n) look-ups.

    Attributes:
      num_pages: all pages there are.
      page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))
        self._num_users = [0] * num_pages
        self._families: dict[Hashable, _Family] = {}
        self._prefix_of: dict[int, _Prefix] = {}
        # In the order in which they were left; a prefix after all that go on from it.
        # Of a plain dict whose first keys are gone the first one is slow to find.
        self._kept: dict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free ones and the kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_uses(self) -> int:
        """Pages in use, one that n sequences share counted n times."""
        return sum(self._num_users)

    def num_needed(self, num_tokens: int) -> int:
        """Return the pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def num_known(
        self, digests: Sequence[bytes], num_pages: int, weights: Hashable
    ) -> int:
        """Return how many pages the longest known prefix has.

        Args:
          digests: of a sequence's full pages, as `extend_digests` makes them.
          num_pages: how many of them count.
          weights: what reads them: stands for the base model and one version of one
            adapter, and for nothing else ever.
        """
        family = self._families.get(weights)
        if family is None:
            return 0
        pages, (last, found) = family.pages, family.found
        # Many that come together begin alike.
        begins_so = 0 < len(found) <= num_pages and digests[len(found) - 1] == last
        return bisect.bisect_left(
            digests,
            True,
            lo=len(found) if begins_so else 0,
            hi=num_pages,
            key=lambda one: one not in pages,
        )

    def find(
        self, digests: Sequence[bytes], num_pages: int, weights: Hashable
    ) -> tuple[int, ...]:
        """Return the pages of a prefix, all of which are known; see `num_known`."""
        if not num_pages:
            return ()
        family, last = self._families[weights], digests[num_pages - 1]
        if family.found[0] != last:
            pages = tuple(map(family.pages.__getitem__, digests[:num_pages]))
            family.found = last, pages
        return family.found[1]

    def can_allocate(
        self, num_tokens: int, shared: Sequence[int] = (), num_spare: int = 0
    ) -> bool:
        """Tell whether `allocate` would succeed, and leave some pages to spare."""
        num_left = self.num_free + len(shared) - self.num_needed(num_tokens) - num_spare
        # Those shared ones that nobody uses are free as well.
        return num_left >= len(shared) or num_left >= sum(
            page in self._kept for page in shared
        )

    def allocate(self, num_tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Take pages for so many tokens; there must be enough.

        Args:
          num_tokens: all tokens of the sequence, those in shared pages included.
          shared: its first pages, as `find` just found them.

        Returns:
          The pages in order, `shared` first.
        """
        assert self.can_allocate(num_tokens, shared), (num_tokens, self.num_free)
        num_users = self._num_users
        for page in shared:
            if not num_users[page]:
                del self._kept[page]
            num_users[page] += 1
        new = [self._take() for _ in range(self.num_needed(num_tokens) - len(shared))]
        return (*shared, *new)

    def can_grow(self, pages: Sequence[int], num_tokens: int) -> bool:
        """Tell whether `grow` would succeed."""
        return self.num_needed(num_tokens) - len(pages) <= self.num_free

    def grow(self, pages: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Take what a sequence's pages lack for so many tokens; there must be enough.

        Args:
          pages: the sequence's, in order.
          num_tokens: all its tokens.

        Returns:
          The pages in order, the old ones first.
        """
        assert self.can_grow(pages, num_tokens), (num_tokens, self.num_free)
        num_new = self.num_needed(num_tokens) - len(pages)
        return (*pages, *(self._take() for _ in range(num_new)))

    def publish(
        self,
        pages: Sequence[int],
        digests: Sequence[bytes],
        num_pages: int,
        weights: Hashable,
    ) -> None:
        """Let later sequences find the first pages of a sequence, which are full.

        Args:
          pages: the sequence's, in order.
          digests, num_pages, weights: see `num_known`.
        """
        family = self._families.get(weights) or _Family(weights)
        first = self.num_known(digests, num_pages, weights)
        parent = self._prefix_of[family.pages[digests[first - 1]]] if first else None
        for index in range(first, num_pages):
            page, digest = pages[index], digests[index]
            if page in self._prefix_of:
                return  # under the name that its weights had before
            prefix = _Prefix(family, digest, parent)
            family.pages[digest], self._prefix_of[page] = page, prefix
            self._families[weights] = family  # from its first page on
            if parent is not None:
                parent.children[prefix] = None
            parent = prefix

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Call some weights another name; if that is in use, they share no more."""
        if new not in self._families and old in self._families:
            family = self._families[new] = self._families.pop(old)
            family.weights = new

    def forget(self, pages: Sequence[int]) -> None:
        """Let nobody find a sequence's pages any more: what they hold is bad."""
        for page in pages:
            if page in self._prefix_of:
                self._forget(self._prefix_of[page])

    def free(self, pages: Sequence[int]) -> None:
        """Give a sequence's pages back; known prefixes are kept while there is room."""
        # The last pages first: what goes on from a prefix is forgotten before it.
        for page in reversed(pages):
            assert self._num_users[page] > 0, page
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._leave(page)

    def check_integrity(self) -> None:
        """Assert that every page is in one place and every prefix can be found."""
        used = [page for page, users in enumerate(self._num_users) if users]
        places = sorted([*self._free, *self._kept, *used])
        assert places == list(range(self.num_pages)), places
        assert self._kept.keys() <= self._prefix_of.keys()
        for weights, family in self._families.items():
            assert family.pages and family.weights == weights
        num_found = sum(len(family.pages) for family in self._families.values())
        assert num_found == len(self._prefix_of)
        for page, prefix in self._prefix_of.items():
            assert self._families[prefix.family.weights] is prefix.family
            assert prefix.family.pages[prefix.digest] == page
            for child in prefix.children:
                assert child.parent is prefix and child.family is prefix.family
            if prefix.parent is not None:
                assert prefix in prefix.parent.children
                assert prefix.parent.digest in prefix.family.pages

    def _take(self) -> int:
        if not self._free:
            self._forget(self._prefix_of[next(iter(self._kept))])
        page = self._free.pop()
        self._num_users[page] = 1
        return page

    def _leave(self, page: int) -> None:
        if page in self._prefix_of:
            self._kept[page] = None
        else:
            self._free.append(page)

    def _forget(self, prefix: _Prefix) -> None:
        """Drop a prefix and all that go on from it; their unused pages are free."""
        family = prefix.family
        family.found = b"", ()
        if prefix.parent is not None:
            del prefix.parent.children[prefix]
        stack = [prefix]
        while stack:
            prefix = stack.pop()
            stack.extend(prefix.children)
            page = family.pages.pop(prefix.digest)
            del self._prefix_of[page]
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)
        if not family.pages:
            del self._families[family.weights]
