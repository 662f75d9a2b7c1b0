// See step_time.h.
#include "plan/step_time.h"

#include <algorithm>
#include <utility>

#include "plan/model.h"

namespace zero::planning {
namespace {

double seconds(double amount, double per_second) { return per_second > 0 ? amount / per_second : 0; }

const PlanSpeed& speed_of(const PlanProfile& profile, config::Precision precision) {
  return precision == config::Precision::Fp32   ? profile.fp32
         : precision == config::Precision::Bf16 ? profile.bf16
                                                : profile.fp16;
}

// Multiples of tokens * hidden elements that a layer's operators other than matrix products write: two norms and two
// sums, attention, and the activation inside the MLP, which is four times as wide.
constexpr double kWhole = 2 + 2, kAttention = 1, kInner = 4;
// The loss passes over the logits once in forward and once in backward.
constexpr double kLogits = 2;

}  // namespace

void count_passes(const StepInput& input, PlanWork& work) {
  const auto& m = input.model;
  const auto& share = input.share;
  const auto length = share.tokens > 0 ? share.tokens : m.sequence;
  const double tokens = static_cast<double>(input.micro * length), hidden = static_cast<double>(m.hidden);
  const double layers = static_cast<double>(m.layers), k = static_cast<double>(input.accumulation);
  double in_layers = 0, head = 0;
  if (m.kind == PlanModel::Kind::Count) {
    in_layers = share.inner * static_cast<double>(m.count);
  } else {
    // Each expert computes its part of the rows.
    const double of_expert = m.experts.count == 0 ? 0
                                                  : static_cast<double>(kept_rows(m.experts, input.micro * length)) /
                                                        (tokens * static_cast<double>(m.experts.count));
    for (const auto& parameter : parameters_of(m))
      if (!parameter.unit.empty())
        in_layers += static_cast<double>(parameter.numel) * (parameter.sizes.size() < 2 ? 1 : share.inner) *
                     (parameter.expert < 0 ? 1 : of_expert);
    head = share.vocabulary * static_cast<double>(m.vocabulary) * hidden;
  }
  // Attention scores and their product with the values; a causal mask halves both.
  const double causal = m.kind == PlanModel::Kind::Bert || m.kind == PlanModel::Kind::T5 ? 1 : 0.5;
  const double scores = causal * tokens * static_cast<double>(m.sequence);
  const double forward = 2 * in_layers * tokens + 4 * layers * scores * hidden * share.heads;
  const double again = input.segments > 0 ? 4.0 / 3 : 1;
  work.flops = k * (3 * again * forward + 3 * 2 * head * tokens);
  const double widths = kWhole + kAttention * share.heads + kInner * share.inner;
  const double logits = (share.gathered_logits ? 1 : share.vocabulary) * static_cast<double>(m.vocabulary);
  work.elements = k * (again * layers * widths * tokens * hidden + kLogits * tokens * logits);
  work.heads = k * again * layers * tokens * static_cast<double>(m.heads) * share.heads;
  work.layers = static_cast<std::int64_t>(k * again * layers + 0.5);
}

PlanTime time_of(const config::Settings& settings, const PlanMachine& machine, const PlanTraffic& traffic,
                 const PlanWork& work) {
  const auto& profile = machine.profile;
  const auto& speed = speed_of(profile, settings.precision);
  const double ranks = machine.ranks_per_host;
  // If there are more ranks than in the measurement, they share the same cores.
  const double crowd = profile.ranks > 0 && !machine.gpu ? std::max(1.0, ranks / profile.ranks) : 1;
  PlanTime time;
  time.compute = crowd * (seconds(work.flops, speed.flops) + seconds(work.elements, speed.elements) +
                          seconds(work.heads, speed.heads) + static_cast<double>(work.layers) * speed.layer_s);
  const double across = static_cast<double>(traffic.across_hosts),
               inside = static_cast<double>(traffic.sent()) - across;
  time.network = crowd * seconds(std::max(inside, 0.0), profile.link_bytes) + seconds(across, profile.network_bytes) +
                 (machine.world() > 1 ? crowd * static_cast<double>(work.collectives) * profile.collective_s : 0);
  time.host_link = seconds(static_cast<double>(std::max(traffic.to_host, traffic.from_host)), profile.host_link_bytes);
  time.disk = ranks * (seconds(static_cast<double>(traffic.read), profile.read_bytes) +
                       seconds(static_cast<double>(traffic.written), profile.write_bytes));
  // On CPUs host memory and device memory are the same.
  const double on_host =
      profile.host_update_elements > 0 || machine.gpu ? profile.host_update_elements : profile.device_update_elements;
  time.update = crowd * (seconds(static_cast<double>(work.updated), profile.device_update_elements) +
                         seconds(static_cast<double>(work.updated_on_host), on_host));
  time.other = crowd * profile.step_s;
  // A GPU overlaps computation and communication; CPU ranks use the same cores for both.
  const bool overlapped = machine.gpu && settings.zero.overlap_comm.value_or(settings.zero.stage == 3);
  const double moving = std::max(time.network, time.host_link);
  const double passes = overlapped ? std::max(time.compute, moving) : time.compute + time.network + time.host_link;
  if (time.compute <= 0) return time;  // without computation, its largest part, the sum would not be a prediction
  // The update pipelines reads, arithmetic and writes.
  time.step = passes + std::max(time.update, time.disk) + time.other;
  const std::pair<double, const char*> parts[] = {{time.compute, "compute"},
                                                  {time.network, "network"},
                                                  {time.host_link, "PCIe"},
                                                  {time.disk, "disk"},
                                                  {time.update, "update"}};
  time.bound = std::max_element(std::begin(parts), std::end(parts), [](const auto& a, const auto& b) {
                 return a.first < b.first;
               })->second;
  return time;
}

}  // namespace zero::planning
