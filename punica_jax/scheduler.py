"""Which sequences run in the next step, and how many rows each gets.

Plain Python; knows sequences by what they have left to do, nothing of devices.
"""

from collections.abc import Sequence

from punica_jax.sequence import SequenceState


def schedule(
    running: Sequence[SequenceState], max_rows: int
) -> list[tuple[SequenceState, int]]:
    """Choose the rows of the next step.

    Sequences that decode come first, one row each, so that prompts never stall them;
    what is left of the step's rows goes to the prompts, in order, in chunks.

    Args:
      running: the sequences in flight, at most `max_rows`.
      max_rows: most rows of a step.

    Returns:
      Sequences and their numbers of rows, each at least 1.
    """
    assert len(running) <= max_rows
    scheduled = [(sequence, 1) for sequence in running if sequence.num_left == 1]
    budget = max_rows - len(scheduled)
    for sequence in running:
        if sequence.num_left > 1 and budget:
            rows = min(sequence.num_left, budget)
            scheduled.append((sequence, rows))
            budget -= rows
    return scheduled
