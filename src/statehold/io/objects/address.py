"""The address of an object store and how it is opened: a URL, a few options, and no secrets.

Owns: the accepted URLs and options; the first use of `obstore`, with its deadlines and retries.
Invariants: credentials come only from the environment, where obstore finds them (AWS_*, GOOGLE_*,
AZURE_*, or the role of the machine). URLs and options with credentials are refused, so no file,
message or log of ours has them. There is a list of accepted options, not of refused ones, so a
secret under an unexpected name is refused, too.
Not here: transfers (client).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from statehold.errors import UsageError, shown

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file", "memory")
STORE_OPTIONS = {
    "account_name",
    "checksum_algorithm",
    "endpoint",
    "region",
    "server_side_encryption",
    "skip_signature",
    "sse_bucket_key_enabled",
    "sse_kms_key_id",
    "unsigned_payload",
    "virtual_hosted_style_request",
}
CLIENT_OPTIONS = {"allow_http", "root_certificate"}

_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_HINT = (
    "credentials are taken from the environment (AWS_ACCESS_KEY_ID and its like), "
    "so that no file, message or log holds them"
)


def check_url(url: str) -> str:
    """`url`, without a slash at its end, if it is one of an object store and holds no secret."""
    parts = urlsplit(url)
    if _has_more(parts):
        facts = {"url": _shown(parts), "expected": "no user, password, query or fragment in it"}
        raise UsageError("not the URL of an object store", facts=facts, hint=_HINT)
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        meant = f"file:///{parts.netloc}{parts.path}" if parts.netloc else "file:///tmp/store"
        raise UsageError(
            "a store in files is named by three slashes and an absolute path",
            facts={"url": _shown(parts), "expected": f"such as {meant}"},
        )
    needs_bucket = parts.scheme in _ALLOW_HTTP
    if parts.scheme not in SCHEMES or (needs_bucket and not parts.netloc):
        schemes = "s3://bucket/prefix, gs://..., az://..., file:///path or memory://"
        facts = {"expected": schemes, "got": _shown(parts)}
        raise UsageError("not the URL of an object store", facts=facts)
    return url if parts.scheme == "memory" else url.rstrip("/")


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `options`, if all of them are known and none holds a secret."""
    unknown = sorted(options.keys() - STORE_OPTIONS - CLIENT_OPTIONS)
    if unknown:
        expected = ", ".join(sorted(STORE_OPTIONS | CLIENT_OPTIONS))
        facts = {"option": shown(unknown[0]), "expected": f"one of {expected}"}
        raise UsageError("not an option of an object store", facts=facts, hint=_HINT)
    endpoint = urlsplit(str(options.get("endpoint", "")))
    if _has_more(endpoint):
        facts = {"endpoint": _shown(endpoint), "expected": "no user, password or query in it"}
        raise UsageError("not the address of an object store", facts=facts, hint=_HINT)
    return dict(options)


def around(one: str, other: str) -> tuple[str, str, str] | None:
    """The URL of the smallest store that has everything below both checked URLs.

    Returned with it: the beginnings of their names in it, which are empty or end with a slash. None
    if the URLs are equal, in two stores or two trees of files, or if one of them is in memory.
    """
    first, second = urlsplit(one), urlsplit(other)
    if first[:2] != second[:2] or first.scheme == "memory":
        return None
    paths = [[part for part in each.path.split("/") if part] for each in (first, second)]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False))
    same = [part for part, _ in pairs]
    if paths[0] == paths[1] or (not same and first.scheme == "file"):
        return None
    names = [unquote("".join(f"{part}/" for part in path[len(same) :])) for path in paths]
    root = "/".join([f"{first.scheme}://{first.netloc}", *same])
    return root, names[0], names[1]


def open_store(url: str, options: Mapping[str, Any], deadline_s: float) -> ObjectStore:
    """The store at a checked `url`. A request and its retries take `deadline_s` at most."""
    try:
        from obstore.store import MemoryStore, from_url
    except ImportError:
        hint = "pip install 'statehold[objects]', or: pip install obstore"
        raise UsageError("an object store needs the package obstore", hint=hint) from None
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryStore()
    if scheme == "file":
        return from_url(url, mkdir=True, automatic_cleanup=True)
    config = {name: value for name, value in options.items() if name in STORE_OPTIONS}
    client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
    # Options of the client replace all options of the environment.
    client.setdefault("allow_http", _is_true(os.environ.get(_ALLOW_HTTP[scheme], "")))
    half = timedelta(seconds=deadline_s / 2)
    # No retry begins after one half of the time, and the last one ends within the other half.
    return from_url(  # type: ignore[call-overload,no-any-return]  # the scheme decides, at run time
        url,
        config=config,
        client_options={**client, "timeout": half, "connect_timeout": min(half, _CONNECT)},
        retry_config={"max_retries": 1000, "retry_timeout": half, "backoff": _BACKOFF},
    )


_CONNECT = timedelta(seconds=10)
_BACKOFF = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=5),
    "base": 2,
}


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on", "y")


def _has_more(parts: SplitResult) -> bool:
    return bool("@" in parts.netloc or parts.query or parts.fragment)


def _shown(parts: SplitResult) -> str:
    """The part of the URL that cannot hold a secret."""
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"[:200]
