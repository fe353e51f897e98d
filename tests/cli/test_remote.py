"""Commands that read accept URLs; commands that write show an alternative."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.cli.support import run
from tests.storage.serving import Served, serving


@pytest.fixture
def served(four: Path, weights: Path, tmp_path: Path) -> Iterator[Served]:
    shutil.copytree(four, tmp_path / "store/checkpoint-3")
    shutil.copytree(weights, tmp_path / "store/open")
    with serving(tmp_path / "store") as one:
        yield one


@pytest.fixture
def memory(four: Path) -> Iterator[str]:
    """The checkpoint in fsspec's memory; its URL."""
    url = f"memory://{uuid.uuid4().hex}/checkpoint-3"
    store = fsspec.filesystem("memory")
    store.put(str(four), url, recursive=True)
    yield url
    store.rm(url, recursive=True)


def test_a_url_gives_the_same_output_as_its_directory(four: Path, weights: Path, served: Served, memory: str) -> None:
    expected = run("inspect", weights, "--json").document
    found = run("inspect", f"{served.url}/open", "--json").document
    assert {**found, "path": ""} == {**expected, "path": ""}
    assert run("verify", f"{served.url}/open").code == 0
    for verb in (["inspect", "--tensors"], ["verify"]):
        expected = run(verb[0], four, *verb[1:], "--json").document
        for url in (f"{served.url}/checkpoint-3", memory, f"file://{four}"):
            found = run(verb[0], url, *verb[1:], "--json").document
            assert found.pop("path") == url.removeprefix("file://")
            drop = {"path", "seconds"}
            assert {key: value for key, value in found.items() if key not in drop} == {
                key: value for key, value in expected.items() if key not in drop
            }


def test_a_checkpoint_and_its_export_are_compared_across_stores(one: Path, served: Served, memory: str) -> None:
    assert run("diff", memory, f"{served.url}/checkpoint-3").code == 0
    assert run("diff", f"{served.url}/checkpoint-3", one).code == 0
    found = run("diff", memory, f"{served.url}/open", "--json")
    assert (found.code, found.document["not_compared"]) == (0, ["optimizer_state"])


def test_a_load_from_a_store_is_planned_without_its_tensors(stored: Path) -> None:
    expected = run("plan", stored, "--to", "tp=4", "--json").document
    with serving(stored.parent) as served:
        found = run("plan", f"{served.url}/{stored.name}", "--to", "tp=4", "--json").document
    assert {**found, "path": ""} == {**expected, "path": ""}


def test_a_url_without_a_checkpoint_is_refused(served: Served) -> None:
    top = run("inspect", served.url)
    assert (top.code, "Name a checkpoint inside it: checkpoint-3" in top.err) == (1, True)
    nowhere = run("verify", f"{served.url}/nowhere")
    assert (nowhere.code, "is not a checkpoint of a known format" in nowhere.err) == (1, True)


@pytest.mark.parametrize(("verb", "what"), [("export", "An export"), ("convert", "A conversion")])
def test_a_web_server_as_a_target_is_refused_with_a_next_step(four: Path, verb: str, what: str) -> None:
    outcome = run(verb, four, "http://localhost/open")
    assert outcome.code == 2
    assert f"{what} cannot be written to http://localhost/open" in outcome.err
    assert "an object store such as" in outcome.err


def test_a_refusal_of_a_store_does_not_return_1(served: Served) -> None:
    served.refuse["flex_checkpoint.json"] = 403
    outcome = run("verify", f"{served.url}/checkpoint-3")
    assert outcome.code == 2
    assert "permission to read it" in outcome.err
    outcome = run("inspect", "nosuch://bucket/run")
    assert (outcome.code, "Protocol not known" in outcome.err) == (2, True)


@pytest.mark.parametrize("ranges_of", ["mapping.json", "model_state/rank-00000.safetensors"])
def test_an_unreadable_file_is_not_reported_as_damaged(served: Served, ranges_of: str) -> None:
    size = (served.root / "checkpoint-3" / ranges_of).stat().st_size
    served.answer = lambda data: data + b"more" if len(data) == size else data
    outcome = run("verify", f"{served.url}/checkpoint-3")
    assert outcome.code == 2
    assert "does not answer range requests" in outcome.err
    assert "could not be checked: level full" in outcome.out
    assert not any(word in outcome.out + outcome.err for word in ("FAILED", "damaged"))
    document = run("verify", f"{served.url}/checkpoint-3", "--json").document
    assert (document["error"], document["passed"]) == ("StorageError", False)
    assert "files" in document["not_checked"]
    assert all(check["passed"] for check in document["checks"])
