"""Which instance a word means: each form, exact before prefix, and never two at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, NotFound
from gpushare.mig.planner import Target
from gpushare.mig.profile import Layout
from gpushare.mig.target import find_targets
from tests.errors import fails
from tests.mig.boards import layout
from tests.tables import each


def with_uuids(one: Layout) -> Layout:
    """Return a layout whose compute instances have UUIDs that tell their place."""
    return replace(
        one,
        instances=tuple(
            replace(
                instance,
                compute=tuple(
                    replace(part, uuid=f"MIG-{one.gpu:04x}{instance.id:04d}-{part.id:04d}-Aa")
                    for part in instance.compute
                ),
            )
            for instance in one.instances
        ),
    )


HOST = (
    with_uuids(layout("a100-80gb", "3g.40gb:4=train", "1g.10gb:0", "2g.20gb:2/1,1")),
    with_uuids(layout("a100-80gb", "3g.40gb:4", "1g.10gb+me:0", gpu=1)),
)
# Ids of the board: 100 * size + start.
TRAIN, SMALL, PARTS = 404, 100, 202


@pytest.mark.parametrize(
    ("word", "wanted"),
    each(
        # The only one in its GPU instance means the whole; one of two means itself.
        (["MIG-00000404-0000-Aa", "mig-00000404-0000-aa", "MIG-00000404"], [Target(0, TRAIN)]),
        (["MIG-00000202-0001", "0/202/1"], [Target(0, PARTS, 1)]),
        (["train", " train ", "0/404"], [Target(0, TRAIN)]),
        (["1/404"], [Target(1, TRAIN)]),
        (["0/404/0"], [Target(0, TRAIN, 0)]),
        (["202", "2g.20gb:2", "2g:2", "2G.20GB:2"], [Target(0, PARTS)]),
        (["1g.10gb+me:0"], [Target(1, SMALL)]),
    ),
)
def test_each_form(word: str, wanted: list[Target]) -> None:
    assert list(find_targets(word, HOST)) == wanted


def test_all_is_everything_and_nothing_on_an_empty_gpu() -> None:
    assert list(find_targets("all", HOST)) == [Target(one.gpu, part.id) for one in HOST for part in one.instances]
    assert find_targets("ALL", [layout("a100-80gb")]) == ()


@pytest.mark.parametrize(
    ("word", "places"),
    [
        ("404", "0/404, 1/404"),
        ("3g.40gb:4", "0/404, 1/404"),
        ("3g:4", "0/404, 1/404"),
        ("MIG-00000202", "0/202/0, 0/202/1"),
    ],
)
def test_what_fits_several_is_refused_with_their_places(word: str, places: str) -> None:
    with fails(BadUsage, "ambiguous_instance", message=places):
        find_targets(word, HOST)


@pytest.mark.parametrize(
    "word",
    [
        *("", " ", "nobody", "9/404", "0/9", "0/404/9", "404/0/0/0", "/404", "0/", "3g:0", "3g.20gb:4", "MIG-"),
        *("mig-0", "-1", "٤"),
    ],
)
def test_what_is_not_there(word: str) -> None:
    with fails(NotFound, "unknown_instance", hint="0/404"):
        find_targets(word, HOST)


@pytest.mark.parametrize(("there", "more"), [(8, None), (9, " and 1 more;")])
def test_of_many_instances_eight_are_listed(there: int, more: str | None) -> None:
    host = [layout("a100-80gb", *(f"1g.10gb:{start}" for start in range(there - 4)), gpu=0)]
    host += [layout("a100-80gb", *(f"1g.10gb:{start}" for start in range(4)), gpu=1)]
    with pytest.raises(NotFound) as caught:
        find_targets("nobody", host)
    assert caught.value.hint.count("1g.10gb:") == 8
    assert (" more;" in caught.value.hint) == (more is not None)
    assert more is None or more in caught.value.hint


def test_a_uuid_in_full_is_meant_also_when_another_begins_with_it() -> None:
    first, second = HOST[0].instances[:2]
    longer = replace(second, compute=(replace(second.compute[0], uuid=f"{first.compute[0].uuid}-b"),))
    found = find_targets(first.compute[0].uuid or "", [replace(HOST[0], instances=(first, longer))])
    assert list(found) == [Target(0, first.id)]


@given(st.text(max_size=20))
def test_any_text_is_found_or_refused(word: str) -> None:
    try:
        found = find_targets(word, HOST)
    except (NotFound, BadUsage) as error:
        assert error.hint
    else:
        known = {(one.gpu, part.id) for one in HOST for part in one.instances}
        assert {(target.gpu, target.instance) for target in found} <= known
