"""Help by what people want, examples that work, hints for typos, and completions."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statehold.cli import _INTENTS, Parser, _parser, arguments, main

Say = Callable[..., tuple[int, str]]
Ended = Callable[..., tuple[object, str, str]]


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Ended:
    """Run words that the parser ends: exit code, stdout and stderr."""

    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as left:
            main(words)
        told = capsys.readouterr()
        return left.value.code, told.out, told.err

    return run


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Parser]]:
    """Every command that can run, with its words."""
    groups = [each for each in actions_of(parser) if isinstance(each, argparse._SubParsersAction)]
    for name, command in (item for group in groups for item in group.choices.items()):
        below = list(commands(command))
        yield from [(f"{name} {more}", each) for more, each in below] or [(name, command)]


COMMANDS = dict(commands(_parser()))


def test_help_has_every_command_once_where_people_look_for_it(ended: Ended) -> None:
    code, out, err = ended("--help")
    assert (code, err) == (0, "")
    for title in _INTENTS:
        assert f"\n{title}:\n" in out
    listed = re.findall(r"^  ([a-z]+) +[a-z]", out, re.MULTILINE)
    assert sorted(listed) == sorted({name.split()[0] for name in COMMANDS})
    assert [name for names in _INTENTS.values() for name in names.split()] == listed
    assert "exit codes:" in out
    assert ended("bench", "--help")[1].count("find the fastest settings") == 1


def test_without_words_there_is_help(ended: Ended) -> None:
    code, out, _ = ended()
    assert code == 2
    assert "look at runs:" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_commands_that_parse(name: str, ended: Ended) -> None:
    code, out, _ = ended(*name.split(), "--help")
    assert code == 0
    shown = re.findall(r"^  (statehold|eval \"\$\(statehold) (.*)$", out, re.MULTILINE)
    assert shown
    for _, text in shown:
        words = shlex.split(text.partition(" >")[0].removesuffix(')"'))
        assert " ".join(words).startswith(name)
        assert arguments(words).module


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documents_have_every_option(name: str) -> None:
    page = (DOCS / "cli.md").read_text("utf-8")
    synopsis = page.partition("\n## ")[0]
    own = re.search(rf"^    statehold {name}( .*|$)(\n {{9}} .*)*", synopsis, re.MULTILINE)
    assert own
    known = page + (DOCS / "planning.md").read_text("utf-8")
    for action in actions_of(COMMANDS[name]):
        names = action.option_strings
        assert not names or any(each in known for each in names), names
        many = re.search(rf"\[{names[0]} [^ \n]*\.\.\.\]", own[0]) if names else None
        assert many is None or action.nargs == "+", names  # [--pin A]... may be given again


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verifi x", "did you mean verify?"),
        ("bench oi", "did you mean io?"),
        ("ls --jsn x", "did you mean --json?"),
        ("plan offload --paramters 7", "did you mean --parameters?"),
        ("prune x --kep 3", "there is no option --kep; did you mean --keep?"),
        ("ls x --levls=1", "did you mean --levels?"),
        ("ls a b", "nothing takes these arguments: b"),
        ("ls -x a", "nothing takes these arguments: -x"),
        ("zzz", "there is no command 'zzz'"),
    ],
)
def test_a_typo_gets_the_near_name(words: str, said: str, ended: Ended) -> None:
    code, out, err = ended(*words.split())
    assert (code, out) == (2, "")
    assert said in err
    assert re.search(r"^  help: statehold.* --help$", err, re.MULTILINE)


def test_colour_may_be_chosen_before_and_after_the_command() -> None:
    assert arguments(["ls", "x"]).color == "auto"
    assert arguments(["--color", "never", "ls", "x"]).color == "never"
    assert arguments(["ls", "x", "--color", "never"]).color == "never"
    assert arguments(["--color", "never", "ls", "x", "--color", "always"]).color == "always"


def test_the_version(ended: Ended) -> None:
    code, out, _ = ended("--version")
    assert code == 0
    assert re.fullmatch(r"statehold \d+\.\d+\.\S+\n", out)


# -- completions -----------------------------------------------------------------------------------

needs_shtab = pytest.mark.skipif(
    importlib.util.find_spec("shtab") is None, reason="needs shtab: pip install shtab"
)
IN_BASH = """
source "$1"
COMP_WORDS=(statehold bench io --si) COMP_CWORD=3
_shtab_statehold
echo "${COMPREPLY[*]}"
"""


@needs_shtab
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_understands_its_completions(shell: str, say: Say, tmp_path: Path) -> None:
    code, script = say("completions", shell)
    assert code == 0
    for name in ("verify", "coordinate", "leftovers"):
        assert name in script
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


@needs_shtab
def test_completions_in_bash(say: Say, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(say("completions", "bash")[1])
    words = ["bash", "-c", IN_BASH, "bash", str(tmp_path / "script")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "--size\n"


def test_other_shells_are_refused(say: Say) -> None:
    code, text = say("completions", "csh")
    assert code == 2
    assert "bash, zsh, fish" in text


def test_completions_without_shtab(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    code, text = say("completions", "bash")
    assert code == 2
    assert "statehold[cli]" in text
