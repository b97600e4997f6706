"""Weights and checkpoints: absent, torn, of another shape, of another run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import path_in
from orchestrator.diag.tracebacks import Failure

LOAD = (
    r"SafetensorError|Error while deserializing header|HeaderTooLarge|HeaderTooSmall|"
    r"InvalidHeader(?:Deserialization|Length|Start)?|"
    r"MetadataIncompleteBuffer|incomplete metadata, file not fully covered",
    r"PytorchStreamReader failed|failed finding central directory|not a ZIP archive|"
    r"invalid header or archive is corrupted",
    r"UnpicklingError|invalid load key|pickle data was truncated|Weights only load failed",
    r"Error no file named [^\n]*(?:safetensors|pytorch_model|\.bin)",
    r"does not appear to have (?:a file|files) named",
    r"(?:No such file or directory|FileNotFoundError|not found|"
    r"does not exist)[^\n]*(?:\.safetensors|pytorch_model|\.gguf|model-\d+-of-\d+|"
    r"consolidated\.\d+|\.index\.json|/models?/)",
    r"(?:model|weights?|target|drafter)[^\n]*(?:\.safetensors|folder|directory|"
    r"path)[^\n]*(?:not found|does not exist|is missing|No such)",
    r"Unrecognized model in|Should have a `?model_type`? key",
    r"Repo id must (?:be in the form|use alphanumeric)|HFValidationError|"
    r"Incorrect path_or_model_id",
    r"safetensors archive passed at [^\n]*does not contain the valid metadata",
    r"Consistency check failed: file should be of size",  # huggingface_hub
    r"Unable to load weights from (?:pytorch )?checkpoint file|Can't load (?:the )?(?:model|"
    r"configuration|config|weights)",
    r"version https://git-lfs\.github\.com|git-?lfs pointer",
    r"It looks like the config file at '[^']+' is not a valid JSON file",
    r"(?:sha256|checksum|hash|size)[^\n]*(?:mismatch|differs|"
    r"does not match)[^\n]*(?:safetensors|shard|weights?|model)",
    r"unable to mmap \d+ bytes from file(?! <filename not spec)|"
    r"(?i:invalid magic (?:number|character)[^\n]*gguf)|GGUF magic (?:invalid|number)|"
    r"not a GGUF file|Keys? \S+ not found in (?:the )?(?:index|weight_map)",
)
SHAPE = (
    r"size mismatch for \S+: copying a param",
    r"Error\(s\) in loading state_dict for",
    r"(?:Missing|Unexpected) key\(s\) in state_dict",
    r"\b(?:missing|unexpected) keys? \S+ in state_dict",  # torch before 0.4
    r"mat1 and mat2 shapes cannot be multiplied|mat1 and mat2 must have the same dtype",
    r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
    r"(?:shape|hidden[_ ]size|head_dim|num_(?:hidden_)?layers|dimension|width|features?|"
    r"taps?)[^\n]*(?:mismatch|does not match|do not match|"
    r"differs?|expected \S+,? (?:but )?(?:got|found)|!=)",
    r"expected (?:input|hidden|weight|tensor)[^\n]*(?:size|shape|dim)[^\n]*(?:got|but)",
    r"shape '\[[^\]]+\]' is invalid for input of size \d+",
    r"Given normalized_shape=|Expected tensor [^\n]*size \d+",
    r"Trying to set a tensor of shape [^\n]* which has shape|which has shape[^\n]*looks incorrect",
    r"ignore_mismatched_sizes",
    r"newly initialized because the shapes did not match",
)
PARTIAL = (
    r"(?:incomplete|partial|torn|truncated|unfinished|corrupt(?:ed)?) (?:checkpoint|ckpt|save)",
    r"(?:checkpoint|ckpt)\S*[^\n]{0,60}(?:is |was |looks )?(?:incomplete|partial|truncated|"
    r"torn|corrupt|not complete|unfinished|"
    r"missing (?:the )?(?:shard|file|rank|optimizer|\.metadata|marker))",
    r"(?:no|without) (?:complete|COMPLETE|done|commit|\.metadata)[- ]?(?:marker|file|"
    r"flag)?[^\n]*(?:checkpoint|ckpt)",
    r"(?:checkpoint|ckpt)\S*[^\n]*(?:no|without|lacks?|missing) (?:\.?metadata|marker|manifest|"
    r"complete|COMPLETE|index)",
    r"(?:step|epoch|iter|global_step)[-_ ]?\d+\S*:? [^\n]{0,40}\b(?:incomplete|"
    r"partial(?:ly written)?|torn|truncated|corrupt(?:ed)?|unfinished)\b",
    r"\b(?:incomplete|torn|truncated|unfinished|corrupt)\b[^\n]{0,60}\b(?:passed over|"
    r"skipp(?:ed|ing)|falling back|fell back|using|resum\w+)\b[^\n]*(?:step|ckpt|checkpoint|epoch)",
    r"pass(?:ed|ing) over [^\n]*(?:checkpoint|ckpt)|(?:checkpoint|ckpt)\S*[^\n]*passed over",
    r"\.tmp\b[^\n]*(?:checkpoint|ckpt)[^\n]*(?:left|found|ignored|skipp)",
    r"Can't find a valid checkpoint at \S+",  # transformers' Trainer
)
MISMATCH = (
    r"loaded state dict (?:has a different number of parameter groups|contains a parameter group)",
    r"(?:checkpoint|ckpt|resume)[^\n]*(?:belongs to|was (?:written|made|saved|trained) (?:with|"
    r"by|for)|is (?:of|from|for) (?:another|a different)"
    r"|does not (?:match|fit|belong)|mismatch|differs|different (?:config|model|world|target))",
    r"(?:config|fingerprint|hash|world[_ ]size|target|vocab|block_size|"
    r"layers?)[^\n]*(?:differs?|mismatch|changed|!=)[^\n]*(?:checkpoint|ckpt|resume)",
    r"param_groups?[^\n]*(?:mismatch|differ)|optimizer state[^\n]*(?:shape|size|mismatch|does not)",
    r"Missing key in checkpoint state_dict|"  # torch.distributed.checkpoint
    r"Size mismatch between saved \S+ and current",
    r"Loading a dataset cached|world size (?:of the checkpoint|changed|mismatch)[^\n]*\d+",
)
_WEIGHT = r"^'[\w.]+\.(?:weight|bias|qweight|weight_scale|inv_freq)'$"
_CKPT = re.compile(
    r"(?i)resum|checkpoint|ckpt|/step[-_]?\d+|latest|optim|epoch[-_]?\d+\.pt|last\.pt"
)


def load(e: Evidence) -> Iterator[Finding]:
    """safetensors (``Error while deserializing header: HeaderTooLarge``: a git-lfs pointer or a cut
    copy), torch's zip reader (``failed finding central directory``), pickle's ``invalid load key``,
    transformers' ``Error no file named``."""
    hits = e.unrecovered(*LOAD)
    hits = [
        h for h in hits if not re.search(r"torchinductor|triton|_inductor|codecache", h.line.text)
    ]
    hits = [h for h in hits if not _in_cache(e, h)]
    unopened = _unopened(e)
    if not hits and not unopened:
        return
    text = " ".join(
        [h.line.text for h in hits]
        + [f.message for f in e.errors if any(f.first <= h.line.number <= f.last for h in hits)]
        + [f.message for f in unopened]
    )
    path = path_in(text)
    lfs = re.search(r"git-lfs|invalid load key, 'v'|HeaderTooLarge", text)
    small = e.probes.search(r"\b(?:12\d|13\d)\b[^\n]*\.(?:safetensors|bin)")
    title = "the weights are absent or damaged" + (f": {path}" if path else "")
    if lfs or small:
        title += " (a git-lfs pointer, not the file, would say this)"
    yield e.found(
        "model.load",
        title,
        [*hits[:4], *unopened[:1], *(li for li, _ in small[:1])],
        f"ls -la {path.rsplit('/', 1)[0] if path else '/workspace/models/NAME'}; head -c 100 "
        "FILE   # "
        "“version https://git-lfs…” is a pointer: git lfs pull\n"
        "compare with the hub's sha256: sha256sum *.safetensors; copy or download again\n"
        "hf download REPO --local-dir DIR",
        confidence=0.88,
    )


def _unopened(e: Evidence) -> list[Failure]:
    """torch.load or safetensors of a path that is absent, or a folder."""
    return [
        f
        for f in e.errors
        if f.name in ("FileNotFoundError", "IsADirectoryError", "NotADirectoryError")
        and any(
            re.search(r"torch/serialization\.py|safetensors/torch\.py", fr.file)
            and re.match(r"_?load|safe_open", fr.function)
            for fr in f.frames
        )
        and not e.recovered(f.line)
    ]


def _in_cache(e: Evidence, hit: Hit) -> bool:
    return any(
        f.first <= hit.line.number <= f.last
        and any(
            re.search(r"codecache|_inductor|triton/|multiprocessing/|data/_utils", fr.file)
            for fr in f.frames[-4:]
        )
        for f in e.failures
    )


def shape(e: Evidence) -> Iterator[Finding]:
    """``Error(s) in loading state_dict``: sizes, missing and unexpected keys (a prefix too many);
    matmuls of unlike shapes in one's own model."""
    hits = e.unrecovered(*SHAPE)
    hits = [
        h
        for h in hits
        if not re.search(r"recompil|guard|size mismatch at index|tensor '", h.line.text)
    ]
    unknown = [f for f in e.raised("KeyError", _WEIGHT) if not e.recovered(f.line)]
    if not hits and not unknown:
        return
    text = " ".join([h.line.text for h in hits] + [f.message for f in e.errors])
    prefix = _prefix(_keys("Missing", text), _keys("Unexpected", text))
    title = "shapes or keys of the weights differ from the model's"
    if prefix:
        title += f": every key has the prefix “{prefix}” too many or too few"
    elif (
        m := re.search(r"size mismatch for (\S+):.*?\[([\d, ]*)\].*?\[([\d, ]*)\]", text)
    ) is not None:
        title += f": {m[1]} is [{m[2]}] in the file, [{m[3]}] in the model"
    elif not hits:
        title += f": {unknown[0].message} is in one and not in the other"
    yield e.found(
        "model.shape",
        title,
        [*hits[:4], *unknown[:1]],
        "python -c \"from safetensors import safe_open; f=safe_open('FILE','pt'); "
        'print([(k, f.get_slice(k).get_shape()) for k in f.keys()][:8])"\n'
        "python -m trainer check config.yaml   # what the config asks for\n"
        + (
            f"rename on loading: key.removeprefix('{prefix}')"
            if prefix
            else "give the config that the file was made with"
        ),
        confidence=0.86,
    )


def _keys(kind: str, text: str) -> list[str]:
    listed = re.search(rf"{kind} key\(s\)[^:]*: .*", text)
    return re.findall(r'"([\w.]+)"', listed[0]) if listed else []


def _prefix(missing: list[str], extra: list[str]) -> str:
    for want in missing[:1]:
        for have in extra:
            if have.endswith(want) and have != want:
                return have.removesuffix(want)
            if want.endswith(have) and have != want:
                return want.removesuffix(have)
    return ""


def partial(e: Evidence) -> Iterator[Finding]:
    """A checkpoint that was cut off while it was written: torch's zip reader on the newest one
    (``failed finding central directory``), a missing marker or shard. Passed over in favour of an
    older one it is a warning; taken, it ends the run."""
    words = e.search(*PARTIAL)
    torn = [
        f
        for f in e.errors
        if re.search(
            r"PytorchStreamReader|central directory|SafetensorError|deserializing|truncated|"
            r"Ran out of input|"
            r"invalid load key|\.metadata|unexpected EOF|enforce fail at inline_container",
            f.text,
        )
        and _of_checkpoint(e, f)
    ]
    writing = e.search(r"PytorchStreamWriter|unexpected pos \d+ vs \d+")
    if writing:
        torn = []
    words = [h for h in words if not re.search(r"(?i)delet|remov|clean|max_partial", h.line.text)]
    if not words and not torn:
        return
    hard = [f for f in torn if not e.recovered(f.line)]
    path = next(
        (
            p
            for t in [*(f.message for f in torn), *(h.line.text for h in words)]
            if (p := path_in(t))
        ),
        "",
    )
    none = not torn and all("valid checkpoint" in h.line.text for h in words)
    found = "no complete checkpoint is there" if none else "an incomplete checkpoint was found"
    lines = [
        li
        for li in e.lines
        if _CKPT.search(li.text) and torn and 0 <= torn[0].first - li.number <= 8
    ]
    yield e.found(
        "checkpoint.partial",
        found + (f": {path}" if path else ""),
        [*words[:3], *torn[:2], *lines[-2:]],
        f"ls -la --time-style=full-iso {path or '/workspace/out'}   # smaller than its sisters?\n"
        "resume from the one before: remove or rename the torn folder\n"
        "was the disk full or the run killed while saving? write beside, then rename (our "
        "trainer does)",
        severity="fatal" if hard or (words and e.outcome.state == "failed") else "warning",
        confidence=0.88 if words else 0.82,
        lasting=not hard,
    )


def _of_checkpoint(e: Evidence, failure: Failure) -> bool:
    frames = " ".join(
        f"{fr.file.rsplit('/', 1)[-1]} {fr.function} {fr.code}"
        for fr in failure.frames
        if not fr.library
    )
    near = " ".join(li.text for li in e.lines if 0 <= failure.first - li.number <= 6)
    return (
        _CKPT.search(f"{failure.message} {frames}") is not None
        # "Loading checkpoint shards" is transformers' bar for the weights of any model.
        or re.search(r"(?i)\bresum|loading checkpoint(?! shards)|from checkpoint|ckpt", near)
        is not None
    )


def mismatch(e: Evidence) -> Iterator[Finding]:
    """The optimizer's ``loaded state dict contains a parameter group that doesn't match``, or a
    resume whose recorded config differs: another number of layers, target, world size."""
    hits = e.unrecovered(*MISMATCH)
    resumed = e.search(
        r"(?i)\bresum(?:e|ed|ing)\b|\bloading (?:the )?(?:checkpoint|ckpt)|restor(?:e|ing)\b",
        quiet=True,
    )
    shapes = [
        f
        for f in e.errors
        if re.search(r"Error\(s\) in loading state_dict|size mismatch|parameter group", f.message)
    ]
    shapes = [
        f
        for f in shapes
        if resumed and resumed[0].line.number <= f.line.number and _of_checkpoint(e, f)
    ]
    if not hits and not shapes:
        return
    if (
        hits
        and not shapes
        and not any(
            re.search(r"parameter group|checkpoint|ckpt|resum|optimizer", h.line.text) for h in hits
        )
    ):
        return
    yield e.found(
        "checkpoint.mismatch",
        "the checkpoint belongs to another config: "
        + (hits[0].line.text.strip()[:120] if hits else shapes[0].message.splitlines()[0][:120]),
        [*hits[:3], *shapes[:2], *resumed[:1]],
        "compare the config that made the checkpoint with the one given; our trainer's own message "
        "names what differs\n"
        "resume with the old config, or start anew in another output folder\n"
        "weights alone can seed a new run: an option of its own, not resume",
        confidence=0.9,
    )


RULES = (load, shape, partial, mismatch)
