"""nvidia-smi of a simulated host: the commands that gpushare runs or prints, with their output and exit code.

Any other option is answered as a wrong one. Texts: an H200 with driver 580.159.04, and what the programs of drivers 550
and 580 say to wrong arguments on NVIDIA's mocked NVML. Errors go to stdout too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.base.values import dataclass
from gpushare.gpu_models import GiProfile, model_of
from gpushare.host.program import Completed
from gpushare.sim import activity
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Handle, HandleKind, Refused, Target
from gpushare.sim.state import SimulatedGpuInstance, SimulatedHostState, SimulatedMigInstance, StateFile

if TYPE_CHECKING:
    from gpushare.sim.activity import Resident

_NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display "
    "Driver is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n"
)
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
    "NVIDIA driver is installed and running.\n\n"
)
_HELP: Final = " Please run 'nvidia-smi -h' for help.\n\n"
_LEVELS = ("Default", "Short", "Medium", "Long")
_COMPUTE_MODES = ("DEFAULT", "", "PROHIBITED", "EXCLUSIVE_PROCESS")
_SWITCH = ("DISABLED", "ENABLED")
# What the value of each option sets: a name or its number.
_MODES = {
    option: {text: place for place, name in enumerate(names) if name for text in (name, str(place))}
    for option, names in (("-c", _COMPUTE_MODES), ("-mig", _SWITCH), ("-pm", _SWITCH))
}
# How an option takes a value.
_NO_VALUE, _VALUE, _MAYBE = "no", "yes", "maybe"


class Wrong(Exception):
    """The command failed: its exit code, and what the program prints for it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name. It never blocks."""
    words = list(argv[1:])
    state = current(state_file)
    # NVIDIA's own messages of this kind go to stdout.
    failures = (
        (not state.nvml_installed, 12, _NO_LIBRARY),
        (not state.driver_loaded, 9, _NO_DRIVER),
        (state.library_mismatch, 18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        (state.permission_denied, 4, "Failed to initialize NVML: Insufficient Permissions\n"),
    )
    for failed, code, text in failures:
        if failed:
            return Completed(tuple(argv), code, text, "")
    run = _command(words)
    try:
        if run in {_change, _change_mig} or any(word.startswith("--set-timeslice") for word in words):
            with changing(state_file) as (changed, _):
                code, text = run(changed, words)
        else:
            code, text = run(state, words)
    except Wrong as wrong:
        # Raised before anything changes.
        code, text = wrong.code, wrong.text
    return Completed(tuple(argv), code, text, "")


def _command(words: list[str]) -> Callable[[SimulatedHostState, list[str]], tuple[int, str]]:
    if words[:1] in (["compute-policy"], ["mig"]):
        return _change_mig if words[0] == "mig" else _compute_policy
    if "-L" in words:
        return _listing
    return _change if _MODES.keys() & {word.partition("=")[0] for word in words} else _show


def _parse(words: Sequence[str], options: Mapping[str, str], *, subcommand: bool = False) -> dict[str, str | None]:
    """Return the options with their values."""
    found: dict[str, str | None] = {}
    rest = list(words[1:] if subcommand else words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in options or (equals and options[name] == _NO_VALUE):
            if subcommand:
                raise Wrong(2, f'Option "{word}" is not recognized.\n')
            raise Wrong(255, f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi -h'.\n\n")
        found[name] = value if equals else None
        if options[name] != _NO_VALUE and not equals:
            # To a subcommand, another option is no value.
            if rest and not (subcommand and rest[0].partition("=")[0] in options):
                found[name] = rest.pop(0)
            elif options[name] == _VALUE and subcommand:
                raise Wrong(2, f'Option "{word}" is missing its value.\n')
            elif options[name] == _VALUE:
                raise Wrong(255, f"ERROR: Option {word} is missing its value.{_HELP}")
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None


def _choose(state: SimulatedHostState, ids: str | None, *, lost: bool = False) -> list[Target]:
    """Return the GPUs that ``-i`` names by index or UUID, with commas; all when it is not given.

    Raises:
        Wrong: there is none, or one of them fell off the bus and ``lost`` is not set.
    """
    wanted = None if ids is None else {part.strip() for part in ids.split(",")}
    gpus = (Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model)) for index, gpu in enumerate(state.gpus))
    found = [one for one in gpus if wanted is None or wanted & {str(one.handle.index), one.gpu.uuid}]
    if not found:
        raise Wrong(6, "No devices were found\n")
    for one in found:
        if one.gpu.lost and not lost:
            raise Wrong(15, _lost_text(one))
    return found


def _lost_text(one: Target) -> str:
    where = f"GPU{one.handle.index}: {one.gpu.pci_bus_id}"
    return f"Unable to determine the device handle for {where}: GPU is lost.  Reboot the system to recover this GPU\n"


def _require(state: SimulatedHostState, one: Target, entry_point: str = "") -> None:
    """Refuse a change that the GPU does not have (fault ``not-supported``), or to any user but root."""
    if entry_point in one.gpu.not_supported:
        raise Refused(Code.NOT_SUPPORTED)
    if not state.root:
        raise Refused(Code.NO_PERMISSION)


_RULE = f"+{'-' * 37}+\n"
_POLICIES = f"""\
{_RULE}| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
"""


def _compute_policy(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    given = _parse(words, {"-i": _VALUE, "-l": _NO_VALUE, "--set-timeslice": _VALUE}, subcommand=True)
    text = given.get("--set-timeslice")
    level = _number(text)
    if text is not None and level is None:
        return 2, f'Option "{text}" is invalid for "--set-timeslice".\n'
    if not given.keys() - {"-i"}:
        return 2, f"Invalid combination of input arguments.{_HELP}"
    if {"-l", "--set-timeslice"} <= given.keys():
        return 2, "One, and only one, compute-policy command allowed at a time\n"
    task = "get compute policies"
    if level is not None:
        task = f"set timeslice policy with value {_LEVELS[level] if level < len(_LEVELS) else 'Unknown'}"
    code, rows, said = Code.SUCCESS, "", ""
    for one in _choose(state, given.get("-i"), lost=True):
        index, refusal = one.handle.index, _policy_refusal(state, one, level)
        if refusal is not None:
            code, said = refusal, f"{said}Failed to {task} for GPU {index} : {ERROR_TEXTS[refusal]}\n"
        elif level is None:
            rows += f"|{index:>4}   {'Timeslice':<16}{_LEVELS[one.gpu.time_slice]:<14}|\n{_RULE}"
        else:
            one.gpu.time_slice = level
            said += f"Successfully {task} for GPU {index}\n"
    return int(code), (_POLICIES + rows if rows else "") + said


def _policy_refusal(state: SimulatedHostState, one: Target, level: int | None) -> Code | None:
    if one.gpu.lost:
        return Code.GPU_IS_LOST
    if one.model.time_slice is False or "compute-policy" in one.gpu.not_supported:
        return Code.NOT_SUPPORTED
    if level is not None and not state.root:
        return Code.NO_PERMISSION
    # nvidia-smi checks no number, the driver does.
    return Code.INVALID_ARGUMENT if level is not None and level >= len(_LEVELS) else None


def _listing(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Return ``nvidia-smi -L``: GPUs and their MIG devices with UUIDs."""
    other = next((word for word in words if word != "-L"), None)
    if other is not None:
        return 2, f"ERROR: Option {other} is not valid for this command.{_HELP}"
    text = ""
    for one in (found := _choose(state, None, lost=True)):
        title = f"GPU {one.handle.index}: {one.model.name} (UUID: {one.gpu.uuid})\n"
        text += _lost_text(one) if one.gpu.lost else title
        for place, instance in enumerate(one.gpu.mig if one.mig_enabled and not one.gpu.lost else []):
            name = activity.device_name(one, instance)
            text += f"  MIG {name:<11} Device {place:>2}: (UUID: {instance.uuid})\n"
    return (15 if any(one.gpu.lost for one in found) else 0), text


def _show(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Return the compute modes: ``--query-gpu=compute_mode --format=csv,noheader``. The table is not simulated."""
    known = ("-i", "--query-gpu", "--format") if any(word.startswith("--query-gpu") for word in words) else ("-i",)
    options = _parse(words, dict.fromkeys(known, _VALUE))
    field, form = options.get("--query-gpu"), (options.get("--format") or "csv").split(",")
    if set(form) - {"csv", "noheader"}:
        return 2, "Format modifier is not recognized.\n"
    if field not in {None, "compute_mode"}:
        return 2, f'Field "{field}" is not a valid field to query.\n\n'
    chosen = _choose(state, options.get("-i"))
    if field is None:
        return 255, "The simulated nvidia-smi has no table. Please run 'gpushare status'.\n"
    modes = [_COMPUTE_MODES[one.gpu.compute_mode].title() for one in chosen]
    return 0, "".join(f"{line}\n" for line in (modes if "noheader" in form else [field, *modes]))


def _change(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out ``-c MODE``, ``-mig MODE`` or ``-pm MODE``."""
    options = _parse(words, dict.fromkeys(("-i", *_MODES), _VALUE))
    option, *more = options.keys() & _MODES.keys()
    if more:
        return 2, "Invalid combination of input arguments. Only one device modification may be done at a time.\n\n"
    wanted, output = _MODES[option].get(options[option] or ""), ""
    if wanted is None:
        return 2, f"ERROR: Option {options[option]} is invalid for {option}.{_HELP}"
    set_mode = {"-c": _set_compute_mode, "-mig": _set_mig_mode, "-pm": _set_persistence}[option]
    for one in _choose(state, options.get("-i")):
        try:
            output += set_mode(state, one, wanted)
        except Refused as refused:
            what = {"-mig": "MIG Mode", "-pm": "persistence mode"}.get(option)
            verb = "set the compute mode" if what is None else f"{('disable', 'enable')[wanted]} {what}"
            if option == "-c" and one.mig_enabled and refused.code == Code.NOT_SUPPORTED:
                title = _COMPUTE_MODES[wanted]
                output += f"Setting compute mode to {title} is not supported on a MIG-enabled device.\n"
            output += f"Unable to {verb} for GPU {one.gpu.pci_bus_id}: {ERROR_TEXTS[refused.code]}\n"
            if refused.code != Code.NOT_SUPPORTED:
                return int(refused.code), f"{output}Terminating early due to previous errors.\n"
            output += "Treating as warning and moving on.\n"
    return 0, output + "All done.\n"


def _set_persistence(state: SimulatedHostState, one: Target, wanted: int) -> str:
    _require(state, one)
    one.gpu.persistence = bool(wanted)
    return f"{_SWITCH[wanted].title()} persistence mode for GPU {one.gpu.pci_bus_id}.\n"


def _set_compute_mode(state: SimulatedHostState, one: Target, wanted: int) -> str:
    gpu, title = one.gpu, _COMPUTE_MODES[wanted]
    if gpu.compute_mode == wanted:
        return f"Compute mode is already set to {title} for GPU {gpu.pci_bus_id}.\n"
    _require(state, one, "nvmlDeviceSetComputeMode")
    if one.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    gpu.compute_mode = wanted
    return f"Set compute mode to {title} for GPU {gpu.pci_bus_id}.\n"


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


def _set_mig_mode(state: SimulatedHostState, one: Target, wanted: int) -> str:
    # Loaded late, as all that is for MIG: every look at a host asks for the time slice.
    from gpushare.sim import library_mig

    verb, bus = ("disable", "enable")[wanted], one.gpu.pci_bus_id
    if one.gpu.mig_mode is None:
        raise Refused(Code.NOT_SUPPORTED)
    _require(state, one, "nvmlDeviceSetMigMode")
    code = library_mig.set_mode(one.gpu, one.model, wanted, library_mig.residents(state, one))
    if code == Code.SUCCESS:
        return f"{verb.title()}d MIG Mode for GPU {bus}\n{'' if one.gpu.persistence else _NO_PERSISTENCE.format(bus)}"
    text = f"Warning: MIG mode is in pending {verb} state for GPU {bus}:{ERROR_TEXTS[code]}\n"
    return text + (_IN_USE if code == Code.IN_USE else _REBOOT).format(bus)


# Of several commands the first one here is carried out.
_COMMANDS = {"-cgi": _VALUE, "-dgi": _NO_VALUE, "-cci": _MAYBE, "-dci": _NO_VALUE}
_OPTIONS = {**_COMMANDS, "-i": _VALUE, "-gi": _VALUE, "-ci": _VALUE, "-C": _NO_VALUE}


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


def _change_mig(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out ``mig ...``."""
    options = _parse(words, _OPTIONS, subcommand=True)
    command = next((name for name in _COMMANDS if name in options), None)
    if command is None:
        return 2, f"Invalid combination of input arguments.{_HELP}"
    chosen = _choose(state, options.get("-i"))
    enabled = [one for one in chosen if one.mig_enabled]
    if not enabled:
        none = all(one.gpu.mig_mode is None for one in chosen)
        return (6, "No MIG-supported devices found.\n") if none else (0, "No MIG-enabled devices found.\n")
    wishes = [part for part in (options[command] or "").split(",") if part]
    if command == "-cgi":
        made = (line for one in enabled for wish in wishes for line in _create(state, one, wish, whole="-C" in options))
        return _carry_out("create GPU instances", made)
    places = _places(enabled, _ids(options.get("-gi")))
    if command == "-dgi":
        return _carry_out("destroy GPU instances", (_destroy(state, place, None) for place in places))
    if command == "-cci":
        parts_made = (_create_compute(state, place, kind) for place in places for kind in wishes or [""])
        return _carry_out("create compute instances", parts_made)
    ids = _ids(options.get("-ci"))
    parts = [(place, part.compute_instance_id) for place in places for part in place.compute_instances()]
    parts = [(place, identity) for place, identity in parts if ids is None or identity in ids]
    if not parts:
        return 6, "No compute instances found: Not Found\n"
    return _carry_out("destroy compute instances", (_destroy(state, *part) for part in parts))


def _ids(text: str | None) -> set[int | None] | None:
    return None if text is None else {_number(part) for part in text.split(",")}


def _places(chosen: list[Target], ids: set[int | None] | None) -> list[_Place]:
    """Return the GPU instances in the order of nvidia-smi: by NVML's number of their profile, then by id."""
    from gpushare.sim import mig

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


def _attempt(state: SimulatedHostState, one: Target, what: str, do: Callable[[list[Resident]], int | None]) -> int:
    """Carry out a change and return the id of what was made; report a refusal as the program does."""
    from gpushare.sim import library_mig

    try:
        _require(state, one)
        return do(library_mig.residents(state, one)) or 0
    except Refused as refused:
        raise Wrong(int(refused.code), f"Unable to {what}: {ERROR_TEXTS[refused.code]}\n") from None


def _create(state: SimulatedHostState, one: Target, wish: str, *, whole: bool) -> Iterator[str]:
    from gpushare.sim import library_mig, mig

    where, (name, _, start) = f"GPU {one.handle.index:>2} using profile", wish.strip().partition(":")
    profile = next((each for each in one.model.profiles if name in {str(each.id), each.name}), None)
    first = _number(start)
    placement = None if first is None or profile is None else (first, profile.size or 0)
    # No profile has this id.
    wanted = -1 if profile is None or profile.id is None else profile.id
    what = f"create a GPU instance on {where} {wish}"
    made = _attempt(
        state, one, what, lambda here: library_mig.create_gpu_instance(one.gpu, one.model, wanted, placement, here)
    )
    instance = next(each for each in mig.gpu_instances(one.gpu) if each.gpu_instance_id == made)
    yield f"Successfully created GPU instance ID {made:>2} on {where} MIG {instance.profile} (ID {wanted:>2})\n"
    if whole and profile is not None:
        yield _create_compute(state, _Place(one, profile, instance), "")


def _create_compute(state: SimulatedHostState, place: _Place, wish: str) -> str:
    from gpushare.sim import library_mig, mig

    one, owner = place.one, place.profile
    # Its profiles are named 3g.71gb or 1c.3g.71gb.
    names = {
        kind: owner.name if kind == mig.whole(owner) else f"{mig.slices_of(kind)}c.{owner.name}"
        for kind in mig.offered(owner)
    }
    name, _, start = (wish or str(mig.whole(owner))).partition(":")
    kind = next((each for each in names if name in {str(each), names[each]}), -1)
    first = _number(start)
    placement = None if first is None or kind < 0 else (first, mig.slices_of(kind))
    made = _attempt(
        state,
        one,
        f"create a compute instance on {place.title} using profile {wish or 'default'}",
        lambda _: library_mig.create_compute_instance(one.gpu, one.model, place.id, kind, placement),
    )
    using = f"using profile MIG {names[kind]} (ID {kind:>2})"
    return f"Successfully created compute instance ID {made:>2} on {place.title} {using}\n"


def _destroy(state: SimulatedHostState, place: _Place, part: int | None) -> str:
    """Destroy a GPU instance, or a compute instance of it."""
    from gpushare.sim import library_mig

    gpu = place.one.gpu
    if part is None:
        what = f"GPU instance ID {place.id:>2} from GPU {place.one.handle.index:>2}"
        _attempt(
            state, place.one, f"destroy {what}", lambda here: library_mig.destroy_gpu_instance(gpu, place.id, here)
        )
    else:
        what = f"compute instance ID {part:>2} from {place.title}"
        _attempt(
            state,
            place.one,
            f"destroy {what}",
            lambda here: library_mig.destroy_compute_instance(gpu, place.id, part, here),
        )
    return f"Successfully destroyed {what}\n"
