"""QKClip: logits against NumPy and the modules' own, and weights after a step."""

import doctest
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tristep
from tristep import optim, optimizer
from tristep.contrib.qk_clip import HeadRows, QKClip
from tristep.contrib.qk_clip import clip as module
from tristep.contrib.qk_clip.heads import largest_logits

SIZE, HEADS, N = 16, 4, 6


class Own(nn.Module):
    """A user's attention with one matrix for queries, keys and values; keys of fewer heads if `keys` is less than HEADS."""

    def __init__(self, keys=HEADS, bias=True):
        super().__init__()
        self.keys, each = keys, SIZE // HEADS
        self.qkv = nn.Linear(SIZE, SIZE + 2 * keys * each, bias=bias)
        self.rows = [HeadRows("qkv.weight", rows=(0, SIZE)), HeadRows("qkv.weight", rows=(SIZE, SIZE + keys * each))]

    def heads(self, x):
        each = SIZE // HEADS
        parts = self.qkv(x).split([SIZE, self.keys * each, self.keys * each], dim=-1)
        return [part.unflatten(-1, (-1, each)).transpose(1, 2) for part in parts]

    def forward(self, x):
        out = scaled_dot_product_attention(*self.heads(x), is_causal=True, enable_gqa=self.keys != HEADS)
        return out.transpose(1, 2).flatten(-2)


def by_numpy(query, key, scale, allowed):
    """The largest logit of each head, in float64."""
    logits = np.einsum("bhqd,bhkd->bhqk", query, key) * scale
    return np.where(allowed, logits, -np.inf).max(axis=(0, 2, 3))


def scaled_up(net, factor=6.0):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(factor)
    return net


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "least", "-1e4", "-1e4 in bfloat16"])
@pytest.mark.parametrize("keys", [4, 2])
def test_largest_logits_like_numpy(keys, mask):
    torch.manual_seed(0)
    query, key = torch.randn(3, 4, 5, 8), torch.randn(3, keys, 7, 8)
    allowed = {"none": torch.ones(5, 7) > 0, "causal": torch.ones(5, 7).tril() > 0}.get(mask, torch.rand(3, 1, 5, 7) > 0.4)
    least = {"float": -math.inf, "least": torch.finfo(torch.float32).min}.get(mask, -1e4)
    given = {"bool": allowed, "none": None, "causal": None}.get(mask, torch.where(allowed, 0.5, least))
    if mask.endswith("bfloat16"):
        given = given.bfloat16()
    found = largest_logits(query, key, 0.3, given, mask == "causal")
    repeated = key.double().numpy().repeat(4 // keys, axis=1)
    np.testing.assert_allclose(found, by_numpy(query.double().numpy(), repeated, 0.3, allowed.numpy()), rtol=1e-5)


MULTIHEAD = {
    "plain": {},
    "batch first": {"batch_first": True},
    "other sizes": {"kdim": 5, "vdim": 5},
    "no bias": {"bias": False},
    "more keys": {"add_bias_kv": True},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("case", MULTIHEAD)
def test_multihead_attention_is_clipped_to_tau(case, need_weights):
    """Its own attention weights after clipping are those of the clipped logits, of which the largest of a head is tau."""
    torch.manual_seed(0)
    net = scaled_up(nn.MultiheadAttention(SIZE, HEADS, **MULTIHEAD[case]), 3.0)
    query, key = torch.randn(5, 3, SIZE), torch.randn(7, 3, MULTIHEAD[case].get("kdim", SIZE))
    if MULTIHEAD[case].get("batch_first"):
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    mask, padding = torch.rand(5, 7) > 0.7, torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    masks = {"attn_mask": mask, "key_padding_mask": padding}
    if need_weights:
        masks = {name: torch.where(each, -1e4, 0.0) for name, each in masks.items()}
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    clip = QKClip(net, tau=1.0)
    net(query, key, key, need_weights=need_weights, **masks)
    largest = clip.step()[""]
    assert (largest > 1.0).any()
    _, weights = net(query, key, key, average_attn_weights=False, **masks)
    torch.testing.assert_close(clip.step()[""], largest.clamp(max=1.0), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(weights).all()
    changed = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert "out_proj.weight" not in changed


def test_multihead_logits_are_those_of_its_weights():
    """log(weight) differs from the logit by a number for each row, so differences of logits are those of logarithms."""
    torch.manual_seed(0)
    net = nn.MultiheadAttention(SIZE, HEADS, batch_first=True).double()
    x = torch.randn(1, 2, SIZE, dtype=torch.float64)
    clip = QKClip(net, tau=100)
    _, weights = net(x, x, x, average_attn_weights=False)
    largest = clip.step()[""]
    q, k, _ = (
        part.unflatten(-1, (HEADS, -1))[0]
        for part in nn.functional.linear(x, net.in_proj_weight, net.in_proj_bias).chunk(3, -1)
    )
    logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(SIZE // HEADS)
    torch.testing.assert_close(logits.softmax(-1), weights[0])
    torch.testing.assert_close(largest.double(), logits.flatten(1).amax(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_users_module_is_clipped_head_by_head(bias):
    torch.manual_seed(0)
    net = scaled_up(nn.Sequential(Own(bias=bias)), 3.0)
    x = torch.randn(2, N, SIZE)
    weight = net[0].qkv.weight.detach().clone()
    clip = QKClip(net, tau=4.0, modules={"0": net[0].rows})
    net(x)
    largest = clip.step()["0"]
    assert int((largest > 4.0).sum()) > 0
    factors = (4.0 / largest).clamp(max=1.0).sqrt().repeat_interleave(SIZE // HEADS)
    expected = weight * torch.cat([factors, factors, torch.ones(SIZE)])[:, None]
    torch.testing.assert_close(net[0].qkv.weight.detach(), expected)
    net(x)
    torch.testing.assert_close(clip.step()["0"], largest.clamp(max=4.0), rtol=1e-5, atol=1e-5)


def test_heads_below_tau_keep_their_bits_and_largest_is_of_all_passes():
    torch.manual_seed(0)
    net = Own()
    before = net.qkv.weight.detach().clone()
    clip = QKClip(net, tau=100, modules={"": net.rows})
    x = torch.randn(2, N, SIZE)
    net(3.0 * x)
    net(x)
    net.eval()
    net(100.0 * x)  # an evaluation does not count
    net.train()
    largest = clip.step()[""]
    assert torch.equal(net.qkv.weight, before)
    query, key, _ = (part.detach().double().numpy() for part in net.heads(3.0 * x))
    np.testing.assert_allclose(largest, by_numpy(query, key, 0.5, np.tril(np.ones((N, N))) > 0), rtol=1e-5)


def test_shared_keys_are_left_to_the_queries():
    torch.manual_seed(0)
    net = scaled_up(Own(keys=2), 4.0)
    x = torch.randn(2, N, SIZE)
    clip = QKClip(net, tau=2.0, modules={"": [HeadRows("qkv.weight", rows=(SIZE, SIZE + 6))]})
    with pytest.raises(ValueError, match="Keys that several heads share"):
        net(x)
    clip.remove()
    clip = QKClip(net, tau=2.0, modules={"": [net.rows[0]._replace(power=1.0)]})
    net(x)
    largest = clip.step()[""]
    net(x)
    torch.testing.assert_close(clip.step()[""], largest.clamp(max=2.0), rtol=1e-5, atol=1e-5)


MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 2}
HUGGING_FACE = {
    "llama": ("Llama", {}),
    "grouped": ("Llama", {"num_key_value_heads": 2}),
    "mla": ("DeepseekV3", {"q_lora_rank": 8, **MLA}),
    "mla, whole queries": ("DeepseekV3", {"q_lora_rank": None, **MLA}),
}


@pytest.fixture
def hugging_face(monkeypatch):
    """A function that makes a model of Hugging Face's.

    The library is imported without the folder of the project in `sys.path`, where it would take `kernels` for a package of
    that name.
    """
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != root])
    module = pytest.importorskip("transformers", reason="not installed")

    def make(name, layers, attention="sdpa", **others):
        sizes = {"vocab_size": 32, "hidden_size": SIZE, "intermediate_size": 16, "max_position_embeddings": 32}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": layers}
        config = getattr(module, f"{name}Config")(**sizes | heads | others, attn_implementation=attention)
        torch.manual_seed(0)
        return getattr(module, f"{name}Model")(config).train()

    return make


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_hugging_faces_attention_is_clipped_to_tau(case, hugging_face):
    name, arguments = HUGGING_FACE[case]
    net = hugging_face(name, 2, **arguments)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if any(each in name for each in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")):
                parameter.mul_(40.0)
    clip, tokens = QKClip(net, tau=3.0), torch.randint(0, 32, (2, N))
    net(input_ids=tokens)
    largest = clip.step()
    assert sorted(largest) == ["layers.0.self_attn", "layers.1.self_attn"]
    first = largest["layers.0.self_attn"]  # later layers get other inputs after clipping
    assert (first > 3.0).any()
    net(input_ids=tokens)
    torch.testing.assert_close(clip.step()["layers.0.self_attn"], first.clamp(max=3.0), rtol=1e-4, atol=1e-4)


def test_attention_that_is_not_seen_is_an_error(hugging_face):
    net = hugging_face("Llama", 1, "eager")
    clip = QKClip(net)
    net(input_ids=torch.zeros(1, 3, dtype=torch.long))
    seen = "no attention has been seen in 'layers.0.self_attn'.*attn_implementation=\"sdpa\""
    with pytest.raises(RuntimeError, match=seen):
        clip.step()


def _multi(entry):
    return lambda net: optim.MultiOptimizer(net, [("*v.weight", *entry), ("*", "lion")], lr=0.0, **MASTERS)


MASTERS = {"multi_precision": True}
OPTIMIZERS = {
    "trainer": lambda net: tristep.Trainer(net, "sgd", {"learning_rate": 0.0, **MASTERS}),
    "trainer of several": lambda net: tristep.Trainer(
        net, [("*v.weight", "muon"), ("*", "ftml", {"learning_rate": 1e-9})], {"learning_rate": 0.0, **MASTERS}
    ),
    "optim": lambda net: optim.Lion(net.parameters(), lr=0.0, **MASTERS),
    "several": _multi(["normuon"]),
    "several, one of torch": lambda net: optim.MultiOptimizer(
        net, [("*v.weight", "lion", MASTERS), ("*", torch.optim.SGD)], lr=0.0
    ),
    "SAM": lambda net: optim.SAM(net.parameters(), "lion", lr=0.0, rho=1e-9, **MASTERS),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_masters_are_scaled_too(case):
    """A bfloat16 weight is the rounded master, so a weight scaled alone would come back at the next step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZE, SIZE), scaled_up(Own(bias=False), 4.0)).bfloat16()
    optimizer, x = OPTIMIZERS[case](net), torch.randn(2, N, SIZE, dtype=torch.bfloat16)
    clip = QKClip(net[1], tau=1.0, modules={"": net[1].rows}, trainer=optimizer)  # names are not those of the trainer
    for k in range(3):
        optimizer.zero_grad()
        net(x).sum().backward()
        if case == "SAM":
            optimizer.ascend()
        optimizer.step(*[1] * case.startswith("trainer"))
        largest = clip.step()[""]
        assert largest.max() > 1.5 if k == 0 else largest.max() < 1.0 * 1.02


CLASSES = {name: each for name, each in optimizer.registered().items() if each.__module__.startswith(optimizer.__name__)}


def refusal(net, made):
    try:
        QKClip(net, modules={"": net.rows}, trainer=made).remove()
    except ValueError as error:
        return str(error)
    return None


def test_an_optimizer_that_would_undo_a_clip_is_refused():
    """After a weight was set, steps at a rate of almost 0 leave it there, unless the optimizer is one of the refused."""
    undone = set()
    for name, options in [*((name, {}) for name in sorted(CLASSES)), ("adamw", {"lookahead": 2})]:
        torch.manual_seed(0)
        net = scaled_up(Own(bias=False), 3.0)
        trainer = tristep.Trainer(net, name, {"learning_rate": 1e-6, **options}, engine="eager")
        refused = refusal(net, trainer)
        assert refused == refusal(net, optim.as_torch(CLASSES[name])(net.parameters(), lr=1e-6, **options))
        weight, put, x = net.qkv.weight.detach(), None, torch.randn(2, N, SIZE)
        for _ in range(4):
            trainer.zero_grad()
            net(x).square().mean().backward()
            trainer.step(1)
            put = weight.mul_(0.5).clone() if put is None else put
        moved = float((weight - put).norm() / put.norm())
        assert (refused is not None) == (moved > 0.2), (name, options, moved)
        if refused:
            assert "would undo a clip" in refused
            assert ("lookahead=2 of 'qkv.weight'" in refused) == bool(options)
            undone |= set() if options else {name}
    assert undone == {"ftml", "ftrl", "schedulefreeadamw", "schedulefreesgd"}


class Between(Own):
    """Attention with something between projections and logits."""

    def __init__(self, queries, keys):
        super().__init__()
        self.between, self.dropout = (queries, keys), nn.Dropout(0.1)

    def heads(self, x):
        parts = super().heads(self.dropout(x))
        return [each(part) for each, part in zip((*self.between, nn.Identity()), parts, strict=True)]


NORM = nn.LayerNorm(SIZE // HEADS)


@pytest.mark.parametrize(
    ("queries", "keys"), [(NORM, NORM), (NORM, nn.Identity()), (nn.Identity(), torch.nn.functional.normalize)]
)
def test_logits_that_do_not_follow_the_weights_are_refused(queries, keys):
    torch.manual_seed(0)
    net = Between(queries, keys)
    before = net.qkv.weight.detach().clone()
    QKClip(net, tau=0.1, modules={"": net.rows})
    for _ in range(2):
        with pytest.raises(ValueError, match="do not grow with 'qkv.bias', 'qkv.weight', .* is there a norm between"):
            net(torch.randn(2, N, SIZE))
    assert torch.equal(net.qkv.weight, before)


def test_to_check_the_logits_changes_nothing():
    """Outputs, gradients and random numbers are those without QKClip, in mixed precision, too."""

    def train(watched):
        torch.manual_seed(0)
        net = nn.Sequential(Between(nn.Identity(), nn.ReLU()))
        if watched:
            QKClip(net, modules={"0": net[0].rows})
        with torch.autocast("cpu", torch.bfloat16):
            out = net(torch.randn(2, N, SIZE))
        out.float().square().mean().backward()
        return [out, *(parameter.grad for parameter in net.parameters()), torch.rand(3)]

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_frozen_weights_are_left_alone():
    torch.manual_seed(0)
    net = scaled_up(nn.MultiheadAttention(SIZE, HEADS, kdim=SIZE - 1, vdim=SIZE - 1, bias=False), 3.0)
    x, keys = torch.randn(N, 2, SIZE), torch.randn(N, 2, SIZE - 1)
    clip, before = QKClip(net, tau=0.1), net.q_proj_weight.detach().clone()
    net.q_proj_weight.requires_grad_(False)
    net(x, keys, keys)
    with pytest.raises(ValueError, match="'q_proj_weight' of '', or its bias, is frozen"):
        clip.step()
    with pytest.raises(ValueError, match="is frozen"):
        QKClip(net)
    net.k_proj_weight.requires_grad_(False)
    assert clip.step()[""].max() > 0.1
    assert torch.equal(net.q_proj_weight, before)


def test_non_finite_logits_leave_a_head_alone():
    net = Own()
    before = net.qkv.weight.detach().clone()
    clip = QKClip(net, tau=1.0, modules={"": net.rows})
    net(torch.full((1, N, SIZE), math.inf))
    assert not torch.isfinite(clip.step()[""]).any()
    assert torch.equal(net.qkv.weight, before)


def _on_ranks():
    torch.manual_seed(0)
    net = scaled_up(Own(), 3.0)
    clip, rank, results = QKClip(net, tau=2.0, modules={"": net.rows}), torch.distributed.get_rank(), []
    for seeing in ((0,), (0, 1), (1,)):
        torch.manual_seed(rank)
        if rank in seeing:
            net(torch.randn(2, N, SIZE))
        results += [clip.step()[""].tolist(), net.qkv.weight.detach().numpy().tobytes()]
    try:
        clip.step()
    except RuntimeError as error:
        results.append(str(error))
    return results


@pytest.mark.sample(0)
def test_ranks_agree_also_where_one_has_seen_no_attention(processes):
    mine, other = processes(2).run(_on_ranks)
    assert mine == other
    assert max(mine[0]) > 2.0
    assert "no attention has been seen in ''" in mine[-1]


@pytest.mark.parametrize("name", ["q_norm", "k_layernorm", "query_layernorm", "qk_norm"])
def test_normalized_queries_are_refused(name):
    net = nn.Module()
    net.q_proj, net.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    net.add_module(name, nn.LayerNorm(4))
    with pytest.raises(ValueError, match="normalizes queries or keys"):
        QKClip(net)


def test_a_trainer_of_something_else_is_refused():
    net = nn.MultiheadAttention(SIZE, HEADS)
    with pytest.raises(TypeError, match="trainer is a SGD: must be a Trainer"):
        QKClip(net, trainer=torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has none of the weights that are scaled"):
        QKClip(net, trainer=tristep.Trainer(nn.Linear(1, 1), "sgd"))
    with pytest.raises(ValueError, match="float64 weights, which would be rounded"):
        QKClip(net, trainer=tristep.Trainer(net.double(), "sgd"))


def test_the_docstrings_example():
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
