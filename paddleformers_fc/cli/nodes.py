"""Jobs on several nodes, started like the stock command: ``NNODES``, ``RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

Paddle's launcher waits forever for nodes that cannot reach each other. So these variables, and the address of the
hostname, are checked before the launcher starts, as far as a single node can.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from paddleformers_fc.errors import OptionError

_DEFAULT_PORT = "8080"


@dataclass(frozen=True)
class ThisNode:
    """This node's position in the job.

    Args:
        count: number of nodes.
        rank: rank of this node.
        environment: variables for the stock command; empty in a job of one node.
    """

    count: int = 1
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def this_node(environment: Mapping[str, str]) -> ThisNode:
    """Return this node's position, from the environment variables that the stock command reads.

    Raises:
        OptionError: a variable is missing or invalid, or other nodes cannot reach this one at its address.
    """
    count = _integer(environment, "NNODES", "1", 1)
    if count == 1:
        return ThisNode()
    missing = [name for name in ("RANK", "MASTER_ADDR") if not environment.get(name)]
    if missing:
        raise _error(
            f"A job of NNODES={count} nodes needs {' and '.join(missing)} on every node.",
            "Set RANK to this node's number, 0 to NNODES - 1, and MASTER_ADDR to the address of node 0.",
        )
    rank = _integer(environment, "RANK", "", 0)
    if rank >= count:
        raise _error(
            f"RANK={rank} is not a node of this job, which has {count}.", "Number the nodes from 0 to NNODES - 1."
        )
    master = _resolve(environment["MASTER_ADDR"])
    _check_no_loopback(environment, master)
    port = str(_integer(environment, "MASTER_PORT", _DEFAULT_PORT, 1))
    # Pass the address: the launcher compares addresses as text, and would not serve its rendezvous for a hostname.
    return ThisNode(count, rank, {"MASTER_ADDR": master, "MASTER_PORT": port})


def on_cpu(ranks: int) -> dict[str, str]:
    """Return the variables with which the stock command starts this many ranks on the CPU of this node."""
    found = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks))), "PADDLE_DISTRI_BACKEND": "gloo"}
    if ranks > 1:
        found |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return found


def _error(what: str, next_step: str) -> OptionError:
    return OptionError(what, where="environment", next_step=next_step)


def _integer(environment: Mapping[str, str], name: str, default: str, least: int) -> int:
    text = environment.get(name) or default
    if not text.isdecimal() or int(text) < least:
        raise _error(
            f"{name}={text} is not a whole number of at least {least}.", f"Set {name} to a number, or remove it."
        )
    return int(text)


def _resolve(master: str) -> str:
    try:
        return socket.gethostbyname(master)
    except OSError as error:
        raise _error(
            f"MASTER_ADDR={master} does not resolve on this node: {error}.",
            "Set the IP address of node 0, or make its hostname resolve on every node.",
        ) from error


def _check_no_loopback(environment: Mapping[str, str], master: str) -> None:
    """Check that the hostname of this node does not resolve to a loopback address."""
    own = environment.get("POD_IP") or _own_address()
    if ipaddress.ip_address(own).is_loopback and not ipaddress.ip_address(master).is_loopback:
        name = socket.gethostname()
        raise _error(
            f"The hostname of this node, {name}, resolves to {own}, where other nodes cannot reach it; MASTER_ADDR is "
            f"{master}.",
            "Make the hostname resolve to this node's network address, in /etc/hosts or DNS; or set POD_IP to "
            "that address, and on CPUs also GLOO_SOCKET_IFNAME to the name of its interface.",
        )


def _own_address() -> str:
    """Return the address that Paddle's launcher uses for this node."""
    try:
        return socket.gethostbyname(socket.getfqdn(socket.gethostname()))
    except OSError:
        return "127.0.0.1"
