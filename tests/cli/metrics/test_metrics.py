"""``gpushare export prometheus`` and ``gpushare metrics``: the values, the text format, the file, the server, the alerts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser
from prometheus_client.metrics_core import Metric

from gpushare.base.model import ComputeMode, Gpu, LinePlace, ListedJob, Snapshot, Way
from gpushare.export.systemd import FILE
from gpushare.host.capabilities import user_name
from gpushare.host.claims import HeldClaim, take_claim
from gpushare.hostfile.load import applied_path
from gpushare.memory.ledger import Place, Request
from gpushare.mig.ledger import NamedInstance, changing_names
from gpushare.show.prometheus import _HELP, MOST_JOBS, Reading, exposition, families
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Refused, Started, World, Write, refusals, sure, until, until_it_runs

DATA = Path(__file__).resolve().parents[3] / "gpushare" / "data"
LABEL = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1)


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of a text, read by prometheus-client; each name and label set once."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        assert family.type == "gauge"
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            assert sample.timestamp is None
            found[key] = sample.value
    return found


def samples(cli: Cli, host: str = "sim:h200") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return parsed(cli("export", "prometheus", host=host, output="json").data["text"])


def value(found: Any, name: str, /, **labels: str) -> float | None:
    """Return the one value of a metric whose labels hold these, or None."""
    values = [number for (key, has), number in found.items() if key == f"gpushare_{name}" and labels.items() <= {*has}]
    assert len(values) < 2, (name, values)
    return values[0] if values else None


def test_an_idle_gpu(cli: Cli, world: World) -> None:
    found = samples(cli)
    uuid = world.uuid()
    assert value(found, "host_up") == value(found, "gpu_up", UUID=uuid, gpu="0") == 1
    assert value(found, "gpu_info", UUID=uuid, model="NVIDIA H200") == 1
    assert value(found, "gpu_sharing", way="timeslice") == 1
    assert value(found, "gpu_time_slice_level") == value(found, "mig_enabled") == 0
    assert not [name for name, _ in found if name.startswith(("gpushare_mps", "gpushare_mig_instance"))]


def runs(real: Real, world: World, *share: str) -> tuple[Started, dict[str, str]]:
    """Start the job web; return it with the labels that its metrics have."""
    started = real("run", *share, "--", "sleep", "300")
    return started, {"name": "web", "pid": str(until_it_runs(world, started, "web").pid)}


def test_a_job_has_its_role_its_way_its_slice_and_its_limit(real: Real, cli: Cli, world: World) -> None:
    started, job = runs(real, world, "--production", "web", "--slice", "500us", "--memory", "4G")
    # A time-slice is set only once the program is on the GPU.
    until(lambda: value(samples(cli), "job_slice_seconds", **job) == 0.0005, "its time-slice is set")
    found = samples(cli)
    assert value(found, "job_info", **job, role="production", way="timeslice", user=user_name(os.geteuid())) == 1
    assert value(found, "job_on_gpu", **job, gpu="0", UUID=world.uuid()) == 1
    assert value(found, "job_state", **job, state="running") == value(found, "jobs", state="running") == 1
    assert value(found, "job_memory_limit_bytes", **job) == 4 << 30
    assert (value(found, "job_memory_used_bytes", **job) or 0) > 0
    # Unknown, or none: absent.
    assert value(found, "job_threads_limit_ratio") is value(found, "job_memory_swapped_bytes") is None
    started.end(signal.SIGTERM)
    assert not [name for name, _ in samples(cli) if name.startswith("gpushare_job")]


def test_a_client_of_mps_has_its_threads(real: Real, cli: Cli, world: World) -> None:
    _, job = runs(real, world, "--threads", "25", "--name", "web")
    found = samples(cli)
    assert value(found, "job_info", **job, role="plain", way="mps") == 1
    assert value(found, "job_threads_limit_ratio", **job) == 0.25
    assert value(found, "job_slice_seconds") is None


def test_a_job_on_a_named_instance(real: Real, cli: Cli, world: World) -> None:
    world.run("mig", "enable", "-g", "0").ok()
    world.run("mig", "create", "3g.71gb", "-g", "0", "--name", "left").ok()
    started, job = runs(real, world, "--name", "web", "--mig", "left")
    found = samples(cli)
    assert value(found, "job_info", **job, way="mig", GPU_I_PROFILE="3g.71gb", instance_name="left") == 1
    assert value(found, "mig_instance_info", name="left") == 1
    assert value(found, "job_slice_seconds") is None
    started.end(signal.SIGTERM)


def job(number: int, **fields: Any) -> ListedJob:
    given = {"name": f"job-{number}", "pid": number + 1, "state": "running", "user": None, "role": None, "device": None}
    return ListedJob(**{**given, **fields})


def test_the_number_of_jobs_and_those_that_wait() -> None:
    waits = job(1, state="waiting", gpu_indexes=(0,), line=LinePlace(place=1, memory_bytes=None, behind=(), held_by=()))
    snapshot = Snapshot(host="x", gpus=(Gpu(index=0, uuid="GPU-1"),))
    found = parsed(exposition(families(Reading(version="1", snapshot=snapshot, jobs=(waits,)))))
    assert value(found, "job_state", name="job-1", state="waiting") == 1
    assert value(found, "job_on_gpu") is None
    jobs = tuple(map(job, range(MOST_JOBS + 5)))
    found = parsed(exposition(families(Reading(version="1", snapshot=Snapshot(host="x", gpus=()), jobs=jobs))))
    assert value(found, "jobs", state="running") == MOST_JOBS + 5
    assert len([name for name, _ in found if name == "gpushare_job_info"]) == MOST_JOBS


@pytest.mark.parametrize("name", ['a"} 1\ngpushare_host_up 0', "a\\", "a\udcff"])
def test_a_name_that_another_user_chose_is_one_label(name: str) -> None:
    jobs = (job(0, user=name, mig_name=name),)
    found = parsed(exposition(families(Reading(version="1", snapshot=Snapshot(host="x", gpus=()), jobs=jobs))))
    assert (value(found, "host_up"), value(found, "job_info", user=name.replace("\udcff", "?"))) == (1, 1)


def test_mps(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "50", "--memory", "8G", "--priority", "low").ok()
    world.client()
    cli("sim", "add").ok()
    found = samples(cli)
    assert value(found, "gpu_sharing", way="mps") == 1
    assert value(found, "mps_daemon_up", UUID=world.uuid(), ours="true", user=user_name(os.geteuid())) == 1
    assert value(found, "mps_clients") == value(found, "mps_servers", status="ACTIVE") == 1
    assert (value(found, "mps_clients_limit"), value(found, "mps_threads_limit_ratio")) == (48, 0.5)
    assert (value(found, "mps_memory_limit_bytes"), value(found, "mps_outside_processes")) == (8 << 30, 1)
    assert value(found, "mps_leases") == 0


def test_a_dead_daemon_is_down_and_has_no_values(cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    # No limit is absent, too.
    assert value(samples(cli), "mps_memory_limit_bytes") is None
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    found = samples(cli)
    assert value(found, "mps_daemon_up") == 0
    assert value(found, "mps_clients") is None
    assert value(found, "gpu_sharing", way="mps") is None


def test_several_foreign_daemons(cli: Cli, world: World, sim_dir: Path) -> None:
    for name in ("a", "b"):
        (sim_dir / name).mkdir()
        world.foreign_daemon(sim_dir / name)
    found = [labels for name, labels in samples(cli) if name == "gpushare_mps_daemon_up"]
    assert len(found) == 2


def test_mig_and_its_leases(cli: Cli, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:0")
    assert value(samples(cli), "mig_instance_leases") == 0
    lease = take_claim(world.host, uuid)
    assert isinstance(lease, HeldClaim)
    assert value(samples(cli), "mig_instance_leases") == 1
    lease.release()
    world.mig("3g.71gb:0", "3g.71gb:4")
    with changing_names(world.host) as names:
        names["train"] = NamedInstance(name="train", gpu_uuid=world.uuid(), profile="3g.71gb", start=4)
    cli("sim", "add", "--mig", world.state.gpus[0].mig[0].uuid).ok()
    found = samples(cli)
    assert value(found, "mig_enabled") == 1
    instances = [dict(labels) for name, labels in found if name == "gpushare_mig_instance_info"]
    assert {instance["start"]: instance.get("name") for instance in instances} == {"0": None, "4": "train"}
    assert [(instance["GPU_I_PROFILE"], instance["UUID"]) for instance in instances] == [("3g.71gb", world.uuid())] * 2
    # Two 3g use six of seven compute slices, and the seventh is lost to everybody.
    assert value(found, "mig_free_compute_slices") == value(found, "mig_lost_compute_slices") == 1
    assert value(found, "mig_free_memory_slices") == value(found, "mig_lost_memory_slices") == 0
    assert value(found, "mig_free_instances", profile="1g.18gb") == 0
    assert value(found, "gpu_sharing", way="mig") == 1


def test_what_is_unknown_is_absent(cli: Cli, world: World) -> None:
    world.fault("not-supported", "time-slice")
    world.fault("not-supported", "processes")
    found = samples(cli)
    assert value(found, "gpu_time_slice_level") is None
    assert value(found, "gpu_memory_unlisted_bytes") is None
    # So it is of a lost GPU.
    world = World("sim:2xh200")
    world.fault("lost", gpu="1")
    found = samples(cli, world.spec)
    assert [value(found, "gpu_up", gpu=gpu) for gpu in "01"] == [1, 0]
    assert (value(found, "gpu_time_slice_level", gpu="1"), value(found, "host_up")) == (None, 1)


def test_a_host_that_does_not_answer(cli: Cli, world: World, tmp_path: Path) -> None:
    world.fault("no-driver")
    path = tmp_path / "gpushare.prom"
    answer = cli("export", "prometheus", "--textfile", str(path))
    assert (answer.code, len(answer.lines("error"))) == (9, 1)
    found = parsed(path.read_text())
    assert value(found, "host_up") == 0
    assert {name for name, _ in found} == {"gpushare_build_info", "gpushare_host_up"}


@pytest.mark.parametrize("host", ["sim:8xh100-80gb", "sim:a100-40gb,t4", "sim:2xrtx-4090"])
def test_every_host_can_be_read(cli: Cli, host: str) -> None:
    assert value(samples(cli, host), "host_up") == 1


def test_textfile_is_whole_or_the_old_one(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpushare.prom"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        answer = cli("export", "prometheus", "--textfile", str(path))
    assert (answer.code, "No space left" in answer.err) == (4, True)
    assert (path.read_text(), [path.name for path in tmp_path.iterdir()]) == ("old", ["gpushare.prom"])
    cli("export", "prometheus", "--textfile", str(path)).ok()
    text = path.read_text()
    assert text.endswith("\n")
    assert (value(parsed(text), "host_up"), stat.S_IMODE(path.stat().st_mode)) == (1, 0o644)
    assert [path.name for path in tmp_path.iterdir()] == ["gpushare.prom"]


@refusals(
    "not_written 4: --textfile /nowhere/at/all/a.prom",
    "bad_textfile 2: --textfile /tmp/a.txt",
    "bad_combination 2: --rules --dashboard",
)
def test_refused(refused: Refused, words: tuple[str, ...], code: str, exit_code: int) -> None:
    text = refused("export", "prometheus", *words, code=code, exit_code=exit_code)
    assert ("No such file" in text) == (code == "not_written")
    assert not Path("/nowhere").exists()


@pytest.mark.parametrize("listen", ["9836", "localhost", "127.0.0.1:port", "127.0.0.1:99999", ":-1"])
def test_no_address(refused: Refused, listen: str) -> None:
    refused("metrics", "--listen", listen, code="bad_address", exit_code=2)


def test_address_in_use(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused("metrics", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", code="cannot_listen", exit_code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server(real: Real, world: World, number: int) -> None:
    world.mig("1g.18gb:0")
    started = real("metrics", "--listen", "127.0.0.1:0")
    address = sure(re.search(r"http://\S+", started.note()))
    for profiles in (["1g.18gb"], ["2g.35gb"]):
        # A change between two scrapes is seen: nothing of the first is kept.
        world.mig(*(f"{profile}:0" for profile in profiles))
        with urllib.request.urlopen(address.group(), timeout=120) as answer:  # noqa: S310 - the server of this test
            found = parsed(answer.read().decode())
        instances = [dict(labels)["GPU_I_PROFILE"] for name, labels in found if name == "gpushare_mig_instance_info"]
        assert instances == profiles
    assert started.end(number).code == 0


@given(
    labels=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), LABEL, max_size=3),
    number=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_label_and_value_come_back(labels: dict[str, str], number: float) -> None:
    metric = Metric("gpushare_x", "A \\ help\nof two lines.", "gauge")
    metric.add_sample("gpushare_x", labels, number)
    assert parsed(exposition([metric])) == {("gpushare_x", frozenset(labels.items())): number}


@given(
    uuids=st.lists(st.sampled_from(["GPU-1", "GPU-2", None]), max_size=4), taken=st.one_of(st.none(), st.floats(0, 2e9))
)
def test_no_series_comes_twice(uuids: list[str | None], taken: float | None) -> None:
    gpus = tuple(Gpu(index=number, uuid=uuid) for number, uuid in enumerate(uuids))
    found = families(Reading(version="1", snapshot=Snapshot(host="x", gpus=gpus, taken_at=taken)))
    parsed(exposition(found))
    assert all(family.samples for family in found)


def test_names_rules_and_dashboard(cli: Cli) -> None:
    for name, text in _HELP.items():
        assert re.fullmatch(r"gpushare_[a-z_]+[a-z]", name)
        assert text.endswith(".")
        # Base units: nothing in percent, milliseconds or MiB.
        assert not re.search(r"percent|milli|mib|_ms$|total$", name)
    used = {name for text in expressions() for name in re.findall(r"\bgpushare_\w+", text)}
    assert len(used) > 10
    assert used <= set(_HELP)
    groups = yaml.safe_load(cli("export", "prometheus", "--rules").ok().out)["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(rules) > 12
    assert all(rule["annotations"]["remedy"] and rule["annotations"]["summary"] and rule["for"] for rule in rules)
    board = json.loads(cli("export", "prometheus", "--dashboard").ok().out)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 8
    assert {each["datasource"]["uid"] for panel in board["panels"] for each in panel["targets"]} == {"${datasource}"}


def test_memory_that_waits_is_reserved_out_or_of_nobody(cli: Cli, world: World) -> None:
    pid = admin.add_process(world.spec, memory_bytes=4 << 30, name="train")
    places = [Place(world.host, Request(memory_bytes=6 << 30, keys=(world.uuid(),), client=False)) for _ in range(2)]
    places[0].take(world.uuid())
    world.fault("unlisted-memory", "2G")
    found = samples(cli)
    assert value(found, "gpu_memory_jobs_reserved_bytes", gpu="0") == 6 << 30
    assert value(found, "gpu_jobs_waiting", gpu="0") == 1
    assert value(found, "gpu_memory_unlisted_bytes", gpu="0") == 2 << 30
    assert value(found, "gpu_memory_idle_bytes", gpu="0") == 0
    assert value(found, "jobs", state="out") is None
    for place in places:
        place.leave()
    cli("swap", "out", str(pid)).ok()
    found = samples(cli)
    assert value(found, "jobs", state="out") == 1
    assert (value(found, "swapped_out_timestamp_seconds", state="out") or 0) > 1e9


def test_a_text_file_knows_memory_that_is_held_by_what_does_nothing(cli: Cli, world: World) -> None:
    """A timer starts gpushare again for each file, so there are no earlier looks; without this the alert never fired."""
    admin.add_process(world.spec, memory_bytes=4 << 30, sm_percent=0)
    admin.add_process(world.spec, memory_bytes=2 << 30, sm_percent=50)
    assert value(samples(cli), "gpu_memory_idle_bytes", gpu="0") == 0
    with world.file.changed() as state:
        for one in state.processes:
            one.started -= 3600 * 100
    assert value(samples(cli), "gpu_memory_idle_bytes", gpu="0") == 4 << 30


def expressions() -> list[str]:
    groups = yaml.safe_load((DATA / "prometheus-rules.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    panels = json.loads((DATA / "grafana-dashboard.json").read_text())["panels"]
    return [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_applied_file_brings_a_dead_daemon_back(cli: Cli, world: World, write: Write) -> None:
    rules = yaml.safe_load(cli("export", "prometheus", "--rules").ok().out)["groups"][0]["rules"]
    (remedy,) = (rule["annotations"]["remedy"] for rule in rules if rule.get("alert") == "GpushareMpsDaemonDown")
    cli("apply", "-f", write("version: 1\ngpus:\n- match: all\n  mps: {threads: 50}\n")).ok()
    for number in (signal.SIGKILL, signal.SIGSTOP):
        world.send(world.state.daemons[0].pid, number)
        stop, apply = remedy.replace("{{ $labels.device }}", world.uuid()).split(": ")[-1].split("; ")
        assert FILE in apply
        for command in (stop, apply.replace(FILE, str(applied_path(world.host)))):
            cli(*command.split()[2:]).ok()
        assert [daemon.threads for daemon in world.state.daemons] == [50]


def test_what_was_asked_for_is_told_from_what_was_left_over(cli: Cli, world: World, write: Write) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    assert value(samples(cli), "gpu_exclusive_wanted") is None
    cli("apply", "-f", write("version: 1\ngpus:\n- match: all\n  exclusive: true\n")).ok()
    assert value(samples(cli), "gpu_exclusive_wanted", gpu="0", UUID=world.uuid()) == 1


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


def test_promtool_takes_the_metrics(cli: Cli, world: World, promtool: str) -> None:
    cli("mps", "start", "--threads", "50").ok()
    world.client()
    text = cli("export", "prometheus", output="json").data["text"]
    jobs = (job(1, way=Way.MIG, mig_profile="1g.18gb", slice_us=500, threads_percent=25.0, memory_used_bytes=1),)
    of_jobs = exposition(families(Reading(version="1", snapshot=Snapshot(host="x", gpus=()), jobs=jobs)))
    # Each metric once: those of the jobs, of which the host has none.
    text += of_jobs[of_jobs.index("# HELP gpushare_jobs ") :]
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    # Labels of dcgm-exporter are called as there.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_tests_the_rules(promtool: str, tmp_path: Path) -> None:
    shutil.copy(DATA / "prometheus-rules.yaml", tmp_path)
    shutil.copy(Path(__file__).parents[2] / "data" / "prometheus-rules-test.yaml", tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", "prometheus-rules-test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_a_panel_that_counts_faults_shows_0_where_there_are_none(promtool: str, tmp_path: Path) -> None:
    panels = json.loads((DATA / "grafana-dashboard.json").read_text())["panels"]
    titles = {"MPS daemons down", "MPS servers in FAULT", "CUDA programs outside MPS"}
    counts = [panel for panel in panels if panel["title"] in titles]
    assert len(counts) == 3
    queries = [target["expr"].replace("$instance", ".*") for panel in counts for target in panel["targets"]]
    zero = {"eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 0}]}
    expected = [{"expr": query, **zero} for query in queries]
    series = [{"series": 'gpushare_host_up{instance="a"}', "values": "1x10"}]
    test = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}]}
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
