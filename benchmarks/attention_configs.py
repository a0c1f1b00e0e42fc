"""What `benchmarks.attention --sweep` tries: configurations that may be the fastest."""

from punica_jax.pallas_kernels._attention_prefill import PrefillConfig
from punica_jax.pallas_kernels._decode_config import DecodeConfig


def prefill_configs(group: int) -> list[PrefillConfig]:
    """Return those for prompts.

    Args:
      group: query heads a key-value head.
    """
    return [
        PrefillConfig(
            block_rows=tile_rows // group,
            block_kv=block_kv,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        for tile_rows, block_kv, num_warps, num_stages in (
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 128, 8, 2),
            (128, 32, 8, 3),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (64, 32, 4, 2),
            (64, 32, 4, 3),
            (64, 32, 4, 4),
        )
    ]


def decode_configs(programs: int, kv_len: int) -> list[DecodeConfig]:
    """Return those for sequences that decode.

    Args:
      programs: sequences times key-value heads.
      kv_len: tokens of a sequence.
    """
    # Fewer programs leave the device idle, more only add to what is combined.
    most = min(32, kv_len // 32)
    splits = [n for n in (1, 2, 4, 8, 16, 32) if n <= most]
    splits = [n for n in splits if 200 <= programs * n <= 2048] or [
        1 if programs > 2048 else most
    ]
    return [
        DecodeConfig(
            block_kv=block_kv,
            splits=num_splits,
            num_warps=num_warps,
            num_stages=num_stages,
            totals_late=totals_late,
        )
        for num_splits in splits
        for block_kv, num_warps, num_stages in (
            *((128, 4, 2), (128, 4, 3)),
            *((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3), (64, 2, 4)),
            *((32, 4, 2), (32, 4, 3), (32, 2, 3), (32, 1, 3)),
        )
        for totals_late in (False, True)
    ]
