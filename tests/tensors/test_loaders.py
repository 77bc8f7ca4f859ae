"""Real data loaders: a run that is killed goes on bit for bit, whichever loader and step it was."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import statehold
from statehold.errors import UnsupportedValueError
from statehold.format.selection import Selection
from statehold.tensors.kinds import loaders
from statehold.tensors.kinds.rng import unchanged
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.loading import (
    BATCHES,
    BEFORE,
    BETWEEN,
    SAMPLES,
    Loop,
    Noisy,
    Stream,
    check_goes_on,
    resumed,
    undisturbed,
)
from support.matching import MemoryStep
from support.ranks import Ranks

# torchdata 0.11 calls what torch 2.13 has deprecated.
torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

FIRST, MIDDLE, LAST = 1, BATCHES + 2, BATCHES  # of the run, of an epoch, of an epoch


def loader_of(dataset: Any = SAMPLES, *, own: bool = False, **options: Any) -> Any:
    """A loader; its own generator is seeded otherwise in every run."""
    generator = torch.Generator().manual_seed(torch.initial_seed()) if own else None
    return torchdata.StatefulDataLoader(dataset, batch_size=4, generator=generator, **options)


@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["ordered", "shuffled"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, shuffle: bool, own: bool) -> None:
    def make() -> Any:
        return loader_of(Noisy(), shuffle=shuffle, own=own)

    check_goes_on(tmp_path, make, [BEFORE, FIRST, MIDDLE, LAST, BETWEEN])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "own": True},
        {"shuffle": True, "own": True, "persistent_workers": True},
    ],
    ids=lambda options: "-".join(options) or "ordered",
)
def test_with_workers(tmp_path: Path, options: dict[str, Any]) -> None:
    def make() -> Any:
        return loader_of(num_workers=2, **options)

    check_goes_on(tmp_path, make, [FIRST, MIDDLE, LAST])


@pytest.mark.thorough
def test_saved_with_workers_where_no_loop_is(tmp_path: Path) -> None:
    def make() -> Any:
        return loader_of(num_workers=2, shuffle=True, persistent_workers=True)

    check_goes_on(tmp_path, make, [BEFORE, BETWEEN])


def test_a_dataset_that_is_run_through_draws_again_what_it_had_drawn(tmp_path: Path) -> None:
    check_goes_on(tmp_path, lambda: loader_of(Stream()), [FIRST, MIDDLE])


class Module:
    """A user's object around its loaders, one of which is not iterated in the run's loop."""

    def __init__(self) -> None:
        self.loaders = {"train": loader_of(Noisy(), shuffle=True, own=True), "test": loader_of()}
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter(self.loaders["train"])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, **{k: v.state_dict() for k, v in self.loaders.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert set(state) == {"epoch", "train", "test"}
        self.epoch = state["epoch"]
        for name, loader in self.loaders.items():
            loader.load_state_dict(state[name])


def test_loaders_inside_an_object(tmp_path: Path) -> None:
    check_goes_on(tmp_path, Module, [BEFORE, FIRST, MIDDLE, LAST, BETWEEN])


@pytest.mark.thorough
@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
def test_loaders_of_accelerate(tmp_path: Path, own: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    for shuffle, workers in [(False, 0), (True, 0), (True, 2)]:

        def make(shuffle: bool = shuffle, workers: int = workers) -> Any:
            loader = loader_of(shuffle=shuffle, num_workers=workers, own=own)
            return accelerator.prepare_data_loader(loader)

        steps = [FIRST, LAST] if workers else [FIRST, MIDDLE, LAST]
        check_goes_on(tmp_path / f"{shuffle}{workers}", make, steps)


# -- in parts --------------------------------------------------------------------------------


def only(*names: str) -> Callable[[statehold.Checkpointer, Any], Any]:
    def restore(ckpt: statehold.Checkpointer, state: Any) -> None:
        ckpt.restore({name: state[name] for name in names}, only=names)

    return restore


WEIGHTS, DATA, RNG = only("model", "optimizer"), only("data"), only("rng")
PARTS = {
    "rng-last": [WEIGHTS, DATA, RNG],
    "rng-first": [RNG, DATA, WEIGHTS],
    "rng-between": [DATA, RNG, WEIGHTS],
    "rng-after-the-iterator": [WEIGHTS, DATA, lambda _, state: state["data"].state_dict(), RNG],
    "skip": [lambda ckpt, state: ckpt.restore(state, skip=["data"]), DATA],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_state_restored_in_parts_in_any_order(tmp_path: Path, parts: list[Any]) -> None:
    def restore(ckpt: statehold.Checkpointer, state: Any) -> None:
        for part in parts:
            part(ckpt, state)

    def make() -> Any:
        return loader_of(Stream(), own=True)

    check_goes_on(tmp_path, make, [MIDDLE], restore)


def test_a_loader_that_is_not_restored_draws_as_ever(tmp_path: Path) -> None:
    undisturbed(tmp_path, loader_of, [MIDDLE])
    loop = Loop(loader_of, seed=5)
    with statehold.Checkpointer(tmp_path / str(MIDDLE), **SMALL) as ckpt:
        ckpt.restore(loop.state, skip=["data"])
        before = torch.get_rng_state()
        iter(loop.loader)
    assert not torch.equal(torch.get_rng_state(), before)
    assert "_get_iterator" not in vars(loop.loader)


class Drawing:
    """An object that draws whenever it gives or takes its state."""

    def state_dict(self) -> dict[str, int]:
        draw()
        return {}

    def load_state_dict(self, _: dict[str, int]) -> None:
        draw()


GENERATOR = torch.Generator()


def draw() -> list[float]:
    own = torch.rand((), generator=GENERATOR)
    return [random.random(), float(numpy.random.random()), float(torch.rand(())), float(own)]


@pytest.mark.parametrize("order", [("rng", "it"), ("it", "rng")], ids=["rng-first", "rng-last"])
def test_objects_that_draw_while_they_give_and_take_their_state(order: tuple[str, str]) -> None:
    whole = {"rng": statehold.Rng(generators={"own": GENERATOR}), "it": Drawing()}
    state = {name: whole[name] for name in order}
    step = MemoryStep(state)
    expected = draw()
    for name in order:
        step.restore({name: state[name]}, selection=Selection([name], None, None, True))
    assert draw() == expected


# -- the iterator that is due ------------------------------------------------------------------


def restored_loop(path: Path, make: Callable[[], Any] = loader_of) -> tuple[Loop, dict[int, str]]:
    """A loop restored in the middle, not iterated yet, and the losses that it should have."""
    whole = undisturbed(path, make, [MIDDLE])
    loop = Loop(make, seed=9)
    with statehold.Checkpointer(path / str(MIDDLE), **SMALL) as ckpt:
        ckpt.restore(loop.state)
    return loop, {at: loss for at, loss in whole.items() if at > MIDDLE}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    of_loaders, of_one = dict(vars(torchdata.StatefulDataLoader)), set(vars(loader_of()))
    loop, _ = restored_loop(tmp_path)
    assert vars(loop.loader).keys() - of_one  # something stands on the loader until it is iterated
    iter(loop.loader)
    assert vars(loop.loader).keys() <= of_one
    assert dict(vars(torchdata.StatefulDataLoader)) == of_loaders
    before = torch.get_rng_state()
    iter(loop.loader)
    assert not torch.equal(torch.get_rng_state(), before)


class Failing(Stream):
    failures = 0

    def __iter__(self) -> Any:
        if Failing.failures > 0:
            Failing.failures -= 1
            draw()
            raise ConnectionError("the data is elsewhere")
        return super().__iter__()


def test_an_iterator_that_cannot_be_made_is_made_again(tmp_path: Path) -> None:
    loop, expected = restored_loop(tmp_path, lambda: loader_of(Failing()))
    Failing.failures = 2
    for _ in range(2):
        with pytest.raises(ConnectionError):
            iter(loop.loader)
    assert Failing.failures == 0
    loop.train(MIDDLE)
    assert loop.losses == expected


def test_a_save_before_the_first_batch_makes_the_iterator(tmp_path: Path) -> None:
    loop, expected = restored_loop(tmp_path)
    with statehold.Checkpointer(tmp_path / "again", **SMALL) as ckpt:
        ckpt.save(MIDDLE, loop.state).wait("committed", DEADLINE_S)
        loop.train(MIDDLE)
        assert loop.losses == expected
        again = Loop(loader_of, seed=10)
        ckpt.restore(again.state)
    again.train(MIDDLE)
    assert again.losses == expected


def test_a_restored_state_that_is_given_up(tmp_path: Path) -> None:
    loop, _ = restored_loop(tmp_path)
    loop.loader.next_iter_state = None
    before = torch.get_rng_state()
    iter(loop.loader)
    assert not torch.equal(torch.get_rng_state(), before)
    assert "_get_iterator" not in vars(loop.loader)


def test_a_copy_of_a_restored_loader_is_one_of_its_own(tmp_path: Path) -> None:
    loop, expected = restored_loop(tmp_path)
    original, loop.loader = loop.loader, copy.deepcopy(loop.loader)
    loop.train(MIDDLE)
    assert loop.losses == expected
    assert "_get_iterator" in vars(original)
    assert "_get_iterator" not in vars(loop.loader)


def test_a_restore_starts_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed(tmp_path, loader_of, [MIDDLE])
    loop = Loop(loader_of, seed=9)
    monkeypatch.setattr(type(loop.loader), "state_dict", lambda _: pytest.fail("it was asked"))
    with statehold.Checkpointer(tmp_path / str(MIDDLE), **SMALL) as ckpt:
        ckpt.restore(loop.state)
    assert loop.loader.next_iter_state is not None


def test_blocks_that_overlap_in_two_threads_leave_no_trace() -> None:
    GENERATOR.manual_seed(4)
    rng = statehold.Rng(generators={"own": GENERATOR})
    saved = rng.state_dict()
    expected = draw()
    rng.load_state_dict(saved)
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with unchanged():
            draw()
            inside.set()
            go_on.wait(DEADLINE_S)
            draw()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(DEADLINE_S)
    with unchanged():  # begins after the other one, ends before it
        draw()
    go_on.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert draw() == expected


# -- warnings ------------------------------------------------------------------------------------


class Counting:
    """A loader of a user's own, around a plain one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.seen = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in list(self.loader)[self.seen :]:
            self.seen += 1
            yield batch
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def plain_inside() -> Any:
    return Counting(DataLoader(SAMPLES, batch_size=4))


def nothing_inside() -> Any:
    return Counting([torch.ones(1, 8)] * BATCHES)


def random_sampler() -> Any:
    return loader_of(sampler=RandomSampler(range(len(SAMPLES))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (plain_inside, '"data" .* whether the DataLoader in it draws .*only='),
        (nothing_inside, '"data" .* whether it draws .*only='),
        (random_sampler, '"data" .* its RandomSampler has no state.*shuffle=True'),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_known_is_told_once(
    tmp_path: Path, make: Callable[[], Any], words: str
) -> None:
    undisturbed(tmp_path, make, [MIDDLE])
    with pytest.warns(RuntimeWarning, match=words) as caught:
        resumed(tmp_path, make, MIDDLE)
    assert [each.filename for each in caught if each.category is RuntimeWarning] == [
        str(Path(__file__).parents[1] / "support/loading.py")
    ]


def test_a_sampler_without_a_state_is_told_of_when_it_can_still_be_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = tmp_path.name  # what was said is not said again in this process
    state = {"good": loader_of(shuffle=True), name: {"data": random_sampler()}}
    with statehold.Checkpointer(tmp_path, **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait("committed", DEADLINE_S)
    told = [each.message for each in caplog.records if "has no state" in each.message]
    assert len(told) == 1
    assert told[0].startswith(
        f'a restart may continue differently in "{name}.data": its RandomSampler'
    )
    assert "shuffle=True" in told[0]


@pytest.mark.parametrize("make", [loader_of, Module])
def test_what_is_known_is_not_told(tmp_path: Path, make: Callable[[], Any]) -> None:
    undisturbed(tmp_path, make, [MIDDLE])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        resumed(tmp_path, make, MIDDLE)
    assert not [each for each in told if each.category is RuntimeWarning]


@pytest.mark.parametrize(("size", "is_told"), [(1, True), (2, False), (3, True)])
def test_another_number_of_ranks_is_told_that_positions_may_be_wrong(
    size: int, is_told: bool
) -> None:
    fs = SimFs(seed=1)
    with Ranks(fs, 2) as ranks:
        ranks.save(1, lambda rank: {"data": loader_of(), "scale": {"of": 3}})
    with Ranks(fs, size) as ranks, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        found = [{"data": loader_of(), "scale": {"of": 0}} for _ in range(size)]
        assert ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank])) == [1] * size
        ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank], skip=["data"]))
    texts = [str(each.message) for each in told if each.category is RuntimeWarning]
    assert len(texts) == (size if is_told else 0)
    assert all('"data" may continue differently: another number of' in text for text in texts)
    assert all(each["scale"] == {"of": 3} for each in found)


def test_nothing_is_told_where_no_generators_are_restored(tmp_path: Path) -> None:
    undisturbed(tmp_path, plain_inside, [MIDDLE])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        resumed(tmp_path, plain_inside, MIDDLE, WEIGHTS)
    assert not [each for each in told if each.category is RuntimeWarning]


class Eager(Counting):
    """A loader that draws when its iterator is made, also where an epoch goes on."""

    made: Any = None

    def __iter__(self) -> Iterator[Any]:
        made, self.made = self.made, None
        if made is None:
            torch.rand(())
        return made or super().__iter__()


def test_what_the_warning_advises_helps(tmp_path: Path) -> None:
    def restore(ckpt: statehold.Checkpointer, state: Any) -> None:
        with pytest.warns(RuntimeWarning, match="whether it draws"):
            ckpt.restore(state)
        state["data"].made = iter(state["data"])
        ckpt.restore({"rng": state["rng"]}, step=MIDDLE, only=["rng"])

    check_goes_on(tmp_path, lambda: Eager([torch.ones(1, 8)] * BATCHES), [MIDDLE], restore)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(SAMPLES), lambda: iter(DataLoader(SAMPLES)),
     lambda: iter(loader_of(num_workers=1))],
    ids=["loader", "iterator", "stateful-iterator"],
)  # fmt: skip
def test_a_plain_loader_is_refused_with_the_line_to_change(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    hint = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
    with statehold.Checkpointer(tmp_path, **SMALL) as ckpt:
        with pytest.raises(UnsupportedValueError, match=hint) as refused:
            ckpt.save(1, {"data": make()})
        assert refused.value.facts["path"] == "data"
        ckpt.save(1, {"data": loader_of()}).wait("committed", DEADLINE_S)
        with pytest.raises(UnsupportedValueError, match=hint):
            ckpt.restore({"data": make()})


@pytest.mark.thorough
def test_a_loader_of_accelerate_that_is_not_stateful_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.Accelerator(cpu=True).prepare_data_loader(DataLoader(SAMPLES))
    with pytest.raises(UnsupportedValueError, match="use_stateful_dataloader=True"):
        MemoryStep({"data": loader})


class Fabrics:
    """As Lightning Fabric's loaders: the loader is inside, and what calls its state is not."""

    def __init__(self, loader: Any) -> None:
        self._dataloader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataloader)


@pytest.mark.thorough
def test_a_loader_that_wraps_another_one_is_refused_with_the_one_to_save(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"data\._dataloader$"):
        MemoryStep({"data": Fabrics(loader_of())})
    with pytest.raises(
        UnsupportedValueError, match=r"data\._dataloader, and .* StatefulDataLoader"
    ):
        MemoryStep({"data": Fabrics(DataLoader(SAMPLES))})

    class Inside(Fabrics):  # as a loop has it that takes the advice
        state_dict = property(lambda self: self._dataloader.state_dict)
        load_state_dict = property(lambda self: self._dataloader.load_state_dict)

    check_goes_on(tmp_path, lambda: Inside(loader_of(shuffle=True)), [FIRST, LAST])


class Unprintable:
    """A key that nobody may print: a tensor's text costs milliseconds, and waits for its device."""

    def __format__(self, spec: str) -> str:
        raise AssertionError("printed")

    __repr__ = __str__ = lambda self: self.__format__("")


class Keyed:
    def __init__(self) -> None:
        self.by_object = {Unprintable(): {"lr": 1.0}}
        self.loaders = {"train": loader_of(shuffle=True)}


def test_keys_that_are_no_names_are_not_printed() -> None:
    assert [path for path, _ in loaders.found_in(Keyed())] == ["loaders.train"]


def test_optimizers_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    monkeypatch.setattr(loaders, "_held", None)  # would be called
    assert loaders.found_in(optimizer) == []
