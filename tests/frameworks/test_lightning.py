"""StateholdCallback: a Trainer of Lightning goes on bit for bit, and keeps what it would keep.

Where Lightning has its own behaviour, the test runs both with the same seeds and compares.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

torchmetrics = pytest.importorskip("torchmetrics")
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

import statehold  # noqa: E402
from statehold import _core  # noqa: E402
from statehold.checkpoint.checkpointer import Checkpointer  # noqa: E402
from statehold.errors import (  # noqa: E402
    StepNotFoundError,
    StorageError,
    UnsupportedValueError,
    UsageError,
)
from statehold.integrations.lightning import StateholdCallback, checkpoints, strategy  # noqa: E402
from statehold.integrations.lightning.checkpoints import Checkpoint, settle  # noqa: E402
from support.disks import no_file_larger_than  # noqa: E402
from support.faults import DEADLINE_S  # noqa: E402

DATA = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
EVERY = {"every_n_train_steps": 1, "save_last": True}
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 8, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = nn.Linear(8, width), nn.Dropout(0.3), nn.BatchNorm1d(width), nn.Linear(width, 8)
        self.net = nn.Sequential(*layers)
        self.seen: list[tuple[int, int, float]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch), batch)
        self.seen.append((self.current_epoch, self.global_step, loss.item()))
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch), batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Two(Net):
    """Two optimizers, which it steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.net(batch), batch)
            self.manual_backward(loss)
            optimizer.step()
        self.seen.append((self.current_epoch, self.global_step, loss.item()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net[0].parameters(), lr=1e-2),
                torch.optim.SGD(self.net[3].parameters(), lr=1e-2, momentum=0.9)]  # fmt: skip


class Hooked(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"count": len(self.seen), "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]


class Batches(Net):
    """Notes the batches that it sees. Lightning itself does not put back the generators."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, int, float]] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.batches.append((self.current_epoch, self.global_step, batch.sum().item()))
        return super().training_step(batch, index)


class Noisy(Net):
    """Draws random numbers in a validation."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        super().validation_step(batch + torch.randn_like(batch), index)


class Double(torchmetrics.Metric):  # type: ignore[misc]
    """Wraps another metric, which has the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def update(self, value: torch.Tensor) -> None:
        self.mean.update(value)

    def compute(self) -> torch.Tensor:
        return 2 * self.mean.compute()

    def reset(self) -> None:
        super().reset()
        self.mean.reset()


class Means(Net):
    """Its learning rate depends on means over an epoch, of torchmetrics, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.twice = Double()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.mean(loss.detach() + batch.sum())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.twice(loss.detach())
        self.log("twice", self.twice, on_step=False, on_epoch=True)
        self.log("greatest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if index == 0:
            self.log("first", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return [optimizer], [{"scheduler": scheduler, "monitor": "mean", "interval": "epoch"}]


class ByValidation(Means):
    def configure_optimizers(self) -> Any:
        optimizers, (config,) = super().configure_optimizers()
        return optimizers, [{**config, "monitor": "val", "interval": "step", "strict": False}]


class Stop(Exception):
    pass


class StopAt(Callback):  # type: ignore[misc]
    """Ends the training with an error, before the batch after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise Stop


def loader() -> Any:
    return stateful.StatefulDataLoader(DATA, batch_size=4, shuffle=True)


def in_order() -> Any:
    return stateful.StatefulDataLoader(DATA, batch_size=4)


def of_workers() -> Any:
    return stateful.StatefulDataLoader(DATA, batch_size=4, shuffle=True, num_workers=2)


def fit(
    out: Any,
    path: Any = None,
    *,
    saves: dict[str, Any] = EVERY,
    more: Callable[[], list[Any]] = list,
    make: Callable[[], Any] = Net,
    data: Callable[[], Any] = loader,
    ours: bool = True,
    seed: int = 0,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """The model, the trainer and the ModelCheckpoint after two epochs of four batches."""
    lightning.seed_everything(seed, verbose=False)
    model, mine = make(), [StateholdCallback()] if ours else []
    checkpoint = ModelCheckpoint(out, **saves)
    trainer = lightning.Trainer(
        callbacks=[*mine, checkpoint, *more()], **{"max_epochs": 2, **QUIET, **options}
    )
    validation = stateful.StatefulDataLoader(DATA[:8], batch_size=4)
    trainer.fit(model, data(), validation, ckpt_path=path)
    return model, trainer, checkpoint


def stopped(out: Path, step: int, more: Callable[[], list[Any]] = list, **options: Any) -> None:
    with pytest.raises(Stop):
        fit(out, more=lambda: [*more(), StopAt(step)], **options)


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def check_goes_on(whole: Any, again: Any) -> None:
    assert again.seen
    assert again.seen == whole.seen[-len(again.seen) :]
    assert same_weights(whole, again)


# -- resuming --------------------------------------------------------------------------------------

MOMENTS: dict[str, dict[str, Any]] = {
    "every batch": {"saves": {**EVERY, "save_top_k": -1, "filename": "{step}"}},
    "validation inside an epoch": {
        "saves": {"save_top_k": -1, "filename": "{step}", "save_on_train_epoch_end": False},
        "val_check_interval": 2,
    },
    "end of an epoch": {
        "saves": {"save_top_k": -1, "filename": "{step}", "save_on_train_epoch_end": True},
        "max_epochs": 3,
    },
    "steps": {
        "saves": {"save_top_k": -1, "filename": "{step}", "save_on_train_epoch_end": False},
        "max_epochs": None,
        "max_steps": 7,
    },
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_checkpoint_goes_on_bit_for_bit(tmp_path: Path, moment: str) -> None:
    whole, trainer, _ = fit(tmp_path / "whole", **MOMENTS[moment])
    paths = sorted((tmp_path / "whole").glob("step=*.ckpt"))
    assert paths
    for path in paths:
        step = int(path.stem.removeprefix("step="))
        again, other, _ = fit(tmp_path / path.stem, path, seed=99, **MOMENTS[moment])
        assert same_weights(whole, again), path
        assert again.seen == whole.seen[step:]
        assert other.global_step == trainer.global_step


def averages() -> list[Any]:
    return [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]


# What Lightning leaves out when it resumes, or forgets: here it comes as in a run left alone.
RESTS: dict[str, dict[str, Any]] = {
    "no validation at the end": {"val_check_interval": 3},
    "fewer batches": {"val_check_interval": 2, "limit_train_batches": 3},
    "no validation before the first batch": {"val_check_interval": 3, "num_sanity_val_steps": 0},
    "a validation that draws": {"val_check_interval": 2, "make": Noisy},
    "means": {"val_check_interval": 3, "make": Means},
    "a scheduler that looks at a validation": {"val_check_interval": 2, "make": ByValidation},
    "loaders that are made again": {"reload_dataloaders_every_n_epochs": 1},
    "loaders that are made in every second epoch": {"reload_dataloaders_every_n_epochs": 2},
    "accumulation by epoch": {"more": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "averaged weights": {"more": averages},
    "patience": {"val_check_interval": 2, "more": lambda: [EarlyStopping("val", patience=9)]},
}


@pytest.mark.parametrize("saves", ["batches", "validations", "epochs"])
@pytest.mark.parametrize("rest", RESTS)
def test_the_rest_of_a_batch_and_of_an_epoch_follows(tmp_path: Path, rest: str, saves: str) -> None:
    kinds = {"batches": {"every_n_train_steps": 1}, "validations": {},
             "epochs": {"save_on_train_epoch_end": True}}  # fmt: skip
    options = {
        **RESTS[rest], "max_epochs": 3,
        "saves": {**kinds[saves], "save_top_k": -1, "filename": "{epoch}-{step}"},
    }  # fmt: skip
    whole, trainer, one = fit(tmp_path / "whole", **options)
    paths = sorted((tmp_path / "whole").glob("*step=*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert len(paths) >= 3
    for path in paths[:-1][-7:]:  # nothing is left to do after the last
        again, other, two = fit(tmp_path / path.stem, path, seed=99, **options)
        assert again.seen == whole.seen[len(whole.seen) - len(again.seen) :], path
        assert same_weights(whole, again), path
        assert str(other.callback_metrics) == str(trainer.callback_metrics), path
        rates = [each.optimizers[0].param_groups[0]["lr"] for each in (trainer, other)]
        assert rates[0] == rates[1], path
        assert Path(one.best_model_path).name == Path(two.best_model_path).name
        for mine, its in zip(trainer.callbacks, other.callbacks, strict=True):
            if isinstance(mine, EarlyStopping):
                assert str(mine.state_dict()) == str(its.state_dict()), path


@pytest.mark.parametrize(
    "options",
    [{"make": Two, "saves": {**EVERY, "every_n_train_steps": 2}}, {"make": Hooked},
     {"accumulate_grad_batches": 3}, {"data": of_workers}],
    ids=["two optimizers", "hooks", "accumulation", "two workers"],
)  # fmt: skip
def test_last_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, _, _ = fit(tmp_path / "whole", **options)
    stopped(tmp_path / "cut", 2, **options)
    again, _, _ = fit(tmp_path / "cut", "last", seed=99, **options)
    check_goes_on(whole, again)
    if options.get("make") is Hooked:
        assert again.loaded["count"] == 2
        assert torch.equal(again.loaded["tensor"], torch.ones(2))


def test_averaged_weights_that_a_callback_saves_go_on(tmp_path: Path) -> None:
    def more() -> list[Any]:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        return [WeightAveraging(multi_avg_fn=average)]

    whole, _, _ = fit(tmp_path / "whole", more=more)
    stopped(tmp_path / "cut", 3, more)
    again, _, _ = fit(tmp_path / "cut", "last", more=more, seed=99)
    check_goes_on(whole, again)


class Averaged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))


class Average(Callback):  # type: ignore[misc]
    """Updates a buffer of the module, before ModelCheckpoint saves the batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.average.lerp_(module.net[3].bias.detach(), 0.1)


def test_an_average_that_a_callback_updates_after_each_batch_goes_on(tmp_path: Path) -> None:
    def more() -> list[Any]:
        return [Average()]

    whole, _, _ = fit(tmp_path / "whole", more=more, make=Averaged)
    stopped(tmp_path / "cut", 3, more, make=Averaged)
    again, _, _ = fit(tmp_path / "cut", "last", more=more, make=Averaged, seed=99)
    check_goes_on(whole, again)


def test_callbacks_go_on(tmp_path: Path) -> None:
    saves = {"monitor": "val", "save_top_k": 2, "save_last": True, "filename": "{step}"}
    options = {"saves": saves, "val_check_interval": 2, "more": lambda: [EarlyStopping("val")]}
    _, whole, one = fit(tmp_path / "run", **options)
    os.rename(tmp_path / "run", tmp_path / "whole")
    stopped(tmp_path / "run", 3, **options)
    _, again, other = fit(tmp_path / "run", "last", seed=99, **options)
    assert str(one.state_dict()) == str(other.state_dict())
    states = [next(each.state_dict() for each in trainer.callbacks if type(each) is EarlyStopping)
              for trainer in (whole, again)]  # fmt: skip
    assert str(states[0]) == str(states[1])


def test_a_checkpoint_of_lightning_itself_resumes(tmp_path: Path) -> None:
    saves = {"every_n_epochs": 1, "save_last": True}
    fit(tmp_path / "run", ours=False, max_epochs=1, saves=saves)
    again, _, checkpoint = fit(tmp_path / "run", "last", saves=saves)
    assert [step for _, step, _ in again.seen] == [4, 5, 6, 7]
    assert (tmp_path / "run/step-000000000008").is_dir()
    assert fit(tmp_path / "run", checkpoint.last_model_path, saves=saves)[0].seen == []


def test_what_was_not_committed_does_not_count(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "last.ckpt.steps").mkdir()
    (out / "last.ckpt").write_text("a placeholder")
    again, _, _ = fit(out, "last")  # the first save was killed
    assert len(again.seen) == 8
    (out / "other.ckpt.steps").mkdir()
    with pytest.raises(StepNotFoundError, match="no committed step"):
        fit(out, out / "other.ckpt")


def test_another_precision_goes_on(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 3)
    again, trainer, _ = fit(tmp_path / "run", "last", precision="bf16-true")
    assert [step for _, step, _ in again.seen] == [3, 4, 5, 6, 7]
    tensors = [
        *again.parameters(),
        *(each["exp_avg"] for each in trainer.optimizers[0].state.values()),
    ]
    assert {each.dtype for each in tensors} == {torch.bfloat16}


def test_a_path_that_is_late_delays_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_third, hold, in_time = threading.Event(), Checkpoint.hold, []

    class Tells(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                saved_third.set()

    def late(self: Checkpoint, step: int) -> bool:
        if step == 1:
            in_time.append(saved_third.wait(DEADLINE_S))
        return hold(self, step)

    monkeypatch.setattr(Checkpoint, "hold", late)
    out, saves = tmp_path / "run", {"every_n_train_steps": 1, "save_top_k": -1}
    fit(out, saves=saves, more=lambda: [Tells()])
    assert in_time == [True]
    assert len(list(out.glob("*.ckpt.steps/step-*/manifest.json"))) == 8


def test_used_directories_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fit(out, max_epochs=1)
    Checkpoint(out / "other.ckpt").announce(str(out), 99)  # another job is saving
    with pytest.raises(UsageError, match="has steps already"):
        fit(out)
    assert (out / "other.ckpt").exists()
    fit(out, "last")  # everything was given back


def test_an_older_step_discards_nothing_until_the_first_save(tmp_path: Path) -> None:
    def steps() -> list[str]:
        return [path.name[-1] for path in sorted((tmp_path / "run").glob("step-*"))]

    fit(tmp_path / "run", saves={"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"})
    older, never = tmp_path / "run/step=6.ckpt", {"every_n_train_steps": 100}
    assert len(fit(tmp_path / "run", older, saves=never)[0].seen) == 2
    assert steps() == ["6", "7", "8"]
    fit(tmp_path / "run", older, saves={"every_n_train_steps": 1}, max_steps=7)
    assert steps() == ["6", "7"]


def test_a_discard_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard, failed = strategy.discard_newer, []

    def once(ckpt: Checkpointer, step: int | None) -> None:
        if step is not None and not failed:
            failed.append(step)
            raise StorageError("the disk is gone", errno=errno.EIO)
        discard(ckpt, step)

    class SavesTwice(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with pytest.raises(StorageError):
                trainer.save_checkpoint(tmp_path / "run/again.ckpt")
            trainer.save_checkpoint(tmp_path / "run/again.ckpt")

    out = tmp_path / "run"
    fit(out, saves={"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"})
    monkeypatch.setattr(strategy, "discard_newer", once)
    never = {"every_n_train_steps": 100}
    fit(out, out / "step=6.ckpt", saves=never, more=lambda: [SavesTwice()], max_steps=7)
    assert failed == [6]
    assert sorted(path.name[-1] for path in out.glob("step-*")) == ["6", "7"]


# -- which checkpoints stay ------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "best": {"monitor": "val", "save_top_k": 2, "save_last": True, "filename": "{step}-{val:.3f}"},
    "worst": {"monitor": "val", "mode": "max", "filename": "worst"},
    "link": {"save_last": "link"},
    "steps": {"every_n_train_steps": 3, "save_last": True},
    "one name": {"every_n_train_steps": 2, "filename": "x"},
    "versions": {"monitor": "val", "save_top_k": 3, "filename": "v"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_mean_the_same(tmp_path: Path, policy: str) -> None:
    found = []
    for name in ("stock", "ours"):
        model, trainer, checkpoint = fit(
            tmp_path / name, saves=POLICIES[policy], ours=name == "ours", val_check_interval=2
        )
        files = sorted(path.name for path in (tmp_path / name).glob("*.ckpt"))
        best = {Path(path).name: score.item() for path, score in checkpoint.best_k_models.items()}
        last = Path(checkpoint.last_model_path).name
        best_model = Net.load_from_checkpoint(checkpoint.best_model_path)
        found.append((files, best, last, Path(checkpoint.best_model_path).name))
        validation = stateful.StatefulDataLoader(DATA[:8], batch_size=4)
        scores = trainer.validate(model, validation, ckpt_path="best", verbose=False)
        found[-1] += (scores, [each.tolist() for each in best_model.parameters()])
    assert found[0] == found[1]
    held = {path.name.removesuffix(".steps") for path in (tmp_path / "ours").glob("*.steps")}
    assert held == {name for name in files if not (tmp_path / "ours" / name).is_symlink()}


def test_what_a_kill_has_left_undone_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, far = tmp_path / "run", tmp_path / "far"

    def more() -> list[Any]:
        return [ModelCheckpoint(far, every_n_train_steps=2)]

    with monkeypatch.context() as killed:
        killed.setattr(Checkpoint, "remove", lambda _: None)  # the kill came before it
        stopped(out, 5, more)
    assert len([*out.glob("*.ckpt")]) == 6
    assert len([*far.glob("*.ckpt")]) == 2
    for path in (out / "epoch=1-step=6.ckpt", far / "epoch=1-step=6.ckpt"):
        Checkpoint(path).announce(str(out), 6)  # a save that was not committed
    fit(out, "last", more=more)
    found = [sorted(os.listdir(folder)) for folder in (out, far)]
    assert [name for name in found[0] if "ckpt" in name] == [
        "epoch=1-step=8.ckpt", "epoch=1-step=8.ckpt.steps", "last.ckpt", "last.ckpt.steps",
    ]  # fmt: skip
    assert found[1] == ["epoch=1-step=8.ckpt", "epoch=1-step=8.ckpt.steps"]


def test_checkpoints_from_before_a_kill_get_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = {**EVERY, "save_top_k": -1, "filename": "{step}"}
    with monkeypatch.context() as killed:
        killed.setattr(Checkpoint, "write", lambda *_: None)  # the kill came before it
        stopped(tmp_path, 4, saves=saves)
    assert not any(Checkpoint(path).has_weights() for path in tmp_path.glob("*.ckpt"))
    fit(tmp_path, "last", saves=saves)
    paths = [tmp_path / f"step={step}.ckpt" for step in range(1, 9)]
    assert [torch.load(path)["global_step"] for path in paths] == [*range(1, 9)]


def test_a_job_with_nothing_left_to_train_writes_what_a_kill_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    options: dict[str, Any] = {"saves": {**EVERY, "filename": "{step}"}, "max_steps": 6}
    with monkeypatch.context() as killed:
        killed.setattr(Checkpoint, "write", lambda *_: None)  # the kill came before it
        killed.setattr(Checkpoint, "remove", lambda _: None)
        fit(out, max_epochs=None, **options)
    assert not any(Checkpoint(path).has_weights() for path in out.glob("*.ckpt"))
    model, trainer, _ = fit(out, "last", max_epochs=None, **options)
    assert (model.seen, trainer.global_step) == ([], 6)
    assert sorted(path.name for path in out.glob("*.ckpt")) == ["last.ckpt", "step=6.ckpt"]
    for path in out.glob("*.ckpt"):
        assert same_weights(Net.load_from_checkpoint(path), model)


def test_a_path_that_was_removed_after_the_resumed_step_stays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"saves": {"every_n_train_steps": 1, "filename": "{step}"}}
    stopped(tmp_path, 3, **options)
    path = tmp_path / "step=3.ckpt"
    Checkpoint(path).removed_after(4)  # the kill came before step 4 was committed
    settle(str(tmp_path), 3)
    assert path.exists()
    settle(str(tmp_path), 4)
    assert path.exists(), "the note is of a training that has not happened"


def test_a_note_that_a_power_cut_has_emptied_leads_to_the_run(tmp_path: Path) -> None:
    stopped(tmp_path, 5)
    shutil.rmtree(tmp_path / "last.ckpt.steps/step-000000000005")  # nor was that on the disk
    (tmp_path / "last.ckpt.steps/step-000000000005.json").write_bytes(b"")
    assert [step for _, step, _ in fit(tmp_path, "last")[0].seen] == [5, 6, 7]


def test_weights_that_a_kill_has_cut_off_take_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = b"half of the weights"

    def killed(values: Any, new: Any) -> None:
        Path(new).write_bytes(half)
        raise Stop

    fit(tmp_path, max_epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "torch_save", killed)
        patched.setattr(os, "unlink", lambda _: None)
        patched.setattr(os, "getpid", lambda: 1)
        with pytest.raises(Stop):
            Checkpoint(tmp_path / "last.ckpt").write({})
    fit(tmp_path, "last")
    assert half not in [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.steps").mkdir()
    (tmp_path / "mine.steps/notes.txt").write_text("of a person")
    settle(str(tmp_path), 3)
    assert (tmp_path / "mine.steps/notes.txt").exists()


def test_a_removed_checkpoint_gives_its_space_back(tmp_path: Path) -> None:
    fit(tmp_path / "run", saves={"every_n_train_steps": 1, "filename": "{step}"})
    (file,) = (tmp_path / "run").glob("step-000000000008/*.safetensors")
    assert file.stat().st_nlink == 2  # in the run, and of the one path that stays
    (file,) = (tmp_path / "run").glob("step-000000000007/*.safetensors")
    assert file.stat().st_nlink == 1


def test_weights_alone_are_saved_beside_a_full_checkpoint(tmp_path: Path) -> None:
    def more() -> list[Any]:
        return [ModelCheckpoint(tmp_path / "weights", every_n_train_steps=2, save_top_k=-1,
                                filename="{step}", save_weights_only=True)]  # fmt: skip

    whole, _, _ = fit(tmp_path / "run", more=more)
    assert same_weights(Net.load_from_checkpoint(tmp_path / "weights/step=8.ckpt"), whole)
    assert "optimizer" in statehold.load(tmp_path / "run/last.ckpt.steps")
    with pytest.raises(KeyError, match="contains only the model"):
        fit(tmp_path / "other", tmp_path / "weights/step=4.ckpt")


@pytest.mark.parametrize(
    ("averaging", "changes"),
    [
        (lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1), ["transfer_weights"]),
        (WeightAveraging, ["_swap_models", "_copy_average_to_current"]),
    ],
)
def test_averaged_weights_wait_for_the_copies_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaging: Any, changes: list[str]
) -> None:
    """They are written through .data, which no save notices."""
    calls: list[str] = []
    callback, gate = averaging(), statehold.Checkpointer.gate

    def gated(ckpt: statehold.Checkpointer) -> None:
        calls.append("gate")
        gate(ckpt)

    def noted(name: str, change: Any, *args: Any) -> None:
        calls.append(name)
        change(*args)

    monkeypatch.setattr(statehold.Checkpointer, "gate", gated)
    for name in changes:
        original = getattr(type(callback), name)
        monkeypatch.setattr(
            type(callback), name, lambda *args, n=name, o=original: noted(n, o, *args)
        )
        if name == "transfer_weights":
            monkeypatch.setattr(type(callback), name, staticmethod(vars(type(callback))[name]))
    fit(
        tmp_path, max_epochs=3, num_sanity_val_steps=0, val_check_interval=2,
        more=lambda: [callback], saves={"every_n_train_steps": 1},
    )  # fmt: skip
    made = [at for at, call in enumerate(calls) if call in changes]
    assert {calls[at] for at in made} == set(changes)
    assert all(calls[at - 1] == "gate" for at in made)


class StopIn(Callback):  # type: ignore[misc]
    """Ends the training with an error, after the forward pass of the batch after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise Stop


@pytest.mark.parametrize(
    ("stop", "goes_on"),
    [(StopAt(2), (0, 2)), (StopIn(2), (0, 2)), (StopAt(3), (1, 3)), (StopIn(3), (1, 3))],
    ids=["before a batch", "in a batch", "before the last batch", "in the last batch"],
)
def test_an_exception_saves_as_in_lightning(
    tmp_path: Path, stop: Any, goes_on: tuple[int, int]
) -> None:
    saves = {"every_n_epochs": 9, "save_on_exception": True, "save_last": True}
    options = {"saves": saves, "make": Batches, "data": in_order}
    found = []
    for out, ours in ((tmp_path / "stock", False), (tmp_path / "ours", True)):
        with pytest.raises(Stop):
            fit(out, more=lambda: [stop], ours=ours, **options)
        names = sorted(path.name for path in out.glob("*.ckpt"))
        again, trainer, _ = fit(out, "last", ours=ours, **options)
        found.append((names, again.batches, trainer.global_step))
    assert found[0] == found[1]
    assert found[0][1][0][:2] == goes_on


def test_after_the_training_everything_is_lightnings_own(tmp_path: Path) -> None:
    model, trainer, _ = fit(tmp_path / "run")
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert not (tmp_path / "final.ckpt.steps").exists()
    assert same_weights(Net.load_from_checkpoint(tmp_path / "final.ckpt"), model)
    assert Net.load_from_checkpoint(tmp_path / "run/last.ckpt").hparams == model.hparams


# -- refusals and warnings -------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda: DataLoader(DATA, batch_size=4, shuffle=True), "does not know its position"),
        (lambda: stateful.StatefulDataLoader(Stream(), batch_size=4), "fetches a batch ahead"),
        (
            lambda: stateful.StatefulDataLoader(DATA, batch_size=4, generator=torch.Generator()),
            "a generator of its own",
        ),
        (loader, None),
    ],
)
def test_loaders_that_are_not_exact_are_named(
    tmp_path: Path, data: Any, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "statehold"):
        fit(tmp_path / "run", data=data, max_epochs=1)
    texts = [each.getMessage() for each in caplog.records if each.name == "statehold"]
    assert len(texts) == (told is not None), texts
    assert told is None or told in texts[0]


def test_weights_that_find_no_room_leave_no_file_behind(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "last.ckpt")
    checkpoint.announce(str(tmp_path), 1)
    with no_file_larger_than(_core.open_fs("auto", 1), 1000), pytest.raises(OSError, match="large"):
        checkpoint.write({"w": torch.ones(1000)})
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.steps"]
    assert not checkpoint.has_weights()


def test_other_strategies_and_places_are_refused() -> None:
    with pytest.raises(UsageError, match="for this strategy"):
        StateholdCallback().setup(SimpleNamespace(strategy=object()), None, "fit")
    with pytest.raises(UsageError, match="local or shared file system"):
        fit("memory://bucket")


def test_a_value_that_no_step_can_hold_is_named(tmp_path: Path) -> None:
    class Odd(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = {"path": object()}

    with pytest.raises(UnsupportedValueError, match=r"odd\.path"):
        fit(tmp_path / "run", make=Odd)


def test_levels_are_a_method(tmp_path: Path) -> None:
    class Levels(StateholdCallback):
        def checkpointer(self, run: str, keep: int) -> Any:
            far = statehold.Directory(name="far", path=tmp_path / "far")
            return statehold.Checkpointer(run, levels=[statehold.Directory(keep=keep), far])

    fit(tmp_path / "run", more=lambda: [Levels()], ours=False)
    assert (tmp_path / "far").is_dir()
    again, _, _ = fit(tmp_path / "run", "last", more=lambda: [Levels()], ours=False)
    assert again.seen == []
