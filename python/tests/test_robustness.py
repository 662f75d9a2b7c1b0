"""Exceptions, Ctrl-C, lifetimes of engines, other processes, and objects that must not be kept alive."""

import gc
import os
import re
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from conftest import Programs, batch, config, network, nightly

import libzero


class Fails(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.error is not None:
            raise self.error
        return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["forward", "hook", "function"])
@pytest.mark.parametrize("error", [KeyError("of the model"), KeyboardInterrupt("of the model")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_goes_through_and_training_continues(where: str, error: BaseException, ranks: int) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            raise error

    def fail(_: torch.Tensor) -> None:
        raise error

    models = [[Fails() for _ in range(ranks)] for _ in range(2)]

    def body(comm: libzero.Communicator) -> str:
        hashes = []
        for faulty in (False, True):
            model = models[faulty][comm.rank]
            engine = libzero.Engine(model, config())
            for step in range(4):
                if faulty and step == 2:
                    with pytest.raises(type(error), match="of the model"):
                        model.error = error if where == "forward" else None
                        y = engine(batch(comm.rank, 9))
                        if where == "hook":
                            y.register_hook(fail)
                        if where == "function":
                            y = Function.apply(y)
                        engine.backward(y.square().mean())
                    model.error = None
                    if ranks > 1 or where == "forward":
                        engine.discard_micro_batch()
                engine.backward(engine(batch(comm.rank, step)).square().mean())
                engine.step()
            hashes.append(engine.state_hash())
            engine.close()
        assert hashes[0] == hashes[1]
        return hashes[0]

    assert len(set(libzero.run_ranks(ranks, body))) == 1


@pytest.mark.parametrize("message", ["", "of the model"])
def test_a_backward_that_failed_is_not_passed_over(message: str) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError(message)

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(network(), config())
        y = engine(batch(comm.rank, 0))
        y.register_hook(fail)
        with pytest.raises(ValueError):
            engine.backward(y.square().mean())
        with pytest.raises((libzero.ConfigError, libzero.CommError), match="backward"):
            engine.step()

    libzero.run_ranks(2, body)


def test_no_unit_is_kept_whole_and_nothing_is_kept_alive() -> None:
    models = [network(1, 256), network(1, 256)]

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        engine = libzero.Engine(model, config())
        made: list[weakref.ref[torch.Tensor]] = []

        def note(_: object, __: object, out: torch.Tensor) -> None:
            made.append(weakref.ref(out))

        for layer in model:
            layer.register_forward_hook(note)
        at_rest = []
        for step in range(100):
            loss = engine(batch(comm.rank, step)).square().mean()
            engine.backward(loss)
            made.append(weakref.ref(loss))
            del loss
            engine.step()
            if step in (10, 99):
                at_rest.append([(row.tier, row.purpose, row.current) for row in engine.memory()])
        assert at_rest[0] == at_rest[1]
        assert engine.memory().peak(purpose="gather buffers") > 0
        engine.reset_peak_memory()  # frees buffers that the next step would use again
        assert engine.memory().current(purpose="gather buffers") == 0
        for p in model.parameters():
            with pytest.raises(RuntimeError, match="while it is sharded"):
                p.untyped_storage().data_ptr()
        assert len(made) == 600 and all(ref() is None for ref in made)
        numel = sum(p.numel() for p in model.parameters())
        assert engine.memory().current(purpose="parameters") <= 4 * (numel // 2 + 64 * 3)

    gc.collect()
    gc.disable()  # references alone must do: no cycles
    try:
        libzero.run_ranks(2, body)
        model = network()
        engine = libzero.Engine(model, config())
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        engine.backward(engine(batch()).sum())
        engine.step()
        with engine.gathered_parameters():
            pass
        kept = [weakref.ref(engine), weakref.ref(model), weakref.ref(model[0].weight)]
        del schedule  # torch's own cycle with the optimizer is not the engine's
        del engine
        assert kept[0]() is None
        del model
        assert [ref() for ref in kept] == [None, None, None]
    finally:
        gc.enable()


def private_kib() -> int:
    """Without pages of libraries, whose share depends on the other processes that have them."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Private_Dirty:")[1].split()[0])


def test_fifty_engines_one_after_another_take_no_memory() -> None:
    model = network(1, 512)
    before = 0
    for i in range(50):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = libzero.Engine(model, config())
        engine.backward(engine(batch()).sum())
        if i % 2:
            engine.step()  # else it ends in the middle of a step
        values = engine.state_dict()
        del engine
        model = network(1, 512)
        model.load_state_dict(values)
        if i == 15:
            before = private_kib()
    assert private_kib() - before < 8 * 1024  # 50 engines hold 3 MiB each


@pytest.mark.nightly
def test_fifty_engines_over_two_processes(programs: Programs) -> None:
    out = programs.ranks("""
        for i in range(50):
            engine = libzero.Engine(network(), config())
            engine.backward(engine(batch(engine.comm.rank)).sum())
            if i % 2:
                engine.step()
            del engine
        print("made them")
    """)
    assert out.count("made them") == 2


@pytest.mark.parametrize(
    "end", [nightly(""), nightly("raise SystemExit(0)"), "keep = [engine, loss]; torch.keep = keep"]
)
def test_the_interpreter_exits_in_the_middle_of_a_step(programs: Programs, end: str) -> None:
    programs.ranks(f"""
        import logging
        logging.basicConfig(level=logging.DEBUG)
        engine = libzero.Engine(network(), config(3, gradient_accumulation_steps=2))
        loss = engine(batch()).sum()
        engine.backward(loss)
        engine.step()
        loss = engine(batch()).sum()
        engine.backward(loss)
        {end}
    """)


LOADER = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 32
        def __getitem__(self, i):
            return torch.full((8,), float(i)), os.getpid()

    def main():
        engine = libzero.Engine(network(), config(3))
        loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context=METHOD)
        workers = set()
        for epoch in range(2):
            for x, pids in loader:
                workers |= set(pids.tolist())
                engine.backward(engine(x).square().mean())
                engine.step()
        assert os.getpid() not in workers and len(workers) == 4
        print("steps", engine.global_step)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("method", ["fork", nightly("spawn")])
def test_workers_of_a_data_loader(programs: Programs, method: str) -> None:
    assert "steps 16" in programs.run(LOADER.replace("METHOD", repr(method)))


def test_a_forked_process_cannot_use_the_engine_and_ends_well(programs: Programs) -> None:
    out = programs.run("""
        engine = libzero.Engine(network(), config(3))
        pid = os.fork()
        if pid == 0:
            try:
                engine.step()
            except libzero.ConfigError as error:
                print("refused", "was made in process" in str(error), flush=True)
            del engine  # its destructor must not wait for threads of the parent
            sys.exit(0)  # with all atexit handlers
        assert os.waitpid(pid, 0)[1] == 0
        engine.backward(engine(batch()).sum())
        engine.step()
        print("parent", engine.global_step)
    """)
    assert "refused True" in out and "parent 1" in out


INTERRUPTED = """
    import signal, threading
    engine = libzero.Engine(network(1, 1600), config(3))
    engine.backward(engine(batch()).sum())
    engine.step()
    other = int(engine.comm.all_gather_bytes(str(os.getpid()).encode())[1])
    if engine.comm.rank == 1:
        time.sleep(60)  # does not come: rank 0 ends it
        os._exit(0)
    at = []
    def kick():
        time.sleep(0.5)
        at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=kick, daemon=True).start()
    try:
        WAIT
        engine.comm.barrier()
        print("continued")
    except KeyboardInterrupt:
        seconds = time.monotonic() - at[0]
        print("interrupted", seconds < 2, seconds)
    sys.stdout.flush()
    os.kill(other, signal.SIGKILL)
    os._exit(0)
"""


@pytest.mark.parametrize("transport", ["shm", nightly("gloo")])
@pytest.mark.parametrize(
    "wait", [nightly("engine.comm.barrier()"), "engine.backward(engine(batch()).sum()); engine.step()"]
)
def test_ctrl_c_ends_a_wait(programs: Programs, wait: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_TRANSPORT", transport)
    assert "interrupted True" in programs.ranks(INTERRUPTED.replace("WAIT", wait), rc=None)


@pytest.mark.nightly
def test_ctrl_c_is_left_to_a_handler_of_the_program(programs: Programs) -> None:
    out = programs.ranks("""
        import signal, threading
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        engine = libzero.Engine(network(), config(3))
        if engine.comm.rank == 1:
            time.sleep(4)
        else:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        engine.comm.barrier()
        print("continued", engine.comm.rank, seen)
    """)
    assert "continued 0 [1]" in out and "continued 1 []" in out


def test_ctrl_c_ends_ranks_as_threads() -> None:
    def body(comm: libzero.Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
        while True:
            time.sleep(0.05)

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        libzero.run_ranks(2, body)
    assert time.monotonic() - begin < 2.5


def test_ctrl_c_is_not_lost_in_a_callback() -> None:
    """An exception that is raised within __del__ is only printed."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.3)

    def body(comm: libzero.Communicator) -> None:
        while True:
            Slow()
            for _ in range(10):
                time.sleep(0.05)

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        libzero.run_ranks(2, body)
    assert time.monotonic() - begin < 30  # each second, until one is raised outside


def test_rank_threads_share_the_gil() -> None:
    """A rank waits in a collective while another one computes in Python."""

    def body(comm: libzero.Communicator) -> float:
        begin = time.monotonic()
        if comm.rank == 1:
            while time.monotonic() - begin < 0.3:
                sum(range(1000))
        comm.barrier()
        return time.monotonic() - begin

    assert all(took < 10 for took in libzero.run_ranks(2, body, timeout_s=20))


DEATH = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, after the first failure
    engine = libzero.Engine(network(1, 256), config(3))
    rank = engine.comm.rank
    try:
        for step in range(4):
            loss = engine(batch(rank, step)).square().mean()
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            engine.backward(loss)
            engine.step()
    except libzero.CommError as lost:
        print("lost", lost.rank, step, lost.code, time.monotonic() - begin < 2, flush=True)
        os._exit(0)
"""


def test_the_death_of_a_rank_is_a_comm_error_of_the_other(programs: Programs) -> None:
    assert "lost 1 2 6 True" in programs.ranks(DEATH, rc=6)


SAVING = """
    import signal, threading
    engine = libzero.Engine(network(1, 1200), config(3))
    comm, rank, folder = engine.comm, engine.comm.rank, FOLDER
    pids = [int(pid) for pid in comm.all_gather_bytes(str(os.getpid()).encode())]
    def step(n):
        engine.backward(engine(batch(rank, n)).square().mean())
        engine.step()
        return engine.state_hash()
    first = step(0)
    engine.save_checkpoint(folder, "first")
    second = step(1)
    if rank == 0:
        print("hashes", first, second, flush=True)
    def writes():
        return any(name.startswith(".tmp") for name in os.listdir(folder))
    def interrupt():
        while not writes():
            time.sleep(0.0005)
        if rank == 1 and HANGS:
            os.kill(pids[1], signal.SIGSTOP)
        if HANGS:
            time.sleep(0.5)
            print("in the middle" if writes() else "too late", flush=True)
        os.kill(os.getpid(), signal.SIGINT)  # every rank, as from a terminal
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        engine.save_checkpoint(folder, "second")
        time.sleep(5)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if HANGS:
        os.kill(pids[1], signal.SIGKILL)
    os._exit(0)
"""


@pytest.mark.parametrize("hangs", [nightly(False), True])
def test_ctrl_c_in_a_save_leaves_a_whole_checkpoint(programs: Programs, hangs: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    text = SAVING.replace("FOLDER", repr(str(folder))).replace("HANGS", str(hangs))
    out = programs.ranks(text, rc=6 if hangs else 0)
    assert out.count("interrupted") == (1 if hangs else 2)
    hashes = dict(zip(("first", "second"), out.split("hashes ")[1].split()[:2], strict=True))
    models = [network(3, 1200) for _ in range(2)]

    def body(comm: libzero.Communicator) -> tuple[str, str]:
        with libzero.Engine(models[comm.rank], config(3)) as engine:
            return engine.load_checkpoint(folder), engine.state_hash()

    found = libzero.run_ranks(2, body)
    assert found[0] == found[1] and found[0] in hashes.items()  # a save that can continue ends first
    if "in the middle" in out:
        assert found[0][0] == "first"
    else:
        assert not hangs or "too late" in out  # a busy machine stopped the other rank after its part


@pytest.mark.nightly
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-"])
def test_a_program_without_standard_streams(programs: Programs, closed: str) -> None:
    """As daemons and cron start programs: what is printed goes into no file, and the numbers are the same."""
    said = []
    for streams in (closed, ""):
        programs.run(
            """
            nvme = {"device": "nvme", "nvme_path": os.getcwd()}
            engine = libzero.Engine(network(), config(zero_optimization={"stage": 3, "offload_optimizer": nvme}))
            losses = []
            for step in range(6):
                for stream in (1, 2):
                    os.write(stream, b"text " * 1000)
                loss = engine(batch(0, step)).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            with open("said", "w") as out:
                print(losses, os.readlink("/proc/self/fd/2"), sep="\\n", file=out)
            """,
            "/bin/sh",
            "-c",
            f'cd {programs.folder} && exec "$0" "$@" {streams}',
        )
        losses, stderr = (programs.folder / "said").read_text().splitlines()
        assert (stderr == "/dev/null") == (streams != "")
        said.append(losses)
    assert said[0] == said[1]


# ---- ranks with different numbers of batches ----
@pytest.mark.parametrize("stage", range(4))
def test_a_save_during_a_step_of_the_other_rank_leaves_no_checkpoint(stage: int, tmp_path: Path) -> None:
    """Rank 1 has more batches than rank 0, which saves. Both fail."""
    models = [network() for _ in range(2)]

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(models[comm.rank], config(stage))
        with pytest.raises((libzero.CommError, RuntimeError), match="got different calls"):
            for step in range(2 + 3 * comm.rank):
                engine.backward(engine(batch(comm.rank, step)).square().mean())
                engine.step()
            engine.save_checkpoint(tmp_path, "end")

    libzero.run_ranks(2, body, timeout_s=600)  # they do not wait for it
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".tmp")]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
def test_a_rank_that_leaves_before_the_others_is_named(programs: Programs, stage: int) -> None:
    out = programs.ranks(
        f"""
        engine = libzero.Engine(network(), config({stage}))
        for step in range(2 + 3 * engine.comm.rank):
            begin = time.monotonic()
            try:
                engine.backward(engine(batch(engine.comm.rank, step)).square().mean())
                engine.step()
            except RuntimeError:
                print("told soon", time.monotonic() - begin < 100, flush=True)
                raise
        print("all batches of rank", engine.comm.rank)
        """,
        rc=None,
    )
    assert "all batches of rank 0" in out and "all batches of rank 1" not in out and "zero run: FAILED (exit" in out
    assert "told soon True" in out
    assert re.search(r"rank 0 \(pid \d+\) has ended, expected \w+\(.*from all 2 ranks \(rank 1/2", out), out


# ---- torch's folder for compiled code ----
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("temporary", [True, False])
def test_torch_gets_a_folder_where_its_own_choice_would_fail(
    named: bool, temporary: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    def no_folder() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored afterwards")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("getpass.getuser", (lambda: "someone") if named else no_name)
    monkeypatch.setattr("tempfile.gettempdir", (lambda: str(tmp_path)) if temporary else no_folder)
    shared = os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK)
    folder = str(tmp_path) if temporary else "/dev/shm" if shared else ""
    name = f"torchinductor_{'someone' if named else os.getuid()}"
    wanted = None if named and temporary else os.path.join(folder, name) if folder else "/"
    libzero._cache.prepare()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == wanted
    libzero._cache.prepare()  # a choice that was made is kept
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == wanted
