"""The database of one or several trackers: SQLite, or PostgreSQL with the same code.

    storage = await Storage.open("sqlite:///tracker.db", tracker_id="t1")
    await storage.write([Upsert(SESSIONS, {...}), ...])  # returns once it is committed
    await storage.decide(rule)                           # writes that depend on what is there
    changes = await storage.changes()                    # what others wrote since the last call
    await storage.close()

Writes that come while a commit is under way go into the next one together, so that thousands of
heartbeats a second cost some dozens of transactions. Every transaction takes the next revision of
the one row in `revisions` first: that orders the transactions of all trackers, and whoever has
read up to a revision misses nothing below it. For the same reason a rule, which runs inside of a
transaction, sees everything that was committed before and nothing changes under it.

A SQLite file belongs to one tracker at a time, which holds a lock beside it. Its write-ahead log is
brought into the file by a thread of its own, so that no commit waits for the disk.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import os
import pathlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

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
    "Decided",
    "Extend",
    "Insert",
    "Purge",
    "Reading",
    "Rule",
    "Storage",
    "Upsert",
    "Write",
]

_Answer = TypeVar("_Answer")

# Between two commits of patient writes: a lone one is committed at once, under load more go into
# one, since a commit costs as much as many rows.
_REST_SECONDS: Final = 0.004
# SQLite: how often its log is brought into the file, and after how many pages (256 MiB) a commit
# does so itself, if that has not kept up.
_CHECKPOINT_SECONDS: Final = 0.5
_LOG_PAGES: Final = 1 << 16
_METADATA = sa.MetaData()
_SCHEMA_VERSION: Final = 2


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

# One row a worker id. Withdrawn: `generation` 0, and `expires_ms` is when, negative.
WORKERS: Final = _table(
    "workers",
    sa.Column("worker_id", sa.String(128), primary_key=True),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("registration", sa.LargeBinary, nullable=False),
    sa.Column("load", sa.LargeBinary, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Column("reliability", sa.Double, nullable=False),
)

# One row a route session, with its newest epoch. Closed: `expires_ms` is when, negative.
SESSIONS: Final = _table(
    "sessions",
    sa.Column("session_id", sa.String(128), primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
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
    """Writes a row unless there is one under its key."""

    table: sa.Table
    row: _Row


@dataclass(frozen=True)
class Extend:
    """Changes columns of the row with this key, if `only_if`'s columns still have these values."""

    table: sa.Table
    key: _Row
    only_if: _Row
    values: _Row


@dataclass(frozen=True)
class Purge:
    """Deletes the workers, or the sessions with their epochs, that have been over since then."""

    table: sa.Table
    over_since_ms: int


Write: TypeAlias = Upsert | Insert | Extend | Purge


class Reading(Protocol):
    """What a rule may look at, inside of its transaction."""

    @property
    def revision(self) -> int:
        """The transaction's."""

    def rows(self, table: sa.Table, keys: Sequence[_Row]) -> list[_Row]:
        """The rows with these keys, in the keys' order; those that there are."""


@dataclass(frozen=True)
class Decided(Generic[_Answer]):
    """What a rule makes of what it read: writes, and an answer for whoever asked."""

    answer: _Answer
    writes: Sequence[Write] = ()


# Runs in a thread of the storage's, possibly more than once, so it must touch nothing but the rows.
# What it raises (a ControlError, if it is sound) refuses its own writes and no others.
Rule: TypeAlias = Callable[[Reading], Decided[_Answer]]


@dataclass(frozen=True)
class Changes:
    """Rows of each table, in the order of their revisions."""

    workers: Sequence[_Row]
    sessions: Sequence[_Row]
    epochs: Sequence[_Row]
    certifications: Sequence[_Row]


@dataclass
class _Pending:
    rule: Rule[Any]
    done: asyncio.Future[Any]


class _Line(Protocol):
    """A connection, and where work on it runs."""

    async def run(self, work: Callable[[sa.Connection], _Answer]) -> _Answer:
        """Does work in one transaction. After a failure the next call connects anew."""

    async def close(self) -> None:
        """Lets go of the connection."""


class _ThreadLine:
    """A thread of its own, which work enters once a transaction: for drivers that block."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "storage")
        self._connection: sa.Connection | None = None

    async def run(self, work: Callable[[sa.Connection], _Answer]) -> _Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[sa.Connection], _Answer]) -> _Answer:
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            with self._connection.begin():
                return work(self._connection)
        except (sa.exc.SQLAlchemyError, OSError):
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError, OSError):
                self._connection.close()
            self._connection = None

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._let_go)
        self._thread.shutdown()


class _LoopLine:
    """The event loop itself, through a driver that does not block."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None

    async def run(self, work: Callable[[sa.Connection], _Answer]) -> _Answer:
        if self._connection is None:
            self._connection = await self._engine.connect()
        try:
            async with self._connection.begin():
                return await self._connection.run_sync(work)
        except (sa.exc.SQLAlchemyError, OSError):
            await self.close()
            raise

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sa.exc.SQLAlchemyError, OSError):
                await self._connection.close()
            self._connection = None


def _kind(url: sa.URL) -> str:
    return url.drivername.partition("+")[0]


def _dialect_url(database: str) -> sa.URL:
    """The URL with its driver: sqlite:///PATH or postgresql[+asyncpg]://..."""
    try:
        url = make_url(database)
    except sa.exc.ArgumentError as error:
        raise ControlError(
            Reason.CONFIGURATION_INVALID,
            f"expected --database as sqlite:///FILE or postgresql://USER@HOST/NAME: {error}",
        ) from error
    drivers = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+asyncpg"}
    name = _kind(url)
    if name not in drivers:
        raise ControlError(
            Reason.CONFIGURATION_INVALID,
            f"expected a database of sqlite or postgresql, got {url.drivername}",
        )
    return url.set(drivername=drivers[name])


class Storage:
    """One tracker's way to the database. Made by open()."""

    def __init__(self, url: sa.URL, tracker_id: str, lock: int | None) -> None:
        self.tracker_id = tracker_id
        # The kind of database, for people.
        self.name = _kind(url)
        # Whether this tracker is the only one: then nothing changes but by its own hand.
        self.exclusive = lock is not None
        self._lock = lock
        self._url = url
        self._insert: Any = sqlite.insert if lock is not None else postgresql.insert
        self._statements: dict[object, Any] = {}
        self._seen = 0
        # Revisions of its own that are committed and lie behind `_seen`.
        self._own: collections.deque[int] = collections.deque()
        # The revision of the transaction under way, once it has one; set when its outcome is known.
        self._under_way: int | None = None
        self._settled = asyncio.Event()
        self._pending: list[_Pending] = []
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._checkpoints: _Checkpoints | None = None
        self._reading = asyncio.Lock()
        self._closing = False
        self._dispose: Callable[[], Awaitable[None]]
        self._write_line, self._read_line = self._connect(url)

    def _connect(self, url: sa.URL) -> tuple[_Line, _Line]:
        """One line for the writer, one for everybody who reads."""
        if self.exclusive:
            engine = sa.create_engine(url, connect_args={"check_same_thread": False})
            sa.event.listen(engine, "connect", _prepare_sqlite)

            async def dispose() -> None:
                engine.dispose()

            self._dispose = dispose
            return _ThreadLine(engine), _ThreadLine(engine)
        # The revisions order transactions; each must see what those before it committed.
        shared = create_async_engine(url, isolation_level="READ COMMITTED", pool_size=2)
        self._dispose = shared.dispose
        # A query is one statement, so it needs no BEGIN and no COMMIT.
        return _LoopLine(shared), _LoopLine(shared.execution_options(isolation_level="AUTOCOMMIT"))

    @classmethod
    async def open(cls, database: str, tracker_id: str) -> Storage:
        """Connects, makes the tables if they are not there, checks their version.

        Raises ControlError: CONFIGURATION_INVALID (no such database, another tracker's file,
        another version's tables), STORAGE_UNAVAILABLE.
        """
        url = _dialect_url(database)
        lock = _lock_file(url) if _kind(url) == "sqlite" else None
        storage = cls(url, tracker_id, lock)
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

    async def _start(self) -> None:
        found = await self._write_line.run(self._make_tables)
        if found != _SCHEMA_VERSION:
            raise ControlError(
                Reason.CONFIGURATION_INVALID,
                f"expected tables of version {_SCHEMA_VERSION}, the database has {found}; "
                "use a tracker of that release, or a new database, which fills by itself",
            )
        self._writer = asyncio.create_task(self._write_forever())
        if self.exclusive:
            assert self._url.database is not None
            self._checkpoints = _Checkpoints(self._url.database)

    def _make_tables(self, connection: sa.Connection) -> int:
        """The version of the tables that are there now."""
        if not self.exclusive:  # two trackers that start at once would both make the tables
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7265646)"))
        if sa.inspect(connection).has_table(_REVISIONS.name):
            # Tables of another version are left as they are.
            there = connection.execute(sa.select(_REVISIONS.c.schema_version)).scalar_one_or_none()
            if there not in (None, _SCHEMA_VERSION):
                return int(there)
        _METADATA.create_all(connection)
        first = {"id": 1, "schema_version": _SCHEMA_VERSION, "revision": 0}
        connection.execute(self._insert(_REVISIONS).values(first).on_conflict_do_nothing())
        version: int = connection.execute(sa.select(_REVISIONS.c.schema_version)).scalar_one()
        return version

    async def close(self) -> None:
        """Commits what is pending and lets go of the database."""
        self._closing = True
        self._wake.set()
        self._hurry.set()
        if self._writer is not None:
            await self._writer
        if self._checkpoints is not None:
            await asyncio.to_thread(self._checkpoints.close)
        await self._write_line.close()
        await self._read_line.close()
        await self._dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def write(self, writes: Sequence[Write], *, patient: bool = False) -> None:
        """Returns once all of them are committed, in one transaction.

        Patient writes wait a moment for others to go with.

        Raises ControlError (STORAGE_UNAVAILABLE) when they are not.
        """
        await self.decide(lambda _: Decided(None, writes), patient=patient)

    async def decide(self, rule: Rule[_Answer], *, patient: bool = False) -> _Answer:
        """The rule's answer, once its writes are committed, in the transaction in which it read.

        Raises ControlError: STORAGE_UNAVAILABLE, and what the rule raises; then nothing of it is
        written.
        """
        if self._closing:
            raise ControlError(Reason.STORAGE_UNAVAILABLE, "the tracker is stopping")
        pending = _Pending(rule, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._wake.set()
        if not patient:
            self._hurry.set()
        answer: _Answer = await pending.done
        return answer

    async def _write_forever(self) -> None:
        loop = asyncio.get_running_loop()
        rested = loop.time()
        while not (self._closing and not self._pending):
            await self._wake.wait()
            if (rest := rested - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), rest)
            self._wake.clear()
            self._hurry.clear()
            batch, self._pending = self._pending, []
            if not batch:
                continue
            try:
                await self._commit(batch)
            except (sa.exc.SQLAlchemyError, OSError):
                for pending in batch:  # find out whose fault it was
                    await self._commit_alone(pending)
            rested = loop.time() + _REST_SECONDS

    async def _commit_alone(self, pending: _Pending) -> None:
        try:
            await self._commit([pending])
        except (sa.exc.SQLAlchemyError, OSError) as error:
            if not pending.done.done():
                pending.done.set_exception(
                    ControlError(Reason.STORAGE_UNAVAILABLE, f"the database refused: {error}")
                )

    async def _commit(self, batch: Sequence[_Pending]) -> None:
        rules = [pending.rule for pending in batch]
        self._settled.clear()
        try:
            revision, answers = await self._write_line.run(
                lambda connection: self._apply(connection, rules)
            )
            if not self.exclusive:
                self._own.append(revision)
        finally:
            self._under_way = None
            self._settled.set()
        for pending, answer in zip(batch, answers, strict=True):
            if pending.done.done():
                continue
            if isinstance(answer, Exception):
                pending.done.set_exception(answer)
            else:
                pending.done.set_result(answer)

    def _apply(
        self, connection: sa.Connection, rules: Sequence[Rule[Any]]
    ) -> tuple[int, list[Any]]:
        """The transaction's revision, and answers of the rules or what they raised."""
        revision = connection.execute(self._cached("bump", _bump)).scalar_one()
        self._under_way = revision
        transaction = _Transaction(self, connection, revision)
        answers: list[Any] = []
        for rule in rules:
            try:
                decided = rule(transaction)
            except (sa.exc.SQLAlchemyError, OSError):
                raise
            except Exception as error:
                answers.append(error)
                continue
            transaction.add(decided.writes)
            answers.append(decided.answer)
        transaction.flush()
        return revision, answers

    def statement(self, shape: object, write: Upsert | Insert | Extend) -> Any:
        """The statement for writes of a shape, made once."""
        return self._cached(shape, lambda: self._statement(write))

    def _cached(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._statements:
            self._statements[key] = make()
        return self._statements[key]

    def _statement(self, write: Upsert | Insert | Extend) -> Any:
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

    async def query(self, query: sa.Select[Any]) -> Sequence[_Row]:
        """Any rows, as they are committed now. Raises ControlError (STORAGE_UNAVAILABLE)."""
        async with self._reading:
            try:
                return await self._read_line.run(lambda connection: _fetch(connection, query))
            except (sa.exc.SQLAlchemyError, OSError) as error:
                raise ControlError(
                    Reason.STORAGE_UNAVAILABLE, f"the database refused: {error}"
                ) from error

    async def changes(self) -> Changes:
        """Everything at the first call; later what others wrote since the last one."""
        newest = (await self.query(sa.select(_REVISIONS.c.revision)))[0]["revision"]
        if self._under_way is not None and self._under_way <= newest:
            # Committed, by us or, if ours failed, by another: ours are not to be read again.
            await self._settled.wait()
        since, first = self._seen, self._seen == 0
        own = sum(since < revision <= newest for revision in self._own)
        if own == newest - since and not first:  # nobody else wrote anything
            found: list[Sequence[_Row]] = [(), (), (), ()]
        else:
            tables = (WORKERS, SESSIONS, EPOCHS, CERTIFICATIONS)
            found = [await self.query(self._written(table, since, newest)) for table in tables]
        self._seen = newest
        while self._own and self._own[0] <= newest:
            self._own.popleft()
        return Changes(*found)

    def _written(self, table: sa.Table, since: int, newest: int) -> sa.Select[Any]:
        """The rows of others behind one revision and up to another."""
        query = sa.select(table).where(table.c.revision > since, table.c.revision <= newest)
        if since:
            query = query.where(table.c.writer != self.tracker_id)
        elif table is SESSIONS:
            query = query.where(table.c.expires_ms > 0)
        elif table is EPOCHS:
            live = sa.select(SESSIONS.c.session_id).where(SESSIONS.c.expires_ms > 0)
            query = query.where(table.c.session_id.in_(live))
        return query.order_by(table.c.revision)


class _Transaction:
    """Rows on their way into one transaction: neighbours of one kind become one call."""

    def __init__(self, storage: Storage, connection: sa.Connection, revision: int) -> None:
        self.revision = revision
        self._storage = storage
        self._connection = connection
        self._mark = {"revision": revision, "writer": storage.tracker_id}
        self._statement: Any = None
        self._waiting: list[dict[str, Any]] = []

    def add(self, writes: Sequence[Write]) -> None:
        """Takes up writes; their order is kept."""
        for write in writes:
            if isinstance(write, Extend):
                names = (tuple(write.only_if), tuple(write.values))
                shape: object = (Extend, write.table.name, names)
                row = {f"key_{name}": value for name, value in write.key.items()}
                row |= {f"if_{name}": value for name, value in write.only_if.items()}
                row |= write.values
            elif isinstance(write, Purge):
                self.flush()
                self._purge(write)
                continue
            else:
                shape = (type(write), write.table.name)
                row = dict(write.row)
            statement = self._storage.statement(shape, write)
            if statement is not self._statement:
                self.flush()
                self._statement = statement
            row |= self._mark
            self._waiting.append(row)

    def flush(self) -> None:
        """Executes what was taken up."""
        if self._waiting:
            self._connection.execute(self._statement, self._waiting)
            self._waiting = []

    def _purge(self, purge: Purge) -> None:
        table = purge.table
        over = table.c.expires_ms.between(1 - purge.over_since_ms, purge.over_since_ms - 1)
        if table is SESSIONS:
            gone = sa.select(table.c.session_id).where(over)
            self._connection.execute(EPOCHS.delete().where(EPOCHS.c.session_id.in_(gone)))
        self._connection.execute(table.delete().where(over))

    def rows(self, table: sa.Table, keys: Sequence[_Row]) -> list[_Row]:
        """See Reading; what was taken up counts."""
        self.flush()
        columns = [table.c[name] for name in _KEYS[table]]
        wanted = [tuple(key[column.name] for column in columns) for key in keys]
        found: dict[tuple[Any, ...], _Row] = {}
        for start in range(0, len(wanted), 64):
            query = sa.select(table).where(sa.tuple_(*columns).in_(wanted[start : start + 64]))
            for row in _fetch(self._connection, query):
                found[tuple(row[column.name] for column in columns)] = row
        return [found[key] for key in wanted if key in found]


def _fetch(connection: sa.Connection, query: sa.Select[Any]) -> Sequence[_Row]:
    rows: Sequence[Any] = connection.execute(query).mappings().all()
    return rows


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


class _Checkpoints:
    """Brings a SQLite file's log into the file, again and again, until close().

    A checkpoint waits for the disk, 50 to 200 ms on an ordinary one. The one that SQLite makes by
    itself is part of some commit, and everybody waits with it; this kind keeps nobody waiting.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            while not self._ended.wait(_CHECKPOINT_SECONDS):
                # A disk that is full is for the writer to report.
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Returns once it has ended."""
        self._ended.set()
        self._thread.join()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """Readers beside the writer, and no fsync a commit: a killed process loses nothing by that.

    A machine that loses power may lose its last commits; PostgreSQL is for those who mind.
    """
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()
