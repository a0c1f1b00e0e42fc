"""The device-side home of the loaded adapters: rank pages of all layers and groups.

Functions here are pure: they take the pools and return the pools. Knows nothing of
adapter files and names, nor of which slots and pages are free: that bookkeeping is the
host's (`punica_jax.adapters`), and so is jitting with the pools donated.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from punica_jax.models._config import MODULE_GROUPS, LlamaConfig
from punica_jax.models._rank_page import PageShape, RankPage
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool, require_count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupPools:
    """The adapters of one module group in every layer, in rank pages.

    A page number means the same page in every layer, so one table serves them all;
    the counts differ, for an adapter may leave a module of some layer alone. One array
    holds all layers, one after the other; see `LoraPool`.

    Attributes:
      a: `[layers * pages, C, 16, d_in]`.
      b: `[layers * pages, 16, d_out_total]`, times the adapter's scale.
      page_table: `i32[slots, max_pages]`, -1 past a slot's pages.
      num_pages: `i32[layers * slots, C]`.
      d_outs: width of each of the `C` modules' outputs (static).
    """

    a: Array
    b: Array
    page_table: Array
    num_pages: Array
    d_outs: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        d_in: int,
        d_outs: tuple[int, ...],
        *,
        num_layers: int,
        num_slots: int,
        num_pages: int,
        max_rank: int,
        dtype: Any,
    ) -> "GroupPools":
        """Make empty pools; see `LoraPools.zeros` for the arguments."""
        modules, pages = len(d_outs), num_layers * num_pages
        return cls(
            a=jnp.zeros((pages, modules, RANK_PAGE, d_in), dtype),
            b=jnp.zeros((pages, RANK_PAGE, sum(d_outs)), dtype),
            page_table=jnp.full((num_slots, -(-max_rank // RANK_PAGE)), -1, jnp.int32),
            num_pages=jnp.zeros((num_layers * num_slots, modules), jnp.int32),
            d_outs=d_outs,
        )

    @property
    def num_layers(self) -> int:
        return self.num_pages.shape[0] // self.page_table.shape[0]

    @property
    def page_shape(self) -> PageShape:
        return PageShape(self.num_layers, self.a.shape[-1], self.d_outs)

    @property
    def pages_per_layer(self) -> int:
        return self.a.shape[0] // self.num_layers

    def layer(self, index: int) -> LoraPool:
        """Return one layer's view: the same arrays, nothing is copied."""
        assert 0 <= index < self.num_layers, (index, self.num_layers)
        return LoraPool(
            a=self.a,
            b=self.b,
            page_table=self.page_table,
            num_pages=self.num_pages,
            d_outs=self.d_outs,
            layer=None if self.num_layers == 1 else jnp.full(1, index, jnp.int32),
        )


class LayerPools(NamedTuple):
    """One decoder layer's pool for each of its module groups."""

    qkv: LoraPool
    o: LoraPool
    gate_up: LoraPool
    down: LoraPool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraPools:
    """All loaded adapters of one model: one `GroupPools` for each module group."""

    qkv: GroupPools
    o: GroupPools
    gate_up: GroupPools
    down: GroupPools

    @classmethod
    def zeros(
        cls,
        config: LlamaConfig,
        *,
        num_slots: int,
        num_pages: int,
        max_rank: int,
        dtype: Any = jnp.float32,
    ) -> "LoraPools":
        """Make pools that hold no adapter.

        Args:
          config: the base model's; gives the layers and the widths.
          num_slots: adapters that can be loaded at one time.
          num_pages: rank pages of each module group, for all slots together.
          max_rank: greatest rank of an adapter; rounded up to whole pages of 16.
          dtype: of the adapters' weights.

        Raises:
          ValueError: a number is no integer of at least 1.
        """
        sizes = {"num_slots": num_slots, "num_pages": num_pages, "max_rank": max_rank}
        for name, value in sizes.items():
            require_count(name, value)
        groups = {
            group: GroupPools.zeros(
                config.d_in(group),
                config.d_outs(group),
                num_layers=config.num_layers,
                dtype=dtype,
                **sizes,
            )
            for group in MODULE_GROUPS
        }
        return cls(**groups)

    def group(self, name: str) -> GroupPools:
        """Return the pools of the module group of that name."""
        assert name in MODULE_GROUPS, name
        return getattr(self, name)

    def layer(self, index: int) -> LayerPools:
        """Return what decoder layer `index` needs."""
        return LayerPools(*(self.group(g).layer(index) for g in LayerPools._fields))

    @property
    def tables(self) -> "PoolTables":
        """What says whose pages are whose: no weights."""
        groups = {group: self.group(group) for group in MODULE_GROUPS}
        return {name: (one.page_table, one.num_pages) for name, one in groups.items()}

    def replace_tables(self, tables: "PoolTables") -> "LoraPools":
        """Return the same weights under other tables."""
        groups = {
            group: dataclasses.replace(
                self.group(group), page_table=page_table, num_pages=num_pages
            )
            for group, (page_table, num_pages) in tables.items()
        }
        return dataclasses.replace(self, **groups)

    @property
    def num_layers(self) -> int:
        return self.qkv.num_layers

    @property
    def num_slots(self) -> int:
        return self.qkv.page_table.shape[0]

    @property
    def max_pages(self) -> int:
        """Most rank pages that one adapter can use in a group."""
        return self.qkv.page_table.shape[1]

    @property
    def max_rank(self) -> int:
        """Greatest rank that the tables have room for, a multiple of 16."""
        return self.max_pages * RANK_PAGE

    @property
    def num_pages(self) -> int:
        """Rank pages of each module group."""
        return self.qkv.pages_per_layer

    @property
    def dtype(self) -> Any:
        return self.qkv.a.dtype


SlotTables = dict[str, tuple[Any, Any]]
# Group -> its page table, and how many pages each layer's slots' modules use.
PoolTables = dict[str, tuple[Array, Array]]


def slot_tables(
    pools: LoraPools,
    pages: Mapping[str, Sequence[int]] | None = None,
    counts: Mapping[str, np.ndarray] | None = None,
) -> SlotTables:
    """Lay out what `set_slot` writes, on the host.

    Args:
      pools: gives the shapes; no array of it is read.
      pages: group -> the adapter's pages in rank order; None unloads the slot.
      counts: group -> `i32[layers, C]`, the pages that each module uses, at most
        `len(pages[group])`; given where `pages` is.

    Returns:
      group -> (`page_row i32[max_pages]`, `counts i32[layers, C]`), every group.
    """
    assert (pages is None) == (counts is None)
    tables: SlotTables = {}
    for group in MODULE_GROUPS:
        num_modules = len(pools.group(group).d_outs)
        row = np.full(pools.max_pages, -1, np.int32)
        used = np.zeros((pools.num_layers, num_modules), np.int32)
        if pages is not None and counts is not None:
            row[: len(pages[group])] = pages[group]
            used[:] = counts[group]
            assert used.max() <= len(pages[group]), (group, used.max(), pages[group])
        tables[group] = (row, used)
    return tables


def write_page(
    pools: LoraPools,
    group: str,
    page: Int[ArrayLike, ""],
    a_page: Float[Array | np.ndarray, "layers C lanes d_in"],
    b_page: Float[Array | np.ndarray, "layers d_out_total lanes"],
    scale: Float[Array | np.ndarray, "layers C"],
) -> tuple[LoraPools, Bool[Array, ""]]:
    """Write one rank page of one module group, in every layer.

    Nothing becomes visible by it: rows read a page only through a slot's table. So an
    adapter is loaded by writing its pages, looking at their flags, then `set_slot`.

    Args:
      pools: the pools; donate them, and the page is written in place.
      group: the module group's name (static).
      page: which page, 0 to `num_pages - 1`. Whoever hands out pages keeps the range:
        like `lax.dynamic_update_slice`, this clamps.
      a_page: the page's A, in the pools' dtype; zeros in unused lanes and modules.
      b_page: the page's B, as files have it, in the pools' dtype; zeros likewise.
      scale: what multiplies each module's B: in float32, rounded once after it.

    Returns:
      The pools, and whether all values are finite as they lie in them.
    """
    own, rank_page = pools.group(group), RankPage(a_page, b_page, scale)
    (a, b), finite = write_weights((own.a, own.b), page, rank_page, own.d_outs)
    written = dataclasses.replace(own, a=a, b=b)
    return dataclasses.replace(pools, **{group: written}), finite


def write_weights(
    weights: tuple[Array, Array],
    page: Int[ArrayLike, ""],
    rank_page: RankPage,
    d_outs: tuple[int, ...],
) -> tuple[tuple[Array, Array], Bool[Array, ""]]:
    """Do what `write_page` does, with the A and B of that group's pools alone.

    A launch costs the host time for every array that goes through it.
    """
    a, b = weights
    a_page, b_page, scale = map(jnp.asarray, rank_page)
    layers, d_out_total, lanes = b_page.shape
    assert a_page.shape == (layers, *a.shape[1:]), a_page.shape
    assert b.shape[1:] == (lanes, d_out_total), b_page.shape
    assert a_page.dtype == b_page.dtype == b.dtype, (a_page.dtype, b_page.dtype)
    scales = jnp.concatenate(
        [
            jnp.broadcast_to(scale[:, i : i + 1], (layers, d_out))
            for i, d_out in enumerate(d_outs)
        ],
        axis=1,
    )
    scaled = b_page.astype(jnp.float32) * scales[:, :, None]
    b_page = scaled.astype(b.dtype).transpose(0, 2, 1)
    is_finite = _all_finite(a_page) & _all_finite(b_page)
    return (_put(a, a_page, page), _put(b, b_page, page)), is_finite


def _put(array: Array, rows: Array | np.ndarray, index: Int[ArrayLike, ""]) -> Array:
    """Write `rows[i]` to row `index` of layer `i`, clamped to the layer's."""
    per_layer = array.shape[0] // len(rows)
    # A scatter: XLA's CPU copies the whole array to update a slice of it by layers.
    first = jnp.arange(len(rows), dtype=jnp.int32) * per_layer
    at = array.at[first + jnp.clip(index, 0, per_layer - 1)]
    return at.set(
        rows,
        indices_are_sorted=True,
        unique_indices=True,
        mode="promise_in_bounds",
    )


def _all_finite(values: Array) -> Bool[Array, ""]:
    # By the bits: XLA may leave out a rounding that only a float's value depends on.
    infinity = np.array(np.inf, values.dtype).view(f"u{values.dtype.itemsize}")
    bits = lax.bitcast_convert_type(values, infinity.dtype)
    return ((bits & infinity) != infinity).all()


def set_slot(
    pools: LoraPools,
    slot: Int[ArrayLike, ""],
    tables: Mapping[str, tuple[Array | np.ndarray, Array | np.ndarray]],
) -> LoraPools:
    """Point a slot at its pages, in every group at once; counts of 0 unload it.

    Args:
      pools: the pools; donate them, and the tables are written in place.
      slot: which slot, 0 to `num_slots - 1`.
      tables: of every group, as `slot_tables` lays them out.

    Returns:
      The pools, in which rows of that slot see the new adapter, whole.
    """
    return pools.replace_tables(put_slot(pools.tables, slot, tables))


def put_slot(
    shown: PoolTables,
    slot: Int[ArrayLike, ""],
    tables: Mapping[str, tuple[Array | np.ndarray, Array | np.ndarray]],
) -> PoolTables:
    """Do what `set_slot` does, with the tables alone; see `write_weights`."""
    assert tables.keys() == MODULE_GROUPS.keys(), sorted(tables)
    put = lax.dynamic_update_index_in_dim
    return {
        group: (
            put(shown[group][0], page_row, slot, 0),
            _put(shown[group][1], counts, slot),
        )
        for group, (page_row, counts) in tables.items()
    }
