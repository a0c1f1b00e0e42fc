"""A tokenizer's decoder chain, token by token.

Knows nothing of ids, vocabularies or special tokens: strings as the file spells them
go in, text that can no longer change comes out. Every stage means what the decoder of
the same name in the `tokenizers` library (Rust, `tokenizers/src/decoders`) means; the
tests hold the two equal.
"""

import codecs
import re
from collections.abc import Mapping
from typing import Any, Protocol


class Stage(Protocol):
    """One decoder of the chain."""

    def feed(self, piece: str) -> list[str]:
        """Take the next piece; return the pieces that are now certain."""
        ...

    def end(self) -> list[str]:
        """Return what is still held back; there is no next piece."""
        ...


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes
    for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class _ByteLevel:
    """Tokens spell bytes; a token with any other character stands for itself."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: str) -> list[str]:
        try:
            data = bytes([_BYTE_OF_CHAR[char] for char in piece])
        except KeyError:
            data = piece.encode()
        text = self._utf8.decode(data)
        return [text] if text else []

    def end(self) -> list[str]:
        text = self._utf8.decode(b"", final=True)
        return [text] if text else []


class _Replace:
    """A text within each token becomes another ("▁" a space)."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def feed(self, piece: str) -> list[str]:
        return [piece.replace(self._pattern, self._content)]

    def end(self) -> list[str]:
        return []


class _ByteFallback:
    """`<0xE2>` tokens are bytes; a run of them is UTF-8, or one U+FFFD per byte."""

    _BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, piece: str) -> list[str]:
        match = self._BYTE_TOKEN.fullmatch(piece)
        if match is None:
            return [*self.end(), piece]
        self._run.append(int(match[1], 16))
        return []

    def end(self) -> list[str]:
        if not self._run:
            return []
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\N{REPLACEMENT CHARACTER}" * len(self._run)
        self._run.clear()
        return [text]


class _Strip:
    """The text loses up to `start` leading characters `content`."""

    def __init__(self, content: str, start: int) -> None:
        self._content = content
        self._left = start

    def feed(self, piece: str) -> list[str]:
        while self._left and piece.startswith(self._content):
            piece = piece[1:]
            self._left -= 1
        if not piece:
            return []
        self._left = 0
        return [piece]

    def end(self) -> list[str]:
        return []


class _Metaspace:
    """`replacement` is a space, and nothing in the first token if it was prepended."""

    def __init__(self, replacement: str, prepend_scheme: str) -> None:
        self._replacement = replacement
        self._space = " " if prepend_scheme == "never" else ""

    def feed(self, piece: str) -> list[str]:
        text = piece.replace(self._replacement, self._space)
        self._space = " "
        return [text]

    def end(self) -> list[str]:
        return []


class _JoinBySpace:
    """What the library does without a decoder: a space between tokens."""

    def __init__(self) -> None:
        self._separator: list[str] = []

    def feed(self, piece: str) -> list[str]:
        pieces = [*self._separator, piece]
        self._separator = [" "]
        return pieces

    def end(self) -> list[str]:
        return []


def streaming_stages(decoder: Mapping[str, Any] | None) -> list[Stage] | None:
    """Build the streaming form of a `tokenizer.json`'s "decoder" section.

    Args:
        decoder: the section; None where the file has none.

    Returns:
        Fresh stages, to be fed in order; None for a chain without a streaming form.
    """
    if decoder is None:
        return [_JoinBySpace()]
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
    else:
        parts = [decoder]
    stages: list[Stage] = []
    fused = False  # later decoders see one text, not tokens
    for part in parts:
        match part:
            case {"type": "ByteLevel"} if not fused:
                stages.append(_ByteLevel())
                fused = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}} if (
                pattern and not fused
            ):
                stages.append(_Replace(pattern, part["content"]))
            case {"type": "ByteFallback"} if not fused:
                stages.append(_ByteFallback())
            case {"type": "Metaspace"} if not fused:
                stages.append(_Metaspace(part["replacement"], part["prepend_scheme"]))
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "stop": 0} if fused:
                stages.append(_Strip(part["content"], part["start"]))
            case _:
                return None
    return stages
