"""The command `statehold`: look at runs, verify, compare and prune them (docs/cli.md).

Owns: arguments, the choice of a command, and what becomes of errors: a message on stderr and an
exit code.
Invariants: nothing here imports torch; NumPy is imported only by what needs numbers, and a
command's module only when the command runs.
Not here: what a command does (one module each), how output looks (output).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from statehold._version import __version__
from statehold.cli import codes
from statehold.errors import StateholdError, UsageError

__all__ = ["main"]

_STEP_HELP = "RUN, RUN@STEP (a number or 'newest', the default), or the directory of a step"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    command = importlib.import_module(f"statehold.cli.{args.module}")
    try:
        if getattr(args, "option", None) and not args.levels:
            raise UsageError("--option is of object stores", hint="it needs --levels")
        return int(command.run(args))
    except StateholdError as error:
        print(f"statehold: {error}", file=sys.stderr)
        return codes.code_of(error)
    except OSError as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("statehold: interrupted", file=sys.stderr)
        return codes.INTERRUPTED


def _failed(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        print(f"statehold: {error}", file=sys.stderr)
    return codes.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="statehold",
        description="Look at checkpoints, verify, compare and prune them.",
        epilog=codes.TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"statehold {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    ls = _command(commands, "ls", "the steps of a run, and what else lies there")
    ls.add_argument("run", metavar="RUN", help="a run directory")
    _add_levels(ls, "also what is at the other levels of the run, object stores included")

    show = _command(commands, "show", "what a step holds, or one tensor of it")
    show.add_argument("step", metavar="RUN[@STEP]", help=_STEP_HELP)
    show.add_argument("tensor", metavar="TENSOR", nargs="?", help="with statistics (needs NumPy)")
    show.add_argument("--values", action="store_true", help="the plain values, too")
    _add_rank(show)

    verify = _command(commands, "verify", "read every byte of a step and check it")
    verify.add_argument("step", metavar="RUN[@STEP]", help=_STEP_HELP)
    verify.add_argument("--all", action="store_true", help="all steps of the run")
    _add_levels(verify, "every copy, at all levels of the run; those in object stores are fetched")

    report = _command(commands, "report", "a page about a run: steps, saves over time, integrity")
    report.add_argument("run", metavar="RUN", help="a run directory")
    report.add_argument("-o", "--output", metavar="FILE", help="the page; needed without --json")
    report.add_argument("--trace", metavar="FILE", nargs="+", default=[], action="extend",
                        help="what Checkpointer(..., trace=FILE) wrote; of every rank")  # fmt: skip
    report.add_argument("--limit", metavar="BYTES", help='a second, such as "7.9 GB": draws the '
                        "limit of the storage beside what saves reached")  # fmt: skip
    report.add_argument("--verify", action="store_true", help="read and check every step")
    _add_levels(report, "ask object stores, too; other levels are always looked at")

    diff = _command(
        commands, "diff", "which tensors and values of two steps differ, and by how much"
    )
    diff.add_argument("a", metavar="A", help=_STEP_HELP)
    diff.add_argument("b", metavar="B", help="the same, or @STEP: of the run of A")
    _add_rank(diff)

    prune = _command(commands, "prune", "give up old steps; shows them, and with --yes does it")
    prune.add_argument("run", metavar="RUN", help="a run directory that no job saves into")
    prune.add_argument("--keep", metavar="N", type=int, required=True, help="the newest N steps")
    prune.add_argument("--leftovers", action="store_true", help="also what crashed saves left")
    prune.add_argument("--yes", action="store_true", help="do it")

    doctor = _command(commands, "doctor", "what this machine lets statehold do")
    doctor.add_argument("path", metavar="PATH", nargs="?", default=".", help="where runs will lie")
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure what this storage can do")
    group = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    io = _command(group, "io", "which way of saving is fastest on a storage, and its profile")
    io.set_defaults(module="bench")
    io.add_argument("path", metavar="PATH", help="a directory on the storage of the runs")
    io.add_argument("--size", metavar="BYTES", default="1GiB", help="of the state (1GiB)")
    io.add_argument("--seconds", metavar="S", type=float, default=600.0, help="in all (600)")
    io.add_argument("--full", action="store_true", help="more levels of every factor")
    where = io.add_mutually_exclusive_group()
    where.add_argument("--profile", metavar="FILE", help="where to write the profile")
    where.add_argument("--no-profile", action="store_true", help="write none")
    io.add_argument("--out", metavar="DIR", help="records, table and plot of the study")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text.capitalize() + ".", epilog=codes.TEXT,
        formatter_class=formatter,
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON document on stdout")
    command.set_defaults(module=name)
    return command


def _add_levels(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--levels", action="store_true", help=text)
    command.add_argument("--option", metavar="KEY=VALUE", action="append", default=[],
                         help="of object stores, such as endpoint=http://127.0.0.1:9000; "
                         "credentials come from the environment")  # fmt: skip


def _add_rank(command: argparse.ArgumentParser) -> None:
    text = "as this rank saved it, where ranks have tensors or values of their own"
    command.add_argument("--rank", metavar="R", type=int, help=text)
