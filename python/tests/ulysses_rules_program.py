"""What two sequence-parallel ranks are told, and the parts of DeepSpeed's interface around them. Written for DeepSpeed.

    python -m libzero.deepspeed.run --num_gpus 2 ulysses_rules_program.py --out FILE

Rank 0 writes what it saw, by name: errors as [type, text].
"""

import argparse
import atexit
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy, vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from deepspeed.utils import groups
from ulysses_program import llama, made, settings

register = UlyssesSPAttentionHF.register_with_transformers
seen: dict[str, Any] = {}


def refused(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        seen[name] = [kinds[: kinds.index("Exception")], str(error)]
    else:
        seen[name] = [[], "nothing"]


class Own(torch.nn.Module):
    """A model whose own attention is over a group; [tokens, batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(11, 12), torch.nn.Linear(12, 11)
        self.qkv = torch.nn.Linear(12, 36)
        self.attention: Callable[..., torch.Tensor] = lambda q, k, v, _: self.local(q, k, v)

    @staticmethod
    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 3, 4).unbind(2)
        return self.head(x + self.attention(q, k, v, 1))


def a_model_of_its_own(loss_of: Callable[..., torch.Tensor], stage: int) -> None:
    """mesh_param, a group of the engine, three heads over two ranks."""
    torch.manual_seed(1)
    plain = Own()
    torch.manual_seed(1)
    model = Own()
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage), mesh_param=(1, 2))
    group = engine.seq_parallel_group
    model.__dict__["attention"] = DistributedAttention(Own.local, group)
    rank = dist.get_rank(group)
    optimizer = torch.optim.AdamW(plain.parameters(), **settings(0)["optimizer"]["params"])
    differences = []
    for step in range(3):
        ids = torch.randint(0, 11, (6, 2), generator=torch.Generator().manual_seed(step))
        targets = ids.roll(1, 0)
        targets[: 1 + step] = -100
        expected = torch.nn.functional.cross_entropy(plain(ids).flatten(0, 1), targets.flatten())
        torch.autograd.backward(expected)
        optimizer.step()
        optimizer.zero_grad()
        own, labels = (x.chunk(2)[rank] for x in (ids, targets))
        loss = loss_of(engine(own), labels, group, (targets != -100).sum())
        engine.backward(loss)
        engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            differences += [(loss - expected).abs().item(), max((a - b).abs().max().item() for a, b in pairs)]
    seen[f"a model of its own, stage {stage}"] = max(differences)
    members = dist.get_process_group_ranks
    seen["mesh_param"] = {
        "engine": [engine.sequence_parallel_size, engine.dp_world_size, engine.seq_dp_world_size],
        "batch": engine.train_batch_size(),
        "group": [members(group), engine.get_sequence_parallel_group() is group],
        "groups": [groups._get_sequence_parallel_world_size(), members(groups._get_sequence_parallel_group())],
        "data": [groups.get_data_parallel_world_size(), members(groups.get_data_parallel_group())],
        "all": [groups._get_sequence_data_parallel_world_size(), members(groups._get_sequence_data_parallel_group())],
    }
    x = torch.arange(24.0).view(3, 1, 4, 2) + 100 * rank
    whole = single_all_to_all(x, 2, 0, 1, group)
    seen["there and back"] = [list(whole.shape), torch.equal(single_all_to_all(whole, 0, 2, 1, group), x)]
    refused("uneven heads", lambda: single_all_to_all(x[:, :, :3], 2, 0, 1, group))
    engine.destroy()


def mesh_param() -> None:
    a_model_of_its_own(lambda logits, y, group, _: vocab_parallel_cross_entropy(logits, y, sp_group=group), 1)
    a_model_of_its_own(
        lambda logits, y, group, count: vocab_sequence_parallel_cross_entropy(logits, y, group).sum() / count, 3
    )
    start = lambda config, mesh: deepspeed.initialize(model=Own(), config=config, mesh_param=mesh)
    refused("mesh of other ranks", lambda: start(settings(0), (2, 2)))
    refused("mesh of one number", lambda: start(settings(0), (2,)))
    refused("mesh and configuration", lambda: start({**settings(0), "sequence_parallel_size": 1}, (1, 2)))


def parallel_state() -> None:
    refused("no group yet", parallel_state_sp.get_sequence_parallel_group)
    refused("one rank", lambda: parallel_state_sp.initialize_sequence_parallel(1))
    refused("three ranks", lambda: parallel_state_sp.initialize_sequence_parallel(3))
    parallel_state_sp.initialize_sequence_parallel(2)
    refused("again", lambda: parallel_state_sp.initialize_sequence_parallel(2))
    calls = ("sequence_parallel", "sequence_data_parallel", "model_parallel")
    seen["sizes"] = [getattr(parallel_state_sp, f"get_{name}_world_size")() for name in calls]
    seen["ranks"] = [getattr(parallel_state_sp, f"get_{name}_rank")() for name in calls]


def registration() -> None:
    plain = made(llama)
    flex, eager, encoder = made(llama), made(lambda: llama(attn_implementation="eager")), torch.nn.Module()
    flex.config._attn_implementation = "flex_attention"
    encoder.config = transformers.T5Config()
    seen["one rank registers"] = register(plain, "sdpa", 1, 1)
    refused("eager", lambda: register(eager, "eager", 2, 1))
    refused("another implementation", lambda: register(eager, "sdpa", 2, 1))
    refused("unknown", lambda: register(plain, "none", 2, 1))
    refused("flex", lambda: register(flex, "flex_attention", 2, 1))
    refused("an encoder", lambda: register(encoder, "sdpa", 2, 1))
    refused("no length", lambda: register(plain, "sdpa", 2, 1, seq_length_is_variable=False))
    refused("an odd length", lambda: register(plain, "sdpa", 2, 1, seq_length=5, seq_length_is_variable=False))
    moving = {"rope_type": "dynamic", "factor": 2.0}
    stretched = made(lambda: llama(rope_scaling=moving))
    refused("positions that depend on the length", lambda: register(stretched, "sdpa", 2, 1))
    mixing = made(llama)
    mixing.config.layer_types = ["full_attention", "linear_attention"]
    refused("a layer with a state", lambda: register(mixing, "sdpa", 2, 1))
    near = made(llama)
    near.model.layers[0].mlp.near = torch.nn.Conv1d(1, 1, 3)
    refused("a layer with neighbours", lambda: register(near, "sdpa", 2, 1))
    single = made(lambda: llama(num_attention_heads=1, num_key_value_heads=1))
    refused("one head", lambda: register(single, "sdpa", 2, 1))


def forwards() -> None:
    """Of a model that is divided, with dropout of attention."""
    ids, positions = torch.arange(12)[None] + 3, torch.arange(12)[None]
    padding = torch.tensor([[0, 0, *[1] * 10]])
    plain = made(llama).eval()
    plain.config._attn_implementation = "eager"  # sdpa is taken over by now
    with torch.no_grad():
        expected = plain(ids, position_ids=positions).logits
        expected_padded = plain(ids, attention_mask=padding, position_ids=positions).logits
    rank = dist.get_rank()

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, 1)[rank]

    model = made(lambda: llama(attention_dropout=0.5))
    mpu = register(model, "sdpa", 2, 1, disable_in_eval=True)
    engine, *_ = deepspeed.initialize(model=model, config=settings(3), mpu=mpu)
    other, *_ = deepspeed.initialize(model=Own(), config=settings(0))  # of a reference model, for example
    kept = groups._get_sequence_parallel_group() is engine.seq_parallel_group
    seen["a later engine"] = [groups._get_sequence_parallel_world_size(), kept, hasattr(other, "seq_parallel_group")]
    other.destroy()
    engine.eval()
    whole = [engine(ids, position_ids=positions).logits, engine(ids, attention_mask=padding).logits]
    differences = [(whole[0] - expected).abs().max(), (whole[1] - expected_padded)[:, 2:].abs().max()]
    seen["whole in evaluation"] = max(differences).item()
    engine.train()
    own = {"input_ids": part(ids), "position_ids": part(positions)}
    refused("no positions", lambda: engine(part(ids)))
    refused("labels", lambda: engine(**own, labels=part(ids)))
    refused("lengths", lambda: engine(ids[:, : 4 + rank], position_ids=positions[:, : 4 + rank]))
    refused("a mask of pairs", lambda: engine(**own, attention_mask=torch.ones(1, 1, 6, 6)))
    refused("a cache", lambda: engine(**own, past_key_values=engine(**own, use_cache=True).past_key_values))
    documents = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])
    refused("documents and a cache", lambda: engine(part(ids), position_ids=part(documents), use_cache=True))
    model.config._attn_implementation = "eager"
    refused("not taken over", lambda: engine(**own))
    model.config._attn_implementation = "sdpa"
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws += [engine(**own).logits.detach().clone(), torch.rand(1)]
    after = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(after, draws[1])
    again = torch.equal(draws[0], draws[2])
    seen["dropout"] = [again, torch.equal(*after), (draws[0] - part(expected)).abs().max().item() > 0.01]
    register(model, "sdpa", 2, 1, seq_length=10, seq_length_is_variable=False)
    refused("another length", lambda: engine(**own))
    register(model, "sdpa", 2, 1)
    engine.eval()
    parts = [engine(**own).logits - part(expected)]
    parts.append((engine(**own, attention_mask=part(padding)).logits - part(expected_padded))[:, 2:])
    seen["divided in evaluation"] = max(each.abs().max().item() for each in parts)
    engine.destroy()


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Of lengths that differ over ranks and samples."""

    def __init__(self, count: int, odd: int = 0, without: str = "") -> None:
        self.count, self.odd, self.without = count, odd, without

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = 4 + 4 * i + 4 * dist.get_rank() + self.odd
        ids = torch.arange(tokens) + 100 * dist.get_rank() + 50 * i
        found = {"input_ids": ids, "labels": ids + 1000, "position_ids": torch.arange(tokens), "mask": ids > 0}
        return {key: value for key, value in found.items() if key != self.without} | {"name": f"{dist.get_rank()}{i}"}


def loader(samples: Samples) -> UlyssesSPDataLoaderAdapter:
    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: value[None] if torch.is_tensor(value) else value for key, value in batch[0].items()}

    one = torch.utils.data.DataLoader(samples, batch_size=1, collate_fn=collate)
    group = parallel_state_sp.get_sequence_parallel_group()
    return UlyssesSPDataLoaderAdapter(one, dist.get_rank(group), group, 2, torch.device("cpu"))


def adapter() -> None:
    adapted, rank = loader(Samples(2)), dist.get_rank()
    for _ in range(2):  # an epoch
        found = list(adapted)
    seen["batches"] = [len(adapted), [batch["name"] for batch in found]]
    seen["parts"] = {key: [b[key].tolist() for b in found] for key in ("input_ids", "position_ids", "shift_labels")}
    seen["dtypes"] = [str(found[0]["mask"].dtype), sorted(found[0])]
    refused("loaders of two lengths", lambda: list(loader(Samples(1 + rank))))
    refused("an odd number of tokens", lambda: next(loader(Samples(1, odd=rank))))
    refused("a batch without position_ids", lambda: next(loader(Samples(1, without="position_ids"))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    words = parser.parse_args()
    deepspeed.init_distributed()
    mesh_param()
    parallel_state()
    registration()
    forwards()
    adapter()
    rank = dist.get_rank()
    atexit._run_exitfuncs()
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    seen["threads at the end"] = [task for task in tasks if "gloo" in task]
    if rank == 0:
        words.out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
