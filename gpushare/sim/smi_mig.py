"""nvidia-smi mig of a simulated host: GPU instances and compute instances, listed, created and destroyed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from gpushare.gpu_models import GiProfile
from gpushare.sim import activity, library_mig, mig
from gpushare.sim.activity import Resident
from gpushare.sim.mps_servers import driver_major
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Refused
from gpushare.sim.smi_gpus import Chosen, changed, choose_present, lost_text, require_root
from gpushare.sim.smi_options import MAYBE, NO_VALUE, VALUE, parse, table
from gpushare.sim.state import SimulatedGpuInstance, SimulatedHostState, SimulatedMigInstance
from gpushare.values import dataclass

# ruff: noqa: W291 - blanks at the ends of lines are the program's own


HELP = """
    mig -- Multi Instance GPU management.

    Usage: nvidia-smi mig [options]

    Options include:
    [-h | --help]: Display help information.
    [-i | --id]: Enumeration index, PCI bus ID or UUID.
                 Provide comma separated values for more than one device.
    [-gi | --gpu-instance-id]: GPU instance ID.
                               Provide comma separated values for more than one GPU instance.
    [-ci | --compute-instance-id]: Compute instance ID.
                                   Provide comma separated values for more than one compute 
                                   instance.
    [-lgip | --list-gpu-instance-profiles]: List supported GPU instance profiles.
                                            Option -i can be used to restrict the command to
                                            run on a specific GPU.
    [-lgipp | --list-gpu-instance-possible-placements]: List possible GPU instance placements
                                                        in the following format, {Start}:Size.
                                                        Option -i can be used to restrict the
                                                        command to run on a specific GPU.
    [-C | --default-compute-instance]: Create compute instance with the default profile when used
                                       with the option to create a GPU instance (-cgi).
    [-cgi | --create-gpu-instance]: Create GPU instances for the given profile tuples. A profile
                                    tuple consists of a profile name or ID and an optional placement
                                    specifier, which consists of a colon and a placement start index.
                                    Provide comma separated values for more than one profile tuple.
                                    Option -i can be used to restrict the command to run on
                                    a specific GPU.
    [-dgi | --destroy-gpu-instance]: Destroy GPU instances.
                                     Options -i and -gi can be used individually or combined
                                     to restrict the command to run on a specific GPU or GPU
                                     instance.
    [-lgi | --list-gpu-instances]: List GPU instances.
                                   Option -i can be used to restrict the command to run on a
                                   specific GPU.
    [-lcip | --list-compute-instance-profiles]: List supported compute instance profiles.
                                                Options -i and -gi can be used individually or
                                                combined to restrict the command to run on a
                                                specific GPU or GPU instance.
    [-lcipp | --list-compute-instance-possible-placements]: List possible compute instance placements
                                                            in the following format, {Start}:Size.
                                                            Options -i and -gi can be used individually or
                                                            combined to restrict the command to run on a
                                                            specific GPU or GPU instance.
    [-cci | --create-compute-instance]: Create compute instance for the given profile name or IDs.
                                        Provide comma separated values for more than one profile.
                                        If no profile name or ID is given, then the default*
                                        compute instance profile ID will be used. Options -i and
                                        -gi can be used individually or combined to restrict the
                                        command to run on a specific GPU or GPU instance.
    [-dci | --destroy-compute-instance]: Destroy compute instances.
                                         Options -i, -gi and -ci can be used individually or
                                         combined to restrict the command to run on a specific
                                         GPU or GPU instance or compute instance.
    [-lci | --list-compute-instances]: List compute instances.
                                       Options -i and -gi can be used individually or combined
                                       to restrict the command to run on a specific GPU or GPU
                                       instance.


"""


@dataclass(frozen=True)
class Place:
    """One GPU instance that a command is about, with its GPU and profile."""

    one: Chosen
    profile: GiProfile
    instance: SimulatedGpuInstance

    @property
    def title(self) -> str:
        """Return what the texts call it."""
        return f"GPU {self.one.index:>2} GPU instance ID {self.instance.gpu_instance_id:>2}"

    def compute_instances(self) -> list[SimulatedMigInstance]:
        """Return its compute instances."""
        identity = self.instance.gpu_instance_id
        return [one for one in self.one.gpu.mig if one.gpu_instance_id == identity]


def compute_name(owner: GiProfile, number: int) -> str:
    """Return the name of a compute instance profile: ``3g.71gb``, ``1c.3g.71gb``."""
    slices = mig.slices_of(number)
    if number == mig.whole(owner):
        return owner.name
    return f"{slices}c.{owner.name}"


def _count(value: int | None, width: int) -> str:
    return f"{'N/A' if value is None else value:>{width}}"


def profiles(chosen: list[Chosen], *, wide: bool) -> str:
    """Return ``-lgip``."""
    name_width = 18 if wide else 16
    rows = []
    for one in chosen:
        present = mig.occupied(one.gpu, one.model)
        for each in one.model.profiles:
            free = mig.remaining_capacity(each, present) if one.mig_enabled else each.instances
            # As the simulated NVML counts it, even where it is not published.
            memory = activity.profile_memory_mib(one.target(), each.name)
            sm = activity.profile_multiprocessors(one.target(), each.name)
            first = f"{one.index:>4}  {'MIG ' + each.name:<{name_width}} {_count(each.id, 3)}    {free:>2}/{each.instances:<2}"
            first += f"       {memory / 1024:<10.2f} {'Yes' if each.peer_to_peer else 'No':<7}{sm:<3}"
            first += f"{_count(each.decoders, 5)}{_count(each.encoders, 6)}   "
            second = " " * (name_width + 40)
            second += (
                f"{_count(each.copy_engines, 6)}{_count(each.jpeg_engines, 6)}{_count(each.optical_flow_engines, 6)}   "
            )
            rows.append((first, second))
    gap = " " * (name_width - 16)
    head = (
        f" GPU   Name             {gap}ID    Instances   Memory     P2P    SM    DEC   ENC  ",
        f"                        {gap}      Free/Total   GiB              CE    JPEG  OFA  ",
    )
    return table("GPU instance profiles:", head, rows, name_width + 61)


def placements(chosen: list[Chosen]) -> str:
    """Return ``-lgipp``."""
    text = ""
    for one in chosen:
        for each in one.model.profiles:
            if each.starts is not None and each.size is not None:
                text += f"GPU {one.index:>2} Profile ID {_count(each.id, 2)} {_starts(each.starts)}:{each.size}\n"
    return text


def _starts(starts: tuple[int, ...] | range) -> str:
    listed = ",".join(str(start) for start in starts)
    return f"{'Placements' if len(starts) > 1 else 'Placement '}: {{{listed}}}"


def gpu_instances(places: list[Place], *, wide: bool) -> str:
    """Return ``-lgi``."""
    name_width = 18 if wide else 16
    rows = []
    for place in places:
        row = f"{place.one.index:>4}  {'MIG ' + place.profile.name:<{name_width}}{_count(place.profile.id, 6)}"
        row += f"{place.instance.gpu_instance_id:>9}{place.instance.start:>11}:{place.profile.size or 0}"
        rows.append((row,))
    gap = " " * (name_width - 16)
    head = (
        f" GPU   Name             {gap}Profile  Instance   Placement  ",
        f"                        {gap}  ID       ID       Start:Size ",
    )
    return table("GPU instances:", head, rows, name_width + 39)


def compute_instances(found: list[tuple[Place, SimulatedMigInstance]]) -> str:
    """Return ``-lci``."""
    rows = []
    for place, instance in found:
        number = mig.number_of(place.profile, instance)
        # Never "+me" here (H100, driver 580).
        name = f"MIG {mig.device_name(place.profile, instance)}"
        row = f"{place.one.index:>4}{place.instance.gpu_instance_id:>7}       {name:<17}{number:>5}"
        row += f"{instance.compute_instance_id:>10}{instance.compute_start:>11}"
        rows.append((f"{row}:{len(mig.span(place.profile, instance))}",))
    head = (
        " GPU     GPU       Name             Profile   Instance   Placement  ",
        "       Instance                       ID        ID       Start:Size ",
        "         ID                                                         ",
    )
    return table("Compute instances:", head, rows, 68)


def compute_profiles(places: list[Place]) -> str:
    """Return ``-lcip``."""
    rows = []
    for place in places:
        profile, present = place.profile, place.compute_instances()
        for number, total in mig.offered(profile).items():
            free = mig.remaining_compute_capacity(profile, number, present)
            sm = activity.compute_multiprocessors(place.one.target(), profile, mig.slices_of(number))
            mark = "*" if number == mig.whole(profile) else " "
            first = f"{place.one.index:>4}{place.instance.gpu_instance_id:>7}       {'MIG ' + compute_name(profile, number):<17}"
            first += f"{number:>5}{mark}{free:>6}/{total:<2}{sm:>12}"
            first += f"{_count(profile.decoders, 9)}{_count(profile.encoders, 6)}{_count(profile.optical_flow_engines, 6)}   "
            second = " " * 65 + f"{_count(profile.copy_engines, 6)}{_count(profile.jpeg_engines, 6)}         "
            rows.append((first, second))
    head = (
        " GPU     GPU       Name             Profile  Instances   Exclusive       Shared       ",
        "       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  ",
        "         ID                                                          CE    JPEG       ",
    )
    return table("Compute instance profiles:", head, rows, 86)


def compute_placements(places: list[Place]) -> str:
    """Return ``-lcipp``."""
    return "".join(
        f"GPU {place.one.index:>2} GI {place.instance.gpu_instance_id:>2} Profile ID {number:>2} "
        f"{_starts(mig.starts(place.profile, number))}:{mig.slices_of(number)}\n"
        for place in places
        for number in mig.offered(place.profile)
    )


# Of several commands the first one here is carried out.
_COMMANDS: Final = (
    "-lgip",
    "-lgipp",
    "-cgi",
    "-dgi",
    "-lgi",
    "-lcip",
    "-lcipp",
    "-cci",
    "-dci",
    "-lci",
    "-C",
    "-gi",
    "-ci",
)
_OPTIONS: Final = {
    "-h": ("--help", NO_VALUE),
    "-i": ("--id", VALUE),
    "-gi": ("--gpu-instance-id", VALUE),
    "-ci": ("--compute-instance-id", VALUE),
    "-lgip": ("--list-gpu-instance-profiles", NO_VALUE),
    "-lgipp": ("--list-gpu-instance-possible-placements", NO_VALUE),
    "-C": ("--default-compute-instance", NO_VALUE),
    "-cgi": ("--create-gpu-instance", VALUE),
    "-dgi": ("--destroy-gpu-instance", NO_VALUE),
    "-lgi": ("--list-gpu-instances", NO_VALUE),
    "-lcip": ("--list-compute-instance-profiles", NO_VALUE),
    "-lcipp": ("--list-compute-instance-possible-placements", NO_VALUE),
    "-cci": ("--create-compute-instance", MAYBE),
    "-dci": ("--destroy-compute-instance", NO_VALUE),
    "-lci": ("--list-compute-instances", NO_VALUE),
}


_Item = TypeVar("_Item")


class _Failed(Exception):
    """A command failed: its lines, and the code that NVML gave."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def run(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out the words after ``mig`` on the state; return exit code and output."""
    options = dict(parse(words, _OPTIONS))
    command = next((name for name in _COMMANDS if name in options), None)
    if "-h" in options or command is None:
        return 0, HELP
    chosen = choose_present(state, options.get("-i"))
    lost = next((one for one in chosen if one.gpu.lost), None)
    if lost is not None:
        return 15, lost_text(lost)
    newer = driver_major(state.driver) >= 550
    able = [one for one in chosen if one.gpu.mig_mode is not None]
    enabled = [one for one in able if one.mig_enabled]
    if newer and not able:
        return 6, "No MIG-supported devices found.\n"
    # 535 lists nothing of a GPU with MIG off, not even its profiles.
    if command in {"-lgip", "-lgipp"} and (able if newer else enabled):
        listed = able if newer else enabled
        wide = _wide(state)
        return 0, profiles(listed, wide=wide) if command == "-lgip" else placements(listed)
    if not enabled:
        return (0 if newer else 6), "No MIG-enabled devices found.\n"
    try:
        return _carry_out(state, enabled, command, options)
    except _Failed as failed:
        return int(failed.code), failed.text


def _wide(state: SimulatedHostState) -> bool:
    # The columns of names grew with 570.
    return driver_major(state.driver) >= 570


def _carry_out(
    state: SimulatedHostState, enabled: list[Chosen], command: str, options: dict[str, str | None]
) -> tuple[int, str]:
    if command == "-cgi":
        wishes = [(one, wish) for one in enabled for wish in (options["-cgi"] or "").split(",") if wish]
        whole = "-C" in options
        return 0, _each(wishes, lambda it: _create_gpu_instance(state, *it, whole=whole), "create GPU instances")
    places = _places(enabled, None if command == "-lgi" else _ids(options.get("-gi")))
    if not places:
        return 6, "No GPU instances found: Not Found\n"
    if command in {"-lci", "-dci", "-C", "-gi", "-ci"}:
        return _compute_instances(state, places, _ids(options.get("-ci")), command)
    if command == "-dgi":
        return 0, _each(places, lambda place: _destroy_gpu_instance(state, place), "destroy GPU instances")
    if command == "-cci":
        text = options["-cci"]
        wanted = [None] if text is None else [part for part in text.split(",") if part]
        return 0, _each(
            places,
            lambda place: ["".join(_create_compute_instance(state, place, one) for one in wanted)],
            "create compute instances",
        )
    if command == "-lgi":
        return 0, gpu_instances(places, wide=_wide(state))
    return 0, compute_profiles(places) if command == "-lcip" else compute_placements(places)


def _compute_instances(
    state: SimulatedHostState, places: list[Place], ids: set[int] | None, command: str
) -> tuple[int, str]:
    found = [
        (place, one)
        for place in places
        for one in place.compute_instances()
        if ids is None or one.compute_instance_id in ids
    ]
    if not found:
        return 6, "No compute instances found: Not Found\n"
    if command == "-dci":
        return 0, _each(found, lambda it: _destroy_compute_instance(state, *it), "destroy compute instances")
    # Without a command the instances are looked for, and that is all.
    return 0, compute_instances(found) if command == "-lci" else ""


def _ids(text: str | None) -> set[int] | None:
    return None if text is None else {int(part) for part in text.split(",") if re.fullmatch("[0-9]{1,9}", part)}


def _places(chosen: list[Chosen], ids: set[int] | None) -> list[Place]:
    """Return the GPU instances in the order of nvidia-smi: by NVML's number of their profile, then by id."""
    found = []
    for one in chosen:
        here = [
            Place(one, profile, instance)
            for instance in mig.gpu_instances(one.gpu)
            if (profile := one.model.profile(instance.profile)) is not None
            and (ids is None or instance.gpu_instance_id in ids)
        ]
        found += sorted(here, key=lambda place: (place.profile.nvml_profile or 0, place.instance.gpu_instance_id))
    return found


@contextmanager
def _attempt(state: SimulatedHostState, one: Chosen, what: str) -> Iterator[list[Resident]]:
    """Yield the processes on a GPU for a change that only root may make; report a refusal as the program does."""
    try:
        require_root(state)
        with changed(state, one) as residents:
            yield residents
    except Refused as refused:
        raise _unable(what, refused.code) from None


def _unable(what: str, code: Code) -> _Failed:
    return _Failed(code, f"Unable to {what}: {ERROR_TEXTS[code]}\n")


def _each(items: Iterable[_Item], act: Callable[[_Item], Iterable[str]], what: str) -> str:
    """Do one thing to each item and return what is said; what was done before a failure stays."""
    text = ""
    try:
        for item in items:
            for said in act(item):
                text += said
    except _Failed as failed:
        raise _Failed(failed.code, f"{text}{failed.text}Failed to {what}: {ERROR_TEXTS[failed.code]}\n") from None
    return text


def _create_gpu_instance(state: SimulatedHostState, one: Chosen, wish: str, *, whole: bool) -> Iterator[str]:
    name, colon, start = wish.strip().partition(":")
    if not name:
        # The spelling is the program's own.
        said = f"Unable to create a GPU instace on GPU {one.index:>2} using profile {wish}: invalid placement syntax\n"
        raise _Failed(Code.INVALID_ARGUMENT, said)
    what = f"create a GPU instance on GPU {one.index:>2} using profile {wish}"
    profile = next((each for each in one.model.profiles if name in {str(each.id), each.name, f"MIG {each.name}"}), None)
    if profile is None or profile.id is None:
        raise _unable(what, Code.INVALID_ARGUMENT)
    digits = re.match("[0-9]{1,9}", start) if colon else None
    placement = None if digits is None else (int(digits.group()), profile.size or 0)
    with _attempt(state, one, what) as residents:
        identity = library_mig.create_gpu_instance(one.gpu, one.model, profile.id, placement, residents)
    yield (
        f"Successfully created GPU instance ID {identity:>2} on GPU {one.index:>2} "
        f"using profile MIG {profile.name} (ID {profile.id:>2})\n"
    )
    if whole:
        made = next(each for each in mig.gpu_instances(one.gpu) if each.gpu_instance_id == identity)
        yield _create_compute_instance(state, Place(one, profile, made), None)


def _create_compute_instance(state: SimulatedHostState, place: Place, wish: str | None) -> str:
    one, owner = place.one, place.profile
    what = f"create a compute instance on {place.title} using profile {'default' if wish is None else wish}"
    number, placement = mig.whole(owner), None
    if wish is not None:
        name, _, start = wish.partition(":")
        names = {compute_name(owner, each): each for each in mig.offered(owner)}
        names |= {str(each): each for each in mig.offered(owner)}
        if name.removeprefix("MIG ") not in names:
            raise _unable(what, Code.INVALID_ARGUMENT)
        number = names[name.removeprefix("MIG ")]
        digits = re.match("[0-9]{1,9}", start)
        placement = None if digits is None else (int(digits.group()), mig.slices_of(number))
    with _attempt(state, one, what):
        owner_id = place.instance.gpu_instance_id
        identity = library_mig.create_compute_instance(one.gpu, one.model, owner_id, number, placement)
    return (
        f"Successfully created compute instance ID {identity:>2} on {place.title} "
        f"using profile MIG {compute_name(owner, number)} (ID {number:>2})\n"
    )


def _destroy_gpu_instance(state: SimulatedHostState, place: Place) -> Iterator[str]:
    where = f"GPU instance ID {place.instance.gpu_instance_id:>2} from GPU {place.one.index:>2}"
    with _attempt(state, place.one, f"destroy {where}") as residents:
        library_mig.destroy_gpu_instance(place.one.gpu, place.instance.gpu_instance_id, residents)
    yield f"Successfully destroyed {where}\n"


def _destroy_compute_instance(state: SimulatedHostState, place: Place, instance: SimulatedMigInstance) -> Iterator[str]:
    where = f"compute instance ID {instance.compute_instance_id:>2} from {place.title}"
    with _attempt(state, place.one, f"destroy {where}") as residents:
        identity = place.instance.gpu_instance_id
        library_mig.destroy_compute_instance(place.one.gpu, identity, instance.compute_instance_id, residents)
    yield f"Successfully destroyed {where}\n"
