"""The demo: one batch, every row another adapter, each checked against the row alone.

Knows `LLM` only from outside: prompts and adapter names in, completions out.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from punica_jax import tiny
from punica_jax.llm import LLM
from punica_jax.request import Completion, SamplingParams

Case: TypeAlias = tuple[str | None, str, str]  # adapter or None, prompt, expected

# The longest right answer, ten letters in Morse, has 49 characters.
MAX_NEW_TOKENS = 64
_LOG_EVERY = 8
_LOG_WIDTH = 140


def main(console: Console | None = None) -> bool:
    """Run the demo on the tiny model that ships with the package.

    Args:
        console: where to print; standard output by default.

    Returns:
        Whether every row is right and equal to the same request run alone.
    """
    if console is None:
        console = Console()
        if not console.is_terminal:  # a file or pipe: 80 columns would fold the table
            console = Console(width=_LOG_WIDTH)
    # float32: the same tokens in every bucket, so "alone" can be compared exactly.
    llm = LLM(
        tiny.model_dir(),
        adapters=tiny.adapter_dirs(),
        dtype=jnp.float32,
        progress=console.is_terminal,
    )
    return run(llm, tiny.demo_prompts(), console)


def run(llm: LLM, cases: Sequence[Case], console: Console) -> bool:
    """Answer all cases in one batch, stream them, then check and report each row.

    Args:
        llm: with every adapter of the cases loaded.
        cases: one row each.
        console: rows are redrawn as they grow on a terminal, logged elsewhere.

    Returns:
        Whether every output is the expected one and has the tokens of the same
        request run alone.
    """
    adapters = [adapter for adapter, _, _ in cases]
    prompts = [prompt for _, prompt, _ in cases]
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)

    with console.status("Compiling the mixed-adapter step"):
        llm.generate(prompts, adapters, sampling, progress=False)
    num_programs = len(llm.programs)

    rows = _Rows(cases, console)
    live = Live(get_renderable=rows.table, console=console, refresh_per_second=12)
    start_s = time.perf_counter()
    with live if console.is_terminal else nullcontext():
        outs = llm.generate(prompts, adapters, sampling, on_token=rows.add)
    seconds = time.perf_counter() - start_s
    programs = list(llm.programs)
    if not console.is_terminal:
        rows.log()

    with console.status("Running every row alone"):
        alone = [
            llm.generate([prompt], [adapter], sampling)[0]
            for adapter, prompt, _ in cases
        ]
    console.print(_result_table(llm, cases, outs, alone))
    num_tokens = sum(len(out.token_ids) for out in outs)
    _print_line(
        console,
        f"{len(cases)} rows, {len(set(adapters) - {None})} adapters, one batch: "
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s",
    )
    _print_line(
        console,
        f"programs compiled: {', '.join(programs)}; "
        f"{len(programs) - num_programs} of them while streaming",
    )
    device = jax.devices()[0]
    _print_line(console, f"device: {device.platform} ({device.device_kind})")
    return _verdict(cases, outs, alone, console)


def _verdict(
    cases: Sequence[Case],
    outs: Sequence[Completion],
    alone: Sequence[Completion],
    console: Console,
) -> bool:
    """Name every wrong row; return whether there is none."""
    faults = []
    for (adapter, prompt, expected), out, single in zip(
        cases, outs, alone, strict=True
    ):
        row = f"{adapter or 'no adapter'}, prompt {prompt!r}"
        if out.text != expected:
            faults.append(f"{row}: expected {expected!r}, got {out.text!r}")
        if out.token_ids != single.token_ids:
            faults.append(f"{row}: {out.text!r} in the batch, {single.text!r} alone")
    for fault in faults:
        _print_line(console, f"WRONG: {fault}", style="red")
    if not faults:
        _print_line(
            console,
            f"All {len(cases)} rows are right and equal to the same requests alone.",
            style="green",
        )
    return not faults


def _print_line(console: Console, line: str, style: str = "") -> None:
    # Outputs may look like rich's markup, and a log's lines are not to be folded.
    console.print(
        Text(line, style=style), soft_wrap=not console.is_terminal, highlight=False
    )


def _rank(llm: LLM, adapter: str | None) -> str:
    """The adapter's rank, or its least and greatest where modules differ."""
    if adapter is None:
        return "-"
    ranks = {row.rank for row in llm.adapters[adapter].report.rows}
    return "-".join(map(str, sorted({min(ranks), max(ranks)})))


def _result_table(
    llm: LLM,
    cases: Sequence[Case],
    outs: Sequence[Completion],
    alone: Sequence[Completion],
) -> Table:
    table = Table()
    for heading in ("adapter", "rank", "prompt", "output", "expected", "ok", "alone"):
        table.add_column(heading, overflow="fold")
    for (adapter, prompt, expected), out, single in zip(
        cases, outs, alone, strict=True
    ):
        table.add_row(
            Text(adapter or "-"),
            _rank(llm, adapter),
            Text(prompt),
            Text(out.text),
            Text(expected),
            _mark("ok" if out.text == expected else "WRONG"),
            _mark("same" if out.token_ids == single.token_ids else "DIFFERS"),
        )
    return table


def _mark(word: str) -> Text:
    return Text(word, style="bold red" if word.isupper() else "green")


class _Rows:
    """The rows' texts as they grow."""

    def __init__(self, cases: Sequence[Case], console: Console) -> None:
        self._cases = cases
        self._console = console
        self._texts = [""] * len(cases)
        self._num_pieces: Counter[int] = Counter()
        self._num_logged = 0

    def add(self, index: int, piece: str) -> None:
        """Append to a row; off a terminal, log all rows now and then."""
        done = self._num_pieces[index]
        # A row that starts piece n + 1 means that all rows have had their piece n.
        if not self._console.is_terminal and done >= self._num_logged + _LOG_EVERY:
            self.log()
        self._num_pieces[index] += 1
        self._texts[index] += piece

    def table(self) -> Table:
        """The rows side by side, for a live display."""
        table = Table.grid(padding=(0, 2))
        for (adapter, prompt, _), text in zip(self._cases, self._texts, strict=True):
            table.add_row(
                Text(adapter or "-", style="cyan"), Text(prompt), Text(text, "bold")
            )
        return table

    def log(self) -> None:
        """Print the rows as plain lines."""
        self._num_logged = max(self._num_pieces.values(), default=0)
        _print_line(self._console, f"after {self._num_logged} pieces")
        for (adapter, prompt, _), text in zip(self._cases, self._texts, strict=True):
            _print_line(self._console, f"  {adapter or '-':10} {prompt:10} {text}")
