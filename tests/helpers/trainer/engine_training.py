"""Training by two processes under other packages' engines, and the same by one process, for tests."""

import os
import warnings
from datetime import timedelta

import rank_training
import torch
import torch.distributed as dist
from rank_training import weights_of

import tristep

STEPS = 5
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9}
ENTRIES = [("ndim<2", "AdamW"), ("*", "Muon")]
TWO = [("ndim<2", "AdamW"), ("*", "Lion")]


def make_net():
    return rank_training.make_net(torch.float32)


def batch(step, rank=0, ranks=1):
    return rank_training.make_batch(step, torch.float32, rank, ranks)


def loss_of(net, x, y):
    return torch.nn.functional.mse_loss(net(x), y)


def make_optimizer(name, net):
    """ "torch AdamW", "torch SGD", the class of tristep.optim by its name, or "multi" and "two", which have two of these."""
    if name == "torch AdamW":
        return torch.optim.AdamW(net.parameters(), **ADAMW)
    if name == "torch SGD":
        return torch.optim.SGD(net.parameters(), **SGD)
    if name in ("multi", "two"):
        return tristep.optim.MultiOptimizer(net, ENTRIES if name == "multi" else TWO, lr=0.01)
    return getattr(tristep.optim, name)(net.parameters(), **ADAMW)


def one_process(name):
    """The weights that one process has after `STEPS`."""
    net = make_net()
    optimizer = make_optimizer(name, net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, *batch(step)).backward()
        optimizer.step()
    return weights_of(net)


def accelerated(name):
    """The weights of a rank under Accelerate, and the losses that were recorded there."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        accelerator = accelerate.Accelerator(cpu=True)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        net = make_net()
        optimizer = make_optimizer(name, net)
        recorder = tristep.viz.Recorder(optimizer, module=net)
        model, optimizer = accelerator.prepare(net, optimizer)
        for step in range(STEPS):
            loss = loss_of(model, *batch(step, rank, ranks))
            accelerator.backward(loss)
            optimizer.step()
            recorder.step(loss=loss)
            optimizer.zero_grad()
        recorder.close()
        return ranks, weights_of(net), recorder.run.scalars["loss"].recent()[0].tolist()
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


class RankBatches(torch.utils.data.IterableDataset):
    """The batches of this rank."""

    def __iter__(self):
        for step in range(STEPS):
            yield batch(step, dist.get_rank(), dist.get_world_size())


def fitted_by_lightning(name, folder):
    """The weights of a rank under Lightning, and the steps whose loss was recorded there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as it says on machines of more cores
        import lightning

        from tristep.integrations.lightning import TristepCallback

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = make_net()

            def training_step(self, pair, index):
                return loss_of(self.net, *pair)

            def configure_optimizers(self):
                return make_optimizer(name, self.net)

        callback = TristepCallback(view=None)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1, "default_root_dir": folder}
        module = Module()
        trainer = lightning.Trainer(callbacks=[callback], **options, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(RankBatches(), batch_size=None))
        return trainer.world_size, weights_of(module.net), callback.run.scalars["loss"].recent()[0].tolist()


def by_deepspeed(name, stage, folder):
    """The weights of a rank under DeepSpeed, and of one that went on from a checkpoint after three steps."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        rank, ranks = dist.get_rank(), dist.get_world_size()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile; gloo does without
        deepspeed.init_distributed("gloo")

        def start():
            net = make_net()
            config = {
                "train_batch_size": rank_training.PARTS,
                "train_micro_batch_size_per_gpu": rank_training.PARTS // ranks,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
            return deepspeed.initialize(model=net, optimizer=make_optimizer(name, net), config=config)[0]

        def go(engine, steps):
            for step in steps:
                engine.backward(loss_of(engine, *batch(step, rank, ranks)))
                engine.step()
            return weights_of(engine.module)

        engine = start()
        go(engine, range(3))
        engine.save_checkpoint(folder)
        whole = go(engine, range(3, STEPS))
        other = start()
        other.load_checkpoint(folder)
        return whole, go(other, range(3, STEPS))


def by_torchft(*args):
    """As `_by_torchft`."""
    with warnings.catch_warnings():  # in its threads, too
        warnings.simplefilter("ignore")
        return _by_torchft(*args)


def _by_torchft(name, lighthouse, restarts):
    """The weights of a replica group of one process under torchft.

    If `restarts`, the second one begins anew after three steps, with other weights, and gets all from the first; both
    have the whole batch, since one step is taken by the first alone. Otherwise each has its part.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank, seconds = dist.get_rank(), timedelta(seconds=30)

    def start(changed=0.0):
        net = make_net()
        with torch.no_grad():
            for param in net.parameters():
                param.add_(changed)
        optimizer = make_trainer(net) if name == "trainer" else make_optimizer(name, net)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=seconds),
            state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
            load_state_dict=lambda saved: (net.load_state_dict(saved["net"]), optimizer.load_state_dict(saved["optimizer"])),
            min_replica_size=1,
            use_async_quorum=restarts,
            init_sync=False,  # they start with equal weights
            timeout=seconds,
            quorum_timeout=seconds,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{rank}",
            hostname="127.0.0.1",
        )
        return net, optimizer, manager, store

    net, optimizer, manager, store = start()
    restarting = restarts and rank == 1
    while (step := manager.current_step()) < STEPS:
        if restarting and step == 3:
            manager.shutdown()
            net, optimizer, manager, store = start(changed=1.0)
            restarting = False
        model, x_and_y = DistributedDataParallel(manager, net), batch(step, *((0, 1) if restarts else (rank, 2)))
        if name == "trainer":
            manager.start_quorum()
            optimizer.zero_grad()
            loss_of(model, *x_and_y).backward()
            if manager.should_commit():
                optimizer.step(1)
        else:
            wrapped = Optimizer(manager, optimizer)
            wrapped.zero_grad()
            loss_of(model, *x_and_y).backward()
            wrapped.step()
    manager.shutdown()
    del store
    return weights_of(net)


def make_trainer(net, **settings):
    """A `tristep.Trainer` with the numbers of "torch SGD"."""
    return tristep.Trainer(net, "sgd", {"learning_rate": SGD["lr"], "momentum": SGD["momentum"]}, **settings)
