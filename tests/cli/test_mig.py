"""``gpushare mig``: what is there, what fits, and the cheapest way to a wish. Nothing is ever changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare.cli import main
from gpushare.sim import admin
from tests.cli.conftest import Cli

DATA = Path(__file__).resolve().parents[1] / "data" / "h200-r580"


def captured_profiles() -> dict[str, tuple[int, int, int]]:
    """Return id, free and total by name, as nvidia-smi printed them on our H200."""
    rows = {}
    for line in (DATA / "mig-lgip.txt").read_text(encoding="utf-8").splitlines():
        words = line.replace("|", " ").split()
        if "MIG" in words:
            free, _, total = words[4].partition("/")
            rows[words[2]] = (int(words[3]), int(free), int(total))
    return rows


def test_profiles_are_those_of_our_h200(cli: Cli) -> None:
    found = cli("--host", "sim:h200", "-o", "json", "mig", "profiles").json["data"]["profiles"]
    assert {row["profile"]: (row["id"], row["free"], row["total"]) for row in found} == captured_profiles()


def test_profiles_of_a_gpu_that_is_not_here_tell_their_confidence(cli: Cli) -> None:
    done = cli("-o", "json", "mig", "profiles", "--model", "b300")
    assert done.code == 0
    assert {row["confidence"] for row in done.json["data"]["profiles"]} == {"documented"}
    assert {row["memory_bytes"] for row in done.json["data"]["profiles"]} == {None}


def test_a_plan_has_explicit_placements_and_changes_nothing(cli: Cli) -> None:
    done = cli("--host", "sim:h200", "-o", "json", "mig", "plan", "3g.71gb", "1g.18gb*3")
    assert [step["command"] for step in done.json["data"]["steps"]] == [
        "nvidia-smi mig -i 0 -cgi 9:4 -C",
        "nvidia-smi mig -i 0 -cgi 19:1 -C",
        "nvidia-smi mig -i 0 -cgi 19:2 -C",
        "nvidia-smi mig -i 0 -cgi 19:3 -C",
    ]
    assert "MIG is off on GPU 0" in done.err
    assert admin.describe("sim:h200")["gpus"][0]["mig"] == []


def test_what_is_there_stays_where_it_is(cli: Cli) -> None:
    cli("--host", "sim:h100", "sim", "mig", "3g.40gb", "1g.10gb:4")
    done = cli("--host", "sim:h100", "-o", "json", "mig", "plan", "2g.20gb")
    assert (done.code, done.json["errors"][0]["code"]) == (19, "no_room")
    fits = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "1g.10gb*2")
    assert (fits.code, fits.json["data"]["where"]) == (0, ["1g.10gb:5 on GPU 0", "1g.10gb:6 on GPU 0"])


def test_no_says_what_would_have_to_go(cli: Cli) -> None:
    cli("--host", "sim:h100", "sim", "mig", "3g.40gb:0", "3g.40gb:4")
    admin.add_process("sim:h100", "0", mig="1")
    done = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "4g.40gb")
    assert done.code == 7
    assert [(row["profile"], row["start"], row["busy"]) for row in done.json["data"]["would_go"]] == [
        ("3g.40gb", 0, True)
    ]


def test_an_exact_layout_keeps_what_is_busy(cli: Cli) -> None:
    cli("--host", "sim:h100", "sim", "mig", "1g.10gb:0", "3g.40gb:4")
    admin.add_process("sim:h100", "0", mig="7")
    done = cli("--host", "sim:h100", "-o", "json", "mig", "plan", "--exact", "1g.10gb", "2g.20gb")
    commands = [step["command"] for step in done.json["data"]["steps"]]
    assert commands[:2] == ["nvidia-smi mig -i 0 -dci -gi 2 -ci 0", "nvidia-smi mig -i 0 -dgi -gi 2"]
    assert not any("-gi 7" in command for command in commands)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan"], 2, "give a wish"),
        (["plan", "3g.40gb", "--memory", "4G"], 2, "give a wish"),
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


def test_a_lost_gpu_is_told_once(cli: Cli) -> None:
    cli("--host", "sim:2xh100", "sim", "fault", "lost", "-g", "1")
    done = cli("--host", "sim:2xh100", "mig", "status")
    assert done.code == 0
    assert done.err.startswith("note: GPU 1: the GPU is lost")


def test_fits_says_into_what_a_compute_instance_comes(cli: Cli) -> None:
    cli("--host", "sim:h100", "mig", "apply", "1c.3g.40gb*2")
    fits = cli("--host", "sim:h100", "-o", "json", "mig", "fits", "1c.3g.40gb")
    assert fits.json["data"]["where"] == ["in 3g.40gb:4 on GPU 0"]


def test_a_gpu_without_mig_says_so(cli: Cli) -> None:
    done = cli("--host", "sim:t4", "mig", "status")
    assert done.code == 3
    assert "Tesla T4" in done.err


def test_the_smallest_profile_that_serves(cli: Cli) -> None:
    done = cli("-o", "json", "mig", "fits", "--model", "h100", "--memory", "20G", "--sm", "30")
    assert done.json["data"]["where"] == ["3g.40gb:4 on GPU 0"]


def test_status_draws_the_slices(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--host", "sim:h200", "sim", "mig", "3g.71gb", "1g.18gb:4"])
    admin.add_process("sim:h200", "0", mig="11")
    capsys.readouterr()
    assert main(["--host", "sim:h200", "mig", "status"]) == 0
    out = capsys.readouterr().out
    assert "|              3g.71gb              |1g.18gb*|   ·    |   ·    |   ·    |" in out
    assert "lost: 1 compute and 0 memory slices" in out
