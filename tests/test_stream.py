"""Streams: the same answers in pieces, and nothing left behind when one is dropped."""

import gc
import io
import re

import numpy as np
import pytest
from rich.console import Console

import punica_jax as pj
from punica_jax import progress
from punica_jax.stream import Piece

PROMPTS = ["hello", "hello", "hello", "a prompt that is longer", "x", "hello"]
ADAPTERS = ["a", None, "b", "c", "a", "c"]
GREEDY = pj.SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def together(llm):
    return llm.generate(PROMPTS, ADAPTERS, GREEDY)


def test_pieces_join_to_the_completions(llm, together):
    texts = [""] * len(PROMPTS)
    ends = {}
    order = []
    for piece in llm.stream(PROMPTS, ADAPTERS, GREEDY):
        assert isinstance(piece, Piece)
        assert piece.index not in ends, "nothing comes after the end"
        order.append(piece.index)
        texts[piece.index] += piece.text
        if piece.completion is not None:
            ends[piece.index] = piece.completion
    assert [ends[index] for index in range(len(PROMPTS))] == together
    assert texts == [row.text for row in together]
    # Four seats: all four prompts' texts grow beside each other.
    assert set(order[:8]) == {0, 1, 2, 3}
    with pytest.raises(AttributeError):
        ends[0].text = "frozen"


def test_several_completions_of_a_prompt(llm):
    warm = pj.SamplingParams(n=2, max_new_tokens=4, temperature=1.5, seed=1)
    rows = llm.generate(["hello", "x"], "a", warm)
    pieces = [p for p in llm.stream(["hello", "x"], "a", warm) if p.completion]
    assert sorted(p.index for p in pieces) == [0, 1, 2, 3]
    assert [p.completion for p in sorted(pieces, key=lambda p: p.index)] == rows


def test_the_arguments_are_checked_at_once(llm, together):
    with pytest.raises(pj.UnknownAdapterError, match="no adapter named 'nope'"):
        llm.stream("hello", "nope")
    assert list(llm.stream([])) == []
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


@pytest.mark.parametrize("num_pieces", [0, 1, 9])
@pytest.mark.parametrize("leave", ["close", "drop", "break", "raise"])
def test_a_stream_that_is_left(llm, together, leave, num_pieces):
    if leave in ("close", "drop"):
        stream = llm.stream(PROMPTS, ADAPTERS, GREEDY)
        for _ in range(num_pieces):
            next(stream)
        if leave == "close":
            stream.close()
        else:
            del stream
            gc.collect()
    elif leave == "break":
        for number, _ in enumerate(llm.stream(PROMPTS, ADAPTERS, GREEDY)):
            if number == num_pieces:
                break
    else:
        with pytest.raises(KeyError):
            for number, _ in enumerate(llm.stream(PROMPTS, ADAPTERS, GREEDY)):
                if number == num_pieces:
                    raise KeyError
    assert not llm._loop.busy
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_calls_during_a_stream_are_refused(llm, checkpoint, together):
    stream = llm.stream(PROMPTS, ADAPTERS, GREEDY)
    calls = {
        "generate": lambda: llm.generate("x"),
        "stream": lambda: llm.stream("x"),
        "load_adapter": lambda: llm.load_adapter("late", checkpoint / "d"),
        "unload_adapter": lambda: llm.unload_adapter("a"),
        "warm_up": llm.warm_up,
    }
    for _ in range(2):
        for name, call in calls.items():
            with pytest.raises(RuntimeError) as caught:
                call()
            assert str(caught.value) == (
                f"{name} was called while another call of this LLM is running; an LLM "
                "takes one call at a time, callbacks and open streams included; finish "
                "or close() an open stream first"
            )
        next(stream)
    ends = {p.index: p.completion for p in stream if p.completion}
    assert [ends[index] for index in range(len(PROMPTS))] == together
    # It has ended, so it holds nothing.
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_the_last_piece_leaves_the_llm_free(llm, together):
    stream = llm.stream(PROMPTS[:2], ADAPTERS[:2], GREEDY)
    ends = []
    while len(ends) < 2:
        piece = next(stream)
        ends += [piece] if piece.completion else []
    # The loop is not over: the stream is neither exhausted nor closed.
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together
    assert list(stream) == []
    assert {piece.index: piece.completion for piece in ends} == {
        0: together[0],
        1: together[1],
    }


def test_closing(llm, together):
    stream = llm.stream(PROMPTS, ADAPTERS, GREEDY)
    next(stream)
    for _ in range(2):
        stream.close()
        assert list(stream) == []
    other = llm.stream(PROMPTS, ADAPTERS, GREEDY)
    stream.close()  # not this one
    with pytest.raises(RuntimeError, match="generate was called while another call"):
        llm.generate("x")
    assert sum(piece.completion is not None for piece in other) == len(PROMPTS)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_step_that_fails_harms_nobody_later(llm, together, monkeypatch, call, error):
    launch = llm._runner.launch
    steps = iter(range(3))

    def fail(*args):
        if next(steps, None) is None:
            raise error("in the middle")
        return launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "launch", fail)
        with pytest.raises(error, match="in the middle"):
            list(getattr(llm, call)(PROMPTS, ADAPTERS, GREEDY))
    assert not llm._loop.busy
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_streamed_chat(llm):
    message = {"role": "user", "content": "hello"}
    prompts = llm.encode_chat([message], template="<s>{{ messages[0].content }}")
    text = "".join(piece.text for piece in llm.stream(prompts, "a", GREEDY))
    assert text == llm.generate("hello", "a", GREEDY)[0].text


def test_prompts_of_every_kind(llm, together):
    tokens = [list(row.prompt_token_ids) for row in together]
    prompts = [
        PROMPTS[0],
        np.asarray(tokens[1], np.int32),
        tuple(tokens[2]),
        [np.int64(token) for token in tokens[3]],
        PROMPTS[4],
        np.asarray(tokens[5], np.uint16),
    ]
    assert llm.generate(prompts, ADAPTERS, GREEDY) == together
    same = np.stack([tokens[0], tokens[1]])
    assert llm.generate(list(same), ADAPTERS[:2], GREEDY) == together[:2]


class TestProgress:
    @pytest.fixture
    def bar(self, monkeypatch):
        """What is shown, on a terminal."""
        file = io.StringIO()
        monkeypatch.setattr(
            progress,
            "Console",
            lambda stderr: Console(
                file=file, force_terminal=True, width=80, color_system=None
            ),
        )
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        return file

    def test_shown_for_several_prompts(self, llm, bar):
        llm.generate(PROMPTS[:3], ADAPTERS[:3], GREEDY)
        shown = bar.getvalue()
        assert "answering" in shown and re.search(r"0/3", shown)
        assert re.search(r"3/3", shown)

    def test_nothing_is_counted_where_nothing_is_shown(self, llm):
        class Uncounted(list):
            def __iter__(self):
                raise AssertionError("counted")

        with progress.answering(Uncounted([None, None]), False) as show:
            show()

    @pytest.mark.parametrize(
        ("prompts", "options", "shown"),
        [
            (PROMPTS[:1], {}, False),
            (PROMPTS[:1], {"progress": True}, True),
            (PROMPTS[:2], {"progress": False}, False),
            (PROMPTS[:2], {"on_token": lambda index, text: None}, False),
        ],
    )
    def test_or_where_asked_for(self, llm, bar, prompts, options, shown):
        llm.generate(prompts, "a", GREEDY, **options)
        assert ("answering" in bar.getvalue()) == shown

    def test_not_into_a_file(self, llm, capsys):
        llm.generate(PROMPTS[:2], "a", GREEDY)
        assert capsys.readouterr() == ("", "")
