"""PEFT directories that are refused, and what the user is told."""

import json
import os

import numpy as np
import pytest

from punica_jax.models._peft import (
    AdapterError,
    UnsupportedAdapterError,
    read_adapter,
    save_adapter,
)
from punica_jax.models._peft_config import PeftLoraConfig
from tests.adapter_cases import CONFIG, peft_names, q_and_v, write_peft

Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0_B = Q0_A.replace("lora_A", "lora_B")


def read(path):
    return read_adapter(path, CONFIG, dtype=np.float32)


def refusal(path) -> str:
    """Return the message with which an adapter is refused."""
    with pytest.raises(AdapterError) as caught:
        read(path)
    assert str(caught.value).startswith(f"adapter {path}: ")
    return str(caught.value).removeprefix(f"adapter {path}: ")


# --- what is not supported ------------------------------------------------------------

OFF = "only absent, null, false or empty is"
UNSUPPORTED = {
    "use_dora": (True, f"use_dora = True, {OFF}"),
    "bias": ("lora_only", "bias = 'lora_only', only \"none\" is"),
    "modules_to_save": (["lm_head"], f"modules_to_save = ['lm_head'], {OFF}"),
    "lora_bias": (True, f"lora_bias = True, {OFF}"),
    "peft_type": ("IA3", "peft_type = 'IA3', only \"LORA\" is"),
    "alora_invocation_tokens": ([1, 2], f"alora_invocation_tokens = [1, 2], {OFF}"),
    "target_parameters": (["w"], f"target_parameters = ['w'], {OFF}"),
    "trainable_token_indices": ([3], f"trainable_token_indices = [3], {OFF}"),
    "megatron_config": ({"a": 1}, f"megatron_config = {{'a': 1}}, {OFF}"),
    "layer_replication": ([[0, 2]], f"layer_replication = [[0, 2]], {OFF}"),
    "use_qalora": (True, f"use_qalora = True, {OFF}"),
    "use_bdlora": ({"nblocks": 2}, f"use_bdlora = {{'nblocks': 2}}, {OFF}"),
    "arrow_config": ({"top_k": 3}, f"arrow_config = {{'top_k': 3}}, {OFF}"),
    "kasa_config": ({"a": 1}, f"kasa_config = {{'a': 1}}, {OFF}"),
    "velora_config": ({"a": 1}, f"velora_config = {{'a': 1}}, {OFF}"),
    "monteclora_config": ({"a": 1}, f"monteclora_config = {{'a': 1}}, {OFF}"),
    "ensure_weight_tying": (True, f"ensure_weight_tying = True, {OFF}"),
    "something_of_2031": ("on", f"something_of_2031 = 'on', {OFF}"),
    "init_lora_weights": (
        "of 2031",
        "init_lora_weights = 'of 2031', only true, false, gaussian, orthogonal, eva, "
        "mica are",
    ),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_named_with_value_and_rule(tmp_path, field):
    value, rule = UNSUPPORTED[field]
    write_peft(tmp_path, **{field: value})
    with pytest.raises(UnsupportedAdapterError) as caught:
        read(tmp_path)
    text = f"adapter_config.json asks for what is not supported: {rule}"
    assert str(caught.value).startswith(f"adapter {tmp_path}: {text}")


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"]
)
def test_initialisations_that_change_the_base_and_what_to_do(tmp_path, init):
    """PEFT converts all of them but LoftQ's; see `golden/peft` for converted ones."""
    advice = (
        "PEFT's save_pretrained makes a plain LoRA of it, with "
        "path_initial_model_for_weight_conversion"
    )
    if init == "loftq":
        advice = (
            "PEFT makes no plain LoRA of it: serve it over the base that LoftQ made, "
            "saved with unload().save_pretrained(...), and set init_lora_weights to "
            "true"
        )
    assert refusal(write_peft(tmp_path, init_lora_weights=init)) == (
        "adapter_config.json asks for what is not supported: init_lora_weights = "
        f"{init!r}, which changes the base's weights too: only true, false, gaussian, "
        f"orthogonal, eva, mica are ({advice})"
    )


def test_all_unsupported_fields_are_named_at_once(tmp_path):
    text = refusal(write_peft(tmp_path, use_dora=True, bias="all", lora_bias=True))
    assert text.count(" = ") == 3


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_lora_on_head_or_embeddings_is_unsupported(tmp_path, target):
    write_peft(tmp_path, target_modules=["q_proj", target])
    with pytest.raises(
        UnsupportedAdapterError,
        match=rf"target_modules = \['q_proj', '{target}'\] asks for a LoRA on "
        rf"(model\.)?{target}, which is not supported",
    ):
        read(tmp_path)


def test_a_pickle_is_refused_by_name(tmp_path):
    write_peft(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(
        UnsupportedAdapterError,
        match=r"adapter_model\.bin is a pickle.*Convert it to adapter_model\.safetens",
    ):
        read(tmp_path)


# --- broken configurations ------------------------------------------------------------

BAD_FIELDS = [
    ({"r": 0}, "r must be an integer from 1, got 0"),
    ({"r": -8}, "r must be an integer from 1, got -8"),
    ({"r": 4.0}, "r must be an integer from 1, got 4.0"),
    ({"r": True}, "r must be an integer from 1, got True"),
    pytest.param(
        {"r": 10**400},
        f"r must be at most 2147483647, got 1{'0' * 17}...{'0' * 19}",
        id="huge r",
    ),
    # Regular expressions, but not within PEFT's.
    (
        {"rank_pattern": {"(?i)q_proj": 4}},
        "rank_pattern: '(?i)q_proj' is not a regular expression: global flags not at "
        "the start of the expression at position 8",
    ),
    (
        {"layers_to_transform": [0], "layers_pattern": "(?P<index>h)"},
        "layers_pattern: '(?P<index>h)' is not a regular expression: redefinition of "
        "group name 'index' as group 2; was group 1 at position 29",
    ),
    # And within them, but none.
    (
        {"alpha_pattern": {"a)(b": 4}},
        "alpha_pattern: 'a)(b' is not a regular expression: unbalanced parenthesis at "
        "position 1",
    ),
    (
        {"rank_pattern": {"q_proj": 0}},
        "rank_pattern['q_proj'] must be an integer from 1, got 0",
    ),
    ({"rank_pattern": [4]}, "rank_pattern must map patterns to numbers, got [4]"),
    (
        {"rank_pattern": {"(q": 4}},
        "rank_pattern: '(q' is not a regular expression: missing ), "
        "unterminated subpattern at position 0",
    ),
    ({"lora_alpha": "16"}, "lora_alpha must be a finite number, got '16'"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number, got nan"),
    ({"lora_alpha": 10**309}, f"lora_alpha must be a finite number, got {10**309}"),
    (
        {"alpha_pattern": {"v_proj": None}},
        "alpha_pattern['v_proj'] must be a finite number, got None",
    ),
    ({"use_rslora": "yes"}, "use_rslora must be true or false, got 'yes'"),
    ({"target_modules": 7}, "target_modules must be a string or strings, got 7"),
    ({"target_modules": [7]}, "target_modules must be a string or strings, got [7]"),
    (
        {"target_modules": "*proj"},
        "target_modules: '*proj' is not a regular expression: nothing to repeat at "
        "position 0",
    ),
    (
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        "layers_to_transform needs target_modules to be a list, got "
        "target_modules = '.*q_proj'",
    ),
    (
        {"layers_to_transform": "all"},
        "layers_to_transform must be one layer index or several, got 'all'",
    ),
]


def test_numbers_of_numpy(tmp_path):
    """Weights come with fields that are given in Python."""
    pair = np.ones((4, 24), np.float32), np.ones((32, 4), np.float32)
    fields = {"r": np.int64(4), "lora_alpha": np.float32(8)}
    save_adapter(tmp_path, CONFIG, {(0, "q_proj"): pair}, **fields)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 8.0)
    given = {"r": np.int64(4), "lora_alpha": np.float32(8), "target_modules": ["q"]}
    config = PeftLoraConfig.from_fields(given | {"peft_type": "LORA"})
    assert (config.r, config.lora_alpha) == (4, 8.0)
    assert (type(config.r), type(config.lora_alpha)) == (int, float)


@pytest.mark.parametrize(("fields", "text"), BAD_FIELDS, ids=str)
def test_broken_fields(tmp_path, fields, text):
    assert refusal(write_peft(tmp_path, **fields)) == text


# --- tensors that do not fit ----------------------------------------------------------


def test_rank_of_a_tensor_must_be_the_configured_one(tmp_path):
    text = refusal(write_peft(tmp_path, r=8))
    assert text.startswith("these tensors have the wrong shape")
    assert f"{Q0_A}: expected [8, 24] (rank 8), got [4, 24]; " in text
    assert f"{Q0_B}: expected [32, 8] (rank 8), got [32, 4]; " in text
    assert text.endswith(" and 4 more")


def test_rank_pattern_says_the_rank(tmp_path):
    text = refusal(write_peft(tmp_path, rank_pattern={"layers.1.*.v_proj": 2}))
    assert text.startswith("these tensors have the wrong shape")
    assert "layers.1.self_attn.v_proj.lora_A.weight: expected [2, 24] (rank 2)" in text


def test_widths_of_another_base(tmp_path):
    tensors = peft_names(q_and_v())
    tensors[Q0_B] = np.zeros((64, 4), np.float32)
    text = refusal(write_peft(tmp_path, tensors))
    assert text == (
        "these tensors have the wrong shape; the rank is what r and rank_pattern of "
        "adapter_config.json say, the other side is the base's: "
        f"{Q0_B}: expected [32, 4] (rank 4), got [64, 4]"
    )


@pytest.mark.parametrize(
    "name",
    [
        Q0_A.replace("layers.0", "layers.3"),
        Q0_A.replace("q_proj", "qkv_proj"),
        Q0_A.replace("self_attn", "mlp"),
        Q0_A.replace("base_model.model.model", "base_model.model"),
        Q0_A.replace("lora_A.weight", "lora_A.bias"),
        Q0_A.replace("lora_A.weight", "lora_magnitude_vector"),
    ],
)
def test_tensors_of_another_base_are_named(tmp_path, name):
    tensors = peft_names(q_and_v()) | {name: np.zeros((4, 24), np.float32)}
    assert refusal(write_peft(tmp_path, tensors)) == (
        "these tensors fit no module of the base model, which has layers 0 to 2 with "
        "LoRA on self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, "
        "self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj: "
        f"{name}. Was the adapter made for another base?"
    )


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.embed_tokens.weight", "lm_head.base_layer.weight"]
)
def test_embeddings_and_heads_of_the_adapters_own(tmp_path, name):
    """PEFT saves them where the vocabulary was resized, or where it is told to."""
    name = f"base_model.model.{name}"
    tensors = peft_names(q_and_v()) | {name: np.zeros((32, 24), np.float32)}
    assert refusal(write_peft(tmp_path, tensors)) == (
        "the file holds an embedding or an output table of its own, which is not "
        f"supported: {name}. If they are the base's, unchanged, save the adapter again "
        "with save_pretrained(..., save_embedding_layers=False); if not, "
        "merge_and_unload() makes a base model of both"
    )
    with pytest.raises(UnsupportedAdapterError):
        read(tmp_path)


def test_long_lists_are_capped(tmp_path):
    names = [Q0_A.replace("layers.0", f"layers.{n}") for n in range(10, 30)]
    tensors = {name: np.zeros((4, 24), np.float32) for name in names}
    text = refusal(write_peft(tmp_path, tensors))
    assert text.startswith("these tensors fit no module")
    assert f"{names[7]} and 12 more. Was" in text
    assert names[8] not in text


def test_half_a_lora(tmp_path):
    tensors = peft_names(q_and_v())
    del tensors[Q0_B]
    assert refusal(write_peft(tmp_path, tensors)) == (
        f"a LoRA needs both lora_A and lora_B, the file lacks: {Q0_B}"
    )


def test_modules_that_the_file_lacks(tmp_path):
    fields = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
    assert refusal(write_peft(tmp_path, **fields)) == (
        "adapter_config.json names modules whose tensors the file lacks: "
        "model.layers.0.self_attn.o_proj, model.layers.1.self_attn.o_proj, "
        "model.layers.2.self_attn.o_proj"
    )


def test_modules_that_the_configuration_does_not_name(tmp_path):
    assert refusal(write_peft(tmp_path, layers_to_transform=[0, 1])) == (
        "the file holds tensors for modules that adapter_config.json does not name "
        "in target_modules: model.layers.2.self_attn.q_proj, "
        "model.layers.2.self_attn.v_proj"
    )


def test_two_adapters_in_one_file(tmp_path):
    tensors = peft_names(q_and_v())
    other = Q0_A.replace(".weight", ".other.weight")
    tensors[other] = tensors[Q0_A]
    text = refusal(write_peft(tmp_path, tensors))
    assert text.startswith("the file must hold one adapter, but has several tensors")


@pytest.mark.parametrize(
    ("tensors", "targets", "promised", "held"),
    [
        (None, ["fc1", "fc2"], 0, 6),
        (None, [], 0, 6),
        (None, "no such module", 0, 6),
        ({}, ["q_proj"], 3, 0),
    ],
)
def test_an_adapter_that_binds_nothing(tmp_path, tensors, targets, promised, held):
    assert refusal(write_peft(tmp_path, tensors, target_modules=targets)) == (
        f"the adapter binds nothing: target_modules = {targets!r} names {promised} of "
        f"the base's 21 modules, and the file holds LoRA tensors for {held}"
    )


def test_integer_weights(tmp_path):
    tensors = peft_names(q_and_v())
    tensors[Q0_A] = tensors[Q0_A].astype(np.int8)
    assert refusal(write_peft(tmp_path, tensors)) == (
        f"weights must be of dtype F16, BF16, F32, F64, got {Q0_A} (I8)"
    )


# --- broken files ---------------------------------------------------------------------


def test_missing_paths_and_files(tmp_path):
    missing = tmp_path / "none"
    assert refusal(missing) == "a PEFT directory is needed, the path does not exist"
    file = tmp_path / "file"
    file.write_text("")
    assert refusal(file) == "a PEFT directory is needed, the path is not a directory"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(empty) == "the directory holds no adapter_config.json"
    write_peft(empty)
    (empty / "adapter_model.safetensors").unlink()
    assert refusal(empty) == "the directory holds no adapter_model.safetensors"


@pytest.mark.parametrize("text", ['{"r": 4', "", "\udcff"])
def test_configuration_that_is_not_json(tmp_path, text):
    write_peft(tmp_path)
    data = text.encode(errors="surrogateescape")
    (tmp_path / "adapter_config.json").write_bytes(data)
    assert refusal(tmp_path).startswith("adapter_config.json is not readable JSON: ")


def test_configuration_that_is_no_object(tmp_path):
    write_peft(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    text = "adapter_config.json must be a JSON object, got list"
    assert refusal(tmp_path) == text


def test_weights_that_shrink_while_they_are_read(tmp_path, monkeypatch):
    path = write_peft(tmp_path) / "adapter_model.safetensors"
    read, size = os.preadv, path.stat().st_size

    def shrinking(fd, buffers, start):
        os.truncate(path, size - 1)
        return read(fd, buffers, start)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert refusal(tmp_path) == (
        f"{path}: not a complete safetensors file ({size - 1} bytes): it has become "
        "shorter. Copy or download it again"
    )


def test_weights_that_come_in_pieces(tmp_path, monkeypatch):
    """A call of the system may return less than it was asked for."""
    write_peft(tmp_path)
    whole = read_adapter(tmp_path, CONFIG, dtype=np.float32)
    read = os.preadv

    def a_little(fd, buffers, start):
        return read(fd, [buffers[0][:97]], start)

    monkeypatch.setattr(os, "preadv", a_little)
    pieces = read_adapter(tmp_path, CONFIG, dtype=np.float32)
    assert pieces.digest() == whole.digest()


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights(tmp_path, kept):
    path = write_peft(tmp_path) / "adapter_model.safetensors"
    data = path.read_bytes()[:kept]
    path.write_bytes(data)
    text = refusal(tmp_path)
    assert text.startswith(
        f"{path}: not a complete safetensors file ({len(data)} bytes): "
    )
    assert text.endswith("Copy or download it again")
