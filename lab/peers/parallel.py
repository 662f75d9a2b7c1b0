"""Tensor and sequence parallelism of gpt.GPT as the users of each peer write it. peer.py makes the optimizer and times the steps.

dtensor     torch's DTensor: `parallelize_module` with ColwiseParallel and RowwiseParallel, heads divided, and the vocabulary as
            in torch's tutorial of tensor parallelism: the embedding is divided by rows, the output layer by columns with whole
            logits. q, k and v are three layers, as in torch's own examples: a part of the rows of a fused qkv would mix heads.
autotp      DeepSpeed's tensor parallelism, `tensor_parallel.autotp_size` with a `partition_config` for this GPT.
autotpsegments, autotpparts   the same with every block in `deepspeed.checkpointing.checkpoint`, without and with
            partition_activations.
ulysses     DeepSpeed's sequence parallelism, `deepspeed.sequence.layer.DistributedAttention`.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from gpt import GPT


class PartAttention(nn.Module):
    """Attention of gpt.Block with three layers for q, k and v, and with a number of heads that follows from their output."""

    def __init__(self, block, hidden):
        super().__init__()
        self.width, self.projection = hidden // block.heads, block.projection
        for i, name in enumerate(("query", "key", "value")):
            layer = nn.Linear(hidden, hidden)
            with torch.no_grad():
                layer.weight.copy_(block.qkv.weight[i * hidden:(i + 1) * hidden])
                layer.bias.zero_()
            setattr(self, name, layer)

    def forward(self, x):
        batch, time, _ = x.shape
        q, k, v = (layer(x).view(batch, time, -1, self.width).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, -1))


class PartBlock(nn.Module):
    def __init__(self, block, hidden):
        super().__init__()
        self.attention = PartAttention(block, hidden)
        self.norm1, self.norm2, self.up, self.down = block.norm1, block.norm2, block.up, block.down

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def with_parts(module, hidden):
    module.blocks = nn.ModuleList(PartBlock(block, hidden) for block in module.blocks)
    return module


def dtensor(module, mesh):
    """Divides `module`, a GPT with_parts(), over the ranks of `mesh`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))  # one sum of three gradients
    parallelize_module(module, mesh, {"token": RowwiseParallel(input_layouts=Replicate()),
                                      "head": ColwiseParallel(output_layouts=Replicate())})
    module.head.weight = module.token.weight  # tied again: each style made a parameter of its own
    for block in module.blocks:
        parallelize_module(block, mesh, {
            "attention": whole, "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(), "attention.projection": RowwiseParallel(),
            "up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def autotp_config(ranks):
    column = {"partition_type": "column"}
    row = {"partition_type": "row"}
    return {"autotp_size": ranks, "partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": [r".*\.(query|key|value|up)\.weight$"], **column},
        {"patterns": [r".*\.(projection|down)\.weight$"], **row}]}}


class TensorRanks:
    """What deepspeed.checkpointing asks Megatron's mpu: all ranks divide the tensors of one sample."""

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_data_parallel_rank(self):
        return 0


def checkpointed(module, partitioned):
    """Recomputes every block of `module` in backward; of its input each rank keeps all, or if `partitioned` its part."""
    import deepspeed

    deepspeed.checkpointing.configure(TensorRanks(), partition_activations=partitioned, num_checkpoints=len(module.blocks))
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(0)
    for block in module.blocks:
        block.forward = functools.partial(deepspeed.checkpointing.checkpoint, block.forward)


class UlyssesBlock(nn.Module):
    """gpt.Block on a stretch of the tokens; DeepSpeed exchanges [batch, tokens, heads, width]."""

    def __init__(self, block, hidden, attention):
        super().__init__()
        self.heads, self.attention = block.heads, attention
        self.norm1, self.qkv, self.projection = block.norm1, block.qkv, block.projection
        self.norm2, self.up, self.down = block.norm2, block.up, block.down

    def forward(self, x):
        batch, time, hidden = x.shape
        q, k, v = (part.view(batch, time, self.heads, hidden // self.heads) for part in self.qkv(self.norm1(x)).split(hidden, 2))
        mixed = self.attention(q, k, v, 0)
        x = x + self.projection(mixed.reshape(batch, time, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class UlyssesGPT(GPT):
    first = 0  # of this rank's tokens

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[self.first:self.first + tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def local_attention(q, k, v):
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


def ulysses(module, group, sequence, hidden):
    """`module`, a UlyssesGPT, with exchanges over `group`; returns this rank's stretch of `sequence` tokens."""
    from deepspeed.sequence.layer import DistributedAttention

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    attention = DistributedAttention(local_attention, group, scatter_idx=2, gather_idx=1)
    module.blocks = nn.ModuleList(UlyssesBlock(block, hidden, attention) for block in module.blocks)
    module.first = rank * sequence // ranks
    return slice(module.first, (rank + 1) * sequence // ranks)
