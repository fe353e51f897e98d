"""A checkpoint that Paddle wrote, as the product sees every checkpoint: with rules and a commit record.

Such a checkpoint says where its tensors are and not what they mean. The rules come from the family of its model, by the
stored names, shapes and cuts, which is what a save of ours would have written down. So a ``config.json`` must lie in
it. The commit record is put together from what there is: no checksums, and the step from the directory's name.
"""

from __future__ import annotations

from pathlib import Path

from paddleformers_fc.errors import NotACheckpoint
from paddleformers_fc.families import ModelDescription, ModelTensor, family_for
from paddleformers_fc.families.stored import completed
from paddleformers_fc.formats import FlexCheckpoint, open_flex
from paddleformers_fc.formats.distcp import DistcpCheckpoint, is_distcp, open_distcp
from paddleformers_fc.formats.flex import CONFIG_NAME, parse_config
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.json_io import read_document
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest
from paddleformers_fc.storage.names import parse_step
from paddleformers_fc.storage.paths import AnyPath

WRITER = "paddle.distributed.flex_checkpoint"


def is_paddle_checkpoint(directory: AnyPath) -> bool:
    """Whether a directory of this machine is a checkpoint of Paddle and none of ours, by the names of files alone."""
    return isinstance(directory, Path) and not (directory / MANIFEST_NAME).exists() and is_distcp(directory)


def open_stored(directory: AnyPath, verify: str = "size") -> FlexCheckpoint:
    """Open a checkpoint, whoever wrote it.

    Args:
        directory: ``checkpoint-N``, or a directory of ``dist.save_state_dict``.
        verify: ``off``, ``size`` or ``full``; a checkpoint of Paddle has nothing that could be compared.
    Raises:
        FlexError: it is none, or damaged, or nothing says what model it is of.
    """
    if isinstance(directory, Path) and is_paddle_checkpoint(directory):
        return describe_distcp(open_distcp(directory))
    return open_flex(directory, verify)


def describe_distcp(stock: DistcpCheckpoint) -> FlexCheckpoint:
    """A checkpoint of Paddle with the rules of its family.

    Raises:
        NotACheckpoint: no ``config.json`` says which family that is.
        MappingError: the family is unknown, or does not declare what is stored.
    """
    catalog = stock.catalog
    path = catalog.root / CONFIG_NAME
    if not exists(path):
        raise NotACheckpoint(
            f"{catalog.root} does not say what model it is of.",
            where=str(catalog.root),
            evidence=[f"{CONFIG_NAME} is not in it"],
            next_step=f"Copy the model's {CONFIG_NAME} into the directory; Paddle does not save it.",
        )
    raw = read_document(path)
    config = parse_config(raw, path)
    family = family_for(config)
    weights = catalog.roles[MODEL_STATE].values()
    tensors = [ModelTensor(one.name, one.shape, one.dtype, stock.cuts[one.name]) for one in weights]
    model, rules = completed(family, ModelDescription(config), tensors)
    return FlexCheckpoint(catalog, _record_of(stock, family.name, raw), rules, config, model)


def _record_of(stock: DistcpCheckpoint, family: str, config: bytes) -> Manifest:
    """What can be said of the save. Of its files, that which an export takes over: the configuration."""
    hasher = BlockHasher()
    hasher.update(config)
    ranks = {path.rpartition("/")[2].partition("_")[0] for path in stock.files}
    return Manifest(
        written_by=WRITER,
        step=parse_step(stock.catalog.root) or 0,
        consumed_samples=0,
        world_size=len(ranks),
        parallel={},
        family=family,
        aoa={},
        files=[hasher.receipt(CONFIG_NAME)],
    )
