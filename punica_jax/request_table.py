"""The requests under way in an engine: whose is which sequence, and what ends them.

Knows requests, the loop that steps their sequences, and names of adapters; nothing of
threads or event loops. All of it is for the engine's thread alone.
"""

from collections.abc import Hashable, Iterator

from punica_jax.engine_request import EngineRequest, QueueFullError, count_end
from punica_jax.loop import StepLoop
from punica_jax.placements import UnknownAdapterError
from punica_jax.request import FinishReason
from punica_jax.request_state import RequestState
from punica_jax.residence import AdapterResidence
from punica_jax.sequence import SequenceState
from punica_jax.stats import AdapterStats, RequestProgress
from punica_jax.versions import Version


class RequestTable:
    """Requests that have begun and of which somebody is to hear.

    Attributes:
      base_stats: of requests without an adapter.
    """

    def __init__(self, loop: StepLoop, residence: AdapterResidence, max_waiting: int):
        """Begin with none.

        Args:
          loop: steps the sequences.
          residence: has their adapters.
          max_waiting: sequences that may wait; requests that bring more are refused.
        """
        self.base_stats = AdapterStats()
        self._loop = loop
        self._residence = residence
        self._max_waiting = max_waiting
        self._requests: dict[EngineRequest, None] = {}
        self._named: dict[str, EngineRequest] = {}  # the last of each id
        self._owners: dict[SequenceState, EngineRequest] = {}
        self._leaving: dict[str, Version] = {}

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._requests)

    def forget(self, request: EngineRequest) -> None:
        """Take a request off, if all its completions have ended."""
        if not any(one in self._owners for one in request.sequences):
            del self._requests[request]
            if self._named.get(request.name) is request:
                del self._named[request.name]

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Call some weights another name: pages computed under it are shared.

        Sequences that wait, and such as have ended, may be exported under it.
        """
        self._loop.pages.rename(old, new)
        for request in self:
            for sequence in request.sequences:
                if sequence.weights == old:
                    sequence.weights = new

    def begin(self, request: EngineRequest) -> None:
        """Let a request's sequences wait.

        Raises:
          UnknownAdapterError: no adapter has the name that it wants.
          ValueError: another one under way has its id.
          QueueFullError: too many wait already, and it does not go on from elsewhere.
        """
        if (adapter := request.sequences[0].adapter) is not None:
            if self._residence[adapter] is self._leaving.get(adapter):
                raise UnknownAdapterError(f"adapter {adapter!r} is being unloaded")
        under_way = self._named.get(request.name)
        if under_way is not None and under_way.can_go_on:
            raise ValueError(f"a request with the id {request.name!r} is under way")
        scheduler, num = self._loop.scheduler, len(request.sequences)
        room = self._max_waiting + scheduler.num_free_seats
        if scheduler.num_waiting + num > room and not request.is_resumed:
            raise QueueFullError(
                f"{scheduler.num_waiting} sequences wait already, and the request "
                f"would bring {num} more; {room} may now: max_waiting = "
                f"{self._max_waiting}, and {scheduler.num_free_seats} for free seats; "
                "try again later or raise max_waiting"
            )
        going = [sequence for sequence in request.sequences if not sequence.is_over]
        self._loop.add(going)  # a policy of the user's may raise
        self._requests[request] = None
        self._named[request.name] = request
        self._owners.update(dict.fromkeys(going, request))
        self._stats(adapter).num_requests += len(going)
        for sequence in request.sequences:
            if sequence.is_over:  # it ended where it came from
                request.end(sequence)

    def end(self, request: EngineRequest, reason: FinishReason) -> None:
        """End a request's completions, as far as they go."""
        for sequence in request.sequences:
            if sequence in self._owners:
                self._loop.cancel(sequence, reason)

    def end_named(self, name: str, reason: FinishReason) -> None:
        """The same by its id, if it is under way."""
        if isinstance(name, str) and name in self._named:
            self.end(self._named[name], reason)

    def export(self, name: str) -> RequestState:
        """Take a request out.

        Raises:
          ValueError: none under way has that id.
        """
        request = self._named.get(name) if isinstance(name, str) else None
        if request is None or not request.can_go_on:
            raise ValueError(f"no request under way has the id {name!r}")
        state = request.state
        self.end(request, "exported")
        return state

    def progress(self) -> dict[str, RequestProgress]:
        """Tell how far requests are: those with seats, then in the order of the rest.

        Those whose tokens have all come, but for steps in flight, are left out.
        """
        scheduler, pages = self._loop.scheduler, self._loop.pages
        going: dict[EngineRequest, list[SequenceState]] = {}
        for sequence in (*scheduler.running, *scheduler.waiting):
            request = self._owners.get(sequence)
            if request is not None and request.can_go_on and not sequence.is_over:
                going.setdefault(request, []).append(sequence)
        return {
            request.name: RequestProgress(
                num_sequences=len(sequences),
                num_seated=sum(one.seat >= 0 for one in sequences),
                num_kv_pages=sum(
                    pages.num_needed(len(one.tokens) + 1) for one in sequences
                ),
            )
            for request, sequences in going.items()
        }

    def unload(self, name: str, cancel: bool) -> Version:
        """Forget an adapter's name, as soon as its requests have ended.

        Args:
          name: the adapter's; new requests for it are refused.
          cancel: cancel those that there are.

        Raises:
          UnknownAdapterError: no adapter has that name.
        """
        version = self._leaving[name] = self._residence[name]
        for sequence in list(self._owners):
            if cancel and sequence.adapter == name:
                self._loop.cancel(sequence)
        self._let_leave(name)
        return version

    def _let_leave(self, name: str) -> None:
        if self._residence.get(name) is not self._leaving[name]:
            del self._leaving[name]  # it has been replaced, and goes by itself
        elif not any(sequence.adapter == name for sequence in self._owners):
            del self._leaving[name]
            self._residence.unregister(name)

    def note_end(self, sequence: SequenceState) -> None:
        """Take note that a sequence is over, and holds nothing any more."""
        request = self._owners.pop(sequence)
        count_end(self._stats(sequence.adapter), sequence)
        request.end(sequence)
        if sequence.error is not None:
            self.end(request, "cancelled")  # its other completions
        if sequence.adapter in self._leaving:
            self._let_leave(sequence.adapter)

    def _stats(self, adapter: str | None) -> AdapterStats:
        if adapter is None:
            return self.base_stats
        if adapter not in self._residence:
            return AdapterStats()  # of a name that is forgotten: nobody will ask
        return self._residence[adapter].stats
