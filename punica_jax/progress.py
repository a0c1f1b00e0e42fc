"""A progress bar over the prompts of a call.

Plain Python; knows a number of prompts, nothing of what they are.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextlib.contextmanager
def answering(
    num_prompts: int, progress: bool | None
) -> Iterator[Callable[[int], None]]:
    """Show on standard error how many prompts are answered.

    Args:
      num_prompts: all of them.
      progress: whether to; None if standard error is a terminal and there are several.

    Yields:
      A function to call with the number of prompts answered so far.
    """
    if progress is None:
        progress = num_prompts > 1 and sys.stderr.isatty()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    with bar:
        task = bar.add_task("answering", total=num_prompts)
        yield lambda answered: bar.update(task, completed=answered)
