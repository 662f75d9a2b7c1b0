// See step_line.h.
#include "tools/report/text/step_line.h"

#include <cmath>
#include <cstdio>

#include "base/json_write.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {
std::string json_number(double value) { return std::isfinite(value) ? printed("%.9g", value) : "null"; }

std::string place(std::int64_t step, std::int64_t steps) {
  return "step " + std::to_string(step) + (steps > 0 ? "/" + std::to_string(steps) : "");
}
}  // namespace

std::string step_line(const StepRow& r) {
  std::string s = place(r.step, r.steps);
  s += " loss " + printed("%.5f", r.loss);
  if (r.grad_norm) s += " grad_norm " + printed("%.4f", *r.grad_norm);
  if (r.lr) s += " lr " + printed("%.1e", *r.lr);
  if (r.loss_scale) s += " scale " + printed("%.6g", *r.loss_scale);
  if (r.skipped) s += " skipped " + std::to_string(*r.skipped);
  if (r.memory_bytes) {
    s += " mem " + human_bytes(*r.memory_bytes);
    if (r.memory_limit_bytes && *r.memory_limit_bytes > 0)
      s += printed(" (%.0f%%)",
                   100.0 * static_cast<double>(*r.memory_bytes) / static_cast<double>(*r.memory_limit_bytes));
  }
  if (r.tokens_per_s) s += printed(" %.0f tok/s", *r.tokens_per_s);
  if (r.aux_loss) s += printed(" aux %.4f", *r.aux_loss);
  if (r.load_max) s += printed(" load %.2f", *r.load_max);
  if (r.dropped) s += printed(" dropped %.1f%%", 100 * *r.dropped);
  if (r.comm_part) s += printed(" comm %.0f%%", 100 * *r.comm_part);
  if (r.io_part) s += printed(" io %.0f%%", 100 * *r.io_part);
  if (r.forward_seconds) s += printed(" forward %.1fms", 1e3 * *r.forward_seconds);
  if (r.backward_seconds) s += printed(" backward %.1fms", 1e3 * *r.backward_seconds);
  if (r.reduce_seconds) s += printed(" reduce %.1fms", 1e3 * *r.reduce_seconds);
  if (r.update_seconds) s += printed(" update %.1fms", 1e3 * *r.update_seconds);
  if (r.eta_seconds) s += " eta " + human_duration(*r.eta_seconds);
  if (!r.memory.empty()) s += "\n  memory";
  for (const MemoryPoint& point : r.memory) {
    s += "  after " + point.after + " " + human_bytes(point.device_bytes) + " peak " + human_bytes(point.device_peak);
    if (point.host_peak > 0) s += " host " + human_bytes(point.host_bytes) + " peak " + human_bytes(point.host_peak);
  }
  return s;
}

std::string step_json(const StepRow& r) {
  std::string s = "{\"step\": " + std::to_string(r.step) + ", \"loss\": " + json_number(r.loss);
  const auto add = [&](const char* name, const std::optional<double>& value, double factor = 1) {
    if (value) s += std::string(", \"") + name + "\": " + json_number(*value * factor);
  };
  add("grad_norm", r.grad_norm);
  add("lr", r.lr);
  add("loss_scale", r.loss_scale);
  if (r.skipped) s += ", \"skipped\": " + std::to_string(*r.skipped);
  add("step_ms", r.step_seconds, 1000);
  add("tokens_per_s", r.tokens_per_s);
  if (r.memory_bytes) s += ", \"memory_bytes\": " + std::to_string(*r.memory_bytes);
  add("comm_part", r.comm_part);
  add("io_part", r.io_part);
  if (r.ranks) s += ", \"ranks\": " + std::to_string(*r.ranks);
  if (r.bytes_sent) s += ", \"bytes_sent\": " + std::to_string(*r.bytes_sent);
  if (r.sent_by_axis)
    s += ", \"zero_bytes_sent\": " + std::to_string(r.sent_by_axis->zero) +
         ", \"tensor_parallel_bytes_sent\": " + std::to_string(r.sent_by_axis->tensor) +
         ", \"sequence_parallel_bytes_sent\": " + std::to_string(r.sent_by_axis->sequence) +
         ", \"expert_parallel_bytes_sent\": " + std::to_string(r.sent_by_axis->expert);
  add("aux_loss", r.aux_loss);
  add("dropped", r.dropped);
  add("load_max", r.load_max);
  add("forward_ms", r.forward_seconds, 1000);
  add("backward_ms", r.backward_seconds, 1000);
  add("reduce_ms", r.reduce_seconds, 1000);
  add("update_ms", r.update_seconds, 1000);
  if (r.memory.empty()) return s + "}";
  s += ", \"memory\": {";
  for (std::size_t i = 0; i < r.memory.size(); ++i) {
    const MemoryPoint& point = r.memory[i];
    s += (i > 0 ? ", " : "") + base::json_quote("after_" + point.after) +
         ": {\"bytes\": " + std::to_string(point.device_bytes) +
         ", \"peak_bytes\": " + std::to_string(point.device_peak) +
         ", \"host_bytes\": " + std::to_string(point.host_bytes) +
         ", \"host_peak_bytes\": " + std::to_string(point.host_peak) + "}";
  }
  return s + "}}";
}

std::string heldout_line(const HeldoutRow& r) {
  std::string s = place(r.step, r.steps) + printed(" held-out %.5f", r.loss);
  for (const auto& [name, value] : r.metrics) s += " " + name + printed(" %.4g", value);
  return s;
}

std::string heldout_json(const HeldoutRow& r) {
  std::string s = "{\"step\": " + std::to_string(r.step) + ", \"heldout_loss\": " + json_number(r.loss), metrics;
  for (const auto& [name, value] : r.metrics)
    metrics += (metrics.empty() ? "" : ", ") + base::json_quote(name) + ": " + json_number(value);
  return s + (metrics.empty() ? "}" : ", \"metrics\": {" + metrics + "}}");
}

}  // namespace zero::report
