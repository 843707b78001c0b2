"""``gpushare doctor``: every check in each verdict that it can have."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import BadUsage
from gpushare.base.model import ComputeMode, MpsDaemon
from gpushare.base.selection import select_one
from gpushare.doctor import examine
from gpushare.doctor.check import Examination, Verdict
from gpushare.doctor.mps import MOST_CLAIMS, foreign
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.host.nvml import NvmlReader
from gpushare.host.smi import ComputePolicy
from gpushare.mps.control import MpsControl, probe_version
from gpushare.mps.daemons import NOT_ASKED, FoundDaemon
from gpushare.mps.home import DaemonHome, home_of
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.plan import carry_out
from gpushare.sim import admin
from tests.cli.drive import Cli, World


def checks(cli: Cli, host: str = "sim:h200") -> dict[str, dict[str, Any]]:
    """Return the checks by id (the last of several)."""
    answer = cli("doctor", host=host, output="json")
    assert answer.lines("error") == []
    by_key = {check["id"]: check for check in answer.data["checks"]}
    for check in by_key.values():
        if check["verdict"] in {"warn", "fail"}:
            assert check["why"]
            assert check["remedy"]
    verdicts = {check["verdict"] for check in answer.data["checks"]}
    assert answer.json["status"] == "ok"
    assert answer.data["worst"] == next((one for one in ("fail", "warn") if one in verdicts), "pass")
    assert answer.code == int("fail" in verdicts)
    return by_key


def verdict(cli: Cli, identifier: str) -> str:
    return str(checks(cli)[identifier]["verdict"])


def test_all_is_well(cli: Cli, world: World) -> None:
    found = checks(cli)
    assert {check["verdict"] for check in found.values()} == {"pass"}, found
    assert set(found) == {
        *("nvml.library", "driver.loaded", "smi.program", "mps.control", "mps.server", "mps.daemons", "mps.shm"),
        *("gpu.persistence", "gpu.compute_mode", "gpu.xid", "gpu.unlisted_memory", "run.directory", "user.root"),
        *("pid.namespace", "records.unread"),
    }
    assert found["smi.program"]["seen"].endswith(" of 1 GPU")
    assert cli("doctor").code == 0
    # Nothing is changed.
    assert not (world.directory / "run").exists()


@pytest.mark.parametrize("form", ["table", "plain", "yaml", "csv"])
def test_other_outputs(cli: Cli, world: World, form: str) -> None:
    world.fault("persistence-off")
    out = cli("doctor", output=form).ok().out
    assert "gpu.persistence" in out
    assert "nvidia-persistenced" in out
    if form == "csv":
        assert {row["verdict"] for row in csv.DictReader(io.StringIO(out))} == {"pass", "warn"}


@pytest.mark.parametrize("width", [80, 120, 200])
def test_on_a_terminal(cli: Cli, world: World, width: int) -> None:
    from gpushare.cli.doctor import check_lines

    world.fault("persistence-off")
    rows = cli("doctor", output="json").data["checks"]
    lines = [line.plain for line in check_lines(rows, width)]
    assert [line.split()[:2] for line in lines if line[:4] in {"pass", "warn"}] == [
        [row["verdict"], row["id"]] for row in rows
    ]
    assert all(len(line) <= width for line in lines)
    assert any(line.endswith("remedy: sudo systemctl enable --now nvidia-persistenced") for line in lines)


@pytest.mark.parametrize(
    ("words", "warns", "fails"), [((), 0, 1), (("--fail-on", "failure"), 0, 1), (("--fail-on", "warning"), 1, 1)]
)
def test_exit_codes_are_those_of_a_linter(
    cli: Cli, world: World, words: tuple[str, ...], warns: int, fails: int
) -> None:
    """2 means a usage error everywhere else."""
    assert cli("doctor", *words).code == 0
    world.fault("persistence-off")
    assert cli("doctor", *words).code == warns
    world.fault("no-driver")
    assert cli("doctor", *words).code == fails
    assert cli("doctor", "--fail-on", "pass").code == 2


@pytest.mark.parametrize(
    ("program", "check", "asks"),
    [("nvidia-smi", "smi.program", ComputePolicy.read), ("nvidia-cuda-mps-control", "mps.control", probe_version)],
)
def test_a_program_that_hangs(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, program: str, check: str, asks: object
) -> None:
    monkeypatch.setattr(asks, "__defaults__", (0.1,))
    world.fault("hang", program)
    found = checks(cli)[check]
    assert (found["verdict"], "did not answer" in found["seen"]) == ("fail", True)
    assert "gpushare doctor" not in found["remedy"]


def test_what_is_unknown_is_no_verdict(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fault("not-supported", "nvmlDeviceGetPersistenceMode")
    assert checks(cli).get("gpu.persistence", {"verdict": "skip"})["verdict"] == "skip"
    world.fault("lost")
    assert "gpu.compute_mode" not in checks(cli)
    monkeypatch.setattr(NvmlReader, "sweep", lambda _: ())
    assert verdict(cli, "gpu.present") == "fail"


@pytest.mark.parametrize("mode", [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED])
def test_compute_mode_left_over(cli: Cli, world: World, mode: ComputeMode) -> None:
    world.host.nvml.set_compute_mode(0, mode)
    found = checks(cli)["gpu.compute_mode"]
    assert (found["verdict"], found["gpu"], mode.title in found["seen"]) == ("warn", 0, True)


def test_compute_mode_of_a_daemon(cli: Cli, world: World, sim_dir: Path) -> None:
    world.foreign_daemon(sim_dir)
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    assert verdict(cli, "gpu.compute_mode") == "pass"
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    world.host.nvml.set_compute_mode(0, ComputeMode.DEFAULT)
    # Of one that is dead it is left over.
    cli("mps", "start", "--exclusive", "--threads", "50").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    found = checks(cli)
    assert (found["gpu.compute_mode"]["verdict"], found["mps.stale"]["verdict"]) == ("warn", "warn")
    for command in found["mps.stale"]["remedy"].split("; "):
        cli(*command.split()[1:]).ok()
    assert (world.state.daemons[0].threads, world.state.gpus[0].compute_mode) == (
        50,
        ComputeMode.EXCLUSIVE_PROCESS.value,
    )


def test_daemons(cli: Cli, world: World, sim_dir: Path) -> None:
    assert "no MPS daemon runs" in checks(cli)["mps.daemons"]["seen"]
    cli("mps", "start").ok()
    world.client()
    assert "of gpushare answers, 1 client" in checks(cli)["mps.daemons"]["seen"]
    cli("mps", "stop", "--force").ok()
    world.foreign_daemon(sim_dir)
    assert f"of another owner ({user_name(os.geteuid())}, {sim_dir}/p)" in checks(cli)["mps.daemons"]["seen"]


@pytest.mark.parametrize(("ours", "expected"), [(True, "fail"), (False, "warn")])
def test_hanging_daemon(
    cli: Cli, world: World, sim_dir: Path, monkeypatch: pytest.MonkeyPatch, ours: bool, expected: str
) -> None:
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)
    monkeypatch.setattr("gpushare.mps.stop._PROBE_SECONDS", 0.1)
    if ours:
        cli("mps", "start", "--threads", "50").ok()
    else:
        world.foreign_daemon(sim_dir)
    world.send(world.state.daemons[0].pid, signal.SIGSTOP)
    found = checks(cli)["mps.answers"]
    assert found["verdict"] == expected
    if ours:
        before = world.state.daemons[0].pid
        for command in found["remedy"].split("; ")[1:]:
            cli(*command.split()[1:]).ok()
        (daemon,) = world.state.daemons
        assert (daemon.pid != before, daemon.threads) == (True, 50)


@pytest.mark.parametrize("ours", [True, False])
def test_fault(cli: Cli, world: World, sim_dir: Path, ours: bool) -> None:
    if ours:
        cli("mps", "start").ok()
    else:
        world.foreign_daemon(sim_dir)
    victim = world.client(queue_seconds=0.5)
    world.client(queue_seconds=0.5)
    world.send(victim, signal.SIGKILL)
    found = checks(cli)["mps.fault"]
    assert found["verdict"] == "fail"
    assert "807" in found["why"]


def test_orphan(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out(plan_start(world.host, select_one("0", world.host.nvml.sweep()), Limits(), transient=True))
    found = checks(cli)["mps.orphan"]
    assert found["verdict"] == "warn"
    with monkeypatch.context() as patched:
        patched.setattr(DaemonHome, "live_leases", lambda _: None)
        assert "mps.orphan" not in checks(cli)
    cli(*found["remedy"].split()[1:]).ok()
    assert "mps.orphan" not in checks(cli)


def test_run_directory(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.host.run_directory
    run.mkdir()
    assert "0 daemons" in checks(cli)["run.directory"]["seen"]
    run.chmod(0o777)
    assert verdict(cli, "run.directory") == "fail"
    run.rmdir()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert verdict(cli, "run.directory") == "warn"


@pytest.mark.parametrize("length", range(50, 65))
def test_run_path_fails_where_a_start_does(world: World, length: int) -> None:
    host = replace(world.host, run_directory=Path("/" + "x" * (length - 1)))
    rows = [check.id for check in examine._run_directory(Examination(host))]
    with pytest.raises(BadUsage) if "run.path" in rows else contextlib.nullcontext():
        home_of(host.run_directory, world.uuid()).check_path()


def test_user(cli: Cli, world: World) -> None:
    assert ("as root" if os.geteuid() == 0 else "may do what root may") in checks(cli)["user.root"]["seen"]
    world.fault("user", "1000")
    found = checks(cli)
    assert (
        found["user.root"]["verdict"],
        "user 1000: MPS and the time-slices of your own jobs work" in found["user.root"]["seen"],
    ) == ("pass", True)
    # The log of the kernel may not be readable.
    assert found["gpu.xid"]["verdict"] == "skip"


def test_device_nodes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(world.host, spec="local")
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    found = list(examine._permissions(examine.Examination(here)))
    assert (found[-1].id, found[-1].verdict) == ("device.nodes", examine.Verdict.FAIL)
    monkeypatch.setattr(os, "access", lambda *_, **__: True)
    assert [check.id for check in examine._permissions(examine.Examination(here))] == ["user.root"]


@pytest.mark.parametrize(("answer", "expected"), [(True, "pass"), (False, "warn"), (None, "skip")])
def test_pid_namespace(cli: Cli, monkeypatch: pytest.MonkeyPatch, answer: bool | None, expected: str) -> None:
    monkeypatch.setattr("gpushare.sim.processes.SimulatedProcesses.namespace_is_host", lambda _: answer)
    assert verdict(cli, "pid.namespace") == expected


def _broken(*_: object, **__: object) -> object:
    raise OSError(errno.EIO, "Input/output error", "/dev/nvidiactl")


def _by_id(host: Host) -> dict[str, Any]:
    return {check.id: check for check in examine.examine(host)}


def test_what_the_system_refuses_is_a_finding(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("mps", "start", "--exclusive").ok()
    for patched, name, identifier, expected in (
        (examine, "kept_entries", "host.file", Verdict.WARN),
        # Daemons that cannot be looked up are not said to be absent.
        (examine, "find_daemons", "mps.daemons", Verdict.SKIP),
        (NvmlReader, "sweep", "nvml.answers", Verdict.FAIL),
    ):
        monkeypatch.setattr(patched, name, _broken)
        found = _by_id(world.host)
        assert found[identifier].verdict is expected
        assert "Input/output error" in found[identifier].seen
        assert found["nvml.library"].verdict is Verdict.PASS
        assert "user.root" in found
        # Whether a daemon set the mode, and where one listens, is unknown.
        assert name == "kept_entries" or not {"gpu.compute_mode", "mps.environment"} & found.keys()
    assert "gpu.present" not in found


def test_a_flood_of_strangers_is_counted(world: World) -> None:
    claims = [
        FoundDaemon(
            MpsDaemon(pid=pid, ours=False, pipe_directory=f"/tmp/{pid}", user="mallory", note=NOT_ASKED),
            None,
            None,
            trusted=False,
        )
        for pid in range(1000, 1300)
    ]
    seen = Examination(world.host, daemons=claims)
    (check,) = foreign(seen)
    assert check.seen.endswith(f"1009 (mallory) and {300 - MOST_CLAIMS} more")


def test_the_claim_of_a_stranger_hides_no_left_over_mode(world: World) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    claim = MpsDaemon(pid=1000, ours=False, pipe_directory="/tmp/x", gpu_indexes=(0,), user="mallory", note=NOT_ASKED)
    for trusted, verdicts in ((False, [Verdict.WARN]), (True, [Verdict.PASS])):
        found = FoundDaemon(claim, None, None, trusted=trusted, uid=4242)
        seen = Examination(world.host, gpus=world.host.nvml.sweep(), daemons=[found])
        assert [check.verdict for check in examine.compute_mode(seen)] == verdicts


def unread(cli: Cli) -> list[str]:
    """Return the remedies of records that cannot be read."""
    return sorted(
        each["remedy"] for each in cli("doctor", output="json").data["checks"] if each["id"] == "records.unread"
    )


def test_a_directory_of_records_that_others_may_write_is_named_once(cli: Cli, world: World) -> None:
    run = world.host.run_directory
    run.mkdir()
    run.chmod(0o775)
    assert f"the directory of records, {run}, is ignored" in checks(cli)["records.unread"]["seen"]
    assert unread(cli) == [f"see whose it is: ls -ld {run}; if yours, close it: chmod go-w {run}"]
    run.chmod(0o755)
    assert verdict(cli, "records.unread") == "pass"
    # One that is a link is only looked at: `chmod` would change what it leads to.
    (run / "jobs").symlink_to(world.directory)
    assert unread(cli) == [f"see whose it is: ls -ld {run}/jobs"]


@pytest.mark.parametrize(("verb", "kind", "back"), [("pause", "pause", "resume"), ("swap out", "swap", "swap in")])
def test_a_job_off_the_gpu_is_brought_back_before_its_unreadable_record_goes(
    cli: Cli, world: World, verb: str, kind: str, back: str
) -> None:
    pid = admin.add_process(world.spec, memory_bytes=4 << 30)
    cli(*verb.split(), str(pid)).ok()
    (path,) = world.host.run_directory.joinpath(kind).glob(f"{pid}.json")
    text = path.read_text()
    path.write_text("x")
    assert unread(cli) == [f"gpushare {back} {pid}; then remove it: rm {path}"]
    cli(*back.split(), str(pid)).ok()
    # The job of a container lives there, and its PID is another process here: its record is not to be removed.
    path.write_text(json.dumps({**json.loads(text), "space": 7}))
    assert unread(cli) == ["see it where it was written, in a container or on its host: gpushare doctor"]


def test_a_link_in_the_place_of_a_record_is_not_followed(cli: Cli, world: World) -> None:
    records = world.host.run_directory / "jobs"
    records.mkdir(parents=True)
    for name, target in (("1", "a" * 300), ("2", "/usr")):
        records.joinpath(f"{name}.json").symlink_to(target)
    assert unread(cli) == [f"remove it: rm {records}/{name}.json" for name in (1, 2)]
