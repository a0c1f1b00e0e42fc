import subprocess
import sys

import pytest

from punica_jax.random_bits import random_bits

FORK = """
import os
from punica_jax.random_bits import random_bits

read, write = os.pipe()
if not os.fork():
    os.write(write, str(random_bits(128)).encode())
    os._exit(0)
os.wait()
print(int(os.read(read, 100)) == random_bits(128))
"""


def test_numbers_differ_and_have_as_many_bits():
    drawn = [random_bits(128) for _ in range(100)]
    assert len(set(drawn)) == 100
    assert max(drawn).bit_length() in range(120, 129)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="it cannot fork")
def test_a_forked_process_draws_others():
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
