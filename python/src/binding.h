// Shared by the files of the extension. The binding uses only libzero's public headers and torch's casters. It converts
// arguments, releases the GIL and translates errors; arithmetic and collectives do not belong here.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <unistd.h>
#include <zero/communicator.h>
#include <zero/errors.h>
#include <zero/mesh.h>

#include <memory>
#include <string>
#include <utility>

namespace torch::nn {
class Module;
}

namespace libzero {
namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_options(py::module_& module);
void bind_plan(py::module_& module);
void bind_communicator(py::module_& module);
void bind_parallel(py::module_& module);
void bind_moe(py::module_& module);
void bind_engine(py::module_& module);

// A Python object that is held, and released, where there may be no GIL.
inline std::shared_ptr<py::object> held_anywhere(const py::object& object) {
  return {new py::object(object), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

// A C++ object owned by Python. It is destroyed without the GIL, because its destructor may wait for threads that need
// the GIL. It is destroyed only in the process that created it: a forked child (a DataLoader's worker) has a copy of
// its memory but not its threads and connections.
template <class T>
class Owned {
 public:
  explicit Owned(std::shared_ptr<T> object) : object_(std::move(object)) {}
  Owned(Owned&& other) noexcept : object_(std::move(other.object_)), process_(other.process_) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (process_ != ::getpid()) {
      new std::shared_ptr<T>(std::move(object_));  // leaked on purpose in a forked process
    } else if (object_) {
      reset();
    }
  }
  void reset() {
    auto dying = std::move(object_);  // with the GIL, if at all: another thread may be in get()
    if (PyGILState_Check() == 0) {
      dying.reset();
    } else {
      py::gil_scoped_release release;
      dying.reset();
    }
  }
  // A copy, so that close() in another thread does not destroy what a call uses.
  std::shared_ptr<T> get(const char* what) const {
    if (process_ != ::getpid())
      throw zero::ConfigError(std::string("[") + what + "] cannot be used in process " + std::to_string(::getpid()) +
                              ": it was made in process " + std::to_string(process_) +
                              ". Hint: workers of a DataLoader prepare data only.");
    if (!object_) throw zero::ConfigError(std::string("[") + what + "] was closed. Hint: make a new one.");
    return object_;
  }
  bool empty() const { return object_ == nullptr; }
  bool alive() const { return object_ != nullptr && process_ == ::getpid(); }

 private:
  std::shared_ptr<T> object_;
  pid_t process_ = ::getpid();
};

struct PyCommunicator {
  Owned<zero::Communicator> owned;
  explicit PyCommunicator(std::shared_ptr<zero::Communicator> comm) : owned(std::move(comm)) {}
  std::shared_ptr<zero::Communicator> get() const { return owned.get("Communicator"); }
};

struct PyMesh {
  Owned<zero::Mesh> owned;
  explicit PyMesh(std::shared_ptr<zero::Mesh> mesh) : owned(std::move(mesh)) {}
  std::shared_ptr<zero::Mesh> get() const { return owned.get("Mesh"); }
};

// RAII scope for calls that may wait for peers. On Python's main thread, if the interpreter cannot handle Ctrl-C within
// half a second because this thread waits in libzero, `comm` is aborted. The wait then throws, and KeyboardInterrupt is
// raised instead. A SIGINT handler installed by the program is not replaced. Constructed and destroyed with the GIL.
class InterruptScope {
 public:
  explicit InterruptScope(const std::shared_ptr<zero::Communicator>& comm);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  bool armed_ = false;
};

// Runs a function that computes, waits or communicates, without the GIL and interruptible by Ctrl-C.
template <class F>
auto blocking(const std::shared_ptr<zero::Communicator>& comm, F&& run) {
  InterruptScope scope(comm);
  py::gil_scoped_release release;
  return std::forward<F>(run)();
}

// Returns a torch::nn module with the names of a torch.nn.Module and the same tensors, not copies. ModuleList and
// Sequential become C++ lists, so that units are found as in C++. ConfigError for lazy parameters without a shape.
std::shared_ptr<torch::nn::Module> mirror(const py::object& module);
// Adds the parameters that the program has registered or replaced since.
void refresh_parameters(torch::nn::Module& mirrored, const py::object& module);
// Gives the mirror the buffers that the module has now.
void refresh_buffers(torch::nn::Module& mirrored, const py::object& module);

}  // namespace libzero
