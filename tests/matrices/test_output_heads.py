"""Output heads under any name are AdamW's or raise; hidden layers beside them are matrices."""

import re

import helpers
import jax
import pytest
from helpers import nested
from model_shapes import shapes

from muon_jax import MuonDimensionNumbers, by_role
from muon_jax._matrices.by_role import routes
from muon_jax._matrices.views import MATRICES
from muon_jax._trees import path_name

CONV = MuonDimensionNumbers((-4, -3, -2), -1)


def mlp(pattern, sizes, start=0):
    """The kernels of a network with these sizes, under numbered names."""
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return {pattern.format(i): size for i, size in enumerate(pairs, start)}


# Trees by the paths of their modules, the layers that are heads, and those that the table knows.
TREES = {
    "Brax policy": (
        mlp("hidden_{}/kernel", (17, 32, 32, 12)),
        "hidden_2/",
        "^$",
    ),
    "Brax value, below a name": (
        mlp("value/hidden_{}/kernel", (17, 256, 256, 256, 3)),
        "hidden_3/",
        "^$",
    ),
    "Brax-like MLP": (mlp("policy/mlp/hidden_{}/kernel", (9, 64, 64, 6)), "hidden_2/", "^$"),
    "arrays by hand": (mlp("w{}", (784, 512, 256, 10), start=1), "w3", "^$"),
    "arrays by hand, in capitals": (mlp("W{}", (784, 512, 10), start=1), "W2", "^$"),
    "W_xh and W_hy": (
        {"rnn/W_xh": (5, 8), "rnn/W_hh": (8, 8), "rnn/W_hy": (8, 5)},
        "W_hy",
        "^$",
    ),
    "mlp_N": (mlp("mlp_{}/kernel", (8, 16, 16, 4)), "mlp_2/", "^$"),
    "fc_in and fc_out": ({"fc_in/kernel": (8, 16), "fc_out/kernel": (16, 4)}, "fc_out/", "^$"),
    "c_fc and c_proj": ({"c_fc/kernel": (8, 16), "c_proj/kernel": (16, 4)}, "c_proj/", "^$"),
    "c_fc alone": ({"c_fc/kernel": (8, 10)}, "c_fc", "^$"),
    "down and up of an autoencoder": (
        {"down/kernel": (784, 32), "up/kernel": (32, 784)},
        "up/",
        "^$",
    ),
    "PureJaxRL": (
        mlp("Dense_{}/kernel", (17, 64, 64, 6)) | mlp("Dense_{}/kernel", (17, 64, 64, 1), start=3),
        "Dense_[25]/",
        "^$",
    ),
    "PureJaxRL, as many actions as observations": (
        mlp("Dense_{}/kernel", (4, 64, 64, 4)) | mlp("Dense_{}/kernel", (4, 64, 64, 1), start=3),
        "Dense_[25]/",
        "^$",
    ),
    "CleanRL Q-network": (
        mlp("q_network/Dense_{}/kernel", (4, 120, 84, 2)),
        "Dense_2/",
        "^$",
    ),
    "CleanRL Atari": (
        {
            "network/Conv_0/kernel": (8, 8, 4, 32),
            "network/Conv_1/kernel": (4, 4, 32, 64),
            "network/Conv_2/kernel": (3, 3, 64, 64),
            "network/Dense_0/kernel": (3136, 512),
            "actor/Dense_0/kernel": (512, 6),
            "critic/Dense_0/kernel": (512, 1),
        },
        "(actor|critic)/",
        "^$",
    ),
    "two critics": (
        mlp("critic1/Dense_{}/kernel", (8, 64, 64, 3)) | mlp("qf2/fc{}/kernel", (8, 64, 64, 3)),
        "Dense_2|fc2",
        "^$",
    ),
    "jaxrl SAC": (
        mlp("MLP_0/Dense_{}/kernel", (17, 256, 256)) | {"Dense_0/kernel": (256, 6)},
        "^Dense_0",
        "^$",
    ),
    "jaxrl critic": (
        mlp("Critic_0/MLP_0/Dense_{}/kernel", (23, 256, 256, 51)),
        "Dense_2",
        "^$",
    ),
    "Haiku MLP": (mlp("mlp/~/linear_{}/w", (8, 64, 64, 10)), "linear_2", "^$"),
    "Haiku MLP below a name": (
        mlp("pi_torso/mlp/~/linear_{}/w", (8, 64, 64, 10)),
        "linear_2",
        "^$",
    ),
    "NeRF": (
        mlp("coarse_mlp/Dense_{}/kernel", (63, 256, 256, 256))
        | {"coarse_mlp/rgb/kernel": (256, 3), "coarse_mlp/sigma/kernel": (256, 1)},
        "rgb|sigma|Dense_2",
        "^$",
    ),
    "Acme": (
        mlp("torso/linear_{}/w", (8, 64, 64))
        | {"policy_head/linear/w": (64, 6), "critic/linear/w": (64, 51)},
        "policy_head|critic",
        "^$",
    ),
    "Stoix": (
        mlp("torso/Dense_{}/kernel", (8, 64, 64)) | {"action_head/Dense_0/kernel": (64, 6)},
        "action_head",
        "^$",
    ),
    "DreamerV3": (
        {
            "dyn/gru/kernel": (16, 24),
            "rew/h0/kernel": (16, 16),
            "rew/out/kernel": (16, 255),
            "policy/out/kernel": (16, 6),
            "dec/image_out/kernel": (16, 48),
        },
        "out/",
        "^$",
    ),
    "DQN": ({"torso/kernel": (8, 64), "q/kernel": (64, 6)}, "^q/", "^$"),
    "distribution of values": ({"fc/kernel": (8, 64), "value/kernel": (64, 51)}, "^value", "^$"),
    "LSTM with an output": (
        {f"rnn/cell/{x}{g}/kernel": (8, 8) for x in "hi" for g in "figo"}
        | {"rnn/out/kernel": (8, 5)},
        "out",
        "^$",
    ),
    "seq2seq": ({"decoder/LSTMCell_0/hi/kernel": (8, 8), "decoder/fc/kernel": (8, 50)}, "fc", "^$"),
    "U-Net": (
        {
            "conv_in/kernel": (3, 3, 4, 64),
            "time_embedding/linear_1/kernel": (64, 256),
            "down_blocks_0/resnets_0/conv1/kernel": (3, 3, 64, 64),
            "conv_out/kernel": (3, 3, 64, 4),
        },
        "conv_out",
        "conv_in|resnets|time",
    ),
    "DiT": (
        {
            "blocks_0/mlp/fc1/kernel": (8, 32),
            "blocks_0/mlp/fc2/kernel": (32, 8),
            "final_layer/linear/kernel": (8, 16),
        },
        "final_layer",
        "mlp",
    ),
    "Flux": (
        {"double_blocks_0/img_mlp/0/kernel": (8, 32), "proj_out/kernel": (8, 16)},
        "proj_out",
        "img_mlp",
    ),
    "StyleGAN": (
        {"synthesis/b4/conv1/kernel": (3, 3, 16, 16), "synthesis/to_rgb/kernel": (1, 1, 16, 3)},
        "to_rgb",
        "^$",
    ),
    "pix2pix": (
        {"enc/Conv_0/kernel": (4, 4, 3, 64), "dec/ConvTranspose_0/kernel": (4, 4, 64, 3)},
        "ConvTranspose",
        "^$",
    ),
    "output_conv": (
        {"Conv_0/kernel": (3, 3, 3, 8), "output_conv/kernel": (3, 3, 8, 3)},
        "output_conv",
        "^$",
    ),
    "VAE decoder": (
        {
            "decoder/Dense_0/kernel": (16, 3136),
            "decoder/ConvTranspose_0/kernel": (3, 3, 64, 32),
            "decoder/ConvTranspose_1/kernel": (3, 3, 32, 3),
        },
        "ConvTranspose_1",
        "^$",
    ),
    "GAN discriminator": (
        {"Conv_0/kernel": (4, 4, 3, 64), "Conv_1/kernel": (4, 4, 64, 1)},
        "Conv_1",
        "^$",
    ),
    "graph network": (
        {
            "MessagePassing_0/Dense_0/kernel": (8, 16),
            "MessagePassing_1/Dense_0/kernel": (16, 16),
            "readout/kernel": (16, 3),
        },
        "readout",
        "^$",
    ),
    "TabNet": (
        {"feature_blocks_0/fc/kernel": (8, 16), "final_mapping/kernel": (16, 3)},
        "final",
        "^$",
    ),
    "layers of one matrix in a list": (
        mlp("layers/{}/linear/kernel", (8, 16, 16, 4)),
        "layers/2",
        "^$",
    ),
    "blocks of one matrix": (mlp("LinearBlock_{}/Dense_0/kernel", (8, 16, 4)), "k_1", "^$"),
    "an ensemble": (
        mlp("critics/0/layers/{}/kernel", (8, 16, 4))
        | mlp("critics/1/layers/{}/kernel", (8, 16, 4)),
        "layers/1",
        "^$",
    ),
    "nnx.Sequential": (mlp("net/layers/{}/kernel", (8, 16, 4)), "layers/1", "^$"),
    "linen list": (mlp("layers_{}/kernel", (8, 16, 4)), "layers_1", "^$"),
    "blocks of one convolution": (
        {
            "ConvBlock_0/Conv_0/kernel": (3, 3, 3, 8),
            "ConvBlock_1/Conv_0/kernel": (3, 3, 8, 3),
        },
        "ConvBlock_1",
        "^$",
    ),
    "twelve arrays": (mlp("w{}", (8,) + (16,) * 11 + (10,), start=1), "w12", "^$"),
    "one module of all": (mlp("MLPBlock_0/Dense_{}/kernel", (8, 16, 4)), "Dense_1", "^$"),
    "an embedding network": (mlp("embedding_net/Dense_{}/kernel", (8, 9, 4)), "Dense_1", "^$"),
    "TD3": (mlp("actor/l{}/kernel", (8, 16, 16, 2), start=1), "l3", "^$"),
    "SIREN": (mlp("SirenLayer_{}/kernel", (2, 64, 64, 3)), "Layer_2", "^$"),
    "GCN": (mlp("GCNLayer_{}/Dense_0/kernel", (8, 16, 7)), "Layer_1", "^$"),
    "ResNet of one block": (
        {"Block_0/Conv_0/kernel": (3, 3, 3, 8), "Dense_0/kernel": (8, 10)},
        "Dense_0",
        "^$",
    ),
    "lin and dense": (mlp("lin{}/kernel", (8, 16, 16, 4)), "lin2", "^$"),
    "projection": ({"encoder/kernel": (8, 16), "projection/kernel": (16, 4)}, "projection", "^$"),
    "a whole network below `embedder`": (
        mlp("embedder/fc{}/kernel", (8, 64, 64, 128), start=1),
        "fc3",
        "^$",
    ),
    "a whole network below `ffn`": (mlp("ffn/dense{}/kernel", (8, 64, 10)), "dense1", "^$"),
    "a whole network below `transform`": (
        {
            "transform/blocks_0/up/kernel": (64, 256),
            "transform/blocks_0/down/kernel": (256, 64),
            "transform/dense/kernel": (64, 100),
        },
        "dense",
        "blocks_0",
    ),
    "a last stage with an output": (
        {
            "stage_1/block_0/up/kernel": (64, 256),
            "stage_1/block_0/down/kernel": (256, 64),
            "stage_2/out/kernel": (64, 10),
        },
        "stage_2",
        "block_0",
    ),
    "a last layer with an output": (
        {
            "layers_0/attn/q/kernel": (64, 64),
            "layers_0/attn/out/kernel": (64, 64),
            "layers_1/output/kernel": (64, 10),
        },
        "layers_1",
        "attn",
    ),
    "mixture density": ({"hidden/kernel": (1, 20), "z_mu/kernel": (20, 5)}, "z_mu", "^$"),
}


@pytest.mark.parametrize(("flat", "heads", "hidden"), TREES.values(), ids=TREES)
def test_heads_have_no_view_and_hidden_layers_do(flat, heads, hidden):
    found = dict(zip(flat, routes([*flat.items()], {}), strict=True))
    of_heads = [path for path in flat if re.search(heads, path)]
    assert of_heads
    for path in of_heads:
        assert found[path].view is None or found[path].role == "unknown", path
    for path in flat:
        if re.search(hidden, path):
            assert found[path].view in (MATRICES, CONV), path


@pytest.mark.parametrize("name", TREES)
def test_the_rules_to_paste_leave_heads_to_adamw(name):
    flat, heads, _ = TREES[name]
    tree = shapes(nested(flat))
    try:
        views = by_role(tree)
    except ValueError as error:
        views = helpers.pasted(str(error))(tree)
    leaves = jax.tree.leaves_with_path(views, is_leaf=lambda x: x in (None, MATRICES, CONV))
    assert all(view is None for path, view in leaves if re.search(heads, path_name(path)))
