"""One request of a cluster, from engine to engine.

Knows what has come of it, and that it may be taken out amid it; nothing of why.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

from punica_jax.engine_request import EngineClosedError
from punica_jax.members import Members, Ticket
from punica_jax.request import SamplingParams, Terms
from punica_jax.request_state import RequestState
from punica_jax.sequence import DEFAULT_TERMS
from punica_jax.stream import Piece

_POLL_S = 0.01
_LEAST_S = 1e-3  # of what is left of a deadline: it passes where the request goes on


class Host(Protocol):
    """What is asked of an engine here; see `Engine`."""

    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        terms: Terms = DEFAULT_TERMS,
        request_id: str | None = None,
    ) -> AsyncGenerator[Piece, None]: ...

    def resume(
        self, state: RequestState, *, request_id: str | None = None
    ) -> AsyncGenerator[Piece, None]: ...

    def cancel(self, request_id: str) -> None: ...


Start = Callable[[Host, str], AsyncGenerator[Piece, None]]
"""Asks an engine for a request by an id; returns its pieces there."""


async def journey(
    ticket: Ticket, engines: Sequence[Host], members: Members, start: Start
) -> AsyncGenerator[Piece, None]:
    """Yield a request's pieces, wherever it is.

    Args:
      ticket: says where it is, which may change.
      engines: by their places.
      members: forget the ticket at the end.
      start: begins it.

    Raises:
      EngineClosedError: its engine has ended, or all have, if nothing of it had come.
    """
    ended: set[int] = set()
    try:
        while True:
            engine, here, state = engines[ticket.place], ticket.here, None
            try:
                async with (
                    _cancelling(engine, ticket),
                    contextlib.aclosing(start(engine, here)) as pieces,
                ):
                    async for piece in pieces:
                        members.note_begin(ticket, here)
                        if piece.index in ended:
                            continue  # it ended where the request came from
                        if _is_exported(piece):
                            state = state or await members.taken(ticket)
                            if state is not None:
                                continue
                        if piece.completion is not None:
                            ended.add(piece.index)
                            if ticket.end_one():
                                members.leave(ticket)
                        yield piece
            except EngineClosedError:
                # It may have been taken out before, and the end of that is not read.
                state = state or await members.taken(ticket)
                if state is None:
                    if ticket.has_begun or ticket.here != here:
                        raise
                    members.note_end(ticket)
                    continue
            if state is None:
                return
            start = resumed(_aged(state, ticket))
    finally:
        members.leave(ticket)


def resumed(state: RequestState) -> Start:
    """Return what has an engine go on with a request."""
    return lambda engine, here: engine.resume(state, request_id=here)


def _is_exported(piece: Piece) -> bool:
    completion = piece.completion
    return completion is not None and completion.finish_reason == "exported"


def _aged(state: RequestState, ticket: Ticket) -> RequestState:
    """Return a state whose times are what is left of them: they begin anew there."""
    age_s, terms = time.monotonic() - ticket.arrived_s, state.terms
    left = {
        name: max(value - age_s, _LEAST_S)
        for name in ("first_token_s", "deadline_s")
        if (value := getattr(terms, name)) is not None
    }
    return dataclasses.replace(state, terms=dataclasses.replace(terms, **left))


@contextlib.asynccontextmanager
async def _cancelling(engine: Host, ticket: Ticket) -> AsyncIterator[None]:
    """Cancel a request amid its way to an engine, as soon as it is there."""

    async def cancel(here: str) -> None:
        while not ticket.is_cancelled:
            if not ticket.is_moving:
                return
            await asyncio.sleep(_POLL_S)
        while True:
            engine.cancel(here)
            await asyncio.sleep(_POLL_S)

    task = asyncio.create_task(cancel(ticket.here)) if ticket.is_moving else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
