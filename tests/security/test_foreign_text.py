"""Text that others choose (names, paths) is shown harmlessly, and quoted where it is to be copied; bad input costs little."""

from __future__ import annotations

import csv
import io
import shlex
from pathlib import Path

import pytest

from gpushare.sim import admin
from tests.cli.drive import World
from tests.security.conftest import gpushare

EVIL = "\x1b]0;owned\x07\x1b[31m"
SHELL = "a;touch pwned;$(touch pwned)`touch pwned`'"


# Keys of what is told, not typed.
TOLD = {"message", "error", "what", "pipe_directory", "log_directory", "environment"}


def strings(value: object) -> list[str]:
    """Return all texts of a document that may be commands."""
    if isinstance(value, dict):
        return [text for key, one in value.items() if key not in TOLD for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


COMMANDS = (
    ("status",),
    ("status", "-v"),
    ("mps", "status"),
    ("mps", "start", "-g", "0"),
    ("mps", "stop", "-g", "0"),
    ("mps", "set", "-g", "0", "--threads", "50"),
    ("run", "-g", "0", "--", "true"),
    ("doctor",),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_pipe_directory_is_quoted_in_what_is_to_be_copied(words: tuple[str, ...], sticky: Path) -> None:
    """Whoever copies a hint into a shell runs what gpushare meant, and nothing else."""
    world = World()
    world.host.nvml.identities()
    place = sticky / SHELL
    place.mkdir()
    world.foreign_daemon(place, uuid=world.uuid())
    answer = gpushare(*words, output="json") if words[0] != "run" else gpushare(*words)
    texts = strings(answer.json) if words[0] != "run" else answer.lines("hint")
    for text in texts:
        hint = text.removeprefix("hint: ")
        for marker in ("gpushare ", "export ", "fuser ", "ls ", "sudo ", "echo "):
            command = hint.find(marker)
            if command < 0 or "touch" not in hint[command:]:
                continue
            quoted = hint[command:].replace(shlex.quote(f"{place}/p"), "").replace(shlex.quote(str(place)), "")
            assert "touch" not in quoted, (words, hint)


@pytest.mark.parametrize("output", ["table", "plain", "csv"])
def test_no_escape_sequence_of_a_process_reaches_the_terminal(output: str) -> None:
    world = World()
    world.host.nvml.identities()
    admin.add_process(world.spec, "0", name=f"evil{EVIL}\nGPU 9 fine\r")
    for words in (("status",), ("status", "-v"), ("doctor",)):
        answer = gpushare(*words, output=output)
        assert answer.code in {0, 1, 7}, answer
        # CSV ends its lines by both.
        said = (answer.out + answer.err).replace("\r\n", "\n")
        for bad in ("\x1b", "\x07", "\r"):
            assert bad not in said, (words, bad)
        assert not any(line.startswith("GPU 9 fine") for line in answer.out.splitlines())


@pytest.mark.parametrize("first", list("=+-@"))
def test_no_cell_is_a_formula(first: str) -> None:
    """A spreadsheet that opens the file must not compute what a process is called."""
    world = World()
    world.host.nvml.identities()
    name = f'{first}cmd|"/c calc"!A1'
    admin.add_process(world.spec, "0", name=name)
    answer = gpushare("status", output="csv").ok()
    cells = [cell for row in csv.reader(io.StringIO(answer.out)) for cell in row]
    assert any("calc" in cell for cell in cells), answer.out
    assert [cell for cell in cells if "calc" in cell and cell[0] in "=+-@"] == []


DIGITS = "9" * 5000
BAD = {
    "gpu": ("status", "-g", DIGITS),
    "drain": ("mps", "stop", "-g", "0", "--drain", DIGITS),
    "count": ("mig", "plan", "1g.10gb*" + DIGITS),
    "place": ("mig", "plan", "1g.10gb:" + DIGITS),
    "sum": ("mig", "plan", *["1c.7g*1024"] * 16),
    "slices": ("mig", "plan", f"{DIGITS}g"),
    "uuid": ("status", "-g", "GPU-" + "x" * 15_000),
    "name": ("mig", "name", "n" * 15_000, "1g.10gb:0", "-y"),
    "host": ("--host", "sim:" + "h" * 15_000, "status"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_soon_and_shortly(name: str) -> None:
    host = "sim:h100" if BAD[name][0] == "mig" else "sim:h200"
    answer = gpushare(*BAD[name], host=host, seconds=10)
    assert answer.code in {2, 3, 6, 7, 19}, answer.err[:500]
    assert len(answer.err) < 1500, answer.err[:500]


FILES = {
    "timestamp": "version: 1\ngpus: !!timestamp 2001001-9\n",
    "digits": f"version: {DIGITS}\ngpus: []\n",
    "hexadecimal": f"version: 1\ngpus:\n- match: {{index: {DIGITS}}}\n  timeslice: long\n",
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
    "deep": "[" * 20_000,
    "wish": "version: 1\ngpus:\n- match: all\n  mig: [" + ", ".join(["1c.7g*1024"] * 16) + "]\n",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("verb", ["apply", "diff"])
def test_a_bad_file_is_refused_soon_and_shortly(verb: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "gpushare.yaml"
    path.write_text(FILES[name])
    words = [verb, "-f", str(path), *(["-y"] if verb == "apply" else [])]
    answer = gpushare(*words, host="sim:h100", seconds=10)
    assert answer.code != 0
    assert len(answer.lines("error")) == 1
    assert len(answer.err) < 1500, answer.err[:500]
