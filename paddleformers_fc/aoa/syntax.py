"""Parse AOA statements, from a list of texts or an ``aoa_config``.

::

    statement := side '->' side { ',' attribute }
    side      := item { ',' item }
    item      := '_' | name [ '^T' ] [ '[' number ':' number ']' ]
    attribute := 'axis' '=' number
               | 'permute' '=' string
               | 'reshape' '=' string
               | 'dtype' '=' string
               | 'src_dtype' '=' string ',' 'dst_dtype' '=' string
               | 'fused_ffn' | 'fused_qkv' | 'fused_qkv_old'
               | 'num_heads' '=' number | 'num_key_value_groups' '=' number

Names may contain placeholders (``$LAYER_ID``, ``$EXPERT_ID``, ``$LAYER_ID_OFFSET``) and one ``*``. The attributes and
the number of names on each side determine the operation. Only the form is checked here: no tensor is looked up and no
placeholder is expanded. Invalid lines are kept with their faults, so that :mod:`.evaluate` reports the faults of all
statements together. Linear in the text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from paddleformers_fc.aoa.faults import Fault, SourceLine, Span
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Shape


class TokenKind(Enum):
    """The kind of a token; the value is its text in reports."""

    NAME = "a name"
    NUMBER = "a number"
    STRING = "a quoted string"
    ARROW = "`->`"
    COMMA = "`,`"
    EQUAL = "`=`"
    COLON = "`:`"
    OPEN = "`[`"
    CLOSE = "`]`"
    END = "the end of the statement"


class Token(NamedTuple):
    """A token and its position. The text of a string excludes the quotes."""

    kind: TokenKind
    text: str
    span: Span


_TOKEN = re.compile(
    r"(?P<ARROW>->)|(?P<EQUAL>=)|(?P<COLON>:)|(?P<OPEN>\[)|(?P<CLOSE>\])|(?P<COMMA>,)"
    r"|(?P<DIGITS>[0-9]+[A-Za-z_][A-Za-z0-9_.$*^]*)|(?P<NUMBER>[0-9]+)"
    r"|(?P<STRING>\"[^\"]*\"|'[^']*')|(?P<NAME>[A-Za-z_][A-Za-z0-9_.$*^]*)|(?P<SPACE>[ \t]+)"
)
_MOST_DIGITS = 9

_BREAK = ("A statement has more than one line.", "a separate entry for every statement")
_INVALID = {
    "\n": _BREAK,
    "\r": _BREAK,
    "-": (
        "Invalid character `-` in a name or number.",
        "names of letters, digits, `_` and `.`; an axis counted from the left, from 0",
    ),
    ">": ("`>` is valid only in `->`.", "`a -> b`"),
    "#": ("The language has no comments.", "a comment of the file that contains the statements, such as YAML's"),
    '"': ("The quote is not closed.", 'a value such as permute="[1, 0]"'),
    "'": ("The quote is not closed.", "a value such as dtype='bfloat16'"),
    ".": ("A name begins with a letter or `_`.", ""),
    "$": ("A name begins with a letter or `_`; a placeholder is inside a name.", "layers.$LAYER_ID.weight"),
    "*": ("A name begins with a letter or `_`; a wildcard is inside a name.", "layers.*.weight"),
    "^": ("`^T` directly follows a name.", "weight^T -> weight"),
}


def tokenize(text: str) -> list[Token]:
    """Return the tokens of one line, with an END token after the last.

    Raises:
        Fault: the first invalid character.
    """
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            cause, accepted = _INVALID.get(text[at], (f"Invalid character {text[at]!r}.", ""))
            raise Fault(cause, accepted, Span(at, at + 1))
        kind, content, span = str(found.lastgroup), found.group(), Span(at, found.end())
        if kind == "DIGITS":
            raise Fault("A name begins with a letter or `_`, not with a digit.", "", span)
        if kind == "NUMBER" and len(content) > _MOST_DIGITS:
            raise Fault(f"Number of {len(content)} digits; no tensor is as large.", "", span)
        if kind != "SPACE":
            tokens.append(Token(TokenKind[kind], content[1:-1] if kind == "STRING" else content, span))
        at = span.end
    return [*tokens, Token(TokenKind.END, "", Span(at, at + 1))]


NOTHING = "_"
TRANSPOSED = "^T"
FFN, QKV, QKV_PER_RANK = FLAGS = ("fused_ffn", "fused_qkv", "fused_qkv_old")

_VALUES = {
    **dict.fromkeys(("axis", "num_heads", "num_key_value_groups"), TokenKind.NUMBER),
    **dict.fromkeys(("permute", "reshape", "dtype", "src_dtype", "dst_dtype"), TokenKind.STRING),
}
KEYWORDS = frozenset((*FLAGS, *_VALUES))


class Item(NamedTuple):
    """One entry of a side.

    Args:
        pattern: the name, with placeholders and wildcard, without ``^T``.
        transposed: whether ``^T`` follows it.
        array: bounds of ``[begin:end]``, or None.
        span: its position.
    """

    pattern: str
    transposed: bool
    array: tuple[int, int] | None
    span: Span


class Attribute(NamedTuple):
    """An attribute; the value of a flag is empty."""

    key: str
    value: str
    span: Span


@dataclass(frozen=True)
class AoaStatement:
    """A parsed statement.

    Args:
        line: the user's text.
        left: the sources.
        right: the results.
        attributes: attributes by key, in the order of the text.
        arrow: the position of the arrow.
    """

    line: SourceLine
    left: tuple[Item, ...]
    right: tuple[Item, ...]
    attributes: Mapping[str, Attribute]
    arrow: Span


class _Parser:
    """Recursive-descent parser of the tokens of one line."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def statement(self, line: SourceLine) -> AoaStatement:
        left = self._side()
        arrow = self._expect(TokenKind.ARROW, "a name, -> and a name").span
        right = self._side()
        attributes: dict[str, Attribute] = {}
        while self._peek(0).kind is TokenKind.COMMA:
            self._at += 1
            attribute = self._attribute()
            if attribute.key in attributes:
                raise Fault(f"Duplicate attribute {attribute.key}.", "", attribute.span)
            attributes[attribute.key] = attribute
        self._expect(TokenKind.END, "`,` and a name or attribute")
        for item in right:
            if item.transposed:
                raise Fault("`^T` is not supported on the right side.", "`a^T -> b`", item.span)
        return AoaStatement(line, left, right, attributes, arrow)

    def _peek(self, ahead: int) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _expect(self, kind: TokenKind, accepted: str) -> Token:
        token = self._peek(0)
        if token.kind is not kind:
            found = token.kind.value if token.kind is TokenKind.END else f"`{token.text}`"
            raise Fault(f"Expected {kind.value}, found {found}.", accepted, token.span)
        self._at += 1
        return token

    def _side(self) -> tuple[Item, ...]:
        items = [self._item()]
        while self._peek(0).kind is TokenKind.COMMA and not self._attribute_ahead():
            self._at += 1
            items.append(self._item())
        return tuple(items)

    def _attribute_ahead(self) -> bool:
        word = self._peek(1)
        return word.kind is TokenKind.NAME and (word.text in KEYWORDS or self._peek(2).kind is TokenKind.EQUAL)

    def _item(self) -> Item:
        token = self._expect(TokenKind.NAME, "")
        if token.text in KEYWORDS:
            raise Fault(f"The keyword `{token.text}` is not a valid name.", "", token.span)
        name, transposed = token.text.removesuffix(TRANSPOSED), token.text.endswith(TRANSPOSED)
        if "^" in name:
            raise Fault("`^` is valid only in `^T` at the end of a name.", "weight^T", token.span)
        array = self._array(token) if self._peek(0).kind is TokenKind.OPEN else None
        if name == NOTHING and (transposed or array):
            raise Fault("`_` is not a tensor and has no axes or parts.", "`_`", token.span)
        if transposed and array:
            raise Fault("`^T` is not supported for an array of names.", "one name per statement", token.span)
        return Item(name, transposed, array, Span(token.span.begin, self._peek(-1).span.end))

    def _array(self, name: Token) -> tuple[int, int]:
        form = "name[0:4], which is name_0, name_1, name_2, name_3"
        kinds = TokenKind.OPEN, TokenKind.NUMBER, TokenKind.COLON, TokenKind.NUMBER, TokenKind.CLOSE
        _, begin, _, end, close = (self._expect(kind, form) for kind in kinds)
        if int(begin.text) >= int(end.text):
            raise Fault("Empty array of names.", form, Span(name.span.begin, close.span.end))
        return int(begin.text), int(end.text)

    def _attribute(self) -> Attribute:
        token = self._expect(TokenKind.NAME, "an attribute")
        key = token.text
        if key in FLAGS:
            return Attribute(key, "", token.span)
        if key not in _VALUES:
            near = difflib.get_close_matches(key[:50], sorted(KEYWORDS), 1)
            raise Fault(f"Unknown attribute `{key}`.", near[0] if near else ", ".join(sorted(KEYWORDS)), token.span)
        self._expect(TokenKind.EQUAL, f"{key}=...")
        value = self._expect(_VALUES[key], f"{key}= and {_VALUES[key].value}")
        return Attribute(key, value.text, Span(token.span.begin, value.span.end))


DTYPES = ("float16", "float32", "bfloat16")
_NUMBERS = re.compile(r"\[\s*(\d{1,9}\s*(?:,\s*\d{1,9}\s*)*)?\]", re.ASCII)
_DEFAULT_FUSED_AXIS = 1


@dataclass(frozen=True, slots=True)
class OneSided:
    """``a -> _``: the source is dropped. ``_ -> b``: the target keeps its initial values."""


class Move(NamedTuple):
    """One name to one name.

    Args:
        permute: for every axis of the result the axis that it reads; empty to reverse all axes; None for no change.
        reshape: the shape [blocks, rows, ...], into which or from which [blocks * rows, ...] is reshaped; empty for no
            change.
        read_as: the declared dtype of the source, or None.
        cast: the dtype that values are converted to, or None.
    """

    permute: Shape | None = None
    reshape: Shape = ()
    read_as: str | None = None
    cast: str | None = None


class Join(NamedTuple):
    """Concatenate several names into one, or split one name into equal lengths, along an axis."""

    axis: int


class Fused(NamedTuple):
    """A fused layer: [gate | up] or [Q | K | V] per tensor-parallel rank, or [q..q k v] per kv head.

    Args:
        kind: the layout.
        axis: the axis of the parts.
        counts: the numbers of query, key and value heads; 1 and 1 for gate and up.
    """

    kind: str
    axis: int
    counts: Shape = (1, 1)


Operation = OneSided | Move | Join | Fused


def operation_of(statement: AoaStatement, left: int, right: int) -> Operation:
    """Return the operation of a statement.

    Args:
        statement: the parsed statement.
        left: the number of expanded names on its left side.
        right: the number of expanded names on its right side.
    Raises:
        Fault: the attributes and the numbers of names fit no operation.
    """
    if any(item.pattern == NOTHING for item in (*statement.left, *statement.right)):
        return _one_sided(statement)
    flags = [statement.attributes[flag] for flag in FLAGS if flag in statement.attributes]
    if len(flags) > 1:
        raise Fault("A statement has one fused layout.", "a second statement", flags[1].span)
    if flags:
        return _fused(statement, flags[0], (left, right))
    if left == right == 1:
        return _move(statement)
    if left > 1 and right > 1:
        raise Fault("Several names on both sides: the relation of the parts is missing.", "one statement per part")
    _only(statement, ("axis",), "several names")
    if "axis" not in statement.attributes:
        raise Fault("The axis of the names is missing.", "`, axis=0` at the end")
    return Join(int(statement.attributes["axis"].value))


def _one_sided(statement: AoaStatement) -> OneSided:
    items = (*statement.left, *statement.right)
    example = "`_ -> new_tensor` or `old_tensor -> _`"
    if len(items) != 2 or all(item.pattern == NOTHING for item in items):
        raise Fault("`_` must be the only name on its side, with one name on the other.", example)
    for attribute in statement.attributes.values():
        raise Fault("A statement with `_` has no attributes.", example, attribute.span)
    for item in items:
        if "$" in item.pattern or "*" in item.pattern or item.transposed or item.array:
            raise Fault("`_` requires the complete name of one tensor.", "one statement per tensor", item.span)
    return OneSided()


def _only(statement: AoaStatement, keys: tuple[str, ...], what: str) -> None:
    for attribute in statement.attributes.values():
        if attribute.key not in keys:
            cause = f"{attribute.key} is not supported in a statement of {what}."
            raise Fault(cause, f"a separate statement, one name to one name, with {attribute.key}", attribute.span)


_FORMS = {
    FFN: ("`gate, up -> fused`, `fused -> gate, up` or `fused -> fused`", ((2, 1), (1, 2), (1, 1))),
    QKV: ("`q, k, v -> fused` or `fused -> q, k, v`", ((3, 1), (1, 3))),
    QKV_PER_RANK: ("`q, k, v -> fused`, `fused -> q, k, v` or `fused -> fused`", ((3, 1), (1, 3), (1, 1))),
}


def _fused(statement: AoaStatement, flag: Attribute, names: tuple[int, int]) -> Operation:
    given, kind = statement.attributes, flag.key
    numbers = () if kind == FFN else ("num_heads", "num_key_value_groups")
    _only(statement, ("axis", kind, *numbers), kind)
    for key in numbers:
        if key not in given or int(given[key].value) < 1:
            example = f"{kind}, num_heads=32, num_key_value_groups=8"
            raise Fault(f"{kind} requires {key}, at least 1.", example, flag.span)
    heads, groups = (int(given[key].value) for key in numbers) if numbers else (1, 1)
    if heads % groups:
        cause = f"num_heads={heads} is not divisible by num_key_value_groups={groups}."
        accepted = "num_key_value_groups is the number of kv heads and divides num_heads"
        raise Fault(cause, accepted, given["num_key_value_groups"].span)
    accepted, forms = _FORMS[kind]
    if names not in forms:
        raise Fault(f"{kind} does not go from {names[0]} to {names[1]} names.", accepted, flag.span)
    axis = int(given["axis"].value) if "axis" in given else _DEFAULT_FUSED_AXIS
    return Fused(kind, axis, (heads, groups, groups) if numbers else (1, 1))


def _move(statement: AoaStatement) -> Move:
    given = statement.attributes
    match tuple(given):
        case () | ("axis",):
            return Move()
        case ("permute",):
            return Move(permute=_permutation(given["permute"]))
        case ("reshape",):
            return Move(reshape=_blocks(given["reshape"]))
        case ("dtype",):
            return Move(cast=_dtype(given["dtype"]))
        case ("src_dtype", "dst_dtype"):
            return Move(read_as=_dtype(given["src_dtype"]), cast=_dtype(given["dst_dtype"]))
    cause = f"Unsupported attributes of a statement from one name to one name: {', '.join(given)}."
    accepted = "one of: permute; reshape; dtype; src_dtype and then dst_dtype"
    raise Fault(cause, accepted, list(given.values())[-1].span)


def _numbers(attribute: Attribute, what: str, example: str) -> Shape:
    found = _NUMBERS.fullmatch(attribute.value.strip())
    if found is None:
        raise Fault(f"Invalid list of {what}.", example, attribute.span)
    return tuple(int(part) for part in found.group(1).split(",")) if found.group(1) else ()


def _permutation(attribute: Attribute) -> Shape:
    axes = _numbers(attribute, "axes", 'permute="[1, 0]", or permute="[]" for all reversed')
    if sorted(axes) != list(range(len(axes))):
        cause = f"{list(axes)} does not contain every axis once."
        raise Fault(cause, f"an order of {list(range(len(axes)))}", attribute.span)
    return axes


def _blocks(attribute: Attribute) -> Shape:
    example = 'reshape="[8, 16, 32]" for 8 blocks of 16 rows, which are [128, 32] in the other form'
    shape = _numbers(attribute, "lengths", example)
    if len(shape) < 3 or 0 in shape:
        raise Fault(f"{list(shape)} is not a shape of blocks with at least three axes.", example, attribute.span)
    return shape


def _dtype(attribute: Attribute) -> str:
    if attribute.value not in DTYPES:
        raise Fault(f"Unknown dtype {attribute.value!r}.", ", ".join(DTYPES), attribute.span)
    return attribute.value


_CONFIG = {"aoa_statements": list, "aoa_config_reverse": bool, "enable_traceback": bool}


@dataclass(frozen=True)
class Program:
    """Parsed statements.

    Args:
        statements: valid statements, in the order of the text.
        invalid: invalid lines, with their faults.
        reverse: whether the statements are written for the opposite direction.
    """

    statements: tuple[AoaStatement, ...]
    invalid: tuple[tuple[SourceLine, Fault], ...] = ()
    reverse: bool = False


def read_config(config: object) -> Program:
    """Return the program of an ``aoa_config``.

    Args:
        config: the configured value, of any type.
    Raises:
        MappingError: the value is not a mapping, or has an unknown key or a value of the wrong type. Invalid statements
            are reported when the program is evaluated.
    """
    if not isinstance(config, Mapping):
        raise _invalid("aoa_config is not a mapping.", f"it is {type(config).__name__}")
    for key, value in config.items():
        if key not in _CONFIG or not isinstance(value, _CONFIG[key]):
            expected = f"expected {_CONFIG[key].__name__}" if key in _CONFIG else "unknown key"
            raise _invalid(f"aoa_config has an invalid entry {key!r}.", f"{key} is {type(value).__name__}, {expected}")
    texts = config.get("aoa_statements", [])
    for entry in texts:
        # Do not convert entries to text: a few YAML references can build nested lists of unbounded size.
        if not isinstance(entry, str):
            raise _invalid("aoa_statements has an entry that is not text.", f"an entry is {type(entry).__name__}")
    return replace(read_statements(texts), reverse=config.get("aoa_config_reverse", False))


def read_statements(statements: Sequence[str]) -> Program:
    """Return the program of a list of statements. The last few programs are cached."""
    return _parsed(tuple(statements))


@lru_cache(maxsize=4)
def _parsed(texts: tuple[str, ...]) -> Program:
    found: list[AoaStatement] = []
    invalid: list[tuple[SourceLine, Fault]] = []
    for number, text in enumerate(texts, start=1):
        line = SourceLine(number, text.strip("\r\n"))
        try:
            tokens = tokenize(line.text)
            found += [_Parser(tokens).statement(line)] if len(tokens) > 1 else []
        except Fault as fault:
            invalid.append((line, fault))
    return Program(tuple(found), tuple(invalid))


def _invalid(problem: str, evidence: str) -> MappingError:
    return MappingError(
        problem,
        where="aoa_config",
        evidence=[evidence],
        next_step=f"Use the keys {', '.join(_CONFIG)}; write every statement as one text in quotes.",
    )
