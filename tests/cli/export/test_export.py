"""``gpushare export`` on simulated hosts: each engine, what it refuses, its files and its JSON."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare.base.model import ComputeMode
from gpushare.cli.export import _own_program
from gpushare.cli.options import settings
from gpushare.connect import connect
from gpushare.mig.parted import choose_config, parse_parted
from gpushare.mps.home import homes_in
from gpushare.sim import admin
from tests.cli.drive import Cli, Refused, World, Write
from tests.export.plugin_config import from_config

T4S = "sim:4xt4"
H100S = "sim:8xh100-80gb"
ENGINES = ("k8s", "dra", "karpenter", "slurm", "systemd")
CONTAINERS = ("cdi", "docker", "compose")


def cut(*profiles: str, host: str = H100S, gpu: str = "0") -> list[str]:
    """Give a simulated GPU these MIG devices and return their UUIDs."""
    connect(host)
    admin.set_mig(host, gpu, profiles)
    return [mig.uuid for mig in connect(host).nvml.sweep()[int(gpu)].mig_instances]


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def plugin_of(text: str) -> Any:
    """Return the plugin configuration that the node is labelled with."""
    data = documents(text)[0]["data"]
    (key,) = (key for key in data if key != "none")
    return key, from_config(yaml.safe_load(data[key]))


@pytest.mark.parametrize("engine", ["dra", "slurm"])
def test_the_hint_on_a_gpu_without_mig_devices_makes_one(cli: Cli, engine: str) -> None:
    """A30 has room for four 1g only; GPU 1 is in MIG mode, GPU 0 is not."""
    host = "sim:2xa30"
    cli("mig", "enable", "-g", "1", "-y", host=host).ok()
    hint = cli("export", engine, "-g", "1", host=host, output="json").error["hint"]
    command = hint.partition(": ")[2].partition("; or")[0]
    cli(*shlex.split(command)[1:], "-y", host=host).ok()
    cli("export", engine, "-g", "1", host=host).ok()


def test_time_slicing_in_kubernetes(cli: Cli) -> None:
    done = cli("export", "k8s", "--node", "gpu01", host=T4S).ok()
    kinds = [document["kind"] for document in documents(done.out)]
    assert kinds == ["ConfigMap", "ClusterPolicy", "Deployment"]
    key, plugin = plugin_of(done.out)
    assert (key, plugin.strategy, plugin.replicas) == ("timeslice-4", "timeSlicing", {"nvidia.com/gpu": 4})
    assert documents(done.out)[2]["spec"]["replicas"] == 5
    assert "note: apply: kubectl taint node gpu01 nvidia.com/gpu=true:NoSchedule" in done.err
    assert "choose with --replicas N" in done.err
    assert cli("export", "k8s", "--node", "gpu01", host=T4S, output="table").ok().out == done.out


def test_options_of_k8s(cli: Cli) -> None:
    words = ["--replicas", "10", "--namespace", "nvidia"]
    done = cli("export", "k8s", *words, host=T4S).ok()
    key, plugin = plugin_of(done.out)
    assert (key, plugin.replicas) == ("timeslice-10", {"nvidia.com/gpu": 10})
    assert documents(done.out)[1]["spec"]["devicePlugin"]["config"]["default"] == "none"
    assert "NODE" in cli("export", "k8s", host=T4S).ok().err
    cut(*["1g.10gb"] * 7, host="sim:h100")
    _, plugin = plugin_of(cli("export", "k8s", "--mig-replicas", "2", host="sim:h100").ok().out)
    assert plugin.replicas == {"nvidia.com/mig-1g.10gb": 2}


@pytest.fixture
def uneven(cli: Cli) -> list[str]:
    """Cut GPU 0, put MPS on one of its devices and on GPU 2, and return the UUIDs of the MIG devices."""
    uuids = cut("3g.40gb:4", "1g.10gb:0", "1g.10gb:1")
    cli("mps", "start", "-g", uuids[0], "--threads", "50", host=H100S).ok()
    cli("mps", "start", "-g", "2", "--threads", "30", "--memory", "8G", host=H100S).ok()
    cli("timeslice", "set", "long", "-g", "3", host=H100S).ok()
    return uuids


def test_dra_says_what_the_plugin_cannot(cli: Cli, refused: Refused, uneven: list[str]) -> None:
    text = refused("export", "k8s", code="no_slice_length", exit_code=3, host=H100S)
    assert "gpushare export dra" in text
    done = cli("export", "dra", host=H100S).ok()
    by_key = {document["metadata"]["name"]: document for document in documents(done.out)}
    (sliced,) = [name for name in by_key if name.startswith("gpu-3-") and name.endswith("-timeslice")]
    by_interval = by_key[sliced]["spec"]["devices"]["config"][0]["opaque"]["parameters"]["sharing"]
    assert by_interval["timeSlicingConfig"] == {"interval": "Long"}
    (capped,) = [name for name in by_key if name.startswith("gpu-2-") and name.endswith("-mps")]
    by_mps = by_key[capped]["spec"]["devices"]["config"][0]["opaque"]["parameters"]["sharing"]
    assert by_mps["mpsConfig"] == {"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "8192Mi"}
    assert [name for name in by_key if name.startswith("gpu-0") and name.endswith("-mps")]
    assert "MPSSupport=true" in done.err
    only = cli("export", "dra", "-g", "3", "--kubernetes", "1.32", host=H100S).ok()
    assert documents(only.out)[0]["apiVersion"] == "resource.k8s.io/v1beta1"


def test_slurm_and_mig_parted_and_systemd(cli: Cli) -> None:
    cut("3g.40gb:4", "1g.10gb:0")
    cli("mps", "start", "-g", "2", "--threads", "30", "--memory", "8G", host=H100S).ok()
    out = cli("export", "slurm", "--autodetect", "off", "--replicas", "3", host=H100S).ok().out
    assert "Name=gpu Type=nvidia_h100_80gb_hbm3_3g.40gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap" in out
    assert "Name=mps Count=100 File=/dev/nvidia2\n" in out
    assert "Name=shard Count=3 File=/dev/nvidia1\n" in out
    assert "echo 8192M" in out
    assert "AutoDetect=nvml\n" in cli("export", "slurm", host=H100S).ok().out
    parted = cli("export", "mig-parted", "--name", "day", host=H100S).ok()
    first = choose_config(parse_parted(yaml.safe_load(parted.out)), "day").entries[0]
    assert (first.devices, dict(first.counts)) == ((0,), {"1g.10gb": 1, "3g.40gb": 1})
    units = cli("export", "systemd", "--program", "/opt/bin/gpushare", host=H100S).ok().out
    assert "ExecStart=/opt/bin/gpushare apply -f /var/lib/gpushare/applied.yaml --yes\n" in units
    assert "gpushare-mps-ready 30.0 8192M 8G -\n" in units


def test_karpenter(cli: Cli) -> None:
    done = cli("export", "karpenter", "--replicas", "4", "--max-nodes", "2", host="sim:t4").ok()
    node_class, pool, overlay, verify = documents(done.out)
    assert node_class["kind"] == "EC2NodeClass"
    assert pool["spec"]["limits"] == {"nvidia.com/gpu": "8"}
    assert overlay["spec"]["capacity"] == {"nvidia.com/gpu": "4"}
    assert verify["spec"]["replicas"] == 8
    named = cli("export", "karpenter", "--instance-type", "g4dn.2xlarge", "--name", "a", host="sim:t4").ok()
    assert "g4dn.2xlarge" in named.out


def test_containers(cli: Cli, uneven: list[str]) -> None:
    shared, plain = uneven[0], uneven[1]
    flags = shlex.split(cli("export", "docker", "-g", shared, host=H100S).ok().out)
    assert f"device={shared}" in flags
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50.0" in flags
    pipe = next(word for word in flags if word.startswith("CUDA_MPS_PIPE_DIRECTORY=")).partition("=")[2]
    assert Path(pipe).is_dir()
    assert cli("export", "docker", "-g", plain, host=H100S).ok().out == f"--gpus device={plain}\n"
    assert cli("export", "cdi", "-g", plain, host=H100S).ok().out == f"--device nvidia.com/gpu={plain}\n"
    (document,) = documents(cli("export", "compose", "-g", "2", "--image", "x", host=H100S).ok().out)
    assert document["services"]["gpu"]["environment"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert document["services"]["gpu"]["image"] == "x"


@pytest.mark.parametrize("engine", [*ENGINES, *CONTAINERS])
def test_json_is_one_document_and_the_files_of_a_simulated_host_an_example(cli: Cli, engine: str) -> None:
    answer = cli("export", engine, host="sim:t4", output="json").ok()
    assert "note: sim:t4 is simulated: the files are an example; for a real host, export there" in answer.err
    data = answer.data
    assert (set(data), data["engine"]) == ({"engine", "documents", "commands", "needs", "lost", "written"}, engine)
    assert data["documents"]
    for document in data["documents"]:
        assert list(document) == ["name", "text", "kind"]
        assert document["text"].endswith("\n")
        assert "sim:" not in document["text"]
    assert data["commands"]
    assert data["needs"]
    assert data["written"] == []


def test_the_script_names_its_node_in_every_command(cli: Cli, tmp_path: Path) -> None:
    cut("3g.40gb", "3g.40gb")
    cli("export", "k8s", "--to", str(tmp_path / "x"), host=H100S).ok()
    commands = (tmp_path / "x" / "apply.sh").read_text().partition("set -x")[2]
    assert 'success node/"$node" --timeout' in commands
    assert "NODE" not in commands


@pytest.mark.parametrize("engine", ENGINES)
def test_files(cli: Cli, refused: Refused, tmp_path: Path, engine: str) -> None:
    there = tmp_path / "my files"
    cli("mps", "start", "-g", "all", host=T4S).ok()
    done = cli("export", engine, "--to", str(there), host=T4S).ok()
    data = cli("export", engine, host=T4S, output="json").ok().data
    script = there / "apply.sh"
    assert {path.name: path.read_text() for path in there.iterdir() if path != script} == {
        document["name"]: document["text"] for document in data["documents"]
    }
    assert sorted(done.out.splitlines()) == sorted(str(path) for path in there.iterdir())
    if script.exists():
        assert [
            line for line in done.err.splitlines() if line.startswith(("note: apply: ", "note: to apply them: "))
        ] == [
            f"note: to apply them: sh '{script}'{' NODE' if engine == 'k8s' else ''} (its first lines say what it needs)"
        ]
        commands = [line.replace("node NODE", 'node "$node"') for line in data["commands"]]
        assert script.read_text().splitlines()[-len(commands) :] == commands
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
        assert script.stat().st_mode & 0o100
    else:
        assert f"note: apply: cd '{there}'" in done.err
    for document in data["documents"]:
        assert bool((there / document["name"]).stat().st_mode & 0o100) is (document["kind"] == "sh")
    # Nothing that is there is written over.
    (there / data["documents"][0]["name"]).write_text("mine")
    refused("export", engine, "--to", str(there), code="file_exists", exit_code=19, host=T4S)
    assert (there / data["documents"][0]["name"]).read_text() == "mine"


@pytest.mark.parametrize(
    "image", ["web", "localhost:5000/a/b_c:V1", "nvcr.io/nvidia/pytorch:25.01-py3", f"repo/web@sha256:{'0f' * 32}"]
)
def test_an_image_is_written_as_it_is_given(cli: Cli, image: str) -> None:
    service = yaml.safe_load(cli("export", "compose", "-g", "0", "--image", image, host=T4S).ok().out)["services"][
        "gpu"
    ]
    assert service["image"] == image


@pytest.mark.parametrize("engine", ["compose", "cdi", "docker", "mig-parted", "systemd", "karpenter"])
def test_what_writes_the_files_that_a_command_names_is_said(cli: Cli, engine: str) -> None:
    """Also where there is one file. The flags of Docker are no file."""
    host = "sim:h100" if engine == "mig-parted" else T4S
    if engine == "mig-parted":
        World(host).mig("3g.40gb")
    done = cli("export", engine, *(["-g", "0"] if engine in {"compose", "cdi", "docker"} else []), host=host).ok()
    is_said = f"note: to write files: gpushare export {engine} --to DIR, with the same options" in done.err
    assert is_said is (engine not in {"cdi", "docker"})


def test_the_note_of_karpenter_names_only_options_that_k8s_has(cli: Cli) -> None:
    done = cli("export", "karpenter", "--cluster", "prod", "--replicas", "3", host=T4S)
    note = next(line for line in done.ok().lines("note") if "export k8s" in line)
    assert re.findall(r"--?\w[-\w]*", note.partition("same")[2]) == ["-f", "--replicas", "--mig-replicas"]
    cli("export", "k8s", "--replicas", "3", "--mig-replicas", "2", host=T4S).ok()


@pytest.mark.parametrize(("words", "code", "exit_code"), [
    (["k8s", "-g", "0"], "per_node", 3), (["k8s", "-g", "9"], "unknown_gpu", 6),
    (["k8s", "--replicas", "0"], "usage", 2), (["k8s", "--mig-replicas", "0"], "usage", 2),
    (["k8s", "--namespace", "default"], "bad_namespace", 2), (["k8s", "--node", "GPU 01"], "bad_node", 2),
    (["dra", "--kubernetes", "1.20"], "no_dra", 3), (["dra", "--kubernetes", "x"], "bad_version", 2),
    (["karpenter", "--name", "A"], "bad_name", 2), (["karpenter", "--max-nodes", "0"], "bad_number", 2),
    (["slurm", "--autodetect", "x"], "bad_autodetect", 2), (["mig-parted"], "no_mig", 3),
    (["mig-parted", "--name", "a b"], "bad_name", 2), (["systemd", "--program", "gpushare"], "bad_path", 2),
    (["docker"], "gpu_not_named", 2), (["compose", "-g", "all"], "one_gpu", 2),
    (["compose", "-g", "0", "--image", "a b"], "bad_name", 2), (["compose", "-g", "0", "--image", ""], "bad_name", 2),
    (["ecs", "-g", "0", "--image", "nvcr.io/NVIDIA/cuda"], "bad_name", 2), (["cdi", "-g", "9"], "unknown_gpu", 6),
    (["k8s", "--to", f"{__file__}/below"], "not_written", 4),
])  # fmt: skip
def test_refused(refused: Refused, words: list[str], code: str, exit_code: int) -> None:
    refused("export", *words, code=code, exit_code=exit_code, host=T4S)


def test_devices_that_an_engine_does_not_take(refused: Refused, uneven: list[str]) -> None:
    refused("export", "dra", "-g", uneven[0], code="whole_gpu", exit_code=2, host=H100S)
    refused("export", "docker", "-g", "0", code="one_device", exit_code=2, host=H100S)
    # A GPU in MIG mode without devices.
    nvml = connect("sim:h100").nvml
    handle = nvml.handle(0)
    nvml.demand(lambda api: api.nvmlDeviceSetMigMode(handle, 1))
    nvml.restart()
    assert nvml.sweep()[0].mig_enabled is True
    for engine, exit_code in (("slurm", 3), ("docker", 6), ("dra", 3)):
        refused("export", engine, code="no_device", exit_code=exit_code, host="sim:h100")


def test_a_lost_gpu_and_a_prohibited_one(refused: Refused) -> None:
    world = World(T4S)
    world.host.nvml.set_compute_mode(1, ComputeMode.PROHIBITED)
    assert "timeslice set" in refused("export", "k8s", code="no_sharing", exit_code=3, host=T4S)
    world.fault("lost", gpu="1")
    # It is never left out in silence.
    assert "see: gpushare status" in refused("export", "k8s", code="gpu_lost", exit_code=6, host=T4S)


def test_one_replica_is_a_gpu_that_is_not_shared(cli: Cli) -> None:
    assert "Name=shard Count=4" in cli("export", "slurm", host=T4S).ok().out
    done = cli("export", "slurm", "--replicas", "1", host=T4S).ok()
    assert "shard" not in done.out + done.err
    assert "Gres=gpu:t4:" in done.out


# -- from gpushare.yaml ------------------------------------------------------------------------------


def test_a_file_says_what_the_host_is_not_yet(cli: Cli, write: Write) -> None:
    path = write("version: 1\ngpus:\n- {match: all, timeslice: default}\n")
    three = ("-f", path, "--replicas", "3")
    assert plugin_of(cli("export", "k8s", *three, host=T4S).ok().out)[0] == "timeslice-3"
    assert "Count=3" in cli("export", "slurm", *three, host=T4S).ok().out
    assert "nvidia.com/gpu: '12'" in cli("export", "karpenter", *three, host=T4S).ok().out


def test_mig_of_a_file(cli: Cli, write: Write) -> None:
    path = write('version: 1\ngpus:\n- match: {index: 0}\n  mig: [3g, "1g*2"]\n')
    host = "sim:2xh100"
    entries = choose_config(
        parse_parted(yaml.safe_load(cli("export", "mig-parted", "-f", path, host=host).ok().out)), None
    )
    assert [(entry.devices, entry.mig_enabled, dict(entry.counts)) for entry in entries.entries] == [
        ((0,), True, {"1g.10gb": 2, "3g.40gb": 1}),
        ((1,), False, {}),
    ]
    claims = {
        document["metadata"]["name"] for document in documents(cli("export", "dra", "-f", path, host=host).ok().out)
    }
    assert len([name for name in claims if re.match("gpu-0-[0-9a-f]{8}-mig-", name)]) == 2


@pytest.mark.parametrize(("engine", "entry", "code", "exit_code", "said"), [
    ("k8s", "match: {index: 9}, exclusive: true", "unknown_gpu", 6, "9"),
    ("k8s", "match: all, shared: true", "bad_file", 2, "shared"),
    ("k8s", "match: all, timeslice: long", "no_slice_length", 3, "gpushare export dra"),
    ("k8s", "match: {index: 2}, mig: [1g.10gb]", "no_mig", 3, "no MIG"),
    # What a GPU can never hold.
    ("dra", "match: {index: 1}, mig: [3g.40gb*3]", "never_fits", 3, "3g.40gb*3 does not fit on GPU 1, even empty"),
    ("dra", 'match: {index: 1}, mig: ["3g.40gb:0", "1g.10gb:1"]', "never_fits", 3, "on GPU 1"),
    ("dra", "match: {index: 1}, mig: [1g.5gb]", "mig_profile_unknown", 3, ": GPU 1: this GPU has no MIG profile '1g.5gb'"),
    ("dra", "match: {index: 1}, mig: [{wish: 1g.10gb, mps: {memory: 20G}}]", "limit_above_gpu", 2, "MIG 1g.10gb of GPU 1"),
    ("dra", "match: {index: 1}, mps: {memory: 900G}", "limit_above_gpu", 2, "900.0 GiB is too large: GPU 1 has 79.6 GiB"),
])  # fmt: skip
def test_a_file_that_is_refused(
    cli: Cli, refused: Refused, write: Write, engine: str, entry: str, code: str, exit_code: int, said: str
) -> None:
    path, host = write(f"version: 1\ngpus:\n- {{{entry}}}\n"), "sim:2xh100,t4"
    assert said in refused("export", engine, "-f", path, code=code, exit_code=exit_code, host=host)
    # Only the GPUs that are exported must hold.
    if "900G" in entry:
        cli("export", "slurm", "-f", path, "-g", "0", host=host).ok()


def test_a_file_that_is_applied_is_exported_as_the_host_is(cli: Cli, write: Write) -> None:
    path = write("version: 1\ngpus:\n- {match: {index: 1}, mig: [3g.40gb, 1g.10gb*2]}\n")
    words = ("export", "slurm", "--autodetect", "off")
    assert "does not exist yet" in cli(*words, "-f", path, host="sim:2xh100").err
    cli("apply", "-f", path, host="sim:2xh100").ok()
    assert cli(*words, "-f", path, host="sim:2xh100").ok().out == cli(*words, host="sim:2xh100").ok().out


# -- MPS daemons that are not what they seem -----------------------------------------------------------


@pytest.mark.usefixtures("patience_is_over")
def test_a_daemon_that_hangs_or_cannot_be_seen_into_is_not_left_out(cli: Cli, refused: Refused, tmp_path: Path) -> None:
    world = World("sim:2xt4")
    world.foreign_daemon(tmp_path)
    world.fault("user", "61000")
    assert "sudo" in refused("export", "dra", code="daemon_unknown", exit_code=4, host=world.spec)
    cli("mps", "start", "-g", "0", host=T4S).ok()
    World(T4S).fault("hang", "nvidia-cuda-mps-control")
    refused("export", "dra", code="daemon_silent", exit_code=1, host=T4S)


def test_daemons_of_a_run_and_dead_ones_are_not_what_the_host_is_set_to(cli: Cli) -> None:
    for index in "01":
        cli("mps", "start", "-g", index, host=T4S).ok()
    world = World(T4S)
    first, second = homes_in([world.host.run_directory])
    record = first.read()
    assert record is not None
    first.write(replace(record, transient=True))
    dead = second.read()
    assert dead is not None
    world.send(dead.pid, 9)
    assert plugin_of(cli("export", "k8s", host=T4S).ok().out)[0] == "timeslice-4"
    assert "gpushare-mps-gpu" not in cli("export", "systemd", host=T4S).ok().out


def test_a_daemon_of_somebody_else_counts(cli: Cli, tmp_path: Path) -> None:
    World(T4S).foreign_daemon(tmp_path)
    key, plugin = plugin_of(cli("export", "k8s", host=T4S).ok().out)
    assert (key, plugin.strategy) == ("mps-4", "mps")
    assert str(tmp_path / "p") in cli("export", "docker", "-g", "1", host=T4S).ok().out


def test_a_media_extension_is_not_lost(cli: Cli) -> None:
    """The name of a MIG device need not have the +me that its GPU instance has."""
    host = "sim:a100-40gb"
    cli("mig", "enable", "-g", "0", "-y", host=host).ok()
    cli("mig", "create", "1g.5gb+me", "1c.3g.20gb", "-y", host=host).ok()
    assert " 1g.5gb+me: 1\n" in cli("export", "mig-parted", host=host).ok().out
    assert " 1c.3g.20gb: 1\n" in cli("export", "mig-parted", host=host).ok().out


def test_a_daemon_in_ecs_and_at_boot(cli: Cli) -> None:
    cli("mps", "start", "--threads", "50", "--memory", "8G", "--exclusive").ok()
    done = cli("export", "ecs", "--name", "train").ok()
    assert json.loads(done.out)["family"] == "train"
    assert "note: apply: aws ecs register-task-definition --cli-input-json file://task-definition.json" in done.err
    assert "-c EXCLUSIVE_PROCESS\n" in cli("export", "systemd").ok().out


@pytest.mark.parametrize("engine", ["k8s", "dra", "karpenter", "slurm", "mig-parted", "docker", "compose", "cdi"])
@pytest.mark.parametrize("source", ["host", "file"])
def test_a_grant_is_told_to_be_lost(cli: Cli, tmp_path: Path, engine: str, source: str) -> None:
    host = "sim:h100-80gb"
    (uuid,) = cut("7g.80gb", host=host)
    words = ["-g", uuid] if engine in CONTAINERS else []
    if source == "file":
        path = tmp_path / "gpushare.yaml"
        path.write_text("version: 1\ngpus: [{match: all, mig: [{wish: 7g.80gb, name: whole, users: [nobody]}]}]\n")
        words = ["-f", str(path)]
    if engine in CONTAINERS and source == "file":
        words += ["-g", uuid]
    assert "grant" not in cli("export", engine, *(words if source == "host" else ()), host=host).err
    if source == "host":
        cli("mig", "name", "whole", "7g.80gb:0", host=host).ok()
        cli("mig", "grant", "whole", "nobody", host=host).ok()
    assert "note: lost: " in (err := cli("export", engine, *words, host=host).ok().err)
    assert "grant" in err


SECTIONS = """
memory: [{match: {user: nobody}, limit: 2G}]
slices: [{match: {user: nobody}, slice: 2ms}]
reserve: {longest: 4h}
"""


@pytest.mark.parametrize("engine", ["k8s", "dra", "karpenter", "slurm", "mig-parted"])
def test_sections_that_are_not_about_gpus_are_told_to_be_lost(cli: Cli, tmp_path: Path, engine: str) -> None:
    path, sharing = tmp_path / "gpushare.yaml", "version: 1\ngpus: [{match: all, mig: [1g.10gb]}]\n"

    def is_lost(*words: str) -> bool:
        return "longest lease of gpushare.yaml" in cli("export", engine, *words, host="sim:h100-80gb").ok().err

    path.write_text(sharing)
    assert not is_lost("-f", str(path))
    path.write_text(sharing + SECTIONS)
    assert is_lost("-f", str(path))
    # Those of the applied file are lost as well.
    cli("apply", "-f", str(path), "-y", host="sim:h100-80gb").ok()
    assert is_lost()


def test_a_unit_has_the_path_of_this_gpushare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "host", "local")
    # As with sudo, whose PATH does not have it.
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["/home/ada/.local/bin/gpushare", "export", "systemd"])
    assert _own_program() == "/home/ada/.local/bin/gpushare"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert _own_program() == "/usr/bin/gpushare"
    monkeypatch.setattr(settings, "host", "sim:h100")
    monkeypatch.setattr(sys, "argv", ["/opt/gpushare"])
    assert _own_program() == "/usr/bin/gpushare"


@pytest.mark.parametrize("engine", ["k8s", "dra", "slurm", "systemd", "mig-parted", "docker", "cdi"])
def test_a_file_from_stdin_is_read_once(cli: Cli, monkeypatch: pytest.MonkeyPatch, write: Write, engine: str) -> None:
    text = "version: 1\ngpus:\n- match: {index: 0}\n  exclusive: true\nslices:\n- match: all\n  slice: 500us\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli("export", engine, "-f", "-").ok().out == cli("export", engine, "-f", write(text)).ok().out
