"""Restores by several ranks, as threads: all of them get the same step, or none changes."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import (
    CorruptionError,
    PeerFailedError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
)
from statehold.format import saved
from statehold.ranks.rounds import MismatchElsewhere
from support.faults import SMALL, must, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.rank_states import OWN, blank, check, state
from support.ranks import RUN, Ranks

SIZE = 4


@pytest.fixture
def fs() -> SimFs:
    """A disk with the steps 1 to 3 of a job of SIZE ranks; of step 3, `w` is written once."""
    fs = SimFs(seed=1)
    with Ranks(fs, SIZE) as ranks:
        for step in range(1, 4):
            ranks.save(step, lambda rank, step=step: state(rank, step))
    return fs


@pytest.fixture
def ranks(fs: SimFs) -> Iterator[Ranks]:
    with Ranks(fs, SIZE) as ranks:
        yield ranks


def data_file(rank: int, step: int = 3) -> str:
    return f"{RUN}/step-{step:012d}/rank-{rank:05d}-of-{SIZE:05d}.safetensors"


def damage(fs: SimFs, rank: int, step: int = 3) -> None:
    """Flip a bit in what `rank` alone has to read of a step: its own tensor."""
    path = data_file(rank, step)
    total = fs.stat_bytes(path)
    assert total is not None
    raw = fs.read_file(path, total)
    length = 8 + int.from_bytes(raw[:8], "little")
    begin, _ = json.loads(raw[8:length])["own"]["data_offsets"]
    fs.corrupt(path, length + begin, 0x10)


def restored(ranks: Ranks, found: list[dict[str, Any]], *args: Any, **options: Any) -> Any:
    return ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(found[rank], *args, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("finder", range(SIZE))
def test_damage_that_one_rank_finds_makes_all_fall_back(fs, ranks, finder: int) -> None:
    damage(fs, finder)
    found = [blank() for _ in range(SIZE)]
    with pytest.warns(RuntimeWarning, match="step 3 is damaged; step 2 was restored") as caught:
        got = restored(ranks, found)
    assert got == [2] * SIZE
    for rank, each in enumerate(found):
        check(each, rank, 2)
    assert len(caught) == SIZE
    assert {each.filename for each in caught} == {__file__}, "not where restore() was called"
    texts = [str(each.message) for each in caught]
    assert all("own" in text and "checksum" in text for text in texts)
    assert sum(f"rank {finder} found damage" in text for text in texts) == SIZE - 1
    assert ranks.names() == [
        "step-000000000001",
        "step-000000000002",
        "step-000000000003.corrupt",
    ]
    ranks.save(3, lambda rank: state(rank, 3))
    got = restored(ranks, found)
    assert got == [3] * SIZE


def test_ranks_that_find_damage_in_different_steps_agree_on_the_same(fs, ranks) -> None:
    damage(fs, 1, step=3)
    damage(fs, 2, step=2)
    found = [blank() for _ in range(SIZE)]
    with pytest.warns(RuntimeWarning, match="step 1 was restored"):
        got = restored(ranks, found)
    assert got == [1] * SIZE
    for rank, each in enumerate(found):
        check(each, rank, 1)
    assert ranks.ckpts[0].steps() == [1]


def test_when_all_steps_are_damaged_all_ranks_say_so(fs, ranks) -> None:
    for step in (1, 2, 3):
        damage(fs, 3, step)
    outcomes = restored(ranks, [blank() for _ in range(SIZE)])
    for error in outcomes:
        assert isinstance(error, CorruptionError)
        assert error.facts["also damaged"] == "1, 2 (2 in all)"
    assert ranks.ckpts[0].steps() == [1, 2, 3]


@pytest.mark.parametrize("finder", [0, 3])
def test_a_damaged_step_that_was_asked_for_is_an_error_on_all(fs, ranks, finder: int) -> None:
    damage(fs, finder)
    outcomes = restored(ranks, [blank() for _ in range(SIZE)], 3)
    assert all(isinstance(error, CorruptionError) for error in outcomes)
    assert all(error.facts["other steps"] == "1, 2 (2 in all)" for error in outcomes)
    found = [blank() for _ in range(SIZE)]
    got = restored(ranks, found, 2)
    assert got == [2] * SIZE


def test_a_record_that_one_rank_cannot_read_is_damage_for_all(fs, ranks) -> None:
    fs.unlink(data_file(2).replace(".safetensors", ".json"))
    found = [blank() for _ in range(SIZE)]
    with pytest.warns(RuntimeWarning, match="step 3 is damaged"):
        got = restored(ranks, found)
    assert got == [2] * SIZE


def test_memory_that_a_tensor_of_one_rank_shares_is_an_error_on_all_and_changes_nothing(
    ranks,
) -> None:
    found = [blank() for _ in range(SIZE)]
    found[2]["own"] = found[2]["w"][:OWN]
    before = copy.deepcopy(found)
    for rank, error in enumerate(restored(ranks, found)):
        assert type(error) is (StateMismatchError if rank == 2 else MismatchElsewhere)
        assert "share memory" in str(error)
        assert all(torch.equal(found[rank][name], before[rank][name]) for name in ("w", "own"))


@pytest.mark.thorough
def test_a_mismatch_of_one_rank_is_an_error_on_all_and_changes_nothing(ranks) -> None:
    found = [blank() for _ in range(SIZE)]
    found[2]["w"] = torch.zeros(7, dtype=torch.int32)
    before = copy.deepcopy(found)
    for rank, error in enumerate(restored(ranks, found)):
        if rank == 2:
            assert type(error) is StateMismatchError
            assert error.facts["w"] == "expected I32 [7], got I32 [1000] in the step"
        else:
            assert isinstance(error, PeerFailedError)
            assert error.rank == 2
            assert "I32 [1000]" in error.reason
    for each, old in zip(found, before, strict=True):
        assert each.keys() == old.keys()
        assert all(torch.equal(each[name], old[name]) for name in ("w", "own"))
        assert (each["seed"], each["step"]) == (old["seed"], old["step"])
    assert ranks.ckpts[0].steps() == [1, 2, 3]
    found[2] = blank()
    got = restored(ranks, found)
    assert got == [3] * SIZE


def test_a_mismatch_and_damage_at_once_leave_no_rank_behind(fs, ranks) -> None:
    """One rank asks the others to look again; one that could not read has nothing to look at."""
    fs.unlink(data_file(2).replace(".safetensors", ".json"))
    found = [blank() for _ in range(SIZE)]
    found[1]["more"] = 1
    outcomes = restored(ranks, found, 3)
    assert [isinstance(error, CorruptionError) for error in outcomes] == [True] * SIZE
    del found[1]["more"]
    got = restored(ranks, found, 2)
    assert got == [2] * SIZE


def test_what_is_wrong_with_the_disk_of_one_rank_ends_the_restore_of_all(ranks) -> None:
    fired = threading.Event()

    def before(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "read_file" and "-00001-of-" in args[0]:
            fired.set()
            raise StorageError("the disk of rank 1 is gone", errno=5, path=args[0])

    store = inside(ranks.ckpts[1]).levels.store
    fs = store.fs
    spy_on(ranks.ckpts[1], before)
    outcomes = restored(ranks, [blank() for _ in range(SIZE)])
    assert fired.is_set()
    assert type(outcomes[1]) is StorageError
    assert all(type(e) is PeerFailedError and e.rank == 1 for e in outcomes if e is not outcomes[1])
    store.fs = fs
    got = restored(ranks, [blank() for _ in range(SIZE)])
    assert got == [3] * SIZE


def test_an_unforeseen_error_of_one_rank_ends_the_restore_of_all(ranks) -> None:
    def before(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "read_file" and "-00001-of-" in args[0]:
            raise MemoryError("no room for a record")

    spy_on(ranks.ckpts[1], before)
    outcomes = restored(ranks, [blank() for _ in range(SIZE)])
    assert type(outcomes[1]) is MemoryError
    for rank in (0, 2, 3):
        assert type(outcomes[rank]) is PeerFailedError
        assert "no room for a record" in outcomes[rank].reason


def test_a_step_that_is_not_there_is_an_error_on_all(ranks) -> None:
    outcomes = restored(ranks, [blank() for _ in range(SIZE)], 9)
    assert {type(error) for error in outcomes} == {StepNotFoundError}


def test_an_empty_run_restores_nothing_on_all_ranks() -> None:
    with Ranks(SimFs(seed=1), SIZE) as ranks:
        got = restored(ranks, [blank() for _ in range(SIZE)])
        assert got == [None] * SIZE


# -- parts of a step, with what is reported --------------------------------------------------


def reports(ranks: Ranks, found: Any, **options: Any) -> list[dict[str, tuple[str, ...]]]:
    """loaded, missing, unexpected and kept, by rank."""
    got = restored(ranks, found, **options)
    assert got == [3] * SIZE
    kinds = ("loaded", "missing", "unexpected", "kept")
    return [{kind: getattr(ckpt.restored, kind) for kind in kinds} for ckpt in ranks.ckpts]


NONE: dict[str, tuple[str, ...]] = {"loaded": (), "missing": (), "unexpected": (), "kept": ()}
ALL = ("w", "own", "seed.rank", "step")


def test_everything_is_reported_as_loaded(ranks) -> None:
    found = reports(ranks, [blank() for _ in range(SIZE)])
    assert found == [{**NONE, "loaded": ALL}] * SIZE


def test_only_and_skip_on_ranks(ranks) -> None:
    found = [blank() for _ in range(SIZE)]
    expected = {**NONE, "loaded": ("w", "step"), "kept": ("own", "seed")}
    assert reports(ranks, found, only=["w", "step"]) == [expected] * SIZE
    for each in found:
        assert torch.equal(each["w"], state(0, 3)["w"])
        assert not each["own"].any()
        assert each["seed"] == {"rank": None}
    found = [blank() for _ in range(SIZE)]
    expected = {**NONE, "loaded": ("own", "seed.rank", "step"), "kept": ("w",)}
    assert reports(ranks, found, skip=["w"]) == [expected] * SIZE
    assert [int(each["own"][0]) for each in found] == [300, 301, 302, 303]


def test_rename_on_ranks(ranks) -> None:
    found = [blank() for _ in range(SIZE)]
    for each in found:
        each["weights"] = each.pop("w")
        each["mine"] = each.pop("own")
    names = {"w": "weights", "own": "mine"}
    told = reports(ranks, found, rename=names)
    assert all(set(each["loaded"]) == {"weights", "mine", "seed.rank", "step"} for each in told)
    assert all(not (each["missing"] or each["unexpected"] or each["kept"]) for each in told)
    assert [int(each["mine"][0]) for each in found] == [300, 301, 302, 303]


def test_what_the_step_lacks_or_has_too_much_is_reported_by_the_rank(ranks) -> None:
    found = [blank() for _ in range(SIZE)]
    found[1]["more"] = torch.zeros(2)
    del found[2]["own"]
    strict = restored(ranks, found)
    assert all(isinstance(error, StateMismatchError | PeerFailedError) for error in strict)
    told = reports(ranks, found, strict=False)
    assert told[0] == {**NONE, "loaded": ALL}
    assert told[3] == {**NONE, "loaded": ALL}
    assert told[1] == {**NONE, "loaded": ALL, "missing": ("more",)}
    assert set(told[2]["loaded"]) == {"w", "seed.rank", "step"}
    assert not told[2]["missing"]
    assert torch.equal(found[1]["more"], torch.zeros(2))
    assert "own" not in found[2]


def test_what_no_rank_has_a_place_for_is_an_error_or_reported(ranks) -> None:
    found = [blank() for _ in range(SIZE)]
    for each in found:
        del each["w"]
    for error in restored(ranks, found):
        assert isinstance(error, StateMismatchError | PeerFailedError)
        assert "w" in str(error)
    told = reports(ranks, found, strict=False)
    assert [each["unexpected"] for each in told] == [("w",)] * SIZE


# -- other numbers of ranks ------------------------------------------------------------------


def check_ways_out(error: Any, size: int) -> None:
    """The error names every place where ranks had their own, and what to do."""
    text = str(error)
    assert "seed.rank" in text
    assert 'skip=["seed.rank"]' in text
    assert f"{SIZE} ranks saved their own" in text
    assert f"restored on {size}" in text or "none of which is this rank's" in text


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_values_of_ranks_do_not_fit_another_number_of_ranks(fs: SimFs, size: int) -> None:
    with Ranks(fs, size) as ranks:
        found = [blank() for _ in range(size)]
        for error in restored(ranks, found):
            assert type(error) is StateMismatchError
            check_ways_out(error, size)
        with_own = restored(ranks, found, skip=["seed.rank"])
        for error in with_own:
            assert type(error) is StateMismatchError
            assert error.facts["tensor"] == "own"
            assert "leave it out" in error.hint
        assert all(not each["w"].any() and each["step"] is None for each in found)
        got = restored(ranks, found, skip=["seed", "own"])
        assert got == [3] * size
        for each in found:
            assert torch.equal(each["w"], state(0, 3)["w"])
            assert each["step"] == 3
            assert each["seed"] == {"rank": None}
        for ckpt in ranks.ckpts:
            assert ckpt.restored.loaded == ("w", "step")
            assert ckpt.restored.kept == ("own", "seed")


def test_a_step_of_four_ranks_restores_alone(fs: SimFs) -> None:
    with checkpointer_on(fs, RUN, **SMALL) as ckpt:
        found = blank()
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(found)
        check_ways_out(caught.value, 1)
        got = ckpt.restore(found, skip=["seed", "own"])
        assert got == 3
        assert torch.equal(found["w"], state(0, 3)["w"])


def test_a_step_of_one_process_restores_on_four_ranks() -> None:
    fs = SimFs(seed=3)
    with checkpointer_on(fs, RUN, **SMALL) as ckpt:
        ckpt.save(1, {**state(7, 1), "rng": statehold.Rng()}).wait()
    with Ranks(fs, SIZE) as ranks:
        found = [{**blank(), "rng": statehold.Rng()} for _ in range(SIZE)]
        got = restored(ranks, found)
        assert got == [1] * SIZE
        for each in found:
            check(each, 7, 1)
        found[3]["more"] = 1
        outcomes = restored(ranks, found)
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        del found[3]["more"]
        ranks.save(2, lambda rank: state(rank, 2))
        again = [blank() for _ in range(SIZE)]
        got = restored(ranks, again)
        assert got == [2] * SIZE
        check(again[2], 2, 2)


def test_what_is_written_once_goes_from_four_ranks_to_three(fs: SimFs) -> None:
    with Ranks(fs, SIZE) as ranks:
        for step in range(4, 7):
            ranks.save(step, lambda rank, step=step: {"w": state(rank, step)["w"], "step": step})
        assert ranks.data_bytes(6).count(0) == SIZE - 1
    with Ranks(fs, 3) as ranks:
        for step in (4, 6):  # each wrote its own, known to be equal; one wrote it
            found = [{"w": blank()["w"], "step": None} for _ in range(3)]
            got = restored(ranks, found, step)
            assert got == [step] * 3
            for each in found:
                assert torch.equal(each["w"], state(0, step)["w"])


def test_buffers_are_one_tensor_beside_a_tensor_of_one_rank() -> None:
    fs = SimFs(seed=1)
    buffer = torch.arange(40, dtype=torch.int32)

    def state_of(rank: int) -> dict[str, Any]:
        own = {"best": torch.ones(3)} if rank == 0 else {}
        return {"model": {"buffer": buffer}, "trainer": own}

    with Ranks(fs, SIZE) as ranks:
        for step in range(1, 4):
            ranks.save(step, state_of)
        assert ranks.data_bytes(1) == [160 + 12, 160, 160, 160]
        assert sum(ranks.data_bytes(3)) == 160 + 12
    for step in range(1, 4):
        check_one_buffer(fs, step, buffer)


def check_one_buffer(fs: SimFs, step: int, buffer: torch.Tensor) -> None:
    """The buffer restores on another number of ranks."""
    with Ranks(fs, 3) as ranks:
        found = [{"model": {"buffer": torch.zeros_like(buffer)}} for _ in range(3)]
        got = restored(ranks, found, step, only=["model"])
        assert got == [step] * 3
        assert all(torch.equal(each["model"]["buffer"], buffer) for each in found)


@pytest.fixture
def equal_later() -> SimFs:
    """A run whose buffer differs between the ranks up to step 2, and is equal at step 3. The saves
    have learned that it differs, and compare it no more."""
    fs = SimFs(seed=1)
    with Ranks(fs, SIZE) as ranks:
        for step in (1, 2, 3):
            ranks.save(step, lambda rank, step=step: {
                "model": {"buffer": torch.arange(40) + rank * (step < 3)}
            })  # fmt: skip
        assert ranks.data_bytes(3) == [320] * SIZE
    return fs


def test_equal_bytes_of_all_ranks_are_one_tensor_for_another_number_of_ranks(
    equal_later: SimFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one_buffer(equal_later, 3, torch.arange(40))
    with Ranks(equal_later, 3) as ranks:
        for step, most in ((2, saved.COMPARED_MAX), (3, SIZE - 1)):
            monkeypatch.setattr(saved, "COMPARED_MAX", most)
            found = [{"model": {"buffer": torch.zeros(40, dtype=torch.int64)}} for _ in range(3)]
            for error in restored(ranks, found, step):
                assert type(error) is StateMismatchError
                assert error.facts["tensor"] == "model.buffer"


def test_random_generators_are_kept_where_every_rank_had_its_own() -> None:
    fs = SimFs(seed=4)
    with Ranks(fs, SIZE) as ranks:

        def draw(rank: int) -> dict[str, Any]:
            return {"rng": statehold.Rng(), "step": 1}

        saves = []
        for rank, ckpt in enumerate(ranks.ckpts):  # one after the other: they share a generator
            torch.manual_seed(rank)
            saves.append(ckpt.save(1, draw(rank)))
        for save in saves:
            save.wait("committed", 60)
        torch.manual_seed(99)
        got = restored(ranks, [draw(rank) for rank in range(SIZE)])
        assert got == [1] * SIZE
        assert torch.initial_seed() in range(SIZE)
        assert all("rng" in ckpt.restored.loaded for ckpt in ranks.ckpts)
    with Ranks(fs, 3) as ranks:
        torch.manual_seed(99)
        before = torch.get_rng_state()
        got = restored(ranks, [draw(rank) for rank in range(3)])
        assert got == [1] * 3
        assert torch.equal(torch.get_rng_state(), before)
        assert all(ckpt.restored.kept == ("rng",) for ckpt in ranks.ckpts)


@pytest.mark.parametrize("size", [1, 2])
def test_random_generators_are_kept_on_another_number_of_ranks_also_where_all_had_the_same(
    size: int,
) -> None:
    fs = SimFs(seed=5)
    torch.manual_seed(7)
    with Ranks(fs, size) as ranks:
        ranks.save(1, lambda rank: {"rng": statehold.Rng(), "step": 1})
    with Ranks(fs, 3) as ranks:
        torch.manual_seed(99)
        before = torch.get_rng_state()
        got = restored(ranks, [{"rng": statehold.Rng(), "step": 0} for _ in range(3)])
        assert got == [1] * 3
        assert torch.equal(torch.get_rng_state(), before)
        assert all(ckpt.restored.kept == ("rng",) for ckpt in ranks.ckpts)
        alone = restored(ranks, [{"rng": statehold.Rng()} for _ in range(3)], only=["rng"])
        assert alone == [1] * 3


def test_no_rank_goes_on_before_the_damaged_step_is_set_aside(fs, ranks) -> None:
    """Else it would find a step that is newer than the one it saves next."""
    damage(fs, 2)
    back, set_aside = threading.Event(), threading.Event()

    def before(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "rename" and args[1].endswith(".corrupt"):
            set_aside.set()
            must(not back.wait(0.2), "a rank went on while the damaged step was there")

    inside(ranks.ckpts[0]).prepare_saving()
    spy_on(ranks.ckpts[0], before)

    def act(rank: int) -> Any:
        found = blank()
        step = ranks.ckpts[rank].restore(found)
        if rank:
            back.set()
        return step

    with pytest.warns(RuntimeWarning, match=r"kept as /runs/x/step-000000000003\.corrupt") as told:
        got = ranks.each(act)
    assert got == [2] * SIZE
    assert set_aside.is_set()
    assert len(told) == SIZE
    assert all(".corrupt" in str(each.message) for each in told)
