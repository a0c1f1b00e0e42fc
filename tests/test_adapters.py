"""The bookkeeping of slots and rank pages."""

import ast
import re
from pathlib import Path

import pytest

import punica_jax.adapters
from punica_jax.adapters import AdapterTable
from punica_jax.models._peft import AdapterReport, ReportRow
from punica_jax.placements import (
    AdapterCapacityError,
    LoadedAdapter,
    UnknownAdapterError,
)

REPORT = AdapterReport(8, lambda _: [ReportRow(0, "self_attn.q_proj", 8, 2.0, 0.5)])
OTHER_REPORT = AdapterReport(4, lambda _: [ReportRow(1, "mlp.down_proj", 4, 1.0, 0.1)])


def table(num_slots=3, qkv=6, o=4, max_rank=64) -> AdapterTable:
    return AdapterTable(num_slots, {"qkv": qkv, "o": o}, max_rank)


def needs(qkv=1, o=0) -> dict[str, int]:
    return {"qkv": qkv, "o": o}


def load(adapters: AdapterTable, name: str, qkv=1, o=0, rank=16) -> LoadedAdapter:
    placement = adapters.allocate(name, needs(qkv, o), rank)
    adapters.publish(placement, REPORT)
    adapters.check_integrity()
    return adapters[name]


def state(adapters: AdapterTable):
    """Return all that the table knows, to compare it before and after."""
    free = {group: sorted(pages) for group, pages in adapters._free_pages.items()}
    return (
        dict(adapters._loaded),
        dict(adapters._pending),
        sorted(adapters._free_slots),
        free,
    )


def test_no_import_of_jax():
    tree = ast.parse(Path(punica_jax.adapters.__file__).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert not names & {"jax", "jaxlib", "flax", "jaxtyping"}, names


# --- the life of an adapter -----------------------------------------------------------


def test_load_use_free():
    adapters = table()
    assert len(adapters) == 0
    loaded = load(adapters, "x", qkv=2, o=1)
    assert loaded == LoadedAdapter("x", 0, {"qkv": (0, 1), "o": (0,)}, REPORT, 1)
    assert load(adapters, "y", qkv=1).pages == {"qkv": (2,), "o": ()}
    assert list(adapters) == ["x", "y"]
    assert adapters.slot_of("y") == 1
    assert adapters.slot_of(None) == -1
    assert adapters.num_free_slots == 1
    assert (adapters.num_free_pages("qkv"), adapters.num_free_pages("o")) == (3, 3)
    assert adapters.free("x") == loaded
    adapters.check_integrity()
    assert list(adapters) == ["y"]
    assert load(adapters, "z", qkv=4).pages["qkv"] == (0, 1, 3, 4)
    assert adapters.slot_of("z") == 0


def test_an_allocated_adapter_is_not_visible():
    adapters = table()
    adapters.allocate("x", needs(), 16)
    assert "x" not in adapters
    with pytest.raises(UnknownAdapterError):
        adapters.slot_of("x")
    adapters.check_integrity()


def test_cancel_gives_everything_back():
    adapters = table()
    before = state(adapters)
    adapters.cancel(adapters.allocate("x", needs(3, 2), 48))
    assert state(adapters) == before


def test_replacing_keeps_the_slot_and_takes_new_pages_first():
    adapters = table(num_slots=1)
    old = load(adapters, "x", qkv=2)
    placement = adapters.allocate("x", needs(3), 48)
    assert adapters["x"] == old
    assert placement.slot == old.slot
    assert placement.pages["qkv"] == (2, 3, 4)
    adapters.check_integrity()
    assert adapters.publish(placement, OTHER_REPORT) == old
    adapters.check_integrity()
    assert adapters["x"].pages["qkv"] == (2, 3, 4)
    assert adapters["x"].report is OTHER_REPORT
    assert adapters.num_free_pages("qkv") == 3


def test_a_replacement_that_fails_leaves_the_old_one():
    adapters = table()
    load(adapters, "x", qkv=2)
    before = state(adapters)
    adapters.cancel(adapters.allocate("x", needs(3), 48))
    assert state(adapters) == before


def test_publishing_a_new_name_replaces_nothing():
    adapters = table()
    assert adapters.publish(adapters.allocate("x", needs(), 16), REPORT) is None


def test_placements_end_once():
    adapters = table()
    placement = adapters.allocate("x", needs(), 16)
    adapters.cancel(placement)
    with pytest.raises(AssertionError):
        adapters.cancel(placement)
    with pytest.raises(AssertionError):
        adapters.publish(placement, REPORT)


def test_two_adapters_can_be_loading():
    adapters = table()
    first, second = (adapters.allocate(name, needs(2), 32) for name in "xy")
    adapters.publish(second, REPORT)
    adapters.cancel(first)
    adapters.check_integrity()
    assert list(adapters) == ["y"]
    assert adapters["y"].pages["qkv"] == (2, 3)


# --- refusals -------------------------------------------------------------------------


def refusal(adapters: AdapterTable, name: str, qkv=1, o=0, rank=16) -> str:
    """Return why an adapter cannot be allocated; nothing may change."""
    before = state(adapters)
    assert not adapters.can_allocate(name, needs(qkv, o), rank)
    with pytest.raises(AdapterCapacityError) as caught:
        adapters.allocate(name, needs(qkv, o), rank)
    assert state(adapters) == before
    return str(caught.value)


def test_rank_above_the_greatest():
    assert refusal(table(), "x", rank=65) == (
        "adapter 'x' does not fit: its rank is 65, above max_rank = 64; raise max_rank"
    )
    assert table().can_allocate("x", needs(4), 64)


def test_no_slot_left():
    adapters = table(num_slots=2)
    load(adapters, "x")
    load(adapters, "y")
    assert refusal(adapters, "z") == (
        "adapter 'z' does not fit: all 2 slots are taken; unload an adapter or raise "
        "num_slots; loaded are 'x', 'y'"
    )
    assert adapters.can_allocate("x", needs(), 16)


def test_no_pages_left():
    adapters = table()
    load(adapters, "x", qkv=4)
    assert refusal(adapters, "y", qkv=3) == (
        "adapter 'y' does not fit: it needs 3 rank pages of group qkv, of which 2 of 6 "
        "are free; unload an adapter or raise adapter_memory or num_slots; loaded are "
        "'x'"
    )
    assert refusal(adapters, "y", qkv=1, o=5) == (
        "adapter 'y' does not fit: it needs 5 rank pages of group o, of which there "
        "are 4; raise adapter_memory or num_slots"
    )


def test_no_pages_left_for_a_replacement():
    adapters = table()
    load(adapters, "x", qkv=4)
    assert refusal(adapters, "x", qkv=3) == (
        "adapter 'x' does not fit: it needs 3 rank pages of group qkv, of which 2 of 6 "
        "are free (the one it replaces stays until it is ready); unload an adapter or "
        "raise adapter_memory or num_slots; loaded are 'x'"
    )


def test_unknown_names_list_the_known_ones():
    adapters = table(num_slots=12, qkv=12)
    text = "no adapter named 'z' is loaded; none is loaded"
    with pytest.raises(UnknownAdapterError, match=re.escape(text)):
        adapters.free("z")
    for n in range(10):
        load(adapters, f"a{n}")
    with pytest.raises(UnknownAdapterError) as caught:
        adapters.slot_of("z")
    assert str(caught.value) == (
        "no adapter named 'z' is loaded; loaded are 'a0', 'a1', 'a2', 'a3', 'a4', "
        "'a5', 'a6', 'a7' and 2 more"
    )


def test_it_is_a_mapping():
    adapters = table()
    load(adapters, "x")
    assert adapters.get("z") is None
    assert "z" not in adapters
    with pytest.raises(KeyError):
        adapters["z"]
    with pytest.raises(ValueError):
        adapters["z"]
    assert dict(adapters) == {"x": adapters["x"]}
    with pytest.raises(TypeError):
        adapters["x"].pages["qkv"] = ()


def test_names_and_order_of_calls():
    adapters = table()
    with pytest.raises(ValueError, match="name must be a text, not empty, got ''"):
        adapters.allocate("", needs(), 16)
    load(adapters, "x")
    adapters.allocate("x", needs(), 16)
    before = state(adapters)
    with pytest.raises(ValueError, match="adapter 'x' is being loaded already"):
        adapters.allocate("x", needs(), 16)
    with pytest.raises(ValueError, match="'x' cannot be freed while it is being repl"):
        adapters.free("x")
    assert state(adapters) == before


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"max_rank": -1}, "max_rank must be at least 1, got -1"),
        ({"o": 0}, "num_pages['o'] must be at least 1, got 0"),
    ],
)
def test_sizes_must_be_positive(sizes, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        table(**sizes)


def test_integrity_is_really_checked():
    for break_it in (
        lambda t: t._free_slots.append(0),
        lambda t: t._free_slots.pop(),
        lambda t: t._free_pages["qkv"].append(0),
        lambda t: t._free_pages["o"].pop(),
        lambda t: t._loaded.clear(),
    ):
        adapters = table()
        load(adapters, "x", qkv=2)
        break_it(adapters)
        with pytest.raises(AssertionError):
            adapters.check_integrity()
