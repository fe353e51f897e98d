"""The job's store is found where rank 0 serves it, and no question to it waits without a bound."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest

from paddleformers_fc.cpu_runtime import stores
from paddleformers_fc.cpu_runtime.ranks import free_ports
from paddleformers_fc.distributed.store_client import StoreClient, hosts_of_ranks, job_store_address
from paddleformers_fc.errors import PeerError
from paddleformers_fc.trainer.session import read_options


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment with the address of something else than the store."""
    for name in ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "8080")
    return monkeypatch


@pytest.mark.parametrize(
    ("master", "endpoints", "own", "address", "host", "hosts"),
    [
        ("", "", "", None, "127.0.0.1", ()),
        ("10.0.0.1:35100", "", "", ("10.0.0.1", 35100), "127.0.0.1", ()),
        ("10.0.0.1:35100", "a:1,b:2", "b:2", ("10.0.0.1", 35100), "b", ("a", "b")),
        ("", "a:1,b:2,[::1]:1", "a:1", ("a", 1), "a", ("a", "b", "[::1]")),
        ("", "10.0.0.1:1,10.0.0.1:2", "10.0.0.1:2", ("10.0.0.1", 1), "127.0.0.1", ("10.0.0.1", "10.0.0.1")),
    ],
    ids=["no launcher", "master", "master and nodes", "nodes", "one node"],
)
def test_the_store_is_where_paddle_has_it_and_ranks_leave_the_loopback_interface_between_nodes_alone(
    variables: pytest.MonkeyPatch, master: str, endpoints: str, own: str, address: object, host: str, hosts: object
) -> None:
    given = {"PADDLE_MASTER": master, "PADDLE_TRAINER_ENDPOINTS": endpoints, "PADDLE_CURRENT_ENDPOINT": own}
    for name, value in given.items():
        if value:
            variables.setenv(name, value)
    assert (job_store_address(), stores.own_host(), hosts_of_ranks()) == (address, host, hosts)
    assert read_options(SimpleNamespace(flex_threads=1, flex_read="auto")).hosts == hosts


def test_the_client_shares_counters_and_values_with_paddles_own() -> None:
    (port,) = free_ports(1)
    native = stores.open_store("127.0.0.1", port, is_master=True)
    client = StoreClient(("127.0.0.1", port), 60, 60)
    assert native.add("counter", 3) == 3
    assert client.add("counter", 1 << 40) == 3 + (1 << 40)
    assert native.add("counter", 0) == 3 + (1 << 40)
    client.set("text", "grüße" * 30_000)
    assert client.get("text").decode() == "grüße" * 30_000
    assert bytes(native.get("text")).decode() == "grüße" * 30_000
    client.post({"counter": 2, "other": 5})
    client.post({"counter": 1})
    assert client.add("counter", -(1 << 40)) == 6, "answers that nobody waited for are not those of later requests"
    assert native.add("other", 0) == 5


@pytest.fixture
def rendezvous() -> Iterator[tuple[str, int]]:
    """An HTTP server, as the one through which launchers find each other."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield ("127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


def test_another_service_at_the_address_is_an_error_that_names_it(rendezvous: tuple[str, int]) -> None:
    with pytest.raises(PeerError) as caught:
        StoreClient(rendezvous, 0.5, 60)
    assert f"127.0.0.1:{rendezvous[1]}, does not answer as the store of this job" in str(caught.value)


def test_an_address_at_which_nothing_can_be_reached_is_an_error_that_names_it(variables: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    for address in (("127.0.0.1", port), ("no-such-node.invalid", 35100)):
        name = "{}:{}".format(*address)
        variables.setenv("PADDLE_MASTER", name)
        with pytest.raises(PeerError, match=f"{name}, cannot be reached") as caught:
            StoreClient(address, 0.2, 60)
        assert f"PADDLE_MASTER={name}" in str(caught.value)


def test_a_store_that_falls_silent_is_waited_for_no_longer_than_the_bound() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        accepted: list[socket.socket] = []

        def answer_once() -> None:
            connection, _ = server.accept()
            connection.recv(1024)
            connection.sendall(bytes(8))
            accepted.append(connection)

        thread = threading.Thread(target=answer_once, daemon=True)
        thread.start()
        client = StoreClient(server.getsockname(), 60, 0.5)
        thread.join()
        with pytest.raises(OSError, match="timed out"):
            client.add("flex/arrivals", 1)
        accepted[0].sendall(bytes(8))  # Too late, and no answer to the next question.
        for request in (lambda: client.add("flex/arrivals", 0), lambda: client.post({"flex/arrivals": 0})):
            with pytest.raises(OSError):
                request()
        accepted[0].close()


def test_a_client_waits_for_a_key_with_one_request_and_can_be_used_after_a_timeout() -> None:
    (port,) = free_ports(1)
    server = stores.open_store("127.0.0.1", port, is_master=True)
    waiting, other = (StoreClient(("127.0.0.1", port), 60, 60) for _ in range(2))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(waiting.wait, "outcome/0", 60.0)
        other.set("outcome/0", "")
        assert answer.result()
    assert waiting.get("outcome/0") == b""
    waiting.post({"posted": 1})
    assert not waiting.wait("outcome/1", 0.01), "the answer to a post is not that of the wait"
    waiting.post({"posted": 1})
    other.set("outcome/1", "late")
    assert waiting.add("counter", 1) == 1
    waiting.post({"posted": 1})
    assert waiting.wait("outcome/1", 60)
    assert waiting.add("posted", 0) == 3
    del server
