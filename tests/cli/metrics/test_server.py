"""``gpushare metrics`` among strangers who connect to it: half-open, slow, too many, too large."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from gpushare.cli.metrics import MetricsServer
from tests.cli.drive import Real, sure


@pytest.fixture
def server(real: Real) -> Iterator[tuple[str, int, int]]:
    """Yield address, port and PID of a server that may have only few files open."""
    # A fraction of the time for a connection.
    program = "from gpushare.cli import main, metrics; metrics._CONNECTION_SECONDS = 2.0; raise SystemExit(main())"
    started = real(
        "metrics",
        "--listen",
        "127.0.0.1:0",
        program=("-c", program),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    found = sure(re.search(r"http://(\S+):(\d+)/", started.note()))
    yield found[1], int(found[2]), started.pid
    started.process.terminate()
    assert started.result().code == 0


def scraped(host: str, port: int) -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nX: "])
def test_two_thousand_half_open_connections(server: tuple[str, int, int], said: bytes) -> None:
    host, port, pid = server
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with ExitStack() as stack:
            for number in range(2000):
                # The system's queue of connections holds 128; one that finds it full waits for a second.
                if number % 64 == 0:
                    time.sleep(0.02)
                stack.enter_context(one := socket.create_connection((host, port), timeout=60))
                if said:
                    try:
                        one.send(said)
                    except OSError:
                        # It was closed already, for those that came after it.
                        continue
            assert "gpushare_host_up" in scraped(host, port)
            before = cpu_seconds(pid)
            time.sleep(0.5)
            assert cpu_seconds(pid) - before < 0.2
            assert len(threads(pid)) < 16
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "gpushare_host_up" in scraped(host, port)


def threads(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def test_a_request_byte_by_byte_has_its_time_once(server: tuple[str, int, int]) -> None:
    host, port, _ = server
    with socket.create_connection((host, port), timeout=60) as slow:
        started = time.monotonic()
        # It is closed at last: a reset, or a broken pipe.
        with suppress(OSError):
            while time.monotonic() - started < 30:
                slow.send(b"G")
                time.sleep(0.02)
        assert time.monotonic() - started < 5
    assert "gpushare_host_up" in scraped(host, port)


def test_a_request_without_end(server: tuple[str, int, int]) -> None:
    host, port, _ = server
    with socket.create_connection((host, port), timeout=60) as large:
        large.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 17_000)
        answer = b""
        # A reset for what it did not read any more.
        with suppress(ConnectionResetError):
            answer = large.recv(100)
        assert not answer or answer.startswith(b"HTTP/1.0 431")
    assert "gpushare_host_up" in scraped(host, port)


def test_who_does_not_read_the_answer(server: tuple[str, int, int]) -> None:
    host, port, _ = server
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(one := socket.create_connection((host, port), timeout=60))
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        deadline = time.monotonic() + 60
        while True:
            try:
                assert "gpushare_host_up" in scraped(host, port)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)


@pytest.mark.parametrize("said", [b"\r\n\r\n", b"x\r\n\r\n", b"\xff\x00 / HTTP/9\n\n", b"POST / HTTP/1.0\r\n\r\n"])
def test_what_is_no_request_is_answered_or_dropped(server: tuple[str, int, int], said: bytes) -> None:
    host, port, _ = server
    with socket.create_connection((host, port), timeout=60) as one:
        one.sendall(said)
        while one.recv(4096):
            pass
    assert "gpushare_host_up" in scraped(host, port)


def test_an_answer_is_compressed_for_who_asks(server: tuple[str, int, int]) -> None:
    host, port, _ = server
    asked = urllib.request.Request(f"http://{host}:{port}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - this test's own
        assert (answer.headers["Content-Encoding"], answer.read(2)) == ("gzip", b"\x1f\x8b")


SlowServer = tuple[MetricsServer, threading.Semaphore, threading.Event]


@pytest.fixture
def slow_server() -> Iterator[SlowServer]:
    """Yield a server in this process, what counts the answers that it begins, and what lets it end them."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def answered(_: Any, start_response: Any) -> list[bytes]:
        begun.release()
        go_on.wait(60)
        start_response("200 OK", [])
        return [b"done"]

    server = MetricsServer("127.0.0.1", 0, answered)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield server, begun, go_on
    go_on.set()
    server.shutdown()
    serving.join()
    server.server_close()


def requested(server: MetricsServer) -> socket.socket:
    """Return a connection that has sent a whole request."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
    connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return connection


def read_all(connection: socket.socket) -> bytes:
    text = b""
    while part := connection.recv(4096):
        text += part
    return text


def test_so_many_are_answered_at_once_and_the_others_refused(slow_server: SlowServer) -> None:
    server, begun, go_on = slow_server
    with ExitStack() as stack:
        waiting = [stack.enter_context(requested(server)) for _ in range(32)]
        assert all(begun.acquire(timeout=60) for _ in waiting)
        for _ in range(40):
            with requested(server) as refused:
                assert b" 503 " in read_all(refused)
        go_on.set()
        assert all(read_all(one).endswith(b"done") for one in waiting)
    with requested(server) as afterwards:
        assert read_all(afterwards).endswith(b"done")


def test_idle_connections_take_no_answer_away(slow_server: SlowServer) -> None:
    server, begun, go_on = slow_server
    with ExitStack() as stack:
        asked = stack.enter_context(requested(server))
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=60))
        # Connections are taken in their order: once this one is answered, all were.
        with requested(server) as last:
            assert all(begun.acquire(timeout=60) for _ in range(2))
            go_on.set()
            assert read_all(last).endswith(b"done")
        assert read_all(asked).endswith(b"done")
