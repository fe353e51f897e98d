"""Some nodes on one machine: each with an address, a hostname and a disk of its own.

With root and ``ip`` a node is a set of Linux namespaces (network, hostname, mounts, processes), joined to the others
by a virtual bridge; its disk is mounted at a path that all nodes have. Without them the nodes share the
network of this machine under different loopback addresses, and start in different directories. The same commands run
in both.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
_SETUP = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind "$3" "$4"
cd "$4"
shift 4
exec "$@"
"""
_NETWORK = "10.199.77."
_OF_JOBS = ("PADDLE_", "MASTER_", "FLAGS_", "NNODES", "RANK", "POD_IP", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Ended:
    """How a command on a node ended: its code, and what it printed."""

    code: int
    output: str


@dataclass(frozen=True)
class Node:
    """A node.

    Args:
        address: at which other nodes reach it.
        disk: what is mounted in the node's working directory, in which commands start, as this process sees it.
        prefix: the command that enters the node; empty for a node without namespaces.
        variables: what commands need to know of it.
    """

    address: str
    disk: Path
    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def start(self, command: Sequence[object], environment: Mapping[str, object], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on this node; its output and errors go to a file."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OF_JOBS)}
        given = {key: str(value) for key, value in environment.items()}
        path = {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")])}
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.prefix, *map(str, command)],
                env={**inherited, **path, **self.variables, **given},
                cwd=self.disk,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@dataclass(frozen=True)
class Running:
    """A command on a node that may be running: its process, which may have entered the node, and what it has printed.

    Args:
        process: as this machine sees it.
        log: its output so far.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def has_printed(self, text: str) -> bool:
        """Return whether a text is in the output, or will never be."""
        return self.process.poll() is not None or text in self.log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks of the command, as this machine sees them."""
        return _ranks_below(self.process.pid)


def _ranks_below(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has ended.
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    below = [root]
    for pid in below:
        if not _is_rank(pid):
            below += children.get(pid, [])
    return [pid for pid in below if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    return b"PADDLE_TRAINER_ID=" in Path(f"/proc/{pid}/environ").read_bytes()


def run(
    nodes: Sequence[Node],
    commands: Sequence[Sequence[object]],
    environments: Sequence[Mapping[str, object]],
    meanwhile: Callable[[list[Running]], object] = lambda _: None,
) -> list[Ended]:
    """Run a command on every node at once, and wait until all have ended.

    Args:
        nodes: the nodes.
        commands: that of every node.
        environments: that of every node.
        meanwhile: called when all commands have started.
    """
    logs = [node.disk / f"output-{secrets.token_hex(4)}.txt" for node in nodes]
    processes = [
        node.start(command, environment, log)
        for node, command, environment, log in zip(nodes, commands, environments, logs, strict=True)
    ]
    try:
        meanwhile([Running(process, log) for process, log in zip(processes, logs, strict=True)])
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # With its namespace of processes, if it has one.
            process.wait()
    return [Ended(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


@contextmanager
def joined_nodes(directory: Path, count: int = 2) -> Iterator[list[Node]]:
    """Some nodes whose disks are directories in ``directory``."""
    disks = [directory / f"disk-{index}" for index in range(count)]
    for disk in disks:
        disk.mkdir(parents=True)
    with ExitStack() as stack:
        try:
            prefixes = stack.enter_context(_joined_namespaces(directory, count))
        except (OSError, subprocess.CalledProcessError):
            loopback = [f"127.0.0.{1 + index}" for index in range(count)]
            yield [Node(*pair, variables={"POD_IP": pair[0]}) for pair in zip(loopback, disks, strict=True)]
            return
        working, hosts = directory / "working", directory / "hosts"
        working.mkdir()
        addresses = [f"{_NETWORK}{1 + index}" for index in range(count)]
        lines = ["127.0.0.1 localhost", *(f"{address} node-{index}" for index, address in enumerate(addresses))]
        hosts.write_text("\n".join(lines) + "\n")
        yield [
            Node(address, disk, (*prefix, "sh", "-c", _SETUP, "sh", f"node-{index}", *map(str, (hosts, disk, working))))
            for index, (address, disk, prefix) in enumerate(zip(addresses, disks, prefixes, strict=True))
        ]


@contextmanager
def _joined_namespaces(directory: Path, count: int) -> Iterator[list[tuple[str, ...]]]:
    """The commands that enter network namespaces, which are joined by a bridge in another and have no way out.

    Raises:
        OSError, CalledProcessError: a tool is missing, or this user may not.
    """
    if any(shutil.which(tool) is None for tool in ("ip", "unshare", "nsenter", "mount", "hostname")):
        raise OSError("a tool is missing")
    run_id = secrets.token_hex(3)
    hub, *names = [f"fc{run_id}-hub", *(f"fc{run_id}-{index}" for index in range(count))]
    with ExitStack() as stack:
        for name in (hub, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            end, port = f"fc{run_id}{index}", f"port{index}"
            _ip("link", "add", end, "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{_NETWORK}{1 + index}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
        enter = ("unshare", "--mount", "--uts", "--pid", "--mount-proc", "--kill-child")
        prefixes = [("nsenter", f"--net=/run/netns/{name}", *enter) for name in names]
        subprocess.run([*prefixes[0], "mount", "--bind", directory, directory], check=True, capture_output=True)
        yield prefixes


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
