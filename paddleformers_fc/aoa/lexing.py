"""Split the text of one statement into tokens, each with its position.

One pass with a regular expression that never backtracks over more than one token; linear in the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from paddleformers_fc.aoa.faults import Fault, Span


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


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its characters. The text of a string has no quotes."""

    kind: TokenKind
    text: str
    span: Span


_TOKEN = re.compile(
    r"(?P<ARROW>->)|(?P<EQUAL>=)|(?P<COLON>:)|(?P<OPEN>\[)|(?P<CLOSE>\])|(?P<COMMA>,)|(?P<NUMBER>[0-9]+)"
    r"|(?P<STRING>\"[^\"]*\"|'[^']*')|(?P<NAME>[A-Za-z_][A-Za-z0-9_.$*^]*)|(?P<SPACE>[ \t]+)"
)
_DIGITS = 9

_BREAK = ("A statement has more than one line.", "a separate entry for every statement")
_REFUSED = {
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
            span = Span(at, at + 1)
            cause, accepted = _REFUSED.get(text[at], (f"Invalid character {text[at]!r}.", ""))
            raise Fault(cause, accepted, span)
        begin, at = at, found.end()
        if found.lastgroup != "SPACE":
            tokens.append(_token(TokenKind[str(found.lastgroup)], found.group(), Span(begin, at)))
    _refuse_leading_digits(tokens)
    return [*tokens, Token(TokenKind.END, "", Span(at, at + 1))]


def _token(kind: TokenKind, text: str, span: Span) -> Token:
    if kind is TokenKind.STRING:
        return Token(kind, text[1:-1], span)
    if kind is TokenKind.NUMBER and len(text) > _DIGITS:
        raise Fault(f"Number of {len(text)} digits; no tensor is as large.", "", span)
    return Token(kind, text, span)


def _refuse_leading_digits(tokens: list[Token]) -> None:
    """Refuse ``0.weight``, which is a number directly followed by a name."""
    for first, second in zip(tokens, tokens[1:], strict=False):
        if first.kind is TokenKind.NUMBER and second.kind is TokenKind.NAME and first.span.end == second.span.begin:
            raise Fault(
                "A name begins with a letter or `_`, not with a digit.", "", Span(first.span.begin, second.span.end)
            )
