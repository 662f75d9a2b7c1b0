// The extension libzero._native, and the translation of C++ errors to Python.
#include <Python.h>
#include <fcntl.h>
#include <torch/csrc/Exceptions.h>
#include <zero/log.h>
#include <zero/torch_check.h>
#include <zero/version.h>

#include <torch/csrc/utils/pythoncapi_compat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "binding.h"

namespace libzero {
namespace {

// A program that was started without stdin, stdout or stderr (a daemon, cron): the next file or socket would get one of
// these descriptors, and what is printed would go into it.
void fill_standard_streams() {
  int fd;
  while ((fd = ::open("/dev/null", O_RDWR)) >= 0 && fd <= STDERR_FILENO) {
  }
  if (fd > STDERR_FILENO) ::close(fd);
}

py::object error_class(const char* name) { return py::module_::import("libzero.errors").attr(name); }

void raise(const char* name, const zero::Error& error, int rank = -1) {
  // If Ctrl-C ended the wait, KeyboardInterrupt replaces the error of the wait.
  if (PyErr_CheckSignals() != 0) return;
  auto value = error_class(name)(error.what());
  value.attr("code") = static_cast<int>(error.code());
  if (rank >= 0) value.attr("rank") = rank;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const zero::ConfigError& error) {
    raise("ConfigError", error);
  } catch (const zero::CommError& error) {
    raise("CommError", error, error.rank());
  } catch (const zero::IoError& error) {
    raise("IoError", error);
  } catch (const zero::InternalError& error) {
    raise("InternalError", error);
  } catch (python_error& error) {  // raised by a hook or an autograd Function
    error.restore();
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

// Messages may come from any thread. They are dropped while the interpreter shuts down.
void log_to(const py::object& sink) {
  if (sink.is_none()) {
    py::gil_scoped_release release;
    zero::set_log_sink({});
    return;
  }
  auto* const callable = sink.inc_ref().ptr();  // leaked on purpose: a thread may be calling it
  py::gil_scoped_release release;
  zero::set_log_sink([callable](zero::LogLevel level, std::string_view text) {
    if (Py_IsInitialized() == 0 || Py_IsFinalizing() != 0) return;
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::object>(callable)(static_cast<int>(level), py::str(text.data(), text.size()));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("libzero's log sink");
    }
  });
}

// The exit code of a program that Python ends with 1. Called again, the last code counts.
void end_with(int code) {
  static int wanted = 1;
  static const bool registered = [] {
    return on_exit(
               [](int status, void*) {
                 if (status != 1) return;  // caught after all
                 std::fflush(nullptr);
                 _exit(wanted);
               },
               nullptr) == 0;
  }();
  wanted = registered ? code : 1;
}

}  // namespace

void bind_errors(py::module_& module) {
  py::register_local_exception_translator(&translate);
  module.def("end_with", &end_with, py::arg("code"));
  module.def("set_log_sink", &log_to, py::arg("sink"));
}

}  // namespace libzero

PYBIND11_MODULE(_native, module) {
  libzero::fill_standard_streams();
  module.attr("version") = ZERO_VERSION;
  module.def(
      "check_torch",
      [] {
        const py::gil_scoped_release released;
        std::vector<std::pair<std::string, std::string>> checks;
        for (auto& check : zero::check_torch()) checks.emplace_back(std::move(check.mechanism), std::move(check.fault));
        return checks;
      },
      "[local] What libzero relies on in torch beyond its documented interface: pairs of a mechanism and what is wrong "
      "with it, empty if it works. For versions that libzero was not tested with.");
  libzero::bind_errors(module);
  libzero::bind_options(module);
  libzero::bind_plan(module);
  libzero::bind_communicator(module);
  libzero::bind_parallel(module);
  libzero::bind_moe(module);
  libzero::bind_engine(module);
}
