"""What programs read of DeepSpeed's launcher: hostfiles, filters of hosts, its command line.

`main()` becomes `zero run --deepspeed`, which reads these options (docs/cli.md).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from libzero.deepspeed import run
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.comm import TORCH_DISTRIBUTED_DEFAULT_PORT
from libzero.deepspeed.utils.logging import logger

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "apply_num_nodes_and_gpus",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]

_TEXTS = {
    ("-H", "--hostfile"): (DLTS_HOSTFILE, "file of lines `HOST slots=N`"),
    ("-i", "--include"): ("", "HOST[:SLOT,...]@... to use"),
    ("-e", "--exclude"): ("", "HOST[:SLOT,...]@... not to use"),
    ("--master_addr",): ("", "the address of the first host"),
    ("--launcher",): ("pdsh", "what starts processes on other hosts"),
    ("--launcher_args",): ("", "its arguments"),
    ("--enable_each_rank_log",): ("None", "folder for each rank's output"),
    ("--bind_core_list",): (None, "cores to pin ranks to: 1,3-5"),
    ("--venv_script",): (None, "script that activates an environment"),
}
_NUMBERS = {
    ("--num_nodes",): (-1, "hosts to use"),
    ("--num_gpus", "--num_accelerators"): (-1, "ranks on each host"),
    ("--master_port",): (TORCH_DISTRIBUTED_DEFAULT_PORT, "the first host's port"),
    ("--node_rank",): (-1, "this host's number, with --no_ssh"),
    ("--ssh_port",): (None, "ssh's port"),
}
_FLAGS = {
    "--module": "the script is a module",
    "--no_python": "the script is a program",
    "--no_local_rank": "no argument --local_rank",
    "--no_ssh": "each host is started by itself",
    "--no_ssh_check": "hosts are not tried first",
    "--force_multi": "as for several hosts",
    "--save_pid": "writes the launcher's process number",
    "--bind_cores_to_rank": "pins ranks to cores",
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """[local] The options of the command `deepspeed`, with user_script and user_args."""
    parser = argparse.ArgumentParser(prog="deepspeed", description="Starts the ranks of a program.")
    for names, (text, help_) in _TEXTS.items():
        parser.add_argument(*names, type=str, default=text, help=help_)
    for names, (number, help_) in _NUMBERS.items():
        parser.add_argument(*names, type=int, default=number, help=help_)
    for name, help_ in _FLAGS.items():
        parser.add_argument(name, action="store_true", help=help_)
    parser.add_argument("--autotuning", default="", choices=["tune", "run"], help="not built")
    levels = ["debug", "info", "warning", "error", "critical"]
    parser.add_argument("--log_level", default="info", choices=levels, help="what the launcher says")
    parser.add_argument("-q", "--quiet", action="store_true", help="errors only")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """[local] The slots of each host in a file of lines `HOST slots=N`; None where there is no file."""
    if not os.path.isfile(hostfile_path):
        logger.warning(f"{hostfile_path}: there is no such hostfile, only this host is used")
        return None
    with open(hostfile_path, encoding="utf-8") as file:
        return _parse_hostfile(file.readlines())


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    found: OrderedDict[str, int] = OrderedDict()
    for line in (each.strip() for each in hostfile_lines):
        if not line or line.startswith("#"):
            continue
        words = re.match(r"(\S+)\s+slots=(\d+)", line)
        if words is None:
            raise ValueError(f"hostfile: got {line!r}, expected HOST slots=N")
        if words[1] in found:
            raise ValueError(f"hostfile: got {words[1]} twice, expected one line for each host")
        found[words[1]] = int(words[2])
    if not found:
        raise ValueError("hostfile: got no host, expected lines HOST slots=N")
    return found


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """[local] `HOST:0,2` as ("HOST", [0, 2])."""
    host, _, slots = node_config.partition(":")
    return host, [int(slot) for slot in slots.split(",")] if slots else []


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """[local] The same for several with @ between them."""
    found: dict[str, set[int]] = {}
    for host, slots in map(parse_node_config, node_config_list.split("@")):
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """[local] The slots of hosts that are included, or not excluded. ValueError for hosts and slots there are not."""
    if include_str and exclude_str:
        raise ValueError("got an inclusion and an exclusion of hosts, expected one of them")
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            raise ValueError(f"got the host {host!r}, expected one of {', '.join(host_info)}")
        absent = [slot for slot in slots if slot not in host_info[host]]
        if absent:
            raise ValueError(f"got slot {absent[0]} of the host {host!r}, expected one of {list(host_info[host])}")
    found: OrderedDict[str, Sequence[int]] = OrderedDict()
    for host, there in host_info.items():
        mine = named.get(host)
        if include_str:
            left = [] if mine is None else mine or list(dict.fromkeys(there))
        else:
            gone = [] if mine is None else mine or there
            left = [slot for slot in dict.fromkeys(there) if slot not in gone]
        if left:
            found[host] = left
    return found


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """[local] The same for hosts with numbers of slots."""
    slots = OrderedDict((host, list(range(count))) for host, count in resource_pool.items())
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> Mapping[str, Sequence[int]]:
    """[local] The first hosts, each with the first slots, where a number is above 0."""
    hosts = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return OrderedDict((host, list(range(num_gpus)) if num_gpus > 0 else active_resources[host]) for host in hosts)


def encode_world_info(world_info: Any) -> str:
    """[local] base64 of its JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Becomes `zero run --deepspeed` with these words, or with sys.argv's. Does not return."""
    run.launch(sys.argv[1:] if args is None else args)


__getattr__ = module_getattr("deepspeed.launcher.runner")

if __name__ == "__main__":
    main()
