"""``gpushare run --memory`` where the driver limits the job: driver 615, cgroups, root."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from gpushare.base.units import GIB
from gpushare.sim import admin
from gpushare.sim.cgroups import FAULTS
from tests.cli.drive import CRASHED, H200, Cli, Real, Refused, World, until
from tests.host.test_cgroups import real_tree

JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05")
SMALL = (*JOB, "--footprint", "4G", "--seconds", "0.5")
LARGE = (*JOB, "--footprint", "9G", "--seconds", "20")


@pytest.fixture(autouse=True)
def driver(world: World) -> None:
    admin.set_fault(H200, "driver", None, "615.71.09")
    world.host.open_cgroups()


def cgroups(world: World) -> list[Path]:
    return list(world.host.cgroup_root.glob("gpushare-job-*"))


def running(world: World) -> bool:
    state = world.file.read()
    return state is not None and any(process.memory_bytes == 4 * GIB for process in state.processes)


def test_an_allocation_above_the_limit_fails(cli: Cli, world: World) -> None:
    answer = cli("run", "--slice", "2ms", "--memory", "8G", "--", *LARGE)
    assert answer.code == 1
    # The program's own, which is the simulated CUDA's, goes to the terminal.
    assert answer.lines("error") == []
    (note,) = [line for line in answer.lines("note") if "limit" in line]
    assert note == (
        "note: if it ran out of GPU memory: its limit is 8.0 GiB, set in the driver (it held 512 MiB at most); to raise it: "
        "--memory SIZE"
    )
    assert cgroups(world) == []


def test_a_job_within_its_limit_runs(cli: Cli, world: World) -> None:
    answer = cli("run", "--memory", "8G", "--", *SMALL)
    assert answer.code == 0, answer
    assert not any("limit is" in line for line in answer.lines("note"))
    assert cgroups(world) == []


def test_the_exit_code_is_the_programs(cli: Cli, world: World) -> None:
    answer = cli("run", "--memory", "8G", "--", "sh", "-c", "exit 3")
    assert answer.code == 3
    assert cgroups(world) == []


def test_the_program_is_in_the_cgroup_before_it_runs(cli: Cli, world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    root = world.host.cgroup_root
    script = (
        f"cat {root}/gpushare-job-*/cgroup.procs > {out}; echo $$ >> {out}; cat {root}/gpushare-job-*/dmem.max >> {out}"
    )
    assert cli("run", "--memory", "8G", "--", "sh", "-c", script).code == 0
    entered, own, limit = out.read_text().splitlines()
    assert entered == own
    assert limit.endswith(f"/vidmem {8 * GIB}")


def test_it_waits_again_for_more(cli: Cli, world: World) -> None:
    answer = cli("run", "--wait", "--requeue", "--memory", "8G", "--", *JOB, "--footprint", "9G", "--seconds", "0.2")
    assert answer.code == 0, answer
    notes = answer.lines("note")
    assert [line for line in notes if "ran out of memory" in line] == [
        "note: it ran out of memory, and waits again for 9.6 GiB"
    ]
    assert cgroups(world) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--over", "warn"),
        ("--over", "pause"),
        ("--swap", "request"),
    ],
)
def test_what_the_driver_cannot_do_is_added_up(cli: Cli, words: tuple[str, ...]) -> None:
    answer = cli("run", "--memory", "8G", *words, "--dry-run", "--", *LARGE)
    assert "added up five times a second" in answer.out
    assert "memory-limits" not in answer.out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_driver_that_says_something_else_is_not_believed(cli: Cli, world: World, fault: str) -> None:
    admin.set_fault(H200, "memory-limits", None, fault)
    answer = cli("run", "--slice", "2ms", "--memory", "8G", "--", *LARGE)
    assert answer.code == 1
    assert "over its limit of 8.0 GiB" in answer.lines("error")[0]
    assert any("the driver did not take the limit as asked" in line for line in answer.lines("note"))
    assert cgroups(world) == []


def test_a_user_is_added_up(cli: Cli, world: World) -> None:
    admin.set_fault(H200, "user", None, "1000")
    answer = cli("run", "--slice", "2ms", "--memory", "8G", "--", *LARGE)
    assert "over its limit of 8.0 GiB" in answer.lines("error")[0]
    assert cgroups(world) == []


def test_a_wrong_unit_that_nobody_else_shows_is_noticed_later(cli: Cli, world: World) -> None:
    # Without the kernel's controller there is no second witness.
    (world.host.cgroup_root / "cgroup.controllers").write_text("cpu memory misc\n")
    admin.set_fault(H200, "memory-limits", None, "mib")
    answer = cli("run", "--slice", "2ms", "--memory", "8G", "--", *LARGE)
    assert answer.code == 1
    assert any("the driver does not limit all of the job" in line for line in answer.lines("note"))
    assert "over its limit of 8.0 GiB" in answer.lines("error")[0]
    assert cgroups(world) == []


def test_a_program_that_cannot_enter_is_added_up(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.host.cgroups.JobCgroup.enter", lambda _self, _pid: None)
    answer = cli("run", "--slice", "2ms", "--memory", "8G", "--", *LARGE)
    assert any("is not in the job's cgroup" in line for line in answer.lines("note"))
    assert "over its limit of 8.0 GiB" in answer.lines("error")[0]
    assert cgroups(world) == []


def test_a_dry_run_says_who_limits(cli: Cli, world: World) -> None:
    answer = cli("run", "--memory", "8G", "--dry-run", "--", "true").ok()
    assert "let the driver limit it to 8.0 GiB" in answer.out
    assert "--soft-limit 0 --hard-limit 8192 -i 0" in answer.out
    assert cgroups(world) == []


def test_status_says_who_limits(real: Real, cli: Cli, world: World) -> None:
    job = real("run", "--memory", "8G", "--name", "train", "--", *JOB, "--footprint", "4G", "--seconds", "60")
    until(lambda: running(world), "the job is on the GPU")
    (row,) = cli("status", output="json").ok().data["limited_jobs"]
    # The program, as in the list of processes.
    assert row["pid"] in {process.pid for process in world.state.processes}
    assert (row["name"], row["limit_bytes"], row["above"], row["by_driver"]) == ("train", 8 * GIB, "refuse", True)
    assert "an allocation fails (limit in the driver)" in cli("status").ok().out
    job.signal(signal.SIGINT)
    job.result()
    assert cli("status", output="json").ok().data["limited_jobs"] == []
    assert cgroups(world) == []


def test_status_of_a_job_that_is_added_up(real: Real, cli: Cli, world: World) -> None:
    admin.set_fault(H200, "driver", None, "580.159.04")
    job = real("run", "--memory", "8G", "--", *JOB, "--footprint", "4G", "--seconds", "60")
    until(lambda: running(world), "the job is on the GPU")
    data = cli("status", output="json").ok().data
    (row,) = data["limited_jobs"]
    assert (row["above"], row["by_driver"]) == ("end", False)
    # Of a job that was given no name too.
    assert row["name"] in {process["job"] for process in data["gpus"][0]["processes"]} - {None}
    assert "it is ended (added up five times a second)" in cli("status").ok().out
    job.signal(signal.SIGINT)
    job.result()


def test_a_job_that_the_driver_limits_is_not_swapped(real: Real, refused: Refused, world: World) -> None:
    words = ("--memory", "8G", "--name", "train", "--slice", "1ms")
    job = real("run", *words, "--", *JOB, "--footprint", "4G", "--seconds", "60")
    until(lambda: running(world), "the job is on the GPU")
    # Nothing of its start may come in between.
    job.says("has a time-slice of 1ms")
    text = refused("swap", "out", "train", code="limited_by_driver", exit_code=3)
    assert "gpushare run --swap request" in text
    job.signal(signal.SIGINT)
    job.result()


def test_ctrl_c_takes_the_limit_off_and_blames_nothing(real: Real, world: World) -> None:
    job = real("run", "--memory", "8G", "--", "sleep", "60")
    until(lambda: (state := world.file.read()) is not None and state.processes, "the job is on the GPU")
    job.signal(signal.SIGINT)
    answer = job.result()
    assert answer.code == 130
    assert "ran out of" not in answer.err + "".join(job.said)
    assert cgroups(world) == []


def test_the_guard_takes_the_limit_off_when_gpushare_is_killed(real: Real, world: World) -> None:
    job = real("run", "--memory", "8G", "--", *JOB, "--footprint", "4G", "--seconds", "60")
    until(lambda: running(world), "the job is on the GPU")
    job.process.send_signal(signal.SIGKILL)
    until(lambda: world.state.processes == [] and cgroups(world) == [], "the program and its cgroup are gone")


@pytest.mark.parametrize("step", ["1", "2"])
def test_a_crash_at_each_call_leaves_what_the_next_command_removes(
    real: Real, cli: Cli, world: World, step: str
) -> None:
    admin.set_fault(H200, "crash-step", None, step)
    assert real("run", "--memory", "8G", "--", "true").result().code == CRASHED
    assert cli("run", "--memory", "8G", "--", "true").code == 0
    assert cgroups(world) == []


def test_a_plain_run_removes_what_a_killed_one_left(cli: Cli, world: World) -> None:
    tree = world.host.open_cgroups()
    os.rename(tree.create().path, f"{tree.root}/gpushare-job-{os.getpid()}-1-0")
    assert len(cgroups(world)) == 1
    cli("run", "--", "true", "--dry-run")
    assert cli("run", "--", "true").code == 0
    assert cgroups(world) == []


@pytest.mark.needs_root
def test_in_a_real_cgroup(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is simulated, the cgroup is the kernel's."""
    with real_tree() as tree:
        monkeypatch.setattr("gpushare.sim.cgroups.SimulatedCgroups", lambda _: tree)
        monkeypatch.setattr("gpushare.memory.driver_limit._set", lambda *_: True)
        monkeypatch.setattr("gpushare.memory.driver_limit.DriverLimit.used_bytes", lambda _: None)
        monkeypatch.setattr("gpushare.memory.driver_limit.release", lambda *_: None)
        if (reason := tree.why_not()) is not None:
            pytest.skip(f"the cgroup of the tests may not be left: {reason}")
        out = tmp_path / "out"
        script = f"grep ^0:: /proc/self/cgroup > {out}; sh -c 'grep ^0:: /proc/self/cgroup' >> {out}; exit 7"
        answer = cli("run", "--memory", "8G", "--", "sh", "-c", script)
        assert answer.code == 7
        assert not any("is not in the job's cgroup" in line for line in answer.lines("note"))
        own, child = out.read_text().splitlines()
        assert own == child
        assert own.startswith(f"0::/gpushare-job-{os.getpid()}-")
        assert not [name for name in os.listdir(tree.root) if name.startswith(f"gpushare-job-{os.getpid()}-")]


def test_a_container_is_added_up(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "podman"
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = cli("run", "--memory", "8G", "--container", "podman", "--dry-run", "--", "image")
    assert "added up five times a second" in answer.out
