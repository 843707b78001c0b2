"""Jobs: names and PIDs, their records, their processes on GPUs, and who may touch them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import BadUsage, GpushareError, InUse, NoPermission, NotFound
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.run import jobs
from gpushare.run.jobs import (
    JobRecord,
    RecordedJob,
    check_name_free,
    consent_to,
    farm_job,
    find_job,
    find_record,
    gpu_processes,
    write_record,
)
from gpushare.sim import admin
from tests.errors import fails

SPEC = "sim:2xh200"


@pytest.fixture
def host() -> Host:
    return connect(SPEC)


def record(host: Host, pid: int, name: str = "web", **more: object) -> JobRecord:
    info = host.processes.describe(pid)
    job_record = JobRecord(name=name, pid=pid, started=info.started, devices=("GPU-a",))
    return replace(job_record, **more)  # type: ignore[arg-type]


def test_a_job_is_found_by_its_pid_and_by_its_name(host: Host) -> None:
    pid = admin.add_process(SPEC, user="4241")
    by_pid = find_job(host, str(pid))
    assert (by_pid.pid, by_pid.name, by_pid.title, by_pid.selector) == (pid, None, f"process {pid}", str(pid))
    write_record(host, record(host, pid, role=jobs.PLAIN))
    by_name = find_job(host, "web")
    assert (by_name.pid, by_name.started, by_name.selector) == (pid, by_pid.started, "web")
    assert by_name == find_job(host, str(pid))
    assert by_name.title == f"'web' (process {pid})"
    # Its identity is the one that a scan of its channels compares.
    with host.open_channels() as control:
        assert control.find(pid, by_name.started).pid == pid
        with pytest.raises(NotFound):
            control.find(pid, by_name.started + 1)


def test_a_pid_is_no_other_process_of_that_number(host: Host) -> None:
    """A gpushare that was killed leaves its PID in a record; and a record may say whatever its writer wants."""
    job, innocent = admin.add_process(SPEC), admin.add_process(SPEC, user="4241")
    process = host.processes.identity(innocent)
    write_record(host, record(host, job, supervisor=Identity(innocent, process.started + 1)))
    assert find_job(host, str(innocent)).pid == innocent
    write_record(host, record(host, job, supervisor=process))
    assert find_job(host, str(innocent)).pid == job
    # One whose program is a gpushare that runs another job.
    write_record(host, record(host, innocent, "outer"))
    assert find_job(host, str(innocent)).name == "outer"


@pytest.mark.parametrize("text", ["nobody", "999999", "0", "00", "9" * 30, "9" * 5000, "0" * 5000, "4294967297"])
def test_what_does_not_run_is_no_job(host: Host, text: str) -> None:
    with fails(NotFound, "no_job") as refused:
        find_job(host, text)
    assert refused.value.hint


@pytest.mark.parametrize("text", ["", "-1", "1web", "a b", "../etc", "x" * 33, "1\n"])
def test_a_word_that_can_be_neither_is_refused(host: Host, text: str) -> None:
    with fails(BadUsage, "bad_name"):
        find_job(host, text)


def test_the_hint_of_an_unknown_name_has_those_that_run(host: Host) -> None:
    write_record(host, record(host, admin.add_process(SPEC)))
    with pytest.raises(NotFound) as refused:
        find_job(host, "wbe")
    assert "running jobs: web;" in (refused.value.hint or "")


def test_a_record_of_an_ended_process_whose_pid_was_reused_is_no_job(host: Host) -> None:
    pid = admin.add_process(SPEC)
    write_record(host, record(host, pid, started=1))
    with pytest.raises(NotFound):
        find_job(host, "web")
    assert find_job(host, str(pid)).name is None
    check_name_free(host, "web")


def test_of_two_records_with_a_name_the_one_that_runs_counts(host: Host, tmp_path: Path) -> None:
    pid = admin.add_process(SPEC)
    write_record(host, record(host, pid, started=1))
    roots = tmp_path / "root"
    write_record(replace(host, run_directory=roots), record(host, pid))
    job_record = find_record(replace(host, shared_run_directories=(roots,)), "web")
    assert job_record.started != 1


def test_its_processes_on_gpus_are_those_of_its_tree(host: Host) -> None:
    pid = admin.add_process(SPEC, gpu="1")
    admin.add_process(SPEC)
    (process,) = gpu_processes(host, find_job(host, str(pid)))
    assert (process.pid, process.gpus, process.under_mps) == (pid, (1,), False)
    # This test's process has no context.
    with fails(NotFound, "no_context"):
        gpu_processes(host, find_job(host, str(os.getpid())))


def test_a_job_that_ends_meanwhile_is_no_job(host: Host) -> None:
    pid = admin.add_process(SPEC)
    job = find_job(host, str(pid))
    admin.end_process(SPEC, pid)
    with fails(NotFound, "no_job"):
        gpu_processes(host, job)


def test_a_gpu_that_does_not_answer_hides_no_other(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = admin.add_process(SPEC, gpu="1")
    job = find_job(host, str(pid))
    real = host.nvml.processes

    def lost(index: int) -> object:
        if index == 0:
            raise GpushareError("GPU 0 is lost", "see: sudo dmesg | tail")
        return real(index)

    monkeypatch.setattr(host.nvml, "processes", lost)
    assert [process.gpus for process in gpu_processes(host, job)] == [(1,)]
    monkeypatch.setattr(host.nvml, "count", lambda: 1)
    with pytest.raises(GpushareError, match="is lost"):
        gpu_processes(host, job)


def test_who_may_touch_a_job(host: Host) -> None:
    own = find_job(host, str(admin.add_process(SPEC)))
    other = find_job(host, str(admin.add_process(SPEC, user="4242")))
    root, user = replace(host, uid=0), replace(host, uid=4243, root=False)
    assert consent_to(replace(host, uid=own.uid or 0), own, "pauses") == ()
    (asked,) = consent_to(root, other, "pauses")
    assert str(asked) == f"process {other.pid} (of 4242)"
    with fails(NoPermission, "other_user"):
        consent_to(user, other, "pauses")
    # Who owns it is not known: it is not ours.
    with pytest.raises(NoPermission):
        consent_to(user, replace(own, uid=None), "pauses")


def test_copies_have_a_name_while_gpushare_runs_them(host: Host) -> None:
    device = select_one("0", [host.nvml.gpu(index) for index in range(host.nvml.count())])
    with farm_job(host, device, "farm", ["train", "a"]) as ended:
        assert find_job(host, "farm").pid == os.getpid()
        write_record(host, record(host, admin.add_process(SPEC), "other", role=jobs.PLAIN))
        with pytest.raises(InUse), farm_job(host, device, "other", ["train"]):
            pass
        ended(256 + 3, None)
        assert find_job(host, "farm").pid == os.getpid()
    assert find_record(host, "farm") is None
    (past,) = jobs.PAST.all(host)
    assert (past.name, past.command, past.exit_code) == ("farm", "train a", 3)
    with farm_job(host, device, None, ["train.py"]):
        assert {named.name for named in jobs.records(host)} == {"other", "train.py-1"}


@pytest.mark.parametrize("is_farm", [True, False])
def test_what_a_killed_gpushare_had_started_counts_as_started(host: Host, *, is_farm: bool) -> None:
    """Before its program runs, the record of a job names gpushare itself; that of a farm always does."""
    device = select_one("0", [host.nvml.gpu(index) for index in range(host.nvml.count())])
    with farm_job(host, device, "farm", ["train"]):
        running = find_record(host, "farm")
    assert running is not None
    killed = Identity(4194303, 1)
    write_record(host, replace(running, **killed._asdict(), supervisor=killed, farm=is_farm))
    past = jobs.last_past(host, "farm")
    assert past is not None
    assert (past.started, past.exit_code) == (is_farm, None)


def test_root_is_asked_for_other_users_processes_of_a_service_of_its_own(host: Host) -> None:
    service = find_job(host, str(admin.add_process(SPEC, user="0")))
    others = [admin.add_process(SPEC, user="4242"), admin.add_process(SPEC, user="4242")]
    last = admin.add_process(SPEC, user="4243")
    root = replace(host, uid=0)
    assert consent_to(root, service, "pauses", [service.pid]) == ()
    asked = consent_to(root, service, "pauses", [service.pid, *others, last])
    assert [str(loss) for loss in asked] == [f"2 processes such as {others[0]} (of 4242)", f"process {last} (of 4243)"]
    # Its own processes are not named again.
    theirs = find_job(host, str(others[0]))
    assert [loss.what for loss in consent_to(root, theirs, "pauses", [*others, last])] == [
        theirs.title,
        f"process {last}",
    ]


def test_records_of_ended_jobs_go_but_those_of_production_stay(host: Host) -> None:
    for name, role in (("web", jobs.PRODUCTION), ("train", jobs.PLAIN)):
        write_record(host, record(host, os.getpid(), name, role=role, started=1))
    assert {each.name for each in jobs.records(host)} == {"web", "train"}
    jobs.forget_ended(host)
    assert {each.name for each in jobs.records(host)} == {"web"}


def test_two_at_once_do_not_get_the_same_name(host: Host) -> None:
    device = select_one("0", [host.nvml.gpu(index) for index in range(host.nvml.count())])
    job = RecordedJob(host, device, record(host, os.getpid(), role=jobs.PLAIN), "python")
    job.check()
    # Another gpushare, which found the name free as well, is faster.
    write_record(host, record(host, admin.add_process(SPEC)))
    with fails(InUse, "name_in_use"):
        job.open()
    assert find_job(host, "web").pid != os.getpid()


WEB = JobRecord(name="web", pid=17, started=35, devices=("GPU-a",), memory_peak_bytes=7)


def test_a_record_is_read_as_it_was_written_and_by_all(host: Host) -> None:
    before = os.umask(0o077)
    try:
        write_record(host, WEB)
    finally:
        os.umask(before)
    assert find_record(host, "web") == WEB
    path = host.run_directory / "jobs" / "web.json"
    assert json.loads(path.read_text())["schema"] == 1
    # Others spare the job, too; nobody but its owner writes.
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent, host.run_directory)] == [0o644, 0o755, 0o755]
