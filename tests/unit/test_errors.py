"""The exception tree: who has to act, facts for programs, text for people."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from statehold import errors
from statehold._core import open_fs
from statehold.errors import (
    ClosedError,
    CorruptionError,
    InvariantError,
    ManifestError,
    NoSpaceError,
    StateholdError,
    StorageError,
    TruncatedFileError,
    UsageError,
    WaitTimeout,
    from_native,
    storage_error,
)


def test_message_is_summary_facts_hint() -> None:
    error = ManifestError("it is bad", facts={"file": "a/b", "got": 3}, hint="do this")
    assert str(error) == "it is bad\n  file  a/b\n  got   3\n  hint: do this"
    assert error.facts == {"file": "a/b", "got": 3}
    assert str(StateholdError("only this")) == "only this"


def test_an_outer_layer_adds_facts() -> None:
    error = ManifestError("it is bad")
    assert error.with_fact("step", 7) is error
    assert str(error).endswith("step  7")


def test_facts_are_copied() -> None:
    facts = {"a": 1}
    error = StateholdError("x", facts=facts)
    facts["a"] = 2
    assert error.facts == {"a": 1}


def test_what_a_signal_handler_raises_is_no_fault_of_ours() -> None:
    """Handlers run on the main thread, and on no other one."""
    here = errors.named(TimeoutError(), "while saving step 1")
    assert here.facts == {"cause": "TimeoutError()"}
    assert "signal handler" in (here.hint or "")
    with ThreadPoolExecutor(1) as other:
        there = other.submit(errors.named, TimeoutError("late"), "while saving step 1").result()
    assert there.facts == {"cause": "late"}
    assert there.hint == "please report it, with the traceback"


def test_families() -> None:
    assert issubclass(ManifestError, CorruptionError)
    assert issubclass(NoSpaceError, StorageError)
    assert issubclass(ClosedError, UsageError)
    assert issubclass(WaitTimeout, TimeoutError)
    # A damaged file is an Exception like any other: recovery code catches it.
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), StateholdError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_its_own_error(code: int) -> None:
    error = storage_error("write", code, "/run/x", 4096)
    assert type(error) is NoSpaceError
    assert (error.errno, error.path, error.offset) == (code, "/run/x", 4096)
    assert "committed steps are untouched" in str(error)
    assert errno.errorcode[code] in str(error)


def test_other_errnos_are_storage_errors() -> None:
    error = storage_error("sync", errno.EIO, "/run/x")
    assert type(error) is StorageError
    assert error.offset is None
    assert "EIO" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("io", StorageError),
        ("truncated", TruncatedFileError),
        ("closed", ClosedError),
        ("invariant", InvariantError),
    ],
)
def test_native_statuses(code: str, kind: type[StateholdError]) -> None:
    assert type(from_native(code, "read", errno.EIO, "/run/x", 10)) is kind


def test_a_message_can_be_printed_whatever_a_file_says() -> None:
    error = CorruptionError("bad", facts={"tensor": "a\x1b[2J\0\ud800\u202eb", "its error": "x\ny"})
    assert "a\\x1b[2J\\x00\\ud800\\u202eb" in str(error)
    assert "x\ny" in str(error)
    assert error.facts["tensor"].endswith("b")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_ctrl_c_while_a_native_error_is_built_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    """The native code calls Python for it, which is where a signal's handler runs."""
    fired = []

    def interrupted(*_: object) -> StateholdError:
        fired.append(True)
        raise raised("meanwhile")

    fs = open_fs("threads", 1, 1)
    monkeypatch.setattr(errors, "from_native", interrupted)
    with pytest.raises(raised, match="meanwhile"):
        fs.read_file(str(tmp_path / "missing"), 1)
    assert fired
    monkeypatch.undo()
    with pytest.raises(StateholdError):  # nothing is left pending
        fs.read_file(str(tmp_path / "missing"), 1)


def test_long_lists_are_cut_and_counted() -> None:
    assert errors.some("abc") == "a, b, c"
    assert errors.some(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, and 4 more"
    lost = errors.PeerLostError("ranks are gone", ranks=range(20))
    assert str(lost.facts["ranks"]).endswith("14, 15, and 4 more")
    assert errors.no_such_step(3, "run", range(9)).facts["committed"] == (
        "1, 2, 3, 4, 5, 6, 7, 8 (9 in all)"
    )
    assert errors.no_such_step(3, "run", []).facts["committed"] == "none"
