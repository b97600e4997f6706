"""A locale that knows no character beyond ASCII, and clocks that disagree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.probes import Probe
from orchestrator.diag.text import Line, parse_time

LOCALE = (
    r"UnicodeEncodeError: '(?:ascii|latin-?1|charmap)' codec can't encode",
    r"UnicodeDecodeError: 'ascii' codec can't decode",
    r"'(?:ascii|latin-1)' codec can't (?:en|de)code",
    r"ValueError: zip\(\) argument \d+ is (?:shorter|longer) than argument",
    r"Python was configured to use ASCII as encoding|Click will abort further execution",
    r"locale\.Error: unsupported locale setting",
    r"tmux: need UTF-8 locale|need UTF-8 locale \(LC_CTYPE\)",
    r"UnicodeEncodeError: 'utf-8' codec can't encode character '\\udc",
)
CLOCK = (
    r"[Cc]lock skew detected",
    r"modification time [\d.e+]+ s in the future|has modification time .* in the future",
    r"time ?stamp (?:\S+ ){0,4}(?:is |lies )?[\d.]* ?s?(?:ec\w*)? ?in the future",
    r"certificate is not yet valid|certificate has expired or is not yet valid|"
    r"CERTIFICATE_VERIFY_FAILED[^\n]*not yet valid",
    r"RequestTimeTooSkewed|difference between the request time and the (?:current|server) time",
    r"(?:host|node|system|container|peer) ?clocks? (?:is |are |differ|off|skew|drift|ahead|"
    r"behind)[^\n]*",
    r"clock (?:is|went|jumped|moved|stepped|ran|runs)[^\n]*(?:back|ahead|behind|forward|off|"
    r"future|past)",
    r"(?:token|signature|JWT|ticket)[^\n]*(?:not yet valid|used before issued|iat\b)|"
    r"Clock skew too great",
    r"[Tt]ime (?:went|jumped|moved) backwards?|heartbeat[^\n]*(?:from|in) the future|"
    r"negative (?:elapsed|duration|interval|age)",
    r"System clock synchronized: no",
    r"(?:age|elapsed|ago|since)[ =:]+-(?!0+(?:\.0*)?(?:\D|$))\d+",
)


def locale(e: Evidence) -> Iterator[Finding]:
    """Python's ascii codec, libtmux's ``ValueError: zip() argument 2 is shorter than argument 1``
    (its separator is no ASCII character), tmux's ``need UTF-8 locale``. bash's ``setlocale: LC_ALL:
    cannot change locale`` alone is a harmless warning."""
    hits = e.unrecovered(*LOCALE)
    zipped = [h for h in hits if "zip()" in h.line.text]
    if zipped and len(zipped) == len(hits):
        tmux = any("tmux" in fr.file for f in e.errors for fr in f.frames) or e.search(r"libtmux")
        posix = e.probes.has(
            r"LANG=(?:C|POSIX)?\s*$|LC_ALL=(?:C|POSIX)?\s*$|ANSI_X3|POSIX"
        ) or e.search(r"cannot change locale|LC_ALL|LANG=", quiet=True)
        if not tmux and not posix:
            return
    if not hits:
        return
    state = e.probes.search(r"LANG=|LC_ALL=|LC_CTYPE|charmap|ANSI_X3")
    yield e.found(
        "env.locale",
        "no UTF-8 locale: a non-ASCII character could not be read or written",
        [*hits[:3], *(li for li, _ in state[:2])],
        "export LC_ALL=C.UTF-8 PYTHONUTF8=1   # in start_training.sh, before tmux and python\n"
        "tmux new-session -e LC_ALL=C.UTF-8 …; locale -a",
        confidence=0.9,
    )


def clock(e: Evidence) -> Iterator[Finding]:
    """make's ``Clock skew detected``, TLS ``certificate is not yet valid``, S3's
    RequestTimeTooSkewed; or host and container (or node and node) that tell times apart by more
    than a minute."""
    hits: list[Hit | Line | Probe] = [*e.unrecovered(*CLOCK)]
    dates: list[tuple[float, Probe]] = []
    for probe in e.probes.named(r"date|now|clock|time$"):
        if isinstance(probe.value, dict):
            stamps = [t for v in probe.value.values() if (t := parse_time(str(v))) is not None]
            if len(stamps) >= 2 and max(stamps) - min(stamps) > 60:
                hits.append(probe)
        elif (stamp := parse_time(probe.text)) is not None:
            dates.append((stamp, probe))
    if len(dates) >= 2:
        low, high = min(dates, key=lambda d: d[0]), max(dates, key=lambda d: d[0])
        hosts = {p.key.startswith(("host", "node", "pve")) or "host" in p.key for _, p in dates}
        if high[0] - low[0] > 60 and len(hosts) == 2:
            hits += [low[1], high[1]]
    hits += [
        p
        for p in e.probes
        if isinstance(p.value, dict)
        for k, v in p.value.items()
        if re.search(r"skew|offset", str(k)) and isinstance(v, (int, float)) and abs(v) > 30
    ]
    if not hits or e.outcome.state == "finished":
        return
    strong = [h for h in hits if not (isinstance(h, Hit) and "synchronized" in h.line.text)]
    if not strong:
        return
    yield e.found(
        "env.clock",
        "the clocks of container, host or peers differ",
        hits[:4],
        "on the host: timedatectl; chronyc tracking; systemctl enable --now chrony\n"
        "the container has the host's clock: mend the host; then touch files that lie in the "
        "future:\n"
        "find /workspace -newermt now -exec touch {} +",
        confidence=0.88,
    )


RULES = (locale, clock)
