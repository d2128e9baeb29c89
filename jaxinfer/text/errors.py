"""The errors of the text room: the caller's text, tokens or messages cannot be used as they are."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer cannot be built, or text cannot be encoded; the message says got / allowed."""


class ChatTemplateError(ValueError):
    """Messages cannot be turned into a prompt; one line that says which message and why."""


def require_unicode(text: str, what: str, error: type[ValueError] = TokenizerError) -> None:
    """Raise `error` when `text` holds half of a surrogate pair, which no encoding can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        found = f"U+{ord(text[failure.start]):04X}"
        raise error(f"{what}: lone surrogate {found} at character {failure.start} is not text") from None
