"""What several tests of commands start once for all that is in them."""

from collections.abc import AsyncIterator

import pytest_asyncio
from meshnet_gguf.testing.commands import Commands


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def commands() -> AsyncIterator[Commands]:
    async with Commands() as running:
        yield running
