"""When two libraries agree: logits within a tolerance, greedy tokens equal.

Knows arrays and tokens; imports neither library.
"""

from collections.abc import Callable, Sequence

import numpy as np

# Of the range of a sequence's logits: the libraries round in another order.
TOLERANCE = 1e-4
# What a change that must show (an adapter, a rotary form) moves the logits by at least.
FAR = 100 * TOLERANCE


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the greatest difference of two logits over the range of the second."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert np.isfinite(theirs).all()
    error = np.abs(ours.astype(np.float64) - theirs).max()
    return float(error / np.ptp(theirs.astype(np.float64)))


def check_greedy(
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    logits_of: Callable[[Sequence[int]], np.ndarray],
) -> None:
    """Check that two libraries continue a prompt by the same tokens.

    Where they part, it must be at a tie: two candidates whose logits the other library
    puts no further apart than both may be off. What follows a tie is not compared, for
    the texts are no longer the same.

    Args:
      logits_of: their logits after every token of a text.
    """
    assert len(ours) == len(theirs), (ours, theirs)
    for index, pair in enumerate(zip(ours, theirs, strict=True)):
        if pair[0] == pair[1]:
            continue
        last = logits_of([*prompt, *theirs[:index]])[-1]
        gap = last[pair[1]] - last[pair[0]]
        assert gap <= 2 * TOLERANCE * np.ptp(last), (
            f"new token {index}: ours {list(ours)}, theirs {list(theirs)}; "
            f"they prefer theirs by {gap}"
        )
        return
