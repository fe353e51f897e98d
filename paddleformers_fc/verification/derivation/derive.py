"""Derive rules for a model that no family declares, from names, shapes and kinds of layers, without guesses.

Every tensor of the model has *options* (:mod:`.candidates`): the layouts that its name, its shape and its layer
allow. A single option is taken. Among several, a user's line decides, or a proved hint, or the same layer elsewhere
in the model. An undecided tensor, or one without an option, is a *question*, and no rules are derived while a
question is open. The rules are proved like those of any family, forward and reversed.

A proof shows that every element has a location, not that the location is right: after an exchange of two tensors of
equal shape the mapping is still proved. Names distinguish them, so names are evidence only under the conditions of
:mod:`.name_matching`. Conventions that are assumed without evidence are listed in :mod:`.options`.

Linear in the tensors; names of the two sides are compared by template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from typing import Any

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Correspondence, Rule, RuleSet, Shape, TensorSpec, Tie, prove
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.verification.derivation.answer_text import answer_lines
from paddleformers_fc.verification.derivation.candidates import Candidate, Evidence
from paddleformers_fc.verification.derivation.layer_kinds import LayeredTensor, LayerKind
from paddleformers_fc.verification.derivation.name_matching import (
    PARTS,
    Fusion,
    NameMatch,
    fused_kind,
    layer_name,
    prefix_of,
    split,
)
from paddleformers_fc.verification.derivation.native_hints import HintedMapping, HintReader, Pieces, pieces_of, rules_of
from paddleformers_fc.verification.derivation.options import (
    CUT_AS_STORED,
    PER_HEAD,
    PER_RANK,
    STRAIGHT,
    Option,
    joined,
    moved,
)

_FUSED_LAYOUTS = frozenset({PER_HEAD, PER_RANK, STRAIGHT, CUT_AS_STORED})

_MOST_ANSWERS = 6
_MOST_LINES = 4


@dataclass(frozen=True)
class Question:
    """A decision that the evidence does not determine.

    Args:
        names: the tensors of either side that it concerns.
        why: one sentence that states the question.
        answers: the AOA lines of every answer, nearly always one; they settle all ``names``.
    """

    names: tuple[str, ...]
    why: str
    answers: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """Return the question as lines of text."""
        lines = [f"{', '.join(fold(self.names))}: {self.why}"]
        for place, answer in enumerate(self.answers, start=1):
            lines += [f"  {place}) {answer[0]}", *(f"     {line}" for line in answer[1:_MOST_LINES])]
            if len(answer) > _MOST_LINES:
                lines.append(f"     and {len(answer) - _MOST_LINES} more lines like these")
        return lines


@dataclass(frozen=True)
class Derivation:
    """The result of a derivation.

    Args:
        rules: the rules, proved if there are no questions.
        reasons: the reason for the rule of each tensor.
        questions: the open questions.
        notes: the parts of the hint that were not used.
    """

    rules: RuleSet
    reasons: dict[str, str]
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()

    def refuse_questions(self) -> None:
        """Refuse a derivation with open questions.

        Raises:
            MappingError: with every question, its answers, and the lines of each answer.
        """
        if self.questions:
            raise MappingError(
                f"The mapping of this model is not determined: {len(self.questions)} questions are open.",
                where="names, shapes and layers of both sides",
                evidence=[line for question in self.questions for line in question.lines()] + list(self.notes),
                next_step="Give the lines of one numbered answer of each question, or other lines, with --settle.",
            )


@dataclass(frozen=True)
class _Open:
    """An undecided candidate and the reason; contested if the hint contradicts the evidence."""

    claim: Candidate
    why: str
    contested: bool = False


def derive_rules(
    tensors: Iterable[LayeredTensor],
    canonical: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    *,
    hint: Sequence[str] = (),
    settled: Sequence[str] = (),
) -> Derivation:
    """Return the rules of a model that no family declares, and open questions.

    Args:
        tensors: every tensor of the model, with the kind of its layer.
        canonical: every tensor of the canonical side.
        config: the model's configuration: ``num_attention_heads``, ``num_key_value_heads``, ``tie_word_embeddings``,
            the first two also in ``text_config``.
        hint: native AOA statements from the canonical side to the model; used if they are proved.
        settled: the user's AOA lines, which take precedence for their tensors.
    Returns:
        the rules, proved if there are no questions.
    Raises:
        MappingError: the settling lines, or rules without questions, cannot be proved.
    """
    return _Study({one.tensor.name: one for one in tensors}, canonical, config).run(hint, settled)


@dataclass
class _State:
    """The decisions so far."""

    rules: dict[tuple[str, ...], tuple[Rule, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, set[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


class _Study:
    def __init__(
        self, model: dict[str, LayeredTensor], canonical: Mapping[str, TensorSpec], config: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._canonical = canonical
        self._config = config
        self._seen = Evidence(model, canonical, config)
        self._shapes, self._sources = self._seen.shapes, self._seen.sources
        self._state = _State()
        self._offered: set[str] = set()
        self._settled: set[str] = set()

    def run(self, hint: Sequence[str], settled: Sequence[str]) -> Derivation:
        ties, unclear = self._ties()
        reader = HintReader([one.tensor for one in self._model.values()], self._canonical, ties)
        own = reader.settled(settled) if settled else HintedMapping()
        hints = reader.hint(hint) if hint else HintedMapping()
        aliases = {tie.alias for tie in ties}
        open_names = [name for name in self._model if name not in aliases | own.fresh and name not in own.pieces]
        self._state.taken |= {item.source for pieces in own.pieces.values() for item in pieces} | own.dropped
        questions = [*unclear, *self._settle(own)]
        claims = self._claims(open_names)
        waiting = [question for claim in claims for question in self._decide(claim, hints)]
        questions += self._same_elsewhere(waiting)
        claimed = {name for claim in claims for name in claim.targets}
        fresh = own.fresh | {name for name in hints.fresh if name not in claimed}
        questions += self._without_claim([name for name in open_names if name not in claimed], hints)
        dropped = own.dropped | self._tied_copies(ties) | (hints.dropped - self._state.taken)
        questions += self._unread(dropped)
        return self._finished(ties, fresh, dropped, questions, hints.unused)

    # Ties.

    def _ties(self) -> tuple[list[Tie], list[Question]]:
        """Return the tied head if the configuration ties it: it has the embedding's shape and no canonical tensor."""
        if not self._config.get("tie_word_embeddings"):
            return [], []
        owners = [
            name for name, one in self._model.items() if one.kind is LayerKind.EMBEDDING and self._seen.is_named(name)
        ]
        ties: list[Tie] = []
        for owner in owners:
            heads = [
                name
                for name, one in self._model.items()
                if name != owner
                and one.kind is not LayerKind.EMBEDDING
                and self._shapes[name] == self._shapes[owner]
                and (not self._seen.is_named(name) or "head" in layer_name(split(name)[0]))
            ]
            if len(heads) == 1:
                ties.append(Tie(owner, heads[0]))
            elif len(heads) > 1:
                return [], [Question((owner, *heads), "the configuration ties one of these to the first one", ())]
        return ties, []

    def _tied_copies(self, ties: Sequence[Tie]) -> frozenset[str]:
        """Return the canonical tensors that repeat a tied one."""
        copies = (self._seen.named(tie.alias, level) for tie in ties for level in NameMatch)
        return frozenset(name for names in copies for name in names if name not in self._state.taken)

    # Options.

    def _claims(self, names: Sequence[str]) -> list[Candidate]:
        """Return the options of every tensor, by the best level of names at which it has any."""
        claims: list[Candidate] = []
        done: set[str] = set()
        for level in NameMatch:
            found = [claim for name in names if name not in done and (claim := self._claim(name, level)) is not None]
            distinct = {claim.targets: claim for claim in found}.values()
            wanted = Counter(source for claim in distinct for source in claim.sources)
            for claim in found:
                # A source that the names of two tensors match is taken for neither.
                if max(wanted[source] for source in claim.sources) == 1 and not done & set(claim.targets):
                    claims.append(claim)
                    done.update(claim.targets)
                    self._state.taken |= claim.sources
        return claims

    def _claim(self, name: str, level: NameMatch) -> Candidate | None:
        return next((claim for claim in self._seen.ways(name, level) if not claim.sources & self._state.taken), None)

    # Decisions.

    def _settle(self, own: HintedMapping) -> list[Question]:
        """Take the decisions of the user's lines; their names and layouts are remembered for other layers."""
        for name, pieces in own.pieces.items():
            self._seen.learn(name, list(dict.fromkeys(item.source for item in sorted(pieces, key=_place))))
        questions: list[Question] = []
        for name, pieces in own.pieces.items():
            if name in self._state.reasons:
                continue
            claim = self._claim_like(name, own.pieces)
            rules = rules_of(pieces, self._shapes[name], self._sources) if claim is None else None
            if claim is not None:
                self._take(claim, claim.options[0])
            elif rules is not None:
                self._record((name,), rules, "a settling line")
            else:
                questions.append(Question((name,), "no rule expresses the layout of the settling line", ()))
        self._settled = set(self._state.layouts)
        return questions

    def _claim_like(self, name: str, pieces: Mapping[str, Pieces]) -> Candidate | None:
        """Return the candidate with the option that is equal to the boxes of a text."""
        for level in NameMatch:
            for claim in self._seen.ways(name, level):
                wanted = {target: pieces.get(target) for target in claim.targets}
                for option in claim.options:
                    if pieces_of(option.rules, self._shapes) == wanted:
                        return Candidate(claim.targets, (option,), "a settling line")
        return None

    def _decide(self, claim: Candidate, hints: HintedMapping) -> Iterator[_Open]:
        """Take the only option, or the option of the hint. Yield an undecided candidate with the reason."""
        hinted = {name: hints.pieces[name] for name in claim.targets if name in hints.pieces}
        if self._kind(claim) in self._settled or self._seen.is_settled(claim.targets[0]):
            hinted = {}
        agreeing = [option for option in claim.options if self._agrees(option, hinted)] if hinted else []
        if hinted and not agreeing:
            theirs = [rules_of(pieces, self._shapes[name], self._sources) for name, pieces in hinted.items()]
            rules = tuple(rule for found in theirs for rule in found or ())
            other = (Option(rules, "as in the hint"),) if rules else ()
            contested = replace(claim, options=(*claim.options, *other))
            yield _Open(contested, f"the hint contradicts the {claim.reason}", contested=True)
        elif len(agreeing) == 1 or len(claim.options) == 1:
            option = agreeing[0] if agreeing else claim.options[0]
            self._take(claim if len(claim.options) == 1 else replace(claim, reason="the proved hint"), option)
        else:
            yield _Open(claim, f"may lie {', or '.join(option.layout for option in claim.options)}")

    def _agrees(self, option: Option, hinted: Mapping[str, Pieces]) -> bool:
        made = pieces_of(option.rules, self._shapes)
        return all(made[name] == pieces for name, pieces in hinted.items())

    def _same_elsewhere(self, waiting: Sequence[_Open]) -> list[Question]:
        """Decide tensors by others of their kind, which have the same layout in one model."""
        groups: dict[tuple[str, str], list[Candidate]] = {}
        for one in waiting:
            known = self._state.layouts.get(self._kind(one.claim), set())
            fitting = [option for option in one.claim.options if option.layout in known]
            if not one.contested and len(known) == 1 and len(fitting) == 1:
                self._take(replace(one.claim, reason="as the other layers of its name"), fitting[0])
            else:
                groups.setdefault((self._kind(one.claim), one.why), []).append(one.claim)
        return [self._question(claims, why) for (_, why), claims in groups.items()]

    def _question(self, claims: Sequence[Candidate], why: str) -> Question:
        template = split(claims[0].targets[0])[0]
        first = [claim for claim in claims if split(claim.targets[0])[0] == template]
        count = len(first[0].options)
        answers = [self._lines([claim.options[at] for claim in first]) for at in range(count)]
        return Question(tuple(name for claim in claims for name in claim.targets), why, tuple(answers))

    def _lines(self, options: Sequence[Option]) -> tuple[str, ...]:
        return answer_lines(options, self._shapes, self._canonical, self._cuts())

    def _cuts(self) -> dict[str, Shape]:
        return {name: one.tensor.cuts for name, one in self._model.items()}

    def _kind(self, claim: Candidate) -> str:
        """Return the kind of tensors with one layout: weight and bias of fused layers of one name, or one template."""
        template = split(claim.targets[0])[0]
        fused = _FUSED_LAYOUTS.issuperset(option.layout for option in claim.options)
        if fused and fused_kind(template):
            return layer_name(template)
        # A sequence of layers has norms and linear layers under one template.
        return f"{template} with {len(self._shapes[claim.targets[0]])} axes"

    def _take(self, claim: Candidate, option: Option) -> None:
        self._record(claim.targets, option.rules, claim.reason)
        self._state.layouts.setdefault(self._kind(claim), set()).add(option.layout)

    def _record(self, targets: tuple[str, ...], rules: tuple[Rule, ...], reason: str) -> None:
        self._state.rules[targets] = rules
        self._state.reasons.update(dict.fromkeys(targets, reason))
        self._state.taken |= {name for rule in rules for name in rule.sources}

    # Tensors that only one side has.

    def _without_claim(self, names: Sequence[str], hints: HintedMapping) -> list[Question]:
        missing: list[str] = []
        for name in names:
            rules = None
            if name in hints.pieces and not {item.source for item in hints.pieces[name]} & self._state.taken:
                rules = rules_of(hints.pieces[name], self._shapes[name], self._sources)
            if rules is not None:
                self._record((name,), rules, "the proved hint")
            elif name not in hints.fresh:
                missing.append(name)
        return [self._missing(group) for group in _by_template(missing)]

    def _missing(self, names: tuple[str, ...]) -> Question:
        first = names[0]
        shape = list(self._shapes[first])
        named = sorted({other for level in NameMatch for other in self._seen.named(first, level)})
        if named:
            shapes = ", ".join(f"{other} {list(self._sources[other])}" for other in named)
            why = f"shape {shape} does not fit {shapes}, or another tensor has taken it"
        else:
            why = f"shape {shape}; no canonical tensor has a matching name"
        found = list(islice(self._unnamed(names), _MOST_ANSWERS))
        self._offered |= {source for options in found for one in options for source in one.rules[0].sources}
        answers = [self._lines(options) for options in found]
        return Question(names, why, (*answers, tuple(f"_ -> {name}" for name in names)))

    def _unnamed(self, names: tuple[str, ...]) -> Iterator[tuple[Option, ...]]:
        """Yield options of tensors of one template by shapes alone, as suggestions."""
        free = [name for name in self._canonical if name not in self._state.taken]
        by_part = {
            split(group[0])[0]: dict(zip(map(_numbers, group), group, strict=True)) for group in _by_template(free)
        }
        wanted = [self._seen.names.moved(*split(name)) for name in names]
        fitting = {template: sources for template, sources in by_part.items() if sources.keys() >= set(wanted)}
        for sources in fitting.values():
            columns = [
                moved(self._model[name], self._seen.source(sources[at]), None, self._seen.conventions)
                for name, at in zip(names, wanted, strict=True)
            ]
            yield from zip(*columns, strict=False)
        template = split(names[0])[0]
        kind = fused_kind(template)
        for parts in permutations(fitting, len(PARTS[kind][0])) if kind is not None else ():
            if len({prefix_of(part) for part in parts}) > 1:
                continue
            fusion = Fusion(kind or "", layer_name(template), parts)
            columns = [
                joined(
                    self._model[name],
                    [self._seen.source(by_part[part][at]) for part in parts],
                    fusion,
                    self._seen.conventions,
                )
                for name, at in zip(names, wanted, strict=True)
            ]
            yield from zip(*columns, strict=False)

    def _unread(self, dropped: frozenset[str]) -> list[Question]:
        read = {name for rules in self._state.rules.values() for rule in rules for name in rule.sources}
        known = read | dropped | self._state.taken | self._offered
        left = [name for name in self._canonical if name not in known]
        return [
            Question(group, "no tensor of the model has a matching name", (tuple(f"{name} -> _" for name in group),))
            for group in _by_template(left)
        ]

    # The end.

    def _finished(
        self,
        ties: Sequence[Tie],
        fresh: frozenset[str],
        dropped: frozenset[str],
        questions: Sequence[Question],
        notes: tuple[str, ...],
    ) -> Derivation:
        order = {name: place for place, name in enumerate(self._model)}
        decided = sorted(self._state.rules.items(), key=lambda entry: order[entry[0][0]])
        rules = RuleSet(
            targets={name: TensorSpec(one.tensor.shape, one.tensor.dtype) for name, one in self._model.items()},
            rules=tuple(rule for _, made in decided for rule in made),
            ties=tuple(ties),
            fresh=tuple(sorted(fresh)),
            dropped=tuple(sorted(dropped)),
        )
        if not questions:
            self._prove(rules)
        return Derivation(rules, self._state.reasons, tuple(questions), tuple(f"the hint: {note}" for note in notes))

    def _prove(self, rules: RuleSet) -> None:
        stored = {name: spec.dtype for name, spec in self._canonical.items()}
        mapping = rules.casting(stored).mapping(stored)
        # The stored shapes and dtypes, not those that the rules imply.
        mapping = replace(mapping, sources=dict(self._canonical))
        prove(mapping, "The derived mapping")
        prove(mapping.reversed(), "The reverse of the derived mapping")


def _place(item: Correspondence) -> tuple[int, ...]:
    return item.target_box.lo


def _numbers(name: str) -> tuple[int, ...]:
    return split(name)[1]


def _by_template(names: Iterable[str]) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(split(name)[0], []).append(name)
    return [tuple(group) for group in groups.values()]
