"""Pages of a KV cache behind their host, on a server that speaks S3."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from statehold.kv import PageVerdict, behind
from support import s3
from support.faults import must
from support.pages import get, made, put

HIT, MISS, STORED = PageVerdict.HIT, PageVerdict.MISS, PageVerdict.STORED


@pytest.mark.usefixtures("s3_environment")
def test_pages_go_to_a_server_that_denies_first_and_come_back_on_another_host(
    tmp_path: Path, proxy: s3.Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "AGAIN_S", 0.0)
    monkeypatch.setattr(behind, "PACK_PAGES", 2)  # more objects than a listing has at a time
    options: dict[str, Any] = {"endpoint": f"http://127.0.0.1:{proxy.port}"}
    proxy.fault = lambda method, target: "denied"
    with made(tmp_path / "one", behind=s3_url, behind_options=options) as store:
        must(put(store, *range(20)) == [STORED] * 20)
        assert get(store, 30) == [MISS]
        assert store.stats()["behind_failed"]
        proxy.fault = lambda method, target: None
    assert proxy.fired["denied"]
    shutil.rmtree(store.path)
    with made(tmp_path / "two", behind=s3_url, behind_options=options) as store:
        assert get(store, *range(21)) == [HIT] * 20 + [MISS]
