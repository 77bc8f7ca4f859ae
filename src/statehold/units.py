"""Byte sizes and durations as people write them.

Owns: the binary unit constants, and the one parser and the formatters for sizes and times.
Invariants: everywhere else a size is an int of bytes; only this module knows its spelling.
Not here: limits on particular sizes (options).
"""

from __future__ import annotations

import re

from statehold.errors import UsageError, refused, shown

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_SIZE = re.compile(r"\s*([0-9]{1,18})(?:\.([0-9]{1,9}))?\s*([A-Za-z]{0,3})\s*", re.ASCII)
_TIME = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(s|min|h|d)\s*", re.ASCII)
WAIT_S_MAX = 365 * 86_400.0
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_HINT = 'write an int of bytes, or a string such as "512 MiB", "1.5GiB" or "2GB"'


def parse_bytes(value: int | str) -> int:
    """The number of bytes in `value`: an int, or a number with a unit.

    KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB powers of 1000. A bare "G" is
    refused because people disagree on its meaning. The result must be a whole number of bytes.
    """
    if type(value) is int:
        if value < 0:
            raise _refused(value, "zero or more bytes")
        return value
    if not isinstance(value, str):
        raise _refused(value, "an int or a str")
    match = _SIZE.fullmatch(value)
    factor = _FACTORS.get(match[3].lower()) if match else None
    if match is None or factor is None:
        raise _refused(value, "a number and a unit: B, KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    whole, fraction = int(match[1]), match[2] or "0"
    scale: int = 10 ** len(fraction)
    parts, rest = divmod(int(fraction) * factor, scale)
    if rest:
        raise _refused(value, "a whole number of bytes")
    return whole * factor + parts


def _refused(value: object, expected: str) -> UsageError:
    return refused("not a size in bytes", expected, shown(value), _HINT)


def parse_rate(bytes_per_s: int | str | None) -> int | None:
    """A limit in bytes a second; None sets none. Raises UsageError."""
    found = None if bytes_per_s is None else parse_bytes(bytes_per_s)
    if found == 0:
        text = "bytes_per_s must be at least one byte a second, or None for no limit"
        raise UsageError(text, facts={"got": repr(bytes_per_s)})
    return found


def parse_seconds(value: object) -> float | None:
    """ "90s", "30min", "2h", "250d" in seconds, above 0; None for anything else."""
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * _SECONDS[match[2]] or None if match else None


def check_timeout(value: object) -> float | None:
    """A time to wait, in seconds; None: for ever, as is any time from WAIT_S_MAX on, which locks of
    the system do not take. Raises UsageError for anything else."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return None if value >= WAIT_S_MAX else max(0.0, value)
    expected = "a number of seconds, or None to wait for ever"
    raise refused("not a time to wait", expected, shown(value))


def format_bytes(n: int) -> str:
    """`n` bytes for people: "0 B", "1023 B", "1.5 GiB"; three significant digits."""
    size = float(abs(n))
    sign = "-" if n < 0 else ""
    if size < KiB:
        return f"{sign}{abs(n)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= KiB
        # Not 1024: 1023.7 KiB would otherwise print as "1024 KiB".
        if size < 999.5 or unit == "TiB":
            break
    return f"{sign}{_three_digits(size)} {unit}"


def format_seconds(s: float) -> str:
    """`s` seconds for people: "850 us", "12.3 ms", "4.56 s", "2 min 05 s", "3 h 20 min"."""
    sign, s = ("-", -s) if s < 0 else ("", s)
    if s == 0:
        return "0 s"
    if s < 0.0009995:
        return f"{sign}{_three_digits(s * 1e6)} us"
    if s < 0.9995:
        return f"{sign}{_three_digits(s * 1e3)} ms"
    if s < 59.95:
        return f"{sign}{_three_digits(s)} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(s / 60), 60)
    return f"{sign}{hours} h {minutes:02d} min"


def format_age(s: float) -> str:
    """How long ago `s` seconds are, for people: "40 s ago", "3 h ago", "12 days ago"."""
    if s < 0:
        return "just now" if s > -_SKEW_S else "in the future"
    for size, unit in _AGES:
        if s >= 2 * size:
            return f"{int(s // size)} {unit} ago"
    return f"{int(s)} s ago"


# Units count from two of them on, so that "90 min ago" is not "1 h ago".
_AGES = ((86_400, "days"), (3600, "h"), (60, "min"))
_SKEW_S = 60  # clocks of two machines may differ


def _three_digits(x: float) -> str:
    decimals = 2 if x < 9.995 else 1 if x < 99.95 else 0
    text = f"{x:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
