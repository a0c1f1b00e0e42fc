"""The command line: `punica-jax demo`, `punica-jax bench`, `punica-jax generate`.

Knows nothing of models or devices: it turns words of a command into calls of the
library and its errors into one line and an exit status.
"""

import dataclasses
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from punica_jax.bench import main as run_bench
from punica_jax.bench_model import SHAPES, SMALL
from punica_jax.demo import main as run_demo
from punica_jax.llm import LLM
from punica_jax.request import Completion, SamplingParams
from punica_jax.stream import Piece

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
def bench(
    shape: Annotated[
        str, typer.Option(help=f"Of a random model: {', '.join(SHAPES)}.")
    ] = SMALL.name,
    rows: Annotated[int, typer.Option(help="Sequences that decode at once.")] = 8,
) -> None:
    """Time decode steps without, with one and with many adapters, on this device.

    Then one product against a plain gather. The repository's benchmarks/ is the long
    form.
    """
    try:
        run_bench(shape, rows)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face directory or hub id, ORG/NAME or ORG/NAME@REVISION."
        ),
    ],
    prompts: Annotated[list[str], typer.Argument(help="One request each.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Load a PEFT directory or hub id: NAME=PATH. Repeatable."),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            help=f"The adapter to answer with, or {BASE!r}: one for all prompts, or "
            "repeated, one for each."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Each prompt is a user's message, for the chat template."
        ),
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among so many most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among those that hold this much.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Sample among those at least so likely beside the first."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: repeat less.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends an answer. Repeatable.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Fixes the random numbers of sampling.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer together.")
    ] = None,
) -> None:
    """Answer prompts with one model in one batch, each with its own adapter.

    What is not given is as the model's generation_config.json has it. Exits with 1 if
    an answer has failed, and with 2 if something that was given is wrong.
    """
    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**given)  # refuses before anything is loaded
        paths = _named_paths(adapter or [])
        names = _adapter_of_each_prompt(use or [BASE], len(prompts))

        llm = LLM(
            model,
            adapters=paths,
            max_model_len=max_model_len,
            progress=sys.stdout.isatty(),  # a pipe gets the answers alone
        )
        sampling = dataclasses.replace(llm.default_sampling, **given)
        asked = prompts
        if chat:
            if "default" not in llm.chat_template.names:
                raise ValueError(
                    f"--chat needs a chat template, and {model} has none for plain "
                    "conversations; leave --chat out"
                )
            asked = llm.encode_chat([[{"role": "user", "content": p}] for p in prompts])
        if len(prompts) == 1:
            outs = _print_stream(llm.stream(asked, names, sampling))
        else:
            outs = llm.generate(asked, names, sampling)
            for prompt, name, out in zip(prompts, names, outs, strict=True):
                typer.echo(f"[{name or BASE}] {prompt}\n{out.text}\n")
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    failed = [out for out in outs if out.error is not None]
    for out in failed:
        which = f"prompt {out.prompt_index}: " if len(outs) > 1 else ""
        typer.echo(f"error: {which}{out.error}", err=True)
    if failed:
        raise typer.Exit(1)


def _print_stream(stream: Iterable[Piece]) -> list[Completion]:
    """Print a prompt's text as it comes; return its completions."""
    outs = []
    for piece in stream:
        typer.echo(piece.text, nl=False)
        if piece.completion is not None:
            outs.append(piece.completion)
    typer.echo()
    return outs


def _named_paths(texts: list[str]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name == BASE:
            raise ValueError(
                f"--adapter must be NAME=PATH with a name other than {BASE!r}, got "
                f"{text!r}"
            )
        if name in paths:
            raise ValueError(
                f"--adapter must give each name once, got {name!r} for {paths[name]!r} "
                f"and for {path!r}"
            )
        paths[name] = path
    return paths


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
