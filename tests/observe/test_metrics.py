"""Figures: they parse, they match what happened, and the port that serves them behaves."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import statehold
from observe.exposition import Samples, samples_of
from statehold import metrics
from statehold import metrics as endpoint_module
from statehold.errors import PortInUseError, StorageError, UsageError
from statehold.net import reception
from statehold.observe import counters
from statehold.observe.counters import Figures, exposition, figures_of
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.training import Training


def asked(endpoint: metrics.Endpoint, path: str = "/metrics", verb: str = "GET") -> tuple[int, str]:
    link = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=DEADLINE_S)
    link.request(verb, path)
    answer = link.getresponse()
    text = answer.read().decode()
    if answer.status == 200:
        kind = answer.getheader("Content-Type")
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
    link.close()
    return answer.status, text


def of_run(samples: Samples, run: object, **labels: str) -> Callable[[str], float]:
    wanted = (("run", str(run)), ("rank", "0"), *labels.items())
    return lambda name: samples[f"statehold_{name}", wanted]


def test_the_endpoint_tells_what_happened(tmp_path: Path) -> None:
    training, run = Training(), tmp_path / 'run "a"\\b'
    with metrics.serve(0) as endpoint:
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            saves = [ckpt.save(step, training.state) for step in (1, 2)]
            ckpt.restore(training.state, step=saves[0].wait("committed", DEADLINE_S).step)
            with pytest.raises(statehold.errors.StepNotFoundError):
                ckpt.restore(training.state, step=7)
        status, text = asked(endpoint)
    assert status == 200
    samples = samples_of(text)
    said = of_run(samples, run)
    assert said("saves_committed_total") == 2
    assert said("saves_failed_total") == said("saves_in_flight") == 0
    assert said("written_bytes_total") == sum(save.stats.written_bytes for save in saves)
    assert said("newest_step") == 2
    assert said("restored_step") == said("restores_total") == said("restores_failed_total") == 1
    assert said("save_seconds_count") == said("save_blocked_seconds_count") == 2
    assert said("save_seconds_sum") == pytest.approx(
        sum(save.stats.committed_s or 0 for save in saves)
    )
    assert of_run(samples, run, le="+Inf")("restore_seconds_bucket") == 1


def test_a_failed_save_is_counted_as_one() -> None:
    fs = SimFs(1)
    ckpt = checkpointer_on(fs, "/failing", **SMALL)
    state = Training().state
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    fs.fail_next("write_file", 5)
    with pytest.raises(StorageError):
        ckpt.save(2, state).wait("committed", DEADLINE_S)
    ckpt.close()
    assert fs.fired["injected"] == 1
    said = of_run(samples_of(exposition()), "/failing")
    assert (said("saves_committed_total"), said("saves_failed_total")) == (1, 1)
    assert (said("saves_in_flight"), said("newest_step")) == (0, 1)


def test_whatever_a_run_is_called_can_be_read_back() -> None:
    hostile = 'a"b\\n\\"c\nd{}=,# HELP \udc80 \u2028é'
    figures_of(hostile, 0).set("newest_step", 3)
    sendable = hostile.replace("\udc80", "\\udc80")
    samples = samples_of(exposition().encode().decode())
    assert of_run(samples, sendable)("newest_step") == 3


def test_a_run_opened_again_goes_on_counting() -> None:
    figures_of("/again", 0).add("saves_committed_total")
    figures_of("/again", 0).add("saves_committed_total")
    assert of_run(samples_of(exposition()), "/again")("saves_committed_total") == 2


def test_the_figures_of_many_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_runs", {})
    for index in range(counters.RUNS_MAX + 10):
        figures_of(f"/run/{index}", 0).set("newest_step", 1)
    figures_of("/run/10", 0)  # is now the newest
    figures_of("/one more", 0).set("newest_step", 1)
    samples = samples_of(exposition())
    kept = [dict(each)["run"] for name, each in samples if name == "statehold_newest_step"]
    assert len(kept) == counters.RUNS_MAX
    assert kept[0] == "/run/12"
    assert kept[-2:] == ["/run/10", "/one more"]


def test_a_histogram_counts_into_the_right_buckets() -> None:
    figures = Figures({"run": "x", "rank": 0})
    for seconds in (0.001, 0.0011, 0.5, 2000.0):
        figures.observe("save_seconds", seconds)
    text = "\n".join(figures.samples("save_seconds"))
    for limit, count in (("0.001", 1), ("0.005", 2), ("0.1", 2), ("0.5", 3), ("1000", 3)):
        assert f'le="{limit}"}} {count}\n' in text
    assert 'le="+Inf"} 4' in text


def test_only_metrics_are_served() -> None:
    with metrics.serve(0) as endpoint:
        assert asked(endpoint, "/")[0] == 404
        assert asked(endpoint, "/metrics/../../etc/passwd")[0] == 404
        assert asked(endpoint, "/metrics", "HEAD") == (200, "")
        assert asked(endpoint, "/metrics", "POST")[0] == 501
        assert asked(endpoint, "/metrics?x=1")[0] == 200


def test_a_port_in_use_is_an_error_of_its_own() -> None:
    with metrics.serve(0) as endpoint:
        with pytest.raises(PortInUseError) as caught:
            metrics.serve(endpoint.port)
        assert str(endpoint.port) in str(caught.value)
        assert asked(endpoint)[0] == 200
    with metrics.serve(endpoint.port) as again:  # close() gave it back
        assert again.port == endpoint.port
    again.close()


@pytest.mark.parametrize("port", [-1, 65536, "9400", True, 9400.0])
def test_what_is_no_port_is_refused(port: object) -> None:
    with pytest.raises(UsageError, match="port must be an integer from 0 to 65535"):
        metrics.serve(port)  # type: ignore[arg-type]


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        metrics.serve(0, "192.0.2.1")
    assert "192.0.2.1" in str(caught.value)


def test_a_forked_child_neither_serves_nor_keeps_the_port() -> None:
    heard, told = os.pipe()
    go_on, ready = os.pipe()
    endpoint, other = metrics.serve(0), metrics.serve(0)
    child = os.fork()
    if child == 0:  # must not return into pytest
        endpoint.close()  # neither hangs nor closes what is its parent's
        os.write(told, b"1")
        os.read(go_on, 1)
        os._exit(0)
    try:
        assert os.read(heard, 1) == b"1"
        assert asked(endpoint)[0] == asked(other)[0] == 200
        other.close()
        metrics.serve(other.port).close()  # the child is alive, and does not hold it
    finally:
        endpoint.close()
        other.close()
        os.write(ready, b"x")
        os.waitpid(child, 0)
        for each in (heard, told, go_on, ready):
            os.close(each)


def test_a_peer_that_has_begun_its_request_stops_neither_others_nor_the_end() -> None:
    """It held the thread from byte to byte, so nobody else was answered, and close() waited."""
    endpoint = metrics.serve(0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as slow:
        for _ in range(3):
            slow.sendall(b"G")
            assert asked(endpoint)[0] == 200
        endpoint.close()


def test_a_peer_that_takes_no_answer_does_not_keep_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = threading.Event()

    def endless() -> str:
        written.set()
        return "x" * (32 << 20)  # more than the kernel keeps for a client

    monkeypatch.setattr(endpoint_module, "exposition", endless)
    monkeypatch.setattr(reception, "FIRST_S", 600.0)
    endpoint = metrics.serve(0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        must(written.wait(DEADLINE_S))
        endpoint.close()


def test_metrics_that_cannot_be_written_end_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ValueError("not a number")]
    real = endpoint_module.exposition

    def failing() -> str:
        if failures:
            raise failures.pop()
        return real()

    monkeypatch.setattr(endpoint_module, "exposition", failing)
    with metrics.serve(0) as endpoint:
        for expected in (b"", b"HTTP/1.1 200 OK"):
            with socket.create_connection(("127.0.0.1", endpoint.port), DEADLINE_S) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                assert client.recv(15) == expected
    assert not failures


def test_a_peer_that_says_nothing_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reception, "FIRST_S", 0.05)
    with metrics.serve(0) as endpoint:
        with (
            socket.create_connection(("127.0.0.1", endpoint.port), DEADLINE_S) as silent,
            socket.create_connection(("127.0.0.1", endpoint.port), DEADLINE_S) as slow,
        ):
            slow.sendall(b"GET /metrics HT")
            assert asked(endpoint)[0] == 200
            assert silent.recv(1) == slow.recv(1) == b""
        with socket.create_connection(("127.0.0.1", endpoint.port)) as rude:
            rude.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
        assert asked(endpoint)[0] == 200
    logging.getLogger("statehold").debug("done")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
