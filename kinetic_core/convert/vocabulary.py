"""From tokenizer.json and its companions to the ``tokenizer.*`` keys of a GGUF file: byte-level BPE only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kinetic_core.checkpoint import CheckpointConfig
from kinetic_core.convert.pretokenizer import recognised
from kinetic_core.errors import TokenizerError, describe, shown
from kinetic_core.text.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED

MAX_JSON_BYTES = 200_000_000


def vocabulary_metadata(
    folder: Path, family: str, n_tokens: int, config: CheckpointConfig, pre_tokenizer: str | None = None
) -> dict[str, Any]:
    """The keys from ``tokenizer.ggml.model`` to ``tokenizer.chat_template``.

    family: the file's architecture, whose own name among equal pre-tokenizers is preferred. n_tokens: rows of the
    embeddings; numbers without a token become unused ones. pre_tokenizer: the name to write in place of the one that
    is recognised. Raises TokenizerError naming what is not supported.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    settings = CheckpointConfig(
        read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {},
        "tokenizer_config.json",
    )
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        got = model.get("type") if isinstance(model, dict) else model
        raise _refused("this kind of tokenizer is not supported", path, shown(got), "BPE")
    for key in ("byte_fallback", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _refused("this variant of BPE is not supported", path, f"{key} {shown(model[key])}", f"no {key}")
    whole_tokens = model.get("ignore_merges")
    if whole_tokens is not None and not isinstance(whole_tokens, bool):
        raise _refused("'ignore_merges' cannot be used", path, shown(whole_tokens), "true or false")
    tokens, types = _tokens(path, model, tokenizer.get("added_tokens"), n_tokens)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer or recognised(path, tokenizer, family, whole_tokens=bool(whole_tokens)),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": _int32(types),
        "tokenizer.ggml.merges": _merges(path, model.get("merges")),
    }
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = _role(settings, config, role, ids)
        if token_id is not None:
            metadata[f"tokenizer.ggml.{key}_token_id"] = token_id
    metadata["tokenizer.ggml.add_bos_token"] = "tokenizer.ggml.bos_token_id" in metadata and _adds_bos(
        path, settings, tokenizer, tokens[metadata["tokenizer.ggml.bos_token_id"]]
    )
    metadata["tokenizer.ggml.add_eos_token"] = False
    template = _chat_template(folder, settings)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return metadata


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; TokenizerError where it is missing, too long or no object."""
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise _refused("a file of the checkpoint is not there", path, "no such file", "a JSON file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise _refused("the file is too long", path, path.stat().st_size, f"at most {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _refused("a file cannot be read", path, error.strerror or str(error), "a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise _refused("the JSON cannot be read", path, str(error)[:80], "valid JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise _refused("the file holds no object", path, shown(value), "a JSON object")
    return value


def _tokens(path: Path, model: dict[str, Any], added: Any, n_tokens: int) -> tuple[list[str], list[int]]:
    """Texts and types by number: 3 special, 4 added otherwise, 5 where there is none, else 1."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        raise _refused("the vocabulary cannot be read", path, shown(vocab), "an object of texts and their numbers")
    if added is not None and not isinstance(added, list):
        raise _refused("'added_tokens' cannot be read", path, shown(added), "a list of objects")
    tokens: list[str | None] = [None] * n_tokens
    types = [UNUSED] * n_tokens
    entries = [(text, token_id, NORMAL) for text, token_id in vocab.items()]
    for entry in added or ():
        text, token_id = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            expected = "a text that takes no neighbouring space along"
            raise _refused("an added token is not supported", path, shown(entry), expected)
        entries.append((text, token_id, CONTROL if entry.get("special") else USER_DEFINED))
    for text, token_id, token_type in entries:
        if type(token_id) is not int or not 0 <= token_id < n_tokens:
            raise _refused(f"the number of the token {text[:40]!r}", path, shown(token_id), f"0 to {n_tokens - 1}")
        if tokens[token_id] not in (None, text):
            raise _refused("two tokens have one number", path, f"{token_id} twice", "one token each")
        tokens[token_id], types[token_id] = text, token_type
    return [f"[unused {i}]" if text is None else text for i, text in enumerate(tokens)], types


def _int32(types: list[int]) -> Any:
    import numpy as np

    return np.array(types, np.int32)


def _merges(path: Path, merges: Any) -> list[str]:
    """Pairs "left right", from either of the forms that files have."""
    if isinstance(merges, list):
        joined = [" ".join(m) if isinstance(m, list) and all(isinstance(t, str) for t in m) else m for m in merges]
        if all(isinstance(m, str) and m.count(" ") == 1 for m in joined):
            return joined
    raise _refused("the merges cannot be read", path, shown(merges), "pairs of texts without spaces")


def _role(settings: CheckpointConfig, config: CheckpointConfig, role: str, ids: dict[str, int]) -> int | None:
    """The number of the bos, eos or pad token: tokenizer_config.json's text, else config.json's number."""
    key = f"{role}_token"
    if key in settings:
        value = settings.values[key]
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str) or text not in ids:
            raise settings.refused(key, "a token of tokenizer.json")
        return ids[text]
    if key in settings.values:  # null: the tokenizer has none
        return None
    value = config.values.get(f"{key}_id")
    if isinstance(value, list):  # several end a turn; the first is the one to write
        value = value[0] if value else None
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < len(ids):
        raise config.refused(f"{key}_id", f"0 to {len(ids) - 1}")
    return value


def _adds_bos(path: Path, settings: CheckpointConfig, tokenizer: dict[str, Any], bos: str) -> bool:
    """Whether encoding puts BOS first: the setting, or a template in tokenizer.json that begins with it."""
    found = _template_begins_with(path, tokenizer.get("post_processor"), bos)
    return bool(settings.get_bool("add_bos_token", default=found))


def _template_begins_with(path: Path, processor: Any, bos: str) -> bool:
    if processor is None:
        return False
    kind = processor.get("type") if isinstance(processor, dict) else None
    if not isinstance(kind, str):
        raise _refused("'post_processor' cannot be read", path, shown(processor), "an object with a type, or null")
    if kind == "Sequence":
        parts = processor.get("processors")
        if not isinstance(parts, list):
            raise _refused("'post_processor' cannot be read", path, shown(parts), "a list of processors")
        found = [_template_begins_with(path, part, bos) for part in parts]  # each is looked at
        return any(found)
    if kind != "TemplateProcessing":
        return False
    single = processor.get("single")
    if not isinstance(single, list) or not all(isinstance(piece, dict) for piece in single):
        raise _refused("the template of 'post_processor' cannot be read", path, shown(single), "a list of objects")
    special = single[0].get("SpecialToken") if single else None
    return isinstance(special, dict) and special.get("id") == bos


def _chat_template(folder: Path, settings: CheckpointConfig) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's, of several the one called default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _refused("the chat template cannot be read", path, str(error)[:80], "a text in UTF-8") from error
    value = settings.values.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise settings.refused("chat_template", "a text, or a list with one called default")
    return value


def _refused(what: str, where: Path, got: object, expected: str) -> TokenizerError:
    return TokenizerError(describe(what, where=str(where), got=got, expected=expected))
