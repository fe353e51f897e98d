"""A job on four nodes, whose replicas share their reads by themselves: what they have, read, and report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cpu_runtime.ranks import free_ports
from tests.harness.limits import ROOT
from tests.nodes.network import joined_nodes, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("sharing_jobs.py")
NODES, DAMAGED, VICTIM = 4, "model_state/rank-00001.safetensors", 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the ranks have written down: all how they have resumed, and the others how they have lost one."""
    directory = tmp_path_factory.mktemp("shared")
    with joined_nodes(directory / "nodes", NODES) as nodes:
        (port,) = free_ports(1)
        launch = [sys.executable, "-m", "paddle.distributed.launch", "--master", f"{nodes[0].address}:{port}"]
        script = ["--nnodes", NODES, "--nproc_per_node", 1, SCRIPT, directory, DAMAGED, VICTIM]
        environment = {"PADDLE_DISTRI_BACKEND": "gloo", "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
        commands = [[*launch, "--rank", rank, *script] for rank in range(NODES)]
        ended = run(nodes, commands, [environment] * NODES)
    found = {name: [json.loads(one.read_text()) for one in directory.glob(f"{name}-*")] for name in ("resumed", "lost")}
    assert [one.code == 0 for one in ended] == [rank != VICTIM for rank in range(NODES)], [one.output for one in ended]
    assert len(found["resumed"]) == NODES
    return found


@pytest.mark.parametrize(("layout", "part"), [("dp4", 0.25), ("sd4", 0.5)])
def test_replicas_on_four_nodes_read_a_share_each_and_have_the_same_bits(job, layout: str, part: float) -> None:
    each, auto = ([rank[f"{layout} {way}"] for rank in job["resumed"]] for way in ("each", "auto"))
    assert [one["tensors"] for one in auto] == [one["tensors"] for one in each]
    assert all(len(one["tensors"]) > 50 for one in auto)
    read, asked = ([sum(one[key] for one in way) for way in (each, auto)] for key in ("read", "asked"))
    assert read[1] == pytest.approx(part * read[0], rel=0.001)
    # The system has counted the same; it also counts documents and connections.
    assert asked[0] - asked[1] > 0.9 * (read[0] - read[1])


def test_a_bit_that_one_replica_reads_is_an_error_with_the_file_on_all_nodes(job) -> None:
    first, *others = [rank["damaged"] for rank in job["resumed"]]
    assert others == [first] * (NODES - 1)
    assert first["error"] == "Corrupt"
    (line,) = [line for line in first["text"].splitlines() if DAMAGED in line]
    assert "does not match its checksum in 1 of " in line
    assert "(found by rank " in line


def test_a_rank_killed_between_rounds_is_named_on_all_other_nodes_and_none_hangs(job) -> None:
    first, *others = job["lost"]
    assert others == [first] * (NODES - 2)
    assert first["error"] == "PeerError"
    assert f"rank {VICTIM} did not arrive" in first["text"]
