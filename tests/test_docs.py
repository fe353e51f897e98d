"""Links and paths in the documents lead to what exists, and their commands run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")
CODE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
ELSEWHERE = {
    "paddleformers-fc derive": "tests/cli/test_derive.py",
    "--role ema_state": "tests/trainer/test_ema.py",
    "convert PEFT": "tests/formats/test_adapters.py",
    "export FLEX merged": "tests/trainer/test_lora_export.py",
    "500 adapters": "tests/trainer/test_workflows.py",
    "500 merged": "tests/trainer/test_workflows.py",
    "tp=8,pp=4,sharding=8 --html": "tests/cli/test_plan_page.py",
    "paddleformers-cli": "tests/trainer/test_entry_points.py",
    "recipes/script.py": "tests/trainer/test_entry_points.py",
    "paddle.distributed.launch": "tests/nodes/test_two_nodes.py",
    "pip install": "tests/test_extras.py",
}
"""Parts of commands that are not run here, and the tests that run them."""
PATH = re.compile(r"`((?:paddleformers_fc|tests|recipes|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_path_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if link and not (page.parent / link).exists()]
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not missing


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        other = page.parent / target if target else page
        assert anchor in _anchors(other), f"{target}#{anchor}"


def test_the_chinese_readme_has_the_sections_and_the_code_of_the_english_one() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    assert CODE.findall(chinese) == CODE.findall(english)
    prose = [CODE.sub("", text) for text in (english, chinese)]
    levels = [[heading.split(" ")[0] for heading in HEADING.findall(text)] for text in prose]
    assert levels[1] == levels[0]
    links = [set(re.findall(r"\]\(([^)#]+)\)", text)) for text in prose]
    assert links[1] - {"README.md"} <= links[0]


def test_every_command_in_the_documents_has_its_options() -> None:
    import typer

    from paddleformers_fc.cli.main import app

    known = {
        name: {text for one in command.params for text in (*one.opts, *one.secondary_opts)} | {"--help"}
        for name, command in typer.main.get_group(app).commands.items()
    }
    for page in PAGES:
        spans = re.findall(r"`([^`\n]*)`", CODE.sub("", page.read_text(encoding="utf-8")))
        for command in (*_commands(page), *spans):
            if found := re.match(r"(?:\w+=\S+ )*paddleformers-fc ([a-z][a-z-]*)(.*)", command):
                assert found[1] in known, (page.name, command)
                assert set(re.findall(r"(?<= )--[\w-]+", found[2])) <= known[found[1]], (page.name, command)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the commands of the documents name."""
    from paddleformers_fc.verification.demo.assets import prepare
    from tests.cli.support import run, save
    from tests.cli.test_plan import SIZES
    from tests.execute.simulated import canonical

    directory = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "recipes", directory / "recipes")
    assets = prepare(directory / "demo_out/assets")
    for name in ("out/checkpoint-500", "out/llama/checkpoint-3"):
        save(directory / name, canonical(), tp=2, config=SIZES)
    shutil.copytree(directory / "out/checkpoint-500", directory / "bucket/run/checkpoint-500")
    assert run("export", directory / "out/checkpoint-500", directory / "exported").code == 0
    recipe = yaml.safe_load((ROOT / "recipes/llama_pt.yaml").read_text(encoding="utf-8"))
    paths = {"train_dataset_path": str(assets.corpus), "eval_dataset_path": str(assets.corpus)}
    for name in ("my.yaml", "job.yaml"):
        (directory / name).write_text(yaml.safe_dump({**recipe, **paths}), encoding="utf-8")
    return directory


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings are prepared and not started; lines for a shell, a scheduler or signals are not run."""
    from tests.cli.support import run

    monkeypatch.chdir(workplace)
    monkeypatch.setenv("POD_IP", "10.0.0.1")  # This machine's hostname need not have an address for others.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in _commands(page):
        if part := next((part for part in ELSEWHERE if part in command), None):
            assert (ROOT / ELSEWHERE[part]).is_file()
        elif command.startswith("make "):
            assert targets is not None
            assert command.split()[1] in targets[1].split(), command
        elif "paddleformers-fc" in command:
            words = shlex.split(command.partition(" & ")[0].replace("s3://", f"file://{workplace}/"))
            for name, _, value in (word.partition("=") for word in words[: words.index("paddleformers-fc")]):
                monkeypatch.setenv(name, value)
            words = words[words.index("paddleformers-fc") + 1 :]
            words += {"train": ["--dry-run"], "export": ["--replace"]}.get(words[0], [])
            outcome = run(*words)
            assert outcome.code == 0, (command, outcome.err)
        else:
            assert re.match(r"\. |#SBATCH|trap |wait |pkill ", command), command


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    from tools import reference

    catalogue = re.sub(r"[*\\]", "", reference.errors())
    quoted = re.findall(r"\"([^\"]+)\"", _page("troubleshooting"))
    assert quoted
    assert not [part for text in quoted for part in text.split(" ... ") if part not in catalogue]


def _commands(page: Path) -> list[str]:
    """The commands in the shell blocks of a page, without remarks."""
    blocks = [body for _, language, body in CODE.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    lines = [line for body in blocks for line in re.sub(r"\\\n\s*", "", body).splitlines()]
    return [line for line in (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in lines) if line]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    headings = HEADING.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lstrip("#").strip()).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
