"""What holds for every verb: exit codes, JSON, misuse, and what is imported."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc import __version__, errors
from paddleformers_fc.cli.main import PROGRAM, exit_code, main
from paddleformers_fc.execute import output_directory
from tests.cli.support import run
from tests.harness.limits import LIMIT

VERBS = (
    "inspect",
    "list",
    "explain",
    "doctor",
    "verify",
    "diff",
    "plan",
    "export",
    "train",
    "register-path",
)
ROOT = Path(__file__).resolve().parents[2]

# Runs the verbs in a process where Paddle cannot be imported. An attempt is reported even when it is swallowed.
WITHOUT_PADDLE = """
import json, sys

attempts = []

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"paddle", "paddleformers", "paddlefleet", "torch", "transformers"}:
            attempts.append(name)
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
from paddleformers_fc.cli.main import main

codes = [main(command) for command in json.loads(sys.argv[1])]
print(json.dumps({"codes": codes, "attempts": attempts}), file=sys.stderr)
"""

# Prints which of the named modules one command line has imported.
IMPORTED = """
import json, sys
from paddleformers_fc.cli.main import main

main(json.loads(sys.argv[1]))
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]), file=sys.stderr)
"""


# Prints how many modules one command line imports beside those of the interpreter.
COUNTED = """
import json, sys
before = set(sys.modules)
from paddleformers_fc.cli.main import main

main(json.loads(sys.argv[1]))
print(json.dumps(len(set(sys.modules) - before)), file=sys.stderr)
"""


def python(code: str, *arguments: str) -> Any:
    """The last line that ``code`` printed on the error stream, as JSON."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_only_commands_that_train_import_paddle(four: Path, weights: Path, stored: Path, tmp_path: Path) -> None:
    commands = [
        ["--help"],
        ["inspect", str(four), "--tensors"],
        ["verify", str(four)],
        ["diff", str(four), str(weights)],
        ["export", str(four), str(tmp_path / "export")],
        ["plan", str(stored), "--to", "tp=2,pp=2"],
        ["register-path"],
        *([verb, "--help"] for verb in VERBS),
    ]
    found = python(WITHOUT_PADDLE, json.dumps(commands))
    assert found == {"codes": [0] * len(commands), "attempts": []}
    path = Path(run("register-path").out.strip())
    assert path.is_absolute()
    assert path.is_file()
    assert path.parts[-2:] == ("trainer", "register.py")
    assert run("register-path", "--json").document == {"custom_register_path": str(path)}


def test_an_import_of_paddle_would_be_noticed(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("output_dir: out\n")
    found = python(WITHOUT_PADDLE, json.dumps([["train", str(config), "--dry-run"]]))
    assert found["attempts"]
    assert found["codes"] == [2]


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        (["register-path", "--json"], []),
        (["inspect", "{four}", "--json"], ["numpy"]),
        (["inspect", "{four}"], ["numpy", "rich.table"]),
    ],
)
def test_a_command_imports_no_more_than_it_needs(four: Path, command: list[str], modules: list[str]) -> None:
    command = [argument.format(four=four) for argument in command]
    assert python(IMPORTED, json.dumps(command), "numpy", "rich.table", "yaml", "paddle") == modules


@pytest.mark.parametrize(("command", "most"), [(["--help"], 150), (["register-path", "--json"], 250)])
def test_a_command_starts_with_few_imports(command: list[str], most: int) -> None:
    """Each takes about a millisecond; numpy alone would be a hundred, Paddle thousands."""
    assert python(COUNTED, json.dumps(command)) < most


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "paddleformers_fc", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout == f"paddleformers-fc {__version__}\n"


def test_a_shell_completes_commands_and_directories(four: Path) -> None:
    for words, found in ((f"{PROGRAM} expl", "explain"), (f"{PROGRAM} list {str(four)[:-1]}", f"{four}/")):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        environment = {**os.environ, **asked, "_PADDLEFORMERS_FC_COMPLETE": "complete_bash"}
        done = subprocess.run(
            [sys.executable, "-m", "paddleformers_fc"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert found in done.stdout.split()


def test_the_help_has_whole_sentences_within_80_columns() -> None:
    outcome = run("--help")
    assert outcome.code == 0
    assert "..." not in outcome.out.partition("Commands:")[2]
    assert "dtypes, files and tensors" in " ".join(outcome.out.split())
    assert max(map(len, outcome.out.splitlines())) <= 80


MISUSE = [
    ["inspect"],
    ["inspect", "/nowhere"],
    ["inspect", __file__],
    ["inspect", "/", "--bogus"],
    ["verify", "/", "--level", "some"],
    ["diff", "/"],
    ["export", "/"],
    ["export", "/", __file__],
    ["train", "/nowhere.yaml"],
    ["train", "/"],
    ["train", __file__, "--nproc", "0"],
    ["train", __file__, "--nproc", "two"],
    ["convert", "/", "/nowhere", "--format", "gguf"],
    ["bogus"],
]


@pytest.mark.parametrize("command", MISUSE, ids=" ".join)
def test_invalid_usage_is_reported_on_the_error_stream_and_as_a_document_under_json(command: list[str]) -> None:
    outcome = run(*command)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Error: " in outcome.err
    outcome = run(*command, "--json")
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.document["error"] == "OptionError"
    assert outcome.document["what"]
    assert outcome.document["next_step"]


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", ""],
        ["verify", ""],
        ["aoa", ""],
        ["plan", "", "--to", "tp=2"],
        ["diff", "", "/"],
        ["diff", "/", ""],
        ["export", "", "/nowhere"],
        ["export", "/", ""],
    ],
    ids=lambda command: " ".join(command),
)
def test_an_empty_argument_is_not_the_current_directory(command: list[str]) -> None:
    outcome = run(*command, "--json")
    assert outcome.code == 2
    assert outcome.document["error"] == "OptionError"
    assert "path of a directory is empty" in outcome.document["what"]


def test_without_a_command_the_help_is_shown() -> None:
    outcome = run()
    assert outcome.code == 2
    assert "verify" in outcome.out + outcome.err


def test_exit_code_1_means_a_fault_of_a_checkpoint() -> None:
    faults = {
        "NotACheckpoint",
        "Corrupt",
        "FormatError",
        "MappingError",
        "MismatchError",
        "Diverged",
        "CheckpointError",
    }
    for name, kind in errors.BY_NAME.items():
        assert exit_code(kind("It went wrong.")) == (1 if name in faults else 2)


def raising(error: BaseException) -> Any:
    """A function that raises."""

    def fail(*args: Any) -> Any:
        raise error

    return fail


def test_a_fault_of_the_program_and_an_interrupt_do_not_return_1(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_directory, "inspect_directory", raising(ZeroDivisionError("by zero")))
    outcome = run("inspect", four)
    assert outcome.code == 2
    assert "ZeroDivisionError: by zero" in outcome.err
    assert "Traceback" in outcome.err
    assert run("inspect", four, "--json").document["what"] == "ZeroDivisionError: by zero"
    monkeypatch.setattr(output_directory, "inspect_directory", raising(KeyboardInterrupt()))
    interrupted = run("inspect", four)
    assert (interrupted.code, interrupted.out, "Traceback" in interrupted.err) == (130, "", False)


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ImportError("numpy's kind of import error") from error

sys.meta_path.insert(0, Interrupted())
signal.signal(signal.SIGINT, signal.default_int_handler)
from paddleformers_fc.__main__ import main
sys.exit(main())
"""


def test_an_interrupt_during_imports_is_quiet() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.fixture
def nameless(four: Path, tmp_path: Path) -> Path:
    """A checkpoint in a directory whose name is bytes and no text."""
    directory = tmp_path / os.fsdecode(b"out\xff")
    try:
        directory.mkdir()
    except OSError:
        pytest.skip("names are text on this file system")
    return Path(shutil.copytree(four, directory / os.fsdecode(b"checkpoint-3\xfe")))


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "export"])
def test_a_file_name_that_is_not_utf8_is_printed(nameless: Path, verb: str) -> None:
    more = {"diff": [nameless], "export": [nameless.parent / os.fsdecode(b"hf\xfd")]}.get(verb, [])
    outcome = run(verb, nameless, *more, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert str(nameless) in outcome.document.values() or verb == "diff"


def test_a_text_stream_gets_such_a_name_escaped(nameless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="utf-8", errors="strict", write_through=True))
    assert main(["inspect", str(nameless)]) == 0
    assert rb"out\udcff/checkpoint-3\udcfe" in shown.getvalue()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("command", "both", "unbuffered"),
    [
        (["verify", "{four}"], True, "1"),
        (["--help"], False, ""),
        (["inspect", "{four}", "--tensors"], False, "1"),
        (["verify", "{four}", "--json"], False, ""),
        (["bogus"], False, ""),
        (["bogus"], True, ""),
        (["register-path"], False, ""),
    ],
)
def test_a_closed_pipe_does_not_return_1(four: Path, command: list[str], both: bool, unbuffered: str) -> None:
    code = "import sys; from paddleformers_fc.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, *(part.format(four=four) for part in command)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        errors = writer if both else subprocess.PIPE
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(argv, cwd=ROOT, env=environment, stdout=writer, stderr=errors, check=False)
    finally:
        os.close(writer)
    closed = command != ["bogus"] or both
    assert done.returncode == (141 if closed else 2)
    if not both:
        assert b"Traceback" not in done.stderr
        assert b"BrokenPipe" not in done.stderr


@pytest.mark.parametrize("command", ["demo", "matrix", "derive", "rederive"])
def test_a_removed_command_is_refused_with_what_replaces_it(command: str) -> None:
    outcome = run(command, "--output", "x")
    assert outcome.code == 2
    assert f"The command '{command}' was removed: " in outcome.err
