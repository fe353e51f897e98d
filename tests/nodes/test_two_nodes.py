"""Jobs of two nodes, started by the commands that users type: they train, save, resume, and fail on both alike.

A job starts eight interpreters that import Paddle, so that they are in ``make test-all``.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from paddleformers_fc.cpu_runtime.ranks import SAVED_ON_SIGNAL, free_ports
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.trainer import register
from tests.harness.on_ranks import run_on_ranks
from tests.harness.waiting import wait_until
from tests.nodes.network import BIN, Ended, Node, Running, joined_nodes, run
from tests.trainer.test_entry_points import run_command_line
from verification.demo.assets import prepare as prepare_assets
from verification.forkserver import ForkServer

REGISTERED = {"custom_register_path": str(register.PATH)}
SCRIPT, RECIPE = (Path(__file__).parents[2] / "recipes" / name for name in ("script.py", "two_nodes.yaml"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes, each with a disk of its own."""
    with joined_nodes(tmp_path / "nodes") as found:
        yield found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, with an output directory in which each node saves on its own disk."""
    directory = tmp_path_factory.mktemp("recipe")
    assets = prepare_assets(directory / "assets")
    content = yaml.safe_load(RECIPE.read_text())
    data = dict.fromkeys(("train_dataset_path", "eval_dataset_path"), str(assets.corpus))
    given = {"model_name_or_path": str(assets.models["llama"]), "output_dir": "out", "max_steps": 2, "save_steps": 2}
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump({**content, **data, **given}))
    return path


def placed(nodes: Sequence[Node]) -> list[dict[str, object]]:
    """The variables of every node, as a scheduler sets them."""
    (port,) = free_ports(1)
    given = {"NNODES": 2, "MASTER_ADDR": nodes[0].address, "MASTER_PORT": port, "PADDLE_DISTRI_BACKEND": "gloo"}
    return [{**given, "RANK": rank} for rank in range(2)]


def train(
    nodes: Sequence[Node],
    config: Path,
    *overrides: str,
    meanwhile: Callable[[list[Running]], object] = lambda _: None,
) -> list[Ended]:
    """``paddleformers-fc train`` on both nodes."""
    command = [BIN / "paddleformers-fc", "train", config, "--nproc", 1, *overrides]
    return run(nodes, [command] * 2, placed(nodes), meanwhile)


def by_launch(nodes: Sequence[Node]) -> list[Ended]:
    """``paddle.distributed.launch`` and a script, with ``MASTER_*`` nowhere in the environment."""
    variables = placed(nodes)
    master = f"{variables[0]['MASTER_ADDR']}:{variables[0]['MASTER_PORT']}"
    launch = [sys.executable, "-m", "paddle.distributed.launch", "--master", master, "--nnodes", 2]
    script = ["--nproc_per_node", 1, SCRIPT, "--output", "out", "--steps", 2]
    commands = [[*launch, "--rank", rank, *script] for rank in range(2)]
    return run(nodes, commands, [{"PADDLE_DISTRI_BACKEND": "gloo"}] * 2)


def by_stock_command(nodes: Sequence[Node], config: Path) -> list[Ended]:
    """``paddleformers-cli train`` with this package's registration."""
    command = [BIN / "paddleformers-cli", "train", config, f"custom_register_path={register.PATH}"]
    return run(nodes, [command] * 2, [{**one, "CUDA_VISIBLE_DEVICES": "0"} for one in placed(nodes)])


def checkpoints(node: Node) -> list[str]:
    return sorted(path.name for path in (node.disk / "out").glob("checkpoint-*"))


def each_disk_has_its_part(
    nodes: Sequence[Node], ended: Sequence[Ended], step: int, steps: list[int], code: int = 0
) -> None:
    """Both nodes have ended well; each has all checkpoints, and of the newest one the files of its rank alone."""
    assert [one.code for one in ended] == [code, code], "\n".join(one.output for one in ended)
    for rank, (node, one) in enumerate(zip(nodes, ended, strict=True)):
        assert checkpoints(node) == [f"checkpoint-{number}" for number in steps if rank or number == step]
        directory = node.disk / f"out/checkpoint-{step}"
        manifest = read_manifest(directory)
        assert (manifest.world_size, manifest.step) == (2, step)
        assert all(f"rank-{rank:05d}" in path.name for path in directory.glob("*/*.safetensors"))
        assert f"Saved step {step}" in one.output


@pytest.mark.slow
def test_two_nodes_resume_from_one_and_each_saves_its_part(ranks: ForkServer, nodes: list[Node], config: Path) -> None:
    saved = config.with_name("saved.yaml")
    content = yaml.safe_load(config.read_text())
    saved.write_text(yaml.safe_dump({**content, "output_dir": str(nodes[1].disk / "out"), **REGISTERED}))
    run_on_ranks(ranks, 2, run_command_line, yaml=saved)
    ended = train(nodes, config, "max_steps=3", "save_steps=3")
    assert all("Resumed step 2" in one.output for one in ended), "\n".join(one.output for one in ended)
    each_disk_has_its_part(nodes, ended, 3, [2, 3])


@pytest.mark.slow
def test_both_nodes_save_when_the_ranks_of_one_get_a_signal(nodes: list[Node], config: Path) -> None:
    def preempt(running: list[Running]) -> None:
        for one in running:
            wait_until(lambda one=one: one.has_printed("global_step: 2"), "the loop runs")
        for rank in running[1].ranks():
            os.kill(rank, signal.SIGTERM)

    ended = train(nodes, config, "max_steps=100000", "save_steps=100000", meanwhile=preempt)
    assert checkpoints(nodes[0]), "\n".join(one.output for one in ended)
    step = int(checkpoints(nodes[0])[-1].removeprefix("checkpoint-"))
    each_disk_has_its_part(nodes, ended, step, [step], SAVED_ON_SIGNAL)


@pytest.mark.slow
def test_two_nodes_train_by_the_stock_command_and_each_disk_gets_its_part(nodes: list[Node], config: Path) -> None:
    each_disk_has_its_part(nodes, by_stock_command(nodes, config), 2, [2])


@pytest.mark.slow
def test_a_script_under_paddles_launcher_needs_no_master_variables(nodes: list[Node]) -> None:
    ended = by_launch(nodes)
    assert [one.code for one in ended] == [0, 0], "\n".join(one.output for one in ended)


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False], ids=["a rendezvous", "nothing"])
def test_one_node_trains_whatever_listens_at_its_master_variables(tmp_path: Path, listens: bool) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if listens else free_ports(1)[0]
        launch = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", 2]
        script = [SCRIPT, "--output", "out", "--steps", 2]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PADDLE_DISTRI_BACKEND": "gloo"}
        (ended,) = run([Node("127.0.0.1", tmp_path)], [[*launch, *script]], [environment])
        server.shutdown()
    assert ended.code == 0, ended.output
    assert "Saved" in ended.output or "Training completed" in ended.output
