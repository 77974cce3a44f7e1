import asyncio
import contextlib

import pytest
from meshnet.errors import ControlError, Reason
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway.admission import Admission, KeyLimits, follow_capacity

from proto.meshnet.shard.v1 import errors_pb2


async def holds(
    admission: Admission, choices: int = 1, owner: str = ""
) -> contextlib.AsyncExitStack:
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(admission.enter(owner=owner, choices=choices))
    return stack


async def reason(admission: Admission, **options: object) -> tuple[int, int]:
    with pytest.raises(MeshnetError) as caught:
        async with admission.enter(**{"owner": "", **options}):  # type: ignore[arg-type]
            pass
    return caught.value.reason, caught.value.retry_after_ms


async def test_slots_are_given_in_the_order_of_asking() -> None:
    admission = Admission(max_active=2)
    first, second = await holds(admission), await holds(admission)
    order: list[str] = []

    async def ask(name: str, choices: int) -> None:
        async with admission.enter(owner="", choices=choices):
            order.append(name)

    wide = asyncio.create_task(ask("wide", 2))
    await asyncio.sleep(0)
    narrow = asyncio.create_task(ask("narrow", 1))
    await asyncio.sleep(0)
    assert (admission.active, admission.queued) == (2, 2)
    await first.aclose()
    await asyncio.sleep(0)
    assert order == []  # a narrow one does not overtake a wide one
    await second.aclose()
    await asyncio.gather(wide, narrow)
    assert order == ["wide", "narrow"]
    assert (admission.active, admission.queued) == (0, 0)


async def test_a_full_line_is_a_refusal_with_a_time_to_come_again() -> None:
    admission = Admission(max_active=1, max_queued=0)
    held = await holds(admission)
    assert await reason(admission) == (errors_pb2.REASON_QUEUE_FULL, 1000)
    await held.aclose()
    async with admission.enter(owner=""):
        pass


async def test_waiting_ends_in_time_and_leaves_nothing() -> None:
    admission = Admission(max_active=1, queue_seconds=0.01)
    held = await holds(admission)
    assert (await reason(admission))[0] == errors_pb2.REASON_QUEUE_FULL
    waiting = asyncio.create_task(holds(admission))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (admission.active, admission.queued) == (1, 0)
    await held.aclose()
    assert admission.active == 0


async def test_more_choices_than_slots_can_never_be_served() -> None:
    assert (await reason(Admission(max_active=2), choices=3))[0] == (
        errors_pb2.REASON_FIELD_OUT_OF_BOUNDS
    )


async def test_a_keys_limits_are_its_own() -> None:
    now = 1000.0
    admission = Admission(max_active=8, clock=lambda: now)
    limits = KeyLimits(max_active=2)
    held = await holds(admission, 2, "a")
    assert (await reason(admission, owner="a", limits=limits))[0] == errors_pb2.REASON_RATE_LIMITED
    async with admission.enter(owner="b", limits=limits):
        pass
    await held.aclose()
    async with admission.enter(owner="a", limits=limits):
        pass

    limits = KeyLimits(requests_per_minute=2)
    for _ in range(2):
        async with admission.enter(owner="c", limits=limits):
            now += 10
    assert await reason(admission, owner="c", limits=limits) == (
        errors_pb2.REASON_RATE_LIMITED,
        40_000,
    )
    now += 41
    async with admission.enter(owner="c", limits=limits):
        pass


async def test_more_slots_are_given_to_who_waits_and_fewer_take_none_away() -> None:
    admission = Admission(max_active=1)
    first = await holds(admission)
    second = asyncio.create_task(holds(admission))
    await asyncio.sleep(0)
    assert admission.queued == 1
    admission.resize(2)
    await second
    assert (admission.active, admission.queued) == (2, 0)
    admission.resize(1)
    assert admission.active == 2
    third = asyncio.create_task(holds(admission))
    await first.aclose()
    await asyncio.sleep(0)
    assert (admission.active, admission.queued) == (1, 1)
    await (await second).aclose()
    await third
    assert admission.active == 1


class OthersMesh:
    """What a mesh has left for these requests: others have the rest of its sessions."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.free = 0
        self.asked: list[str] = []
        self.served: list[str] = []
        self.ended = asyncio.Event()

    async def request(self, name: str, choices: int = 1) -> None:
        async with self.admission.enter(owner="", choices=choices) as place:
            while True:
                self.asked.append(name)
                await asyncio.sleep(0)
                if self.free >= choices:
                    break
                await place.wait_again(1)
            self.free -= choices
            place.served()
            self.served.append(name)
            await self.ended.wait()
            self.free += choices


async def test_a_mesh_that_others_fill_is_asked_in_the_order_of_coming() -> None:
    admission = Admission(max_active=4)
    mesh = OthersMesh(admission)
    first = asyncio.create_task(mesh.request("first", 2))
    while not admission.queued:
        await asyncio.sleep(0)
    second = asyncio.create_task(mesh.request("second"))
    third = asyncio.create_task(mesh.request("third"))
    mesh.asked.clear()
    mesh.free = 1  # enough for the second, but the first was there before
    while len(mesh.asked) < 3:
        await asyncio.sleep(0.001)
    assert set(mesh.asked) == {"first"}
    assert mesh.served == []
    mesh.free = 4
    while len(mesh.served) < 3:
        await asyncio.sleep(0.001)
    assert (mesh.served, mesh.free) == (["first", "second", "third"], 0)
    mesh.ended.set()
    await asyncio.gather(first, second, third)
    assert (admission.active, admission.queued, mesh.free) == (0, 0, 4)


async def test_who_asks_a_full_mesh_for_much_holds_up_the_others_for_a_while_only() -> None:
    admission = Admission(max_active=4)
    mesh = OthersMesh(admission)
    mesh.free = 1
    wide = asyncio.create_task(mesh.request("wide", 2))
    while not admission.queued:
        await asyncio.sleep(0)
    narrow = asyncio.create_task(mesh.request("narrow"))
    while not mesh.served:
        await asyncio.sleep(0.001)
    assert mesh.served == ["narrow"]
    assert mesh.asked.count("wide") > 3
    # Who comes later need not wait until the narrow one has ended, and the wide one is not lost.
    mesh.free = 1
    later = asyncio.create_task(mesh.request("later"))
    while len(mesh.served) < 2:
        await asyncio.sleep(0.001)
    mesh.free = 2
    while len(mesh.served) < 3:
        await asyncio.sleep(0.001)
    assert mesh.served == ["narrow", "later", "wide"]
    mesh.ended.set()
    await asyncio.gather(wide, narrow, later)
    assert (admission.active, admission.queued) == (0, 0)


async def test_the_end_of_an_own_answer_is_room_for_who_waits_for_the_mesh() -> None:
    admission = Admission(max_active=4)
    mine = await holds(admission)
    mesh = OthersMesh(admission)

    async def patient() -> None:
        async with admission.enter(owner="") as place:
            await place.wait_again(1_000_000)  # longer than this test may take
            mesh.served.append("patient")

    waiting = asyncio.create_task(patient())
    while not admission.queued:
        await asyncio.sleep(0)
    # Nor is a slot given to who comes now.
    later = asyncio.create_task(mesh.request("later"))
    mesh.free = 1
    mesh.ended.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert (mesh.served, admission.queued) == ([], 2)
    await mine.aclose()
    await asyncio.gather(waiting, later)
    assert mesh.served == ["patient", "later"]


async def test_who_waits_for_the_mesh_is_bound_as_all_who_wait() -> None:
    admission = Admission(max_active=2, max_queued=1, queue_seconds=0.01)
    with pytest.raises(MeshnetError) as late:
        async with admission.enter(owner="") as place:
            while True:
                await place.wait_again(1)
    assert late.value.reason == errors_pb2.REASON_QUEUE_FULL
    admission.queue_seconds = 30
    mesh = OthersMesh(admission)
    first, second = (asyncio.create_task(mesh.request(name)) for name in ("first", "second"))
    with pytest.raises(MeshnetError) as full:
        await second
    assert full.value.reason == errors_pb2.REASON_QUEUE_FULL
    # Cancelled in the line and while it asks, it leaves nothing.
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (admission.active, admission.queued) == (0, 0)
    mesh.free = 1
    mesh.ended.set()
    await mesh.request("third")
    assert (mesh.served, admission.active) == (["third"], 0)


async def test_slots_follow_what_the_mesh_can_serve() -> None:
    admission = Admission(max_active=4)
    # A mesh without a route, and one that cannot be asked, change nothing.
    answers: list[int | ControlError] = [
        2, 0, ControlError(Reason.PEER_UNREACHABLE, "away"), 9, 16, 3
    ]  # fmt: skip
    seen: list[int] = []

    async def capacity() -> int:
        seen.append(admission.max_active)
        if not answers:
            raise asyncio.CancelledError
        answer = answers.pop(0)
        if isinstance(answer, ControlError):
            raise answer
        return answer

    with pytest.raises(asyncio.CancelledError):
        await follow_capacity(admission, capacity, limit=10, interval=0)
    assert seen == [4, 2, 2, 2, 9, 10, 3]
