"""``gpushare mig``: what is there, what fits, and the cheapest way to a wish. Nothing is ever changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare.cli import main
from gpushare.gpu_models import model_of
from gpushare.host.capabilities import user_name
from gpushare.sim import admin
from gpushare.sim.current import changing
from gpushare.sim.mig import place_instances
from gpushare.sim.state import StateFile
from tests.cli.drive import Cli, World, missing

DATA = Path(__file__).resolve().parents[2] / "data" / "h200-r580"


def captured_profiles() -> dict[str, tuple[int, int, int]]:
    """Return id, free and total by name, as nvidia-smi printed them on our H200."""
    rows = {}
    for line in (DATA / "mig-lgip.txt").read_text(encoding="utf-8").splitlines():
        words = line.replace("|", " ").split()
        if "MIG" in words:
            free, _, total = words[4].partition("/")
            rows[words[2]] = (int(words[3]), int(free), int(total))
    return rows


def test_profiles(cli: Cli) -> None:
    found = cli("--host", "sim:h200", "-o", "json", "mig", "profiles").json["data"]["profiles"]
    assert {row["profile"]: (row["id"], row["free"], row["total"]) for row in found} == captured_profiles()
    done = cli("-o", "json", "mig", "profiles", "--model", "b300").ok()
    assert {row["confidence"] for row in done.json["data"]["profiles"]} == {"documented"}
    assert {row["memory_bytes"] for row in done.json["data"]["profiles"]} == {None}


def test_a_plan_has_explicit_placements_and_changes_nothing(cli: Cli) -> None:
    done = cli("--host", "sim:h200", "-o", "json", "mig", "plan", "3g.71gb", "1g.18gb*3")
    assert [step["command"] for step in done.json["data"]["steps"]] == [
        "nvidia-smi -i 0 -mig 1",
        "nvidia-smi mig -i 0 -cgi 9:4 -C",
        "nvidia-smi mig -i 0 -cgi 19:1 -C",
        "nvidia-smi mig -i 0 -cgi 19:2 -C",
        "nvidia-smi mig -i 0 -cgi 19:3 -C",
    ]
    applied = cli("--host", "sim:h200", "-o", "json", "mig", "apply", "-n", "3g.71gb", "1g.18gb*3")
    assert applied.json["data"]["steps"] == done.json["data"]["steps"]
    assert admin.describe("sim:h200").gpus[0].mig == []


def test_what_is_there_stays_and_a_no_says_what_would_have_to_go(cli: Cli) -> None:
    cli("--host", "sim:h100", "sim", "mig", "3g.40gb", "1g.10gb:4")
    cli("--host", "sim:h100", "-o", "json", "mig", "plan", "2g.20gb").ends(19, "no_room")
    fits = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "1g.10gb*2")
    assert (fits.code, fits.json["data"]["where"]) == (0, ["1g.10gb:5 on GPU 0", "1g.10gb:6 on GPU 0"])
    cli("--host", "sim:h100", "sim", "mig", "3g.40gb:0", "3g.40gb:4")
    admin.add_process("sim:h100", "0", mig="1")
    done = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "4g.40gb").ends(7)
    assert done.json["data"]["would_go"] == ["3g.40gb:0 on GPU 0"]


def test_the_printed_commands_lead_to_the_wish_and_those_of_the_undo_back(cli: Cli) -> None:
    cli("--host", "sim:h100", "sim", "mig", "1g.10gb:0", "3g.40gb:4")

    def run(command: str) -> None:
        """Do what NVIDIA's program does by this command."""
        words = tuple(command.split())
        assert words[:4] == ("nvidia-smi", "mig", "-i", "0"), command
        with changing(StateFile("sim:h100")) as (state, _):
            (gpu,) = state.gpus
            here = {instance.gpu_instance_id: f"{instance.profile}:{instance.start}" for instance in gpu.mig}
            if words[4] in {"-dci", "-cci"}:
                # Each instance comes with its compute instance here.
                assert int(words[words.index("-gi") + 1]) in here
            elif words[4] == "-dgi":
                del here[int(words[6])]
            else:
                assert (words[4], words[6:]) in {("-cgi", ("-C",)), ("-cgi", ())}
                number, _, start = words[5].partition(":")
                name = next(profile.name for profile in model_of(gpu.model).profiles if profile.id == int(number))
                here[-1] = f"{name}:{start}"
            state.gpus = [place_instances(gpu, model_of(gpu.model), list(here.values()))]

    def places() -> list[tuple[str, int]]:
        return sorted((gpu.profile, gpu.start) for gpu in admin.describe("sim:h100").gpus[0].mig)

    plan = ("--host", "sim:h100", "-o", "json", "mig", "plan", "--exact", "1g.10gb", "2g.20gb")
    before, steps = places(), cli(*plan).json["data"]["steps"]
    gone = [step for step in steps if "-cgi" not in step["command"]]
    for step in gone:
        run(step["command"])
    assert places() != before
    for step in reversed(gone):
        run(step["undo"])
    assert places() == before
    steps = cli(*plan).json["data"]["steps"]
    for step in steps:
        run(step["command"])
    assert cli(*plan).json["data"]["steps"] == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan"], 2, "give either a WISH, or --memory, --sm or both"),
        (["plan", "3g.40gb", "--memory", "4G"], 2, "give either a WISH, or --memory, --sm or both"),
        (["plan", "nonsense"], 2, "nonsense"),
        (["plan", "9g.99gb"], 3, "9g.99gb"),
        (["fits", "7g.80gb*2"], 3, "7g.80gb"),
        (["profiles", "--model", "t4"], 3, "no MIG"),
        (["profiles", "--model", "h999"], 2, "h999"),
        (["status", "-g", "9"], 6, "9"),
    ],
)
def test_bad_input(cli: Cli, words: list[str], code: int, said: str) -> None:
    done = cli("--host", "sim:h100", "mig", *words)
    assert (done.code, done.out) == (code, "")
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert lines[1].startswith("hint: ")


def test_what_happens_inside_a_gpu_instance_is_told(cli: Cli) -> None:
    cli("--host", "sim:h100", "mig", "apply", "1c.3g.40gb*2")
    fits = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "1c.3g.40gb")
    assert fits.json["data"]["where"] == ["in 3g.40gb:4 on GPU 0"]
    cli("--host", "sim:h100", "mig", "apply", "1c.3g.40gb:0*3", "3g:4")
    fits = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "2c.3g.40gb:0")
    assert fits.json["data"]["would_go"] == ["2 compute instances of 3g.40gb:0 on GPU 0"]


def test_a_gpu_without_mig_says_so_and_a_lost_one_is_left_out(cli: Cli) -> None:
    assert "Tesla T4" in cli("--host", "sim:t4", "mig", "status").ends(3).err
    cli("--host", "sim:2xh100", "sim", "fault", "lost", "-g", "0")
    assert cli("mig", "fits", "3g", host="sim:2xh100", output="json").data["where"] == ["3g.40gb:4 on GPU 1"]


def test_status_draws_the_slices(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--host", "sim:h200", "sim", "mig", "3g.71gb", "1g.18gb:4"])
    admin.add_process("sim:h200", "0", mig="11")
    capsys.readouterr()
    assert main(["--host", "sim:h200", "mig", "status"]) == 0
    out = capsys.readouterr().out
    assert "|              3g.71gb              |1g.18gb*|   ·    |   ·    |   ·    |" in out
    assert "unusable: 1 compute and 0 memory slices" in out


@pytest.mark.parametrize("words", [("plan", "3g"), ("fits", "3g"), ("profiles",), ("status",)])
@pytest.mark.parametrize("gpu", ["0", "0,1"])
def test_a_lost_gpu_that_is_named_is_the_error(cli: Cli, words: tuple[str, ...], gpu: str) -> None:
    cli("--host", "sim:2xh100", "sim", "fault", "lost", "-g", "0")
    done = cli("--host", "sim:2xh100", "mig", *words, "-g", gpu)
    if words in {("status",), ("profiles",)} and gpu == "0,1":
        said = "error: GPU 0 does not answer: the GPU is lost: it fell off the bus"
        assert (done.code, done.err.splitlines()[0]) == (1, said)
    else:
        assert (done.code, done.err.splitlines()[0]) == (6, "error: GPU 0: the GPU is lost: it fell off the bus")


def test_marks_of_a_plan(cli: Cli) -> None:
    done = cli("--host", "sim:h100", "mig", "plan", "1g+me:0 1g.20gb:2")
    assert missing(done.out, "| +1g+me |", "    +1g.20gb    ") == []
    lines = cli("mig", "plan", "1g.18gb").ok().out.splitlines()
    after = next(number for number, line in enumerate(lines) if line.startswith("after"))
    assert lines[after + 1].strip() == "* in use, + new, ~ changed inside"


def test_an_instance_that_is_not_there_is_answered_with_those_that_are(cli: Cli) -> None:
    cli("--host", "sim:h100", "mig", "apply", "3g:4 1g:0")
    cli("--host", "sim:h100", "mig", "name", "train", "0/2")
    done = cli("--host", "sim:h100", "mig", "destroy", "1g.10gb")
    assert done.err.splitlines()[1].startswith("hint: instances: 0/7 (1g.10gb:0), 0/2 (train);")
    taken = cli("--host", "sim:h100", "mig", "name", "train", "0/7")
    assert taken.err.splitlines()[0] == "error: the name 'train' belongs to 3g.40gb:4 of GPU 0"


def test_who_holds_in_several_ways_is_named_once(cli: Cli) -> None:
    cli("--host", "sim:h100", "mig", "apply", "3g:4")
    cli("--host", "sim:h100", "sim", "add", "--mig", "2", "--holder", "--name", "nv-hostengine")
    first = cli("--host", "sim:h100", "mig", "destroy", "0/2").err.splitlines()[0]
    assert (first.count("nv-hostengine"), first.count("/dev/nvidia-caps/")) == (1, 2)


@pytest.mark.parametrize(("model", "wish"), [("h100", "1g+me 2g 3g"), ("rtx-pro-6000", "1g+me.all 1g-me 2g-me")])
def test_the_picture_of_a_plan_fits_80_columns(cli: Cli, model: str, wish: str) -> None:
    done = cli("mig", "plan", "--model", model, *wish.split())
    picture = [line for line in done.out.splitlines() if "|" in line]
    assert [line.split()[0] for line in picture] == ["before", "after"]
    assert max(map(len, picture)) <= 80
    assert all(word.partition("g")[2].lstrip(".0123456789gb") in picture[1] for word in wish.split())


def test_the_undo_of_a_change_gives_grants_again(cli: Cli) -> None:
    cli("--host", "sim:h100", "mig", "apply", "3g:4")
    cli("--host", "sim:h100", "mig", "name", "train", "0/2")
    cli("--host", "sim:h100", "mig", "grant", "train", "root")
    done = cli("--host", "sim:h100", "-o", "json", "mig", "apply", "1g:0", "-y")
    assert done.json["data"]["undo"].endswith("gpushare mig name train 3g.40gb:4 -g 0 && gpushare mig grant train root")


def test_equal_gpus_are_shown_once(cli: Cli) -> None:
    world = World.new("sim:8xh100")
    out = cli("mig", "status", host=world.spec).ok().out
    assert out.startswith("GPU 0-7  NVIDIA H100 80GB HBM3   MIG off\n")
    assert len(out.splitlines()) < 10
    uuids = [world.mig("3g.40gb", gpu=str(index))[0] for index in range(8)]
    short = cli("mig", "status", host=world.spec, output="table").ok().out
    assert short.startswith("GPU 0-7  NVIDIA")
    assert short.count("MIG-") == 0
    assert short.endswith("\n\nUUIDs: gpushare mig status -v\n")
    # A pipe, -v and -g have all UUIDs.
    assert all(uuid in cli("mig", "status", host=world.spec, output="plain").ok().out for uuid in uuids)
    assert all(uuid in cli("mig", "status", "-v", host=world.spec, output="table").ok().out for uuid in uuids)
    for gpus in ("3", "2,3"):
        shown = cli("mig", "status", "-g", gpus, host=world.spec, output="table").ok().out
        assert uuids[3] in shown
        assert "UUIDs:" not in shown
    world.add(uuids[2])
    busy = cli("mig", "status", host=world.spec, output="table").ok().out
    assert busy.startswith("GPU 0-1, 3-7  NVIDIA")
    assert f" 4194305 python3 ({user_name(os.geteuid())})\n" in busy.partition("\nGPU 2  NVIDIA")[2]
