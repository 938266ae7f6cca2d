"""The fault proxy: each fault does what its name says, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from time import monotonic
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.history import HistoryWriter, read_history
from tests.support.mock_process import start_mock_process
from tests.support.proxy import TcpProxy
from tests.support.proxy_link import Cut, Way
from tests.support.wait import wait_until

DEADLINE_S = 20.0


class _Echo(socketserver.ThreadingTCPServer):
    """Sends back what it gets, and remembers it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EchoHandler)
        self.received = bytearray()
        self.open = 0
        self.port: int = self.server_address[1]


class _EchoHandler(socketserver.BaseRequestHandler):
    server: _Echo

    def handle(self) -> None:
        self.server.open += 1
        try:
            while data := self.request.recv(65_536):
                self.server.received += data
                self.request.sendall(data)
        except OSError:
            pass
        finally:
            self.server.open -= 1


@pytest.fixture
def echo() -> Iterator[_Echo]:
    with _Echo() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy(echo: _Echo) -> Iterator[TcpProxy]:
    with TcpProxy(("127.0.0.1", echo.port)) as proxy:
        yield proxy


@contextlib.contextmanager
def dialled(proxy: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), DEADLINE_S) as client:
        yield client


def receive(client: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (more := client.recv(65_536)):
        data += more
    return bytes(data)


def receive_all(client: socket.socket) -> tuple[bytes, bool]:
    """Everything until the end, and whether the end was a reset."""
    data = bytearray()
    try:
        while more := client.recv(65_536):
            data += more
    except ConnectionResetError:
        return bytes(data), True
    return bytes(data), False


def talks(client: socket.socket) -> bool:
    client.sendall(b"hello")
    return receive(client, 5) == b"hello"


def test_forwards_everything_unchanged(proxy: TcpProxy) -> None:
    payload = bytes(range(256)) * 20_000
    with dialled(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=[payload])
        sender.start()
        assert receive(client, len(payload)) == payload
        sender.join()
    assert proxy.accepted == 1
    wait_until(lambda: proxy.links == 0, DEADLINE_S)
    assert proxy.log == []


def test_an_end_of_stream_is_passed_on_and_answers_still_arrive(proxy: TcpProxy) -> None:
    with dialled(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert receive_all(client) == (b"last words", False)


def test_a_reset_is_passed_on(proxy: TcpProxy, echo: _Echo) -> None:
    with dialled(proxy) as client:
        assert talks(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(lambda: echo.open == 0, DEADLINE_S)


def test_a_delay_is_a_delay_and_not_a_throttle(proxy: TcpProxy) -> None:
    payload = bytes(2_000_000)
    with dialled(proxy) as client:
        assert talks(client)
        proxy.delay(0.1)
        started = monotonic()
        sender = threading.Thread(target=client.sendall, args=[payload])
        sender.start()
        assert receive(client, len(payload)) == payload
        took_s = monotonic() - started
        sender.join()
    assert 0.2 <= took_s < 6, "some thirty chunks each way, one after the other, would take more than six seconds"


def test_a_delay_may_be_one_way(proxy: TcpProxy) -> None:
    proxy.delay(30, ways=[Way.DOWN])
    with dialled(proxy) as client:
        client.sendall(b"hello")
        proxy.heal()  # what is under way arrives at once
        assert receive(client, 5) == b"hello"


def test_a_throttle_bounds_the_rate(proxy: TcpProxy) -> None:
    proxy.throttle(40_000, ways=[Way.DOWN])
    with dialled(proxy) as client:
        started = monotonic()
        client.sendall(bytes(20_000))
        assert len(receive(client, 20_000)) == 20_000
        assert monotonic() - started >= 0.4


def test_a_throttle_may_be_lifted(proxy: TcpProxy) -> None:
    proxy.throttle(1)
    with dialled(proxy) as client:
        client.sendall(bytes(10_000))
        proxy.heal()
        assert len(receive(client, 10_000)) == 10_000


@pytest.mark.parametrize("how", Cut)
def test_a_cut_ends_every_connection(proxy: TcpProxy, echo: _Echo, how: Cut) -> None:
    with dialled(proxy) as one, dialled(proxy) as two:
        assert talks(one)
        assert talks(two)
        assert proxy.cut(how) == 2
        for client in (one, two):
            assert receive_all(client) == (b"", how is Cut.RST)
        wait_until(lambda: echo.open == 0, DEADLINE_S)
    with dialled(proxy) as client:
        assert talks(client), "a cut is over at once"
    assert proxy.happened("cut") == 1


@pytest.mark.parametrize("how", Cut)
@pytest.mark.parametrize("size", [0, 1, 1_000, 100_000])
def test_a_cut_after_so_many_bytes_up(proxy: TcpProxy, echo: _Echo, size: int, how: Cut) -> None:
    trigger = proxy.cut_after(size, Way.UP, how=how)
    with dialled(proxy) as client:
        with contextlib.suppress(OSError):
            client.sendall(bytes(200_000))
        trigger.wait(DEADLINE_S)
        if how is Cut.FIN:
            wait_until(lambda: len(echo.received) >= size, DEADLINE_S)
        wait_until(lambda: echo.open == 0, DEADLINE_S)
    if how is Cut.FIN:  # a reset may destroy what the server has not read
        assert len(echo.received) == size
    assert len(echo.received) <= size
    assert [fired.what for fired in proxy.log] == ["cut_after"]


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_a_cut_after_so_many_bytes_down(proxy: TcpProxy, size: int) -> None:
    with dialled(proxy) as client:
        assert talks(client)
        trigger = proxy.cut_after(size, Way.DOWN, how=Cut.FIN)
        client.sendall(b"hello")
        assert receive_all(client) == (b"hello"[:size], False)
        assert (trigger.fired, trigger.armed) == (1, False)


def test_a_cut_after_bytes_counts_each_connection_for_itself_and_as_often_as_told(proxy: TcpProxy) -> None:
    trigger = proxy.cut_after(8, Way.UP, times=2)
    with dialled(proxy) as one, dialled(proxy) as two, dialled(proxy) as three:
        assert talks(one)
        assert talks(two)
        for client in (one, two):
            client.sendall(b"hello")
            assert receive_all(client)[1]
        assert talks(three)
        assert talks(three)
    assert trigger.fired == 2


def test_frozen_both_ways_nothing_arrives_until_it_heals(proxy: TcpProxy, echo: _Echo) -> None:
    with dialled(proxy) as old:
        assert talks(old)
        proxy.freeze()
        with dialled(proxy) as new:
            for client in (old, new):
                client.sendall(b"later")
                client.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    client.recv(1)
            assert echo.received == b"hello"
            proxy.heal()
            for client in (old, new):
                client.settimeout(DEADLINE_S)
                assert receive(client, 5) == b"later"


def test_frozen_one_way_the_other_goes_on(proxy: TcpProxy, echo: _Echo) -> None:
    proxy.freeze(ways=[Way.DOWN])
    with dialled(proxy) as client:
        client.sendall(b"heard")
        wait_until(lambda: echo.received == b"heard", DEADLINE_S)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(DEADLINE_S)
        proxy.heal()
        assert receive(client, 5) == b"heard"


def test_frozen_the_server_does_not_learn_that_its_client_left(proxy: TcpProxy, echo: _Echo) -> None:
    with dialled(proxy) as client:
        assert talks(client)
        proxy.freeze()
    with dialled(proxy):  # a connection later, the first one's end has certainly reached the proxy
        wait_until(lambda: echo.open == 2, DEADLINE_S)
    proxy.heal()
    wait_until(lambda: echo.open == 0, DEADLINE_S)


def test_a_frozen_connection_can_be_cut(proxy: TcpProxy, echo: _Echo) -> None:
    with dialled(proxy) as client:
        assert talks(client)
        proxy.freeze()
        client.sendall(b"never")
        proxy.cut()
        assert receive_all(client) == (b"", True)
    proxy.heal()
    wait_until(lambda: echo.open == 0, DEADLINE_S)
    assert echo.received == b"hello"


def test_refuses_new_connections_and_keeps_the_old(proxy: TcpProxy) -> None:
    with dialled(proxy) as old:
        assert talks(old)
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError), dialled(proxy):
            pass
        assert talks(old)
        proxy.heal()
        with dialled(proxy) as new:
            assert talks(new)


def test_healing_disarms_what_has_not_fired(proxy: TcpProxy) -> None:
    trigger = proxy.cut_after(1, Way.UP)
    proxy.heal()
    with dialled(proxy) as client:
        assert talks(client)
    assert (trigger.fired, trigger.armed) == (0, False)


def test_a_server_that_is_gone_is_a_connection_that_ends() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with TcpProxy(("127.0.0.1", nobody.getsockname()[1])) as proxy:
            try:
                with dialled(proxy) as client:
                    ended = receive_all(client)
            except ConnectionResetError:  # it may end before the dialling has
                ended = b"", True
        assert ended == (b"", True)


def test_faults_are_told_to_a_history(echo: _Echo, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("history")
    with (
        HistoryWriter(directory, "faults") as history,
        TcpProxy(("127.0.0.1", echo.port), history=history, name="upstream") as proxy,
    ):
        proxy.freeze()
        proxy.cut()
    assert [(event.f, event.key, event.type) for event in read_history(directory)] == [
        ("freeze", "upstream", "info"),
        ("cut", "upstream", "info"),
    ]


def test_in_front_of_http() -> None:
    with start_mock_process() as mock, TcpProxy(("127.0.0.1", mock.port)) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/healthz"
        assert urlopen(url, timeout=DEADLINE_S).read() == b'{"status":"ok"}'
        proxy.cut_after(10, Way.DOWN)
        with pytest.raises((URLError, ConnectionError)):
            urlopen(url, timeout=DEADLINE_S).read()
        proxy.refuse()
        with pytest.raises(URLError, match="refused"):
            urlopen(url, timeout=DEADLINE_S)
        proxy.heal()
        assert urlopen(url, timeout=DEADLINE_S).read() == b'{"status":"ok"}'
