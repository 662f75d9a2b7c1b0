#include "parallel/random_region.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <xxhash.h>

#include <mutex>
#include <utility>

#include "base/mix.h"

namespace zero::parallel {

std::vector<at::Generator> default_generators(at::Device device) {
  std::vector<at::Generator> all{at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

void RandomRegion::open() {
  if (std::exchange(open_, true) || tensor_rank_ < 0) return;
  for (auto& generator : default_generators(device_)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const auto outside = generator.get_state();
    const auto hash = XXH3_64bits(outside.const_data_ptr(), outside.nbytes());
    const auto own = 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(1 + tensor_rank_);
    generator.set_current_seed(base::mixed(hash + own));
    seeded_.push_back({generator, outside, generator.get_state()});
  }
}

void RandomRegion::close() noexcept {
  open_ = false;
  for (auto& [generator, outside, inside] : std::exchange(seeded_, {})) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const bool drew = !generator.get_state().equal(inside);
    generator.set_state(outside);
    if (!drew) continue;
    if (generator.device().is_cpu())
      at::check_generator<at::CPUGeneratorImpl>(generator)->random();
    else
      generator.set_offset(generator.get_offset() + 4);  // a multiple of 4, as Philox counts
  }
}

}  // namespace zero::parallel
