"""Learning rates by layer: timm's numbers, layers read from modules, and training as torch.optim does with the groups."""

import copy
import doctest
import re
from importlib import import_module

import pytest
import torch
from torch import nn

import tristep
from tristep.trainer.step import depths


def _module_of(names, matcher=None):
    """Return a module with parameters of these names; those that end in "weight" are matrices."""
    net = nn.Module()
    for name in names:
        *path, last = name.split(".")
        owner = net
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, nn.Parameter(torch.ones(2, 2) if last == "weight" else torch.ones(2)))
    if matcher is not None:
        net.group_matcher = lambda coarse: matcher
    return net


def _factors(groups, key="lr_mult"):
    return {name: group[key] for group in groups for name, _ in group["params"]}


# The names and `group_matcher` of three models of timm, and the layers that timm 1.0.31 gives them.
VIT = (
    {
        "stem": r"^cls_token|reg_token|pos_embed|patch_embed|norm_pre",
        "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
    },
    {"cls_token": 0, "pos_embed": 0, "patch_embed.proj.weight": 0}
    | {f"blocks.{i}.{name}": i + 1 for i in range(11) for name in ("norm1.bias", "attn.qkv.weight", "mlp.fc1.weight")}
    | {"norm.bias": 11, "head.weight": 12, "head.bias": 12},
)
CONVNEXT = (
    {
        "stem": r"^stem",
        "blocks": [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm_pre", (99999,)),
        ],
    },
    {"stem.0.weight": 0, "stages.0.blocks.0.gamma": 1, "stages.0.blocks.1.mlp.fc1.weight": 2}
    | {"stages.1.downsample.1.weight": 3, "stages.1.blocks.0.gamma": 3, "stages.1.blocks.1.gamma": 4, "norm_pre.bias": 4}
    | {"head.norm.bias": 5, "head.fc.weight": 5},
)
RESNET = (
    {"stem": r"^conv1|bn1|maxpool", "blocks": r"^layer(\d+)\.(\d+)"},
    {"conv1.weight": 0, "bn1.bias": 0, "layer1.0.bn1.bias": 1, "layer1.1.conv1.weight": 2, "layer2.0.downsample.0.weight": 3}
    | {"layer2.0.conv1.weight": 3, "layer2.1.conv2.weight": 4, "fc.bias": 5},
)


@pytest.mark.parametrize(("matcher", "layers"), [VIT, CONVNEXT, RESNET], ids=["vit", "convnext", "resnet"])
def test_a_group_matcher_gives_the_factors_of_timms_formula(matcher, layers):
    groups = tristep.layer_groups(_module_of(layers, matcher), 0.75)
    assert groups.depths == layers
    assert _factors(groups) == {name: 0.75 ** (max(layers.values()) - layer) for name, layer in layers.items()}
    assert _factors(groups, "wd_mult") == {name: float(name.endswith("weight")) for name in layers}


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "vit_tiny_patch16_224", "resnet18"])
def test_groups_are_those_of_timm(name):
    timm = pytest.importorskip("timm")
    net = timm.create_model(name)
    expected = import_module("timm.optim").param_groups_layer_decay(net, weight_decay=0.1, layer_decay=0.65)
    groups = tristep.layer_groups(net, 0.65, lr=0.5, weight_decay=0.1)
    of = {id(param): (0.5 * group["lr_scale"], group["weight_decay"]) for group in expected for param in group["params"]}
    assert {id(param): (group["lr"], group["weight_decay"]) for group in groups for _, param in group["params"]} == of


class _Block(nn.Module):
    def __init__(self, width, more=()):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 2), nn.GELU(), nn.Linear(2, width))
        self.more = nn.ModuleList(more)


def _net(**modules):
    net = nn.Module()
    for name, module in modules.items():
        net.register_parameter(name, module) if isinstance(module, nn.Parameter) else net.add_module(name, module)
    return net


def _stage(width, n):
    return _net(downsample=nn.Linear(width, width), blocks=nn.Sequential(*(_Block(width) for _ in range(n))))


def _transformer():
    blocks = nn.ModuleList(_Block(4) for _ in range(3))
    return _net(
        embed=nn.Linear(2, 4), blocks=blocks, positions=nn.Embedding(3, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 2)
    )


AUTOMATIC = {
    "transformer": (_transformer, "embed 0 positions 0 blocks.0 1 blocks.1 2 blocks.2 3 norm 4 head 4"),
    "stages": (
        lambda: _net(
            stem=nn.Linear(2, 3), stages=nn.Sequential(_stage(3, 2), _stage(4, 1), _stage(5, 2)), head=nn.Linear(5, 2)
        ),
        "stem 0 stages.0.downsample 0 stages.0.blocks.0 1 stages.0.blocks.1 2 stages.1.downsample 3 stages.1.blocks.0 3 "
        "stages.2.downsample 3 stages.2.blocks.0 3 stages.2.blocks.1 4 head 5",
    ),
    "heads or experts inside of blocks": (
        lambda: nn.Sequential(*(_Block(4, [_Block(2), _Block(2)]) for _ in range(2)), nn.Linear(4, 2)),
        "0 0 1 1 2 2",
    ),
    "lists of unequal blocks": (
        lambda: _net(
            stem=nn.Conv2d(3, 4, 3),
            layer1=nn.Sequential(_Block(4), _Block(4)),
            layer2=nn.Sequential(_Block(4, [nn.Linear(4, 6)]), _Block(6)),
            fc=nn.Linear(6, 2),
        ),
        "stem 0 layer1.0 1 layer1.1 2 layer2.0 3 layer2.1 4 fc 5",
    ),
    "encoder and decoder": (
        lambda: nn.Transformer(4, 2, 2, 2, 8, batch_first=True),
        "encoder.layers.0 0 encoder.layers.1 1 encoder.norm 2 decoder.layers.0 2 decoder.layers.1 3 decoder.norm 4",
    ),
    "no blocks but layers": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)),
        "0 0 2 1 4 2",
    ),
}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_layers_are_read_from_lists_of_blocks(name):
    make, text = AUTOMATIC[name]
    words = text.split()
    expected = list(zip(words[::2], map(int, words[1::2]), strict=True))
    groups = tristep.layer_groups(make(), 0.5)
    layers = {
        parameter: next(layer for prefix, layer in expected if parameter.startswith(prefix + "."))
        for parameter in groups.depths
    }
    assert groups.depths == layers
    assert sorted(_factors(groups)) == sorted(layers)


@pytest.mark.parametrize(
    "depth",
    [
        lambda name: 0 if name[:3] in ("emb", "pos") else 1 if name.startswith("blocks") else 4,
        ["embed.*|positions.*", re.compile(r"^blocks\.")],
    ],
    ids=["function", "patterns"],
)
def test_depth_by_a_function_or_patterns(depth):
    groups = tristep.layer_groups(_transformer(), 0.5, depth=depth, no_decay=None)
    last = max(groups.depths.values())
    assert last == (4 if callable(depth) else 2)  # a function's numbers may have gaps
    factors = _factors(groups)
    assert factors["positions.weight"] == 0.5**last
    assert factors["blocks.2.norm.bias"] == 0.5 ** (last - 1)
    assert factors["head.bias"] == 1
    assert set(_factors(groups, "wd_mult").values()) == {1.0}


def test_the_table_stays_when_an_optimizer_takes_the_groups():
    groups = tristep.layer_groups(_transformer(), 0.5, lr=1.0)
    before = str(groups)
    torch.optim.AdamW(groups)
    assert str(groups) == before
    assert groups.table()[1] == ("0", "0.0625", "3", "24", "1", "embed.weight and 2 more")
    assert len(groups.table()) == 6


@pytest.mark.parametrize(
    ("name", "options"), [("adam", {"decoupled_wd": True, "epsilon": 1e-16}), ("sgd", {"momentum": 0.9})]
)
def test_multipliers_train_as_torch_does_with_the_groups(name, options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    other = copy.deepcopy(net)
    trainer = tristep.Trainer(tristep.layer_groups(net, 0.6), name, {"learning_rate": 0.02, "wd": 0.1, **options})
    groups = tristep.layer_groups(other, 0.6, lr=0.02, weight_decay=0.1)
    torchs = torch.optim.AdamW(groups, eps=1e-16) if name == "adam" else torch.optim.SGD(groups, momentum=0.9)
    for _ in range(4):
        x, y = torch.randn(9, 4).double(), torch.randint(3, (9,))
        for each in (net, other):
            each.zero_grad()
            nn.functional.cross_entropy(each(x), y).backward()
        trainer.step(1)
        torchs.step()
    names = trainer.optimizer.param_names.values()
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    for each, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("net", "options", "error", "message"),
    [
        (nn.Parameter(torch.ones(2)), {}, TypeError, "net must be a torch.nn.Module, got Parameter"),
        (
            nn.Linear(2, 2),
            {},
            ValueError,
            "net: this Linear has no ModuleList or Sequential of repeated blocks .* give depth",
        ),
        (nn.ReLU(), {}, ValueError, "net: this ReLU has no parameters"),
        (nn.LazyLinear(2), {}, ValueError, "net: 'weight', 'bias' are not initialized yet"),
        (_transformer(), {"decay": 0}, ValueError, "decay=0: must be"),
        (_transformer(), {"decay": 1.1}, ValueError, "decay=1.1: must be"),
        (_transformer(), {"depth": "embed"}, TypeError, "depth='embed': must be a function"),
        (_transformer(), {"depth": ["embed*", "x*"]}, ValueError, "depth: pattern 'x[*]' gets no parameter.*more$"),
        (_transformer(), {"depth": lambda name: -1}, ValueError, r"depth\('embed.weight'\)=-1: must be 0 or more"),
        (_transformer(), {"no_decay": "ndim<x"}, ValueError, "no_decay: pattern='ndim<x'"),
        (_transformer(), {"weight_decay": 0.1}, ValueError, "weight_decay=0.1: is for groups with lr"),
        (_transformer(), {"lr": -1}, ValueError, "lr=-1: must be"),
        (_module_of(["a"], [r"^a"]), {}, TypeError, r"group_matcher\(coarse=False\) is \['\^a'\]"),
    ],
)
def test_mistakes_are_named(net, options, error, message):
    with pytest.raises(error, match=message):
        tristep.layer_groups(net, **options)


def test_groups_for_another_kind_of_optimizer_are_refused():
    with pytest.raises(TypeError, match="TrainerGroup"):
        torch.optim.AdamW(tristep.layer_groups(_transformer()))
    with pytest.raises(ValueError, match=r"params\[0\] has the key 'lr'"):
        tristep.Trainer(tristep.layer_groups(_transformer(), lr=0.1), "sgd")


def test_docstring_examples():
    failed, attempted = doctest.testmod(depths)
    assert attempted == 9
    assert failed == 0
