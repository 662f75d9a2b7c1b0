// Bindings of zero::Engine; libzero/engine.py wraps them.
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/nn/module.h>
#include <zero/build.h>
#include <zero/build_generator.h>
#include <zero/engine.h>
#include <zero/program_steps.h>
#include <zero/read_scope.h>

#include <map>
#include <optional>
#include <span>
#include <string_view>

#include "binding.h"
#include "update_rule.h"

namespace libzero {
namespace {

struct Held {
  std::shared_ptr<zero::Communicator> comm;  // outlives the engine
  std::shared_ptr<zero::Mesh> mesh;          // shared with the program, which may keep it longer than the engine
  std::shared_ptr<torch::nn::Module> model;
  std::unique_ptr<zero::Engine> engine;
};

class PyEngine {
 public:
  PyEngine(const py::object& module, const zero::Options& options, const PyCommunicator& comm, const PyMesh* mesh,
           const py::object& rule)
      : owned_(std::make_shared<Held>()) {
    auto& held = *owned_.get("Engine");
    held.comm = comm.get();
    held.model = mirror(module);
    const auto given = mesh != nullptr ? mesh->get() : nullptr;
    const auto optimizer = rule.is_none() ? nullptr : std::make_shared<PyRule>(rule);
    if (given && given->world() != held.comm)
      throw zero::ConfigError("[Engine] got a mesh of another Communicator than comm. Hint: leave comm out.");
    blocking(held.comm, [&] {
      held.engine = given ? std::make_unique<zero::Engine>(held.model, options, given, optimizer)
                          : std::make_unique<zero::Engine>(held.model, options, held.comm, optimizer);
      held.mesh = held.engine->shared_mesh();
    });
  }

  std::shared_ptr<const Held> held() const { return owned_.get("Engine"); }

  // Runs a call that computes, waits or communicates, with a range of that name in torch.profiler.
  template <class F>
  auto run(const char* range, F&& call) const {
    const auto held = owned_.get("Engine");
    return blocking(held->comm, [&] {
      RECORD_USER_SCOPE(range);
      try {
        return call(*held->engine);
      } catch (const zero::CommError& error) {
        // Its text names the collectives that differ; the program knows its own call.
        if (std::string_view(error.what()).find("got different calls") == std::string_view::npos) throw;
        const auto name = std::string_view(range).substr(std::string_view("libzero::").size());
        throw zero::CommError("[Engine::" + std::string(name) + "] " + error.what(), error.rank());
      }
    });
  }
  // A call that does not wait for peers, but may wait for this rank's delayed update.
  template <class F>
  auto local(F&& call) const {
    const auto held = owned_.get("Engine");
    return blocking(nullptr, [&] { return call(*held->engine); });
  }
  bool alive() const { return owned_.alive(); }
  void close() {
    if (owned_.alive()) owned_.reset();
  }

 private:
  Owned<Held> owned_;
};

// In the place of torch.random.default_generator while a module is built: torch.manual_seed and its like, which are no
// operators, see and leave the generator of an eager build.
struct PyGenerator {
  py::object real;

  py::object attribute(const std::string& name) const {
    const py::object found = real.attr(name.c_str());
    if (PyCallable_Check(found.ptr()) == 0) return found;
    return py::cpp_function([found](const py::args& values, const py::kwargs& words) {
      zero::detail::lend_generator();
      py::object result = found(*values, **words);
      zero::detail::take_generator();
      return result;
    });
  }
};

// Modules may be built in several threads, with the GIL.
class GeneratorScope {
 public:
  GeneratorScope() {
    if (scopes_++ > 0) return;
    const auto random = py::module_::import("torch.random");
    random.attr("default_generator") = PyGenerator{random.attr("default_generator")};
  }
  ~GeneratorScope() {
    if (--scopes_ > 0) return;
    const auto random = py::module_::import("torch.random");
    const py::object held = random.attr("default_generator");
    random.attr("default_generator") = held.cast<PyGenerator&>().real;
  }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  inline static int scopes_ = 0;
};

struct PyGathered {
  Owned<zero::Communicator> comm;
  Owned<zero::GatheredParameters> scope;
};

PyGathered gathered(const PyEngine& self, const std::optional<std::vector<std::string>>& names, bool modify) {
  auto scope = self.run("libzero::gathered_parameters", [&](zero::Engine& engine) {
    return names ? engine.gathered_parameters(*names, modify) : engine.gathered_parameters(modify);
  });
  return {Owned<zero::Communicator>(self.held()->comm),
          Owned<zero::GatheredParameters>(std::make_shared<zero::GatheredParameters>(std::move(scope)))};
}

struct PyForward {  // Engine.__call__: handles Ctrl-C during all-gathers of the forward
  Owned<zero::Communicator> comm;
  std::unique_ptr<InterruptScope> scope;
};

// The tensors of a compiled graph's inputs, which may also be numbers and None.
std::vector<at::Tensor> tensors_of(const py::sequence& inputs) {
  std::vector<at::Tensor> tensors;
  for (const auto input : inputs)
    if (THPVariable_Check(input.ptr())) tensors.push_back(THPVariable_Unpack(input.ptr()));
  return tensors;
}

struct PyReadScope {
  std::optional<zero::ReadScope> scope;
};

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

py::dict report_of(const zero::ExportReport& report) {
  return py::dict(py::arg("files") = report.files, py::arg("tensors") = report.tensors, py::arg("bytes") = report.bytes,
                  py::arg("remarks") = report.remarks);
}

using Changes = std::map<std::string, py::function>;

// Calls Python. `calls` must outlive the result, whose copies count no reference: an export copies and destroys them
// without the GIL.
decltype(zero::ExportOptions::change) changes_of(const Changes& calls) {
  decltype(zero::ExportOptions::change) changes;
  for (const auto& [name, call] : calls)
    changes[name] = [&call = call](std::int64_t begin, std::span<float> values) {
      const py::gil_scoped_acquire gil;
      call(begin, at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kFloat));
    };
  return changes;
}

py::dict summary_of(const zero::TraceSummary& s) {
  return py::dict(py::arg("steps") = s.steps, py::arg("step_s") = s.step_s, py::arg("compute_s") = s.compute_s,
                  py::arg("gather_wait_s") = s.gather_wait_s, py::arg("reduce_wait_s") = s.reduce_wait_s,
                  py::arg("optimizer_s") = s.optimizer_s, py::arg("communication_s") = s.communication_s,
                  py::arg("hidden") = s.hidden, py::arg("file") = s.file, py::arg("joined") = s.joined);
}

// Methods of zero::Engine as they are. collective: what computes, waits or communicates; see PyEngine::run().
template <class Method, class... Arguments>
auto collective(const char* name, Method method) {
  return [method, range = "libzero::" + std::string(name)](const PyEngine& self, const Arguments&... arguments) {
    return self.run(range.c_str(), [&](zero::Engine& engine) { return (engine.*method)(arguments...); });
  };
}
template <class Result, class... Arguments>
void collective(py::class_<PyEngine>& c, const char* name, Result (zero::Engine::*method)(Arguments...)) {
  c.def(name, collective<decltype(method), std::decay_t<Arguments>...>(name, method));
}
template <class Method, class... Arguments>
auto local(Method method) {
  return [method](const PyEngine& self, const Arguments&... arguments) {
    return self.local([&](zero::Engine& engine) { return (engine.*method)(arguments...); });
  };
}
template <class Result, class... Arguments>
void local(py::class_<PyEngine>& c, const char* name, Result (zero::Engine::*method)(Arguments...)) {
  c.def(name, local<decltype(method), std::decay_t<Arguments>...>(method));
}
template <class Result, class... Arguments>
void local(py::class_<PyEngine>& c, const char* name, Result (zero::Engine::*method)(Arguments...) const) {
  c.def(name, local<decltype(method), std::decay_t<Arguments>...>(method));
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<zero::StepResult>(module, "StepResult")
      .def_readonly("updated", &zero::StepResult::updated)
      .def_readonly("overflow", &zero::StepResult::overflow)
      .def_readonly("grad_norm", &zero::StepResult::grad_norm)
      .def_readonly("loss_scale", &zero::StepResult::loss_scale)
      .def_readonly("lr", &zero::StepResult::lr)
      .def_readonly("global_step", &zero::StepResult::global_step);

  py::class_<zero::ExportOptions>(module, "ExportOptions")
      .def(py::init<>())
      .def_readwrite("format", &zero::ExportOptions::format)
      .def_readwrite("dtype", &zero::ExportOptions::dtype)
      .def_readwrite("names", &zero::ExportOptions::names)
      .def_readwrite("prefix", &zero::ExportOptions::prefix)
      .def_readwrite("shard_bytes", &zero::ExportOptions::shard_bytes)
      .def_readwrite("duplicate_tied", &zero::ExportOptions::duplicate_tied)
      .def_readwrite("allow_overflow", &zero::ExportOptions::allow_overflow)
      .def_readwrite("heads", &zero::ExportOptions::heads)
      .def_readwrite("config", &zero::ExportOptions::config)
      .def_readwrite("only", &zero::ExportOptions::only)
      .def_readwrite("stem", &zero::ExportOptions::stem)
      .def_readwrite("extra_files", &zero::ExportOptions::extra_files);
  py::class_<zero::ImportOptions>(module, "ImportOptions")
      .def(py::init<>())
      .def_readwrite("names", &zero::ImportOptions::names)
      .def_readwrite("key", &zero::ImportOptions::key)
      .def_readwrite("prefix", &zero::ImportOptions::prefix)
      .def_readwrite("partial", &zero::ImportOptions::partial)
      .def_readwrite("optimizer", &zero::ImportOptions::optimizer)
      .def_readwrite("untie", &zero::ImportOptions::untie)
      .def_readwrite("only", &zero::ImportOptions::only);

  py::class_<PyGathered>(module, "GatheredScope").def("close", [](const PyGathered& self) {
    const auto scope = self.scope.get("gathered_parameters");
    blocking(self.comm.get("gathered_parameters"), [&] { scope->close(); });
  });

  py::class_<PyForward>(module, "ForwardScope")
      .def("__enter__", [](PyForward& self) { self.scope = std::make_unique<InterruptScope>(self.comm.get("Engine")); })
      .def("__exit__", [](PyForward& self, const py::args&) {
        self.scope.reset();
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      });

  py::class_<PyReadScope>(module, "ReadScope")
      .def(py::init([](const py::sequence& inputs, const char* kernel, bool training) {
             const auto tensors = tensors_of(inputs);
             py::gil_scoped_release release;
             return PyReadScope{zero::ReadScope(tensors, kernel, training)};
           }),
           py::arg("inputs"), py::arg("kernel"), py::arg("training"))
      .def_static(
          "check_write",
          [](const py::sequence& inputs, const char* kernel) {
            zero::ReadScope::check_write(tensors_of(inputs), kernel);
          },
          py::arg("inputs"), py::arg("kernel"))
      .def(
          "close", [](PyReadScope& self) { self.scope.reset(); }, py::call_guard<py::gil_scoped_release>());

  PyRule::bind(module);
  py::class_<PyEngine> c(module, "Engine");
  c.def(py::init<const py::object&, const zero::Options&, const PyCommunicator&, const PyMesh*, const py::object&>(),
        py::arg("module"), py::arg("options"), py::arg("comm"), py::arg("mesh") = py::none(),
        py::arg("rule") = py::none());
  c.def("forward_scope", [](const PyEngine& self) {
    return PyForward{Owned<zero::Communicator>(self.held()->comm), nullptr};
  });
  c.def("alive", &PyEngine::alive);
  c.def("close", &PyEngine::close);
  c.def(
      "backward",
      [](const PyEngine& self, const at::Tensor& loss, bool retain_graph, bool create_graph, bool recoverable,
         std::optional<std::int64_t> tokens) {
        self.run("libzero::backward", [&](zero::Engine& engine) {
          engine.backward(loss, {.retain_graph = retain_graph,
                                 .create_graph = create_graph,
                                 .recoverable = recoverable,
                                 .tokens = tokens});
        });
      },
      py::arg("loss"), py::arg("retain_graph") = false, py::arg("create_graph") = false, py::arg("recoverable") = false,
      py::arg("tokens") = py::none());
  collective(c, "step", &zero::Engine::step);
  collective(c, "discard_micro_batch", &zero::Engine::discard_micro_batch);
  collective(c, "flush", &zero::Engine::flush);
  c.def("gradient", [](const PyEngine& self, const std::string& name) {
    return optional(self.run("libzero::gradient", [&](zero::Engine& engine) { return engine.gradient(name); }));
  });
  c.def("own_gradient", [](const PyEngine& self, const std::string& name) {
    const auto own = self.local([&](zero::Engine& engine) { return engine.own_gradient(name); });
    return std::make_pair(own.begin, optional(own.values));
  });
  collective(c, "set_gradient", &zero::Engine::set_gradient);
  collective(c, "set_own_gradient", &zero::Engine::set_own_gradient);
  collective(c, "parameter_state", &zero::Engine::parameter_state);
  c.def("state_names", [](const PyEngine& self, const std::string& name) {
    return self.local([&](zero::Engine& engine) { return engine.state_names(name); });
  });
  c.def("own_parameter_state", [](const PyEngine& self, const std::string& name, const std::string& state) {
    auto own = self.local([&](zero::Engine& engine) { return engine.own_parameter_state(name, state); });
    return std::make_pair(own.begin, std::move(own.values));
  });
  collective(c, "set_parameter_state", &zero::Engine::set_parameter_state);
  collective(c, "set_own_parameter_state", &zero::Engine::set_own_parameter_state);
  c.def("gathered_parameters", &gathered, py::arg("names"), py::arg("modify"));
  collective(c, "full_state_dict", &zero::Engine::full_state_dict);
  collective(c, "state_hash", &zero::Engine::state_hash);
  collective(c, "logical_hash", &zero::Engine::logical_hash);
  c.def("refresh_parameters",
        [](const PyEngine& self, const py::object& module) { refresh_parameters(*self.held()->model, module); });
  c.def("refresh_buffers",
        [](const PyEngine& self, const py::object& module) { refresh_buffers(*self.held()->model, module); });
  c.def("save_checkpoint", [](const PyEngine& self, const std::filesystem::path& dir, const std::string& tag,
                              bool weights_only, bool exclude_frozen) {
    self.run("libzero::save_checkpoint", [&](zero::Engine& engine) {
      engine.save_checkpoint(dir, tag, {.weights_only = weights_only, .exclude_frozen = exclude_frozen});
    });
  });
  collective(c, "keep_snapshot", &zero::Engine::keep_snapshot);
  local(c, "checkpoint_pending", &zero::Engine::checkpoint_pending);
  collective(c, "finish_checkpoint", &zero::Engine::finish_checkpoint);
  c.def("export_weights", [](const PyEngine& self, const std::filesystem::path& path,
                             const zero::ExportOptions& options, const Changes& change) {
    auto whole = options;
    whole.change = changes_of(change);
    return report_of(
        self.run("libzero::export_weights", [&](zero::Engine& engine) { return engine.export_weights(path, whole); }));
  });
  c.def("save_16bit_model", [](const PyEngine& self, const std::filesystem::path& dir, const std::string& filename,
                               bool exclude_frozen_parameters) {
    return report_of(self.run("libzero::save_16bit_model", [&](zero::Engine& engine) {
      return engine.save_16bit_model(dir, filename, exclude_frozen_parameters);
    }));
  });
  c.def("import_weights",
        [](const PyEngine& self, const std::filesystem::path& path, const zero::ImportOptions& options) {
          const auto report = self.run("libzero::import_weights",
                                       [&](zero::Engine& engine) { return engine.import_weights(path, options); });
          py::dict result;
          result["taken"] = report.taken;
          result["converted"] = report.converted;
          result["tied"] = report.tied;
          result["missing"] = report.missing;
          result["unexpected"] = report.unexpected;
          result["bytes_read"] = report.bytes_read;
          return result;
        });
  c.def("load_checkpoint", [](const PyEngine& self, const std::filesystem::path& dir, const std::string& tag,
                              bool weights_only, const std::vector<std::string>& partial) {
    return self.run("libzero::load_checkpoint", [&](zero::Engine& engine) {
      return engine.load_checkpoint(dir, tag, {.weights_only = weights_only, .partial = partial});
    });
  });
  local(c, "set_user_state", &zero::Engine::set_user_state);
  local(c, "user_state", &zero::Engine::user_state);
  c.def("start_trace", [](const PyEngine& self, const std::filesystem::path& file, std::int64_t first,
                          std::optional<std::int64_t> last) {
    zero::TraceSteps steps{.first = first};
    if (last) steps.last = *last;
    self.run("libzero::start_trace", [&](zero::Engine& engine) { engine.start_trace(file, steps); });
  });
  c.def("stop_trace", [](const PyEngine& self) {
    return summary_of(self.run("libzero::stop_trace", [](zero::Engine& engine) { return engine.stop_trace(); }));
  });
  c.def("times", [](const PyEngine& self) {
    const auto t = self.local([](zero::Engine& engine) { return engine.times(); });
    return py::dict(py::arg("compute_s") = t.compute_s, py::arg("gather_wait_s") = t.gather_wait_s,
                    py::arg("reduce_wait_s") = t.reduce_wait_s, py::arg("optimizer_s") = t.optimizer_s);
  });
  local(c, "lr", &zero::Engine::lr);
  local(c, "parameter_group", &zero::Engine::parameter_group);
  local(c, "set_lr", &zero::Engine::set_lr);
  local(c, "options", &zero::Engine::options);
  local(c, "memory", &zero::Engine::memory);
  local(c, "reset_peak_memory", &zero::Engine::reset_peak_memory);
  local(c, "is_gradient_accumulation_boundary", &zero::Engine::is_gradient_accumulation_boundary);
  local(c, "global_step", &zero::Engine::global_step);
  local(c, "skipped_steps", &zero::Engine::skipped_steps);
  local(c, "global_samples", &zero::Engine::global_samples);
  local(c, "accumulation_steps", &zero::Engine::accumulation_steps);
  local(c, "micro_batch_size", &zero::Engine::micro_batch_size);
  c.def("mesh", [](const PyEngine& self) { return PyMesh(self.held()->mesh); });
  c.def("accept_backward",
        [](const PyEngine& self) { self.local([](zero::Engine& e) { zero::ProgramSteps(e).accept_backward(); }); });
  c.def("follow", [](const PyEngine& self, const at::Tensor& output) {
    self.local([&](zero::Engine& e) { zero::ProgramSteps(e).follow(output); });
  });
  c.def("scale", [](const PyEngine& self, const at::Tensor& loss) {
    return self.local([&](zero::Engine& e) { return zero::ProgramSteps(e).scale(loss); });
  });
  c.def("add_up", [](const PyEngine& self) { self.local([](zero::Engine& e) { zero::ProgramSteps(e).add_up(); }); });
  c.def("set_number", [](const PyEngine& self, int group, const std::string& name, double value) {
    self.local([&](zero::Engine& e) { zero::ProgramSteps(e).set_number(group, name, value); });
  });
  c.def("discard_gradients",
        [](const PyEngine& self) { self.local([](zero::Engine& e) { zero::ProgramSteps(e).discard_gradients(); }); });
  c.def("grad_norm", [](const PyEngine& self) {
    return self.run("libzero::grad_norm", [](zero::Engine& e) { return zero::ProgramSteps(e).grad_norm(); });
  });
  c.def("take_clip", [](const PyEngine& self) {
    return self.local([](zero::Engine& e) { return zero::ProgramSteps(e).take_clip(); });
  });
  c.def("clip_grad_norm", [](const PyEngine& self, double max_norm) {
    return self.run("libzero::clip_grad_norm",
                    [&](zero::Engine& e) { return zero::ProgramSteps(e).clip_grad_norm(max_norm); });
  });
  c.def("count_micro_batches", [](const PyEngine& self, bool counts) {
    self.local([&](zero::Engine& e) { zero::ProgramSteps(e).count_micro_batches(counts); });
  });
  c.def("set_accumulation_steps", [](const PyEngine& self, std::int64_t steps) {
    self.local([&](zero::Engine& e) { zero::ProgramSteps(e).set_accumulation_steps(steps); });
  });
  c.def("leave_out", [](const PyEngine& self, const std::vector<std::string>& names) {
    self.local([&](zero::Engine& e) { zero::ProgramSteps(e).leave_out(names); });
  });
  local(c, "micro_batches", &zero::Engine::micro_batches);
  local(c, "loss_scale", &zero::Engine::loss_scale);
  local(c, "units", &zero::Engine::units);
  local(c, "unit_modules", &zero::Engine::unit_modules);

  py::class_<PyGenerator>(module, "_BuildGenerator").def("__getattr__", &PyGenerator::attribute);
  module.def(
      "build",
      [](const py::function& make, std::optional<at::Device> device) {
        const GeneratorScope generator;
        try {
          return zero::build([&] { return make(); }, device.value_or(at::kCPU));
        } catch (py::error_already_set& error) {
          // data_ptr() of a parameter without values: torch reports what its memory's guard says.
          const auto text = py::str(error.value()).cast<std::string>();
          if (!error.matches(PyExc_RuntimeError) || !text.starts_with("[zero::build]")) throw;
          throw zero::ConfigError(text.substr(0, text.find('\n')));
        }
      },
      py::arg("make"), py::arg("device") = py::none());
  module.def(
      "divided_parameter",
      [](const at::Tensor& like, const std::vector<std::int64_t>& sizes) {
        return zero::divided_parameter(like, sizes);
      },
      py::arg("like"), py::arg("sizes"));
  module.def(
      "deferred_values",
      [](const at::Tensor& like, const std::vector<std::int64_t>& sizes, std::int64_t place, const py::function& fill) {
        return zero::deferred_values(sizes, like.scalar_type(), like.device(), place,
                                     [call = held_anywhere(fill)](const at::Tensor& values) {
                                       const py::gil_scoped_acquire gil;
                                       (*call)(values);
                                     });
      },
      py::arg("like"), py::arg("sizes"), py::arg("place"), py::arg("fill"));
}

}  // namespace libzero
