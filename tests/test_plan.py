"""Plans: order, way back, and what could not be undone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import ExitCode, GpushareError, Interrupted, NoPermission, NotHeld, OperationFailed
from gpushare.plan import Plan, Step, carry_out, roll_back, setting_step


def step(log: list[str], name: str, *, fails: BaseException | None = None, stays: Exception | None = None) -> Step:
    """Return a step that notes what it does."""

    def act(word: str, error: BaseException | None) -> Callable[[], None]:
        def do() -> None:
            log.append(f"{word} {name}")
            if error is not None:
                raise error

        return do

    return Step(
        what=f"step {name}", command=f"do {name}", undo=f"undo {name}", do=act("do", fails), revert=act("undo", stays)
    )


def plan(*steps: Step) -> Plan:
    return Plan(title="a plan", steps=steps)


def failure(text: str = "no") -> OperationFailed:
    return OperationFailed(text, "try again", gpu="1", code="some_code")


def test_steps_in_order_and_told_before_each() -> None:
    log: list[str] = []
    carry_out(plan(step(log, "a"), step(log, "b")), lambda one: log.append(f"tell {one.what[-1]}"))
    assert log == ["tell a", "do a", "tell b", "do b"]


@given(st.integers(1, 6), st.data())
def test_a_failure_undoes_itself_and_those_before_it_last_first(count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    log: list[str] = []
    steps = [step(log, str(i), fails=failure() if i == at else None) for i in range(count)]
    with pytest.raises(OperationFailed, match=r"(?m)^no$"):
        carry_out(plan(*steps))
    assert log == [f"do {i}" for i in range(at + 1)] + [f"undo {i}" for i in range(at, -1, -1)]


def test_a_step_without_a_way_back_is_passed_over() -> None:
    log: list[str] = []
    one_way = Step(what="x", command="x", do=lambda: log.append("do x"))
    with pytest.raises(OperationFailed):
        carry_out(plan(step(log, "a"), one_way, step(log, "b", fails=failure())))
    assert log == ["do a", "do x", "do b", "undo b", "undo a"]


def test_what_could_not_be_undone_is_named_with_its_command() -> None:
    log: list[str] = []
    error = NoPermission("not you", "be root", gpu="1")
    steps = [step(log, "a", stays=failure("stuck")), step(log, "b"), step(log, "c", fails=error)]
    with pytest.raises(GpushareError) as caught:
        carry_out(plan(*steps))
    assert caught.value.message == "not you; these steps could not be undone: step a (stuck)"
    assert caught.value.hint == "undo by hand: undo a"
    assert (caught.value.exit_code, caught.value.code) == (ExitCode.NO_PERMISSION, "no_permission")
    assert caught.value.gpu == "1"
    assert log[-3:] == ["undo c", "undo b", "undo a"]


def test_any_error_of_a_way_back_leaves_the_others_their_turn() -> None:
    log: list[str] = []
    steps = [step(log, "a"), step(log, "b", stays=OSError("disk full")), step(log, "c", fails=failure())]
    with pytest.raises(OperationFailed, match=r"step b .OSError: disk full."):
        carry_out(plan(*steps))
    assert log[-1] == "undo a"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_anything_else_in_the_middle_rolls_back_too(error: BaseException) -> None:
    log: list[str] = []
    with pytest.raises(type(error)):
        carry_out(plan(step(log, "a"), step(log, "b", fails=error), step(log, "c")))
    assert log == ["do a", "do b", "undo b", "undo a"]


def test_ctrl_c_says_what_could_not_be_undone() -> None:
    log: list[str] = []
    steps = [step(log, "a", stays=failure("stuck")), step(log, "b", fails=KeyboardInterrupt())]
    with pytest.raises(GpushareError, match="interrupted; these steps could not be undone: step a") as caught:
        carry_out(plan(*steps))
    assert caught.value.exit_code is ExitCode.INTERRUPTED
    assert caught.value.code == Interrupted.code


def test_ctrl_c_does_not_cut_the_way_back() -> None:
    log: list[str] = []
    again = Step(
        what="x",
        command="x",
        do=lambda: None,
        revert=lambda: signal.raise_signal(signal.SIGINT) or log.append("undone x"),
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OperationFailed):
        carry_out(plan(step(log, "a"), again, step(log, "b", fails=failure())))
    assert log[-2:] == ["undone x", "undo a"]
    assert signal.getsignal(signal.SIGINT) is before


def test_roll_back_outside_the_main_thread() -> None:
    log: list[str] = []
    thread = threading.Thread(target=lambda: roll_back([step(log, "a")]))
    thread.start()
    thread.join()
    assert log == ["undo a"]


class Dial:
    """A setting of a host: a value, and what happens to those who write it."""

    def __init__(self, value: int | None) -> None:
        self.value = value
        self.written: list[int] = []
        self.fails: Callable[[int], None] = lambda _: None
        self.permitted = True

    def write(self, value: int) -> None:
        self.written.append(value)
        self.fails(value)
        self.value = value

    def allowed(self) -> None:
        if not self.permitted:
            raise NoPermission("turning the dial needs root", "be root")

    def step(self, wanted: int) -> Step:
        return setting_step(
            what="turn the dial",
            command=f"dial {wanted}",
            setting="the dial of GPU 1",
            read=lambda: self.value,
            write=self.write,
            wanted=wanted,
            in_words=lambda value: f"<{value}>",
            see="dial --show",
            gpu="1",
            allowed=self.allowed,
        )


def test_a_setting_is_written_and_comes_back() -> None:
    dial = Dial(1)
    step = dial.step(5)
    step.do()
    assert dial.value == 5
    assert roll_back([step]) == []
    assert dial.written == [5, 1]
    # Once: what others do then is theirs.
    dial.value = 7
    assert roll_back([step]) == []
    assert dial.value == 7


def test_a_setting_that_is_there_is_neither_written_nor_taken_back() -> None:
    """Another process may have made it, after the plan: it needs no permission, and is not this step's to undo."""
    dial = Dial(5)
    dial.permitted = False
    step = dial.step(5)
    step.do()
    assert roll_back([step]) == []
    assert (dial.value, dial.written) == (5, [])


@pytest.mark.parametrize(("found", "left"), [(3, 3), (None, 5)])
def test_the_value_found_when_the_step_acts_comes_back_if_it_is_known(found: int | None, left: int) -> None:
    dial = Dial(1)
    step = dial.step(5)
    dial.value = found
    step.do()
    assert roll_back([step]) == []
    assert dial.value == left


@pytest.mark.parametrize(("found", "shown"), [(4, "<4>"), (None, "unknown")])
def test_a_value_that_is_not_held_is_an_error_and_the_old_one_comes_back(found: int | None, shown: str) -> None:
    dial = Dial(1)
    write = dial.write

    def write_badly(value: int) -> None:
        write(value)
        dial.value = found if value == 5 else value

    dial.write = write_badly  # type: ignore[method-assign]
    with pytest.raises(NotHeld) as caught:
        carry_out(plan(dial.step(5)))
    assert caught.value.message == f"the dial of GPU 1 was set to <5> but reads back as {shown}"
    assert (caught.value.hint, caught.value.code, caught.value.gpu) == ("see: dial --show", "not_held", "1")
    assert dial.value == 1


@pytest.mark.parametrize("half", [False, True], ids=["before", "half way"])
@pytest.mark.parametrize("error", [failure(), KeyboardInterrupt(), OSError("disk full")])
def test_a_write_that_fails_is_taken_back_where_it_did_something(error: BaseException, half: bool) -> None:
    dial = Dial(1)

    def fails(value: int) -> None:
        if value == 5:
            dial.value = 2 if half else 1
            raise error

    dial.fails = fails
    with pytest.raises(type(error)):
        carry_out(plan(dial.step(5)))
    assert dial.value == 1
    assert dial.written == ([5, 1] if half else [5])


def test_a_setting_without_permission_is_not_touched() -> None:
    dial = Dial(1)
    dial.permitted = False
    with pytest.raises(NoPermission) as caught:
        carry_out(plan(dial.step(5)))
    # Nothing to undo, and so nothing that could not be undone.
    assert caught.value.message == "turning the dial needs root"
    assert dial.written == []


def test_a_value_that_does_not_come_back_is_named() -> None:
    dial = Dial(1)

    def sticks(value: int) -> None:
        if value == 1:
            raise failure("stuck")

    dial.fails = sticks
    later = step([], "b", fails=failure("no"))
    with pytest.raises(OperationFailed, match=r"no; these steps could not be undone: turn the dial .stuck."):
        carry_out(plan(dial.step(5), later))
