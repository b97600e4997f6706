"""The frozen target: any causal language model that transformers loads. Where it is, what is in it,
what can be known of it before a weight is read (``check_target``). ``taps.py`` runs it."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from trainer import hub
from trainer.config import TargetConfig
from trainer.drafter.config import text_config
from trainer.errors import ResourceError, TargetError, first_line, named_line
from trainer.objective import FrozenTarget
from trainer.packaged import PACKAGE, packaged_file
from trainer.taps import OTHER_TARGET, decoder_layers

GIVE_A_MODEL = "name the folder that `save_pretrained` wrote, or a .gguf file"
COPY_AGAIN = "copy or download the model again"
OWN_CODE = "name a model of a kind that transformers has itself: code beside a model is never run"
UNREADABLE = (
    *(OSError, ValueError, LookupError, struct.error),
    *(TypeError, AttributeError, ArithmeticError, RecursionError, StrictDataclassError),
)
"""What transformers and its reader of GGUF raise about files that are absent or cut short, and
about a config.json with a word for a number, or with no heads."""
STATEFUL = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
"""Kinds of layers that read a row from left to right, whatever documents it holds."""


@dataclass(frozen=True)
class Source:
    """Where transformers finds the model: ``from_pretrained(folder, gguf_file=…)``."""

    folder: str
    gguf_file: str | None = None
    silence: str | None = None
    """Of a model of the hub: why that does not answer. Then the cache alone is read."""

    def arguments(self) -> dict[str, Any]:
        # Without it transformers asks the terminal whether to run what came with a model.
        stated: dict[str, Any] = {"trust_remote_code": False}
        if self.silence:
            return stated | {"local_files_only": True}
        return stated | ({"gguf_file": self.gguf_file} if self.gguf_file else {})


def locate(model: str) -> Source:
    """What ``target.model`` means. Raises ``TargetError`` for a path that is not there."""
    if model.startswith(PACKAGE):
        model = str(packaged_file(model))
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"target.model: no file {path}", next_step=GIVE_A_MODEL)
        return Source(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(
                f"target.model: the folder {path} has no config.json",
                next_step=GIVE_A_MODEL,
            )
        return Source(str(path))
    if path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise TargetError(f"target.model: no file or folder {model}", next_step=GIVE_A_MODEL)
    return Source(model, silence=hub.silence())


def load_hf_config(target: TargetConfig) -> Any:
    """The target's transformers configuration; no weights are read."""
    source = locate(target.model)
    try:
        with _packages(target):
            config = _read_config(source)
    except UNREADABLE as error:
        if source.silence:
            raise TargetError(
                f"target.model {target.model} is not in this machine's cache, and the hub "
                f"{hub.constants.ENDPOINT} does not answer: {source.silence}",
                next_step="give this machine a way there (HTTPS_PROXY, or a mirror: HF_ENDPOINT), "
                "or download the model elsewhere, copy it here and name its folder",
            ) from None
        next_step = "check the name, or download the model into a folder and name that"
        if "trust_remote_code" in str(error):
            next_step = OWN_CODE
        elif source.gguf_file:
            next_step = COPY_AGAIN
        elif Path(source.folder).is_dir():
            next_step = f"mend its config.json, or {COPY_AGAIN}"
        raise TargetError(
            f"target.model {target.model}: transformers cannot read it: {_why(error)}",
            next_step=next_step,
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TargetError(
            f"target.model {target.model} is of type {config.model_type}, no causal language model",
            next_step=OTHER_TARGET,
        )
    return config


def _read_config(source: Source) -> Any:
    if source.gguf_file is None:
        return AutoConfig.from_pretrained(source.folder, **source.arguments())
    file = Path(source.folder) / source.gguf_file
    return copy.deepcopy(_gguf_config(source, file.stat().st_mtime_ns))


@functools.cache
def _gguf_config(source: Source, changed: int) -> Any:
    """Read once a process: the reader takes 4.6 s of CPU for a vocabulary of 49,152."""
    return AutoConfig.from_pretrained(source.folder, **source.arguments())


def _tokenizer_class(source: Source) -> Any:
    """AutoTokenizer, or what it would choose for a GGUF file, where it reads the config again."""
    if source.gguf_file is None or (Path(source.folder) / "tokenizer_config.json").is_file():
        return AutoTokenizer
    chosen = TOKENIZER_MAPPING.get(type(_read_config(source)), PreTrainedTokenizerFast)
    return chosen if issubclass(chosen, PreTrainedTokenizerFast) else AutoTokenizer


def load_tokenizer(target: TargetConfig) -> Any:
    """With ``target.chat_template`` in its own one's place. Raises ``TargetError``."""
    source = locate(target.model)
    try:
        tokenizer = _tokenizer_class(source).from_pretrained(source.folder, **source.arguments())
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises nothing narrower
        raise TargetError(
            f"target.model {target.model}: no usable tokenizer: {_why(error)}",
            next_step=OWN_CODE
            if "trust_remote_code" in str(error)
            else "put the tokenizer's files beside the weights",
        ) from None
    if target.chat_template:
        try:
            tokenizer.chat_template = target.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TargetError(
                f"target.chat_template: cannot read {target.chat_template}: {first_line(error)}",
                next_step="name a Jinja file in UTF-8, relative to the config file",
            ) from None
    return tokenizer


def fit_tokenizer(target: TargetConfig, tokenizer: Any, rows: int) -> None:
    """Pad with tokens that the embedding has a row for. Raises ``TargetError`` for another model's
    tokenizer, which knows more than that; tokens may be added: Gemma 3's knows an image."""
    if tokenizer.vocab_size > rows:
        raise TargetError(
            f"target.model {target.model}: its tokenizer knows {tokenizer.vocab_size} tokens, its"
            f" config.json {rows}",
            next_step="put the model's own tokenizer beside the weights",
        )
    if (tokenizer.pad_token_id or 0) >= rows:
        # Added to many a model that never grew; what pads a row is read like any other token.
        tokenizer.pad_token = tokenizer.eos_token


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_target(target: TargetConfig, config: Any) -> Any:
    """The whole target on the meta device. Raises ``TargetError`` for one that could not be loaded
    here, or that no drafter can be trained for: of weights only headers are read, so that nobody
    waits for data to be made before being told."""
    check_weight_files(target)
    source = locate(target.model)
    accelerate = find_spec("accelerate") is not None
    if source.gguf_file is not None and not accelerate:
        raise TargetError(
            f"target.model {target.model} is a GGUF file, which transformers loads beside"
            " `accelerate` only",
            next_step="pip install accelerate",
        )
    if source.gguf_file is None and Path(source.folder).is_dir() and accelerate:
        model = _from_pretrained(target, torch.device("meta"))
    else:
        # A GGUF file would be unpacked, a model of the hub fetched; and without accelerate
        # transformers loads nothing onto a device by its name.
        with torch.device("meta"), _told(target, RuntimeError):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=target.attention)
    stateful = STATEFUL.intersection(getattr(text_config(config), "layer_types", None) or ())
    if stateful:
        raise TargetError(
            f"target.model {target.model} has layers of kind {', '.join(sorted(stateful))}, whose"
            " state would pass from one document of a row to the next",
            next_step=OTHER_TARGET,
        )
    try:
        decoder_layers(model)
        frozen_weights(model)
    except TargetError as error:
        what = f"target.model {target.model}: {error.what}"
        raise TargetError(what, next_step=error.next_step) from None
    return model


def load_model(target: TargetConfig, device: torch.device) -> Any:
    """The whole target with its head, frozen, in evaluation mode."""
    try:
        return freeze(_from_pretrained(target, device))
    except torch.cuda.OutOfMemoryError as error:
        raise ResourceError(
            f"the target does not fit on {device}: {first_line(error)}",
            next_step="`python -m trainer check` prints what it needs",
        ) from None


def _from_pretrained(target: TargetConfig, device: torch.device) -> Any:
    source = locate(target.model)
    meta = {"device_map": "meta"} if device.type == "meta" else {}
    # There it speaks of a size below zero; elsewhere of a device.
    with _told(target, *([RuntimeError] if meta else [])):
        known = {"config": _read_config(source)} if source.gguf_file else {}
        model, found = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=compute_dtype(target.dtype, device),
            attn_implementation=target.attention,
            # Reported below, by name and with both shapes; transformers' own error has neither.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **meta,
            **known,
            **source.arguments(),
        )
        refuse_holes(target.model, found)
        return model if meta else model.to(device)


@contextmanager
def _packages(target: TargetConfig) -> Iterator[None]:
    """One that is absent, by name."""
    try:
        yield
    except ImportError as error:
        raise TargetError(
            f"target.model {target.model} cannot be loaded here: {first_line(error)}",
            next_step="install the package named above, or choose another target.attention or a"
            " target that is not quantized",
        ) from None


@contextmanager
def _told(target: TargetConfig, *more: type[Exception]) -> Iterator[None]:
    """transformers' errors as ours."""
    expected: tuple[type[Exception], ...] = (*UNREADABLE, SafetensorError, *more)
    try:
        with _packages(target):
            yield
    except expected as error:
        raise TargetError(
            f"target.model {target.model}: its weights cannot be loaded: {_why(error)}",
            next_step="state target.attention: eager"
            if "attn_implementation" in str(error)
            else COPY_AGAIN,
        ) from None


def _why(error: BaseException) -> str:
    """On one line; of a key, or of a slip over what a config.json says, with its kind."""
    if isinstance(error, StrictDataclassError):
        error = error.__cause__ or error
    return first_line(error) if isinstance(error, (OSError, ValueError)) else named_line(error)


def refuse_holes(name: str, found: dict[str, Any]) -> None:
    """transformers fills what a file lacks with noise and only warns: a drafter of such a target is
    of no use to anyone."""
    problems = [f"no tensor {key}" for key in sorted(found.get("missing_keys") or ())]
    problems += [
        f"{key} has shape {tuple(theirs)}, config.json implies {tuple(ours)}"
        for key, theirs, ours in sorted(found.get("mismatched_keys") or ())
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise TargetError(
            f"target.model {name}: weights and config.json differ: {'; '.join(problems[:3])}{more}",
            next_step=COPY_AGAIN,
        )


def check_weight_files(target: TargetConfig) -> None:
    """Raise ``TargetError`` for a folder with a shard that is absent or cut short, by its name."""
    source = locate(target.model)
    folder = Path(source.folder)
    if source.gguf_file is not None or not folder.is_dir():
        return
    for file in weight_files(folder):
        try:
            if file.suffix == ".bin":
                torch.load(file, map_location="meta", weights_only=True)
            else:
                with safe_open(file, framework="pt"):
                    pass
        except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            # torch's first sentence; its second says to load what may run code.
            why = first_line(error).partition(". ")[0]
            raise TargetError(
                f"target.model: {file} is absent, damaged or cut short: {why}",
                next_step=COPY_AGAIN,
            ) from None


def weight_files(folder: Path) -> list[Path]:
    """Those that transformers reads: the one that holds all, else the shards that an index names.
    Others may lie beside them: the same weights as Mistral names them, an adapter."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return [folder / whole]
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                return sorted({folder / name for name in named})
            except UNREADABLE as error:
                raise TargetError(
                    f"{index} cannot be read: {_why(error)}", next_step=COPY_AGAIN
                ) from None
    return []


def freeze(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def frozen_weights(model: Any) -> FrozenTarget:
    """Of a whole model, where they lie."""
    embedding = model.get_input_embeddings().weight.detach()
    head_module = model.get_output_embeddings()
    if head_module is None:
        raise TargetError(f"{type(model).__name__} has no output head", next_step=OTHER_TARGET)
    if getattr(head_module, "bias", None) is not None:
        raise TargetError(
            f"{type(model).__name__} has a biased output head; readers of drafters apply none",
            next_step=OTHER_TARGET,
        )
    head = head_module.weight.detach()
    tied = head.data_ptr() == embedding.data_ptr()
    return FrozenTarget(embedding, embedding if tied else head)


def load_frozen(target: TargetConfig) -> FrozenTarget:
    """The two matrices on the CPU, read alone from safetensors where the format allows it."""
    source = locate(target.model)
    folder = Path(source.folder)
    if source.gguf_file is None and folder.is_dir():
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(load_hf_config(target))
        names = {id(p): name for name, p in skeleton.named_parameters(remove_duplicate=False)}
        embedding = names[id(skeleton.get_input_embeddings().weight)]
        head = names[id(skeleton.get_output_embeddings().weight)]
        found = _read_tensors(folder, {embedding, head})
        if embedding in found:
            tied = getattr(text_config(skeleton.config), "tie_word_embeddings", False)
            if head in found and not tied:
                return FrozenTarget(found[embedding], found[head])
            if tied:
                return FrozenTarget(found[embedding], found[embedding])
    return frozen_weights(load_model(target, torch.device("cpu")))


def _read_tensors(folder: Path, wanted: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in wanted & set(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found


def cache_argument(model: Any) -> str:
    """What the model calls its key-value cache: ``cache`` from transformers 5.20 or so on,
    ``past_key_values`` before."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
