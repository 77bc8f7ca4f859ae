"""Real replicas that die inside a step: the others finish it, as if one had done it alone."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilience.control import peers
from resilience.jobs import (
    UNTIL,
    Job,
    Log,
    assert_like,
    coordinated,
    replica,
    step_indices,
    undisturbed,
)
from resilience.replica import (
    BATCH,
    FEATURES,
    MAX_NORM,
    MICROBATCHES,
    SEED,
    data,
)
from statehold import Checkpointer, offload
from statehold.errors import ReplicaRefusedError, UsageError, WaitTimeout
from statehold.ranks.preemption import LEFT
from statehold.resilience import Replicas
from statehold.resilience.driver import Driver


def assert_counted_once(logs: list[Log], lost: Iterable[int] = ()) -> None:
    """Each microbatch of a step is in one share.

    lost: steps with a share of a replica that was killed after its vote, and wrote nothing down.
    """
    for step in range(UNTIL):
        shares = [index for log in logs for index in log.shares.get(step, ())]
        assert len(shares) == len(set(shares))
        assert (len(shares) < MICROBATCHES) == (step in lost)


@pytest.mark.thorough
def test_replicas_that_die_at_every_moment_of_a_step(tmp_path: Path, alone: Log) -> None:
    dooms = [(2, "backward"), (4, "sum"), (6, "Vote"), (8, "after Vote")]
    with coordinated(5) as meeting, Job(tmp_path, meeting, UNTIL) as job:
        for doom in dooms:
            job.start(doom)
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL] * 4 + [0]
    for log in logs:
        assert_like(log, alone)
    assert_counted_once(logs, lost=[8])
    survivor = logs[-1]
    assert sorted(survivor.losses) == list(range(UNTIL))
    assert survivor.weights == alone.weights
    for step in range(UNTIL):
        shares = [step_indices(step) & log.computed.keys() for log in logs]
        assert set.union(*shares) == step_indices(step)
        lost = [doom for doom in dooms if doom[0] == step]
        assert sum(map(len, shares)) == len(step_indices(step)) or lost


@pytest.mark.thorough
def test_a_loader_draws_what_lost_replicas_leave(tmp_path: Path, alone: Log) -> None:
    """Its worker has drawn ahead for the share that the replica had before."""
    with coordinated(3) as meeting, Job(tmp_path, meeting, UNTIL, workers=1) as job:
        job.start((3, "backward"))
        job.start((6, "Vote"))
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL] * 2 + [0]
    for log in logs:
        assert_like(log, alone)
    assert_counted_once(logs)
    assert logs[-1].weights == alone.weights


@pytest.mark.thorough
def test_a_microbatch_that_hangs_costs_its_replica_the_lease(tmp_path: Path, alone: Log) -> None:
    """When it goes on, nothing of it counts, and the replica joins again. It was the first member,
    and leaves the run directory to the next one."""
    go, back, run = tmp_path / "go", tmp_path / "back", tmp_path / "run"
    with coordinated(2) as meeting, Job(tmp_path, meeting, UNTIL, run=run) as job:
        job.start(hold=(3, go), options=(("stuck_s", 0.5), ("lease_s", 2.0)))
        meeting.wait_for("has connected")
        job.start(hold=(UNTIL - 4, back))
        meeting.wait_for("the lease of its rank 0 has ended")
        go.touch()
        meeting.wait_for("has connected", times=3)
        back.touch()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [0, 0]
    for log in logs:
        assert_like(log, alone)
    assert_counted_once(logs)
    assert 3 not in logs[0].losses
    assert logs[0].shares[UNTIL - 1]
    with Checkpointer(run) as ckpt:
        assert UNTIL in ckpt.steps()


@pytest.mark.thorough
def test_each_replica_that_is_asked_to_leave_leaves_after_its_step(
    tmp_path: Path, alone: Log
) -> None:
    """One that is not the first member leaves the saving to the others; the last one saves."""
    run = tmp_path / "run"
    with coordinated(3) as meeting, Job(tmp_path, meeting, UNTIL, run=run, every=100) as job:
        job.start(leaves=9)
        meeting.wait_for("has connected")
        job.start(leaves=3)
        meeting.wait_for("has connected", times=2)
        job.start(leaves=6)
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [LEFT] * 3
    assert [max(log.losses) for log in logs] == [9, 3, 6]
    for log in logs:
        assert_like(log, alone)
    with Checkpointer(run) as ckpt:
        assert max(ckpt.steps()) == 10


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_redundant_replicas_compute_nothing_again(
    tmp_path: Path, alone: Log, reduction: str
) -> None:
    """Each of three computes its share and a copy of another one's. Then two die, one by one."""
    options = (("redundancy", 2), ("reduction", reduction))
    with coordinated(3) as meeting, Job(tmp_path, meeting, UNTIL, options=options) as job:
        job.start((3, "sum"))
        job.start((6, "after Vote"))
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL] * 2 + [0]
    assert_counted_once(logs, lost=[6])
    if reduction == "exact":
        for log in logs:
            assert_like(log, alone)
    assert sorted(logs[-1].losses) == list(range(UNTIL))
    for step in range(UNTIL):
        times = sum((log.computed for log in logs), Counter())
        wanted = 2 if step <= 6 else 1
        assert {times[each] for each in step_indices(step)} == {wanted}


@pytest.mark.thorough
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path: Path, alone: Log) -> None:
    run = tmp_path / "run"
    logs = []
    for count, until in ((2, 5), (1, 8), (3, UNTIL)):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        with coordinated(count) as meeting, Job(folder, meeting, until, run=run) as job:
            for _ in range(count):
                job.start()
            logs += job.wait()
    for log in logs:
        assert_like(log, alone)
    assert [sorted(log.losses) for log in logs] == [
        *[[*range(5)]] * 2, [5, 6, 7], *[[*range(8, UNTIL)]] * 3
    ]  # fmt: skip
    assert logs[-1].weights == alone.weights


@pytest.mark.thorough
def test_when_all_are_lost_the_newest_step_comes_from_memory(
    tmp_path: Path, memory: Path, alone: Log
) -> None:
    """Its only copy is there: the one on the disk is removed."""
    run, again, go = (tmp_path / each for each in ("run", "again", "go"))
    order: dict[str, Any] = {"run": run, "memory": memory}
    with coordinated(2) as meeting, Job(tmp_path, meeting, 7, hold=(6, go), **order) as job:
        job.start((6, "sum"))
        job.start((6, "sum"))
        peers.until((memory / "step-000000000006").exists)  # it is committed
        go.touch()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL] * 2
    peers.until(lambda: (run / "step-000000000006").exists())  # what outlives the trainer copies it
    for step in run.glob("step-*"):
        shutil.rmtree(step)
    again.mkdir()
    with coordinated(1) as meeting, Job(again, meeting, UNTIL, **order) as job:
        job.start()
        logs += job.wait()
    for log in logs:
        assert_like(log, alone)
    assert min(logs[-1].losses) == 6
    assert logs[-1].weights == alone.weights


@pytest.mark.thorough
@pytest.mark.parametrize("shards", ["fsdp", "tp"])
def test_a_replica_of_two_ranks_is_lost_with_one_of_them(tmp_path: Path, shards: str) -> None:
    """Two replicas are; a new one joins, and the last one goes on."""
    whole = undisturbed(tmp_path / "whole", UNTIL, width=2, shards=shards)
    hold = UNTIL - 4, tmp_path / "all are here"
    assert whole[0].norms == whole[1].norms  # of the gradients that both hold together
    assert min(whole[0].norms.values()) > MAX_NORM
    order: dict[str, Any] = {"width": 2, "shards": shards, "hold": hold}
    with coordinated(3) as meeting, Job(tmp_path, meeting, UNTIL, **order) as job:
        job.start((3, "sum"))
        job.start((6, "after Vote"))
        job.start()
        for process in job.processes[:4]:
            process.join()
        job.start()
        meeting.wait_for("has connected", times=8)
        hold[1].touch()
        logs = job.wait()
    codes = [each.exitcode for each in job.processes]
    assert codes[1] == codes[3] == -signal.SIGKILL
    assert codes[0] == codes[2] == 1  # nothing to go on with
    assert codes[4:] == [0, 0, 0, 0]
    for number, log in enumerate(logs):
        assert_like(log, whole[number % 2])
    assert [log.weights for log in logs[4:]] == [log.weights for log in [*whole, *whole]]
    assert logs[6].shares[UNTIL - 1] == logs[7].shares[UNTIL - 1] != []


@pytest.mark.thorough
def test_a_replica_that_comes_later_takes_part_in_the_next_steps(tmp_path: Path) -> None:
    until = 1 << 30
    with coordinated(2) as meeting, Job(tmp_path, meeting, until, pause_s=0.01) as job:
        job.start()
        job.start()
        meeting.wait_for("has 2 replicas")
        job.start()
        meeting.wait_for("has 3 replicas")
        job.processes[0].kill()
        meeting.wait_for("has 2 replicas", times=2)
        job.start()
        meeting.wait_for("has 3 replicas", times=2)
        late = job.logged(3, steps=2)
        job.progress(3, steps=1)  # so the others have written down these steps, too
        logs = job.stop()
    first, last = min(late.losses), max(late.losses)
    assert first > min(logs[1].losses)
    for step in range(first, last + 1):
        assert late.losses[step] == logs[1].losses[step] == logs[2].losses[step]
    assert step_indices(first + 1) & late.computed.keys()


def test_a_replica_that_draws_other_samples_than_a_lost_one_stops(tmp_path: Path) -> None:
    order: dict[str, Any] = {"options": (("lease_s", 2.0),), "pause_s": 0.6, "is_impure": True}
    with coordinated(2) as meeting, Job(tmp_path, meeting, UNTIL, **order) as job:
        job.start((0, "backward"))  # after a beat has told what it has drawn
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [-signal.SIGKILL, 1]
    assert [log.errors for log in logs] == [[], ["ImpureSamplesError"]]


def refusal(other: Replicas) -> dict[str, Any]:
    with other, pytest.raises(ReplicaRefusedError) as refused:
        next(other.steps(1))
    return refused.value.facts


def test_a_replica_that_differs_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinated(9) as meeting, Job(tmp_path, meeting, 1 << 30) as job:
        job.start()
        meeting.wait_for("has connected")
        seed, more = SEED + 1, MICROBATCHES + 1
        facts = refusal(replica(meeting.address, seed=seed))
        assert facts == {"what": "seed", "expected": str(SEED), "got": str(seed)}
        facts = refusal(replica(meeting.address, microbatches=more))
        assert facts == {"what": "microbatches", "expected": str(MICROBATCHES), "got": str(more)}
        assert refusal(replica(meeting.address, samples=7))["what"] == "samples"
        assert refusal(replica(meeting.address, batch=BATCH + 1))["what"] == "batch"
        assert refusal(replica(meeting.address, reduction="fast"))["what"] == "reduction"
        with Checkpointer(tmp_path / "run") as ckpt:  # the others would save nothing after it
            facts = refusal(replica(meeting.address, checkpointer=ckpt))
        assert facts == {"what": "checkpointer", "expected": "None", "got": "given"}
        other = nn.Linear(FEATURES, FEATURES)
        assert refusal(replica(meeting.address, model=other))["what"] == "parameters"
        script = tmp_path / "another.py"
        script.write_text("pass")
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        assert refusal(replica(meeting.address))["what"] == "code"


def test_a_replica_that_stays_alone_says_what_it_waits_for() -> None:
    with (
        coordinated(1) as meeting,
        replica(meeting.address, min_replicas=2, wait_s=0.2) as lonely,
        pytest.raises(WaitTimeout, match=r"at least 2, with this one \(min_replicas\)") as late,
    ):
        next(lonely.steps(1))
    assert late.value.facts["coordinator"] == meeting.address
    assert late.value.facts["connection"] == "up"


def test_a_replica_without_a_coordinator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATEHOLD_COORDINATOR", raising=False)
    with pytest.raises(UsageError, match="needs the address of its coordinator"):
        replica(None)
    with coordinated(1) as meeting:
        address = meeting.address
    with replica(address, wait_s=0.2) as lost, pytest.raises(WaitTimeout) as late:
        next(lost.steps(1))
    assert "refused" in late.value.facts["connection"]


def test_bad_arguments_are_refused() -> None:
    for options in (
        {"reduction": "best"},
        {"min_replicas": 0},
        {"lease_s": 0.0},
        {"wait_s": 0},
        {"batch": 0},
        # What no message of the protocol can say: the replica called for wait_s in vain.
        {"min_replicas": 1.5},
        {"min_replicas": math.inf},
        {"redundancy": 1.5},
        {"lease_s": math.inf},
        {"lease_s": 1e6},
        {"wait_s": math.nan},
    ):
        with pytest.raises(UsageError):
            replica("127.0.0.1:1", **options).close()


def test_a_replica_may_wait_for_ever() -> None:
    with coordinated(1) as meeting, replica(meeting.address, wait_s=math.inf) as replicas:
        assert [step.number for step in replicas.steps(0)] == []


def test_a_part_outside_of_the_model_is_refused_in_the_first_microbatch() -> None:
    """Its gradient would be the sum over the microbatches of one replica."""
    head = nn.Linear(FEATURES, 1)
    with coordinated(1) as meeting, replica(meeting.address, state={"head": head}) as replicas:
        model = replicas.state["model"]
        replicas.state["optimizer"].add_param_group({"params": list(head.parameters())})
        steps = replicas.steps(1)
        microbatches = iter(next(steps))
        next(microbatches).backward(head(model(data()[:2])).square().mean())
        with pytest.raises(UsageError, match="does not sum") as refused:
            next(microbatches)
    assert refused.value.facts["parameter"] == "head.weight"


@pytest.mark.parametrize("is_on_files", [False, True])
def test_an_offloaded_optimizer_is_refused_at_once(tmp_path: Path, *, is_on_files: bool) -> None:
    """It trained where no file held a part of it, until the first joiner came."""
    tiers = [offload.Path(tmp_path) if is_on_files else offload.Host("1MiB")]
    optimizer = offload.AdamW(nn.Linear(2, 2).parameters(), lr=0.1, tiers=tiers)
    with contextlib.closing(optimizer), pytest.raises(UsageError, match="offloaded") as refused:
        replica("127.0.0.1:1", state={"more": [optimizer]})
    assert refused.value.facts == {"name": "more.0", "got": "AdamW"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("lr", "optimizer.param_groups.0.lr"),
        ("bit", "optimizer.state.model.3.bias.exp_avg"),
        ("skips", "model.0.weight"),
        ("frozen", "model.3.bias.requires_grad"),
    ],
)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_member_that_differs_is_named_before_it_trains_on(
    tmp_path: Path, alone: Log, reduction: str, how: str, what: str
) -> None:
    """R19: it leaves, and the others finish that step without it."""
    options = (("reduction", reduction),)
    with coordinated(3) as meeting, Job(tmp_path, meeting, UNTIL, options=options) as job:
        job.start()
        job.start(odd=(4, how))
        job.start()
        logs = job.wait()
    assert [each.exitcode for each in job.processes] == [0, 1, 0]
    assert [log.errors for log in logs] == [[], ["ReplicaRefusedError"], []]
    facts = logs[1].facts[0]
    assert what in facts["what"].split(", ")
    assert (facts["replica"], facts["step"]) == (logs[1].votes[-1].name, "5")
    assert facts["safe"].startswith("saved steps up to 4:")
    assert max(logs[1].losses) == 4
    assert logs[0].losses == logs[2].losses
    assert sorted(logs[0].losses) == list(range(UNTIL))
    if reduction == "exact":
        assert logs[0].losses == alone.losses
        assert logs[0].weights == logs[2].weights == alone.weights


@pytest.mark.thorough
def test_of_two_that_differ_nobody_goes_on(tmp_path: Path) -> None:
    """R19: also if they are replicas of two ranks, and only one rank differs."""
    with coordinated(2) as meeting, Job(tmp_path, meeting, UNTIL, width=2) as job:
        job.start()
        job.start()
        logs = job.wait()
    assert not any(log.errors for log in logs)
    again = tmp_path / "again"
    again.mkdir()
    with coordinated(2) as meeting, Job(again, meeting, UNTIL, width=2) as job:
        job.start()
        job.start(odd=(4, "bit"))
        logs = job.wait()
    assert [log.errors for log in logs] == [["ReplicaRefusedError"]] * 4
    assert {max(log.losses) for log in logs} == {4}
    assert {facts["members"] for log in logs for facts in log.facts} == {"2"}
    assert len({facts["replica"] for log in logs for facts in log.facts}) == 2


def test_a_microbatch_that_changes_a_buffer_ends_the_run() -> None:
    """A replica without others refuses it, too: with others it would compute something else."""
    norm = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))
    with coordinated(1) as meeting, replica(meeting.address, model=norm) as replicas:
        steps = replicas.steps(1)
        microbatches = iter(next(steps))
        next(microbatches).backward(norm(data()[:4]).square().sum())
        with pytest.raises(UsageError, match="changes a buffer") as refused:
            next(microbatches)
        assert refused.value.facts["buffer"] == "model.0.running_mean"


def test_loops_that_are_left_early_are_refused() -> None:
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        steps = replicas.steps(3)
        for microbatch in next(steps):
            loss = next(iter(replicas.state["model"].parameters())).sum()
            microbatch.backward(loss)
            with pytest.raises(UsageError, match="twice"):
                microbatch.backward(loss)
        step = next(steps)
        with pytest.raises(UsageError, match="left before its end"):
            _ = step.loss
        with pytest.raises(UsageError, match="was not called"):
            for _ in step:
                pass


@pytest.mark.parametrize("after", [0, MICROBATCHES - 1])
def test_a_gradient_after_the_backward_of_its_microbatch_is_refused(after: int) -> None:
    """It would count for the next microbatch of this replica, and after the last one not at all."""
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        name, param = next(iter(replicas.state["model"].named_parameters()))
        steps = replicas.steps(1)

        def train() -> None:
            for microbatch in next(steps):
                microbatch.backward(param.sum())
                if microbatch.index == after:
                    param.sum().backward()

        with pytest.raises(UsageError, match="after the backward") as refused:
            train()
        assert refused.value.facts == {"step": 0, "microbatch": after, "parameter": name}


def test_one_before_it_counts_for_its_microbatch() -> None:
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        param = next(iter(replicas.state["model"].parameters()))
        steps = replicas.steps(1)
        for microbatch in next(steps):
            param.sum().backward()
            microbatch.backward(param.sum())
        assert torch.equal(param.grad, torch.full_like(param, 2))


class OutOfMemory(Exception):
    """What a device says in the middle of a backward pass."""


class FailsBackward(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if FailsBackward.armed:
            FailsBackward.armed = False
            raise OutOfMemory
        return grad


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("fails", [0, 3, MICROBATCHES - 1])
def test_a_backward_pass_that_has_failed_is_repeated(reduction: str, fails: int) -> None:
    """R14: the second try draws the same dropout, and the gradients have the same bits."""

    def gradients(fails: int | None) -> list[torch.Tensor]:
        with coordinated(1) as meeting, replica(meeting.address, reduction=reduction) as replicas:
            model = replicas.state["model"]
            steps = replicas.steps(1)
            step, tries = next(steps), 0
            for microbatch in step:
                for _ in range(2):
                    hidden = FailsBackward.apply(model[:2](data()[microbatch.samples]))
                    FailsBackward.armed = tries == fails
                    tries += 1
                    try:
                        microbatch.backward(model[2:](hidden).square().mean())
                        break
                    except OutOfMemory:
                        assert model[3].weight.grad is None
            assert len(step.share) == len(step.losses) == MICROBATCHES
            return [each.grad.clone() for each in model.parameters()]

    for again, wanted in zip(gradients(fails), gradients(None), strict=True):
        assert torch.equal(again, wanted)


def test_gradients_are_clipped_by_their_norm_over_all_parameters() -> None:
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        model = replicas.state["model"]
        steps = replicas.steps(1)
        step = next(steps)
        for microbatch in step:
            microbatch.backward(model(data()[:4]).square().sum())
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()
        assert step.clip_grad_norm(norm / 2) == pytest.approx(norm)
        assert step.clip_grad_norm(norm) == pytest.approx(norm / 2)


def test_a_run_that_has_ended_without_this_replica_leaves_it_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop of the documents runs once more, and must not take the loss of an older step."""
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        steps = replicas.steps(2)
        for microbatch in (first := next(steps)):
            microbatch.backward(replicas.state["model"](data()[:1]).sum())
        assert (first.is_over, math.isnan(first.loss)) == (False, False)
        replicas.state["model"].zero_grad()
        monkeypatch.setattr(Driver, "step", lambda *_: iter(()))
        last = next(steps)
        assert not list(last)
        assert last.is_over
        assert math.isnan(last.loss)
        assert last.losses == last.share == []
        assert last.clip_grad_norm(1.0) == 0
        assert not list(steps)


def test_a_step_keeps_its_losses() -> None:
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        steps, then = [], []
        for step in replicas.steps(3):
            for microbatch in step:
                x = data()[:1] * (step.number + 1)
                microbatch.backward(replicas.state["model"](x).sum())
            steps.append(step)
            then.append((step.loss, step.losses))
        assert [(step.loss, step.losses) for step in steps] == then
        assert len({loss for loss, _ in then}) == 3


def test_a_second_loop_goes_on_where_the_first_one_has_ended() -> None:
    with coordinated(1) as meeting, replica(meeting.address) as replicas:
        numbers = []
        for until in (1, 3):
            for step in replicas.steps(until):
                for microbatch in step:
                    microbatch.backward(replicas.state["model"](data()[:1]).sum())
                numbers.append(step.number)
    assert numbers == [0, 1, 2]
