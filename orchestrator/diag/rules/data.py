"""Training data: absent, malformed, without supervised tokens, or not fitting the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import container_of, path_in
from orchestrator.diag.tracebacks import Failure

_DATA_FILE = (
    r"\.(?:jsonl?|parquet|arrow|csv|tsv|txt|npy|npz|bin|idx|zst|gz|tar|mds|lance)(?:\.\w+)?\b"
)
_DATA_WORD = (
    r"data|dataset|corpus|shard|train|valid|eval|prompts|mix|manifest|split|token(?:s|ized)"
)
MISSING = (
    r"DataFilesNotFoundError|EmptyDatasetError|DatasetNotFoundError",
    r"Unable to find '[^']+'",
    r"(?:Couldn't|Could not) find (?:any data file|a dataset script|file) (?:at|in)",
    r"doesn't contain any data files|OSError: Cannot find data file\b",
    rf"No (?:such )?(?:data|shard|sample|training|matching)? ?files? (?:found|"
    rf"match)[^\n]*(?:{_DATA_WORD})",
    r"\b(?<![\d.,])(?:[Nn]o|0|zero) (?:shards?|samples|documents|examples|rows|data files) "
    r"(?:found|in|at|under|match)",
    r"(?:data|dataset|shard|corpus|training)[ \w]*(?:file|path|folder|"
    r"directory)[^\n]*(?:does not exist|not found|is missing)",
    # torch's sampler and transformers' Trainer of a dataset without a row
    r"but got num_samples=0\b|Invalid key: \d+ is out of bounds for size 0\b",
    r"glob [^\n]*(?:matched|matches) (?:no|0|nothing)\b(?![.,]\d)",
)
FORMAT = (
    r"ArrowInvalid: (?:JSON parse error|Could not (?:open|convert)|Parquet|Not an Arrow|"
    r"Column)|ArrowTypeError",
    r"JSON parse error|Parquet magic bytes not found|Parquet file size is \d+ bytes|"
    r"Couldn't deserialize thrift",
    r"DatasetGenerationError|DatasetGenerationCastError|CastError: Couldn't cast|"
    r"Couldn't cast array of type|Columns? \S+ not in the dataset\. Current columns",
    r"(?:JSONDecodeError|json\.decoder)",
    r"tarfile\.\w*Error|ReadError: (?:unexpected end|not a gzip|file could not be opened)|"
    r"Not a gzipped file|Compressed file ended before the end-of-stream|BadGzipFile|"
    r"CRC check failed",
    r"ZstdError|zstd[^\n]*(?:Unknown frame descriptor|corrupt|decompress)|Data corruption detected",
    r"ParserError: Error tokenizing data|_csv\.Error|csv\.Error",
    r"mmap length is greater than filesize|"  # numpy.memmap of a truncated file
    r"Cannot load file containing pickled data|cannot reshape array of size|"
    r"Failed to interpret file",
    r"(?:invalid|malformed|bad|corrupt(?:ed)?|truncated|unparsable) (?:JSON|json|line|record|"
    r"sample|row|parquet|shard|document)\b",
    r"(?:line|row|record|sample|document) \d+[^\n]{0,40}(?:is not valid|does not parse|invalid|"
    r"malformed|missing (?:field|key|column)|"
    r"has no ['\"]?(?:messages|conversations|text|content))",
    r"Unexpected (?:column|field|schema)|schema mismatch|column names don't match",
)
EMPTY = (
    r"\b(?<![\d.,])(?:no|0|zero|without) (?:supervised|trainable|assistant|target|labelled|labeled|"
    r"loss|valid|response)[ _-]?"
    r"(?:tokens?|labels?|targets?|positions?|anchors?)",
    r"(?:all|every) (?:labels?|targets?|tokens?) (?:are|is|were) (?:-100|masked|ignored)",
    r"(?:loss|label|assistant|supervis\w+|response|target)[ _-]?masks? (?:is |are |was |"
    r"were )?(?:all |entirely )?(?:zero|empty|0|False|None)\b(?!\.\d)",
    r"(?:mask|labels?|supervised|assistant_masks?)[^\n]{0,40}(?:sum|count|total|"
    r"tokens)[ =:]+0(?:\.0+)?\b",
    r"\bno (?:valid |usable )?anchors?\b|\b(?<![\d.,])(?:0|zero) (?:valid )?anchors?\b|"
    r"\banchors? ?[=:] ?0\b(?!\.\d)",
    r"[Cc]ould not find (?:response|instruction) key .* in the following instance|"
    r"This instance will be ignored in loss",
    r"return_assistant_tokens_mask==True but chat template does not contain `\{% generation %\}`",
    r"(?:num_items_in_batch|n_supervised|n_loss_tokens|supervised_tokens|loss_tokens|"
    r"weight_sum|target_tokens)['\" ]*[=:] ?0(?:\.0+)?\b",
    r"nothing (?:is |was |left )?(?:to supervise|supervised|to train on)|"
    r"no tokens? (?:left )?to (?:train|supervise)",
    r"supervised (?:share|fraction|tokens)[ :=]+0(?:\.0+)?\s?%?(?:\s|$)",
)
TOKENIZER = (
    r"(?:vocab(?:ulary)?[ _]?size|tokenizer|token(?:s| id)?)[^\n]*(?:outside|exceed|"
    r"larger than|beyond|>=|out of range|does not (?:fit|match))"
    r"[^\n]*(?:vocab|embedding|model|table|rows|\d)",
    r"(?:mask|pad|eos|bos|special|added)[ _]token(?:[ _]id)?\S* [^\n]*(?:not in|outside|"
    r"missing|None|unknown|does not exist|not (?:set|defined|found))",
    r"Asking to pad but the tokenizer does not have a padding token",
    r"chat_template (?:is )?(?:not set|null|None\b)|no template argument was passed|"
    r"does not have a (?:default )?chat template",
    r"Conversation roles must alternate|jinja2\.exceptions\.\w+|TemplateError|"
    r"TemplateSyntaxError|UndefinedError: ",
    r"Couldn't instantiate the backend tokenizer|Can't load tokenizer for|"
    r"Tokenizer class \S+ does not exist",
    r"tokenizer (?:has|of|knows)[^\n]*(?:but|while|,)[^\n]*(?:model|embedding|"
    r"target)[^\n]*(?:has|of|\d)",
    r"len\(tokenizer\)[^\n]*\d+[^\n]*(?:embedding|vocab)",
    r"(?:tokenizers?|vocabular(?:y|ies)) (?:differ|mismatch|do(?:es)? not (?:match|agree|fit))|"
    r"(?:different|wrong) (?:tokenizer|vocabulary|chat template)",
    r"srcIndex < srcSelectDimSize|Indexing\.cu:\d+[^\n]*Assertion `(?:srcIndex|index|ind)",
)


def missing(e: Evidence) -> Iterator[Finding]:
    """``FileNotFoundError`` on a data file, datasets' ``DataFilesNotFoundError`` / ``Unable to
    find``. A model's file, a compile cache's, a command or a script are other codes."""
    failures = [
        f
        for f in e.errors
        if f.name in ("FileNotFoundError", "NotADirectoryError", "IsADirectoryError")
        and _is_data(f)
        and not e.recovered(f.line)
    ]
    hits = [
        h
        for h in e.search(*MISSING)
        if not e.recovered(h.line) and not re.search(r"gated|authenticated|private", h.line.text)
    ]
    if not failures and not hits:
        return
    said = next((f for f in e.errors for h in hits[:1] if f.line is h.line), None)
    told = failures[0] if failures else said
    text = told.message if told else hits[0].line.text
    path = path_in(text)
    yield e.found(
        "data.missing",
        f"training data is absent: {path or text.strip()[:120]}",
        [*failures[:2], *hits[:2]],
        f"in the container: ls -la {path.rsplit('/', 1)[0] if path else '/workspace/data'}; "
        "mount | grep workspace\n"
        f"is the mount point there (pct config {container_of(e)} | grep mp)?\n"
        "does the config name it as the container sees it? rows left after filters: "
        "print(len(dataset))\n"
        "copy it in: dflashctl push …",
        confidence=0.9,
    )


def _is_data(failure: Failure) -> bool:
    message = failure.message
    if re.search(
        r"safetensors|pytorch_model|/hub/|config\.json|tokenizer|\.pt\b|\.pth\b|ckpt|"
        r"checkpoint|torchinductor|triton|"
        r"adapter|\.metadata|\.distcp|/(?:step|epoch|global_step)[-_]?\d+/|/dev/|\.so\b|"
        r"\.cu?h\b|\.sh\b|\.py\b|\.ya?ml|\.toml",
        message,
    ):
        return False
    if re.search(_DATA_FILE, message):
        return True
    frames = " ".join(
        f"{fr.file} {fr.function} {fr.code}" for link in failure.chain() for fr in link.frames
    )
    path = path_in(message)
    return bool(path) and bool(
        re.search(rf"(?:{_DATA_WORD})", path, re.IGNORECASE)
        or re.search(r"datasets?/|dataloader|load_dataset|data\.py|dataset", frames)
    )


# A parser's own errors, and those that mean data only where the user's code reads some.
_PARSE_ERRORS = (
    *("JSONDecodeError", "ArrowInvalid", "ArrowTypeError", "BadGzipFile", "ZstdError"),
    *("DatasetGenerationError", "DatasetGenerationCastError", "CastError", "ParserError"),
)
_READ_ERRORS = ("EOFError", "UnicodeDecodeError", "KeyError", "ValueError", "error", "ZlibError")


def format_(e: Evidence) -> Iterator[Finding]:
    """json, pyarrow, datasets, gzip, zstd and csv on a broken record or file; the message's row,
    else the line the loader names. The same exception inside a compile cache or a config is not
    data."""
    failures = [
        f
        for f in e.errors
        if (f.name in _PARSE_ERRORS or (f.name in _READ_ERRORS and _in_data_code(f)))
        and not _in_cache(f)
        and not e.recovered(f.line)
    ]
    hits = _said_malformed(e)
    if not failures and not hits:
        return
    near = [
        li
        for li in e.lines
        for f in failures[:1]
        if 0 < li.number - f.line.number <= 3
        and re.search(rf"{_DATA_FILE}|\b(?:line|sample|row|record) [\d,]+", li.text)
    ]
    told = [li.text for li in near] + [f.message for f in failures[:2]]
    told += [h.line.text for h in hits[:2]]
    file = re.search(rf"\S+{_DATA_FILE}", " ".join(told))
    name = file[0].strip("'\"(),") if file else ""
    said = failures[0].message.splitlines()[0][:120] if failures and failures[0].message else ""
    yield e.found(
        "data.format",
        "a record does not parse" + (f" in {name}" if name else "") + (f": {said}" if said else ""),
        [*failures[:2], *near[:1], *hits[:2]],
        f"python - <<'P'\nimport json\nfor n, line in enumerate(open('{name or 'FILE.jsonl'}'),"
        " 1):\n"
        "    try: json.loads(line)\n    except ValueError as e: print(n, e)\nP\n"
        "the last line only: the copy was cut off; copy again and compare sha256sum; else mend "
        "or drop it",
        confidence=0.88,
    )


def _said_malformed(e: Evidence) -> list[Hit]:
    """Words of a broken record that nobody passed over and that are no cache's or checkpoint's."""
    caches = [f for f in e.failures if _in_cache(f)]
    others = re.compile(
        r"(?i)skip|ignor|drop|torchinductor|triton|codecache|checkpoint|ckpt|safetensors"
    )
    return [
        h
        for h in e.search(*FORMAT)
        if not e.recovered(h.line)
        and not others.search(h.line.text)
        and not any(f.first <= h.line.number <= f.last for f in caches)
    ]


def _in_cache(failure: Failure) -> bool:
    return any(
        re.search(
            r"codecache|triton/|_inductor|autograd_cache|transformers/|huggingface_hub|"
            r"safetensors|configuration_",
            fr.file,
        )
        for fr in failure.frames[-4:]
    )


_OF_A_RECORD = {
    "KeyError": r"'(?:messages|conversations|text|content|role|input_ids|prompt|response|labels|"
    r"completion|loss_mask|tokens?|from|value)'",
    "ValueError": r"parse|invalid literal|could not convert|reshape|unpack|column|field|"
    r"expected \d+ (?:fields|columns)",
}
"""Words that make an error of every day one of a record, in code that reads data."""


def _in_data_code(failure: Failure) -> bool:
    """One of the innermost frames reads data: the user's own by its file's name, or a library's."""
    frames = failure.frames[-3:]
    named = any(
        re.search(
            r"data|dataset|loader|collat|pack|shard|prepro|tokeniz|corpus|stream|reader",
            fr.file.rsplit("/", 1)[-1],
        )
        for fr in frames
        if not fr.library
    )
    if (words := _OF_A_RECORD.get(failure.name)) is not None:
        return named and re.search(words, failure.message) is not None
    if failure.name == "EOFError":
        return named or "end-of-stream" in failure.message
    return named or any(
        re.search(r"json/|gzip|zstandard|csv|pyarrow|datasets/", fr.file) for fr in frames
    )


def empty_mask(e: Evidence) -> Iterator[Finding]:
    """No token left to learn from: the chat template does not mark the assistant's words, the
    marker strings differ, everything was cut away. trl's ``Could not find response key``,
    transformers' ``chat template does not contain {% generation %}``. A few such documents are
    skipped, not fatal."""
    hits = [
        h
        for h in e.search(*EMPTY)
        if not re.search(r"(?i)warn_if|--|skipp?(?:ed|ing)? \d+ of", h.line.text)
    ]
    nan = any(s.loss is None or s.loss != s.loss for s in e.series.losses()[-2:])
    hits = [h for h in hits if nan or not e.recovered(h.line)]
    zero = [s for s in e.series.losses() if s.loss == 0]
    flat = bool(zero) and len(zero) >= max(3, len(e.series.losses()) // 2)
    if not hits and not flat:
        return
    if not hits and not e.search(r"(?i)mask|supervis|label|assistant|template"):
        return
    yield e.found(
        "data.empty_mask",
        "no supervised token: there is nothing to learn from",
        [*hits[:4], *(s.line for s in zero[:2])],
        "look at one sample: decode the ids where the mask is 1\n"
        "the chat template must mark the assistant: {% generation %} … {% endgeneration %}, or "
        "the markers in\n"
        "the config must equal the template's (<|im_start|>assistant); longer sequences if "
        "answers are cut off",
        confidence=0.88,
        severity="fatal",
        lasting=flat or nan,
    )


def tokenizer(e: Evidence) -> Iterator[Finding]:
    """A vocabulary larger than the embedding (``index out of range in self``, the device's
    ``srcIndex < srcSelectDimSize``), a mask or pad token that is not there, no chat template, or
    one that refuses the roles (jinja2)."""
    hits = [
        h
        for h in e.search(*TOKENIZER)
        if not e.recovered(h.line)
        and not re.search(
            r"Special tokens have been added|FutureWarning|fine-tuned|you may observe unexpected|"
            r"longer than the specified maximum|"
            r"['\"]\w+_token(?:_id)?['\"] ?:",  # a config, written out
            h.line.text,
        )
    ]
    index = [
        f for f in e.errors if f.name == "IndexError" and "index out of range in self" in f.message
    ]
    device = [h for h in hits if "srcIndex" in h.line.text or "Indexing.cu" in h.line.text]
    embedding = any(
        re.search(r"embed", f"{fr.function} {fr.code}") for f in e.errors for fr in f.frames
    )
    named = [h for h in hits if h not in device]
    counts = _counts(e)
    if not (named or (index and embedding) or (device and (counts or named))):
        return
    title = "tokenizer and model do not fit"
    if counts:
        title += f": {counts[0]} token ids, {counts[1]} embedding rows"
    elif named:
        title += ": " + named[0].line.text.strip()[:130]
    yield e.found(
        "data.tokenizer",
        title,
        [*named[:3], *device[:1], *index[:1]],
        'python -c "from transformers import AutoTokenizer, AutoConfig; '
        "t=AutoTokenizer.from_pretrained(P); "
        'print(len(t), AutoConfig.from_pretrained(P).vocab_size)"\n'
        "tokenize with the target's own tokenizer; data tokenized for another model must be "
        "made again\n"
        "a mask token must be an id below the number of embedding rows",
        confidence=0.9,
    )


def _counts(e: Evidence) -> tuple[str, str] | None:
    """The tokenizer's size and the embedding's, if both are printed and do not fit."""
    number = r"\b(\d{1,3}(?:,\d{3})+|\d{4,7})\b"
    words = e.search(
        rf"(?i)\b(?:tokenizer|vocab\w*|max(?:imum)? (?:token )?id|token ids?)\b[^\n]*?{number}",
        quiet=True,
    )
    rows = e.search(
        rf"(?i)\b(?:embedding|embed_tokens|lm_head|model vocab\w*|"
        rf"config vocab\w*)\b[^\n]*?{number}",
        quiet=True,
    )
    for a in words:
        for b in rows:
            if a.line is not b.line and int(a[1].replace(",", "")) > int(b[1].replace(",", "")):
                return a[1], b[1]
    for hit in e.search(
        r"(?:tokenizer|vocab\w*|token ids?|max(?:imum)? (?:token "
        r")?id)\D{0,30}(\d{4,7})\D{1,40}(?:embedding|model|rows|table|weight)\D{0,20}(\d{4,7})",
    ):
        if int(hit[1]) >= int(hit[2]):
            return hit[1], hit[2]
    return None


RULES = (missing, format_, empty_mask, tokenizer)
