"""The command line: `punica-jax demo`, `punica-jax generate`.

Knows nothing of models or devices: it turns words of a command into calls of the
library and its errors into one line and an exit status.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from punica_jax.demo import main as run_demo
from punica_jax.llm import LLM
from punica_jax.request import SamplingParams

BASE = "none"  # what --use calls the model without an adapter

app = typer.Typer(
    help="Serve many LoRA adapters over one base model, mixed in one batch.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        ours = version("punica-jax")
    except PackageNotFoundError:
        ours = "(a checkout that is not installed)"
    typer.echo(f"punica-jax {ours}, jax {version('jax')}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of punica-jax and JAX.",
        ),
    ] = False,
) -> None:
    del version  # its callback has done the work


@app.command()
def demo() -> None:
    """Answer one batch, every row with another adapter, and check each row.

    Runs the small Llama and the 8 adapters that ship with the package. Exits with 1 if
    a row is wrong or differs from the same request run alone.
    """
    raise typer.Exit(0 if run_demo() else 1)


@app.command()
def generate(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face Llama directory.")],
    prompts: Annotated[list[str], typer.Argument(help="One request each.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Load a PEFT directory: NAME=PATH. May be repeated."),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            help=f"The adapter to answer with, or {BASE!r}: one for all prompts, or "
            "repeated, one for each."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer.")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Fixes the random numbers of sampling.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer together.")
    ] = None,
) -> None:
    """Answer prompts with one model in one batch, each with its own adapter."""
    try:
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )
        paths = dict(_named_path(text) for text in adapter or [])
        names = _adapter_of_each_prompt(use or [BASE], len(prompts))

        llm = LLM(
            model_dir,
            adapters=paths,
            max_model_len=max_model_len,
            progress=sys.stdout.isatty(),  # a pipe gets the answers alone
        )
        if len(prompts) == 1:
            llm.generate(prompts, names, sampling, on_token=_print_piece)
            typer.echo()
            return
        outs = llm.generate(prompts, names, sampling)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    for prompt, name, out in zip(prompts, names, outs, strict=True):
        typer.echo(f"[{name or BASE}] {prompt}\n{out.text}\n")


def _print_piece(index: int, piece: str) -> None:
    del index
    typer.echo(piece, nl=False)


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path) or name == BASE:
        raise ValueError(
            f"--adapter must be NAME=PATH with a name other than {BASE!r}, got {text!r}"
        )
    return name, Path(path)


def _adapter_of_each_prompt(use: list[str], num_prompts: int) -> list[str | None]:
    names = [None if name == BASE else name for name in use]
    if len(names) == 1:
        return names * num_prompts
    if len(names) != num_prompts:
        raise ValueError(
            "--use must be given once, or once for each prompt: "
            f"got {len(names)} for {num_prompts} prompts"
        )
    return names
