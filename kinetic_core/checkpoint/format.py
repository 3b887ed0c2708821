"""How a family's checkpoints look: their class, metadata from config.json, and one rule per tensor of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kinetic_core.checkpoint.transforms import Make, unchanged

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kinetic_core.checkpoint.config import CheckpointConfig

ATTENTION: Mapping[str, str] = MappingProxyType(
    {f"attn_{ours}": f"self_attn.{ours[0]}_proj" for ours in ("q", "k", "v", "output")}
)
"""The projections of attention, as most families call them."""
SWIGLU: Mapping[str, str] = MappingProxyType({f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")})
"""Those of a gated feed-forward layer."""


@dataclass(frozen=True)
class TensorRule:
    """One tensor of the file and what it is made from.

    name:   the GGUF name; ``{layer}`` stands for the number of each block.
    source: the checkpoint's name, with the same ``{layer}``; ``{expert}`` where it has one tensor per expert, which
            are stacked along a new first axis.
    make:   from the checkpoint's f32 array to the file's; a ValueError says that the shape does not fit.

    Several rules may have one name, for checkpoints that call its source otherwise; a source may serve several names.
    A tensor whose source the checkpoint lacks is left out of the file.
    """

    name: str
    source: str
    make: Make = unchanged


def _no_extras(config: CheckpointConfig) -> Mapping[str, npt.NDArray[np.float32]]:
    return {}


@dataclass(frozen=True)
class CheckpointFormat:
    """The checkpoints of one architecture.

    classes:  values of ``architectures`` in config.json.
    metadata: the file's keys without the ``<architecture>.`` prefix, ``block_count`` among them. Raises MetadataError
              for keys of config.json that are missing, of another type, or describe a variant that the family's code
              does not cover.
    rules:    the tensors, in the file's order.
    extras:   tensors that the file has and checkpoints do not: frequency factors, say.
    skipped:  beginnings of names that are no part of the text model, and what they belong to.
    """

    classes: tuple[str, ...]
    metadata: Callable[[CheckpointConfig], Mapping[str, Any]]
    rules: Callable[[CheckpointConfig], Sequence[TensorRule]]
    extras: Callable[[CheckpointConfig], Mapping[str, npt.NDArray[np.float32]]] = _no_extras
    skipped: Mapping[str, str] = field(default_factory=dict)


def model_rules(norm: str, *, norm_name: str = "output_norm", model: str = "model.") -> list[TensorRule]:
    """Embeddings, last norm and output layer; norm: what checkpoints call the last norm."""
    return [
        TensorRule("token_embd.weight", f"{model}embed_tokens.weight"),
        TensorRule(f"{norm_name}.weight", f"{model}{norm}.weight"),
        TensorRule("output.weight", "lm_head.weight"),
    ]


def block_rules(
    modules: Mapping[str, str],
    makes: Mapping[str, Make] | None = None,
    *,
    block: str = "blk.{layer}.",
    layer: str = "model.layers.{layer}.",
    biased: bool = False,
) -> list[TensorRule]:
    """Rules for the tensors of a block.

    modules: GGUF name -> the checkpoint's, both without ``.weight``. makes: by GGUF name, for weight and bias alike.
    biased: whether modules that are no norms may have a bias.
    """
    makes = makes or {}
    rules: list[TensorRule] = []
    for ours, theirs in modules.items():
        make = makes.get(ours, unchanged)
        rules.append(TensorRule(f"{block}{ours}.weight", f"{layer}{theirs}.weight", make))
        if biased and "norm" not in ours:
            rules.append(TensorRule(f"{block}{ours}.bias", f"{layer}{theirs}.bias", make))
    return rules
