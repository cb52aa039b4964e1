"""Shrinks any config: fields by their names, layers to one of each kind."""

from __future__ import annotations

import inspect
import re
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENS = 48
"""Token ids below this are text in every family; those of images, padding and the like are above."""

INDEX_HEADS = 16
"""So many that no two of the scores by which an indexer selects tokens are zero, and thus equal."""

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WINDOW, POSITIONS = 64, 64, 4, 2, 16, 8, 256
MAX_LAYERS = 8

_LAYER_COUNTS = re.compile(r"(num_)?(hidden_|decoder_|encoder_)?layers|n_layers?|num_blocks|depth|encoder_depth")
_LAYER_IDS = re.compile("layer|idx|index")
_FIRST_LAYERS = re.compile("first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers")
_LAST_LAYERS = re.compile("num_kv_shared_layers")
_ROTARY_FIELDS = (
    "original_max_position_embeddings",
    "max_position_embeddings",
    "mrope_section",
    "partial_rotary_factor",
)

_UNTOUCHED = (
    "image_size|patch_size|spatial|temporal|channels|chunk_size_feed|conv|kernel|expand|n_langs|type_vocab|ngram"
    "|multiplier|vision_feature|num_codebooks|mel_bins|dtype|version"
)
# The first pattern found in a field's name decides how larger numbers are replaced; see `_small`.
_SIZES: tuple[tuple[str, int], ...] = (
    ("(^|_)(pad|bos|eos|sep|cls|mask|unk|eod)_(token_)?(id|index)$|token_(id|index)$|_token$", -1),
    ("original_max_position|floor|rel_extent|(relative|max|bias)_(max_)?distance|axial", 16),
    ("max_.*position|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_(source|target)", POSITIONS),
    ("window_layers|layer_(end|start)", 2),
    ("vocab", VOCABULARY),
    ("per_layer_input$|laurel|router_hidden", 16),
    ("index.*kv_heads", 1),
    ("index.*heads", INDEX_HEADS),
    ("(key_value|kv)_heads|kv_n_heads|query_groups", KV_HEADS),
    ("linear_num_key_heads", KV_HEADS),
    ("mamba_n(um)?_?heads|n_mamba_heads|ssm_heads", 8),
    ("heads(_per_ngram)?$|n_head$|num_heads|heads_per_layer", HEADS),
    ("(rope|nope)_head_dim|rotary_dim", 8),
    ("v_head_dim", 12),
    ("head_?dim|d_head|dim_head|d_kv|kv_channels|head_size|headdim|dim_per_head", HEAD_DIM),
    ("lora_rank|_rank$|lowrank|rank$|d_rel", 8),
    ("index_topk$", WINDOW),
    ("budget", WINDOW),
    ("kpool|compress_ratio", 2),
    ("topk_group", 1),
    ("n_group$|expert_group", 2),
    ("per_tok|topk_blocks|top_?k(_experts)?$|moe_k|moe_topk", 2),
    ("shared_experts?$|num_shared", 1),
    ("expert_num|n(um)?_(local_|routed_|zero_)?experts|moe_num_experts", 4),
    ("moe.*(size|dim)|expert.*(size|dim)", 32),
    ("window|local_attention|attention_chunk_size|attn_chunk|chunk_length|block_size", WINDOW),
    ("intermediate|ffn|d_ff|ff_dim|dim_ff|^dff|d_inner|feed_forward|mlp", 96),
    ("state_size|d_state|buckets", 8),
    ("n_?groups", 2),
    ("d_ssm", 64),
    ("hidden|d_model|n_embd|embed|emb_dim|dim_model|lru_width|width|projection|proj_dim|dim$|out_size", HIDDEN),
    ("multiple_of|divisible", 16),
    ("layers?$|depth|layers_per", 2),
)


def small_config(
    config: PretrainedConfig, overrides: dict[str, Any] | None = None, *, fill: bool = False
) -> PretrainedConfig:
    """A config of the same class, small enough to run in a moment.

    Args:
        config: A config with its defaults.
        overrides: Fields of the language model's config to set.
        fill: Also set sizes that are None by default, which some families need in spite of the default.
    """
    from transformers import PretrainedConfig

    inner = config.get_text_config(decoder=True)
    kept = kept_layers(config)
    fields: dict[str, Any] = {}
    for name, default in _parameters(config).items():
        if name not in vars(config):  # an alias of a field
            continue
        value = vars(config)[name]
        if isinstance(value, PretrainedConfig):
            fields[name] = small_config(value, overrides if value is inner else None, fill=fill)
        elif value is None and fill:
            fields |= _filled(name, len(kept))
        else:
            small = _small_field(config, name, value, kept)
            derived = default is None and not _must_be_given(name, value, small)
            if small != (value if default is None else default) and not derived:
                fields[name] = small
    fields |= _small_differences(config, kept)
    return type(config)(**{**fields, **((overrides or {}) if config is inner else {})})


def _differences(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Per-layer differences from the config, for families that have them."""
    return {int(layer): fields for layer, fields in (config.to_dict().get("per_layer_config") or {}).items()}


def _small_differences(config: PretrainedConfig, kept: list[int]) -> dict[str, Any]:
    small: dict[int, dict[str, Any]] = {}
    for layer, fields in _differences(config).items():
        there = SimpleNamespace(**{**vars(config), **fields})
        for name, value in fields.items() if layer in kept else ():
            larger = name == "head_dim" and value > vars(config)[name]
            small.setdefault(kept.index(layer), {})[name] = _small(there, name, value) * (2 if larger else 1)
    return {"per_layer_config": small} if small else {}


def kept_layers(config: PretrainedConfig) -> list[int]:
    """The first layer of each kind, at least two. A kind is everything that the config says about a single layer."""
    count = _layer_count(config)
    properties = [found for name, value in vars(config).items() if (found := _by_layer(name, value, count))]
    if different := _differences(config):
        properties.append(tuple(str(different.get(layer)) for layer in range(count)))
    kinds = list(zip(*properties, strict=True)) if properties else [()] * count
    kept = {kinds.index(kind) for kind in dict.fromkeys(kinds)}
    if len(kept) > MAX_LAYERS:  # then not all combinations, but every value
        kept = {values.index(value) for values in properties for value in dict.fromkeys(values)}
    for layer in range(count):
        if len(kept) < 2:
            kept.add(layer)
    return sorted(kept)


def layer_types(config: PretrainedConfig) -> list[str]:
    """The config's names of its kinds of layers."""
    text = config.get_text_config(decoder=True)
    names = ("layer_types", "layers_block_type", "attention_layers", "attn_layers")
    found = next((value for name in names if (value := getattr(text, name, None))), ())
    return sorted({str(kind) for kind in found})


def _parameters(config: PretrainedConfig) -> dict[str, Any]:
    general = {"architectures", "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states"}
    signature = inspect.signature(type(config)).parameters
    return {name: field.default for name, field in signature.items() if name not in general}


def _layer_count(config: PretrainedConfig) -> int:
    counts = [value for name, value in vars(config).items() if _LAYER_COUNTS.fullmatch(name) and _is_int(value)]
    return max(counts, default=0)


def _by_layer(name: str, value: Any, count: int) -> tuple[str, ...] | None:
    """A field's value per layer; None if the field is not about single layers."""
    if _is_int(value) and _FIRST_LAYERS.fullmatch(name):
        return tuple(str(layer < value) for layer in range(count))
    if _is_int(value) and _LAST_LAYERS.fullmatch(name):
        return tuple(str(layer >= count - value) for layer in range(count))
    if _are_layer_ids(name, value, count):
        return tuple(str(layer in value) for layer in range(count))
    if isinstance(value, (list, tuple)) and len(value) == count > 2:
        return tuple(map(str, value))
    return None


def _are_layer_ids(name: str, value: Any, count: int) -> bool:
    if not (isinstance(value, (list, tuple)) and value and all(map(_is_int, value)) and _LAYER_IDS.search(name)):
        return False
    return list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < count and not set(value) <= {0, 1}


def _small_field(config: PretrainedConfig, name: str, value: Any, kept: list[int]) -> Any:
    count = _layer_count(config)
    if _LAYER_COUNTS.fullmatch(name) and _is_int(value):
        return len(kept) if value == count else min(value, 2)
    if _is_int(value) and (_FIRST_LAYERS.fullmatch(name) or _LAST_LAYERS.fullmatch(name)):
        return (_by_layer(name, value, count) or ()).count("True") and sum(
            (_by_layer(name, value, count) or ())[layer] == "True" for layer in kept
        )
    if _are_layer_ids(name, value, count):
        return type(value)(kept.index(layer) for layer in value if layer in kept)
    if isinstance(value, (list, tuple)) and len(value) == count > 2:
        return type(value)(_small(config, name, value[layer]) for layer in kept)
    return _small(config, name, value)


def _small(config: Any, name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return True if name == "is_decoder" else value
    if re.search("dropout|pdrop|layerdrop|drop_path", name):
        return 0.0 if value is not None else None
    if re.search("soft_?cap", name) and isinstance(value, (int, float)):
        return 2.0  # small enough to affect scores of about 1
    if isinstance(value, dict):
        return {key: _small_rotary(config, str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and _TOKEN_IDS.search(name):
        return _special_token(name)
    if name == "attention_types":
        return [[kinds, 1] for kinds, _ in value]
    if isinstance(value, (list, tuple)):
        return type(value)(_small(config, name, item) for item in value)
    return _small_number(config, name, value) if _is_int(value) else value


def _filled(name: str, layers: int) -> dict[str, Any]:
    """A value for a field that is None by default, if one is known."""
    if name == "layer_types":
        return {name: ["full_attention"] * layers}
    if re.search(_UNTOUCHED, name) or _LAYER_COUNTS.fullmatch(name):
        return {}
    size = next((size for pattern, size in _SIZES if re.search(pattern, name)), -1)
    return {} if size == -1 else {name: size}


def _small_number(config: Any, name: str, value: int) -> int:
    if re.search(_UNTOUCHED, name):
        return value
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            if size == -1:
                return _special_token(name) if value >= TOKENS or not name.startswith("pad") else value
            return min(value, _like_its_sibling(config, name, value, size))
    return value


def _like_its_sibling(config: Any, name: str, value: int, size: int) -> int:
    """Keep equal sizes equal: key/value heads and query heads, head size and rotated size."""
    if re.search("(key_value|kv)_heads|linear_num_key", name):
        other = re.sub("key_value_|kv_", "", name) if "linear" not in name else "linear_num_value_heads"
        other = "num_attention_heads" if other not in vars(config) else other
        return HEADS if value == vars(config).get(other) else size
    return 8 if name == "head_dim" and value == vars(config).get("qk_rope_head_dim") else size


_TOKEN_IDS = re.compile(_SIZES[0][0])


def _special_token(name: str) -> int:
    return TOKENS + zlib.crc32(name.encode()) % (VOCABULARY - TOKENS)


def _small_rotary(config: Any, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _small_rotary(config, str(key), item) for key, item in value.items()}
    if name == "mrope_section":
        return sections(value, HEAD_DIM // 2 if sum(value) > 32 else HEAD_DIM // 8)
    if name == "partial_rotary_factor":
        return max(round(value * 4), 1) / 4  # half or a quarter of a small head is an even number
    if name in ("original_max_position_embeddings", "max_position_embeddings"):
        return 16 if name.startswith("original") else POSITIONS
    return value if isinstance(value, (bool, float, str)) or value is None else _small(config, name, value)


def sections(value: list[int], frequencies: int) -> list[int]:
    """Distribute the frequencies of a small head over time, height and width."""
    rest = frequencies // len(value)
    return [frequencies - rest * (len(value) - 1), *[rest] * (len(value) - 1)]


def _must_be_given(name: str, value: Any, small: Any) -> bool:
    """Whether a field's small value must be passed because the config does not derive it from others."""
    if isinstance(value, (list, tuple)):
        return True
    return isinstance(value, dict) and any(f"'{field}'" in str(small) for field in _ROTARY_FIELDS)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
