"""The container of a process, from the cgroup paths that each runtime documents."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.host.process import container_of
from tests.tables import each

ID = "0123456789abcdef" * 4
SHORT = ID[:12]
HALF = ID[:32]
POD = "pod5c9f1c4e-6d4b-4f0e-9b44-1d6a3c1f0a11"
V1 = "12:pids:{path}\n11:memory:{path}\n1:name=systemd:{path}\n0::/system.slice/containerd.service\n"
V2 = "0::{path}\n"
# With both versions mounted the last line is of another place.
BOTH = pytest.mark.parametrize("layout", [V1, V2], ids=["v1", "v2"])


@BOTH
@pytest.mark.parametrize(
    ("path", "container"),
    each(
        (
            [
                f"/docker/{ID}",
                f"/system.slice/docker-{ID}.scope",
                f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope",
                f"/my-parent/{ID}",
                f"/machine.slice/libpod-{ID}.scope",
                f"/machine.slice/libpod-{ID}.scope/container",
                f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
                f"/libpod_parent/libpod-{ID}",
                f"/system.slice/nerdctl-{ID}.scope",
                f"/kubepods/burstable/{POD}/{ID}",
                f"/kubepods/{POD}/{ID}",
                f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{POD}.slice/cri-containerd-{ID}.scope",
                f"/kubepods.slice/kubepods-{POD}.slice/crio-{ID}.scope",
                f"/kubepods.slice/kubepods-{POD}.slice/crio-{ID}.scope/container",
                f"/kubepods.slice/kubepods-{POD}.slice/docker-{ID}.scope",
                f"/system.slice/containerd.service/kubepods-{POD}.slice:cri-containerd:{ID}",
                f"/ecs/task-id/{ID}",
                # A shorter id counts below a known parent only, and there the last one.
                *(f"/docker/{HALF}", f"/docker/{'f' * 32}/x/{HALF}", f"/lxc/{HALF}"),
            ],
            SHORT,
        ),
        ([f"/docker/{ID}/docker/{'f' * 64}"], "f" * 12),
        (["/lxc/web1", "/lxc/web1/system.slice/sshd.service", "/lxc.payload.web1"], "web1"),
        (["/lxc.payload.web1/user.slice", "/lxc.payload/web1", "/lxc.web1"], "web1"),
        (
            [
                "/slurm/uid_1000/job_123/step_0/task_0",
                "/system.slice/slurmstepd.scope/job_123/step_0/user/task_0",
                "/system.slice/node1_slurmstepd.scope/job_123/step_batch/user/task_0",
            ],
            "job_123",
        ),
        (["/slurm/uid_1000/job_1/job_2"], "job_2"),
        ([f"/machine.slice/libpod-conmon-{ID}.scope", f"/other/{HALF}", f"/{HALF}/docker/x"], None),
        ([f"/kubepods:x/{HALF}", "/other/job_7", "/job_7/slurmstepd.scope", "/", "/init.scope", "/docker"], None),
        (["/user.slice/user-1000.slice/session-2.scope", "/kubepods.slice"], None),
        (["/system.slice/docker.service", "/system.slice/containerd.service"], None),
    ),
)
def test_the_container_of_a_cgroup(layout: str, path: str, container: str | None) -> None:
    assert container_of(layout.format(path=path)) == container


def test_no_text_is_no_container() -> None:
    assert container_of("") is None


@given(st.text(alphabet="0123456789abcdef/.-:\ndockerlxcslurmjob_", max_size=120))
def test_any_text_is_a_short_name_of_one_line_or_none(text: str) -> None:
    found = container_of(text)
    assert found is None or (found in text and "\n" not in found)


@pytest.mark.parametrize(
    "path",
    ["/kubepods" * 500, "/slurm" * 900, "/docker" * 900 + "/x", "/lxc." * 900, "/slurm/job_" * 500 + "x", "a" * 9000],
)
def test_a_long_path_costs_nothing(path: str) -> None:
    """Whoever may make cgroups chooses their names, and every process on a GPU is looked at."""
    started = time.process_time()
    container_of(V1.format(path=path) * 5)
    assert time.process_time() - started < 0.2
