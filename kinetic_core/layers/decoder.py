"""The base class of decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kinetic_core.errors import TensorError, describe
from kinetic_core.gguf import check_block_count, require_tensor
from kinetic_core.interfaces import Architecture

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight


class DecoderArchitecture(Architecture):
    """An architecture whose files have the usual keys, embeddings, and an output layer of their own or tied.

    meta:     the keys under `key`.
    n_layers: ``block_count``, which agrees with the tensors found.
    d_model:  ``embedding_length``, the hidden size.
    eps:      ``attention.layer_norm_rms_epsilon``.

    A subclass sets `key`, reads its own keys after these, and records `build`.
    """

    key: ClassVar[str]
    """What ``general.architecture`` says."""

    def __init__(self, source: TensorSource) -> None:
        """Read the keys of every decoder.

        Raises MetadataError for keys that are missing, of another type or do not fit, TensorError where
        ``token_embd.weight`` is missing or no matrix.
        """
        self.meta = meta = source.metadata.prefixed(self.key)
        self.n_layers = check_block_count(meta, source.tensors)
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0.0)
        shape = require_tensor(source.tensors, "token_embd.weight").shape
        if len(shape) != 2:
            raise TensorError(
                describe("'token_embd.weight' is not a matrix", got=shape, expected="[vocabulary, hidden]")
            )
        self._vocab_size = shape[0]

    @property
    def context_length(self) -> int:
        """``<architecture>.context_length``."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self._vocab_size

    def embed(self, b: ProgramBuilder, scale: float = 1.0) -> Value:
        """f32[rows, d_model]: the tokens' rows of ``token_embd.weight``, times `scale`."""
        return b.embedding(b.weight("token_embd.weight", (self._vocab_size, self.d_model)), scale)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them; factor 1."""
        name = "output.weight" if b.has("output.weight") else "token_embd.weight"
        return b.weight(name, (self._vocab_size, self.d_model)), 1.0
