"""Where adapters live on the device: pools of rank pages.

Knows one module group (the modules that share an input) of a layer, which may share
its arrays with other layers. Knows nothing of adapter files, names, or which pages are
free.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from punica_jax.pallas_kernels._operands import as_array

# One page holds this many consecutive ranks: the least that a tensor-core product
# takes, so a finer page would save memory but no time.
RANK_PAGE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraPool:
    """The adapters of one module group of one layer, in rank pages.

    Rank `16 p + i` of slot `s` lives in lane `i` of page `page_table[s, p]`, for all
    `C` modules of the group. Module `c` of slot `s` uses its first `num_pages[s, c]`
    pages; what lies beyond may be read, but is never added. Lanes past the true rank
    are zeros.

    The arrays may hold the pages of several layers, one layer's after the other's, all
    under one page table: every array that a program takes costs the host 1.5 us a
    launch. `layer` says whose they are here.

    Attributes:
      a: `[pages, C, 16, d_in]`, the A matrices as PEFT stores them.
      b: `[pages, 16, d_out_total]`, the transposed B matrices times the adapter's
        scale, the group's modules one after the other along `d_out_total`. (At rank 64
        the expand is a tenth faster than with the 16 ranks last, at rank 16 as fast,
        and the gradient is the same product with A and B in each other's place.)
      page_table: `i32[slots, max_pages]`; anything past a slot's pages, and best
        negative, which spares a few rows' kernels a read.
      num_pages: `i32[slots, C]`, 0 where the adapter leaves the module alone.
      d_outs: width of each of the `C` modules' outputs (static).
      layer: `i32[1]`, where `a`, `b` and `num_pages` hold several layers; else None.
    """

    a: Array
    b: Array
    page_table: Array
    num_pages: Array
    d_outs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    layer: Array | None = None

    @property
    def d_in(self) -> int:
        return self.a.shape[-1]

    @property
    def d_out(self) -> int:
        return sum(self.d_outs)

    @property
    def num_slots(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_modules(self) -> int:
        return len(self.d_outs)

    @property
    def num_layers(self) -> int:
        """Layers whose pages the arrays hold."""
        return self.num_pages.shape[0] // self.num_slots

    @property
    def layer_index(self) -> Array:
        """Which of them this is, `i32[1]`."""
        assert self.layer is not None or self.num_layers == 1, self.num_layers
        return jnp.zeros(1, jnp.int32) if self.layer is None else self.layer

    @property
    def tables(self) -> tuple[Array, Array, Array]:
        """What kernels look up pages in, in their order."""
        return self.page_table, self.num_pages, self.layer_index

    @property
    def pages_per_layer(self) -> int:
        return self.a.shape[0] // self.num_layers

    @property
    def first_page(self) -> Array:
        """Number of the layer's first page in the arrays, `i32[]`."""
        return self.layer_index[0] * self.pages_per_layer

    @property
    def layer_num_pages(self) -> Array:
        """The layer's `num_pages`, `i32[slots, C]`."""
        first = self.layer_index[0] * self.num_slots
        return lax.dynamic_slice_in_dim(self.num_pages, first, self.num_slots)

    @property
    def max_rank(self) -> int:
        return self.page_table.shape[1] * RANK_PAGE

    @property
    def dtype(self) -> Any:
        return self.a.dtype

    @property
    def d_out_offsets(self) -> tuple[int, ...]:
        """First column of each module in `d_out_total`."""
        return tuple(sum(self.d_outs[:c]) for c in range(len(self.d_outs)))


def pack_adapters(
    a: Float[Array, "slots rank d_in"],
    b: Float[Array, "slots d_out rank"],
    ranks: Int[Array, "slots"] | None = None,
) -> LoraPool:
    """Pack dense stacks of adapters into a pool of one module.

    The copy is differentiable: gradients with respect to the pool flow back to `a`
    and `b`.

    Args:
      a: A of every slot; rows past a slot's rank are ignored.
      b: B of every slot, already times its scale.
      ranks: true rank of every slot, 0 to `rank` (more counts as `rank`); None means
        `rank` for all.

    Returns:
      A `LoraPool` in which slot `s` owns pages `s * n .. (s + 1) * n`,
      `n = ceil(rank / 16)`.

    Raises:
      ValueError: the shapes or dtypes do not fit each other.
    """
    a, b = as_array("a", a), as_array("b", b)
    if a.ndim != 3 or b.ndim != 3 or a.shape[:2] != (b.shape[0], b.shape[2]):
        raise ValueError(
            "a must be [slots, rank, d_in] and b [slots, d_out, rank], "
            f"got a {a.shape} and b {b.shape}"
        )
    if a.dtype != b.dtype:
        raise ValueError(
            f"a and b must have one dtype, got {a.dtype} and {b.dtype}; cast them "
            "before the call"
        )
    slots, rank, d_in = a.shape
    d_out = b.shape[1]
    if ranks is not None:
        ranks = as_array("ranks", ranks)
        if ranks.shape != (slots,) or not jnp.issubdtype(ranks.dtype, jnp.integer):
            raise ValueError(
                f"ranks must be integers, one for each of {slots} slots, got "
                f"{ranks.dtype}{list(ranks.shape)}"
            )
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got a {a.shape}")
    pages = -(-rank // RANK_PAGE)
    pad = pages * RANK_PAGE - rank
    if ranks is not None:
        # Selected, not multiplied: what lies past a slot's rank may be NaN.
        used = jnp.arange(rank, dtype=ranks.dtype)[None, :] < ranks[:, None]
        a = jnp.where(used[:, :, None], a, jnp.zeros_like(a))
        b = jnp.where(used[:, None, :], b, jnp.zeros_like(b))
    a = jnp.pad(a, ((0, 0), (0, pad), (0, 0)))
    b = jnp.pad(b, ((0, 0), (0, 0), (0, pad)))
    b = b.swapaxes(1, 2)
    counts = (
        jnp.full((slots,), pages, jnp.int32)
        if ranks is None
        else -(-jnp.clip(ranks.astype(jnp.int32), 0, rank) // RANK_PAGE)
    )
    return LoraPool(
        a=a.reshape(slots * pages, 1, RANK_PAGE, d_in),
        b=b.reshape(slots * pages, RANK_PAGE, d_out),
        page_table=jnp.arange(slots * pages, dtype=jnp.int32).reshape(slots, pages),
        num_pages=counts[:, None],
        d_outs=(d_out,),
    )
