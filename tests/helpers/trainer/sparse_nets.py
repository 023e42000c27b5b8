"""A small net with sparse gradients, for tests."""

import torch


def values_of(*tensors):
    return [tensor.detach().cpu().double().numpy().copy() for tensor in tensors]


class Net(torch.nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self, sparse=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4, sparse=sparse)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, words):
        return self.head(torch.tanh(self.embedding(words)))


def backward_of(net, words):
    torch.nn.functional.cross_entropy(net(words), words % 3, reduction="sum").backward()
