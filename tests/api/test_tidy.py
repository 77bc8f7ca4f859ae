"""Repository lint: limits on length, and words that must not stay behind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile
from pathlib import Path, PurePath

import pytest

from support.house import facts

ROOT = Path(__file__).parents[2]
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
HEAD_LINES_MAX = 15
SECTIONS = ("Owns:", "Invariants:", "Not here:")
STILL_SEVERAL = {"src/statehold/tensors/kinds/loaders"}
BANNED = ["TODO", "FIXME", "XXX", "PLACE" + "HOLDER"]
CODE = {".py", ".pyi", ".cpp", ".h", ".sh"}


@cache
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    ours = [name for name in listed.stdout.splitlines() if "third_party" not in name]
    return [ROOT / name for name in ours if (ROOT / name).is_file()]


def test_files_are_short_and_narrow() -> None:
    problems = []
    for path in tracked():
        if path.suffix not in CODE:
            continue
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES_MAX:
            problems.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
        problems += [
            f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
            for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS_MAX
        ]
    assert not problems, "\n".join(problems)


def test_two_doors_lead_into_a_checkpointer() -> None:
    """No test calls or sets what is behind them: support/inside.py."""
    behind = re.compile(r"(?<!\bself)\._(opened\(\)|borrowed\b)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.is_relative_to(ROOT / "tests") and path.name != "inside.py"
        for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), 1)
        if behind.search(line)
    ]
    assert not found


def test_the_tests_draw_the_same_on_every_day() -> None:
    """Each source of chance has a seed, and only support/seeds.py says where it comes from."""
    unseeded = re.compile(
        r"\b(Random|default_rng)\(\)|STATEHOLD_SEED\"|\btime\(\) *(//|%)|\.today\(\)"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py" and path.name != "seeds.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unseeded.search(line) and path != Path(__file__)
    ]
    assert not found


def test_functions_are_short() -> None:
    problems = []
    for path in tracked():
        if path.suffix != ".py":
            continue
        for name, line, length in facts(path.read_text()).functions:
            if length > FUNCTION_LINES_MAX:
                problems.append(f"{path.relative_to(ROOT)}:{line} {name}: {length}")
    assert not problems, "\n".join(problems)


def test_every_source_file_opens_with_its_contract() -> None:
    problems = []
    for path in tracked():
        text = path.read_text() if path.suffix in CODE else ""
        if path.suffix == ".py" and text and not facts(text).head:
            problems.append(str(path.relative_to(ROOT)))
        if path.suffix in {".cpp", ".h"} and not text.startswith("//"):
            problems.append(str(path.relative_to(ROOT)))
    assert not problems, "\n".join(problems)


def heads() -> Iterator[tuple[PurePath, str]]:
    """The modules of the package, without a suffix, and what each says of itself at its top."""
    for path in tracked():
        if path.suffix == ".py" and path.is_relative_to(ROOT / "src"):
            head = facts(path.read_text()).head or ""
            yield path.relative_to(ROOT).with_suffix(""), head


def modules() -> set[str]:
    """Every name of a module, of a folder or of a document: the ends of their paths."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in tracked()]
    paths = [path for path in paths if path.parts[0] in {"src", "native", "docs"}]
    paths += [parent for path in paths for parent in path.parents]
    return {"/".join(path.parts[at:]) for path in paths for at in range(len(path.parts))}


def plain(head: str) -> str:
    """A head without tables and code, whose lines are indented."""
    return re.sub(r"^    .*$", "", head, flags=re.M)


def begins_again(head: str) -> list[str]:
    """Why a head is more than one contract, or a long one."""
    found = [f"{each} twice" for each in SECTIONS if len(re.findall(rf"^{each}", head, re.M)) > 1]
    has_section = re.compile(rf"^({'|'.join(SECTIONS)})", re.M).search
    paragraphs = re.split(r"\n\n(?=\S)", head)
    for each in list(dropwhile(lambda text: not has_section(text), paragraphs))[1:]:
        if not each.startswith(SECTIONS):
            found.append(f"a paragraph after the sections: {each[:40]}")
    lines = [line for line in plain(head).splitlines() if line]
    if len(lines) > HEAD_LINES_MAX:
        found.append(f"{len(lines)} lines")
    return found


def wrong_names(head: str, module: PurePath, known: set[str]) -> list[str]:
    """Modules in the brackets of a head that are not there, or that are the module itself."""
    found = []
    for number, part in enumerate(re.split(r"^Not here: ", plain(head), flags=re.M)):
        brackets = re.findall(r"\(([^()]*)\)", part)
        words = [word for each in brackets for word in re.split(r",\s+", each)]
        names = [word for word in words if re.fullmatch(r"[a-z0-9_/]+", word)]
        found += [
            name
            for name in names
            if f"/{module}".endswith(f"/{name}")
            or (name not in known and (number or "/" in name))  # before, a word may be any other
        ]
    return found


def test_a_module_opens_with_one_contract() -> None:
    """What belongs to a section of it stands below the rule; what belongs to a class, there."""
    found = [
        f"{module}: {fault}"
        for module, head in heads()
        if module.as_posix() not in STILL_SEVERAL
        for fault in begins_again(head)
    ]
    assert not found, "\n".join(found)


def test_a_head_names_modules_that_are_there() -> None:
    """A word in brackets is a module, or the end of its path: always in what is "Not here"."""
    known = modules()
    found = [f"{at}: {name}" for at, head in heads() for name in wrong_names(head, at, known)]
    assert not found, "\n".join(found)


def test_a_package_lists_modules_that_are_there() -> None:
    """The first column of a table at the top of a package names its modules, or what it exports."""
    found = []
    for module, head in heads():
        if module.name != "__init__":
            continue
        folder, source = ROOT / module.parent, (ROOT / module).with_suffix(".py").read_text()
        for row in re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  +(?=\S)", head, re.M):
            found += [
                f"{module.parent}: {name}"
                for name in row.split(", ")
                if not (folder / name).is_dir()
                and not (folder / f"{name}.py").is_file()
                and not re.search(rf'"{name}"| as {name}$', source, re.M)
            ]
    assert not found, "\n".join(found)


ONE = "A file.\n\n    a table\n\nOwns: a.\nInvariants: b.\n\nNot here: c (page)."
SEVERAL = [
    ONE.replace("Owns", "Invariants"),
    ONE.replace("Not here: c", "A second file.\n\nNot here: c"),
    ONE + "\n\nOf a table.",
    "\n".join(["A line."] * (HEAD_LINES_MAX + 1)),
]


@pytest.mark.parametrize("head", SEVERAL)
def test_a_head_of_several_files_is_found(head: str) -> None:
    assert not begins_again(ONE)
    assert begins_again(head)


@pytest.mark.parametrize("word", ["store", "cli/pages", "steps/page"])
def test_a_wrong_name_is_found(word: str) -> None:
    at, known = PurePath("src/statehold/steps/store"), {"page", "cli/page", "store", "steps/store"}
    assert not wrong_names(ONE, at, known)
    assert wrong_names(ONE.replace("page", word), at, known)


def test_nothing_was_left_behind() -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        if path.suffix in CODE | {".md", ".toml"} and path != Path(__file__)
        for word in re.findall(rf"\b({'|'.join(BANNED)})\b", path.read_text())
    ]
    assert not problems, "\n".join(problems)


def test_digits_are_those_of_ascii() -> None:
    """In a text, the class of digits of `re` and int() also take those of other scripts."""
    found = [
        f"{path.name}:{at}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if "\\d" in line or re.search(r"type=(int|float)\b", line)
    ]
    assert found == []
