"""How a search for a limit is cut into launches and programs. Pure numbers."""

import dataclasses
import itertools

from punica_jax.pallas_kernels._digit_buckets import MAX_CHUNK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DigitConfig:
    """How a search is cut; a function of static things alone, never of the rows.

    Attributes:
      digits: bits of a key that each launch decides, the highest first, 32 in all. A
        digit of `n` bits sorts values into `2**n` buckets: more bits, fewer launches,
        but longer ones.
      chunk: values of a program, a power of two.
      num_warps: warps of a program.
      num_eager: how many launches read their values before they know whether they need
        them, and what they have in buckets is compared as it is. Few of the first can
        skip a chunk, and most of the others; and to those, as above a floor, hardly a
        lane has two values left (`folded`).
    """

    digits: tuple[int, ...]
    chunk: int = 2048
    num_warps: int = 4
    num_eager: int = 3

    def __post_init__(self):
        if not all(1 <= bits <= 6 for bits in self.digits) or sum(self.digits) != 32:
            raise ValueError(
                f"digits must be 1 to 6 bits each, 32 in all, got {self.digits}"
            )
        for name in ("chunk", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.chunk > MAX_CHUNK:
            raise ValueError(f"chunk must be at most {MAX_CHUNK}, got {self.chunk}")

    @property
    def shifts(self) -> tuple[int, ...]:
        """The place of each digit's lowest bit, from the highest digit on."""
        return tuple(32 - end for end in itertools.accumulate(self.digits))


# Counts are packed: a bucket more costs little, a launch 1.4 us at the least.
COUNTING = DigitConfig(digits=(4, 4, 4, 5, 5, 5, 5))
# A weight is compared with each bucket. Behind the first 13 bits (sign, exponent, four
# bits of mantissa) hardly a chunk has values left, and there is little to compare.
# (With 12 bits in those four launches 32 rows of 128k values took 4 % more, before
# chunks were folded.)
WEIGHING = DigitConfig(digits=(3, 3, 3, 4, 4, 5, 5, 5), num_eager=4)
