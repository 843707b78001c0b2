"""The conversation with nvidia-cuda-mps-control: daemons that lie, hang, refuse or vanish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NoPermission, NotFound, OperationFailed, TimedOut
from gpushare.base.model import Priority
from gpushare.base.units import GIB, MIB
from gpushare.connect import connect
from gpushare.host.program import Completed, timed_out_error
from gpushare.mps import control as mps_control
from gpushare.mps.control import MpsControl, Overview, ServerRow
from gpushare.mps.limits import Limits
from gpushare.sim import admin
from tests.errors import fails
from tests.mps.fake_daemon import CLOSING, Daemon, control
from tests.sim import mps


def test_commands_go_through_stdin_to_the_daemon_of_the_directory() -> None:
    daemon = Daemon({"get_server_list": "628\n629\n"})
    assert control(daemon).servers() == [628, 629]
    assert daemon.env == {"CUDA_MPS_PIPE_DIRECTORY": "/run/p"}


SETTERS: list[tuple[Callable[[MpsControl], None], str, str]] = [
    (lambda c: c.set_threads(25.0), "set_default_active_thread_percentage 25.0", "25.0\n"),
    (lambda c: c.set_memory(512 * MIB), "set_default_device_pinned_mem_limit 0 512M", "512M\n"),
    (lambda c: c.set_memory(None), "set_default_device_pinned_mem_limit 0 0G", ""),
    (lambda c: c.set_priority(Priority.LOW), "set_default_client_priority 1", "1\n"),
    (lambda c: c.set_threads(25.0, 7), "set_active_thread_percentage 7 25.0", "25.0\n"),
    (lambda c: c.set_memory(512 * MIB, 7), "set_device_pinned_mem_limit 7 0 512M", "512M\n"),
]


def asked_after(sent: str) -> str:
    """Return the question that reads back what a command sets."""
    return sent.replace("set_", "get_", 1).rpartition(" ")[0]


@pytest.mark.parametrize(("call", "sent", "good"), SETTERS, ids=[sent for _, sent, _ in SETTERS])
def test_a_setter_sends_and_reads_back(call: Callable[[MpsControl], None], sent: str, good: str) -> None:
    daemon = Daemon({asked_after(sent): good})
    call(control(daemon))
    assert daemon.asked == [sent, asked_after(sent)]


LIES = [
    pytest.param(call, sent, held, id=f"{sent}-{held.strip()}")
    for call, sent, good in SETTERS
    for held in ("100.0\n", "1M\n", "0\n", "Server 7 not found\n", "", "garbage\n")
    # A percentage is always answered: silence there is a dropped conversation.
    if held != good and (held or "percentage" not in sent)
]


@pytest.mark.parametrize(("call", "sent", "held"), LIES)
def test_a_setter_refuses_what_the_daemon_does_not_hold(
    call: Callable[[MpsControl], None], sent: str, held: str
) -> None:
    with fails(OperationFailed, "limit_not_held", match="did not accept the"):
        call(control(Daemon({asked_after(sent): held, sent: "25.0\n"})))


@pytest.mark.parametrize("held", ["1G\n", "1500M\n"])
def test_a_limit_floored_to_whole_g_is_held_and_so_is_an_exact_one(held: str) -> None:
    control(Daemon({"get_default_device_pinned_mem_limit 0": held})).set_memory(1500 * MIB)
    control(Daemon({"get_device_pinned_mem_limit 7 0": held})).set_memory(1500 * MIB, 7)


def test_a_percentage_is_compared_as_the_daemon_keeps_it() -> None:
    daemon = Daemon({"get_default_active_thread_percentage": "33.3\n"})
    control(daemon).set_threads(100 / 3)
    assert daemon.asked[0] == "set_default_active_thread_percentage 33.3"


@pytest.mark.parametrize(
    ("text", "error", "code"),
    [
        ("Cannot find MPS control daemon process\n", NotFound, "no_daemon"),
        ("Insufficient privileges for UID 65534. Control deamon settings ...\n", NoPermission, "not_your_daemon"),
        ("Not enough privilege to execute quit command\n", NoPermission, "not_your_daemon"),
        ("Cannot authenticate or connect to MPS control daemon process\n", NoPermission, "not_your_daemon"),
        ("", OperationFailed, "mps_control"),
    ],
)
def test_a_refusal_is_an_error_of_its_own(text: str, error: type[GpushareError], code: str) -> None:
    for stdout, stderr in ((text, ""), ("", text)):
        daemon = Daemon({"set_default_client_priority 1": stdout}, code=1, stderr=stderr)
        with fails(error, code):
            control(daemon).set_priority(Priority.LOW)


def test_a_refusal_with_exit_0_is_an_error_too() -> None:
    daemon = Daemon({"quit": "Not enough privilege to execute quit command\n"})
    with pytest.raises(NoPermission):
        control(daemon).quit()


def test_a_hanging_daemon_is_a_time_out_that_names_command_and_directory() -> None:
    daemon = Daemon()
    daemon.error = timed_out_error(["nvidia-cuda-mps-control"], 5.0)
    for call in (control(daemon).answers, control(daemon).overview, control(daemon).quit):
        with fails(TimedOut, "daemon_hangs", match="/run/p"):
            call()


@pytest.mark.parametrize(("code", "stderr"), [(0, ""), (1, "Cannot send command to MPS control daemon process\n")])
def test_a_dropped_conversation_is_held_again(code: int, stderr: str) -> None:
    class Busy(Daemon):
        def run(self, argv: Sequence[str], **given: object) -> Completed:  # type: ignore[override]
            self.code = code if self.drops else 0
            return super().run(argv, **given)  # type: ignore[arg-type]

    daemon = Busy({"get_server_list": "628\n"}, stderr=stderr, drops=3)
    assert control(daemon).servers() == [628]
    assert daemon.asked == ["get_server_list"]
    with fails(OperationFailed, "mps_control"):
        control(Busy(stderr=stderr, drops=10**6)).ask("get_server_list", timeout=0.03)


def test_all_attempts_together_have_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon drops each conversation after two seconds: the next one has only the seconds that are left."""
    now, waited = 0.0, []

    class Slow(Daemon):
        def run(self, argv: Sequence[str], *, timeout: float = 10.0, **more: Any) -> Completed:
            nonlocal now
            waited.append(timeout)
            now += 2.0
            return super().run(argv, timeout=timeout, **more)

    clock = SimpleNamespace(monotonic=lambda: now, monotonic_ns=lambda: 0, sleep=lambda _: None)
    monkeypatch.setattr("gpushare.mps.control.time", clock)
    slow = control(Slow(stderr="Cannot send command to MPS control daemon process\n", code=1, drops=10**6))
    with fails(OperationFailed, "mps_control"):
        slow.ask("get_server_list", timeout=5.0)
    assert waited == [5.0, 3.0, 1.0]
    waited.clear()
    with fails(OperationFailed, "mps_control"):
        slow.quit()
    assert waited == [10.0, 8.0, 6.0, 4.0, 2.0, 0.05]


def test_a_daemon_that_answers_only_to_drop_is_busy_and_does_not_hang() -> None:
    class CutShort(Daemon):
        """Its second answer comes too late."""

        def run(self, argv: Sequence[str], **given: Any) -> Completed:
            done = super().run(argv, **given)
            self.error = timed_out_error(["nvidia-cuda-mps-control"], 0.05)
            return done

    with fails(OperationFailed, "mps_control"):
        control(CutShort(drops=10**6)).ask("get_server_list", timeout=5.0)


def test_a_command_that_must_not_come_twice_is_sent_again_only_when_it_did_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(mps_control, "_wait_to_retry", lambda: waits.append(1))
    silent = Daemon({"quit": ""}, drops=1)
    control(silent).quit()
    assert (silent.asked, waits) == ([], [])
    refused = Daemon({"quit": ""}, drops=3, stderr="Cannot send command to ...\n")
    control(refused).quit()
    assert (refused.asked, waits) == (["quit"], [1, 1, 1])


def test_whether_a_daemon_answers() -> None:
    assert control(Daemon({"get_default_active_thread_percentage": "100.0\n"})).answers()
    assert not control(Daemon(code=1, stderr="Cannot find MPS control daemon process\n")).answers()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("ACTIVE\n", "ACTIVE"),
        ("FAULT\n", "FAULT"),
        ("Server 7 not found\n", None),
        ("", None),
        ('Unknown command "get_server_status"\n', None),
    ],
)
def test_the_status_of_a_server_is_a_word_of_the_daemon_or_unknown(said: str, status: str | None) -> None:
    assert control(Daemon({"get_server_status 7": said})).server_status(7) == status


def overview(**replies: str) -> tuple[Overview, Daemon]:
    daemon = Daemon(
        {
            CLOSING: "50.0\n",
            "get_default_client_priority": "1\n",
            "get_default_device_pinned_mem_limit 0": replies.get("memory", ""),
            "get_server_list": replies.get("servers", ""),
            "get_server_status 7": replies.get("status", "ACTIVE\n"),
            "get_active_thread_percentage 7": replies.get("threads", "50.0\n"),
            "get_device_pinned_mem_limit 7 0": replies.get("limit", ""),
            "get_server_status 8": "FAULT\n",
            "get_active_thread_percentage 8": "20.0\n",
            "get_device_pinned_mem_limit 8 0": "2G\n",
            "ps": replies.get("ps", "Server not found\n"),
        }
    )
    return control(daemon).overview(), daemon


def test_the_state_of_a_fresh_daemon_in_one_conversation() -> None:
    found, daemon = overview()
    assert found == Overview(Limits(threads_percent=50.0, priority=Priority.LOW), (), ())
    assert len(daemon.asked) == 4
    assert overview(memory="4G\n")[0].limits.memory_limit_bytes == 4 * GIB


def test_several_servers_each_with_its_own_limits() -> None:
    found, _ = overview(memory="1G\n", servers="7\n8\n")
    assert found.limits.memory_limit_bytes == GIB
    assert found.servers == (
        ServerRow(7, "ACTIVE", Limits(threads_percent=50.0)),
        ServerRow(8, "FAULT", Limits(threads_percent=20.0, memory_limit_bytes=2 * GIB)),
    )


def test_a_server_that_went_away_in_between_is_left_out() -> None:
    gone = "Server 7 not found\n"
    found, _ = overview(servers="7\n8\n", status=gone, threads=gone, limit=gone)
    assert [server.pid for server in found.servers] == [8]


def test_driver_535_tells_no_status_and_that_is_unknown() -> None:
    found, _ = overview(servers="7\n", status='Unknown command "get_server_status"\n', limit="1G\n")
    assert found.servers == (ServerRow(7, None, Limits(threads_percent=50.0, memory_limit_bytes=GIB)),)


def test_a_daemon_without_ps_does_not_count_as_one_without_clients() -> None:
    with fails(OperationFailed, "strange_reply"):
        overview(servers="7\n", ps='Unknown command "ps"\n')


def test_garbage_is_unknown() -> None:
    daemon = Daemon(dict.fromkeys([CLOSING, "get_server_list"], "?\n"))
    assert control(daemon).overview() == Overview(Limits(), (), ())


@pytest.mark.parametrize("driver", ["535.261.03", "550.163.01", "580.159.04", "595.99.02"])
def test_the_simulated_daemon_of_every_driver_is_understood(driver: str, sim_dir: Path) -> None:
    host = mps.new(sim_dir, driver=driver)
    host.start()
    client = host.client()
    talk = MpsControl(connect(host.host.spec).programs, str(host.pipe))
    talk.set_threads(30.0)
    talk.set_memory(2500 * MIB)
    talk.set_priority(Priority.LOW)
    assert client.mps_server is not None
    talk.set_threads(20.0, client.mps_server)
    talk.set_memory(700 * MIB, client.mps_server)
    overview = talk.overview()
    status = None if driver < "55" else "ACTIVE"
    assert overview.servers == (
        ServerRow(client.mps_server, status, Limits(threads_percent=20.0, memory_limit_bytes=700 * MIB)),
    )
    limits = Limits(threads_percent=30.0, memory_limit_bytes=2 * GIB, priority=Priority.LOW)
    assert overview.limits == limits
    assert [(row.pid, row.server_pid) for row in overview.clients] == [(client.pid, client.mps_server)]
    talk.set_memory(None)
    assert talk.memory() is None
    assert mps_control.PROGRAM == "nvidia-cuda-mps-control"
    admin.end_process(host.host.spec, client.pid)
    assert talk.overview().clients == ()


def test_half_an_answer_is_asked_again() -> None:
    """The first of two percentages alone looks like the answer to the closing question."""
    daemon = HalfOnce({"get_default_active_thread_percentage": "30.0\n"})
    assert control(daemon).threads() == 30.0
    assert daemon.halves == 0


class HalfOnce(Daemon):
    """A daemon that drops its first conversation in the middle."""

    halves = 1

    def run(self, argv: Sequence[str], **named: Any) -> Completed:
        done = super().run(argv, **named)
        if self.halves:
            self.halves -= 1
            return replace(done, stdout=done.stdout.splitlines(keepends=True)[0])
        return done


def test_a_server_without_a_limit_holds_none() -> None:
    daemon = Daemon({"get_device_pinned_mem_limit 7 0": ""})
    control(daemon).set_memory(None, 7)
    assert daemon.asked == ["set_device_pinned_mem_limit 7 0 0G", "get_device_pinned_mem_limit 7 0"]
    for held in ("512M\n", "2G\n"):
        with fails(OperationFailed, "limit_not_held", match="did not accept the pinned memory limit None"):
            control(Daemon({"get_device_pinned_mem_limit 7 0": held})).set_memory(None, 7)


def test_each_kind_of_command_has_its_own_patience() -> None:
    """Ending takes longer than asking: servers wait for what their clients have in flight."""
    waited: list[tuple[str, float]] = []

    class Watched(Daemon):
        def run(self, argv: Sequence[str], *, timeout: float = 10.0, stdin: str = "", **more: Any) -> Completed:
            waited.append((stdin.splitlines()[0], round(timeout, 1)))
            return super().run(argv, timeout=timeout, stdin=stdin, **more)

    watched = control(Watched())
    watched.ask("get_server_list")
    watched.ask("get_server_list", timeout=0.5)
    watched.quit()
    watched.quit(force=True)
    MpsControl(Watched(), "/run/p", seconds=0.7).ask("get_server_list")
    assert waited == [
        ("get_server_list", 5.0),
        ("get_server_list", 0.5),
        ("quit", 10.0),
        ("quit -t 1", 16.0),
        ("get_server_list", 0.7),
    ]


@pytest.mark.parametrize(
    ("printed", "command", "reply"),
    [
        ("100.0\n", "get_server_list", ""),
        ("628\n629\n50.0\n", "get_server_list", "628\n629\n"),
        ("", "get_server_list", None),
        # A PID, and a word, are no percentage.
        ("100\n", "get_server_list", None),
        ("628\n", "get_server_list", None),
        ("Server 1.0 not found\n", "get_server_list", None),
        ("a.b\n", "get_server_list", None),
        # The answer to the question itself is not the closing one.
        ("50.0\n", "get_active_thread_percentage 628", None),
        ("50.0\n100.0\n", "get_default_active_thread_percentage", "50.0\n"),
    ],
)
def test_the_closing_answer_is_told_from_the_reply(printed: str, command: str, reply: str | None) -> None:
    assert mps_control.without_closing_answer(printed, command) == reply


def test_two_who_met_wait_a_little_and_not_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    for at in range(0, 18_000_000, 1000):
        told = SimpleNamespace(sleep=waited.append, monotonic_ns=lambda at=at: at)
        monkeypatch.setattr(mps_control, "time", told)
        mps_control._wait_to_retry()
    assert len(set(waited)) == 18
    assert (min(waited), max(waited)) == (pytest.approx(0.002), pytest.approx(0.019))


def test_what_fails_without_a_word_is_told_by_its_exit_code() -> None:
    daemon = Daemon({"quit": ""}, code=3)
    with pytest.raises(OperationFailed, match="'quit' failed at the MPS daemon: exit code 3"):
        control(daemon).quit()
    daemon = Daemon({"quit": "Bus error\n"}, code=3)
    with pytest.raises(OperationFailed, match=r"(?m)failed at the MPS daemon: Bus error$"):
        control(daemon).quit()
