"""When the CPU runtime becomes active, and when it refuses."""

from __future__ import annotations

import subprocess
import sys

from verification.forkserver import ForkServer

JOBS = "tests.cpu_runtime.jobs_activation"


def test_importing_the_runtime_imports_no_paddle() -> None:
    modules = ("", ".launch", ".ranks", ".rankmain")
    imports = "; ".join(f"import paddleformers_fc.cpu_runtime{module}" for module in modules)
    heavy = "[name for name in ('paddle', 'paddleformers', 'numpy') if name in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; import sys; print({heavy})"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_second_activation_changes_nothing_and_logs_nothing(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:twice", 1).values
    assert seen["first"] == seen["second"] == seen["table"]
    assert seen["replaced"] == [True, False]
    assert len(seen["log"]) == 1
    assert "\n" not in seen["log"][0]
    assert all(name in seen["log"][0] for name in seen["table"])


def test_patches_have_names_of_their_own(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:twice", 1).values
    assert len(set(seen["table"])) == len(seen["table"]) > 10


def test_a_renamed_hook_is_refused_before_anything_is_patched(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:with_a_renamed_hook", 1).values
    assert "DygraphShardingOptimizerV2.clear_grad is missing" in seen["error"]
    assert not seen["touched"]
    assert seen["log"] == []


def test_an_unknown_version_whose_hooks_are_the_known_ones_is_a_warning(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:with_another_paddle", 1).values
    assert (seen["error"], seen["touched"]) == ("", True)
    assert "paddle 3.9.0 is installed; the known version is paddle 3.3.1" in seen["log"][0]


def test_on_an_accelerator_nothing_is_patched(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:on_an_accelerator", 1).values
    assert seen == {"names": [], "touched": False, "log": []}
