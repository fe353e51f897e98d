"""Links and paths in the documents lead to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")
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


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
