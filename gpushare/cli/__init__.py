"""The command line: one file per verb, and the one place where errors become text and exit codes."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

# Nearly all that a start makes stays to its end: looking for garbage in it, also at the exit, is a fifth of the start.
gc.set_threshold(50_000)
atexit.register(gc.freeze)

import typer  # noqa: E402

from gpushare.cli import common  # noqa: E402
from gpushare.errors import BadUsage, ExitCode, GpushareError, OperationFailed  # noqa: E402

# One file per verb, in the order of the help, with what the help says of it. Only the file of the verb that is asked for
# is loaded: the whole tree costs more than Typer itself, at every start.
VERBS: Final[Mapping[str, str]] = {
    "status": "Show GPUs, sharing, limits, clients, processes.",
    "run": "Run a program inside a share of a GPU.",
    "doctor": "Check the host; each finding has a remedy.",
    "timeslice": "Show and set the time-slice level.",
    "mps": "Start, limit, watch and stop MPS daemons.",
    "mig": "Show, plan and change MIG layouts exactly.",
    "advise": "Say which way of sharing fits, and what to type.",
    "compare": "Compare the ways of sharing; every cell has its source.",
    "bench": "Measure which way of sharing is best for a command.",
    "tune": "Find the cap of a job beside a production job.",
    "observe": "Record how GPUs and processes are used.",
    "savings": "Say what sharing fewer GPUs would save.",
    "apply": "Make the host what gpushare.yaml says.",
    "diff": "Say how the host differs from gpushare.yaml; exit 7 if it does.",
    "capture": "Write how the host is shared, as gpushare.yaml.",
    "export": "Write this host for Kubernetes, Slurm, Docker, systemd.",
    "metrics": "Serve metrics for Prometheus.",
    "explain": "Explain an error code or a log line.",
    "sim": "Simulated hosts, to try everything on.",
}
# Who writes to stdout before there is a result: Click's help, ours, the version.
_WRITERS: Final = frozenset({"echo", "put", "_version"})
_OPTIONS_WITH_VALUE: Final = frozenset({"--host", "-o", "--output"})


def build(verbs: Sequence[str] = tuple(VERBS), words: Sequence[str] = ()) -> typer.Typer:
    """Return the program with these verbs; all of them is the whole command tree. With none, all are only listed.

    Of a group, only the command that ``words`` name is built, if they name one: Typer reads the signatures of all.
    """
    program = typer.Typer(
        name="gpushare",
        cls=common.RootGroup,
        help="Share the GPUs of one host well: see who is on them, set a way of sharing up, prove it, take it down again.",
        epilog="On a machine without a GPU try: gpushare --host sim:h200 status",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=common.CONTEXT,
    )
    program.callback()(_root)
    for verb in verbs:
        import_module(f"gpushare.cli.{verb}").register(program)
    for group in program.registered_groups:
        group.typer_instance = _narrowed(group.typer_instance, words)
    for verb, short in VERBS.items() if not verbs else ():
        program.command(verb, short_help=short)(_root)
    return program


def _narrowed(group: typer.Typer | None, words: Sequence[str]) -> typer.Typer | None:
    asked = [one for one in getattr(group, "registered_commands", ()) if (one.name or "") in words]
    if group is None or len(asked) != 1 or "--help" in words or "-h" in words:
        return group
    narrow = copy.copy(group)
    narrow.registered_commands = asked
    return narrow


def _root() -> None:
    """Share the GPUs of one host well."""


def __getattr__(name: str) -> Any:
    """Return the whole tree as ``gpushare.cli.app``, for the man page and the completions."""
    if name == "app":
        return build()
    raise AttributeError(name)


def asked_verbs(words: Sequence[str]) -> Sequence[str]:
    """Return the verb that the words name, or none when it is none of ours; what stands behind "--" is not looked at."""
    before = iter(_before_dashes(words))
    for word in before:
        if word in _OPTIONS_WITH_VALUE:
            next(before, None)
        elif not word.startswith("-"):
            return (word,) if word in VERBS else ()
    return tuple(VERBS) if "--" in words else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; the one try/except of the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    common.reset()
    common.open_closed_streams()
    try:
        with common.ended_by_exception():
            code = _run(words)
        sys.stdout.flush()
    except (BrokenPipeError, common.ReaderGone):
        # The reader is gone (| head): nothing more to say.
        _drop_stdout()
        return 128 + 13
    except OSError as error:
        return _unwritten(error)
    return code


def _drop_stdout() -> None:
    """Let nothing more be said on stdout, also not by the interpreter's own flush at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_of_stdout(error: OSError) -> bool:
    """Return whether an error came from writing to stdout."""
    try:
        # What could not leave is still there, and fails again.
        sys.stdout.flush()
    except OSError:
        return True
    # With PYTHONUNBUFFERED nothing is kept; then the function that failed tells.
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_code.co_name in _WRITERS


def _unwritten(error: OSError, answer: Any = None) -> int:
    """Say on stderr that the result could not be written, and what the command itself came to."""
    from gpushare.show.render import write_error

    hint = "the disk may be full, or what stdout goes to be closed"
    if common.settings.changes and not common.settings.dry_run and answer is not None and not answer.errors:
        hint = "the command itself was carried out; see: gpushare status"
    said = OperationFailed(f"cannot write the result: {error.strerror or error}", hint, code="not_written")
    with contextlib.suppress(OSError):
        for one in (*getattr(answer, "errors", ()), said):
            write_error(one, sys.stderr)
    _drop_stdout()
    return int(getattr(answer, "exit_code", 0)) or int(ExitCode.FAILED)


def _run(words: list[str]) -> int:
    try:
        verbs = tuple(VERBS) if "_GPUSHARE_COMPLETE" in os.environ else asked_verbs(words)
        answer = build(verbs, _before_dashes(words))(args=words, prog_name="gpushare", standalone_mode=False)
        return _written(answer)
    except GpushareError as error:
        return _failed(words, error)
    except KeyboardInterrupt as error:
        return _failed(words, common.interrupted(error))
    except (BrokenPipeError, common.ReaderGone):
        raise
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback without --debug
        return _unexpected(words, error)


def _written(answer: Any) -> int:
    """Write a command's result; a plain number is an exit code (of `gpushare run`, of ``--help``)."""
    if isinstance(answer, int):
        return answer
    if answer is None:
        return 0
    from gpushare.show.render import write

    try:
        write(answer, common.settings.output, stdout=sys.stdout, stderr=sys.stderr, quiet=common.settings.quiet)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _unwritten(error, answer)
    return int(answer.exit_code)


def _failed(words: list[str], error: GpushareError) -> int:
    if common.settings.debug or "--debug" in _before_dashes(words):
        import traceback

        traceback.print_exception(error)
    from gpushare.show.result import failure

    # The error may come before -o was understood.
    common.settings.output_format = _asked_output(words)
    return _written(failure(_command_of(words), error))


def _unexpected(words: list[str], error: Exception) -> int:
    if hasattr(error, "format_message"):
        return _usage(words, error)
    if type(error).__name__ in {"Abort", "Exit"}:
        return int(getattr(error, "exit_code", ExitCode.FAILED))
    if isinstance(error, OSError) and _is_of_stdout(error):
        return _unwritten(error)
    if common.settings.debug or "--debug" in _before_dashes(words):
        raise error
    what = f"{type(error).__name__}: {error}".replace("\n", " ")
    bug = OperationFailed(
        f"unexpected {what}", "this is a bug of gpushare; run it again with --debug and report it", code="bug"
    )
    return _failed(words, bug)


def _usage(words: list[str], error: Any) -> int:
    """Return the exit code of an error of the parser, said in our two lines."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(context.get_help() + "\n")
        return int(ExitCode.USAGE)
    # An option without its value comes without the command that it stands behind.
    path = max(getattr(context, "command_path", ""), " ".join(["gpushare", *_path_of(words)]), key=len)
    message = _in_our_words(" ".join(str(error.format_message()).split()).rstrip("."))
    return _failed(words, BadUsage(message[:1].lower() + message[1:], f"see: {path} --help"))


def _in_our_words(message: str) -> str:
    """Return a message of the parser: an option that is meant as a command is, a number by no name of Python's."""
    import re

    options = re.fullmatch(r"(.*) \(Possible options: (.*)\)", message)
    if options is not None:
        meant = " or ".join(f"'{option}'" for option in options[2].split(", "))
        message = f"{options[1]}. Did you mean {meant}?"
    return re.sub(r"is not a valid (int|integer)( range)?$", "is not a whole number", message)


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _command_of(words: Sequence[str]) -> str:
    """Return the command that the words name, for the envelope: ``mps start``."""
    return " ".join(_path_of(words)) or "gpushare"


def _path_of(words: Sequence[str]) -> list[str]:
    """Return the command that the words name, as far as the tree knows them."""
    # By name alone: Typer would read the signature of every command for it.
    group: typer.Typer | None = build(asked_verbs(words))
    path: list[str] = []
    for word in _before_dashes(words):
        groups = {one.name: one.typer_instance for one in group.registered_groups} if group else {}
        if word in groups:
            path.append(word)
            group = groups[word]
        elif group and any(one.name == word for one in group.registered_commands):
            path.append(word)
            group = None
    return path


def _asked_output(words: Sequence[str]) -> Any:
    """Return the last output format among the words, if it is one."""
    from gpushare.show.result import OutputFormat

    asked = common.settings.output
    before = list(_before_dashes(words))
    for position, word in enumerate(before):
        text = None
        if word in {"-o", "--output"} and position + 1 < len(before):
            text = before[position + 1]
        elif word.startswith("--output="):
            text = word.partition("=")[2]
        elif word.startswith("-o") and not word.startswith("--"):
            text = word[2:]
        if text and text.lower() in {form.value for form in OutputFormat}:
            asked = OutputFormat(text.lower())
    return asked
