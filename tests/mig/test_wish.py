"""A wish as typed: words, counts, places, compute instances, sizes, ids, needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.units import GIB
from gpushare.gpu_models import GpuModel, find_model
from gpushare.mig.profile import Profile
from gpushare.mig.wish import Need, Request, find_profile, merge_equal, parse_wish, resolve, smallest_for_need, wish_of
from tests.errors import fails
from tests.mig.boards import MODELS, layout

H100 = find_model("h100").profiles
RTX = find_model("rtx-pro-6000-blackwell-96gb").profiles


def one(profile: str, count: int = 1, start: int | None = None, compute: tuple[int, ...] = ()) -> Request:
    return Request(profile=profile, count=count, start=start, compute=compute)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3g.40gb 1g.10gb*2", [one("3g.40gb"), one("1g.10gb", 2)]),
        ("3g.40gb, 1g.10gb x2", [one("3g.40gb"), one("1g.10gb", 2)]),
        ("1g.10gbx2 1g.10gb", [one("1g.10gb", 3)]),
        ("1g.10gb *2", [one("1g.10gb", 2)]),
        ("MIG 1g.10gb+me", [one("1g.10gb+me")]),
        ("mig-1g.10gb", [one("1g.10gb")]),
        ("3G.40GB:4", [one("3g.40gb", start=4)]),
        ("9:4,19", [one("9", start=4), one("19")]),
        ("19*7", [one("19", 7)]),
        (
            "3g 1g+me 1g-me*2 1g+me.all 2g+gfx",
            [one("3g"), one("1g+me"), one("1g-me", 2), one("1g+me.all"), one("2g+gfx")],
        ),
        ("1c.3g.40gb*3", [one("3g.40gb", compute=(1, 1, 1))]),
        ("1c.3g.40gb*4", [one("3g.40gb", compute=(1, 1, 1)), one("3g.40gb", compute=(1,))]),
        ("1c.3g.40gb 2c.3g.40gb", [one("3g.40gb", compute=(2, 1))]),
        ("1c.3g:4*2", [one("3g", start=4, compute=(1, 1))]),
        ("3c.3g.40gb 1c.3g.40gb*6", [one("3g.40gb"), one("3g.40gb", 2, compute=(1, 1, 1))]),
    ],
)
def test_what_is_read(text: str, expected: list[Request]) -> None:
    assert sorted(parse_wish(text), key=str) == sorted(merge_equal(tuple(expected)), key=str)


@pytest.mark.parametrize(
    "text",
    [
        *("", " , ", "banana", "3g.40gb*0", "*2", "x3", "1g.10gb*2 x3", "3g.40gb:", "3g.40gb:a", "4c.3g.40gb"),
        *("0c.3g", "1c.9", "1g.10gb*99999", "g.40gb"),
    ],
)
def test_what_is_refused_as_usage(text: str) -> None:
    with pytest.raises(BadUsage) as caught:
        parse_wish(text)
    assert caught.value.hint


@given(st.text(max_size=40))
def test_any_text_is_a_wish_or_bad_usage(text: str) -> None:
    try:
        wish = parse_wish(text)
    except BadUsage:
        return
    assert wish


@given(st.text(alphabet="13479cg.bx*:+-me ,", max_size=24))
def test_what_is_printed_is_read_back(text: str) -> None:
    try:
        wish = parse_wish(text)
    except GpushareError:
        return
    again = parse_wish(" ".join(str(request) for request in wish))
    assert sorted(again, key=str) == sorted(wish, key=str)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("3g", "3g.40gb"),
        ("1g", "1g.10gb"),
        ("1g+me", "1g.10gb+me"),
        ("15", "1g.20gb"),
        ("0", "7g.80gb"),
        ("MIG 2g.20gb", "2g.20gb"),
    ],
)
def test_profiles_by_name_size_and_id(text: str, name: str) -> None:
    assert find_profile(text, H100).name == name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_every_profile_is_found_by_its_name_and_id(model: GpuModel) -> None:
    profiles = model.profiles
    for profile in profiles:
        assert find_profile(profile.name, profiles) is profile
        assert find_profile(str(profile.id), profiles) is profile


def test_a_size_of_two_plain_profiles_is_ambiguous() -> None:
    twins = tuple(Profile(name=name, id=None, slices=1, placements=None) for name in ("1g.10gb", "1g.20gb"))
    with pytest.raises(BadUsage) as caught:
        find_profile("1g", twins)
    assert "1g.10gb, 1g.20gb" in caught.value.hint


def test_a_profile_of_another_model_is_never_here_and_the_hint_has_all() -> None:
    with pytest.raises(NotSupported) as caught:
        find_profile("3g.47gb", H100)
    assert "3g.40gb" in caught.value.hint
    with pytest.raises(NotSupported) as caught:
        find_profile("99", H100)
    assert "7g.80gb" in caught.value.hint


def test_a_start_that_is_no_placement() -> None:
    with pytest.raises(BadUsage) as caught:
        resolve(one("3g.40gb", start=2), H100)
    assert caught.value.hint == "it starts at: 0, 4"


@pytest.mark.parametrize("compute", [(2, 2), (3, 1), (5,)])
def test_compute_instances_that_do_not_go_in(compute: tuple[int, ...]) -> None:
    with pytest.raises(NotSupported):
        resolve(one("3g.40gb", compute=compute), H100)


def test_unknown_placements_are_not_planned() -> None:
    with fails(NotSupported, "placements_unknown"):
        resolve(one("2g.32gb"), find_model("rtx-pro-4500-blackwell-32gb").profiles)


@pytest.mark.parametrize(
    ("memory", "sms", "name"),
    [
        (5 * GIB, None, "1g.10gb"),
        (10 * GIB, None, "1g.20gb"),
        (None, 30, "2g.20gb"),
        (20 * GIB, 30, "3g.40gb"),
        (None, 61, "4g.40gb"),
        (None, 132, "7g.80gb"),
        (None, None, "1g.10gb"),
    ],
)
def test_the_smallest_that_serves(memory: int | None, sms: int | None, name: str) -> None:
    assert smallest_for_need(Need(memory_bytes=memory, multiprocessors=sms), H100).name == name


def test_media_and_graphics_profiles_are_not_taken_for_a_need() -> None:
    assert smallest_for_need(Need(memory_bytes=GIB), RTX).name == "1g.24gb"


def test_no_profile_serves() -> None:
    with pytest.raises(NotSupported) as caught:
        smallest_for_need(Need(memory_bytes=200 * GIB, multiprocessors=4), H100)
    assert "200.0 GiB and 4 SMs" in caught.value.message


def test_what_is_unknown_does_not_serve() -> None:
    profiles = find_model("b300").profiles
    with pytest.raises(NotSupported):
        smallest_for_need(Need(memory_bytes=GIB), profiles)
    assert smallest_for_need(Need(), profiles).name == "1g.34gb"


def test_the_wish_of_a_layout() -> None:
    gpu = layout("h100", "3g.40gb:4/1,1", "1g.10gb:0", "1g.10gb:1")
    assert [str(request) for request in wish_of(gpu.instances)] == ["1g.10gb:0", "1g.10gb:1", "1c.3g.40gb:4*2"]
