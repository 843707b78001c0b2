"""MIG in nvidia-smi of a simulated host: MIG mode, and GPU and compute instances created and destroyed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from gpushare.gpu_models import GiProfile
from gpushare.sim import activity, library_mig, mig
from gpushare.sim.activity import Resident
from gpushare.sim.devices import forget_gone
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Refused, Target
from gpushare.sim.processes import holding
from gpushare.sim.smi_options import (
    HELP,
    MAYBE,
    NO_VALUE,
    VALUE,
    Wrong,
    choose,
    number,
    parse,
    require_root,
    supports,
)
from gpushare.sim.state import SimulatedGpuInstance, SimulatedHostState, SimulatedMigInstance
from gpushare.values import dataclass

_NO_PERSISTENCE = (
    "\nWarning: persistence mode is disabled on device {}. See the Known Issues section of the nvidia-smi(1) man page "
    "for more information. Run with [--help | -h] switch to get more information on how to enable persistence mode.\n"
)
_IN_USE = (
    "{} is currently being used by one or more other processes (e.g. CUDA application or a monitoring application such "
    "as another instance of nvidia-smi). Please first kill all processes using the device and retry the command or "
    "reboot the system to make MIG mode effective.\n"
)
_REBOOT = "Reboot the system or try nvidia-smi --gpu-reset to make MIG mode effective on GPU {}\n"
# Of several commands the first one here is carried out.
_COMMANDS = {"-cgi": VALUE, "-dgi": NO_VALUE, "-cci": MAYBE, "-dci": NO_VALUE}
_OPTIONS = {**_COMMANDS, "-i": VALUE, "-gi": VALUE, "-ci": VALUE, "-C": NO_VALUE}


@dataclass(frozen=True)
class _Place:
    """One GPU instance that a command is about, with its GPU and profile."""

    one: Target
    profile: GiProfile
    instance: SimulatedGpuInstance

    @property
    def id(self) -> int:
        return self.instance.gpu_instance_id

    @property
    def title(self) -> str:
        return f"GPU {self.one.handle.index:>2} GPU instance ID {self.id:>2}"

    def compute_instances(self) -> list[SimulatedMigInstance]:
        return [each for each in self.one.gpu.mig if each.gpu_instance_id == self.id]


def set_mode(state: SimulatedHostState, one: Target, wanted: int) -> str:
    """Carry out ``-mig`` on one GPU and return what is said.

    Raises:
        Refused: the GPU cannot, or the user may not.
    """
    verb, bus = ("disable", "enable")[wanted], one.gpu.pci_bus_id
    if one.gpu.mig_mode is None or not supports(one, "nvmlDeviceSetMigMode"):
        raise Refused(Code.NOT_SUPPORTED)
    require_root(state)
    code = library_mig.set_mode(one.gpu, one.model, wanted, _residents(state, one))
    forget_gone(one.gpu)
    if code == Code.SUCCESS:
        return f"{verb.title()}d MIG Mode for GPU {bus}\n{'' if one.gpu.persistence else _NO_PERSISTENCE.format(bus)}"
    text = f"Warning: MIG mode is in pending {verb} state for GPU {bus}:{ERROR_TEXTS[code]}\n"
    return text + (_IN_USE if code == Code.IN_USE else _REBOOT).format(bus)


def run(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out the words after ``mig`` on the state; return exit code and output."""
    options = parse(words, _OPTIONS, subcommand=True)
    command = next((name for name in _COMMANDS if name in options), None)
    if command is None:
        return 2, f"Invalid combination of input arguments.{HELP}"
    chosen = choose(state, options.get("-i"))
    enabled = [one for one in chosen if one.mig_enabled]
    if not enabled:
        none = all(one.gpu.mig_mode is None for one in chosen)
        return (6, "No MIG-supported devices found.\n") if none else (0, "No MIG-enabled devices found.\n")
    wishes = None if options.get(command) is None else [part for part in (options[command] or "").split(",") if part]
    if command == "-cgi":
        made = (_create(state, one, wish, whole="-C" in options) for one in enabled for wish in wishes or [])
        return _carry_out("create GPU instances", chain.from_iterable(made))
    places = _places(enabled, _ids(options.get("-gi")))
    if command == "-dgi":
        return _carry_out("destroy GPU instances", (_destroy(state, place, None) for place in places))
    if command == "-cci":
        kinds = [None] if wishes is None else wishes
        parts_made = (_create_compute_instance(state, place, kind) for place in places for kind in kinds)
        return _carry_out("create compute instances", parts_made)
    ids = _ids(options.get("-ci"))
    parts = [(place, part.compute_instance_id) for place in places for part in place.compute_instances()]
    parts = [(place, identity) for place, identity in parts if ids is None or identity in ids]
    if not parts:
        return 6, "No compute instances found: Not Found\n"
    return _carry_out("destroy compute instances", (_destroy(state, *part) for part in parts))


def _ids(text: str | None) -> set[int | None] | None:
    return None if text is None else {number(part) for part in text.split(",")}


def _places(chosen: list[Target], ids: set[int | None] | None) -> list[_Place]:
    """Return the GPU instances in the order of nvidia-smi: by NVML's number of their profile, then by id."""
    found: list[_Place] = []
    for one in chosen:
        here = [
            _Place(one, profile, instance)
            for instance in mig.gpu_instances(one.gpu)
            if (profile := one.model.profile(instance.profile)) and (ids is None or instance.gpu_instance_id in ids)
        ]
        found += sorted(here, key=lambda place: (place.profile.nvml_profile or 0, place.id))
    if not found:
        raise Wrong(6, "No GPU instances found: Not Found\n")
    return found


def _carry_out(what: str, lines: Iterable[str]) -> tuple[int, str]:
    """Do one thing after the other and return what is said; what was done before a failure stays."""
    text = ""
    try:
        for line in lines:
            text += line
    except Wrong as wrong:
        return wrong.code, f"{text}{wrong.text}Failed to {what}: {ERROR_TEXTS[wrong.code]}\n"
    return 0, text


def _residents(state: SimulatedHostState, one: Target) -> list[Resident]:
    return [*activity.residents(state, one), *holding(state, one.handle.index)]


@contextmanager
def _attempt(state: SimulatedHostState, one: Target, what: str) -> Iterator[list[Resident]]:
    """Yield the processes that are on the GPU or hold it open; report a refusal as the program does."""
    try:
        require_root(state)
        yield _residents(state, one)
        forget_gone(one.gpu)
    except Refused as refused:
        raise Wrong(int(refused.code), f"Unable to {what}: {ERROR_TEXTS[refused.code]}\n") from None


def _create(state: SimulatedHostState, one: Target, wish: str, *, whole: bool) -> Iterator[str]:
    where, (name, _, start) = f"GPU {one.handle.index:>2} using profile", wish.strip().partition(":")
    with _attempt(state, one, f"create a GPU instance on {where} {wish}") as residents:
        profile = next((each for each in one.model.profiles if name in {str(each.id), each.name}), None)
        if profile is None or profile.id is None:
            raise Refused(Code.INVALID_ARGUMENT)
        first = number(start)
        placement = None if first is None else (first, profile.size or 0)
        identity = library_mig.create_gpu_instance(one.gpu, one.model, profile.id, placement, residents)
    yield f"Successfully created GPU instance ID {identity:>2} on {where} MIG {profile.name} (ID {profile.id:>2})\n"
    if whole:
        made = next(each for each in mig.gpu_instances(one.gpu) if each.gpu_instance_id == identity)
        yield _create_compute_instance(state, _Place(one, profile, made), None)


def _create_compute_instance(state: SimulatedHostState, place: _Place, wish: str | None) -> str:
    one, owner = place.one, place.profile
    with _attempt(state, one, f"create a compute instance on {place.title} using profile {wish or 'default'}"):
        name, _, start = (wish or str(mig.whole(owner))).partition(":")
        kind = next((each for each in mig.offered(owner) if name in {str(each), _compute_name(owner, each)}), None)
        if kind is None:
            raise Refused(Code.INVALID_ARGUMENT)
        first = number(start)
        placement = None if first is None else (first, mig.slices_of(kind))
        identity = library_mig.create_compute_instance(one.gpu, one.model, place.id, kind, placement)
    made = f"using profile MIG {_compute_name(owner, kind)} (ID {kind:>2})"
    return f"Successfully created compute instance ID {identity:>2} on {place.title} {made}\n"


def _destroy(state: SimulatedHostState, place: _Place, part: int | None) -> str:
    """Destroy a GPU instance, or a compute instance of it."""
    gpu = place.one.gpu
    what = f"GPU instance ID {place.id:>2} from GPU {place.one.handle.index:>2}"
    if part is not None:
        what = f"compute instance ID {part:>2} from {place.title}"
    with _attempt(state, place.one, f"destroy {what}") as residents:
        if part is None:
            library_mig.destroy_gpu_instance(gpu, place.id, residents)
        else:
            library_mig.destroy_compute_instance(gpu, place.id, part, residents)
    return f"Successfully destroyed {what}\n"


def _compute_name(owner: GiProfile, kind: int) -> str:
    """Return the name of a compute instance profile: ``3g.71gb``, ``1c.3g.71gb``."""
    return owner.name if kind == mig.whole(owner) else f"{mig.slices_of(kind)}c.{owner.name}"
