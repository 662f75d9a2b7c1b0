// Writes manifest.json. See manifest.h.
#include <algorithm>
#include <charconv>

#include "base/check.h"
#include "formats/json.h"
#include "formats/manifest.h"

namespace zero::formats {
namespace {

// The shortest text that reads back to the same bits.
std::string text_of(double value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return {buffer, end};
}

Json json_of(const std::vector<std::vector<Box>>& slices) {
  Json list = Json::array();
  for (const auto& slice : slices) {
    Json boxes = Json::array();
    for (const auto& box : slice) boxes.push_back({{"start", box.start}, {"size", box.size}});
    list.push_back(std::move(boxes));
  }
  return list;
}

// One line, because a checkpoint may have hundreds of thousands of parts.
std::string line_of(const Tensor& tensor) {
  Json json = {{"kind", tensor.kind},   {"name", tensor.name}, {"dtype", tensor.dtype},
               {"shape", tensor.shape}, {"parts", "@"},        {"requires_grad", tensor.requires_grad}};
  if (!tensor.slices.empty()) json["slices"] = json_of(tensor.slices);
  std::string parts = "[";
  for (const auto& part : tensor.parts)
    parts += base::join(parts.size() > 1 ? "," : "", "[", part.file, ",", part.offset, ",", part.start, ",", part.numel,
                        "]");
  auto text = json.dump();
  constexpr std::string_view kPlace = "\"parts\":\"@\"";
  text.replace(text.find(kPlace), kPlace.size(), "\"parts\":" + parts + "]");
  return text;
}

std::string lines_of(const std::vector<Tensor>& tensors, const std::string& indent) {
  std::string text = "[";
  for (const auto& tensor : tensors) text += (text.size() > 1 ? ",\n" : "\n") + indent + " " + line_of(tensor);
  return text + (tensors.empty() ? "]" : "\n" + indent + "]");
}

}  // namespace

void check_user_state(std::string_view text, const std::string& where) {
  std::uint64_t bytes = text.size();
  for (const char c : text) {  // as JSON has them
    const bool doubled = c == '"' || c == '\\' || (c >= '\b' && c <= '\r' && c != '\v');
    bytes += doubled ? 1 : static_cast<unsigned char>(c) < ' ' ? 5 : 0;
  }
  if (bytes > kMostUserStateBytes)
    throw ConfigError(base::join("[", where, "] got a user state of ", bytes, " bytes, expected at most ",
                                 kMostUserStateBytes,
                                 ", which a load reads. Hint: save large data to a file of its own."));
}

std::string manifest_text(const Manifest& m) {
  Json files = Json::array(), rates = Json::array();
  for (const auto& file : m.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"hash", file.hash}});
  for (const double rate : m.set_rates) rates.push_back(text_of(rate));
  const bool version_5 =
      m.good < 0 || m.weights_only ||
      std::any_of(m.files.begin(), m.files.end(), [](const auto& file) { return is_exported_file(file.name); });
  Json json = {{"format", "zero.checkpoint/2"},
               {"min_reader", version_5 ? 5 : 4},
               {"writer", {{"libzero", m.libzero_version}, {"libtorch", m.libtorch_version}}},
               {"tag", m.tag},
               {"seq", m.seq},
               {"id", m.id},
               {"created", m.created},
               {"step",
                {{"global_steps", m.global_steps},
                 {"applied_steps", m.applied_steps},
                 {"skipped_steps", m.skipped_steps},
                 {"global_samples", m.global_samples}}},
               {"batch", {{"global", m.global_batch}, {"micro", m.micro_batch}, {"accumulation", m.accumulation}}},
               {"optimizer", {{"type", m.optimizer}, {"slots", m.slots}}},
               {"scaler",
                {{"scale", text_of(m.loss_scale)}, {"hysteresis", m.hysteresis}, {"good", m.good}, {"floor", m.floor}}},
               {"world",
                {{"size", m.world},
                 {"stage", m.stage},
                 {"recipe", {{"parameter", m.parameter_dtype}, {"gradient", m.gradient_dtype}, {"wire", m.wire_dtype}}},
                 {"transport", m.transport},
                 {"torch_threads", m.torch_threads},
                 {"cpu_capability", m.cpu_capability}}},
               {"mesh", {{"dp", m.world / (m.sequence * m.tensor)}, {"sp", m.sequence}, {"tp", m.tensor}}},
               {"config", m.config},
               {"config_hash", m.config_hash},
               {"user_state", m.user_state},
               {"program", {{"rates", rates}, {"missed_steps", m.missed_steps}}},
               {"files", files},
               {"blocks", m.blocks},
               {"aliases", m.aliases}};
  if (version_5) json["content"] = m.weights_only ? kWeightsContent : kTrainingContent;
  try {
    auto text = json.dump(1);
    text.resize(text.size() - 2);  // "\n}"
    text += ",\n \"tensors\": " + lines_of(m.tensors, " ") + ",\n \"ranks\": [";
    for (std::size_t r = 0; r < m.ranks.size(); ++r) text += (r == 0 ? "\n  " : ",\n  ") + lines_of(m.ranks[r], "  ");
    return text + (m.ranks.empty() ? "]\n}\n" : "\n ]\n}\n");
  } catch (const Json::exception&) {
    throw ConfigError(
        "[save_checkpoint] a name or the user state is not valid UTF-8. Hint: encode binary user state as text.");
  }
}

std::string tensors_text(const std::vector<Tensor>& tensors) {
  try {
    return lines_of(tensors, "");
  } catch (const Json::exception&) {
    throw ConfigError("[save_checkpoint] a tensor's name is not valid UTF-8. Hint: rename the module or parameter.");
  }
}

}  // namespace zero::formats
