"""PEFT directories: what is read from them and what is written to them."""

import dataclasses
import gc
import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from punica_jax.models import MODULE_GROUPS
from punica_jax.models._peft import (
    AdapterError,
    make_adapter,
    read_adapter,
    read_rank,
    save_adapter,
)
from punica_jax.models._safetensors import SafetensorsFileError, open_safetensors
from tests.adapter_cases import (
    CONFIG,
    GOLDEN_CONFIG,
    WIDTHS,
    in_pools,
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


def page_bytes(adapter):
    return sum(
        array.nbytes
        for group in MODULE_GROUPS
        for index in range(adapter.num_pages(group))
        for array in adapter.page(group, index)
    )


def read(path, **options):
    return read_adapter(path, CONFIG, **{"dtype": np.float32, **options})


# --- what is read ---------------------------------------------------------------------


def test_every_golden_case_is_there():
    assert len(GOLDEN_CASES) == 15


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
    a_page, b_page, _ = adapter.page("o", 0)
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
    expected_b = np.zeros((3, 48, 64), dtype)
    columns = {Q: slice(0, 32), V: slice(48, 64)}
    for (layer, module), (a, b) in factors.items():
        rank = a.shape[0]
        scaled = b * np.float32(5 / rank)  # in float32, cast after
        expected_a[layer, {Q: 0, V: 2}[module], :rank] = a.astype(dtype)
        expected_b[layer, :rank, columns[module]] = scaled.astype(dtype).T
    for index in range(3):
        a_page, b_page = in_pools(adapter, "qkv", index)
        lanes = slice(16 * index, 16 * index + 16)
        assert a_page.dtype == b_page.dtype == dtype
        np.testing.assert_array_equal(a_page, expected_a[:, :, lanes])
        np.testing.assert_array_equal(b_page, expected_b[:, lanes])


def test_scale_is_folded_before_the_cast(tmp_path):
    """B below bfloat16's reach of the sum is where the order of rounding shows."""
    factors = q_and_v(rank=1)
    save_adapter(tmp_path, CONFIG, factors, lora_alpha=1 / 3)
    _, b_page = in_pools(read(tmp_path, dtype=jnp.bfloat16), "qkv", 0)
    b = factors[0, Q][1]
    right = (b * np.float32(1 / 3)).astype(ml_dtypes.bfloat16)
    late = b.astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(1 / 3)
    np.testing.assert_array_equal(b_page[0, :1, :32], right.T)
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
        a_page, b_page = in_pools(adapter, group, 0)
        assert (a_page.shape[-1], b_page.shape[-1]) == widths
        assert adapter.counts(group).all()
    np.testing.assert_array_equal(
        in_pools(adapter, "gate_up", 0)[1][1, :8, 40:],
        factors[1, UP][1].T * np.float32(2),
    )
    assert adapter.nbytes == page_bytes(adapter)


FUSED_CONFIG = dataclasses.replace(CONFIG, model_type="phi3")
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
QKV_COLUMNS = 32 + 16 + 16


def fused_factors(rank: int) -> dict:
    rng = np.random.default_rng(0)
    return {
        (layer, module): (
            rng.standard_normal((rank, 24)).astype(np.float32),
            rng.standard_normal((d_out, rank)).astype(np.float32),
        )
        for layer, module, d_out in ((0, QKV, QKV_COLUMNS), (2, GATE_UP, 80))
    }


def test_a_fused_layer_is_all_modules_of_its_group(tmp_path):
    """One A, which every module of the group gets, and a B over all their outputs."""
    factors = fused_factors(18)
    save_adapter(tmp_path, FUSED_CONFIG, factors, lora_alpha=36)
    adapter = read_adapter(tmp_path, FUSED_CONFIG, dtype=np.float32)
    assert saved_fields(tmp_path)["target_modules"] == [
        f"model.layers.0.{QKV}",
        f"model.layers.2.{GATE_UP}",
    ]
    assert [(row.layer, row.module) for row in adapter.report.rows] == [*factors]
    np.testing.assert_array_equal(
        adapter.counts("qkv"), [[2, 2, 2], [0, 0, 0], [0, 0, 0]]
    )
    np.testing.assert_array_equal(adapter.counts("gate_up"), [[0, 0], [0, 0], [2, 2]])
    for (layer, name), group in zip(factors, ("qkv", "gate_up"), strict=True):
        a, b = factors[layer, name]
        pages = [in_pools(adapter, group, index) for index in range(2)]
        got_a = np.concatenate([page for page, _ in pages], axis=2)[layer, :, :18]
        got_b = np.concatenate([page for _, page in pages], axis=1)[layer, :18]
        np.testing.assert_array_equal(got_a, np.broadcast_to(a, got_a.shape))
        np.testing.assert_array_equal(got_b, 2 * b.T)
    assert adapter.nbytes == page_bytes(adapter)
    norm = np.linalg.norm(2 * np.float64(factors[0, QKV][1]) @ factors[0, QKV][0])
    assert adapter.report.rows[0].delta_norm == pytest.approx(norm, rel=1e-9)


def test_an_adapter_of_separate_layers_does_not_fit_fused_ones(tmp_path):
    save_adapter(tmp_path, CONFIG, q_and_v())
    with pytest.raises(AdapterError, match="fit no module of the base model") as caught:
        read_adapter(tmp_path, FUSED_CONFIG, dtype=np.float32)
    assert "LoRA on self_attn.qkv_proj, self_attn.o_proj, mlp.gate" in str(caught.value)


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
        {"modules_to_save": [], "target_parameters": [], "use_dora": False},
        {"bias": None, "init_lora_weights": None},
        # As PEFT leaves them in a converted adapter; it heeds none.
        {"init_lora_weights": True, "corda_config": {"corda_method": "kpm"}},
        {"init_lora_weights": True, "loftq_config": {"loftq_bits": 4}},
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


def test_norms_that_are_known_are_not_computed(tmp_path):
    save_adapter(tmp_path, CONFIG, random_factors({(0, Q): 5, (1, DOWN): 40}))
    first, *others = read(tmp_path).report.rows
    known = [first._replace(delta_norm=-1.0), others[0]._replace(rank=39)]
    assert read(tmp_path).report.complete(known).rows == (known[0], *others)


@pytest.mark.slow
def test_modules_are_nothing_that_garbage_collection_walks_through(tmp_path):
    """With hundreds of adapters in host memory it would hold up steps."""
    kept = {}
    for num_layers in (1, 1, 3):  # the first one is the process's first
        ranks = {(layer, module): 4 for layer in range(num_layers) for module in WIDTHS}
        save_adapter(tmp_path, CONFIG, random_factors(ranks))
        gc.collect()
        before = len(gc.get_objects())
        adapter = read(tmp_path)
        adapter.report.complete()
        gc.collect()
        kept[num_layers] = len(gc.get_objects()) - before
        assert len(adapter.report.rows) == len(ranks)
        del adapter
    assert kept[3] - kept[1] < 7


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


def test_the_rank_and_all_checks_before_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", None)  # that reads weights
    tensors = peft_names(random_factors({(0, Q): 4, (1, Q): 12, (2, Q): 4}))
    fields = {"rank_pattern": {"layers.1.self_attn.q_proj": 12, "o_proj": 99}}
    path = write_peft(tmp_path, tensors, target_modules=["q_proj"], **fields)
    assert read_rank(path, CONFIG) == 12  # o has no LoRA

    def refusal(**changes):
        with pytest.raises(AdapterError) as caught:
            read_rank(path, dataclasses.replace(CONFIG, **changes))
        assert str(caught.value).startswith(f"adapter {path}: ")
        return str(caught.value).removeprefix(f"adapter {path}: ")

    assert refusal(num_layers=2).startswith("these tensors fit no module of the base")
    assert refusal(num_layers=4).endswith("the file lacks: model.layers.3." + Q)
    assert refusal(hidden_size=32).startswith("these tensors have the wrong shape")
    weights = path / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert "not a complete safetensors file" in refusal()
    weights.unlink()
    assert refusal() == "the directory holds no adapter_model.safetensors"
    (path / "adapter_config.json").write_text("[" * 10**6)
    assert refusal().startswith("adapter_config.json is not readable JSON")


# --- base names -----------------------------------------------------------------------


def test_another_base_name_is_a_warning(tmp_path):
    write_peft(tmp_path, base_model_name_or_path="meta-llama/Llama-2-7b-hf")
    text = (
        f"adapter {tmp_path} was trained on 'meta-llama/Llama-2-7b-hf', "
        "the base model is '/models/Llama-3.1-8B'"
    )
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        read(tmp_path, base_names=["/models/Llama-3.1-8B", "Llama-3.1"])
    assert Path(caught[0].filename).name == "test_peft.py"


@pytest.mark.parametrize(
    "base_names",
    [
        [],
        ["/local/copy/Llama-2-7b-hf/"],
        ["org/chat", "Meta-Llama/llama-2-7B-HF"],
        ["org/chat", "org/base", "llama-2-7b-hf"],
    ],
)
def test_the_same_base_elsewhere_is_no_warning(tmp_path, base_names):
    write_peft(tmp_path, base_model_name_or_path="meta-llama/Llama-2-7b-hf")
    read(tmp_path, base_names=base_names)  # warnings are errors here


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
    a_page, b_page = in_pools(read(tmp_path), "qkv", 0)
    np.testing.assert_array_equal(a_page[0, 0, :4], a)
    np.testing.assert_array_equal(b_page[0, :4, :32], b.T)


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


@pytest.mark.parametrize(
    ("pair", "got"),
    [
        (None, "None"),
        (np.ones((2, 4)), "array("),
        ((np.ones((4, 2)),), "(array("),
        (np.ones((3, 4, 2)), "array("),
        ((np.ones(4), np.ones((8, 4))), "A of shape [4] and B of [8, 4]"),
        ((np.ones((4, 2)), None), "A of shape [4, 2] and B of []"),
        ({"A": 1, "B": 2}, "{'A': 1, 'B': 2}"),
    ],
)
def test_arrays_that_are_no_pair(pair, got):
    with pytest.raises(AdapterError) as caught:
        make_adapter(CONFIG, {(1, Q): pair}, dtype=np.float32)
    d_in, (d_out, *_) = CONFIG.d_in("qkv"), CONFIG.d_outs("qkv")
    assert str(caught.value).startswith(
        f"model.layers.1.{Q} must have a pair of arrays, A [rank, {d_in}] and B "
        f"[{d_out}, rank], got {got}"
    )


@pytest.mark.parametrize("odd", ["complex64", "int8", "bool", "object", "<U3"])
def test_arrays_of_a_dtype_that_no_file_may_have(odd):
    a, b = (np.ones(shape, np.float32) for shape in ((4, 32), (32, 4)))
    with pytest.raises(AdapterError) as caught:
        make_adapter(CONFIG, {(1, Q): (a, b.astype(odd))}, dtype=np.float32)
    assert str(caught.value) == (
        f"model.layers.1.{Q}: weights must be of dtype F16, BF16, F32, F64, got "
        f"float32 and {np.dtype(odd)}"
    )


def test_arrays_of_a_module_that_is_none():
    with pytest.raises(AdapterError) as caught:
        make_adapter(CONFIG, {(1, "z_proj"): (1, 2)}, dtype=np.float32)
    assert str(caught.value) == (
        "the base model has no module (1, 'z_proj'); a module is (layer, name) or a "
        f"path such as 'model.layers.0.{Q}', with layers 0 to {CONFIG.num_layers - 1} "
        "and q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )


def test_a_file_that_shrinks_or_is_closed_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(1000, dtype=np.float32)}, path)
    target = {"x": [np.zeros(1000, np.float32)]}
    with open_safetensors(path) as file:
        file.read_into(target)
        os.truncate(path, 2000)
        with pytest.raises(SafetensorsFileError, match=r"2000 bytes.*become shorter"):
            file.read_into(target)
    file.close()  # twice closes nobody else's file
    with pytest.raises(SafetensorsFileError, match=r"x\.safetensors: cannot be read"):
        file.read_into(target)
    np.testing.assert_array_equal(target["x"][0][:100], np.arange(100))
