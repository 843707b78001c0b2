"""The table of changing commands that are hit: what is there before, the command, and what a user would do next.

A new verb is one more row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.crashes.inject import PROGRAM as PROGRAM_STARTS
from benchmarks.crashes.world import World
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.host.identity import Identity
from gpushare.run.jobs import JobRecord, write_record
from gpushare.sim import admin

Words = Sequence[str]
# It ends by itself only while its gpushare lives; one that was left alone goes on until somebody ends it.
ENDS_WITH_ITS_GPUSHARE: Final = 'kill -0 "$PPID" 2>/dev/null || exec sleep 300'
PROGRAM: Final = ("sh", "-c", f"sleep 0.2; {ENDS_WITH_ITS_GPUSHARE}")
# Long enough for one turn, and the way out and back.
LONG_PROGRAM: Final = ("sh", "-c", f"sleep 1.4; {ENDS_WITH_ITS_GPUSHARE}")
IS_ROOT: Final = os.geteuid() == 0
MPS_HOST: Final = "sim:2xh200"
MIG_HOST: Final = "sim:2xa100-80gb"
ALL_HOST: Final = "sim:4xa100-80gb"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One command on one prepared host."""

    name: str
    host: str
    prepare: Callable[[World], None]
    # Words may hold {facts} of the world.
    command: Words
    # What a user would do after it was hit; each of them alone must bring back the old or the new state.
    then: Sequence[Words]
    # Real processes take part: guards and programs are waited for, and may not stay.
    runs: bool = False
    # The guard is hit too, or instead, after gpushare was killed so many effects after it had started its program.
    guard_after: int | None = None
    # Its program, as the effect that starts it begins.
    program: str = PROGRAM_STARTS
    # It can run with the real control daemon.
    real: bool = False


def words_of(world: World, words: Words) -> list[str]:
    """Return words with the facts of a world in place."""
    return [word.format(**world.facts) if "{" in word and "}" in word else word for word in words]


def _do(world: World, *words: str) -> dict[str, Any]:
    """Run a command that must succeed, and return its data."""
    done = world.run(words_of(world, [*words, "-o", "json"]))
    if done.code != 0:
        message = f"gpushare {' '.join(words)}: exit code {done.code}\n{done.out}{done.err}"
        raise RuntimeError(message)
    return dict(json.loads(done.out)["data"] or {})


def _program(world: World, *argv: str, **environment: str) -> None:
    world.call(lambda: connect(world.spec).programs.run(argv, env=environment).text)


def _foreign_mps(world: World) -> None:
    """Give the last GPU a daemon that somebody else started, with a client, and a second process outside it."""
    world.call(lambda: connect(world.spec))
    gpu = len(world.state.gpus) - 1
    where = world.scratch / "f"
    if world.real_program is None:
        # Beside the host, where gpushare's own files are not; the same in each look.
        where.mkdir(exist_ok=True)
        _program(
            world, "nvidia-cuda-mps-control", "-d", CUDA_VISIBLE_DEVICES=world.state.gpus[gpu].uuid,
            CUDA_MPS_PIPE_DIRECTORY=str(where / "p"), CUDA_MPS_LOG_DIRECTORY=str(where / "l"),
        )  # fmt: skip
        pipe = {"CUDA_MPS_PIPE_DIRECTORY": str(where / "p")}
        world.call(lambda: admin.add_process(world.spec, str(gpu), mps=True, environment=pipe))
    world.call(lambda: admin.add_process(world.spec, str(gpu)))


def _foreign_mig(world: World) -> None:
    """Give the last GPU instances of somebody else, one of them busy."""
    world.call(lambda: connect(world.spec))
    gpu = len(world.state.gpus) - 1
    world.call(lambda: admin.set_mig(world.spec, str(gpu), ["3g.40gb", "1g.10gb"]))
    busy = world.state.gpus[gpu].mig[0].uuid
    world.call(lambda: admin.add_process(world.spec, str(gpu), mig=busy))


def _mig(world: World) -> None:
    """Give GPU 0 a busy instance with a name and an idle one with another."""
    _foreign_mig(world)
    _do(world, "mig", "enable", "-g", "0", "-y")
    _do(world, "mig", "create", "-g", "0", "1g.10gb:6", "--name", "keep", "-y")
    _do(world, "mig", "create", "-g", "0", "2g.20gb:4", "--name", "idle", "-y")
    found = {one.profile: one.uuid for one in world.state.gpus[0].mig}
    world.facts |= {"busy": found["1g.10gb"], "idle": found["2g.20gb"]}
    world.call(lambda: admin.add_process(world.spec, "0", mig=world.facts["busy"]))


def _after(*commands: Words, first: Callable[[World], None]) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        first(world)
        for words in commands:
            _do(world, *words)

    return prepare


def _interrupted(world: World) -> None:
    """Leave a MIG change that died in its middle."""
    _mig(world)
    world.call(lambda: admin.set_fault(world.spec, "crash-step", None, "3"))
    world.run(["mig", "apply", "-g", "0", "1g.10gb:6", "3g.40gb:0", "-y"])
    world.call(lambda: admin.clear_faults(world.spec))


def _mig_on_one(world: World) -> None:
    _foreign_mig(world)
    _do(world, "mig", "enable", "-g", "0", "-y")
    _do(world, "mig", "create", "-g", "0", "1g.10gb:6", "-y")
    _do(world, "mig", "create", "-g", "0", "2g.20gb:4", "-y")


def _clients(world: World) -> None:
    """Start a daemon of ours with two clients."""
    _foreign_mps(world)
    _do(world, "mps", "start", "-g", "0")
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": world.state.daemons[-1].pipe_directory}
    for number in range(2):
        pid = world.call(lambda: admin.add_process(world.spec, "0", mps=True, environment=pipe))
        world.facts[f"client{number}"] = pid


def _exclusive_by_hand(world: World) -> None:
    _foreign_mps(world)
    _program(world, "nvidia-smi", "-i", "0", "-c", "EXCLUSIVE_PROCESS")


_HOST_FILES: Final = {
    "one.yaml": """version: 1
gpus:
- match: {index: 0}
  mig:
  - {wish: 3g.40gb, name: train}
  - 1g.10gb*2
- match: {index: 1}
  timeslice: long
- match: {index: 2}
  mps: {threads: 25, memory: 4G, exclusive: true}
""",
    "two.yaml": """version: 1
gpus:
- match: {index: 0}
  mig:
  - {wish: 2g.20gb, name: infer, mps: {threads: 50}}
- match: {index: 1}
  mps: {threads: 60}
- match: {index: 2}
  timeslice: short
""",
}


def _files(world: World) -> None:
    _foreign_mig(world)
    for name, text in _HOST_FILES.items():
        (world.scratch / name).write_text(text, encoding="utf-8")
        world.facts[name.partition(".")[0]] = str(world.scratch / name)


def _run(*options: str, program: Words = PROGRAM) -> Words:
    return ("run", *options, "--", *program)


def _mps_rows() -> list[Row]:
    start = partial(Row, host=MPS_HOST, prepare=_foreign_mps, real=True)
    running = _after(("mps", "start", "-g", "0", "--threads", "80", "--memory", "20G"), first=_foreign_mps)
    exclusive = ("mps", "start", "-g", "0", "--exclusive", "--threads", "50", "--memory", "8G")
    users = ("mps", "start", "-g", "0", "--users", "daemon", "--threads", "50")
    stop = ("mps", "stop", "-g", "0")
    return [
        # Only root starts it, in the simulation too.
        *(
            [Row(name="mps start --users", host=MPS_HOST, prepare=_foreign_mps, command=users, then=[users])]
            if IS_ROOT
            else []
        ),
        start(name="mps start", command=("mps", "start", "-g", "0"), then=[("mps", "start", "-g", "0"), stop]),
        start(name="mps start --exclusive", command=exclusive[:5], then=[exclusive[:5], stop]),
        start(
            name="mps start with limits",
            command=(*exclusive, "--priority", "low"),
            then=[(*exclusive, "--priority", "low"), stop],
        ),
        start(name="mps stop", prepare=_after(exclusive, first=_foreign_mps), command=stop, then=[stop]),
        start(name="mps stop, a dead daemon", prepare=_dead_daemon, command=stop, then=[stop, exclusive[:5]]),
        start(
            name="mps set",
            prepare=running,
            command=("mps", "set", "-g", "0", "--threads", "40", "--memory", "8G", "--priority", "low"),
            then=[("mps", "set", "-g", "0", "--threads", "40", "--memory", "8G", "--priority", "low"), stop],
        ),
    ]


def _dead_daemon(world: World) -> None:
    """Leave the record of a daemon that somebody killed, with a compute mode to restore."""
    _foreign_mps(world)
    _do(world, "mps", "start", "-g", "0", "--exclusive")
    pid = int(json.loads(next(world.directory.glob("run/mps/*/daemon.json")).read_text(encoding="utf-8"))["pid"])
    world.call(lambda: connect(world.spec).processes.send(pid, 9))


def _timeslice_rows() -> list[Row]:
    level, reset = ("timeslice", "set", "long", "-g", "0"), ("timeslice", "reset", "-g", "0")
    short, restore = ("timeslice", "set", "500us", "{job}"), ("timeslice", "reset", "{job}")
    return [
        Row(name="timeslice set", host=MPS_HOST, prepare=_exclusive_by_hand, command=level, then=[level, reset]),
        Row(
            name="timeslice reset",
            host=MPS_HOST,
            prepare=_after(level, first=_exclusive_by_hand),
            command=reset,
            then=[reset, level],
        ),
        Row(name="timeslice set JOB", host=MPS_HOST, prepare=_job, command=short, then=[short, restore]),
        Row(
            name="timeslice set JOB, again",
            host=MPS_HOST,
            prepare=_after(("timeslice", "set", "1ms", "{job}"), first=_job),
            command=short,
            then=[short, restore],
        ),
        Row(
            name="timeslice reset JOB",
            host=MPS_HOST,
            prepare=_after(short, first=_job),
            command=restore,
            then=[restore, short],
        ),
    ]


def _mig_rows() -> list[Row]:
    recover = ("mig", "recover", "-y")
    row = partial(Row, host=MIG_HOST, prepare=_mig)
    create = ("mig", "create", "-g", "0", "3g.40gb", "--name", "new", "-y")
    several = ("mig", "create", "-g", "0", "1g.10gb*3", "--name", "many", "-y")
    destroy = ("mig", "destroy", "idle", "-y")
    apply = ("mig", "apply", "-g", "0", "1g.10gb:6", "1g.10gb*2", "1c.2g.20gb*2", "-y")
    named = (
        "mig",
        "apply",
        "-g",
        "0",
        "1g.10gb:6",
        "2g.20gb*2",
        "--name",
        "keep,two,idle",
        "--grant",
        "two=daemon",
        "-y",
    )
    on = ("mig", "enable", "-g", "0", "-y")
    off = ("mig", "disable", "-g", "0", "--destroy", "-y")
    grant, revoke = ("mig", "grant", "idle", "daemon", "-y"), ("mig", "revoke", "idle", "-y")
    forget, name = ("mig", "name", "--forget", "idle", "-y"), ("mig", "name", "other", "{idle}", "-y")
    mps = _after(("mps", "start", "-g", "{idle}", "--threads", "40"), first=_mig)
    return [
        row(name="mig create", command=create, then=[create, recover]),
        row(name="mig create, several", command=several, then=[several, recover]),
        row(name="mig destroy", command=destroy, then=[destroy, recover]),
        row(name="mig destroy, with a grant", prepare=_after(grant, first=_mig), command=destroy, then=[destroy, recover]),
        row(name="mig destroy, with a daemon", prepare=mps, command=destroy, then=[destroy, recover]),
        row(name="mig apply", command=apply, then=[apply, recover]),
        row(name="mig apply, with names and users", command=named, then=[named]),
        row(name="mig enable", prepare=_foreign_mig, command=on, then=[on, recover]),
        row(name="mig disable", prepare=_mig_on_one, command=off, then=[off, recover]),
        row(name="mig name", prepare=_after(forget, first=_mig), command=name, then=[name]),
        row(name="mig name --forget", command=forget, then=[forget]),
        row(name="mig grant", command=grant, then=[grant, revoke]),
        row(name="mig revoke", prepare=_after(grant, first=_mig), command=revoke, then=[revoke, grant]),
        row(name="mig recover", prepare=_interrupted, command=recover, then=[recover, apply]),
    ]  # fmt: skip


def _reserve_rows() -> list[Row]:
    take, end = ("reserve", "-g", "0", "--for", "4h", "-y"), ("reserve", "-g", "0", "--end", "-y")
    row = partial(Row, host=MPS_HOST)
    return [
        row(name="reserve", prepare=_foreign_mps, command=take, then=[take]),
        row(name="reserve --end", prepare=_after(take, first=_foreign_mps), command=end, then=[take]),
    ]


def _apply_rows() -> list[Row]:
    one, two = ("apply", "-f", "{one}", "-y"), ("apply", "-f", "{two}", "-y")
    return [
        Row(name="apply", host=ALL_HOST, prepare=_files, command=one, then=[one]),
        Row(name="apply, another file", host=ALL_HOST, prepare=_after(one, first=_files), command=two, then=[two]),
    ]


def _advise_rows() -> list[Row]:
    words = ("-g", "0", "--processes", "4", "--memory", "2G", "--users", "same", "--no-saturating", "--apply", "-y")
    return [Row(name="advise --apply", host=MIG_HOST, prepare=_mig_on_one, command=("advise", *words), then=[("advise", *words)])]  # fmt: skip


def _run_rows() -> list[Row]:
    row = partial(Row, host=MPS_HOST, prepare=_foreign_mps, runs=True, real=True)
    plain, limits = _run("-g", "0"), _run("-g", "0", "--threads", "30", "--memory", "4G")
    detached = ("run", "-d", "--name", "train", "-g", "0", "--", *PROGRAM)
    stop = ("mps", "stop", "-g", "0")
    running = _after(("mps", "start", "-g", "0", "--threads", "80"), first=_foreign_mps)
    copies = ("farm", "-g", "0", "--copies", "2", "--", *PROGRAM)
    limited = ("farm", "-g", "0", "--copies", "2", "--memory", "4G", "--", *PROGRAM)
    several = ("farm", "-g", "any", "--copies", "2", "--memory", "4G", "--", *PROGRAM)
    pairs = ("farm", "-g", "any", "--gpus", "2", "--copies", "2", "--memory", "4G", "--", *PROGRAM)
    # Whatever happened to it, the same words complete what is missing, and nothing twice.
    logged = ("farm", "-g", "0", "--copies", "3", "--memory", "4G", "--logs", "{logs}", "--resume", "--", *PROGRAM)
    mig = _run("--mig", "2g.20gb")
    waits = _run("--wait", "--mig", "2g.20gb", "--memory", "4G")
    named = _run("--mig", "idle", "--threads", "50")
    pair = _run("--gpus", "2", "--memory", "4G")
    waiting_pair = _run("--gpus", "2", "--wait", "--memory", "4G", "--time", "1h", "--name", "pair")
    again = _run("-g", "0", "--threads", "30", "--restart-on", "mps-fault")
    made = _run("--mig", "3g.40gb", "--create", "-g", "0")
    production = _run("-g", "0", "--production", "web")
    opportunistic = _run("-g", "0", "--opportunistic")
    inside = partial(Row, host=MIG_HOST, prepare=_mig, runs=True)
    return [
        row(name="run", command=plain, then=[plain, stop]),
        inside(name="run --mig --create", command=made, then=[made]),
        inside(name="run --mig --create, its guard too", command=made, then=[made], guard_after=3),
        row(name="run -d", command=detached, then=[detached, stop]),
        row(name="run, its guard too", command=plain, then=[plain, stop], guard_after=3),
        row(name="run with limits", command=limits, then=[limits]),
        row(name="run under MPS", prepare=running, command=limits, then=[limits, stop]),
        row(name="run under MPS, its guard too", prepare=running, command=limits, then=[limits], guard_after=3),
        row(name="run --gpus", command=pair, then=[pair]),
        row(name="run --gpus --wait --time", command=waiting_pair, then=[waiting_pair]),
        row(name="run --gpus, its guard too", command=pair, then=[pair], guard_after=3),
        row(name="run --restart-on", command=again, then=[again, stop]),
        row(name="farm --copies", command=copies, then=[copies, stop]),
        row(name="farm --copies --memory", command=limited, then=[limited, stop]),
        row(name="farm on several GPUs", command=several, then=[several]),
        row(name="farm --gpus", command=pairs, then=[pairs]),
        row(name="farm --logs --resume", prepare=_logs_of_a_farm, command=logged, then=[logged]),
        row(name="run --production", command=production, then=[production]),
        row(name="run --opportunistic", command=opportunistic, then=[opportunistic]),
        inside(name="run --mig", prepare=_after(("mig", "name", "--forget", "idle", "-y"), first=_mig), command=mig, then=[mig]),
        inside(name="run --mig, its guard too", prepare=_after(("mig", "name", "--forget", "idle", "-y"), first=_mig), command=mig, then=[mig], guard_after=3),
        inside(name="run --wait --mig", prepare=_after(("mig", "name", "--forget", "idle", "-y"), first=_mig), command=waits, then=[waits]),
        inside(name="run --mig NAME with limits", command=named, then=[named]),
    ]  # fmt: skip


def _logs_of_a_farm(world: World) -> None:
    """Name the directory of logs of a farm, where its effects are counted and its results are looked at."""
    _foreign_mps(world)
    world.facts["logs"] = str(world.directory / "var" / "farm")


def _job(world: World) -> None:
    """Give GPU 0 a job outside MPS."""
    _foreign_mps(world)
    world.facts["job"] = world.call(lambda: admin.add_process(world.spec, "0"))


def _resting_job(world: World) -> None:
    """Give GPU 0 a job outside MPS that computes nothing: nobody is paused for it."""
    _foreign_mps(world)
    world.facts["job"] = world.call(lambda: admin.add_process(world.spec, "0", sm_percent=0))


def _pause_rows() -> list[Row]:
    pause, resume = ("pause", "{job}"), ("resume", "{job}")
    row = partial(Row, host=MPS_HOST, prepare=_job, runs=True)
    paused = _after(pause, first=_job)
    return [
        row(name="pause", command=pause, then=[resume, pause]),
        row(name="pause, its guard too", command=pause, then=[resume, pause], guard_after=20, program="start guard.py"),
        row(name="resume", prepare=paused, command=resume, then=[resume, pause]),
    ]


def _job_of_a_user(world: World) -> None:
    """Give GPU 0 a job of a user who has a run directory of its own."""
    _foreign_mps(world)
    (world.directory / "users" / "65534").mkdir(parents=True, mode=0o755)
    world.facts["job"] = world.call(lambda: admin.add_process(world.spec, "0", user="65534"))


def _user_has_swapped_it_out(world: World) -> None:
    _job_of_a_user(world)
    world.call(lambda: admin.set_fault(world.spec, "user", None, "65534"))
    _do(world, "swap", "out", "{job}")
    world.call(lambda: admin.set_fault(world.spec, "user", None, "0"))


def _job_of_a_gpushare(world: World) -> None:
    """Give GPU 0 a job whose gpushare is a simulated process, as the copies of a farm have one."""
    _job(world)
    pid = int(world.facts["job"])

    def note() -> None:
        host = connect(world.spec)
        device = select_one("0", host.nvml.sweep())
        identity = host.processes.identity(pid) or Identity(pid, 0)
        record = JobRecord(
            name="train", **identity._asdict(), devices=(device.uuid,), role="plain", supervisor=identity
        )
        write_record(host, record)

    world.call(note)


def _stop_rows() -> list[Row]:
    stop, client, train = ("stop", "{job}", "-y"), ("stop", "{client0}", "-y"), ("stop", "train", "-y")
    row = partial(Row, host=MPS_HOST, prepare=_job, command=stop, then=[stop])
    return [
        row(name="stop"),
        row(name="stop, a client of MPS", prepare=_clients, command=client, then=[client]),
        row(name="stop, by its gpushare", prepare=_job_of_a_gpushare, command=train, then=[train]),
        row(name="stop, a paused job", prepare=_after(("pause", "{job}"), first=_job), runs=True),
        row(name="stop, a job that is out", prepare=_after(("swap", "out", "{job}"), first=_job), runs=True),
    ]


def _swap_rows() -> list[Row]:
    out, back = ("swap", "out", "{job}"), ("swap", "in", "{job}")
    there = ("move", "{job}", "-g", "1")
    row = partial(Row, host=MPS_HOST, prepare=_job, runs=True)
    gone = _after(out, first=_job)
    guard = partial(row, program="start guard.py")
    return [
        row(name="swap out", command=out, then=[back, out]),
        guard(name="swap out, its guard too", command=out, then=[back, out], guard_after=18),
        row(name="swap in", prepare=gone, command=back, then=[back, out]),
        guard(name="swap in, its guard too", prepare=gone, command=back, then=[back, out], guard_after=15),
        row(name="swap out, by root", prepare=_job_of_a_user, command=(*out, "-y"), then=[(*back, "-y"), (*out, "-y")]),
        row(
            name="swap in, by root",
            prepare=_user_has_swapped_it_out,
            command=(*back, "-y"),
            then=[(*back, "-y"), (*out, "-y")],
        ),
        row(name="move", command=there, then=[there, ("move", "{job}", "-g", "0")]),
        guard(name="move, its guard too", command=there, then=[there], guard_after=20),
    ]


def _production_grows(world: World) -> None:
    """Let a process that may be production have nearly all of GPU 0: less than 1 GiB is left next to another program."""
    _foreign_mps(world)

    def fill() -> None:
        gpu = connect(world.spec).nvml.gpu(0)
        room = (gpu.memory_total_bytes or 0) - (gpu.memory_reserved_bytes or 0)
        admin.add_process(world.spec, "0", memory_bytes=room - (1300 << 20), name="web")

    world.call(fill)


def _somebody_waits(world: World) -> None:
    """Let this process, which lives as long as the tries do, wait for memory on GPU 0; it never takes a place.

    It wants more than is free next to a job, which leaves for no less.
    """
    _foreign_mps(world)
    pid, directory = os.getpid(), world.directory / "run" / "claims"
    directory.mkdir(parents=True, mode=0o700)
    directory.parent.chmod(0o700)
    started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    (directory / f"gpushare-memory-{0:016x}").write_text(
        f"gpushare claim 1\nboot {boot}\nspace {os.stat('/proc/self/ns/pid').st_ino}\nkey memory\n"
        f"process {pid} {started}\nfact want {138 << 30} 0 {world.state.gpus[0].uuid}\nticket 1\n",
        encoding="ascii",
    )


def _ledger_rows() -> list[Row]:
    row = partial(Row, host=MPS_HOST, prepare=_foreign_mps, runs=True)
    wait = _run("--wait", "--memory", "4G", "-g", "0")
    held = _run("--memory", "4G", "-g", "0")
    turns = _run("--swap", "turns=0.1s", "--memory", "4G", "-g", "0", program=LONG_PROGRAM)
    moves = _run("--movable", "--memory", "4G", "-g", "0", program=LONG_PROGRAM)
    idle = _run("--swap", "idle=0.1s", "-g", "0", program=LONG_PROGRAM)
    yields = _run("--opportunistic", "--yield", "swap", "--memory", "1G", "-g", "0", program=LONG_PROGRAM)
    stop = ("mps", "stop", "-g", "0")
    return [
        row(name="run --wait", command=wait, then=[wait, stop]),
        row(name="run --wait, its guard too", command=wait, then=[wait, stop], guard_after=3),
        row(name="run --memory", command=held, then=[held, stop]),
        row(name="run --swap turns", prepare=_somebody_waits, command=turns, then=[turns]),
        row(
            name="run --swap turns, its guard too", prepare=_somebody_waits, command=turns, then=[turns], guard_after=40
        ),
        row(name="run --movable", prepare=_somebody_waits, command=moves, then=[moves]),
        row(name="run --swap idle", command=idle, then=[idle]),
        row(name="run --opportunistic --yield swap", prepare=_production_grows, command=yields, then=[yields]),
    ]


def _slice_rows() -> list[Row]:
    row = partial(Row, host=MPS_HOST, prepare=_job, runs=True)
    production = _run("--production", "web", "--slice", "16ms", "-g", "0", program=_FOR_A_WHILE)
    group = _run("--opportunistic", "--for", "{job}", "--yield", "slices", "-g", "0", program=_FOR_A_WHILE)
    named = _run("-g", "0", "--name", "train")
    keep = ("timeslice", "keep", "-f", "{rules}")
    running = _after(("mps", "start", "-g", "0"), first=_resting_job)
    return [
        row(name="run --production --slice", command=production, then=[production]),
        row(name="run --opportunistic --yield slices", prepare=running, command=group, then=[group]),
        row(name="run --name", prepare=_foreign_mps, command=named, then=[named, ("mps", "stop", "-g", "0")]),
        row(name="timeslice keep", prepare=_rules, command=keep, then=[keep]),
    ]


# Until its slice is set.
_FOR_A_WHILE: Final = ("sh", "-c", f"sleep 0.5; {ENDS_WITH_ITS_GPUSHARE}")


def _rules(world: World) -> None:
    _job(world)
    path = world.scratch / "rules.yaml"
    path.write_text("version: 1\nslices:\n- {match: all, slice: 500us}\n", encoding="utf-8")
    world.facts["rules"] = str(path)


def rows() -> list[Row]:
    """Return all rows."""
    return [
        *_mps_rows(),
        *_timeslice_rows(),
        *_pause_rows(),
        *_swap_rows(),
        *_stop_rows(),
        *_mig_rows(),
        *_reserve_rows(),
        *_apply_rows(),
        *_advise_rows(),
        *_run_rows(),
        *_ledger_rows(),
        *_slice_rows(),
    ]
