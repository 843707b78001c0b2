"""Sizes, percentages, durations: every text gives a value that MPS can hold, or BadUsage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base import units
from gpushare.base.errors import BadUsage, ExitCode
from gpushare.base.units import GIB, KIB, MIB, TIB
from tests.errors import fails
from tests.tables import each

UUID = "GPU-0d54321e-a080-c56a-9a57-14e2f8d3a1d0"
NASTY = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789.eE+-kKmMgGtTiIbB %", max_size=12),
    st.sampled_from(["nan", "NaN", "inf", "-inf", "1e3M", "1e9", "٣G", "²M", "３２%", "9" * 5000 + "M", "9" * 5000]),
    st.sampled_from(["-1M", "+1M", "0x10M", "1_000M", "1,5G", "4 G B", "", " ", "\n", "M", ".", ".M", "1.M", "1\x00M"]),
)


@pytest.mark.parametrize(
    ("text", "size"),
    each(
        (["4G", "4GiB", "4Gi", "4gb", " 4 GiB ", "4096M"], 4 * GIB),
        (["1.5g"], 1536 * MIB),
        ([".5G", "0.5 GB"], 512 * MIB),
        (["2048K"], 2 * MIB),
        (["2047K", "0001M", "1." + "9" * 200 + "M"], MIB),
        (["1T"], TIB),
        (["0.3G"], 307 * MIB),
    ),
)
def test_a_size_is_binary_and_rounded_down_to_whole_mebibytes(text: str, size: int) -> None:
    assert units.parse_memory_limit(text) == size


NO_VALUES: list[tuple[Callable[[str], object], str, list[str]]] = [
    (
        units.parse_memory_limit,
        "bad_size",
        ["4", "4096", "4B", "0M", "0.5M", "1023K", "2000T", "1e3M", "4X", "-4G", "٣G", "", "4 4G"],
    ),
    (
        units.parse_thread_percentage,
        "bad_percentage",
        ["0", "0.0", "0.04", "100.01", "101", "-1", "nan", "inf", "1e1", "٣٣", "25%%", "", "9" * 5000],
    ),
    (
        units.parse_slice,
        "bad_slice",
        ["500", "0us", "0.4us", "2s", "-1ms", "nan us", "1e3us", "us", "1,5ms", "٣us", "9" * 5000],
    ),
    # No clock can wait for it.
    (units.parse_seconds, "bad_duration", ["9" * 400]),
]


@pytest.mark.parametrize(
    ("parse", "code", "text"), [(parse, code, text) for parse, code, texts in NO_VALUES for text in [*texts, "banana"]]
)
def test_what_is_no_value_is_refused(parse: Callable[[str], object], code: str, text: str) -> None:
    with fails(BadUsage, code, message=text[:9], hint="--memory" if code == "bad_size" else "") as caught:
        parse(text)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("parse", "code", "holds"),
    [
        (units.parse_memory_limit, "bad_size", lambda size: size > 0 and size % MIB == 0),
        (
            units.parse_thread_percentage,
            "bad_percentage",
            lambda percent: 0.0 < percent <= 100.0 and float(units.mps_percentage(percent)) == percent,
        ),
        (units.parse_seconds, "bad_duration", lambda seconds: seconds >= 0 and math.isfinite(seconds)),
    ],
)
@given(text=NASTY)
def test_any_text_is_a_value_that_can_be_held_or_bad_usage(
    parse: Callable[[str], Any], code: str, holds: Callable[[Any], bool], text: str
) -> None:
    try:
        value = parse(text)
    except BadUsage as error:
        assert error.code == code
    else:
        assert holds(value)


@given(st.integers(1, 1024 * 1024))
def test_a_limit_goes_to_mps_as_whole_m_and_comes_back(mebibytes: int) -> None:
    size = units.parse_memory_limit(f"{mebibytes}M")
    assert units.mps_memory(size) == f"{mebibytes}M"
    assert units.parse_memory_limit(units.mps_memory(size)) == size


@given(st.integers(1, 10**6))
def test_the_readback_is_the_limit_floored_to_whole_g_from_1024m_up(mebibytes: int) -> None:
    read = units.parse_memory_limit(units.mps_memory_readback(mebibytes * MIB)) // MIB
    assert read == (mebibytes if mebibytes < 1024 else mebibytes // 1024 * 1024)


@pytest.mark.parametrize(
    ("text", "percent"),
    [("25", 25.0), ("25%", 25.0), (" 33.3 % ", 33.3), ("100", 100.0), ("0.1", 0.1), ("33.33", 33.3)],
)
def test_a_percentage_has_the_one_decimal_that_the_daemon_keeps(text: str, percent: float) -> None:
    assert units.parse_thread_percentage(text) == percent


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("5s", 5.0),
        ("2.5s", 2.5),
        ("250ms", 0.25),
        ("10m", 600.0),
        ("10 min", 600.0),
        ("1H", 3600.0),
        ("2d", 172800.0),
    ],
)
def test_a_duration_has_its_unit(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds


def test_a_duration_without_a_unit_is_refused_as_a_size_is() -> None:
    """idle=10 may mean minutes."""
    for parse in (units.parse_seconds, units.parse_memory_limit):
        with pytest.raises(BadUsage, match=r"(?m)'20' has no unit$"):
            parse("20")


@pytest.mark.parametrize("text", ["0", "0.0", "0M"])
def test_a_memory_limit_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="is below 1 MiB"):
        units.parse_memory_limit(text)


@pytest.mark.parametrize(("seconds", "text"), [(46800, "13h"), (5400, "90m"), (90, "90s"), (0, "0s"), (45.4, "45s")])
def test_a_duration_for_an_option(seconds: float, text: str) -> None:
    assert units.duration_option(seconds) == text


@pytest.mark.parametrize(
    ("text", "microseconds", "again"),
    [("500us", 500, "500us"), ("2.5ms", 2500, "2.5ms"), (" 16 MS ", 16000, "16ms"), ("2048µs", 2048, "2.048ms")],
)
def test_a_time_slice_has_its_unit(text: str, microseconds: int, again: str) -> None:
    assert units.parse_slice(text) == microseconds
    assert units.format_slice(microseconds) == again


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 MiB"),
        (1, "1 B"),
        (KIB, "1 KiB"),
        (512 * MIB, "512 MiB"),
        (4 * GIB, "4.0 GiB"),
        (2 * TIB, "2.0 TiB"),
    ],
)
def test_a_size_for_people(size: int | None, text: str) -> None:
    assert units.format_bytes(size) == text


def test_a_percentage_for_people() -> None:
    assert [units.format_percent(value) for value in (None, 25.0, 33.3)] == ["-", "25 %", "33.3 %"]


@pytest.mark.parametrize(
    ("text", "limit"),
    each(
        (["0=1G", "0=1G,"], GIB),
        (["0=512M", "0=512MB"], 512 * MIB),
        ([f"{UUID}=2g", f" {UUID.upper()} = 2G ", f"0=1G,{UUID}=2G"], 2 * GIB),
        (["1=1G", "0=1G,1=1G", "0=1.5G", "0=1024", "0=", "1G", "", "0=0G", "0=٣G"], None),
    ),
)
def test_the_limit_of_a_clients_environment(text: str, limit: int | None) -> None:
    assert units.parse_pinned_limits(text, UUID) == limit


@given(st.one_of(NASTY, NASTY.map(lambda value: f"0={value}"), st.just("0=" + "9" * 5000 + "M")))
def test_the_environment_of_any_process_is_a_limit_or_unknown(text: str) -> None:
    limit = units.parse_pinned_limits(text, UUID)
    assert limit is None or (limit > 0 and limit % MIB == 0)


@given(st.integers(1, 10**6))
def test_what_gpushare_sets_for_a_client_is_read_back(mebibytes: int) -> None:
    size = mebibytes * MIB
    assert units.parse_pinned_limits(f"0={units.mps_memory(size)}", UUID) == size


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (9 * GIB, 8 * GIB, ("9.0 GiB", "8.0 GiB")),
        (8 * GIB + 20 * MIB, 8 * GIB, ("8212 MiB", "8192 MiB")),
        (8 * GIB + 1, 8 * GIB, ("8589934593 B", "8589934592 B")),
    ],
)
def test_different_sizes_never_read_alike(one: int, other: int, texts: tuple[str, str]) -> None:
    assert units.format_distinct(one, other) == texts
