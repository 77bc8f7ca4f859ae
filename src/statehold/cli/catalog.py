"""`statehold catalog DIR`: brings the catalogue of the runs below a directory up to date.

Not here: what is in it (lineage/catalog), who asks it (lineage/relatives).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from statehold.cli import codes
from statehold.cli.output import emit, note, say
from statehold.lineage.catalog import Catalog
from statehold.reading.places import NotFoundError, directory_of


def run(args: argparse.Namespace) -> int:
    if not os.path.isdir(directory_of(args.directory)):
        raise NotFoundError("no such directory", facts={"directory": args.directory})
    catalog = Catalog(args.directory, args.file)
    found = catalog.rebuild() if args.rebuild else catalog.scan()
    if args.json:
        emit({"file": catalog.file, **asdict(found)})
    else:
        say(
            f"{found.steps} steps of {found.runs} runs, with {found.graphs} different graphs; "
            f"{found.read} manifests read, {found.gone} steps gone"
        )
        for each in found.unreadable:
            note(f"unreadable: {each}")
    return codes.NO if found.unreadable else codes.YES
