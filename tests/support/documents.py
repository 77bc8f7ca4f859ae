"""The blocks of code in a Markdown document, with the heading that they stand under.

A block is fenced by ``` or indented by four columns after an empty line. `language` is what follows
the fence, "" for none; of an indented block it is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Block:
    path: Path
    line: int  # of its first line of code, from 1
    heading: str
    language: str | None
    code: str

    @property
    def is_python(self) -> bool:
        return self.language == "python"

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    lines = path.read_text().splitlines()
    heading, at, is_text = "", 0, False
    while at < len(lines):
        line, begin = lines[at], at
        at += 1
        if line.startswith("```"):
            while at < len(lines) and not lines[at].startswith("```"):
                at += 1
            code = "\n".join(lines[begin + 1 : at]) + "\n"
            yield Block(path, begin + 2, heading, line[3:].strip(), code)
            at += 1
        elif line.startswith("    ") and not is_text:
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            code = "\n".join(each[4:] for each in lines[begin:at]).rstrip() + "\n"
            yield Block(path, begin + 1, heading, None, code)
        elif found := re.match(r"#+ (.*)", line):
            heading = found[1]
        # What is indented below a line of text goes on with it: the items of lists.
        is_text = bool(line.strip()) and not line.startswith(("#", "```"))


def docstring_block(path: Path) -> Block:
    """The indented block of the docstring that a module begins with, as Python."""
    text = re.match(r'"""(.*?)"""', path.read_text(), re.DOTALL)
    if text is None:
        raise ValueError(f"{path} has no docstring")
    found = re.search(r"\n\n((?:    .*\n|\n)+)", text[1])
    if found is None:
        raise ValueError(f"the docstring of {path} has no block")
    line = text[1][: found.start(1)].count("\n") + 1
    code = "\n".join(each[4:] for each in found[1].rstrip().splitlines()) + "\n"
    return Block(path, line, "", "python", code)
