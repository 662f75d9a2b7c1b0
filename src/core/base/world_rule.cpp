// See world_rule.h.
#include "base/world_rule.h"

namespace zero::base {

bool WorldRule::allows(std::int64_t ranks) const {
  if (ranks < 1 || ranks % copy != 0 || ranks / tensor % experts != 0) return false;
  const std::int64_t data = ranks / copy;
  return (batch_parts == 0 || batch_parts % data == 0) && (data_parallel == 0 || data_parallel == data);
}

std::vector<std::int64_t> WorldRule::allowed(std::int64_t most) const {
  std::vector<std::int64_t> list;
  for (std::int64_t ranks = 1; ranks <= most; ++ranks)
    if (allows(ranks)) list.push_back(ranks);
  return list;
}

std::string one_of(const std::vector<std::int64_t>& numbers) {
  if (numbers.empty()) return "none";
  std::string text = std::to_string(numbers[0]);
  for (std::size_t i = 1; i < numbers.size(); ++i)
    text += (i + 1 == numbers.size() ? " or " : ", ") + std::to_string(numbers[i]);
  return text;
}

}  // namespace zero::base
