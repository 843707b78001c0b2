"""A job as a command: what it prints is what `gpushare run` and `gpushare farm` take."""

from __future__ import annotations

import shlex
from dataclasses import fields

import pytest

from gpushare.base.model import Priority
from gpushare.cli import root
from gpushare.job_command import JobCommand

EVERYTHING = {
    "gpu": "0", "gpus": 2, "mig": "1g", "production": "serve", "metric": "rate=([0-9.]+)", "lower_is_better": True,
    "opportunistic": True, "target": "serve", "yields": "caps=60", "keep_percent": 97.0, "slice": "500us", "weight": 3.0,
    "wait": True, "requeue": True, "swap": "turns=60s", "threads_percent": 12.5, "memory": 20 << 30, "over": "warn",
    "priority": Priority.LOW, "container": "podman", "name": "train", "detach": True,
    "time": "2h", "restart_on": "mps-fault", "movable": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (JobCommand(), "gpushare run -- CMD"),
        (
            JobCommand(gpu="0", production="serve", wait=True, memory=(1 << 30) + 1, program=("python", "my train.py")),
            "gpushare run -g 0 --production serve --wait --memory 1025M -- python 'my train.py'",
        ),
        (JobCommand(mig="train", program="a > b", root=True), "sudo gpushare run --mig train -- a > b"),
        (JobCommand(gpu="$CUDA_VISIBLE_DEVICES"), 'gpushare run -g "$CUDA_VISIBLE_DEVICES" -- CMD'),
        (JobCommand(copies=8, memory="SIZE"), "gpushare farm --copies 8 --memory SIZE -- CMD"),
        (JobCommand(weight=1.23456, swap="idle=10m,turns"), "gpushare run --weight 1.23 --swap idle=10m,turns -- CMD"),
    ],
)
def test_a_job_is_the_command_that_starts_it(job: JobCommand, line: str) -> None:
    assert str(job) == line


def test_every_option_is_one_of_run() -> None:
    assert {*EVERYTHING, "program", "copies", "parallel", "root"} == {field.name for field in fields(JobCommand)}
    job = JobCommand(**EVERYTHING)  # type: ignore[arg-type]
    run = root().get_command(None, "run")
    parsed = run.make_context(
        "run", [*shlex.split(" ".join(job.options())), "--", "CMD"], resilient_parsing=True
    ).params
    expected = {
        **EVERYTHING, "keep": "97%", "how": "caps=60", "run_time": "2h", "lower": True, "slice_text": "500us", "memory": "20G",
        "threads": "12.5", "weight": "3", "priority": "low", "command": ("CMD",),
    }  # fmt: skip
    got = {
        name: value
        for name, value in parsed.items()
        if value is not None and value is not False and not name.startswith("shared_")
    }
    assert got == {name: expected[name] for name in got}
    assert len(got) == len(EVERYTHING) + 1
