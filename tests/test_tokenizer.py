"""Tokenizer files in, text out: whole, streamed, and refused."""

import json
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from punica_jax._text_stages import streaming_stages
from punica_jax.model_dir import ModelFileError
from punica_jax.tokenizer import Detokenizer, Tokenizer, TokenizerError

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "many adapters share one base model; each row may use another adapter",
    "naïve café, 12 345 tokens: höher, schneller, weiter",
]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _byte_level() -> tokenizers.Tokenizer:
    """Llama-3 and GPT-2: tokens spell bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # "ü plus" holds a space, which spells no byte: it stands for itself.
    tokenizer.add_tokens(["ü plus", AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _byte_level_ambiguous() -> tokenizers.Tokenizer:
    """Added tokens that the decoder reads as the bytes E9, FC: it has no other way."""
    tokenizer = _byte_level()
    tokenizer.add_tokens(["é", "ü"])
    return tokenizer


def _sentencepiece() -> tokenizers.Tokenizer:
    """Llama-2: "▁" for spaces, bytes for characters outside the vocabulary."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # merges stay within words
    trained.train_from_iterator(
        TEXT[:2],
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=[*special, *bytes_], show_progress=False
        ),
    )
    # The trainer marks bytes as special; in a Llama-2 file only the first three are.
    model = json.loads(trained.to_str())["model"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(special)
    # "<0xZZ>" looks like a byte and is none.
    tokenizer.add_tokens(["<0xZZ>", "▁▁"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _with_decoder(decoder) -> tokenizers.Tokenizer:
    tokenizer = _sentencepiece()
    tokenizer.decoder = decoder
    return tokenizer


def _chain(*parts):
    return decoders.Sequence(list(parts))


STREAMED = {
    "byte_level": _byte_level,
    "byte_level_ambiguous": _byte_level_ambiguous,
    "sentencepiece": _sentencepiece,
    "sentencepiece_unstripped": lambda: _with_decoder(
        _chain(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    ),
    "sentencepiece_unfused": lambda: _with_decoder(
        _chain(decoders.Replace("▁", " "), decoders.ByteFallback())
    ),
    "strip_three": lambda: _with_decoder(
        _chain(decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0))
    ),
    "metaspace": lambda: _with_decoder(decoders.Metaspace()),
    "metaspace_never": lambda: _with_decoder(
        decoders.Metaspace(prepend_scheme="never")
    ),
    "metaspace_bytes": lambda: _with_decoder(
        _chain(decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"))
    ),
    "byte_level_in_a_chain": lambda: _with_decoder(_chain(decoders.ByteLevel())),
    "no_decoder": lambda: _with_decoder(None),
}
HELD = {
    "wordpiece": lambda: _with_decoder(decoders.WordPiece()),
    "ctc": lambda: _with_decoder(decoders.CTC()),
    "strip_per_token": lambda: _with_decoder(_chain(decoders.Strip("▁", 1, 0))),
    "replace_across_tokens": lambda: _with_decoder(
        _chain(decoders.Fuse(), decoders.Replace("er", "XY"))
    ),
    "replace_by_regex": lambda: _with_decoder(
        _chain(decoders.Replace(tokenizers.Regex("e+"), "E"))
    ),
    "bytes_after_fuse": lambda: _with_decoder(
        _chain(decoders.Fuse(), decoders.ByteFallback())
    ),
}
KINDS = STREAMED | HELD


@cache
def _tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), eos_token_ids=[2], model_vocab_size=1000)


@cache
def _id_of_byte(kind: str) -> dict[int, int]:
    """The token that is one byte, for each byte."""
    vocab = KINDS[kind]().get_vocab()
    if kind == "sentencepiece":
        return {byte: vocab[f"<0x{byte:02X}>"] for byte in range(256)}
    # A byte that is a printable Latin-1 character spells itself; the others, in
    # order, have the rest of the alphabet.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {ord(char): char for char in alphabet if ord(char) < 256}
    others = [byte for byte in range(256) if byte not in spelled]
    spelled |= zip(others, alphabet[len(spelled) :], strict=True)
    return {byte: vocab[char] for byte, char in spelled.items()}


def _byte_ids(kind: str, data: bytes) -> list[int]:
    return [_id_of_byte(kind)[byte] for byte in data]


def _stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return [*pieces, detokenizer.finish()]


def _check_stream(tokenizer, ids):
    # Equal, so every moment's text is a prefix of the final one: nothing shown is
    # taken back, and no U+FFFD appears that the whole does not have.
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


def _save(path, tokenizer, **files):
    tokenizer.save(str(path / "tokenizer.json"))
    for name, fields in files.items():
        text = fields if isinstance(fields, str) else json.dumps(fields)
        (path / f"{name}.json").write_text(text, encoding="utf-8")
    return path


class TestStreaming:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=60)
    @given(data=st.data())
    def test_random_tokens_join_to_the_whole_decode(self, kind, data):
        tokenizer = _tokenizer(kind)
        last = tokenizer.vocab_size + 5  # the model's padding is decoded too
        ids = data.draw(st.lists(st.integers(0, last), max_size=24))
        _check_stream(tokenizer, ids)

    @pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
    @settings(max_examples=150)
    @given(data=st.binary(max_size=16))
    @example(data=b"\xe2\x82\xac")
    @example(data=b"\xe2\x82")
    @example(data=b"\xf0\x9f\x92\xe2\x82\xac")
    @example(data=b"\xed\xa0\x80\xe0\x80\xf4\x90\xc0\xaf")
    def test_random_bytes_join_to_the_whole_decode(self, kind, data):
        tokenizer = _tokenizer(kind)
        _check_stream(tokenizer, _byte_ids(kind, data))

    @pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
    @settings(max_examples=100)
    @given(text=st.text(max_size=24))
    @example(text="  two  spaces ")
    @example(text="👩‍👩‍👧 नमस्ते 你好")
    def test_random_texts_join_to_the_whole_decode(self, kind, text):
        tokenizer = _tokenizer(kind)
        ids = tokenizer.encode(text)
        _check_stream(tokenizer, ids)
        if REPLACEMENT not in text:
            assert not any(REPLACEMENT in piece for piece in _stream(tokenizer, ids))

    @pytest.mark.parametrize("kind", STREAMED)
    def test_ordinary_text_is_not_held_back(self, kind):
        tokenizer = _tokenizer(kind)
        ids = [i for i in tokenizer.encode(TEXT[0]) if i not in {0, 1, 2}]
        pieces = _stream(tokenizer, ids)
        assert len(ids) > 10
        assert pieces[-1] == ""
        assert sum(piece != "" for piece in pieces[1:-1]) == len(ids) - 1

    @pytest.mark.parametrize("kind", HELD)
    def test_a_chain_without_streaming_form_waits(self, kind):
        tokenizer = _tokenizer(kind)
        ids = tokenizer.encode(TEXT[0])
        *pushed, rest = _stream(tokenizer, ids)
        assert set(pushed) == {""}
        assert rest == tokenizer.decode(ids) != ""

    def test_a_character_comes_whole(self):
        tokenizer = _tokenizer("byte_level")
        ids = _byte_ids("byte_level", "a€b".encode())
        assert _stream(tokenizer, ids) == ["a", "", "", "€", "b", ""]

    def test_byte_fallback_waits_for_the_end_of_the_run(self):
        tokenizer = _tokenizer("sentencepiece")
        run = _byte_ids("sentencepiece", "€é".encode())
        word = tokenizer.encode("the")[1:]
        pieces = _stream(tokenizer, run + word)
        assert pieces[: len(run)] == [""] * len(run)
        assert pieces[len(run)].startswith("€é t")

    def test_only_the_first_word_loses_its_space(self):
        tokenizer = _tokenizer("sentencepiece")
        ids = tokenizer.encode("the dog")[1:]
        again = ids + ids
        assert "".join(_stream(tokenizer, again)) == "the dog the dog"

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=30)
    @given(text=st.sampled_from(TEXT), cut=st.integers(0, 40))
    def test_after_a_prompt_text_goes_on(self, kind, text, cut):
        tokenizer = _tokenizer(kind)
        ids = tokenizer.encode(text)
        prompt, ids = ids[:cut], ids[cut:]
        # It may not end inside a character; where nothing streams, nor in its bytes.
        assume(REPLACEMENT not in tokenizer.decode(prompt))
        last = tokenizer.token(prompt[-1]) if prompt else None
        assume(kind != "bytes_after_fuse" or "<0x" not in (last or ""))
        detokenizer = Detokenizer(tokenizer, prompt=prompt)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        before = tokenizer.decode(prompt)
        assert before + "".join(pieces) == tokenizer.decode(prompt + ids)

    def test_special_tokens_are_left_out(self):
        tokenizer = _tokenizer("byte_level")
        start, end = _byte_ids("byte_level", "é".encode())
        # Skipped also inside a character, as the whole decode does.
        assert _stream(tokenizer, [0, start, 1, end, 1]) == ["", "", "", "é", "", ""]

    def test_cost_does_not_grow_with_the_length(self, monkeypatch):
        tokenizer = _tokenizer("byte_level")
        detokenizer = Detokenizer(tokenizer)

        def refuse(*_):
            raise AssertionError("a push decoded a sequence of ids")

        monkeypatch.setattr(Tokenizer, "decode", refuse)
        (bad,) = _byte_ids("byte_level", b"\xff")
        for _ in range(50):
            assert detokenizer.push(bad) == REPLACEMENT
        assert detokenizer.finish() == ""

    def test_a_bad_id_changes_nothing(self):
        tokenizer = _tokenizer("byte_level")
        detokenizer = Detokenizer(tokenizer)
        start, end = _byte_ids("byte_level", "é".encode())
        assert detokenizer.push(start) == ""
        with pytest.raises(TokenizerError, match="from 0 to 999, got 1000"):
            detokenizer.push(1000)
        assert detokenizer.push(end) == "é"


class TestWhole:
    @pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
    @settings(max_examples=50)
    @given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    def test_decode_undoes_encode(self, kind, text):
        tokenizer = _tokenizer(kind)
        marks = ("<s>", "</s>", "<unk>", "<0x", "▁")  # not themselves once encoded
        assume(not any(mark in text for mark in marks))
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_encode_adds_the_files_own_special_tokens(self):
        tokenizer = _tokenizer("byte_level")
        assert tokenizer.encode("")[:1] == [0]
        assert tokenizer.encode("fox")[0] == 0
        assert 0 not in tokenizer.encode("fox")[1:]

    def test_encode_ignores_the_files_truncation_and_padding(self, tmp_path):
        raw = _byte_level()
        plain = raw.encode(TEXT[0]).ids
        raw.enable_truncation(4)
        raw.enable_padding(length=64)
        assert len(raw.encode(TEXT[0]).ids) == 64
        tokenizer = Tokenizer.from_dir(_save(tmp_path, raw))
        assert tokenizer.encode(TEXT[0]) == plain

    def test_encode_refuses_a_lone_surrogate(self):
        with pytest.raises(TokenizerError) as caught:
            _tokenizer("byte_level").encode("ab\ud800")
        assert str(caught.value) == (
            "text must be valid Unicode, got a lone surrogate '\\ud800' at index 2"
        )

    @pytest.mark.parametrize("bad", [-1, 1000, 2**40])
    def test_decode_refuses_an_id_outside_the_vocabulary(self, bad):
        tokenizer = _tokenizer("byte_level")
        text = f"tokenizer: a token id must be from 0 to 999, got {bad}"
        with pytest.raises(TokenizerError) as caught:
            tokenizer.decode([3, bad])
        assert str(caught.value) == text
        with pytest.raises(TokenizerError) as caught:
            Detokenizer(tokenizer).push(bad)
        assert str(caught.value) == text

    def test_the_models_padding_decodes_to_nothing(self):
        tokenizer = _tokenizer("byte_level")
        (letter,) = _byte_ids("byte_level", b"x")
        assert tokenizer.vocab_size < 900
        assert tokenizer.decode([letter, 900, letter]) == "xx"

    def test_numpy_ids_are_ids(self):
        tokenizer = _tokenizer("byte_level")
        ids = np.asarray(tokenizer.encode("fox"), np.int32)
        assert tokenizer.decode(list(ids)) == "fox"  # pyright: ignore[reportArgumentType]
        assert "".join(_stream(tokenizer, ids)) == "fox"


class TestFiles:
    def test_reads_a_directory(self, tmp_path):
        raw = _byte_level()
        _save(
            tmp_path,
            raw,
            generation_config={"eos_token_id": [1, 5]},
            config={"eos_token_id": 2, "vocab_size": 2000},
        )
        tokenizer = Tokenizer.from_dir(str(tmp_path))
        assert tokenizer.eos_token_ids == {1, 5}
        assert tokenizer.vocab_size == raw.get_vocab_size()
        assert tokenizer.encode(TEXT[2]) == raw.encode(TEXT[2]).ids
        assert tokenizer.decode([1999]) == ""

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, set()),
            ({"config": {"eos_token_id": 2}}, {2}),
            ({"config": {"eos_token_id": [2, 3]}}, {2, 3}),
            ({"generation_config": {"eos_token_id": 1}}, {1}),
            ({"generation_config": {}, "config": {"eos_token_id": 2}}, {2}),
            (
                {
                    "generation_config": {"eos_token_id": None},
                    "config": {"eos_token_id": 2},
                },
                {2},
            ),
            (
                {
                    "generation_config": {"eos_token_id": 0},
                    "config": {"eos_token_id": 2},
                },
                {0},
            ),
            ({"config": {"eos_token_id": None}}, set()),
        ],
    )
    def test_stop_ids(self, tmp_path, files, expected):
        path = _save(tmp_path, _byte_level(), **files)
        assert Tokenizer.from_dir(path).eos_token_ids == expected

    @pytest.mark.parametrize("value", ["</s>", 2.0, True, [1, "2"], {"id": 1}])
    def test_stop_ids_of_another_type(self, tmp_path, value):
        _save(tmp_path, _byte_level(), generation_config={"eos_token_id": value})
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_dir(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path / 'generation_config.json'}: eos_token_id must be a token id "
            f"or a list of them, got {value!r}"
        )

    @pytest.mark.parametrize("bad", [-1, 500])
    def test_stop_id_outside_the_vocabulary(self, tmp_path, bad):
        _save(tmp_path, _byte_level(), config={"eos_token_id": bad, "vocab_size": 400})
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_dir(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path / 'tokenizer.json'}: a token id must be from 0 to 399, "
            f"got {bad}"
        )

    def test_no_tokenizer_json(self, tmp_path):
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_dir(tmp_path)
        assert str(caught.value).startswith(
            f"{tmp_path / 'tokenizer.json'}: no such file; a model directory needs a "
            "tokenizer.json. Write one with transformers:"
        )

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}', "\x00"])
    def test_malformed_tokenizer_json(self, tmp_path, text):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_dir(tmp_path)
        prefix = f"{tmp_path / 'tokenizer.json'}: not a tokenizer file: "
        assert str(caught.value).startswith(prefix)
        assert len(str(caught.value)) > len(prefix)

    def test_truncated_tokenizer_json(self, tmp_path):
        file = _save(tmp_path, _byte_level()) / "tokenizer.json"
        file.write_text(file.read_text(encoding="utf-8")[:5000], encoding="utf-8")
        with pytest.raises(TokenizerError, match="not a tokenizer file: EOF while"):
            Tokenizer.from_dir(tmp_path)

    @pytest.mark.parametrize("name", ["config", "generation_config"])
    def test_malformed_side_file(self, tmp_path, name):
        _save(tmp_path, _byte_level(), **{name: '{"eos_token_id": 2'})
        with pytest.raises(ModelFileError) as caught:
            Tokenizer.from_dir(tmp_path)
        assert str(caught.value).startswith(
            f"{tmp_path / f'{name}.json'}: not valid JSON: Expecting ',' delimiter"
        )

    @pytest.mark.parametrize("name", ["config", "generation_config"])
    def test_side_file_that_is_no_object(self, tmp_path, name):
        _save(tmp_path, _byte_level(), **{name: "[2]"})
        with pytest.raises(ModelFileError) as caught:
            Tokenizer.from_dir(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path / f'{name}.json'}: must hold a JSON object, got list"
        )


@pytest.mark.parametrize(
    ("kinds", "streams"), [(STREAMED, True), (HELD, False)], ids=["streamed", "held"]
)
def test_which_chains_stream(kinds, streams):
    for kind in kinds:
        stages = streaming_stages(_tokenizer(kind).decoder_fields)
        assert (stages is not None) == streams, kind
