"""Jobs of several nodes, as the stock command starts them: ``NNODES``, ``RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

Paddle's launcher waits without a limit for nodes that cannot reach each other. Faults of these variables, and of the
address that the hostname resolves to, are refused before the launcher starts if one node can detect them alone.
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
    """This node's place in the job.

    Args:
        count: number of nodes.
        rank: of this one.
        environment: variables for the stock command; empty in a job of one node.
    """

    count: int = 1
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def this_node(environment: Mapping[str, str]) -> ThisNode:
    """Return this node's place, from the environment variables that the stock command reads.

    Raises:
        OptionError: a variable is missing or invalid, or other nodes cannot reach this one at its address.
    """
    count = _whole(environment, "NNODES", "1", 1)
    if count == 1:
        return ThisNode()
    missing = [name for name in ("RANK", "MASTER_ADDR") if not environment.get(name)]
    if missing:
        raise _refused(
            f"A job of NNODES={count} nodes needs {' and '.join(missing)} on every node.",
            "Set RANK to this node's number, 0 to NNODES - 1, and MASTER_ADDR to the address of node 0.",
        )
    rank = _whole(environment, "RANK", "", 0)
    if rank >= count:
        raise _refused(
            f"RANK={rank} is not a node of this job, which has {count}.", "Number the nodes from 0 to NNODES - 1."
        )
    master = _resolved(environment["MASTER_ADDR"])
    _check_no_loopback(environment, master)
    port = str(_whole(environment, "MASTER_PORT", _DEFAULT_PORT, 1))
    # The launcher compares addresses as text: with a hostname it would not serve its rendezvous.
    return ThisNode(count, rank, {"MASTER_ADDR": master, "MASTER_PORT": port})


def on_cpu(ranks: int) -> dict[str, str]:
    """Return variables by which the stock command starts ranks on the CPU of this node.

    Args:
        ranks: how many.
    """
    found = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks))), "PADDLE_DISTRI_BACKEND": "gloo"}
    if ranks > 1:
        found |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return found


def _refused(what: str, next_step: str) -> OptionError:
    return OptionError(what, where="environment", next_step=next_step)


def _whole(environment: Mapping[str, str], name: str, default: str, least: int) -> int:
    text = environment.get(name) or default
    if not text.isdecimal() or int(text) < least:
        raise _refused(
            f"{name}={text} is not a whole number of at least {least}.", f"Set {name} to a number, or remove it."
        )
    return int(text)


def _resolved(master: str) -> str:
    try:
        return socket.gethostbyname(master)
    except OSError as error:
        raise _refused(
            f"MASTER_ADDR={master} does not resolve on this node: {error}.",
            "Name the address of node 0, or let its hostname resolve on every node.",
        ) from error


def _check_no_loopback(environment: Mapping[str, str], master: str) -> None:
    """Refuse a hostname of this node that resolves to a loopback address."""
    own = environment.get("POD_IP") or _own_address()
    if ipaddress.ip_address(own).is_loopback and not ipaddress.ip_address(master).is_loopback:
        name = socket.gethostname()
        raise _refused(
            f"The hostname of this node, {name}, resolves to {own}, where no other node reaches it; MASTER_ADDR is "
            f"{master}.",
            "Let the hostname resolve to this node's address in the network, in /etc/hosts or DNS; or set POD_IP to "
            "that address, and on CPUs also GLOO_SOCKET_IFNAME to the name of its interface.",
        )


def _own_address() -> str:
    """Return the address that Paddle's launcher uses for this node."""
    try:
        return socket.gethostbyname(socket.getfqdn(socket.gethostname()))
    except OSError:
        return "127.0.0.1"
