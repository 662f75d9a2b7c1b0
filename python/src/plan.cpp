// Bindings of the planner and of MemoryReport.
#include <zero/memory_report.h>
#include <zero/plan.h>

#include "binding.h"
#include "tools/support/gpt_plan.h"

namespace libzero {
namespace {

using zero::MemoryReport;

// (tier, purpose, current, peak) for non-zero rows, then (tier, "total", ...).
std::vector<std::tuple<std::string, std::string, std::uint64_t, std::uint64_t>> rows_of(const MemoryReport& report) {
  std::vector<std::tuple<std::string, std::string, std::uint64_t, std::uint64_t>> rows;
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t) {
    const auto tier = static_cast<MemoryReport::Tier>(t);
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      const auto purpose = static_cast<MemoryReport::Purpose>(p);
      if (report.current(tier, purpose) == 0 && report.peak(tier, purpose) == 0) continue;
      rows.emplace_back(MemoryReport::name(tier), MemoryReport::name(purpose), report.current(tier, purpose),
                        report.peak(tier, purpose));
    }
    if (report.current(tier) != 0 || report.peak(tier) != 0)
      rows.emplace_back(MemoryReport::name(tier), "total", report.current(tier), report.peak(tier));
  }
  return rows;
}

py::object allocator_of(const MemoryReport& report) {
  if (!report.allocator) return py::none();
  const auto& a = *report.allocator;
  return py::dict(py::arg("allocated") = a.allocated, py::arg("allocated_peak") = a.allocated_peak,
                  py::arg("reserved") = a.reserved, py::arg("reserved_peak") = a.reserved_peak,
                  py::arg("retries") = a.retries);
}

zero::PlanMachine machine_of(int hosts, int ranks_per_host, bool gpu, std::uint64_t device_bytes,
                             std::uint64_t host_bytes, std::uint64_t file_bytes, bool shared_memory,
                             const std::string& profile) {
  zero::PlanMachine machine;
  machine.hosts = hosts;
  machine.ranks_per_host = ranks_per_host;
  machine.gpu = gpu;
  machine.device_bytes = device_bytes;
  machine.host_bytes = host_bytes;
  machine.file_bytes = file_bytes;
  machine.shared_memory = shared_memory;
  if (!profile.empty()) machine.profile = zero::PlanProfile::from_json(profile);
  return machine;
}

}  // namespace

void bind_plan(py::module_& module) {
  using zero::Plan, zero::PlanModel, zero::PlanMachine;
  py::class_<MemoryReport>(module, "MemoryReport")
      .def_property_readonly("rows", &rows_of)
      .def_property_readonly("allocator", &allocator_of)
      .def("table", &MemoryReport::table);
  py::class_<PlanModel>(module, "PlanModel")
      .def_static(
          "named", [](const std::string& name) { return zero::cli::with_gpt_pass(PlanModel::named(name)); },
          py::arg("name"))
      .def_static("names", &PlanModel::names)
      .def_static("of_count", &PlanModel::of_count, py::arg("parameters"))
      .def_static(
          "of_options",
          [](const zero::Options& options) { return zero::cli::with_gpt_pass(PlanModel::of_options(options)); },
          py::arg("options"))
      .def("num_parameters", &PlanModel::num_parameters);
  py::class_<PlanMachine>(module, "PlanMachine")
      .def(py::init(&machine_of), py::kw_only(), py::arg("hosts") = 1, py::arg("ranks_per_host") = 1,
           py::arg("gpu") = true, py::arg("device_bytes") = 0, py::arg("host_bytes") = 0, py::arg("file_bytes") = 0,
           py::arg("shared_memory") = false, py::arg("profile") = "")
      .def_property_readonly("world", &PlanMachine::world);
  py::class_<Plan>(module, "Plan")
      .def_readonly("stage", &Plan::stage)
      .def_readonly("offload", &Plan::offload)
      .def_readonly("checkpointing", &Plan::checkpointing)
      .def_readonly("micro_batch", &Plan::micro_batch)
      .def_readonly("accumulation", &Plan::accumulation)
      .def_readonly("memory", &Plan::memory)
      .def_readonly("fits", &Plan::fits)
      .def_readonly("misses", &Plan::misses)
      .def_readonly("refusal", &Plan::refusal)
      .def_readonly("largest_micro_batch", &Plan::largest_micro_batch)
      .def_readonly("largest_model", &Plan::largest_model)
      .def_readonly("notices", &Plan::notices)
      .def_property_readonly("bytes_sent", [](const Plan& self) { return self.traffic.sent(); })
      .def_property_readonly("volume", [](const Plan& self) { return self.traffic.volume; })
      .def_property_readonly("step_s", [](const Plan& self) { return self.time.step; })
      .def_property_readonly("bound", [](const Plan& self) { return self.time.bound; });
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.def("plan", &zero::plan, py::arg("model"), py::arg("options"), py::arg("machine"), release);
  module.def(
      "plan_all",
      [](const PlanModel& model, const zero::Options& options, const PlanMachine& machine) {
        return zero::plan_all(model, options, machine);
      },
      py::arg("model"), py::arg("options"), py::arg("machine"), release);
  module.def("cheapest", &zero::cheapest, py::arg("plans"), release);
}

}  // namespace libzero
