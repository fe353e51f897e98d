"""What holds for every verb: exit codes, documents, what is refused, and what is imported."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import paddleformers_fc
from paddleformers_fc import __version__, errors
from paddleformers_fc.cli.main import PROGRAM, app, exit_code, main
from paddleformers_fc.errors import BY_NAME, FlexError
from paddleformers_fc.execute import output_directory
from tests.cli.support import document_of, run, save
from tests.execute.simulated import canonical
from tests.harness.limits import ROOT
from tests.harness.processes import WITHOUT_PADDLE, python
from tools.json_page import DOCUMENTS, FREE

ERROR = {"error", "what", "where", "evidence", "next_step"}


def test_every_command_has_a_documented_document() -> None:
    documented = {name.split()[0] for name in (*DOCUMENTS, *FREE)}
    assert documented == set(typer.main.get_group(app).commands)


COMMANDS = {
    "inspect": ["inspect", "{stored}", "--tensors"],
    "inspect output": ["inspect", "{out}"],
    "list": ["list", "{out}"],
    "explain": ["explain", "{stored}", "model.norm.weight"],
    "doctor": ["doctor", "{out}", "--no-hooks"],
    "verify": ["verify", "{stored}"],
    "diff": ["diff", "{stored}", "{other}"],
    "plan": ["plan", "{stored}", "--to", "tp=2,dp=2"],
    "export": ["export", "{stored}", "{hf}"],
    "convert": ["convert", "{stored}", "{flex}"],
    "clean": ["clean", "{out}"],
    "aoa": ["aoa", "llama", "--toy"],
    "families": ["families"],
}


@pytest.fixture
def places(stored: Path, tmp_path: Path) -> dict[str, Path]:
    """The directories of these commands."""
    arrays = canonical()
    arrays["model.norm.weight"][0] += 1
    new = {name: tmp_path / name for name in ("hf", "flex")}
    return {"stored": stored, "out": stored.parent, "other": save(tmp_path / "other", arrays), **new}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_document_has_the_documented_keys_and_types(case: str, places: dict[str, Path]) -> None:
    outcome = run(*(part.format(**places) for part in COMMANDS[case]), "--json")
    assert outcome.code == (1 if case == "diff" else 0), outcome.out
    found = msgspec.json.decode(outcome.out, type=DOCUMENTS[case.split()[0]])
    # Every key is documented, and every documented key exists.
    assert msgspec.json.decode(msgspec.json.encode(found)) == outcome.document


def test_a_failed_verification_has_its_own_keys_and_those_of_an_error(copy: Path) -> None:
    (copy / "config.json").unlink()
    document = run("verify", copy, "--json").document
    assert document.keys() == ERROR | set(DOCUMENTS["verify"].__struct_fields__)
    assert set(msgspec.json.decode(FlexError("It failed.").to_wire())) == ERROR


@pytest.fixture
def unconfigured(stored: Path, tmp_path: Path) -> Path:
    """A checkpoint in Paddle's format without a configuration, which is in ``model/config.json`` next to it."""
    source = tmp_path / "unconfigured"
    assert run("convert", stored, source, "--format", "distcp").code == 0
    (tmp_path / "model").mkdir()
    (source / "config.json").rename(tmp_path / "model/config.json")
    return source


@pytest.mark.parametrize("named", ["model", "model/config.json"])
def test_four_commands_read_a_checkpoint_with_the_configuration_that_is_named(
    stored: Path, unconfigured: Path, tmp_path: Path, named: str
) -> None:
    hf, flex = tmp_path / "hf", tmp_path / "flex"
    commands = [
        ("diff", stored, unconfigured),
        ("diff", unconfigured, unconfigured),
        ("export", unconfigured, hf),
        ("plan", unconfigured, "--to", "tp=2"),
        ("convert", unconfigured, flex),
    ]
    for command in commands:
        refused = run(*command)
        assert refused.code > 0
        assert "--config DIR of diff, plan, export and convert, or config= of open" in refused.err
        done = run(*command, "--config", tmp_path / named)
        assert (done.code, done.err) == (0, "")
    assert run("diff", stored, hf).code == run("diff", stored, flex).code == 0
    sizes = [json.loads((place / "config.json").read_text())["hidden_size"] for place in (hf, tmp_path / "model")]
    assert sizes[0] == sizes[1]


def test_a_configuration_that_differs_from_that_of_the_checkpoint_is_rejected_with_both_names(
    stored: Path, unconfigured: Path, tmp_path: Path
) -> None:
    own = json.loads((tmp_path / "model/config.json").read_text())
    more = {**own, "seq_length": 128, "torch_dtype": "bfloat16"}
    for name, config in (("equal", own), ("more", more), ("different", {**own, "rope_theta": 5})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for place in ("equal", "more", "different", "nowhere", "different/job.yaml"):
        commands = [
            ("diff", stored, stored),
            ("export", stored, tmp_path / place / "hf"),
            ("plan", stored, "--to", "tp=2"),
            ("convert", stored, tmp_path / place / "flex"),
        ]
        for command in commands:
            done = run(*command, "--config", tmp_path / place)
            assert done.code == (0 if place in ("equal", "more") else 2), done.err
            if place == "different":
                assert "rope_theta" in done.err
                assert all(str(one / "config.json") in done.err for one in (stored, tmp_path / place))
            elif done.code:
                assert f"{tmp_path / place} has no config.json" in done.err
    with pytest.raises(FlexError, match="names a different one"):
        paddleformers_fc.open(stored).convert(tmp_path / "new", config=tmp_path / "different")
    # The configuration is used for the side without one, whatever the other side has.
    assert run("diff", stored, unconfigured, "--config", tmp_path / "different").code == 0


def test_a_configuration_that_a_flex_checkpoint_lost_is_copied_back_and_not_named(
    stored: Path, weights: Path, tmp_path: Path
) -> None:
    lost = Path(shutil.copytree(stored, tmp_path / "lost"))
    (lost / "config.json").unlink()
    commands = [("diff", lost, stored), ("export", lost, tmp_path / "hf"), ("plan", lost, "--to", "tp=2")]
    for command in commands:
        failed = run(*command, "--config", weights)
        assert (failed.code, failed.out) == (1, "")
        assert "--config (config=) cannot replace a file with a recorded checksum" in failed.err
        assert f"next: Copy config.json of another checkpoint of this run to {lost / 'config.json'}." in failed.err
    shutil.copy(stored / "config.json", lost)
    assert [run(*command).code for command in commands] == [0, 0, 0]


# A program that runs commands where Paddle cannot be imported.
PURE = f"""{WITHOUT_PADDLE}
import json
from paddleformers_fc.cli.main import main

codes = [main(command) for command in json.loads(sys.argv[1])]
print(json.dumps({{"codes": codes, "attempts": attempts}}), file=sys.stderr)
"""

# A program that runs one command line and prints the modules which it imports.
IMPORTED = """
import json, sys
before = set(sys.modules)
from paddleformers_fc.cli.main import main

main(json.loads(sys.argv[1]))
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


def printed(code: str, *arguments: str) -> Any:
    """The last line that ``code`` printed on the error stream, as JSON."""
    return json.loads(python("-c", code, *arguments).stderr.splitlines()[-1])


def test_only_commands_that_train_import_paddle(places: dict[str, Path]) -> None:
    commands = [[part.format(**places) for part in one] for one in COMMANDS.values() if one[0] != "doctor"]
    helps = [["--help"], ["register-path"], *([verb, "--help"] for verb in typer.main.get_group(app).commands)]
    found = printed(PURE, json.dumps([*commands, *helps]))
    assert found == {"codes": [int(one[0] == "diff") for one in commands] + [0] * len(helps), "attempts": []}
    path = Path(run("register-path").out.strip())
    assert path.is_absolute()
    assert path.is_file()
    assert path.parts[-2:] == ("trainer", "register.py")
    assert document_of("register-path") == {"custom_register_path": str(path)}


@pytest.mark.parametrize(
    ("command", "heavy", "most"),
    [
        (["--help"], [], 150),
        (["register-path", "--json"], [], 250),
        (["inspect", "{four}", "--json"], ["numpy"], None),
        (["inspect", "{four}"], ["numpy", "rich.table"], None),
    ],
)
def test_a_command_imports_no_more_than_it_needs(
    four: Path, command: list[str], heavy: list[str], most: int | None
) -> None:
    """Each module takes about a millisecond; numpy alone would be a hundred, Paddle thousands."""
    imported = printed(IMPORTED, json.dumps([argument.format(four=four) for argument in command]))
    assert [name for name in ("numpy", "rich.table", "yaml", "paddle") if name in imported] == heavy
    assert most is None or len(imported) < most


def test_a_shell_completes_commands_and_directories(four: Path) -> None:
    for words, found in ((f"{PROGRAM} expl", "explain"), (f"{PROGRAM} list {str(four)[:-1]}", f"{four}/")):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        asked["_PADDLEFORMERS_FC_COMPLETE"] = "complete_bash"
        done = python("-m", "paddleformers_fc", check=False, **asked)
        assert found in done.stdout.split()


def test_the_help_has_whole_sentences_within_80_columns_and_is_shown_without_a_command() -> None:
    shown = run("--help")
    assert shown.code == 0
    assert "..." not in shown.out.partition("Commands:")[2]
    assert "dtypes, files and tensors" in " ".join(shown.out.split())
    assert max(map(len, shown.out.splitlines())) <= 80
    outcome = run()
    assert (outcome.code, "verify" in outcome.out + outcome.err) == (2, True)
    assert python("-m", "paddleformers_fc", "--version").stdout == f"paddleformers-fc {__version__}\n"


def test_exit_code_1_means_a_fault_of_a_checkpoint() -> None:
    codes = {name: exit_code(kind("It went wrong.")) for name, kind in errors.BY_NAME.items()}
    assert {name for name, code in codes.items() if code == 1} == {
        *("NotACheckpoint", "Corrupt", "FormatError", "MappingError", "MismatchError", "Diverged", "CheckpointError")
    }
    assert set(codes.values()) == {1, 2}


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
    done = python("-c", INTERRUPTED_IMPORT, "--help", check=False)
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


def test_a_file_name_that_is_not_utf8_is_printed_and_escaped_in_text(
    nameless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["inspect"], ["export", nameless.parent / os.fsdecode(b"hf\xfd")]):
        outcome = run(command[0], nameless, *command[1:], "--json")
        assert (outcome.code, outcome.err) == (0, "")
        assert str(nameless) in outcome.document.values()
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
        (["verify", "{four}", "--json"], False, ""),
        (["bogus"], False, ""),
        (["bogus"], True, ""),
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


MODEL = ("config.json", "flex_checksums.json")


@pytest.fixture(scope="module")
def tree(kept: Path, stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of the commands, which none of them changes."""
    root = tmp_path_factory.mktemp("refusals")
    for name in ("one", "four", "open"):
        shutil.copytree(kept / name, root / name)
    shutil.copytree(stored, root / "sized")
    shutil.copytree(kept / "open", root / "bare", ignore=shutil.ignore_patterns(*MODEL))
    shutil.copytree(kept / "open", root / "out")
    for name in ("out", "runs"):
        shutil.copytree(kept / "four", root / name / "checkpoint-3")
    next((shutil.copytree(stored, root / "lost") / "model_state").iterdir()).unlink()
    for name, text in {
        "mine/config.json": '{"mine": 1}',
        "empty/.keep": "",
        "job.yaml": "output_dir: out",
        "statements.yaml": "aoa_statements: ['model.norm.weight -> model.norm.weight']",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "loop").symlink_to(root / "loop")
    before = _contents(root)
    yield root
    assert _contents(root) == before


def _contents(root: Path) -> dict[Path, bytes]:
    """What is below a directory, with empty directories."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("inspect", 2, "Missing argument"),
        ("inspect nowhere", 2, "does not exist"),
        ("inspect job.yaml", 2, "is a file"),
        ("inspect one --bogus", 2, "--bogus"),
        ("inspect ''", 2, "path of a directory is empty"),
        ("inspect one zzz", 2, "No stored tensor matches 'zzz'."),
        ("inspect one zzz", 2, "must match the complete name; write '*zzz*'"),
        ("inspect one '*q_kv_proj*'", 2, "model.layers.{0...1}.self_attn.qkv_proj.weight"),
        ("inspect one model.norms.weight", 2, "model.norm.weight"),
        ("inspect runs '*'", 1, "Name a checkpoint inside it: checkpoint-3."),
        ("inspect nosuch://bucket/run", 2, "Protocol not known"),
        ("list four", 2, "is a checkpoint"),
        ("clean four --yes", 2, "is a checkpoint"),
        ("verify one --level some", 2, "some"),
        ("explain four model.layers.1.self_attn.kproj.weight", 2, "mean model.layers.1.self_attn.k_proj.weight?"),
        ("inspect four model.norm.weigth", 2, "did you mean model.norm.weight?"),
        ("diff four one --role Model_sate", 2, "did you mean model_state?"),
        ("export four x --role model_sate", 2, "did you mean model_state?"),
        ("inspect fuor", 2, "did you mean four?"),
        ("explain four/model_sate model.norm.weight", 2, "did you mean model_state?"),
        ("explain four model.layers.1.self_attn.kproj.weight", 2, "inspect four --tensors"),
        ("diff one ''", 2, "path of a directory is empty"),
        ("diff one four --role moments", 2, "Unknown role 'moments'"),
        ("diff one four --role ema_state", 2, "Neither side holds a tensor of ema_state"),
        ("diff four open --role optimizer_state", 2, "open contains open weights and has no optimizer_state."),
        ("export one job.yaml", 2, "is a file"),
        *((f"export one new --max-shard-size={size}", 2, "size") for size in ("''", "5", "-1GB")),
        ("export one new --max-shard-size=0B", 2, "max_shard_bytes=0"),
        ("export one loop", 2, "loop"),
        ("export one four --replace", 2, "Nothing is written into a checkpoint"),
        ("export four four/a/b --replace", 2, "Nothing is written into a checkpoint"),
        ("export one open", 2, "--replace"),
        ("export one mine", 2, "config.json is there"),
        ("export out new", 1, "contains open weights and is not a flex checkpoint"),
        ("export one http://localhost/open", 2, "An export cannot be written to http://localhost/open"),
        ("convert one http://localhost/open", 2, "an object store such as"),
        ("convert one new --format gguf", 2, "gguf"),
        ("convert four mine", 2, "is not empty"),
        ("convert four four/new", 2, "into its source"),
        ("convert bare new", 2, "config.json"),
        ("aoa empty", 2, "config.json"),
        ("aoa empty --toy", 2, "--toy"),
        ("aoa llama", 2, "hidden_size="),
        ("aoa llama", 2, "--toy"),
        ("aoa llama --toy --tp 3", 2, "num_attention_heads: 8"),
        ("aoa llama --toy --tp 0", 2, "--tp"),
        ("aoa unheard_of", 2, "llama"),
        ("plan sized --to tp=4", 2, "num_key_value_heads=2 is not divisible by tp=4"),
        ("plan sized --to tp=2,zp=3", 2, "zp: unknown axis"),
        ("plan sized --to ' '", 2, "The grid to plan for is empty."),
        ("plan sized --to tp=2 --dtype float12", 2, "known: float32, bfloat16, float16"),
        ("export one x --dtype bfloat61", 2, "did you mean bfloat16?"),
        ("export one x --dtype fp16", 2, "known: float32, bfloat16"),
        ("plan sized --to tp=2 --dtype float16", 1, "model.norm.weight: stored float32, expected float16"),
        ("plan sized --to tp=2 --dtype float16", 1, "--dtype of plan) to change between float32 and bfloat16"),
        ("plan lost --to tp=2", 1, "is missing"),
        ("plan bare --to tp=2", 2, "Name a directory with the model's config.json: --config DIR"),
        ("plan sized --to tp=2 --aoa-config job.yaml", 2, "The file contains no aoa_config."),
        ("plan open --to tp=2 --aoa-config statements.yaml", 2, "aoa_config"),
        ("plan sized --to tp=2 --html sized/flex_checkpoint.json", 2, "--html"),
        ("train nowhere.yaml", 2, "does not exist"),
        ("train one", 2, "is a directory"),
        ("train job.yaml --nproc 0", 2, "--nproc"),
        ("bogus", 2, "No such command"),
        *((f"{name} --output x", 2, f"The command '{name}' was removed: ") for name in ("demo", "derive")),
    ],
)
def test_a_command_is_rejected_with_the_fault_and_a_next_step(
    tree: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tree)
    outcome = run(*shlex.split(command))
    assert (outcome.code, outcome.out) == (code, "")
    assert words in outcome.err
    outcome = run(*shlex.split(command), "--json")
    assert (outcome.code, outcome.err) == (code, "")
    assert outcome.document["what"]
    assert outcome.document["next_step"]
    error = outcome.document["error"]
    assert error == "OptionError" if code == 2 else exit_code(BY_NAME[error]("")) == code
