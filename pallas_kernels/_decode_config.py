"""How decode attention is cut into programs.

Knows shapes, and what memory a device has; nothing of what programs do.
"""

import dataclasses

import jax
from jax import Array
from jax.experimental import pallas as pl

from punica_jax.pallas_kernels._dispatch import multiprocessors, shared_bytes
from punica_jax.pallas_kernels._kv_tile import padded

# Programs that run at once: two for each of 132 multiprocessors, in powers of two.
AT_ONCE = 256
# Of shared memory, for two programs a multiprocessor, each with three blocks on their
# way and one in use; or for one with twice as long blocks.
ROOMY_BYTES = 200 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the decode form cuts its work.

    Attributes:
      block_kv: tokens an iteration, a power of two, at least 16.
      splits: parts that each sequence's tokens are cut into, a power of two.
      num_warps: warps of a program.
      num_stages: iterations whose loads overlap.
      totals_late: whether a row's weights are added up after the last iteration, not
        in each.
    """

    block_kv: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3
    totals_late: bool = False

    def __post_init__(self):
        for name, least in (("block_kv", 16), ("splits", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(
                    f"{name} must be a power of two, at least {least}, got {value}"
                )


def default_config(
    *,
    seqs: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    itemsize: int,
    max_kv_len: int,
) -> DecodeConfig:
    """Choose a configuration; a function of static things alone."""
    # At most 16 KiB of K and as much of V an iteration.
    block_kv = max(16, min(64, 16384 // (padded(head_dim) * itemsize)))
    programs = seqs * kv_heads
    # More rows, or float32, would spill with fewer warps or totals for each token.
    narrow = group <= 16 and itemsize == 2
    roomy = shared_bytes() >= ROOMY_BYTES
    # One program a multiprocessor with blocks as long as two programs' beats two splits
    # and the launch that adds them: 16 sequences of 512 tokens and 8 kv heads take 11.7
    # us, not 13.2, of 2000 33.6, not 36.0 (H200).
    one_each = AT_ONCE // 2 <= programs <= multiprocessors()
    if narrow and group > 1 and roomy and one_each:
        return DecodeConfig(block_kv=2 * block_kv, splits=1, totals_late=True)

    splits = _num_splits(programs, pl.cdiv(max_kv_len, block_kv))
    if splits > 1:
        # With two or four splits four warps are faster: 8 sequences of 512 tokens and 8
        # kv heads take 10.7 us, not 11.2 (H100). With more they were not measured.
        num_warps = 2 if narrow and group > 1 and splits > 4 else 4
        return DecodeConfig(block_kv=block_kv, splits=splits, num_warps=num_warps)
    # Where all programs run at once, the one with most tokens decides. It is fastest
    # with two warps, which wait less for each other, and without a sum over tokens in
    # each iteration: with contexts of the paper's trace 32 sequences with 8 kv heads
    # take 33.3 us, not 36.0, of 512 tokens 19.2, not 19.3 (H200).
    two_warps = narrow and (group > 1 or programs <= AT_ONCE)
    # Twice as many wait less for memory with three blocks on their way: 64 such take
    # 44.6 us, not 47.0, of 640 tokens 45.1, not 46.6; 16 with 32 kv heads, four warps,
    # 51.2, not 53.5, of 512 tokens 36.2, not 37.7. Four times as many do not.
    deep = narrow and roomy and AT_ONCE < programs <= 2 * AT_ONCE
    return DecodeConfig(
        block_kv=block_kv,
        splits=1,
        num_warps=2 if two_warps else 4,
        num_stages=4 if deep else 3,
        totals_late=two_warps or deep,
    )


def _num_splits(programs: int, blocks: int) -> int:
    # Where there are as many programs as run at once, a second launch that sums the
    # splits only costs: 22.1 us became 28.
    splits = 1
    while programs * splits < AT_ONCE and splits < min(blocks, 32):
        splits *= 2
    return splits


def config_of(
    q: jax.ShapeDtypeStruct | Array,
    kv_pages: jax.ShapeDtypeStruct | Array,
    page_table: jax.ShapeDtypeStruct | Array,
) -> DecodeConfig:
    """Choose a configuration for operands, of which only shapes and dtypes count."""
    _, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = kv_pages.shape
    seqs, pages_per_seq = page_table.shape
    return default_config(
        seqs=seqs,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        itemsize=kv_pages.dtype.itemsize,
        max_kv_len=pages_per_seq * page_size,
    )
