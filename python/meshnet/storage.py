"""The database of one or several trackers: SQLite, or PostgreSQL with the same code.

    storage = await Storage.open("sqlite:///tracker.db", tracker_id="t1")
    await storage.write([Upsert(SESSIONS, {...}), ...])  # returns once it is committed
    changes = await storage.changes()                    # what others wrote since the last call
    await storage.close()

Writes that come while a commit is under way go into the next one together, so that thousands of
heartbeats a second cost some dozens of transactions. Every transaction takes the next revision of
the one row in `revisions` first: that orders the transactions of all trackers, and whoever has
read up to a revision misses nothing below it.

A SQLite file belongs to one tracker at a time, which holds a lock beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from meshnet.errors import ControlError, Reason

__all__ = [
    "CERTIFICATIONS",
    "EPOCHS",
    "RECEIPTS",
    "SESSIONS",
    "WORKERS",
    "Changes",
    "Extend",
    "Insert",
    "Storage",
    "Upsert",
]

_METADATA = sa.MetaData()
_SCHEMA_VERSION: Final = 1


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """A table whose rows say at which revision which tracker wrote them."""
    return sa.Table(
        name,
        _METADATA,
        *columns,
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
        sa.Column("writer", sa.String(64), nullable=False),
    )


_REVISIONS = sa.Table(
    "revisions",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
)

# One row a worker id. `expires_ms` 0: withdrawn.
WORKERS: Final = _table(
    "workers",
    sa.Column("worker_id", sa.String(128), primary_key=True),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("registration", sa.LargeBinary, nullable=False),
    sa.Column("load", sa.LargeBinary, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Column("reliability", sa.Double, nullable=False),
)

# One row a route session. `expires_ms` 0: closed.
SESSIONS: Final = _table(
    "sessions",
    sa.Column("session_id", sa.String(128), primary_key=True),
    sa.Column("ttl_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
)

# One row a route epoch.
EPOCHS: Final = _table(
    "epochs",
    sa.Column("session_id", sa.String(128), primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("route", sa.LargeBinary, nullable=False),
)

RECEIPTS: Final = _table(
    "receipts",
    sa.Column("session_id", sa.String(128), primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("work_id", sa.String(128), primary_key=True),
    sa.Column("worker_id", sa.String(128), primary_key=True),
    sa.Column("outcome", sa.Integer, nullable=False),
    sa.Column("receipt", sa.LargeBinary, nullable=False),
)

CERTIFICATIONS: Final = _table(
    "certifications",
    sa.Column("record_id", sa.String(64), primary_key=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

_KEYS: Final = {
    table: tuple(column.name for column in table.primary_key.columns)
    for table in (WORKERS, SESSIONS, EPOCHS, RECEIPTS, CERTIFICATIONS)
}

_Row = Mapping[str, Any]


@dataclass(frozen=True)
class Upsert:
    """Writes a whole row, whatever was there under its key."""

    table: sa.Table
    row: _Row


@dataclass(frozen=True)
class Insert:
    """Writes a row unless there is one under its key; `Storage.read` shows which one holds."""

    table: sa.Table
    row: _Row


@dataclass(frozen=True)
class Extend:
    """Changes columns of the row with this key, if `only_if`'s columns still have these values."""

    table: sa.Table
    key: _Row
    only_if: _Row
    values: _Row


_Write = Upsert | Insert | Extend


@dataclass(frozen=True)
class Changes:
    """Rows of each table, in the order of their revisions."""

    workers: Sequence[_Row]
    sessions: Sequence[_Row]
    epochs: Sequence[_Row]
    certifications: Sequence[_Row]


@dataclass
class _Pending:
    writes: list[_Write]
    done: asyncio.Future[None]


def _dialect_url(database: str) -> sa.URL:
    """The URL with its asyncio driver: sqlite:///PATH or postgresql[+asyncpg]://..."""
    try:
        url = make_url(database)
    except sa.exc.ArgumentError as error:
        raise ControlError(
            Reason.CONFIGURATION_INVALID,
            f"expected --database as sqlite:///FILE or postgresql://USER@HOST/NAME: {error}",
        ) from error
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    name = url.drivername.partition("+")[0]
    if name not in drivers:
        raise ControlError(
            Reason.CONFIGURATION_INVALID,
            f"expected a database of sqlite or postgresql, got {url.drivername}",
        )
    return url.set(drivername=drivers[name])


class Storage:
    """One tracker's way to the database. Made by open()."""

    def __init__(self, engine: AsyncEngine, tracker_id: str, lock: int | None) -> None:
        self.tracker_id = tracker_id
        # Whether this tracker is the only one: then nothing changes but by its own hand.
        self.exclusive = lock is not None
        self._engine = engine
        self._lock = lock
        self._insert: Any = sqlite.insert if lock is not None else postgresql.insert
        self._statements: dict[object, Any] = {}
        self._seen = 0
        self._pending: list[_Pending] = []
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._connection: AsyncConnection | None = None
        self._reader: AsyncConnection | None = None
        self._reading = asyncio.Lock()
        self._closing = False

    @classmethod
    async def open(cls, database: str, tracker_id: str) -> Storage:
        """Connects, makes the tables if they are not there, checks their version.

        Raises ControlError: CONFIGURATION_INVALID (no such database, another tracker's file,
        another version's tables), STORAGE_UNAVAILABLE.
        """
        url = _dialect_url(database)
        lock = _lock_file(url) if url.drivername.startswith("sqlite") else None
        options: dict[str, Any] = {}
        if lock is None:
            # The revisions order transactions; each must see what those before it committed.
            options = {"isolation_level": "READ COMMITTED", "pool_size": 4}
        engine = create_async_engine(url, **options)
        if lock is not None:
            sa.event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        storage = cls(engine, tracker_id, lock)
        try:
            await storage._start()
        except BaseException as error:
            await storage.close()
            if isinstance(error, sa.exc.SQLAlchemyError | OSError):
                raise ControlError(
                    Reason.STORAGE_UNAVAILABLE, f"expected the database {url}: {error}"
                ) from error
            raise
        return storage

    @property
    def name(self) -> str:
        """The kind of database, for people."""
        return self._engine.dialect.name

    async def _start(self) -> None:
        async with self._engine.begin() as connection:
            if not self.exclusive:  # two trackers that start at once would both make the tables
                await connection.execute(sa.text("SELECT pg_advisory_xact_lock(7265646)"))
            await connection.run_sync(_METADATA.create_all)
            first = {"id": 1, "schema_version": _SCHEMA_VERSION, "revision": 0}
            await connection.execute(
                self._insert(_REVISIONS).values(first).on_conflict_do_nothing()
            )
            found = (await connection.execute(sa.select(_REVISIONS.c.schema_version))).scalar_one()
        if found != _SCHEMA_VERSION:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected tables of version {_SCHEMA_VERSION}, the database has {found}; "
                "use a tracker of that version or another database",
            )
        self._connection = await self._engine.connect()
        self._reader = await self._engine.connect()
        self._writer = asyncio.create_task(self._write_forever())

    async def close(self) -> None:
        """Commits what is pending and lets go of the database."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            await self._writer
        for connection in (self._connection, self._reader):
            if connection is not None:
                await connection.close()
        await self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def write(self, writes: Iterable[_Write]) -> None:
        """Returns once all of them are committed, in one transaction.

        Raises ControlError (STORAGE_UNAVAILABLE) when they are not.
        """
        if self._closing:
            raise ControlError(Reason.STORAGE_UNAVAILABLE, "the tracker is stopping")
        pending = _Pending(list(writes), asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._wake.set()
        await asyncio.shield(pending.done)

    async def _write_forever(self) -> None:
        while not (self._closing and not self._pending):
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, []
            if not batch:
                continue
            try:
                await self._commit([write for pending in batch for write in pending.writes])
            except (sa.exc.SQLAlchemyError, OSError):
                await self._recover()
                for pending in batch:  # find out whose fault it was
                    await self._commit_alone(pending)
            else:
                for pending in batch:
                    if not pending.done.done():
                        pending.done.set_result(None)

    async def _commit_alone(self, pending: _Pending) -> None:
        try:
            await self._commit(pending.writes)
        except (sa.exc.SQLAlchemyError, OSError) as error:
            await self._recover()
            if not pending.done.done():
                pending.done.set_exception(
                    ControlError(Reason.STORAGE_UNAVAILABLE, f"the database refused: {error}")
                )
        else:
            if not pending.done.done():
                pending.done.set_result(None)

    async def _recover(self) -> None:
        """A connection that works again after a failure, if there is one to be had."""
        with contextlib.suppress(sa.exc.SQLAlchemyError, OSError):
            assert self._connection is not None
            await self._connection.close()
            self._connection = await self._engine.connect()

    async def _commit(self, writes: Sequence[_Write]) -> None:
        connection = self._connection
        assert connection is not None
        async with connection.begin():
            bump = self._cached("bump", _bump)
            revision = (await connection.execute(bump)).scalar_one()
            mark = {"revision": revision, "writer": self.tracker_id}
            # Neighbours of one kind become one call; the order of the rest is kept.
            rows: list[dict[str, Any]] = []
            kind: object = None
            for write in writes:
                if isinstance(write, Extend):
                    shape: object = (Extend, write.table.name, tuple(write.values))
                    row = {f"key_{name}": value for name, value in write.key.items()}
                    row |= {f"if_{name}": value for name, value in write.only_if.items()}
                    row |= write.values
                else:
                    shape = (type(write), write.table.name)
                    row = dict(write.row)
                if shape != kind and rows:
                    await connection.execute(self._statements[kind], rows)
                    rows = []
                kind = shape
                if kind not in self._statements:
                    self._statements[kind] = self._statement(write)
                rows.append(row | mark)
            if rows:
                await connection.execute(self._statements[kind], rows)

    def _cached(self, key: str, make: Any) -> Any:
        if key not in self._statements:
            self._statements[key] = make()
        return self._statements[key]

    def _statement(self, write: _Write) -> Any:
        table = write.table
        if isinstance(write, Extend):
            conditions = [table.c[name] == sa.bindparam(f"key_{name}") for name in write.key]
            conditions += [table.c[name] == sa.bindparam(f"if_{name}") for name in write.only_if]
            values: Any = {
                name: sa.bindparam(name) for name in [*write.values, "revision", "writer"]
            }
            return table.update().where(*conditions).values(values)
        insert = self._insert(table)
        if isinstance(write, Insert):
            return insert.on_conflict_do_nothing()
        others = {c.name: insert.excluded[c.name] for c in table.c if not c.primary_key}
        return insert.on_conflict_do_update(index_elements=_KEYS[table], set_=others)

    async def read(self, table: sa.Table, keys: Sequence[_Row]) -> list[_Row]:
        """The rows with these keys, in the keys' order; those that there are."""
        columns = [table.c[name] for name in _KEYS[table]]
        found: dict[tuple[Any, ...], _Row] = {}
        for start in range(0, len(keys), 64):
            some = [
                tuple(key[column.name] for column in columns) for key in keys[start : start + 64]
            ]
            query = sa.select(table).where(sa.tuple_(*columns).in_(some))
            for row in await self.query(query):
                found[tuple(row[column.name] for column in columns)] = row
        wanted = [tuple(key[column.name] for column in columns) for key in keys]
        return [found[key] for key in wanted if key in found]

    async def query(self, query: sa.Select[Any]) -> Sequence[_Row]:
        """Any rows, as they are committed now. Raises ControlError (STORAGE_UNAVAILABLE)."""
        async with self._reading:
            assert self._reader is not None
            try:
                async with self._reader.begin():
                    rows: Sequence[Any] = (await self._reader.execute(query)).mappings().all()
                    return rows
            except (sa.exc.SQLAlchemyError, OSError) as error:
                with contextlib.suppress(sa.exc.SQLAlchemyError, OSError):
                    await self._reader.close()
                    self._reader = await self._engine.connect()
                raise ControlError(
                    Reason.STORAGE_UNAVAILABLE, f"the database refused: {error}"
                ) from error

    async def changes(self) -> Changes:
        """Everything at the first call; later what others wrote since the last one."""
        first = self._seen == 0
        newest = (await self.query(sa.select(_REVISIONS.c.revision)))[0]["revision"]
        if newest == self._seen:
            return Changes((), (), (), ())
        found = []
        for table in (WORKERS, SESSIONS, EPOCHS, CERTIFICATIONS):
            query = sa.select(table).where(
                table.c.revision > self._seen, table.c.revision <= newest
            )
            if not first:
                query = query.where(table.c.writer != self.tracker_id)
            elif table is SESSIONS:
                query = query.where(table.c.expires_ms > 0)
            elif table is EPOCHS:
                live = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.expires_ms > 0)
                query = query.where(table.c.session_id.in_(live))
            found.append(await self.query(query.order_by(table.c.revision)))
        self._seen = newest
        return Changes(*found)


def _bump() -> Any:
    return (
        _REVISIONS.update()
        .where(_REVISIONS.c.id == 1)
        .values(revision=_REVISIONS.c.revision + 1)
        .returning(_REVISIONS.c.revision)
    )


def _lock_file(url: sa.URL) -> int:
    """Takes the lock beside a SQLite file; it ends with the process, however that ends."""
    path = url.database
    if not path or path == ":memory:":
        raise ControlError(
            Reason.CONFIGURATION_INVALID, f"expected a file in the database URL, got {url}"
        )
    file = pathlib.Path(path + ".lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ControlError(
            Reason.CONFIGURATION_INVALID, f"expected to write beside {path}: {error}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ControlError(
            Reason.CONFIGURATION_INVALID,
            f"another tracker works on {path}; several trackers share PostgreSQL, not SQLite",
        ) from error
    return lock


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """Readers beside the writer, and no fsync a commit: a killed process loses nothing by that.

    A machine that loses power may lose its last commits; PostgreSQL is for those who mind.
    """
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()
