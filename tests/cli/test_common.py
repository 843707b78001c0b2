"""What holds for every command: common options, usage errors, help, version, pipes, tracebacks."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from gpushare import __version__
from gpushare.base.model import TimeSlice
from gpushare.base.units import GIB
from gpushare.cli import root
from gpushare.cli.help import COMMON, EXAMPLES, GROUPS
from gpushare.sim import admin
from tests.cli.drive import ASKING, H200, Cli, Real, Refused, World, environment


def paths(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in command.children().items() if hasattr(command, "children") else ():
        yield from paths(inner, (*words, name))


COMMANDS = list(paths(root()))
LEAVES = [words for words in COMMANDS if words and words not in {("mps",), ("sim",), ("timeslice",)}]


def test_the_tree_is_built_once() -> None:
    """Typer reads the signature of a command when it is built: each time would cost every run of a process."""
    assert root() is root()
    assert root().get_command(None, "mig") is root().get_command(None, "mig")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command(cli: Cli, words: tuple[str, ...]) -> None:
    answer = cli(*words, "-h", host=None).ok()
    assert answer.out.lstrip().startswith(f"Usage: {' '.join(['gpushare', *words])}")
    assert answer.err == ""
    common = ("--host SPEC", "-o, --output", "-q, --quiet", "-v, --verbose", "--debug  ")
    assert [option in answer.out for option in common] == [not words] * len(common)
    assert ("\nCommon options: --host -o -q -v --debug (gpushare --help)\n" in answer.out) == bool(words)
    changes = "-n, --dry-run" in answer.out
    assert changes == (words in CHANGING)
    # It is accepted by every command that changes something, and shown where something can be asked.
    assert ("-y, --yes" in answer.out) == (words in {*ASKING, ("advise",)})


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_a_command_with_more_than_two_options_has_examples_that_parse(words: tuple[str, ...]) -> None:
    command = command_of(words)
    own = [one for one in command.params if one.param_type_name == "option" and COMMON.isdisjoint(one.opts)]
    examples = EXAMPLES.get(" ".join(words), ())
    plain = [one for one in own if not {"--dry-run", "--yes"} & set(one.opts) and not one.hidden]
    assert examples or len(plain) <= 2 or hasattr(command, "children")
    for _, example in examples:
        typed = shlex.split(
            example.removeprefix('eval "$(gpushare ').removesuffix(')"').split(" > ")[0].split(" | ")[0]
        )
        path = typed[typed.index(words[0]) :]
        assert tuple(path[: len(words)]) == words
        command.make_context("", path[len(words) :])


def command_of(words: Iterable[str]) -> Any:
    command = root()
    for word in words:
        command = command.get_command(None, word)
    return command


def test_every_group_of_options_names_options_that_are() -> None:
    for path, groups in GROUPS.items():
        known = {name for one in command_of(path.split()).params for name in one.opts}
        named = [name.removeprefix("+") for names in groups.values() for name in names.split()]
        assert [name for name in named if f"--{name}" not in known] == []


CHANGING = [
    (verb,) for verb in ("run", "farm", "pause", "resume", "stop", "move", "reserve", "apply", "advise", "bench")
]
CHANGING += [("timeslice", verb) for verb in ("set", "reset", "keep")]
CHANGING += [("sim", "reset"), ("swap", "out"), ("swap", "in")]
CHANGING += [("mps", verb) for verb in ("start", "stop", "set")]
CHANGING += [
    ("mig", verb) for verb in ("create", "destroy", "apply", "enable", "disable", "recover", "grant", "revoke", "name")
]


@pytest.mark.parametrize("words", [
    "--host sim:a30 -o json status", "status --host sim:a30 -o json", "--host=sim:a30 status --output=json",
    "-ojson status --host sim:a30",
    # The last one counts.
    "--host sim:h200 -o csv status --host sim:a30 -o JSON",
    "--host sim:h200 --host sim:a30 -o plain --output json status",
    # Between a group and its command.
    "--host sim:a30 timeslice -o json show",
])  # fmt: skip
def test_common_options_before_and_after(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("GPUSHARE_HOST", "sim:l4")
    answer = cli(*words.split(), host=None).ok()
    assert set(answer.json["command"].split()) <= set(words.split())
    assert answer.data["gpus"][0]["name"] == "NVIDIA A30"
    assert cli("status", host=None, output="json").ok().data["host"] == "sim:l4"


@pytest.mark.parametrize(
    "words", ["-qo json doctor", "-qo json status", "-qo json capture", "-vo json compare", "-vojson mig status"]
)
def test_short_options_in_one_word(cli: Cli, world: World, words: str) -> None:
    answer = cli(*words.split())
    assert answer.code in {0, 1}
    assert answer.json["command"] in words
    assert answer.data
    # So is the form of an error.
    world.fault("no-driver")
    errors = [error["code"] for error in cli(*words.split()).json["errors"]]
    assert errors == ([] if answer.json["command"] in {"doctor", "compare"} else ["driver_not_loaded"])


def test_a_command_that_is_printed_is_for_the_same_host(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("timeslice", "set", "long", "-g", "0", "-y")
    option = ("--host", "sim:2xt4,a30")
    undo = "gpushare --host sim:2xt4,a30 timeslice reset -g 0"
    assert f"; undo: {undo}\n" in cli(*words, *option).ok().out
    cli(*undo.split()[1:], "-y").ok()
    assert f"note: undo: {undo}\n" in cli(*words, "-n", *option).ok().err
    assert cli(*words, *option, output="json").ok().data["undo"] == "gpushare timeslice reset -g 0"
    hint = "see all, and those that have ended: gpushare --host sim:2xt4,a30 jobs -v"
    assert cli("stop", "nobody", *option).lines("hint") == [f"hint: {hint}"]
    cli("sim", "fault", "xid", "79", "-g", "0", *option).ok()
    assert "remedy: gpushare --host sim:2xt4,a30 explain 'Xid 79'" in cli("doctor", *option, output="table").ok().out
    # The user's shell still has the variable.
    monkeypatch.setenv("GPUSHARE_HOST", "sim:2xt4,a30")
    cli(*undo.split()[1:], "-y").ok()
    assert "; undo: gpushare timeslice reset -g 0\n" in cli(*words, *option).ok().out


@pytest.mark.parametrize(("words", "command"), [
    ("resume", "pause list"), ("apply nosuch.yaml", "capture"), ("sim end 5", "sim show"),
    ("logs -f a -o json", "logs a"), ("mps start --bogus", "mps start --help"), ("mps status", "mps start"),
])  # fmt: skip
def test_a_hint_is_for_the_same_host_before_the_host_is_read(cli: Cli, words: str, command: str) -> None:
    answer = cli("--host", "sim:t4", *words.split(), host=None)
    assert f"gpushare --host sim:t4 {command}" in answer.out + answer.err


@pytest.mark.parametrize("words", ["-o xml status", "status -o xml", "status --output="])
def test_unknown_output(cli: Cli, words: str) -> None:
    answer = cli(*words.split())
    assert (answer.code, answer.out) == (2, "")
    assert "is not an output format" in answer.lines("error")[0]
    assert answer.lines("hint") == ["hint: give -o table, plain, json, yaml or csv"]
    # After a known one it is said in that form.
    cli("-o", "json", "status", "-o", "xml").ends(2, "bad_output")


def test_unknown_host(cli: Cli) -> None:
    for spec in ("sim:nonsense", "nohost"):
        answer = cli("status", "--host", spec, output="json", host=None)
        assert (answer.code, len(answer.json["errors"])) == (2, 1)
    # As if it was not given: this machine, which has NVML or has not.
    assert cli("status", "--host", "", output="json", host=None).code in {0, 9, 12, 4}
    # The hint has no host that does not exist.
    assert cli("status", host="sim:nosuch").lines("hint") == ["hint: see them all: gpushare sim list --models"]


@pytest.mark.parametrize(("words", "command"), [
    ("status --nonsense", "status"), ("mps start --treads 5", "mps start"), ("timeslice set", "timeslice set"),
    ("stop", "stop"), ("logs train --lines -1", "logs"), ("jobs train", "jobs"), ("status -g", "status"),
    ("status more", "status"), ("mps logs --lines 0", "mps logs"), ("sim add --sm 101", "sim add"),
])  # fmt: skip
def test_wrong_usage(refused: Refused, cli: Cli, words: str, command: str) -> None:
    said = refused(*words.split(), code="usage", exit_code=2)
    assert f"see: gpushare {command} --help" in said
    assert cli(*words.split(), output="json").json["command"] == command


@pytest.mark.parametrize(("words", "meant"), [
    ("stats", "status"), ("mps strat", "start"), ("timeslce show", "timeslice"), ("list", "status"), ("ps", "jobs"),
    ("queue", "jobs"), ("kill 0", "stop"), ("delete 0", "mig destroy"), ("kubernetes", "export k8s"),
    ("export kubernetes", "k8s"), ("mig delete", "destroy"), ("status --json", "-o json"), ("--json status", "-o json"),
    ("status --wach 1", "--watch"), ("mps start --mem 4G", "--memory"), ("mps start --sm 50", "--threads"),
    ("mps start --percent=50", "--threads"), ("mps start --limit 4G", "--threads' or '--memory"),
    ("advise --sm 50", "--sms"),
    # What nothing is like gets no suggestion.
    ("frobnicate", None), ("status --yen", None), ("mps start --yes-please", None), ("mps stop --hell", None),
    ("status --debut", None),
])  # fmt: skip
def test_an_unknown_word_says_what_was_meant(refused: Refused, words: str, meant: str | None) -> None:
    said = refused(*words.split(), code="usage", exit_code=2).lower()
    assert f"did you mean '{meant}'?" in said if meant else "did you mean" not in said


def test_every_suggested_command_is_one() -> None:
    from gpushare.cli.suggest import _COMMANDS

    for group, words in _COMMANDS.items():
        for meant in words.values():
            command_of(word for word in f"{group} {meant}".split() if not word.startswith("-"))


@pytest.mark.parametrize("words", [(), ("mps",), ("timeslice",), ("sim",)])
def test_no_arguments_show_the_help(cli: Cli, words: tuple[str, ...]) -> None:
    answer = cli(*words, host=None).ends(2)
    assert "Usage: gpushare" in answer.out
    assert answer.err == ""


def test_version(cli: Cli) -> None:
    # Before anything else is looked at.
    for more in ((), ("nonsense",)):
        assert cli("--version", *more, host=None).ok().out == f"gpushare {__version__}\n"


def test_quiet_drops_notes_and_keeps_errors(cli: Cli) -> None:
    assert cli("timeslice", "set", "short", "-n").lines("note")
    assert cli("-q", "timeslice", "set", "short", "-n").ok().err == ""
    assert cli("timeslice", "set", "short", "-n", "--quiet").ok().err == ""
    assert cli("-q", "timeslice", "set", "nonsense").lines("error")


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "plain"])
def test_a_change_is_one_line_with_its_undo_and_none_with_quiet(cli: Cli, quiet: bool) -> None:
    cli("status").ok()
    pid = str(admin.add_process(H200, memory_bytes=2 * GIB))
    changes = (
        (("pause", pid), f"undo: gpushare resume {pid}"),
        (("resume", pid), f"undo: gpushare pause {pid}"),
        (("resume", "--all"), "no job is paused"),
        (("swap", "out", pid), f"undo: gpushare swap in {pid}"),
        (("swap", "in", pid), f"undo: gpushare swap out {pid}"),
        (("stop", pid), "is gone after"),
        (("timeslice", "set", "short"), "undo: gpushare timeslice reset -g 0"),
        (("timeslice", "reset"), "undo: gpushare timeslice set short -g 0"),
        (("timeslice", "reset"), "nothing to do: the host is as requested"),
        (("mps", "start", "--threads", "30"), "MPS on GPU 0: threads 30 % per client; undo: gpushare mps stop -g 0"),
        (
            ("mps", "set", "--memory", "8G"),
            "MPS on GPU 0: threads 30 %, memory 8.0 GiB per client; undo: gpushare mps set",
        ),
        (("mps", "stop"), "undo: gpushare mps start -g 0 --threads 30 --memory 8G"),
        (("mig", "enable"), "GPU 0: MIG is on; undo: gpushare mig disable -g 0"),
        (("mig", "create", "1g.18gb", "--name", "train"), "undo: gpushare mig destroy train -y"),
        (("mig", "grant", "train", "nobody"), "train is granted to nobody only; undo: gpushare mig revoke train"),
        (("mig", "revoke", "train"), "train has no grants; undo: gpushare mig grant train nobody"),
        (("mig", "name", "--forget", "train"), "has no name; undo: gpushare mig name train 1g.18gb:"),
        (("mig", "name", "train", "0/13"), "is named 'train'; undo: gpushare mig name --forget train"),
        (("mig", "destroy", "train"), "on GPU 0 is gone; undo: gpushare mig "),
        (("mig", "disable"), "GPU 0: MIG is off; undo: gpushare mig enable -g 0"),
        (("mig", "recover"), "nothing to do: no change was interrupted"),
        (("sim", "reset"), f"{H200}: reset"),
    )
    for words, line in changes:
        answer = cli(*words, *(["-q"] if quiet else [])).ok()
        if quiet:
            assert (answer.out, answer.err) == ("", ""), words
        else:
            (said,) = answer.out.splitlines()
            assert line in said, (words, said)


def test_verbose_says_each_step_and_debug_the_traceback(cli: Cli) -> None:
    answer = cli("timeslice", "set", "short", "-v").ok()
    assert "set the time-slice of GPU 0 to short\n  nvidia-smi compute-policy" in answer.err
    for words in ("--debug timeslice set x", "timeslice set x --debug"):
        answer = cli(*words.split())
        assert (answer.code, "Traceback" in answer.err, len(answer.lines("error"))) == (2, True, 1)


@pytest.mark.parametrize(
    ("error", "exit_code", "code"), [(RuntimeError("some\nthing"), 1, "bug"), (KeyboardInterrupt(), 130, "interrupted")]
)
def test_a_bug_and_an_interrupt_are_said_in_two_lines(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, code: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gpushare.snapshot.Observer.read", broken)
    answer = cli("status", output="json")
    assert (answer.code, answer.error["code"], "Traceback" in answer.err) == (exit_code, code, False)
    if code == "bug":
        assert answer.lines("error") == ["error: unexpected RuntimeError: some thing"]
        with pytest.raises(RuntimeError, match="some"):
            cli("--debug", "status")


def test_output_of_an_error_is_the_asked_one(cli: Cli) -> None:
    assert "errors:" in cli("timeslice", "set", "x", output="yaml").out
    assert cli("timeslice", "set", "x", output="csv").out == ""


def test_what_stands_behind_dashes_is_no_option_of_ours(cli: Cli) -> None:
    answer = cli("run", "--", "no-such-program", "-o", "json", "--debug")
    assert (answer.code, answer.out) == (127, "")
    assert "Traceback" not in answer.err


def test_broken_pipe(real: Real) -> None:
    started = real("sim", "list", "--models", "-o", "json", stdout=subprocess.PIPE)
    assert started.process.stdout is not None
    started.process.stdout.close()
    _, err = started.process.communicate(timeout=120)
    assert started.process.returncode == 128 + 13
    assert err == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("words", "hint"), [
    (("status", "-o", "json"), "the disk may be full"), (("status", "--help"), "the disk may be full"),
    (("timeslice", "set", "short", "-o", "json"), "the command itself succeeded"),
    (("timeslice", "set", "short", "-n"), "the disk may be full"),
])  # fmt: skip
def test_a_result_that_cannot_be_written(
    real: Real, world: World, words: tuple[str, ...], hint: str, unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:
        answer = real(*words, stdout=full, env={"PYTHONUNBUFFERED": unbuffered}).result()
    assert answer.code == 1
    assert answer.lines("error") == ["error: cannot write the result: No space left on device"]
    assert answer.err.splitlines()[-1].startswith(f"hint: {hint}")
    assert ("succeeded" in hint) == (world.host.policy.read()[0] is TimeSlice.SHORT)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(closed: str) -> None:
    command = f'exec "$0" -m gpushare --host sim:h200 status {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], check=False, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_loads_no_verb() -> None:
    code = "import sys; from gpushare.cli import main; main(['--help']); print([m for m in sys.modules if m.startswith('gpushare.cli.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("['gpushare.cli.options', 'gpushare.cli.help']")


def test_the_short_option_for_help_survives_a_look_at_the_options_from_elsewhere(cli: Cli) -> None:
    """A completion looks at a command's options in a context of its own, and Typer keeps the first help option."""
    import typer

    command = root().get_command(None, "doctor")
    names = [name for one in command.get_params(typer.Context(command)) for name in one.opts]
    assert {"-h", "--help"} <= set(names)


def test_the_help_of_a_command_is_one_screen(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns 45 lines; what is rare is behind --help-all. The program itself lists all commands."""
    monkeypatch.setenv("COLUMNS", "80")

    def lengths(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for name, command in group.children().items():
            words = (*path, name)
            yield " ".join(words), len(cli(*words, "--help", host=None).ok().out.splitlines())
            yield from lengths(command, words) if hasattr(command, "children") else ()

    assert {path: lines for path, lines in lengths(root(), ()) if lines > 45} == {}


def test_the_gpu_of_the_hint_is_of_those_named(refused: Refused) -> None:
    text = refused("export", "docker", "-g", "2,3", code="one_gpu", exit_code=2, host="sim:4xt4")
    assert "hint: give one: -g 2" in text
