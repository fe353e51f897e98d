"""Mutants of the package ``catalog``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STORED = ("tests/formats/test_stored.py",)
HUGGING = ("tests/formats/test_huggingface.py",)
DISTCP = ("tests/formats/test_paddle_distcp.py",)
RULES = (
    "tests/corruption/test_hostile_documents.py::test_rules_that_know_a_tensor_as_another_than_its_file_are_refused",
)
UNLISTED = ("tests/corruption/test_hostile_documents.py::test_a_file_that_the_manifest_does_not_list_is_not_read",)
LOADS = ("tests/execute/test_save_and_load.py",)

MUTANTS = (
    Mutant(
        "formats/catalog.py",
        "        if (known.dtype, known.global_shape) == (shard.dtype, shard.global_shape):",
        "        if known.dtype == shard.dtype:",
        STORED,
        "files that say [8, 4] and [16, 4] of one tensor are taken as whole",
    ),
    Mutant(
        "formats/catalog.py",
        "        if (known.dtype, known.global_shape) == (shard.dtype, shard.global_shape):",
        "        if known.global_shape == shard.global_shape:",
        STORED,
        "files that say float32 and bfloat16 of one tensor are taken as whole",
    ),
    Mutant(
        "formats/catalog.py",
        "                places.append((file, begin + fragment.start * width))",
        "                places.append((file, begin))",
        STORED,
        "every box of a range is read from the range's beginning",
    ),
    Mutant(
        "formats/catalog.py",
        "        kind = (shard.dtype, shard.global_shape, shard.box, shard.flat)",
        "        kind = (shard.dtype, shard.global_shape, shard.box)",
        STORED,
        "two ranges of alike tensors share their boxes",
    ),
    Mutant(
        "formats/catalog.py",
        "        key = (shard.dtype, shard.global_shape, *boxes)",
        "        key = (shard.global_shape, *boxes)",
        STORED,
        "tensors of different types share their form",
    ),
    Mutant(
        "formats/catalog.py",
        "                if tensor.form.faults:\n                    yield from tensor.faults()",
        "                pass",
        ("tests/plan/test_build.py", "tests/corruption/test_types_and_shapes.py", "tests/execute/test_opening.py"),
        "a checkpoint whose tensors have holes is opened",
    ),
    Mutant(
        "formats/flex.py",
        " or form.dtype != spec.dtype:",
        ":",
        RULES,
        "a header's type is not held against mapping.json",
    ),
    Mutant(
        "formats/flex.py",
        "        elif (form := tensor.form).shape != spec.shape or",
        "        elif (form := tensor.form).shape is None or",
        RULES,
        "a header's shape is not held against mapping.json",
    ),
    Mutant(
        "formats/flex.py",
        '            if name not in aliases:\n                yield f"{name}: the rules know this tensor, and it is not stored"',
        "            pass",
        ("tests/execute/test_opening.py", "tests/corruption/test_types_and_shapes.py", "tests/cli/test_verify.py"),
        "a checkpoint that lacks a weight as a whole is opened",
    ),
    Mutant(
        "formats/flex.py",
        "            if parameter_of(role, name) not in rules.targets:",
        "            if role == MODEL_STATE and name not in rules.targets:",
        ("tests/corruption/test_types_and_shapes.py", "tests/execute/test_opening.py", "tests/cli/test_verify.py"),
        "a state of no parameter is opened",
    ),
    Mutant(
        "formats/flex.py",
        "    _refuse_unlisted(directory, manifest)\n",
        "",
        UNLISTED,
        "a mapping that the manifest does not list is read",
    ),
    Mutant(
        "formats/huggingface.py",
        "    catalog = Catalog(directory, {MODEL_STATE: tensors}, identities)",
        "    catalog = Catalog(directory, {MODEL_STATE: tensors})",
        ("tests/execute/test_collective_checksums.py",),
        "open weights that are replaced while they are loaded are not noticed",
    ),
    Mutant(
        "formats/huggingface.py",
        "        if tensor not in headers[name].tensors",
        "        if False",
        HUGGING,
        "a tensor that its file does not hold is no error of the index",
    ),
    Mutant(
        "formats/huggingface.py",
        "    for tensor, names in holders.items():\n        added[names[0]].append(tensor)",
        "    pass",
        HUGGING,
        "what a listed file holds and the index does not name is dropped",
    ),
    Mutant(
        "formats/huggingface.py",
        "    missing = sorted(name for name, found in zip(files, there, strict=True) if not found)\n    if missing:",
        "    missing = sorted(name for name, found in zip(files, there, strict=True) if not found)\n    if False:",
        HUGGING,
        "missing files of an index are found one by one",
    ),
    Mutant(
        "formats/paddle_distcp.py",
        '        if index.fields.get("replica_id"):\n            continue',
        "        pass",
        DISTCP,
        "replicas in Paddle's own checkpoints are taken for second copies",
    ),
    Mutant(
        "formats/paddle_distcp.py",
        "piece.length != shard.size * piece.width or piece.width",
        "piece.width",
        (
            "tests/formats/test_paddle_distcp.py"
            "::test_a_damaged_stock_checkpoint_is_refused_and_the_fault_is_named[an array without its last row]",
        ),
        "an array of Paddle's that is shorter than its shard is read",
    ),
    Mutant(
        "formats/paddle_distcp.py",
        "    faults.extend(catalog.faults())\n",
        "",
        DISTCP,
        "a checkpoint of Paddle's with holes is opened",
    ),
    Mutant(
        "formats/paddle_distcp.py",
        "    _refuse_links(directory, found)\n",
        "",
        DISTCP,
        "links in a checkpoint of Paddle's are followed out of it",
    ),
)
