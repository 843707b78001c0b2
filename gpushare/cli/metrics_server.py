"""The HTTP server of ``gpushare metrics``: what any local user connects to must not end it or keep it busy.

One thread waits for requests, and a few answer them. A connection that has not said all of its request costs no thread:
it has a few seconds, a bounded size, and goes first when there are too many.
"""

from __future__ import annotations

import contextlib
import io
import queue
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

_REQUEST_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 10.0
_MOST_REQUEST_BYTES: Final = 16 << 10
_MOST_CONNECTIONS: Final = 256
_WORKERS: Final = 4
_MOST_WAITING: Final = 32
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_TOO_LARGE: Final = b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n\r\n"


class _Handler(WSGIRequestHandler):
    """Answers one request that was read already: ``request`` is the connection and what it said."""

    def setup(self) -> None:
        self.connection, said = self.request
        self.rfile, self.wfile = io.BytesIO(said), io.BytesIO()

    def finish(self) -> None:
        # The time is for all of it: whoever reads a byte now and then holds no thread.
        self.connection.settimeout(_ANSWER_SECONDS)
        with contextlib.suppress(OSError):
            self.connection.sendall(self.wfile.getvalue())  # type: ignore[attr-defined]

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name is the library's
        """Log nothing."""


class MetricsServer(WSGIServer):
    """Serves a WSGI application until it is interrupted."""

    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: str, port: int, application: Callable[[Any, Any], Iterable[bytes]]) -> None:
        """Listen.

        Raises:
            OSError, OverflowError: it cannot.
        """
        self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((address, port), _Handler)
        self.set_app(application)
        self.socket.setblocking(False)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = soft == resource.RLIM_INFINITY
        self._most = _MOST_CONNECTIONS if unlimited else max(8, min(_MOST_CONNECTIONS, soft // 4))
        # In the order in which they came: what was said so far, and until when there is time.
        self._open: dict[socket.socket, tuple[bytearray, float]] = {}
        self._complete: queue.Queue[tuple[socket.socket, bytes, Any]] = queue.Queue(_MOST_WAITING)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serve until an exception ends it."""
        for _ in range(_WORKERS):
            threading.Thread(target=self._answer, daemon=True).start()
        self._selector.register(self.socket, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._next_deadline()):
                if key.fileobj is self.socket:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._open:
                    self._read(key.fileobj)
            now = time.monotonic()
            for connection in [one for one, (_, until) in self._open.items() if until <= now]:
                self._drop(connection)

    def _next_deadline(self) -> float | None:
        first = next(iter(self._open.values()), None)
        return None if first is None else max(0.0, first[1] - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self.socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor or memory is left: the oldest makes room. Without one nothing changes for now.
            if self._open:
                self._drop(next(iter(self._open)))
            else:
                time.sleep(0.1)
            return
        connection.setblocking(False)
        if len(self._open) >= self._most:
            self._drop(next(iter(self._open)))
        self._open[connection] = (bytearray(), time.monotonic() + _REQUEST_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)
        # Mostly the request is there already.
        self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        said, _ = self._open[connection]
        try:
            more = connection.recv(_MOST_REQUEST_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if not more:
            self._drop(connection)
        elif b"\r\n\r\n" in said or b"\n\n" in said:
            self._forget(connection)
            try:
                self._complete.put_nowait((connection, bytes(said), connection.getpeername()))
            except queue.Full:
                _close(connection, _BUSY)
            except OSError:
                connection.close()
        elif len(said) > _MOST_REQUEST_BYTES:
            self._forget(connection)
            _close(connection, _TOO_LARGE)

    def _answer(self) -> None:
        while True:
            connection, said, address = self._complete.get()
            # Whatever goes wrong with one request is no matter of the next.
            with contextlib.suppress(Exception):
                self.RequestHandlerClass((connection, said), address, self)  # type: ignore[arg-type]
            _close(connection)

    def _forget(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._selector.unregister(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()


def _close(connection: socket.socket, last: bytes = b"") -> None:
    with contextlib.suppress(OSError):
        if last:
            connection.send(last)
        connection.shutdown(socket.SHUT_WR)
    connection.close()
