"""Map models without a declared family by the AOA statements of their class.

Stock FlexCheckpoint uses the same statements: ``_gen_aoa_config`` and ``_gen_inv_aoa_config``, or a class's overrides
of ``gen_aoa_statements`` and ``gen_inv_aoa_statements``. They are evaluated once per model, for the tensors of all
ranks. A checkpoint stores the resulting rules, so it can be read without the class.

Time: one exchange of all ranks' descriptions, and a proof of the rules. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from paddle.nn import Layer

from paddleformers_fc.distributed.channel import Channel, run_on_all
from paddleformers_fc.errors import MappingError
from paddleformers_fc.execute.load import whole_model
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import library, live_roles
from paddleformers_fc.trainer.description import OWN_RULES, describe_model
from paddleformers_fc.trainer.library import has_adapters, unwrap_model

if TYPE_CHECKING:
    from paddleformers_fc.aoa import Program


_FORWARD = "_gen_aoa_config", "gen_aoa_statements"
_INVERSE = "_gen_inv_aoa_config", "gen_inv_aoa_statements"


def check_mapped(model: Any, model_type: str) -> None:
    """Check that a family declares a model type, or that the model or its class has statements.

    Raises:
        MappingError: there is neither.
    """
    if _writer(model, _FORWARD) is None:
        family_for({"model_type": model_type})


def adopt_statements(model: Any, channel: Channel) -> None:
    """Map a model without a declared family by the statements of its class. Every rank must call.

    Models with adapters, and models whose class has no statements, are skipped.

    Args:
        model: the model as it was built, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        MappingError: the same on every rank: the statements are invalid, cannot be proved or do not fit the model.
    """
    model = unwrap_model(model)
    if getattr(model, "config", None) is None or has_adapters(model) or _writer(model, _FORWARD) is None:
        return
    described = describe_model(model)
    if described.rules is not None or is_known(described.config):
        return
    named = f"No family declares model_type {described.model_type!r}"
    tensors = whole_model(described, partial(live_roles.model_roles, model), channel)

    def evaluate() -> RuleSet:
        from paddleformers_fc.aoa import Program
        from paddleformers_fc.families.class_statements import rules_of_statements

        try:
            forward, inverse = _program(model, _FORWARD) or Program(()), _program(model, _INVERSE)
            return rules_of_statements(tensors, forward, inverse, bool(described.config.get("tie_word_embeddings")))
        except MappingError as error:
            raise MappingError(
                f"{named}, and the AOA statements of the class cannot be used.",
                where=f"{type(model).__module__}.{type(model).__qualname__}",
                evidence=[error.what, *error.evidence],
                next_step="Correct the statements, or declare the family, as docs/add-a-family.md shows.",
            ) from error

    rules = run_on_all(channel, "evaluating the AOA statements of the model", evaluate)
    setattr(model, OWN_RULES, rules)
    if channel.rank == 0:
        ways = "in both directions" if _writer(model, _INVERSE) else "and their inversion"
        library.logger.info(
            f"{named}. The AOA statements of {type(model).__name__} are used {ways}: "
            f"{count_text(len(rules.targets), 'tensor')}, {count_text(len(rules.rules), 'rule')}, proved."
        )


def _writer(model: Any, names: tuple[str, str]) -> Callable[[Any], object] | None:
    """Return the first of these methods that a model or its class has; methods of ``Layer`` itself do not count."""
    kind = model if isinstance(model, type) else type(model)
    for name in names:
        found: Callable[[Any], object] | None = getattr(model, name, None)
        own = getattr(kind, name, None)
        if found is not None and (own is None or own is not getattr(Layer, name, None)):
            return found
    return None


def _program(model: Any, names: tuple[str, str]) -> Program | None:
    from paddleformers_fc.aoa import read_config

    writer = _writer(model, names)
    try:
        return None if writer is None else read_config(writer(model.config))
    except MappingError:
        raise
    except Exception as error:  # A model class may raise anything.
        evidence = [f"{type(error).__name__}: {error}"]
        next_step = "Correct this method of the model's class."
        raise MappingError(f"{names[0]} fails.", evidence=evidence, next_step=next_step) from error
