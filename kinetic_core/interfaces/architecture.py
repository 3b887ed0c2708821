"""The architecture contract: a family of models, from a file's metadata to a recorded program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kinetic_core.checkpoint.format import CheckpointFormat
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.program.builder import ProgramBuilder
    from kinetic_core.program.values import Value


@dataclass(frozen=True)
class ArchitectureCapabilities:
    """Questions about a family; every default is no, and the suite tests a declared no as well."""

    has_recurrent_state: bool = False
    """Does any layer keep a state that cannot be cut back to an earlier position?"""
    has_prediction_block: bool = False
    """Can a file of this family carry a block that predicts the token after the next (MTP)?"""
    has_experts: bool = False
    """Does any layer route tokens to experts?"""
    has_sliding_window: bool = False
    """Does any attention layer see a bounded window only?"""


@dataclass(frozen=True)
class TinyVariant:
    """A miniature of one variant of the family, from which the suite makes random models.

    name:     shown in reports, e.g. ``"untied"``.
    metadata: the file's keys without the ``<architecture>.`` prefix, plus full ``general.*`` or ``tokenizer.*`` keys.
    tensors:  tensor name -> shape as GGUF would list it reversed: outermost (outputs) first.
    values:   tensor name -> (mean, standard deviation) where not (0, 0.3 / sqrt(inputs)).
    optional: tensors that a file of this variant may lack, as patterns: ``"output.weight"``, ``"blk.*.attn_q.bias"``.
    defaults: key -> the value that its absence stands for, whether this variant has the key or not.

    Everything else must be there: without it a file is refused by its name, and the suite checks that.
    """

    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    optional: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Architecture(ABC):
    """A model of one family: made from a file's metadata and tensor table, it records its forward pass once.

    An implementation reads like the family's equations::

        class Toy(Architecture):
            capabilities = ArchitectureCapabilities()

            def __init__(self, source):
                meta = source.metadata.prefixed("toy")
                self.n_layers = meta.get_int("block_count", minimum=1)
                ...

            def build(self, b):
                x = b.embedding(b.weight("token_embd.weight", (self.vocab, self.d_model)))
                for layer in range(self.n_layers):
                    x = b.add(x, self.mixer(b, layer, b.rms_norm(x, ...)))
                return b.rms_norm(x, b.weight("output_norm.weight", (self.d_model,)), self.eps)
    """

    capabilities: ClassVar[ArchitectureCapabilities]
    checkpoint: ClassVar[CheckpointFormat | None] = None
    """How Hugging Face checkpoints of the family are read; None: they cannot be converted."""

    @abstractmethod
    def __init__(self, source: TensorSource) -> None:
        """Read the configuration. Raises MetadataError, TensorError or UnsupportedModelError naming what is wrong."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Positions the model was made for."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the output layer."""

    @abstractmethod
    def build(self, b: ProgramBuilder) -> Value:
        """Record the trunk; return hidden: f32[rows, d_model] after the last norm, which the head reads.

        Every weight of the file must be asked for by name (`b.weight`); what the file has besides is refused by name
        unless `ignored_tensors` lists it.
        """

    @abstractmethod
    def output(self, b: ProgramBuilder) -> tuple[Any, float]:
        """The output layer's weight [vocab, d_model] and the factor that its logits are multiplied with."""

    @property
    def has_prediction(self) -> bool:
        """Does this file carry a block that predicts the token after the next?"""
        return False

    def build_prediction(self, b: ProgramBuilder, hidden: Value) -> Value:
        """Record the block that predicts the token after the next; only called where `has_prediction`.

        A row is a token t + 1 at its position; `hidden` its token t's hidden state after the trunk's last norm (or,
        further ahead, what this block returned for it). Returns the hidden state that its output layer reads.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prediction block")

    def prediction_output(self, b: ProgramBuilder) -> tuple[Any, float]:
        """The output layer of the prediction block: weight and factor, as `output`; by default the trunk's."""
        return self.output(b)

    def ignored_tensors(self) -> Sequence[str]:
        """Tensors that files of this family carry and the forward pass does not need."""
        return ()

    @classmethod
    @abstractmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Miniatures of every variant that the family supports, for tests and the conformance suite.

        At least one has matrices whose rows are a multiple of 256 wide: K-quants can store no others.
        """
