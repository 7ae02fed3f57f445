"""Stages of blocks: `embed`, `layer[k]`, `attn[k]`, `mlp[k]`, `hidden[k]`, `norm`, `head` as selectors.

    block_stages(model)["attn[0]"]                   # encoder.layer.0.attention.output.dense, of BERT

# Note: [What a block's stages are]
`layer[k]` is the output of block k. `attn[k]` and `mlp[k]` are what its attention and its feed-forward part
add to the residual stream, before it is added (BERT's and T5's too, where a module within does that).
`hidden[k]` is `hidden_states[k]` of transformers: `hidden[0]` the input of the first block, `hidden[k]` the
output of block k - 1, and the last one that after the final norm, where there is one; but before it in those
that transformers marks with `tie_last_hidden_states=False`: ViT, DINOv2, CLIP, SigLIP, wav2vec2.
Encoder-decoders and models of two towers have the names with `encoder.`, `decoder.`, `text.`, `vision.` in
front. Blocks in several lists, one for each size of an image, are numbered through and have no `hidden[k]`;
nor have families whose states are other values: Longformer cuts off padding of its own. A negative number
counts from the last. `image_features` and `text_features` are the vectors that `get_image_features` and
`get_text_features` of CLIP and SigLIP return, before they are normalised.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from inspect import getclosurevars
from typing import Any

from torch import nn

_LISTS = ("layers", "layer", "block", "blocks", "h")
_ATTENTION = (
    "attention.output.dense",
    "layer.0.SelfAttention",
    "self_attn",
    "self_attention",
    "attention",
    "attn",
    "multi_head_attention",
)
_MIXERS = ("mixer", "mamba", "linear_attn", "temporal_block", "fourier")
"""What mixes tokens where a block has no attention."""
_FEED_FORWARD = (
    "layer.2.DenseReluDense",
    "layer.1.DenseReluDense",
    "mlp",
    "feed_forward",
    "ffn",
    "block_sparse_moe",
    "fc2",
    "output.dense",
)
_FINAL_NORMS = (
    "norm",
    "ln_f",
    "norm_f",
    "final_norm",
    "final_layer_norm",
    "final_layernorm",
    "layer_norm",
    "layernorm",
    "post_layernorm",
    "embedding_norm",
    "emb_layer_norm_after",
    "ln",
)
"""The last three are those of LFM2, ESM and Megatron-BERT."""
_NORM_FIRST = ("data2vec-audio", "sew", "sew-d", "speecht5")
"""Families with a norm beside the blocks that comes before them."""
_OTHER_STATES = (
    "canine",
    "falcon_mamba",
    "funnel",
    "led",
    "longformer",
    "mamba",
    "mamba2",
    "patchtst",
    "prophetnet",
    "rt_detr",
    "rwkv",
    "squeezebert",
)
"""Families whose hidden states are outputs of no module, or are numbered otherwise, as Mamba's are."""
_EMBEDDINGS = (
    "embeddings",
    "embed_tokens",
    "tokens_embed",
    "embed_in",
    "wte",
    "word_embeddings",
    "patch_embed",
    "shared",
    "feature_projection",
)
_HEADS = ("lm_head", "classifier", "score", "cls", "qa_outputs", "proj_out", "head", "projector")
_FEATURES = {
    "image_features": ("visual_projection", "vision_model.head"),
    "text_features": ("text_projection", "text_model.head"),
}
"""Of CLIP, and of SigLIP."""
_FEATURES_OF_TOWERS = {"vision": "image_features", "text": "text_features"}
"""Of one tower of SigLIP, whose head makes them."""
_WITH_FEATURES = ("altclip", "chinese_clip", "clip", "metaclip_2", "siglip")
_TOWERS = {"text_model": "text.", "vision_model": "vision.", "encoder": "encoder.", "decoder": "decoder."}


def block_stages(model: nn.Module) -> dict[str, str]:
    """Return the selectors of a model's blocks by stage name; empty for a model without blocks."""
    towers = _towers(model)
    stages: dict[str, str] = {}
    for name, paths in towers.items():
        prefix = name if len(towers) > 1 else ""
        stages |= {f"{prefix}{stage}": selector for stage, selector in _tower_stages(model, paths).items()}
    if towers:
        head = next((name for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)), "")
        stages |= {"head": head, "penultimate": f"{head}/in"} if head else {}
    return stages | _features(model)


def _features(model: Any) -> dict[str, str]:
    """Return where a model of texts and images, or one tower of it, has the vectors that are compared."""
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if not kind.startswith(_WITH_FEATURES):
        return {}
    modules = {path for path, _ in model.named_modules()}
    features = {
        name: path
        for name, paths in _FEATURES.items()
        if (path := next(filter(modules.__contains__, paths), ""))
    }
    if not features and kind.startswith("siglip") and "head" in modules:
        tower = next((tower for tower in _FEATURES_OF_TOWERS if tower in kind), "")
        return {_FEATURES_OF_TOWERS[tower]: "head"} if tower else {}
    return features


def _towers(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of the lists of blocks by the name of their tower; the most of one kind for each."""
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in _block_lists(model):
        kinds[_tower_name(path)][re.sub(r"\d+", "#", path)].append(path)

    def block_count(paths: Sequence[str]) -> int:
        return sum(len(list(model.get_submodule(path).children())) for path in paths)

    return {name: max(result.values(), key=block_count) for name, result in kinds.items()}


def _block_lists(model: nn.Module) -> Iterator[str]:
    """Yield the paths of lists of modules with an attention part or a mixer, outside any other block."""
    result: list[str] = []
    for path, part in model.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or path.rpartition(".")[2] not in _LISTS:
            continue
        if not len(part) or any(path.startswith(f"{other}.") for other in result):
            continue
        if any(_child(block, _ATTENTION) for block in part) or _child(part[0], _MIXERS):
            result.append(path)
            yield path


def _tower_name(path: str) -> str:
    return next((name for part in path.split(".") if (name := _TOWERS.get(part))), "")


def _tower_stages(model: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    blocks = [f"{path}.{name}" for path in paths for name, _ in model.get_submodule(path).named_children()]
    stages: dict[str, str] = {}
    if embed := _beside(model, paths[0], _EMBEDDINGS):
        stages["embed"] = embed
    for index, layer in enumerate(blocks):
        block = model.get_submodule(layer)
        attention, feed_forward = _child(block, _ATTENTION), _child(block, _FEED_FORWARD)
        stages[f"layer[{index}]"] = layer
        stages |= {f"attn[{index}]": f"{layer}.{attention}"} if attention else {}
        stages |= {f"mlp[{index}]": f"{layer}.{feed_forward}"} if feed_forward else {}
    norm = _norm_after(model, paths[-1])
    stages |= {"norm": norm} if norm else {}
    return stages | (_hidden_states(model, paths[0], blocks, norm) if len(paths) == 1 else {})


def _hidden_states(model: Any, path: str, blocks: Sequence[str], norm: str) -> dict[str, str]:
    """Return the selectors of the states of one list of blocks, as transformers numbers them."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") in _OTHER_STATES:
        return {}
    states = [f"{blocks[0]}/in", *blocks]
    if norm and _ties_last(model, path, norm):
        states[-1] = norm
    if getattr(config, "conv_kernel_size", 0) and isinstance(_convolution(model, path), nn.Module):
        states[1] = f"{path.rpartition('.')[0]}.conv"
    return {f"hidden[{index}]": selector for index, selector in enumerate(states)}


def _convolution(model: nn.Module, path: str) -> object:
    """Return the convolution that DeBERTa-v2 has beside its blocks, and applies after the first."""
    return getattr(model.get_submodule(path.rpartition(".")[0]), "conv", None)


def _child(block: nn.Module, names: tuple[str, ...]) -> str:
    """Return the first path that a block has."""
    modules = {path for path, _ in block.named_modules()}
    return next((name for name in names if name in modules), "")


def _beside(model: nn.Module, path: str, names: tuple[str, ...]) -> str:
    """Return the nearest module of one of the names, beside the blocks or further out."""
    parts = path.split(".")[:-1]
    for length in range(len(parts), -1, -1):
        around = ".".join(parts[:length])
        parent = model.get_submodule(around)
        for name in names:
            if isinstance(getattr(parent, name, None), nn.Module):
                return f"{around}.{name}" if around else name
    return ""


def _norm_after(model: Any, path: str) -> str:
    """Return the norm behind the last block; a list's neighbour with that role, or its parent's."""
    norm = _beside(model, path, _FINAL_NORMS)
    config = getattr(model, "config", None)
    is_first = getattr(config, "model_type", "") in _NORM_FIRST
    if is_first or getattr(config, "do_stable_layer_norm", None) is False:  # of wav2vec2 and its kind
        return ""
    tower = path.rpartition(".")[0].partition(".")[0]
    return (
        norm
        if not norm or "." not in path or norm.startswith(tower) or tower in ("encoder", "transformer")
        else ""
    )


def _ties_last(model: nn.Module, path: str, norm: str) -> bool:
    """Whether transformers replaces the last hidden state with the value after the norm; see the Note.

    Families that collect states themselves do so beside their blocks: a norm further out comes later.
    """
    parts = path.split(".")[:-1]
    for length in range(len(parts), -1, -1):
        forward: Any = type(model.get_submodule(".".join(parts[:length]))).forward
        while forward is not None:  # through the decorators
            given = getclosurevars(forward).nonlocals if forward.__closure__ else {}
            if "tie_last_hidden_states" in given:
                return bool(given["tie_last_hidden_states"])
            forward = getattr(forward, "__wrapped__", None)
    return norm.rpartition(".")[0] == path.rpartition(".")[0]
