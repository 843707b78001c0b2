"""``gpushare stop`` and ``jobs`` by root next to other users: what they write never ends, or names, what is not theirs."""

from __future__ import annotations

import csv
import io

import pytest

from tests.cli.drive import World, alive
from tests.security.conftest import Stranger, gpushare
from tests.security.test_memory_ledger import claim, whole


def test_root_is_asked_before_a_user_leaves_the_line(world: World, mallory: Stranger) -> None:
    with mallory.keeps(lambda: claim(world, whole(world), "name train")) as pid:
        (job,) = gpushare("jobs", output="json").data["jobs"]
        assert (job["name"], job["pid"], job["state"]) == ("train", pid, "waiting")
        answer = gpushare("stop", "train", output="json")
        assert (answer.code, answer.error["code"]) == (19, "needs_consent")
        assert alive(pid)
        (job,) = gpushare("stop", "train", "-y", output="json").data["jobs"]
        assert (job["pid"], job["ended_by"]) == (pid, "line")
        assert not alive(pid)


def test_a_claim_that_names_the_process_of_another_user_ends_nothing(
    world: World, mallory: Stranger, alice: Stranger
) -> None:
    with alice.runs(["sleep", "60"]) as pid:
        mallory.does(lambda: claim(world, whole(world), "name train", pid=pid).name)
        for text in ("train", str(pid)):
            assert gpushare("stop", text, "-y", output="json").error["code"] in {"no_job", "not_on_gpu"}
        assert alive(pid)


@pytest.mark.parametrize("name", ["$(touch /tmp/x)", "`id`", "a,b", "../x", "list", "-y", "\x1b[2J"])
def test_what_can_be_no_name_is_not_shown_as_one(world: World, mallory: Stranger, name: str) -> None:
    """The completions of root's shell read the names from the rectangle."""

    def write() -> None:
        claim(world, whole(world), f"name {name}")

    with mallory.keeps(write):
        # A claim with some of them says nothing at all.
        rows = csv.DictReader(io.StringIO(gpushare("jobs", "-a", output="csv").out))
        assert {row["name"] for row in rows} <= {""}
        assert gpushare("stop", name, "-y", output="json").code in {2, 6}
