"""The parameters of published models as their sources name them: shapes, small, in nested dicts."""

import jax
import jax.numpy as jnp


def shapes(tree):
    """The tree with arrays' shapes in the place of tuples."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _linear(rows, cols):
    return {"kernel": (rows, cols), "bias": (cols,)}


def _norm(width):
    return {"scale": (width,), "bias": (width,)}


def bloom(layers=2, width=8, vocabulary=32):
    """Flax BLOOM of Hugging Face."""
    block = {
        "input_layernorm": _norm(width),
        "self_attention": {
            "query_key_value": _linear(width, 3 * width),
            "dense": _linear(width, width),
        },
        "post_attention_layernorm": _norm(width),
        "mlp": {
            "dense_h_to_4h": _linear(width, 4 * width),
            "dense_4h_to_h": _linear(4 * width, width),
        },
    }
    return {
        "transformer": {
            "word_embeddings": {"embedding": (vocabulary, width)},
            "word_embeddings_layernorm": _norm(width),
            "h": {str(i): block for i in range(layers)},
            "ln_f": _norm(width),
        }
    }


def gpt2(layers=2, width=8, vocabulary=32):
    """Flax GPT-2 of Hugging Face: its `FlaxConv1D` has kernels (out, in)."""

    def conv1d(out, rows):
        return {"kernel": (out, rows), "bias": (out,)}

    block = {
        "ln_1": _norm(width),
        "attn": {"c_attn": conv1d(3 * width, width), "c_proj": conv1d(width, width)},
        "ln_2": _norm(width),
        "mlp": {"c_fc": conv1d(4 * width, width), "c_proj": conv1d(width, 4 * width)},
    }
    return {
        "transformer": {
            "wte": {"embedding": (vocabulary, width)},
            "wpe": {"embedding": (16, width)},
            "h": {str(i): block for i in range(layers)},
            "ln_f": _norm(width),
        }
    }


def gemma(width=8, heads=2, dim=6, hidden=24, transposed=False):
    """Gemma of DeepMind: one layer with as many key heads as heads, one with a single one."""
    gates = (2, hidden, width) if transposed else (2, width, hidden)
    grouped = {"q_einsum": {"w": (heads, width, dim)}, "kv_einsum": {"w": (2, 1, width, dim)}}
    equal = {"qkv_einsum": {"w": (3, heads, width, dim)}}

    def layer(attention):
        return {
            "pre_attention_norm": {"scale": (width,)},
            "attn": {**attention, "attn_vec_einsum": {"w": (heads, dim, width)}},
            "pre_ffw_norm": {"scale": (width,)},
            "mlp": {"gating_einsum": gates, "linear": (hidden, width)},
        }

    return {
        "transformer": {
            "embedder": {"input_embedding": (32, width)},
            "layer_0": layer(grouped),
            "layer_1": layer(equal),
            "final_norm": {"scale": (width,)},
        }
    }


def gemma3(width=2560, heads=8, key_heads=4, dim=256, hidden=10240):
    """The first layer of Gemma 3 4B, of DeepMind's package."""
    layer = {
        "attn": {
            "q_einsum": {"w": (heads, width, dim)},
            "kv_einsum": {"w": (2, key_heads, width, dim)},
            "attn_vec_einsum": {"w": (heads, dim, width)},
            "_query_norm": {"scale": (dim,)},
            "_key_norm": {"scale": (dim,)},
        },
        "mlp": {"gating_einsum": (2, hidden, width), "linear": (hidden, width)},
        "pre_attention_norm": {"scale": (width,)},
    }
    return {"embedder": {"input_embedding": (262144, width)}, "layer_0": layer}


def llama(width=4096, heads=32, key_heads=8, dim=128, hidden=14336):
    """The first layer of Llama 3 8B, in Flax of Hugging Face."""
    attention = {
        "q_proj": {"kernel": (width, heads * dim)},
        "k_proj": {"kernel": (width, key_heads * dim)},
        "v_proj": {"kernel": (width, key_heads * dim)},
        "o_proj": {"kernel": (heads * dim, width)},
    }
    mlp = {
        "gate_proj": {"kernel": (width, hidden)},
        "up_proj": {"kernel": (width, hidden)},
        "down_proj": {"kernel": (hidden, width)},
    }
    layer = {"self_attn": attention, "mlp": mlp, "input_layernorm": {"weight": (width,)}}
    return {
        "model": {"embed_tokens": {"embedding": (128256, width)}, "layers": {"0": layer}},
        "lm_head": {"kernel": (width, 128256)},
    }


def _weights(shapes):
    """Weights of PyTorch, (out, in), by their names."""
    return {name: {"weight": shape} for name, shape in shapes.items()}


def _moe_of_torch(attention, width, hidden, vocabulary, experts):
    """A layer with experts, of which one stands for all, in names of Hugging Face."""
    expert = {
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
    }
    layer = {
        "self_attn": _weights(attention),
        "mlp": {"gate": {"weight": (experts, width)}, "experts": {"0": _weights(expert)}},
        **_weights({"input_layernorm": (width,)}),
    }
    return {
        "model": {**_weights({"embed_tokens": (vocabulary, width)}), "layers": {"3": layer}},
        **_weights({"lm_head": (vocabulary, width)}),
    }


def qwen3_moe(width=2048, heads=32, key_heads=4, dim=128):
    """A layer of Qwen3 30B-A3B."""
    attention = {
        "q_proj": (heads * dim, width),
        "k_proj": (key_heads * dim, width),
        "v_proj": (key_heads * dim, width),
        "o_proj": (width, heads * dim),
        "q_norm": (dim,),
        "k_norm": (dim,),
    }
    return _moe_of_torch(attention, width, hidden=768, vocabulary=151936, experts=128)


def deepseek(width=7168, heads=128, q_rank=1536, nope=128, rope=64, v=128, **of_moe):
    """A layer of DeepSeek V3, or of a model with its latent attention."""
    of_q = {
        "q_a_proj": (q_rank, width),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (nope + rope), q_rank),
    }
    attention = {
        **(of_q if q_rank else {"q_proj": (heads * (nope + rope), width)}),
        "kv_a_proj_with_mqa": (512 + rope, width),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (heads * (nope + v), 512),
        "o_proj": (width, heads * v),
    }
    sizes = {"hidden": 2048, "vocabulary": 129280, "experts": 256, **of_moe}
    return _moe_of_torch(attention, width, **sizes)


def kimi_k2():
    """A layer of Kimi K2."""
    return deepseek(heads=64, vocabulary=163840, experts=384)


def moonlight():
    """A layer of Moonlight 16B-A3B, whose queries have no latent."""
    return deepseek(2048, 16, q_rank=0, hidden=1408, vocabulary=163840, experts=64)


def glm5():
    """A layer of GLM-5, with the indexer of its sparse attention."""
    tree = deepseek(6144, 64, q_rank=2048, nope=192, v=256, vocabulary=154880)
    indexer = {"wq_b": (32 * 128, 2048), "wk": (128, 6144), "weights_proj": (32, 6144)}
    tree["model"]["layers"]["3"]["self_attn"]["indexer"] = _weights(indexer)
    return tree


def kimi_k3(low_rank_gate=False, width=7168, heads=96, dim=128, hidden=33792):
    """The first layer of Kimi K3; with a gate of low rank, of Kimi Linear at that size."""
    full, filters = heads * dim, (heads * dim, 1, 4)
    projections = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (full, width))
    projections |= {"f_a_proj": (dim, width), "f_b_proj": (full, dim), "b_proj": (heads, width)}
    of_gate = {"g_a_proj": (dim, width), "g_b_proj": (full, dim)}
    projections |= of_gate if low_rank_gate else {"g_proj": (full, width)}
    convolutions = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), filters)
    attention = {
        **_weights(projections | convolutions | {"o_norm": (dim,), "o_proj": (width, full)}),
        "A_log": (1, 1, heads, 1) if low_rank_gate else (heads,),
        "dt_bias": (full,),
    }
    mlp = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    layer = {
        "self_attn": attention,
        "mlp": _weights(mlp),
        **_weights({"input_layernorm": (width,)}),
    }
    return {
        "model": {**_weights({"embed_tokens": (163840, width)}), "layers": {"0": layer}},
        **_weights({"lm_head": (163840, width)}),
    }


def levanter_llama(layers=3, width=8, groups=2, per_group=2, dim=4, hidden=24):
    """Llama of Levanter, of Haliax' modules: stacked layers, the axes of outputs first."""
    return {
        "transformer": {
            "layers": {
                "stacked": {
                    "self_attn": {
                        "q_proj": {"weight": (layers, groups, per_group, dim, width)},
                        "k_proj": {"weight": (layers, groups, dim, width)},
                        "v_proj": {"weight": (layers, groups, dim, width)},
                        "o_proj": {"weight": (layers, width, groups * per_group, dim)},
                    },
                    "mlp": {
                        "gate_proj": {"weight": (layers, hidden, width)},
                        "up_proj": {"weight": (layers, hidden, width)},
                        "down_proj": {"weight": (layers, width, hidden)},
                    },
                    "input_layernorm": {"weight": (layers, width)},
                    "post_attention_layernorm": {"weight": (layers, width)},
                }
            },
            "norm": {"weight": (width,)},
        },
        "embeddings": {"token_embeddings": {"weight": (32, width)}},
        "lm_head": {"weight": (32, width)},
    }


def resnet18():
    """The first and the last layers of ResNet-18 in Flax' example."""
    block = {
        "Conv_0": {"kernel": (3, 3, 8, 8)},
        "BatchNorm_0": _norm(8),
        "Conv_1": {"kernel": (3, 3, 8, 8)},
        "BatchNorm_1": _norm(8),
    }
    return {
        "conv_init": {"kernel": (7, 7, 3, 8)},
        "bn_init": _norm(8),
        "ResNetBlock_0": block,
        "ResNetBlock_1": {**block, "conv_proj": {"kernel": (1, 1, 8, 8)}, "norm_proj": _norm(8)},
        "Dense_0": _linear(8, 10),
    }


def cnn():
    """The network for MNIST of Flax' example."""
    return {
        "Conv_0": {"kernel": (3, 3, 1, 32), "bias": (32,)},
        "Conv_1": {"kernel": (3, 3, 32, 64), "bias": (64,)},
        "Dense_0": _linear(3136, 256),
        "Dense_1": _linear(256, 10),
    }


def vae():
    """Flax' example."""
    return {
        "encoder": {
            "fc1": _linear(784, 500),
            "fc2_mean": _linear(500, 20),
            "fc2_logvar": _linear(500, 20),
        },
        "decoder": {"fc1": _linear(20, 500), "fc2": _linear(500, 784)},
    }


def ppo():
    """The actor and critic of Flax' example."""
    return {
        "conv1": {"kernel": (8, 8, 4, 32), "bias": (32,)},
        "conv2": {"kernel": (4, 4, 32, 64), "bias": (64,)},
        "conv3": {"kernel": (3, 3, 64, 64), "bias": (64,)},
        "hidden": _linear(3136, 512),
        "logits": _linear(512, 4),
        "value": _linear(512, 1),
    }


def purejaxrl():
    """The actor and critic of PureJaxRL: layers 0 to 2 and 3 to 5, numbered as one network."""
    sizes = [(17, 64), (64, 64), (64, 6), (17, 64), (64, 64), (64, 1)]
    return {**{f"Dense_{i}": _linear(*size) for i, size in enumerate(sizes)}, "log_std": (6,)}


def qwix_lora(layers=2, width=8, rank=2):
    """Gemma's attention with the factors that Qwix adds, and a linear layer with Flax' own."""
    attention = {
        "q_einsum": {
            "w": (2, width, 6),
            "w_lora_a": (width, rank),
            "w_lora_b": (rank, 2, 6),
        },
        "attn_vec_einsum": {
            "w": (2, 6, width),
            "w_lora_a": (2, 6, rank),
            "w_lora_b": (rank, width),
        },
        "gate_proj": {
            "kernel": (width, 24),
            "kernel_lora_a": (width, rank),
            "kernel_lora_b": (rank, 24),
        },
        "up_proj": {"kernel": (width, 24), "lora": {"lora_a": (width, rank), "lora_b": (rank, 24)}},
        "down_proj": {
            "wrapped": {"weight": (24, width)},
            "lora": {"lora_A": {"weight": (24, rank)}, "lora_B": {"weight": (rank, width)}},
        },
        "adapter": {"down": {"kernel": (width, rank)}, "up": {"kernel": (rank, width)}},
    }
    return {"layers": {str(i): attention for i in range(layers)}}
