"""The command line: one file per verb, and the one place where errors become text and exit codes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TextIO

# Nearly all objects of a start live to its end: collecting garbage, even at the exit, would be a fifth of its time.
gc.set_threshold(50_000)
atexit.register(gc.freeze)

from gpushare.base.errors import BadUsage, ExitCode, GpushareError, OperationFailed  # noqa: E402
from gpushare.cli import options as common  # noqa: E402
from gpushare.show.text import NotWritten, put  # noqa: E402
from gpushare.signals import ended_by_exception  # noqa: E402

# One file per verb, in the groups and the order of the help, with its line there. Only the file of the requested verb is
# loaded: the whole tree costs more than Typer itself at every start.
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Look": {
        "status": "Show GPUs, how they are shared, limits and processes.",
        "top": "Watch GPUs and jobs on one screen, and act on them.",
        "jobs": "List jobs: running, waiting, paused, out, ended.",
        "doctor": "Check the host; each finding has a remedy.",
        "explain": "Explain an error code or a log line.",
        "observe": "Record how GPUs and processes are used.",
        "metrics": "Serve metrics for Prometheus.",
        "schema": "Print the JSON Schema of an answer.",
    },
    "Share": {
        "run": "Run a program inside a share of a GPU.",
        "farm": "Run many copies of a program, as many at a time as fit.",
        "stop": "End jobs in the way that is safe for their neighbours.",
        "logs": "Show the output of a job that runs in the background.",
        "mps": "Start, limit, watch and stop MPS daemons.",
        "mig": "Show, plan and change MIG layouts.",
        "timeslice": "Show and set time-slices, per process or per GPU.",
        "pause": "Take a job off the GPU at once; list paused jobs.",
        "resume": "Put paused jobs back on the GPU.",
        "swap": "Move a job out of the GPU into host memory, and back.",
        "move": "Move a running job to another GPU of the same model.",
        "reserve": "Reserve a GPU for some hours; list the leases.",
    },
    "Decide": {
        "advise": "Recommend a way of sharing, with its commands.",
        "compare": "Compare the ways of sharing; every cell has its source.",
        "bench": "Measure which way of sharing is best for a command.",
        "tune": "Find the time-slice or cap of a job next to a production job.",
        "savings": "Estimate what sharing fewer GPUs would save.",
    },
    "Whole host": {
        "apply": "Set up the host as gpushare.yaml says.",
        "diff": "Show how the host differs from gpushare.yaml; exit 7 if it does.",
        "capture": "Write the sharing of the host as gpushare.yaml.",
        "export": "Write this host for Kubernetes, Slurm, Docker, systemd.",
    },
    "Try": {
        "sim": "Simulated hosts to try everything on.",
    },
}
VERBS: Final[Mapping[str, str]] = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}


@functools.cache
def root() -> common.RootGroup:
    """Return the program. The file of a verb is loaded on first use."""
    return common.RootGroup(
        name="gpushare",
        listed=GROUPS,
        help="Share the GPUs of one host: see who uses them, set up a way of sharing, check that it works, and undo it.",
        epilog="On a machine without a GPU, try: gpushare --host sim:h200 status",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings=common.CONTEXT,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code. All errors are handled here."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    common.reset()
    common.settings.words, common.settings.verbs = tuple(words), VERBS
    common.settings.set_printed_host()
    common.open_closed_streams()
    common.let_streams_outlive_terminal()
    common.keep_exit_codes_of_children()
    try:
        with ended_by_exception():
            code = _run(words)
        sys.stdout.flush()
    except (BrokenPipeError, common.ReaderGone):
        # The reader is gone (| head): the exit code is that of SIGPIPE (13).
        _discard_output(sys.stdout)
        return 128 + 13
    except OSError as error:
        # From the flush, or from our own messages.
        return _report_not_written(error)
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _discard_output(sys.stderr)
    return code


def _discard_output(stream: TextIO) -> None:
    """Discard further output to a stream, so that the interpreter's flush at exit cannot fail and change the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report_not_written(error: OSError, answer: Any = None) -> int:
    """Report on stderr that the result (``answer``, if there was one) could not be written; return the exit code."""
    from gpushare.show.render import exit_code_of, write_error

    hint = "the disk may be full, or the target of stdout closed"
    if common.settings.changes and not common.settings.dry_run and answer is not None and not answer.errors:
        hint = "the command itself succeeded; see: gpushare status"
    unwritten = OperationFailed(f"cannot write the result: {error.strerror or error}", hint, code="not_written")
    with contextlib.suppress(OSError):
        for each in (*getattr(answer, "errors", ()), unwritten):
            write_error(each, sys.stderr)
    _discard_output(sys.stdout)
    exit_code = 0 if answer is None else exit_code_of(answer)
    return exit_code or int(ExitCode.FAILED)


def _run(words: list[str]) -> int:
    """Run the program, report every error, and return the exit code."""
    try:
        return _write_answer(root()(args=words, prog_name="gpushare", standalone_mode=False))
    except GpushareError as error:
        return _report_error(error)
    except KeyboardInterrupt as error:
        return _report_error(common.interrupted_error(error))
    except (BrokenPipeError, common.ReaderGone):
        raise
    except NotWritten as error:
        return _report_not_written(error)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback without --debug
        return _report_unexpected(error)


def _write_answer(answer: Any) -> int:
    """Write a command's result and return its exit code. A plain number is one (`gpushare run`, ``--help``)."""
    if isinstance(answer, int):
        return answer
    if answer is None:
        return 0
    from gpushare.show.render import exit_code_of, write

    answer = replace(answer, command=answer.command or common.settings.command)
    try:
        write(answer, common.settings.output, stdout=sys.stdout, stderr=sys.stderr, quiet=common.settings.quiet)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _report_not_written(error, answer)
    return exit_code_of(answer)


def _report_error(error: GpushareError) -> int:
    """Write an error as the command's result, with --debug its traceback first, and return the exit code."""
    if common.settings.debug:
        import traceback

        traceback.print_exception(error)
    from gpushare.show.result import failed_result

    return _write_answer(failed_result(common.settings.command or "gpushare", error))


def _report_unexpected(error: Exception) -> int:
    """Report an exception that is no `GpushareError`: of the parser, of the system, or a bug; return the exit code."""
    if hasattr(error, "format_message"):
        return _report_parser_error(error)
    if type(error).__name__ in {"Abort", "Exit"}:
        return int(getattr(error, "exit_code", ExitCode.FAILED))
    if common.settings.debug:
        raise error
    if isinstance(error, OSError):
        from gpushare.base.errors import system_error

        refused = system_error(error)
        if refused is not None:
            return _report_error(refused)
    problem = f"{type(error).__name__}: {error}".replace("\n", " ")
    bug = OperationFailed(
        f"unexpected {problem}", "this is a bug in gpushare; run it again with --debug and report it", code="bug"
    )
    return _report_error(bug)


def _report_parser_error(error: Any) -> int:
    """Report an error of the parser in our two lines, and return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        put(sys.stdout, error.ctx.get_help() + "\n")
        return int(ExitCode.USAGE)
    path = " ".join(filter(None, ("gpushare", common.settings.command)))
    from gpushare.cli.suggest import meant_word

    message = _in_our_words(" ".join(str(error.format_message()).split()).rstrip("."))
    words = (meant_word(error) or "").replace(" or ", "' or '")
    question = f". Did you mean '{words}'?" if words else ""
    return _report_error(BadUsage(message[:1].lower() + message[1:] + question, f"see: {path} --help"))


def _in_our_words(message: str) -> str:
    """Return a message of the parser in the style of ours, without names of Python types."""
    import re

    from gpushare.base.units import quoted

    message = re.sub(r" \(Possible options: .*\)$", "", message)
    message = re.sub(r"'([^']{61,})'", lambda long: quoted(long[1]), message)
    return re.sub(r"is not a valid (int|integer)( range)?$", "is not a whole number", message)
