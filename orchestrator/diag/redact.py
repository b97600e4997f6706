"""Secrets out of texts, before they leave in a bundle.

What is recognized: the shapes of known tokens, ``NAME=value`` and ``"name": "value"`` whose name
speaks of a secret, private keys, passwords in URLs, authorization headers. Addresses on request.
"""

from __future__ import annotations

import re

MARK = "[redacted]"
_NAME = (
    r"(?:[\w-]*(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"credential|auth(?:orization)?|cookie|session[_-]?key|webhook)[\w-]*)"
)
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}|xox[abposr]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|PVEAPIToken=\S+)"
)
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*):([^\s/@]+)@")
_HEADER = re.compile(
    r"(?i)\b((?:authorization|proxy-authorization|x-api-key|cookie)\s*:\s*)([^\r\n]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}")
_QUOTED = re.compile(rf"(?i)(['\"]{_NAME}['\"]\s*[:=]\s*)(['\"])(?:(?!\2).)*\2")
_ASSIGNED = re.compile(rf"(?i)(\b{_NAME}\s*=\s*)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;\"')}}\]]+)")
_YAML = re.compile(rf"(?im)^(\s*(?:-\s*)?{_NAME}\s*:[ \t]+)(\S.*)$")
_FLAG = re.compile(rf"(?i)(--{_NAME}[= ])(\S+)")
# A command line as a list, of Python or of JSON over several lines.
_LISTED = re.compile(rf"(?i)(['\"]--{_NAME}['\"]\s*,\s*)(['\"])(?:(?!\2).)*\2")
_NETRC = re.compile(r"(?i)\b(machine\s+\S+\s+login\s+\S+\s+password\s+)(\S+)")
_WANDB = re.compile(r"(?i)(wandb[^\n]{0,40}?\b)([0-9a-f]{40})\b")
_ADDRESS = re.compile(
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{0,4}\b", re.IGNORECASE
)
# Numbers and switches under a telling name are no secrets: max_tokens=4096, use_auth_token=False.
_HARMLESS = re.compile(
    r"(?i)^['\"]?(?:\d{1,12}(?:\.\d+)?|true|false|none|null|yes|no|\[redacted\]|\*+|<[\w ]+>|"
    r")['\"]?,?$"
)
_PLAIN_NAME = re.compile(
    r"(?i)tokens|tokeniz|token_?ids?|(?:mask|pad|eos|bos|unk|sep|cls|special)_?token"
)


def redact(text: str, *, addresses: bool = False) -> str:
    """``text`` with every secret replaced by a mark; the rest is kept to the character."""
    text = _KEY_BLOCK.sub(f"-----BEGIN PRIVATE KEY----- {MARK}", text)
    text = _TOKENS.sub(MARK, text)
    text = _URL.sub(rf"\1:{MARK}@", text)
    text = _HEADER.sub(rf"\1{MARK}", text)
    text = _BEARER.sub(rf"\1 {MARK}", text)
    text = _NETRC.sub(rf"\1{MARK}", text)
    text = _WANDB.sub(rf"\1{MARK}", text)
    for pattern in (_QUOTED, _LISTED):
        text = pattern.sub(_quoted, text)
    for pattern in (_FLAG, _ASSIGNED, _YAML):
        text = pattern.sub(_assigned, text)
    if addresses:
        text = _ADDRESS.sub("[address]", text)
    return text


def _quoted(match: re.Match[str]) -> str:
    value = match[0][len(match[1]) :]
    if _PLAIN_NAME.search(match[1]) or _HARMLESS.match(value):
        return match[0]
    return f"{match[1]}{match[2]}{MARK}{match[2]}"


def _assigned(match: re.Match[str]) -> str:
    if _PLAIN_NAME.search(match[1]) or _HARMLESS.match(match[2]):
        return match[0]
    return f"{match[1]}{MARK}"
