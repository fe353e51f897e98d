"""Mutants of the package ``storage``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REGIONS = ("tests/storage/test_regions.py",)
RANGES = ("tests/storage/test_ranges.py",)
MANIFEST = ("tests/storage/test_manifest.py",)
COMMIT = ("tests/storage/test_commit.py",)
CRASH = (
    "tests/storage/test_crash.py::test_a_first_save_into_new_directories_survives_a_power_failure",
    "tests/storage/test_crash.py::test_a_crash_while_a_new_step_is_saved_leaves_the_old_step_alone",
)
REMOVAL = ("tests/storage/test_crash.py::test_a_crash_while_a_checkpoint_is_removed_never_leaves_half_of_it",)
WRITER = ("tests/storage/test_safetensors_writer.py",)
READER = ("tests/storage/test_safetensors_reader.py",)
AHEAD = ("tests/storage/test_prefetch.py",)
SCATTER = ("tests/storage/test_vectored_read.py",)
OWNER = ("tests/storage/test_staging_lock.py",)

MUTANTS = (
    # ---- Regions: which bytes go where.
    Mutant(
        "storage/regions.py",
        "range(0, source.shape[fast], STRIPE)",
        "range(0, source.shape[fast] - 1, STRIPE)",
        REGIONS,
        "the last column of a transpose is missing where it is one more than a stripe",
    ),
    Mutant(
        "storage/regions.py",
        "stripe = (*before, slice(low, low + STRIPE))",
        "stripe = (*before, slice(low, low + STRIPE - 1))",
        REGIONS,
        "a column of every stripe of a transpose is missing",
    ),
    Mutant(
        "storage/regions.py",
        "span = sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + self.dtype.itemsize",
        "span = sum((n - 1) * s for n, s in zip(size, strides, strict=True))",
        REGIONS,
        "the last number of a span is that of the read before",
    ),
    Mutant(
        "storage/regions.py",
        "return min(walk.sizes[-axes - 1], max(1, (scratch_bytes - run) // stride + 1))",
        "return min(walk.sizes[-axes - 1], max(1, scratch_bytes // stride + 1))",
        REGIONS,
        "a span is longer than the scratch memory",
    ),
    Mutant(
        "storage/regions.py",
        "if stride > run * max_over_read:",
        "if stride > 2 * run * max_over_read:",
        REGIONS,
        "more bytes are read along with short runs than the caller allows",
    ),
    Mutant(
        "storage/regions.py",
        "if axes == len(walk.sizes) or run >= SHORT_RUN:",
        "if axes == len(walk.sizes) or run > SHORT_RUN:",
        REGIONS,
        "runs of exactly a KiB are read with their gaps",
    ),
    Mutant(
        "storage/regions.py",
        "if axes and axes[-1][1:] == (length * source, length * target):",
        "if axes and axes[-1][1] == length * source:",
        REGIONS,
        "axes that continue each other in the file alone are joined",
    ),
    Mutant(
        "storage/casts.py",
        "lost = np.isinf(target) & np.isfinite(source)",
        "lost = np.isinf(target) & np.isinf(source)",
        ("tests/storage/test_casts.py",),
        "a number too large for float16 becomes infinite without a word",
    ),
    # ---- Reading of files.
    Mutant(
        "storage/files.py",
        "            count = os.preadv(file.descriptor, [view[done:]], offset + done)",
        "            count = os.preadv(file.descriptor, [view[done:]], offset)",
        RANGES,
        "what a short read leaves is read from the beginning again",
    ),
    Mutant(
        "storage/files.py",
        "        count = max(0, count - view.nbytes)\n        offset += view.nbytes",
        "        offset += view.nbytes",
        ("tests/storage/test_ranges.py", "tests/storage/test_vectored_read.py", "tests/execute/test_reading.py"),
        "after a short read of several buffers some are not filled",
    ),
    Mutant(
        "storage/files.py",
        "count = os.pwrite(self._descriptor, view[done:], offset + done)",
        "count = os.pwrite(self._descriptor, view[done:], offset)",
        WRITER,
        "what a short write leaves overwrites what it wrote",
    ),
    Mutant(
        "storage/files.py",
        '        if not stat.S_ISREG(status.st_mode):\n            raise FormatError(f"{path} is not a regular file."',
        '        if False:\n            raise FormatError(f"{path} is not a regular file."',
        ("tests/storage/test_safetensors_reader.py", "tests/storage/test_ranges.py", "tests/storage/test_manifest.py"),
        "a pipe or a directory is read as a file",
    ),
    Mutant(
        "storage/files.py",
        '            with _naming("sync", self._path):\n                os.fsync(self._descriptor)',
        "            pass",
        CRASH,
        "files are closed without being synced",
    ),
    Mutant(
        "storage/files.py",
        "        fsync_directory(parent)\n",
        "        pass\n",
        CRASH,
        "the names of new output directories are not brought to the device",
    ),
    Mutant(
        "storage/files.py",
        "    for parent in real_path(path).parents:",
        "    for parent in real_path(path).parents if missing else ():",
        CRASH,
        "directories that another library made are not brought to the device",
    ),
    Mutant(
        "storage/files.py",
        "    between = [one for one in path.parents if root in one.parents]",
        "    between = [one for one in path.parents if root in one.parents or one == root]",
        ("tests/storage/test_safetensors_writer.py", "tests/storage/test_commit.py"),
        "a rank that is late brings a discarded directory back to life",
    ),
    Mutant(
        "storage/ranges.py",
        "            refuse_replaced(file, self._identities)\n",
        "            pass\n",
        ("tests/execute/test_collective_checksums.py", "tests/execute/test_hygiene.py"),
        "a file that was replaced after the check is read",
    ),
    Mutant(
        "storage/ranges.py",
        "        if kind is None:\n            self.refuse_replaced()",
        "        pass",
        ("tests/storage/test_remote.py",),
        "a remote file that is replaced while it is read is not noticed",
    ),
    Mutant(
        "storage/ranges.py",
        "            if shared.users == 0 and self._closed:",
        "            if self._closed:",
        RANGES,
        "a file is closed under a thread that reads it",
    ),
    Mutant(
        "storage/identity.py",
        "return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)",
        "return FileIdentity(status.st_dev, 0, status.st_size, 0)",
        ("tests/execute/test_collective_checksums.py",),
        "another file of the same size passes for the one that was checked",
    ),
    Mutant(
        "storage/vectored_read.py",
        "            _one_by_one(file, rows, range(low + int(whole), high))",
        "            _one_by_one(file, rows, range(low + int(whole) + 1, high))",
        SCATTER,
        "the row at which a short read ends is not filled",
    ),
    Mutant(
        "storage/vectored_read.py",
        '        whole = found["result"] == rows.lengths[low : low + BATCH][found["data"]]',
        '        whole = found["result"] > 0',
        SCATTER,
        "a row of which a part was read is taken for whole",
    ),
    Mutant(
        "storage/vectored_read.py",
        "            queue, self._queue = self._queue, None\n            queue.close()\n            raise",
        "            raise",
        SCATTER,
        "results of an interrupted read are taken for those of the next",
    ),
    Mutant(
        "storage/vectored_read.py",
        "os.register_at_fork(after_in_child=_SPARE.clear)",
        "",
        SCATTER,
        "a child process reads through its parent's contexts",
    ),
    # ---- Remote files.
    Mutant(
        "storage/prefetch.py",
        "        for low in range(one.begin, one.end, BUNDLE_BYTES):",
        "        for low in range(one.begin, one.end - 1, BUNDLE_BYTES):",
        AHEAD,
        "the last byte of a request of 8 MiB and one is not asked for",
    ),
    Mutant(
        "storage/prefetch.py",
        "            view[done : done + high - low] = memoryview(self._fetched(file, bundle)[index])[low:high]",
        "            view[done : done + high - low] = memoryview(self._fetched(file, bundle)[0])[low:high]",
        AHEAD,
        "bytes come from the first request of a bundle",
    ),
    Mutant(
        "storage/prefetch.py",
        "return gap <= GAP_BYTES and (length <= FREE_BYTES or length <= MAX_GAP_RATIO * size)",
        "return gap <= GAP_BYTES",
        AHEAD,
        "far more bytes are fetched than are wanted",
    ),
    # ---- Checksums and documents.
    Mutant(
        "storage/checksum.py",
        "        if self._room != self._block_bytes:\n",
        "        if self._room != self._block_bytes and len(blocks):\n",
        ("tests/storage/test_checksum.py",),
        "a file shorter than a block has no checksum of a block",
    ),
    Mutant(
        "storage/checksum.py",
        "            self._block.reset()\n",
        "",
        ("tests/storage/test_checksum.py",),
        "the checksum of a block is that of all before it",
    ),
    Mutant(
        "storage/block_checksums.py",
        "                except StorageError as error:\n                    with lock:\n"
        "                        found.refusals[span.checksum.path] = error",
        "                except StorageError:\n                    pass",
        MANIFEST,
        "a full verification passes although every read fails",
    ),
    Mutant(
        "storage/block_checksums.py",
        "        for first in range(0, len(numbers), count):",
        "        for first in range(0, len(numbers) - 1, count):",
        MANIFEST,
        "the last block of a file is not compared where it is alone in a span",
    ),
    Mutant(
        "storage/block_checksums.py",
        "        end = min(position + checksum.block_bytes, checksum.size)",
        "        end = min(position + checksum.block_bytes, checksum.size - 1)",
        MANIFEST,
        "the last byte of a file is not compared",
    ),
    Mutant(
        "storage/json_io.py",
        "    if (len(raw), digest) != (checksum.size, checksum.digest):",
        "    if len(raw) != checksum.size:",
        ("tests/trainer/test_altered_documents.py", "tests/storage/test_manifest.py"),
        "an edit of equal length of a small document is not noticed",
    ),
    Mutant(
        "storage/json_io.py",
        "    if len(found) != len(pairs):",
        "    if False:",
        ("tests/corruption/test_hostile_documents.py::test_json_is_read_within_the_bounds_that_are_stated",),
        "of a key that is there twice the last one counts",
    ),
    # ---- The manifest.
    Mutant(
        "storage/json_io.py",
        "        return not _extensions.decode(value).must_understand",
        "        return True",
        ("tests/storage/test_manifest.py", "tests/families/test_stored.py"),
        "a field that a newer writer requires readers to understand is ignored",
    ),
    Mutant(
        "storage/manifest.py",
        "    if sealed.seal != seal:",
        "    if not sealed.seal:",
        MANIFEST,
        "a manifest that was edited is read",
    ),
    Mutant(
        "storage/manifest.py",
        "    if not raw.endswith(_END):",
        "    if False:",
        MANIFEST,
        "a manifest without its last byte is read",
    ),
    Mutant(
        "storage/manifest.py",
        'return path == root or path.startswith(root.rstrip("/") + "/")',
        'return path == root or path.startswith(root.rstrip("/"))',
        MANIFEST,
        "a link from checkpoint-5 into checkpoint-50 is followed",
    ),
    Mutant(
        "storage/manifest.py",
        "    if found.refusal and not (faults or found.faults):",
        "    if False:",
        MANIFEST,
        "a file that may not be read is called damaged",
    ),
    Mutant(
        "storage/file_checksums.py",
        "    if found > size:\n",
        "    if found > size + 1:\n",
        MANIFEST,
        "a file that is one byte too long passes",
    ),
    Mutant(
        "storage/manifest.py",
        "    strangers = _extra_files(directory, manifest)\n",
        "    strangers: list[str] = []\n",
        MANIFEST,
        "files of another save are taken for part of this one",
    ),
    Mutant(
        "storage/file_checksums.py",
        "    elif len(checksum.blocks) != -(-checksum.size // checksum.block_bytes):",
        "    elif len(checksum.blocks) > -(-checksum.size // checksum.block_bytes):",
        MANIFEST,
        "a checksum with too few block checksums passes, and its last bytes are never compared",
    ),
    # ---- Commit.
    Mutant(
        "storage/commit.py",
        "    for directory in directories_within(staging):\n        fsync_directory(directory)\n\n\ndef finish_commit",
        "\n\ndef finish_commit",
        CRASH,
        "the entries of a checkpoint's directories are not brought to the device before its name",
    ),
    Mutant(
        "storage/commit.py",
        '    """Make the new name durable, then drop the mark of its maker."""\n    fsync_directory(target.parent)\n',
        '    """Make the new name durable, then drop the mark of its maker."""\n',
        COMMIT,
        "the name of a checkpoint is not brought to the device",
    ),
    Mutant(
        "storage/commit.py",
        '    verify_files(staging, msgspec.structs.replace(manifest, files=here), "size", documents=())',
        "    pass",
        COMMIT,
        "a staging directory that lacks a file is committed",
    ),
    Mutant(
        "storage/commit.py",
        "    kept = [_made_visible(path, target) for path in displaced if path not in old]",
        "    kept = []",
        COMMIT,
        "somebody else's files stay under a hidden name",
    ),
    Mutant(
        "storage/commit.py",
        "    old = [path for path in displaced if _is_finished(path) and not _is_only_whole(path, target)]",
        "    old = [path for path in displaced if not _is_only_whole(path, target)]",
        COMMIT,
        "somebody else's files, found under the name, are deleted",
    ),
    Mutant(
        "storage/commit.py",
        "            _restore_backup(displaced, target)\n            raise",
        "            raise",
        COMMIT,
        "a commit that fails between two renames leaves no checkpoint under the name",
    ),
    Mutant(
        "storage/commit.py",
        "        if not _is_finished(path) or _is_taken(target):\n            continue",
        "        if _is_taken(target):\n            continue",
        COMMIT,
        "half of a checkpoint gets its name back",
    ),
    Mutant(
        "storage/commit.py",
        "    if is_directory(staging) and is_own(staging):",
        "    if is_directory(staging):",
        COMMIT,
        "a save that failed deletes another one's directory",
    ),
    Mutant(
        "storage/commit.py",
        "    rename(directory, doomed)\n    fsync_directory(doomed.parent)\n    remove_tree(doomed)",
        "    remove_tree(directory)",
        REMOVAL,
        "a crash while a checkpoint is deleted leaves half of it under its name",
    ),
    Mutant(
        "storage/commit.py",
        "    last = [path for path in own if str(path) in marks]",
        "    last: list[Path] = []",
        COMMIT,
        "an export is recognised before all of its files are there",
    ),
    Mutant(
        "storage/commit.py",
        "    for name in marks:\n        remove_file(target / name)\n    fsync_directory(target)\n",
        "",
        COMMIT,
        "an older export is recognised while its files are being replaced",
    ),
    # ---- Owners.
    Mutant(
        "storage/staging_lock.py",
        "return ProcessState.ALIVE if started == owner.started else ProcessState.DEAD",
        "return ProcessState.ALIVE",
        OWNER,
        "a process number that was given again keeps a dead save's directory",
    ),
    Mutant(
        "storage/staging_lock.py",
        "    if not owner.boot or owner.boot != here.boot or owner.namespace != here.namespace:",
        "    if not owner.boot or owner.boot != here.boot:",
        OWNER,
        "a live save in another container is taken for dead",
    ),
    Mutant(
        "storage/staging_lock.py",
        "    except PermissionError:\n        pass\n    return True",
        "    except PermissionError:\n        return False\n    return True",
        OWNER,
        "another user's live save is taken for dead",
    ),
    # ---- Safetensors.
    Mutant(
        "storage/safetensors.py",
        "        if begin != due or end != due + size or size < 0:",
        "        if end != begin + size or size < 0:",
        READER,
        "a header with gaps or overlaps between its tensors is read",
    ),
    Mutant(
        "storage/safetensors.py",
        "    return Header(tensors, metadata, file_size) if data_begin + due == file_size else None",
        "    return Header(tensors, metadata, file_size)",
        READER,
        "a file that is shorter or longer than its header says is read",
    ),
    Mutant(
        "storage/safetensors.py",
        "        if written != due:\n",
        "        if written > due:\n",
        WRITER,
        "a tensor of which a part was given is written",
    ),
    Mutant(
        "storage/safetensors.py",
        "        if self._left:\n            self._file.abandon()",
        "        if False:\n            self._file.abandon()",
        WRITER,
        "a file with a hole is finished",
    ),
    Mutant(
        "storage/safetensors.py",
        "        if key != self._names[self._next]:",
        "        if key not in self._names:",
        WRITER,
        "a tensor is written into another one's place",
    ),
    # ---- Names.
    Mutant(
        "storage/names.py",
        "    match = _CHECKPOINT.fullmatch(path.name)",
        "    match = _CHECKPOINT.match(path.name)",
        ("tests/storage/test_newest.py", "tests/storage/test_paths.py"),
        "checkpoint-5.old is taken for a checkpoint",
    ),
)
