"""Slurm: gres.conf by Slurm's own rules, and lines of slurm.conf that agree with it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.model import Priority, TimeSlice, Way
from gpushare.base.units import MIB
from gpushare.export.description import HostDescription
from gpushare.export.document import Export
from gpushare.export.slurm import slurm_export, slurm_order
from tests.errors import fails
from tests.export.hosts import gpu, host, mig, mps, t4s, text

MIXED = host(
    gpu(0, Way.EXCLUSIVE),
    gpu(1, replicas=3),
    gpu(2, Way.MPS, mps=mps(25.0, memory_limit_bytes=3840 * MIB)),
    gpu(3, Way.MIG, mig=(mig(0), mig(1), mig(4, "3g.40gb"))),
)


def records(found: Export) -> list[dict[str, str]]:
    """Return the records of gres.conf, after Slurm's rules (src/interfaces/gres.c, gres_c_s.c), restated."""
    lines = [line for line in text(found, "gres.conf").splitlines() if not line.startswith("#")]
    first, *rest = lines
    assert first in {"AutoDetect=nvml", "AutoDetect=off"}
    gres = [dict(word.split("=", 1) for word in line.split()) for line in rest]
    known = {"Name", "Type", "Count", "File", "MultipleFiles", "Links"}
    files = {one.get("File") for one in gres if one["Name"] == "gpu"}
    for one in gres:
        assert set(one) <= known
        assert ("File" in one) != ("MultipleFiles" in one)
        assert one.get("MultipleFiles", "a,b").count(",") >= 1
        if one["Name"] in {"mps", "shard"}:
            assert int(one["Count"]) > 0
            # Without a gpu record of the file Slurm discards it; by NVML slurmd finds the records itself.
            assert one["File"] in files or first == "AutoDetect=nvml"
    assert len({tuple(sorted(one.items())) for one in gres}) == len(gres)
    return gres


def lines(found: Export) -> dict[str, str]:
    """Return the lines of slurm.conf by key."""
    said = [line for line in text(found, "slurm.conf.lines").splitlines() if not line.startswith("#")]
    return dict(line.split("=", 1) for line in said)


def node_gres(found: Export) -> Counter[str]:
    """Return how many of each resource the node line promises."""
    numbers: Counter[str] = Counter()
    for item in lines(found)["NodeName"].partition("Gres=")[2].split(","):
        name, _, number = item.rpartition(":")
        numbers[name] += int(number)
    return numbers


def test_time_slicing_becomes_shards() -> None:
    export = slurm_export(t4s(4))
    assert [record["Name"] for record in records(export)] == ["gpu"] * 4 + ["shard"] * 4
    assert node_gres(export) == {"gpu:t4": 4, "shard": 16}
    assert lines(export)["GresTypes"] == "gpu,shard"
    assert lines(export)["SelectType"] == "select/cons_tres"
    assert lines(export)["NodeName"].startswith("gpu01 Gres=")
    assert any("--replicas" in text for text in export.lost)
    assert any("limits neither memory nor threads" in text for text in export.lost)


# Two pairs with NVLink, one behind the other: devices are counted by PCI bus id, files by their minor.
PAIRS = host(
    gpu(0, Way.EXCLUSIVE, minor=3, links=(-1, 1, 0, 0)),
    gpu(1, Way.EXCLUSIVE, minor=2, links=(1, -1, 0, 0)),
    gpu(2, minor=1, links=(0, 0, -1, 1)),
    gpu(3, minor=0, links=(0, 0, 1, -1)),
)


def test_jobs_of_several_gpus_get_connected_ones() -> None:
    links = {record["File"]: record["Links"] for record in records(slurm_export(PAIRS)) if record["Name"] == "gpu"}
    assert links == {
        "/dev/nvidia3": "-1,1,0,0", "/dev/nvidia2": "1,-1,0,0", "/dev/nvidia1": "0,0,-1,1", "/dev/nvidia0": "0,0,1,-1",
    }  # fmt: skip
    assert "Links" not in records(slurm_export(t4s(4)))[0]
    assert any("--gres=gpu:N gives it whole GPUs" in text for text in slurm_export(PAIRS).lost)


def test_gpus_of_their_own_need_no_shared_resource() -> None:
    export = slurm_export(t4s(2, sharing=Way.EXCLUSIVE))
    assert len(records(export)) == 2
    assert lines(export) == {
        "GresTypes": "gpu",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/cgroup,task/affinity",
        "NodeName": "gpu01 Gres=gpu:t4:2",
    }
    assert [document.name for document in export.documents] == ["gres.conf", "slurm.conf.lines", "cgroup.conf.lines"]
    assert "\nConstrainDevices=yes\n" in text(export, "cgroup.conf.lines")
    # slurmctld does not start with it where there is no slurmdbd.
    assert "\n#AccountingStorageTRES=gres/gpu\n" in text(export, "slurm.conf.lines")


def test_every_gpu_in_its_own_way() -> None:
    export = slurm_export(MIXED, autodetect="off")
    gres = records(export)
    assert [one for one in gres if one["Name"] == "mps"] == [{"Name": "mps", "Count": "100", "File": "/dev/nvidia2"}]
    assert [one for one in gres if one["Name"] == "shard"] == [{"Name": "shard", "Count": "3", "File": "/dev/nvidia1"}]
    assert [one["MultipleFiles"] for one in gres if "MultipleFiles" in one] == [
        "/dev/nvidia3,/dev/nvidia-caps/nvidia-cap100,/dev/nvidia-caps/nvidia-cap101",
        "/dev/nvidia3,/dev/nvidia-caps/nvidia-cap102,/dev/nvidia-caps/nvidia-cap103",
        "/dev/nvidia3,/dev/nvidia-caps/nvidia-cap108,/dev/nvidia-caps/nvidia-cap109",
    ]
    assert node_gres(export) == {
        "gpu:t4": 3,
        "gpu:nvidia_h100_80gb_hbm3_1g.10gb": 2,
        "gpu:nvidia_h100_80gb_hbm3_3g.40gb": 1,
        "mps": 100,
        "shard": 3,
    }
    types = Counter(f"gpu:{one['Type']}" for one in gres if one["Name"] == "gpu")
    assert types == Counter({key: value for key, value in node_gres(export).items() if key.startswith("gpu:")})


def test_with_mig_slurmd_looks_itself() -> None:
    export = slurm_export(MIXED)
    assert text(export, "gres.conf").splitlines()[1] == "AutoDetect=nvml"
    assert {record["Name"] for record in records(export)} == {"mps", "shard"}
    assert lines(export)["JobAcctGatherParams"] == "DisableGPUAcct"


@pytest.mark.parametrize(
    ("model", "profile", "mib", "named"),
    [
        ("NVIDIA H200", "1g.18gb", 16384, "nvidia_h200_1g.16gb"),
        ("NVIDIA H200", "1g.18gb+me", 16384, "nvidia_h200_1g.16gb"),
        ("NVIDIA A100-SXM4-80GB", "3g.40gb", 40192, "nvidia_a100-sxm4-80gb_3g.39gb"),
        ("NVIDIA A100-SXM4-80GB", "1c.2g.20gb", 19968, "nvidia_a100-sxm4-80gb_2g.20gb"),
        # 39.5 GiB goes up.
        ("NVIDIA H100 80GB HBM3", "3g.40gb", 40448, "nvidia_h100_80gb_hbm3_3g.40gb"),
        ("NVIDIA A100-SXM4-40GB", "1g.5gb", 4864, "nvidia_a100-sxm4-40gb_1g.5gb"),
    ],
)
def test_slurmd_names_mig_devices_by_their_memory(model: str, profile: str, mib: int, named: str) -> None:
    device = mig(profile=profile, memory_total_bytes=mib << 20)
    described = host(gpu(0, Way.MIG, name=model, mig=(device,)))
    assert node_gres(slurm_export(described)) == {f"gpu:{named}": 1}
    own = f"{model.lower().replace(' ', '_')}_{profile}"
    assert any("by their memory" in text for text in slurm_export(described).needs) is (named != own)
    # Where it is told each device, it takes our name.
    assert node_gres(slurm_export(described, autodetect="off")) == {f"gpu:{own}": 1}


def test_mps_comes_with_its_scripts() -> None:
    export = slurm_export(MIXED)
    assert {document.name for document in export.documents if document.kind == "sh"} == {
        "gpushare-prolog.sh",
        "gpushare-epilog.sh",
        "gpushare-task-prolog.sh",
    }
    said = lines(export)
    for key in ("Prolog", "Epilog", "TaskProlog"):
        assert Path(said[key]).name in {document.name for document in export.documents}


def test_what_is_lost() -> None:
    lost = slurm_export(
        host(
            gpu(0, Way.MPS, mps=mps(priority=Priority.LOW)),
            gpu(1, time_slice=TimeSlice.LONG),
            gpu(2, Way.MIG, mig=(mig(name="train"),)),
        )
    ).lost
    for word in ("time-slice level", "low priority", "names", "one user"):
        assert any(word in one for one in lost)


UNEQUAL = host(
    gpu(0, Way.MPS, mps=mps()),
    gpu(1, Way.MPS, mps=mps(), minor=2, name="NVIDIA A30"),
    gpu(2, Way.MPS, mps=mps(), minor=5),
)
CUT = host(gpu(0, Way.MIG, mig=(mig(0), mig(1))), gpu(1, Way.MPS, mps=mps()), gpu(2), gpu(3, Way.MPS, mps=mps()))


def numbers(found: Export) -> dict[str, str]:
    """Return the UUID of each number in the prolog."""
    script = text(found, "gpushare-prolog.sh").partition("with_shards()")[0]
    return dict(re.findall(r"^    (\d+) \| \S+\) echo (\S+) ;;$", script, re.MULTILINE))


@pytest.mark.parametrize(
    ("described", "autodetect", "order"),
    [
        # By type in the order of slurm.conf, in one type by file; a gap does not count.
        (UNEQUAL, "off", {"0": 0, "1": 2, "2": 1}),
        (UNEQUAL, "nvml", {"0": 0, "1": 1, "2": 2}),
        # MIG devices come last.
        (CUT, "off", {"0": 1, "2": 3}),
        (CUT, "nvml", {"0": 1, "2": 3}),
    ],
)
def test_the_prolog_knows_slurms_numbers(described: HostDescription, autodetect: str, order: dict[str, int]) -> None:
    export = slurm_export(described, autodetect=autodetect)
    assert numbers(export) == {number: described.gpus[index].uuid for number, index in order.items()}
    if described is UNEQUAL:
        assert "Gres=gpu:t4:2,gpu:a30:1," in lines(export)["NodeName"]
    if autodetect == "off":
        assert any("slurmd -G" in text for text in export.needs)


@pytest.mark.parametrize(
    ("described", "options", "kind", "code"),
    [
        (host(gpu(0, Way.MIG, mig=(mig(mps=mps()),))), {}, NotSupported, "sharing_on_mig"),
        (host(gpu(0, Way.MIG, mig=(mig(replicas=2),))), {}, NotSupported, "sharing_on_mig"),
        (host(gpu(0, Way.MIG)), {}, NotSupported, "no_device"),
        (t4s(minor=None), {}, NotSupported, "no_minor"),
        (host(gpu(0, Way.MIG, mig=(mig(capabilities=None),))), {"autodetect": "off"}, NotSupported, "no_capabilities"),
        (t4s(), {"autodetect": "rsmi"}, BadUsage, "bad_autodetect"),
    ],
)
def test_refused(described: HostDescription, options: dict[str, Any], kind: type[GpushareError], code: str) -> None:
    with fails(kind, code) as refused:
        slurm_export(described, **options)
    assert refused.value.hint


def test_the_gpu_without_a_device_is_named() -> None:
    with fails(NotSupported, "no_device") as refused:
        slurm_export(host(gpu(0, Way.MIG, mig=(mig(),)), gpu(1, Way.MIG)))
    assert "make one: gpushare mig apply -g 1 1g;" in refused.value.hint


KINDS = st.sampled_from(
    [
        {"sharing": Way.EXCLUSIVE},
        {"sharing": Way.TIMESLICE, "replicas": 2},
        {"sharing": Way.MPS, "mps": mps()},
        {"sharing": Way.MIG, "mig": (mig(0), mig(1))},
    ]
)


@given(st.lists(KINDS, min_size=1, max_size=6), st.sampled_from(["nvml", "off"]))
def test_what_is_written_means_the_same(kinds: list[dict[str, Any]], autodetect: str) -> None:
    export = slurm_export(host(*(gpu(index, **kind) for index, kind in enumerate(kinds))), autodetect=autodetect)
    gres = records(export)
    for index, kind in enumerate(kinds):
        names = {one["Name"] for one in gres if one.get("File") == f"/dev/nvidia{index}"} - {"gpu"}
        wanted = {Way.TIMESLICE: {"shard"}, Way.MPS: {"mps"}}.get(kind["sharing"], set())
        assert names == wanted
    number = sum(len(kind.get("mig", ())) or 1 for kind in kinds)
    assert sum(value for key, value in node_gres(export).items() if key.startswith("gpu:")) == number
    assert {key.partition(":")[0] for key in node_gres(export)} == set(lines(export)["GresTypes"].split(","))


def slurmd() -> str | None:
    """Return Slurm's own daemon, which checks a gres.conf without running."""
    return os.environ.get("GPUSHARE_TEST_SLURMD") or shutil.which("slurmd")


@pytest.mark.skipif(slurmd() is None, reason="slurmd is not installed (GPUSHARE_TEST_SLURMD is its path)")
@pytest.mark.parametrize(
    "described", [t4s(4), MIXED, UNEQUAL, CUT, PAIRS], ids=["t4s", "mixed", "unequal", "cut", "pairs"]
)
def test_slurmd_takes_it(tmp_path: Path, described: HostDescription) -> None:
    said = listed(tmp_path, slurm_export(described, autodetect="off"))
    # The order by which it numbers the GPUs. 22.05 lists each file of a MIG device.
    order = slurm_order(described, by_nvml=False)
    whole = [f"nvidia{one.gpu.minor}" for one in order if one.mig is None]
    assert said[: len(whole)] == whole


DETECTED = host(
    gpu(0, Way.MPS, mps=mps(), minor=4),
    gpu(1, Way.MPS, mps=mps(), minor=10, name="NVIDIA A30"),
    gpu(2, Way.MIG, mig=(mig(0), mig(1)), minor=0),
    gpu(3, Way.MPS, mps=mps(), minor=2),
)


@pytest.mark.skipif(slurmd() is None, reason="slurmd is not installed (GPUSHARE_TEST_SLURMD is its path)")
@pytest.mark.parametrize("described", [UNEQUAL, CUT, DETECTED], ids=["unequal", "cut", "detected"])
def test_slurmd_orders_what_it_detects(tmp_path: Path, described: HostDescription) -> None:
    export = slurm_export(described, autodetect="nvml")
    detect(tmp_path, described)
    order = slurm_order(described, by_nvml=True)
    whole = [f"nvidia{one.gpu.minor}" for one in order if one.mig is None]
    for end in [*whole, *(f"nvidia-cap{number}" for number in range(100, 110)), "nvidia0"]:
        (tmp_path / "dev").mkdir(exist_ok=True)
        if not (tmp_path / "dev" / end).is_symlink():
            (tmp_path / "dev" / end).symlink_to("/dev/null")
    said = listed(tmp_path, export, detected=True)
    assert said[: len(whole)] == whole
    assert len(described.gpus) == len(whole) + len([gpu for gpu in described.gpus if gpu.mig])


def detect(tmp_path: Path, described: HostDescription) -> None:
    """Write Slurm's own stand-in for a driver, a file of GPUs: type, CPUs, links, device file, UUID."""
    detected = []
    for each in described.gpus:
        name = (each.name or "").lower().replace(" ", "_")
        links = ",".join("-1" if other is each else "0" for other in described.gpus)
        if not each.mig:
            detected.append(f"{name}|2|0|{links}|{tmp_path}/dev/nvidia{each.minor}")
        for mig_device in each.mig:
            # Without its second capability: slurmd reads lines of 256 bytes.
            files = f"{tmp_path}/dev/nvidia{each.minor},{tmp_path}/dev/nvidia-cap{(mig_device.capabilities or (0,))[0]}"
            detected.append(f"{name}_{mig_device.profile}|2|0|(null)|{files}")
    # In an order that slurmd has to sort.
    (tmp_path / "fake_gpus.conf").write_text("\n".join(reversed(detected)) + "\n")


def write_gres(directory: Path, found: Export) -> None:
    """Write gres.conf with the devices that it names."""
    devices = directory / "dev"
    devices.mkdir(exist_ok=True)
    body = text(found, "gres.conf").replace("AutoDetect=nvml", "AutoDetect=off")
    body = body.replace("/dev/nvidia-caps/", "/dev/").replace("/dev/", f"{devices}/")
    (directory / "gres.conf").write_text(body)
    for path in set(re.findall(rf"{re.escape(str(devices))}/[^,\s]+", body)):
        # A character device, as slurmd asks for.
        if not Path(path).is_symlink():
            Path(path).symlink_to("/dev/null")


def listed(tmp_path: Path, found: Export, *, detected: bool = False) -> list[str]:
    """Return the device files of the GPUs in the order of ``slurmd -G``."""
    write_gres(tmp_path, found)
    name = socket.gethostname().partition(".")[0]
    said = lines(found)
    plugins = os.environ.get("GPUSHARE_TEST_SLURM_PLUGINS")
    config = [
        "ClusterName=t",
        f"SlurmctldHost={name}",
        "AuthType=auth/none",
        "CredType=cred/none",
        f"SlurmdSpoolDir={tmp_path}",
        f"StateSaveLocation={tmp_path}",
        *([f"PluginDir={plugins}"] if plugins else []),
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        f"GresTypes={said['GresTypes']}",
        f"NodeName={name} CPUs=1 Gres={said['NodeName'].partition('Gres=')[2]}",
        "PartitionName=p Nodes=ALL",
    ]
    (tmp_path / "slurm.conf").write_text("\n".join(config) + "\n")
    done = subprocess.run(
        [slurmd() or "slurmd", "-G", "-f", str(tmp_path / "slurm.conf")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # 24.11 says that the CPUs of slurm.conf are not this machine's.
    wrong = re.compile(r"fatal|error(?!: Node configuration differs)|more configured than expected", re.IGNORECASE)
    assert wrong.search(done.stderr) is None, done.stderr
    return [Path(file).name for file in re.findall(r"Name=gpu .*? File=([^,\s]+)", done.stderr)]
