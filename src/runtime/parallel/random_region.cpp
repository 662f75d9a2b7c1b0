#include "parallel/random_region.h"

#include <ATen/CPUGeneratorImpl.h>
#include <xxhash.h>

#include <mutex>
#include <utility>

namespace zero::parallel {
namespace {

// The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

void RandomRegion::open() {
  if (std::exchange(open_, true) || tensor_rank_ < 0) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  outside_ = generator.get_state();
  const auto hash = XXH3_64bits(outside_.const_data_ptr(), outside_.nbytes());
  generator.set_current_seed(mixed(hash + 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(1 + tensor_rank_)));
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
