"""``gpushare metrics``: metrics for Prometheus; written by `gpushare/show/prometheus.py`."""

from __future__ import annotations

import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from gpushare import __version__
from gpushare.base.errors import BadUsage, ExitCode, GpushareError, OperationFailed
from gpushare.base.model import Snapshot, Way
from gpushare.base.units import quoted
from gpushare.cli.options import Command, Refused, flag, note, option, refuse, settings, verb
from gpushare.export.document import not_written_error
from gpushare.host.host import Host
from gpushare.host.records import replace_file
from gpushare.host.written_file import opened_directory
from gpushare.hostfile.load import kept_entries
from gpushare.mig.recover import visible_leftovers
from gpushare.mps.home import homes_in
from gpushare.run.listing import listed_jobs
from gpushare.run.look import with_memory
from gpushare.show.prometheus import IDLE_SECONDS, Reading, exposition, families
from gpushare.show.result import Result
from gpushare.snapshot import LastWork, Observer

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


_DEFAULT: Final = "127.0.0.1:9836"


@verb(Command)
def metrics(
    listen: str = option("--listen", "ADDR:PORT", "Where to listen; :PORT listens on every address.", default=_DEFAULT),
) -> Any:
    """Serve metrics that no other exporter has, at /metrics, until Ctrl-C.

    The metrics say how each GPU is shared: its time-slice, MPS daemons with limits and clients, MIG layout with free
    slices and slices that no further instance can use, leases, and the jobs of gpushare with role, way, time-slice and
    memory. Without root, the jobs are those of this user and of root. Use it next to dcgm-exporter: both label a GPU with its
    UUID.
    """
    address, port = _parse_address(listen)
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry()
    registry.register(_Collector(settings.connect()))
    try:
        server = MetricsServer(address, port, make_wsgi_app(registry))
    except (OSError, OverflowError) as error:
        raise OperationFailed(
            f"cannot listen at {listen}: {getattr(error, 'strerror', None) or error}",
            "give another address: --listen 127.0.0.1:9837",
            code="cannot_listen",
        ) from None
    host = f"[{address}]" if ":" in address else address
    note(f"http://{host}:{server.server_port}/metrics")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        # Ctrl-C and SIGTERM are the normal end.
        return int(ExitCode.OK)
    finally:
        server.server_close()


def _parse_address(text: str) -> tuple[str, int]:
    """Return the address and the port of ADDR:PORT; no address is every address."""
    address, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadUsage(f"'{text[:60]}' is not an address", f"give ADDR:PORT: {_DEFAULT}", code="bad_address")
    # prometheus-client takes an IPv6 address without brackets.
    return address.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - asked for by an empty address


class _Collector:
    """Reads the host at each scrape."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._work = LastWork(host)
        # Concurrent scrapes run in threads of their own.
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        """Read the host and return its metrics; prometheus_client calls this at each scrape."""
        with self._lock:
            metrics = families_now(self._host, self._work)[0]
            # Hold no NVML handles between scrapes: one on a MIG device keeps its instance in use.
            self._host.nvml.restart()
        return metrics


def families_now(host: Host, work: LastWork | None = None) -> tuple[list[Metric], GpushareError | None]:
    """Return the current metrics; for a host that does not answer, the few that remain and the error."""
    try:
        return families(_read_host(host, work)), None
    except GpushareError as error:
        return families(Reading(version=__version__, snapshot=None)), error


def _idle_bytes(snapshot: Snapshot, work: LastWork) -> dict[int, int]:
    """Return by GPU the memory of processes that have been idle for a while; GPUs where that is unknown are left out."""
    idle_bytes: dict[int, int] = {}
    for gpu in snapshot.gpus:
        if gpu.processes is None:
            continue
        idle = [(process, work.idle_seconds(process, snapshot.taken_at or 0.0)) for process in gpu.processes]
        if all(seconds is not None for _, seconds in idle):
            idle_bytes[gpu.index] = sum(
                process.memory_used_bytes or 0 for process, seconds in idle if (seconds or 0.0) >= IDLE_SECONDS
            )
    return idle_bytes


def _read_host(host: Host, work: LastWork | None) -> Reading:
    """Return one look at a host, with all that the metrics need; ``work`` knows the last work from earlier looks."""
    observer = Observer(host, power=True)
    work = work or LastWork(host, once=True)
    snapshot = work.added_to(with_memory(host, observer.read()))
    state = observer.state
    layouts = {}
    for gpu in snapshot.gpus:
        if gpu.error is None and gpu.mig_capable:
            with suppress(GpushareError):
                layouts[gpu.index] = state.layout(gpu)
    entries, _ = kept_entries(host, snapshot.gpus)
    exclusive = {index for index, entry in entries.items() if entry.sharing is Way.EXCLUSIVE}
    exclusive_uuids = {gpu.uuid for gpu in snapshot.gpus if gpu.index in exclusive}
    mps_leases = {}
    for home in homes_in(host.run_directories):
        if home.read() is not None and (leases := home.live_leases()) is not None:
            mps_leases[str(home.pipe)] = len(leases)
    return Reading(
        version=__version__,
        snapshot=snapshot,
        layouts=layouts,
        names={(named.gpu_uuid, named.profile, named.start): named.name for named in state.names.values()},
        leases=None if state.claims is None else tuple(state.claims),
        mps_leases=mps_leases,
        mig_interrupted=any(leftover.id == "mig.interrupted" for leftover in visible_leftovers(host)),
        exclusive_wanted=frozenset(filter(None, exclusive_uuids)),
        idle_bytes=_idle_bytes(snapshot, work),
        jobs=tuple(listed_jobs(host, snapshot, most_ended=0)),
    )


@dataclass(frozen=True, kw_only=True)
class PrometheusAnswer:
    """The answer of `export prometheus`."""

    text: str
    # Where it was written.
    textfile: str | None = None


_REFUSED: Final = (
    Refused("--rules --dashboard", "--textfile", "only metrics are written there", "--rules"),
    Refused("--rules", "--dashboard", "one of them is printed", "--dashboard"),
)


def prometheus(
    textfile: str | None = option("--textfile", "PATH", "Write PATH (*.prom) for node_exporter, atomically."),
    rules: bool = flag("--rules", "Print the alert rules instead."),
    dashboard: bool = flag("--dashboard", "Print the Grafana dashboard instead."),
) -> Any:
    """Write metrics as text, once; or the alert rules; or a Grafana dashboard.

    --textfile writes for the textfile collector of node_exporter, from a timer:
    gpushare export prometheus --textfile /var/lib/node_exporter/gpushare.prom
    """
    refuse(_REFUSED)
    if rules or dashboard:
        name = "prometheus-rules.yaml" if rules else "grafana-dashboard.json"
        text = files("gpushare").joinpath(f"data/{name}").read_text(encoding="utf-8")
        return Result(data=PrometheusAnswer(text=text), text=text.rstrip("\n"))
    families, error = families_now(settings.connect())
    text = exposition(families)
    if textfile is not None:
        _write_textfile(Path(textfile), text)
    return Result(
        data=PrometheusAnswer(text=text, textfile=textfile),
        text=text.rstrip("\n") if textfile is None else f"wrote {textfile}",
        errors=() if error is None else (error,),
    )


def _write_textfile(path: Path, text: str) -> None:
    """Write a file in one step, readable by node_exporter's user."""
    if path.suffix != ".prom":
        raise BadUsage(
            f"{quoted(str(path), 200)} does not end in .prom", "node_exporter reads *.prom only", code="bad_textfile"
        )
    try:
        # The directory often belongs to node_exporter's user. Metrics are harmless there, and he may read them anyway.
        with opened_directory(path.parent, make=False, strangers=True) as descriptor:
            # Write into the directory that was checked, even if its path names another one now.
            replace_file(Path(f"/proc/self/fd/{descriptor}") / path.name, text, durable=True)
    except OSError as error:
        raise not_written_error(
            path,
            error,
            f"give a directory of your own, or run this as its owner: ls -ld {shlex.quote(str(path.parent))}",
        ) from None


# How long a request may take to come, and its answer to be read.
_CONNECTION_SECONDS: Final = 10.0
# Connections whose request is not complete, and those that are answered at the same time.
_MOST_INCOMPLETE: Final = 8
_MOST_ANSWERED: Final = 32


class _Handler(WSGIRequestHandler):
    """Answers one request. Its lines and headers are bounded by the library, its time by the server."""

    server: MetricsServer
    # Of each read and write: also for a slow reader of the answer.
    timeout = _CONNECTION_SECONDS
    _is_counted = False

    def parse_request(self) -> bool:
        """Read a request, and return whether to answer it: it is valid, and not too many others are being answered."""
        is_valid = super().parse_request()
        if self.server.deadlines.pop(self.connection, None) is None:
            # It was dropped: the end of the connection looks like the end of a request.
            return False
        if is_valid and not self.server.answers.acquire(blocking=False):
            self.send_error(503)
            return False
        self._is_counted = is_valid
        return is_valid

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            if self._is_counted:
                self.server.answers.release()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name is the library's
        """Do not log."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application until it is interrupted."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: str, port: int, application: Callable[[Any, Any], Iterable[bytes]]) -> None:
        """Listen at an address; raises OSError or OverflowError if it cannot."""
        self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((address, port), _Handler)
        self.set_app(application)
        self.socket.setblocking(False)
        self.answers = threading.BoundedSemaphore(_MOST_ANSWERED)
        # Of the connections whose request is not complete, in order of arrival.
        self.deadlines: dict[Any, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread; if too many have not sent a whole request yet, drop the oldest of them."""
        if len(self.deadlines) >= _MOST_INCOMPLETE:
            self._drop(next(iter(self.deadlines)))
        self.deadlines[request] = time.monotonic() + _CONNECTION_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop connections whose request did not come in time. Called twice a second, and after each connection."""
        now = time.monotonic()
        # The threads of other connections change the dictionary meanwhile.
        for connection, deadline in list(self.deadlines.items()):
            if deadline <= now:
                self._drop(connection)

    def _drop(self, connection: Any) -> None:
        """Shut a connection down: its thread reads the end, and finishes."""
        self.deadlines.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called at the end of its thread."""
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a request that failed: its client has gone, or does not read."""
