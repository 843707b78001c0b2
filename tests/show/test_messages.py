"""Notes, errors and hints: one line each, and on a terminal wrapped between words."""

from __future__ import annotations

from types import SimpleNamespace

from gpushare.base.errors import BadUsage, NoPermission
from gpushare.base.model import MpsClient
from gpushare.mps.limits import Limits
from gpushare.plan import Plan, Step
from gpushare.show.plan import plan_result
from gpushare.show.render import write, write_error, write_notes
from gpushare.show.result import OutputFormat
from gpushare.show.run import RunReport
from tests.show.conftest import Screen

LONG = "the time-slice level of GPU 0 was read back " * 3
UNDO = "undo: gpushare mig apply -g 0 " + "1g.10gb:1 " * 10


def test_a_message_in_a_pipe_is_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Screen()
    write_error(BadUsage(LONG, LONG), stream)
    write_notes([LONG], stream)
    assert len(stream.getvalue().splitlines()) == 3


def test_a_message_on_a_terminal_is_wrapped_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Screen(terminal=True)
    write_error(BadUsage(LONG, "short"), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("error: the time-slice")
    assert all(line.startswith("       ") for line in lines[1:-1])
    assert lines[-1] == "hint: short"
    assert max(map(len, lines)) <= 40
    assert " ".join(stream.getvalue().split()) == f"error: {LONG.strip()} hint: short"


def test_a_command_that_is_wrapped_can_be_copied(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Screen(terminal=True)
    write_notes([UNDO], stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0] == "note: undo:"
    assert [line.endswith(" \\") for line in lines[1:]] == [True] * (len(lines) - 2) + [False]


def test_lines_of_run_are_wrapped_too(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Screen(terminal=True)
    device = SimpleNamespace(title="GPU 0")
    RunReport(None, device, stream, quiet=False).outside(812)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("error: process 812 runs on GPU 0 outside MPS")
    assert max(map(len, lines)) <= 60
    pipe = Screen()
    RunReport(None, device, pipe, quiet=False).outside(812)
    assert len(pipe.getvalue().splitlines()) == 2


def test_limits_are_said_only_if_they_were_read(monkeypatch):
    for threads, said in (
        (100.0, "is attached to MPS server 7 on GPU 0 (threads 100 %, memory limit none)"),
        (None, "was attached to MPS server 7 on GPU 0; its limits could not be read before it ended"),
    ):
        client = MpsClient(pid=812, server_pid=7, threads_percent=threads)
        monkeypatch.setattr(RunReport, "_client", lambda _self, _pid, client=client: client)
        pipe = Screen()
        limits = Limits(memory_limit_bytes=8 << 30)
        RunReport(None, SimpleNamespace(title="GPU 0"), pipe, quiet=False, limits=limits).attached(812)
        assert pipe.getvalue() == f"gpushare: process 812 {said}\n"


def test_a_command_for_root_is_one_that_this_user_can_type(monkeypatch, tmp_path):
    def texts():
        """Return a command for root as a hint, as an undo and in a plan."""
        command = "sudo gpushare mig enable -g 0"
        stream = Screen()
        write_error(NoPermission("no", f"run it as root: {command}"), stream)
        step = Step(what="enable", command=None, undo=command, do=lambda: None)
        plan = Plan(title="MIG is on", steps=(step,), undo=command)
        for dry_run in (True, False):
            write(plan_result(plan, dry_run=dry_run), OutputFormat.TABLE, stdout=stream, stderr=stream)
        return [line.rpartition(": ")[2] for line in stream.getvalue().splitlines() if "mig enable" in line]

    own = tmp_path / "gpushare"
    own.write_text("", encoding="utf-8")
    own.chmod(0o755)
    of_root = tmp_path / "bin"
    of_root.mkdir()
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr("gpushare.show.text._SUDO_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("gpushare.show.text._SUDO_PATH_BUT_RHEL", str(of_root))
    monkeypatch.setattr("gpushare.show.text._RHEL", str(tmp_path / "redhat-release"))
    monkeypatch.setattr("sys.argv", [str(own)])
    monkeypatch.setattr("gpushare.show.text._simulated", False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert texts() == [f"sudo {own} mig enable -g 0"] * 4
    # Another one than this.
    (of_root / "gpushare").write_text("", encoding="utf-8")
    (of_root / "gpushare").chmod(0o755)
    assert texts() == [f"sudo {own} mig enable -g 0"] * 4
    (of_root / "gpushare").unlink()
    (of_root / "gpushare").symlink_to(own)
    assert texts() == ["sudo gpushare mig enable -g 0"] * 4
    # There sudo does not look in /usr/local.
    (tmp_path / "redhat-release").touch()
    assert texts() == [f"sudo {own} mig enable -g 0"] * 4
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert texts() == ["gpushare mig enable -g 0"] * 4
