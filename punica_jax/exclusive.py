"""One call at a time.

Plain Python; knows names of calls, not what they do.
"""

import contextlib
import threading
from collections.abc import Iterator


class Exclusive:
    """Refuses a call while another runs, in a thread or inside a callback.

    Seats, slots and pages have one user at a time: a call inside another would write
    over the sequences in flight.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Hold the place of the one call.

        Args:
          what: the call's name, for errors.

        Raises:
          RuntimeError: another one holds it.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{what} was called while another call of this LLM is running; an LLM "
                "takes one call at a time, callbacks and open streams included; finish "
                "or close() an open stream first"
            )
        try:
            yield
        finally:
            self._lock.release()
