"""Parse tokens into statements. Placeholders are not expanded, and no tensor is looked up.

::

    statement := side '->' side { ',' attribute }
    side      := item { ',' item }
    item      := '_' | name [ '^T' ] [ '[' number ':' number ']' ]
    attribute := 'axis' '=' number
               | 'permute' '=' string
               | 'dtype' '=' string
               | 'src_dtype' '=' string ',' 'dst_dtype' '=' string
               | 'fused_ffn' | 'fused_qkv' | 'fused_qkv_old'
               | 'num_heads' '=' number | 'num_key_value_groups' '=' number

Names contain placeholders (``$LAYER_ID``, ``$EXPERT_ID``, ``$LAYER_ID_OFFSET``) and one ``*``. Linear in the tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from paddleformers_fc.aoa.faults import Fault, SourceLine, Span
from paddleformers_fc.aoa.lexing import Token, TokenKind, tokenize

NOTHING = "_"
TRANSPOSED = "^T"
FLAGS = ("fused_ffn", "fused_qkv", "fused_qkv_old")
_VALUES = {
    "axis": TokenKind.NUMBER,
    "num_heads": TokenKind.NUMBER,
    "num_key_value_groups": TokenKind.NUMBER,
    "permute": TokenKind.STRING,
    "dtype": TokenKind.STRING,
    "src_dtype": TokenKind.STRING,
    "dst_dtype": TokenKind.STRING,
}
KEYWORDS = frozenset((*FLAGS, *_VALUES))


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a side.

    Args:
        pattern: the name, with its placeholders and wildcard, without ``^T``.
        transposed: whether ``^T`` follows it.
        array: bounds of ``[begin:end]``, or None.
        span: its characters.
    """

    pattern: str
    transposed: bool
    array: tuple[int, int] | None
    span: Span


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute; the value of a flag is empty."""

    key: str
    value: str
    span: Span


@dataclass(frozen=True)
class AoaStatement:
    """A parsed statement.

    Args:
        line: the user's text.
        left: the items that are read.
        right: the items that are written.
        attributes: by key, in the order of the text.
        arrow: the position of the arrow.
    """

    line: SourceLine
    left: tuple[Item, ...]
    right: tuple[Item, ...]
    attributes: Mapping[str, Attribute]
    arrow: Span


def parse_line(line: SourceLine) -> AoaStatement | None:
    """Return the statement of one line, or None for a blank one.

    Raises:
        Fault: the line is not a statement.
    """
    tokens = tokenize(line.text)
    if tokens[0].kind is TokenKind.END:
        return None
    return _Reader(tokens).statement(line)


class _Reader:
    """A cursor over the tokens of one line."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def statement(self, line: SourceLine) -> AoaStatement:
        left = self._side()
        arrow = self._expect(TokenKind.ARROW, "a name, -> and a name").span
        right = self._side()
        attributes: dict[str, Attribute] = {}
        while self._token.kind is TokenKind.COMMA:
            self._at += 1
            attribute = self._attribute()
            if attribute.key in attributes:
                raise Fault(f"Duplicate attribute {attribute.key}.", "", attribute.span)
            attributes[attribute.key] = attribute
        self._expect(TokenKind.END, "`,` and a name or attribute")
        for item in right:
            if item.transposed:
                raise Fault("`^T` is not supported on the right side.", "`a^T -> b`", item.span)
        return AoaStatement(line, tuple(left), tuple(right), attributes, arrow)

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _peek(self, ahead: int) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _expect(self, kind: TokenKind, accepted: str) -> Token:
        token = self._token
        if token.kind is not kind:
            found = token.kind.value if token.kind is TokenKind.END else f"`{token.text}`"
            raise Fault(f"Expected {kind.value}, found {found}.", accepted, token.span)
        if kind is not TokenKind.END:
            self._at += 1
        return token

    def _side(self) -> list[Item]:
        items = [self._item()]
        while self._token.kind is TokenKind.COMMA and not self._attribute_ahead():
            self._at += 1
            items.append(self._item())
        return items

    def _attribute_ahead(self) -> bool:
        following = self._peek(1)
        return following.kind is TokenKind.NAME and (
            following.text in KEYWORDS or self._peek(2).kind is TokenKind.EQUAL
        )

    def _item(self) -> Item:
        token = self._expect(TokenKind.NAME, "")
        if token.text in KEYWORDS:
            raise Fault(f"The keyword `{token.text}` is not a valid name.", "", token.span)
        transposed = token.text.endswith(TRANSPOSED)
        name = token.text[: -len(TRANSPOSED)] if transposed else token.text
        if "^" in name:
            raise Fault("`^` is valid only in `^T` at the end of a name.", "weight^T", token.span)
        array = self._array(token) if self._token.kind is TokenKind.OPEN else None
        if name == NOTHING and (transposed or array):
            raise Fault("`_` is not a tensor and has no axes or parts.", "`_`", token.span)
        if transposed and array:
            raise Fault("`^T` is not supported for an array of names.", "one name per statement", token.span)
        return Item(name, transposed, array, Span(token.span.begin, self._peek(-1).span.end))

    def _array(self, name: Token) -> tuple[int, int]:
        self._at += 1
        form = "name[0:4], which is name_0, name_1, name_2, name_3"
        begin = self._expect(TokenKind.NUMBER, form)
        self._expect(TokenKind.COLON, form)
        end = self._expect(TokenKind.NUMBER, form)
        self._expect(TokenKind.CLOSE, form)
        span = Span(name.span.begin, self._peek(-1).span.end)
        if int(begin.text) >= int(end.text):
            raise Fault("Empty array of names.", form, span)
        return int(begin.text), int(end.text)

    def _attribute(self) -> Attribute:
        token = self._expect(TokenKind.NAME, "an attribute")
        if token.text in FLAGS:
            return Attribute(token.text, "", token.span)
        if token.text == "reshape":
            raise Fault("`reshape` is an attribute of newer versions of Paddle than 3.3.", "", token.span)
        if token.text not in _VALUES:
            near = difflib.get_close_matches(token.text[:50], sorted(KEYWORDS), 1)
            raise Fault(
                f"Unknown attribute `{token.text}`.", near[0] if near else ", ".join(sorted(KEYWORDS)), token.span
            )
        self._expect(TokenKind.EQUAL, f"{token.text}=...")
        value = self._expect(_VALUES[token.text], f"{token.text}= and {_VALUES[token.text].value}")
        return Attribute(token.text, value.text, Span(token.span.begin, value.span.end))
