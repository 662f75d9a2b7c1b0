"""Tests in the pattern of DeepSpeed's own: every rank runs them with pytest. test_deepspeed.py starts the ranks."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


class DistributedTest:
    world_size = 2

    @pytest.fixture(autouse=True)
    def ranks(self):
        deepspeed.init_distributed()


class SimpleModel(torch.nn.Module):
    def __init__(self, hidden_dim, nlayers=2):
        super().__init__()
        self.linears = torch.nn.ModuleList([torch.nn.Linear(hidden_dim, hidden_dim) for _ in range(nlayers)])
        self.cross_entropy_loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, y):
        for linear in self.linears:
            x = linear(x)
        return self.cross_entropy_loss(x, y)


def random_dataloader(model, total_samples, hidden_dim, device, dtype):
    batch_size = model.train_micro_batch_size_per_gpu()
    data = torch.randn(total_samples, hidden_dim, device=device, dtype=dtype)
    labels = torch.empty(total_samples, dtype=torch.long, device=device).random_(hidden_dim)
    dataset = torch.utils.data.TensorDataset(data, labels)
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
class TestZeroTrains(DistributedTest):
    def test(self, zero_stage, dtype):
        config_dict = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": 0},
        }
        if dtype == torch.float16:
            config_dict["fp16"] = {"enabled": True, "initial_scale_power": 8}
        if dtype == torch.bfloat16:
            config_dict["bf16"] = {"enabled": True}
        hidden_dim = 8
        torch.manual_seed(3 + dist.get_rank())
        model = SimpleModel(hidden_dim)
        model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_dict)
        assert dist.get_world_size() == self.world_size
        loader = random_dataloader(model, 16, hidden_dim, model.device, dtype)
        dist.barrier()
        for n, batch in enumerate(loader):
            loss = model(batch[0], batch[1])
            model.backward(loss)
            assert model.is_gradient_accumulation_boundary() == (n % 2 == 1)
            model.step()
        assert model.global_steps == 4 and model.skipped_steps == 0
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for p in model.parameters():
                mine = p.data.detach().float().clone()
                mean = mine.clone()
                dist.all_reduce(mean)
                assert torch.equal(mean / self.world_size, mine)


class TestZero3Parameters(DistributedTest):
    def test_external_and_gathered(self):
        class External(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
                deepspeed.zero.register_external_parameter(self, self.second.weight)

            def forward(self, x):
                return torch.nn.functional.linear(self.first(x), self.second.weight).sum()

        config_dict = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
        }
        with deepspeed.zero.Init(config_dict_or_path=config_dict):
            net = External()
        engine, _, _, _ = deepspeed.initialize(model=net, config=config_dict)
        assert net.first.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters(net.second.weight, modifier_rank=1):
            assert net.second.weight.ds_status == ZeroParamStatus.AVAILABLE
            if dist.get_rank() == 1:
                with torch.no_grad():
                    net.second.weight.fill_(2.0)
        loss = engine(torch.ones(1, 4, device=get_accelerator().current_device_name()))
        engine.backward(loss)
        engine.step()
        with deepspeed.zero.GatheredParameters(net.second.weight):
            assert (net.second.weight - 2.0).abs().max() < 0.02

    @pytest.mark.parametrize("optimizer_class", [FusedAdam, DeepSpeedCPUAdam])
    def test_engine_optimizers(self, optimizer_class):
        torch.manual_seed(1)
        net = SimpleModel(8)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=net,
            optimizer=optimizer_class(net.parameters(), lr=0.5),
            config={"train_batch_size": 4, "zero_optimization": {"stage": 2}},
        )
        assert engine.train_micro_batch_size_per_gpu() == 2 and optimizer.param_groups[0]["lr"] == 0.5
        before = net.linears[0].weight.detach().clone()
        engine.backward(engine(torch.randn(2, 8), torch.tensor([1, 2])))
        engine.step()
        assert engine.was_step_applied() and not torch.equal(before, net.linears[0].weight)
        assert deepspeed.utils.safe_get_full_fp32_param(net.linears[0].weight).shape == (8, 8)
