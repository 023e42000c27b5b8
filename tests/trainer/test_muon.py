"""What Muon can be told: lists of coefficients, blocks of rows, flattened kernels; with torch's and others' Muon."""

import pytest
import torch

import tristep
from tristep import Trainer
from tristep.kernels.rules.muon import COEFFICIENTS

CLOSE = {"rtol": 1e-5, "atol": 1e-3}  # after steps of 0.01 along directions in bfloat16, summed in another order


def parameters(*shapes, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def train(step, params, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        step()


# For each case: our optimizer, its arguments, and the peer's. NorMuon has those of the authors' code and of the paper.
THEIRS = {
    "polar express": (
        "muon",
        {"coefficients": "polar_express", "steps": 10},
        {"ns_coeffs": list(COEFFICIENTS["polar_express"]), "ns_steps": 10},
    ),
    "own list": (
        "muon",
        {"coefficients": [(2.0, -1.5, 0.5), (1.5, -0.5, 0)], "nesterov": False, "momentum": 0.8},
        {"ns_coeffs": [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)], "ns_steps": 2, "nesterov": False, "momentum": 0.8},
    ),
    "as large as adamw's": ("muon", {"match_adamw": True}, {"use_adjusted_lr": True}),
    "on products": ("muon", {"gram": True}, {"ns_method": "gram_newton_schulz", "ns_reset_steps": (2, 4)}),
    "normuon": ("normuon", {}, {"use_adjusted_lr": False}),
    "normuon as in the paper": (
        "normuon",
        {"match_adamw": True, "row_beta": 0.8, "nesterov": False},
        {"update_scale": "match_rms", "beta2": 0.8, "nesterov": False},
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", THEIRS)
def test_like_pytorch_optimizers(name):
    """Kernels of convolutions, too, which both flatten."""
    reference = pytest.importorskip("pytorch_optimizer", reason="a peer")
    own, arguments, their_arguments = THEIRS[name]
    shapes = ((12, 20), (20, 12) if own == "muon" else (16, 16), (8, 3, 2, 2), (12, 20))
    ours, theirs = (parameters(*shapes) for _ in range(2))
    trainer = Trainer(ours, own, {"learning_rate": 0.01, "wd": 0.1, "flatten": True, **arguments})
    peer = {"muon": reference.Muon, "normuon": reference.NorMuon}[own]
    other = peer([{"params": theirs, "use_muon": True}], lr=0.01, weight_decay=0.1, **their_arguments)
    train(lambda: trainer.step(1), ours)
    train(other.step, theirs)
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_torchs_interface_has_the_lists_and_splits():
    """Options of a group that torch's class does not know; a step is that of the Trainer's Muon."""
    ours, theirs = (parameters((6, 5), (4, 6)) for _ in range(2))
    more = {"gram": True, "iteration_dtype": "float16"}
    groups = [{"params": ours[:1], "split": (2, 4), **more}, {"params": ours[1:], "ns_coefficients": "cubic5"}]
    own = tristep.optim.Muon(groups, lr=0.01, weight_decay=0.1, ns_coefficients="deepseekv4", ns_steps=None)
    train(own.step, ours)
    common = {"learning_rate": 0.01, "wd": 0.1}
    first = Trainer(theirs[:1], "muon", {**common, "coefficients": "deepseekv4", "split": {"*": [2, 4]}, **more})
    second = Trainer(theirs[1:], "muon", {**common, "coefficients": "cubic5"})
    train(lambda: (first.step(1), second.step(1)), theirs)
    assert all(map(torch.equal, ours, theirs))
    with pytest.raises(ValueError, match=r"split=4: .* has 6 rows, shape \(6, 5\), which are not that"):
        own.add_param_group({"params": parameters((6, 5)), "split": 4})
    with pytest.raises(ValueError, match="iteration_dtype='float32'.*'bfloat16'"):
        own.add_param_group({"params": parameters((6, 5)), "iteration_dtype": "float32"})
    with pytest.raises(ValueError, match="iteration_dtype='float32'.*'bfloat16'"):
        Trainer(theirs, "muon", {"iteration_dtype": "float32"})
    assert len(own.param_groups) == 2


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(4, 12), torch.nn.Linear(4, 4)


SPLITS = {
    "patterns": {"*qkv*": [4, 4, 2, 2], "value|out.*": 2},
    "function": lambda name, shape: {"qkv.weight": [4, 4, 2, 2], "out.weight": 2}.get(name),
}


@pytest.mark.parametrize("split", SPLITS)
def test_each_block_takes_the_step_that_it_would_take_alone(split):
    """Momentum and decay, too; biases are vectors as before."""
    net = Attention()
    trainer = Trainer(net, "muon", {"learning_rate": 0.1, "wd": 0.1, "split": SPLITS[split]})
    blocks = [*net.qkv.weight.detach().split([4, 4, 2, 2]), *net.out.weight.detach().split(2)]
    alone = [torch.nn.Parameter(block.clone()) for block in blocks]
    other = torch.optim.Muon(alone, lr=0.1, weight_decay=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        gradients = [*net.qkv.weight.grad.split([4, 4, 2, 2]), *net.out.weight.grad.split(2)]
        for param, gradient in zip(alone, gradients, strict=True):
            param.grad = gradient.clone()
        trainer.step(1)
        other.step()
    torch.testing.assert_close(net.qkv.weight, torch.cat(alone[:4]), rtol=0.0, atol=5e-3)
    torch.testing.assert_close(net.out.weight, torch.cat(alone[4:]), rtol=0.0, atol=5e-3)


# By pattern the rows of each part, of 12.
PARTS = {
    "(row part=2) -> part row": [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]],
    "part=3 row -> part row": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    "(head=2 part=3 row) -> part (head row)": [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]],
    "(head=2 part=3 row=2) -> part head row": [[0, 1], [6, 7], [2, 3], [8, 9], [4, 5], [10, 11]],
    "(group gate=2 half=3) -> gate (half group)": [[0, 6, 1, 7, 2, 8], [3, 9, 4, 10, 5, 11]],
    "(row) -> row": [list(range(12))],
}


@pytest.mark.parametrize("pattern", PARTS)
@pytest.mark.parametrize("name", ["muon", "normuon", "dion2", "nordion2"])
def test_each_part_of_a_pattern_takes_the_step_that_it_would_take_alone(name, pattern):
    """Also of a stack of matrices; and a saved training goes on."""
    (whole, stack) = parameters((12, 8), (2, 12, 8))
    arguments = {"learning_rate": 0.01, "wd": 0.1, "match_adamw": True, "nesterov": False}
    make = lambda: Trainer([whole, stack], name, {**arguments, "split": pattern})  # noqa: E731
    trainer = make()
    matrices = lambda one, many: [matrix[rows] for matrix in (one, *many) for rows in PARTS[pattern]]  # noqa: E731
    alone = [torch.nn.Parameter(part.clone()) for part in matrices(whole.detach(), stack.detach())]
    other = Trainer(alone, name, arguments)
    torch.manual_seed(1)
    for step in range(3):
        whole.grad, stack.grad = torch.randn_like(whole), torch.randn_like(stack)
        for param, gradient in zip(alone, matrices(whole.grad, stack.grad), strict=True):
            param.grad = gradient.clone()
        trainer.step(1)
        other.step(1)
        if step == 1:
            saved = trainer.state_dict()
            trainer = make()
            trainer.load_state_dict(saved)
            assert trainer.optimizer.split == pattern
    torch.testing.assert_close(matrices(whole.detach(), stack.detach()), [each.detach() for each in alone], **CLOSE)


def test_patterns_by_name_and_in_torchs_interface():
    net, copied = Attention(), Attention()
    pattern = "(head=2 part=3 row) -> part head row"
    trainer = Trainer(net, [("*weight", "muon", {"learning_rate": 0.1, "split": {"qkv*": pattern}}), ("*", "sgd")])
    groups = [{"params": [copied.qkv.weight], "split": pattern}, {"params": [copied.out.weight]}]
    own = tristep.optim.Muon(groups, lr=0.1, weight_decay=0.0)
    for seed in range(3):
        for each in (net, copied):
            torch.manual_seed(seed)
            for param in (each.qkv.weight, each.out.weight, each.qkv.bias, each.out.bias):
                param.grad = torch.randn_like(param)
        trainer.step(1)
        own.step()
    torch.testing.assert_close(net.qkv.weight, copied.qkv.weight, **CLOSE)
    with pytest.raises(ValueError, match=r"split: the lengths of its axes make 5 rows, but params\[0\] has 12"):
        own.add_param_group({"params": parameters((12, 4)), "split": "(row part=5) -> part row"})


UNFIT = {
    "a pattern of nothing": ({"*qvk*": 3}, r"split\['\*qvk\*'\]: is the first pattern of no matrix. The matrices are 'out"),
    "a vector": (
        {"qkv.bias": 2},
        r"\['qkv.bias'\]: is the first pattern of no matrix. (?!.*qkv.bias)Did you mean 'qkv.weight'",
    ),
    "no divisor": ({"*qkv*": 5}, r"split\['\*qkv\*'\]=5: 'qkv.weight' has 12 rows, shape \(12, 4\), which are not"),
}


@pytest.mark.parametrize("name", ["NorMuon", "Dion2", "NorDion2"])
def test_patterns_of_names_are_refused_where_an_optimizer_has_none(name):
    with pytest.raises(ValueError, match="split={'weight': 2} needs the names of the parameters"):
        getattr(tristep.optim, name)(torch.nn.Linear(4, 4).named_parameters(), split={"weight": 2})


@pytest.mark.parametrize("case", UNFIT)
def test_splits_that_fit_no_parameter_are_refused(case):
    split, message = UNFIT[case]
    with pytest.raises(ValueError, match=message):
        Trainer(Attention(), "muon", {"split": split})


STACKS = {
    "plain": {},
    "on products": {"gram": True, "match_adamw": True},
    "split": {"split": [2, 6]},
    "split by name": {"split": {"experts*": 2}},
    "8 bits": {"state_dtype": "8bit"},
}


@pytest.mark.parametrize("arguments", STACKS)
@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_a_stack_of_matrices_is_as_many_matrices(name, arguments):
    """Weights of experts, [experts, rows, columns]: as the same weights as parameters of their own."""
    rows, columns = (64, 128) if arguments == "8 bits" else (8, 5)  # states of fewer elements are not packed
    (stack,) = parameters((3, rows, columns))
    apart = [torch.nn.Parameter(matrix.detach().clone()) for matrix in stack]
    settings = {"learning_rate": 0.02, "wd": 0.1, **STACKS[arguments]}
    named = [(f"experts.{k}", matrix) for k, matrix in enumerate(apart)]
    together = Trainer([("experts", stack)], name, settings)
    exact = {key: value for key, value in settings.items() if key != "state_dtype"}  # whose rounding goes by place
    separate = Trainer(named, name, exact)
    torch.manual_seed(1)
    for step in range(4):
        stack.grad = torch.randn_like(stack)
        for matrix, gradient in zip(apart, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        together.step(1)
        separate.step(1)
        if step == 1:
            state = together.state_dict()
            together = Trainer([("experts", stack)], name, settings)
            together.load_state_dict(state)
    close = CLOSE | ({"atol": 0.02} if arguments == "8 bits" else {})
    torch.testing.assert_close(stack.detach(), torch.stack(apart).detach(), **close)


def test_other_dimensions_take_adamws_steps():
    """Kernels of 2-D convolutions without `flatten`, and vectors."""
    ours, theirs = (parameters((6, 3, 2, 2), (7,)) for _ in range(2))
    trainer = Trainer(ours, "muon", {"learning_rate": 0.01, "wd": 0.1})
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    train(lambda: trainer.step(1), ours)
    train(adamw.step, theirs)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("face", ["Trainer", "tristep.optim"])
def test_the_ratio_of_adamws_rate_is_to_the_rate_before_warm_up_and_resume(face):
    """Rates are 0.01, 0.02, ..., on the way to 0.1, and AdamW's a tenth; after two steps another optimizer goes on."""
    (ours,), (theirs,) = parameters((7,)), parameters((7,))
    if face == "Trainer":
        schedule = tristep.lr_scheduler.CosineScheduler(100, warmup_steps=10)
        settings = {"learning_rate": 0.1, "lr_scheduler": schedule, "adam_learning_rate": 0.01}
        made = [Trainer([ours], "normuon", settings) for _ in range(2)]
    else:
        made = [tristep.optim.NorMuon([ours], lr=0.1, adam_learning_rate=0.01) for _ in range(2)]
    adamw = torch.optim.AdamW([theirs], weight_decay=0.0)
    for t in range(1, 6):
        ours.grad = theirs.grad = torch.linspace(-1, 1, 7) / t
        adamw.param_groups[0]["lr"] = 0.001 * t
        adamw.step()
        if t == 3:
            made[1].load_state_dict(made[0].state_dict())
        if face == "Trainer":
            made[t >= 3].step(1)
        else:
            made[t >= 3].param_groups[0]["lr"] = 0.01 * t
            made[t >= 3].step()
    torch.testing.assert_close(ours, theirs)
