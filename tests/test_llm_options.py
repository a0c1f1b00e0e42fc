"""A checkpoint with everything beside its weights, served within limits of memory."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import punica_jax as pj
from punica_jax import models
from punica_jax.model_dir import ModelDir
from tests import tiny_checkpoint as tiny

GREEDY = pj.SamplingParams(max_new_tokens=1)  # prefill programs alone
USER = {"role": "user", "content": "hello"}
KV_PAGE = 2 * 2 * 2 * 8 * 16 * 4
RANK_PAGE_BYTES = 16 * 4 * 2 * (3 * 32 + 64 + 32 + 32 + 2 * 32 + 96 + 48 + 32)


@pytest.fixture(scope="module")
def limited(checkpoint, tmp_path_factory):
    """Room for one and a half sequences and for one adapter of the greatest rank."""
    path = shutil.copytree(checkpoint / "model", tmp_path_factory.mktemp("m") / "base")
    fields = {"eos_token_id": [257], "do_sample": True, "top_p": 0.5, "num_beams": 2}
    (path / "generation_config.json").write_text(json.dumps(fields))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (path / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    tokens = {"bos_token": {"content": "<s>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.warns(UserWarning, match="changes transformers' tokens: num_beams$"):
        return pj.LLM(
            path,
            {"b": checkpoint / "b"},
            max_seats=4,
            max_model_len=32,
            num_slots=3,
            max_rank=32,
            page_size=16,
            kv_memory=3 * KV_PAGE,
            adapter_memory=2 * RANK_PAGE_BYTES + 1000,
            progress=False,
        )


def test_sequences_wait_for_pages(limited, llm):
    prompts, adapters = ["hello there, you", "x", "hello there, you"], ["b", None, "b"]
    # The first and the last have two pages each of the three that there are.
    assert limited.generate(prompts, adapters, GREEDY) == (
        llm.generate(prompts, adapters, GREEDY)
    )


def test_adapters_wait_for_nobody(limited, checkpoint):
    with pytest.raises(pj.AdapterCapacityError, match="it needs 2 rank pages of group"):
        limited.load_adapter("again", checkpoint / "b")
    assert list(limited.adapters) == ["b"]


def test_defaults_of_the_checkpoint(limited, monkeypatch):
    assert limited.default_sampling == pj.SamplingParams(temperature=1.0, top_p=0.5)
    warm = pj.SamplingParams(temperature=1.0, top_p=0.5, seed=3, max_new_tokens=1)
    monkeypatch.setattr(limited, "default_sampling", warm)  # for its seed
    assert limited.generate(["x"], "b") == limited.generate(["x"], "b", warm)
    assert limited.chat([USER]) == limited.generate("hello", None, warm)


def test_print(limited, llm):
    text = str(limited)
    lines = text.splitlines()
    assert lines[0] == "LLM base"
    assert lines[1].startswith("  model     llama, 2 layers, ")
    assert lines[1].endswith(" parameters, float32, 127 KiB")
    device = r"  device    cpu, [\d.]+ [KM]iB of [\d.]+ GiB reserved"
    assert re.fullmatch(device, lines[2])
    assert lines[3] == (
        "  KV cache  3 pages of 16 tokens, 12.00 KiB: 1 of 4 seats at the full 32 "
        "tokens"
    )
    assert re.fullmatch(
        r"  adapters  1 in 3 slots, ranks up to 32, 2 rank pages a group, [\d.]+ KiB",
        lines[4],
    )
    assert lines[5] == (
        "    b: slot 0, rank 20, rank pages qkv 2, o 0, gate_up 0, down 0"
    )
    assert re.match(r"  programs  \d+ compiled: 4 write_page, 1 set_slot", lines[6])
    assert lines[7] == "  sampling  max_new_tokens=128, temperature=1.0, top_p=0.5"
    assert lines[8] == (
        "            generation_config.json also has what is not supported: num_beams"
    )
    assert len(lines) == 10 and lines[9].startswith("  workspace ")
    other = str(llm).splitlines()
    assert [line.split(":")[0] for line in other[5:8]] == ["    a", "    b", "    c"]
    assert other[-2] == "  sampling  max_new_tokens=128, temperature=0.0"


def test_print_as_it_is_now(limited, llm, checkpoint, monkeypatch):
    warm = pj.SamplingParams(temperature=0.5, top_k=3, max_new_tokens=9)
    monkeypatch.setattr(limited, "default_sampling", warm)
    lines = str(limited).splitlines()
    assert lines[7] == "  sampling  max_new_tokens=9, temperature=0.5, top_k=3"
    assert lines[8].endswith("what is not supported: num_beams")
    assert re.fullmatch(
        r"  workspace [\d.]+ MiB at most for a step, [\d.]+ KiB for adapters on their "
        r"way, [\d.]+ KiB for the seats' sampling",
        lines[9],
    )
    assert repr(limited.adapters) == "mappingproxy(AdapterTable(['b']))"
    llm.load_adapter("two\nlines", checkpoint / "d")
    try:
        assert r"    'two\nlines': slot 3, rank 8, " in str(llm)
    finally:
        llm.unload_adapter("two\nlines")


def test_generation_fields_that_are_not_supported_are_a_warning(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint / "model", tmp_path / "m")
    file = path / "generation_config.json"
    # Bookkeeping, and what does nothing as it is; warnings are errors here.
    harmless = {"transformers_version": "5.0", "_from_model_config": True}
    harmless |= {"pad_token_id": 0, "use_cache": True, "num_beams": 1, "typical_p": 0.9}
    file.write_text(json.dumps(harmless))
    pj.LLM(path, max_seats=1, progress=False)
    fields = {"num_beams": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [7]}
    file.write_text(json.dumps(harmless | fields | {"do_sample": True}))
    with pytest.warns(UserWarning) as caught:
        pj.LLM(path, max_seats=1, progress=False)
    (warning,) = caught
    assert str(warning.message) == (
        "generation_config.json of m has what is not supported here, and changes "
        "transformers' tokens: no_repeat_ngram_size, num_beams, suppress_tokens, "
        "typical_p"
    )
    assert Path(warning.filename) == Path(__file__)


def test_config_is_read_once(checkpoint, monkeypatch):
    def read_again(*_, **__):
        raise AssertionError("read before")

    monkeypatch.setattr(models.LlamaConfig, "from_dir", read_again)
    config = models.LlamaConfig.from_hf(
        json.loads((checkpoint / "model" / "config.json").read_text())
    )
    model = pj.load_model(checkpoint / "model", config=config, progress=False)
    assert model.config == config


@pytest.fixture
def no_weights(checkpoint, tmp_path):
    """A model's directory without its weights: reading them would fail."""
    path = tmp_path / "no weights"
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / "model" / name, path)
    return path


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["a"], r"adapters must map names to directories or .* got \['a'\]"),
        ("x/y", "adapters must map names to directories or .* got 'x/y'"),
        ({"": "a"}, "an adapter's name must be a text, not empty, got ''"),
        ({3: "a"}, "an adapter's name must be a text, not empty, got 3"),
        (
            {"a": "a", "b": "b", "d": "d"},
            "adapters must be at most num_slots = 2, got 3; raise num_slots",
        ),
        ({"x": "no/such/dir"}, "no/such/dir: no such directory, and not the id"),
        ({"a": "a", "c": "c"}, "adapter 'c' does not fit: its rank is 64, above max_r"),
        ({"m": "model"}, "model: the directory holds no adapter_config.json"),
        ({"m": "bare"}, "bare: the directory holds no adapter_model.safetensors"),
        ({"m": "dora"}, "dora: adapter_config.json asks for what .* use_dora = True"),
        ({"m": "wide"}, "wide: these tensors have the wrong shape"),
        (
            {"m": "deep"},
            r"deep: these tensors fit no module of .* layers 0 to 1 .*\.2\.",
        ),
        ({"m": "short"}, "short: .*not a complete safetensors file .* Copy or downl"),
    ],
)
def test_first_adapters(no_weights, checkpoint, tmp_path, adapters, message):
    fields = json.loads((checkpoint / "a" / "adapter_config.json").read_text())
    for name, more in (("bare", {}), ("dora", {"use_dora": True})):
        (tmp_path / name).mkdir()
        text = json.dumps(fields | more)
        (tmp_path / name / "adapter_config.json").write_text(text)
    for name, layer, hidden_size in (("wide", 0, 48), ("deep", 2, 32)):
        base = dataclasses.replace(tiny.CONFIG, num_layers=3, hidden_size=hidden_size)
        pair = np.ones((4, hidden_size)), np.ones((32, 4))
        models.save_adapter(tmp_path / name, base, {(layer, "q_proj"): pair})
    short = shutil.copytree(checkpoint / "a", tmp_path / "short")
    os.truncate(short / "adapter_model.safetensors", 999)
    made = ("bare", "dora", "wide", "deep", "short")
    if isinstance(adapters, dict):
        for folder in ("a", "b", "c", "d", "model", *made):
            root = tmp_path if folder in made else checkpoint
            adapters = {
                name: root / folder if path == folder else path
                for name, path in adapters.items()
            }
    with pytest.raises(ValueError, match=message):
        pj.LLM(no_weights, adapters, num_slots=2, max_rank=32, progress=False)


def test_what_adapters_pass_before_the_weights(no_weights, checkpoint):
    with pytest.raises(pj.CheckpointError, match="the weights must be in"):
        pj.LLM(no_weights, {"a": checkpoint / "a"}, num_slots=1, progress=False)


def test_not_a_model(checkpoint, tmp_path):
    with pytest.raises(pj.ModelFileError) as caught:
        pj.LLM(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: a Hugging Face model directory needs this file"
    )
    with pytest.raises(
        pj.ModelFileError, match="is an adapter's directory, to be load"
    ):
        pj.LLM(checkpoint / "a")
    with pytest.raises(pj.HubError, match="missing: no such directory, and not the id"):
        pj.LLM(tmp_path / "missing")
    model = shutil.copytree(checkpoint / "model", tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": 1}')
    with pytest.raises(pj.GenerationConfigError, match="do_sample must be true or fal"):
        pj.LLM(model)


HUB = "models--org--chat/snapshots/0"


@pytest.mark.parametrize(
    ("folder", "field", "names"),
    [
        ("mine", None, ["mine"]),
        ("mine", "", ["mine"]),
        ("mine", "org/base", ["org/base", "mine"]),
        ("mine", "/tmp/base", ["mine", "/tmp/base"]),
        ("mine", "./base", ["mine", "./base"]),
        (HUB, None, ["org/chat", "0"]),
        (HUB, "org/base", ["org/chat", "org/base", "0"]),
    ],
)
def test_what_a_model_is_called(tmp_path, folder, field, names):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.json").write_text(json.dumps({"_name_or_path": field}))
    assert ModelDir(tmp_path / folder).model_names == tuple(names)


@pytest.mark.parametrize(
    ("folder", "field", "silent", "warned"),
    [
        ("Chat", None, ["org/chat", "/home/me/chat"], ["org/base"]),
        ("mine", "org/base", ["org/base", "them/base", "mine"], ["org/chat"]),
        (HUB, "org/base", ["org/chat", "org/base"], ["org/larger", "org/0.5"]),
    ],
)
def test_adapters_that_name_their_base(
    checkpoint, tmp_path, folder, field, silent, warned
):
    """The hub's id, the config's field or the folder's name; warnings are errors."""
    model = shutil.copytree(checkpoint / "model", tmp_path / folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"_name_or_path": field}))
    path = shutil.copytree(checkpoint / "a", tmp_path / "adapter")
    fields = json.loads((path / "adapter_config.json").read_text())
    llm = pj.LLM(model, max_seats=1, progress=False)
    assert str(llm).startswith(f"LLM {ModelDir(model).model_names[0]}\n")

    def load(base):
        text = json.dumps(fields | {"base_model_name_or_path": base})
        (path / "adapter_config.json").write_text(text)
        llm.load_adapter("x", path)

    for base in silent:
        load(base)
    for base in warned:
        with pytest.warns(UserWarning, match=f"was trained on '{base}', the base mod"):
            load(base)
