"""A strict reader of the text exposition format 0.0.4, as Prometheus has it."""

from __future__ import annotations

import re

from support.faults import must

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_HELP = re.compile(rf"# HELP ({_NAME}) (.+)")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\[\\"n])*)"')
_SAMPLE = re.compile(rf"({_NAME})\{{(.*)\}} (-?[0-9.e+-]+|\+Inf)")
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]


def samples_of(text: str) -> Samples:
    """The samples of an exposition; AssertionError for whatever is not in the format."""
    must(text.endswith("\n"), "the last line does not end")
    must("\r" not in text)
    found: Samples = {}
    kind, name = "", ""
    helped: set[str] = set()
    for line in text[:-1].split("\n"):
        if told := _HELP.fullmatch(line):
            must(told[1] not in helped, f"{told[1]} comes twice")
            helped.add(told[1])
        elif told := _TYPE.fullmatch(line):
            must(told[1] in helped, f"{told[1]} has a type before its help")
            name, kind = told[1], told[2]
        else:
            key, value = _sample(line, name, kind)
            must(key not in found, f"{key} comes twice")
            found[key] = value
    _check_histograms(found)
    return found


def _sample(line: str, name: str, kind: str) -> tuple[tuple[str, Labels], float]:
    sample = _SAMPLE.fullmatch(line)
    must(sample, f"no sample: {line!r}")
    assert sample is not None
    suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    must(sample[1] in {name + suffix for suffix in suffixes}, f"{line!r} is not of {name}")
    must((kind != "gauge") <= (float(sample[3]) >= 0))
    if kind == "counter":
        must(name.endswith("_total"), f"{name} is a counter")
    return (sample[1], _labels(sample[2])), float(sample[3])


def _labels(text: str) -> Labels:
    found, at = [], 0
    while at < len(text):
        label = _LABEL.match(text, at)
        must(label, f"no label: {text[at:]!r}")
        assert label is not None
        found.append((label[1], re.sub(r"\\.", lambda m: _ESCAPES[m[0]], label[2])))
        at = label.end()
        must(at == len(text) or text[at] == ",", text)
        at += 1
    must(len({name for name, _ in found}) == len(found), "a label comes twice")
    return tuple(found)


def _check_histograms(found: Samples) -> None:
    below: dict[tuple[str, Labels], float] = {}
    for (name, labels), value in found.items():
        if name.endswith("_bucket"):
            series = name.removesuffix("_bucket"), tuple(x for x in labels if x[0] != "le")
            must(value >= below.get(series, 0), f"{name}: buckets are cumulative")
            below[series] = value
    for (name, labels), value in below.items():
        must(found[f"{name}_count", labels] == value, f"{name}: the last bucket counts all")
