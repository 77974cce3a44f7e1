"""What the tests of the control plane share."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator

import pytest
from meshnet.testing.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer.start() as server:
        yield server


_NAMES = (f"tests{number}" for number in itertools.count())


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """The URL of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tracker.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(next(_NAMES))


@pytest.fixture
def shared_database(postgres: PostgresServer) -> str:
    """The URL of an empty database that several trackers may use."""
    return postgres.url(next(_NAMES))
