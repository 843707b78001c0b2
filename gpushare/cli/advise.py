"""``gpushare advise``."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpushare.cli.common import CONTEXT, ChangingCommand, settings
from gpushare.cli.measured import HungAfter, LowerIsBetter, MeasuredTime, PrintedNumber
from gpushare.errors import BadUsage, GpuLost, NotFound

if TYPE_CHECKING:
    from gpushare.advice.advise import Advice
    from gpushare.advice.facts import GpuFacts, HostFacts
    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Case
    from gpushare.host.host import Host


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "advise",
        cls=ChangingCommand,
        short_help="Say which way of sharing fits, and what to type.",
        # Options end at the command's name: its own are its own, also without "--".
        context_settings={**CONTEXT, "allow_interspersed_args": False},
    )(advise)


def _yes_no(name: str, text: str, *also: str) -> Any:
    return typer.Option(f"--{name}/--no-{name}", *also, help=text, show_default=False)


def advise(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CMD...]", help="What to measure, with --measure.", show_default=False),
    ] = None,
    processes: Annotated[str | None, typer.Option("--processes", metavar="N", help="How many processes share.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Memory of one process at its peak: 6G.")
    ] = None,
    sms: Annotated[str | None, typer.Option("--sms", metavar="N", help="SMs that one process needs.")] = None,
    saturating: Annotated[bool | None, _yes_no("saturating", "One process alone fills the GPU (measured).")] = None,
    users: Annotated[str | None, typer.Option("--users", metavar="WHO", help="same or different.")] = None,
    trusted: Annotated[
        bool | None, typer.Option("--trusted/--untrusted", help="They trust each other.", show_default=False)
    ] = None,
    isolation: Annotated[
        str | None,
        typer.Option("--isolation", metavar="KIND", help="none, quota, fault, full; or several: quota,fault."),
    ] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", metavar="N", help="Parties among the processes to be kept apart.")
    ] = None,
    bandwidth_qos: Annotated[bool | None, _yes_no("bandwidth-qos", "Memory bandwidth must be guaranteed.")] = None,
    weights: Annotated[bool | None, _yes_no("weights", "Unequal shares are wanted.")] = None,
    containment: Annotated[
        bool | None, _yes_no("containment", "Each must stay in its share, also when others idle.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option("--latency", metavar="TIME", help="Latency target of a request: 20ms; yes, none.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option("--pattern", metavar="KIND", help="interactive, bursty or steady.")
    ] = None,
    production: Annotated[
        str | None, typer.Option("--production", metavar="N", help="So many production processes.")
    ] = None,
    opportunistic: Annotated[
        str | None, typer.Option("--opportunistic", metavar="N", help="So many that give way to production.")
    ] = None,
    role: Annotated[
        str | None, typer.Option("--role", metavar="ROLE", help="production or opportunistic, of all.")
    ] = None,
    one_application: Annotated[
        bool | None,
        typer.Option("--one-application/--many-applications", help="They are one application.", show_default=False),
    ] = None,
    cooperating: Annotated[bool | None, _yes_no("cooperating", "They work together (MPI ranks).")] = None,
    code: Annotated[bool | None, _yes_no("code", "The program can be changed.")] = None,
    running: Annotated[bool | None, _yes_no("running", "They run already, and must not be started anew.")] = None,
    cuda_graphs: Annotated[bool | None, _yes_no("cuda-graphs", "They launch CUDA graphs (LLM engines).")] = None,
    bandwidth_bound: Annotated[bool | None, _yes_no("bandwidth-bound", "It fills the memory bandwidth.")] = None,
    io_bound: Annotated[bool | None, _yes_no("io-bound", "The GPU waits for input.")] = None,
    vms: Annotated[bool | None, _yes_no("vms", "They are virtual machines.")] = None,
    nccl: Annotated[bool | None, _yes_no("nccl", "They need NCCL.")] = None,
    p2p: Annotated[bool | None, _yes_no("p2p", "They need peer-to-peer between GPUs.")] = None,
    ipc: Annotated[bool | None, _yes_no("ipc", "They share GPU memory (CUDA IPC).")] = None,
    graphics: Annotated[bool | None, _yes_no("graphics", "They draw (OpenGL, Vulkan).")] = None,
    profiler: Annotated[bool | None, _yes_no("profiler", "A profiler or debugger is needed.")] = None,
    dynamic_parallelism: Annotated[bool | None, _yes_no("dynamic-parallelism", "Kernels launch kernels.")] = None,
    containers: Annotated[bool | None, _yes_no("containers", "They run in containers.")] = None,
    kubernetes: Annotated[bool | None, _yes_no("kubernetes", "Kubernetes starts them.")] = None,
    root: Annotated[bool | None, _yes_no("root", "Root (sudo) is to be had.")] = None,
    command: Annotated[
        str | None, typer.Option("--command", metavar="CMD", help="The program, for the lines: 'python train.py'.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("-g", "--gpu", metavar="GPU", help="The GPU to share. [default: the first]")
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Workloads from a YAML file; - is stdin.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="What runs on the GPU now.")] = False,
    recording: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="What a recording of `gpushare observe` saw.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option("--mechanism", metavar="NAME", help="Explain this way: why, or why not.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Carry the set-up out; see it first with --dry-run.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure CMD under each way that fits (gpushare bench), then answer.")
    ] = False,
    copies: Annotated[
        int | None, typer.Option("--copies", metavar="N", help="Measure so many copies. [default: --processes]")
    ] = None,
    metric: PrintedNumber = None,
    lower: LowerIsBetter = False,
    window: MeasuredTime = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", metavar="N", help="How often each is run. [default: 3]")
    ] = None,
    timeout: HungAfter = None,
) -> Any:
    """Say which way of sharing a GPU fits, why, and what exactly to type on this host.

    Say what you know; what decides and was not said is asked on a terminal, never with -y. Every way gets
    a verdict, -v prints every rule with its source. Nothing is changed without --apply.

    --measure runs copies of CMD under the ways that no rule refuses, as gpushare bench does, and says how that
    changed the answer: gpushare advise --measure --processes 4 --metric 'rate=([0-9.]+)' --for 5s -- python job.py

    A file holds the same words: workloads: [{processes: 4, memory: 6G, users: same, saturating: no}]
    """
    words = {key: value for key, value in locals().items() if key not in _NOT_A_PROPERTY}
    if program and command is None:
        words["command"] = shlex.join(program)
    from gpushare.advice.ways import way_of
    from gpushare.advice.workload import checked
    from gpushare.cli.facts import gather

    asked_for = {
        "--copies": copies,
        "--metric": metric,
        "--lower-is-better": lower or None,
        "--for": window,
        "--repeat": repeat,
        "--timeout": timeout,
    }
    wanted = _wanted(program, command, asked_for, measure=measure, explained=mechanism is not None)
    explained = None if mechanism is None else way_of(mechanism)
    if explained is not None and apply:
        raise BadUsage(
            "--mechanism explains, --apply carries out", "leave one of them away", code="explained_and_applied"
        )
    sources = [name for name, given in (("--file", file), ("--live", live), ("--from", recording)) if given]
    if len(sources) > 1:
        raise BadUsage(f"{' and '.join(sources)} together", "give one of them", code="two_sources")
    pair = (_number("--production", production), _number("--opportunistic", opportunistic))
    if sources and pair != (None, None):
        raise BadUsage(
            f"--production stands not beside {sources[0]}", "give each workload its role", code="two_sources"
        )
    case = _case(words, file, root, pair, seen=live or recording is not None)
    case = case and checked(case)
    host = settings.connect()
    facts = gather(host)
    chosen = _chosen(host, facts, gpu)
    case = case or checked(_seen(host, chosen.index, words, root, recording))
    situation = _situation(case, facts, chosen)
    if _may_ask(explained=explained is not None):
        from gpushare.cli.advise_cases import asked

        situation = asked(situation)
    from gpushare.advice.advise import advise as advised

    if wanted is not None:
        from gpushare.cli.advise_measure import measured_answer

        return measured_answer(host, situation, wanted, live=live, apply=apply)
    return _answered(advised(situation), explained, live=live, apply=apply)


_MEASURING: Final = frozenset({"program", "measure", "copies", "metric", "lower", "window", "repeat", "timeout"})
_NOT_A_PROPERTY: Final = _MEASURING | {
    *("production", "opportunistic", "root", "gpu", "file", "live", "recording", "mechanism", "apply"),
}


def _wanted(
    program: list[str] | None, command: str | None, asked: dict[str, Any], *, measure: bool, explained: bool
) -> Any:
    """Return what is to be measured, or None.

    Raises:
        BadUsage: there is something to measure and no --measure, or the other way round.
    """
    given = [name for name, value in asked.items() if value is not None]
    if measure and explained:
        raise BadUsage("--mechanism explains, --measure measures", "leave one of them away", code="bad_combination")
    if measure:
        from gpushare.cli.advise_measure import wanted_of

        return wanted_of(program or shlex.split(command or ""), asked)
    if program or given:
        said = "a command" if program else ", ".join(given)
        raise BadUsage(
            f"{said} without --measure",
            "measure it: gpushare advise --measure ... -- CMD; only name it: --command 'CMD'",
            code="bad_combination",
        )
    return None


def _number(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    from gpushare.advice.workload import workload_of

    try:
        return workload_of({"processes": text}).processes
    except BadUsage as error:
        raise BadUsage(f"{option}: {error.message}", error.hint, code=error.code) from None


def _case(
    words: dict[str, Any], file: str | None, root: bool | None, pair: tuple[int | None, int | None], *, seen: bool
) -> Case | None:
    """Return the case as far as it needs no host; None: it is on the GPU, or in a recording."""
    from gpushare.cli import advise_cases

    if seen:
        advise_cases.case_of(words, root=root, pair=pair)
        return None
    if file is not None:
        return advise_cases.overlaid(advise_cases.case_from_file(file, root=root), words)
    # Checked before the host is asked: a wrong word costs nothing.
    return advise_cases.case_of(words, root=root, pair=pair)


def _seen(host: Host, index: int, words: dict[str, Any], root: bool | None, recording: str | None) -> Case:
    from gpushare.cli import advise_cases

    if recording is not None:
        found = advise_cases.case_from_recording(recording, index, root=root)
    else:
        found = advise_cases.case_from_now(host, index, root=root)
    return advise_cases.overlaid(found, words)


def _chosen(host: Host, facts: HostFacts, gpu: str | None) -> GpuFacts:
    """Return the GPU that is meant: the one that is named, or the first that answers.

    Raises:
        NotFound: there is none.
        BadUsage: several are named.
        GpuLost: it does not answer.
    """
    from gpushare.selection import select_one

    if not facts.gpus:
        raise NotFound("this host has no GPU", "see: gpushare doctor", code="no_gpu")
    if gpu is not None:
        device = select_one(gpu, host.nvml.sweep())
        return next(one for one in facts.gpus if one.index == device.gpu.index)
    found = next((one for one in facts.gpus if one.error is None), None)
    if found is None:
        raise GpuLost(str(facts.gpus[0].error), "see: gpushare status", gpu=str(facts.gpus[0].index))
    return found


def _situation(case: Case, facts: HostFacts, gpu: GpuFacts) -> Situation:
    from gpushare.advice.situation import Situation
    from gpushare.advice.table import load_table

    return Situation(case, facts, gpu, load_table())


def _may_ask(*, explained: bool) -> bool:
    from gpushare.show.result import OutputFormat

    terminal = sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
    wanted = settings.output in {OutputFormat.AUTO, OutputFormat.TABLE}
    return terminal and wanted and not settings.yes and not explained


RUNS_ON: Final = "what runs now keeps running as it is: it joins MPS or an instance only when it is started anew"


def _answered(advice: Advice, explained: Any, *, live: bool, apply: bool) -> Any:
    from gpushare.cli.advise_data import advice_data, verdict_data
    from gpushare.show.advise import answer_table, reasons_table, verdicts_table
    from gpushare.show.result import Result

    data = advice_data(advice)
    notes = [*data["notes"], *([RUNS_ON] if live else [])]
    if explained is not None:
        one = verdict_data(advice.of(explained))
        table = reasons_table([one], f"{one['title']} on {data['gpu_title']}: {one['outcome']}")
        if data["winner"] != one["way"]:
            notes.append(f"the advice for this case is: {data['answer']} (all of it without --mechanism)")
        return Result(command="advise", data={**data, "explained": one}, tables=(table,), notes=tuple(notes))
    if apply:
        from gpushare.cli.advise_apply import applied

        return applied(advice, notes)
    tables = [answer_table(data, whole=settings.verbose), verdicts_table(data)]
    if settings.verbose:
        tables.append(reasons_table(data["verdicts"], "every rule"))
    return Result(command="advise", data=data, tables=tuple(tables), csv=tables[1], notes=tuple(notes))
