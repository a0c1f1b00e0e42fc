"""Which group a kernel's time belongs to, and where the gaps are."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import timeline, where
from benchmarks.timeline import Event, busy_ns, self_times_ns, sources


def event(name, start_ns, duration_ns, line="Stream #1"):
    return Event(name=name, line=line, start_ns=start_ns, duration_ns=duration_ns)


def test_what_runs_beside_or_inside_another_counts_once():
    events = [
        event("loop", 0, 100),
        event("inner", 10, 30),
        event("innermost", 20, 5),
        event("beside", 90, 30, line="Stream #2"),
        event("later", 150, 10),
    ]
    assert self_times_ns(events) == [70, 25, 5, 30, 10]
    assert busy_ns(events) == 130
    assert busy_ns([]) == 0


@pytest.mark.parametrize(
    ("name", "functions", "group"),
    [
        ("lora_shrink", (), "shrink"),
        ("lora_project", (), "base products, with shrink"),
        ("lora_project_gated", (), "base products, with what follows"),
        ("lora_project_rotary", (), "base products, with what follows"),
        ("lora_expand", (), "expand"),
        ("lora_rotary_expand", (), "rotary and cache writes, with expand"),
        ("paged_attention_decode", (), "attention"),
        ("paged_attention_decode_rotary", (), "attention, with what is before it"),
        ("segment_metadata", (), "segments"),
        ("nvjet_tst_64x8_64x16_1x4_h_bz_TNT", (), "base products"),
        ("gemm_fusion_dot_3", (), "base products"),
        ("fusion_7", ("matmul_rows", "LoraLinear.__call__"), "base products"),
        ("fusion_8", ("RMSNorm.__call__", "DecoderLayer.heads"), "norms and rotary"),
        ("fusion_8", ("lora_normed", "DecoderLayer._after"), "norms and rotary"),
        ("fusion_9", ("rotate", "DecoderLayer.heads"), "norms and rotary"),
        ("fusion", ("_store", "CachedAttention._store"), "cache writes"),
        ("fusion", ("CachedAttention._store",), "cache writes"),
        ("fusion", ("most_likely", "run_step"), "sampling"),
        ("fusion", ("sample.<locals>.draw", "run_step"), "sampling"),
        ("fusion", ("_attend", "paged_attention", "run_step"), "attention"),
        ("fusion", ("_einsum", "expand", "lora"), "expand"),
        ("fusion", ("one_pass", "segment_metadata", "run_step"), "segments"),
        ("fusion", ("DecoderLayer.heads", "Llama.attended"), where.OTHER),
        ("memcpy", (), where.OTHER),
    ],
)
def test_groups(name, functions, group):
    assert where.group_of(name, [functions]) == group


def test_a_product_with_a_norm_fused_to_it_is_a_product():
    norm, product = ("RMSNorm.__call__",), ("matmul_rows", "LoraLinear.__call__")
    assert where.group_of("fusion", [norm, product]) == "base products"


def test_the_first_step_is_parted_from_the_others():
    steps = [
        event(name, start_ns, 2)
        for number in range(3)
        for name, start_ns in (("a", 10 * number), ("b", 10 * number + 4))
    ]
    once = event("memcpy", 21, 1)
    others, start_ns = where.without_first([*steps[:5], once, steps[5]], 3)
    assert others == [*steps[2:5], once, steps[5]] and start_ns == 6
    assert where.without_first([once], 3) == ([once], None)


def test_summary_adds_up():
    steps = [
        event("lora_shrink", 0, 10_000),
        event("fusion.3", 10_000, 20_000),
        event("nvjet_a", 15_000, 25_000, line="Stream #2"),
        event("mystery", 45_000, 5_000),
    ]
    again = [event(e.name, e.start_ns + 50_000, e.duration_ns, e.line) for e in steps]
    by_operation = {"fusion_3": [("rotate",)]}
    groups, kernels = where.summarise([*steps, *again], by_operation, 2)
    figures = {row["group"]: row for row in groups}
    assert set(figures) == set(where.GROUPS)
    us = {name: row["us"] for name, row in figures.items() if row["us"]}
    assert us == {
        "shrink": 10,
        "base products": 25,
        "norms and rotary": 20,
        where.OTHER: 5,
        "gaps": 5,
    }
    assert figures["shrink"]["launches"] == 1
    assert figures["gaps"]["step_us"] == 50
    assert figures["gaps"]["share"] == pytest.approx(0.1)
    assert [row["kernel"] for row in kernels][:2] == ["nvjet_a", "fusion.3"]
    assert where.summarise([], {}, 2) == ([], [])


def innermost(x):
    return jnp.tanh(x) * 2


def outer(x):
    return innermost(x @ x) + 1


def test_sources_are_read_from_a_compiled_program():
    compiled = jax.jit(outer).lower(jnp.ones((8, 8))).compile()
    found = sources(compiled.as_text())
    stacks = {stack for stacks in found.values() for stack in stacks}
    name = "test_sources_are_read_from_a_compiled_program"
    assert ("innermost", "outer", name) in {stack[:3] for stack in stacks}
    assert ("outer", name) in {stack[:2] for stack in stacks}
    assert all("." not in key for key in found)


def test_an_operation_without_a_source_has_its_operands():
    text = """HloModule jit_f

FunctionNames
1 "main"
2 "rotate"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused_computation (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %neg.1 = f32[2]{0} negate(%p), metadata={op_name="neg" stack_frame_id=2}
}

ENTRY %main.1 (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %fusion.1 = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused_computation
  ROOT %dot.1 = f32[2]{0} dot(%fusion.1, %fusion.1), lhs_contracting_dims={0}
}
"""
    stack = ("rotate", "main")
    assert sources(text)["fusion_1"] == [stack]
    assert sources(text)["dot_1"] == [stack, stack]


def test_operations_are_recorded_where_there_is_no_gpu():
    step = jax.jit(outer)
    x = jnp.ones((64, 64))
    run = functools.partial(step, x)
    jax.block_until_ready(run())
    events = timeline.record(run)
    assert events and all(event.duration_ns >= 0 for event in events)
    known = sources(step.lower(x).compile().as_text())
    assert {timeline.kernel_key(event.name) for event in events} <= set(known)
    assert timeline.kernel_times(run).keys() == {event.name for event in events}
