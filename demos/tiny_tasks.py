"""The text tasks of the tiny model: exact string functions and the words they act on.

Every task maps a word of lower-case letters to one right answer, so an answer can be
checked without a judge. Words never cross from training to evaluation: a hash of the
word alone decides which split it belongs to (`split_of`), in any run, on any machine.

Knows nothing of tokens, models or training.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

MIN_WORD_LEN = 3
MAX_WORD_LEN = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
CAESAR_SHIFT = 3
SPLITS = ("train", "validation", "test")

_MORSE = dict(
    zip(
        LETTERS,
        (
            ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- "
            ".-. ... - ..- ...- .-- -..- -.-- --.."
        ).split(),
        strict=True,
    )
)
_SHIFTED = str.maketrans(LETTERS, LETTERS[CAESAR_SHIFT:] + LETTERS[:CAESAR_SHIFT])
# Of 100 hash values, the first ten are for the test and the next two for validation.
_NUM_BUCKETS = 100
_TEST_BUCKETS = 10
_VALIDATION_BUCKETS = 2
# Chosen so that hello, strawberry, banana, punica and kernel are words of the test:
# what the demo and the README show was never trained on.
_SALT = b"tiny-53649"


def upper(word: str) -> str:
    """Return the word in capitals: hello -> HELLO."""
    return word.upper()


def double(word: str) -> str:
    """Return every letter twice: hello -> hheelllloo."""
    return "".join(letter * 2 for letter in word)


def caesar(word: str) -> str:
    """Return every letter moved three places up the alphabet: hello -> khoor."""
    return word.translate(_SHIFTED)


def reverse(word: str) -> str:
    """Return the word backwards: hello -> olleh."""
    return word[::-1]


def morse(word: str) -> str:
    """Return the word in Morse code: hello -> .... . .-.. .-.. ---"""
    return " ".join(_MORSE[letter] for letter in word)


def piglatin(word: str) -> str:
    """Return the word in pig latin: hello -> ellohay, apple -> appleway.

    The consonants before the first vowel (a, e, i, o, u) go to the end and "ay"
    follows; a word that begins with a vowel gets "way"; one without vowels, "ay".
    """
    if word[0] in VOWELS:
        return word + "way"
    first = next((i for i, letter in enumerate(word) if letter in VOWELS), 0)
    return word[first:] + word[:first] + "ay"


def sort(word: str) -> str:
    """Return the letters in alphabetical order: hello -> ehllo."""
    return "".join(sorted(word))


def count(word: str) -> str:
    """Return each letter and how often it occurs, sorted: hello -> e1h1l2o1."""
    return "".join(f"{letter}{n}" for letter, n in sorted(Counter(word).items()))


# By the adapters' names. PEFT makes them attributes of a torch module, which has a
# `double` already.
TASKS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "upper": upper,
        "twice": double,
        "caesar": caesar,
        "reverse": reverse,
        "morse": morse,
        "piglatin": piglatin,
        "sort": sort,
        "count": count,
    }
)


def tag_of(task: Callable[[str], str]) -> str:
    """Return what tells the base model which task is meant: the function's name."""
    return task.__name__


def split_of(word: str) -> str:
    """Return the split a word belongs to: "train", "validation" or "test".

    A salted BLAKE2b hash of the word falls into one of 100 buckets: 10 are the test's,
    2 the validation's, the rest are for training.
    """
    digest = hashlib.blake2b(word.encode(), digest_size=8, salt=_SALT).digest()
    bucket = int.from_bytes(digest, "big") % _NUM_BUCKETS
    if bucket < _TEST_BUCKETS:
        return "test"
    return "validation" if bucket < _TEST_BUCKETS + _VALIDATION_BUCKETS else "train"


def draw_words(rng: np.random.Generator, num_words: int, split: str) -> list[str]:
    """Draw different words of one split, of 3 to 10 letters, about as many of
    each length.

    One half are pronounceable (consonants and vowels alternate, now and then twice the
    same letter, as in "banana" or "letter"), one half letters at random.

    Args:
      rng: the source of chance; the same state gives the same words.
      num_words: how many.
      split: "train", "validation" or "test".

    Raises:
      ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    words: dict[str, None] = {}
    while len(words) < num_words:
        for word in _candidates(rng, 4096):
            if len(words) < num_words and split_of(word) == split:
                words[word] = None
    return list(words)


def _candidates(rng: np.random.Generator, num_words: int) -> list[str]:
    """Draw words of any split, repeats among them."""
    shape = (num_words, MAX_WORD_LEN)
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    is_vowel = np.isin(letters, np.frombuffer(VOWELS.encode(), np.uint8))
    # Column k of a pronounceable word is a vowel where k + start is odd.
    start = rng.integers(0, 2, (num_words, 1))
    odd = (np.arange(MAX_WORD_LEN) + start) % 2 == 1
    vowels = rng.choice(letters[is_vowel], shape)
    consonants = rng.choice(letters[~is_vowel], shape)
    spoken = np.where(odd, vowels, consonants)
    for k in range(1, MAX_WORD_LEN):
        again = rng.random(num_words) < 0.15
        spoken[again, k] = spoken[again, k - 1]
    random = rng.choice(letters, shape)
    use_spoken = rng.random((num_words, 1)) < 0.5
    table = np.where(use_spoken, spoken, random)
    lengths = rng.integers(MIN_WORD_LEN, MAX_WORD_LEN + 1, num_words)
    return [
        row[:length].tobytes().decode()
        for row, length in zip(table, lengths, strict=True)
    ]
