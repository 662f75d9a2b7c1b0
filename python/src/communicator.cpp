// Bindings of Communicator, and ranks as threads of this process.
#include <torch/csrc/utils/pybind.h>
#include <zero/process_group.h>
#include <zero/work.h>

#include <atomic>
#include <condition_variable>
#include <thread>

#include "binding.h"

namespace libzero {
namespace {

using Numels = std::optional<std::vector<std::int64_t>>;

struct PyWork {
  Owned<zero::Communicator> comm;  // outlives the work
  Owned<zero::Work> work;
};

template <class F>
auto blocking_on(const PyCommunicator& self, F&& call) {
  const auto comm = self.get();
  return blocking(comm, [&] { return call(*comm); });
}

// Starts a collective without the GIL, because the transport may have to wait for buffer space.
template <class F>
PyWork started(const PyCommunicator& self, F&& start) {
  return {Owned<zero::Communicator>(self.get()), Owned<zero::Work>(blocking_on(self, std::forward<F>(start)))};
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

PyCommunicator from_process_group(const py::object& group) {
  auto* const raw = group.cast<c10d::ProcessGroup*>();
  const auto held = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(raw);
  return PyCommunicator(blocking(nullptr, [&] { return zero::Communicator::from_process_group(held); }));
}

// One run of ranks as threads. The calling thread waits for them and checks for Ctrl-C.
class Ranks {
 public:
  Ranks(py::function body, int size) : body_(std::move(body)), size_(size) {}

  void run(double timeout_s) {
    py::gil_scoped_release release;
    zero::ThreadFaults faults;
    faults.timeout = milliseconds(timeout_s);
    std::thread runner([&] {
      try {
        zero::run_ranks(size_, faults, [this](std::shared_ptr<zero::Communicator> comm) { rank(std::move(comm)); });
      } catch (...) {
        failure_ = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    });
    std::exception_ptr interrupt;
    std::chrono::steady_clock::time_point stopped;
    while (!wait_a_moment()) {
      const auto now = std::chrono::steady_clock::now();
      // Again every second: an exception is lost if it is raised within a __del__ or another callback.
      if (interrupt && now - stopped < std::chrono::seconds(1)) continue;
      py::gil_scoped_acquire gil;
      if (!interrupt) {
        if (PyErr_CheckSignals() == 0) continue;
        interrupt = std::make_exception_ptr(py::error_already_set());
      }
      stopped = now;
      stop();
    }
    runner.join();
    if (interrupt) failure_ = interrupt;
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void rank(std::shared_ptr<zero::Communicator> comm) {
    py::gil_scoped_acquire gil;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) {  // before this thread began
        PyErr_SetNone(PyExc_KeyboardInterrupt);
        throw py::error_already_set();
      }
      comms_.push_back(comm);
      threads_.push_back(PyThreadState_Get()->thread_id);
    }
    const Leave leave{*this, PyThreadState_Get()->thread_id};
    body_(PyCommunicator(std::move(comm)));
  }

  struct Leave {  // a later thread may have the same number
    Ranks& ranks;
    const unsigned long thread;
    ~Leave() {
      std::lock_guard<std::mutex> lock(ranks.mutex_);
      std::erase(ranks.threads_, thread);
    }
  };

  bool wait_a_moment() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return ended_; });
  }

  // Requires the GIL. abort() ends waits; an asynchronous exception ends Python code.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    for (const auto& held : comms_)
      if (const auto comm = held.lock()) comm->abort("KeyboardInterrupt");
    for (const auto thread : threads_) PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
  }

  py::function body_;
  int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false, stopped_ = false;
  std::vector<std::weak_ptr<zero::Communicator>> comms_;
  std::vector<unsigned long> threads_;
  std::exception_ptr failure_;
};

py::dict stats_of(const PyCommunicator& self) {
  const auto stats = self.get()->stats();
  py::dict ops;
  for (const auto& [name, row] : stats.by_op) ops[py::str(name)] = py::make_tuple(row.calls, row.bytes_sent);
  return py::dict(py::arg("by_op") = ops,
                  py::arg("control") = py::make_tuple(stats.control.calls, stats.control.bytes_sent),
                  py::arg("bytes_across_hosts") = stats.bytes_across_hosts, py::arg("bytes_sent") = stats.bytes_sent());
}

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<PyWork>(module, "Work", "A collective in progress.")
      .def(
          "wait",
          [](const PyWork& self) {
            const auto work = self.work.get("Work");
            blocking(self.comm.get("Work"), [&] { work->wait(); });
          },
          "Blocks until the collective is complete on this rank: outputs may then be read, inputs written.")
      .def(
          "done",
          [](const PyWork& self) {
            const auto work = self.work.get("Work");
            return blocking(nullptr, [&] { return work->done(); });
          },
          "True when wait() would not block.");

  py::class_<PyCommunicator> c(module, "Communicator", "The ranks of a run, or of a group created by split().");
  c.def_static(
      "from_env", [] { return PyCommunicator(blocking(nullptr, &zero::Communicator::from_env)); },
      "[collective] The ranks started by torchrun, `zero run`, Open MPI, MPICH or Slurm; without these, a world of "
      "one.");
  c.def_static(
      "local", [] { return PyCommunicator(zero::Communicator::local()); }, "[local] A world of one.");
  c.def_static("launched", &zero::Communicator::launched,
               "[local] Whether the environment has a launcher's variables, which from_env() reads.");
  c.def_static("from_process_group", &from_process_group, py::arg("group"),
               "[collective] The ranks of a torch.distributed process group with a backend for CPU tensors.");
  c.def_property_readonly("rank", [](const PyCommunicator& self) { return self.get()->rank(); });
  c.def_property_readonly("size", [](const PyCommunicator& self) { return self.get()->size(); });
  c.def_property_readonly("local_rank", [](const PyCommunicator& self) { return self.get()->local_rank(); });
  c.def_property_readonly("local_size", [](const PyCommunicator& self) { return self.get()->local_size(); });
  c.def_property_readonly("transport", [](const PyCommunicator& self) { return self.get()->transport(); });
  c.def_property(
      "timeout_s", [](const PyCommunicator& self) { return static_cast<double>(self.get()->timeout().count()) / 1000; },
      [](const PyCommunicator& self, double seconds) { self.get()->set_timeout(milliseconds(seconds)); },
      "Timeout of an operation in seconds, for operations that begin afterwards.");
  c.def(
      "all_gather",
      [](const PyCommunicator& self, const at::Tensor& out, const at::Tensor& in, const std::string& of) {
        return started(self, [&](zero::Communicator& comm) { return comm.all_gather(out, in, of); });
      },
      py::arg("out"), py::arg("input"), py::arg("of") = "",
      "[collective] Flat, contiguous tensors of one dtype; out.numel() == size * input.numel().");
  c.def(
      "reduce_scatter",
      [](const PyCommunicator& self, const at::Tensor& out, const at::Tensor& in) {
        return started(self, [&](zero::Communicator& comm) { return comm.reduce_scatter(out, in); });
      },
      py::arg("out"), py::arg("input"),
      "[collective] Sum in fp32 in rank order, rounded once; fp32, bf16, fp16; input.numel() == size * out.numel().");
  c.def(
      "all_reduce",
      [](const PyCommunicator& self, const at::Tensor& inout) {
        return started(self, [&](zero::Communicator& comm) { return comm.all_reduce(inout); });
      },
      py::arg("inout"), "[collective] Sum, in place; fp32, bf16, fp16.");
  c.def(
      "broadcast",
      [](const PyCommunicator& self, const at::Tensor& inout, int root) {
        return started(self, [&](zero::Communicator& comm) { return comm.broadcast(inout, root); });
      },
      py::arg("inout"), py::arg("root"), "[collective] The root's values on every rank; any dtype.");
  c.def(
      "all_to_all",
      [](const PyCommunicator& self, const at::Tensor& out, const at::Tensor& in, const Numels& out_numels,
         const Numels& in_numels) {
        if (out_numels.has_value() != in_numels.has_value())
          throw py::value_error("[Communicator.all_to_all] got one of out_numels and in_numels, expected both or none");
        return started(self, [&](zero::Communicator& comm) {
          return out_numels ? comm.all_to_all(out, in, *out_numels, *in_numels) : comm.all_to_all(out, in);
        });
      },
      py::arg("out"), py::arg("input"), py::arg("out_numels") = py::none(), py::arg("in_numels") = py::none(),
      "[collective] Part p of input is sent to rank p; any dtype. Parts have equal sizes, or in_numels[p] elements "
      "go to rank p and out_numels[p] come from it, which that rank's in_numels must say as well (else CommError).");
  c.def(
      "barrier",
      [](const PyCommunicator& self) { blocking_on(self, [](zero::Communicator& comm) { comm.barrier(); }); },
      "[collective] Blocks until all ranks have called it.");
  c.def(
      "all_gather_bytes",
      [](const PyCommunicator& self, const py::bytes& mine) {
        const std::string text = mine;
        std::vector<py::bytes> out;
        for (const auto& each :
             blocking_on(self, [&](zero::Communicator& comm) { return comm.all_gather_bytes(text); }))
          out.emplace_back(each);
        return out;
      },
      py::arg("mine"), "[collective] A short message of any length from each rank, in rank order. Blocking.");
  c.def(
      "split",
      [](const PyCommunicator& self, int color, int key, const std::string& name) -> std::optional<PyCommunicator> {
        auto part = blocking_on(self, [&](zero::Communicator& comm) { return comm.split(color, key, name); });
        if (part == nullptr) return std::nullopt;
        return PyCommunicator(std::move(part));
      },
      py::arg("color"), py::arg("key") = 0, py::arg("name") = "",
      "[collective] A new Communicator of the ranks with the same color; None for a color below 0. The run's "
      "Communicator counts the calls of a group with a name, as \"NAME.all_reduce\".");
  c.def(
      "abort",
      [](const PyCommunicator& self, const std::string& reason) {
        const auto comm = self.get();
        blocking(nullptr, [&] { comm->abort(reason); });
      },
      py::arg("reason"), "[local] Notifies every peer that this rank failed; their waits raise CommError.");
  c.def("stats", &stats_of, "[local] Payload bytes sent, by operation; control messages are separate.");
  c.def("reset_stats", [](const PyCommunicator& self) { self.get()->reset_stats(); });
  c.def(
      "close",
      [](PyCommunicator& self) {
        if (self.owned.alive()) self.owned.reset();
      },
      "[local] Releases it; engines that use it keep it. May wait a few seconds until peers have received.");
  c.def_property_readonly("closed", [](const PyCommunicator& self) { return self.owned.empty(); });
  c.def("__repr__", [](const PyCommunicator& self) {
    if (!self.owned.alive()) return std::string("libzero.Communicator(closed)");
    return "libzero.Communicator(rank " + std::to_string(self.get()->rank()) + "/" +
           std::to_string(self.get()->size()) + ", " + self.get()->transport() + ")";
  });

  module.def(
      "run_ranks", [](int size, py::function body, double timeout_s) { Ranks(std::move(body), size).run(timeout_s); },
      py::arg("size"), py::arg("body"), py::arg("timeout_s") = 60.0);
}

}  // namespace libzero
