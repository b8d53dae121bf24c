"""Removes likely secrets from command lines and other text before it is stored.

The name before a value decides whether the value is a secret: in options, assignments, JSON and Python literals,
headers and URLs. Where a value has no clear end, the rest of the text is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from probing.daemon.processes.procfs import clean_text

__all__ = ("command_text", "names_secret", "redacted", "takes_secret")

MAX_COMMAND = 1_024
# The maximum number of characters of an argument that are read and shown.
MAX_ARGUMENT = 2 * MAX_COMMAND
HIDDEN = "***"
# Words that also count at the end of a longer word, as in dbpassword, hftoken, myapikey.
_GLUED = (
    r"passwords?|passwd|passphrase|passcode|secrets?|credentials?|(?:api|access|private|secret)keys?"
    r"|(?:auth|access|hf|api)tokens?"
)
_WORDS = (
    r"pwd|pw|psk|token|creds?|auth(?:orization)?|bearer|(?:set.)?cookies?|signature|sas"
    r"|(?:api|access|private|secret|encryption|account|license|ssh|signing|master)[-_. ]?keys?(?:[-_.]?id)?"
)
# A name that ends in KEY, such as WANDB_KEY, is secret, unless one of these prefixes comes before KEY (sort_key).
_KEY_OF = (
    r"(?<![a-z0-9])(?!(?:sort|primary|foreign|cache|partition|dict|data|dataset|group|image|text|label|input|output"
    r"|metric|monitor|best|state|index|map|shard|column|feature|target|join|row|batch|loss|score|object|bucket|lookup"
    r"|hash|module|param|layer|query|value|public|host|hot|dim|config|order|id|by|per|rng|prng|random|dropout|init|attn"
    r"|attention|kv|past)[-_. ])[a-z0-9]+[-_. ]key"
)
# What may follow one of these words, as in API_KEY_2 and token_value. --max-tokens, --tokenizer and --keyboard do not
# match.
_AFTER = r"(?:[-_. ]?\d+|[-_. ](?:value|string|str|text|b64|base64))?"
_NAME = re.compile(rf"(?:(?:{_GLUED})|^-*pass|(?:^|[^a-z0-9])(?:{_WORDS})|{_KEY_OF}){_AFTER}[\])]*$", re.IGNORECASE)
# Names such as pad_token are about the tokens of a text, which are not secret.
_OF_TEXT = re.compile(
    r"(?:^|[-_.])(?:bos|cls|eos|eot|image|mask|next|pad|prev|sep|special|start|stop|unk)[-_.]token$", re.IGNORECASE
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATOR = re.compile(r"=>|[=:]")
_QUOTE = re.compile(r"\s{0,8}(\\*)([\"'])")
# A value without quotes ends at a blank. If it begins with a bracket, it extends to the end of the text.
_BARE = re.compile(r"\s{0,8}(?:[\[{(].*|[^\s&\"']+)", re.DOTALL)
_ENDS_NAME = frozenset("=:&?,;\"'{}\\\t\n")
MAX_NAME = 64
# Names whose values may contain blanks and punctuation. Such a value extends to the end of the line.
_TO_THE_END = re.compile(r"(?:authorization|cookies?)$", re.IGNORECASE)
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]{0,127})(\s+)(?!-)(?:\"[^\"]*\"?|'[^']*'?|\S+)")
# A number after -p is not a password: database clients take a password after -p, but ssh, docker and others take a
# port.
_NUMBERS = re.compile(r"[\d:.,/-]*")
_ATTACHED = re.compile(r"(?<!\S)-p(?=[a-z-]*[^a-z\s-])(?!\d[\d:./-]*(?!\S))\S+")
_IN_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{1,20}://)[^\s/]+@")
# Tokens with a recognisable form: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, JSON web tokens, PEM.
_TOKEN = re.compile(
    r"\b(?i:bearer|basic)\s+[^\s\"']+|\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|-----BEGIN [A-Z ]*PRIVATE KEY.*",
    re.DOTALL,
)


def command_text(cmdline: Sequence[str]) -> str:
    """Returns the arguments joined by blanks, cut at 1024 characters, with ``***`` for values of secret-looking names
    and for tokens.
    """
    shown: list[str] = []
    option, size = "", 0
    for argument in cmdline:
        if takes_secret(option, argument):
            shown.append(HIDDEN)
            option = ""
        else:
            shown.append(_redact(argument[:MAX_ARGUMENT]))
            option = argument
        size += len(shown[-1]) + 1
        if size > MAX_COMMAND:
            break
    return clean_text(" ".join(shown), MAX_COMMAND)


def redacted(text: str) -> str:
    """Returns a line of any text with ``***`` for values of secret-looking names and options, and for tokens."""

    def option(match: re.Match[str]) -> str:
        hide = takes_secret(match[1], match[0][len(match[1]) + len(match[2]) :])
        return match[1] + match[2] + HIDDEN if hide else match[0]

    return _redact(_OPTION.sub(option, text))


def names_secret(name: str) -> bool:
    """Returns whether the value of a variable, option, key or header ``name`` is likely a secret: api_key, hfToken,
    --pw.
    """
    plain = _CAMEL.sub("_", name[-128:]).strip("_ ")
    return _NAME.search(plain) is not None and _OF_TEXT.search(plain) is None


def takes_secret(option: str, value: str) -> bool:
    """Returns whether ``value``, the argument after ``option``, is a secret according to the option's name."""
    if not option.startswith("-") or "=" in option or value.startswith("--"):
        return False
    if option == "-p":
        return not value.startswith("-") and _NUMBERS.fullmatch(value) is None
    if option in ("-u", "--user"):
        return ":" in value
    return names_secret(option)


def _redact(argument: str) -> str:
    name, equals, _ = argument.partition("=")
    if equals and names_secret(name):
        return name + equals + HIDDEN
    text = _IN_URL.sub(rf"\1{HIDDEN}@", argument)
    text = _TOKEN.sub(HIDDEN, text)
    text = _ATTACHED.sub("-p" + HIDDEN, text)
    return _assignments(text)


def _assignments(text: str) -> str:
    parts, at, look = [], 0, 0
    while separator := _SEPARATOR.search(text, look):
        look = separator.end()
        name = _name_before(text, separator.start(), at)
        if not names_secret(name):
            continue
        if quote := _QUOTE.match(text, look):
            end = _end_of_quoted(text, quote.end(), len(quote[1]), quote[2])
            parts += [text[at : quote.end()], HIDDEN, quote[1] + quote[2]]
        elif bare := _BARE.match(text, look):
            end = len(text) if _TO_THE_END.search(name) else bare.end()
            parts += [text[at:look], bare[0][: len(bare[0]) - len(bare[0].lstrip())], HIDDEN]
        else:
            continue
        at = look = end
    return "".join((*parts, text[at:]))


def _name_before(text: str, end: int, start: int) -> str:
    """Returns at most the last two words between ``start`` and ``end``, without quotes."""
    name = text[max(start, end - MAX_NAME - 16) : end].rstrip().rstrip("\\\"'")[-MAX_NAME:]
    blanks = 0
    for index in range(len(name) - 1, -1, -1):
        blanks += name[index] == " "
        if name[index] in _ENDS_NAME or blanks == 2:
            return name[index + 1 :]
    return name


def _end_of_quoted(text: str, at: int, depth: int, quote: str) -> int:
    """Returns where a quoted value ends: after the next quote that has ``depth`` backslashes before it, as the opening
    quote has. If ``depth`` is 0, any even number of backslashes counts. Without such a quote, the value extends to the
    end of the text.
    """
    while (found := text.find(quote, at)) >= 0:
        escapes = found - len(text[at:found].rstrip("\\")) - at
        at = found + 1
        if escapes == depth if depth else escapes % 2 == 0:
            return at
    return len(text)
