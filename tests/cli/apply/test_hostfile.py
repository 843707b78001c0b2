"""``gpushare capture``, ``diff`` and ``apply`` on simulated hosts."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare.base.errors import OperationFailed
from gpushare.base.model import ComputeMode, Priority
from gpushare.base.units import GIB
from gpushare.host.capabilities import user_id, user_name
from gpushare.host.cdi import local_path
from gpushare.host.host import make_private_directory
from gpushare.hostfile import apply, steps
from gpushare.hostfile.kept import KEPT, kept_limits, user_limits_in
from gpushare.hostfile.parse import parse
from gpushare.mig.ledger import names_of
from gpushare.mps.control import MpsControl
from gpushare.mps.home import LIMIT_FILE, pipe_directory, pipe_users, set_pipe_users
from gpushare.sim import admin
from tests.cli.drive import Answer, Cli, Refused, World, Write, same

EIGHT = "sim:8xh100-80gb"
TWO = "sim:2xh100"
MIXED = """\
version: 1
gpus:
- match: {index: 0}
  exclusive: true
- match: {index: 1}
  timeslice: long
- match: {index: 2}
  mps: {threads: 25, memory: 4G, priority: low, users: [nobody]}
- match: {index: 3}
  mps: {exclusive: true}
- match: {index: [4, 5]}
  mig: [3g.40gb, 1g.10gb*2]
- match: {index: 6}
  mig:
  - {wish: "3g.40gb:4", name: train, users: [nobody, daemon], mps: {threads: 50, memory: 2G}}
  - 1c.2g.20gb*2
  - {wish: 1g.10gb, name: test}
- match: {model: h100}
  timeslice: default
"""


def one(way: str, index: int = 0) -> str:
    """Return a file with one entry."""
    return f"version: 1\ngpus:\n- match: {{index: {index}}}\n  {way}\n"


def captured(cli: Cli, host: str) -> str:
    done = cli("capture", host=host).ok()
    assert [line for line in done.err.splitlines() if "to restore it at every boot" not in line] == []
    return done.out


class Host:
    """A host to which files are applied; ``text`` is a file, or what is said of GPU 0."""

    def __init__(self, cli: Cli, refused: Refused, write: Write, spec: str = TWO) -> None:
        self.cli, self.is_refused, self.write, self.world = cli, refused, write, World(spec)

    def file(self, text: str) -> str:
        return self.write(text if text.startswith("version") else one(text))

    def __call__(self, verb: str, text: str, *more: str, output: str | None = None) -> Answer:
        return self.cli(verb, "-f", self.file(text), *more, host=self.world.spec, output=output)

    def apply(self, text: str, *more: str) -> Answer:
        return self("apply", text, *more).ok()

    def plan(self, text: str, *more: str) -> list[Any]:
        """Return the steps of a plan, or those that were taken."""
        return list(self("apply", text, *more, output="json").ok().data["steps"])

    def differs(self, text: str) -> str:
        """Return what differs from a file; nothing does: an empty text."""
        answer = self("diff", text)
        assert answer.code in {0, 7}
        return answer.out if answer.code else ""

    def refused(self, text: str, *more: str, code: str, exit_code: int) -> str:
        return self.is_refused(
            "apply", "-f", self.file(text), *more, code=code, exit_code=exit_code, host=self.world.spec
        )

    def capture(self) -> str:
        return self.cli("capture", host=self.world.spec).ok().out

    @property
    def kept(self) -> Path:
        return self.world.directory / "var" / "applied.yaml"

    def undo(self, answer: Answer) -> Answer:
        """Do what takes a change back."""
        words = answer.data["undo"].split()
        assert words[:3] == ["gpushare", "apply", "-f"]
        return self.cli(*words[1:], host=self.world.spec, output="json").ok()


@pytest.fixture
def two(cli: Cli, refused: Refused, write: Write) -> Host:
    return Host(cli, refused, write)


def states(answer: Any) -> dict[int, str]:
    return {row["gpu"]: row["state"] for row in answer.data["gpus"]}


# -- the round trip ----------------------------------------------------------------------------------


def test_capture_reset_apply_gives_the_same(cli: Cli, write: Write) -> None:
    cli("apply", "-f", write(MIXED), host=EIGHT).ok()
    before = captured(cli, EIGHT)
    assert [list(entry)[1] for entry in yaml.safe_load(before)["gpus"]] == [
        *("exclusive", "timeslice", "mps", "mps", "mig", "mig", "timeslice")
    ]
    cli("sim", "reset", host=EIGHT).ok()
    assert len(yaml.safe_load(captured(cli, EIGHT))["gpus"]) == 1
    answer = cli("apply", "-f", write(before), host=EIGHT, output="json").ok()
    assert states(answer) == {**dict.fromkeys(range(7), "done"), 7: "same"}
    assert captured(cli, EIGHT) == before
    assert cli("diff", "-f", write(before), host=EIGHT).ok().err == ""


def test_what_is_applied_is_there(cli: Cli, write: Write) -> None:
    cli("status", host=EIGHT).ok()
    # A dry run changes nothing.
    before = same(EIGHT)
    done = cli("apply", "-f", write(MIXED), "--dry-run", host=EIGHT).ok()
    assert "nothing is changed (dry run)" in done.out
    assert "nvidia-smi -i 4 -mig 1" in done.out
    assert same(EIGHT) == before
    assert not (World(EIGHT).directory / "var" / "applied.yaml").exists()
    answer = cli("apply", "-f", write(MIXED), host=EIGHT).ok()
    *lines, undo = answer.out.splitlines()
    assert undo.startswith("undo: gpushare apply -f ")
    assert lines == [
        "GPU 0: exclusive",
        "GPU 1: timeslice: level long",
        "GPU 2: mps: threads 25 %, memory 4.0 GiB, priority low, for nobody",
        "GPU 3: mps: no programs outside it",
        "GPU 4: mig: 3g.40gb 1g.10gb*2",
        "GPU 5: mig: 3g.40gb 1g.10gb*2",
        "GPU 6: mig: 3g.40gb:4 'train' 1c.2g.20gb*2 1g.10gb 'test'",
    ]
    # A second one does nothing.
    before = same(EIGHT)
    assert cli("apply", "-f", write(MIXED), "-q", host=EIGHT).ok().out == ""
    again = cli("apply", "-f", write(MIXED), host=EIGHT, output="json").ok()
    assert (again.data["steps"], set(states(again).values())) == ([], {"same"})
    assert same(EIGHT) == before
    world = World(EIGHT)
    gpus = world.state.gpus
    assert [gpu.compute_mode for gpu in gpus[:4]] == [3, 0, 0, 3]
    assert [gpu.time_slice for gpu in gpus] == [0, 3, 0, 0, 0, 0, 0, 0]
    assert [gpu.mig_mode for gpu in gpus[4:]] == [1, 1, 1, 0]
    assert world.look()[6].places == {("3g.40gb", 4), ("2g.20gb", 2), ("1g.10gb", 1)}
    rows = {row["gpu_index"]: row for row in cli("mps", "status", host=EIGHT, output="json").ok().data["mps_daemons"]}
    limits = {gpu: (row["threads_percent"], row["memory_limit_bytes"]) for gpu, row in rows.items()}
    assert limits == {2: (25.0, 4 << 30), 3: (100.0, None), 6: (50.0, 2 << 30)}
    names = names_of(world.host)
    assert {name: (one.profile, one.start, one.users) for name, one in names.items()} == {
        "train": ("3g.40gb", 4, ("daemon", "nobody")),
        "test": ("1g.10gb", 1, ()),
    }


def test_a_daemon_that_goes_leaves_its_directory_to_everybody(two: Host) -> None:
    two.apply("mps: {users: [nobody]}")
    pipe = Path(two.world.state.daemons[0].pipe_directory)
    assert pipe_users(pipe) == ("nobody",)
    two.apply("timeslice: default")
    assert pipe_users(pipe) == ()


def test_a_daemon_that_is_as_the_file_says_has_no_step(two: Host) -> None:
    two.apply("mig: [{wish: 3g.40gb, mps: {threads: 50}}]")
    done = [step["what"] for step in two.plan("mig: [{wish: 3g.40gb, mps: {threads: 50}}, 1g.10gb]")]
    assert done
    assert not [what for what in done if "MPS" in what]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_way_of_sharing_follows_any_other(cli: Cli, write: Write, seed: int) -> None:
    chosen = random.Random(seed)  # noqa: S311 - which ways are tried
    for _ in range(6):
        document = {"version": 1, "gpus": [{"match": {"index": n}, **_any_way(chosen, n)} for n in range(2)]}
        path = write(json.dumps(document))
        assert cli("apply", "-f", path, host=TWO).code == 0, document
        assert cli("diff", "-f", path, host=TWO).code == 0
        assert cli("apply", "-f", path, host=TWO, output="json").ok().data["steps"] == []
        assert cli("diff", "-f", write(captured(cli, TWO)), host=TWO).code == 0


def _any_way(chosen: random.Random, gpu: int) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [
        {"exclusive": True},
        {"timeslice": chosen.choice(["default", "short", "long"])},
        {"mps": {}},
        {"mps": {"threads": 25.5, "memory": "1500M", "users": ["nobody"]}},
        {"mps": {"exclusive": True, "priority": "low"}},
        {"mig": []},
        {"mig": ["1c.3g.40gb:0", {"wish": "2c.3g.40gb:0", "mps": {"threads": 10}}, "2g.20gb"]},
        {"mig": ["3g.40gb:0", {"wish": "1g.10gb:6", "name": f"a{gpu}", "users": ["nobody"]}, "1g.10gb"]},
        {
            "mig": [
                {"wish": "1g.10gb", "name": f"b{gpu}", "mps": {"memory": "1G"}},
                {"wish": "1g.10gb", "name": f"a{gpu}"},
            ]
        },
        {"mig": [{"wish": "3g", "name": f"a{gpu}", "users": ["daemon"], "mps": {"users": ["nobody"]}}]},
    ]
    return chosen.choice(ways)


def test_a_name_moves_to_another_gpu(two: Host) -> None:
    text = "version: 1\ngpus:\n- {match: {index: 0}, mig: [%s]}\n- {match: {index: 1}, mig: [%s]}\n"
    named = "{wish: 1g.10gb, name: train, users: [nobody]}"
    two.apply(text % (named, "1g.10gb"))
    two.apply(text % ("1g.10gb", named))
    host = two.world.host
    assert names_of(host)["train"].gpu_uuid == two.world.uuid(1)
    # The instance that lost its name is everybody's again.
    minor = host.nvml.minor_number(0)
    assert minor is not None
    accesses = [host.capabilities.access(capability) for capability in host.capabilities.of_gpu(minor).values()]
    assert {access.owner for access in accesses if access is not None} == {0}


# -- diff --------------------------------------------------------------------------------------------


def test_diff_says_each_thing_and_changes_nothing(cli: Cli, write: Write) -> None:
    cli("apply", "-f", write(MIXED), host=EIGHT).ok()
    before = same(EIGHT)
    other = MIXED.replace("long", "short").replace("threads: 25,", "threads: 30,").replace("name: test", "name: rest")
    other = other.replace("users: [nobody, daemon]", "users: [nobody]").replace("memory: 2G", "memory: 1G")
    done = cli("diff", "-f", write(other), host=EIGHT)
    assert done.code == 7
    for line in (
        "GPU 0 (exclusive): as in the file",
        "  time-slice: long; the file: short",
        "  MPS threads: 25 %; the file: 30 %",
        "  name rest: none; the file: 1g.10gb:1",
        "  name test: 1g.10gb:1; the file: none",
        "  users of train: daemon, nobody; the file: nobody",
        "  MPS of 3g.40gb:4 memory: 2G; the file: 1G",
    ):
        assert line in done.out.splitlines(), done.out
    assert "gpushare apply -f" in done.err
    assert same(EIGHT) == before
    answer = cli("diff", "-f", write(other), host=EIGHT, output="json")
    assert (answer.code, answer.data["as_requested"]) == (7, False)
    assert answer.data["gpus"][1]["differences"] == [{"what": "time-slice", "found": "long", "wanted": "short"}]


def test_each_new_device_beside_one_like_it_gets_its_daemon(two: Host) -> None:
    two.apply("mig: [1c.3g.40gb]")
    two.apply("mig: [{wish: 1c.3g.40gb*3, mps: {}}]")
    assert len({daemon.visible[0] for daemon in two.world.state.daemons}) == 3


@pytest.mark.parametrize(("way", "said"), [
    (one("exclusive: true", index=7), "this host has no GPU 7"),
    ("mig: [3g.40gb*3]", "3g.40gb*3 does not fit on GPU 0, even empty"), ("mig: [9g.80gb]", "no MIG profile '9g.80gb'"),
    ("mps: {memory: 900G}", "the memory limit 900.0 GiB is too large: GPU 0 has 79.6 GiB"),
])  # fmt: skip
def test_diff_says_what_can_never_be(two: Host, way: str, said: str) -> None:
    done = two("diff", way)
    assert (done.code, said in done.out, "make it so" in done.err) == (7, True, False)


def test_what_apply_would_refuse_is_not_named(cli: Cli, write: Write) -> None:
    """It refuses the whole file for one GPU."""
    path = write(one("mig: [1g]") + "- match: {index: 2}\n  timeslice: long\n")
    done = cli("diff", "-f", path, host="sim:2xt4,a30")
    assert (done.code, "Tesla T4) has no MIG" in done.out, "time-slice: default" in done.out) == (7, True, True)
    assert "make it so" not in done.err
    assert "has no MIG" in cli("apply", "-n", "-f", path, host="sim:2xt4,a30").err


def test_diff_names_the_command_for_the_file_as_it_was_given(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(one("exclusive: true").encode())))
    assert "make it so: gpushare apply -f -\n" in cli("diff", "-f", "-", host=TWO).err
    path = tmp_path / "my host.yaml"
    path.write_text(one("exclusive: true"), encoding="utf-8")
    assert f"make it so: gpushare apply -f '{path}'\n" in cli("diff", "-f", str(path), host=TWO).err


def test_a_part_of_the_model_is_enough(cli: Cli, write: Write) -> None:
    host = "sim:a100-40gb,a100-80gb,h100,h100-pcie,l4"
    text = "version: 1\ngpus:\n- {match: {model: A100}, timeslice: long}\n- {match: {model: h100}, timeslice: short}\n"
    cli("apply", "-f", write(text), host=host).ok()
    assert [gpu.time_slice for gpu in World(host).state.gpus] == [3, 3, 1, 1, 0]
    for nothing in ("a10", "Tesla"):
        text = f"version: 1\ngpus:\n- {{match: {{model: {nothing}}}, timeslice: long}}\n"
        assert f"no GPU of this host is model {nothing}" in cli("diff", "-f", write(text), host=host).ok().err


def test_the_file_is_an_argument_or_an_option(cli: Cli, refused: Refused, write: Write) -> None:
    path = write("version: 1\ngpus:\n  - match: {index: 0}\n    timeslice: short\n")
    assert cli("diff", path).code == 7
    cli("apply", path).ok()
    cli("diff", path).ok()
    for verb in ("apply", "diff"):
        assert "no file is given" in refused(verb, code="usage", exit_code=2)
        assert "two files are given" in refused(verb, path, "-f", path, code="two_sources", exit_code=2)


def test_an_apply_is_taken_back_by_its_undo(two: Host) -> None:
    two.apply("mig: [{wish: 3g.40gb, name: train}, 1g.10gb]")
    before = two.capture()
    planned = two("apply", "mps: {threads: 25}", "-n", output="json").ok()
    answer = two("apply", "mps: {threads: 25}", "-y", output="json").ok()
    assert planned.data["undo"] == answer.data["undo"]
    again = two.undo(answer)
    assert two.capture() == before
    # The first undo is still right, and the undo of the undo is another file.
    assert again.data["undo"].split()[3] != answer.data["undo"].split()[3]
    # It would take what was made since, so it asks.
    assert "-y" not in again.data["undo"].split()


def test_the_file_of_the_directory_is_the_default(
    cli: Cli, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    file = tmp_path / "gpushare.yaml"
    file.write_text(one("timeslice: long"))
    file.chmod(0o644)
    assert cli("diff", host=TWO).code == 7
    cli("apply", host=TWO).ok()
    assert World(TWO).state.gpus[0].time_slice == 3
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", str(os.getuid()))
    cli("diff", host=TWO).ok()
    for path, mode in ((file, 0o666), (tmp_path, 0o777)):
        path.chmod(mode)
        assert "other users may have written ./gpushare.yaml" in refused("diff", code="untrusted_file", exit_code=4)
        path.chmod(0o755)
    monkeypatch.setenv("SUDO_UID", "4242")
    if os.getuid():
        refused("diff", code="untrusted_file", exit_code=4)
    file.unlink()
    refused("diff", code="usage", exit_code=2)


def test_capture_says_how_to_survive_a_reboot(cli: Cli) -> None:
    (note,) = [line for line in cli("capture").ok().lines("note") if "at every boot" in line]
    assert (
        ": sudo gpushare capture > gpushare.yaml; sudo gpushare apply gpushare.yaml; sudo gpushare export systemd"
        in note
    )


# -- capture -----------------------------------------------------------------------------------------


def test_capture_notes_what_a_file_cannot_say(cli: Cli, tmp_path: Path) -> None:
    world = World("sim:3xt4")
    world.host.nvml.set_compute_mode(0, ComputeMode.PROHIBITED)
    world.foreign_daemon(tmp_path, uuid=world.uuid(1))
    world.fault("lost", gpu="2")
    done = cli("capture", host="sim:3xt4")
    assert done.code == 1
    assert yaml.safe_load(done.out)["gpus"] == [{"match": {"index": 1}, "timeslice": "default"}]
    assert "compute mode prohibited" in done.err
    assert "did not start" in done.err
    assert "GPU 2 does not answer" in done.err


@pytest.mark.parametrize("way", ["mps: {threads: 30}", "mig: [{wish: 1g.10gb, mps: {threads: 30}}]"])
def test_capture_guesses_nothing_of_a_daemon_that_hangs(
    cli: Cli, write: Write, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    cli("apply", "-f", write(one(way)), host=TWO).ok()
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)
    World(TWO).fault("hang", "nvidia-cuda-mps-control")
    done = cli("capture", host=TWO).ok()
    assert yaml.safe_load(done.out)["gpus"] == [{"match": {"index": 1}, "timeslice": "default"}]
    assert "GPU 0 is left out: its MPS daemon does not answer" in done.err


def test_what_hides_the_time_slice_is_named(two: Host) -> None:
    two.world.fault("missing", "nvidia-smi")
    assert "nvidia-smi is not" in two("apply", "timeslice: long").lines("error")[0]
    assert "its time-slice level is unknown" in two.cli("capture", host=TWO).err


def test_a_gpu_without_compute_modes_is_in_the_default_one(two: Host) -> None:
    two.world.fault("not-supported", "compute-mode", gpu="0")
    assert two.capture().count("timeslice: default") == 1
    assert [step["what"] for step in two.plan("timeslice: default")] == ["keep the file for the next boot"]
    assert two("apply", "exclusive: true").code == 3


def test_a_daemon_stays_stopped_where_another_size_takes_its_place(two: Host) -> None:
    two.apply("mig: [{wish: '1c.3g.40gb:0', mps: {threads: 10}}, '2c.3g.40gb:0']")
    two.cli("mig", "apply", "3g.40gb:0", "-g", "0", host=TWO).ok()
    assert two.world.state.daemons == []


# -- refused -----------------------------------------------------------------------------------------


LIMIT = "version: 1\ngpus: [{match: all, exclusive: true}]\nmemory: [{match: {user: nosuch}, limit: 8G}]\n"
SECOND = "- {match: {index: 1}, mig: [7g.80gb*2]}\n"


@pytest.mark.parametrize(("text", "code", "exit_code", "said"), [
    ("mps: {threads: 300}", "bad_file", 2, ":4:"),
    ("mig: [3g.40gb*3]", "never_fits", 3, ":3:3: GPU 0: 3g.40gb*3 does not fit"),
    (one("timeslice: long") + SECOND, "never_fits", 3, ":5:3: GPU 1: 7g.80gb*2 does not fit"),
    (one("mig: [9g.80gb]", index=1), "mig_profile_unknown", 3, ":3:3: GPU 1: this GPU has no MIG profile '9g.80gb'"),
    ("mps: {memory: 400G}", "limit_above_gpu", 2, ":3:3"),
    ("mps: {memory: 400G}", "limit_above_gpu", 2, "give at most memory: 81559M"),
    ("mps: {users: [no-such-user]}", "no_user", 6, "no-such-user"),
    (one("exclusive: true", index=4), "unknown_gpu", 6, "this host has no GPU 4"),
    (LIMIT, "no_user", 6, "gpushare.yaml:3:10"),
])  # fmt: skip
def test_a_file_that_can_never_hold_changes_nothing(two: Host, text: str, code: str, exit_code: int, said: str) -> None:
    two.world.host.nvml.sweep()
    assert said in two.refused(text, code=code, exit_code=exit_code)


def test_a_plan_without_a_step_is_one_line(two: Host) -> None:
    two.apply("timeslice: default")
    assert two.apply("timeslice: default", "-n").out == "nothing to do: the host is as requested\n"


LONG_FIRST = "version: 1\ngpus:\n- {match: {index: 0}, timeslice: long}\n- match: {index: 1}\n  "
INSTANCE = "mig: [{wish: 3g.40gb, name: a, mps: {memory: SIZE}}, 1g.10gb]"


@pytest.mark.parametrize(("before", "wanted"), [
    ("mps: {threads: 50}", "mps: {threads: 50, memory: 800G}"), ("mig: [3g.40gb]", "mps: {memory: 800G}"),
    (INSTANCE.replace("SIZE", "8G"), INSTANCE.replace("SIZE", "50G")),
    ("mig: [1g.10gb]", INSTANCE.replace("SIZE", "50G")),
])  # fmt: skip
def test_a_limit_that_is_too_large_changes_no_gpu(two: Host, before: str, wanted: str) -> None:
    two.apply(one(before, index=1))
    for more in ([], ["-n"]):
        two.refused(f"{LONG_FIRST}{wanted}\n", *more, code="limit_above_gpu", exit_code=2)


@pytest.mark.parametrize(("kind", "value", "wanted", "code"), [
    ("driver", "550.54.14", "mps: {multiuser: true}", "no_multiuser"),
    ("driver", "550.54.14", "mig: [{wish: 3g.40gb, mps: {multiuser: true}}]", "no_multiuser"),
    ("missing", "nvidia-cuda-mps-control", "mps: {}", "program_missing"),
])  # fmt: skip
def test_a_daemon_that_can_never_be_changes_no_gpu(two: Host, kind: str, value: str, wanted: str, code: str) -> None:
    two.world.fault(kind, value)
    for more in ([], ["-n"]):
        two.refused(f"{LONG_FIRST}{wanted}\n", *more, code=code, exit_code=3)


def test_the_plan_for_a_running_daemon_is_what_is_carried_out(two: Host) -> None:
    two.cli("mps", "start", "-g", "0", "--threads", "50", "--memory", "8G", host=TWO).ok()
    step = two.plan("mps: {threads: 30, users: [nobody]}", "-n")[0]
    assert step["what"] == "change the MPS daemon of GPU 0: threads 30 %, priority normal, for nobody"
    limits, access = step["command"].splitlines()
    assert limits == "gpushare mps set -g 0 --threads 30 --memory none --priority normal"
    assert "setfacl -m u:nobody:rx" in access
    limits_back, access_back = step["undo"].splitlines()
    assert limits_back == "gpushare mps set -g 0 --threads 50 --memory 8G --priority normal"
    assert access_back.startswith("setfacl -b ")
    for line in (limits, limits_back):
        two.cli(*line.split()[1:], host=TWO).ok()
    # Only the users differ.
    only = two.plan("mps: {threads: 50, memory: 8G, users: [nobody]}", "-n")
    assert only[0]["command"].startswith("chmod 700 ")


def test_a_daemon_of_another_user_is_refused_before_the_first_change(two: Host) -> None:
    two.cli("mps", "start", "-g", "1", "--threads", "50", host=TWO).ok()
    two.world.fault("user", "65534")
    text = "version: 1\ngpus:\n- {match: {index: 0}, mps: {}}\n- {match: {index: 1}, mps: {threads: 30}}\n"
    two.refused(text, code="no_permission", exit_code=4)
    assert [daemon.threads for daemon in two.world.state.daemons] == [50.0]
    assert states(two("apply", text, "-n", output="json").ok()) == {0: "planned", 1: "planned"}


def test_the_commands_of_a_plan_with_mig_work_in_their_order(two: Host) -> None:
    steps = two.plan("mig: [{wish: '3g.40gb:4', name: alice, users: [nobody]}]", "-n")
    commands = [line for step in steps for line in (step["command"] or "").splitlines()]
    order = [
        next(number for number, command in enumerate(commands) if words in command)
        for words in ("-mig 1", "-cgi ", "mig name alice 3g.40gb:4 -g 0", "mig grant alice nobody")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("command", ["apply", "diff"])
def test_no_file(refused: Refused, command: str, tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    # Not into another file, which may be there.
    assert f"gpushare capture > {path}\n" in refused(command, "-f", path, code="no_file", exit_code=6)
    assert "empty" in refused(command, "-f", "", code="bad_file", exit_code=2)


def test_a_daemon_that_gives_way_to_mig_is_said_to(two: Host) -> None:
    two.apply("mps: {threads: 25}")
    assert "of GPU 0; it stays stopped" in two.apply("mig: [3g.40gb]", "-n").out


def test_what_the_next_boot_would_not_bring_back_is_said(two: Host) -> None:
    assert "at boot" not in two.apply("timeslice: long").err
    done = two.apply(one("timeslice: long", index=1))
    assert "only this file is applied at boot, and it has no entry for GPU 0" in done.err
    # It replaced the one before; once said is enough.
    assert "at boot" not in two.apply(one("timeslice: long", index=1)).err


def test_a_name_of_a_gpu_that_the_file_is_not_about_is_taken(two: Host) -> None:
    two.apply("mig: [{wish: 1g.10gb, name: test}]")
    text = one("mig: [{wish: 1g.10gb, name: test}]", index=1)
    said = two.refused(text, code="name_taken", exit_code=2)
    assert ":3:3: GPU 1: the name 'test' belongs to 1g.10gb:6 of GPU 0" in said
    # A GPU that does not answer keeps its names.
    two.world.fault("lost", gpu="0")
    two.refused(text, code="name_taken", exit_code=2)


def test_only_root_may_but_a_user_may_have_daemons(two: Host) -> None:
    two.world.fault("user", "nobody")
    for way in ("timeslice: long", "mps: {exclusive: true}"):
        two.refused(way, code="no_permission", exit_code=4)
    assert states(two("apply", "timeslice: long", "-n", output="json").ok()) == {0: "planned"}
    assert two.world.state.gpus[0].time_slice == 0
    two.apply("mps: {threads: 25}")
    assert [daemon.threads for daemon in two.world.state.daemons] == [25.0]
    two.refused("mps: {exclusive: true}", code="no_permission", exit_code=4)
    assert two.differs("mps: {threads: 25}") == ""


# -- in use ------------------------------------------------------------------------------------------

BUSY = [
    # What is there, who is on it, what is wanted.
    ("timeslice: default", {}, "mig: [3g.40gb]"),
    ("timeslice: default", {}, "mps: {threads: 25}"),
    ("mig: [3g.40gb]", {"mig": "0"}, "timeslice: default"),
    ("mig: [3g.40gb]", {"mig": "0"}, "mig: [7g.80gb]"),
    ("mps: {threads: 25}", {"mps": True}, "timeslice: default"),
    ("mps: {threads: 25}", {"mps": True}, "mps: {exclusive: true}"),
    ("mps: {threads: 25}", {"mps": True}, "mig: [3g.40gb]"),
]


@pytest.mark.parametrize(("there", "who", "wanted"), BUSY)
def test_a_gpu_in_use_is_refused_and_the_others_are_done(two: Host, there: str, who: Any, wanted: str) -> None:
    world = two.world
    two.apply(there)
    pid = _somebody(world, who)
    before = captured_of_gpu(two.cli, 0)
    answer = two("apply", one(wanted) + "- {match: {index: 1}, timeslice: long}\n", output="json")
    assert (answer.code, answer.json["status"], answer.error["gpu"]) == (19, "partial", "0")
    assert states(answer) == {0: "failed", 1: "done"}
    assert captured_of_gpu(two.cli, 0) == before
    assert pid in world.pids()
    assert world.state.gpus[1].time_slice == 3
    # It did not hold as a whole: what is applied at boot stays what it was.
    assert there in two.kept.read_text()
    # Alone it is an error as any other.
    alone = two("apply", wanted, "--wait", "0.1s", output="json")
    assert (alone.code, alone.json["status"], alone.error["code"]) == (19, "error", answer.error["code"])
    world.send(pid, 9)
    two.apply(wanted)


def _somebody(world: World, who: dict[str, Any]) -> int:
    if who.get("mps"):
        return world.client()
    instance = world.state.gpus[0].mig[0].uuid if "mig" in who else None
    return admin.add_process(world.spec, "0", mig=instance) if instance else admin.add_process(world.spec, "0")


def captured_of_gpu(cli: Cli, gpu: int) -> Any:
    return cli("capture", "-g", str(gpu), host=TWO, output="json").ok().data["gpus"]


def test_what_is_refused_is_not_called_done(two: Host) -> None:
    text = "version: 1\ngpus:\n- match: all\n  exclusive: true\n"
    for _ in range(2):
        admin.add_process(TWO, "0")
    two("apply", text, "-y")
    for option in ("-y", "-n"):
        answer = two("apply", text, option)
        assert answer.code == 19
        assert "as requested" not in answer.out
        assert "nothing is changed" in answer.out


def test_wait_goes_on_when_the_program_has_ended(two: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = admin.add_process(TWO, "0")
    monkeypatch.setattr(
        "gpushare.cli.apply.time.sleep", lambda _: two.world.send(pid, 9) if pid in two.world.pids() else None
    )
    assert "waiting up to 3600 s: GPU 0" in two.apply("mig: [3g.40gb]", "--wait", "1h").err
    assert [instance.profile for instance in two.world.state.gpus[0].mig] == ["3g.40gb"]


def test_what_may_change_under_programs_does(two: Host) -> None:
    admin.add_process(TWO, "0")
    two.apply("timeslice: long")
    two.apply(one("mps: {threads: 25}", index=1))
    two.world.client(index=1)
    two.apply(one("mps: {threads: 50, memory: 1G}", index=1))
    (daemon,) = two.world.state.daemons
    assert (daemon.threads, daemon.memory, len(two.world.attached())) == (50.0, {"0": 1024}, 1)


def test_somebody_elses_daemon_is_never_stopped(two: Host, tmp_path: Path) -> None:
    pid = two.world.foreign_daemon(tmp_path, uuid=two.world.uuid(0))
    two.refused("exclusive: true", code="foreign_daemon", exit_code=19)
    assert "did not start" in two.differs("timeslice: default")
    assert two.world.state.daemons[0].pid == pid


UNIT = """\
version: 1
gpus:
- match: {index: 0}
  mps: {threads: 25, memory: 3840M, priority: low, users: [nobody]}
- match: {index: 1}
  mig:
  - {wish: "3g.40gb:4", mps: {threads: 50}}
  - 1g.10gb
"""


def unit_daemon(world: World, uuid: str, *, threads: str, memory: str = "-", users: tuple[str, ...] = ()) -> None:
    """Start a daemon as the unit of `gpushare export systemd` does, and give it its limits."""
    pipe = local_path(world.host, pipe_directory(uuid))
    pipe.mkdir(parents=True)
    set_pipe_users(pipe, users)
    environment = {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory(uuid),
        "CUDA_MPS_LOG_DIRECTORY": f"/var/log/gpushare-mps/{uuid}",
    }
    assert world.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment).exit_code == 0
    control = MpsControl(world.host.programs, pipe_directory(uuid))
    control.set_threads(float(threads))
    if memory != "-":
        control.set_memory(3840 << 20)
        control.set_priority(Priority.LOW)
    (pipe.parent / LIMIT_FILE).write_text(f"{memory}\n", encoding="utf-8")


def test_daemons_of_units_are_in_force(cli: Cli, write: Write) -> None:
    path, world = write(UNIT), World(TWO)
    admin.set_fault(TWO, "user", value="root")
    cli("apply", "-f", path, "-y", host=TWO).ok()
    before = cli("capture", host=TWO).ok().out
    uuids = [daemon.visible[0] for daemon in world.state.daemons]
    for uuid in uuids:
        cli("mps", "stop", "-g", uuid, host=TWO).ok()
    unit_daemon(world, uuids[0], threads="25", memory="3840M", users=("nobody",))
    unit_daemon(world, uuids[1], threads="50")
    # At the next boot, or when gpushare.service is started again, nothing is in its way.
    assert cli("diff", "-f", path, host=TWO).code == 0
    assert cli("apply", "-f", path, "-y", host=TWO, output="json").ok().data["steps"] == []
    assert cli("capture", host=TWO).ok().out == before
    assert cli("doctor", host=TWO).code == 0
    exported = cli("export", "systemd", host=TWO).ok().out
    assert exported.count("ExecStart=/usr/bin/nvidia-cuda-mps-control -f") == 2
    assert " 25.0 3840M 3G 1\n" in exported
    assert "setfacl -m u:nobody:rx" in exported


def test_a_unit_is_not_worked_against(cli: Cli, write: Write) -> None:
    world = World(TWO)
    cli("doctor", host=TWO)
    unit_daemon(world, world.uuid(), threads="50")
    answer = cli("apply", "-f", write("version: 1\ngpus:\n- match: {index: 0}\n  timeslice: long\n"), "-y", host=TWO)
    assert answer.code == 19
    assert "gpushare-mps-gpu-" in answer.lines("error")[0]
    assert "sudo systemctl disable --now gpushare-mps-gpu-" in answer.lines("hint")[0]
    assert len(world.state.daemons) == 1


def test_a_lost_gpu_does_not_hold_up_the_others(two: Host) -> None:
    two.world.fault("lost", gpu="0")
    text = "version: 1\ngpus:\n- {match: {index: [0, 1]}, timeslice: long}\n"
    answer = two("apply", text, output="json")
    assert (answer.code, answer.json["errors"][0]["code"]) == (6, "gpu_lost")
    assert states(answer) == {0: "failed", 1: "done"}
    assert two.differs(text)


def test_what_a_dead_daemon_left_is_cleared_away(two: Host) -> None:
    two.apply("mps: {exclusive: true}")
    two.world.send(two.world.state.daemons[0].pid, 9)
    assert two.differs("mps: {exclusive: true}")
    two.apply("timeslice: default")
    assert two.cli("mps", "status", host=TWO, output="json").ok().data["mps_daemons"] == []
    assert two.world.state.gpus[0].compute_mode == 0


# -- faults ------------------------------------------------------------------------------------------

FROM = (
    "version: 1\ngpus:\n- match: {index: 0}\n  mig:\n  - {wish: 3g.40gb, name: old, users: [nobody]}\n"
    "  - {wish: '1g.10gb:0', mps: {threads: 10}}\n- {match: {index: 1}, exclusive: true}\n"
)
TO = (
    "version: 1\ngpus:\n- match: {index: 0}\n  mig:\n  - {wish: 2g.20gb*2, mps: {threads: 20}}\n"
    "  - {wish: 1g.10gb, name: new, users: [daemon]}\n- {match: {index: 1}, timeslice: long}\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 12))
def test_a_fault_at_a_step_takes_that_gpu_back(two: Host, step: int) -> None:
    two.apply(FROM)
    before = captured_of_gpu(two.cli, 0)
    with two.world.fault_at(step):
        answer = two("apply", TO, output="json")
    rows = states(answer)
    failed = {gpu for gpu, state in rows.items() if state == "failed"}
    assert len(failed) <= 1
    assert answer.code == (1 if failed else 0)
    assert rows == {gpu: "failed" if gpu in failed else "done" for gpu in (0, 1)}
    if 0 in failed:
        assert captured_of_gpu(two.cli, 0) == before
    assert two.differs(FROM) or not failed
    assert two.kept.read_text() == (FROM if failed else TO)
    # The way is free afterwards.
    two.apply(TO)
    assert two.kept.read_text() == TO


def test_a_daemon_that_was_there_gets_its_limits_back_and_goes_on(two: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    two.apply("mig: [{wish: 3g.40gb*2, mps: {threads: 50}}]")

    def daemons() -> list[tuple[int, float, tuple[str, ...]]]:
        return [(one.pid, one.threads, pipe_users(Path(one.pipe_directory))) for one in two.world.state.daemons]

    before, plan, calls = daemons(), steps.plan_limits, []

    def second_fails(*words: Any) -> Any:
        calls.append(words)
        if len(calls) == 2:
            raise OperationFailed("the second daemon does not answer", "try again")
        return plan(*words)

    monkeypatch.setattr(steps, "plan_limits", second_fails)
    assert two("apply", "mig: [{wish: 3g.40gb*2, mps: {threads: 25, users: [nobody]}}]").code == 1
    assert len(calls) > 2
    assert daemons() == before


@pytest.mark.usefixtures("patience_is_over")
def test_a_daemon_that_does_not_start_takes_its_gpu_back(two: Host) -> None:
    two.apply(FROM)
    before = captured_of_gpu(two.cli, 1)
    two.world.fault("hang", "nvidia-smi")
    assert two("apply", one("timeslice: long", index=1)).code != 0
    two.world.clear()
    assert captured_of_gpu(two.cli, 1) == before


def test_a_daemon_that_comes_back_is_for_the_same_users(two: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    make, seen = apply.compute_mode_step, []

    def fail() -> None:
        seen.append(len(two.world.state.daemons))
        raise OperationFailed("the driver did not", "try again")

    monkeypatch.setattr(apply, "compute_mode_step", lambda *words, **more: replace(make(*words, **more), do=fail))
    two.apply("mps: {users: [nobody]}")
    assert two("apply", "exclusive: true").code == 1
    assert seen == [0]
    assert [pipe_users(Path(daemon.pipe_directory)) for daemon in two.world.state.daemons] == [("nobody",)]


def test_a_crash_in_the_middle_is_undone_by_the_next_apply(two: Host) -> None:
    two.apply(FROM)
    two.world.fault("crash-step", "3")
    assert two.world.run_apart("apply", "-f", two.file(TO)) == 137
    two.world.clear()
    assert "was interrupted" in two.apply(TO).err
    assert two.differs(TO) == ""


def test_who_may_not_change_mig_leaves_an_interrupted_change_to_root(two: Host) -> None:
    two.cli("mig", "enable", "-g", "0", "-y", host=TWO).ok()
    two.world.fault("crash-step", "2")
    assert two.world.run_apart("mig", "create", "-g", "0", "1g.10gb", "2g.20gb") == 137
    two.world.clear()
    two.world.fault("user", "1000")
    text = one("mps: {threads: 25}", index=1)
    two.refused(text, code="no_permission", exit_code=4)
    two.world.fault("user", "root")
    assert "was undone" in two.apply(text).err
    assert "MIG is on without an instance" in two.cli("mig", "status", "-g", "0", host=TWO).ok().err


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EIO, 1), (errno.EACCES, 4)])
def test_a_file_that_cannot_be_kept_for_the_boot_is_an_error(
    two: Host, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """The units for the boot would apply another one, or none."""
    kept, real, text = two.kept, os.replace, one("timeslice: long")

    def refusing(source: Any, target: Any) -> None:
        if Path(target) == kept:
            raise OSError(number, os.strerror(number), str(source))
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refusing)
        answer = two("apply", text, output="json")
    error = answer.error
    assert (answer.code, error["code"], answer.json["status"]) == (code, "not_kept", "partial")
    assert "limits" not in error["message"]
    assert os.strerror(number) in error["message"]
    assert error["hint"]
    assert (states(answer), answer.data["kept"], kept.exists()) == ({0: "done"}, None, False)
    # The same again keeps it, though there is nothing else to do.
    assert two("apply", text, output="json").ok().data["kept"] == str(kept)
    assert kept.read_text() == text
    monkeypatch.setattr(os, "replace", refusing)
    # Limits of users are in force by the kept file only.
    limited = text + "memory: [{match: all, limit: 10G}]\n"
    answer = two("apply", limited, output="json")
    assert "nothing is changed" in two("apply", limited).out
    assert (answer.code, answer.data["limits"], answer.data["steps"]) == (code, [], [])
    assert answer.error["message"].startswith("the file is not kept: the next boot will not apply it, and limits")
    # One that is kept is not written again: at boot the disk may be full.
    two.apply(text)


def test_a_plan_says_that_only_the_kept_text_changes(two: Host) -> None:
    text = one("exclusive: true")
    both = two.plan(text, "-n")
    assert both[-1]["what"] == "keep the file for the next boot"
    assert len(both) > 1
    two.apply(text)
    new = f"version: 1 # The same.\n{text.partition('version: 1')[2].lstrip()}"
    assert "1. keep the file for the next boot\n" in two.apply(new, "-n").out
    assert two.kept.read_text() == text
    assert two.apply(new).out.startswith("the file is kept for the next boot; undo: ")
    assert two.kept.read_text() == new
    for words in (("-n",), ()):
        assert "nothing to do" in two.apply(new, *words).out


def test_a_time_slice_that_a_file_cannot_express_with_mig_is_noted(cli: Cli) -> None:
    cli("timeslice", "set", "short", host="sim:h100").ok()
    World("sim:h100").mig("3g.40gb")
    answer = cli("capture", host="sim:h100").ok()
    assert "GPU 0: its time-slice level short is left out: a file cannot express one with MIG" in answer.err
    assert "timeslice" not in answer.out


def test_the_undo_keeps_for_boot_what_the_previous_file_set_up(two: Host) -> None:
    two.apply("timeslice: long")
    answer = two("apply", one("timeslice: short", index=1), output="json").ok()
    assert "it has no entry for GPU 0, which the previous file had" in answer.err
    two.undo(answer)
    assert "- match: {index: 0}\n    timeslice: long" in two.kept.read_text()
    assert "- match: {index: 1}\n    timeslice: default" in two.kept.read_text()
    # A lost GPU of the previous file takes no undo from the others.
    two.world.fault("lost", gpu="0")
    two.undo(two("apply", one("timeslice: short", index=1), output="json").ok())
    assert two.world.state.gpus[1].time_slice == 0


def test_limits_in_a_file_that_its_user_has_kept_are_not_said_to_be_in_force(two: Host) -> None:
    two.world.fault("user", "1000")
    for _ in range(2):
        said = two.apply("version: 1\nmemory:\n- {match: all, limit: 8G}\n").err
        assert "come into force only when root applies" in said
        assert "limit: 8G" not in two.capture()


def test_a_user_who_is_not_root_sees_the_limits_that_root_has_set(two: Host) -> None:
    text = f"version: 1\nmemory:\n- {{match: {{user: '{os.geteuid()}'}}, limit: 8G}}\nreserve: {{longest: 4h}}\n"
    two.apply(text)
    two.world.fault("user", "1000")
    assert two("diff", text).ok().out.strip() == "nothing differs from the file"
    for words in (("-n",), (), ()):
        answer = two.apply(text, *words)
        assert "come into force" not in answer.err
    assert "nothing to do: the host is as requested" in answer.out
    assert all(part in two.capture() for part in ("limit: 8G", "longest: 4h"))
    # A job belongs to the real user.
    assert "you may reserve 8.0 GiB" in two.cli("run", "-g", "0", "--memory", "9G", "--", "true", host=TWO).err
    refused = two.cli("reserve", "-g", "0", "--for", "5h", "-n", host=TWO)
    assert (refused.code, "the longest here is 4 h" in refused.err) == (4, True)


RULES = "version: 1\nslices:\n- match: all\n  slice: 2ms\nmemory:\n- {match: all, limit: 8G}\n"


def test_a_capture_loses_no_rules_of_root(cli: Cli, write: Write, tmp_path: Path) -> None:
    cli("apply", "-f", write(RULES), host=TWO).ok()
    as_root = cli("capture", host=TWO).ok()
    World(TWO).fault("user", "1000")
    as_user = cli("capture", host=TWO).ok()
    assert as_user.out == as_root.out
    assert as_user.err.count("slices, memory and reserve are those of the file that root applied last") == 1
    # Neither does the unit that follows them.
    assert "gpushare-timeslice.service" in cli("export", "systemd", "--to", str(tmp_path / "u"), host=TWO).ok().out
    own = RULES.replace("2ms", "4ms").replace("8G", "9G")
    cli("apply", "-f", write(own), host=TWO).ok()
    both = cli("capture", host=TWO).ok()
    assert both.out == as_root.out
    assert "the slices of your own file are left out: " in both.err
    (roots,) = World(TWO).host.shared_state_directories
    (roots / KEPT).write_text("version: 2\n")
    broken = cli("capture", host=TWO).ok()
    assert f"{roots / KEPT} cannot be read, or is not valid: its slices, memory and reserve are left out" in broken.err
    (roots / KEPT).unlink()
    # Where root has applied none, the user's own rules are captured; limits of that file are not in force.
    alone = cli("capture", host=TWO).ok()
    assert ("slice: 4ms" in alone.out, "memory:" in alone.out) == (True, False)
    assert "slices are those of the file that you applied last" in alone.err


def test_limits_of_users_are_kept_compared_captured_and_honored(two: Host) -> None:
    user = user_name(os.geteuid())
    text = f"version: 1\nmemory:\n- {{match: {{user: ['{user}']}}, limit: 8G}}\n- {{match: all, limit: 20G}}\n"
    changes = [f"memory: limit of user {user}: none -> 8G", "memory: limit of each other user: none -> 20G"]
    assert all(change in two.differs(text) for change in changes)
    two.world.fault("user", "1000")
    assert "1. keep the file as the one that was applied last\n" in two.apply(text, "-n").out
    two.world.clear()
    planned = two.plan(text, "-n")
    wanted = f"keep the file for the next boot, and put in force: {'; '.join(changes)}"
    assert [step["what"] for step in planned] == [wanted]
    # The dry run is the plan that is carried out.
    assert two.plan(text) == planned
    assert "nothing to do" in two.apply(text).out
    assert two("diff", text).ok().out.strip() == "nothing differs from the file"
    assert "limit: 8G" in two.capture()
    for wait in ((), ("--wait",)):
        answer = two.cli("run", "-g", "0", *wait, "--memory", "9G", "--", "true", host=TWO)
        (error,) = answer.lines("error")
        assert (answer.code, "needs 9.0 GiB, and you may reserve 8.0 GiB on a GPU" in error) == (4, True)
    two.cli("run", "-g", "0", "--wait", "--memory", "7G", "--", "true", host=TWO).ok()


@pytest.mark.parametrize("gpus", ["", "gpus: [{match: {index: 0}, timeslice: long}]\n"])
def test_limits_of_users_are_taken_back_by_the_undo(two: Host, gpus: str) -> None:
    limited = "version: 1\n{}memory:\n- {{match: all, limit: {}}}\n"
    # At first there are none.
    first = two("apply", limited.format(gpus, "20G"), output="json").ok()
    planned = two.apply(limited.format("", "8G"), "-n").err.strip().rpartition("undo: ")[2].splitlines()[0]
    answer = two("apply", limited.format("", "8G"), output="json").ok()
    assert answer.data["undo"] == planned
    two.undo(answer)
    assert "limit: 20G" in two.kept.read_text()
    # What is set up at boot is what was: GPU 0 is not left out.
    assert ("timeslice: long" in two.kept.read_text()) is bool(gpus)
    two.undo(first)
    assert "memory" not in two.kept.read_text()
    assert two.world.state.gpus[0].time_slice == 0


def test_a_file_without_limits_ends_those_in_force(two: Host) -> None:
    two.apply("version: 1\nmemory:\n- {match: all, limit: 20G}\n")
    text = "version: 1\ngpus:\n- {match: all, timeslice: default}\n"
    change = "memory: limit of each user: 20G -> none"
    planned = two.apply(text, "-n").out
    assert f"1. keep the file for the next boot, and put in force: {change}\n" in planned
    assert f"{change}; undo: gpushare apply -f " in two.apply(text).out
    assert "memory" not in two("diff", text).ok().out


def test_the_first_entry_that_matches_a_user_counts() -> None:
    everybody, others = "{match: all, limit: 8G}", "{match: {user: [root, nobody]}, limit: 4G}"
    for rows, named, rest in (([everybody, others], {0: 4 * GIB}, 8 * GIB), ([others, everybody], None, 8 * GIB)):
        limits = user_limits_in(parse("version: 1\nmemory:\n- " + "\n- ".join(rows) + "\n"))
        assert limits.others == rest
        assert limits.named == (named or {0: 4 * GIB, user_id("nobody"): 4 * GIB})


def test_limits_outlive_a_user_who_is_gone(cli: Cli, world: World) -> None:
    text = "version: 1\nmemory:\n- {match: {user: [no-such-user, root]}, limit: 8G}\n- {match: all, limit: 20G}\n"
    make_private_directory(world.host.state_directory)
    (world.host.state_directory / KEPT).write_text(text)
    assert kept_limits(world.host).named == {0: 8 * GIB}
    assert kept_limits(world.host).others == 20 * GIB


def test_a_file_that_names_what_is_not_here_changes_nothing(two: Host) -> None:
    """With all its faults at once: a GPU, a profile, a limit."""
    text = one("timeslice: long") + "- {match: {index: 1}, mig: [9g.80gb]}\n- {match: {index: 7}, timeslice: long}\n"
    for more in ((), ("-n",)):
        answer = two("apply", text, *more)
        assert answer.code not in {0, 7}
        assert "no MIG profile '9g.80gb'" in answer.err
        assert "this host has no GPU 7" in answer.err
    assert two.world.state.gpus[0].time_slice == 0
