"""The frozen target: any causal language model that transformers loads, tapped by module.

A tap of layer ``id`` is ``hidden_states[id + 1]`` of the full model, exactly: the output of the
0-based decoder layer ``id``, except that the last layer's is taken behind the final norm, because
that is what transformers reports there and what every reader of the checkpoint will see.
"""

from __future__ import annotations

import copy
import inspect
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer import hub
from trainer.config import TargetConfig
from trainer.data.batch import Batch
from trainer.drafter.config import text_config
from trainer.errors import ResourceError, TargetError, first_line
from trainer.graphs import Recorded
from trainer.objective import FrozenTarget
from trainer.packaged import PACKAGE, packaged_file

GIVE_A_MODEL = "name the folder that `save_pretrained` wrote, or a .gguf file"
COPY_AGAIN = "copy or download the model again"
UNREADABLE = (OSError, ValueError, LookupError, struct.error)
"""What transformers and its reader of GGUF raise about files that are absent or cut short."""
OTHER_TARGET = "choose another target; most causal language models of transformers will do"


@dataclass(frozen=True)
class Source:
    """Where transformers finds the model: ``from_pretrained(folder, gguf_file=…)``."""

    folder: str
    gguf_file: str | None = None
    silence: str | None = None
    """Of a model of the hub: why that does not answer. Then the cache alone is read."""

    def arguments(self) -> dict[str, Any]:
        if self.silence:
            return {"local_files_only": True}
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


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
        return AutoConfig.from_pretrained(source.folder, **source.arguments())
    except UNREADABLE as error:
        if source.silence:
            raise TargetError(
                f"target.model {target.model} is not in this machine's cache, and the hub "
                f"{hub.constants.ENDPOINT} does not answer: {source.silence}",
                next_step="give this machine a way there (HTTPS_PROXY, or a mirror: HF_ENDPOINT), "
                "or download the model elsewhere, copy it here and name its folder",
            ) from None
        raise TargetError(
            f"target.model {target.model}: transformers cannot read it: {first_line(error)}",
            next_step=COPY_AGAIN
            if source.gguf_file
            else "check the name, or download the model into a folder and name that",
        ) from None


def load_tokenizer(target: TargetConfig) -> Any:
    """With ``target.chat_template`` in its own one's place. Raises ``TargetError``."""
    source = locate(target.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **source.arguments())
    except UNREADABLE as error:
        raise TargetError(
            f"target.model {target.model}: no usable tokenizer: {first_line(error)}",
            next_step="put the tokenizer's files beside the weights",
        ) from None
    if target.chat_template:
        try:
            tokenizer.chat_template = target.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise TargetError(
                f"target.chat_template: cannot read {target.chat_template}: {error.strerror}",
                next_step="name a Jinja file, relative to the config file",
            ) from None
    return tokenizer


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(target: TargetConfig, device: torch.device) -> Any:
    """The whole target with its head, frozen, in evaluation mode."""
    source = locate(target.model)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=compute_dtype(target.dtype, device),
            attn_implementation=target.attention,
            # Reported below, by name and with both shapes; transformers' own error has neither.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **source.arguments(),
        )
        refuse_holes(target.model, found)
        model = model.to(device)
    except torch.cuda.OutOfMemoryError as error:
        raise ResourceError(
            f"the target does not fit on {device}: {first_line(error)}",
            next_step="`python -m trainer check` prints what it needs",
        ) from None
    except (*UNREADABLE, ImportError, SafetensorError) as error:
        raise TargetError(
            f"target.model {target.model}: its weights cannot be loaded: {first_line(error)}",
            next_step=COPY_AGAIN + "; a missing package is named above",
        ) from None
    return freeze(model)


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
    """Raise ``TargetError`` for a folder with a shard that is absent or cut short. Reads headers
    only, so that nobody waits for data to be made before being told."""
    source = locate(target.model)
    folder = Path(source.folder)
    if source.gguf_file is not None or not folder.is_dir():
        return
    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise TargetError(f"{index} cannot be read: {error}", next_step=COPY_AGAIN) from None
        files |= {folder / name for name in named}
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise TargetError(
                f"target.model: {file} is absent, damaged or cut short: {first_line(error)}",
                next_step=COPY_AGAIN,
            ) from None


def freeze(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def decoder_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """(the decoder, its layers): found by structure, whatever they are called.

    The decoder is the module that owns a list of as many layers as the text config says, outside
    any vision or audio part (whose lists may have the same length, but not the widest weights:
    the language model's decoder is where the input embedding lives).
    """
    text = text_config(model.config)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    owners = [
        (module, child)
        for module in model.modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == text.num_hidden_layers
        if any(part is embedding for part in module.modules())
    ]
    if not owners:
        raise TargetError(
            f"{type(model).__name__} has no list of {text.num_hidden_layers} decoder layers beside"
            " its input embedding, so it cannot be tapped",
            next_step=OTHER_TARGET,
        )
    # The innermost owner is the decoder itself; an outer one would be a wrapper.
    return owners[-1]


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
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in wanted & set(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found


class _Tap(nn.Module):
    """A decoder layer that keeps its last output. Decoders read attributes of their layers (such
    as ``attention_type``), so what is not found here is the layer's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.taken: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        self.taken = output[0] if isinstance(output, tuple) else output
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class TappedTarget:
    """The target stage: features of a batch, in inference mode, stopped after the last tap.

    The decoder is copied shallowly, with its layers up to the last tap: weights are shared with
    ``model``, which stays whole for whoever holds it, and several stages may share one model in
    several threads.
    """

    def __init__(
        self,
        model: Any,
        layer_ids: Sequence[int],
        device: torch.device,
        *,
        cuda_graph: bool = False,
    ) -> None:
        """``cuda_graph``: the forward pass as one graph, for rows of the first shape asked for."""
        decoder, layers = decoder_layers(model)
        self.device = device
        self._graph = FeatureGraph(self) if cuda_graph else None
        self.layer_ids = tuple(layer_ids)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.feature_width = len(layer_ids) * text_config(model.config).hidden_size
        self._last = len(layers) - 1
        kept: list[nn.Module] = list(layers[: max(layer_ids) + 1])
        self._taps = {i: _Tap(kept[i]) for i in set(layer_ids) - {self._last}}
        for layer_id, tap in self._taps.items():
            kept[layer_id] = tap
        self._decoder = copy.copy(decoder)
        self._decoder._modules = {
            name: nn.ModuleList(kept) if child is layers else child
            for name, child in decoder._modules.items()
        }

    def features(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """[b, S, K·H]; see ``TargetStage``. Documents do not see each other: transformers builds
        its block-diagonal mask from position ids that restart, given no other mask."""
        tokens = batch.tokens.to(self.device, non_blocking=True)
        position = batch.position.to(self.device, non_blocking=True)
        return self.tap(tokens, position, out)

    def tap(self, tokens: Tensor, position: Tensor, out: Tensor | None = None) -> Tensor:
        """Features of ``tokens`` i64 [b, S] at ``position`` i64 [b, S]."""
        if out is None:
            # Made outside inference mode: autograd refuses to save inference tensors.
            out = torch.empty(
                (*tokens.shape, self.feature_width), dtype=self.dtype, device=self.device
            )
        if self._graph is not None and self._graph.takes(tokens):
            self._graph.run(tokens, position, out)
        else:
            self.run(tokens, position, out)
        return out

    def run(self, tokens: Tensor, position: Tensor, out: Tensor) -> None:
        """The forward pass itself, into ``out``."""
        width = self.feature_width // len(self.layer_ids)
        with torch.inference_mode():
            result = self._decoder(input_ids=tokens, position_ids=position, use_cache=False)
            for index, layer_id in enumerate(self.layer_ids):
                tap = self._taps.get(layer_id)
                taken = result.last_hidden_state if tap is None else tap.taken
                assert taken is not None
                part = out[..., index * width : (index + 1) * width]
                part.copy_(taken, non_blocking=True)
                if tap is not None:
                    tap.taken = None


class FeatureGraph:
    """A target's forward pass as a graph, with the tensors that it reads and writes.

    Thirty layers of 576 cost 3 ms of computing and four times that in launches, which in threads
    hold the interpreter that the drafters need too."""

    def __init__(self, target: TappedTarget) -> None:
        self._target = target
        self._tokens: Tensor | None = None
        self._recorded: Recorded[None] = Recorded(self._run, target.device)

    def takes(self, tokens: Tensor) -> bool:
        """A cache of features asks for parts of a batch too: of other shapes, as they come."""
        return self._tokens is None or self._tokens.shape == tokens.shape

    def run(self, tokens: Tensor, position: Tensor, out: Tensor) -> None:
        if self._tokens is None:
            self._tokens, self._position = tokens.clone(), position.clone()
            self._out = torch.empty(out.shape, dtype=out.dtype, device=self._target.device)
        else:
            self._tokens.copy_(tokens, non_blocking=True)
            self._position.copy_(position, non_blocking=True)
        self._recorded()
        out.copy_(self._out, non_blocking=True)

    def _run(self) -> None:
        assert self._tokens is not None
        self._target.run(self._tokens, self._position, self._out)


def check_taps(model: Any, layer_ids: Sequence[int]) -> None:
    """Raise ``TargetError`` unless hooks see exactly what transformers reports as hidden states.

    A tap one layer off trains to an acceptance that looks perfect and is not; eight tokens prove
    the contrary before anything is trained. The model must be whole.
    """
    device = next(model.parameters()).device
    text = text_config(model.config)
    tokens = (torch.arange(8, device=device) % text.vocab_size)[None]
    position = torch.arange(8, device=device)[None]
    decoder, _ = decoder_layers(model)
    with torch.inference_mode():
        result = decoder(
            input_ids=tokens, position_ids=position, output_hidden_states=True, use_cache=False
        )
    seen = TappedTarget(model, layer_ids, device).tap(tokens, position).chunk(len(layer_ids), -1)
    for layer_id, found in zip(layer_ids, seen, strict=True):
        if not torch.equal(found, result.hidden_states[layer_id + 1]):
            raise TargetError(
                f"{type(model).__name__}: the output of layer {layer_id} is not"
                f" hidden_states[{layer_id + 1}]; this architecture cannot be tapped",
                next_step=OTHER_TARGET,
            )


def cache_argument(model: Any) -> str:
    """What the model calls its key-value cache: ``cache`` from transformers 5.20 or so on,
    ``past_key_values`` before."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
