"""The whole MPS path with real CUDA clients, in one call: ``python -m benchmarks.gpu_mps_path [--host sim:h200]``.

Prints one line per finding and writes all figures as JSON. Changes no setting of the GPU: no clocks, power,
compute mode, time-slice or MIG; only an MPS daemon in a private directory. On a simulated host the
clients pretend, which rehearses the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENT = [sys.executable, str(Path(__file__).with_name("gpu_client.py"))]
GPUSHARE = [sys.executable, "-m", "gpushare"]


@dataclass
class Client:
    """A CUDA client whose lines are read in the background."""

    process: subprocess.Popen[str]
    lines: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    stderr: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.stderr.extend(self.process.stderr)

    def wait_for(self, event: str, seconds: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=left)
                if line is None:
                    break
                if line["event"] == event:
                    return line
                if line["event"] == "error":
                    raise RuntimeError(f"the client failed: {line['message']}")
        raise RuntimeError(f"no '{event}' from the client; it said: {''.join(self.stderr)[-800:]}")

    def drain(self) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                line = self.lines.get_nowait()
                if line is None:
                    found.append({"event": "gone"})
                    break
                found.append(line)
        return found

    def tell(self, word: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        self.tell("end")
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class MpsPath:
    """The path, step by step."""

    def __init__(self, host: str, tries: int) -> None:
        self.host, self.tries = host, tries
        self.pretend = ["--pretend"] if host.startswith("sim:") else []
        self.figures: dict[str, Any] = {"host": host, "taken_at": time.strftime("%Y-%m-%d %H:%M:%S"), "failures": []}
        self.opened: list[Client] = []

    # -- tools ---------------------------------------------------------------------------------------

    def gpushare(self, *words: str, check: bool = True) -> dict[str, Any]:
        done = subprocess.run(
            [*GPUSHARE, "--host", self.host, "-o", "json", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        document: dict[str, Any] = json.loads(done.stdout)
        document["exit_code"] = done.returncode
        if check:
            self.expect(done.returncode == 0, f"gpushare {' '.join(words)} exits 0", document.get("errors"))
        return document

    def expect(self, condition: bool, what: str, seen: object = None) -> bool:
        print(
            f"{'ok  ' if condition else 'FAIL'} {what}" + (f": {seen}" if seen not in (None, [], "") else ""),
            flush=True,
        )
        if not condition:
            self.figures["failures"].append({"what": what, "seen": str(seen)})
        return condition

    def run(self, kind: str, *limits: str, wait: bool = False) -> Client:
        argv = [
            *GPUSHARE,
            "--host",
            self.host,
            "run",
            *limits,
            "--",
            *CLIENT,
            kind,
            *self.pretend,
            *(["--wait"] if wait else []),
        ]
        return self._open(argv, dict(os.environ))

    def joined(self, kind: str) -> Client:
        """Start a client from a shell's environment: `mps env`, without `run`."""
        if self.pretend:
            return self.run(kind, wait=True)
        environment = self.gpushare("mps", "env")["data"]["environment"]
        return self._open([*CLIENT, kind, "--wait"], {**os.environ, **environment})

    def _open(self, argv: list[str], env: dict[str, str]) -> Client:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        client = Client(process)
        self.opened.append(client)
        return client

    def clients(self) -> list[dict[str, Any]]:
        daemons = self.gpushare("mps", "status")["data"]["mps_daemons"]
        return [client for daemon in daemons for server in daemon["servers"] for client in server["clients"]]

    def wait_clients(self, count: int, seconds: float = 30.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while len(found := self.clients()) < count and time.monotonic() < deadline:
            time.sleep(0.3)
        return found

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        print(f"\n== {name}", flush=True)
        started = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other parts are still worth the machine's time
            self.expect(False, name, f"{type(error).__name__}: {error}")
        finally:
            for client in self.opened:
                if client.process.poll() is None:
                    client.end()
            self.opened.clear()
            print(f"   {time.monotonic() - started:.1f} s", flush=True)

    # -- the path ------------------------------------------------------------------------------------

    def look(self) -> None:
        with self.part("look: status, time-slice, doctor (read-only)"):
            status = self.gpushare("status")["data"]
            self.figures["driver"] = status["driver_version"]
            self.figures["gpu"] = status["gpus"][0]
            self.figures["timeslice"] = self.gpushare("timeslice", "show")["data"]
            self.figures["doctor"] = self.gpushare("doctor", check=False)
            self.expect(
                status["gpus"][0]["time_slice"] is not None, "the time-slice is read", status["gpus"][0]["time_slice"]
            )

    def limits(self) -> None:
        with self.part("two clients with different limits, started by `gpushare run`, which starts the daemon"):
            first = self.run("probe", "--threads", "25", "--memory", "4G")
            second = self.run("probe", "--threads", "50", "--memory", "8G")
            probes = [client.wait_for("probe", 90) for client in (first, second)]
            rows = sorted(self.wait_clients(2), key=lambda row: row["threads_percent"] or 0)
            self.figures["limits"] = {"probes": probes, "status": rows}
            self.expect(
                [row["threads_percent"] for row in rows] == [25.0, 50.0],
                "status shows the caps",
                [row["threads_percent"] for row in rows],
            )
            self.expect(
                [row["memory_limit_bytes"] for row in rows] == [(4 << 30) - (512 << 20), (8 << 30) - (512 << 20)],
                "status shows the memory limits",
                [row["memory_limit_bytes"] for row in rows],
            )
            print("   probes:", probes, flush=True)
            if not self.pretend:
                self.expect(
                    probes[0]["multiprocessors"] < probes[1]["multiprocessors"],
                    "the client sees its cap",
                    [p["multiprocessors"] for p in probes],
                )
                self.expect(
                    probes[0]["allocated_mib"] < 4096 and probes[1]["allocated_mib"] < 8192,
                    "an allocation over the limit fails",
                    [p["allocated_mib"] for p in probes],
                )
            deadline = time.monotonic() + 5
            while "attached to MPS" not in "".join(first.stderr) and time.monotonic() < deadline:
                time.sleep(0.1)
            self.expect(
                "attached to MPS" in "".join(first.stderr), "run proves the attachment", "".join(first.stderr).strip()
            )
        status = self.gpushare("mps", "status")["data"]["mps_daemons"]
        self.expect(status == [], "the daemon went with its last program", status)

    def alone(self) -> None:
        with self.part("one client alone: the rate at 100, 50 and 25 %"):
            rates = {}
            for percent in ("100", "50", "25"):
                client = self.run("probe", "--threads", percent)
                rates[percent] = client.wait_for("probe", 90)
                client.end()
            self.figures["alone"] = rates
            print("   ", rates, flush=True)
            if not self.pretend:
                speed = [rates[percent]["products_per_second"] for percent in ("100", "50", "25")]
                self.expect(speed[0] > 1.3 * speed[1] > 1.69 * speed[2], "the throughput falls with the cap", speed)

    def kill_many(self) -> None:
        with self.part(f"{self.tries} times: kill a client with a deep queue beside a steady one"):
            self.gpushare("mps", "start", "--memory", "20G")
            steady = self.joined("steady")
            steady.wait_for("ready")
            steady.tell("go")
            steady.wait_for("rate")
            ahead = [self.joined("deep") for _ in range(2)]
            outcomes = []
            for number in range(self.tries):
                victim = ahead.pop(0)
                if number + 2 < self.tries:
                    ahead.append(self.joined("deep"))
                outcomes.append(self._kill_one(number, victim, steady))
                if outcomes[-1]["broke"]:
                    break
            broke = sum(outcome["broke"] for outcome in outcomes)
            drains = [outcome["drain_seconds"] for outcome in outcomes if outcome["drain_seconds"] is not None]
            self.figures["kill"] = {"outcomes": outcomes, "broke": broke, "tries": len(outcomes)}
            self.expect(
                broke == 0 and len(outcomes) == self.tries, f"the neighbour broke in {broke} of {len(outcomes)} tries"
            )
            if drains:
                print(
                    f"   drain: median {statistics.median(drains):.3f} s, {min(drains):.3f} to {max(drains):.3f}",
                    flush=True,
                )

    def _kill_one(self, number: int, victim: Client, steady: Client) -> dict[str, Any]:
        victim.wait_for("ready")
        victim.tell("go")
        victim.wait_for("running")
        time.sleep(0.6)
        pid = victim.process.pid
        if self.pretend:
            pid = max(row["pid"] for row in self.wait_clients(2))
        steady.drain()
        done = self.gpushare("mps", "kill", str(pid))
        time.sleep(0.8)
        after = steady.drain()
        errors = [line for line in after if line["event"] in {"error", "gone"}]
        rates = [line["steps_per_second"] for line in after if line["event"] == "rate"]
        drain = (done["data"] or {}).get("drain") or {}
        outcome = {
            "number": number,
            "exit_code": done["exit_code"],
            "drain_seconds": drain.get("seconds"),
            "by": drain.get("by"),
            "before_percent": drain.get("before_percent"),
            "after_percent": drain.get("after_percent"),
            "server_status": (done["data"] or {}).get("server_status"),
            "steady_rate_after": rates[-1] if rates else None,
            "steady_longest_ms": max((line["longest_ms"] for line in after if line["event"] == "rate"), default=None),
            "broke": bool(errors) or done["exit_code"] != 0 or not rates,
            "errors": errors + done["errors"],
        }
        print("   ", outcome, flush=True)
        return outcome

    def endings(self, times: int) -> None:
        with self.part(f"Ctrl-C, SIGTERM and the death of gpushare, {times} times each, next to the steady client"):
            if not self.gpushare("mps", "status")["data"]["mps_daemons"]:
                self.gpushare("mps", "start")
            steady = self.joined("steady")
            steady.wait_for("ready")
            steady.tell("go")
            steady.wait_for("rate")
            found: list[dict[str, Any]] = []
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                found += [self._end_one(number, steady) for _ in range(times)]
            self.figures["endings"] = found
            broke = [outcome for outcome in found if outcome["errors"]]
            self.expect(not broke, f"the neighbour broke in {len(broke)} of {len(found)} endings", broke)

    def _end_one(self, number: int, steady: Client) -> dict[str, Any]:
        victim = self.run("deep")
        victim.wait_for("running")
        time.sleep(0.8)
        steady.drain()
        before = {row["pid"] for row in self.clients()}
        started = time.monotonic()
        victim.process.send_signal(number)
        code = victim.process.wait(60)
        if number == signal.SIGKILL:
            # Now it is the guard's turn.
            while len(self.clients()) >= len(before) and time.monotonic() - started < 30:
                time.sleep(0.2)
        seconds = time.monotonic() - started
        time.sleep(0.8)
        after = steady.drain()
        left = len(self.clients())
        outcome = {
            "signal": signal.Signals(number).name,
            "exit_code": code,
            "seconds": round(seconds, 2),
            "clients_before": sorted(before),
            "clients_left": left,
            "steady_rate_after": [line["steps_per_second"] for line in after if line["event"] == "rate"][-1:],
            "errors": [line for line in after if line["event"] in {"error", "gone"}]
            + ([] if left < len(before) else ["it lives on"]),
            "said": "".join(victim.stderr).strip().splitlines()[-2:],
        }
        print("   ", outcome, flush=True)
        return outcome

    def outside(self) -> None:
        with self.part("a program that runs outside MPS is found and ended by --strict"):
            argv = [
                *GPUSHARE,
                "--host",
                self.host,
                "run",
                "--strict",
                "--",
                "env",
                "CUDA_MPS_PIPE_DIRECTORY=/nonexistent",
            ]
            if self.pretend:
                argv.insert(-1, "GPUSHARE_SIM_OUTSIDE=1")
                os.environ["GPUSHARE_SIM_OUTSIDE"] = "1"
            client = self._open([*argv, *CLIENT, "steady", *self.pretend], dict(os.environ))
            os.environ.pop("GPUSHARE_SIM_OUTSIDE", None)
            code = client.process.wait(60)
            time.sleep(0.2)
            said = "".join(client.stderr).strip()
            self.figures["outside"] = {"exit_code": code, "said": said}
            self.expect(code == 1 and "outside MPS" in said, "it is reported and ended", (code, said))

    def stop(self) -> None:
        with self.part("stop, and the process is gone"):
            daemon = self.gpushare("mps", "status")["data"]["mps_daemons"]
            done = self.gpushare("mps", "stop", "--drain", "10s")
            self.figures["stop"] = done["data"]
            self.expect(
                self.gpushare("mps", "status")["data"]["mps_daemons"] == [],
                "no daemon is left",
                daemon[0]["pid"] if daemon else None,
            )


def main() -> int:
    """Run the path and return 0 when everything held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="local")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--endings", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", nargs="*", metavar="PART", help="of: look limits alone kill_many endings outside stop"
    )
    options = parser.parse_args()
    path = MpsPath(options.host, options.tries)
    parts = {
        "look": path.look,
        "limits": path.limits,
        "alone": path.alone,
        "kill_many": path.kill_many,
        "endings": lambda: path.endings(options.endings),
        "outside": path.outside,
        "stop": path.stop,
    }
    for name, part in parts.items():
        if not options.only or name in options.only:
            part()
    if options.json:
        options.json.write_text(json.dumps(path.figures, indent=1, default=str))
    print(f"\n{len(path.figures['failures'])} failures", flush=True)
    return 1 if path.figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
