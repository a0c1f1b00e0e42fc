"""Random numbers for seeds and ids, which need be no secret.

The system's own give the interpreter's lock away at each call: each client of a burst
would wait for the engine's thread.
"""

import os
import random

_generator = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_generator.seed)


def random_bits(count: int) -> int:
    """Return a number of so many random bits: others in a forked process."""
    return _generator.getrandbits(count)
