"""Programs of Lightning's Trainer with its strategies for DeepSpeed. frameworks_program.py runs them."""

import contextlib
import glob
import io
import logging
import os
import warnings

import lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

warnings.filterwarnings("ignore")
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
"""Lightning removes the variable when a Trainer ends."""
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Host(CUDAAccelerator):
    """The CPU. Lightning gives its strategies for DeepSpeed to the class of CUDA's devices only."""

    setup_device = CPUAccelerator.setup_device
    get_device_stats = CPUAccelerator.get_device_stats
    teardown = CPUAccelerator.teardown
    parse_devices = CPUAccelerator.parse_devices
    auto_device_count = CPUAccelerator.auto_device_count
    is_available = CPUAccelerator.is_available

    def setup(self, trainer):
        pass

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", i) for i in range(devices)]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=generator), torch.randn(4, generator=generator)


class Model(lightning.LightningModule):
    def __init__(self, late):
        super().__init__()
        self.save_hyperparameters()
        self.late, self.net, self.losses = late, None, []
        if not late:
            self.configure_model()

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(3)
            nn = torch.nn
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))

    def loss_of(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, _):
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch, _):
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch, _):
        return self.net(batch[0]).detach()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer_of(strategy, folder, epochs):
    """With the default checkpoint callback."""
    return lightning.Trainer(
        accelerator=Host() if strategy else "cpu", devices=RANKS, strategy=strategy or "auto", max_epochs=epochs,
        default_root_dir=folder, gradient_clip_val=0.5, accumulate_grad_batches=2, use_distributed_sampler=False,
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip


def strategy_of(stage):
    return None if stage is None else f"deepspeed_stage_{stage}"


def loaders():
    """Rank r has the r-th part of each batch of 4."""
    size = 4 // RANKS
    rows = [4 * batch + RANK * size + i for batch in range(6) for i in range(size)]
    part = torch.utils.data.Subset(Numbers(), rows)
    return torch.utils.data.DataLoader(part, batch_size=size)


def mean_of(losses):
    values = torch.tensor(losses, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
        values /= torch.distributed.get_world_size()
    return values.tolist()


def fit(words, stage):
    """Two epochs, then a new Trainer resumes after the first; validation, weights of the checkpoint."""
    strategy, folder = strategy_of(stage), f"{words.folder}/fit-{stage}"
    late = stage == 3
    seen = {}
    model = Model(late)
    trainer = trainer_of(strategy, folder + "/whole", 2)
    trainer.fit(model, loaders(), loaders())
    seen["losses"] = mean_of(model.losses)
    seen["val"] = float(trainer.callback_metrics["val_loss"])
    seen["steps"] = trainer.global_step

    model = Model(late)
    trainer = trainer_of(strategy, folder + "/parts", 1)
    trainer.fit(model, loaders(), loaders())
    seen["first"] = mean_of(model.losses)
    (path,) = glob.glob(folder + "/parts/checkpoints/*.ckpt")
    seen["path"] = os.path.basename(path)
    model = Model(late)
    trainer = trainer_of(strategy, folder + "/again", 2)
    trainer.fit(model, loaders(), loaders(), ckpt_path=path)
    seen["again"] = mean_of(model.losses)
    (path,) = glob.glob(folder + "/again/checkpoints/*.ckpt")
    if stage is None:
        state = torch.load(path, weights_only=True)["state_dict"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(path)
    seen["state"] = {name: float(value.double().abs().sum()) for name, value in state.items()}
    return seen


def rest(words, stage):
    """After fit() the same Trainer's test(), validate() and predict(), and those of a new one from the checkpoint."""
    strategy, folder = strategy_of(stage), f"{words.folder}/rest-{stage}"
    late = stage == 3
    model = Model(late)
    trainer = trainer_of(strategy, folder + "/whole", 1)
    trainer.fit(model, loaders(), loaders())
    (path,) = glob.glob(folder + "/whole/checkpoints/*.ckpt")
    seen = {}

    def run(name, trainer, model, **more):
        seen[name] = [
            trainer.test(model, loaders(), verbose=False, **more)[0]["test_loss"],
            trainer.validate(model, loaders(), verbose=False, **more)[0]["val_loss"],
            mean_of([float(each.square().mean()) for each in trainer.predict(model, loaders(), **more)]),
        ]

    run("same", trainer, model)
    run("best", trainer, model, ckpt_path="best")
    run("new", trainer_of(strategy, folder + "/new", 1), Model(late), ckpt_path=path)
    trainer.fit_loop.max_epochs = 2
    model.losses.clear()
    trainer.fit(model, loaders(), loaders())  # again, after the tests
    seen["again"] = mean_of(model.losses)

    (last,) = glob.glob(folder + "/whole/checkpoints/epoch=1*.ckpt")
    if stage is not None and RANK == 0:  # as Lightning's documentation shows: one file, for load_from_checkpoint()
        from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

        with open(last + "/latest", "w") as file:  # it reads the tag as the whole of the file
            file.write("checkpoint")
        with contextlib.redirect_stdout(io.StringIO()):
            convert_zero_checkpoint_to_fp32_state_dict(last, folder + "/whole.ckpt")
        last = folder + "/whole.ckpt"
    if RANK == 0:
        state = torch.load(last, weights_only=False)
        seen["epoch"] = state["epoch"], state["global_step"], state["hyper_parameters"]["late"] == late
        whole = Model.load_from_checkpoint(last, map_location="cpu", weights_only=False, late=False)
        seen["state"] = {name: float(value.double().abs().sum()) for name, value in whole.state_dict().items()}
    return seen
