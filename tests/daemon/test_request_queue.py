import asyncio

import pytest

from peerllm.daemon.request_queue import RequestQueue
from peerllm.protocol.errors import Overloaded


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    queue, served = RequestQueue(), []

    async def request(name: int) -> None:
        async with queue.turn():
            await asyncio.sleep(0)
            served.append(name)

    await asyncio.gather(*(request(name) for name in range(10)))
    assert served == list(range(10))
    assert (queue.waiting, queue.active) == (0, 0)


async def test_one_more_than_the_bound_is_refused_at_once() -> None:
    queue, gate = RequestQueue(max_waiting=2), asyncio.Event()

    async def request() -> None:
        async with queue.turn():
            await gate.wait()

    tasks = [asyncio.create_task(request()) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="2 requests wait"):
        async with queue.turn():
            pass
    gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("moment", ["waiting", "turn has just come"])
async def test_a_request_that_is_cancelled_gives_its_place_up(moment: str) -> None:
    queue, gate, served = RequestQueue(), asyncio.Event(), []

    async def request(name: int) -> None:
        async with queue.turn():
            if name == 0:
                await gate.wait()
            served.append(name)

    tasks = [asyncio.create_task(request(name)) for name in range(3)]
    await settle()
    if moment == "waiting":
        tasks[1].cancel()
        await settle()
        gate.set()
    else:
        gate.set()
        await asyncio.sleep(0)  # 0 passes its turn on to 1 in this step, and 1 has not run yet
        tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert served in ([0, 2], [0, 1, 2])
    assert served[-1] == 2
    assert (queue.waiting, queue.active) == (0, 0)
