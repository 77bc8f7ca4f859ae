"""From the records of the ranks to a summary, a text table and a plot.

Invariants: a save is blocked, durable, a restore done, when the last rank is; clocks of one machine
are compared. Rates are bytes of the whole state over that, beside the limits of the same run: of
one process (fio or raw mode, the better) and of the raw mode in four processes at once. Restores
are compared with the same library's restore into the layout that was saved, of the same round. No
path of this machine gets into a report.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bench.harness import GB, median, spread
from bench.ranks.peers import TITLES
from bench.report import (
    Column,
    Record,
    Row,
    limits_of,
    number,
    percent,
    ratio,
    save_files,
    spread_text,
    table,
)
from bench.train import NO_SAVES

SAME = ("fsdp-4", "fsdp-4")


def command(options: argparse.Namespace) -> str:
    """The command, without the paths in it."""
    shown = [
        f"--{key.replace('_', '-')} {value}"
        for key, value in _plain(options).items()
        if key not in ("smoke", "peers", "pairs") and value is not None
    ]
    return " ".join(["python -m bench.ranks", *["--smoke"] * options.smoke, *shown])


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("dir", "out")}


def progress_line(record: Record) -> str:
    task = record["task"]
    what = f"{task['source']} -> {task['layout']}" if task["source"] else task["layout"]
    label = f"{task['kind']:8}{task['peer']:22}{what:22}round {task['repetition']}"
    if record["status"] != "ok":
        return f"{label}  {record['status']}: {record['reason'][:300]}"
    return f"{label}  {record['job_s']:.1f} s"


def summarise(records: list[Record], limits: list[Record]) -> dict[str, Any]:
    """Medians, and their ratios."""
    good = [record for record in records if record["status"] == "ok"]
    found = {
        "limits": limits_of([record for record in limits if record["status"] == "ok"]),
        "limits_of_ranks": _raw(_by_peer(good, "raw").get("raw", [])),
    }
    return found | {
        "save": [_save_row(*item, found) for item in _by_peer(good, "save").items()],
        "train": _train_rows(_by_peer(good, "train")),
        "restore": _restore_rows([r for r in good if r["task"]["kind"] == "restore"]),
        "failed": [progress_line(record) for record in records if record["status"] != "ok"],
    }


def _by_peer(records: Iterable[Record], kind: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["task"]["kind"] == kind:
            found[record["task"]["peer"]].append(record)
    return found


def _span(ranks: list[dict[str, Any]], end: str) -> float:
    """From the first rank's begin to the last rank's end."""
    return float(max(each[end] for each in ranks) - min(each["begin"] for each in ranks))


def _bytes(record: Record) -> int:
    """What all programs of a record save together."""
    if record["task"]["layout"].startswith("share"):
        return sum(each["bytes"] for each in record["ranks"])
    return int(record["ranks"][0]["whole_bytes"])


def _raw(records: list[Record]) -> Row:
    """GB/s of all ranks together."""
    rates = defaultdict(list)
    for record in records:
        for key in record["ranks"][0]["spans"]:
            seconds = _span([each["spans"][key] for each in record["ranks"]], "end")
            rates[key].append(record["ranks"][0]["whole_bytes"] / seconds / GB)
    return {key: spread(values) for key, values in rates.items()}


# -- save ----------------------------------------------------------------------------------------


def _saves(record: Record) -> list[list[dict[str, Any]]]:
    """For each save, what the ranks say of it."""
    return [list(each) for each in zip(*(rank["saves"] for rank in record["ranks"]), strict=True)]


def _save_row(peer: str, records: list[Record], limits: Row) -> Row:
    first = [_saves(record)[0] for record in records]
    later = [save for record in records for save in _saves(record)[1:]]
    # The second save of statehold still writes fresh files: nothing was retired before it.
    steady = [save for record in records for save in _saves(record)[2:]]
    own = records[0]["ranks"][0]["reuses_files"]
    size, limit = _bytes(records[0]), "overwrite" if own else "fresh"
    measured = steady if own else later
    durable = spread(_span(save, "durable") for save in measured)
    rate = size / GB / durable["median"] if durable else None
    blocked = [each["blocked"] - each["begin"] for save in measured for each in save]
    ranks_limit = limits["limits_of_ranks"].get(limit)
    return {
        "peer": peer,
        "bytes": size,
        "tensors": records[0]["ranks"][0]["tensors"],
        "blocked_first_s": spread(_last_blocked(save) for save in first),
        "blocked_s": spread(_last_blocked(save) for save in measured),
        "blocked_each_s": spread(blocked),
        "blocked_cpu_s": spread(each["blocked_cpu_s"] for save in measured for each in save),
        "durable_first_s": spread(_span(save, "durable") for save in first),
        "durable_s": durable,
        "gb_s": rate,
        "limit": limit,
        "of_limit": ratio(rate, limits["limits"]["best"].get(limit)),
        "of_ranks_limit": ratio(rate, ranks_limit["median"] if ranks_limit else None),
        "parts_s": _parts(measured),
    }


def _last_blocked(save: list[dict[str, Any]]) -> float:
    return float(max(each["blocked"] - each["begin"] for each in save))


def _parts(saves: list[list[dict[str, Any]]]) -> dict[str, float | None]:
    """Medians over saves and ranks of where the time of the call goes."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in (each for save in saves for each in save):
        for key, seconds in each["parts_s"].items():
            found[key].append(seconds)
    return {key: median(values) for key, values in found.items()}


# -- train ---------------------------------------------------------------------------------------


def _train_rows(found: dict[str, list[Record]]) -> list[Row]:
    if NO_SAVES not in found:
        return []
    base = _loop_s(found[NO_SAVES])["median"]
    steps = found[NO_SAVES][0]["task"]["steps"]
    rows = []
    for peer, records in found.items():
        loops = _loop_s(records)
        of_base = {key: value / base for key, value in loops.items()}
        rows.append({"peer": peer, "step_s": loops["median"] / steps, "ratio": of_base})
    return rows


def _loop_s(records: list[Record]) -> dict[str, float]:
    found = spread(max(each["loop_s"] for each in record["ranks"]) for record in records)
    assert found is not None
    return found


# -- restore -------------------------------------------------------------------------------------


def _restore_rows(records: list[Record]) -> list[Row]:
    found: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        task = record["task"]
        found[task["peer"], task["source"], task["layout"]].append(record)
    rows = [_restore_row(*key, group) for key, group in found.items()]
    for row in rows:
        same = next((r for r in rows if r["peer"] == row["peer"] and _is_same(r)), None)
        for key in ("cold_s", "warm_s"):
            row[f"{key[:-2]}_of_same"] = row[key]["median"] / same[key]["median"] if same else None
    return rows


def _is_same(row: Row) -> bool:
    return (row["source"], row["target"]) == SAME


def _restore_row(peer: str, source: str, target: str, records: list[Record]) -> Row:
    cold, warm = (
        [list(each) for r in records for each in zip(*(k[key] for k in r["ranks"]), strict=True)]
        for key in ("cold", "warm")
    )
    size = records[0]["ranks"][0]["whole_bytes"]
    needed = [each["bytes"] for each in records[0]["ranks"]]
    cold_s = spread(_span(each, "end") for each in cold)
    assert cold_s is not None
    return {
        "peer": peer,
        "source": source,
        "target": target,
        "bytes": size,
        "cold_s": cold_s,
        "warm_s": spread(_span(each, "end") for each in warm),
        "cold_gb_s": size / GB / cold_s["median"],
        "read_of_needed": _most_read(cold[0], needed),
        "device_of_whole": median([each[0]["device_bytes"] / size for each in cold]),
    }


def _most_read(ranks: list[dict[str, Any]], needed: list[int]) -> float | None:
    """Of the rank where it is most: bytes read, through the page cache or past it, over held."""
    ratios = [
        (each["reads"]["cached_bytes"] + each["reads"]["direct_bytes"]) / held
        for each, held in zip(ranks, needed, strict=True)
        if each["reads"]
    ]
    return max(ratios, default=None)


# -- text ----------------------------------------------------------------------------------------

SAVE_COLUMNS: list[Column] = [
    ("peer", lambda r: TITLES[r["peer"]]),
    ("GB", lambda r: number(r["bytes"] / GB)),
    ("blocked first s", lambda r: spread_text(r["blocked_first_s"], 4)),
    ("blocked s, last rank", lambda r: spread_text(r["blocked_s"], 4)),
    ("blocked s, each rank", lambda r: spread_text(r["blocked_each_s"], 4)),
    ("of it processor s", lambda r: spread_text(r["blocked_cpu_s"], 4)),
    ("durable first s", lambda r: spread_text(r["durable_first_s"])),
    ("durable s", lambda r: spread_text(r["durable_s"])),
    ("GB/s", lambda r: number(r["gb_s"])),
    ("of limit", lambda r: f"{percent(r['of_limit'])} {r['limit']}"),
    ("of 4 x raw", lambda r: percent(r["of_ranks_limit"])),
]
TRAIN_COLUMNS: list[Column] = [
    ("peer", lambda r: TITLES.get(r["peer"], r["peer"])),
    ("save every step, x no saves", lambda r: spread_text(r["ratio"])),
    ("step s", lambda r: number(r["step_s"], 3)),
]
RESTORE_COLUMNS: list[Column] = [
    ("peer", lambda r: "statehold" if r["peer"] == "statehold" else "DCP load"),
    ("saved", lambda r: r["source"]),
    ("restored", lambda r: r["target"]),
    ("cold s", lambda r: spread_text(r["cold_s"])),
    ("x same", lambda r: number(r["cold_of_same"])),
    ("warm s", lambda r: spread_text(r["warm_s"])),
    ("x same", lambda r: number(r["warm_of_same"])),
    ("cold GB/s", lambda r: number(r["cold_gb_s"])),
    ("read / held", lambda r: number(r["read_of_needed"])),
    ("device / state", lambda r: number(r["device_of_whole"])),
]


def _parts_lines(rows: list[Row]) -> list[str]:
    lines = ["", "Where the time of save() goes, ms (medians over ranks and steady saves)"]
    for row in rows:
        if row["parts_s"]:
            shown = ", ".join(f"{key} {1e3 * s:.2f}" for key, s in row["parts_s"].items())
            whole = 1e3 * row["blocked_each_s"]["median"]
            lines.append(f"  {TITLES[row['peer']]}: {whole:.2f} of which {shown}")
    return lines


def text(facts: Row, summary: Row) -> str:
    """The whole report; triples are min / median / max."""
    lines = [f"{key}: {value}" for key, value in facts.items()]
    lines += ["", "Limits, GB/s (min / median / max)"]
    for key in ("fresh", "overwrite", "read"):
        for engine, value in summary["limits"].get(key, {}).items():
            lines.append(f"  {key:10}{engine:12}{spread_text(value)}")
        if key in summary["limits_of_ranks"]:
            shown = spread_text(summary["limits_of_ranks"][key])
            lines.append(f"  {key:10}{'4 x native':12}{shown}")
    if summary["save"]:
        lines += ["", "Save", *table(summary["save"], SAVE_COLUMNS)]
        lines += _parts_lines(summary["save"])
    if summary["train"]:
        lines += ["", "Train", *table(summary["train"], TRAIN_COLUMNS)]
    if summary["restore"]:
        lines += ["", "Restore", *table(summary["restore"], RESTORE_COLUMNS)]
    if summary["failed"]:
        lines += ["", "NOT MEASURED", *(f"  {line}" for line in summary["failed"])]
    return "\n".join(lines) + "\n"


def write(
    options: argparse.Namespace,
    facts: Row,
    records: list[Record],
    limits: list[Record],
    summary: Row,
) -> None:
    """results.json, table.txt and, where matplotlib is installed, plot.png."""
    whole = {
        "schema": 1,
        "facts": facts,
        "options": _plain(options),
        "summary": summary,
        "records": records,
        "limits": [record.get("result") for record in limits],
    }
    save_files(options.out, whole, text(facts, summary))
    try:
        from bench.ranks.plot import draw
    except ImportError as error:
        print(f"no plot: {error}")
        return
    draw(summary, options.out / "plot.png")
