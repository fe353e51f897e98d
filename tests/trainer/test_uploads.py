"""Checkpoints that are uploaded to an S3 store beside training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import Corrupt, OptionError, StorageError
from paddleformers_fc.execute import upload
from paddleformers_fc.execute.commit_coordinator import DiskLeaders
from paddleformers_fc.execute.upload import Upload
from paddleformers_fc.storage.files import files_within
from paddleformers_fc.storage.manifest import MANIFEST_NAME, DivergedTie, read_manifest, write_manifest
from paddleformers_fc.storage.paths import RemotePath
from paddleformers_fc.trainer import save
from paddleformers_fc.trainer.options import FlexFields, check_options, upload_url
from paddleformers_fc.trainer.tiers import Retention, Tier
from paddleformers_fc.trainer.uploads import CheckpointUploader, Uploads
from tests.cli.support import run
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2, SD2V2
from tests.harness.waiting import pause
from tests.storage.buckets import Bucket
from tests.trainer import jobs
from tests.trainer.test_rotation import WEIGHTS, left, make_checkpoint
from tests.trainer.test_trainer import SIX_STEPS, settings
from verification.forkserver import ForkServer


def content(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files_within(directory)}


def steps(bucket: Bucket) -> list[str]:
    """The checkpoints of a bucket that have a manifest."""
    names = (name.rsplit("/", 1) for name in bucket.files("run"))
    return sorted(parts[0] for parts in names if parts[-1] == MANIFEST_NAME)


def upload_of(source: Path, bucket: Bucket, is_coordinator: bool = True, patience: float = LIMIT) -> Upload:
    return Upload(source, bucket.path / "run" / source.name, is_coordinator, patience, lambda: None)


def test_the_manifest_is_sent_last_and_only_what_the_store_lacks(bucket: Bucket, tmp_path: Path) -> None:
    sent: list[str] = []
    source = make_checkpoint(tmp_path, 2)
    bucket.store.accepts = lambda method, path, query: sent.append(path.partition("/checkpoint-2/")[2]) is None
    size = upload_of(source, bucket).run()
    assert bucket.files("run/checkpoint-2") == content(source)
    assert size == sum(map(len, content(source).values()))
    assert sent[-1] == MANIFEST_NAME
    assert sorted(set(sent)) == sorted(content(source))
    sent.clear()
    assert (upload_of(source, bucket).run(), sent) == (0, [])
    # An interrupted upload left a file with different content.
    bucket.remove(f"run/checkpoint-2/{MANIFEST_NAME}")
    bucket.remove("run/checkpoint-2/config.json")
    bucket.put(f"run/checkpoint-2/{WEIGHTS}", b"[]")
    size = upload_of(source, bucket).run()
    assert bucket.files("run/checkpoint-2") == content(source)
    assert size == len(b"{}") * 2 + (source / MANIFEST_NAME).stat().st_size


def test_another_checkpoint_of_the_same_step_is_replaced_without_a_mixture(bucket: Bucket, tmp_path: Path) -> None:
    older = make_checkpoint(tmp_path, 2)
    (older / "more.json").write_bytes((older / "config.json").read_bytes())
    manifest = read_manifest(older)
    (config,) = (one for one in manifest.files if one.path == "config.json")
    write_manifest(older, replace(manifest, files=[*manifest.files, replace(config, path="more.json")]))
    upload_of(older, bucket).run()
    whole = [bucket.files("run/checkpoint-2")]
    (tmp_path / "again").mkdir()
    newer = make_checkpoint(tmp_path / "again", 2)
    write_manifest(newer, replace(read_manifest(newer), consumed_samples=7))
    seen: list[dict[str, bytes]] = []
    bucket.store.accepts = lambda *_: seen.append(bucket.files("run/checkpoint-2")) is None
    upload_of(newer, bucket).run()
    whole.append(bucket.files("run/checkpoint-2"))
    assert whole[1] == content(newer)
    assert all(one in whole for one in seen if MANIFEST_NAME in one)


def test_a_damaged_local_file_is_not_uploaded(bucket: Bucket, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, 2)
    (source / WEIGHTS).write_bytes(b"{|")
    with pytest.raises(Corrupt, match="does not match its recorded checksum and is not uploaded"):
        upload_of(source, bucket).run()
    found = bucket.files("run/checkpoint-2")
    assert not {MANIFEST_NAME, WEIGHTS} & {*found}
    assert bucket.unfinished() == []


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST_NAME])
def test_bytes_that_the_store_changes_are_no_checkpoint(bucket: Bucket, tmp_path: Path, name: str) -> None:
    source = make_checkpoint(tmp_path, 2)

    def alter(path: str) -> None:
        if path.endswith(name):
            bucket.put(f"run/checkpoint-2/{name}", b"[" * (source / name).stat().st_size)

    bucket.store.changed = alter
    with pytest.raises(Corrupt, match="does not have the bytes that were uploaded"):
        upload_of(source, bucket).run()
    assert steps(bucket) == []


def test_files_of_two_disks_make_one_checkpoint(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_POLL_SECONDS", 0.01)
    first, second = make_checkpoint(tmp_path, 2), tmp_path / "other/checkpoint-2"
    whole = content(first)
    second.mkdir(parents=True)
    for name in ("config.json", MANIFEST_NAME):
        (second / name).write_bytes(whole[name])
    (second / WEIGHTS).parent.mkdir()
    (first / WEIGHTS).rename(second / WEIGHTS)
    with pytest.raises(StorageError, match="Another node has not finished its part"):
        upload_of(first, bucket, patience=0.1).run()
    assert steps(bucket) == []
    upload_of(second, bucket, is_coordinator=False).run()
    upload_of(first, bucket).run()
    assert bucket.files("run/checkpoint-2") == whole


def uploader(bucket: Bucket, limit: int | None = None, every: int = 0) -> CheckpointUploader:
    return CheckpointUploader(bucket.path / "run", Retention(limit, every), LIMIT, True)


def test_old_checkpoints_in_the_store_are_deleted_as_on_a_disk(bucket: Bucket, tmp_path: Path) -> None:
    """The best one, those of every third step and the newest one stay, and before it one without diverged ties."""
    bucket.put("run/checkpoint-1/notes.txt", b"of another program")
    bucket.put("run/checkpoint-0/half.safetensors", b"without a manifest")
    one = uploader(bucket, limit=1, every=3)
    for step in range(1, 6):
        path = make_checkpoint(tmp_path, step)
        if step == 5:
            tie = DivergedTie(["a", "b"], ["model_state b on rank 1, a on rank 0"])
            write_manifest(path, replace(read_manifest(path), ties=[tie]))
        one.enqueue(path, str(tmp_path / "checkpoint-2"))
    assert not one.is_busy(LIMIT)
    one.raise_failures()
    assert steps(bucket) == [f"checkpoint-{step}" for step in (2, 3, 4, 5)]
    others = {name for name in bucket.files("run") if name.split("/")[0] in ("checkpoint-0", "checkpoint-1")}
    assert others == {"checkpoint-1/notes.txt", "checkpoint-0/half.safetensors"}


def test_a_refused_upload_is_tried_again_and_its_last_error_is_raised(bucket: Bucket, tmp_path: Path) -> None:
    bucket.store.accepts = lambda *_: False
    one, path = uploader(bucket), make_checkpoint(tmp_path, 2)
    one.enqueue(path)
    assert not one.is_busy(LIMIT)
    assert one.pending() == [path]
    with pytest.raises(StorageError, match="refused to"):
        one.raise_failures()
    bucket.store.accepts = lambda *_: True
    one.enqueue(make_checkpoint(tmp_path, 4))
    assert not one.is_busy(LIMIT)
    one.raise_failures()
    assert (one.pending(), steps(bucket)) == ([], ["checkpoint-2", "checkpoint-4"])


def uploads(url: RemotePath, output_dir: Path, limit: int = 0) -> Uploads:
    args: Any = SimpleNamespace(save_total_limit=limit, flex_keep_every=0, output_dir=str(output_dir), flex_timeout=60)
    return Uploads(url, args, ALONE)


def test_an_interrupt_stops_an_upload_and_the_next_start_completes_it(bucket: Bucket, tmp_path: Path) -> None:
    one, path = uploads(bucket.path / "run", tmp_path), make_checkpoint(tmp_path, 2)
    bucket.store.accepts = lambda *_: pause() is None
    with pytest.raises(KeyboardInterrupt), one.draining():
        raise KeyboardInterrupt
    assert (steps(bucket), bucket.unfinished()) == ([], [])
    assert one.pending() == [path]
    bucket.store.accepts = lambda *_: True
    with uploads(bucket.path / "run", tmp_path).draining():
        pass
    assert bucket.files("run/checkpoint-2") == content(path)


def test_a_local_checkpoint_stays_until_it_is_uploaded(bucket: Bucket, tmp_path: Path) -> None:
    disks = DiskLeaders((0,), "")
    one = uploads(bucket.path / "run", tmp_path)
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=1, flex_keep_every=0)
    session: Any = SimpleNamespace(args=args, uploads=one)
    bucket.store.accepts = lambda *_: False
    for step in (2, 4):
        one.committed(make_checkpoint(tmp_path, step), None, disks)
    with pytest.raises(StorageError, match="refused to"), one.draining():
        pass
    save.rotate(session, Tier(), tmp_path / "checkpoint-4", None, disks, ALONE)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    bucket.store.accepts = lambda *_: True
    with one.draining():
        pass
    save.rotate(session, Tier(), tmp_path / "checkpoint-4", None, disks, ALONE)
    assert left(tmp_path) == ["checkpoint-4"]
    assert steps(bucket) == ["checkpoint-2", "checkpoint-4"]


def test_a_bucket_that_cannot_be_written_is_refused_before_training(bucket: Bucket, tmp_path: Path) -> None:
    missing = RemotePath(f"{bucket.path}-missing/run")
    with pytest.raises(StorageError, match="refused to write"):
        uploads(missing, tmp_path).check()
    (tmp_path / "job.yaml").write_text(json.dumps({"output_dir": str(tmp_path / "out"), "device": "cpu"}))
    outcome = run("train", tmp_path / "job.yaml", "flex_checkpoint=true", f"flex_upload={missing}", "--dry-run")
    assert "refused to write" in outcome.err
    assert (outcome.code, (tmp_path / "out").exists()) == (2, False)
    uploads(bucket.path / "run", tmp_path).check()
    assert bucket.files("run") == {}
    bucket.store.accepts = lambda *_: False
    with pytest.raises(StorageError, match="refused to write"):
        uploads(bucket.path / "run", tmp_path).check()


def test_checkpoints_are_uploaded_to_a_file_system_of_this_machine(tmp_path: Path) -> None:
    target = tmp_path / "of all runs/é/run"
    url = upload_url(FlexFields(flex_upload=f"file://{quote(str(target))}"))
    assert url == upload_url(FlexFields(flex_upload=f"local://{quote(str(target))}"))
    assert url is not None
    one = uploads(url, tmp_path / "out", limit=1)
    one.check()
    (tmp_path / "out").mkdir()
    with one.draining():
        for step in (2, 4):
            one.committed(make_checkpoint(tmp_path / "out", step), None, DiskLeaders((0,), ""))
    assert content(target) == {
        f"checkpoint-4/{name}": data for name, data in content(tmp_path / "out/checkpoint-4").items()
    }


def test_checkpoints_are_not_uploaded_to_themselves_into_memory_or_to_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    options = SimpleNamespace(**{**vars(FlexFields()), "flex_checkpoint": True, "output_dir": f"{tmp_path}/link"})
    options.flex_upload = f"file://{tmp_path}"
    with pytest.raises(OptionError, match="flex_upload and output_dir are one directory"):
        check_options(options)
    with pytest.raises(OptionError, match="flex_upload: An upload in memory://run would end with this process"):
        FlexFields(flex_upload="memory://run")
    for value in (3, "", "out", "http://host/run", "s3://key:secret@bucket/run"):
        with pytest.raises(OptionError, match="flex_upload") as caught:
            FlexFields(flex_upload=value)
        assert "secret" not in caught.value.render()
    checkpoint = make_checkpoint(tmp_path, 2)
    for command in ("export", "convert"):
        outcome = run(command, checkpoint, "memory://run")
        assert outcome.code == 2
        assert "would end with this process" in outcome.err


def train(environment: dict[str, str], endpoint: str, **given: Any) -> dict[str, Any]:
    """Train on a rank with the S3 store of a test."""
    import fsspec

    os.environ.update(environment)
    fsspec.config.conf["s3"] = {"endpoint_url": endpoint}
    return jobs.run(**given)


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_uploads_and_another_layout_resumes(
    ranks: ForkServer, bucket: Bucket, tmp_path: Path, beside: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    store = {"environment": environment, "endpoint": bucket.store.url}
    given = {"flex_upload": f"{bucket.path}/run", "save_total_limit": 1, "flex_async_save": beside, **SIX_STEPS}
    saved, _ = run_on_ranks(ranks, 2, train, **store, **settings(DP2, tmp_path / "out", **given))
    assert steps(bucket) == ["checkpoint-6"]
    assert bucket.files("run/checkpoint-6") == content(tmp_path / "out/checkpoint-6")
    assert [name for name in left(tmp_path / "out") if name.startswith("checkpoint")] == ["checkpoint-6"]
    assert saved["step"] == 6
    given = {**SIX_STEPS, "max_steps": 8, "save_strategy": "no"}
    resumed = settings(SD2V2, tmp_path / "again", f"{bucket.path}/run/checkpoint-6", **given)
    found, _ = run_on_ranks(ranks, 2, train, **store, **resumed)
    assert (found["step"], len(found["losses"])) == (8, 2)
