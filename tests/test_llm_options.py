"""A checkpoint with everything beside its weights, served within limits of memory."""

import json
import re
import shutil

import pytest

import punica_jax as pj
from punica_jax import models
from punica_jax.model_dir import ModelDir

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
        r"  workspace [\d.]+ MiB at most for a step, [\d.]+ KiB for the seats' "
        "sampling",
        lines[9],
    )
    assert repr(limited.adapters) == "mappingproxy(AdapterTable(['b']))"
    llm.load_adapter("two\nlines", checkpoint / "d")
    try:
        assert r"    'two\nlines': slot 3, rank 8, " in str(llm)
    finally:
        llm.unload_adapter("two\nlines")


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
    ],
)
def test_first_adapters(no_weights, checkpoint, tmp_path, adapters, message):
    fields = json.loads((checkpoint / "a" / "adapter_config.json").read_text())
    for name, more in (("bare", {}), ("dora", {"use_dora": True})):
        (tmp_path / name).mkdir()
        text = json.dumps(fields | more)
        (tmp_path / name / "adapter_config.json").write_text(text)
    if isinstance(adapters, dict):
        for folder in ("a", "b", "c", "d", "model", "bare", "dora"):
            root = tmp_path if folder in ("bare", "dora") else checkpoint
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


@pytest.mark.parametrize(
    ("fields", "folder", "published", "name"),
    [
        ({"_name_or_path": "org/base"}, "mine", "org/base", "org/base"),
        ({"_name_or_path": "/tmp/base"}, "mine", None, "mine"),
        ({"_name_or_path": "./base"}, "mine", None, "mine"),
        ({"_name_or_path": ""}, "mine", None, "mine"),
        ({}, "models--org--base/snapshots/0", "org/base", "org/base"),
    ],
)
def test_what_a_model_is_called(tmp_path, fields, folder, published, name):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.json").write_text(json.dumps(fields))
    files = ModelDir(tmp_path / folder)
    assert (files.published_name, files.model_name) == (published, name)
