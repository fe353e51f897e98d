"""Links and paths in the documents lead to what exists, their commands run, and the reference has all of the code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.limits import LIMIT, ROOT
from tools import reference

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")
CODE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
ELSEWHERE = {
    "--role ema_state": "tests/trainer/test_ema.py::test_adapters_are_averaged_and_exported",
    "export FLEX merged": "tests/trainer/test_lora.py::test_adapters_are_merged_into_their_own_base_only",
    "convert PEFT": "tests/formats/test_adapters.py::test_adapters_of_peft_are_equal_after_a_flex_checkpoint_and_back",
    "tp=8,pp=4,sharding=8 --html": "tests/cli/test_plan_page.py::test_the_text_names_the_page",
    "MASTER_ADDR=10.0.0.1 MASTER_PORT=8080 paddleformers-cli": "tests/nodes/test_two_nodes.py::by_stock_command",
    "paddleformers-cli": "tests/trainer/test_entry_points.py::"
    "test_the_stock_command_line_trains_two_ranks_and_another_layout_resumes",
    "recipes/script.py": "tests/trainer/test_entry_points.py::"
    "test_the_script_of_the_recipes_trains_on_two_ranks_and_resumes_on_one",
    "recipes/stream_weights.py": "tests/trainer/test_stream.py::test_another_process_computes_the_same_logits",
    "paddle.distributed.launch --master": "tests/nodes/test_two_nodes.py::by_launch",
    "pkill": "tests/trainer/test_save_on_signal.py::test_ranks_of_paddles_launcher_save_when_it_is_ended",
    **dict.fromkeys(
        ("500 adapters", "500 merged"),
        "tests/trainer/test_entry_points.py::test_the_stock_command_line_trains_resumes_and_exports_adapters",
    ),
    **dict.fromkeys(
        ("#SBATCH", "& pid=$!", "trap ", "wait "),
        "tests/cli/test_train.py::test_the_lines_for_slurm_save_on_its_signal_and_queue_the_job_again",
    ),
}
"""Parts of commands that are not run here, and the tests that run them."""
MARKED = re.compile(r"\bnetwork\b")
"""The remark of a line that no test runs."""
PATH = re.compile(r"`((?:paddleformers_fc|tests|recipes|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_heading_and_path_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if link and not (page.parent / link).exists()]
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not missing
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", CODE.sub("", text)):
        assert anchor in _anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_every_function_in_the_table_of_subjects_is_in_its_file() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`paddleformers_fc/[^|]+) \| ([^|]*) \|$", _page("architecture"), re.MULTILINE)
    for files, functions in rows:
        first, *others = (ROOT / name for name in re.findall(r"`([\w./]+\.py)`", files))
        found = "".join(
            path.read_text() for path in (first, *others, *(first.parent / o.name for o in others)) if path.exists()
        )
        for name in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"^(?:def|class) {name}\b", found, re.MULTILINE), (files, name)


def test_the_reference_of_options_has_every_option_with_its_default() -> None:
    from paddleformers_fc.trainer.options import FlexFields

    rows = dict(re.findall(r"^\| `(\w*flex_\w+)` \| .* \| `?([^`|]+)`? \| [^|]+ \|$", _page("options"), re.MULTILINE))
    fields = {name: str(value) for name, value in vars(FlexFields()).items()}
    assert rows == {name: "false" if value == "False" else value for name, value in fields.items()}


def test_the_reference_of_commands_has_every_command_with_every_argument_and_option() -> None:
    import typer

    from paddleformers_fc.cli.main import app

    rows = dict(re.findall(r"^\| `([\w-]+)([^\n]*)$", _page("commands"), re.MULTILINE))
    commands = typer.main.get_group(app).commands
    assert set(rows) == set(commands)
    for name, command in commands.items():
        options = {text for one in command.params for text in (*one.opts, *one.secondary_opts) if text.startswith("--")}
        assert set(re.findall(r"--[\w-]+", rows[name])) == options - {"--json"}, name
        arguments = {str(one.metavar) for one in command.params if not one.opts[0].startswith("-")}
        assert all(one in rows[name] for one in arguments), name


def test_the_python_api_in_the_readme_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli.support import save
    from tests.execute.simulated import canonical

    save(tmp_path / "out/checkpoint-500", canonical())
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "paddleformers_fc.open" in block]
    exec(block, {})
    assert (tmp_path / "exported/model.safetensors").is_file()


CHINESE = {
    "README.zh-CN.md": "README.md",
    "docs/zh/quick-start.md": "docs/quick-start.md",
    "docs/zh/resume-under-another-layout.md": "docs/how-to/resume-under-another-layout.md",
    "docs/zh/concepts.md": "docs/concepts.md",
    "docs/zh/troubleshooting.md": "docs/troubleshooting.md",
    "docs/zh/options.md": "docs/options.md",
}
"""The English page of every Chinese one."""
KEY = re.compile(r"`[^`\n]+`")


@pytest.mark.parametrize("page", CHINESE)
def test_a_chinese_page_has_the_sections_links_code_and_table_rows_of_the_english_one(page: str) -> None:
    chinese, english = ((ROOT / name).read_text(encoding="utf-8") for name in (page, CHINESE[page]))
    blocks = [[_without_comments(one[0]) for one in CODE.finditer(text)] for text in (chinese, english)]
    assert blocks[0] == blocks[1]
    prose = [CODE.sub("", text) for text in (english, chinese)]
    levels = [[heading.split(" ")[0] for heading in HEADING.findall(text)] for text in prose]
    assert levels[1] == levels[0]
    rows = [[line.count("|") for line in text.splitlines() if line.startswith("|")] for text in prose]
    assert rows[1] == rows[0]
    assert set(KEY.findall(prose[1])) == set(KEY.findall(prose[0]))
    links = [_targets(name, text) for name, text in zip((CHINESE[page], page), prose, strict=True)]
    assert links[1] == links[0]


def test_every_chinese_page_of_the_site_has_an_english_one() -> None:
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs/zh").glob("*.md")}
    assert pages == CHINESE.keys() - {"README.zh-CN.md"}


def _targets(page: str, text: str) -> set[str]:
    """Return the files that a page links to; a Chinese page counts as the English one."""
    found = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    named = {os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in found}
    return {CHINESE.get(name, name.replace("docs/zh/", "docs/")) for name in named} - {"README.md"}


def _without_comments(block: str) -> str:
    return re.sub(r"(^|  +)# .*$", "", block, flags=re.MULTILINE)


def test_every_command_in_the_documents_has_its_options() -> None:
    import typer

    from paddleformers_fc.cli.main import app

    known = {
        name: {text for one in command.params for text in (*one.opts, *one.secondary_opts)} | {"--help"}
        for name, command in typer.main.get_group(app).commands.items()
    }
    for page in PAGES:
        spans = re.findall(r"`([^`\n]*)`", CODE.sub("", page.read_text(encoding="utf-8")))
        for command in (*(command for command, _ in _commands(page)), *spans):
            if found := re.match(r"(?:\w+=\S+ )*paddleformers-fc ([a-z][a-z-]*)(.*)", command):
                assert found[1] in known, (page.name, command)
                assert set(re.findall(r"(?<= )--[\w-]+", found[2])) <= known[found[1]], (page.name, command)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the commands of the documents name."""
    from tests.cli.support import SIZES, open_weights, run, save
    from tests.execute.simulated import canonical
    from verification.demo.assets import prepare

    directory = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "recipes", directory / "recipes")
    assets = prepare(directory / "demo_out/assets")
    for name in ("out/checkpoint-500", "out/llama/checkpoint-3"):
        save(directory / name, canonical(), tp=2, config=SIZES)
    # Trainings resume them, and a checkpoint is that of the model that a training names.
    open_weights(assets.models["llama"], canonical(), {**SIZES, "fuse_rms_norm": False})
    shutil.copytree(directory / "out/checkpoint-500", directory / "bucket/run/checkpoint-500")
    assert run("export", directory / "out/checkpoint-500", directory / "exported").code == 0
    (directory / ".venv").symlink_to(sys.prefix)
    recipe = yaml.safe_load((ROOT / "recipes/llama_pt.yaml").read_text(encoding="utf-8"))
    paths = {"train_dataset_path": str(assets.corpus), "eval_dataset_path": str(assets.corpus)}
    for name in ("my.yaml", "job.yaml"):
        (directory / name).write_text(yaml.safe_dump({**recipe, **paths}), encoding="utf-8")
    return directory


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings are prepared and not started, and make prints what it would run."""
    from tests.cli.support import run

    monkeypatch.chdir(workplace)
    monkeypatch.setenv("POD_IP", "10.0.0.1")  # This machine's hostname need not have an address for others.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for command, remark in _commands(page):
        if MARKED.search(remark) or any(part in command for part in ELSEWHERE):
            continue
        elif command.startswith("make "):
            _shell(f"{command} --dry-run", ROOT)
        elif "paddleformers-fc" in command:
            words = shlex.split(command.partition(" & ")[0].replace("s3://", f"file://{workplace}/"))
            for name, _, value in (word.partition("=") for word in words[: words.index("paddleformers-fc")]):
                monkeypatch.setenv(name, value)
            words = words[words.index("paddleformers-fc") + 1 :]
            words += {"train": ["--dry-run"], "export": ["--replace"]}.get(words[0], [])
            outcome = run(*words)
            assert outcome.code == 0, (command, outcome.err)
        else:
            _shell(command, workplace)


def test_examples_run_by_other_tests_are_on_a_page_and_in_their_files() -> None:
    commands = [command for page in PAGES for command, _ in _commands(page)]
    assert not [part for part in ELSEWHERE if not any(part in command for command in commands)]
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_code_blocks_without_a_language_are_not_commands() -> None:
    begin = re.compile(r"^ *(paddleformers-fc|make|pip|python|\w+=\S+) ", re.MULTILINE)
    for page in PAGES:
        blocks = CODE.findall(page.read_text(encoding="utf-8"))
        assert not [body for _, language, body in blocks if language in ("", "sh", "text") and begin.search(body)], page


def _shell(command: str, directory: Path) -> None:
    """Run a line in a shell."""
    done = subprocess.run(
        ["sh", "-ec", command], cwd=directory, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, (command, done.stderr)


def _commands(page: Path) -> list[tuple[str, str]]:
    """The commands in the shell blocks of a page, and their remarks."""
    blocks = [body for _, language, body in CODE.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    lines = [line for body in blocks for line in re.sub(r"\\\n\s*", "", body).splitlines()]
    parts = [re.fullmatch(r"(.*?)((?:^|\s)# .*)?", line.strip()) for line in lines]
    return [(part[1].strip(), part[2] or "") for part in parts if part is not None and part[1].strip()]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    headings = HEADING.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lstrip("#").strip()).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def catalogue() -> str:
    """The page of errors, for which the sources of all modules are read."""
    return reference.errors()


def test_the_reference_has_every_command_name_and_error_of_the_code(catalogue: str) -> None:
    import typer

    import paddleformers_fc
    from paddleformers_fc import errors
    from paddleformers_fc.cli.main import app

    pages = reference.commands()
    commands = typer.main.get_group(app).commands
    assert re.findall(r"^### (.*)$", pages, re.MULTILINE) == sorted(commands)
    named = {text for command in commands.values() for one in command.params for text in one.opts}
    assert not [text for text in named if text.startswith("--") and f"`{text}`" not in pages]
    api = reference.api()
    assert not [name for name in paddleformers_fc.__all__ if f"### {name}\n" not in api]
    assert re.findall(r"^## (.*)$", catalogue, re.MULTILINE) == list(errors.BY_NAME)


def test_the_catalogue_of_errors_has_the_messages_of_the_code_with_reason_and_next_step(catalogue: str) -> None:
    sections = re.split(r"^## ", catalogue, flags=re.MULTILINE)[1:]
    assert not [
        section.split()[0]
        for section in sections
        if not section.startswith("FlexError") and not ("**Why:**" in section and "**What to do:**" in section)
    ]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", catalogue, re.MULTILINE)
    assert ("*path* ends too early.", "The file was truncated. Restore it or use another checkpoint.") in rows


def test_messages_that_troubleshooting_quotes_are_those_of_the_code(catalogue: str) -> None:
    messages = re.sub(r"[*\\]", "", catalogue)
    quoted = re.findall(r"\"([^\"]+)\"", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"))
    assert quoted
    assert not [part for text in quoted for part in text.split(" ... ") if part not in messages]
