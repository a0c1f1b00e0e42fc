"""A progress bar over the sequences of a call.

Plain Python; knows when a sequence has ended, nothing of what steps it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from punica_jax.sequence import SequenceState


@contextlib.contextmanager
def answering(
    sequences: Sequence[SequenceState], progress: bool | None
) -> Iterator[Callable[[], None]]:
    """Show on standard error how many sequences are answered.

    Args:
      sequences: all of them.
      progress: whether to; None if standard error is a terminal and there are several.

    Yields:
      A function to call after each step.
    """
    if progress is None:
        progress = len(sequences) > 1 and sys.stderr.isatty()
    if not progress:
        yield lambda: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("answering", total=len(sequences))
        yield lambda: bar.update(
            task, completed=sum(one.finish_reason is not None for one in sequences)
        )
