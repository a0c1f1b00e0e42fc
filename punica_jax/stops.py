"""Where a text ends: stop strings, found while the text still grows.

Plain Python; knows pieces of text, nothing of tokens.
"""

from collections.abc import Sequence


class StopStrings:
    """Lets a text through piece by piece, up to the stop string that is complete first.

    Text that may be the beginning of a stop string is held back. Where several are
    complete at one character, the longest counts: none leaves a part of itself behind.
    What is found does not depend on how the text is cut into pieces.

    Attributes:
      found: the stop string that ended the text, None before.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """Look for some strings; `include` keeps the one that ended the text."""
        self.found: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Add to the text; return what is certain not to be cut.

        Args:
          piece: the next part of the text.
          may_stop: whether a stop string may be complete in this part.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        old = len(self._held)
        text = self._held + piece
        if may_stop and (end := self._find(text, old)) is not None:
            self._held = ""
            return text[:end]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        certain = len(text) - kept
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, old: int) -> int | None:
        """Return where to cut if a stop string ends beyond the first `old` characters.

        Notes which one.
        """
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if not ends:
            return None
        end, start, self.found = min(ends)
        return end if self._include else start


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    longest = min(len(text), len(stop) - 1)
    # Mostly its first character is not there: a third of the time of looking on.
    if not longest or stop[0] not in text[-longest:]:
        return 0
    return next(n for n in range(longest, -1, -1) if text.endswith(stop[:n]))
