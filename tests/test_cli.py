"""The command line and the demo: what they print, and how they end."""

import io
import re
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from punica_jax import LLM, ChatTemplate, Completion, Piece, SamplingParams, cli, demo
from tests import tiny_checkpoint

RANKS = {"upper": (8,), "reverse": (4, 16), "[red]": (64,)}
CASES = [
    ("upper", "hello", "HELLO"),
    ("reverse", "hello", "olleh"),
    ("[red]", "hello", "[b]hello[/b]"),
    (None, "hello", "hello"),
]
ANSWERS = {
    "upper": str.upper,
    "reverse": lambda text: text[::-1],
    "[red]": lambda text: f"[b]{text}[/b]",
    None: str,
}


class FakeLLM:
    """Answers by string functions, one character a step for all rows.

    A row of the adapter `fickle` answers differently when it is alone.
    """

    default_sampling = SamplingParams(max_new_tokens=9, temperature=0.25)

    def __init__(self, *, fickle=""):
        self.programs = []
        self.calls = []
        self.chat_template = ChatTemplate("{{ messages[0].content }}")
        self.adapters = {
            name: SimpleNamespace(
                report=SimpleNamespace(rows=[SimpleNamespace(rank=r) for r in ranks])
            )
            for name, ranks in RANKS.items()
        }
        self._fickle = fickle

    def encode_chat(self, conversations):
        return [_chat_prompt(conversation) for conversation in conversations]

    def generate(self, prompts, adapters, sampling, on_token=None, progress=None):
        self.calls.append((tuple(prompts), tuple(adapters), sampling))
        program = f"step[seats={len(prompts)}]"
        if program not in self.programs:
            self.programs.append(program)
        texts = [
            ANSWERS[adapter](prompt)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        if len(prompts) == 1 and adapters[0] == self._fickle:
            texts[0] += "!"
        errors = [f"it is {text}" if text == "BAD" else None for text in texts]
        for step in range(max(map(len, texts))) if on_token else ():
            for index, text in enumerate(texts):
                if step < len(text):
                    on_token(index, text[step])
        return [
            Completion(
                text=text,
                token_ids=tuple(text.encode()),
                finish_reason="error" if error else "stop",
                error=error,
                adapter=adapter,
                prompt_token_ids=tuple(prompt.encode()),
                prompt_index=index,
            )
            for index, (text, adapter, prompt, error) in enumerate(
                zip(texts, adapters, prompts, errors, strict=True)
            )
        ]

    def stream(self, prompts, adapters, sampling):
        pieces = []
        outs = self.generate(
            prompts, adapters, sampling, lambda *piece: pieces.append(Piece(*piece))
        )
        yield from pieces
        for index, out in enumerate(outs):
            yield Piece(index, "", out)


def _run(llm, cases, *, terminal=False):
    file = io.StringIO()
    console = Console(
        file=file,
        width=140,
        force_terminal=terminal,
        force_interactive=terminal,
        color_system=None,
    )
    right = demo.run(llm, cases, console)
    return right, file.getvalue()


def _result_cells(output):
    """The result table's cells, line by line."""
    return [
        [cell.strip() for cell in line.strip("│┃").split("│")]
        for line in output.splitlines()
        if line.startswith("│")
    ]


def _chat_prompt(conversation):
    ((message,)) = conversation
    assert message["role"] == "user"
    return f"<{message['content']}>"


class TestDemoRun:
    def test_all_right(self):
        llm = FakeLLM()
        right, output = _run(llm, CASES)
        assert right is True
        assert _result_cells(output) == [
            ["upper", "8", "hello", "HELLO", "HELLO", "ok", "same"],
            ["reverse", "4-16", "hello", "olleh", "olleh", "ok", "same"],
            ["[red]", "64", "hello", "[b]hello[/b]", "[b]hello[/b]", "ok", "same"],
            ["-", "-", "hello", "hello", "hello", "ok", "same"],
        ]
        lines = output.splitlines()
        assert lines[-1] == (
            "All 4 rows are right and equal to the same requests alone."
        )
        assert re.fullmatch(
            r"4 rows, 3 adapters, one batch: 27 tokens in \d+\.\d\d s, \d+ tokens/s",
            lines[-4],
        )
        assert lines[-3] == (
            "programs compiled: step[seats=4]; 0 of them while streaming"
        )
        device = jax.devices()[0]
        assert lines[-2] == f"device: {device.platform} ({device.device_kind})"

    def test_one_batch_then_every_row_alone(self):
        llm = FakeLLM()
        _run(llm, CASES)
        whole = (("hello",) * 4, ("upper", "reverse", "[red]", None))
        assert [call[:2] for call in llm.calls] == [
            whole,
            whole,
            *((("hello",), (adapter,)) for adapter in whole[1]),
        ]
        assert {call[2].temperature for call in llm.calls} == {0.0}

    def test_wrong_row(self):
        cases = [*CASES[:2], (None, "hello", "HELLO")]
        right, output = _run(FakeLLM(), cases)
        assert right is False
        assert output.splitlines()[-1] == (
            "WRONG: no adapter, prompt 'hello': expected 'HELLO', got 'hello'"
        )
        assert [row[5] for row in _result_cells(output)] == ["ok", "ok", "WRONG"]

    def test_row_that_differs_from_alone(self):
        right, output = _run(FakeLLM(fickle="reverse"), CASES)
        assert right is False
        assert output.splitlines()[-1] == (
            "WRONG: reverse, prompt 'hello': 'olleh' in the batch, 'olleh!' alone"
        )
        marks = [row[5:] for row in _result_cells(output)]
        assert marks == [
            ["ok", "same"],
            ["ok", "DIFFERS"],
            ["ok", "same"],
            ["ok", "same"],
        ]

    def test_log_shows_the_rows_as_they_grow(self):
        _, output = _run(FakeLLM(), CASES)
        assert output.splitlines()[:10] == [
            "after 8 pieces",
            "  upper      hello      HELLO",
            "  reverse    hello      olleh",
            "  [red]      hello      [b]hello",
            "  -          hello      hello",
            "after 12 pieces",
            "  upper      hello      HELLO",
            "  reverse    hello      olleh",
            "  [red]      hello      [b]hello[/b]",
            "  -          hello      hello",
        ]
        assert "\x1b" not in output

    def test_terminal_redraws_the_rows(self):
        right, output = _run(FakeLLM(), CASES, terminal=True)
        assert right is True
        assert "pieces" not in output
        before_table = output[: output.index("expected")]
        assert "[b]hello[/b]" in before_table
        assert "\x1b[" in before_table  # the cursor goes back up


class TestCommands:
    def test_version(self):
        result = CliRunner().invoke(cli.app, ["--version"])
        assert result.exit_code == 0
        assert re.fullmatch(
            r"punica-jax (\d+\.\d+\.\d+|\(a checkout that is not installed\)), "
            rf"jax {re.escape(jax.__version__)}\n",
            result.stdout,
        )

    @pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
    def test_demo_exit_status(self, monkeypatch, right, status):
        monkeypatch.setattr(cli, "run_demo", lambda: right)
        assert CliRunner().invoke(cli.app, ["demo"]).exit_code == status

    def test_help_names_the_commands(self):
        result = CliRunner().invoke(cli.app, [])
        assert "demo" in result.output and "generate" in result.output

    def test_generate_passes_everything_on(self, monkeypatch, tmp_path):
        made = []

        def make(path, **options):
            made.append((FakeLLM(), path, options))
            return made[0][0]

        monkeypatch.setattr(cli, "LLM", make)
        words = f"generate {tmp_path} ab cd --adapter upper=/up --adapter reverse=/re"
        options = "--use reverse --use none --max-new-tokens 5 --temperature 0.5"
        result = CliRunner().invoke(
            cli.app, [*words.split(), *options.split(), *"--seed 3".split()]
        )
        assert result.exit_code == 0, result.output
        assert result.stdout == "[reverse] ab\nba\n\n[none] cd\ncd\n\n"
        ((llm, path, options),) = made
        assert path == str(tmp_path)
        assert options["adapters"] == {"upper": "/up", "reverse": "/re"}
        ((prompts, adapters, sampling),) = llm.calls
        assert (prompts, adapters) == (("ab", "cd"), ("reverse", None))
        assert sampling == SamplingParams(max_new_tokens=5, temperature=0.5, seed=3)

    def test_generate_samples_as_asked_or_as_the_model_has_it(self, monkeypatch):
        llm = FakeLLM()
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: llm)
        options = "--top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.5"
        stops = "--stop END --stop STOP"
        for words in ("", f"{options} {stops}"):
            result = CliRunner().invoke(
                cli.app, ["generate", "o/m", "x", *words.split()]
            )
            assert result.exit_code == 0, result.output
        assert [call[2] for call in llm.calls] == [
            llm.default_sampling,
            SamplingParams(
                max_new_tokens=9,
                temperature=0.25,
                top_k=5,
                top_p=0.9,
                min_p=0.1,
                repetition_penalty=1.5,
                stop=("END", "STOP"),
            ),
        ]

    @pytest.mark.parametrize("prompts", [["ab"], ["ab", "cd"]])
    def test_generate_chats(self, monkeypatch, prompts):
        llm = FakeLLM()
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: llm)
        result = CliRunner().invoke(cli.app, ["generate", "/m", *prompts, "--chat"])
        assert result.exit_code == 0, result.output
        assert llm.calls[0][0] == tuple(f"<{prompt}>" for prompt in prompts)
        if len(prompts) == 1:
            assert result.stdout == "<ab>\n"
        else:
            assert result.stdout == "[none] ab\n<ab>\n\n[none] cd\n<cd>\n\n"

    @pytest.mark.parametrize("templates", [{}, {"rag": "R"}])
    def test_generate_chats_by_a_template_alone(self, monkeypatch, templates):
        llm = FakeLLM()
        llm.chat_template = ChatTemplate(templates)
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: llm)
        result = CliRunner().invoke(cli.app, ["generate", "/m", "hi", "--chat"])
        assert result.exit_code == 2
        assert result.stderr == (
            "error: --chat needs a chat template, and /m has none for plain "
            "conversations; leave --chat out\n"
        )

    def test_generate_streams_a_single_prompt(self, monkeypatch):
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: FakeLLM())
        result = CliRunner().invoke(
            cli.app, ["generate", "/m", "hey", "--adapter", "upper=/u", "--use=upper"]
        )
        assert result.stdout == "HEY\n"

    @pytest.mark.parametrize(
        ("prompts", "stdout", "stderr"),
        [
            (["bad"], "BAD\n", "error: it is BAD\n"),
            (
                ["ok", "bad"],
                "[upper] ok\nOK\n\n[upper] bad\nBAD\n\n",
                "error: prompt 1: it is BAD\n",
            ),
        ],
    )
    def test_generate_tells_of_answers_that_failed(
        self, monkeypatch, prompts, stdout, stderr
    ):
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: FakeLLM())
        result = CliRunner().invoke(
            cli.app, ["generate", "/m", *prompts, "--use=upper"]
        )
        assert (result.stdout, result.stderr) == (stdout, stderr)
        assert result.exit_code == 1

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (
                ["hi", "--adapter", "upper"],
                "--adapter must be NAME=PATH with a name other than 'none', "
                "got 'upper'",
            ),
            (
                ["hi", "--adapter", "none=/x"],
                "--adapter must be NAME=PATH with a name other than 'none', "
                "got 'none=/x'",
            ),
            (
                ["hi", "--adapter", "a=/x", "--adapter", "a=/y"],
                "--adapter must give each name once, got 'a' for '/x' and for '/y'",
            ),
            (
                ["a", "b", "c", "--use", "none", "--use", "none"],
                "--use must be given once, or once for each prompt: got 2 for "
                "3 prompts",
            ),
            (
                ["hi", "--temperature", "-1"],
                "temperature must be a number from 0 to 100, got -1.0",
            ),
        ],
    )
    def test_generate_refuses(self, words, text):
        result = CliRunner().invoke(cli.app, ["generate", "/m", *words])
        assert result.exit_code == 2
        assert result.stderr == f"error: {text}\n"
        assert result.stdout == ""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint.write_model(path / "model")
    tiny_checkpoint.write_adapter(path / "a", 4, seed=1)
    tiny_checkpoint.write_adapter(path / "b", 20, ("q_proj", "v_proj"), seed=2)
    return path


class TestRealModel:
    """The same with `LLM`, on a model of random weights.

    One new token each: decode programs would double the time, and tests/test_llm.py
    has them.
    """

    @pytest.mark.slow
    def test_demo_run(self, checkpoint, monkeypatch):
        monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 1)
        names = ["a", "b", None]
        llm = LLM(
            checkpoint / "model",
            adapters={name: checkpoint / name for name in names if name},
            progress=False,
        )
        outs = llm.generate(
            ["hello"] * 3, names, SamplingParams(max_new_tokens=1, ignore_eos=True)
        )
        cases = [
            (name, "hello", out.text) for name, out in zip(names, outs, strict=True)
        ]
        right, output = _run(llm, cases)
        assert right is True, output
        assert [row[:2] for row in _result_cells(output)] == [
            ["a", "4"],
            ["b", "20"],
            ["-", "-"],
        ]
        assert "3 rows, 2 adapters, one batch: 3 tokens in " in output
        assert "; 0 of them while streaming" in output
        wrong = [*cases[:2], (None, "hello", "no such answer")]
        right, output = _run(llm, wrong)
        assert right is False
        assert output.count("WRONG: ") == 1
        assert "no adapter, prompt 'hello': expected 'no such answer', got" in output

    @pytest.mark.slow
    def test_the_demo_itself(self):
        result = CliRunner().invoke(cli.app, ["demo"])
        assert result.exit_code == 0, result.output
        assert "All 9 rows are right and equal to the same" in result.output
        assert "9 rows, 8 adapters, one batch: " in result.output
        assert "; 0 of them while streaming" in result.output

    def test_generate(self, checkpoint):
        words = ["generate", str(checkpoint / "model"), "hello", "hello"]
        adapters = [f"--adapter={name}={checkpoint / name}" for name in "ab"]
        options = ["--use=b", "--use=none", "--max-new-tokens=1"]
        result = CliRunner().invoke(cli.app, [*words, *adapters, *options])
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("[b] hello\n")
        assert "\n\n[none] hello\n" in result.stdout

    def test_generate_names_what_is_wrong(self, checkpoint):
        model = str(checkpoint / "model")
        result = CliRunner().invoke(cli.app, ["generate", model, "hi", "--use=legal"])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: no adapter named 'legal' is loaded")
        missing = checkpoint / "nothing"
        result = CliRunner().invoke(cli.app, ["generate", str(missing), "hi"])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {missing}: no such directory, and not")
