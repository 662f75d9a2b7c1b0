// See deepspeed_files.h. The patterns are those of _get_ckpt_name and _get_zero_ckpt_name of DeepSpeed's engine.
#include "interchange/deepspeed_files.h"

#include <map>
#include <string_view>

#include "base/check.h"
#include "base/printable.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;

constexpr std::string_view kModel = "_model_states.pt", kOptim = "_optim_states.pt";

// Removes a prefix of the text.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Removes a number of at most 6 digits; -1 if there is none.
int take_number(std::string_view& text) {
  int number = -1;
  for (int digits = 0; digits < 6 && !text.empty() && text[0] >= '0' && text[0] <= '9'; ++digits, text.remove_prefix(1))
    number = (number < 0 ? 0 : number) * 10 + (text[0] - '0');
  return number;
}

struct Name {
  bool optim = false;
  int rank = -1;   // of data parallelism; -1: for all ranks
  int model = -1;  // of model parallelism
};

// False: of another kind.
bool parse(std::string_view name, Name& out) {
  if (name.ends_with(kOptim))
    out.optim = true;
  else if (!name.ends_with(kModel))
    return false;
  name.remove_suffix(out.optim ? kOptim.size() : kModel.size());
  if (out.optim && !take(name, "bf16_")) (void)take(name, "fp16_");
  if (take(name, "zero_pp_rank_")) {
    out.rank = take_number(name);
    if (out.rank < 0 || !take(name, "_")) return false;
  }
  if (!take(name, "mp_rank_")) return false;
  out.model = take_number(name);
  return out.model >= 0 && name.empty() && (!out.optim || out.rank >= 0);
}

std::vector<std::string> in_order(const formats::Folder& tag, const std::map<int, std::string>& by_rank) {
  std::vector<std::string> names;
  for (const auto& [rank, name] : by_rank) {
    if (rank != static_cast<int>(names.size()))
      fail_damaged(tag.path(), base::join("has no file of rank ", names.size(), " but ", name));
    names.push_back(name);
  }
  return names;
}

}  // namespace

DeepSpeedFiles deepspeed_files(const formats::Folder& tag) {
  DeepSpeedFiles files;
  std::map<int, std::string> model, optim;
  std::string one;
  for (const auto& name : tag.names()) {
    if (name == "zero") {
      files.universal = true;
      continue;
    }
    Name parsed;
    if (!parse(name, parsed)) {
      if (name.ends_with("model_states.pt") || name.ends_with("optim_states.pt"))
        fail_damaged(tag.path_of(base::printable(name, base::Lines::Escape)),
                     "is a part of a pipeline or an expert, expected data-parallel ranks of a whole model");
      continue;
    }
    if (parsed.model != 0)
      fail_damaged(tag.path_of(name),
                   "is of another tensor-parallel rank, expected data-parallel ranks of a whole model");
    if (!parsed.optim && parsed.rank < 0)
      one = name;
    else if (!(parsed.optim ? optim : model).emplace(parsed.rank, name).second)
      fail_damaged(tag.path_of(name), base::join("is a second file of rank ", parsed.rank, ", expected one"));
  }
  // A universal checkpoint for all stages has the same under both names.
  if (files.universal && !one.empty()) model.clear();
  if (!one.empty() && !model.empty())
    fail_damaged(tag.path(), "has " + one + " and files of each rank, expected one or the other");
  files.optim = in_order(tag, optim);
  files.model = in_order(tag, model);
  if (!one.empty()) files.model.push_back(one);
  if (!files.universal && files.model.empty())
    fail_damaged(tag.path(), "has no file *_model_states.pt, expected a checkpoint of DeepSpeed");
  return files;
}

bool is_deepspeed_tag(const formats::Folder& folder) {
  for (const auto& name : folder.names())
    if (name.ends_with(kModel)) return true;
  const auto zero = folder.info_of("zero");
  return zero && zero->directory && !folder.exists("manifest.json");
}

}  // namespace zero::interchange
