"""Names and shapes of a model's parameters, and the FLOPs of a token, from its config alone. Ground floor, no torch.

The plan of a run, the stage split, validation and the initial weights read these instead of building a model; a test
holds them equal to the module on the meta device. Names are those of Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from hp_train import registry
from hp_train.config.schema import ModelSection

EMBEDDING_NAME = "model.embed_tokens.weight"
FINAL_NORM_NAME = "model.norm.weight"
HEAD_NAME = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Number of parameters of each part that a pipeline split can move: `layer` is one transformer block."""

    embedding: int
    layer: int
    norm: int
    head: int  # the output matrix, also when it is tied to the embedding


def num_kv_heads(config: ModelSection) -> int:
    """Return the number of key and value heads; `model.num_kv_heads=null` means as many as query heads."""
    return config.num_heads if config.num_kv_heads is None else config.num_kv_heads


def head_dim(config: ModelSection) -> int:
    """Return the features of one attention head."""
    return config.dim // config.num_heads


def layer_shapes(config: ModelSection, layer: int) -> dict[str, Shape]:
    """Return name -> shape of one block, in the order in which the module registers them. `layer` is global."""
    plugged = _plugged(config)
    if plugged is not None:
        return plugged(config, layers=[layer], embedding=False, head=False)
    dim, ffn_dim, kv_dim = config.dim, config.ffn_dim, num_kv_heads(config) * head_dim(config)
    q_dim = config.num_heads * head_dim(config)
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.input_layernorm.weight": (dim,),
        f"{prefix}.self_attn.q_proj.weight": (q_dim, dim),
        f"{prefix}.self_attn.k_proj.weight": (kv_dim, dim),
        f"{prefix}.self_attn.v_proj.weight": (kv_dim, dim),
        f"{prefix}.self_attn.o_proj.weight": (dim, q_dim),
        f"{prefix}.post_attention_layernorm.weight": (dim,),
        f"{prefix}.mlp.gate_proj.weight": (ffn_dim, dim),
        f"{prefix}.mlp.up_proj.weight": (ffn_dim, dim),
        f"{prefix}.mlp.down_proj.weight": (dim, ffn_dim),
    }


def parameter_shapes(
    config: ModelSection, *, layers: Iterable[int] | None = None, embedding: bool = True, head: bool = True
) -> dict[str, Shape]:
    """Return name -> shape of the whole model, or of one pipeline stage of it.

    `layers` are global layer numbers, all by default. Tied embeddings appear once, under the embedding's name; a stage
    that has the head but not the embedding owns a copy, named `lm_head.weight`.
    """
    plugged = _plugged(config)
    if plugged is not None:
        layers = range(config.num_layers) if layers is None else layers
        return plugged(config, layers=layers, embedding=embedding, head=head)
    shapes: dict[str, Shape] = {}
    if embedding:
        shapes[EMBEDDING_NAME] = (config.vocab_size, config.dim)
    for layer in range(config.num_layers) if layers is None else layers:
        shapes.update(layer_shapes(config, layer))
    if head:
        shapes[FINAL_NORM_NAME] = (config.dim,)
        if not (config.tie_embeddings and embedding):
            shapes[HEAD_NAME] = (config.vocab_size, config.dim)
    return shapes


def part_sizes(config: ModelSection) -> PartSizes:
    """Return how many parameters the embedding, one block, the final norm and the head have."""
    plugged = _plugged(config)
    if plugged is not None:
        ends = [plugged(config, layers=[], embedding=not last, head=last) for last in (False, True)]
        return PartSizes(_count(ends[0]), _count(layer_shapes(config, 0)), 0, _count(ends[1]))
    matrix = config.vocab_size * config.dim
    return PartSizes(embedding=matrix, layer=_count(layer_shapes(config, 0)), norm=config.dim, head=matrix)


def num_parameters(config: ModelSection) -> int:
    """Return the parameters of the whole model, a tied matrix counted once."""
    return num_parameters_of_stage(config, range(config.num_layers))


def num_parameters_of_stage(config: ModelSection, layers: range, *, embedding: bool = True, head: bool = True) -> int:
    """Return the parameters that one pipeline stage holds, its own copy of a tied output matrix included."""
    if _plugged(config) is not None:
        return _count(parameter_shapes(config, layers=layers, embedding=embedding, head=head))
    sizes = part_sizes(config)
    count = len(layers) * sizes.layer
    if embedding:
        count += sizes.embedding
    if head:
        count += sizes.norm
        if not (config.tie_embeddings and embedding):
            count += sizes.head
    return count


def flops_per_token(config: ModelSection, seq_len: int) -> int:
    """Return the FLOPs of forward and backward per token, as model FLOPs utilisation counts them.

    6 N + 12 L H Q T of PaLM (Chowdhery et al. 2022, appendix B): N the parameters that multiply every token (all but
    the embedding's rows, which are looked up), L layers, H heads of Q features, T tokens of context. By that
    convention causal attention is not halved and recomputation does not count.
    """
    sizes = part_sizes(config)
    multiplied = config.num_layers * sizes.layer + sizes.norm + sizes.head
    if _plugged(config) is not None:
        return 6 * multiplied  # what mixes positions without parameters is not known
    attention = 12 * config.num_layers * config.num_heads * head_dim(config) * seq_len
    return 6 * multiplied + attention


def _plugged(config: ModelSection) -> Callable[..., dict[str, Shape]] | None:
    """Return the function that tells the shapes of a plugin's model; None for what is built in."""
    component = registry.find("model", config.name)
    return None if component is None else registry.resolve(component.shapes)


def _count(shapes: dict[str, Shape]) -> int:
    return sum(prod(shape) for shape in shapes.values())
