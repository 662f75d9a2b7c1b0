// Bindings of Options: a configuration from a file, a dictionary or JSON text, and its explanation.
#include <zero/config_tools.h>
#include <zero/monitor.h>
#include <zero/options.h>

#include <optional>

#include "binding.h"

namespace libzero {
namespace {

std::string json_of(const py::handle& value) {
  return py::module_::import("json").attr("dumps")(value).cast<std::string>();
}

// {"zero_optimization.stage": 3}: overrides by dotted key.
std::vector<zero::Setting> settings_of(const py::dict& settings) {
  std::vector<zero::Setting> out;
  for (const auto& [key, value] : settings) out.push_back({key.cast<std::string>(), json_of(value)});
  return out;
}

zero::Options options_of(const py::object& config, const py::dict& settings) {
  const auto extra = settings_of(settings);
  if (config.is_none()) return zero::Options().with(extra);
  if (py::isinstance<zero::Options>(config)) return config.cast<const zero::Options&>().with(extra);
  if (py::isinstance<py::dict>(config)) return zero::Options::from_json(json_of(config), "<dict>", extra);
  if (py::isinstance<py::str>(config)) {
    const auto text = config.cast<std::string>();
    const auto first = text.find_first_not_of(" \t\r\n");
    if (first != std::string::npos && text[first] == '{') return zero::Options::from_json(text, "<text>", extra);
  }
  const auto path = py::module_::import("os").attr("fspath")(config).cast<std::string>();
  return zero::Options::from_file(path, extra);
}

}  // namespace

void bind_options(py::module_& module) {
  py::class_<zero::Options>(module, "Options",
                            "The description of a run: DeepSpeed's JSON keys, checked strictly. Immutable. Local.\n\n"
                            "config: a path, a dict, JSON text (begins with '{'), or Options. settings: overrides by "
                            "dotted key, {'zero_optimization.stage': 3}.\nConfigError lists all faults; IoError if a "
                            "file cannot be read.")
      .def(py::init(&options_of), py::arg("config") = py::none(), py::arg("settings") = py::dict())
      .def(
          "with_settings",
          [](const zero::Options& self, const py::dict& settings) { return self.with(settings_of(settings)); },
          py::arg("settings"), "A copy with the given dotted keys overridden.")
      .def("explain", py::overload_cast<int, bool>(&zero::Options::explain, py::const_), py::arg("world") = 1,
           py::arg("all") = false, "Every effective value and its source.")
      .def("notices", &zero::Options::notices,
           "Deprecated names, keys without effect and clamped values, one line each.")
      .def("digest", &zero::Options::digest, "A digest of every effective value; ranks compare it.")
      .def("effective", &zero::Options::effective, "Every effective value as JSON text, by dotted key.")
      .def("is_set", &zero::Options::is_set, py::arg("key"), "Whether the configuration gives this dotted key.")
      .def("__repr__", [](const zero::Options& self) { return "libzero.Options(digest=" + self.digest() + ")"; });
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<zero::Monitor>(module, "Monitor", "Metrics as the blocks csv_monitor and tensorboard specify. Local.")
      .def(py::init<const zero::Options&, int>(), py::arg("options"), py::arg("rank"), release)
      .def("active", &zero::Monitor::active)
      .def("write", &zero::Monitor::write, py::arg("values"), py::arg("samples"), release);
  module.def("config_schema", &zero::config_schema, "JSON Schema of the configuration.");
  module.def(
      "cannot_start",
      [](const zero::Options& options, std::optional<int> world) { return cannot_start(options, world); },
      py::arg("options"), py::arg("world") = py::none());
}

}  // namespace libzero
