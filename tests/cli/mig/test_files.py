"""``gpushare mig check`` and ``export mig-parted`` on simulated hosts, and every file that is none."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare.connect import connect
from gpushare.sim import admin
from tests.cli.drive import Cli, Refused, World, Write, refusals

HOST = "sim:2xh100"
MIXED = "sim:h100,t4"
TWO = """\
version: v1
mig-configs:
  day:
  - devices: [0]
    mig-enabled: true
    mig-devices: {"3g.40gb": 1, "1g.10gb": 2}
  - devices: [1]
    mig-enabled: false
  night:
  - {devices: all, mig-enabled: false}
"""


def cut(*profiles: str, host: str = HOST, gpu: str = "0") -> None:
    """Give a simulated GPU these instances."""
    connect(host)
    admin.set_mig(host, gpu, profiles)


def test_check_says_what_is_missing_and_too_much(cli: Cli) -> None:
    cut("3g.40gb:4", "1g.10gb:0", "1g.10gb:1")
    done = cli("mig", "check", "3g", "1g.10gb*2", "-g", "0", host=HOST).ok()
    assert (done.out, done.err) == ("GPU 0: as asked\n", "")
    data = cli("mig", "check", "3g:4", "1g.10gb*2", "-g", "0", host=HOST, output="json").ok().data
    assert data["as_requested"] is True
    assert data["gpus"][0]["missing"] == data["gpus"][0]["extra"] == []
    done = cli("mig", "check", "3g:0", "1g.10gb", "2g.20gb*2", "-g", "0", host=HOST).ends(7)
    assert done.out == "GPU 0: not as asked\n  missing: 3g.40gb:0, 2g.20gb*2\n  extra: 1g.10gb:1, 3g.40gb:4\n"
    assert "apply --dry-run" in done.err
    answer = cli("mig", "check", "3g:0", "-g", "0", host=HOST, output="json").ends(7)
    assert answer.json["status"] == "ok"
    row = answer.data["gpus"][0]
    assert row["missing"] == [{"profile": "3g.40gb", "start": 0, "count": 1, "mig_device": True}]
    assert [instance["start"] for instance in row["extra"]] == [0, 1, 4]


def test_every_gpu_is_looked_at_also_a_lost_one(cli: Cli) -> None:
    cut("1g.10gb")
    answer = cli("mig", "check", "1g.10gb", host=HOST, output="json").ends(7)
    first, second = answer.data["gpus"]
    assert first["as_requested"] is True
    assert second["problem"] == "MIG is off; asked: on"
    assert second["missing"] == [{"profile": "1g.10gb", "start": None, "count": 1, "mig_device": True}]
    admin.set_fault(HOST, "lost", "1", None)
    answer = cli("mig", "check", "1g.10gb", host=HOST, output="json").ends(7)
    assert [row["as_requested"] for row in answer.data["gpus"]] == [True, False]
    assert "lost" in answer.data["gpus"][1]["problem"].lower()


def test_a_pending_mode_is_not_as_asked(cli: Cli, write: Write) -> None:
    host = "sim:a100-80gb"
    connect(host)
    admin.set_fault(host, "reset-required", "0", None)
    nvml = connect(host).nvml
    handle = nvml.handle(0)
    nvml.ask(lambda api: api.nvmlDeviceSetMigMode(handle, 1))
    (gpu,) = nvml.sweep()
    assert (gpu.mig_enabled, gpu.mig_pending) == (False, True)
    done = cli("mig", "check", "-f", write(TWO), "-c", "night", host=host).ends(7)
    assert "MIG is off, pending: on; asked: off" in done.out
    assert "MIG is off, pending: on; asked: on" in cli("mig", "check", "1g.10gb", host=host).out


def test_check_and_apply_of_a_file(cli: Cli, write: Write) -> None:
    cut("3g.40gb:4", "1g.10gb:0", "1g.10gb:1")
    path = write(TWO)
    assert cli("mig", "check", "-f", path, "-c", "day", host=HOST).ok().out == "GPU 0: as asked\nGPU 1: as asked\n"
    done = cli("mig", "check", "-f", path, "-c", "night", host=HOST).ends(7)
    assert "GPU 0: not as asked\n  MIG is on; asked: off\n  extra: 1g.10gb:0, 1g.10gb:1, 3g.40gb:4" in done.out
    assert cli("mig", "check", "-f", path, "-c", "night", "-g", "1", host=HOST).ok().out == "GPU 1: as asked\n"
    # A GPU without an entry is left alone.
    path = write(FIRST)
    cli("mig", "apply", "-f", path, host=HOST).ok()
    done = cli("mig", "check", "-f", path, host=HOST).ok()
    assert done.out == "GPU 0: as asked\nGPU 1: no entry of the config is for it\n"
    rows = cli("mig", "check", "-f", path, host=HOST, output="json").ok().data["gpus"]
    assert [row["as_requested"] for row in rows] == [True, None]
    # It is named, so the file must say something of it.
    assert cli("mig", "check", "-f", path, "-g", "1", host=HOST).code == 7


NO_MATCH = 'version: v1\nmig-configs: {x: [{device-filter: "0x20B510DE", devices: all, mig-enabled: false}]}\n'
FIRST = 'version: v1\nmig-configs: {x: [{devices: [0], mig-enabled: true, mig-devices: {"1g.10gb": 1}}]}\n'


def test_exact_wants_an_entry_for_each_gpu(cli: Cli, refused: Refused, write: Write) -> None:
    """As nvidia-mig-parted assert: "not all GPUs match the specified config"."""
    path = write(FIRST)
    text = refused("mig", "apply", "-f", path, "--exact", code="no_gpu_of_config", exit_code=6, host=HOST)
    assert "config 'x' has no entry for GPU 1" in text
    cli("mig", "apply", "-f", path, host=HOST).ok()
    done = cli("mig", "check", "-f", path, "--exact", host=HOST).ends(7)
    assert "GPU 1: not as asked\n  no entry of the config is for it" in done.out
    cli("mig", "check", "-f", path, "--exact", "-g", "0", host=HOST).ok()
    refused("mig", "check", "1g.10gb", "--exact", code="bad_combination", exit_code=2, host=HOST)


def test_a_file_that_matches_no_gpu(cli: Cli, refused: Refused, write: Write) -> None:
    path = write(NO_MATCH)
    for words in (("apply",), ("apply", "-n"), ("check",)):
        assert "config 'x', entry 1 matches no GPU here" in cli("mig", *words, "-f", path, host=HOST).ok().err
    refused("mig", "apply", "-f", path, "--exact", code="no_gpu_of_config", exit_code=6, host=HOST)
    refused("mig", "apply", "-f", path, "-g", "0", code="no_gpu", exit_code=6, host=HOST)
    assert cli("mig", "check", "-f", path, "--exact", host=HOST).code == 7
    path = write("version: v1\nmig-configs: {x: [{devices: [], mig-enabled: false}]}\n")
    done = cli("mig", "apply", "-f", path, host=HOST).ok()
    assert "entry 1 matches no GPU here" in done.err
    assert "nothing to do" in done.out


def test_gpus_of_other_models(cli: Cli, write: Write) -> None:
    cut("1g.10gb", host=MIXED)
    path = write(
        'version: v1\nmig-configs:\n  x:\n  - device-filter: "0x233010DE"\n    devices: all\n    mig-enabled: true\n'
        '    mig-devices: {"1g.10gb": 1}\n  - {device-filter: ["0x1EB810DE"], devices: all, mig-enabled: false}\n'
    )
    assert cli("mig", "check", "-f", path, host=MIXED).ok().out == "GPU 0: as asked\nGPU 1: as asked\n"
    path = write('version: v1\nmig-configs: {x: [{devices: all, mig-enabled: true, mig-devices: {"1g.10gb": 1}}]}\n')
    done = cli("mig", "check", "-f", path, host=MIXED).ends(7)
    assert done.out == "GPU 0: as asked\nGPU 1: not as asked\n  Tesla T4 has no MIG\n"
    off = write("version: v1\nmig-configs: {x: [{devices: all, mig-enabled: false}]}\n")
    assert cli("mig", "check", "-f", off, host="sim:t4").ok().out == "GPU 0: as asked\n"


@refusals(
    "no_wish 2:  | 1g.10gb -f x",
    "bad_combination 2: 1g.10gb -c x",
    "bad_profile 2: banana",
    "mig_profile_unknown 3: 9g.99gb",
    "unknown_gpu 6: 1g.10gb -g 9",
    "no_file 6: -f /nonexistent/mig.yaml",
    "bad_file 2: -f /",
)
def test_check_refuses(refused: Refused, words: list[str], code: str, exit_code: int) -> None:
    refused("mig", "check", *words, code=code, exit_code=exit_code, host=HOST)


# Newer PyYAML merges each key once; each of these mappings still takes all of them.
BOMB = (
    "a: &a {"
    + ", ".join(f"k{number}: 1" for number in range(60))
    + "}\n"
    + "".join(f"b{number}: {{<<: *a}}\n" for number in range(300))
)


def keys(count: int) -> str:
    return "".join(f"k{number}: 0\n" for number in range(count))


# Each of 260 mappings gets 64 keys in place of one.
MERGED = f"a: &a {{{', '.join(f'k{number}' for number in range(64))}}}\n" + "".join(
    f"b{number}: {{<<: *a}}\n" for number in range(260)
)
LAUGHS = "a: &a [x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ("a: [1\n", "not YAML"),
        ("a: b: c\n", ":1:5: this is not YAML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("a: \x07\n", "not YAML"),
        ("!!python/object/apply:os.system [id]\n", "not YAML"),
        ("version: v1\nversion: v1\n", "the key 'version' is given twice"),
        ("version: v1\nmig-configs: {x: [{devices: all, mig-enabled: no}], x: []}\n", "the key 'x' is given twice"),
        ("&a [*a]\n", "a list"),
        ("version: v1\nmig-configs: &a {x: *a}\n", "'x' is a mapping, not a list"),
        ("version: v1\nmig-configs: {x: &a [*a]}\n", "item 1 of 'x' is a list"),
        ("[" * 5000, "too deep"),
        ("[" * 64 + "]" * 64, "a list"),
        ("[" * 65 + "]" * 65, "too deep"),
        (BOMB, "too many keys"),
        (keys(4096), "unknown key"),
        (keys(4097), "too many keys"),
        (LAUGHS, "unknown key"),
        (f"a: &a {{k: 0}}\nb: {{<<: [{', '.join(['*a'] * 64)}]}}\n", "unknown key"),
        (f"a: &a {{k: 0}}\nb: {{<<: [{', '.join(['*a'] * 65)}]}}\n", "too many merged mappings"),
        (f"{MERGED}c: {{<<: {{u, v, w, x, y}}}}\n", "unknown key"),
        (f"{MERGED}c: {{<<: {{u, v, w, x, y, z}}}}\n", "too many keys"),
        (f"version: {'9' * 40}\n", "lacks the key"),
        (f"version: {'9' * 41}\n", "the number is too long"),
        ("version: " + "9" * 5000 + "\n", "the number is too long"),
        ("version: 0x" + "f" * 5000 + "\n", "the number is too long"),
        ("version: 2026-99-99\n", "this is not a valid timestamp"),
        ("x" * (256 << 10) + "\n", "larger than 256 KiB"),
        ("x" * ((256 << 10) - 1) + "\n", "the file is 'xxx"),
        ("--- {version: v1}\n--- {}\n--- {}\n", "3 YAML documents"),
        (TWO + "---\n" + TWO, ":12:1: the second document has an unknown key"),
        ("version: v1\nmig-configs:\n  x:\n  - devices: all\n    mig-enabled: 1\n", ":5:18: 'mig-enabled' is neither"),
        ("version: v1\nmig-configs:\n  x:\n  - devices: 7\n    mig-enabled: true\n", ":4:14: 'devices' is 7, neither"),
    ],
)
def test_a_bad_file(refused: Refused, write: Write, content: str | bytes, said: str) -> None:
    assert said in refused("mig", "check", "-f", write(content), code="bad_file", exit_code=2, host=HOST)


def test_a_bad_file_is_not_to_be_written_over(refused: Refused, write: Write) -> None:
    for content in ("version: v2\nmig-configs: {}\n", TWO.replace("true", "maybe"), "a: [1\n"):
        assert " > " not in refused("mig", "check", "-f", write(content), code="bad_file", exit_code=2, host=HOST)


def test_a_file_that_may_not_be_read(refused: Refused, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(TWO)
    opened = Path.open

    def closed(self: Path, *arguments: Any, **named: Any) -> Any:
        # Root may read every file, so the mode of a file would prove nothing.
        if str(self) == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", closed)
    refused("mig", "check", "-f", path, code="bad_file", exit_code=4, host=HOST)


def test_files_from_stdin_with_a_byte_order_mark_and_an_anchor(
    cli: Cli, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\ufeffversion: v1\nmig-configs:\n  x: &off [{devices: all, mig-enabled: false}]\n  y: *off\n"
    assert cli("mig", "check", "-f", write(text), "-c", "y", host=HOST).ok().out.count("as asked") == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TWO.encode())))
    cli("mig", "check", "-f", "-", "-c", "night", host=HOST).ok()


@pytest.mark.parametrize(
    ("size", "problem"), [((256 << 10) + 1, "stdin is larger than 256 KiB"), (256 << 10, "the file is 'xxx")]
)
def test_a_long_stdin(cli: Cli, monkeypatch: pytest.MonkeyPatch, size: int, problem: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * size)))
    assert problem in cli("mig", "check", "-f", "-", host=HOST).err


def test_export_is_a_v1_file(cli: Cli) -> None:
    cut("3g.40gb:4", "1g.10gb:0")
    cut("3g.40gb:0", "1g.10gb:4", gpu="1")
    done = cli("export", "mig-parted", host=HOST).ok()
    assert done.out == (
        "version: v1\nmig-configs:\n  current:\n    - devices: all\n      mig-enabled: true\n"
        "      mig-devices:\n        1g.10gb: 1\n        3g.40gb: 1\n"
    )
    one = yaml.safe_load(cli("export", "mig-parted", "-g", "1", "--name", "night", host=HOST).ok().out)
    assert one["mig-configs"]["night"][0]["devices"] == [1]


@pytest.mark.parametrize("placement", [True, False])
def test_what_is_exported_is_as_asked(cli: Cli, write: Write, placement: bool) -> None:
    cut("3g.40gb:4", "1g.10gb:0", "1g.10gb:1")
    text = cli("export", "mig-parted", *(["--placement"] if placement else []), host=HOST).ok().out
    assert len(list(yaml.safe_load_all(text))) == 1 + placement
    cli("mig", "check", "-f", write(text), host=HOST).ok()
    # The same instances elsewhere: only the file with places minds.
    cut("3g.40gb:0", "1g.10gb:5", "1g.10gb:6")
    assert cli("mig", "check", "-f", write(text), host=HOST).code == (7 if placement else 0)


def test_a_gpu_instance_that_no_mig_parted_file_can_say(cli: Cli, world: World) -> None:
    world.mig("3g.71gb:4", "1g.18gb:0")
    _destroy_compute_instances(world)
    done = cli("export", "mig-parted").ok()
    assert '"3g.71gb"' not in done.out
    assert "lost: a GPU instance without a compute instance" in done.err
    answer = cli("mig", "check", "1g.18gb", output="json").ends(7)
    assert answer.data["gpus"][0]["extra"] == [{"profile": "3g.71gb", "start": 4, "count": 1, "mig_device": False}]
    assert "extra: 3g.71gb:4 (no compute instance)" in cli("mig", "check", "1g.18gb").out


def _destroy_compute_instances(world: World) -> None:
    """Destroy the compute instance of the 3g.71gb, as `nvidia-smi mig -dci` does."""
    from gpushare.mig.driver import MigReader

    nvml = world.host.nvml
    (gpu,) = nvml.sweep()
    instance = next(each for each in MigReader(nvml).layout(gpu).instances if each.profile.name == "3g.71gb")
    handle = nvml.handle(0)

    def destroy(api: object) -> None:
        inside = api.nvmlDeviceGetGpuInstanceById(handle, instance.id)  # type: ignore[attr-defined]
        compute = api.nvmlGpuInstanceGetComputeInstanceById(inside, instance.compute[0].id)  # type: ignore[attr-defined]
        api.nvmlComputeInstanceDestroy(compute)  # type: ignore[attr-defined]

    nvml.demand(destroy)


def test_pci_ids_are_those_of_the_model() -> None:
    host = connect("sim:h200,t4,thor-igpu-gb10b")
    assert [host.nvml.pci_ids(index) for index in range(3)] == [(0x233510DE, None), (0x1EB810DE, None), (None, None)]


def test_a_host_without_mig_is_refused_what_wants_it(cli: Cli, write: Write) -> None:
    """`devices: all` skips a GPU without MIG, but not all of them."""
    text = "version: v1\nmig-configs:\n  a:\n  - devices: all\n    mig-enabled: true\n    mig-devices: {1g.5gb: 7}\n"
    assert cli("mig", "check", "-f", write(text), host="sim:t4").code != 0
    assert "MIG" in cli("mig", "apply", "-f", write(text), host="sim:t4").ends(3).err


def test_diff_names_an_instance_without_a_compute_instance(cli: Cli, world: World, write: Write) -> None:
    path = write("version: 1\ngpus:\n- match: all\n  mig: [{wish: '3g.71gb:4', name: alice}]\n")
    cli("apply", "-f", path).ok()
    _destroy_compute_instances(world)
    assert cli("diff", "-f", path).out.splitlines() == [
        "GPU 0 (mig): different",
        "  MIG devices: none; the file: 3g.71gb:4",
        "  MIG devices: 3g.71gb:4 (no compute instance); the file: none",
    ]
