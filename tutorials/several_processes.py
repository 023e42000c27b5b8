"""The demo's network, trained by several processes that share each batch: on one machine or many, with GPUs or without.

    torchrun --nproc_per_node 2 tutorials/several_processes.py
    torchrun --nproc_per_node 2 tutorials/several_processes.py --compression 2bit --threshold 0.05
    torchrun --nproc_per_node 2 tutorials/several_processes.py --replicate

Compared with a script for one process three things are new: `kvstore="dist_sync"`, each process's own part of a batch, and
its own device. Gradients are added up over the processes, so `step` takes the size of the whole batch, as ever.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import tristep
from tristep.demo import load, make_batches, network


def main() -> None:
    options = parse()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    data, net = load(device), network().to(device)

    compression = None
    if options.compression is not None:
        compression = {"type": options.compression}
        if options.threshold is not None:
            compression["threshold"] = options.threshold
    trainer = tristep.Trainer(
        net,
        "sgd",
        {"learning_rate": 0.05, "momentum": 0.9},
        kvstore="dist_sync",
        update_on_kvstore=not options.replicate,  # the default is True: each process updates its share of the weights
        compression_params=compression,
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()

    for batch in make_batches(options.epochs):
        own = batch[rank::ranks]  # this process's part; all processes draw the same batches
        loss = cross_entropy(net(data["images"][own]), data["labels"][own], reduction="sum")
        trainer.zero_grad()
        loss.backward()  # sums are on their way while this runs
        trainer.step(batch_size=len(batch))

    trainer.save_states(options.states)  # all processes come here, one writes; any number can go on from it
    report(net, data, options, rank, ranks)
    dist.destroy_process_group()


def report(net: torch.nn.Module, data: dict[str, torch.Tensor], options: argparse.Namespace, rank: int, ranks: int) -> None:
    """Print how well it did, and whether all processes have the same weights."""
    with torch.no_grad():
        right = net(data["test images"]).argmax(dim=1) == data["test labels"]
    weights = b"".join(param.detach().cpu().numpy().tobytes() for param in net.parameters())
    digests: list[str] = [""] * ranks
    dist.all_gather_object(digests, hashlib.sha256(weights).hexdigest())
    if rank == 0:
        how = "each updates all weights" if options.replicate else "each updates its share of the weights"
        print(f"{ranks} processes, {how}, gradients sent {options.compression or 'as they are'}")
        print(f"accuracy on images not trained on: {right.float().mean().item():.1%}")
        print(f"weights of all processes are the same bits: {len(set(digests)) == 1}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the 1,347 training images")
    parser.add_argument("--replicate", action="store_true", help="let each process update all weights")
    parser.add_argument("--compression", metavar="TYPE", help="how gradients are sent: 2bit, 1bit, int8, sign, topk ...")
    parser.add_argument("--threshold", type=float, metavar="T", help="of 2bit and 1bit; 0.5 if left out")
    parser.add_argument("--states", default="several_processes.states", metavar="FILE", help="where to save the states")
    return parser.parse_args()


if __name__ == "__main__":
    main()
