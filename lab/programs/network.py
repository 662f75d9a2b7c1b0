"""Measures a training step on two hosts: network namespaces of this machine, connected by a link of limited rate.

Started by script/bench-network (root). Measures the link with a plain TCP stream first, then runs `zero bench step` on two ranks of
each host, over shared memory inside a host and TCP between them, and all over TCP; prints a table and writes JSON. For every stage:
the step, the bytes that a host sends over the link, their transfer time at the measured rate, the computation alone,
and step / (link + compute).
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

FIRST, SECOND = "10.214.78.1", "10.214.78.2"
PORT = 29611


def run(*words, check=True):
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode != 0:
        sys.exit(f"bench-network: error: got '{done.stderr.strip()}' from {' '.join(words)}, expected it to work. Hint: needs root, iproute2, and a kernel with veth and tbf.")
    return done.stdout


class Network:
    """Network namespaces as hosts `a` and `b`, removed at the end."""

    def __init__(self):
        self.names = {host: f"zb{os.getpid()}{host}" for host in "ab"}

    def join(self, mbit):
        link = f"zl{os.getpid()}"
        for name in self.names.values():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", link + "a", "netns", self.names["a"], "type", "veth", "peer", "name", link + "b", "netns", self.names["b"])
        for host, address in (("a", FIRST), ("b", SECOND)):
            name = self.names[host]
            run("ip", "-n", name, "addr", "add", address + "/24", "dev", link + host)
            run("ip", "-n", name, "link", "set", link + host, "up")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link + host, "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")

    def words(self, host, *words):
        return ["ip", "netns", "exec", self.names[host], *words]

    def close(self):
        for number in (signal.SIGTERM, signal.SIGINT):  # a second one must not leave a host behind
            signal.signal(number, signal.SIG_IGN)
        for name in self.names.values():
            pids = run("ip", "netns", "pids", name, check=False).split()
            if pids:
                run("kill", "-9", *pids, check=False)
            run("ip", "netns", "del", name, check=False)


def stream_server():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", PORT))
    listener.listen(1)
    print("listening", flush=True)
    peer, _ = listener.accept()
    space = bytearray(1 << 20)
    while peer.recv_into(space):
        pass


def stream_client(address, seconds):
    peer = socket.create_connection((address, PORT))
    data, begin, sent = bytes(1 << 20), time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        peer.sendall(data)
        sent += len(data)
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)  # the end: all has arrived
    print(sent / (time.monotonic() - begin))


def link_bytes_per_second(network):
    """Payload of one TCP stream from a to b."""
    server = subprocess.Popen(network.words("b", sys.executable, __file__, "--stream-server"), stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    rate = float(run(*network.words("a", sys.executable, __file__, "--stream-client", SECOND)))
    server.wait()
    return rate


def run_on_both(network, options, transport, words):
    """The same command under `zero run` on both hosts; standard output of the first, without the ranks' prefixes."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ZERO_TOKEN="bench", ZERO_TIMEOUT_S="300")
    if transport:
        environment["ZERO_TRANSPORT"] = transport
    hosts = [subprocess.Popen(network.words(host, options.zero, "run", "--nnodes=2", f"--node_rank={number}", f"-n{options.ranks}", "--master_addr", FIRST, *words),
                              env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number, host in enumerate("ab")]
    outputs = [host.communicate() for host in hosts]
    if any(host.returncode for host in hosts):
        sys.exit("bench-network: error: got exit codes " + ", ".join(str(host.returncode) for host in hosts) + ", expected 0:\n" + "\n".join(err for _, err in outputs))
    return re.sub(r"^\[[^\]]*\] ", "", outputs[0][0], flags=re.M)


def bench(network, options, transport, settings):
    return json.loads(run_on_both(network, options, transport, ["zero", "bench", "step", "--json", "--quiet", "--stages", options.stages, "--recipes", options.recipes,
                                                                "--rounds", "1", "--steps", str(options.steps), "--warmup", str(options.warmup), *sets(settings)]))


def sets(settings):
    return [word for setting in settings for word in ("--set", setting)]


def loss_curve(network, options, settings):
    """Step -> training loss, of `zero train` on a text."""
    out = run_on_both(network, options, "", ["zero", "train", "configs/stage3-bf16.json", "--text", options.text, "--steps", str(options.train), "--json", "--quiet",
                                             "--set", "steps_per_print=1", *sets(settings)])
    curve, held_out = {}, None
    for line in out.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            if "step" in one and "loss" in one:
                curve[one["step"]] = one["loss"]
            held_out = one.get("heldout_nats_per_byte", held_out)
    return curve, held_out


def rows_of(result, rate, ranks, name):
    compute = {one["recipe"]: one["floor_s"] for one in result["compute"]}
    for one in result["runs"]:
        across = one["bytes_across_hosts_per_step"] * ranks
        link = across / rate
        yield {"transport": name, "recipe": one["recipe"], "stage": one["stage"], "step_s": one["step_s"]["median"], "compute_s": compute[one["recipe"]],
               "bytes_between_hosts_per_step": across, "link_s": link, "step_over_link_plus_compute": one["step_s"]["median"] / (link + compute[one["recipe"]]),
               "last_loss": one["last_loss"]}


def table(rows):
    head = ["", "recipe", "stage", "step, ms", "a host sends, MB", "link, ms", "compute, ms", "step / (link + compute)", "last loss"]
    lines = [[row["transport"], row["recipe"], str(row["stage"]), f"{row['step_s'] * 1e3:.0f}", f"{row['bytes_between_hosts_per_step'] / 1e6:.2f}", f"{row['link_s'] * 1e3:.0f}",
              f"{row['compute_s'] * 1e3:.0f}", f"{row['step_over_link_plus_compute']:.2f}", f"{row['last_loss']:.4f}"] for row in rows]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))) + " |" for line in [head, *lines]]
    rule = "|" + "|".join("-" * (width + 2) if i < 2 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", default="build/bin/zero")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--recipes", default="fp32,bf16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...", help="runs stage 3 with these settings, too")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="trains the GPT of configs/stage3-bf16.json so long with each variant, on --text")
    parser.add_argument("--text", help="a text file for --train")
    parser.add_argument("--out", help="writes this JSON file")
    parser.add_argument("--stream-server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stream-client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stream_server:
        return stream_server()
    if options.stream_client:
        return stream_client(options.stream_client, 3)
    if os.geteuid() != 0:
        sys.exit("bench-network: error: got user %d, expected root, who may make network namespaces" % os.geteuid())
    def end(number, _):
        signal.signal(number, signal.SIG_IGN)
        sys.exit("bench-network: ended by a signal")

    signal.signal(signal.SIGTERM, end)
    network = Network()
    try:
        network.join(options.mbit)
        rate = link_bytes_per_second(network)
        print(f"link of {options.mbit} Mbit/s: one TCP stream carries {rate * 8 / 1e6:.0f} Mbit/s of payload", flush=True)
        rows, machine = [], None
        for name, transport, settings in [("shm+gloo", "", []), ("gloo", "gloo", [])]:
            result = bench(network, options, transport, settings)
            machine, model = result["machine"], result["model"]
            rows += rows_of(result, rate, options.ranks, name)
        options.stages = "3"
        for variant in options.variant:
            name, _, settings = variant.partition(":")
            result = bench(network, options, "", [setting for setting in settings.split(",") if setting])
            rows += rows_of(result, rate, options.ranks, name)
        print(table(rows))
        curves = {}
        if options.train:
            for variant in ["exact:", *options.variant]:
                name, _, settings = variant.partition(":")
                curve, held_out = loss_curve(network, options, [setting for setting in settings.split(",") if setting])
                curves[name] = {"loss": curve, "held_out": held_out}
            shown = [step for step in sorted(next(iter(curves.values()))["loss"]) if step % max(1, options.train // 8) == 0]
            print("\n| training loss at step | " + " | ".join(map(str, shown)) + " | held out |\n|---|" + "---:|" * (len(shown) + 1))
            for name, one in curves.items():
                print(f"| {name} | " + " | ".join(f"{one['loss'][step]:.4f}" for step in shown) + f" | {one['held_out'] or float('nan'):.4f} |")
        if options.out:
            with open(options.out, "w") as out:
                json.dump({"schema": "zero.bench.network/1", "date": time.strftime("%Y-%m-%d"), "machine": machine, "model": model, "hosts": 2, "ranks_per_host": options.ranks,
                           "link_mbit_per_s": options.mbit, "stream_bytes_per_s": rate, "rows": rows, "curves": curves}, out, indent=2)
    finally:
        network.close()


main()
