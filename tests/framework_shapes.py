"""The trees that training frameworks make of published models: shapes by path.

Each tree is what the framework's own modules have, run with `jax.eval_shape` at the commit named:

-   MaxText: AI-Hypercomputer/maxtext at e591f30, `get_model_mdn` and its configurations
-   Tunix: google/tunix at c7d8950, `tunix/models/*/model.py`
-   Levanter: stanford-crfm/levanter at 9263f81, with haliax at f41e7d4
-   Grug: marin-community/marin at 02788a1, `experiments/grug/base/model.py`
-   Flax: google/flax at 18f8f31, `examples`
-   Hugging Face: Flax models of transformers 4.49.0; gpt-oss of PyTorch at 00d4b3d, as read
"""

from collections.abc import Mapping

type Shapes = dict[str, tuple[int, ...]]


def below(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """The same shapes below a path."""
    return {f"{prefix}/{name}": shape for name, shape in shapes.items()}


def scanned(
    prefix: str, layers: int, shapes: Mapping[str, tuple[int, ...]], axis: int = 1
) -> Shapes:
    """The shapes of layers that are stacked along an axis, below a path."""
    stacked = {name: (*s[:axis], layers, *s[axis:]) for name, s in shapes.items()}
    return below(prefix, stacked)


def _attention(width: int, heads: int, key_heads: int, dim: int) -> Shapes:
    return {
        "query/kernel": (width, heads, dim),
        "key/kernel": (width, key_heads, dim),
        "value/kernel": (width, key_heads, dim),
        "out/kernel": (heads, dim, width),
    }


def _norms_of_qk(dim: int) -> Shapes:
    return {"query_norm/scale": (dim,), "key_norm/scale": (dim,)}


def _mlp(width: int, hidden: int) -> Shapes:
    return {
        "wi_0/kernel": (width, hidden),
        "wi_1/kernel": (width, hidden),
        "wo/kernel": (hidden, width),
    }


def _experts(width: int, hidden: int, experts: int) -> Shapes:
    return {
        "gate/kernel": (width, experts),
        "wi_0": (experts, width, hidden),
        "wi_1": (experts, width, hidden),
        "wo": (experts, hidden, width),
    }


def _norms_around_attention(width: int) -> Shapes:
    names = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    return {f"{name}/scale": (width,) for name in names}


def _model(width: int, vocabulary: int, layers: Shapes, tied: bool = False) -> Shapes:
    head = {} if tied else {"decoder/logits_dense/kernel": (width, vocabulary)}
    norm = {"decoder/decoder_norm/scale": (width,)}
    return {
        "token_embedder/embedding": (vocabulary, width),
        **below("decoder", layers),
        **norm,
        **head,
    }


def _llama_layer() -> Shapes:
    return {
        **below("self_attention", _attention(4096, 32, 8, 128)),
        **below("mlp", _mlp(4096, 14336)),
        **_norms_around_attention(4096),
    }


def maxtext_llama3() -> Shapes:
    """`model_name=llama3-8b`: as many layers as heads. The tree of `pure_nnx=True` is the same."""
    return _model(4096, 128256, scanned("layers", 32, _llama_layer()))


def maxtext_pipeline() -> Shapes:
    """llama3-8b with `ici_pipeline_parallelism=4` and two layers a stage: 4 repeats, 4 stages."""
    layers = {
        name: (4, 4, *shape)
        for i in range(2)
        for name, shape in below(f"layers/layers_{i}", _llama_layer()).items()
    }
    return _model(4096, 128256, below("pipeline_module", layers))


def maxtext_qwen3_moe() -> Shapes:
    """`model_name=qwen3-30b-a3b`."""
    layer = {
        **below("self_attention", _attention(2048, 32, 4, 128) | _norms_of_qk(128)),
        **below("moe_block", _experts(2048, 768, 128)),
        **_norms_around_attention(2048),
    }
    return _model(2048, 151936, scanned("layers", 48, layer))


def maxtext_deepseek3(
    heads: int = 128,
    experts: int = 256,
    layers: tuple[int, int] = (3, 58),
    vocabulary: int = 129280,
) -> Shapes:
    """`model_name=deepseek3-671b`: two stacks, of layers with an MLP and with experts."""
    latent = {
        "wq_a/kernel": (7168, 1536),
        "q_norm/scale": (1536,),
        "wq_b/kernel": (1536, heads, 192),
        "wkv_a/kernel": (7168, 576),
        "kv_norm/scale": (512,),
        "wkv_b/kernel": (512, heads, 256),
        "out/kernel": (heads, 128, 7168),
    }
    attention = below("self_attention", latent) | _norms_around_attention(7168)
    moe = {
        **below("MoeBlock_0", _experts(7168, 2048, experts) | {"gate/bias": (experts,)}),
        **below("shared_experts", _mlp(7168, 2048)),
    }
    dense, sparse = layers
    stacks = {
        **scanned("dense_layers", dense, attention | below("mlp", _mlp(7168, 18432))),
        **scanned("moe_layers", sparse, attention | below("DeepSeekMoeBlock_0", moe)),
    }
    return _model(7168, vocabulary, stacks)


def maxtext_kimi_k2() -> Shapes:
    """`model_name=kimi-k2-1t`: a stack of one layer, and one of 60."""
    return maxtext_deepseek3(64, 384, (1, 60), 163840)


def maxtext_gpt_oss() -> Shapes:
    """`model_name=gpt-oss-20b`: pairs of layers."""
    attention = {
        **_attention(2880, 64, 8, 64),
        "query/bias": (64, 64),
        "key/bias": (8, 64),
        "value/bias": (8, 64),
        "out/bias": (2880,),
        "sinks": (64,),
    }
    biases = {"gate/bias": (32,), "wo_bias": (32, 2880)}
    biases |= {f"wi_{i}_bias": (32, 2880) for i in range(2)}
    layer = {
        **below("GptOssAttention", attention),
        **below("GptOssMlp", _experts(2880, 2880, 32) | biases),
        **_norms_around_attention(2880),
    }
    pair = below("layers_0", layer) | below("layers_1", layer)
    return _model(2880, 201088, scanned("layers", 12, pair))


def maxtext_gemma3() -> Shapes:
    """`model_name=gemma3-4b`: five times six layers in one stack, and four layers besides."""
    names = ("pre_self_attention_norm", "post_self_attention_norm", "pre_ffw_norm", "post_ffw_norm")
    layer = {
        **below("self_attention", _attention(2560, 8, 4, 256) | _norms_of_qk(256)),
        **below("mlp", _mlp(2560, 10240)),
        **{f"{name}/scale": (2560,) for name in names},
    }
    six, four = (
        {path: s for i in range(n) for path, s in below(f"layers_{i}", layer).items()}
        for n in (6, 4)
    )
    layers = scanned("layers", 5, six) | below("layers_remainder", four)
    return _model(2560, 262144, layers, tied=True)


def maxtext_gemma4() -> Shapes:
    """`model_name=gemma4-26b`: blocks of a global layer and of a stack of five local ones."""
    names = ("pre_self_attention_norm", "post_self_attention_norm", "pre_ffw_norm", "post_ffw_norm")
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1")
    norms = (*norms, "post_feedforward_layernorm_2")
    mlp = {
        **below("moe_block/MoeBlock_0", _experts(2816, 704, 128) | {"per_expert_scale": (128,)}),
        **below("moe_block/shared_experts", _mlp(2816, 2112)),
        **{f"{name}/scale": (2816,) for name in norms},
        "pre_forward_scale_2": (2816,),
    }
    others = {
        **below("mlp", mlp),
        **{f"{name}/scale": (2816,) for name in names},
        "layer_scalar": (1,),
    }
    of_global = _attention(2816, 16, 2, 512) | _norms_of_qk(512)
    del of_global["value/kernel"]
    of_local = _attention(2816, 16, 8, 256) | _norms_of_qk(256)
    block = {
        **below("global_layer", others | below("self_attention", of_global)),
        **scanned("local_layers", 5, others | below("self_attention", of_local)),
    }
    return _model(2816, 262144, scanned("scanned_blocks", 5, block), tied=True)


def maxtext_qwen3_next() -> Shapes:
    """`model_name=qwen3-next-80b-a3b`: blocks of three linear attentions and of one with gates."""
    linear = {
        "A_log": (32,),
        "conv1d/kernel": (4, 1, 8192),
        "dt_bias": (32,),
        "in_proj_ba/kernel": (2048, 64),
        "in_proj_qkvz/kernel": (2048, 12288),
        "norm/rms_norm/scale": (128,),
        "out_proj/kernel": (4096, 2048),
    }
    gated = {
        **_attention(2048, 16, 2, 256),
        "query/kernel": (2048, 16, 512),
        "out/kernel": (4096, 2048),
        **_norms_of_qk(256),
    }
    mlp = {
        **below("routed_experts", _experts(2048, 512, 512)),
        **below("shared_expert", _mlp(2048, 512)),
        "shared_expert_gate/kernel": (2048, 1),
    }
    norms = {"input_layernorm/scale": (2048,), "post_attention_layernorm/scale": (2048,)}
    attentions = [below("attention", linear)] * 3 + [below("attention/attention", gated)]
    block = {
        path: shape
        for i, attention in enumerate(attentions)
        for path, shape in below(f"layer_{i}", attention | below("mlp", mlp) | norms).items()
    }
    return _model(2048, 151936, scanned("layers", 12, block))


def tunix_qwen3_moe(layers: int = 2) -> Shapes:
    """`ModelConfig.qwen3_30b_a3b()`, of which two layers."""
    attention = {
        "q_proj/w": (2048, 32, 128),
        "k_proj/w": (2048, 4, 128),
        "v_proj/w": (2048, 4, 128),
        "o_proj/w": (32, 128, 2048),
        "q_norm/w": (128,),
        "k_norm/w": (128,),
    }
    mlp = {
        "router/kernel": (2048, 128),
        "gate_proj": (128, 2048, 768),
        "up_proj": (128, 2048, 768),
        "down_proj": (128, 768, 2048),
    }
    norms = {f"{name}_layernorm/w": (2048,) for name in ("input", "post_attention")}
    layer = below("attn", attention) | below("mlp", mlp) | norms
    return {
        "embedder/input_embedding": (151936, 2048),
        **{p: s for i in range(layers) for p, s in below(f"layers/{i}", layer).items()},
        "final_norm/w": (2048,),
        "lm_head/w": (2048, 151936),
    }


def tunix_gemma4_moe() -> Shapes:
    """`ModelConfig.gemma4_26b_a4b()`, of which a local and a global layer."""
    norms = ("pre_attention", "post_attention", "pre_ffw", "post_ffw", "dense_post_ffw")
    others = {
        **{f"{name}_norm/scale": (2816,) for name in (*norms, "moe_pre_ffw", "moe_post_ffw")},
        "skip_scale": (1,),
        "mlp/gate_proj/kernel": (2816, 2112),
        "mlp/up_proj/kernel": (2816, 2112),
        "mlp/down_proj/kernel": (2112, 2816),
        "moe/gating_einsum": (128, 2, 704, 2816),
        "moe/linear": (128, 704, 2816),
        "moe/per_expert_scale": (128,),
        "moe/router_logits": (2816, 128),
        "moe/router_scale": (2816,),
    }

    def attention(dim: int, keys: Shapes) -> Shapes:
        projections = {"q_einsum/w": (16, 2816, dim), "attn_vec_einsum/w": (16, dim, 2816)}
        norms = {"_query_norm/scale": (dim,), "_key_norm/scale": (dim,)}
        return below("attn", projections | keys | norms)

    return {
        "embedder/input_embedding": (262144, 2816),
        **below("layers/0", others | attention(256, {"kv_einsum/w": (2, 8, 2816, 256)})),
        **below("layers/5", others | attention(512, {"k_einsum/w": (2, 2816, 512)})),
        "final_norm/scale": (2816,),
    }


def levanter_gpt2() -> Shapes:
    """`Gpt2Config(num_layers=3, hidden_dim=64, num_heads=4)`: linear layers with inputs first."""
    layer = {
        **{f"ln_{i}/{name}": (64,) for i in (1, 2) for name in ("weight", "bias")},
        "attn/c_attn/weight": (64, 3, 4, 16),
        "attn/c_attn/bias": (3, 4, 16),
        "attn/c_proj/weight": (4, 16, 64),
        "attn/c_proj/bias": (64,),
        "mlp/c_fc/weight": (64, 256),
        "mlp/c_fc/bias": (256,),
        "mlp/c_proj/weight": (256, 64),
        "mlp/c_proj/bias": (64,),
    }
    return {
        **scanned("transformer/blocks/stacked", 3, layer, axis=0),
        "transformer/ln_f/weight": (64,),
        "transformer/ln_f/bias": (64,),
        "embeddings/token_embeddings/weight": (1000, 64),
        "embeddings/position_embeddings/weight": (1024, 64),
    }


def levanter_mixtral() -> Shapes:
    """`MixtralConfig` of three layers: outputs first, but for the experts."""
    layer = {
        "self_attn/q_proj/weight": (2, 2, 16, 64),
        "self_attn/k_proj/weight": (2, 16, 64),
        "self_attn/v_proj/weight": (2, 16, 64),
        "self_attn/o_proj/weight": (64, 4, 16),
        "block_sparse_moe/gate/weight": (8, 64),
        "block_sparse_moe/experts/w1/weight": (8, 64, 192),
        "block_sparse_moe/experts/w2/weight": (8, 192, 64),
        "block_sparse_moe/experts/w3/weight": (8, 64, 192),
        "input_layernorm/weight": (64,),
        "post_attention_layernorm/weight": (64,),
    }
    return {
        **scanned("transformer/layers/stacked", 3, layer, axis=0),
        "transformer/norm/weight": (64,),
        "embeddings/token_embeddings/weight": (1000, 64),
        "lm_head/weight": (1000, 64),
    }


def grug(layers: int = 2) -> Shapes:
    """Plain arrays (in, out) in modules of Equinox, small."""
    layer = {
        "rms_attn/weight": (64,),
        "attn/w_q": (64, 64),
        "attn/w_k": (64, 32),
        "attn/w_v": (64, 32),
        "attn/w_o": (64, 64),
        "rms_mlp/weight": (64,),
        "mlp/mlp_up": (64, 176),
        "mlp/mlp_down": (176, 64),
    }
    return {
        "token_embed": (1000, 64),
        "output_proj": (64, 1000),
        **{p: s for i in range(layers) for p, s in below(f"blocks/{i}", layer).items()},
        "final_norm/weight": (64,),
    }


def hugging_face_roberta(layers: int = 2) -> Shapes:
    """`FlaxRobertaForSequenceClassification`, of which two layers: a head of two layers."""

    def dense(rows: int, cols: int) -> Shapes:
        return {"kernel": (rows, cols), "bias": (cols,)}

    norm = {"LayerNorm/scale": (768,), "LayerNorm/bias": (768,)}
    names = [f"attention/self/{name}" for name in ("query", "key", "value")]
    layer = {
        **{p: s for name in names for p, s in below(name, dense(768, 768)).items()},
        **below("attention/output", below("dense", dense(768, 768)) | norm),
        **below("intermediate/dense", dense(768, 3072)),
        **below("output", below("dense", dense(3072, 768)) | norm),
    }
    tables = {"word": 50265, "position": 512, "token_type": 2}
    embeddings = {f"{name}_embeddings/embedding": (rows, 768) for name, rows in tables.items()}
    layers_by_path = (below(f"encoder/layer/{i}", layer) for i in range(layers))
    return {
        **below("roberta/embeddings", embeddings | norm),
        **{f"roberta/{p}": s for of_layer in layers_by_path for p, s in of_layer.items()},
        **below("classifier/dense", dense(768, 768)),
        **below("classifier/out_proj", dense(768, 2)),
    }


def flax_seq2seq() -> Shapes:
    """`Seq2seq(hidden_size=8, vocab_size=20)`: the decoder's cell has the output layer."""
    cell = {f"i{gate}/kernel": (20, 8) for gate in "figo"}
    cell |= {f"h{gate}/kernel": (8, 8) for gate in "figo"}
    cell |= {f"h{gate}/bias": (8,) for gate in "figo"}
    head = {"Dense_0/kernel": (8, 20), "Dense_0/bias": (20,)}
    of_decoder = below("DecoderLSTMCell_0", head | below("LSTMCell_0", cell))
    return of_decoder | below("LSTMCell_0", cell)


def flax_sst2() -> Shapes:
    """`TextClassifier` of a bidirectional LSTM, without its cells: attention in the classifier."""
    layers = {
        "keys_only_mlp_attention/keys/kernel": (512, 256),
        "keys_only_mlp_attention/energy/kernel": (256, 1),
        "mlp/intermediate_layer/kernel": (512, 256),
        "mlp/intermediate_layer/bias": (256,),
        "mlp/output_layer/kernel": (256, 1),
    }
    return {"embedder/embedding": (1000, 300), **below("classifier", layers)}


def pytorch_gpt_oss() -> Shapes:
    """A layer of gpt-oss 20B: linear layers have outputs first, and experts have inputs first."""
    heads = {"q": 64 * 64, "k": 8 * 64, "v": 8 * 64}
    projections = {f"self_attn/{name}_proj/weight": (n, 2880) for name, n in heads.items()}
    biases = {f"self_attn/{name}_proj/bias": (n,) for name, n in heads.items()}
    layer = {
        **projections,
        **biases,
        "self_attn/o_proj/weight": (2880, 64 * 64),
        "self_attn/o_proj/bias": (2880,),
        "self_attn/sinks": (64,),
        "mlp/router/weight": (32, 2880),
        "mlp/router/bias": (32,),
        "mlp/experts/gate_up_proj": (32, 2880, 2 * 2880),
        "mlp/experts/gate_up_proj_bias": (32, 2 * 2880),
        "mlp/experts/down_proj": (32, 2880, 2880),
        "mlp/experts/down_proj_bias": (32, 2880),
        "input_layernorm/weight": (2880,),
        "post_attention_layernorm/weight": (2880,),
    }
    return {
        "model/embed_tokens/weight": (201088, 2880),
        **below("model/layers/0", layer),
        "model/norm/weight": (2880,),
        "lm_head/weight": (201088, 2880),
    }
