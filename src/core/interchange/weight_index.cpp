// See weight_index.h.
#include "interchange/weight_index.h"

#include <cmath>

#include "base/check.h"
#include "formats/json.h"
#include "formats/manifest.h"

namespace zero::interchange {

using formats::fail_damaged;

namespace {
constexpr std::uint64_t kMostIndexBytes = std::uint64_t{256} << 20;
}

WeightIndex read_weight_index(const formats::Folder& folder, const std::string& name) {
  WeightIndex index;
  index.path = folder.path_of(name);
  const auto json = formats::parse_json(folder.read_file(name, kMostIndexBytes), index.path, 8);
  const formats::JsonView top(json, index.path);
  for (const auto& [tensor, view] : top.at("weight_map").fields()) {
    const auto file = view.text();
    if (!formats::valid_file_name(file)) view.fail("is not the plain name of a file");
    index.by_file[file].insert(tensor);
  }
  const auto& raw = top.raw();
  if (!raw.contains("metadata") || !raw["metadata"].is_object() || !raw["metadata"].contains("total_size"))
    return index;
  const auto& total = raw["metadata"]["total_size"];
  index.total = total.dump();
  // Old writers wrote a floating-point number.
  if (total.is_number_unsigned())
    index.total_bytes = total.get<std::uint64_t>();
  else if (const double number = total.is_number() ? total.get<double>() : -1;
           number >= 0 && number < 0x1p53 && number == std::floor(number))
    index.total_bytes = static_cast<std::uint64_t>(number);
  return index;
}

void WeightIndex::check_total(std::uint64_t data_bytes) const {
  if (!total.empty() && total_bytes != data_bytes)
    fail_damaged(path,
                 base::join("says that total_size is ", total, ", its files hold ", data_bytes, " bytes of tensors"));
}

void check_claimed(const formats::Folder& folder, const std::string& index, const std::string& file,
                   std::set<std::string> claimed, const std::vector<std::string>& held) {
  for (const auto& tensor : held)
    if (claimed.erase(tensor) == 0)
      fail_damaged(folder.path_of(file), "holds the tensor " + tensor + ", which " + index + " does not say");
  if (!claimed.empty())
    fail_damaged(folder.path_of(file), "does not hold the tensor " + *claimed.begin() + ", which " + index + " says");
}

}  // namespace zero::interchange
