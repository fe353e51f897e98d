"""Write pages of the site from the code: commands, Python API and errors.

The pages are strings of Markdown; :mod:`tools.site` adds them to the site. They are written at every build, so that
they cannot differ from the code, and without Paddle.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paddleformers_fc"
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")
_EXAMPLE = re.compile(r"^Examples?:\n((?: {4}.*\n?)+)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`(?:~?[\w.]*\.)?(\w+)`")


def commands() -> str:
    """Return the section of all commands with arguments, options and help."""
    import typer

    from paddleformers_fc.cli.main import PROGRAM, app

    parts: list[str] = []
    for name, command in sorted(typer.main.get_group(app).commands.items()):
        arguments = [one for one in command.params if not one.opts[0].startswith("-")]
        options = [one for one in command.params if one.opts[0].startswith("-")]
        usage = " ".join([PROGRAM, name, *(_argument(one) for one in arguments), "[OPTIONS]"])
        parts += [f"### {name}", f"```text\n{usage}\n```", _markdown(command.help or "")]
        rows = [(f"`{_metavar(one)}`", "", _help(one)) for one in arguments]
        rows += [(f"`{'`, `'.join((*one.opts, *one.secondary_opts))}`", _default(one), _help(one)) for one in options]
        parts.append(_table(("argument or option", "default", "meaning"), rows))
    return "## Command line\n\n" + _lines(*parts)


def api() -> str:
    """Return the page of the names of ``import paddleformers_fc`` and of the classes that they return."""
    import paddleformers_fc

    homes = {name: paddleformers_fc._HOME[name] for name in sorted(paddleformers_fc.__all__, key=str.lower)}
    parts = ["Names of `import paddleformers_fc`, then the classes of what they return.", "## Names"]
    for name, home in homes.items():
        parts += _definition("###", name, _found(home, name))
    parts += ["## Results"]
    for node in _tree(PACKAGE / "api.py").body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_" and node.name not in homes:
            parts += _definition("###", node.name, node)
    return "# Python API\n\n" + _lines(*parts)


def errors() -> str:
    """Return the catalogue of errors: per class what it means, why it occurs, what to do, and its messages."""
    from paddleformers_fc import errors as module
    from paddleformers_fc.cli.main import exit_code

    messages = _messages()
    parts = [
        "Every error is of one of these classes. It contains the problem, the place, the evidence and the next step. "
        "Parts of a message that differ from case to case are in *italics*."
    ]
    for name, kind in module.BY_NAME.items():
        base = "" if kind is module.FlexError else f"A [{kind.__base__.__name__}](#{kind.__base__.__name__.lower()}). "
        parts += [f"## {name}", f"{base}Exit code of a command: {exit_code(kind(''))}.", _markdown(kind.__doc__ or "")]
        rows = sorted(messages.get(name, ()), key=lambda row: row[0].lstrip("*").lower())
        parts += [_table(("message", "next step"), rows)] if rows else []
    return "# Errors\n\n" + _lines(*parts)


def _messages() -> dict[str, set[tuple[str, str]]]:
    """Return message and next step of every error that the package constructs, by class."""
    from paddleformers_fc.errors import BY_NAME

    found: dict[str, set[tuple[str, str]]] = {}
    trees = [_tree(path) for path in sorted(PACKAGE.rglob("*.py"))]
    shared = _constants(trees)
    for tree in trees:
        constants = shared | _constants([tree])
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME and node.args:
                steps = [one.value for one in node.keywords if one.arg == "next_step"]
                message = _text(node.args[0], constants)
                if re.search(r"[a-z]{3}", re.sub(r"\*[^*]*\*", "", message)):
                    step = _text(steps[0], constants) if steps else ""
                    found.setdefault(node.func.id, set()).add((_cell(message), _cell(step)))
    return found


def _constants(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """Return the values of the constants of modules by their names."""
    return {
        target.id: node.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """Return a text of the code with its variable parts in italics."""
    from paddleformers_fc.text import install_command

    match node:
        case ast.Constant(value=value):
            return _escaped(str(value))
        case ast.JoinedStr(values=values):
            return "".join(_text(one, constants) for one in values)
        case ast.FormattedValue(value=value):
            return _text(value, constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case ast.IfExp(body=body, orelse=other):
            return " / ".join(filter(None, (_text(body, constants), _text(other, constants))))
        case ast.Call(func=ast.Name(id="install_command"), args=[ast.Constant(value=extra)]):
            return f"`{install_command(extra)}`"
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in constants:
            return _text(constants[name], {})
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"*{name.strip('_').replace('_', ' ')}*"
    return "*...*"


_BY_MODULE = "__getattr__"


def _definition(mark: str, name: str, node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Yield heading, signature and docstring of a function, or of a class and its public methods."""
    yield f"{mark} {name}"
    if isinstance(node, ast.FunctionDef) and node.name != _BY_MODULE:
        yield f"```python\n{_signature(node)}\n```"
    yield _markdown(ast.get_docstring(node) or "")
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            yield from _definition(f"{mark}#", f"{name}.{method.name}", method)


def _signature(node: ast.FunctionDef) -> str:
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returned}"


def _found(home: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the definition of a name of a module, or the function that makes it when it is first used."""
    path = ROOT / (home.replace(".", "/") + ".py")
    known = {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return known[name if name in known else _BY_MODULE]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _markdown(docstring: str) -> str:
    """Turn a docstring into Markdown: roles into code, and the items of a section into a list."""
    text = _ROLE.sub(r"`\1`", inspect.cleandoc(docstring)).replace("``", "`")
    text = _EXAMPLE.sub(lambda found: f"```python\n{inspect.cleandoc(found[1])}\n```\n", text)
    text = re.sub(r"^(Why|What to do):", r"**\1:**", text, flags=re.MULTILINE)
    lines: list[str] = []
    section = False
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section = True
            lines += ["", f"**{found[1]}**", ""]
        elif section and re.match(r" {4}\S", line):
            item = re.match(r" {4}([\w*, ]+): (.*)", line)
            lines.append(f"* `{item[1]}`: {item[2]}" if item else f"* {line.strip()}")
        elif section and line.startswith(" "):
            lines.append(f"    {line.strip()}")
        else:
            section = section and not line.strip()
            lines.append(line)
    return "\n".join(lines).strip()


def _help(one: Any) -> str:
    return _cell(_escaped(one.help or ""))


def _default(one: Any) -> str:
    given = getattr(one.default, "value", one.default)
    return f"`{given}`" if given not in (None, "", False, ()) and not callable(given) else ""


def _metavar(one: Any) -> str:
    return str(one.metavar or one.name.upper())


def _argument(one: Any) -> str:
    name = _metavar(one) + (" ..." if one.nargs == -1 else "")
    return name if one.required else f"[{name}]"


def _escaped(text: str) -> str:
    return re.sub(r"([*_<\[\]`])", r"\\\1", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _lines(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
