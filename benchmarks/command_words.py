"""What a benchmark's command may say: numbers, ranks, contexts.

Knows texts; nothing of what is measured.
"""

import argparse

_SPAN_STRIDE = 4  # tokens from one context of a span to the next


def parse_contexts(text: str) -> tuple[int, ...]:
    """Read `512` or `512..640`.

    Raises:
      argparse.ArgumentTypeError: it is neither.
    """
    first, _, last = text.partition("..")
    ends = first, last or first
    if not all(end.isdecimal() for end in ends) or not 1 <= int(first) <= int(ends[1]):
        raise argparse.ArgumentTypeError(f"must be N or N..M, N from 1, got {text!r}")
    return tuple(range(int(first), int(ends[1]) + 1, _SPAN_STRIDE))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read `16` or `8,16,64`; raises as `parse_contexts`."""
    ranks = text.split(",")
    if not all(rank.isdecimal() and int(rank) >= 1 for rank in ranks):
        raise argparse.ArgumentTypeError(f"must be N or N,N,... from 1, got {text!r}")
    return tuple(map(int, ranks))


def parse_count(text: str) -> int:
    """Read an integer of at least 1; raises as `parse_contexts`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)
