"""Plain English: a few habits that make sentences hard to parse, found mechanically.

The sentences are those of the documents, and the docstrings, comments and texts of the Python code
in DONE. No line can be exempted: rewrite the sentence.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DOCUMENTS = [
    "README.md",
    "HACKING.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "STYLE.md",
    "bench/README.md",
    "native/README.md",
    "docs/cli.md",
    "docs/cluster.md",
    "docs/comparison.md",
    "docs/dcp.md",
    "docs/durability.md",
    "docs/failures.md",
    "docs/faq.md",
    "docs/format.md",
    "docs/glossary.md",
    "docs/guide.md",
    "docs/in_and_out.md",
    "docs/incremental.md",
    "docs/index.md",
    "docs/integrations.md",
    "docs/io_study.md",
    "docs/migrating.md",
    "docs/offload.md",
    "docs/reference.md",
    "docs/resilience.md",
    "docs/tutorial.md",
    "docs/versioning.md",
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/decisions/*.md"))),
]
DONE = [
    "bench",
    "examples",
    *(
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("src/statehold/*"))
        if path.suffix == ".py" or (path.is_dir() and path.name not in ("__pycache__", "tensors"))
    ),
]

WORDS_MAX = 40
SEMICOLONS_MAX = 2

_BEGIN = r"(?:^|(?<=[.!?:] ))"  # of a sentence
HABITS = {
    "say who does it": r"\b(is|are|was|were|be|been) (told|said) ?(of|once|so)?\b",
    "say what of what": r"\bof (which|whom)(?=[.;:?]|$)",
    "say what it is not": r"\b(what (is|has|are|have) (no|none)|(?<!there )(is|are) none)\b",
    'write "Invariants:"': r"\bHolds:|What holds:",
    "begin with a noun": _BEGIN + r"(Such an? |One (that|of which) |That (which|of) |Those that )",
    "put the subject first": _BEGIN + r"(So (is|are|does|do) |Nor )",
    'write "because"': r", for (it|they|he|there|this|that|its|their|nothing|nobody) ",
    'write "unreachable", "gone" or "absent"': r"\b(is|are|was|were|be) away\b",
    "name who it is": r"\b[Ww]hoever\b",
    'write "in addition to"': r"\bbesides\b",
    'write "again"': r"\banew\b",
}

Text = tuple[int, str]  # the first line of a paragraph, and its words


def paragraphs(text: str, line: int = 1) -> Iterator[Text]:
    """The paragraphs of prose: list items, table cells and fields are paragraphs of their own.
    Code, which is indented or fenced, is left out."""
    words: list[str] = []
    begin, is_fenced = line, False
    for number, each in enumerate([*text.splitlines(), ""], line):
        is_fence = each.lstrip().startswith("```")
        starts = re.match(
            r"\s*([-*#>|] ?|\d+\.? )|\s*$|(Invariants|Not here|Owns|Facts): |[a-z_][\w, /=.]*: ",
            each,
        )
        if (starts or is_fence or is_fenced or each.startswith("    ")) and words:
            yield begin, " ".join(words)
            words = []
        is_fenced ^= is_fence
        if is_fence or is_fenced or each.startswith(("    ", "|--")):
            continue
        if each.startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", each))
        elif each.strip():
            begin = begin if words else number
            words.append(each.strip().lstrip("-*#> "))


def sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", paragraph))
    return re.split(r"(?<=[.!?])[)*\"]*\s+", plain)


def problems(paragraph: str) -> Iterator[str]:
    for what, habit in HABITS.items():
        if found := re.search(habit, paragraph):
            yield f"{what}: {found[0].strip()!r}"
    if paragraph.count(";") > SEMICOLONS_MAX:
        yield f"{paragraph.count(';')} semicolons in a paragraph: {paragraph[:60]!r}"
    for sentence in sentences(paragraph):
        if (words := len(sentence.split())) > WORDS_MAX:
            yield f"{words} words in a sentence: {sentence[:60]!r}"


def prose_of_code(path: Path) -> Iterator[Text]:
    """Docstrings, comments, and every other string of one line that has spaces in it."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "\n" in node.value:
                yield from paragraphs(inspect.cleandoc(node.value), node.lineno)
            elif " " in node.value:
                yield node.lineno, node.value
    yield from comments(source)


# A "#" in a string begins no comment. The module tokenize says the same, in twenty times the time.
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}'''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)""",
    re.DOTALL,
)


def comments(source: str) -> Iterator[Text]:
    words: list[str] = []
    begin = end = at = 0
    line = 1
    for found in STRING_OR_COMMENT.finditer(source):
        if found[1] is None:
            continue
        line += source.count("\n", at, found.start())
        at = found.start()
        is_alone = not source[source.rfind("\n", 0, at) + 1 : at].strip()
        if words and (line != end + 1 or not is_alone):
            yield begin, " ".join(words)
            words = []
        begin = begin if words else line
        end = line
        words.append(found[1].lstrip("# "))
    if words:
        yield begin, " ".join(words)


def checked(names: list[str]) -> list[Path]:
    found = [ROOT / name for name in names]
    return sorted(
        file for each in found for file in ([each] if each.is_file() else each.rglob("*.py"))
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_plain(name: str) -> None:
    text = (ROOT / name).read_text()
    found = [
        f"{name}:{line}: {each}" for line, words in paragraphs(text) for each in problems(words)
    ]
    assert not found, "\n".join(found)


def test_code_speaks_plainly() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {each}"
        for path in checked(DONE)
        for line, words in prose_of_code(path)
        for each in problems(words)
    ]
    assert not found, "\n".join(found)


BAD = [
    "A path on a disk is told of.",
    "The error names the steps of which.",
    "It cannot lock what is no regular file.",
    "Holds: nothing is lost.",
    "Nothing is lost. Such a step is kept.",
    "A level rests. One that failed rests longer.",
    "A level rests. So is its thread.",
    "It is refused, for it is no memory.",
    "A level that is away gets no saves.",
    "Whoever saves pays.",
    "a; b; c; d",
    "word " * (WORDS_MAX + 1),
]


@pytest.mark.parametrize("text", BAD)
def test_each_habit_is_found(text: str) -> None:
    assert list(problems(text))


def test_code_is_not_prose() -> None:
    text = "Plain words.\n\n    Such a; b; c; d\n\n```\nHolds:\n```\n- One item.\n| a | A cell |\n"
    read = [words for _, words in paragraphs(text)]
    assert read == ["Plain words.", "One item.", "", "a", "A cell", ""]


def test_comments_are_read_as_they_stand() -> None:
    text = '# One,\n# and more.\nx = \'#1\'  # Two.\n"""\n# a text\n"""\n# Three.\n\n# Four.\n'
    read = [(1, "One, and more."), (3, "Two."), (7, "Three."), (9, "Four.")]
    assert list(comments(text)) == read
