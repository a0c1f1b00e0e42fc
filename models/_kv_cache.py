"""The paged key and value cache, and attention through it.

Knows pages and sequences of one batch; nothing of who owns a page, of requests or of
the model around it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from punica_jax.models._config import LlamaConfig
from punica_jax.models._layers import Unprojected
from punica_jax.pallas_kernels import lora_attention, paged_attention, require_count
from punica_jax.pallas_kernels.reference import store_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KvCache:
    """The keys and values of every layer, in pages of `page_size` tokens.

    A page number means the same page in every layer.

    Attributes:
      kv: per layer `[2, pages, kv_heads, page_size, head_dim]`, rotated keys, then
        values. In one array, for each donated one costs the host 7 us a launch.
    """

    kv: tuple[Array, ...]

    @classmethod
    def zeros(
        cls,
        config: LlamaConfig,
        num_pages: int,
        page_size: int,
        dtype: Any = jnp.float32,
    ) -> "KvCache":
        """Make an empty cache for a model.

        Args:
          config: the model's; gives the layers, heads and widths.
          num_pages: pages of each layer.
          page_size: tokens of a page.
          dtype: of the keys and values; the model's.

        Raises:
          ValueError: a number is no integer of at least 1.
        """
        for name, value in {"num_pages": num_pages, "page_size": page_size}.items():
            require_count(name, value)
        shape = (2, num_pages, config.num_kv_heads, page_size, config.head_dim)
        # Arrays of their own: a donated one must not be donated twice.
        return cls(tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)))

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.kv[0].shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.kv[0].shape[3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeqTable:
    """The sequences of a batch: where their rows and their pages are.

    Rows `bounds[s] .. bounds[s + 1]` are the last rows of sequence `s`, which has
    `kv_lens[s]` tokens, these included. Rows from `bounds[-1]` on are padding. A
    sequence without rows is idle.

    Attributes:
      page_table: `i32[seqs, pages_per_seq]`, the pages of each sequence in order;
        those beyond what `kv_lens` needs may hold any value.
      bounds: `i32[seqs + 1]`, not falling, from 0.
      kv_lens: `i32[seqs]`.
    """

    page_table: Array | np.ndarray
    bounds: Array | np.ndarray
    kv_lens: Array | np.ndarray

    @property
    def num_seqs(self) -> int:
        """Sequences that the table has room for."""
        return self.kv_lens.shape[0]

    def seq_of_row(self, rows: int) -> Int32[Array, "rows"]:
        """Return each row's sequence; `num_seqs` for padding rows."""
        row = jnp.arange(rows, dtype=jnp.int32)
        seq = jnp.searchsorted(self.bounds[1:], row, side="right", method="compare_all")
        return seq.astype(jnp.int32)

    def positions(self, rows: int) -> Int32[Array, "rows"]:
        """Return each row's place in its sequence, from 0; 0 for padding rows."""
        seq = self.seq_of_row(rows)
        # Of a row of sequence s: kv_lens[s] - bounds[s + 1] + row.
        shift = jnp.asarray(self.kv_lens - self.bounds[1:]).at[seq].get(mode="clip")
        row = jnp.arange(rows, dtype=jnp.int32)
        return jnp.where(seq < self.num_seqs, row + shift, 0)


class CachedAttention:
    """An `attend` that keeps keys and values in a cache.

    Lives as long as one trace: made inside the traced function (or the body of a
    loop), passed to the model, and `cache` read from it afterwards.
    """

    def __init__(
        self,
        cache: KvCache,
        table: SeqTable,
        rows: int,
        max_query_len: int,
        implementation: str | None = None,
    ):
        """Find where each row's key and value go.

        Args:
          cache: the cache before this step.
          table: the batch's sequences.
          rows: rows of the batch, padding included.
          max_query_len: most rows of one sequence; 1 is the decode form.
          implementation: see `punica_jax.pallas_kernels.resolve`.
        """
        self._kv = list(cache.kv)
        self._table = table
        self._max_query_len = max_query_len
        self._implementation = implementation
        positions = table.positions(rows)
        seq = table.seq_of_row(rows)
        page_table = jnp.asarray(table.page_table)
        page = page_table.at[seq, positions // cache.page_size].get(mode="clip")
        # Padding rows get pages past the end, each its own: their stores are dropped,
        # and the others may be promised to meet no page slot twice.
        row = jnp.arange(rows, dtype=jnp.int32)
        self._page = jnp.where(seq < table.num_seqs, page, cache.num_pages + row)
        self._offset = positions % cache.page_size

    @property
    def cache(self) -> KvCache:
        """The cache with the keys and values of the layers called so far."""
        return KvCache(tuple(self._kv))

    def __call__(
        self, layer_index: int, unprojected: Unprojected
    ) -> Float[Array, "rows heads head_dim"]:
        """Store the rows' keys and values, then attend to all of their sequences'."""
        out, self._kv[layer_index] = _store_and_attend(
            unprojected,
            self._kv[layer_index],
            self._table,
            (self._page, self._offset),
            max_query_len=self._max_query_len,
            implementation=self._implementation,
        )
        return out


# One function for all layers: see `_llama._after_attention`.
@functools.partial(jax.jit, static_argnames=("max_query_len", "implementation"))
def _store_and_attend(
    unprojected: Unprojected,
    kv_pages: Array,
    table: SeqTable,
    place: tuple[Array, Array],
    *,
    max_query_len: int,
    implementation: str | None,
) -> tuple[Array, Array]:
    """Return what the rows of one layer attend to, and the layer's pages."""
    sequences: tuple[Any, ...] = table.page_table, table.bounds, table.kv_lens
    options = {"max_query_len": max_query_len, "implementation": implementation}
    if unprojected.is_plain:
        arrays = unprojected.linear.arrays
        return lora_attention(
            unprojected.x,
            arrays["weight"],
            unprojected.rotary,
            kv_pages,
            *place,
            *sequences,
            lora=unprojected.lora,
            bias=arrays["bias"],
            **options,
        )
    q, k, v = unprojected.heads()
    kv_pages = store_rows(kv_pages, k, v, *place)
    return paged_attention(q, kv_pages, *sequences, **options), kv_pages
