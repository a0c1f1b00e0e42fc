"""What is shown on standard error while something takes long.

Plain Python; knows when a sequence has ended and what a program is called, nothing of
what steps or compiles them.
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
from rich.table import Column, Table
from rich.text import Text

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


@contextlib.contextmanager
def compiling(
    num_programs: int, progress: bool
) -> Iterator[Callable[[str, float], None]]:
    """Show on standard error what is compiled so far, and a table at the end.

    Args:
      num_programs: all of them; some that are compiled together count as one.
      progress: whether to show anything.

    Yields:
      A function to call after each, with its name (a line for each of several) and the
      seconds that it took.
    """
    if not progress:
        yield lambda name, seconds: None
        return
    console = Console(stderr=True)
    table = Table("program", Column("seconds", justify="right"))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("compiling", total=num_programs)

        def note(name: str, seconds: float) -> None:
            table.add_row(Text(name), f"{seconds:.2f}")  # a [bracket] is no style
            bar.advance(task)

        yield note
    console.print(table)
