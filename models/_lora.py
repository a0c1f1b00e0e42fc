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
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupPools:
    """The adapters of one module group in every layer, in rank pages.

    A page number means the same page in every layer, so one table serves them all;
    the counts differ, for an adapter may leave a module of some layer alone.

    Attributes:
      a: per layer `[pages, C, 16, d_in]`.
      b: per layer `[pages, 16, d_out_total]`, times the adapter's scale.
      page_table: `i32[slots, max_pages]`.
      num_pages: per layer `i32[slots, C]`.
      d_outs: width of each of the `C` modules' outputs (static).
    """

    a: tuple[Array, ...]
    b: tuple[Array, ...]
    page_table: Array
    num_pages: tuple[Array, ...]
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
        layers, modules = range(num_layers), len(d_outs)
        return cls(
            a=tuple(
                jnp.zeros((num_pages, modules, RANK_PAGE, d_in), dtype) for _ in layers
            ),
            b=tuple(
                jnp.zeros((num_pages, RANK_PAGE, sum(d_outs)), dtype) for _ in layers
            ),
            page_table=jnp.zeros((num_slots, -(-max_rank // RANK_PAGE)), jnp.int32),
            num_pages=tuple(jnp.zeros((num_slots, modules), jnp.int32) for _ in layers),
            d_outs=d_outs,
        )

    def layer(self, index: int) -> LoraPool:
        """Return one layer's view: the same arrays, nothing is copied."""
        return LoraPool(
            a=self.a[index],
            b=self.b[index],
            page_table=self.page_table,
            num_pages=self.num_pages[index],
            d_outs=self.d_outs,
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
          ValueError: a number is not positive.
        """
        sizes = {"num_slots": num_slots, "num_pages": num_pages, "max_rank": max_rank}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
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
        return len(self.qkv.a)

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
        return self.qkv.a[0].shape[0]

    @property
    def dtype(self) -> Any:
        return self.qkv.a[0].dtype


SlotTables = dict[str, tuple[Any, Any]]
# Group -> its page table, and per layer how many pages each slot's modules use.
PoolTables = dict[str, tuple[Array, tuple[Array, ...]]]


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
        row = np.zeros(pools.max_pages, np.int32)
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
    b_page: Float[Array | np.ndarray, "layers lanes d_out_total"],
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
      b_page: the page's B, times the adapter's scale, in the pools' dtype.

    Returns:
      The pools, and whether all the page's values are finite.
    """
    written, finite = write_group_page(pools.group(group), page, a_page, b_page)
    return dataclasses.replace(pools, **{group: written}), finite


def write_group_page(
    pools: GroupPools,
    page: Int[ArrayLike, ""],
    a_page: Float[Array | np.ndarray, "layers C lanes d_in"],
    b_page: Float[Array | np.ndarray, "layers lanes d_out_total"],
) -> tuple[GroupPools, Bool[Array, ""]]:
    """Do what `write_page` does, with the pools of that group alone.

    A launch costs the host time for every array that goes through it: a fourth of them
    is a fourth of the time.
    """
    layers, dtype = len(pools.a), pools.a[0].dtype
    assert a_page.shape == (layers, *pools.a[0].shape[1:]), a_page.shape
    assert b_page.shape == (layers, *pools.b[0].shape[1:]), b_page.shape
    assert a_page.dtype == b_page.dtype == dtype, (a_page.dtype, b_page.dtype)
    put = lax.dynamic_update_index_in_dim
    written = dataclasses.replace(
        pools,
        a=tuple(put(a, a_page[i], page, 0) for i, a in enumerate(pools.a)),
        b=tuple(put(b, b_page[i], page, 0) for i, b in enumerate(pools.b)),
    )
    return written, jnp.isfinite(a_page).all() & jnp.isfinite(b_page).all()


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
    """Do what `set_slot` does, with the tables alone; see `write_group_page`."""
    assert tables.keys() == MODULE_GROUPS.keys(), sorted(tables)
    put = lax.dynamic_update_index_in_dim
    return {
        group: (
            put(shown[group][0], page_row, slot, 0),
            tuple(
                put(used, counts[i], slot, 0) for i, used in enumerate(shown[group][1])
            ),
        )
        for group, (page_row, counts) in tables.items()
    }
