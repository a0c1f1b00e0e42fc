"""One sequence's rows in a step.

Plain numbers; knows nothing of where they come from.
"""

import array
from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """The rows that one sequence has in a step.

    Attributes:
      tokens: the rows' tokens, of type code "i"; any number stands for one that the
        seat keeps.
      kv_len: tokens of the sequence, these included.
      pages: its KV pages, in order, enough for `kv_len`.
      slot: its adapter's slot, -1 for none.
      seat: its seat, -1 for none.
      ends: whether the rows end with its newest token, so that a new one comes of them.
      is_kept: whether the last row is the token that its seat keeps on the device.
      draws: whether the new token is drawn by its seat; else it is the most likely one.
      wants_logprobs: whether its next token's log-probabilities are wanted.
      targets: the prompt's tokens after its first rows, one each, whose
        log-probabilities are wanted.
    """

    tokens: "array.array[int]"
    kv_len: int
    pages: Sequence[int]
    slot: int
    seat: int = -1
    ends: bool = True
    is_kept: bool = False
    draws: bool = False
    wants_logprobs: bool = False
    targets: Sequence[int] = ()
