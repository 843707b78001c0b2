"""The command line: one file per verb, and the one place where errors become text and exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

# Nearly all that a start makes stays to its end: looking for garbage in it, also at the exit, is a fifth of the start.
gc.set_threshold(50_000)
atexit.register(gc.freeze)

import typer  # noqa: E402

from gpushare.cli import common  # noqa: E402
from gpushare.errors import BadUsage, ExitCode, GpushareError, OperationFailed  # noqa: E402

# One file per verb, in the order of the help. Only the file of the verb that is asked for is loaded: the
# whole tree costs as much as Typer itself, at every start.
VERBS: Final = ("status", "run", "doctor", "timeslice", "mps", "mig", "sim")
_OPTIONS_WITH_VALUE: Final = frozenset({"--host", "-o", "--output"})


def build(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """Return the program with these verbs; all of them is the whole command tree."""
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
    return program


def _root() -> None:
    """Share the GPUs of one host well."""


def __getattr__(name: str) -> Any:
    """Return the whole tree as ``gpushare.cli.app``, for the man page and the completions."""
    if name == "app":
        return build()
    raise AttributeError(name)


def asked_verbs(words: Sequence[str]) -> Sequence[str]:
    """Return the verb that the words name, or all of them when it is none of ours."""
    before = iter(_before_dashes(words))
    for word in before:
        if word in _OPTIONS_WITH_VALUE:
            next(before, None)
        elif not word.startswith("-"):
            return (word,) if word in VERBS else VERBS
    return () if "--version" in _before_dashes(words) else VERBS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; the one try/except of the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    common.reset()
    try:
        with common.ended_by_exception():
            code = _run(words)
        sys.stdout.flush()
    except (BrokenPipeError, common.ReaderGone):
        # The reader is gone (| head): nothing more to say, also not at the interpreter's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return code


def _run(words: list[str]) -> int:
    try:
        verbs = VERBS if "_GPUSHARE_COMPLETE" in os.environ else asked_verbs(words)
        answer = build(verbs)(args=words, prog_name="gpushare", standalone_mode=False)
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

    write(answer, common.settings.output, stdout=sys.stdout, stderr=sys.stderr, quiet=common.settings.quiet)
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
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    return _failed(words, BadUsage(message[:1].lower() + message[1:], f"see: {path} --help"))


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _command_of(words: Sequence[str]) -> str:
    """Return the command that the words name, for the envelope: ``mps start``."""
    return " ".join(_path_of(words)) or "gpushare"


def _path_of(words: Sequence[str]) -> list[str]:
    """Return the command that the words name, as far as the tree knows them."""
    command: Any = typer.main.get_command(build(asked_verbs(words)))
    path: list[str] = []
    for word in _before_dashes(words):
        found = getattr(command, "commands", {}).get(word)
        if found is not None:
            path.append(word)
            command = found
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
