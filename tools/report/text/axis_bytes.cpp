// See axis_bytes.h.
#include "tools/report/text/axis_bytes.h"

#include "base/check.h"
#include "tools/report/text/text.h"

namespace zero::report {

std::string degrees_text(const Degrees& degrees) {
  return base::join(degrees.data, " dp x ", degrees.sequence, " sp x ", degrees.tensor, " tp",
                    degrees.expert > 1 ? base::join(", experts over ", degrees.expert) : "");
}

std::string operation_on_mesh(std::string_view counted, const Degrees& degrees) {
  const auto dot = counted.find('.');
  const auto group = dot == std::string_view::npos ? std::string_view() : counted.substr(0, dot);
  const std::string operation(dot == std::string_view::npos ? counted : counted.substr(dot + 1));
  const bool exchange = operation.starts_with("all_to_all");
  if (group.empty()) {
    if (degrees.tensor > 1 && degrees.data * degrees.sequence == 1) return "tp." + operation;
    if (degrees.sequence > 1 && degrees.data * degrees.tensor == 1 && exchange) return "sp." + operation;
    if (degrees.expert > 1 && degrees.expert == degrees.data * degrees.sequence && exchange) return "ep." + operation;
    return operation;
  }
  if (group == "dp" || group == "dp_sp" || group == "edp") return operation;
  // Without data-parallel ranks, ZeRO shards over this group.
  if (group == "sp" && degrees.data == 1 && !exchange) return operation;
  return std::string(counted);
}

void AxisBytes::add(std::string_view operation, std::uint64_t bytes) {
  if (operation.starts_with("tp."))
    tensor += bytes;
  else if (operation.starts_with("sp."))
    sequence += bytes;
  else if (operation.starts_with("ep."))
    expert += bytes;
  else if (operation.find('.') == std::string_view::npos && operation != "control")
    zero += bytes;
}

std::string axes_text(const AxisBytes& bytes, const Degrees& degrees) {
  std::string text;
  const auto add = [&](const char* name, int ranks, std::uint64_t sent) {
    if (ranks > 1) text += (text.empty() ? "" : ", ") + std::string(name) + " " + human_bytes(sent);
  };
  add("ZeRO", degrees.data * degrees.sequence, bytes.zero);
  add("tensor parallelism", degrees.tensor, bytes.tensor);
  add("sequence parallelism", degrees.sequence, bytes.sequence);
  add("expert parallelism", degrees.expert, bytes.expert);
  return text;
}

}  // namespace zero::report
