"""Rules for time-slices: root follows no file that another user could have written, and no text that a user chooses."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from gpushare.base.errors import NoPermission
from gpushare.base.model import Gpu
from gpushare.host.origin import MOST_OF_COMMAND, origin_of
from gpushare.hostfile.load import load_own
from gpushare.hostfile.parse import parse
from gpushare.timeslice.rules import Names, decide
from tests.errors import fails
from tests.security.conftest import Stranger

RULES = "version: 1\nslices: [{match: all, slice: 16ms}]\n"
RAISING = "version: 1\nslices: [{match: {command: '*'}, slice: 16ms}, {match: {cgroup: '/*'}, slice: 16ms}]\n"


def refused(path: Path) -> str:
    with fails(NoPermission, "untrusted_file") as caught:
        load_own(str(path))
    assert caught.value.hint
    return caught.value.message


def test_a_file_of_another_user(mallory: Stranger) -> None:
    path = mallory.home / "gpushare.yaml"
    mallory.does(lambda: path.write_text(RULES))
    refused(path)
    # Not when it is root's either: its directory is theirs, and so they choose what is in it.
    os.chown(path, 0, 0)
    refused(path)


def test_a_link_to_a_file_of_root(mallory: Stranger, tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text(RULES)
    assert load_own(str(good)).rules
    link = tmp_path / "link.yaml"
    link.symlink_to(good)
    assert "symbolic link" in refused(link)


def test_a_directory_that_anyone_may_change(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    path = directory / "gpushare.yaml"
    path.write_text(RULES)
    assert load_own(str(path)).rules
    directory.chmod(0o777)
    assert f"{directory}: it is a directory that anyone may change" in refused(path)


def test_a_user_raises_nothing_by_its_command_line(mallory: Stranger) -> None:
    """A name with new lines and terminal codes, and two megabytes of arguments."""
    words = ["/bin/sh", "-c", "read line", "a\nuser: root\x1b[2J", *["x" * (100 << 10)] * 18]
    who = {"user": mallory.uid, "group": mallory.uid, "extra_groups": []}
    with subprocess.Popen(words, stdin=subprocess.PIPE, **who) as process:
        try:
            began = time.process_time()
            origin = origin_of(process.pid)
            assert origin.uid == mallory.uid
            assert len(origin.command or "") <= MOST_OF_COMMAND
            gpu = Gpu(index=0, uuid="GPU-00000000-0278-5de8-9bc3-edc91cebc70e")
            rules = parse(RAISING).rules[:1]
            decision = decide(rules, Names(), origin, gpu, 2048)
            assert (decision.microseconds, decision.limited) == (2048, "the slice that it had")
            assert time.process_time() - began < 2
        finally:
            process.kill()
