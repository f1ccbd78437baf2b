"""The commands in a shell block, as far as the documentation uses the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_HEREDOC = re.compile(r"<<'?(\w+)'?\n.*?^\1$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(^|\s)#[^'\"\n]*$", re.MULTILINE)
_CONTINUED = re.compile(r"\\\n\s*")
_SETTING = re.compile(r"^\w+=")
_SEPARATORS = ";<>|&()\n"


def commands(text: str) -> Iterator[list[str]]:
    """The argument lists of a block's commands; variables set before a command, pipes and redirections are left out."""
    text = _CONTINUED.sub(" ", _COMMENT.sub("", _HEREDOC.sub("", text)))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for token in [*lexer, "\n"]:
        if token.strip(_SEPARATORS):
            if words or not _SETTING.match(token):
                words.append(token)
        elif words:
            yield words
            words = []


def tidemill_arguments(words: list[str]) -> list[str] | None:
    """What `tidemill` is called with by a command, directly, by a module or by a script; None if it isn't called."""
    if words[0] == "tidemill":
        return words[1:]
    if words[0] == "scripts/demo":
        return ["demo", *words[1:]]
    if words[0] in ("python", "torchrun") and "tidemill" in words and words[words.index("tidemill") - 1] == "-m":
        return words[words.index("tidemill") + 1 :]
    return None
