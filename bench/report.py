"""From records to a summary, a text table and a plot.

Invariants: every throughput stands beside the limit measured in the same run, and names its
denominator. The limit is the median over the run of the better of its two measurements (limit.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.harness import GB, median, spread
from bench.peers import PEERS
from bench.train import NO_SAVES

Record = dict[str, Any]
Row = dict[str, Any]


def progress_line(record: Record) -> str:
    case = record["case"]
    label = f"{case['bench']:8}{case['peer']:22}round {case['repetition']}"
    if record["status"] != "ok":
        return f"{label}  {record['status']}: {record['reason']}"
    if lost := record["result"].get("difference"):
        return f"{label}  WRONG BYTES: {lost}"
    return f"{label}  {record['process_s']:.1f} s"


def failures(records: Iterable[Record]) -> list[Record]:
    """Records of cases that failed or did not restore what was saved."""
    return [
        record
        for record in records
        if record["status"] == "failed"
        or (record["status"] == "ok" and record["result"].get("difference") is not None)
    ]


def _results(records: Iterable[Record], bench: str) -> dict[str, list[Record]]:
    """peer -> its good records of one benchmark."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["case"]["bench"] == bench and record["status"] == "ok":
            found[record["case"]["peer"]].append(record)
    return found


def summarise(records: list[Record]) -> dict[str, Any]:
    """Medians per peer, and their ratios to the limits of this run."""
    limits = limits_of(_results(records, "limit").get("", []))
    return {
        "limits": limits,
        "save": [_save_row(*item, limits) for item in _results(records, "save").items()],
        "train": _train_rows(_results(records, "train"), limits),
        "restore": [_restore_row(*item, limits) for item in _results(records, "restore").items()],
        "not_measured": sorted(
            {
                f"{r['case']['bench']} {r['case']['peer']}: {r['status']}, {r['reason']}"
                for r in records
                if r["status"] != "ok"
            }
        ),
        "wrong": [progress_line(record) for record in failures(records)],
    }


def limits_of(records: list[Record]) -> dict[str, Any]:
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    copies: dict[str, list[float]] = defaultdict(list)
    copied: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for key, value in record["result"].get("copied", {}).items():
            copied[key].append(value)
        for engine, found in record["result"]["storage"].items():
            for key, value in found.items():
                rates[key][engine].append(value)
        for threads, value in record["result"]["memory_copy"].items():
            copies[threads].append(value)
    limits: dict[str, Any] = {
        key: {engine: spread(values) for engine, values in engines.items()}
        for key, engines in rates.items()
    }
    limits["best"] = {
        key: max(median(values) or 0.0 for values in engines.values())
        for key, engines in rates.items()
    }
    limits["copied"] = {key: spread(values) for key, values in copied.items()}
    limits["memory_copy"] = {threads: spread(values) for threads, values in copies.items()}
    return limits


def ratio(value: float | None, limit: float | None) -> float | None:
    return value / limit if value is not None and limit else None


def _save_row(peer: str, records: list[Record], limits: dict[str, Any]) -> Row:
    results = [record["result"] for record in records]
    first = [result["saves"][0] for result in results]
    later = [save for result in results for save in result["saves"][1:]]
    size = results[0]["bytes"]
    later_limit = "overwrite" if results[0]["reuses_files"] else "fresh"
    first_rate = size / GB / spread(s["durable_s"] for s in first)["median"]  # type: ignore[index]
    later_durable = spread(save["durable_s"] for save in later)
    later_rate = size / GB / later_durable["median"] if later_durable else None
    return {
        "peer": peer,
        "bytes": size,
        "blocked_first_s": spread(save["blocked_s"] for save in first),
        "blocked_later_s": spread(save["blocked_s"] for save in later),
        "staged_s": spread(save["staged_s"] for save in later if save["staged_s"] is not None),
        "durable_first_s": spread(save["durable_s"] for save in first),
        "durable_later_s": later_durable,
        "first_gb_s": first_rate,
        "first_of_fresh_limit": ratio(first_rate, limits["best"].get("fresh")),
        "later_gb_s": later_rate,
        "later_limit": later_limit,
        "later_of_limit": ratio(later_rate, limits["best"].get(later_limit)),
        "by_save_s": [
            median([result["saves"][index]["durable_s"] for result in results])
            for index in range(min(len(result["saves"]) for result in results))
        ],
        "cpu_s": median([save["cpu_s"] for save in later]),
        "extra_memory_bytes": max(result["extra_memory_bytes"] for result in results),
        "staging_bytes": results[0]["staging_bytes"],
        "files": results[0]["files"],
        "verified": all(result["difference"] is None for result in results),
    }


def _train_rows(found: dict[str, list[Record]], limits: dict[str, Any]) -> list[Row]:
    if NO_SAVES not in found:
        return []
    base = median([record["result"]["step_s"] for record in found[NO_SAVES]]) or 1.0
    plain = [step for record in found[NO_SAVES] for step in record["result"]["steps"]]
    rows: list[Row] = [
        {
            "peer": NO_SAVES,
            "step_s": base,
            "compute_1_s": median([step["compute_s"] for step in plain]),
            "update_1_s": median([step["update_s"] for step in plain]),
        }
    ]
    for peer, records in found.items():
        if peer == NO_SAVES:
            continue
        row: Row = {"peer": peer}
        for interval in sorted({record["case"]["interval"] for record in records}):
            chosen = [r["result"] for r in records if r["case"]["interval"] == interval]
            row[f"every_{interval}"] = spread(result["step_s"] / base for result in chosen)
            for part in ("compute", "update"):
                row[f"{part}_{interval}_s"] = median(
                    [step[f"{part}_s"] for result in chosen for step in result["steps"]]
                )
            row[f"save_{interval}_s"] = median(
                [s["save_s"] for result in chosen for s in result["steps"][::interval]]
            )
        row["verified"] = all(record["result"]["difference"] is None for record in records)
        rows.append(row)
    size = found[NO_SAVES][0]["result"]["bytes"]
    return [*rows, *_train_bounds(size, base, limits)]


def _train_bounds(size: int, base: float, limits: dict[str, Any]) -> list[Row]:
    """What perfect overlap with the disk at its limit would give."""
    rows = []
    for key in ("overwrite", "fresh"):
        if rate := limits["best"].get(key):
            seconds = size / GB / rate
            row: Row = {"peer": f"bound: {key} limit"}
            for interval in (1, 10):
                value = max(1.0, seconds / (interval * base))
                row[f"every_{interval}"] = {"min": value, "median": value, "max": value}
            rows.append(row)
    return rows


def _restore_row(peer: str, records: list[Record], limits: dict[str, Any]) -> Row:
    results = [record["result"] for record in records]
    size = results[0]["bytes"]
    row: Row = {"peer": peer, "bytes": size, "page_cache": results[0]["page_cache"]}
    for key in ("cold_s", "warm_s"):
        row[key] = spread(value for result in results for value in result[key])
    row["cold_gb_s"] = size / GB / row["cold_s"]["median"]
    row["cold_of_read_limit"] = ratio(row["cold_gb_s"], limits["best"].get("read"))
    row["warm_gb_s"] = size / GB / row["warm_s"]["median"]
    row["extra_memory_bytes"] = max(result["extra_memory_bytes"] for result in results)
    row["verified"] = all(result["difference"] is None for result in results)
    return row


# --- text ---------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def spread_text(value: dict[str, float] | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return " / ".join(f"{value[key]:.{digits}f}" for key in ("min", "median", "max"))


def _megabytes(value: int) -> str:
    return f"{value / 1e6:.0f} MB"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


Column = tuple[str, Callable[[Row], str]]

SAVE_COLUMNS: list[Column] = [
    ("peer", lambda r: r["peer"]),
    ("blocked first s", lambda r: spread_text(r["blocked_first_s"], 3)),
    ("blocked later s", lambda r: spread_text(r["blocked_later_s"], 3)),
    ("staged s", lambda r: spread_text(r["staged_s"])),
    ("durable first s", lambda r: spread_text(r["durable_first_s"])),
    ("durable later s", lambda r: spread_text(r["durable_later_s"])),
    ("first GB/s", lambda r: number(r["first_gb_s"])),
    ("of fresh", lambda r: percent(r["first_of_fresh_limit"])),
    ("later GB/s", lambda r: number(r["later_gb_s"])),
    ("of limit", lambda r: f"{percent(r['later_of_limit'])} {r['later_limit']}"),
    ("extra memory", lambda r: _megabytes(r["extra_memory_bytes"])),
    ("of it staging", lambda r: _megabytes(r["staging_bytes"])),
    ("files", lambda r: str(r["files"])),
]
TRAIN_COLUMNS: list[Column] = [
    ("peer", lambda r: r["peer"]),
    ("every step, x no saves", lambda r: spread_text(r.get("every_1"))),
    ("every 10 steps, x no saves", lambda r: spread_text(r.get("every_10"))),
    ("compute s", lambda r: number(r.get("compute_1_s"), 3)),
    ("gate + update s", lambda r: number(r.get("update_1_s"), 3)),
    ("save call s", lambda r: number(r.get("save_1_s"), 3)),
    ("step s", lambda r: number(r.get("step_s"), 3)),
]
RESTORE_COLUMNS: list[Column] = [
    ("peer", lambda r: r["peer"]),
    ("cold s", lambda r: spread_text(r["cold_s"])),
    ("cold GB/s", lambda r: number(r["cold_gb_s"])),
    ("of read limit", lambda r: percent(r["cold_of_read_limit"])),
    ("warm s", lambda r: spread_text(r["warm_s"])),
    ("warm GB/s", lambda r: number(r["warm_gb_s"])),
    ("extra memory", lambda r: _megabytes(r["extra_memory_bytes"])),
]


def table(rows: list[Row], columns: list[Column]) -> list[str]:
    cells = [[title for title, _ in columns]] + [[show(row) for _, show in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def text(facts: dict[str, Any], summary: dict[str, Any]) -> str:
    """The whole report; triples are min / median / max."""
    lines = [f"{key}: {value}" for key, value in facts.items()]
    lines += ["", "Limits, GB/s (min / median / max)"]
    for key in ("fresh", "overwrite", "read"):
        for engine, value in summary["limits"].get(key, {}).items():
            lines.append(f"  {key:10}{engine:8}{spread_text(value)}")
    for key, value in summary["limits"].get("copied", {}).items():
        lines.append(f"  {key:10}{'copied':8}{spread_text(value)}")
    for threads, value in summary["limits"]["memory_copy"].items():
        lines.append(f"  memory copy, {threads} thread(s)  {spread_text(value)}")
    for bench, columns in (
        ("save", SAVE_COLUMNS),
        ("train", TRAIN_COLUMNS),
        ("restore", RESTORE_COLUMNS),
    ):
        if summary[bench]:
            lines += ["", bench.capitalize(), *table(summary[bench], columns)]
    for title, key in (("Not measured", "not_measured"), ("WRONG", "wrong")):
        if summary[key]:
            lines += ["", title, *(f"  {entry}" for entry in summary[key])]
    return "\n".join(lines) + "\n"


def save_files(out: Path, whole: dict[str, Any], shown: str) -> None:
    """results.json, and table.txt, which is printed too."""
    (out / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    (out / "table.txt").write_text(shown)
    print(shown)


def write(
    out: Path,
    facts: dict[str, Any],
    options: dict[str, Any],
    records: list[Record],
    summary: dict[str, Any],
) -> None:
    """results.json, table.txt and, where matplotlib is installed, plot.png."""
    whole = {
        "schema": 1,
        "facts": facts,
        "options": {key: str(value) for key, value in options.items()},
        "summary": summary,
        "records": records,
    }
    save_files(out, whole, text(facts, summary))
    try:
        from bench.plot import draw
    except ImportError as error:
        print(f"no plot: {error}")
        return
    draw(summary, {name: entry.title for name, entry in PEERS.items()}, out / "plot.png")
