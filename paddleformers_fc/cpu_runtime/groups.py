"""Process groups with one store per group.

``ProcessGroupGloo`` ignores its group id when it writes its members' addresses to the store, so groups that are created
in a row read each other's addresses: with four ranks one start in three fails, with eight it hangs. Here every group
except the default one has its own store, served by its first member. The default store only contains the address of
that store, by group id. Ids are unique and equal on all members, because all ranks count groups in the same order.

Cost: 0.1 s per group, and in its first member a listening socket with a thread or two of Paddle's.
"""

from __future__ import annotations

import functools
import socket
from typing import Any

from paddle.base import core
from paddle.distributed import collective

from .. import errors
from ..upstream import replace_everywhere
from . import p2p, stores

_BIND_ATTEMPTS = 8

# The store must outlive the group, which Paddle never frees.
_stores: list[Any] = []


def apply() -> None:
    """Create every gloo group through :func:`new_process_group`."""
    original = collective._new_process_group_impl

    @functools.wraps(original)
    def new_process_group_impl(
        backend: str,
        store: Any,
        rank: int,
        world_size: int,
        group_name: str,
        pg_options: Any,
        group_id: int = 0,
        **options: Any,
    ) -> Any:
        if backend != "gloo":
            return original(backend, store, rank, world_size, group_name, pg_options, group_id, **options)
        if group_name == collective._default_group_name:
            p2p.open_mailbox(store, rank, world_size)
        else:
            store = group_store(store, rank, group_id)
        group = core.ProcessGroupGloo.create(store, rank, world_size, group_id)
        p2p.register(group, group_id)
        return group

    replace_everywhere(original, new_process_group_impl)


def group_store(default_store: Any, rank: int, group_id: int) -> Any:
    """Return the store of one group, on each of its members.

    Args:
        default_store: the store that all ranks of the job share.
        rank: this process' rank inside the group; rank 0 serves the store.
        group_id: the group's number, equal on all members and unique.

    Raises:
        PeerError: no port could be bound for the store.
    """
    key = f"gloo-group/{group_id}"
    if rank == 0:
        store, address = _serve(group_id)
        default_store.set(key, address)
    else:
        default_store.wait(key)
        host, port = bytes(default_store.get(key)).decode().rsplit(":", 1)
        store = stores.open_store(host, int(port), is_master=False)
    _stores.append(store)
    return store


def _serve(group_id: int) -> tuple[Any, str]:
    """Create a store, and return it with its address. Try several ports, because another process may bind one first."""
    host = stores.own_host()
    failures: list[str] = []
    for _ in range(_BIND_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        try:
            return stores.open_store(host, port, is_master=True), f"{host}:{port}"
        except Exception as error:  # Paddle has no exception type for a port that is in use.
            failures.append(f"port {port}: {error}")
    raise errors.PeerError(
        f"No port could be bound for the store of process group {group_id}.",
        where=host,
        evidence=failures,
        next_step="Check the machine's limit on open sockets.",
    )
