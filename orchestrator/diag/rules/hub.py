"""Model hubs: no way there, or no right to enter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding
from orchestrator.diag.tracebacks import Failure

AUTH = (
    r"GatedRepoError|RepositoryNotFoundError|LocalTokenNotFoundError|BadRequestError[^\n]*[Tt]oken",
    r"(?:Cannot access|access(?:ing)? a) gated repo|gated repo(?:sitory)?\b[^\n]*(?:access|"
    r"authenticated|log in)",
    r"\b40[13] (?:Client Error|Forbidden|Unauthorized)",
    r"Access to (?:model|dataset) \S+ is restricted",
    r"make sure (?:that )?you (?:are authenticated|have access)|Please (?:log ?in|"
    r"make sure you specified the correct `repo_id`)",
    r"Invalid (?:user(?:name)?|credentials|token)[^\n]*(?:hugging|hub|password)|"
    r"Invalid username or password",
    r"(?:Token|HF_TOKEN|User access token)[^\n]*(?:is required|is invalid|not found|expired|"
    r"invalid)",
    r"is not a (?:local folder and is not a )?valid model identifier",
    r"DatasetNotFoundError[^\n]*(?:gated|authenticated|private)|is a gated dataset",
)
OFFLINE = (
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled",
    r"[Ww]e couldn't connect to 'https?://\S*(?:huggingface|hf)|couldn't connect to \S*huggingface",
    r"Cannot reach https?://\S+: offline mode is enabled",
    r"the hub https?://\S+ does not answer",  # trainer/target.py
    r"HTTPSConnectionPool\(host='\S*(?:huggingface|hf\.co|modelscope|xethub|amazonaws|"
    r"cloudfront|github)\S*'",
    r"(?:huggingface\.co|hf\.co|modelscope|cdn-lfs|xet)\S*[^\n]*(?:[Cc]onnect(?:ion)?(?:Error|"
    r" timed out| refused| reset)?|"
    r"[Tt]imed? ?out|[Nn]ame[ -]?[Rr]esolution|unreachable|Max retries|EOF occurred)",
    r"(?:NameResolutionError|NewConnectionError|ConnectTimeout(?:Error)?|ReadTimeout(?:Error)?|"
    r"ProxyError|SSLError|MaxRetryError)"
    r"[^\n]*(?:hugging|hf\.co|hub|modelscope)",
    r"Couldn't reach '[^']+' on the Hub|ConnectionError: Couldn't reach",
    r"httpx\.(?:Connect(?:Error|Timeout)|ReadTimeout|ProxyError)|httpcore\.Connect",
    r"\b50[234] (?:Server Error|Gateway|Bad Gateway|Service)[^\n]*(?:hugging|hf\.co|hub)",
    r"Max retries exceeded with url: /(?:api/)?(?:models|datasets|[\w.-]+/[\w.-]+/resolve)",
    r"CAS (?:service|client) error[^\n]*|hf_xet[^\n]*(?:error|failed|timed out)",
    r"\b429 (?:Client Error|Too Many Requests)[^\n]*(?:hugging|hf\.co|hub)?",
    r"An error happened while trying to locate the file(?:s)? on the Hub",
)


BROKEN = r"\w*(?:Connection|Connect|Timeout|Encoding|Protocol|SSL|Proxy|Read)Error|\w*Timeout"
"""Exceptions of a way that broke, by whichever library names them; none that names the hub."""


def auth(e: Evidence) -> Iterator[Finding]:
    """huggingface_hub 0.20 to 1.x: ``GatedRepoError: 401``, ``RepositoryNotFoundError`` (a private
    one says 404 or 401 too), transformers' ``You are trying to access a gated repo``."""
    hits = [
        h for h in e.search(*AUTH) if not e.recovered(h.line) and "publickey" not in h.line.text
    ]
    # A proxy's own 403 is no word of the hub.
    hits = [h for h in hits if not re.search(r"ssh|wandb|[Pp]roxy|Tunnel", h.line.text)]
    if hits and re.search(
        r"40[134]|[Gg]ated|[Tt]oken|authent|restricted|Repository|log ?in",
        " ".join(h.line.text for h in hits),
    ):
        repo = _repo(" ".join(h.line.text for h in hits))
        yield e.found(
            "hub.auth",
            f"the hub refuses {repo or 'the repository'}: gated, private, or a wrong token",
            hits[:4],
            "open the model's page, accept its terms with the account of the token\n"
            "in the container: hf auth login   (or export HF_TOKEN=…); hf auth whoami\n"
            "or copy the weights in and give their path",
            confidence=0.93,
        )


def offline(e: Evidence) -> Iterator[Finding]:
    """``LocalEntryNotFoundError … outgoing traffic has been disabled``, requests' and httpx'
    connect errors to the hub, ``We couldn't connect to 'https://huggingface.co'``: also where
    HF_HUB_OFFLINE is set and the cache (HF_HOME of *that* rank's user) lacks the file."""
    hits = e.unrecovered(*OFFLINE)
    hits = [h for h in hits if "wandb" not in h.line.text]
    broken = [f for f in e.raised(BROKEN) if _asked_the_hub(f) and not e.recovered(f.line)]
    if not hits and not broken:
        return
    home = e.search(r"\bHF_(?:HOME|HUB_CACHE|HUB_OFFLINE)\b|TRANSFORMERS_OFFLINE|HOME=", quiet=True)
    repo = _repo(" ".join(h.line.text for h in hits))
    yield e.found(
        "hub.offline",
        f"no way to the model hub, and {repo or 'the files'} are not in the cache",
        [*hits[:4], *broken[:1], *home[:1]],
        "in the container: curl -sI https://huggingface.co | head -1; getent hosts huggingface.co; "
        "ls $HF_HOME/hub\n"
        "fetch it beforehand where there is a way: hf download REPO --local-dir "
        "/workspace/models/NAME\n"
        "and give that path; the same HF_HOME for every rank; proxy: HTTPS_PROXY",
        confidence=0.92,
    )


def _asked_the_hub(failure: Failure) -> bool:
    return any("huggingface_hub/" in fr.file for fr in failure.frames)


def _repo(text: str) -> str:
    match = re.search(
        r"(?:huggingface\.co|hf\.co)/(?:api/(?:models|datasets)/)?((?!docs|"
        r"api)[\w.-]+/[\w.-]+?)(?:/|\.?\s|$|')"
        r"|(?:model|dataset|repo) '?([\w-]+/[\w.-]+)'? (?:is|on)",
        text,
    )
    return (match[1] or match[2] or "").rstrip(".") if match else ""


def tracker(e: Evidence) -> Iterator[Finding]:
    """wandb's ``api_key not configured (no-tty)``: a run has nobody to type one."""
    hits = e.unrecovered(r"api_key not configured \(no-tty\)")
    if hits:
        yield e.found(
            "hub.auth",
            "wandb has no key, and nobody is there to type one",
            hits[:2],
            "in the container: wandb login   (or export WANDB_API_KEY=… for the run)\n"
            "or without it: export WANDB_MODE=offline; transformers: report_to='none'",
            confidence=0.9,
        )


RULES = (auth, offline, tracker)
