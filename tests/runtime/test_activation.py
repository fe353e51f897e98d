"""When the CPU runtime becomes active, and when it refuses."""

from __future__ import annotations

import subprocess
import sys

from paddleformers_fc.runtime.forkserver import ForkServer

JOBS = "tests.runtime.jobs_activation"


def test_importing_the_runtime_imports_no_paddle() -> None:
    modules = ("", ".launch", ".forkserver", ".ranks", ".rankmain")
    imports = "; ".join(f"import paddleformers_fc.runtime{module}" for module in modules)
    heavy = "[name for name in ('paddle', 'paddleformers', 'numpy') if name in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; import sys; print({heavy})"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_second_activation_changes_nothing_and_says_nothing(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:twice", 1).values
    assert seen["first"] == seen["second"] == seen["table"]
    assert seen["replaced"] == [True, False]
    assert len(seen["log"]) == 1
    assert "\n" not in seen["log"][0]
    assert all(name in seen["log"][0] for name in seen["table"])


def test_patches_have_names_of_their_own(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:twice", 1).values
    assert len(set(seen["table"])) == len(seen["table"]) > 10


def test_an_unknown_paddle_is_refused_with_both_versions(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:with_another_paddle", 1).values
    assert "paddle 3.3.1" in seen["error"]
    assert "paddle 3.9.0" in seen["error"]
    assert not seen["touched"]
    assert seen["log"] == []


def test_an_unknown_paddleformers_is_refused_with_both_versions(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:with_another_paddleformers", 1).values
    assert "paddleformers 1.2.0" in seen["error"]
    assert "paddleformers 1.3.0" in seen["error"]
    assert not seen["touched"]


def test_on_an_accelerator_nothing_is_mended(bare_ranks: ForkServer) -> None:
    (seen,) = bare_ranks.run(f"{JOBS}:on_an_accelerator", 1).values
    assert seen == {"names": [], "touched": False, "log": []}
