"""Examples of the tiny model's tasks as token arrays, and its tokenizer files.

A token is a byte, so ids 0 to 255 are the bytes' values; three special tokens follow.
An example is one sequence: <s> prompt <sep> answer </s>. A tagged prompt names its
task ("upper:hello"), an untagged one is the word alone, and its answer is the word
itself for the base model, the task's answer for an adapter.

Knows nothing of models, devices or training.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from demos.tiny_tasks import MAX_WORD_LEN, TASKS, tag_of

BOS, EOS, SEP = "<s>", "</s>", "<sep>"
BOS_ID, EOS_ID, SEP_ID = 256, 257, 258
# Five more than there are tokens: tensor cores want a multiple of eight.
VOCAB_SIZE = 264
MAX_MODEL_LEN = 128
# The longest example is tagged Morse: 3 special tokens, the tag, 10 letters, and 10
# letters of at most 4 signs with 9 spaces between them.
SEQ_LEN = 3 + len("morse:") + MAX_WORD_LEN + 5 * MAX_WORD_LEN - 1


@dataclasses.dataclass(frozen=True)
class Examples:
    """Sequences with the part of each that is the answer.

    Attributes:
      tokens: `u16[examples, SEQ_LEN]`, zeros past the end.
      answer_starts: `u8[examples]`, the answer's first position.
      ends: `u8[examples]`, one past </s>.
      slots: `i8[examples]`, the adapter (its place in `TASKS`), -1 for the base.
      kinds: `i8[examples]`, the task (its place in `TASKS`), -1 for echo.
    """

    tokens: np.ndarray
    answer_starts: np.ndarray
    ends: np.ndarray
    slots: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, index: np.ndarray) -> "Examples":
        """Return the examples at these places."""
        fields = dataclasses.fields(self)
        return Examples(**{f.name: getattr(self, f.name)[index] for f in fields})


def base_examples(words: Sequence[str]) -> Examples:
    """Make the base model's examples: every word echoed, and tagged with every task.

    Returns:
      `9 * len(words)` examples: first all echoes, then task after task.
    """
    prompts, answers = list(words), list(words)
    for task in TASKS.values():
        prompts += [f"{tag_of(task)}:{word}" for word in words]
        answers += [task(word) for word in words]
    kinds = np.repeat(np.arange(-1, len(TASKS), dtype=np.int8), len(words))
    return _examples(prompts, answers, kinds, np.full_like(kinds, -1))


def adapter_examples(words: Sequence[str]) -> Examples:
    """Make the adapters' examples: every word under every adapter, untagged.

    Returns:
      `8 * len(words)` examples, task after task.
    """
    prompts = list(words) * len(TASKS)
    answers = [task(word) for task in TASKS.values() for word in words]
    kinds = np.repeat(np.arange(len(TASKS), dtype=np.int8), len(words))
    return _examples(prompts, answers, kinds, kinds)


def _examples(
    prompts: Sequence[str],
    answers: Sequence[str],
    kinds: np.ndarray,
    slots: np.ndarray,
) -> Examples:
    # 0 stands for <s>, 1 for <sep> and 2 for </s> until the bytes are in one array: no
    # task reads or writes these bytes.
    lines = [
        b"\0%b\1%b\2" % (prompt.encode(), answer.encode())
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert max(map(len, lines)) <= SEQ_LEN
    text = b"".join(line.ljust(SEQ_LEN, b"\3") for line in lines)
    tokens = np.frombuffer(text, np.uint8).reshape(-1, SEQ_LEN).astype(np.uint16)
    for mark, token_id in enumerate((BOS_ID, SEP_ID, EOS_ID, 0)):
        tokens[tokens == mark] = token_id
    return Examples(
        tokens=tokens,
        answer_starts=(tokens == SEP_ID).argmax(1).astype(np.uint8) + np.uint8(1),
        ends=(tokens == EOS_ID).argmax(1).astype(np.uint8) + np.uint8(1),
        slots=slots,
        kinds=kinds,
    )


def build_tokenizer() -> Tokenizer:
    """Make the byte-level tokenizer: "hi" -> <s> h i <sep>, ids of bytes their values.

    It is a BPE without merges over the byte alphabet of `tokenizers`.
    """
    vocab = {char: byte for byte, char in _byte_chars().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, SEP)]
    )
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {SEP}", special_tokens=[(BOS, BOS_ID), (SEP, SEP_ID)]
    )
    return tokenizer


def write_text_files(path: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    build_tokenizer().save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "sep_token": SEP,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_MODEL_LEN,
        },
    )
    write_json(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False},
    )


def write_json(file: Path, fields: dict[str, object]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _byte_chars() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, the others get the characters from
    U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    chars = {byte: chr(byte) for byte in printable}
    return chars | {byte: chr(256 + n) for n, byte in enumerate(others)}
