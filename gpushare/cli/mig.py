"""``gpushare mig``: instances and layouts; done by `gpushare/mig/`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import typer

from gpushare.base.errors import ExitCode, GpuLost, GpushareError, NotSupported
from gpushare.base.model import Gpu
from gpushare.base.selection import no_mig_error
from gpushare.base.values import dataclass
from gpushare.cli import mig_change, mig_files
from gpushare.cli.mig_change import planned_or_refused
from gpushare.cli.mig_files import mode_text, typed_wish
from gpushare.cli.options import (
    GPU_OPTION,
    GROUP,
    NEEDED_MEMORY,
    NEEDED_SMS,
    WISHES,
    AskingCommand,
    ChangingCommand,
    Command,
    Refused,
    argument,
    flag,
    gpus_named,
    option,
    refuse,
    settings,
)
from gpushare.gpu_models import find_model
from gpushare.host.host import Host
from gpushare.mig.holders import no_plan_error
from gpushare.mig.layouts import layouts_of
from gpushare.mig.ledger import MigLedger
from gpushare.mig.places import named_places
from gpushare.mig.plan import Cost, MigPlan, Why, shown_steps
from gpushare.mig.planner import plan_add, plan_exact
from gpushare.mig.profile import Layout
from gpushare.mig.recover import leftovers
from gpushare.mig.target import need_name
from gpushare.plan import Plan
from gpushare.show.mig import (
    MigGpu,
    ProfileRow,
    grouped_text,
    layout_text,
    plan_text,
    profile_rows,
    profiles_table,
    silent_lines,
    status_csv,
    status_row,
)
from gpushare.show.plan import PlanAnswer, plan_result, with_answer
from gpushare.show.render import form_of
from gpushare.show.result import OutputFormat, Result
from gpushare.show.status import gpu_errors


@dataclass(frozen=True, kw_only=True)
class MigEnvAnswer:
    """The answer of `mig env`."""

    name: str
    # The UUID of the MIG device.
    uuid: str
    gpu: int
    profile: str
    # The memory slice at which it begins.
    start: int
    environment: Mapping[str, str]


def env(name: str = argument("NAME", "The name of an instance.", default=...)) -> Any:
    """Print the export line that makes a shell's programs use an instance: eval "$(gpushare mig env train)".

    The instance is checked first: a MIG UUID that came back with another size is not printed. Other programs may use
    the instance at the same time: `gpushare run --mig` keeps other runs out.
    """
    places = named_places(settings.connect(), need_name(name, 'eval "$(gpushare mig env NAME)"'))
    place = places[0]
    environment = {"CUDA_VISIBLE_DEVICES": place.mig.uuid}
    notes: tuple[str, ...] = ()
    if len(places) > 1:
        notes = (f"{name} has {len(places)} compute instances; this is the first, and a CUDA program uses one",)
    return Result(
        data=MigEnvAnswer(
            name=name,
            uuid=place.mig.uuid,
            gpu=place.gpu.index,
            profile=place.instance.profile.name,
            start=place.instance.start,
            environment=environment,
        ),
        text="\n".join(f"export {key}={shlex.quote(value)}" for key, value in environment.items()),
        notes=notes,
    )


app = typer.Typer(
    **GROUP, help="MIG: instances, profiles, and exact plans with the fewest changes, carried out as transactions."
)
MODEL: Final = option("--model", "MODEL", "An empty GPU of this model instead of this host's GPUs: h100-80gb.")
_GPU_OR_MODEL: Final = (Refused("--gpu", "--model", "it is a GPU of this host", "'3g.40gb*2' --model h100-80gb"),)


def status(gpu: str | None = GPU_OPTION) -> Any:
    """Show the MIG instances of each GPU with placement and processes (UUIDs: -v), and what still fits.

    Of several GPUs a terminal shows no UUIDs, unless -v or -g is given, and GPUs that look the same are shown once. A *
    marks an instance in use. With MIG on and no instance, no CUDA program can use the GPU.
    """
    host = settings.connect()
    gpus, silent = capable_gpus(host, gpu)
    hidden: dict[int, GpushareError] = {}
    layouts = layouts_of(host, gpus, hidden)
    screen = form_of(settings.output, terminal=sys.stdout.isatty()) is OutputFormat.TABLE
    uuids = settings.verbose or gpu is not None or len(gpus) == 1 or not screen
    texts: list[tuple[int, str]] = []
    rows: list[MigGpu] = []
    unusable_notes: list[str] = []
    for mig_gpu, layout in zip(gpus, layouts, strict=True):
        error = hidden.get(mig_gpu.index)
        title = f"{mig_gpu.name}   MIG {mode_text(mig_gpu)}"
        if error is not None:
            texts.append((mig_gpu.index, f"{title}\n  unknown: {error.message}"))
            rows.append(status_row(mig_gpu, None, error.message))
            continue
        texts.append((mig_gpu.index, f"{title}\n{layout_text(layout, uuids=uuids)}"))
        rows.append(status_row(mig_gpu, layout, None))
        if mig_gpu.mig_enabled and not layout.instances:
            unusable_notes.append(f"GPU {mig_gpu.index}: MIG is on without an instance: no CUDA program can use it")
    text = grouped_text(texts)
    if not uuids and any(layout.instances for layout in layouts):
        text += "\n\nUUIDs: gpushare mig status -v"
    notes = [str(leftover) for leftover in leftovers(host, MigLedger(host))]
    notes += [*unusable_notes, *(f"{error.message}: {error.hint}" for error in hidden.values())]
    return Result(
        data=MigStatusAnswer(gpus=tuple(rows)),
        text=text + silent_lines(silent),
        csv=status_csv(rows),
        notes=tuple(notes),
        errors=gpu_errors(silent),
    )


def profiles(gpu: str | None = GPU_OPTION, model: str | None = MODEL) -> Any:
    """Show the GPU instance profiles that the driver offers, with free counts and placements.

    The number in a name is rounded; the memory column is exact. With --model, published facts replace the
    driver's, each with its confidence; the driver's may differ.
    """
    silent: Sequence[Gpu] = ()
    if model is not None:
        layout, confidence = model_layout(model)
        rows = profile_rows(layout, confidence)
    else:
        host = settings.connect()
        gpus, silent = capable_gpus(host, gpu)
        rows = [row for layout in layouts_of(host, gpus) for row in profile_rows(layout)]
    return Result(
        data=MigProfilesAnswer(profiles=tuple(rows)), tables=(profiles_table(rows),), errors=gpu_errors(silent)
    )


def fits(
    wish: list[str] | None = WISHES,
    gpu: str | None = GPU_OPTION,
    model: str | None = MODEL,
    memory: str | None = NEEDED_MEMORY,
    sm: int | None = NEEDED_SMS,
) -> Any:
    """Tell whether a wish fits next to what exists: yes, and where; no, and what is in the way; or never.

    Exit code 0: it fits; 7: not at the moment; 3: never on these GPUs.
    """
    refuse(_GPU_OR_MODEL)
    wanted = typed_wish(wish, memory, sm)
    _, layouts = chosen_gpus(gpu, model)
    answer = plan_add(layouts, wanted)
    if not isinstance(answer, MigPlan) and answer.why is Why.NEVER:
        raise no_plan_error(answer)
    if isinstance(answer, MigPlan):
        places = [
            f"{'' if new.whole else 'in '}{new.instance} on GPU {planned.gpu}"
            for planned in answer.gpus
            for new in planned.created
        ]
        text = "yes: " + ", ".join(places) + "\n\n" + plan_text(answer, {layout.gpu: layout for layout in layouts})
        return Result(data=MigFitsAnswer(fits=True, where=tuple(places)), text=text)
    data = MigFitsAnswer(fits=False, would_go=tuple(f"{change} on GPU {index}" for index, change in answer.would_go))
    text = f"no: {answer.message}"
    return Result(data=data, text=text, notes=(answer.hint,), exit_code=ExitCode.NOT_AS_REQUESTED)


def plan(
    wish: list[str] | None = WISHES,
    gpu: str | None = GPU_OPTION,
    model: str | None = MODEL,
    memory: str | None = NEEDED_MEMORY,
    sm: int | None = NEEDED_SMS,
    exact: bool = flag("--exact", "Plan exactly this layout and nothing else."),
    may_destroy: bool = flag("--may-destroy", "Idle instances may be destroyed."),
) -> Any:
    """For a wish, print the plan that destroys and creates the fewest instances, with a picture and nvidia-smi commands.

    Busy instances always stay. Without --exact the wish is added, and idle instances are destroyed only with
    --may-destroy. Several GPUs share a wish at the lowest cost; with --exact each gets all of it.
    """
    refuse(_GPU_OR_MODEL)
    wanted = typed_wish(wish, memory, sm)
    gpus, layouts = chosen_gpus(gpu, model)
    if exact:
        layout_plan = planned_or_refused(plan_exact(layouts, {layout.gpu: wanted for layout in layouts}))
    else:
        layout_plan = planned_or_refused(plan_add(layouts, wanted, may_destroy=may_destroy))
    steps = tuple(shown_steps(layout_plan, [each.index for each in gpus if not each.mig_enabled]))
    # The undo of a new instance has a word in place of its id, which is not known yet.
    has_placeholder = any("-ci CI" in (step.undo or "") for step in steps)
    notes = ("GI and CI are the ids that the steps print when they create an instance",) if has_placeholder else ()
    result = plan_result(Plan(title="the layout", steps=steps, notes=notes), dry_run=True)
    return replace(
        with_answer(result, MigPlanAnswer, cost=layout_plan.cost),
        text=plan_text(layout_plan, {layout.gpu: layout for layout in layouts}),
        tables=result.tables if steps else (),
    )


@dataclass(frozen=True, kw_only=True)
class MigPlanAnswer(PlanAnswer):
    """The answer of `mig plan`."""

    cost: Cost


def capable_gpus(host: Host, gpu: str | None) -> tuple[Sequence[Gpu], Sequence[Gpu]]:
    """Return the GPUs that -g names and that have MIG, at least one; and those that it names and that do not answer."""
    chosen = gpus_named(host, gpu)
    gpus = [each for each in chosen if each.mig_capable and each.error is None]
    silent = [each for each in chosen if each.error is not None]
    if silent and not gpus:
        raise _silent_error(silent)
    if not gpus:
        raise no_mig_error(chosen, "try one that has it: gpushare mig profiles --model h100-80gb")
    return gpus, silent


def _silent_error(silent: Sequence[Gpu]) -> GpuLost:
    return GpuLost(str(silent[0].error), "see: gpushare status", gpu=silent[0].index)


def chosen_gpus(gpu: str | None, model: str | None) -> tuple[Sequence[Gpu], Sequence[Layout]]:
    """Return the GPUs that a wish is for, with their layouts; for --model no GPU, and the layout of an empty one."""
    if model is not None:
        return (), [model_layout(model)[0]]
    host = settings.connect()
    gpus, silent = capable_gpus(host, gpu)
    if silent and gpu not in {None, "all"}:
        raise _silent_error(silent)
    return gpus, layouts_of(host, gpus)


def model_layout(model: str) -> tuple[Layout, dict[str, str]]:
    """Return an empty GPU of a model from the catalogue, with the confidence of each profile."""
    entry = find_model(model)
    if not entry.profiles:
        raise NotSupported(f"{entry.name} has no MIG", "see which have: gpushare sim list --models", code="no_mig")
    return Layout(gpu=0, profiles=entry.profiles), dict(entry.confidence)


@dataclass(frozen=True, kw_only=True)
class MigFitsAnswer:
    """The answer of `mig fits`."""

    fits: bool
    # Places, in words.
    where: tuple[str, ...] = ()
    # What is in the way, in words.
    would_go: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MigStatusAnswer:
    """The answer of `mig status`."""

    gpus: tuple[MigGpu, ...]


@dataclass(frozen=True, kw_only=True)
class MigProfilesAnswer:
    """The answer of `mig profiles`."""

    profiles: tuple[ProfileRow, ...]


for function, kind, text in (
    (status, Command, "Show instances, free placements and unusable slices."),
    (profiles, Command, "Show the profiles and where they fit."),
    (fits, Command, "Tell whether a wish fits, and what is in the way."),
    (plan, Command, "Print the cheapest plan for a wish."),
    (mig_change.create, ChangingCommand, "Add instances; nothing is destroyed."),
    (mig_change.destroy, AskingCommand, "Destroy instances."),
    (mig_change.apply, AskingCommand, "Give GPUs exactly this layout."),
    (mig_change.enable, AskingCommand, "Switch MIG mode on."),
    (mig_change.disable, AskingCommand, "Switch MIG mode off."),
    (mig_change.recover, ChangingCommand, "Undo a change that was interrupted."),
    (mig_files.check, Command, "Check whether the GPUs have a layout; exit 7 if not."),
    (env, Command, "Print the variable for a named instance."),
    (mig_change.grant, ChangingCommand, "Let only named users use an instance."),
    (mig_change.revoke, AskingCommand, "Revoke a grant."),
    (mig_change.name, AskingCommand, "Name an instance, or forget a name."),
):
    app.command(cls=kind, short_help=text)(function)
