"""Reading GGUF files: a bounded header parser, typed metadata, block formats, memory-mapped tensors, split sets.

A file is untrusted: `open_model_file` checks everything the header says before any view of a tensor is made.

    with open_model_file("model.gguf") as model:
        print(model.architecture, model.metadata.get_str("general.name", None))
        weights = read_tensor(model, "output_norm.weight")
"""

from kinetic_core.gguf.blocks import (
    BLOCK_FORMATS,
    BlockField,
    BlockFormat,
    GGMLType,
    as_type,
    can_dequantize,
    dequantize,
)
from kinetic_core.gguf.file import FileIdentity, GGUFFile, open_model_file
from kinetic_core.gguf.header import GGUFHeader, TensorInfo, parse_header, read_header
from kinetic_core.gguf.metadata import Metadata, check_block_count
from kinetic_core.gguf.source import MemoryTensors, RawTensor, TensorSource, read_tensor, require_tensor
from kinetic_core.gguf.write import gguf_bytes, stream_gguf, write_gguf

__all__ = [
    "BLOCK_FORMATS",
    "BlockField",
    "BlockFormat",
    "FileIdentity",
    "GGMLType",
    "GGUFFile",
    "GGUFHeader",
    "MemoryTensors",
    "Metadata",
    "RawTensor",
    "TensorInfo",
    "TensorSource",
    "as_type",
    "can_dequantize",
    "check_block_count",
    "dequantize",
    "gguf_bytes",
    "open_model_file",
    "parse_header",
    "read_header",
    "read_tensor",
    "require_tensor",
    "stream_gguf",
    "write_gguf",
]
