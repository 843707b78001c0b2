"""What ``nvidia-smi mig`` prints: its help and its tables."""

# ruff: noqa: W291 - blanks at the ends of lines are the program's own

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare.sim import activity, mig_compute, mig_layout
from gpushare.sim.models import GiProfile
from gpushare.sim.smi_view import Chosen
from gpushare.sim.state import SimulatedGpuInstance, SimulatedMigInstance

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
    slices = mig_compute.slices_of(number)
    if number == mig_compute.whole(owner):
        return owner.name
    return f"{slices}c.{owner.name}"


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int) -> str:
    """Return a table with a rule after each row, which may have several lines."""
    rule = "+" + "-" * width + "+\n"
    lines = rule + f"| {title:<{width - 1}}|\n" + "".join(f"|{line:<{width}}|\n" for line in head)
    lines += "|" + "=" * width + "|\n"
    return lines + "".join("".join(f"|{line:<{width}}|\n" for line in row) + rule for row in rows)


def _count(value: int | None, width: int) -> str:
    return f"{'N/A' if value is None else value:>{width}}"


def profiles(chosen: list[Chosen], *, wide: bool) -> str:
    """Return ``-lgip``."""
    name_width = 18 if wide else 16
    rows = []
    for one in chosen:
        present = mig_layout.occupied(one.gpu, one.model)
        for each in one.model.profiles:
            free = mig_layout.remaining_capacity(each, present) if one.mig_enabled else each.instances
            # As the simulated NVML counts it, also where it is not published.
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
    return _table("GPU instance profiles:", head, rows, name_width + 61)


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
    return _table("GPU instances:", head, rows, name_width + 39)


def compute_instances(found: list[tuple[Place, SimulatedMigInstance]]) -> str:
    """Return ``-lci``."""
    rows = []
    for place, instance in found:
        number = mig_compute.number_of(place.profile, instance)
        # Never "+me" here (H100, driver 580).
        name = f"MIG {mig_compute.device_name(place.profile, instance)}"
        row = f"{place.one.index:>4}{place.instance.gpu_instance_id:>7}       {name:<17}{number:>5}"
        row += f"{instance.compute_instance_id:>10}{instance.compute_start:>11}"
        rows.append((f"{row}:{len(mig_compute.span(place.profile, instance))}",))
    head = (
        " GPU     GPU       Name             Profile   Instance   Placement  ",
        "       Instance                       ID        ID       Start:Size ",
        "         ID                                                         ",
    )
    return _table("Compute instances:", head, rows, 68)


def compute_profiles(places: list[Place]) -> str:
    """Return ``-lcip``."""
    rows = []
    for place in places:
        profile, present = place.profile, place.compute_instances()
        for number, total in mig_compute.offered(profile).items():
            free = mig_compute.remaining_capacity(profile, number, present)
            sm = activity.compute_multiprocessors(place.one.target(), profile, mig_compute.slices_of(number))
            mark = "*" if number == mig_compute.whole(profile) else " "
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
    return _table("Compute instance profiles:", head, rows, 86)


def compute_placements(places: list[Place]) -> str:
    """Return ``-lcipp``."""
    return "".join(
        f"GPU {place.one.index:>2} GI {place.instance.gpu_instance_id:>2} Profile ID {number:>2} "
        f"{_starts(mig_compute.starts(place.profile, number))}:{mig_compute.slices_of(number)}\n"
        for place in places
        for number in mig_compute.offered(place.profile)
    )
