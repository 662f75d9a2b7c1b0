// See step_time.h.
#include "plan/step_time.h"

#include <algorithm>
#include <utility>

#include "plan/model.h"

namespace zero::planning {
namespace {

double seconds(double amount, double per_second) { return per_second > 0 ? amount / per_second : 0; }

double peak_of(const PlanProfile& profile, config::Precision precision) {
  return precision == config::Precision::Fp32   ? profile.fp32_flops
         : precision == config::Precision::Bf16 ? profile.bf16_flops
                                                : profile.fp16_flops;
}

}  // namespace

double flops_of(const StepInput& input) {
  const auto& m = input.model;
  const double tokens = static_cast<double>(input.micro * m.sequence), hidden = static_cast<double>(m.hidden);
  double in_layers = 0, head = 0;
  if (m.kind == PlanModel::Kind::Count) {
    in_layers = static_cast<double>(m.count);
  } else {
    for (const auto& parameter : parameters_of(m))
      if (!parameter.unit.empty()) in_layers += static_cast<double>(parameter.numel);
    head = static_cast<double>(m.vocabulary) * hidden;
  }
  // Scores and their product with the values, of which a causal mask leaves half.
  const double causal = m.kind == PlanModel::Kind::Bert || m.kind == PlanModel::Kind::T5 ? 1 : 0.5;
  const double attention = causal * 4 * static_cast<double>(m.layers) * tokens * static_cast<double>(m.sequence) * hidden;
  const double layers = 2 * in_layers * tokens + attention;
  const double again = input.segments > 0 ? 1 : 0;
  return static_cast<double>(input.accumulation) * ((3 + again) * layers + 3 * 2 * head * tokens);
}

PlanTime time_of(const StepInput& input) {
  const auto& machine = input.machine;
  const auto& profile = machine.profile;
  const auto& traffic = input.traffic;
  PlanTime time;
  time.compute = seconds(flops_of(input), peak_of(profile, input.settings.precision));
  const double across = static_cast<double>(traffic.across_hosts), inside = static_cast<double>(traffic.sent()) - across;
  time.network = seconds(std::max(inside, 0.0), profile.link_bytes) + seconds(across, profile.network_bytes) +
                 static_cast<double>(input.collectives) * (machine.world() > 1 ? profile.collective_latency_s : 0);
  time.host_link = seconds(static_cast<double>(std::max(traffic.to_host, traffic.from_host)), profile.host_link_bytes);
  const double ranks = machine.ranks_per_host;
  time.disk = ranks * (seconds(static_cast<double>(traffic.read), profile.read_bytes) +
                       seconds(static_cast<double>(traffic.written), profile.write_bytes));
  time.update = seconds(static_cast<double>(input.updated), profile.device_update_elements) +
                seconds(static_cast<double>(input.updated_on_host), profile.host_update_elements);
  time.other = profile.step_overhead_s;
  // A GPU computes while it communicates; CPU ranks do both with the same cores.
  const bool beside = machine.gpu && input.settings.zero.overlap_comm.value_or(input.settings.zero.stage == 3);
  const double moving = std::max(time.network, time.host_link);
  const double passes = beside ? std::max(time.compute, moving) : time.compute + time.network + time.host_link;
  // The update reads, computes and writes in a pipeline.
  time.step = passes + std::max(time.update, time.disk) + time.other;
  const std::pair<double, const char*> parts[] = {{time.compute, "compute"},
                                                  {time.network, "network"},
                                                  {time.host_link, "PCIe"},
                                                  {time.disk, "disk"},
                                                  {time.update, "update"}};
  const auto longest = std::max_element(std::begin(parts), std::end(parts));
  if (longest->first > 0 && time.compute > 0) time.bound = longest->second;
  if (time.compute <= 0) time.step = 0;
  return time;
}

}  // namespace zero::planning
