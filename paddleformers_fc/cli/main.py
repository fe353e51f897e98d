"""The command line ``paddleformers-fc``: its commands and exit codes.

====  ================================================================================================================
code  meaning
====  ================================================================================================================
0     success
1     a fault was found: a checkpoint is damaged, incomplete or does not fit, or two checkpoints differ
2     invalid usage, or the command failed before it could check a checkpoint
130   interrupted by Ctrl-C
141   the reader of the output has closed the pipe, as ``head`` does
====  ================================================================================================================

``train`` returns the code of its job. Each command imports its implementation when it runs; ``--help`` does not import
Rich, and most commands do not import Paddle.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperGroup

from paddleformers_fc import __version__, output, progress_display as progress
from paddleformers_fc.errors import CheckpointError, FlexError, MappingError, MismatchError, NotACheckpoint, OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from paddleformers_fc.storage.paths import AnyPath

PROGRAM = "paddleformers-fc"
_HELP = f"Run {PROGRAM} --help, or a command with --help."
OK, FAULT, MISUSE, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141

_T = TypeVar("_T")


_REMOVED = {
    "demo": "run make demo in the repository",
    "matrix": "run make matrix in the repository",
    "derive": "a class without a declared family is used through its own AOA statements",
    "rederive": "checkpoints of earlier versions are not read",
}


class _Commands(TyperGroup):
    """A command group whose help shows the first sentence of every command in full."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _REMOVED:
            ctx.fail(f"The command '{args[0]}' was removed: {_REMOVED[args[0]]}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


# Without markup, --help and usage errors do not import Rich, which would dominate their time.
app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    help="Flex checkpoints for PaddleFormers: train, inspect, verify, compare and export.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Flex checkpoints for PaddleFormers: train, inspect, verify, compare and export."""


Level = Literal["off", "size", "full"]
"""How thoroughly to verify."""

Tied = Literal["refuse", "first", "last"]
"""Which copy of a tied tensor to read."""


def _directories(incomplete: str) -> list[str]:
    """Return the directories that begin with a text, for shell completion."""
    parent = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    found = [f"{path}/" for path in parent.expanduser().glob("*") if path.is_dir()]
    return sorted(path for path in found if path.startswith(incomplete.removeprefix("./")))


Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A flex checkpoint or open weights: a path, or a URL such as s3://...",
        autocompletion=_directories,
    ),
]
Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CKPT", help="A checkpoint or open weights: a path or a URL.", autocompletion=_directories),
]
OutputDirectory = Annotated[
    str,
    typer.Argument(metavar="OUTPUT_DIR", help="The directory of the checkpoints.", autocompletion=_directories),
]
Config = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="DIR_OR_FILE",
        help="The model's config.json or its directory, for a checkpoint without one.",
    ),
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
    """Show the content of a checkpoint: its run, roles, dtypes, files and tensors."""
    from paddleformers_fc.cli import inspection
    from paddleformers_fc.execute.output_directory import damaged_facts, inspect_directory

    source = _opened(directory)
    try:
        found = inspect_directory(source, pattern or ("*" if tensors else None))
    except CheckpointError:
        readable = None if as_json else damaged_facts(source)
        if readable is not None:
            inspection.show(readable, output.console(), files="recorded")
        raise
    _present(found, inspection.show, as_json)
    return OK


@app.command("list")
def list_checkpoints(directory: OutputDirectory, as_json: Json = False) -> int:
    """List the checkpoints of an output directory: steps, layouts, sizes, whether each is complete; and leftovers.

    A checkpoint is complete if all files have the recorded sizes, and metadata files the recorded checksums. If the
    newest one in OUTPUT_DIR is not, the exit code is 1. The list includes the run's local tier on this machine.
    """
    from paddleformers_fc.cli import inspection
    from paddleformers_fc.execute.output_directory import is_newest_faulty, list_output
    from paddleformers_fc.trainer.tiers import local_tier_of

    output_dir = _local(directory, "Listing")
    found = list_output(output_dir, local_tier_of(output_dir))
    _present(found, inspection.show_listed, as_json)
    return FAULT if is_newest_faulty(found) else OK


@app.command()
def explain(
    checkpoint: Checkpoint,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A canonical or stored name; states have a suffix such as .moment1_0.")
    ],
    as_json: Json = False,
) -> int:
    """Trace a tensor to its files and byte offsets, and show the mapping rules."""
    import paddleformers_fc
    from paddleformers_fc.cli import explaining

    source = _opened(checkpoint)
    with progress.working(f"explaining {name}"):
        found = paddleformers_fc.open(source).explain(name)
    _present(found, explaining.show, as_json)
    return OK


@app.command()
def doctor(
    directory: Annotated[
        str | None,
        typer.Argument(metavar="OUTPUT_DIR", help="Where a job saves or will save.", autocompletion=_directories),
    ] = None,
    hooks: Annotated[bool, typer.Option(help="Import Paddle, and check the hooks of this package in it.")] = True,
    all_faults: Annotated[
        bool, typer.Option("--all", help="List the known faults of the installed Paddle and PaddleFormers.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Diagnose this environment and an output directory: versions, disk, space, and what a resume would do.

    To measure the disk, a file of 128 MiB is written to the directory, read and deleted.
    """
    from paddleformers_fc.cli import verification
    from paddleformers_fc.trainer.diagnosis import diagnose

    output_dir = None if directory is None else _local(directory, "A diagnosis")
    with progress.working("checking the environment"):
        found = diagnose(output_dir, hooks)
    show = verification.show_all_of_diagnosis if all_faults else verification.show_diagnosis
    _present(found, show, as_json)
    return OK if found.passed else FAULT


@app.command()
def verify(
    directory: Directory,
    level: Annotated[
        Level,
        typer.Option(
            help="off: manifest and headers. size: also sizes of files, and metadata files. full: every byte."
        ),
    ] = "full",
    as_json: Json = False,
) -> int:
    """Verify a checkpoint: files, checksums, headers, coverage, the proof of its mapping, and tied tensors."""
    import msgspec

    from paddleformers_fc.cli import verification
    from paddleformers_fc.execute.verify import verify_checkpoint

    source = _named(directory)
    with progress.working(f"checking {source}"):
        outcome, problem = verify_checkpoint(source, level)
    if as_json:
        wire = msgspec.json.decode(problem.to_wire()) if problem else {}
        output.print_json({**wire, **msgspec.to_builtins(outcome)})
    else:
        verification.show(outcome, output.console())
        if problem:
            output.print_error(problem, as_json=False)
    return exit_code(problem) if problem else OK


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint or open weights: a path or a URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other checkpoint.")],
    role: Annotated[
        str | None, typer.Option(help="Compare only this role: model_state, master_weight, optimizer_state, ...")
    ] = None,
    atol: Annotated[float, typer.Option(help="Tolerance: |a - b| <= atol + rtol * |b| for all elements.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative tolerance; if both are 0, bits are compared.")] = 0.0,
    config: Config = "",
    as_json: Json = False,
) -> int:
    """Compare two checkpoints tensor by tensor (md5 in canonical form), across parallel layouts and formats.

    If one of them is a directory of open weights, only model_state is compared.
    """
    from paddleformers_fc.cli import difference

    one, other = _opened(a), _opened(b)
    with progress.working(f"comparing {one} and {other}"):
        try:
            found = difference.compare(one, other, config or None, role, atol, rtol)
        except NotACheckpoint as error:  # Not code 1, which means that tensors differ.
            output.print_error(error, as_json)
            return MISUSE
    _present(found, difference.show, as_json)
    return OK if found.equal else FAULT


@app.command()
def aoa(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A family, such as llama, or a directory with config.json.")
    ],
    reverse: Annotated[bool, typer.Option("--reverse", help="Map the model to open weights.")] = False,
    toy: Annotated[bool, typer.Option("--toy", help="Print the statements of a family for a toy model.")] = False,
    tp: Annotated[
        int | None, typer.Option(min=1, help="The tensor-parallel degree, if the statements depend on it.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Print a model's mapping as AOA statements, as Paddle's FlexCheckpoint reads them.

    They depend on the sizes in the model's config.json. A family name has no sizes and needs --toy.
    """
    from paddleformers_fc.cli import explaining
    from paddleformers_fc.formats.aoa_statements import aoa_statements

    _present(aoa_statements(model, reverse=reverse, toy=toy, tp=tp), explaining.show_statements, as_json)
    return OK


@app.command()
def plan(
    directory: Checkpoint,
    to: Annotated[
        str,
        typer.Option(
            metavar="GRID", help="The target: dp, tp, pp, vpp, ep, sharding, stage, split, ..., as in tp=2,pp=2,dp=4."
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="The target model's dtype; by default the stored one. A resume needs flex_allow_casts for it."
        ),
    ] = None,
    aoa_config: Annotated[
        Path | None,
        typer.Option(
            "--aoa-config",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A YAML or JSON file with aoa_config, such as the training configuration, or only its statements.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", dir_okay=False, help="Also write the plan as one page for a browser."),
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="How the page groups more than 32 ranks.")] = 8,
    config: Config = "",
    as_json: Json = False,
) -> int:
    """Show the bytes, reads, memory and dropped tensors of a load under another layout, rank by rank.

    No tensor is loaded. If the layout does not divide the model, the error lists the sizes.
    """
    import paddleformers_fc
    from paddleformers_fc.cli import planning

    source = _opened(directory)
    with progress.working(f"planning {source}"):
        statements = None if aoa_config is None else planning.read_aoa_config(aoa_config)
        checkpoint = paddleformers_fc.open(source, config=config or None)
        if html is None:
            found = checkpoint.plan(to, dtype, statements)
        else:
            flows = checkpoint.plan_flows(to, dtype, statements)
            planning.write_page(html, flows, ranks_per_node)
            found = flows.plan
    _present(found, planning.show, as_json)
    if html is not None and not as_json:
        print(f"wrote {html}")
    return OK


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A finished flex checkpoint: a path or a URL.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory of the Hugging Face files.")],
    max_shard_size: Annotated[
        str,
        typer.Option(
            help="Largest file, in bytes of tensors without the header: 500MB, 5GB, 4GiB, ... A larger tensor gets a "
            "file of its own."
        ),
    ] = "5GB",
    verify: Annotated[
        Level,
        typer.Option(
            help="How thoroughly to verify the checkpoint; only full detects flipped bits. off needs the weight files "
            "only."
        ),
    ] = "full",
    replace: Annotated[bool, typer.Option("--replace", help="Replace an older export in the directory.")] = False,
    tied: Annotated[
        Tied, typer.Option(help="Which copy of a tensor to export, by stage or rank, if copies differ.")
    ] = "refuse",
    as_format: Annotated[
        str,
        typer.Option("--format", help="huggingface, peft or paddleformers-lora; by default peft for adapters."),
    ] = "",
    base: Annotated[
        str, typer.Option("--base", help="Open weights into which to merge the checkpoint's adapters.")
    ] = "",
    accept_base: Annotated[
        bool, typer.Option("--accept-base", help="Merge into a base that the adapters were not trained on.")
    ] = False,
    role: Annotated[
        str, typer.Option("--role", help="model_state, or ema_state: the moving average of the weights.")
    ] = "model_state",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 (from master weights, if stored) or bfloat16; by default as stored.")
    ] = "",
    config: Config = "",
    as_json: Json = False,
) -> int:
    """Write a checkpoint's weights as Hugging Face files, and print one md5, which is equal for every layout."""
    from paddleformers_fc.cli import exporting
    from paddleformers_fc.trainer.options import parse_size

    source, target = _named(checkpoint), _target(directory, "An export")
    with progress.working(f"exporting {source}"):
        found = exporting.export(
            source,
            target,
            config or None,
            verify,
            role,
            dtype,
            max_shard_bytes=parse_size(max_shard_size),
            replace=replace,
            tied=tied,
            format=as_format,
            base=base or None,
            accept_base=accept_base,
        )
    _present(found, exporting.show, as_json)
    output.warn_unverified(source, verify)
    return OK


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format: a path or a URL.")],
    directory: Annotated[str, typer.Argument(metavar="OUT", help="The directory to write.")],
    to: Annotated[
        Literal["flex", "hf", "distcp"],
        typer.Option("--format", help="flex: a flex checkpoint. hf: the weights. distcp: Paddle's FlexCheckpoint."),
    ] = "flex",
    config: Config = "",
    max_shard_size: Annotated[str, typer.Option(help="Largest file, in bytes of tensors, as for export.")] = "5GB",
    verify: Annotated[
        Level, typer.Option(help="How thoroughly to verify recorded checksums; only full detects flipped bits.")
    ] = "full",
    replace: Annotated[bool, typer.Option("--replace", help="Replace older weights in OUT; with --format hf.")] = False,
    tied: Annotated[
        Tied, typer.Option(help="Which copy of a tensor to read, by stage or rank, if copies differ.")
    ] = "refuse",
    as_json: Json = False,
) -> int:
    """Write a checkpoint in another format: weights, optimizer states and the state of the Trainer.

    The format of SRC is detected, and SRC is not changed. Needs neither a model nor a GPU.
    """
    from paddleformers_fc.cli import exporting
    from paddleformers_fc.trainer.options import parse_size

    named, target = _opened(source), _target(directory, "A conversion")
    with progress.working(f"converting {named}"):
        size = parse_size(max_shard_size)
        found = exporting.convert(
            named, target, to, config or None, verify, max_shard_bytes=size, replace=replace, tied=tied
        )
    _present(found, exporting.show_converted, as_json)
    output.warn_unverified(named, verify)
    return OK


@app.command()
def clean(
    directory: OutputDirectory,
    yes: Annotated[bool, typer.Option("--yes", help="Remove all leftovers without confirmation.")] = False,
    as_json: Json = False,
) -> int:
    """Remove leftovers of interrupted saves, after a confirmation for each; checkpoints are never removed.

    On a file system without locks, first make sure that no job saves to this directory.
    --json without --yes only lists the leftovers.
    """
    from paddleformers_fc.cli import inspection
    from paddleformers_fc.execute import output_directory
    from paddleformers_fc.text import size_text

    def confirmed(one: output_directory.LeftoverFacts) -> bool:
        if yes or as_json:
            return yes
        return typer.confirm(f"Remove {one.name} ({size_text(one.bytes)})? {one.why}", err=True)

    found = output_directory.clean(_local(directory, "Cleaning"), confirmed)
    _present(found, inspection.show_cleaned, as_json)
    return OK


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", exists=True, dir_okay=False, help="A PaddleFormers configuration.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of keys in the configuration.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local ranks on a machine without an accelerator; 1 by default.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and its environment, but do not run it.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Run the stock PaddleFormers training of a YAML, with flex checkpoints.

    Without an accelerator, it runs on --nproc local processes over gloo.

    With one, it runs paddleformers-cli, which starts
    paddle.distributed.launch on the visible devices.

    Logs go to output_dir/log (then log-2, ...); a filtered log of rank 0 is
    shown, under --json on the error stream. The exit code is the job's.
    """
    from paddleformers_fc.cli import training

    job = training.prepare(config, nproc, overrides or [], claim_logs=not dry_run)
    if dry_run:
        _present(job, training.show_job, as_json)
        return OK
    if not job.flex:
        idle = f", and these keys have no effect: {', '.join(job.idle)}" if job.idle else ""
        text = "flex_checkpoint is not true, so checkpoints have PaddleFormers' own format"
        sys.stderr.write(f"{PROGRAM}: {text}{idle}.\n")
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
def families(as_json: Json = False) -> int:
    """List the declared model families and the libraries of their classes."""
    from paddleformers_fc.cli import explaining

    _present(explaining.family_table(), explaining.show_families, as_json)
    return OK


@app.command()
def register_path(as_json: Json = False) -> int:
    """Print the path for custom_register_path in a YAML of the stock paddleformers-cli."""
    from paddleformers_fc.trainer.register import PATH

    if as_json:
        output.print_json({"custom_register_path": str(PATH)})
    else:
        print(PATH)
    return OK


def exit_code(error: FlexError) -> int:
    """Return 1 for a fault of a checkpoint, else 2."""
    return FAULT if isinstance(error, (CheckpointError, MappingError, MismatchError)) else MISUSE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: the arguments without the program's name; by default those of this process.
    Returns:
        the exit code.
    """
    with output.closed_pipe_ignored():
        code = _run(arguments)
        # Flush here, so that a closed pipe fails inside the context manager.
        sys.stdout.flush()
        return code
    return CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    output.escape_invalid_text()
    try:
        return int(command.main(args=arguments, prog_name=PROGRAM, standalone_mode=False) or OK)
    except FlexError as error:
        output.print_error(error, as_json)
        return exit_code(error)
    except typer.TyperException as error:
        # Typer puts the name of an exception before messages about invalid choices.
        error.message = error.message.removeprefix("Value error, ")
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
        # An uncaught exception would end with code 1, which means a fault of a checkpoint.
        traceback.print_exc()
        if as_json:
            output.print_error(FlexError(f"{type(error).__name__}: {error}", next_step="Report this fault."), as_json)
        return MISUSE


def _named(text: str) -> AnyPath:
    """Return the directory of an argument. URLs are not checked here, because not every store has directories.

    Raises:
        OptionError: there is no such directory on this machine, the URL cannot be one, or the argument is empty.
        StorageError: the operating system denied access.
    """
    from paddleformers_fc.storage.files import exists, is_directory, similar_entry
    from paddleformers_fc.storage.paths import expand_user, parse_path

    found = parse_path(expand_user(text))
    if isinstance(found, Path) and not is_directory(found):
        is_file = exists(found)
        raise OptionError(
            f"Directory {str(found)!r} {'is a file' if is_file else 'does not exist'}.",
            evidence=[] if is_file else similar_entry(found),
            next_step="Name an existing directory.",
        )
    return found


def _opened(text: str) -> AnyPath:
    """Return the directory of an argument, as :func:`_named`; warn if open weights hide the checkpoints in it."""
    from paddleformers_fc.formats.registry import checkpoints_advice, format_of

    found = _named(text)
    format = format_of(found) if isinstance(found, Path) else None
    if format is not None and (advice := checkpoints_advice(found)):
        sys.stderr.write(f"{found} contains checkpoints, but is read as {format.title}. {advice}\n")
    return found


def _target(text: str, doing: str) -> AnyPath:
    """Return the directory to which a command writes.

    Raises:
        BadParameter: it is a file.
        OptionError: it cannot be written, or is in the memory of this process.
    """
    from paddleformers_fc.storage.files import exists, is_directory
    from paddleformers_fc.storage.paths import expand_user, parse_target, require_lasting

    found = parse_target(expand_user(text), doing)
    if exists(found) and not is_directory(found):
        raise typer.BadParameter(f"Directory {text!r} is a file.")
    require_lasting(found, doing)
    return found


def _local(text: str, doing: str) -> Path:
    """Return the directory of an argument, which must be on this machine."""
    from paddleformers_fc.storage.paths import require_local

    return require_local(_named(text), doing)


def _present(found: _T, show: Callable[[_T, Console], None], as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    else:
        show(found, output.console())
