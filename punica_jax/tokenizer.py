"""Text to token ids and back, whole or token by token.

Knows nothing of models, devices, JAX or chat templates: it reads `tokenizer.json`
through the `tokenizers` library and the stop ids beside it.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from punica_jax._text_stages import streaming_stages
from punica_jax.model_dir import ModelDir


class TokenizerError(ValueError):
    """A tokenizer file, a text or a token id breaks a rule; the text says which."""


class Tokenizer:
    """A `tokenizer.json` with the stop ids of its model.

    Attributes:
        vocab_size: one more than the largest id of the tokenizer, added tokens
            included. A model's embedding may be longer (padding).
        eos_token_ids: the ids that end a sequence; empty where no file names any.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        model_vocab_size: int | None = None,
        name: str = "tokenizer",
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        Args:
            tokenizer: taken over: its truncation and padding are switched off.
            eos_token_ids: the ids that end a sequence.
            model_vocab_size: rows of the model's embedding. An id below it that the
                tokenizer lacks decodes to nothing; a model can produce such ids.
            name: what errors call this tokenizer.
        """
        # tokenizer.json may carry its training run's settings; a prompt is never
        # cut or padded behind the caller's back.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._name = name
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._num_ids = max(self.vocab_size, model_vocab_size or 0)
        self.eos_token_ids = frozenset(eos_token_ids)
        for token_id in self.eos_token_ids:
            self._check_id(token_id)

    @classmethod
    def from_dir(cls, path: str | Path | ModelDir) -> "Tokenizer":
        """Read a Hugging Face model directory.

        `tokenizer.json` is required. The stop ids are `eos_token_id` (an id or a list)
        of `generation_config.json`, else of `config.json`.

        Raises:
            TokenizerError: the file is missing or malformed, or a stop id is no token.
            ModelFileError: one of the other files is malformed.
        """
        files = path if isinstance(path, ModelDir) else ModelDir(path)
        file = files.path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{file}: no such file; a model directory needs a tokenizer.json. Write"
                " one with transformers:"
                " AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        # The library raises the bare Exception class for every malformed file.
        except Exception as error:
            raise TokenizerError(f"{file}: not a tokenizer file: {error}") from error
        eos_token_ids = _eos_token_ids(files, "generation_config.json")
        if eos_token_ids is None:
            eos_token_ids = _eos_token_ids(files, "config.json")
        model_vocab_size = files.fields("config.json").get("vocab_size")
        return cls(
            tokenizer,
            eos_token_ids=eos_token_ids or (),
            model_vocab_size=(
                model_vocab_size if isinstance(model_vocab_size, int) else None
            ),
            name=str(file),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids.

        Args:
            text: special tokens that it spells become their ids.
            add_special_tokens: with those that the file itself adds, such as one that
                begins a text.

        Raises:
            TokenizerError: the text holds a lone surrogate, which no UTF-8 has.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                "text must be valid Unicode, got a lone surrogate "
                f"{text[error.start]!r} at index {error.start}"
            ) from error
        # `encode` holds Python's lock, from whoever launches steps: 0.4 s for 600 kB.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text, special tokens left out.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        for token_id in token_ids:
            self._check_id(token_id)
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The token as the file spells it; None for one that decodes to nothing.

        Raises:
            TokenizerError: the id is outside the vocabulary.
        """
        self._check_id(token_id)
        if token_id in self._special_ids:
            return None
        return self._tokenizer.id_to_token(token_id)

    @functools.cached_property
    def decoder_fields(self) -> Mapping[str, Any] | None:
        """The file's "decoder" section: how tokens become text; None without one."""
        decoder = self._tokenizer.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self._num_ids:
            raise TokenizerError(
                f"{self._name}: a token id must be from 0 to {self._num_ids - 1}, "
                f"got {token_id}"
            )


class Detokenizer:
    """One sequence's text, token by token.

    The pieces that `push` returns and the one of `finish` join to exactly
    `tokenizer.decode` of all the ids; after a prompt, to what they add to its text:
    decoders such as Llama 2's take a space away where a text begins, not where it goes
    on. (A character that the prompt begins and does not end is U+FFFD.) No piece holds
    a part of a character. Work and memory of a push do not grow with the sequence's
    length.

    Text is held back while it may still change: an unfinished UTF-8 character; with
    byte-fallback tokens (`<0xE2>`) the whole run of them, because the decoder replaces
    all of a run when any byte of it is wrong; and with a decoder that has no streaming
    form (WordPiece, CTC, ...: no Llama uses one) everything until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt: Sequence[int] = ()) -> None:
        """Begin a text.

        Args:
            tokenizer: whose ids come.
            prompt: the ids that the text follows.
        """
        self._tokenizer = tokenizer
        self._stages = streaming_stages(tokenizer.decoder_fields)
        # What decoders know of a text before them, its last token tells.
        texts = (one for one in reversed(prompt) if tokenizer.token(one) is not None)
        self._before = list(itertools.islice(texts, 1))
        self._held_ids = list(self._before)
        if self._stages is not None:
            for token_id in self._before:
                self.push(token_id)
            self.finish()

    def push(self, token_id: int) -> str:
        """Add the next token; return the text that is now certain, maybe none.

        Raises:
            TokenizerError: the id is outside the vocabulary; nothing has changed.
        """
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        if self._stages is None:
            self._held_ids.append(token_id)
            return ""
        pieces = [token]
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
        return "".join(pieces)

    def finish(self) -> str:
        """End the sequence; return the text still held back."""
        if self._stages is None:
            before = self._tokenizer.decode(self._before)
            return self._tokenizer.decode(self._held_ids)[len(before) :]
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
            pieces += stage.end()
        return "".join(pieces)


def _eos_token_ids(files: ModelDir, name: str) -> list[int] | None:
    """The file's `eos_token_id` as a list; None where it has none."""
    value = files.fields(name).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise TokenizerError(
            f"{files.path / name}: eos_token_id must be a token id or a list of them, "
            f"got {value!r}"
        )
    return ids
