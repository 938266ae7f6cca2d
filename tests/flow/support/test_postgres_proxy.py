"""The fault proxy in front of PostgreSQL: a fault hits its statement, in every way a driver can send one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import generators
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.db import pooled
from tests.support.postgres_proxy import PostgresProxy
from tests.support.postgres_wire import CopyPoint
from tests.support.proxy_link import Cut, Trigger
from tests.support.wait import wait_until

DEADLINE_S = 20.0
INSERT = "INSERT INTO notes"


@pytest.fixture
def direct(database: str) -> Iterator[psycopg.Connection]:
    """A connection past the proxy, and an empty table to write to."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE notes (id int, body text)")
        yield connection


@pytest.fixture
def proxy(database: str) -> Iterator[PostgresProxy]:
    with PostgresProxy(database) as proxy:
        yield proxy


@pytest.fixture
def address(direct: psycopg.Connection, proxy: PostgresProxy, database: str) -> str:
    """The database by way of the proxy."""
    del direct
    return proxy.proxied(database)


def ids(direct: psycopg.Connection) -> list[int]:
    return [row[0] for row in direct.execute("SELECT id FROM notes ORDER BY id")]


def idle(direct: psycopg.Connection) -> bool:
    """Whether no other client is left: what they had sent is carried out or rolled back."""
    row = direct.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    ).fetchone()
    assert row is not None
    return bool(row[0] == 0)


def settled(direct: psycopg.Connection) -> list[int]:
    wait_until(lambda: idle(direct), DEADLINE_S)
    return ids(direct)


@contextlib.contextmanager
def connected(address: str, *, autocommit: bool = True) -> Iterator[psycopg.Connection]:
    """A connection that a fault may cut: it is closed at the end, and not told to commit.

    A driver that waits for an answer may see of a reset only that the socket has an error: the statement fails, and the
    connection is open as before, with a command in progress.
    """
    with contextlib.closing(psycopg.connect(address, autocommit=autocommit)) as connection:
        yield connection


def armed(trigger: Trigger) -> bool:
    """As if nothing had happened to it."""
    return trigger.armed and trigger.fired == 0


def test_the_proxy_is_not_noticed(address: str, proxy: PostgresProxy, database: str) -> None:
    with psycopg.connect(address) as connection:
        assert connection.info.host == "127.0.0.1"
        assert connection.info.dbname == conninfo_to_dict(database)["dbname"]
        connection.execute("INSERT INTO notes VALUES (%s, %s)", [1, "one"])
        connection.commit()
        assert connection.execute("SELECT body FROM notes").fetchone() == ("one",)
    assert proxy.traffic.statements == 6, "both transactions begin and end"
    assert proxy.traffic.transactions == 2


def test_another_server_is_refused(proxy: PostgresProxy) -> None:
    with pytest.raises(ValueError, match="this proxy leads to"):
        proxy.proxied("host=example.org dbname=x")


@pytest.mark.parametrize("sslmode", ["disable", "prefer"])
@pytest.mark.parametrize("gssencmode", ["disable", "prefer"])
def test_encryption_is_declined(address: str, sslmode: str, gssencmode: str) -> None:
    with psycopg.connect(make_conninfo(address, sslmode=sslmode, gssencmode=gssencmode)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError, match="SSL"):
        psycopg.connect(make_conninfo(address, sslmode="require"))


def test_large_results_and_values(address: str) -> None:
    with psycopg.connect(address) as connection:
        rows = connection.execute("SELECT n, repeat('x', 50) FROM generate_series(1, 100000) AS n").fetchall()
        assert len(rows) == 100_000
        large = "y" * 20_000_000
        assert connection.execute("SELECT %s", [large]).fetchone() == (large,)
        with connection.cursor("by name") as cursor:
            cursor.execute("SELECT generate_series(1, 10000)")
            assert sum(n for (n,) in cursor) == 50_005_000


def test_copies_both_ways(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    with psycopg.connect(address) as connection:
        with connection.cursor().copy("COPY notes FROM STDIN") as copy:
            for number in range(10_000):
                copy.write_row((number, "z" * 100))
        with connection.cursor().copy("COPY notes TO STDOUT") as copy:
            assert sum(1 for _ in copy.rows()) == 10_000
        connection.commit()
    assert len(ids(direct)) == 10_000
    assert proxy.traffic.copied_bytes > 1_000_000


def test_cancels_and_notifications_pass(address: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("LISTEN news")
        connection.execute("NOTIFY news, 'hello'")
        assert [note.payload for note in connection.notifies(timeout=DEADLINE_S, stop_after=1)] == ["hello"]
        canceller = threading.Thread(target=connection.cancel_safe)
        canceller.start()
        with contextlib.suppress(psycopg.errors.QueryCanceled):
            connection.execute("SELECT pg_sleep(0.2)")  # the cancel may come before, while or after
        canceller.join()


PARAMETERS = pytest.mark.parametrize("parameters", [None, [1]], ids=["simple", "extended"])


def insert(connection: psycopg.Connection, parameters: list[int] | None, *, prepare: bool | None = None) -> None:
    query = f"{INSERT} VALUES ({'1' if parameters is None else '%s'})"
    connection.execute(query.encode(), parameters, prepare=prepare)


@PARAMETERS
@pytest.mark.parametrize("how", Cut)
def test_a_swallowed_reply_leaves_the_row(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, parameters: list[int] | None, how: Cut
) -> None:
    trigger = proxy.swallow(INSERT, how=how)
    with connected(address) as connection, pytest.raises(psycopg.OperationalError):
        insert(connection, parameters)
    assert ids(direct) == [1], "it was committed before the client was cut off"
    assert trigger.fired == 1
    assert [fired.what for fired in proxy.log] == ["swallow"]
    assert proxy.log[0].text.startswith(INSERT)
    with psycopg.connect(address, autocommit=True) as connection:
        insert(connection, parameters)
    assert ids(direct) == [1, 1], "once means once"


@PARAMETERS
def test_cut_before_the_statement_there_is_no_row(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, parameters: list[int] | None
) -> None:
    trigger = proxy.cut_before(INSERT)
    with connected(address) as connection, pytest.raises(psycopg.OperationalError):
        insert(connection, parameters)
    assert settled(direct) == []
    assert trigger.fired == 1


def insert_and_commit(address: str) -> None:
    with connected(address, autocommit=False) as connection, connection:
        insert(connection, [1])


def test_an_unknown_commit(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    proxy.swallow("^COMMIT")
    with pytest.raises(psycopg.OperationalError):
        insert_and_commit(address)
    assert ids(direct) == [1]


def test_a_commit_that_never_arrived(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    proxy.cut_before("^COMMIT")
    with pytest.raises(psycopg.OperationalError):
        insert_and_commit(address)
    assert settled(direct) == []


def test_a_statement_swallowed_inside_a_transaction_is_rolled_back(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    proxy.swallow(INSERT)
    with pytest.raises(psycopg.OperationalError):
        insert_and_commit(address)
    assert settled(direct) == []


def test_prepared_statements_are_known_by_their_text(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    with connected(address) as connection:
        insert(connection, [1], prepare=True)
        insert(connection, [1])
        trigger = proxy.swallow(INSERT)
        with pytest.raises(psycopg.OperationalError):
            insert(connection, [1])
    assert len(ids(direct)) == 3
    assert proxy.log[0].text.startswith(INSERT), "the text was sent two executions earlier"
    assert trigger.fired == 1


def test_a_statement_that_fails_leaves_the_fault_armed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    trigger = proxy.swallow(INSERT)
    with connected(address) as connection:
        for parameters in (["not a number"], [2**40]):
            with pytest.raises(psycopg.DataError):
                connection.execute("INSERT INTO notes VALUES (%s::text::int)", parameters)
        assert armed(trigger)
        with pytest.raises(psycopg.OperationalError):
            insert(connection, [1])
    assert ids(direct) == [1]
    assert proxy.traffic.errors == 2


def test_a_statement_refused_before_all_of_it_was_sent_leaves_the_fault_armed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    """The server answers its Parse with an error while Bind, Execute and Sync are still on their way."""
    trigger = proxy.swallow(INSERT)
    with connected(address) as connection:
        pgconn = connection.pgconn
        pgconn.enter_pipeline_mode()
        pgconn.send_prepare(b"", f"{INSERT} VALUES (nonsense)".encode())
        pgconn.send_flush_request()
        pgconn.flush()
        wait_until(lambda: proxy.traffic.errors == 1, DEADLINE_S)
        pgconn.send_query_prepared(b"", None)
        pgconn.pipeline_sync()
        pgconn.flush()
        (refused,), *_ = (connection.wait(generators.fetch_many(pgconn)) for _ in range(3))
        assert refused.status == psycopg.pq.ExecStatus.FATAL_ERROR
        pgconn.exit_pipeline_mode()
        assert armed(trigger)
        with pytest.raises(psycopg.OperationalError):
            insert(connection, [1])
    assert ids(direct) == [1]


def send_insert(connection: psycopg.Connection) -> None:
    """Send it and do not wait for the answer."""
    connection.pgconn.send_query(f"{INSERT} VALUES (1)".encode())
    connection.pgconn.flush()


def test_a_connection_that_ends_first_leaves_the_fault_armed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    trigger = proxy.swallow(INSERT)
    with direct.transaction(), contextlib.closing(psycopg.connect(address, autocommit=True)) as connection:
        direct.execute("LOCK TABLE notes")
        send_insert(connection)
        wait_until(lambda: not trigger.armed, DEADLINE_S)
        proxy.cut()
        wait_until(lambda: proxy.links == 0, DEADLINE_S)
    assert armed(trigger)


def test_as_often_as_told(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    trigger = proxy.swallow(lambda text: text.startswith(INSERT), times=3)
    failures = 0
    for _ in range(5):
        with connected(address) as connection:
            try:
                insert(connection, [1])
            except psycopg.OperationalError:
                failures += 1
    assert (failures, trigger.fired, len(ids(direct))) == (3, 3, 5)


def test_healing_disarms(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    trigger = proxy.cut_before(INSERT, times=None)
    proxy.heal()
    with psycopg.connect(address, autocommit=True) as connection:
        insert(connection, [1])
    assert (trigger.fired, ids(direct)) == (0, [1])


def test_one_fault_hits_one_of_many(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    trigger = proxy.swallow(INSERT)
    failed: list[int] = []

    def work(number: int) -> None:
        with connected(address) as connection:
            try:
                insert(connection, [number])
            except psycopg.OperationalError:
                failed.append(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == trigger.fired == 1
    assert ids(direct) == list(range(8))


def insert_three(address: str) -> None:
    """In one pipeline, with three different texts."""
    with psycopg.connect(address, autocommit=True) as connection, connection.pipeline():
        for number in (1, 2, 3):
            connection.execute(f"INSERT INTO notes VALUES (%s, 'number {number}')".encode(), [number])


@pytest.mark.parametrize("matched", [1, pytest.param(2, marks=pytest.mark.again), 3])
def test_a_pipeline_shares_the_fate_of_its_transaction(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, matched: int
) -> None:
    trigger = proxy.swallow(rf"\(\$1, 'number {matched}'")
    with pytest.raises(psycopg.OperationalError):
        insert_three(address)
    assert ids(direct) == [1, 2, 3], "one implicit transaction, committed at its end"
    assert trigger.fired == 1


def test_a_pipeline_is_cut_before_its_second_statement(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    proxy.cut_before("number 2")
    with pytest.raises(psycopg.OperationalError):
        insert_three(address)
    assert settled(direct) == [], "what came before was never committed"


def test_answers_fetched_within_a_pipeline_arrive_and_its_end_is_swallowed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    trigger = proxy.swallow(INSERT)
    with connected(address) as connection:
        pipeline = connection.pipeline()
        pipeline.__enter__()
        cursor = connection.execute("INSERT INTO notes VALUES (%s) RETURNING id", [7])
        assert cursor.fetchone() == (7,), "a flush asks for answers before the transaction ends"
        assert trigger.fired == 0
        with pytest.raises(psycopg.OperationalError):
            pipeline.__exit__(None, None, None)
        assert trigger.fired == 1
    assert ids(direct) == [7]


def insert_and_fail(connection: psycopg.Connection) -> None:
    with connection.pipeline():
        insert(connection, [1])
        connection.execute("SELECT 1 / %s", [0])


def test_an_error_later_in_the_pipeline_leaves_the_fault_armed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    trigger = proxy.swallow(INSERT)
    with psycopg.connect(address, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            insert_and_fail(connection)
        assert armed(trigger)
        assert connection.execute("SELECT 1").fetchone() == (1,), "the connection goes on"
    assert ids(direct) == []


def test_asynchronous_connections_and_pools(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    async def work() -> None:
        async with pooled(address) as pool:
            for _ in range(3):
                with pytest.raises(psycopg.OperationalError):
                    async with pool.connection() as connection:
                        await connection.execute(f"{INSERT} VALUES (%s)", [1])
                async with pool.connection() as connection:
                    await connection.execute("SELECT 1")

    trigger = proxy.swallow(INSERT, times=None)
    asyncio.run(work())
    assert trigger.fired == 3
    assert ids(direct) == [1, 1, 1]


def start_insert(address: str, errors: list[Exception]) -> threading.Thread:
    def work() -> None:
        try:
            with psycopg.connect(address, autocommit=True) as connection:
                insert(connection, [1])
        except psycopg.Error as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("after", [False, True])
def test_a_stalled_statement_goes_on_when_healed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, after: bool
) -> None:
    errors: list[Exception] = []
    trigger = (proxy.stall_after if after else proxy.stall_before)(INSERT)
    thread = start_insert(address, errors)
    trigger.wait(DEADLINE_S)
    assert ids(direct) == ([1] if after else [])
    assert thread.is_alive()
    proxy.heal()
    thread.join(DEADLINE_S)
    assert ids(direct) == [1]
    assert not errors


@pytest.mark.parametrize("after", [False, True])
def test_a_client_that_dies_while_stalled(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, after: bool
) -> None:
    trigger = (proxy.stall_after if after else proxy.stall_before)(INSERT)
    with contextlib.closing(psycopg.connect(address, autocommit=True)) as connection:
        send_insert(connection)
        trigger.wait(DEADLINE_S)
    assert settled(direct) == ([1] if after else [])
    wait_until(lambda: proxy.links == 0, DEADLINE_S)


ROWS = b"".join(b"%d\tbody of row %d\n" % (number, number) for number in range(1, 1_001))


def copy_rows(address: str, rows: bytes = ROWS) -> None:
    with (
        connected(address, autocommit=False) as connection,
        connection,
        connection.cursor().copy("COPY notes FROM STDIN") as copy,
    ):
        for at in range(0, len(rows), 1_000):
            copy.write(rows[at : at + 1_000])


@pytest.mark.parametrize(
    "point",
    [
        0,
        *(pytest.param(point, marks=pytest.mark.again) for point in (1, 500, 1_000)),
        "middle",
        "last",
        *(pytest.param(point, marks=pytest.mark.again) for point in (len(ROWS) - 1, len(ROWS))),
    ],
)
def test_a_copy_cut_in_its_data_leaves_nothing(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, point: CopyPoint
) -> None:
    trigger = proxy.cut_copy(point)
    with pytest.raises(psycopg.OperationalError):
        copy_rows(address)
    assert settled(direct) == []
    assert trigger.fired == 1
    copy_rows(address)
    assert len(ids(direct)) == 1_000


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_copy_cut_after_its_end(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection, autocommit: bool
) -> None:
    trigger = proxy.swallow("^COPY")
    with connected(address, autocommit=autocommit) as connection:  # noqa: SIM117
        with pytest.raises(psycopg.OperationalError), connection.cursor().copy("COPY notes FROM STDIN") as copy:
            copy.write(ROWS)
    assert len(settled(direct)) == (1_000 if autocommit else 0)
    assert trigger.fired == 1


def give_up_copying(address: str) -> None:
    with psycopg.connect(address) as connection, connection.cursor().copy("COPY notes FROM STDIN"):
        raise ZeroDivisionError


def test_a_copy_that_is_too_short_or_fails_or_is_none_leaves_the_fault_armed(
    address: str, proxy: PostgresProxy, direct: psycopg.Connection
) -> None:
    trigger = proxy.cut_copy(10)
    copy_rows(address, b"1\tx\n")
    assert armed(trigger)
    with pytest.raises(psycopg.DataError):
        copy_rows(address, b"x\tx\n")
    assert armed(trigger)
    with psycopg.connect(address, autocommit=True) as connection:
        insert(connection, [2])
    assert armed(trigger)
    with pytest.raises(ZeroDivisionError):
        give_up_copying(address)
    assert armed(trigger)
    assert settled(direct) == [1, 2]


def copy_extended(connection: psycopg.Connection) -> None:
    """As `Cursor.copy` would with parameters: Sync is then sent twice, and answered once."""
    connection.pgconn.send_query_params(b"COPY notes FROM STDIN", None)
    (result,) = connection.wait(generators.execute(connection.pgconn))
    assert result.status == psycopg.pq.ExecStatus.COPY_IN
    connection.wait(generators.copy_to(connection.pgconn, ROWS))
    connection.wait(generators.copy_end(connection.pgconn, None))


def test_a_copy_sent_with_the_extended_protocol(address: str, proxy: PostgresProxy, direct: psycopg.Connection) -> None:
    with connected(address) as connection:
        copy_extended(connection)
        insert(connection, [0])
        cut = proxy.cut_copy("last")
        with pytest.raises(psycopg.OperationalError):
            copy_extended(connection)
    assert len(settled(direct)) == 1_001
    swallowed = proxy.swallow("^COPY")
    with connected(address) as connection, pytest.raises(psycopg.OperationalError):
        copy_extended(connection)
    assert len(settled(direct)) == 2_001
    assert cut.fired == swallowed.fired == 1


def test_statements_and_transactions_are_counted(address: str, proxy: PostgresProxy) -> None:
    inserts = proxy.watch(INSERT)
    with psycopg.connect(address, autocommit=True) as connection:
        for _ in range(3):
            insert(connection, [1])
        with connection.transaction():
            insert(connection, [1])
            insert(connection, None)
    assert inserts.fired == 5
    traffic = proxy.traffic
    assert (traffic.statements, traffic.transactions, traffic.errors) == (7, 4, 0)


def test_every_connection_can_be_cut_and_made_again(address: str, proxy: PostgresProxy) -> None:
    with connected(address) as connection:
        assert proxy.cut() == 1
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with psycopg.connect(address) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_leaves_before_the_client_has_said_anything() -> None:
    """As one does that has crashed. What the client asks then is a matter between it and the proxy, and comes late."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with PostgresProxy(f"host={host} port={port}") as proxy:  # whatever goes wrong inside is raised at the end
            with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as client:
                server.accept()[0].close()
                assert client.recv(1) == b""
                with contextlib.suppress(ConnectionError):
                    client.sendall(struct.pack("!ii", 8, 80877103))
                    assert client.recv(1) == b""
            wait_until(lambda: proxy.links == 0, DEADLINE_S)
