"""What no rule has words for: the library whose code raised it.

A library's messages change from release to release, its folders hardly. Asked only where all that
is known of a failed run is an exception; one that the user's own code raised, be it called back by
a library, stays the code's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.python import uncaught
from orchestrator.diag.rules.shared import path_in
from orchestrator.diag.tracebacks import Failure, Frame


@dataclass(frozen=True)
class _Library:
    code: str
    title: str
    remedy: str
    innermost: str = ""
    """Of the frame that raised it: ``file:function``."""
    within: str = ""
    """Of any frame below the user's own."""
    name: str = r"\w+"
    """Of the exception."""
    other: str = r"$^"
    """Words of a mistake in the user's code."""


_NET = r"\w*(?:HTTP|Connection|Connect|Protocol|SSL|Proxy|Encoding)Error|\w*Timeout\w*"
LIBRARIES = (
    _Library(
        "hub.offline",
        "the model hub's client failed",
        "in the container: curl -sI https://huggingface.co | head -1; hf auth whoami\n"
        "fetch it beforehand: hf download REPO --local-dir /workspace/models/NAME; give that path",
        within=r"huggingface_hub/",
        name=_NET,
    ),
    _Library(
        "compile.backend_failed",
        "the compiler behind torch.compile failed",
        "TORCHDYNAMO_VERBOSE=1 TORCH_LOGS=+inductor python …   # the whole story\n"
        "to tell the layers apart: torch.compile(backend='aot_eager') runs without inductor",
        innermost=r"torch/_inductor/(?!output_code|utils\.py:run)|triton/(?:compiler|backends|language"
        r"|runtime)(?:/|\.py)|torch/_functorch/_aot_autograd/(?!runtime_wrappers)",
    ),
    _Library(
        "dist.rendezvous",
        "the ranks did not find each other",
        "MASTER_ADDR and MASTER_PORT the same on every rank, the port free: ss -ltn | grep PORT\n"
        "as many ranks started as the world size says?",
        innermost=r"torch/distributed/(?:elastic/)?rendezvous",
    ),
    _Library(
        "nccl.init",
        "NCCL could not start",
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET dflashctl launch …   # the reason in NCCL WARN",
        innermost=r"torch/distributed/distributed_c10d\.py",
        name=r"DistBackendError",
    ),
    _Library(
        "gpu.none",
        "CUDA does not start in the process",
        "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L; ls -l /dev/nvidia*",
        innermost=r"torch/cuda/__init__\.py:_lazy_init",
        other=r"forked|spawn",
    ),
    _Library(
        "checkpoint.mismatch",
        "the checkpoint does not fit what is to be loaded",
        "compare the config that made the checkpoint with the one given: model, optimizer, ranks\n"
        "resume with the old config, or start anew in another output folder",
        innermost=r"torch/distributed/checkpoint/\S*:\w*(?:load|plan|read)|"
        r"torch/optim/\S*:load_state_dict",
    ),
    _Library(
        "model.load",
        "the weights cannot be read",
        "ls -la FOLDER; head -c 100 FILE   # a git-lfs pointer says so in words\n"
        "compare with the hub's sha256: sha256sum *.safetensors; copy or download again",
        innermost=r"safetensors/|transformers/(?:modeling_utils|configuration_utils|utils/hub)\.py",
        name=r"OSError|EnvironmentError|SafetensorError|EOFError",
    ),
    _Library(
        "data.tokenizer",
        "the tokenizer refuses what it is given",
        "look at one record of the data, and at the template: tokenizer.chat_template\n"
        "text must be strings; tokenize with the target's own tokenizer",
        innermost=r"transformers/(?:tokenization_\w+\.py:(?!convert_to_tensors|_?pad)|"
        r"utils/chat_template)|tokenizers/|jinja2/",
    ),
    _Library(
        "data.missing",
        "the dataset is not there as it is asked for",
        "in the container: ls -la FOLDER\n"
        "its configurations and splits: datasets.get_dataset_config_names, get_dataset_split_names",
        innermost=r"datasets/(?:load\.py|builder\.py:_create_builder_config|arrow_reader\.py)",
    ),
    _Library(
        "data.format",
        "the dataset library cannot read a record",
        "load each file by itself to find the one; print its columns and their types\n"
        "files of one dataset must have the same columns with the same types",
        innermost=r"datasets/(?:table|arrow_\w+|builder|formatting/|features/|packaged_modules/)|"
        r"pyarrow/|webdataset/|zstandard/",
    ),
    _Library(
        "env.version",
        "a library cannot be imported as another asks for it",
        "python -m pip check; dflashctl env diff GOOD.json\n"
        "the message names the module: install the version that the other one asks for",
        innermost=r"transformers/utils/(?:import_utils|versions)\.py|importlib_metadata/",
    ),
)


def raised(e: Evidence) -> Iterator[Finding]:
    """The innermost frame tells whose exception it is, and its folder what it is about."""
    for failure in uncaught(e)[:1]:
        for link in failure.chain():
            known = next((one for one in LIBRARIES if _is_of(link, one)), None)
            if known is not None:
                said = link.message.splitlines()[0][:140] if link.message else link.name
                path = path_in(link.message)
                yield e.found(
                    known.code,
                    f"{known.title}: {said}",
                    [failure, *([] if link is failure else [link])],
                    known.remedy.replace("FOLDER", path.rpartition("/")[0] or "FOLDER"),
                    confidence=0.55,
                )
                return


def _is_of(failure: Failure, library: _Library) -> bool:
    below = _below_the_user(failure)
    if not below or not re.fullmatch(library.name, failure.name):
        return False
    if re.search(library.other, failure.message):
        return False
    if library.within:
        return any(re.search(library.within, fr.file) for fr in below)
    last = below[-1]
    return re.search(rf"(?:^|/)(?:{library.innermost})", f"{last.file}:{last.function}") is not None


_PYTHONS_OWN = re.compile(r"/lib(?:64)?/python[\d.]+/(?!site-packages|dist-packages)|<frozen ")


def _below_the_user(failure: Failure) -> list[Frame]:
    """The library's own frames, after the last of the user's; none if the user's raised it."""
    frames = failure.frames
    own = max((i for i, fr in enumerate(frames) if not fr.library), default=-1)
    return [fr for fr in frames[own + 1 :] if not _PYTHONS_OWN.search(fr.file)]
