"""Who may be served now, who waits, and who is told to come again.

    admission = Admission(max_active=8, max_queued=64, queue_seconds=30)
    async with admission.enter(owner="key-1", choices=2, limits=KeyLimits(max_active=4)) as place:
        ...

Slots are those of the workers: a choice of a request takes one session on every stage. When their
number changes, follow_capacity() has admission go along. Requests wait in one line, first come
first served, and one that needs several slots is not overtaken. Others may have the workers'
sessions too: who has been given a slot and is refused by the mesh waits again, in the place that
was its own (Place.wait_again), and until one has found room they ask one after the other. A request
for several sessions that the mesh has refused often, while no other of ours was in its way, may be
overtaken: it could wait for others for ever, and everybody else for it.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from meshnet.errors import ControlError

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway._failures import RequestError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["Admission", "KeyLimits", "Place", "follow_capacity"]

_LOG = logging.getLogger("meshnet.gateway")
_MINUTE = 60.0
# Of a tracker of thousands of workers no more is asked than this share of the time.
_BUSY_SHARE = 0.02
# A mesh that others fill is asked again so often, or when it says.
_ASK_AGAIN_SECONDS = 0.25
_ASK_AGAIN_AT_MOST_SECONDS = 1.0
# So many refusals are waited for before others may overtake.
_PATIENCE = 8


@dataclass(frozen=True)
class KeyLimits:
    """What one key may take: slots at once, and requests in any minute. 0 = no limit."""

    max_active: int = 0
    requests_per_minute: int = 0


class Place:
    """One request's slots, or its place in the line for them. Made by Admission.enter()."""

    def __init__(self, admission: Admission, slots: int, number: int, until: float) -> None:
        self.slots = slots
        self.number = number
        self.until = until
        self.admitted = asyncio.Event()
        # How often the mesh has refused it although it had no other session of ours.
        self.refusals = 0
        self._admission = admission

    @property
    def may_be_overtaken(self) -> bool:
        """Whether those behind it need not wait any longer for it."""
        return self.slots > 1 and self.refusals >= _PATIENCE

    async def wait_again(self, retry_after_ms: int = 0) -> None:
        """Gives the slots back, as the mesh has none left, and waits for its turn to ask again.

        Raises MeshnetError (QUEUE_FULL) as Admission.enter() does.
        """
        await self._admission.wait_again(self, retry_after_ms)

    def served(self) -> None:
        """Says that the mesh had room."""
        self._admission.served(self)


class Admission:
    """Slots, a bounded line for them, and limits of keys. `clock` is in seconds."""

    def __init__(
        self,
        *,
        max_active: int,
        max_queued: int = 64,
        queue_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_active = max_active
        self.max_queued = max_queued
        self.queue_seconds = queue_seconds
        self.active = 0
        self._clock = clock
        self._line: list[Place] = []  # who came first is first
        self._numbers = itertools.count()
        # While the mesh is full of others' sessions: when it is asked again, or who asks it.
        self._again: asyncio.TimerHandle | None = None
        self._asking: Place | None = None
        self._active_of: collections.Counter[str] = collections.Counter()
        self._requests_of: dict[str, collections.deque[float]] = {}

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._line)

    def resize(self, max_active: int) -> None:
        """Another number of slots: whoever waits for one gets it, whoever has one keeps it."""
        self.max_active = max_active
        self._admit()

    @contextlib.asynccontextmanager
    async def enter(
        self, *, owner: str, choices: int = 1, limits: KeyLimits | None = None
    ) -> AsyncIterator[Place]:
        """Holds `choices` slots while the block runs.

        Raises MeshnetError: FIELD_OUT_OF_BOUNDS for more choices than there are slots at all,
        RATE_LIMITED, QUEUE_FULL when the line is full or did not move in time.
        """
        self._check_key(owner, choices, limits or KeyLimits())
        if choices > self.max_active:
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                f"expected at most {self.max_active} choices, which is what the mesh serves at "
                f"once, got {choices}",
                "n",
            )
        self._active_of[owner] += choices
        until = asyncio.get_running_loop().time() + self.queue_seconds
        place = Place(self, choices, next(self._numbers), until)
        try:
            await self._take(place)
            try:
                yield place
            finally:
                if place.admitted.is_set():
                    self._leave(place)
        finally:
            self._active_of[owner] -= choices
            if not self._active_of[owner]:
                del self._active_of[owner]

    def _check_key(self, owner: str, choices: int, limits: KeyLimits) -> None:
        if limits.max_active and self._active_of[owner] + choices > limits.max_active:
            raise MeshnetError(
                errors_pb2.REASON_RATE_LIMITED,
                f"expected at most {limits.max_active} answers at once with this key, got "
                f"{choices} beside {self._active_of[owner]}; wait until one is done",
                retry_after_ms=1000,
            )
        if not limits.requests_per_minute:
            return
        now = self._clock()
        recent = self._requests_of.setdefault(owner, collections.deque())
        while recent and recent[0] <= now - _MINUTE:
            recent.popleft()
        if len(recent) >= limits.requests_per_minute:
            raise MeshnetError(
                errors_pb2.REASON_RATE_LIMITED,
                f"expected at most {limits.requests_per_minute} requests a minute with this key, "
                "got one more; come again later",
                retry_after_ms=max(1, round(1000 * (recent[0] + _MINUTE - now))),
            )
        recent.append(now)

    async def wait_again(self, place: Place, retry_after_ms: int) -> None:
        """See Place.wait_again()."""
        # Whoever was the first of the line has not lost that place to one who came later.
        waits = self._asking is place or len(self._line) < self.max_queued
        self._give_back(place)
        if not self.active:
            place.refusals += 1
        if (waits or self._line) and self._again is None and self._asking is None:
            seconds = min(retry_after_ms / 1000, _ASK_AGAIN_AT_MOST_SECONDS) or _ASK_AGAIN_SECONDS
            self._again = asyncio.get_running_loop().call_later(seconds, self._ask)
        if not waits:
            raise self._line_full()
        await self._wait(place)

    def served(self, place: Place) -> None:
        """See Place.served()."""
        if self._asking is place:
            self._asking = None
            self._admit()

    async def _take(self, place: Place) -> None:
        if not self._line and self._fits(place):
            self._give(place)
        elif len(self._line) >= self.max_queued:
            raise self._line_full()
        else:
            await self._wait(place)

    async def _wait(self, place: Place) -> None:
        bisect.insort(self._line, place, key=lambda each: each.number)
        try:
            async with asyncio.timeout_at(place.until):
                await place.admitted.wait()
        except BaseException as error:
            if place.admitted.is_set():
                self._leave(place)
            else:
                self._line.remove(place)
                self._admit()
            if isinstance(error, TimeoutError):
                raise self._full(f"none became free within {self.queue_seconds:g} s") from error
            raise

    def _fits(self, place: Place) -> bool:
        free = self._again is None and self._asking is None
        return free and self.active + place.slots <= self.max_active

    def _give(self, place: Place) -> None:
        self.active += place.slots
        place.admitted.set()

    def _give_back(self, place: Place) -> None:
        self.active -= place.slots
        place.admitted.clear()
        if self._asking is place:
            self._asking = None

    def _leave(self, place: Place) -> None:
        self._give_back(place)
        if self._again is None:
            self._admit()
        else:
            # What it had of the mesh is free now.
            self._ask()

    def _admit(self) -> None:
        while self._line and self._fits(first := self._first()):
            self._line.remove(first)
            self._give(first)

    def _first(self) -> Place:
        """Whose turn it is, of a line that is not empty."""
        return next((place for place in self._line if not place.may_be_overtaken), self._line[0])

    def _ask(self) -> None:
        """Lets the first of the line see whether the mesh has room again."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._line and self._fits(first := self._first()):
            self._line.remove(first)
            self._asking = first
            self._give(first)

    def _line_full(self) -> MeshnetError:
        return self._full(f"{len(self._line)} requests wait already")

    def _full(self, why: str) -> MeshnetError:
        return MeshnetError(
            errors_pb2.REASON_QUEUE_FULL,
            f"expected one of {self.max_active} slots, {why}; come again later",
            retry_after_ms=1000,
        )


async def follow_capacity(
    admission: Admission,
    capacity: Callable[[], Awaitable[int]],
    *,
    limit: int = 0,
    interval: float = 2.0,
) -> None:
    """For ever: as many slots as the mesh has sessions, at most `limit` (0: no limit).

    `capacity` asks it, every `interval` seconds. A mesh that serves nobody, or cannot be asked,
    changes nothing: its requests are refused with the reason why, at once and all alike.
    """
    while True:
        began = time.monotonic()
        try:
            found = await capacity()
        except ControlError as error:
            _LOG.info("how much the mesh can serve is not known: %s", error)
            found = 0
        slots = min(found, limit or found)
        if slots and slots != admission.max_active:
            _LOG.info("%d slots, as the mesh serves %d sessions at once", slots, found)
            admission.resize(slots)
        await asyncio.sleep(max(interval, (time.monotonic() - began) / _BUSY_SHARE))
