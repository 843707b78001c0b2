"""``gpushare advise``: recommend a way of sharing; done by `gpushare/advice/`."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer
from typer.core import TyperOption

from gpushare.advice.advise import Advice, AdviceAnswer, advice_answer
from gpushare.advice.advise import advise as advice_for
from gpushare.advice.case import (
    Case,
    Pattern,
    Role,
    Workload,
    check_users,
    read_case,
    sizes_of,
    workload_of,
    workloads_of,
    workloads_of_sizes,
)
from gpushare.advice.facts import GpuFacts, HostFacts, RunningJob, host_facts, instance_facts
from gpushare.advice.measured import BENCH_WAYS, MeasuredAdvice, bench_ways, measured_advice, unmeasured_advice
from gpushare.advice.measured import measured_answer as answer_of
from gpushare.advice.place import first_gpu
from gpushare.advice.questions import next_question, with_answer
from gpushare.advice.rules import WayVerdict
from gpushare.advice.situation import MPS_CONTEXT_BYTES, Situation
from gpushare.advice.steps import Change, Recipe, Verb
from gpushare.advice.table import load_table
from gpushare.advice.ways import way_of
from gpushare.base.errors import (
    BadCombination,
    BadUsage,
    GpuLost,
    GpushareError,
    Interrupted,
    NotFound,
    NotSupported,
    no_gpu_error,
    or_none,
)
from gpushare.base.model import Way
from gpushare.base.selection import Device, is_any, select_for_change, select_one
from gpushare.base.units import MIB
from gpushare.cli.options import (
    LOWER_IS_BETTER,
    MEASURED_TIME,
    PRINTED_NUMBER,
    AskingCommand,
    Refused,
    argument,
    ask_and_carry_out,
    ask_line,
    flag,
    gpus_of,
    option,
    positive_time,
    refuse,
    settings,
    split_command,
    verb,
)
from gpushare.host.host import Host
from gpushare.hostfile.file import MpsWish
from gpushare.hostfile.steps import daemon_step, level_step, stop_step
from gpushare.inputs import shown_path, text_of
from gpushare.mig.change import MigChange
from gpushare.mig.daemons import own_daemons, refuse_used
from gpushare.mig.grant import Naming
from gpushare.mig.ledger import MigLedger
from gpushare.mig.planner import plan_add, plan_exact
from gpushare.mps.home import own_home
from gpushare.mps.limits import Limits
from gpushare.mps.set import plan_limits
from gpushare.mps.start import plan_start
from gpushare.plan import Plan, Step
from gpushare.run.jobs import PRODUCTION, is_running, records
from gpushare.show.advise import answer_table, reasons_table, verdicts_table
from gpushare.show.plan import plan_result, with_undo
from gpushare.show.result import OutputFormat, Result, Table
from gpushare.snapshot import HostState, Observer
from gpushare.timeslice.policy import plan_level

if TYPE_CHECKING:
    from gpushare.base.benchmark import BenchAnswer
    from gpushare.measure.bench import Measurement
    from gpushare.measure.bench import Settings as BenchSettings


T = TypeVar("T")

# The properties of a workload, named as in a file: option, value (None: yes or no), help.
_PROPERTIES: Final = (
    ("--like", "KIND", "Usual properties of jupyter, spark, ci, rendering, hpc, serving or training."),
    ("--processes", "N", "Number of processes."),
    ("--gpus", "N", "GPUs that each job has at the same time; --processes is the number of jobs."),
    ("--memory", "SIZE", "Peak memory of one process, without its CUDA context: 6G; of unequal ones: 34G,17G."),
    ("--sms", "N", "SMs that one process needs."),
    ("--saturating/--no-saturating", None, "One process alone fills the GPU; if unsure, measure it."),
    (
        "--production-saturating/--no-production-saturating",
        None,
        "The production job alone fills the GPU; --saturating is then about the other job.",
    ),
    ("--users", "WHO", "same or different."),
    ("--trusted/--untrusted", None, "The processes trust each other."),
    ("--isolation", "KIND", "none, quota (memory), fault, full; or a list: quota,fault."),
    ("--groups", "N", "Number of groups to be kept apart."),
    ("--latency", "TIME", "Latency target per request, like 20ms; or yes, none."),
    ("--pattern", "KIND", "interactive, bursty or steady."),
    ("--production", "N", "Number of production processes."),
    ("--opportunistic", "N", "Number of processes that yield to production."),
    ("--role", "ROLE", "Role of all processes: production or opportunistic."),
    ("--one-application/--many-applications", None, "The processes are one application."),
    ("--cooperating/--no-cooperating", None, "The processes cooperate (MPI ranks)."),
    ("--code/--no-code", None, "The program can be changed."),
    ("--running/--no-running", None, "They are already running and must not be restarted."),
    ("--bandwidth-bound/--no-bandwidth-bound", None, "The program saturates the memory bandwidth."),
    ("--io-bound/--no-io-bound", None, "The GPU waits for input."),
    ("--root/--no-root", None, "You can become root (sudo)."),
    ("--destroy/--no-destroy", None, "Idle MIG instances may be destroyed for it, named and granted ones too."),
    (
        "--needs",
        "LIST",
        (
            "What they need: nccl, p2p (between GPUs), ipc (CUDA IPC), graphics, profiler, dynamic-parallelism, "
            "cuda-graphs, bandwidth-qos, weights (unequal shares; weights=2:1), resizing (shares change often), "
            "containment (no use of idle shares), replicas (copies of one model), multi-model (one server, several "
            "models), server (it does not end by itself), gaps (production waits between requests), progress (each has to keep advancing, instead of waiting "
            "for the one before it), managed-memory (UVM), vms, containers, kubernetes, occupied (the programs on the GPU cannot be ended). no-NAME: they do not. "
            "[for example: nccl,no-graphics]"
        ),
    ),
    ("--command", "CMD", "The program, to appear in the output: 'python3 train.py'."),
)


_REFUSED: Final = (
    Refused("--way", "--apply --measure", "it explains one way", "--way mps"),
    Refused("--file", "--live --from", "the workloads come from one place", "--file jobs.yaml"),
    Refused("--live", "--from", "the workloads come from one place", "--live"),
    Refused(
        "--production --opportunistic", "--file --live --from", "each workload there has its role", "--production 1"
    ),
    Refused("--processes", "--file", "the file has the number of each workload", "--file jobs.yaml"),
    Refused("--dry-run", "--apply --measure", "the advice itself changes nothing", "--apply --dry-run", needs=True),
    Refused(
        "CMD --metric --lower-is-better --for --repeat",
        "--measure",
        "it is for a measurement",
        "--measure -- CMD; to name the program only: --command 'CMD'",
        needs=True,
    ),
    Refused(
        "--lower-is-better",
        "--metric",
        "it is about that number",
        "--measure --metric 'ms=([0-9.]+)' --lower-is-better -- CMD",
        needs=True,
    ),
)


class _AdviseCommand(AskingCommand):
    """Adds the properties of a workload as options; --help shows those that are asked for, --help-all all of them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Make an option of each property, after the program and before the options of the function."""
        options = [
            TyperOption(
                # Its name is that in a file: one_application of --one-application/--many-applications.
                param_decls=[option.split("/")[0].strip("-").replace("-", "_"), option],
                metavar=metavar,
                is_flag=metavar is None,
                default=None,
                multiple=option == "--needs",
                help=text,
            )
            for option, metavar, text in _PROPERTIES
        ]
        program, *others = named["params"]
        self._names = [str(option.name) for option in options]
        super().__init__(*arguments, **{**named, "params": [program, *options, *others]})

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with the properties of the workload in the context, not as arguments."""
        words = {name: ctx.params.pop(name) for name in self._names}
        # --needs can be given several times.
        words["needs"] = ",".join(words["needs"]) if words["needs"] else None
        ctx.meta["workload"] = words
        return super().invoke(ctx)


@verb(_AdviseCommand, takes_program=True)
def advise(
    context: typer.Context,
    program: list[str] | None = argument("[CMD...]", "The program to measure, with --measure."),
    gpu: str | None = option("-g --gpu", "SET", "The GPUs to use: 0, 0-3. [default: all idle ones]"),
    file: str | None = option("-f --file", "FILE", "Workloads from a YAML file; - is stdin."),
    live: bool = flag("--live", "Use the workloads that run on the GPU now."),
    recording: str | None = option("--from", "FILE", "Use the workloads in a recording of gpushare observe."),
    way: str | None = option("--way", "NAME", "Explain why this way fits or does not."),
    apply: bool = flag("--apply", "Carry out the setup; preview with --dry-run."),
    no_input: bool = flag("--no-input", "Ask no questions."),
    consolidate: bool = flag("--consolidate", "Use as few GPUs as possible, instead of all that are idle."),
    measure: bool = flag("--measure", "Measure CMD in each way that fits (gpushare bench), then answer."),
    metric: str | None = PRINTED_NUMBER,
    lower: bool = LOWER_IS_BETTER,
    window: str | None = MEASURED_TIME,
    repeat: int = option("--repeat", "N", "Runs of each way.", default=3, min=1, max=100),
) -> Any:
    """Recommend a way of sharing, say why, and print the commands for this host.

    Give what you know; on a terminal, gpushare asks for the rest. The jobs go on all idle GPUs. Nothing is changed
    without --apply. A file uses the same names: workloads: [{processes: 4, memory: 6G}]
    """
    words = dict(context.meta["workload"])
    root = words.pop("root")
    destroy = words.pop("destroy")
    production_saturating = words.pop("production_saturating")
    production = _parse_count("--production", words.pop("production"))
    opportunistic = _parse_count("--opportunistic", words.pop("opportunistic"))
    command = words["command"]
    if program and command is None:
        words["command"] = shlex.join(program)
    refuse(_REFUSED)
    explained = None if way is None else way_of(way)
    measuring = None
    if measure:
        argv = program or (split_command("--command", command) if command else [])
        measuring = parse_measuring(argv, metric, window, repeat, lower=lower)
    # All words are checked before the host is asked, so that a typo costs nothing.
    if file is None:
        case = case_of(words, production, opportunistic, root=root)
    else:
        case = with_given_properties(case_from_file(file, root=root), words)
    from_host = live or recording is not None
    if not from_host:
        case = check_users(_with_production_saturating(case, production_saturating))

    # The advice itself only reads.
    settings.changes = apply or measure
    host = settings.connect()
    if apply and not settings.dry_run:
        from gpushare.cli.mig_change import recover_first

        recover_first(host, MigLedger(host))
    state = HostState(host)
    # Few answers name jobs: only these look for those that run.
    facts = replace(host_facts(state), ask_jobs=cache(lambda: tuple(_running_jobs(host))))
    fixed_gpu, among = _gpu_choice(state, facts, gpu)
    if from_host:
        answering = _answering_gpus(facts, among)
        fixed_gpu = fixed_gpu or _first_busy_gpu(answering if live else answering[:1])
        index = fixed_gpu.index
        seen = case_from_recording(recording, index, root=root) if recording else case_from_now(host, index, root=root)
        case = check_users(_with_production_saturating(with_given_properties(seen, words), production_saturating))
    if destroy is not None:
        case = replace(case, destroy=destroy)
    _check_sms(case, facts.gpus if fixed_gpu is None else (fixed_gpu,))
    gpu_facts = fixed_gpu or _answering_gpus(facts, among)[0]
    situation = Situation(case, facts, gpu_facts, load_table(), among=among, consolidate=consolidate)
    asks = not no_input and explained is None and _may_ask()
    situation = _choose_gpu_and_ask(situation, gpu_is_fixed=fixed_gpu is not None, one_gpu=measure, asks=asks)
    if measuring is not None:
        return measure_and_answer(host, situation, measuring, live=live, apply=apply)
    advice = advice_for(situation)
    data = advice_answer(advice)
    notes = [*data.notes, *([RESTART_NOTE] if live else [])]
    if apply:
        return carry_out_setup(advice, notes)
    verdict = None if explained is None else advice.verdict_on(explained)
    return _advice_result(data, notes) if verdict is None else _explained_result(data, verdict, notes)


def _with_production_saturating(case: Case, value: bool | None) -> Case:
    """Return the case with whether a production job alone fills the GPU; None: that is not given."""
    if value is None:
        return case
    if Role.PRODUCTION not in case.roles:
        raise BadUsage(
            "--production-saturating needs a production job",
            "give --production N, or a role in the file",
            code="no_role",
        )
    works = tuple(replace(work, saturating=value) if work.role is Role.PRODUCTION else work for work in case.workloads)
    return replace(case, workloads=works)


def _choose_gpu_and_ask(situation: Situation, *, gpu_is_fixed: bool, one_gpu: bool, asks: bool) -> Situation:
    """Return the situation on the best GPU and, if gpushare ``asks`` questions, with the user's answers: what is judged.

    ``gpu_is_fixed``: the GPU of the situation stays, and is the only one. ``one_gpu``: the advice is for one GPU.
    """
    if not gpu_is_fixed:
        situation = replace(situation, gpu=_gpu_to_begin_with(situation))
    if gpu_is_fixed or one_gpu:
        situation = replace(situation, among=(situation.gpu.index,))
    if asks:
        situation = ask_questions(ask_numbers(situation))
        if not gpu_is_fixed:
            # After the answers, another GPU may be better.
            situation = replace(situation, gpu=_gpu_to_begin_with(situation))
    return situation


def _parse_count(option: str, text: str | None) -> int | None:
    """Return the number of processes that an option gives; None: it is not given."""
    if text is None:
        return None
    try:
        return workload_of({"processes": text}).processes
    except BadUsage as error:
        raise BadUsage(f"{option}: {error.message}", error.hint, code=error.code) from None


def _running_jobs(host: Host) -> Iterator[RunningJob]:
    """Yield the jobs of gpushare that run now; none if the records cannot be read."""
    for record in or_none(lambda: records(host)) or ():
        if is_running(host, record):
            production = record.role == PRODUCTION
            yield RunningJob(record.name, production=production, mps=record.mps, devices=record.devices)


def _gpu_choice(state: HostState, facts: HostFacts, value: str | None) -> tuple[GpuFacts | None, tuple[int, ...]]:
    """Return the one GPU or MIG instance that -g names, or else the indexes of the GPUs to choose from; none: all GPUs.

    Raises GpuLost (none answers, or a named one does not), BadUsage (several, and a MIG instance is among them).
    """
    if not facts.gpus:
        raise no_gpu_error()
    if value is None or is_any(value):
        if all(gpu.error is not None for gpu in facts.gpus):
            raise GpuLost(str(facts.gpus[0].error), "see: gpushare status", gpu=facts.gpus[0].index)
        return None, ()
    devices = select_for_change(value, state.gpus)
    if len(devices) > 1 and all(device.mig is None for device in devices):
        return None, tuple(device.gpu.index for device in devices)
    # Refuses several, of which one is a MIG instance.
    device = select_one(value, state.gpus)
    whole_gpu = next(gpu for gpu in facts.gpus if gpu.index == device.gpu.index)
    return whole_gpu if device.mig is None else instance_facts(state, whole_gpu, device.mig), ()


def _check_sms(case: Case, gpus: Sequence[GpuFacts]) -> None:
    """Raise BadUsage if a process needs more SMs than the largest of these GPUs has."""
    needed = max(work.sms or 0 for work in case.workloads)
    counts = [gpu.multiprocessors for gpu in gpus if gpu.multiprocessors is not None]
    if len(counts) == len(gpus) and needed > max(counts):
        place = gpus[0].title if len(gpus) == 1 else "the largest GPU"
        raise BadUsage(
            f"{needed} SMs are asked for, and {place} has {max(counts)}",
            f"give --sms 1 to {max(counts)}",
            code="bad_count",
        )


def _answering_gpus(facts: HostFacts, among: Sequence[int]) -> list[GpuFacts]:
    return [gpu for gpu in facts.gpus if gpu.error is None and (gpu.index in among or not among)]


def _first_busy_gpu(gpus: Sequence[GpuFacts]) -> GpuFacts:
    """Return the first GPU with processes, else the first one."""
    return next((gpu for gpu in gpus if gpu.processes), gpus[0])


def _gpu_to_begin_with(situation: Situation) -> GpuFacts:
    """Return the GPU that the answer begins with: one on which programs run, if they are the case; else the best."""
    gpus = _answering_gpus(situation.host, situation.among)
    return _first_busy_gpu(gpus) if situation.case.any("running") else first_gpu(situation, gpus)


def _may_ask() -> bool:
    """Return whether questions can be asked: on a terminal, for an answer as a table."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
    return terminal and settings.output in {OutputFormat.AUTO, OutputFormat.TABLE}


RESTART_NOTE: Final = "running programs are not affected: they join MPS or an instance only after a restart"


def _explained_result(data: AdviceAnswer, verdict: WayVerdict, notes: list[str]) -> Result:
    """Return the result of --way: why one way fits or does not."""
    table = reasons_table([verdict], f"{verdict.title} on {data.gpu_title}: {verdict.outcome.value}")
    if data.winner != verdict.way:
        notes = [*notes, f"the advice for this case is: {data.answer} (drop --way to see it)"]
    return Result(data=replace(data, explained=verdict), tables=(table,), notes=tuple(notes))


def _advice_result(
    data: AdviceAnswer, notes: Sequence[str], measured_tables: Sequence[Table] = (), **errors: Any
) -> Result:
    """Return advice as a result, with the tables of what was measured, if anything was."""
    verdicts = verdicts_table(data)
    tables = [answer_table(data, whole=settings.verbose), *measured_tables, verdicts]
    if settings.verbose:
        tables.append(reasons_table(data.verdicts, "every rule"))
    return Result(data=data, tables=tuple(tables), csv=verdicts, notes=tuple(notes), **errors)


def case_of(words: Mapping[str, Any], production: int | None, opportunistic: int | None, *, root: bool | None) -> Case:
    """Return the case of the options: ``words`` are the properties of a workload, by their names in a file.

    ``production`` and ``opportunistic`` are numbers of processes; if both are None, the processes have no such roles.
    """
    if production is None and opportunistic is None:
        return Case(workloads=workloads_of(words), root=root)
    repeated = [f"--{name}" for name in ("processes", "role") if words.get(name) is not None]
    if repeated:
        raise BadUsage(
            "--production and --opportunistic already give the number and the role of the processes",
            f"drop {' and '.join(repeated)}",
            code="two_counts",
        )
    sizes = sizes_of(words.get("memory"))
    most, jobs_text, example = (1, "one job", "60G") if opportunistic is None else (2, "two jobs", "60G,40G")
    if len(sizes) > most:
        raise BadUsage(f"{len(sizes)} sizes of memory for {jobs_text}", f"give --memory {example}", code="bad_count")
    # A single size is that of both jobs.
    production_size, opportunistic_size = (sizes[0], sizes[-1]) if sizes else (None, None)
    workload = workload_of({**words, "memory": production_size})
    # --opportunistic alone: there is one production process. --bandwidth-bound is about the opportunistic job.
    production_job = replace(workload, role=Role.PRODUCTION, processes=production or 1, bandwidth_bound=None)
    if opportunistic is None:
        return Case(workloads=(production_job,), root=root)
    opportunistic_memory = workload_of({"memory": opportunistic_size}).memory
    opportunistic_job = replace(workload, role=Role.OPPORTUNISTIC, processes=opportunistic, memory=opportunistic_memory)
    # It is the opportunistic job that fills the GPU: if production did, sharing would make no sense.
    return Case(workloads=(replace(production_job, saturating=None), opportunistic_job), root=root)


def case_from_file(path: str, *, root: bool | None) -> Case:
    """Return the workloads of a YAML file as a case; ``-`` is stdin."""
    case = read_case(text_of(path, "YAML", "for its format, see: gpushare advise --help"), shown_path(path))
    return case if root is None else replace(case, root=root)


def with_given_properties(case: Case, words: Mapping[str, Any]) -> Case:
    """Return the case with the properties that are given as options, for all of its workloads."""
    if len(case.workloads) > 1 and words.get("processes") is not None:
        raise BadCombination(
            "--processes cannot be combined with several workloads", "give the number of each in the file: processes: 4"
        )

    overlay = workload_of({key: value for key, value in words.items() if value is not None})
    changes = {name: value for name, value in vars(overlay).items() if value is not None}
    return replace(case, workloads=tuple(replace(work, **changes) for work in case.workloads))


# -- what runs, and what ran -----------------------------------------------------------------------


def case_from_now(host: Host, index: int, *, root: bool | None) -> Case:
    """Return the programs on a GPU as a case: one workload per user and program."""
    gpu = next(gpu for gpu in Observer(host).read().gpus if gpu.index == index)
    if gpu.processes is None:
        raise NotFound(
            f"the processes on GPU {index} cannot be seen from here",
            f"say what runs: gpushare advise -g {index} --processes 4; or run this on the host, outside the container",
            code="not_seen",
        )
    programs = [
        process
        for process in gpu.processes
        if (process.compute or process.mps) and "nvidia-cuda-mps" not in (process.name or "")
    ]
    if not programs:
        raise NotFound(
            f"no program is running on GPU {index}",
            "say what you want to run: gpushare advise --processes 4",
            code="nobody",
        )
    graphics = any(process.graphics and not process.compute for process in gpu.processes) or None
    # The setup is for these programs, so they can be restarted.
    properties: dict[str, Any] = {"graphics": graphics, "occupied": False}
    workloads = [_workload_of_process(each.name, each.user, each.memory_used_bytes, **properties) for each in programs]
    return Case(workloads=_merge_processes(workloads), root=root)


def case_from_recording(path: str, index: int, *, root: bool | None) -> Case:
    """Return the programs on a GPU in a recording of ``gpushare observe`` as a case."""
    from gpushare.measure.dcgm import read_measured
    from gpushare.measure.recording import workloads_of

    recording = read_measured(path)
    if not recording.processes_known:
        raise NotSupported(
            f"{path} has no processes: dcgm-exporter does not list them",
            f"say what runs: gpushare advise --processes N --memory SIZE; see the GPUs: gpushare observe --from {shlex.quote(path)}",
            code="no_processes_recorded",
        )
    workloads = [
        _workload_of_process(
            used.process.name,
            used.process.user,
            used.memory_peak_bytes,
            pattern=None if used.pattern is None else Pattern(used.pattern),
        )
        for used in workloads_of(recording)
        if used.process.gpu == index
    ]
    if not workloads:
        see = f"see: gpushare observe --from {shlex.quote(path)}"
        raise NotFound(f"{path} has no program on GPU {index}", see, code="nobody")
    return Case(workloads=_merge_processes(workloads), root=root)


def _workload_of_process(name: str | None, user: str | None, used_bytes: int | None, **properties: Any) -> Workload:
    """Return a seen process as a workload. Its memory is without its CUDA context, which the advice adds; at least 1 MiB."""
    memory = None if used_bytes is None else max(used_bytes - MPS_CONTEXT_BYTES, MIB)
    return Workload(name=name, user=user, processes=1, memory=memory, **properties)


def _merge_processes(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """Merge the processes of one user and program into one workload, with the largest memory."""
    groups: dict[tuple[str | None, str | None], list[Workload]] = {}
    for workload in workloads:
        groups.setdefault((workload.user, workload.name), []).append(workload)
    merged = []
    for group in groups.values():
        sizes = [workload.memory for workload in group if workload.memory is not None]
        memory = max(sizes) if len(sizes) == len(group) else None
        patterns = {workload.pattern for workload in group}
        pattern = patterns.pop() if len(patterns) == 1 else None
        merged.append(replace(group[0], processes=len(group), memory=memory, pattern=pattern))
    return tuple(merged)


# -- questions -------------------------------------------------------------------------------------


def _prompt(text: str, words: list[str]) -> str:
    """Return a question with the words that may be typed; on lines of their own if one has no room for an answer, too."""
    answers = f"[{'/'.join(words)}, Enter: unknown] "
    width = max(shutil.get_terminal_size().columns, 40)
    if len(text) + len(answers) + max(map(len, words)) < width:
        return f"{text} {answers}"
    return "\n".join([*textwrap.wrap(text, width - 1), f"  {answers}"])


def ask_numbers(situation: Situation) -> Situation:
    """Ask how many processes there are, and how much memory each needs; an empty answer leaves that open."""
    workloads: list[Workload] = []
    single = len(situation.case.workloads) == 1
    for workload in situation.case.workloads:
        name = workload.name or ("" if workload.role is None else workload.role.value)
        of_name = f" of {name}" if name else ""
        if workload.processes is None and single:
            question = "How many processes are to share the GPU?"
            count = _ask_until_valid(question, "4", lambda line: workload_of({"processes": line}).processes)
            workload = replace(workload, processes=count)
        if workload.memory is not None:
            workloads.append(workload)
            continue
        text = f"How much GPU memory does one process{of_name} need at its peak, without its CUDA context?"
        example = "6G or 34G,17G" if single else "6G"
        with_memory = _ask_until_valid(text, example, partial(_with_memory_typed, workload, may_differ=single))
        workloads += with_memory or [workload]
    return replace(situation, case=replace(situation.case, workloads=tuple(workloads)))


def _ask_until_valid(text: str, example: str, read: Callable[[str], T]) -> T | None:
    """Ask until ``read`` accepts the line, and return what it makes of it; None: the line is empty."""
    while line := ask_line(_prompt(text, [f"like {example}"])).strip():
        try:
            return read(line)
        except BadUsage as error:
            sys.stderr.write(f"  {error.message}; {error.hint}\n")
    return None


def _with_memory_typed(workload: Workload, line: str, *, may_differ: bool) -> Sequence[Workload]:
    """Return a workload with a size of memory; if its processes ``may_differ``, one workload for each of several sizes."""
    sizes = sizes_of(line) if may_differ else [line]
    if len(sizes) > 1:
        return workloads_of_sizes(workload, sizes)
    return [replace(workload, memory=workload_of({"memory": line}).memory)]


def ask_questions(situation: Situation) -> Situation:
    """Ask the questions whose answers change the advice; an empty answer leaves one open, the end of the input all."""
    skipped: set[str] = set()
    while (question := next_question(situation, frozenset(skipped))) is not None:
        words = [answer.word for answer in question.answers]
        line = ask_line(_prompt(question.text or "", words))
        if not line:
            break
        text = line.strip().lower()
        fitting = [answer.value for answer in question.answers if text and answer.word.startswith(text)]
        if len(fitting) == 1:
            situation = with_answer(situation, question.field, fitting[0])
        elif text:
            sys.stderr.write(f"  choose one of: {', '.join(words)}\n")
            continue
        else:
            skipped.add(question.field)
    return situation


def carry_out_setup(advice: Advice, notes: Sequence[str]) -> Any:
    """Carry out the setup of the winner as one plan, or with --dry-run only show it."""
    if advice.best is None or advice.recipe is None:
        raise NotSupported(
            "nothing fits: there is nothing to set up", "see why: gpushare advise -v", code="nothing_fits"
        )
    way, recipe = advice.best.way, advice.recipe
    if recipe.several_shells:
        raise NotSupported(
            f"{way.label}: its lines name the instances that earlier ones create, so --apply cannot plan it as a whole",
            f"run them in order: {'; '.join(line.command for line in recipe.lines if line.command)}",
            code="several_shells",
        )
    changes = [change for line in recipe.lines if line.change is not None for change in line.change.per_gpu]
    if not changes:
        notes_of_plan = [f"{line.what}: {line.command}" if line.command else line.what for line in recipe.lines]
        plan = Plan(title="nothing", steps=(), notes=tuple(notes_of_plan))
        return plan_result(
            plan, dry_run=settings.dry_run, notes=notes, empty=f"nothing to set up; the answer is: {way.label}"
        )
    result = _with_undo_of_recipe(_carry_out_changes(changes), recipe)
    later = [f"then, {line.what}: {line.command}" for line in recipe.lines if line.command and line.change is None]
    return replace(result, notes=(*notes, *result.notes, *later))


def _with_undo_of_recipe(result: Result, recipe: Recipe) -> Result:
    """Return the result of the changes with the undo of the recipe in place of the plan's.

    The plan's stays if the recipe has an undo line without a command: its command is known only after the change.
    """
    if not result.data.steps or any(line.command is None for line in recipe.undo):
        return result
    notes = tuple(text for text in result.notes if not text.startswith("undo: "))
    undo = "; ".join(line.command for line in recipe.undo if line.command)
    done = with_undo([text for text, _ in result.done], undo) if result.done else ()
    return replace(result, notes=notes, done=done)


def _carry_out_changes(changes: Sequence[Change]) -> Result:
    """Carry out the changes in order: as one transaction if MIG changes, else as one plan."""
    mig_changes = [change for change in changes if change.verb.value.startswith("mig ")]
    if mig_changes:
        # What comes before is to stop our MPS daemon, and the MIG change does that itself.
        later = [change for change in changes[changes.index(mig_changes[0]) + 1 :] if change not in mig_changes]
        return _carry_out_mig_changes(mig_changes, later)
    host = settings.connect()
    device = select_one(changes[0].selector, gpus_of(host))
    # Their locks are held meanwhile: no other gpushare starts or changes the daemon.
    homes = []
    if changes[0].verb in {Verb.MPS_START, Verb.MPS_SET}:
        homes = [own_home(host, device.uuid)]
    return ask_and_carry_out(
        _plan_changes(host, device, changes), homes=homes, replan=lambda: _plan_changes(host, device, changes)
    )


def _carry_out_mig_changes(mig_changes: Sequence[Change], later: Sequence[Change]) -> Result:
    """Carry out changes of MIG, and the ``later`` ones that need the new instances, as one transaction."""
    from gpushare.cli.mig_change import carry_out_change

    several_verbs = len({change.verb for change in mig_changes}) > 1
    # Each GPU gets its own instances, but a transaction creates one wish.
    several_wishes = len(mig_changes) > 1 and mig_changes[0].verb is Verb.MIG_CREATE
    if several_verbs or several_wishes:
        needs = ", ".join(f"GPU {change.selector} needs `{change.verb.value}`" for change in mig_changes)
        commands = "; ".join(shlex.join(["gpushare", *change.words]) for change in mig_changes)
        raise NotSupported(
            f"{needs}: --apply carries out one kind of change of MIG as a transaction, not several",
            f"run them one after the other: {commands}",
            code="several_changes",
        )
    return carry_out_change(lambda host, ledger: _mig_change(host, ledger, mig_changes, later))


def _mig_change(host: Host, ledger: MigLedger, of_mig: Sequence[Change], later: Sequence[Change]) -> MigChange:
    """Return one MIG change for changes of one kind, with the steps of the ``later`` ones after it."""
    from gpushare.cli.mig_change import change_of, current_layouts, planned_or_refused

    gpus, layouts = current_layouts(host, ",".join(change.selector for change in of_mig))
    change_by_gpu = {gpu: change for change in of_mig for gpu in change.gpus}
    if of_mig[0].verb is Verb.MIG_CREATE:
        planned = plan_add(layouts, of_mig[0].wish)
        modes: dict[int, bool] = {}
    else:
        planned = plan_exact(layouts, {gpu: change.wish for gpu, change in change_by_gpu.items()})
        modes = {gpu: change.verb is not Verb.MIG_DISABLE for gpu, change in change_by_gpu.items()}
    title = "; ".join(" ".join(change.words[1:]) for change in of_mig)
    after = Naming(after=tuple(_later_step(host, change) for change in later))
    return change_of(host, ledger, gpus, layouts, planned_or_refused(planned), title, modes=modes, naming=after)


def _plan_changes(host: Host, device: Device, changes: Sequence[Change]) -> Plan:
    """Return the plan of changes without MIG: the first is planned now, the others when the first is done."""
    first = changes[0]
    limits = first.limits or Limits()
    if first.verb is Verb.MPS_START:
        plan = plan_start(host, device, limits, exclusive=False)
    elif first.verb is Verb.MPS_SET:
        try:
            plan = plan_limits(host, device, limits)
        except NotFound:
            # The daemon has died since, or its start was interrupted, which a new start finishes.
            plan = plan_start(host, device, limits, exclusive=False)
    elif first.level is not None:
        plan = plan_level(host, [device], first.level)
    else:
        plan = _plan_stop(host, device)
    later = [_later_step(host, change) for change in changes[1:]]
    parts = (plan, *(Plan(title=step.what, steps=(step,)) for step in later))
    return replace(plan, steps=(*plan.steps, *later), parts=parts)


def _plan_stop(host: Host, device: Device) -> Plan:
    """Return the plan that stops gpushare's MPS daemon of a device, if one runs and nobody uses it."""
    steps = []
    for daemon in own_daemons(host, device.gpu):
        if daemon.device.uuid == device.uuid:
            refuse_used(host, daemon)
            steps.append(stop_step(host, daemon))
    return Plan(title=f"MPS on {device.title} is stopped", steps=tuple(steps))


def _later_step(host: Host, change: Change) -> Step:
    """Return the step that sets a level or starts an MPS daemon after another change of the GPU.

    The daemon is planned when the step acts: the device that it serves may not be there before the other change.
    """
    gpu = host.nvml.gpu(change.gpus[0])
    if change.level is not None:
        return level_step(host, gpu, change.level, gpu.time_slice)
    wish = MpsWish(limits=change.limits or Limits())

    def current_device() -> Device:
        gpu_now = host.nvml.gpu(gpu.index)
        return Device(gpu=gpu_now) if change.instance is None else select_one(change.instance, [gpu_now])

    title = f"GPU {gpu.index}" if change.instance is None else current_device().title
    return daemon_step(host, title, current_device, wish, selector=change.selector)


# Fewer copies do not share; so many are measured if the number of processes is unknown.
_FEWEST_COPIES: Final = 2


def parse_measuring(
    argv: Sequence[str], metric: str | None, window: str | None, repeat: int, *, lower: bool
) -> BenchSettings:
    """Return what the options of --measure say; the ways and the number of copies follow from the advice."""
    from gpushare.cli.bench import check_window
    from gpushare.measure.bench import Settings as BenchSettings
    from gpushare.measure.metric import parse_metric

    if not argv:
        raise BadUsage(
            "--measure needs a program to run", "give it last: gpushare advise --measure -- CMD", code="no_command"
        )
    check_window(window, metric)
    return BenchSettings(
        argv=argv,
        metric=parse_metric(metric, higher_is_better=not lower),
        repeat=repeat,
        window=None if window is None else positive_time("--for", window, "3s"),
    )


def measure_and_answer(host: Host, situation: Situation, measuring: BenchSettings, *, live: bool, apply: bool) -> Any:
    """Measure the ways that fit, and answer by the figures; by the rules, where nothing can be measured.

    The setup of the answer is carried out (``apply``) only if the rules or a finished measurement have found it.
    """
    from gpushare.cli.bench import bench_plan, measure_with_progress
    from gpushare.measure.bench import prepare
    from gpushare.measure.ways import parse_ways

    if situation.pair:
        raise NotSupported(
            "copies of one program cannot show how production behaves next to another job",
            "measure the two: gpushare tune --production 'CMD' --opportunistic 'CMD'",
            code="pair_not_measured",
        )
    # As many processes of the case as can run at once.
    at_once = [situation.at_a_time(Way.TIMESLICE), situation.at_a_time(Way.MPS), situation.case.processes]
    copies = min((count for count in at_once if count is not None), default=_FEWEST_COPIES)
    notes = _notes_of_copies(situation.case, copies, live=live)
    if situation.case.processes is None:
        works = tuple(replace(work, processes=copies) for work in situation.case.workloads)
        situation = replace(situation, case=replace(situation.case, workloads=works))
    advice = advice_for(situation)
    reason = _why_not_measured(advice)
    if reason is not None:
        return _set_up_or_show(unmeasured_advice(advice, reason, copies), None, notes, apply=apply)
    device = select_one(situation.gpu.selector, gpus_of(host))
    try:
        ways = parse_ways(",".join(bench_ways(advice)))
        prepared = prepare(host, device, replace(measuring, cells=[(way, copies) for way in ways]))
        if settings.dry_run:
            return bench_plan(host, device, prepared)
        data, measurement = measure_with_progress(host, device, prepared)
    except NotSupported as error:
        # The rules still have an answer.
        advice_of_rules = unmeasured_advice(advice, f"nothing could be measured: {error.message}", copies)
        return _set_up_or_show(advice_of_rules, None, notes, apply=False, error=error)
    early = _early_end_error(measurement)
    return _set_up_or_show(
        measured_advice(advice, data, copies),
        data,
        notes,
        apply=apply and early is None,
        error=early,
        exit_code=None if measurement.signal is None else 128 + measurement.signal,
    )


def _notes_of_copies(case: Case, copies: int, *, live: bool) -> list[str]:
    """Return how the copies that are measured differ from the case."""
    notes = [RESTART_NOTE] if live else []
    several = len(case.workloads) > 1
    if case.processes is None and not several:
        notes.append(f"assuming {copies} processes; for another number: --processes N")
    if case.processes not in {None, copies}:
        notes.append(f"measured with {copies} copies; the case has {case.processes} processes")
    if several:
        notes.append("copies of one program were measured; the case has several programs")
    return notes


def _why_not_measured(advice: Advice) -> str | None:
    """Return why nothing is to be measured; None if at least two ways can be compared."""
    if advice.best is None:
        return "nothing fits: there is nothing to measure"
    if not advice.situation.several:
        return "one process does not share: there is nothing to measure"
    names = set(bench_ways(advice))
    comparable = [way for way, bench_names in BENCH_WAYS.items() if names & set(bench_names)]
    if len(comparable) < 2:
        only = comparable[0].label if comparable else "none of those that gpushare bench measures"
        return f"the rules leave nothing to compare ({only})"
    return None


def _early_end_error(measurement: Measurement) -> GpushareError | None:
    """Return the error of a benchmark that was interrupted or failed; None: it was finished."""
    if measurement.interrupted:
        remainder = (
            f"the answer uses the {len(measurement.runs)} finished runs" if measurement.runs else "nothing was measured"
        )
        return Interrupted(f"interrupted; {remainder}", "the copies were ended and the host was restored")
    return measurement.error


def _set_up_or_show(
    measured_advice: MeasuredAdvice,
    bench: BenchAnswer | None,
    notes: Sequence[str],
    *,
    apply: bool,
    error: GpushareError | None = None,
    exit_code: int | None = None,
) -> Any:
    """With ``apply`` carry out the setup of the answer after a measurement, else return the answer as a result."""
    from gpushare.cli.bench import bench_notes
    from gpushare.show.bench import bench_result

    data = answer_of(measured_advice, bench)
    all_notes = [*notes, *data.notes]
    if bench is not None:
        all_notes += bench_notes(bench)
    if apply:
        return carry_out_setup(measured_advice.final, [f"measured: {measured_advice.measured.sentence}", *all_notes])
    tables = bench_result(_with_chosen_way(bench, measured_advice)).tables if bench is not None and bench.cells else ()
    if error is None:
        return _advice_result(data, all_notes, tables)
    return _advice_result(data, all_notes, tables, errors=(error,), exit_code=exit_code)


def _with_chosen_way(bench: BenchAnswer, measured_advice: MeasuredAdvice) -> BenchAnswer:
    """Return the measurement with the cells of the final answer marked as chosen, instead of those with the best figures."""
    answer = measured_advice.measured
    # For two copies a cap of 200/n % is 100 %, so plain MPS was measured in its place, and that cell is marked.
    measured_as = [cell.measured_as for cell in bench.cells if (cell.way, cell.copies) == (answer.way, answer.copies)]
    name = next((cell.way for cell in measured_as if cell.copies == answer.copies), answer.way)
    return replace(bench, cells=tuple(replace(cell, chosen=cell.way == name) for cell in bench.cells))
