"""The demo's network, trained by several processes that share each batch: on one machine or many, with GPUs or without.

    torchrun --nproc_per_node 2 tutorials/several_processes.py
    torchrun --nproc_per_node 2 tutorials/several_processes.py --replicate
    torchrun --nproc_per_node 2 tutorials/several_processes.py --compression int8
    torchrun --nproc_per_node 3 tutorials/several_processes.py --store dist_async

Compared with a script for one process three things are new: a store, each process's own part of a batch, and its own device.
Gradients are added up over the processes, so `step` takes the size of the whole batch, as ever. The last command has two
workers that do not wait for each other, and a server, the last process, which never comes back from `create`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import tristep
from tristep.demo import load, make_batches, network
from tristep.lr_scheduler import CosineScheduler


def main() -> None:
    options = parse()
    in_step = options.store == "dist_sync"
    store = tristep.kvstore.create(options.store)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    data, net = load(device), network().to(device)

    compression: dict[str, Any] | None = None
    if options.compression is not None:
        compression = {"type": options.compression}
        if options.threshold is not None:
            compression["threshold"] = options.threshold
    batches = make_batches(options.epochs)
    updates = len(batches) if in_step else len(batches) * store.num_workers
    schedule = CosineScheduler(updates, base_lr=0.004, final_lr=0.00004, warmup_steps=updates // 10)
    trainer = tristep.Trainer(
        net,
        "adam",
        {"learning_rate": 0.004, "lr_scheduler": schedule},
        kvstore=store,
        update_on_kvstore=not options.replicate,  # the default is True: each process updates its share of the weights
        compression_params=compression,
    )

    for batch in batches:
        own = batch[store.rank :: store.num_workers]  # this process's part; all processes draw the same batches
        loss = cross_entropy(net(data["images"][own]), data["labels"][own], reduction="sum")
        trainer.zero_grad()
        loss.backward()  # sums are on their way while this runs
        trainer.step(batch_size=len(batch) if in_step else len(own))

    if options.states:
        trainer.save_states(options.states)  # all come here; whatever their number, others can go on from it
    store.barrier()
    report(net, data, options, store)
    if in_step:
        dist.destroy_process_group()


def report(net: torch.nn.Module, data: dict[str, torch.Tensor], options: argparse.Namespace, store: Any) -> None:
    """Print how well it did, and whether all processes have the same weights, or how old the weights were."""
    with torch.no_grad():
        right = net(data["test images"]).argmax(dim=1) == data["test labels"]
    lines = [f"accuracy on images not trained on: {right.float().mean().item():.1%}"]
    if options.store == "dist_sync":
        how = "each updates all weights" if options.replicate else "each updates its share of the weights"
        lines.insert(0, f"{store.num_workers} processes, {how}, gradients sent {options.compression or 'as they are'}")
        weights = b"".join(param.detach().cpu().numpy().tobytes() for param in net.parameters())
        digests = [""] * store.num_workers
        dist.all_gather_object(digests, hashlib.sha256(weights).hexdigest())
        lines.append(f"weights of all processes are the same bits: {len(set(digests)) == 1}")
    else:
        lines.insert(0, f"{store.num_workers} workers, 1 server")
        late = store.staleness()[store.rank]
        lines.append(f"updates by others between a pull and the push after it: {late.mean:.2f}, at most {late.max}")
    if store.rank == 0:
        print("\n".join(lines))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the 1,347 training images")
    parser.add_argument("--replicate", action="store_true", help="let each process update all weights")
    parser.add_argument("--compression", metavar="TYPE", help="how gradients are sent: 2bit, 1bit, int8, sign, topk ...")
    parser.add_argument("--threshold", type=float, metavar="T", help="of 2bit and 1bit; 0.5 if left out")
    parser.add_argument("--states", metavar="FILE", help="where to save the optimizer's states")
    parser.add_argument("--store", default="dist_sync", choices=["dist_sync", "dist_async"], help="dist_async has a server")
    return parser.parse_args()


if __name__ == "__main__":
    main()
