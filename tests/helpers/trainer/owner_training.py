"""Training with rules of whole tensors on DTensors, and on one process, for tests."""

import torch
import torch.distributed as dist
from dtensors import sent_by, whole_tensors

import tristep
from tristep.kernels import tensor_rule


@tensor_rule(shapes=lambda shape: {"longest": ()})
def pulled(w, g, state, hyper):
    """Steps of at most lr, in proportion to the longest gradient, and back to where the weight has been at first."""
    start, longest = state
    (lr,) = hyper
    longest = torch.maximum(longest, g.norm())
    return w - lr * (g / longest + w - start), (start, longest)


class Pulled(tristep.optimizer.RuleOptimizer):
    rule = pulled

    def init_state(self, weight, state):
        state[0].copy_(weight)


# Of no two alike is there a stack, so that arithmetic is the same with some of them as with all. Rows and columns that no
# number of ranks divides, and fewer rows than ranks.
MATRICES = [(7, 4), (1, 3), (5, 9), (12, 2), (3, 3), (6, 8)]
LARGE = [(70, 60), (64, 65), (61, 70)]  # enough elements for their states to be packed
OTHERS = [(5,), (2, 3, 2), (1,), (4, 3, 1, 2)]
RULES = {
    "muon of torch": (lambda groups: tristep.optim.Muon(groups, lr=0.02, weight_decay=0.1), MATRICES),
    "muon": (lambda groups: AnyMuon(groups, lr=0.02, weight_decay=0.1), MATRICES + OTHERS),
    "normuon": (lambda groups: tristep.optim.NorMuon(groups, lr=0.02, weight_decay=0.1), MATRICES + OTHERS),
    "parts": (
        lambda groups: AnyMuon(groups, lr=0.02, split="(row part=2) -> part row"),  # rows in turn, which shards cut
        [(8, 4), (6, 9), (12, 2), (2, 3), (6, 8)],
    ),
    "masters": (lambda groups: AnyMuon(groups, lr=0.02, flatten=True, multi_precision=True), MATRICES + OTHERS),
    "dion2": (lambda groups: tristep.optim.Dion2(groups, lr=0.02, weight_decay=0.1, fraction=0.4), MATRICES + OTHERS),
    "nordion2": (lambda groups: tristep.optim.NorDion2(groups, lr=0.02, weight_decay=0.1, fraction=0.4), MATRICES + OTHERS),
    "soap": (lambda groups: tristep.optim.SOAP(groups, lr=0.02, precondition_frequency=2), MATRICES + OTHERS),
    "pulled": (lambda groups: tristep.optim.as_torch(Pulled)(groups, lr=0.02), MATRICES + OTHERS),
    "adafactor": (lambda groups: tristep.optim.Adafactor(groups, lr=0.02, weight_decay=0.1), MATRICES + OTHERS),
    "came": (lambda groups: tristep.optim.CAME(groups, lr=0.02, clip_threshold=0.5), MATRICES + OTHERS),
}
AnyMuon = tristep.optim.as_torch(tristep.optimizer.Muon)  # of which vectors take AdamW's steps


def make_mesh(shape=(-1,)):
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size(),) if shape == (-1,) else shape
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])


def placed(whole, mesh, dim=0):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(whole.clone(), mesh, [Replicate()] * (mesh.ndim - 1) + [placement])


def _dims(shapes):
    """Cut by rows and by columns in turn, and one that every rank has."""
    return [None if k == 3 else (k % 2 if len(shape) > 1 else 0) for k, shape in enumerate(shapes)]


class Pair:
    """The same parameters as DTensors and as a single process has them, in two groups, each with an optimizer."""

    def __init__(self, make, shapes, dtype=torch.float32, mesh=None, gradient_dtype=None):
        torch.manual_seed(0)
        self.mesh, self.dims, self.gradient_dtype = mesh or make_mesh(), _dims(shapes), gradient_dtype
        self.alone = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        self.cut = [
            torch.nn.Parameter(placed(p.detach(), self.mesh, dim)) for p, dim in zip(self.alone, self.dims, strict=True)
        ]
        self.optimizers = [make([{"params": ps[:4]}, {"params": ps[4:], "lr": 0.01}]) for ps in (self.cut, self.alone)]

    def step(self, k, missing=()):
        torch.manual_seed(100 + k)
        for i, (p, q, dim) in enumerate(zip(self.cut, self.alone, self.dims, strict=True)):
            for each in (p, q) if self.gradient_dtype else ():
                each.grad_dtype = self.gradient_dtype
            grad = torch.randn(q.shape, dtype=self.gradient_dtype or q.dtype)
            q.grad = None if i in missing else grad
            p.grad = None if i in missing else placed(grad, self.mesh, dim)
        for optimizer in self.optimizers:
            optimizer.step()

    def results(self):
        """Weights and states of both, as arrays."""
        found = []
        for optimizer, parameters in zip(self.optimizers, (self.cut, self.alone), strict=True):
            rows = [optimizer.state_dict()["state"].get(i, {}) for i in range(len(parameters))]
            states = [dict(zip(row, whole_tensors(row.values()), strict=True)) for row in rows]
            found.append(sent_by((whole_tensors(parameters), states)))
        return found


def make_net():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
    return torch.nn.Sequential(*layers)  # of the last a rank has nothing


def fully_sharded(net):
    from torch.distributed.fsdp import fully_shard

    fully_shard(net[0], mesh=make_mesh())
    return fully_shard(net, mesh=make_mesh())


def backward(net, step):
    torch.manual_seed(100 + step)
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net.zero_grad()
    torch.nn.functional.mse_loss(net(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
