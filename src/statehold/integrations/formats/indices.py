"""Directories of shards with an index, as Hugging Face writes them.

Invariants: a file that the index names is there, and no name of the index leads out of the
directory.
"""

from __future__ import annotations

import json
import os

from statehold.errors import CorruptionError, MissingFileError


def indexed(directory: str, index_name: str, suffix: str) -> tuple[list[str], dict[str, str]]:
    """The files of a directory, and its index: which name is in which file, if it has one."""
    path = os.path.join(directory, index_name)
    if not os.path.exists(path):
        names = sorted(name for name in os.listdir(directory) if name.endswith(suffix))
        return [os.path.join(directory, name) for name in names], {}
    try:
        with open(path, encoding="utf-8") as file:
            index = {str(key): str(name) for key, name in json.load(file)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        facts = {"file": path, "expected": 'JSON with a "weight_map"', "cause": repr(fault)[:200]}
        raise CorruptionError("the index of a checkpoint cannot be read", facts=facts) from fault
    files = sorted({os.path.join(directory, os.path.basename(name)) for name in index.values()})
    for each in files:
        if not os.path.isfile(each):
            raise MissingFileError("a checkpoint lacks a file", facts={"file": each})
    return files, index
