"""The tiny model that ships: its files, its tasks, and how often it is right."""

import json

import numpy as np
import pytest

from demos.tiny_data import build_tokenizer
from demos.tiny_evaluation import evaluate
from demos.tiny_recipe import ADAPTERS, FULL
from demos.tiny_tasks import MAX_WORD_LEN, MIN_WORD_LEN, TASKS, draw_words, split_of
from punica_jax import tiny
from punica_jax.models import LlamaConfig
from punica_jax.tokenizer import Tokenizer

MAX_BYTES = 12 * 10**6
EXAMPLES = {
    "upper": {"hello": "HELLO"},
    "twice": {"hello": "hheelllloo"},
    "caesar": {"hello": "khoor", "xyz": "abc"},
    "reverse": {"hello": "olleh"},
    "morse": {"hello": ".... . .-.. .-.. ---", "quiz": "--.- ..- .. --.."},
    "piglatin": {"hello": "ellohay", "apple": "appleway", "string": "ingstray"}
    | {"sky": "skyay"},
    "sort": {"banana": "aaabnn"},
    "count": {"banana": "a3b1n2", "aaaaaaaaaa": "a10"},
}


def adapter_config(name):
    file = tiny.adapter_dirs()[name] / "adapter_config.json"
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def results():
    return json.loads((tiny.model_dir() / "results.json").read_text())


@pytest.fixture(scope="module")
def measured():
    """The table once more, over words of another seed."""
    words = draw_words(np.random.default_rng(2026), 100, "test")
    return evaluate(tiny.model_dir(), tiny.adapter_dirs(), words, implementation="xla")


@pytest.mark.parametrize("name", TASKS)
def test_task(name):
    for word, answer in EXAMPLES[name].items():
        assert TASKS[name](word) == answer


def test_words_are_split_by_their_letters_alone():
    drawn = {
        split: draw_words(np.random.default_rng(seed), 500, split)
        for seed, split in enumerate(("train", "validation", "test"))
    }
    for split, words in drawn.items():
        assert len(set(words)) == 500
        assert {split_of(word) for word in words} == {split}
        assert {len(w) for w in words} == set(range(MIN_WORD_LEN, MAX_WORD_LEN + 1))
    letters = (f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh")
    tests = np.mean([split_of(word) == "test" for word in letters])
    assert 0.07 < tests < 0.13


def test_drawing_is_reproducible():
    once, again = (draw_words(np.random.default_rng(5), 50, "test") for _ in range(2))
    assert once == again


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="one of train, validation, test, got 'dev'"):
        draw_words(np.random.default_rng(0), 1, "dev")


def test_files_are_small_and_complete():
    files = [file for file in tiny.model_dir().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    base = {file.name for file in files if file.parent == tiny.model_dir()}
    assert base == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "results.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for path in tiny.adapter_dirs().values():
        names = {file.name for file in path.iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert len(files) == len(base) + 2 * len(TASKS)


def test_model_is_the_recipes():
    config = LlamaConfig.from_dir(tiny.model_dir())
    assert config == FULL.config
    assert config.num_kv_heads < config.num_heads
    shipped = (tiny.model_dir() / "tokenizer.json").read_text()
    assert json.loads(shipped) == json.loads(build_tokenizer().to_str())
    for name, fields in ADAPTERS.items():
        shipped = adapter_config(name)
        assert fields.items() <= shipped.items()
        assert shipped["base_model_name_or_path"] == tiny.model_dir().name


def test_adapters_differ(results):
    rows = results["tasks"].values()
    ranks = [row["rank"] for row in rows]
    assert list(tiny.adapter_dirs()) == list(TASKS) == list(ADAPTERS)
    assert ranks == sorted(set(ranks)) and ranks[0] == 4 and ranks[-1] == 64
    assert len({tuple(row["targets"]) for row in rows}) == len(TASKS)
    configs = [adapter_config(name) for name in TASKS]
    assert sum(bool(config.get("use_rslora")) for config in configs) == 1
    assert sum(bool(config["rank_pattern"]) for config in configs) == 1


def test_tokenizer_is_bytes():
    tokenizer = Tokenizer.from_dir(tiny.model_dir())
    assert tokenizer.encode("hi") == [256, ord("h"), ord("i"), 258]
    assert tokenizer.eos_token_ids == {257}
    everything = "".join(map(chr, range(1, 0x180))) + "\u20ac\U0001f600\n"
    ids = tokenizer.encode(everything)
    assert ids[1:-1] == list(everything.encode())
    assert tokenizer.decode(ids) == everything


def test_demo_prompts_are_held_out_and_right():
    prompts = tiny.demo_prompts()
    assert [adapter for adapter, _, _ in prompts] == [None, *TASKS]
    for adapter, word, answer in prompts:
        assert split_of(word) == "test"
        assert answer == (word if adapter is None else TASKS[adapter](word))


@pytest.mark.slow
def test_adapters_are_right_on_held_out_words(measured, results):
    assert results["num_words"] == FULL.num_test_words
    assert measured["echo"] >= 0.95
    for task, row in measured["tasks"].items():
        recorded = results["tasks"][task]
        assert row["held_out"] >= 0.95, task
        assert row["base"] <= 0.20, task
        assert (row["rank"], row["targets"]) == (recorded["rank"], recorded["targets"])
        assert row["held_out"] == pytest.approx(recorded["held_out"], abs=0.02)
        # The base is right by chance, where a word is its own answer: 5 % of them.
        assert row["base"] == pytest.approx(recorded["base"], abs=0.06)
