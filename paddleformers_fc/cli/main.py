"""The command line ``paddleformers-fc``: its commands and exit codes.

====  ================================================================================================================
code  meaning
====  ================================================================================================================
0     success
1     a fault was found: a checkpoint is damaged, incomplete or does not fit, or two checkpoints differ
2     invalid usage, or an operation that failed without a result about a checkpoint
130   interrupted by Ctrl-C
141   the reader of the output has closed it, as ``head`` does
====  ================================================================================================================

``train`` returns the code of its job. Commands are declared here; each is implemented in a module that is imported when
the command runs. Only ``train``, ``demo``, ``derive`` and ``matrix`` import Paddle. ``--help`` takes a fifth of a
second.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from paddleformers_fc import __version__
from paddleformers_fc.cli import output
from paddleformers_fc.errors import CheckpointError, FlexError, MappingError, MismatchError, NotACheckpoint, OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from paddleformers_fc.storage.paths import AnyPath

PROGRAM = "paddleformers-fc"
_HELP = f"Run {PROGRAM} --help, or a verb with --help."
RIGHT, WRONG, MISUSE, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141

_T = TypeVar("_T")

app = typer.Typer(
    help="Flex checkpoints for PaddleFormers: train, look at, check, compare and export them.",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Flex checkpoints for PaddleFormers: train, look at, check, compare and export them."""


class NameMatch(str, Enum):
    """How much of a checkpoint's files is checked."""

    off = "off"
    size = "size"
    full = "full"


class Tied(str, Enum):
    """Which copy of a tied tensor is read."""

    refuse = "refuse"
    first = "first"
    last = "last"


Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="A flex checkpoint or open weights: a path, or a URL such as s3://...")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.command()
def inspect(
    directory: Directory,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="List the stored tensors whose names match, such as '*q_proj*'."),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List stored tensors: all, or those that match.")] = False,
    as_json: Json = False,
) -> int:
    """Show what a checkpoint holds: who saved it, its roles, dtypes and files, and its tensors."""
    from paddleformers_fc.cli import inspection

    found = inspection.inspect(_named(directory), pattern or ("*" if tensors else None))
    _present(found, inspection.show, as_json)
    return RIGHT


@app.command()
def verify(
    directory: Directory,
    level: Annotated[
        NameMatch,
        typer.Option(
            help="off: manifest and headers. size: also that files are there, and documents. full: every byte."
        ),
    ] = NameMatch.full,
    as_json: Json = False,
) -> int:
    """Check a checkpoint: files and checksums, headers, coverage, the proof of its mapping, tied tensors."""
    import msgspec

    from paddleformers_fc.cli import verification

    source = _named(directory)
    with output.working(f"checking {source}"):
        outcome, problem = verification.verify(source, level.value)
    if as_json:
        wire = msgspec.json.decode(problem.to_wire()) if problem else {}
        output.print_json({**wire, **msgspec.to_builtins(outcome)})
    else:
        verification.show(outcome, output.console())
        if problem:
            output.print_error(problem, as_json=False)
    return exit_code(problem) if problem else RIGHT


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint or open weights: a path or a URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    role: Annotated[
        str | None, typer.Option(help="Compare this role alone: model_state, master_weight, optimizer_state, ...")
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints tensor by tensor (md5 in canonical form), across parallel layouts and formats.

    Beside a directory of open weights only model_state is compared.
    """
    from paddleformers_fc.cli import difference

    one, other = _named(a), _named(b)
    with output.working(f"comparing {one} and {other}"):
        try:
            found = difference.diff(one, other, role)
        except NotACheckpoint as error:  # Nothing was compared: 1 would say that they are different.
            output.print_error(error, as_json)
            return MISUSE
    _present(found, difference.show, as_json)
    return RIGHT if found.equal else WRONG


@app.command()
def aoa(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A family, such as llama, or a directory with config.json.")
    ],
    reverse: Annotated[bool, typer.Option("--reverse", help="From the model to open weights.")] = False,
    toy: Annotated[bool, typer.Option("--toy", help="Of a family: its statements for the sizes of a toy.")] = False,
    as_json: Json = False,
) -> int:
    """Print a model's mapping as AOA statements, which stock FlexCheckpoint reads.

    They follow from the sizes in the model's config.json. A family alone has none, and takes --toy.
    """
    from paddleformers_fc.cli import statements

    _present(statements.statements(model, reverse=reverse, toy=toy), statements.show, as_json)
    return RIGHT


@app.command()
def plan(
    directory: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint or open weights: a path or a URL.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="GRID", help="The target: dp, tp, pp, vpp, ep, sharding, stage, split, ..., as in tp=2,pp=2,dp=4."
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="The target model's dtype; by default the stored one.")] = None,
    as_json: Json = False,
) -> int:
    """Show what loading onto other ranks would do, for each of them: bytes, reads, memory, what is fresh or dropped.

    Nothing is loaded, and no rank is needed. A grid that the model cannot have is refused with the numbers.
    """
    from paddleformers_fc.cli import planning

    source = _named(directory)
    with output.working(f"planning {source}"):
        found = planning.plan(source, to, dtype)
    _present(found, planning.show, as_json)
    return RIGHT


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A finished flex checkpoint: a path or a URL.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where the Hugging Face files go.")],
    max_shard_size: Annotated[
        str,
        typer.Option(
            help="Bound on the tensors of one file: 500MB, 5GB, 4GiB, ... A header comes on top, and a larger tensor "
            "has a file of its own."
        ),
    ] = "5GB",
    verify: Annotated[
        NameMatch, typer.Option(help="How the checkpoint is checked first; only full finds flipped bits.")
    ] = NameMatch.full,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model that is in the directory.")] = False,
    tied: Annotated[
        Tied, typer.Option(help="Which copy of a tied tensor is exported, by pipeline stage, where copies differ.")
    ] = Tied.refuse,
    as_json: Json = False,
) -> int:
    """Write a checkpoint's weights as Hugging Face files; prints them and one md5, the same for every layout."""
    from paddleformers_fc.cli import exporting
    from paddleformers_fc.storage.paths import expand_user, require_local
    from paddleformers_fc.trainer.options import parse_size

    source, target = _named(checkpoint), require_local(expand_user(directory), "An export")
    if target.exists() and not target.is_dir():
        raise typer.BadParameter(f"Directory {directory!r} is a file.")
    with output.working(f"exporting {source}"):
        found = exporting.export(source, target, parse_size(max_shard_size), verify.value, replace, tied.value)
    _present(found, exporting.show, as_json)
    return RIGHT


@app.command()
def rederive(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A finished flex checkpoint on this machine.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values of keys that config.json lacks and the tensors leave open."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Derive the mapping of a checkpoint again that an older version saved; only mapping.json and the manifest change.

    Needed where a checkpoint is refused because its mapping was derived from an incomplete configuration.
    """
    from paddleformers_fc.cli import rederiving
    from paddleformers_fc.storage.paths import require_local

    directory = require_local(_named(checkpoint), "A checkpoint whose mapping is derived again")
    with output.working(f"deriving the mapping of {directory}"):
        found = rederiving.rederive(directory, settings or [])
    _present(found, rederiving.show, as_json)
    return RIGHT


@app.command()
def clean(
    directory: Annotated[str, typer.Argument(metavar="OUTPUT_DIR", help="The directory that holds the checkpoints.")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove all that may be removed, without asking.")] = False,
    as_json: Json = False,
) -> int:
    """Remove what interrupted saves left beside the checkpoints: asks for each, never removes a checkpoint.

    Make sure that no job on another host saves in this directory. --json without
    --yes lists and removes nothing.
    """
    from paddleformers_fc.cli import cleaning
    from paddleformers_fc.storage.paths import require_local
    from paddleformers_fc.text import size_text

    source = _named(directory)

    def confirmed(one: cleaning.LeftoverFacts) -> bool:
        if yes or as_json:
            return yes
        return typer.confirm(f"Remove {one.name} ({size_text(one.bytes)})? {one.why}", err=True)

    found = cleaning.clean(require_local(str(source), "Cleaning"), confirmed)
    _present(found, cleaning.show, as_json)
    return RIGHT


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", exists=True, dir_okay=False, help="A PaddleFormers configuration.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys that replace the configuration's.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local ranks on a machine without an accelerator; 1 by default.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print command and environment; start nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Run the stock PaddleFormers training of a YAML, with flex checkpoints.

    Without an accelerator: on --nproc require_local processes over gloo.

    With one: handed over to paddleformers-cli, which starts
    paddle.distributed.launch on the visible devices.

    Logs go to output_dir/log (then log-2, ...); what is worth reading of rank
    0's is shown, under --json on the error stream. The exit code is the job's.
    """
    from paddleformers_fc.cli import training

    job = training.prepare(config, nproc, overrides or [])
    if dry_run:
        _present(training.plan(job), training.show_plan, as_json)
        return RIGHT
    if not job.flex:
        idle = f", and without effect: {', '.join(job.idle)}" if job.idle else ""
        sys.stderr.write(f"{PROGRAM}: flex_checkpoint is not true, so checkpoints are PaddleFormers' own{idle}.\n")
    ended, problem = training.run(job, echo=sys.stderr if as_json else sys.stdout)
    if as_json:
        import msgspec

        wire = msgspec.json.decode(problem.to_wire()) if problem else {}
        with output.closed_pipe_ignored():
            output.print_json({**wire, **msgspec.to_builtins(ended)})
        return ended.returncode
    with output.closed_pipe_ignored():
        if ended.report:
            sys.stderr.write(f"{ended.report}\n")
        if problem:
            output.print_error(problem, as_json)
        training.show(ended, output.console())
    return ended.returncode


@app.command()
def demo(
    directory: Annotated[
        Path, typer.Option("--output", file_okay=False, help="The directory to work in; an earlier demo is replaced.")
    ] = Path("demo_out"),
    as_json: Json = False,
) -> int:
    """Train tiny models, resume them under other layouts, export them, and show that the numbers are the same."""
    from paddleformers_fc.cli.start_checks import require_paddleformers
    from paddleformers_fc.verification.demo import demo as run_demo

    require_paddleformers("The demo")
    return run_demo(directory, as_json)


@app.command()
def derive(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Open weights with their config.json.")],
    settle: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="An AOA statement that answers a question; repeatable.")
    ] = None,
    native: Annotated[
        bool, typer.Option(help="Use the AOA statements of the model's class where they can be proved.")
    ] = True,
    family: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="Also write what was derived as a family to be registered.")
    ] = None,
    fused: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER=GEOMETRY", help="How a layer is cut that is fused in files too; for --family."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Derive how the model of a config.json is made of open weights, where no family declares it.

    Builds the model's layers without their numbers, compares names and shapes, and
    proves the result. What is not clear is asked, with the lines that settle it.
    """
    from paddleformers_fc.cli import deriving

    source = _named(directory)
    if not isinstance(source, Path):
        raise typer.BadParameter(f"Directory {str(source)!r} is not on this machine.")
    with output.working(f"deriving {source}"):
        found = deriving.derive(source, settle or [], native, family, fused or [])
    _present(found, deriving.show, as_json)
    return RIGHT


@app.command()
def matrix(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE.yaml", exists=True, dir_okay=False, help="A matrix of layouts.")
    ],
    only: Annotated[
        str | None, typer.Option(metavar="'FROM->TO'", help="Run these cells alone; * stands for any layout.")
    ] = None,
    work: Annotated[
        Path, typer.Option(file_okay=False, help="Where it trains; what an earlier run found there is kept.")
    ] = Path("out/matrix"),
    documents: Annotated[
        Path, typer.Option("--output", file_okay=False, help="Where the table and the picture go.")
    ] = Path("docs/verification"),
    as_json: Json = False,
) -> int:
    """Verify that every layout resumes what every other saved: md5 there and back, exports, losses; a table of it."""
    from paddleformers_fc.verification.matrix import run_matrix

    return run_matrix(recipe, only, work, documents, as_json)


@app.command()
def register_path(as_json: Json = False) -> int:
    """Print the file that a YAML for the stock paddleformers-cli names as its custom_register_path."""
    from paddleformers_fc.trainer.register import PATH

    if as_json:
        output.print_json({"custom_register_path": str(PATH)})
    else:
        print(PATH)
    return RIGHT


def exit_code(error: FlexError) -> int:
    """1 where the error says that a checkpoint is wrong, else 2."""
    return WRONG if isinstance(error, (CheckpointError, MappingError, MismatchError)) else MISUSE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: without the program's name; by default those of this process.
    Returns:
        the exit code.
    """
    code = CLOSED
    with output.closed_pipe_ignored():
        code = _run(arguments)
        sys.stdout.flush()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    output.escape_what_is_no_text()
    try:
        return int(command.main(args=arguments, prog_name=PROGRAM, standalone_mode=False) or RIGHT)
    except FlexError as error:
        output.print_error(error, as_json)
        return exit_code(error)
    except typer.TyperException as error:
        if as_json:
            output.print_error(OptionError(error.format_message(), next_step=_HELP), as_json)
        else:
            error.show()  # type: ignore[attr-defined]  # Every such exception has it.
        return MISUSE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        # A traceback would end in code 1, which says that a checkpoint is wrong. Nothing was found out about it.
        traceback.print_exc()
        if as_json:
            output.print_error(FlexError(f"{type(error).__name__}: {error}", next_step="Report this fault."), as_json)
        return MISUSE


def _named(text: str) -> AnyPath:
    """The directory of an argument. One of a store is looked at when it is opened: not every store knows directories.

    Raises:
        OptionError: the URL cannot be that of a directory, or the argument is empty.
        typer.BadParameter: there is no such directory on this machine.
    """
    from paddleformers_fc.storage.paths import expand_user, parse_path

    found = parse_path(expand_user(text))
    if isinstance(found, Path) and not found.is_dir():
        fault = "is a file" if found.exists() else "does not exist"
        raise typer.BadParameter(f"Directory {str(found)!r} {fault}.")
    return found


def _present(found: _T, show: Callable[[_T, Console], None], as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    else:
        show(found, output.console())
