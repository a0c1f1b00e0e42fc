"""What the tests of the benchmarks share: a model small enough to compile at once."""

from benchmarks.decode_rivals import adapt
from punica_jax.bench_model import BenchModel, make_config
from punica_jax.pallas_kernels.shapes import ModelShape

TINY = ModelShape(
    name="tiny",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
)


def make_tiny_bench(rows: int) -> BenchModel:
    return BenchModel(
        make_config(TINY),
        max_rows=rows,
        max_context=64,
        ranks=[16] * rows,
        max_rank=32,
        adapt=adapt,
    )
