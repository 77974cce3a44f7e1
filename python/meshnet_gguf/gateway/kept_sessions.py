"""Sessions that wait for the next turn of their conversation.

    kept = KeptSessions(admission, seconds=120)
    lease = kept.take(kept.any_of(owner, model), token_ids)   # None: nobody has read this before
    await kept.put(lease)                                     # after an answer that ended well

A session holds what its stages have read. A turn that begins with the same tokens goes on there,
and only what is new is read. A session is given to whoever put it there (an API key; everybody is
one where there are no keys), to one request at a time, for `seconds` after its last answer, and no
longer in all than `longest`. Sessions that wait take slots that nobody needs: they end before
somebody has to wait for one, those first that have waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshnet.tasks import cancel

from meshnet_gguf.client import Session
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway.admission import Admission
from meshnet_gguf.route_source import OpenedRoute

__all__ = ["KeptSessions", "Lease"]

_LOG = logging.getLogger("meshnet.gateway")
# Where less than this much of what a session holds would be used, it waits for its own next turn.
_LEAST_SHARE = 0.5
_END_SECONDS = 1.0


@dataclass
class Lease:
    """An open session with what keeps it open, and whose it is.

    `stack` ends the session and gives its route back.
    """

    owner: str
    model: str
    opened: OpenedRoute
    session: Session
    stack: contextlib.AsyncExitStack
    began: float
    reused: bool = False
    last_used: float = field(default=0.0)

    @property
    def whose(self) -> tuple[object, ...]:
        """Owner, model, and what the tokens mean."""
        return self.owner, self.model, self.opened.route.identity


class KeptSessions:
    """Sessions that wait. `seconds` 0 keeps none; `clock` is in seconds."""

    def __init__(
        self,
        admission: Admission,
        *,
        seconds: float = 0.0,
        longest: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self.longest = longest
        self._admission = admission
        self._clock = clock
        self._waiting: list[Lease] = []  # the one that has waited longest first
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def now(self) -> float:
        """The time, as leases count it."""
        return self._clock()

    @property
    def for_one(self) -> int:
        """How many may wait for one owner: half of all slots."""
        return max(1, self._admission.max_active // 2)

    def any_of(self, owner: str, model: str) -> Lease | None:
        """One of those that wait for an owner; it goes on waiting."""
        mine = [lease for lease in self._usable() if (lease.owner, lease.model) == (owner, model)]
        return mine[-1] if mine else None

    def take(self, like: Lease, token_ids: Sequence[int]) -> Lease | None:
        """The one that has read most of these tokens, if that is worth while.

        It is one of the same owner and model as `like`, to which tokens mean the same.
        """
        best, most = None, 0
        for lease in self._usable():
            if lease.whose != like.whose:
                continue
            shared = lease.session.held_of(token_ids)
            if shared > most and shared >= _LEAST_SHARE * len(lease.session.cached_token_ids):
                best, most = lease, shared
        if best is not None:
            self._waiting.remove(best)
            best.reused = True
        return best

    async def put(self, lease: Lease) -> None:
        """Keeps a session whose answer has ended, or ends it."""
        if not self.seconds or not lease.session.cached_token_ids or lease.session.ended:
            await end(lease)
            return
        lease.last_used = self._clock()
        self._waiting.append(lease)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())
        mine = [other for other in self._waiting if other.owner == lease.owner]
        await self._end(mine[: -self.for_one])
        # Its own slot is still counted.
        await self.make_room(leaving=1)

    async def make_room(self, *, leaving: int = 0) -> None:
        """Ends as many as there are more sessions than slots, with those under way."""
        active = self._admission.active - leaving
        over = active + len(self._waiting) - self._admission.max_active
        if over > 0:
            await self._end(self._waiting[:over])

    async def end_all(self) -> None:
        """Ends all that wait."""
        await self._end(list(self._waiting))

    async def aclose(self) -> None:
        """Ends all, for good."""
        self.seconds = 0.0
        await self.end_all()
        if self._sweeper is not None:
            await cancel(self._sweeper)

    def _usable(self) -> list[Lease]:
        now = self._clock()
        return [
            lease
            for lease in self._waiting
            if not lease.session.ended
            and now - lease.last_used < self.seconds
            and now - lease.began < self.longest
        ]

    async def _end(self, leases: Sequence[Lease]) -> None:
        # Taken out first: nobody may be given one that is ending.
        self._waiting = [lease for lease in self._waiting if lease not in leases]
        await asyncio.gather(*(end(lease) for lease in leases))

    async def _sweep(self) -> None:
        while self._waiting:
            await asyncio.sleep(max(0.05, self.seconds / 8))
            usable = self._usable()
            await self._end([lease for lease in self._waiting if lease not in usable])


async def end(lease: Lease) -> None:
    """Ends a session that is not used any more; whatever goes wrong then hurts nobody."""
    try:
        # Somebody may wait for its slot: stages that do not answer are left as if we had gone.
        async with asyncio.timeout(_END_SECONDS):
            await lease.stack.aclose()
    except (MeshnetError, TimeoutError) as error:
        _LOG.info("a kept session did not end in good order: %s", error)
