"""PEFT directories: what is read from them, and what is refused."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from punica_jax.models._peft import (
    AdapterError,
    UnsupportedAdapterError,
    read_adapter,
    save_adapter,
)
from tests.adapter_cases import (
    CONFIG,
    GOLDEN_CONFIG,
    peft_names,
    q_and_v,
    random_factors,
    write_peft,
)

GOLDEN = Path(__file__).parent / "golden" / "peft"
GOLDEN_CASES = sorted(folder.name for folder in GOLDEN.iterdir())
Q, K, V, O = (f"self_attn.{m}_proj" for m in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"mlp.{m}_proj" for m in ("gate", "up", "down"))
Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0_B = Q0_A.replace("lora_A", "lora_B")


def read(path, **options):
    return read_adapter(path, CONFIG, **{"dtype": np.float32, **options})


def refusal(path, **options) -> str:
    """Return the message with which an adapter is refused."""
    with pytest.raises(AdapterError) as caught:
        read(path, **options)
    assert str(caught.value).startswith(f"adapter {path}: ")
    return str(caught.value).removeprefix(f"adapter {path}: ")


# --- what is read ---------------------------------------------------------------------


def test_every_golden_case_is_there():
    assert len(GOLDEN_CASES) == 9


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_modules_ranks_scales_and_norms_are_those_of_peft(case):
    """`expected.json` is what peft 0.21.2 made of the same directory."""
    expected = json.loads((GOLDEN / case / "expected.json").read_text())
    adapter = read_adapter(GOLDEN / case, GOLDEN_CONFIG, dtype=np.float32)
    rows = {f"model.layers.{r.layer}.{r.module}": r for r in adapter.report.rows}
    assert rows.keys() == expected.keys()
    for path, row in rows.items():
        assert row.rank == expected[path]["rank"], path
        assert row.scale == pytest.approx(expected[path]["scale"], rel=1e-12), path
        assert row.delta_norm == pytest.approx(
            expected[path]["delta_norm"], rel=1e-5
        ), path


def test_bfloat16_files_are_read():
    with safe_open(GOLDEN / "rslora" / "adapter_model.safetensors", "numpy") as file:
        assert {file.get_slice(n).get_dtype() for n in file.keys()} == {"BF16"}
    adapter = read_adapter(GOLDEN / "rslora", GOLDEN_CONFIG, dtype=jnp.bfloat16)
    a_page, b_page = adapter.page("o", 0)
    assert a_page.dtype == b_page.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pages_hold_a_and_scaled_b_and_zeros(tmp_path, dtype):
    """Rank 40 q (3 pages), rank 16 v (1), k left alone, and layer 1 without any."""
    dtype = np.dtype(jnp.dtype(dtype))
    factors = random_factors({(0, Q): 40, (0, V): 16, (2, Q): 3})
    save_adapter(tmp_path, CONFIG, factors, r=16, lora_alpha=5)
    adapter = read(tmp_path, dtype=dtype)
    assert adapter.rank == 40
    assert adapter.num_pages("qkv") == 3
    assert [adapter.num_pages(g) for g in ("o", "gate_up", "down")] == [0, 0, 0]
    counts = adapter.counts("qkv")
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, [[3, 0, 1], [0, 0, 0], [1, 0, 0]])

    expected_a = np.zeros((3, 3, 48, 24), dtype)
    expected_b = np.zeros((3, 64, 48), dtype)
    columns = {Q: slice(0, 32), V: slice(48, 64)}
    for (layer, module), (a, b) in factors.items():
        rank = a.shape[0]
        scaled = b * np.float32(5 / rank)  # in float32, cast after
        expected_a[layer, {Q: 0, V: 2}[module], :rank] = a.astype(dtype)
        expected_b[layer, columns[module], :rank] = scaled.astype(dtype)
    for index in range(3):
        a_page, b_page = adapter.page("qkv", index)
        lanes = slice(16 * index, 16 * index + 16)
        assert a_page.dtype == b_page.dtype == dtype
        np.testing.assert_array_equal(a_page, expected_a[:, :, lanes])
        np.testing.assert_array_equal(b_page, expected_b[:, :, lanes])


def test_scale_is_folded_before_the_cast(tmp_path):
    """B below bfloat16's reach of the sum is where the order of rounding shows."""
    factors = q_and_v(rank=1)
    save_adapter(tmp_path, CONFIG, factors, lora_alpha=1 / 3)
    _, b_page = read(tmp_path, dtype=jnp.bfloat16).page("qkv", 0)
    b = factors[0, Q][1]
    right = (b * np.float32(1 / 3)).astype(ml_dtypes.bfloat16)
    late = b.astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(1 / 3)
    np.testing.assert_array_equal(b_page[0, :32, :1], right)
    assert (right != late).any()


def test_float16_files_and_all_seven_modules(tmp_path):
    modules = (Q, K, V, O, GATE, UP, DOWN)
    factors = random_factors({(n, m): 8 for n in range(3) for m in modules})
    factors = {
        key: (a.astype(np.float16), b.astype(np.float16))
        for key, (a, b) in factors.items()
    }
    save_adapter(tmp_path, CONFIG, factors, lora_alpha=16)
    adapter = read(tmp_path)
    for group, widths in {
        "qkv": (24, 64),
        "o": (32, 24),
        "gate_up": (24, 80),
        "down": (40, 24),
    }.items():
        a_page, b_page = adapter.page(group, 0)
        assert (a_page.shape[-1], b_page.shape[1]) == widths
        assert adapter.counts(group).all()
    np.testing.assert_array_equal(
        adapter.page("gate_up", 0)[1][1, 40:, :8], factors[1, UP][1] * np.float32(2)
    )
    assert adapter.nbytes == sum(4 * (a.size + b.size) for a, b in factors.values())


def test_an_adapter_name_in_the_keys_is_accepted(tmp_path):
    tensors = {
        name.replace(".weight", ".default.weight"): array
        for name, array in peft_names(q_and_v()).items()
    }
    assert len(read(write_peft(tmp_path, tensors)).report.rows) == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.1, "inference_mode": False, "task_type": "SEQ_2_SEQ_LM"},
        {"init_lora_weights": "gaussian", "revision": "main", "peft_version": "9.9"},
        {"fan_in_fan_out": True, "megatron_core": "mine", "qalora_group_size": 32},
        {"modules_to_save": [], "loftq_config": {}, "use_dora": False, "bias": None},
        {"a_future_switch": False, "a_future_config": None},
        {"layers_pattern": "", "layers_to_transform": [], "exclude_modules": None},
    ],
)
def test_fields_that_change_nothing_are_accepted(tmp_path, fields):
    assert len(read(write_peft(tmp_path, **fields)).report.rows) == 6


def test_delta_norm_is_the_norm_of_the_product(tmp_path):
    factors = random_factors({(0, Q): 5, (1, DOWN): 40})
    save_adapter(tmp_path, CONFIG, factors, r=5, lora_alpha=-3, use_rslora=True)
    report = read(tmp_path).report
    norms = {}
    for (layer, module), (a, b) in factors.items():
        delta = b.astype(np.float64) @ a.astype(np.float64)
        norms[layer, module] = np.linalg.norm(delta) * 3 / np.sqrt(a.shape[0])
    for row in report.rows:
        assert row.delta_norm == pytest.approx(norms[row.layer, row.module], rel=1e-12)
    whole = np.sqrt(sum(norm**2 for norm in norms.values()))
    assert report.delta_norm == pytest.approx(whole, rel=1e-12)


def test_delta_norm_of_a_product_that_cancels_is_zero(tmp_path):
    factors = q_and_v(rank=2)
    a, b = factors[0, Q]
    factors[0, Q] = np.stack([a[0], a[0]]), np.stack([b[:, 0], -b[:, 0]], axis=1)
    save_adapter(tmp_path, CONFIG, factors)
    norm = read(tmp_path).report.rows[0].delta_norm
    assert 0 <= norm < 1e-7


def test_report_prints_a_table(tmp_path):
    factors = {
        (0, Q): (np.eye(2, 24, dtype=np.float32), np.eye(32, 2, dtype=np.float32)),
        (2, UP): (np.eye(4, 24, dtype=np.float32), np.eye(40, 4, dtype=np.float32)),
    }
    save_adapter(tmp_path, CONFIG, factors, r=2, lora_alpha=4)
    assert str(read(tmp_path).report).splitlines() == [
        "2 modules in 2 layers, greatest rank 4, norm of the whole change 3.46; "
        "each cell: rank xscale norm",
        "layer  self_attn.q_proj  mlp.up_proj",
        "0      2 x2 2.83         -",
        "2      -                 4 x1 2",
    ]


def test_weights_that_are_not_finite_are_read(tmp_path):
    """They are found on the device, where it costs nothing."""
    tensors = peft_names(q_and_v())
    tensors[Q0_A][0, 0] = np.nan
    adapter = read(write_peft(tmp_path, tensors), dtype=np.float16)
    assert np.isnan(adapter.report.rows[0].delta_norm)
    assert np.isnan(adapter.page("qkv", 0)[0]).sum() == 1


def test_what_overflows_the_dtype_becomes_infinite(tmp_path):
    adapter = read(write_peft(tmp_path, lora_alpha=1e9), dtype=np.float16)
    assert np.isinf(adapter.page("qkv", 0)[1]).any()


# --- base names -----------------------------------------------------------------------


def test_another_base_name_is_a_warning(tmp_path):
    write_peft(tmp_path, base_model_name_or_path="meta-llama/Llama-2-7b-hf")
    text = (
        f"adapter {tmp_path} was trained on 'meta-llama/Llama-2-7b-hf', "
        "the base model is '/models/Llama-3.1-8B'"
    )
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        read(tmp_path, base_name="/models/Llama-3.1-8B")
    assert Path(caught[0].filename).name == "test_peft.py"


@pytest.mark.parametrize("base_name", [None, "/local/copy/Llama-2-7b-hf/"])
def test_the_same_base_elsewhere_is_no_warning(tmp_path, base_name):
    write_peft(tmp_path, base_model_name_or_path="meta-llama/Llama-2-7b-hf")
    read(tmp_path, base_name=base_name)  # warnings are errors here


# --- what is not supported ------------------------------------------------------------

OFF = "only absent, null, false or empty is"
UNSUPPORTED = {
    "use_dora": (True, f"use_dora = True, {OFF}"),
    "bias": ("lora_only", "bias = 'lora_only', only \"none\" is"),
    "modules_to_save": (["lm_head"], f"modules_to_save = ['lm_head'], {OFF}"),
    "lora_bias": (True, f"lora_bias = True, {OFF}"),
    "peft_type": ("IA3", "peft_type = 'IA3', only \"LORA\" is"),
    "loftq_config": ({"loftq_bits": 4}, f"loftq_config = {{'loftq_bits': 4}}, {OFF}"),
    "eva_config": ({"rho": 2.0}, f"eva_config = {{'rho': 2.0}}, {OFF}"),
    "corda_config": ({"a": 1}, f"corda_config = {{'a': 1}}, {OFF}"),
    "lora_ga_config": ({"a": 1}, f"lora_ga_config = {{'a': 1}}, {OFF}"),
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
        "pissa_niter_4",
        "init_lora_weights = 'pissa_niter_4', which changes the base's weights too: "
        "only true, false, gaussian, orthogonal, eva are",
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
    (
        {"alpha_pattern": {"v_proj": None}},
        "alpha_pattern['v_proj'] must be a finite number, got None",
    ),
    ({"use_rslora": "yes"}, "use_rslora must be a bool, got 'yes'"),
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
        "base_model.model.lm_head.weight",
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


# --- what is written ------------------------------------------------------------------


def saved_fields(path: Path) -> dict:
    return json.loads((path / "adapter_config.json").read_text())


def test_saved_fields_follow_from_the_tensors(tmp_path):
    ranks = {(0, Q): 4, (1, Q): 4, (0, V): 4, (1, V): 8, (0, DOWN): 2, (1, DOWN): 2}
    save_adapter(tmp_path, CONFIG, random_factors(ranks))
    fields = saved_fields(tmp_path)
    assert fields["r"] == fields["lora_alpha"] == 4
    assert fields["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert fields["layers_to_transform"] == [0, 1]
    assert fields["rank_pattern"] == {
        "model.layers.1.self_attn.v_proj": 8,
        "down_proj": 2,
    }
    rows = read(tmp_path).report.rows
    assert {(row.layer, row.module): row.rank for row in rows} == ranks


def test_saved_paths_where_layers_differ(tmp_path):
    save_adapter(tmp_path, CONFIG, random_factors({(0, Q): 4, (2, O): 4}))
    assert saved_fields(tmp_path)["target_modules"] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.2.self_attn.o_proj",
    ]
    assert len(read(tmp_path).report.rows) == 2


def test_every_way_to_name_a_module(tmp_path):
    pair = random_factors({(1, Q): 4})[1, Q]
    for n, key in enumerate([(1, "q_proj"), (1, Q), "model.layers.1.self_attn.q_proj"]):
        save_adapter(tmp_path / str(n), CONFIG, {key: pair})
        (row,) = read(tmp_path / str(n)).report.rows
        assert (row.layer, row.module) == (1, Q)


def test_transposed_views_are_saved_as_they_read(tmp_path):
    a, b = random_factors({(0, Q): 4})[0, Q]
    save_adapter(tmp_path, CONFIG, {(0, Q): (a.T.copy().T, jnp.asarray(b.T).T)})
    a_page, b_page = read(tmp_path).page("qkv", 0)
    np.testing.assert_array_equal(a_page[0, 0, :4], a)
    np.testing.assert_array_equal(b_page[0, :32, :4], b)


@pytest.mark.parametrize(
    ("tensors", "fields", "text"),
    [
        ({}, {}, "the adapter binds nothing: no tensors were given"),
        ({(3, Q): None}, {}, "the base model has no module (3, 'self_attn.q_proj')"),
        ({(0, Q): 4, (0, "q_proj"): 4}, {}, "module model.layers.0.self_attn.q_proj"),
        (
            {(0, Q): 4},
            {"r": 4, "rank_pattern": {"q_proj": 8}},
            "these tensors have the",
        ),
        (
            {(0, Q): 4},
            {"target_modules": ["v_proj"]},
            "adapter_config.json names modules",
        ),
        ({(0, Q): 4}, {"use_dora": True}, "adapter_config.json asks for what is not"),
    ],
)
def test_what_cannot_be_read_is_not_written(tmp_path, tensors, fields, text):
    pair = random_factors({(0, Q): 4})[0, Q]
    with pytest.raises(AdapterError, match=re.escape(text)):
        save_adapter(tmp_path / "new", CONFIG, dict.fromkeys(tensors, pair), **fields)
    assert not (tmp_path / "new").exists()
