"""Checkpoint forms that public readers load: z-lab's (default) and speculators'.

Both are a folder of ``model.safetensors`` and ``config.json`` that hold the same tensors under the
same names; the configs differ. z-lab's form is what the ``dflash`` package, SGLang, SpecForge and
vLLM read. Every layout flag and the RoPE base are written out, because a reader's default for a
missing one has made whole servers accept nothing.

    save(folder, config, state)      write one form
    load(folder)                     read either, checked against the shapes its config implies
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.drafter.config import SLIDING, DrafterConfig
from trainer.drafter.model import Drafter
from trainer.errors import CheckpointError, first_line

Form = Literal["z-lab", "speculators"]

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CODEBOOKS = ("predecessor_codebook", "successor_codebook")


def save(
    folder: Path,
    config: DrafterConfig,
    state: dict[str, Tensor],
    *,
    form: Form = "z-lab",
    dtype: torch.dtype = torch.bfloat16,
    verifier: str = "",
) -> None:
    """Write ``state`` (``Drafter.state_dict()``) and the form's config into ``folder``.

    ``verifier`` is the target's name or path, which the speculators form records. Each file appears
    whole or not at all, the config last: a folder with a config is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        published_name(name): value.detach().to("cpu", dtype).contiguous()
        for name, value in state.items()
    }
    weights = folder / f".{WEIGHTS_FILE}.partial"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.replace(folder / WEIGHTS_FILE)
    if form == "z-lab":
        described = z_lab_config(config, dtype)
    else:
        described = speculators_config(config, dtype, verifier)
    written = folder / f".{CONFIG_FILE}.partial"
    with written.open("w", encoding="utf-8") as stream:
        json.dump(described, stream, indent=2, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    written.replace(folder / CONFIG_FILE)


def load(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """A saved drafter of either form: its config, and its tensors under our parameter names.

    Raises ``CheckpointError`` with one message for an absent, truncated or misfit file.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist", next_step="name a folder that an export wrote"
        ) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}",
            next_step="the file is truncated or damaged; copy or export it again",
        ) from error
    state = {parameter_name(name): value for name, value in tensors.items()}
    for problem in misfits(config, state):
        raise CheckpointError(f"{path}: {problem}", next_step="the config and the weights differ")
    return config, state


def misfits(config: DrafterConfig, state: dict[str, Tensor]) -> list[str]:
    """What of ``state`` does not fit the model of ``config``, one line each."""
    try:
        with torch.device("meta"):
            wanted = {name: tuple(p.shape) for name, p in Drafter(config).named_parameters()}
    except (TypeError, RuntimeError) as error:
        return [f"no model has sizes like those of its config: {first_line(error)}"]
    found = [f"tensor {name} is missing" for name in wanted if name not in state]
    found += [f"tensor {name} is not part of the model" for name in state if name not in wanted]
    found += [
        f"tensor {name} has shape {tuple(state[name].shape)}, the config implies {shape}"
        for name, shape in wanted.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    return found


def published_name(name: str) -> str:
    """The selector's codebooks are published as bare matrices; all else as the model names it."""
    for codebook in CODEBOOKS:
        if name == f"candidate_selector.{codebook}.weight":
            return f"candidate_selector.{codebook}"
    return name


def parameter_name(name: str) -> str:
    bare = name in {f"candidate_selector.{codebook}" for codebook in CODEBOOKS}
    return f"{name}.weight" if bare else name


# -- configs --------------------------------------------------------------------------------------


def transformer_config(config: DrafterConfig) -> dict[str, Any]:
    """The Qwen3 keys that both forms share."""
    sliding = SLIDING in config.layer_types
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        # Readers before transformers 5 look for the first, later ones for the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
        },
        "rope_scaling": None,
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }


def draft_options(config: DrafterConfig) -> dict[str, Any]:
    """What z-lab's reader looks up in ``dflash_config`` beside the mask token and the taps."""
    options: dict[str, Any] = {
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.dflash2 is not None:
        options |= config.dflash2.model_dump()
    return options


def z_lab_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    kinds = set(config.layer_types)
    described = transformer_config(config) | {
        "architectures": ["DFlash2DraftModel" if config.dflash2 else "DFlashDraftModel"],
        "block_size": config.block_size,
        "dtype": str(dtype).removeprefix("torch."),
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **draft_options(config),
        },
    }
    if len(kinds) == 1:
        # The flag outranks the layer types in every reader, so it must agree with all of them: with
        # both kinds of layer no value would be right.
        described["is_causal"] = kinds == {SLIDING}
    return described


def speculators_config(config: DrafterConfig, dtype: torch.dtype, verifier: str) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": transformer_config(config),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        # Counted from the embedding's output there, from the first layer's here.
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier},
        },
        # Unknown to that reader; needed to read the drafter back.
        "num_target_layers": config.num_target_layers,
        "dflash_config": draft_options(config),
    }


def read_config(folder: Path) -> DrafterConfig:
    """The config of a saved drafter of either form."""
    path = folder / CONFIG_FILE
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        return _parse(described)
    except FileNotFoundError:
        what, todo = f"{path} does not exist", "name a folder that an export wrote"
    except KeyError as error:
        what, todo = f"{path} lacks {error.args[0]!r}", "this is no DFlash drafter's config"
    except (TypeError, AttributeError):
        what, todo = f"{path} is no mapping of a drafter's fields", "copy or export it again"
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        what, todo = f"{path}: {place} {first['msg']}".replace("  ", " "), "mend the config"
    except (OSError, ValueError, RecursionError) as error:
        what, todo = f"{path} is not JSON: {first_line(error)}", "copy or export it again"
    raise CheckpointError(what, next_step=todo)


def _parse(described: dict[str, Any]) -> DrafterConfig:
    foreign = "speculators_model_type" in described
    body = described["transformer_layer_config"] if foreign else described
    options = described["dflash_config"] if not foreign else described.get("dflash_config", {})
    if foreign:
        taps = [i - 1 for i in described["aux_hidden_state_layer_ids"]]
        mask = described["mask_token_id"]
    else:
        taps, mask = options["target_layer_ids"], options["mask_token_id"]
    second = {k: options[k] for k in DFLASH2_KEYS if k in options}
    layers = body["num_hidden_layers"]
    return DrafterConfig.model_validate(
        {
            "hidden_size": body["hidden_size"],
            "intermediate_size": body["intermediate_size"],
            "num_layers": layers,
            "num_heads": body["num_attention_heads"],
            "num_kv_heads": body["num_key_value_heads"],
            "head_dim": body["head_dim"],
            "vocab_size": body["vocab_size"],
            "rope_theta": (body.get("rope_parameters") or body)["rope_theta"],
            "rms_norm_eps": body["rms_norm_eps"],
            "max_position_embeddings": body["max_position_embeddings"],
            "block_size": described["block_size"],
            "mask_token_id": mask,
            "target_layer_ids": taps,
            "num_target_layers": described["num_target_layers"],
            "target_hidden_size": body["hidden_size"],
            "layer_types": body["layer_types"],
            "sliding_window": body.get("sliding_window"),
            "initializer_range": body.get("initializer_range", 0.02),
            "input_embedding_scale": options.get("input_embedding_scale", 1.0),
            "output_multiplier": options.get("output_multiplier", 1.0),
            "final_logit_softcapping": options.get("final_logit_softcapping") or None,
            "dflash2": second or None,
        }
    )


DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
