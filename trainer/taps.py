"""The target stage: a target's layers found by structure, tapped, stopped after the last tap.

A tap of layer ``id`` is ``hidden_states[id + 1]`` of the full model, exactly: the output of the
0-based decoder layer ``id``, except that the last layer's is taken behind the final norm, because
that is what transformers reports there and what every reader of the checkpoint will see.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.batch import Batch
from trainer.drafter.config import text_config
from trainer.errors import TargetError
from trainer.graphs import Recorded

OTHER_TARGET = "choose another target; most causal language models of transformers will do"


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
