"""Which KV pages are free, which are shared, and which hold a prefix worth keeping.

Plain bookkeeping; knows tokens and page numbers, nothing of devices. A page is shared
only when it is full: its tokens, all tokens before it and the weights that read them
are then the same for whoever uses it.
"""

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(eq=False, slots=True)
class _Prefix:
    """A full page's place in the tree of known prefixes; the root has no page."""

    parent: "_Prefix | None"
    tokens: tuple[int, ...] | Hashable  # its key in the parent
    page: int
    children: "dict[Hashable, _Prefix]" = dataclasses.field(default_factory=dict)


class KvPages:
    """The KV pages of one device.

    A page is free, used by one or more sequences, or unused but kept: it holds a prefix
    that a later sequence may share, until a page is needed and it is the one that has
    been unused for longest.

    Attributes:
      num_pages: all pages there are.
      page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))
        self._num_users = [0] * num_pages
        self._roots: dict[Hashable, _Prefix] = {}
        self._prefix_of: dict[int, _Prefix] = {}
        # In the order in which they were left; a prefix after all that go on from it.
        self._kept: dict[int, None] = {}

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

    def match(self, tokens: Sequence[int], weights: Hashable) -> tuple[int, ...]:
        """Return the pages of the longest known prefix of `tokens`.

        Args:
          tokens: of a sequence. Its last token is never matched: a step must have a
            row to give logits.
          weights: what reads them: stands for the base model and one version of one
            adapter, and for nothing else ever.
        """
        pages = []
        prefix = self._roots.get(weights)
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            if prefix is None:
                break
            prefix = prefix.children.get(tuple(tokens[start : start + self.page_size]))
            if prefix is not None:
                pages.append(prefix.page)
        return tuple(pages)

    def can_allocate(self, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Tell whether `allocate` would succeed."""
        kept = sum(page in self._kept for page in shared)
        return self.num_needed(num_tokens) - len(shared) <= self.num_free - kept

    def allocate(self, num_tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Take pages for so many tokens; there must be enough.

        Args:
          num_tokens: all tokens of the sequence, those in shared pages included.
          shared: its first pages, as `match` just found them.

        Returns:
          The pages in order, `shared` first.
        """
        assert self.can_allocate(num_tokens, shared), (num_tokens, self.num_free)
        for page in shared:
            self._kept.pop(page, None)
            self._num_users[page] += 1
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
        self, pages: Sequence[int], tokens: Sequence[int], weights: Hashable
    ) -> None:
        """Let later sequences find the full pages of a sequence.

        Args:
          pages: the sequence's, in order.
          tokens: its first tokens, as many as the pages hold by now.
          weights: see `match`.
        """
        # A root is kept from its first child on.
        prefix = self._roots.get(weights) or _Prefix(None, weights, -1)
        for index in range(len(tokens) // self.page_size):
            start = index * self.page_size
            key = tuple(tokens[start : start + self.page_size])
            known = prefix.children.get(key)
            if known is None:
                if pages[index] in self._prefix_of:
                    return
                known = _Prefix(prefix, key, pages[index])
                prefix.children[key] = self._prefix_of[pages[index]] = known
                if prefix.parent is None:
                    self._roots[weights] = prefix
            prefix = known

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Call some weights another name; if that is in use, they share no more."""
        if new not in self._roots and (root := self._roots.pop(old, None)) is not None:
            root.tokens = new
            self._roots[new] = root

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
        assert all(root.children for root in self._roots.values())
        for page, prefix in self._prefix_of.items():
            assert prefix.page == page
            assert prefix.parent is not None
            assert prefix.parent.children[prefix.tokens] is prefix
            while prefix.parent is not None:
                prefix = prefix.parent
            assert self._roots[prefix.tokens] is prefix

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
        assert prefix.parent is not None
        del prefix.parent.children[prefix.tokens]
        if prefix.parent.parent is None and not prefix.parent.children:
            self._roots.pop(prefix.parent.tokens, None)
        stack = [prefix]
        while stack:
            prefix = stack.pop()
            stack.extend(prefix.children.values())
            del self._prefix_of[prefix.page]
            if prefix.page in self._kept:
                del self._kept[prefix.page]
                self._free.append(prefix.page)
