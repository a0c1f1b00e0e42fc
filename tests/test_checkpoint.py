import dataclasses
import gc
import json
import re
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from punica_jax.models import (
    MODULE_PATHS,
    CheckpointError,
    ConfigError,
    Llama,
    LlamaConfig,
    UnsupportedConfigError,
    load_model,
    save_model,
)

# All widths differ (q 32, kv 16, hidden 24, mlp 40), so a mixed-up axis fails.
CONFIG = LlamaConfig(
    vocab_size=20,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
)
Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def random_model(config: LlamaConfig = CONFIG, dtype=jnp.float32) -> Llama:
    """Return a model whose parameters, biases and norms too, are all random."""
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [
        jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_model(model, path)
    return path


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of the saved model, to break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors")


def assert_same(got: Llama, expected: Llama) -> None:
    assert got.config == expected.config
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new, old)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, progress=False)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (jnp.float32, jnp.float16)),
    ],
)
def test_save_and_load_give_the_same_model(tmp_path, dtype, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, mlp_bias=tied)
    model = random_model(config, dtype)
    save_model(model, tmp_path)
    assert_same(load_model(tmp_path, dtype=dtype, progress=False), model)


def test_tensors_are_named_and_laid_out_as_hugging_face_does(model, saved):
    tensors = tensors_of(saved)
    layer = model.layers[1]
    qkv = [tensors[Q.replace("q_proj", f"{name}_proj")] for name in "qkv"]
    assert [part.shape for part in qkv] == [(32, 24), (16, 24), (16, 24)]
    np.testing.assert_array_equal(np.concatenate(qkv), layer.qkv.weight[...])
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.v_proj.bias"], layer.qkv.bias[...][48:]
    )
    np.testing.assert_array_equal(
        tensors["model.layers.1.mlp.up_proj.weight"], layer.gate_up.weight[...][40:]
    )
    np.testing.assert_array_equal(tensors["lm_head.weight"], model.lm_head[...])
    assert json.loads((saved / "config.json").read_text())["torch_dtype"] == "float32"


# What a layer of each family has that a Llama's has not, and the other way round.
LAYER = "model.layers.1."
BIASES = {f"{LAYER}self_attn.{name}_proj.bias" for name in "qkv"}
HEAD_NORMS = {f"{LAYER}self_attn.{name}_norm.weight" for name in "qk"}
FUSED = {f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}mlp.gate_up_proj.weight"}
APART = {f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"}
APART |= {f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")}


@pytest.mark.parametrize(
    ("model_type", "more", "fewer"),
    [
        ("qwen2", BIASES, set()),
        ("qwen3", HEAD_NORMS, set()),
        ("phi3", FUSED, APART),
    ],
)
def test_families(tmp_path, model_type, more, fewer):
    plain = dataclasses.replace(CONFIG, attention_bias=False)
    config = dataclasses.replace(plain, model_type=model_type)
    model = random_model(config)
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        f"{model_type.capitalize()}ForCausalLM"
    ]
    tensors = tensors_of(tmp_path)
    of_layer = {name for name in tensors if name.startswith(LAYER)}
    of_llama = {
        f"{LAYER}{name}.weight"
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *MODULE_PATHS.values(),
        )
    }
    assert of_layer == (of_llama | more) - fewer
    if model_type == "phi3":
        layer = model.layers[1]
        for linear, group in (("self_attn.qkv", "qkv"), ("mlp.gate_up", "gate_up")):
            weight = getattr(layer, group).weight[...]
            got = tensors[f"{LAYER}{linear}_proj.weight"]
            np.testing.assert_array_equal(got, weight)
    assert_same(load_model(tmp_path, progress=False), model)


@pytest.mark.parametrize(
    "name", ["qweight", "weight_scale_inv", "weight.quant_state.bitsandbytes__nf4"]
)
def test_quantised_weights_are_refused_by_name(folder, name):
    tensors = tensors_of(folder)
    del tensors[Q]
    name = Q.replace("weight", name)
    rewrite(folder, tensors | {name: np.ones((4, 4), np.int32)})
    message = error_of(folder)
    assert f"the weights are quantised (there is a tensor {name})" in message
    assert "missing" not in message


@pytest.mark.parametrize("max_shard_bytes", [1, 9000, 10**9])
def test_shards(model, tmp_path, max_shard_bytes):
    save_model(model, tmp_path, max_shard_bytes=max_shard_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    sizes = [{n: t.nbytes for n, t in load_file(file).items()} for file in files]
    assert all(sum(s.values()) <= max_shard_bytes or len(s) == 1 for s in sizes)
    assert sum(sum(s.values()) for s in sizes) == index["metadata"]["total_size"]
    assert_same(load_model(tmp_path, progress=False), model)


def test_saving_again_replaces_what_was_there(model, tmp_path):
    save_model(model, tmp_path, max_shard_bytes=9000)
    other = random_model(dataclasses.replace(CONFIG, num_layers=1))
    save_model(other, tmp_path)
    assert_same(load_model(tmp_path, progress=False), other)
    save_model(model, tmp_path, max_shard_bytes=9000)
    assert_same(load_model(tmp_path, progress=False), model)


def test_weights_are_cast(saved, model):
    loaded = load_model(saved, dtype=jnp.bfloat16, progress=False)
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    assert_same(loaded, expected)
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'int8'"):
        load_model(saved, dtype=jnp.int8)


def test_mixed_stored_types(folder, model):
    tensors = tensors_of(folder)
    for number, name in enumerate(tensors):
        stored = (np.float32, jnp.bfloat16, np.float16)[number % 3]
        tensors[name] = tensors[name].astype(jnp.bfloat16).astype(stored)
    rewrite(folder, tensors)
    expected = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), model
    )
    got = load_model(folder, progress=False)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # float16 has fewer exponents than bfloat16: what is tiny there rounds.
        np.testing.assert_allclose(new, old, rtol=0, atol=2**-25)


def test_harmless_tensors(folder, model):
    tensors = tensors_of(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    rewrite(folder, tensors)
    assert_same(load_model(folder, progress=False), model)


def test_head_of_a_tied_model_is_the_embedding(tmp_path):
    model = random_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    save_model(model, tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, tensors)
    assert_same(load_model(tmp_path, progress=False), model)


def test_all_missing_tensors_are_listed(folder):
    tensors = tensors_of(folder)
    del tensors[Q], tensors[GATE]
    rewrite(folder, tensors)
    assert f"2 tensors are missing: {GATE}, {Q}" in error_of(folder)


def test_all_unexpected_tensors_are_listed(folder):
    tensors = tensors_of(folder)
    for name in ("model.layers.2.input_layernorm.weight", "score.weight"):
        tensors[name] = np.ones(3, np.float32)
    rewrite(folder, tensors)
    message = error_of(folder)
    assert "2 tensors are unexpected: " in message
    assert "model.layers.2.input_layernorm.weight, score.weight" in message


def test_untied_head_must_be_there(folder):
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    rewrite(folder, tensors)
    assert "1 tensors are missing: lm_head.weight" in error_of(folder)


def test_wrong_shapes_and_types(folder):
    tensors = tensors_of(folder)
    tensors[Q] = tensors[Q].T.copy()
    tensors["model.norm.weight"] = np.ones(24, np.int8)
    rewrite(folder, tensors)
    message = error_of(folder)
    assert f"{Q} must have shape [32, 24], got [24, 32]" in message
    assert "model.norm.weight must be one of F32, BF16, F16, got I8" in message


def test_refusals_come_before_any_device_work(folder):
    tensors = tensors_of(folder)
    del tensors[Q]
    rewrite(folder, tensors)
    before = len(jax.live_arrays())
    error_of(folder)
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(folder)
    assert f"not a complete safetensors file ({file.stat().st_size} bytes)" in message


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"...")
    message = error_of(folder)
    assert "must be in model.safetensors, or in files named by" in message
    assert "convert them to safetensors" in message


def test_missing_shards_are_listed(model, tmp_path):
    save_model(model, tmp_path, max_shard_bytes=9000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    for name in (files[0], files[2]):
        (tmp_path / name).unlink()
    message = error_of(tmp_path)
    assert f"2 of the {len(files)} files that model.safetensors.index.json" in message
    assert f"do not exist: {files[0]}, {files[2]}" in message


def test_truncated_shard_is_named(model, tmp_path):
    save_model(model, tmp_path, max_shard_bytes=9000)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file}: not a complete safetensors file" in error_of(tmp_path)


def test_one_tensor_in_two_shards(model, tmp_path):
    save_model(model, tmp_path, max_shard_bytes=9000)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: np.ones(1, np.float32)}, second)
    message = error_of(tmp_path)
    assert f"{name!r} must be in one file, found in {first.name} and" in message


def write_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "a\\b"]
)
def test_files_outside_the_directory(folder, file):
    write_index(folder, json.dumps({"weight_map": {Q: file}}))
    expected = f"every file must lie in the directory, got {file!r}"
    assert expected in error_of(folder)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(folder, index):
    write_index(folder, index)
    assert "must be a JSON object whose weight_map gives" in error_of(folder)


def test_files_may_be_links_into_a_cache(folder, model, tmp_path):
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert_same(load_model(folder, progress=False), model)


def test_the_configuration_is_checked(folder):
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"sliding_window": 4096}))
    with pytest.raises(UnsupportedConfigError, match="'sliding_window'"):
        load_model(folder)
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    file.write_text(json.dumps(fields | dynamic))
    with pytest.raises(UnsupportedConfigError, match="max_model_len of at most 2048"):
        load_model(folder, max_model_len=2049)
    loaded = load_model(folder, max_model_len=2048, progress=False)
    assert loaded.config == CONFIG
    with pytest.raises(ConfigError, match=re.escape(str(folder / "no"))):
        load_model(folder / "no")


@pytest.mark.parametrize("path", [None, 3, b"x"])
def test_a_path_that_is_none(path):
    with pytest.raises(ValueError, match=f"path must be a directory .* got {path!r}$"):
        load_model(path)


def test_progress_bar(folder, capfd):
    load_model(folder, progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "loading model" in captured.err
    load_model(folder, progress=False)
    assert capfd.readouterr() == ("", "")


def test_host_memory_holds_two_tensors_at_most(tmp_path):
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=512,
        num_layers=10,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
    )
    save_model(Llama(config, rngs=nnx.Rngs(0)), tmp_path)
    sizes = [t.nbytes for t in tensors_of(tmp_path).values()]
    # Python's own objects, which do not grow with the tensors.
    allowed = 2 * max(sizes) + 600_000
    assert sum(sizes) > 5 * allowed

    def peak_bytes(function) -> int:
        gc.collect()
        tracemalloc.start()
        function()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    def load() -> None:
        model = load_model(tmp_path, progress=False)
        leaves = jax.tree.leaves(model)
        assert sum(leaf.nbytes for leaf in leaves) == sum(sizes)

    load()  # compiles
    gc.collect()  # what other tests have left
    before = sum(array.nbytes for array in jax.live_arrays())
    assert peak_bytes(load) < allowed
    assert sum(array.nbytes for array in jax.live_arrays()) == before
    # The meter sees what it should: all tensors at once are far beyond the limit.
    assert peak_bytes(lambda: tensors_of(tmp_path)) >= sum(sizes)
