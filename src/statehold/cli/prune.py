"""`statehold prune RUN --keep N`: delete all but the newest steps, and those that other rules keep.
`statehold kv prune STORE`: let pages of a store of KV pages go, by identity, age and size.

The bytes of a step or a leftover are those that its end frees: a file that another step or run has
stays. Steps and leftovers that share a file may free more together than each alone.

Invariants: nothing changes without --yes; with it the run is locked, so no job saves meanwhile, and
steps go in the order R1 to R3 (store). The newest step always stays. If no step has the metric or a
pin that the rules name, nothing is deleted. A step that has lost a file or the end of one, or whose
documents are damaged, of a newer format or of another step, stays, too. The rules choose among the
others: otherwise such a step could take the place of the last step that restores. Steps that were
set aside as damaged stay: a person decides about those.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

from statehold.checkpoint.restore.choice import Choice, chosen
from statehold.cli import codes
from statehold.cli.output import counted, emit, plain, say, table
from statehold.cli.places import describe, is_per_host, leftovers_of
from statehold.errors import StepNotFoundError, UsageError, no_such_step, refused
from statehold.kv.looking import prune
from statehold.kv.page import identity_in
from statehold.options.keep import Keep
from statehold.reading.places import file_system, run_at
from statehold.reading.sizes import sizes
from statehold.steps.directories import is_leftover
from statehold.steps.lock import RunLock, is_saved_into
from statehold.steps.pool import POOL_NAME
from statehold.steps.store import Store
from statehold.units import format_bytes, parse_bytes, parse_seconds

_NOTHING_CHANGED = "nothing was changed; pass --yes to delete them"


def run(args: argparse.Namespace) -> int:
    if "store" in args:
        return _prune_pages(args)
    fs, path = file_system(), run_at(args.run)
    keep = _policy(args)
    store = Store(fs, path, keep=keep, reuse=False)
    _check_names(store, keep, args.pin)
    with contextlib.ExitStack() as lock:
        if args.yes:
            lock.callback(RunLock(path, passes=True).release)
        document = _plan(fs, store, path, args)
        if args.yes and args.leftovers:
            store.recover()
        if args.yes:
            store.retain(among=set(store.steps()).difference(document["damaged"]))
    document["done"] = args.yes
    emit(document) if args.json else _show(document)
    return codes.YES


def _prune_pages(args: argparse.Namespace) -> int:
    if not args.identity and args.older_than is None and args.to is None:
        hint = "pass --identity, --older-than or --to; the pages go that all of them mean"
        raise UsageError("prune needs to know which pages go", hint=hint)
    age_s = parse_seconds(args.older_than)
    if args.older_than is not None and age_s is None:
        raise refused("not an age of pages", 'a time such as "90s", "2h" or "7d"', args.older_than)
    gone, nbytes = prune(
        args.store, identities=[identity_in(each) for each in args.identity],
        before_s=math.inf if age_s is None else time.time() - age_s,
        to=None if args.to is None else parse_bytes(args.to), is_done=args.yes,
    )  # fmt: skip
    if args.json:
        emit({"store": args.store, "pages": dict(gone), "bytes": nbytes, "done": args.yes})
        return codes.YES
    if gone:
        say(table(("IDENTITY", "PAGES"), gone.most_common(), right="PAGES"))
    say(f"{counted(gone.total(), 'page')} in all, {format_bytes(nbytes)} of the files")
    if gone and not args.yes:
        say(_NOTHING_CHANGED)
    return codes.YES


def _policy(args: argparse.Namespace) -> Keep:
    if args.keep < 1:
        raise refused("--keep must be a number of steps", "at least 1", args.keep)
    if bool(args.best) != bool(args.metric):
        facts = {"got": f"--best {args.best} --metric {args.metric}"}
        hint = "write --best 2 --metric val_loss, or neither"
        raise UsageError("--best and --metric belong together", facts=facts, hint=hint)
    return Keep(
        last=args.keep,
        every=args.every,
        best=args.best,
        metric=args.metric,
        mode="max" if args.max else "min",
        pinned=[*args.pin, *(n for n in map(_number, args.pin) if n is not None)],
    )


def _number(pin: str) -> int | None:
    """The step that a pin may mean; it may be a tag, too."""
    return int(pin) if len(pin) <= 12 and pin.isascii() and pin.isdecimal() else None


def _check_names(store: Store, keep: Keep, pins: Sequence[str]) -> None:
    """Raises StepNotFoundError for what no step has: a typing error would keep no step."""
    steps = store.steps()
    if steps and keep.metric:
        chosen(store, Choice(best=keep.metric))
    for pin in pins if steps else ():
        try:
            if (number := _number(pin)) not in steps:
                chosen(store, Choice(tag=pin))
        except StepNotFoundError as error:
            raise (error if number is None else no_such_step(number, store.root, steps)) from None


def _plan(fs: Any, store: Store, path: str, args: argparse.Namespace) -> dict[str, Any]:
    """The steps to delete, as things are now."""
    steps = store.steps()
    damaged = {step for step in steps if _is_damaged(store, step)}
    kept = damaged | store.kept([step for step in steps if step not in damaged])
    retired = {step: store.where(step) for step in steps if step not in kept}
    gone = _leftovers(fs, path, is_ours=args.yes) if args.leftovers else []
    folders = [f"{path}/{each['name']}" for each in gone]
    pool = {f"{path}/{POOL_NAME}"}.intersection(folders)  # its names end with the leftovers
    return {
        "run": path,
        "keep": sorted(kept),
        "damaged": sorted(damaged),
        "retire": [
            {"step": step, "bytes": sizes([where], pool).own_bytes}
            for step, where in retired.items()
        ],
        "leftovers": gone,
        "bytes": sizes([*retired.values(), *folders]).own_bytes,
    }


def _leftovers(fs: Any, path: str, *, is_ours: bool) -> list[dict[str, Any]]:
    """The leftovers that store.recover() clears. While a job has the run, nothing is left over.

    is_ours: this command has the run.
    """
    if not is_ours and is_saved_into(path):
        return []
    found = leftovers_of(fs, path)
    return [each for each in found if each["kind"] in _HIDDEN or is_leftover(each["name"])]


# recover() leaves unfinished copies, and steps that were set aside.
_HIDDEN = ("replaced", "spare", "shared")


def _is_damaged(store: Store, step: int) -> bool:
    found = describe(store, step, is_part=is_per_host(store.root))
    return found is not None and found["state"] != "committed"


def _show(document: dict[str, Any]) -> None:
    rows = [(f"step {each['step']}", format_bytes(each["bytes"])) for each in document["retire"]]
    rows += [(plain(each["name"]), format_bytes(each["bytes"])) for each in document["leftovers"]]
    if rows:
        say(table(("GOES" if not document["done"] else "GONE", "BYTES"), rows, right="BYTES"))
    stay = ", ".join(map(str, document["keep"])) or "none"
    say(f"{format_bytes(document['bytes'])} in all; steps that stay: {stay}")
    if document["damaged"]:
        steps = ", ".join(map(str, document["damaged"]))
        say(f"steps that are damaged, or of a newer format, do not count and stay: {steps}")
    if rows and not document["done"]:
        say(_NOTHING_CHANGED)
