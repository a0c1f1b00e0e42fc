"""Which KV pages are free.

Plain bookkeeping; knows nothing of devices, nor of what the pages hold.
"""

from collections.abc import Sequence


class KvPages:
    """A free list of KV pages.

    Attributes:
      num_pages: all pages there are.
      page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_needed(self, num_tokens: int) -> int:
        """Return the pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, num_tokens: int) -> bool:
        return self.num_needed(num_tokens) <= len(self._free)

    def allocate(self, num_tokens: int) -> tuple[int, ...]:
        """Take the pages for so many tokens; there must be enough."""
        assert self.can_allocate(num_tokens), (num_tokens, len(self._free))
        return tuple(self._free.pop() for _ in range(self.num_needed(num_tokens)))

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, each once."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages
