"""One request of a cluster, from engine to engine.

Knows what has come of it, and that it may be taken out amid it; nothing of why.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from punica_jax.engine_request import EngineClosedError
from punica_jax.members import Members
from punica_jax.request import DeadlineError, Terms
from punica_jax.request_state import RequestState
from punica_jax.stream import Piece
from punica_jax.tickets import Ticket


class Host(Protocol):
    """What is asked of an engine here; see `Engine`."""

    def resume(
        self, state: RequestState, *, request_id: str | None = None
    ) -> AsyncGenerator[Piece, None]: ...

    def cancel(self, request_id: str) -> None: ...


Start = Callable[[Any, str, Terms], AsyncGenerator[Piece, None]]
"""Asks an engine for a request, by an id and with terms; returns its pieces there."""


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
      RequestError: its adapter was replaced while it was at no engine.
    """
    ended: set[int] = set()
    try:
        while True:
            (place, here), state, has_come = ticket.at, None, False
            engine = engines[place]
            try:
                begun = start(engine, here, ticket.terms_left)
                async with contextlib.aclosing(begun) as pieces:
                    async for piece in pieces:
                        if ticket.is_cancelled:
                            engine.cancel(here)  # it may not have known it before
                        if piece.index in ended:
                            continue  # it ended where the request came from
                        has_come = True
                        members.note_begin(ticket, here, is_seated=bool(piece.text))
                        if _is_exported(piece):
                            state = state or await members.state_of(ticket)
                            if state is not None:
                                continue
                        if piece.completion is not None:
                            ended.add(piece.index)
                            members.end_one(ticket)
                        yield piece
            except EngineClosedError:
                # It may have been taken out before, and the end of that is not read.
                state = state or await members.state_of(ticket)
                if state is None:
                    if has_come or ticket.at[1] != here:
                        raise
                    members.give_again(ticket)
                    continue
            except DeadlineError:
                if ticket.num_hops == 1:
                    raise
                raise DeadlineError(
                    "a request was not answered within its deadline of "
                    f"{ticket.terms.deadline_s:g} s; it has moved between engines"
                ) from None
            if state is None:
                return
            members.check_weights(ticket)
            start = resumed(state)
    finally:
        members.leave(ticket)


def resumed(state: RequestState) -> Start:
    """Return what has an engine go on with a request."""
    return lambda engine, here, terms: engine.resume(
        dataclasses.replace(state, terms=terms), request_id=here
    )


def _is_exported(piece: Piece) -> bool:
    completion = piece.completion
    return completion is not None and completion.finish_reason == "exported"
