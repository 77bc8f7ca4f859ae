"""The command `statehold`: inspects, verifies, compares and prunes runs (docs/cli.md).

Owns: arguments, the choice of a command, and the handling of errors: a message on stderr and an
exit code; the form of `--help`, and of errors about arguments.
Invariants: nothing here imports torch. Only code that needs numbers imports NumPy. A command's
module is imported only when the command runs. Help goes to stdout and exits with 0. An error goes
to stderr; one about arguments exits with 2.
Not here: what a command does (one module each), the form of output (output).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from statehold._version import __version__
from statehold.cli import codes, output, terminal
from statehold.errors import StateholdError, UsageError

# -- the command -----------------------------------------------------------------------------------


__all__ = ["main"]

_STEP_HELP = (
    "RUN, RUN@STEP (a number or 'newest', the default), RUN@best:METRIC, RUN@tag:TAG, or the "
    "directory of a step"
)
FORMATS = ("hf", "torch", "dcp", "deepspeed-universal")
_INTENTS = {
    "look at runs": "ls show tree du catalog report",
    "check and compare": "verify diff doctor",
    "change runs": "prune fork copy free",
    "exchange with other libraries": "export import",
    "measure and plan": "bench plan",
    "train with replicas": "coordinate",
    "serve": "kv",
    "set up the shell": "completions",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        try:
            return _run(arguments(argv))
        finally:
            output.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return codes.CLOSED_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        output.error(f"{where}{error.strerror or error}")
        return codes.FAILED
    except KeyboardInterrupt:
        output.error("interrupted")
        return codes.INTERRUPTED


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command."""
    words, parser = sys.argv[1:] if argv is None else argv, _parser()
    if not words:
        parser.print_help()
        raise SystemExit(codes.USAGE)
    args: argparse.Namespace
    args, left_over = parser.parse_known_args(words)
    if left_over:
        args.parser.refuse_left_over(left_over)
    return args


def _run(args: argparse.Namespace) -> int:
    name = args.parser.prog.partition(" ")[2]  # without "statehold"
    try:
        command = importlib.import_module(f"statehold.cli.{args.module}")
        terminal.choose_color(args.color)
        if getattr(args, "option", None) and not args.levels:
            raise UsageError("--option is only for object stores", hint="pass --levels, too")
        with output.busy(name):
            return int(getattr(command, args.call)(args))
    except ModuleNotFoundError as error:
        if error.name != "torch":  # commands without it say so themselves
            raise
        hint = "pip install torch; ls, show, verify, diff, prune and doctor do not need it"
        output.error(UsageError(f"{name} needs PyTorch, which is missing", hint=hint))
        return codes.USAGE
    except StateholdError as error:
        output.error(error)
        return codes.code_of(error)


def _parser() -> Parser:
    parser = Parser(
        prog="statehold",
        description="Look at checkpoints, verify, compare, move and prune them.",
        epilog=codes.TEXT,
        intents=_INTENTS,
    )
    parser.add_argument("--version", action="version", version=f"statehold {__version__}")
    _add_color(parser, "auto")
    commands = parser.add_commands()
    for add in (_add_looking, _add_checking, _add_report, _add_prune, _add_families, _add_copies,
                _add_free, _add_transfers, _add_bench, _add_plan, _add_coordinate,
                _add_kv):  # fmt: skip
        add(commands)
    _add_completions(parser, commands)
    return parser


def _add_looking(commands: Any) -> None:
    ls = _command(
        commands, "ls", "list the steps of a run and its other files",
        "statehold ls runs/llama", "statehold ls runs/llama --levels --json",
    )  # fmt: skip
    ls.add_argument("run", metavar="RUN", help="a run directory")
    _add_levels(ls, "also list the other levels of the run, including object stores")

    show = _command(
        commands, "show", "show the contents of a step, or one tensor or value",
        "statehold show runs/llama@1000", "statehold show runs/llama model.embed.weight",
        "statehold show runs/llama epoch", "statehold show runs/llama --values --rank 3",
    )  # fmt: skip
    show.add_argument("step", metavar="RUN[@STEP]", help=_STEP_HELP)
    show.add_argument("tensor", metavar="NAME", nargs="?", help="one tensor with statistics (needs "
                      "NumPy), a value, or a prefix or pattern: 'model.*.bias'")  # fmt: skip
    show.add_argument("--values", action="store_true", help="also show the plain values")
    _add_rank(show)


def _add_checking(commands: Any) -> None:
    verify = _command(
        commands, "verify", "read every byte of a step and check it",
        "statehold verify runs/llama@1000", "statehold verify runs/llama --all --levels",
    )  # fmt: skip
    verify.add_argument("step", metavar="RUN[@STEP]", help=_STEP_HELP)
    verify.add_argument("--all", action="store_true", help="verify all steps of the run")
    _add_levels(verify, "verify every copy at all levels; this downloads those in object stores")

    diff = _command(
        commands, "diff", "show which tensors and values of two steps differ, and by how much",
        "statehold diff runs/llama@1000 @2000", "statehold diff runs/a runs/b",
    )  # fmt: skip
    diff.add_argument("a", metavar="A", help=_STEP_HELP)
    diff.add_argument("b", metavar="B", help="the same, or @STEP for a step of the run of A")
    diff.add_argument("tensor", metavar="NAME", nargs="?",
                      help="only this one, or a prefix or pattern: 'model.*.bias'")  # fmt: skip
    _add_rank(diff)

    doctor = _command(
        commands, "doctor", "show what works on this machine", "statehold doctor /nvme/runs",
    )  # fmt: skip
    doctor.add_argument("path", metavar="PATH", nargs="?", default=".", help="a directory of runs")


def _add_report(commands: Any) -> None:
    report = _command(
        commands, "report", "write a page about a run, or about a store of KV pages",
        "statehold report runs/llama -o report.html",
        "statehold report runs/llama -o report.html --trace trace-*.json --verify",
    )  # fmt: skip
    report.add_argument("run", metavar="RUN|STORE", help="a run directory, or that of a PageStore")
    report.add_argument("-o", "--output", metavar="FILE", help="the page; needed without --json")
    report.add_argument("--trace", metavar="FILE", nargs="+", default=[], action="extend",
                        help="what Checkpointer(..., trace=FILE) wrote, one a rank")  # fmt: skip
    report.add_argument("--limit", metavar="BYTES", help='bytes per second, such as "7.9 GB": draw '
                        "this limit of the storage next to the rates of the saves")  # fmt: skip
    report.add_argument("--verify", action="store_true", help="read and check every step")
    _add_levels(report, "also read object stores; other levels are always read")


def _add_prune(commands: Any) -> None:
    prune = _command(
        commands, "prune", "delete old steps; without --yes, only list them",
        "statehold prune runs/llama --keep 3", "statehold prune runs/llama --keep 3 --yes",
    )  # fmt: skip
    prune.add_argument("run", metavar="RUN", help="a run directory that no job saves into")
    prune.add_argument("--keep", metavar="N", type=whole, required=True, help="keep N newest steps")
    prune.add_argument("--every", metavar="N", type=whole,
                       help="also keep the first step at or after each multiple of N")  # fmt: skip
    prune.add_argument("--best", metavar="N", type=whole, default=0,
                       help="also keep the N steps with the smallest --metric")  # fmt: skip
    prune.add_argument("--metric", metavar="NAME", help="a metric that save() got")
    prune.add_argument("--max", action="store_true", help="the greatest --metric is the best")
    prune.add_argument("--pin", metavar="STEP|TAG", action="append", default=[],
                       help="also keep this step, or this tag; may be given again")  # fmt: skip
    prune.add_argument("--leftovers", action="store_true", help="also delete leftovers of crashes")
    prune.add_argument("--yes", action="store_true", help="do it")


def _add_families(commands: Any) -> None:
    fork = _command(
        commands, "fork", "begin a new run from a step of another, without a copy",
        "statehold fork runs/base@1000 runs/child", module="transfer", call="fork",
    )  # fmt: skip
    fork.add_argument("step", metavar="BASE[@STEP]", help=_STEP_HELP)
    fork.add_argument("child", metavar="CHILD", help="the directory of the new run")
    tree = _command(
        commands, "tree", "draw how runs descend, and what they share", "statehold tree runs",
    )  # fmt: skip
    tree.add_argument("directory", metavar="DIR", nargs="?", default=".", help="with runs below it")
    catalog = _command(
        commands, "catalog", "list the steps below a directory for nearest relatives",
        "statehold catalog runs", module="tree", call="catalog",
    )  # fmt: skip
    catalog.add_argument("directory", metavar="DIR", help="the runs below it are read")
    catalog.add_argument("--file", metavar="FILE", help="the catalogue, if it is not in DIR")
    catalog.add_argument("--rebuild", action="store_true", help="make it again from nothing")
    du = _command(
        commands, "du", "show what steps take on storage and share", "statehold du runs/llama",
        module="tree", call="du",
    )  # fmt: skip
    du.add_argument("run", metavar="RUN", help="a run directory")


def _add_copies(commands: Any) -> None:
    copy = _command(
        commands, "copy", "copy a step into another directory, verified",
        "statehold copy runs/llama@1000 /archive/llama", module="transfer", call="copy",
    )  # fmt: skip
    copy.add_argument("step", metavar="RUN[@STEP]", help=_STEP_HELP)
    copy.add_argument("destination", metavar="DST", help="a run, or a directory that is to be one")
    copy.add_argument("--no-links", action="store_true", help="also copy what could be linked")


def _add_free(commands: Any) -> None:
    free = _command(
        commands, "free", "free the memory levels of a run; without --yes, only show",
        "statehold free runs/llama", "statehold free runs/llama --yes",
    )  # fmt: skip
    free.add_argument("run", metavar="RUN", help="a run directory, even if it is gone")
    free.add_argument("--yes", action="store_true", help="do it")
    free.add_argument("--force", action="store_true", help="also take it from an agent, and delete "
                      "steps that are nowhere else")  # fmt: skip
    _add_levels(free, "also ask object stores which steps they have")


def _add_transfers(commands: Any) -> None:
    out = _command(
        commands, "export", "write a step as a checkpoint of another library",
        "statehold export runs/llama@1000 model --to hf",
        "statehold export runs/llama checkpoint --to dcp", module="transfer", is_export=True,
    )  # fmt: skip
    out.add_argument("step", metavar="RUN[@STEP]", help=_STEP_HELP)
    out.add_argument("destination", metavar="DST", help="a path that does not exist")
    out.add_argument("--to", metavar="FORMAT", required=True, help=" or ".join(FORMATS),
                     choices=FORMATS)  # fmt: skip
    out.add_argument("--name", metavar="NAME", help="the part of the state (hf: model; else all)")
    out.add_argument("--config", metavar="DIR",
                     help="hf: also copy config.json and the tokenizer of this model")  # fmt: skip
    into = _command(
        commands, "import", "make a checkpoint of another library a step of a run",
        "statehold import pytorch_model.bin runs/llama@0 --name model", module="transfer",
        is_export=False,
    )  # fmt: skip
    into.add_argument("source", metavar="SRC", help="a file or a directory")
    into.add_argument("step", metavar="RUN@STEP", help="the new step, with a number")
    into.add_argument("--name", metavar="NAME", help="put it below this name (safetensors: model)")
    into.add_argument("--skip", metavar="NAME", action="append",
                      help="leave this out, such as args; may be given again")  # fmt: skip


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure what this storage can do")
    group = bench.add_commands()
    io = _command(
        group, "io", "find the fastest settings for a storage and write its profile",
        "statehold bench io /nvme/runs", "statehold bench io /nvme/runs --size 8GiB --seconds 300",
        module="bench",
    )  # fmt: skip
    io.add_argument("path", metavar="PATH", help="a directory on the storage of the runs")
    io.add_argument("--size", metavar="BYTES", default="1GiB", help="the size of the state (1GiB)")
    io.add_argument("--seconds", metavar="S", type=number, default=600.0, help="in all (600)")
    io.add_argument("--full", action="store_true", help="measure more values of every setting")
    where = io.add_mutually_exclusive_group()
    where.add_argument("--profile", metavar="FILE", help="where to write the profile")
    where.add_argument("--no-profile", action="store_true", help="write none")
    io.add_argument("--out", metavar="DIR", help="the directory for the records and the table")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="compute what a design costs, without running it")
    group = plan.add_commands()
    offload = _command(
        group, "offload", "predict the time of an update of offloaded optimizer state",
        "statehold plan offload --parameters 7e9 --memory 64GiB --path /nvme0=6.5GB,4GB",
        module="plan",
    )  # fmt: skip
    _add_options(
        offload,
        ("parameters", "N", str, _NEEDED, "of one rank, such as 7e9"),
        ("memory", "BYTES", str, _NEEDED, "host memory for gradients and state"),
        ("rate", "N", str, "1e9", "parameters that the host updates in a second (1e9)"),
        ("device-rate", "N", str, None, "the same of a device"),
        ("device-link", "BYTES", str, None, "what the link to it moves one way in a second"),
        ("subgroup", "BYTES", str, None, "instead of the size that it chooses"),
    )  # fmt: skip
    offload.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16",
                         help="of the parameters (bf16)")  # fmt: skip
    offload.add_argument("--path", metavar="DIR[=READ,WRITE]", action="append", default=[],
                         help='a path, with its rates such as "6GB,4GB" a second; without them, '
                         "those of its profile (bench io)")  # fmt: skip
    offload.add_argument("--full-duplex", action="store_true", help="paths do both at full rate")
    _add_plan_resilience(group)
    _add_plan_serving(group)
    _add_plan_lowrank(group)


# Of an option that has no default: it must be given.
_NEEDED: Any = object()


def _add_plan_resilience(group: Any) -> None:
    found = _command(
        group, "resilience", "choose redundancy, interval and spares under failures",
        "statehold plan resilience --replicas 64 --mtbf 3600 --save-seconds 5",
        module="plan_resilience",
    )  # fmt: skip
    _add_options(
        found,
        ("replicas", "N", whole, _NEEDED, "of the job"),
        ("mtbf", "S", number, None, "between two losses of a replica, in the whole job"),
        ("trace", "FILE", str, None, "failures, instead of --mtbf (docs/planning.md)"),
        ("shape", "K", number, 1.0, "of the Weibull clocks of nodes, as 0.78 (1: exponential)"),
        ("nodes", "N", whole, 1, "clocks of a replica (1)"),
        ("seed", "N", whole, 0, "of the failures (0)"),
        ("save-seconds", "S", number, _NEEDED, "how long a checkpoint stops the training"),
        ("restart-seconds", "S", number, 600.0, "until all train again from a checkpoint (600)"),
        ("repair-seconds", "S", number, math.inf, "until a machine is back (with a restart)"),
        ("step-seconds", "S", number, 60.0, "of a step (60)"),
        ("reduce-seconds", "S", number, 2.0, "of them, to reduce (2)"),
        ("steps", "N", whole, 2000, "to simulate (2000)"),
        ("microbatches", "N", whole, None, "of a step (4 for each replica)"),
        ("min-replicas", "N", whole, None, "with fewer the job restarts (half)"),
        ("plot", "FILE", str, None, "draw where the time goes (matplotlib)"),
    )  # fmt: skip
    found.add_argument("--policy", action="append", help="only this one, or these",
                       choices=("restart", "drop", "quota", "stacked", "exact"))  # fmt: skip


def _add_plan_serving(group: Any) -> None:
    found = _command(
        group, "serving", "choose a layout and a concurrency for serving a model",
        "statehold plan serving --config config.json --gpu h200 --gpus 8 --store /nvme=6GB",
        module="plan_serving",
    )  # fmt: skip
    _add_options(
        found,
        ("config", "FILE", str, _NEEDED, "the config.json of the model"),
        ("gpu", "GPU", str, _NEEDED, "a name such as h200, or its data sheet (docs/planning.md)"),
        ("gpus", "N", whole, _NEEDED, "how many there are"),
        ("trace", "FILE", str, None, "requests, instead of drawn ones (docs/planning.md)"),
        ("requests", "N", whole, 512, "how many to draw (512)"),
        ("prompt", "N", number, 512, "tokens of a prompt, the mean (512)"),
        ("answer", "N", number, 4096, "tokens of an answer, the mean (4096)"),
        ("rate", "N", number, math.inf, "requests in a second (all at once)"),
        ("seed", "N", whole, 0, "of the requests (0)"),
        ("store", "DIR[=BYTES]", str, None, "where pages survive, and what it reads in a second"),
        ("kv-dtype", "TYPE", str, None, "of keys and values (that of the model)"),
        ("utilization", "SHARE", number, 0.9, "of the memory of a device (0.9)"),
    )  # fmt: skip
    for name, kind, metavar in (("layout", str, "DPxTPxPP"), ("concurrency", whole, "N")):
        found.add_argument(f"--{name}", action="append", type=kind, default=[], metavar=metavar,
                           help="only this one; any number of them (all that fit)")  # fmt: skip


def _add_plan_lowrank(group: Any) -> None:
    found = _command(
        group, "lowrank", "compare a Llama of low-rank pairs with one of linear layers",
        "statehold plan lowrank --config config.json --rank 512", "statehold plan lowrank --config "
        "config.json --tp 4 --device flops=2.8e14,memory=900GB,link=280GB",
        module="plan_lowrank",
    )  # fmt: skip
    _add_options(
        found,
        ("config", "FILE", str, _NEEDED, "the config.json of the model"),
        ("rank", "R", whole, None, "of the pairs (a quarter of the width, if it fits)"),
        ("device", "RATES", str, None, "what a device reaches, for times (docs/lowrank.md)"),
        ("tokens", "N", whole, 16384, "of a step (16384)"),
        ("length", "N", whole, 4096, "tokens of a sequence (4096)"),
        ("tp", "N", whole, 1, "ranks that share each layer (1)"),
        ("pp", "N", whole, 1, "stages of a pipeline (1)"),
        ("microbatches", "N", whole, 4, "of a step (4)"),
    )  # fmt: skip
    found.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16",
                       help="of weights, moments and activations (bf16)")  # fmt: skip


def _add_options(command: Parser, *rows: tuple[str, str, Any, Any, str]) -> None:
    """Options with a name, a metavar, a type, a default and a help."""
    for name, metavar, kind, default, text in rows:
        given = {"required": True} if default is _NEEDED else {"default": default}
        command.add_argument(f"--{name}", metavar=metavar, type=kind, help=text, **given)


def _add_coordinate(commands: Any) -> None:
    coordinate = _command(
        commands, "coordinate", "be the place where the replicas of a job meet",
        "statehold coordinate --port 29400 --replicas 8",
    )  # fmt: skip
    _add_options(
        coordinate,
        ("port", "PORT", whole, _NEEDED, "listen here; 0 takes a free port and prints it"),
        ("host", "HOST", str, "", "listen on this address only (all of this machine)"),
        ("replicas", "N", whole, None, "begin as soon as so many replicas are here"),
        ("settle", "S", number, 5.0, "begin with fewer when none has come for so long (5)"),
    )  # fmt: skip
    coordinate.add_argument("--once", action="store_true", help="end when the job has ended")


def _add_kv(commands: Any) -> None:
    group = commands.add_parser("kv", help="look at stores of KV pages, and prune").add_commands()
    for action, module, text in (
        ("ls", "kv", "count the pages of a store, by identity"),
        ("verify", "kv", "read every page of a store and check it"),
        ("prune", "prune", "let pages of a store go; without --yes, only count them"),
        ("serve-stats", "report", "show what the processes of a store have counted"),
    ):
        example = f"statehold kv {action} /nvme/pages" + " --older-than 7d" * (action == "prune")
        command = _command(group, action, text, example, module=module, action=action)
        command.add_argument("store", metavar="STORE", help="the directory of a PageStore")
        if action == "prune":
            command.add_argument("--identity", metavar="HEX", action="append", default=[],
                                 help="only pages of this one; may be given again")  # fmt: skip
            _add_options(
                command,
                ("older-than", "AGE", str, None, "only pages that nobody used for so long"),
                ("to", "BYTES", str, None, "only until the others take so much of the files"),
            )
            command.add_argument("--yes", action="store_true", help="do it")
        if action == "serve-stats":
            command.add_argument("--follow", action="store_true",
                                 help="then show each second what was added")  # fmt: skip


def _add_completions(parser: Parser, commands: Any) -> None:
    found = _command(
        commands, "completions", "print what makes a shell complete commands and options",
        'eval "$(statehold completions bash)"',
        "statehold completions zsh > ~/.zfunc/_statehold",
        "statehold completions fish > ~/.config/fish/completions/statehold.fish", whole=parser,
    )  # fmt: skip
    found.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")


def _command(commands: Any, name: str, text: str, *examples: str, **defaults: Any) -> Parser:
    command: Parser = commands.add_parser(
        name, help=text, description=text[:1].upper() + text[1:] + ".", epilog=epilog(examples)
    )
    command.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    _add_color(command, argparse.SUPPRESS)
    command.set_defaults(**{"module": name, "call": "run", "parser": command, **defaults})
    return command


def _add_color(parser: Parser, default: str) -> None:
    parser.add_argument("--color", metavar="WHEN", choices=terminal.CHOICES, default=default,
                        help="auto, always or never: colour the output")  # fmt: skip


def _add_levels(command: Parser, text: str) -> None:
    command.add_argument("--levels", action="store_true", help=text)
    command.add_argument("--option", metavar="KEY=VALUE", action="append", default=[],
                         help="of the object stores, such as endpoint=http://127.0.0.1:9000; "
                         "credentials come from the environment")  # fmt: skip


def _add_rank(command: Parser) -> None:
    text = "show the tensors and values that this rank saved for itself"
    command.add_argument("--rank", metavar="R", type=whole, help=text)


# -- arguments -------------------------------------------------------------------------------------
# The help of a parser leads: commands by what people want, examples, and near names for typos.

_NAME_COLUMNS = 16


def whole(text: str) -> int:
    """A whole number of an option. Only ASCII: int() also takes "1_000" and other scripts."""
    if not re.fullmatch("-?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"not a whole number of up to 18 digits: {text!a}")
    return int(text)


def number(text: str) -> float:
    """A number of an option, with or without a fraction."""
    if not re.fullmatch(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|-?inf|nan", text):
        raise argparse.ArgumentTypeError(f"not a number: {text!a}")
    return float(text)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser. intents: {what people want: names of commands}, in the order of the help.

    Commands that no intent names stand under "more".
    """

    def __init__(self, *args: Any, intents: dict[str, str] | None = None, **more: Any) -> None:
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **more)
        self._intents = {title: names.split() for title, names in (intents or {}).items()}
        self._words: list[str] = []
        self._commands: argparse._SubParsersAction[Any] | None = None

    def add_commands(self) -> Any:
        """The action whose add_parser() adds a command."""
        made = self.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
        self._commands = made
        return made

    # -- help ------------------------------------------------------------------------------

    def format_help(self) -> str:
        """Like that of argparse, but with commands by intent."""
        if self._commands is None:
            return super().format_help()
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=_NAME_COLUMNS)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in self._by_intent(self._commands._choices_actions):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(each for each in self._actions if each is not self._commands)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _by_intent(
        self, actions: Sequence[argparse.Action]
    ) -> Iterator[tuple[str, list[argparse.Action]]]:
        left = {each.dest: each for each in actions}
        for title, names in self._intents.items():
            yield title, [left.pop(name) for name in names if name in left]
        yield "more" if self._intents else "commands", list(left.values())

    # -- errors ----------------------------------------------------------------------------

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; remembers the words, for hints."""
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action is self._commands and value not in self._commands.choices:
            self._refuse(
                f"there is no command {value!r}", _near(value, list(self._commands.choices))
            )
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong, and with the options that may have been meant."""
        unknown = [f"there is no option {name}" + (f"; {near}" if near else "")
                   for name, near in self._unknown()]  # fmt: skip
        self._refuse(message, *unknown)

    def refuse_left_over(self, words: Sequence[str]) -> NoReturn:
        """Exit because nothing takes these words."""
        for name, near in self._unknown():
            self._refuse(f"there is no option {name}", near)
        self._refuse(f"nothing takes these arguments: {' '.join(words)}")

    def _refuse(self, message: str, *hints: str) -> NoReturn:
        lines = [f"hint: {hint}" for hint in hints if hint]
        output.error("\n  ".join([message, *lines, f"help: {self.prog} --help"]))
        raise SystemExit(codes.USAGE)

    def _unknown(self) -> Iterator[tuple[str, str]]:
        """Words that look like long options but do not exist, and what may have been meant."""
        known = list(self._option_string_actions)
        for word in self._words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if word.startswith("--") and not any(each.startswith(name) for each in known):
                yield name, _near(name, known)


def _near(word: str, known: Sequence[str]) -> str:
    """A hint with the nearest name; "" if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def epilog(examples: Sequence[str]) -> str:
    """What stands below the options of a command."""
    lines = "".join(f"  {each}\n" for each in examples)
    return (f"examples:\n{lines}\n" if examples else "") + codes.TEXT
