"""Options: those that every command takes, those of several verbs, and how a plan is shown or carried out."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from gpushare import __version__
from gpushare.base.errors import BadCombination, BadUsage, Interrupted, NeedsConsent
from gpushare.base.units import parse_seconds, parse_thread_percentage, quoted
from gpushare.base.values import dataclass
from gpushare.show.text import NotWritten, one_line, put, set_host
from gpushare.signals import Ended

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gpushare.base.model import Gpu
    from gpushare.host.host import Host
    from gpushare.mps.home import DaemonHome
    from gpushare.plan import Loss, Plan, Step
    from gpushare.show.result import OutputFormat, Result


CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# What each `typer.Typer` of a verb is made with; that of a group: `GROUP`.
_PLAIN: Final[Mapping[str, Any]] = {"add_completion": False, "rich_markup_mode": None}


@dataclass
class Settings:
    """The values of the common options; one object per run of the program."""

    host: str | None = None
    # None: a table on a terminal, else plain text.
    output_format: OutputFormat | None = None
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    dry_run: bool = False
    yes: bool = False
    # The command changes something.
    changes: bool = False
    # The command, as far as it was parsed: ``mps start``.
    command: str = ""
    # All words of the command line.
    words: tuple[str, ...] = ()
    verbs: Collection[str] = ()
    # The options and arguments that are given, by their long names: ``--gpu``, ``JOB``.
    given: frozenset[str] = frozenset()
    connected: Host | None = None

    def connect(self) -> Host:
        """Return the host that ``--host`` or ``GPUSHARE_HOST`` names, or this machine; it is connected once.

        A command that changes something also removes the temporary files of killed gpushare processes.
        """
        if self.connected is None:
            from gpushare.connect import connect

            try:
                self.connected = connect(self.spec)
            except BadUsage:
                # No such host: a command with it would fail too.
                set_host(None, (), simulated=False)
                raise
            if self.changes and not self.dry_run:
                from gpushare.host.records import sweep_leftovers

                sweep_leftovers(self.connected)
        return self.connected

    def set_printed_host(self) -> None:
        """Let printed commands name the host, unless the user's shell does already."""
        is_host_of_shell = self.spec == (os.environ.get("GPUSHARE_HOST") or "local")
        set_host(None if is_host_of_shell else self.spec, self.verbs, simulated=self.spec != "local")

    @property
    def output(self) -> OutputFormat:
        from gpushare.show.result import OutputFormat

        return self.output_format or OutputFormat.AUTO

    @property
    def spec(self) -> str:
        return self.host or os.environ.get("GPUSHARE_HOST") or "local"


settings = Settings()


def reset() -> None:
    """Reset all settings, for several runs in one process (tests)."""
    for name, value in vars(Settings()).items():
        setattr(settings, name, value)
    set_host(None, (), simulated=False)


class _Terminal(io.FileIO):
    """A terminal. Output to a closed one is lost, but does not keep a command from ending in order."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def let_streams_outlive_terminal() -> None:
    """Replace stdout and stderr by streams that a closed terminal does not break (`_Terminal`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.isatty() and type(stream) is io.TextIOWrapper:
                raw = _Terminal(stream.fileno(), "w", closefd=False)
                wrapped = io.TextIOWrapper(
                    io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True, write_through=True
                )
                setattr(sys, name, wrapped)


def keep_exit_codes_of_children() -> None:
    """Restore the default of SIGCHLD: a parent may have left it ignored, and then all exit codes of children are lost."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream (``>&-``): Python has None there, and any write would fail."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It stays open until the process ends, as Python's own streams do.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def parse_output_format(text: str) -> OutputFormat:
    """Return the output format that a user names; raises BadUsage if there is none of this name."""
    from gpushare.show.result import OutputFormat

    try:
        return OutputFormat(text.lower())
    except ValueError:
        raise BadUsage(
            f"{quoted(text)} is not an output format", "give -o table, plain, json, yaml or csv", code="bad_output"
        ) from None


def _storing_callback(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[..., Any]:
    """Return the parser's callback that stores the value of an option, converted, as ``settings.NAME``."""

    def callback(_context: Any, _parameter: Any, value: Any) -> Any:
        # An absent option changes nothing: it may have been given before the command.
        if value not in {None, False}:
            setattr(settings, name, convert(value))
            settings.set_printed_host()
        return value

    return callback


def _common_flag(name: str, help_text: str, *declarations: str, hidden: bool = False) -> TyperOption:
    """Return a yes-or-no option that sets ``settings.NAME``; no command gets it as an argument."""
    return TyperOption(
        param_decls=[*declarations, f"shared_{name}"],
        is_flag=True,
        hidden=hidden,
        default=False,
        expose_value=False,
        callback=_storing_callback(name),
        help=help_text,
    )


def common_options() -> list[TyperOption]:
    """Return the options of every command, new objects each time."""
    return [
        TyperOption(
            param_decls=["--host", "shared_host"],
            metavar="SPEC",
            expose_value=False,
            callback=_storing_callback("host"),
            help="The host: local, or a simulated one like sim:h200 or sim:2xt4,a30. [env: GPUSHARE_HOST]",
        ),
        TyperOption(
            param_decls=["-o", "--output", "shared_output"],
            metavar="FORMAT",
            expose_value=False,
            callback=_storing_callback("output_format", parse_output_format),
            help="table, plain, json, yaml or csv. [default: table on a terminal, else plain]",
        ),
        _common_flag("quiet", "Print no notes, and nothing about a change that succeeded.", "-q", "--quiet"),
        _common_flag("verbose", "Print more: each step of a change, for example.", "-v", "--verbose"),
        _common_flag("debug", "Show the traceback of an error.", "--debug"),
    ]


def change_options(*, asks: bool) -> list[TyperOption]:
    """Return the options of commands that change something; ``asks``: the change may need consent."""
    return [
        _common_flag("dry_run", "Print the plan and change nothing; needs no root.", "-n", "--dry-run"),
        _common_flag(
            "yes",
            "Answer yes to the question that the command may ask; --dry-run shows it.",
            "-y",
            "--yes",
            hidden=not asks,
        ),
    ]


# The commands whose --help leaves options to --help-all, as `help.GROUPS` says.
_LONG: Final = frozenset({"advise", "bench", "run", "tune"})


def _whole_help(ctx: Any) -> str:
    from gpushare.cli.help import ALL

    ctx.meta[ALL] = True
    return str(ctx.get_help()) + "\n"


def _version(_ctx: Any) -> str:
    return f"gpushare {__version__}\n"


def _switch(name: str, act: Callable[[Any], str], text: str) -> TyperOption:
    """Return an option that acts at once, prints what ``act`` returns, and ends the program."""

    def callback(ctx: Any, _parameter: Any, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            put(sys.stdout, act(ctx))
            ctx.exit()

    return TyperOption(
        param_decls=[name, "shared_" + name.removeprefix("--").replace("-", "_")],
        is_flag=True,
        default=False,
        expose_value=False,
        is_eager=True,
        callback=callback,
        help=text,
    )


def interrupted_error(error: KeyboardInterrupt) -> Interrupted:
    """Return the error of a command that a signal ended; its exit code is 128 + N."""
    number = error.number if isinstance(error, Ended) else signal.SIGINT
    interruption = Interrupted("interrupted", "nothing more was changed; see: gpushare status")
    interruption.exit_code = 128 + number  # type: ignore[assignment]
    return interruption


class ReaderGone(Exception):
    """The reader of stdout is gone. Typer would handle a BrokenPipeError itself, with exit code 1."""


def _apply_common_options(words: Sequence[str], *, interspersed: bool) -> None:
    """Set the common options (-o json, --debug) of a command line that the parser refuses: its error is shown as they say.

    ``interspersed``: options may come after arguments.
    """
    lenient = TyperCommand(
        name=None,
        params=[*change_options(asks=True), *common_options()],
        add_help_option=False,
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": interspersed,
        },
    )
    with contextlib.suppress(BadUsage):
        lenient.make_context("", list(words), resilient_parsing=True)


def _note_command_name(name: str | None, parent: Any) -> None:
    """Note the name of the command; the program itself has no parent."""
    if parent is not None:
        settings.command = f"{settings.command} {name}".strip()


@contextlib.contextmanager
def _errors_in_typed_format(words: Sequence[str], *, interspersed: bool) -> Iterator[None]:
    """Let an error of the parser be shown in the output format that the words request."""
    # The parser consumes its list.
    words = list(words)
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # The only thing that parsing writes is --help.
        raise NotWritten(error.errno, error.strerror) from error
    except Exception:
        _apply_common_options(words, interspersed=interspersed)
        raise


def _given_names(ctx: Any) -> Iterator[str]:
    """Yield the long names of the options, and the words of the arguments, that the command line gives."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name)
        value = ctx.params.get(parameter.name)
        # Typer 0.26.5 says of a list that is not given that it is, and empty.
        if source is None or source.name != "COMMANDLINE" or value is False or value in ((), []):
            continue
        if parameter.param_type_name == "argument":
            yield parameter.metavar.strip("[].")
        else:
            yield max(parameter.opts, key=len)


class Helped:
    """A command whose help has its options in groups, and examples."""

    def get_help_option_names(self, _ctx: Any) -> list[str]:
        """Return ``-h`` and ``--help``, also in a completion or a walk over all commands, where `CONTEXT` does not apply."""
        return ["-h", "--help"]

    def format_help_text(self: Any, ctx: Any, formatter: Any) -> None:
        """Write what the command does; of a command with ``--help-all``, ``--help`` has the first paragraph."""
        from gpushare.cli.help import is_short

        whole = self.help
        if is_short(ctx):
            self.help = whole.split("\n\n")[0]
        try:
            super().format_help_text(ctx, formatter)  # type: ignore[misc]
        finally:
            self.help = whole

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the options, and the commands of a group."""
        from gpushare.cli.help import write_examples, write_options

        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)
        write_options(self.get_params(ctx), ctx, formatter)
        write_examples(ctx, formatter)


# Options that take a comma-separated list: given again, they add to it. So does one with a comma in its metavar.
_LISTS: Final = frozenset({"--gpu", "--ways", "--caps", "--isolation"})


def _process_once(process: Callable[[Any, Any], None], option: Any, value: Any, state: Any) -> None:
    """Process an option in the state of click's parser. One that is given again adds to a list; other values are refused."""
    earlier = state.opts.get(option.dest)
    process(value, state)
    now = state.opts[option.dest]
    if earlier is None:
        return
    name = option.obj.opts[-1]
    if option.action == "store_const":
        if now != earlier:
            other = option.obj.secondary_opts[0]
            raise BadCombination(f"{option.obj.opts[0]} cannot be combined with {other}", "give one of them")
    elif name in _LISTS or "," in (option.obj.metavar or ""):
        state.opts[option.dest] = f"{earlier},{now}"
    else:
        raise BadUsage(
            f"{name} is given several times: {quoted(str(earlier))}, {quoted(str(now))}",
            "give it once, with one value",
            code="repeated_option",
        )


class Command(Helped, TyperCommand):
    """A command. Its Ctrl-C is an error like any other: Typer would exit with 130 and print nothing."""

    changes = False
    # Whether a change may need consent.
    asks = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        options = []
        if named.get("name") in _LONG:
            options.append(_switch("--help-all", _whole_help, "Show all options and examples."))
        if self.changes:
            options += change_options(asks=self.asks)
        named["params"] = [*(named.get("params") or []), *options, *common_options()]
        super().__init__(*arguments, **named)

    def make_parser(self, ctx: Any) -> Any:
        """Return click's parser, which would keep the last of several values of an option (`_process_once`).

        Before the command (`Group`) the last value still wins: an alias may give `--host` and `-o` there.
        """
        parser: Any = super().make_parser(ctx)
        # A completion must not fail.
        if not ctx.resilient_parsing:
            for option in {*parser._short_opt.values(), *parser._long_opt.values()}:
                if option.action in {"store", "store_const"}:
                    option.process = partial(_process_once, option.process, option)
        return parser

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the words; an error is shown in the output format that they request."""
        _note_command_name(info_name, parent)
        interspersed = self.context_settings.get("allow_interspersed_args", True)
        # The parser consumes its list.
        words = list(args)
        with _errors_in_typed_format(args, interspersed=interspersed):
            ctx = super().make_context(info_name, args, parent, **extra)
        if not interspersed and not ctx.resilient_parsing:
            self._note_misplaced_options(ctx, words)
        return ctx

    def _note_misplaced_options(self, ctx: Any, words: list[str]) -> None:
        """Note which options of this command are passed to the program, because they stand after it without ``--`` before it."""
        program = next((ctx.params[parameter.name] for parameter in self.params if parameter.nargs == -1), None) or []
        words_before = words[: len(words) - len(program)]
        if not program or words_before[-1:] == ["--"]:
            return
        options = {name for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
        typed = takewhile(lambda word: word != "--", program[1:])
        names = dict.fromkeys(word.partition("=")[0] if word.startswith("--") else word for word in typed)
        misplaced = [name for name in names if name.startswith("-") and name in options]
        if misplaced:
            note(
                f"passed to {quoted(os.path.basename(program[0]))}, not to gpushare: {', '.join(misplaced)}; options of "
                "gpushare come before the program; if these are the program's, put -- before it"
            )

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises Interrupted after Ctrl-C, and ReaderGone (| head), which Typer would handle itself."""
        settings.changes = self.changes
        settings.given = frozenset(_given_names(ctx))
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGone from None
        except KeyboardInterrupt as error:
            raise interrupted_error(error) from None


class ChangingCommand(Command):
    """A command that changes something. It takes nothing that anybody would miss, so ``--yes`` is not in its help."""

    changes = True


class AskingCommand(ChangingCommand):
    """A command that asks before something named, granted, busy or not ours goes (`consented`)."""

    asks = True


class Group(Helped, TyperGroup):
    """A group of commands; the root one also knows ``--version``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        # We suggest more: `gpushare.cli.suggest`.
        named["suggest_commands"] = False
        named["params"] = [*(named.get("params") or []), *common_options()]
        super().__init__(*arguments, **named)

    def children(self) -> dict[str, Any]:
        """Return all commands by name, for a walk over the tree."""
        return {name: self.get_command(None, name) for name in self.list_commands(None)}  # type: ignore[arg-type]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the words before the command, and print errors in the output format that the words ask for."""
        _note_command_name(info_name, parent)
        with _errors_in_typed_format(args, interspersed=True):
            return super().make_context(info_name, args, parent, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return what Typer finds for the first word; an error about the word has it, so that `suggest` finds a similar one."""
        with _errors_in_typed_format(args, interspersed=True):
            try:
                return super().resolve_command(ctx, args)
            except Exception as error:
                error.unknown_command = args[0]  # type: ignore[attr-defined]
                raise


GROUP: Final[Mapping[str, Any]] = {**_PLAIN, "cls": Group, "no_args_is_help": True}

Function = TypeVar("Function", bound=Callable[..., Any])
# By the name of the file whose only command it is.
_APPS: Final[dict[str, typer.Typer]] = {}


def verb(kind: type[Command], *, takes_program: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that makes a function the only command of its file.

    ``takes_program``: its last words are a program with options of its own.
    """

    def register(function: Function) -> Function:
        app = _APPS[function.__module__] = typer.Typer(**_PLAIN)
        context = {**CONTEXT, "allow_interspersed_args": False} if takes_program else None
        app.command(cls=kind, context_settings=context)(function)
        return function

    return register


class RootGroup(Group):
    """The program itself. The file of a verb is loaded on first use: the whole tree costs more than Typer at every start.

    ``listed`` has the groups of verbs with their help lines, so that none is loaded for them.
    """

    def __init__(self, *, listed: Mapping[str, Mapping[str, str]], **named: Any) -> None:
        self._listed = listed
        named["params"] = [
            _switch("--version", _version, "Show the version and exit."),
            _switch(
                "--install-completion",
                lambda _: import_module("gpushare.cli.completion").install(),
                "Install the completion of your shell (bash, zsh or fish) for this user.",
            ),
        ]
        super().__init__(**named)

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the verbs, in the order of the help."""
        return [verb for verbs in self._listed.values() for verb in verbs]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command or group that the file of a verb makes; None: no such verb."""
        if cmd_name not in self.commands and cmd_name in self.list_commands(ctx):
            module = import_module(f"gpushare.cli.{cmd_name}")
            self.commands[cmd_name] = typer.main.get_command(_APPS.get(module.__name__) or module.app)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the named command; ``help [VERB]`` and ``version`` are the options of the same name."""
        if args[0] == "help" and args[1:]:
            return super().resolve_command(ctx, [*args[1:], "--help"])
        if args[0] in {"help", "version"}:
            put(sys.stdout, _version(ctx) if args[0] == "version" else ctx.get_help() + "\n")
            ctx.exit()
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs in their groups, in columns that are the same in all."""
        width = max(map(len, self.list_commands(ctx)))
        for title, verbs in self._listed.items():
            with formatter.section(title):
                formatter.write_dl([(verb.ljust(width), text) for verb, text in verbs.items()])


# -- options and arguments of several verbs ---------------------------------------------------------


def option(names: str, metavar: str | None, text: str, default: Any = None, **more: Any) -> Any:
    """Return an option of a verb: its names (``-g --gpu``), the word for its value, and its help.

    ``default=...`` makes it required; ``more`` is Typer's: ``min``, ``max``.
    """
    return typer.Option(default, *names.split(), metavar=metavar, help=text, **more)


def flag(names: str, text: str) -> Any:
    """Return an option without a value, which is False where it is not given."""
    return typer.Option(False, *names.split(), help=text)


def argument(metavar: str, text: str | None = None, default: Any = None) -> Any:
    """Return an argument of a verb: its word in the usage, and its help; ``default=...`` makes it required."""
    return typer.Argument(default, metavar=metavar, help=text, show_default=False)


GPU_OPTION: Final = option(
    "-g --gpu",
    "GPU",
    "GPU index, range (0-3), UUID or its prefix, PCI bus id, MIG UUID, a comma-separated list, or all.",
)
WHOLE_GPU_OPTION: Final = option(
    "-g --gpu", "GPU", "GPU index, range (0-3), UUID or its prefix, PCI bus id, a comma-separated list, or all."
)
ONE_GPU_OPTION: Final = option("-g --gpu", "GPU", "One GPU or MIG device: index, UUID or PCI bus id.")
CLIENT_THREADS: Final = option("--threads", "PCT", "Active thread percentage: 0.1 to 100.")
OVER_ACTION: Final = option("--over", "ACTION", "Above --memory: end, warn or pause. [default: end]")
PRIORITY_OPTION: Final = option("--priority", "LEVEL", "Client priority: normal or low.")
WISHES: Final = argument(
    "WISH...", "The instances wanted: 3g.40gb '1g.10gb*2'; from slice 4 on: 3g:4; in a GPU instance: '1c.3g.40gb*3'."
)
NEEDED_MEMORY: Final = option("--memory", "SIZE", "Instead of a WISH: at least this much memory.")
NEEDED_SMS: Final = option("--sm", "N", "Instead of a WISH: at least this many SMs.", min=1)
PARTED_FILE: Final = option("-f --file", "FILE", "A mig-parted v1 file; - is stdin.")
PARTED_EXACT: Final = flag("--exact", "With a file: every GPU must have an entry, and every entry a GPU.")
PARTED_CONFIG: Final = option("-c --config", "NAME", "The config of the file to use.")
PRINTED_NUMBER: Final = option("--metric", "REGEX", "Regex of a number that CMD prints: 'rate=([0-9.]+)'.")
LOWER_IS_BETTER: Final = flag("--lower-is-better/--higher-is-better --lower", "Whether the number is a time or a rate.")
MEASURED_TIME: Final = option("--for", "TIME", "Measure for this long, then end CMD; needs --metric.")
HUNG_AFTER: Final = option("--timeout", "TIME", "When a run counts as hung. [default: depends on a run of CMD alone]")
WAIT_TIMEOUT: Final = option("--timeout", "TIME", "With --wait: give up after this time: 10m. [default: never]")
HOST_FILE_ARGUMENT: Final = argument("[FILE]", "gpushare.yaml, version 1; - is stdin. [default: ./gpushare.yaml]")
HOST_FILE_OPTION: Final = option("-f --file", "FILE", "The same as FILE.")


def host_file(argument: str | None, option: str | None, verb: str) -> str:
    """Return the path that is given as an argument or as an option, else that of ``gpushare.yaml`` in this directory."""
    if argument is not None and option is not None:
        raise BadUsage("two files are given", f"give one: gpushare {verb} {quoted(option)}", code="two_sources")
    path = option if argument is None else argument
    if path is None:
        from gpushare.hostfile.load import default_path

        path = default_path()
    if path is None:
        raise BadUsage(
            "no file is given, and there is no ./gpushare.yaml",
            f"give one: gpushare {verb} gpushare.yaml; gpushare capture writes one",
            code="usage",
        )
    return path


def longest_wait(timeout: str | None, *, wait: bool) -> float | None:
    """Return how many seconds a command may wait for room: 0 without ``--wait``; None: without end."""
    if timeout is not None and not wait:
        raise BadCombination("--timeout belongs to --wait", f"gpushare {settings.command} JOB --wait --timeout 10m")
    if not wait:
        return 0.0
    return None if timeout is None else parse_seconds(timeout)


class Refused(NamedTuple):
    """Options that do not go together: one of ``options`` beside one of ``others``, or, if ``needs``, without any of them.

    An option with a value (``--yield:swap``) stands for this value of it alone; ``instead`` is an example without it.
    """

    options: str
    others: str
    why: str
    instead: str
    needs: bool = False


def refuse(rows: Sequence[Refused], given: Collection[str] | None = None) -> None:
    """Raise BadCombination if given options do not go together; ``given`` is by default `Settings.given`."""
    if given is None:
        given = settings.given
    for row in rows:
        options = [name for name in row.options.split() if name in given]
        others = [name for name in row.others.split() if name in given]
        if options and row.needs and not others:
            problem = f"{options[0]} needs {' or '.join(row.others.split())}"
        elif options and others and not row.needs:
            problem = f"{options[0]} cannot be combined with {others[0]}"
        else:
            continue
        # --yield:swap is typed as two words.
        problem = problem.replace(":", " ")
        raise BadCombination(f"{problem}: {row.why}", f"for example: gpushare {settings.command} {row.instead}")


def note(text: str) -> None:
    """Print a note on stderr, unless --quiet is given."""
    if not settings.quiet:
        from gpushare.show.render import write_notes

        write_notes([text], sys.stderr)


def gpus_of(host: Host) -> Sequence[Gpu]:
    """Return the GPUs of a host, with their modes and the names of their instances."""
    gpus = host.nvml.sweep()
    if any(gpu.mig_instances for gpu in gpus):
        from gpushare.mig.places import with_names

        return with_names(host, gpus)
    return gpus


def gpus_named(host: Host, gpu: str | None) -> list[Gpu]:
    """Return the GPUs that ``-g`` names, each once; an instance names its GPU."""
    from gpushare.base.selection import select

    return list({device.gpu.index: device.gpu for device in select(gpu, gpus_of(host))}.values())


def ask_line(prompt: str) -> str:
    """Ask on stderr and return the line from stdin, empty at its end."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = ""
    try:
        # A terminal that was closed meanwhile (EIO) counts as the end of the input.
        with contextlib.suppress(OSError):
            line = sys.stdin.readline()
    finally:
        # Without an answer, the cursor is still on the line of the question.
        if not line:
            sys.stderr.write("\n")
    return line


def consented(plan: Plan, agreed: Sequence[Loss] = ()) -> tuple[Loss, ...]:
    """Ask for the losses of a plan that the user has not agreed to yet, and return all that are agreed to.

    Call it after planning and before the first change. Then plan again under the locks; if `is_agreed` is false for the
    new plan, it would take something else: ask again. Raises NeedsConsent.
    """
    from gpushare.plan import describe_losses, open_losses

    to_ask = () if settings.yes or settings.dry_run else open_losses(plan.consent, agreed)
    if to_ask:
        from gpushare.show.plan import plan_answer

        data = plan_answer(plan, dry_run=False)
        losses = describe_losses(to_ask)
        hint = f"to do it: {_command_line_with_yes()}; to see the plan: --dry-run"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NeedsConsent(f"this {losses}, and there is no terminal to ask on", hint, data=data)
        question = f"{one_line(f'This {losses}.')} Continue? [y/N] "
        if ask_line(question).strip().lower() not in {"y", "yes"}:
            raise NeedsConsent("not confirmed; nothing was changed", hint, code="not_confirmed", data=data)
    return (*agreed, *plan.consent)


def is_agreed(plan: Plan, agreed: Sequence[Loss]) -> bool:
    """Return whether a plan takes only what the user has agreed to."""
    from gpushare.plan import open_losses

    return settings.yes or not open_losses(plan.consent, agreed)


def _command_line_with_yes() -> str:
    """Return this command line with ``-y`` after the words of the command: before those of a program that it runs."""
    words = list(settings.words)
    end_of_command = 0
    for word in settings.command.split():
        if word in words[end_of_command:]:
            end_of_command = words.index(word, end_of_command) + 1
    return shlex.join(["gpushare", *words[:end_of_command], "-y", *words[end_of_command:]])


def ask_and_carry_out(
    plan: Plan,
    *,
    homes: Sequence[DaemonHome] = (),
    replan: Callable[[], Plan] | None = None,
    locked: Callable[[], AbstractContextManager[Sequence[str]]] = lambda: contextlib.nullcontext(()),
) -> Result:
    """Ask for consent, carry out a plan, and return the result with the undo; with --dry-run only show the plan.

    While the plan is carried out, the locks of ``homes`` are held, and the one of ``locked``, which yields notes: no other
    gpushare changes the same. ``replan`` plans again under the locks, because the host may have changed during the
    question. If the new plan takes more than the user has agreed to, the locks are released and the user is asked again.
    """
    from gpushare.plan import carry_out
    from gpushare.show.plan import plan_result

    if settings.dry_run:
        return plan_result(plan, dry_run=True)
    lock_notes: list[str] = []
    agreed = consented(plan)
    while True:
        with contextlib.ExitStack() as locks:
            lock_notes += locks.enter_context(locked())
            # In a fixed order, so that two commands cannot wait for each other's locks.
            for home in sorted(homes, key=lambda home: home.directory):
                locks.enter_context(home.locked())
            if replan is not None:
                plan = replan()
            if is_agreed(plan, agreed):
                carry_out(plan, say_step if settings.verbose else None)
                return plan_result(plan, dry_run=False, notes=lock_notes)
        agreed = consented(plan, agreed)


def say_step(step: Step) -> None:
    """Print a step that begins now, for --verbose."""
    command = "" if step.command is None else f"  {step.command}\n"
    sys.stderr.write(f"{step.what}\n{command}")
    sys.stderr.flush()


# How many other processes are named.
_NAMED: Final = 6


def others_note(others: Mapping[int, str]) -> str:
    """Return the note on other processes on the GPU, by PID."""
    named = ", ".join(f"{pid} {name}".rstrip() for pid, name in list(others.items())[:_NAMED])
    return f"other processes used the GPU during the measurement ({named}) and may have affected the figures"


def parse_percentage(option: str, text: str, *, example: str, code: str) -> float:
    """Return a part of something in percent, as typed: ``97%`` or ``97``; ``0.97`` is refused, as it may be a share."""
    try:
        percent = parse_thread_percentage(text)
    except BadUsage:
        raise BadUsage(
            f"{option} '{text[:40]}' is not a percentage from 0.1 to 100", f"give one: {example}", code=code
        ) from None
    if percent <= 1 and "%" not in text:
        raise BadUsage(f"{option} {text} may be a share or a percentage", f"say which: {example}", code=code)
    return percent


def split_command(option: str, command: str) -> list[str]:
    """Return the words of a command line, at least one, as a shell splits them."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadUsage(
            f"{option} {quoted(command, 200)} is not a command line: {error}", "close the quote", code="bad_command"
        ) from None
    if not words:
        raise BadUsage(f"{option} names no program", f"give one: {option} 'python3 train.py'", code="no_command")
    return words


def positive_time(option: str, text: str, example: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """Return a time above zero in seconds, as typed; ``least`` and ``most`` are in seconds too."""
    seconds = parse_seconds(text)
    if seconds <= 0 or not least <= seconds <= most:
        raise BadUsage(f"invalid duration for {option}: {text}", f"give {option} {example}", code="bad_duration")
    return seconds


# The refresh interval of a screen or a recording.
INTERVAL: Final[Mapping[str, Any]] = {"example": "1s, or another time from 0.1s on", "least": 0.1}
