"""``gpushare run --memory`` and ``--wait``: limits of a job, waiting for room, more memory the second time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpushare.base.errors import InUse
from gpushare.base.model import ComputeMode
from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.host.capabilities import user_name
from gpushare.memory.admission import UserLimits
from gpushare.memory.ledger import Place, Request, reservations
from gpushare.memory.peaks import Profile, find_profile, keep_profile
from gpushare.memory.room import wait_for_room
from gpushare.run.jobs import PRODUCTION, output_path
from gpushare.run.queued import ErrorTail, _size_with_more, lacked_memory
from gpushare.sim import admin
from tests.cli.drive import H200, ROOT, Cli, Patch, Real, Refused, Words, World, missing, refusals, until

JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05")


@refusals(
    "one_gpu 2: -g all -- true",
    "bad_over 2: --memory 4G --over kill -- true",
    "mig_off 6: --wait --mig 1g -- true",
    "bad_duration 2: --wait --timeout x -- true | --swap idle=0 -- true | --swap turns=0 -- true",
    "unknown_gpu 6: --wait -g 9 -- true",
    "bad_name 2: --wait --memory 4G --production 'a b!' -- true",
    "command_not_found 127: --wait --memory 4G -- no-such-program",
)
def test_wrong_usage(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    refused("run", *words, code=code, exit_code=exit_code)


def test_a_limit_per_process_is_reserved_too(real: Real, cli: Cli, world: World) -> None:
    """A job that has just begun holds little; one that waits must not take what it may allocate."""
    job = real("run", "--memory", "100G", "--", *JOB, "--footprint", "2G", "--seconds", "60")
    world.wait_for_a_job()
    assert [reservation.memory_bytes for reservation in reservations(world.host) or []] == [100 * GIB]
    assert cli("status", output="json").ok().data["gpus"][0]["jobs_reserved_bytes"] == 100 * GIB
    cli("run", "--wait", "--timeout", "0.3s", "--memory", "60G", "--", "true").ends(19)
    job.end()
    assert reservations(world.host) == []


def test_the_limit_of_a_user_holds_without_waiting_too(real: Real, cli: Cli, world: World, tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    user = user_name(os.geteuid())
    path.write_text(f"version: 1\nmemory:\n- {{match: {{user: ['{user}']}}, limit: 30G}}\n", encoding="utf-8")
    cli("apply", "-f", str(path), "-y").ok()
    asked = ("run", "-g", "0", "--memory", "20G", "--slice", "2ms")
    cli(*asked, "-n", "--", "true").ok()
    job = real(*asked, "--", *JOB, "--footprint", "2G", "--seconds", "60")
    world.wait_for_a_job()
    for option in ((), ("-n",)):
        answer = cli(*asked, *option, "--", "true")
        assert (answer.code, len(answer.lines("hint"))) == (19, 1)
        (error,) = answer.lines("error")
        assert "your jobs have reserved 20.0 GiB of the 30.0 GiB that you may have on a GPU" in error
    waited = cli(*asked, "--wait", "--timeout", "0.3s", "--", "true").ends(19)
    assert "your jobs have reserved 20.0 GiB of the 30.0 GiB that you may have on a GPU" in waited.lines("error")[0]
    assert "gpushare stop NAME" in waited.lines("hint")[0]
    assert len(reservations(world.host) or []) == 1
    cli("run", "-g", "0", "--memory", "10G", "--slice", "2ms", "--", "true").ok()
    job.end()
    cli(*asked, "--", "true").ok()


def test_the_largest_size_that_an_error_names_is_taken(cli: Cli) -> None:
    hint = cli("run", "--memory", "900G", "--", "true").lines("hint")[0]
    cli("run", "-n", "--wait", "--memory", hint.split()[-1], "--", "true").ok()


@pytest.mark.parametrize(
    ("footprint", "held"),
    [("9G", "9.0 GiB, over its limit of 8.0 GiB"), ("8212M", "8212 MiB, over its limit of 8192 MiB")],
)
def test_a_job_over_its_limit_is_ended(cli: Cli, world: World, footprint: str, held: str) -> None:
    answer = cli("run", "--slice", "2ms", "--memory", "8G", "--", *JOB, "--footprint", footprint, "--seconds", "20")
    assert answer.code == 1
    (error,) = answer.lines("error")
    assert f"holds {held}" in error
    assert answer.lines("hint")
    # However early that is, it was on the GPU.
    assert "runs on GPU 0" in answer.err
    assert "no CUDA context" not in answer.err
    assert (world.state.processes, reservations(world.host)) == ([], [])


def test_a_warning_leaves_the_job_alone(cli: Cli) -> None:
    answer = cli("run", "--memory", "8G", "--over", "warn", "--", *JOB, "--footprint", "9G", "--seconds", "1").ok()
    assert any("over its limit" in line for line in answer.lines("note"))


def test_a_job_waits_for_room_and_then_runs(real: Real, cli: Cli, world: World) -> None:
    first = real("run", "--memory", "100G", "--", *JOB, "--footprint", "90G", "--seconds", "3")
    world.wait_for_a_job()
    began = time.monotonic()
    answer = cli("run", "--wait", "--memory", "60G", "--", *JOB, "--footprint", "50G", "--seconds", "0.2").ok()
    assert time.monotonic() - began > 1
    assert any("waiting for 60.0 GiB" in line for line in answer.lines("note"))
    assert first.process.wait(20) == 0


@pytest.mark.parametrize(
    ("seconds", "said"), [("0.3s", ["60.0 GiB within 0.3 s"]), ("0", ["no room for 60.0 GiB now", "--timeout 10m"])]
)
def test_no_room_in_time(refused: Refused, world: World, seconds: str, said: list[str]) -> None:
    world.hold(120 * GIB)
    words = ("--wait", "--timeout", seconds, "--memory", "60G", "--", "true")
    text = refused("run", *words, code="no_room", exit_code=19)
    assert [part for part in said if part not in text] == []


def test_two_jobs_of_one_name_do_not_both_wait(real: Real, refused: Refused, world: World) -> None:
    world.hold(120 * GIB)
    words = ("run", "--wait", "--memory", "60G", "--name", "train", "--", "true")
    waits = real(*words)
    until(lambda: [reservation for reservation in reservations(world.host) or [] if reservation.waits], "it waits")
    message = refused(*words, code="name_in_use", exit_code=19)
    assert missing(message, "already waits for room", "end the other: gpushare stop ") == []
    waits.end()


def test_the_end_of_a_job_frees_its_place(real: Real, world: World) -> None:
    waiting = real("run", "--wait", "--memory", "60G", "--", *JOB, "--seconds", "60")
    world.wait_for_a_job()
    waiting.process.send_signal(signal.SIGKILL)
    until(lambda: world.state.processes == [] and reservations(world.host) == [], "both are gone")
    # One that waits leaves the line.
    world.hold(120 * GIB)
    waiting = real("run", "--wait", "--memory", "60G", "--", *JOB)
    until(lambda: len(reservations(world.host) or []) == 2, "it waits")
    waiting.end().ends(130)
    assert len(reservations(world.host) or []) == 1


def test_the_peak_of_a_command_is_reserved_the_next_time(cli: Cli) -> None:
    words = ("run", "--wait", "--", *JOB, "--footprint", "9G", "--seconds", "0.6")
    first = cli(*words).ok()
    assert any("not known" in line for line in first.lines("note"))
    assert any("reserves 9.0 GiB" in line for line in cli(*words).lines("note"))
    # It had all memory that there is: to reserve a fifth more than it held would let it fail again and again.
    words = ("run", "--wait", "--requeue", "--", *JOB, "--footprint", "200G")
    for _ in range(2):
        answer = cli(*words).ends(1)
        assert any("its memory is not known" in line for line in answer.lines("note"))
        assert not any("waits again" in line for line in answer.lines("note"))


@pytest.mark.parametrize("more", [(), ("--slice", "2ms"), ("--name", "train"), ("--production", "web")])
def test_a_plain_run_keeps_its_peak(cli: Cli, monkeypatch: Patch, more: Words) -> None:
    monkeypatch.setattr("gpushare.run.jobs._PEAK_LOOKS", 1)
    monkeypatch.setattr("gpushare.run.share.Watch.poll_interval", lambda _: 0.1)
    job = ("--", *JOB, "--footprint", "9G", "--seconds", "1")
    assert cli("run", *more, *job).code == 0
    assert any("reserves 9.0 GiB" in line for line in cli("run", "-n", "--wait", *job).lines("note"))


@pytest.mark.parametrize("long", [True, False])
def test_the_peak_of_a_server_ended_by_hand_is_kept_after_a_while(real: Real, long: bool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import gpushare.run.program, gpushare.run.queued\ngpushare.run.queued._LONG_SECONDS = {0.1 if long else 60}\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    world = World("sim:a30")
    words = ("run", "--wait", "--slice", "2ms", "--", *JOB, "--footprint", "9G", "--seconds", "60")
    # The simulated job handles SIGINT and ends with 0; a shell does not.
    shell = (*words[:5], "sh", "-c", f"{' '.join(JOB)} --footprint 9G --seconds 60; exit 130")
    job = real(*shell, host=world.spec, env={"PYTHONPATH": path})
    until(
        lambda: (
            (state := world.file.read()) is not None
            and any(process.memory_bytes == 9 * GIB for process in state.processes)
        ),
        "the job is on the GPU",
    )
    time.sleep(0.5)
    assert job.end().code == 130
    (device,) = select("0", world.host.nvml.sweep())
    assert (find_profile(world.host, device, shell[5:]) is not None) is long


@pytest.mark.parametrize(("looks", "script"), [(10, "exit 0"), (1, "exit 3")])
def test_short_or_failed_runs_keep_no_peak(cli: Cli, world: World, monkeypatch: Patch, looks: int, script: str) -> None:
    monkeypatch.setattr("gpushare.run.jobs._PEAK_LOOKS", looks)
    cli("run", "--", "sh", "-c", f"{' '.join(JOB)} --footprint 9G --seconds 1; {script}")
    assert not (world.host.state_directory / "peaks").exists()


def test_a_job_without_enough_memory_waits_again_for_more(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"echo $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT >> {tmp_path}/limits\n"
        f"[ $(wc -l < {tmp_path}/limits) -ge 3 ] || {{ echo 'CUDA out of memory. Tried to allocate 2 GiB' >&2; exit 1; }}\n"
    )
    answer = cli("run", "--wait", "--requeue", "--memory", "10G", "--", "sh", str(script)).ok()
    again = [line for line in answer.lines("note") if "waits again" in line]
    assert [line.split()[-2] for line in again] == ["12.0", "14.4"]
    limits = (tmp_path / "limits").read_text().split()
    assert [limit.split("=")[1] for limit in limits] == ["9728M", "11776M", "14233M"]


def test_a_job_asks_for_the_whole_gpu_before_it_gives_up(cli: Cli, world: World) -> None:
    program = ("sh", "-c", "echo CUDA out of memory >&2; exit 1")
    answer = cli("run", "--wait", "--requeue", "--slice", "2ms", "--memory", "16G", "--", *program, host="sim:a30")
    again = [line.split("again for ")[1] for line in answer.lines("note") if "waits again" in line]
    # Of its 24 GiB, 0.5 are reserved by the driver.
    assert again == ["19.2 GiB", "23.0 GiB", "23.5 GiB"]
    assert "note: it ran out of memory at its maximum (23.5 GiB): not started again" in answer.lines("note")
    assert answer.code == 1
    # A display: all of the GPU is less than all of its memory, and more would never start.
    admin.add_process(world.spec, memory_bytes=GIB // 2, graphics=True, name="Xorg")
    program = ("sh", "-c", "echo CUDA out of memory >&2; exit 1")
    words = ("--wait", "--requeue", "--timeout", "2s", "--memory", "135G", "--", *program)
    answer = cli("run", *words).ends(1)
    assert "note: it ran out of memory at its maximum (139.3 GiB): not started again" in answer.lines("note")
    # What it asks for the next time is no more than that, too.
    answer = cli("run", "-n", "--wait", "--", *program)
    assert any("now it would start at once" in line for line in answer.ok().lines("note"))


@pytest.mark.parametrize(
    ("script", "code"),
    # The last one is killed by the host.
    [("echo broken >&2; exit 3", 3), ("echo CUDA out of memory >&2; kill -9 $$", 137)],
)
def test_a_failure_for_another_reason_is_not_repeated(cli: Cli, script: str, code: int) -> None:
    answer = cli("run", "--wait", "--requeue", "--memory", "10G", "--", "sh", "-c", script)
    assert answer.code == code
    assert not any("waits again" in line for line in answer.lines("note"))


def test_a_job_that_its_user_ends_is_not_started_again(real: Real, world: World) -> None:
    """It may have survived an allocation that failed."""
    words = ("run", "--wait", "--requeue", "--grace", "1s", "--memory", "10G", "--", "sh", "-c")
    job = real(*words, "echo CUDA out of memory >&2; exec sleep 60")
    world.wait_for_a_job()
    assert "waits again" not in job.end().ends(130).err
    assert world.state.processes == []


# It leaves the tree at once; simulated, so it says by itself what it holds.
STRAY = """
import os, time
from gpushare.sim.current import changing, current
from gpushare.host.identity import identity_of
from gpushare.sim.state import SimulatedProcess, StateFile
file = StateFile(os.environ["GPUSHARE_SIM_HOST"])
while not (found := [one for one in current(file).processes if one.pid == os.getpid()]):
    time.sleep(0.01)
me, ready = found[0], os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.read(ready[0], 1)
        pid = os.getpid()
        stray = SimulatedProcess(pid=pid, real=True, gpu_uuid=me.gpu_uuid, name="stray", uid=me.uid,
                                 started=identity_of(pid).started, memory_bytes=9 << 30)
        with changing(file) as (state, _):
            state.processes.append(stray)
        time.sleep(60)
    os._exit(0)
os.wait()
os.write(ready[1], b"x")
time.sleep(60)
"""


@pytest.mark.parametrize("how", [(), ("--swap", "request")])
def test_a_process_that_leaves_the_tree_counts_and_ends_with_the_job(cli: Cli, world: World, how: Words) -> None:
    answer = cli("run", *how, "--memory", "8G", "--grace", "1s", "--", sys.executable, "-c", STRAY).ends(1)
    assert "holds 9.5 GiB, over its limit of 8.0 GiB (2 processes" in answer.err
    assert world.state.processes == []


def test_any_gpu_takes_the_one_without_a_production_job(real: Real, cli: Cli) -> None:
    world = World("sim:2xa30")
    words = ("run", "-g", "0", "--production", "web", "--", *JOB, "--footprint", "2G", "--seconds", "20")
    job = real(*words, host=world.spec)
    world.wait_for_a_job()
    answer = cli("run", "--wait", "-g", "any", "--memory", "2G", "--", *JOB, "--seconds", "0.2", host=world.spec).ok()
    assert any("GPU 1: no production job" in line for line in answer.lines("note"))
    job.end(signal.SIGTERM)


def test_any_gpu_takes_the_one_where_the_profiles_say_least_harm(real: Real, cli: Cli) -> None:
    world = World("sim:2xa30")
    # The commands that run there are found by their command lines.
    heavy = (*JOB, "--footprint", "2G", "--seconds", "60", "--need", "90")
    light = (*JOB, "--footprint", "9G", "--seconds", "60", "--need", "20")
    mine = (*JOB, "--footprint", "2G", "--seconds", "0.2")
    device = select("0", world.host.nvml.sweep())[0]
    for command, use in ((heavy, 90.0), (light, 20.0), (mine, 50.0)):
        keep_profile(world.host, device, command, Profile(memory_bytes=2 * GIB, use_percent=use))
    jobs = [
        real("run", "-g", "0", "--", *heavy, host=world.spec),
        real("run", "-g", "1", "--slice", "2ms", "--", *light, host=world.spec),
    ]
    sizes = [2 * GIB, 9 * GIB]
    until(lambda: sorted(process.memory_bytes for process in world.state.processes) == sizes, "both are on their GPUs")
    words = ("run", "-n", "--wait", "-g", "any", "--", *mine)
    room = cli("-o", "json", *words, host=world.spec).ok().data["room"]
    assert room["gpus"] == [1]
    # Although there is less room.
    assert [gpu["why"].split("; ")[1] for gpu in room["devices"]] == [
        "it uses 50 %, those there 20 %",
        "it uses 50 %, those there 90 %, and 40 % has to wait",
    ]
    # Of a command that is not known, only how busy the GPUs are.
    words = ("run", "-n", "--wait", "-g", "any", "--memory", "2G", "--", "true")
    room = cli("-o", "json", *words, host=world.spec).ok().data["room"]
    assert all("% busy; " in gpu["why"] for gpu in room["devices"])
    for job in jobs:
        job.end(signal.SIGTERM)


A30 = "sim:a30"


def test_any_gpu_is_one_that_answers(cli: Cli, refused: Refused) -> None:
    world = World("sim:2xa30")
    cli("status", host=world.spec).ok()
    world.fault("lost", gpu="0")
    words = ("run", "-n", "--wait", "-g", "any", "--memory", "4G", "--", "true")
    assert cli("-o", "json", *words, host=world.spec).ok().data["room"]["gpus"] == [1]
    world.fault("lost", gpu="1")
    refused(*words, code="gpu_lost", exit_code=6, host=world.spec)


@pytest.mark.parametrize("option", [("--wait",), ("--memory", "4G")])
def test_several_gpus_and_none_named_hints_at_any(refused: Refused, option: Words) -> None:
    text = refused("run", *option, "--", "true", code="gpu_not_named", exit_code=2, host="sim:2xa30")
    assert "hint: name one: -g 0; or take the one where it harms least: -g any\n" in text


def test_the_reason_for_a_gpu_is_as_of_the_start(real: Real) -> None:
    world = World("sim:2xa30")
    both = [world.hold(20 * GIB, gpu) for gpu in (0, 1)]
    words = ("run", "--wait", "-g", "any", "--slice", "2ms", "--memory", "10G", "--", "true")
    job = real(*words, host=world.spec)
    job.says("waiting for 10.0 GiB")
    admin.add_process(world.spec, "1", memory_bytes=2 * GIB, sm_percent=70)
    both[1].leave()
    assert "GPU 1: no production job; it is 70 % busy; 21.5 GiB free to reserve" in job.says("GPU 1: ")
    assert job.result().code == 0
    both[0].leave()


def test_jobs_that_do_not_fit_take_turns(real: Real) -> None:
    # What they have reserved does not fit together, what they hold would.
    words = ("run", "--swap", "turns=0.5s", "--memory", "16G", "--", *JOB, "--footprint", "8G", "--seconds", "60")
    both = [real(*words, host=A30) for _ in range(2)]
    for job in both:
        for _ in range(2):
            job.says("out of the GPU: 8.0 GiB to host memory")
            job.says("back on the GPU: 8.0 GiB")
    for job in both:
        job.signal(signal.SIGINT)
    for job in both:
        answer = job.result()
        # The simulated job ends by itself.
        assert answer.code == 0, answer
        assert "OUT_OF_MEMORY" not in "".join(job.said) + answer.out + answer.err
    assert reservations(World(A30).host) == []


@pytest.mark.parametrize("named", [(), ("--for", "llm")], ids=["", "for another production job"])
def test_production_takes_the_memory_of_an_opportunistic_job(cli: Cli, real: Real, named: Words) -> None:
    world = World(A30)
    if named:
        # It has run here before, and is not the one that needs room now.
        cli("run", "--production", "llm", "--", "true", host=world.spec).ok()
    words = ("run", "--opportunistic", "--yield", "swap", *named, "--memory", "16G", "--", *JOB, "--footprint", "16G")
    other = real(*words, "--seconds", "30", host=world.spec)
    world.wait_for_a_job()
    words = ("run", "--production", "web", "--wait", "--memory", "12G", "--", *JOB, "--footprint", "12G")
    web = real(*words, "--seconds", "1", host=world.spec)
    _, err = web.process.communicate(timeout=60)
    assert web.process.returncode == 0, err
    other.process.send_signal(signal.SIGINT)
    _, err = other.process.communicate(timeout=60)
    assert "out of the GPU" in err
    assert reservations(world.host) == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--wait", "--timeout", "5m", "--memory", "10G"), "room for 10.0 GiB, first come first served, for 5 min"),
        (("--wait",), "wait until GPU 0 has no other jobs, first come first served"),
        (("--memory", "10G"), "reserve 10.0 GiB on GPU 0"),
        (("--memory", "10G", "--over", "pause"), "stop it (SIGSTOP) if its processes together hold more"),
        (("--wait", "--requeue", "--memory", "10G"), "if it runs out of memory, wait again for 12.0 GiB"),
        (("--swap", "idle=10m"), "swap it out after 10 min without work"),
        (("--swap", "turns", "--memory", "10G"), "nine times the measured switch"),
        (("--opportunistic", "--yield", "swap", "--memory", "10G"), "swap it out when a production job needs room"),
    ],
)
def test_a_dry_run_shows_what_will_happen(cli: Cli, world: World, words: Words, shown: str) -> None:
    text = cli("run", "-n", *words, "--", "true").ok().out
    assert shown in text
    assert "run true" in text
    assert reservations(world.host) == []


def test_an_opportunistic_job_leaves_for_each_production_job(cli: Cli, refused: Refused, world: World) -> None:
    words = ("run", "-n", "--opportunistic", "--yield", "swap", "--memory", "10G")
    for host in (H200, "sim:2xh200"):
        refused(*words, "--for", "web", "--", "true", code="no_production", exit_code=6, host=host)
    refused(*words, "--for", "999999", "--", "true", code="no_process", exit_code=6)
    pid = admin.add_process(H200, name="serve")
    world.record("web", pid, PRODUCTION)
    step = "swap it out when a production job needs room"
    for target in ("web", str(pid)):
        assert step in cli(*words, "--for", target, "--", "true").ok().out
    # One that does not run now may run later.
    admin.end_process(H200, pid)
    assert step in cli(*words, "--for", "web", "--", "true").ok().out


def test_the_gpu_of_the_production_job_that_was_named(cli: Cli, refused: Refused) -> None:
    world = World("sim:2xh200")
    world.record("web", admin.add_process(world.spec, "1", name="serve"), PRODUCTION, gpu=1)
    words = ("run", "-n", "--opportunistic", "--yield", "swap", "--memory", "10G", "--for", "web")
    assert "run true on GPU 1" in cli(*words, "--", "true", host=world.spec).ok().out
    refused(*words, "-g", "0", "--", "true", code="other_device", exit_code=2, host=world.spec)
    cli(*words, "-g", "any", "--", "true", host=world.spec).ok()
    # A job that leaves may get one where that does not run.
    world = World("sim:3xh200")
    world.record("web", admin.add_process(world.spec, "2", name="serve"), PRODUCTION, gpu=2)
    words = ("run", "-n", "--opportunistic", "--yield", "swap", "--memory", "10G", "--for", "web")
    assert "run true on GPU 0" in cli(*words, "-g", "0,1", "--", "true", host=world.spec).ok().out


def test_a_process_to_yield_to_is_looked_for_on_the_gpus(cli: Cli, refused: Refused) -> None:
    world = World("sim:2xh200")
    with subprocess.Popen(["sleep", "600"]) as process:
        words = ("run", "-n", "--opportunistic", "--for", str(process.pid))
        for more in (("-g", "0"), ("-g", "0", "--yield", "swap", "--memory", "10G")):
            cli(*words, *more, "--", "true", host=world.spec).ok()
        process.kill()
    pid = admin.add_process(world.spec, "1", name="serve")
    words = ("run", "-n", "--opportunistic", "--for", str(pid))
    text = refused(*words, "-g", "0", "--", "true", code="other_device", exit_code=2, host=world.spec)
    assert missing(text, f"process {pid} runs on a different device from GPU 0", "run this job there: -g 1") == []
    # Of several GPUs it is the one on which the process works that tells.
    both = cli(*words, "-g", "0,1", "--gpus", "2", "--", "true", host=world.spec).ok()
    assert f"next to process {pid}: paused" in both.err


def test_a_job_that_needs_whole_gpus_says_which_small_program_is_in_the_way(cli: Cli) -> None:
    pid = admin.add_process("sim:2xa30", "1", memory_bytes=GIB // 2)
    planned = cli("run", "-n", "--wait", "--gpus", "2", "--", "true", host="sim:2xa30").ok()
    assert f"; GPU 1 has 23.0 GiB free to reserve; the rest is held by process {pid} (512 MiB)\n" in planned.err
    assert planned.err.count("held by") == 1


def test_a_dry_run_names_the_room_of_each_gpu_and_where_a_job_would_start(cli: Cli) -> None:
    words = ("run", "-n", "--wait", "--gpus", "2", "--memory", "10G", "--", "true")
    (room,) = (line for line in cli(*words, host="sim:2xa30").ok().lines("note") if "start at once" in line)
    assert re.search(r"on GPU 0 \(no production .*\) and GPU 1 \(no production .*\)$", room)
    world = World("sim:2xa30")
    place = world.hold(20 * GIB)
    words = ("run", "-n", "--wait", "-g", "any", "--memory", "10G", "--", "true")
    room = cli("-o", "json", *words, host=world.spec).ok().data["room"]
    assert (room["starts_now"], room["gpus"], room["behind"]) == (True, [1], [])
    answer = cli(*words, host=world.spec).ok()
    assert any("would start at once, on GPU 1: no production job" in line for line in answer.lines("note"))
    # The steps are those of the GPU that it would take.
    assert "run true as a client of the MPS daemon of GPU 1" in answer.out
    place.leave()


def test_a_dry_run_says_behind_whom_a_job_would_wait(cli: Cli) -> None:
    world = World()
    key = world.uuid(0)
    holder = world.hold(120 * GIB, name="train")
    first = Place(world.host, Request(memory_bytes=100 * GIB, keys=(key,), client=False, name="large"))
    words = ("run", "-n", "--wait", "--memory", "60G", "--", "true")
    room = cli("-o", "json", *words).ok().data["room"]
    assert (room["starts_now"], room["gpus"]) == (False, [])
    (before,) = room["behind"]
    assert (before["pid"], before["user"], before["name"]) == (os.getpid(), user_name(os.geteuid()), "large")
    assert room["devices"][0]["held_by"][0]["name"] == "train"
    (note,) = [line for line in cli(*words).lines("note") if "would wait" in line]
    assert "60.0 GiB, 1 job before it: GPU 0 has" in note
    assert "held by 'train' (120.0 GiB)" in note
    # It fits next to the one that runs, and delays nobody.
    assert cli("-o", "json", "run", "-n", "--wait", "--memory", "10G", "--", "true").ok().data["room"]["starts_now"]
    assert [reservation.name for reservation in reservations(world.host) or []] == ["train", "large"]
    for place in (holder, first):
        place.leave()


@pytest.mark.parametrize("words", [(), ("-n",), ("--wait",), ("-n", "--wait"), ("--over", "warn")])
@pytest.mark.parametrize("size", ["200G", "81400M"])
def test_what_fits_no_gpu_is_refused_of_one_and_of_several(refused: Refused, cli: Cli, words: Words, size: str) -> None:
    """81400M fits the GPU, but not without what the driver reserves."""
    messages = {
        refused(
            "run", "-g", gpu, *words, "--memory", size, "--", "true",
            host="sim:2xh100", code="limit_above_gpu", exit_code=2,
        )
        for gpu in ("0", "any")
    }  # fmt: skip
    (message,) = messages
    assert "note:" not in message
    # `status` shows 79.6 GiB.
    assert "is too large: GPU 0 has 79.1 GiB even when it is empty" in message
    cli("run", "-g", "any", *words, "--memory", "81047M", "--", "true", host="sim:2xh100").ok()


def test_a_gpu_that_is_too_small_is_not_taken_in_place_of_a_full_one(cli: Cli) -> None:
    host = "sim:t4,a100-80gb"
    cli("sim", "add", "-g", "1", "--memory", "60G", host=host).ok()
    assert "GPU 1 has " in cli("run", "-g", "any", "--memory", "40G", "--", "true", host=host).ok().lines("note")[0]


@pytest.mark.parametrize("given", ["1", "{uuid}", "1,1", "1,-1,0", "1,9"])
def test_any_keeps_to_the_gpus_that_a_batch_system_gave(cli: Cli, monkeypatch: Patch, given: str) -> None:
    world = World("sim:2xa30")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given.format(uuid=world.uuid(1)))
    answer = cli("run", "-n", "-g", "any", "--wait", "--memory", "4G", "--", "true", host=world.spec).ok()
    assert "wait until GPU 1 has room for 4.0 GiB" in answer.out
    assert "note: -g any: of the GPUs in CUDA_VISIBLE_DEVICES: GPU 1" in answer.lines("note")


def test_any_keeps_to_the_instances_that_a_batch_system_gave(cli: Cli, monkeypatch: Patch) -> None:
    world = World("sim:2xa30")
    uuid, _ = world.mig("2g.12gb", "2g.12gb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    words = ("-o", "json", "run", "-n", "-g", "any", "--wait", "--memory", "4G", "--", "true")
    (instance,) = cli(*words, host=world.spec).ok().data["room"]["devices"]
    assert instance["device_uuid"] == uuid


@pytest.mark.parametrize("given", ["", "7", "NoDevFiles"])
def test_any_without_a_gpu_that_was_given_is_refused(refused: Refused, monkeypatch: Patch, given: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    words = ("-g", "any", "--wait", "--memory", "4G", "--", "true")
    refused("run", *words, code="bad_gpu", exit_code=2, host="sim:2xa30")


def test_any_chooses_instances_where_mig_is_on_and_never_the_whole_gpu(cli: Cli, refused: Refused) -> None:
    world = World("sim:2xa30")
    world.mig("2g.12gb")
    words = ("run", "-g", "any", "--wait", "--timeout", "5s", "--memory", "4G", "--", "true")
    notes = cli(*words, host=world.spec).ok().err
    assert "note: GPU 1: no production job" in notes or "note: MIG 2g.12gb of GPU 0" in notes
    assert "MIG mode" not in notes
    # Swapping needs a GPU without MIG.
    text = cli("run", "-n", "-g", "any", "--swap", "turns", "--memory", "4G", "--", "true", host=world.spec).ok().out
    assert "until GPU 1 has room" in text
    for more in (("--wait",), ("--swap", "turns")):
        words = ("run", "-g", "0", *more, "--memory", "4G", "--", "true")
        refused(*words, code="mig_enabled", exit_code=3, host=world.spec)
    small = World("sim:a30")
    small.mig("2g.12gb")
    refused("run", "-g", "any", "--swap", "turns", "--", "true", code="mig_enabled", exit_code=3, host=small.spec)


def test_a_gpu_that_one_program_has_alone_is_waited_for(cli: Cli) -> None:
    world = World("sim:a30")
    pid = admin.add_process(world.spec, memory_bytes=GIB, name="alone")
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    planned = cli("run", "-n", "--swap", "turns", "--memory", "4G", "--", "true", host=world.spec).ok()
    waits = "now it would wait for 4.0 GiB: GPU 0 is in compute mode exclusive-process"
    assert any(waits in line for line in planned.lines("note"))
    words = ("run", "--swap", "turns", "--timeout", "1s", "--memory", "4G", "--", "true")
    answer = cli(*words, host=world.spec).ends(19)
    assert any(f"exclusive-process, and process {pid} has it" in line for line in answer.lines("note"))
    admin.end_process(world.spec, pid)
    cli(*words, host=world.spec).ok()


def test_a_job_inside_another_one_does_not_wait_for_that(real: Real, world: World) -> None:
    """A script or a notebook that runs with --wait starts a program with --wait: it would wait for itself."""
    inner = ("run", "--wait", "--timeout", "20s", "--memory", "100G", "--", "echo", "inner")
    outer = ("run", "--wait", "--memory", "120G", "--", sys.executable, "-m", "gpushare", "--host", world.spec)
    answer = real(*outer, *inner).result().ok()
    assert "inner" in answer.out
    assert "waiting" not in answer.err


def test_a_line_without_the_jobs_of_others_is_said(cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gpushare.run.queued.claims_are_shared", lambda _: False)
    answer = cli("run", "--wait", "--memory", "4G", "--", "true").ok()
    said = "other users' jobs are not visible in this line: neither /run/lock"
    assert any(said in line for line in answer.lines("note"))
    assert "not seen" not in cli("run", "--memory", "4G", "--", "true").err


def test_a_prohibited_gpu_is_not_waited_for(refused: Refused) -> None:
    world = World("sim:2xa30")
    world.host.nvml.set_compute_mode(1, ComputeMode.PROHIBITED)
    words = ("run", "--wait", "--memory", "4G")
    refused(*words, "-g", "1", "--", "true", code="compute_prohibited", exit_code=19, host=world.spec)
    world.host.nvml.set_compute_mode(0, ComputeMode.PROHIBITED)
    refused(*words, "-g", "any", "--", "true", code="compute_prohibited", exit_code=19, host=world.spec)


def test_a_lost_gpu_is_said_while_waiting() -> None:
    world = World("sim:2xa30")
    place = world.hold(20 * GIB)
    messages: list[str] = []
    first = select("0", world.host.nvml.sweep())
    world.fault("lost", gpu="0")
    waits = Place(world.host, Request(memory_bytes=GIB, keys=(first[0].uuid,), client=False))
    with pytest.raises(InUse):
        wait_for_room(world.host, waits, first, 0.2, UserLimits(), lambda text, *_: messages.append(text))
    assert messages == ["waiting for 1.0 GiB: GPU 0 does not answer"]
    place.leave()


@pytest.mark.parametrize("size", [1, 4, 5, 1024])
def test_what_runs_out_of_memory_asks_for_more_each_time(size: int) -> None:
    assert _size_with_more(size << 20) > size << 20


def test_the_end_of_stderr_is_kept_and_all_of_it_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    tail = ErrorTail()
    text = b"x" * 200_000 + b"\nCUDA out of memory\n"
    while text:
        text = text[os.write(tail.descriptor, text) :]
    assert tail.ran_out_of_memory()
    assert len(capfd.readouterr().err) == 200_020


def test_stderr_that_another_program_made_non_blocking_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    full = os.write(writer, b"x" * (1 << 20))
    ours = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        tail = ErrorTail()
        os.write(tail.descriptor, b"last words\n")
        until(lambda: tail._tail == b"last words\n", "the words are read")
        assert len(os.read(reader, full)) == full
        assert not tail.ran_out_of_memory()
    finally:
        os.dup2(ours, 2)
        os.close(ours)
    with open(reader, "rb") as stream:
        assert stream.read() == b"last words\n"


OOM = b"Traceback (most recent call last):\n  File 'a.py'\ntorch.OutOfMemoryError: CUDA out of memory.\n"
BROKEN = b"Traceback (most recent call last):\n  File 'a.py'\nValueError: bad shape\n"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        (b"CUDA_ERROR_OUT_OF_MEMORY", True),
        (b"RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        (b"std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp", True),
        (b"ResourceExhaustedError: OOM when allocating tensor with shape[8] on device:GPU:0", True),
        (b"RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.", True),
        (b"FATAL ERROR: Reached heap limit - JavaScript heap out of memory", False),
        (b"java.lang.OutOfMemoryError: Java heap space", False),
        (b"DefaultCPUAllocator: can't allocate memory: Cannot allocate memory", False),
        # A later failure of its own is no want of memory.
        (OOM, True),
        (b"warning: CUDA out of memory, trying a smaller batch\nepoch 2\n" + BROKEN, False),
        (BROKEN + OOM, True),
        (OOM + b"\nDuring handling of the above exception, another exception occurred:\n\n" + BROKEN, True),
        (OOM + b"Exception ignored in: <function f>\n" + BROKEN, True),
        (
            OOM + BROKEN.replace(b"ValueError", b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError"),
            True,
        ),
        (OOM + b"======\ntrain.py FAILED\n", True),
        (BROKEN, False),
        # Its wrapper, or gpushare in a log, has the last word.
        (b"CUDA out of memory. retrying\n" + BROKEN + b"train.py has ended with 1\n", False),
    ],
)
def test_what_tells_that_there_was_no_gpu_memory(text: bytes, short: bool) -> None:
    assert lacked_memory(text) == short


def test_a_job_without_room_is_told_so_also_in_its_plan(cli: Cli, world: World) -> None:
    admin.add_process(world.spec, memory_bytes=120 * GIB)
    for option in ((), ("--slice", "2ms"), ("--slice", "2ms", "-n")):
        answer = cli("run", *option, "--memory", "60G", "--", "true").ok()
        (note,) = (line for line in answer.lines("note") if "may run out of memory" in line)
        assert "GiB free to reserve, and this job reserves 60.0 GiB" in note
        assert "--wait" in note
        small = cli("run", *option, "--memory", "4G", "--", "true").ok()
        assert not any("may run out of memory" in line for line in small.lines("note"))


@pytest.mark.parametrize(("size", "more"), [("10G", "12.0 GiB"), ("130G", "139.8 GiB"), ("143155M", None)])
def test_a_plan_asks_for_no_more_than_there_is(cli: Cli, size: str, more: str | None) -> None:
    out = cli("run", "-n", "--wait", "--requeue", "--memory", size, "--", "true").ok().out
    assert ("wait again" in out) == (more is not None)
    assert more is None or f"wait again for {more}" in out


def test_production_with_a_metric_has_its_output_kept_and_waits_again(real: Real, world: World, tmp_path: Path) -> None:
    words = ("--production", "web", "--slice", "2ms", "--metric", "rate=([0-9.]+)")
    program = ("sh", "-c", "echo rate=1; echo broken >&2")
    for _ in range(2):
        answer = real("run", "--wait", "--requeue", "--memory", "4G", *words, "--", *program).result()
        assert answer.out.splitlines() == ["rate=1", "broken"]
        # That of the job before is not kept.
        assert output_path(world.host, "web").read_text().splitlines() == ["rate=1", "broken"]
    # It runs out of memory, and waits again.
    script = f"[ -e {tmp_path}/again ] && exit 3; touch {tmp_path}/again; echo CUDA out of memory >&2; exit 1"
    words = ("--production", "web", "--slice", "2ms", "--metric", "rate=([0-9.]+)")
    answer = real("run", "--wait", "--requeue", "--memory", "10G", *words, "--", "sh", "-c", script).result()
    # What the first try has printed says nothing of the second one.
    assert (answer.code, answer.err.count("it ran out of memory, and waits again for 12.0 GiB")) == (3, 1)
