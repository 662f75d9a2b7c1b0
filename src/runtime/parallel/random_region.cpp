#include "parallel/random_region.h"

#include <ATen/CPUGeneratorImpl.h>
#include <xxhash.h>

#include <mutex>
#include <utility>

#include "base/mix.h"

namespace zero::parallel {
void RandomRegion::open() {
  if (std::exchange(open_, true) || tensor_rank_ < 0) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  outside_ = generator.get_state();
  const auto hash = XXH3_64bits(outside_.const_data_ptr(), outside_.nbytes());
  generator.set_current_seed(base::mixed(hash + 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(1 + tensor_rank_)));
  inside_ = generator.get_state();
}

void RandomRegion::close() noexcept {
  open_ = false;
  if (!outside_.defined()) return;
  const auto outside = std::exchange(outside_, {}), inside = std::exchange(inside_, {});
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const bool drew = !generator.get_state().equal(inside);
  generator.set_state(outside);
  if (drew) at::check_generator<at::CPUGeneratorImpl>(generator)->random();
}

}  // namespace zero::parallel
