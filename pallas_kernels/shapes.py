"""The one list of named shapes that tests, benchmarks and tuning share.

Plain numbers; knows nothing of arrays or kernels.
"""

import dataclasses
import math
from typing import Literal, get_args

Popularity = Literal["distinct", "uniform", "skewed", "identical", "one-vs-rest"]
POPULARITIES: tuple[Popularity, ...] = get_args(Popularity)


def segment_sizes(popularity: Popularity, rows: int) -> list[int]:
    """Return how many rows each adapter gets (Punica, section 6).

    Args:
      popularity: `distinct`: an adapter each; `uniform`: ceil(sqrt(rows)) adapters,
        near-equal; `skewed`: zipf 1.5, sizes floor(1.5^k) while they fit, the
        remainder last; `identical`: one adapter; `one-vs-rest`: 1 and rows - 1.
    """
    match popularity:
        case "distinct":
            return [1] * rows
        case "uniform":
            count = math.ceil(math.sqrt(rows))
            return [rows // count + (i < rows % count) for i in range(count)]
        case "skewed":
            sizes: list[int] = []
            while (size := math.floor(1.5 ** len(sizes))) <= rows - sum(sizes):
                sizes.append(size)
            rest = rows - sum(sizes)
            return [*sizes, rest] if rest else sizes
        case "identical":
            return [rows]
        case "one-vs-rest":
            return [1, rows - 1] if rows > 1 else [1]
    raise ValueError(f"popularity must be one of {POPULARITIES}, got {popularity!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that its kernels see."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    rope_theta: float = 10000.0


LLAMA_2_7B = ModelShape(
    name="7B",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
)
LLAMA_3_1_8B = ModelShape(
    name="8B",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    rope_theta=500000.0,
)
MODEL_SHAPES = {shape.name: shape for shape in (LLAMA_2_7B, LLAMA_3_1_8B)}

# What the kernel tests cover in full (`pytest -m grid`).
TEST_ROWS = (1, 2, 3, 4, 7, 10, 16, 32, 64, 133)
TEST_RANKS = (1, 8, 16, 24, 32, 64, 96, 128)
TEST_DTYPES = ("float32", "bfloat16", "float16")
