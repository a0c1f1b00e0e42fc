"""What a tile's program needs is on its way before it multiplies.

A change of layout, of which each product makes some, is behind a barrier that no later
load passes.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from punica_jax.pallas_kernels import LoraPool, _pair, segment_metadata
from punica_jax.pallas_kernels._expand import expand
from punica_jax.pallas_kernels._fused import Shrunk, gated_expand, rotary_expand
from punica_jax.pallas_kernels._shrink import shrink

ROWS, WIDTH, HEAD = 96, 256, 64
_LOADS = {"get", "masked_load"}


def straight_lines(jaxpr: core.Jaxpr):
    """Return the primitives of each branch that has a product and no loop."""
    found, own = [], []

    def walk(jaxpr: core.Jaxpr):
        for eqn in jaxpr.eqns:
            own.append(eqn.primitive.name)
            if eqn.primitive.name == "cond":
                for branch in eqn.params["branches"]:
                    found.extend(straight_lines(branch.jaxpr))
            elif eqn.primitive.name in ("pjit", "jit", "closed_call"):
                walk(eqn.params["jaxpr"].jaxpr)

    walk(jaxpr)
    if "dot_general" in own and not {"while", "scan"} & set(own):
        found.append(own)
    return found


def kernels(jaxpr: core.Jaxpr):
    """Yield a program's launches; each is within its refusal of derivatives."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        elif eqn.primitive.name == "custom_jvp_call":
            yield from kernels(eqn.params["call_jaxpr"].jaxpr)


def launch(form: str, max_pages: int):
    modules = {"lora": 1, "expand": 1, "gated": 2, "rotary": 3}[form]
    pool = LoraPool(
        a=jnp.zeros((8, modules, 16, 128), jnp.bfloat16),
        b=jnp.zeros((8, 16, modules * WIDTH), jnp.bfloat16),
        page_table=jnp.zeros((4, max_pages), jnp.int32),
        num_pages=jnp.ones((4, modules), jnp.int32),
        d_outs=(WIDTH,) * modules,
    )

    def run(x, y, slots):
        segments = segment_metadata(
            slots, num_slots=4, implementation="pallas_interpret"
        )
        if form == "lora":
            return _pair._launch(y, x, pool, segments, interpret=False)
        shrunk = Shrunk(shrink(x, pool, segments), pool, segments)
        if form == "rotary":
            table = jnp.zeros((ROWS, HEAD), jnp.bfloat16)
            kv_pages = jnp.zeros((2, ROWS, WIDTH // HEAD, 16, HEAD), jnp.bfloat16)
            return rotary_expand(y, shrunk, (table, table), kv_pages, slots, slots)
        if form == "gated":
            return gated_expand(y, shrunk)
        vector = jnp.ones((4, WIDTH), jnp.float32)
        options = {"scale": vector, "bias": vector, "residual": y}
        return expand(y, shrunk.v, pool, segments, **options)

    rows = 32 if form == "lora" else ROWS
    x = jnp.zeros((rows, 128), jnp.bfloat16)
    y = jnp.zeros((rows, modules * WIDTH), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(run)(x, y, jnp.zeros(rows, jnp.int32)).jaxpr
    *_, call = kernels(jaxpr)
    return call.params["jaxpr"]


@pytest.mark.parametrize("max_pages", [1, 4])
@pytest.mark.parametrize(
    ("form", "num_products"), [("expand", 1), ("gated", 2), ("rotary", 2)]
)
def test_all_loads_come_before_the_first_product(form, num_products, max_pages):
    lines = straight_lines(launch(form, max_pages))
    # Of a single page, and of few rows' expand of all that an adapter may have.
    assert len(lines) == (2 if form == "expand" and max_pages > 1 else 1)
    for line in lines:
        order = [name for name in line if name in {*_LOADS, "dot_general"}]
        assert order.count("dot_general") == num_products
        # Of y, v and B at least.
        assert len(order) >= num_products * 3 + 1
        first = order.index("dot_general")
        assert not _LOADS & set(order[first:])


def conditions(jaxpr: core.Jaxpr, sources):
    """Yield which refs each condition depends on, those of a branch after its own.

    Args:
      sources: which those are of each operand, as sets of numbers.
    """
    known = dict(zip(jaxpr.invars, sources, strict=True))

    def of(operands):
        own = (known.get(x) for x in operands if not isinstance(x, core.Literal))
        return frozenset().union(*filter(None, own))

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield of(eqn.invars[:1])
            for branch in eqn.params["branches"]:
                yield from conditions(branch.jaxpr, [of([x]) for x in eqn.invars[1:]])
        known |= dict.fromkeys(eqn.outvars, of(eqn.invars))


def test_conditions_wait_for_all_look_ups_of_a_kind():
    """Else a compiler moves those that one branch needs behind it, one more wait."""
    kernel = launch("lora", max_pages=4)
    *_, page_table, num_pages, _, _, slot, first, end = range(13)
    halves = [eqn for eqn in kernel.eqns if eqn.primitive.name == "cond"]
    assert len(halves) == 2
    numbers = {ref: frozenset([n]) for n, ref in enumerate(kernel.invars)}
    for half in halves:
        *_, branch = half.params["branches"]
        operands = [numbers.get(ref, frozenset()) for ref in half.invars[1:]]
        busy, *others = conditions(branch.jaxpr, operands)
        assert {slot, first, end} <= busy and page_table not in busy
        assert any({page_table, num_pages} <= own for own in others)


def paths(jaxpr: core.Jaxpr) -> set[tuple[str, ...]]:
    """Return what a program may do, in order: `wait`, load `v` or `other`, `dot`.

    Of each choice one branch; of a loop its body, but for one that waits.
    """
    found = {()}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "cond":
            several = [paths(branch.jaxpr) for branch in eqn.params["branches"]]
            own = set().union(*several)
        elif name == "while":
            own = paths(eqn.params["body_jaxpr"].jaxpr)
            own = {("wait",)} if own == {("atomic",)} else own
        elif name in ("scan", "pjit", "jit"):
            own = paths(eqn.params["jaxpr"].jaxpr)
        elif name == "masked_load" and eqn.outvars[0].aval.ndim > 1:
            is_v = eqn.outvars[0].aval.dtype == jnp.float32
            own = {("v" if is_v else "other",)}
        elif name in ("atomic_rmw", "dot_general"):
            own = {(name.partition("_")[0],)}
        else:
            continue
        found = {before + after for before in found for after in own}
    return found


@pytest.mark.parametrize("max_pages", [1, 4])
def test_v_is_loaded_after_it_was_waited_for(monkeypatch, max_pages):
    for least in ("_LEAST_PROGRAMS", "_LEAST_SMALL_PROGRAMS"):
        monkeypatch.setattr(_pair, least, 1)
    *_, expands = launch("lora", max_pages).eqns
    found = set().union(*(paths(own.jaxpr) for own in expands.params["branches"]))
    # Not of two conditions that never hold at once.
    found = {order for order in found if "v" in order and order.count("wait") == 1}
    first = set()
    for order in found:
        waited = order.index("wait")
        assert "v" not in order[:waited], order
        before = order[:waited].count("other")
        first.add(before)
        # All that a program of no crowd needs; else nothing.
        assert before in (0, order.count("other")), order
    assert len(first) == 2, found
