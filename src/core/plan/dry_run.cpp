// See dry_run.h.
#include "plan/dry_run.h"

#include <algorithm>

#include "step/tiers.h"

namespace zero::planning {

using step::Purpose;
using step::Tier;

class DryRun::Allocated final : public PassTensor {
 public:
  Allocated(DryRun& run, int buffer, std::int64_t bytes, bool in_block)
      : run(run), buffer(buffer), bytes(bytes), in_block(in_block) {}
  ~Allocated() override { run.free(*this); }
  Allocated(const Allocated&) = delete;
  Allocated& operator=(const Allocated&) = delete;

  DryRun& run;
  const int buffer;
  const std::int64_t bytes;
  const bool in_block;  // in a peer-readable block
};

DryRun::DryRun(const step::RunFacts& run, const std::vector<step::Unit>& units,
               const std::vector<step::GroupFacts>& groups, step::Observer& observer,
               const step::Completion& completion)
    : run_(run),
      groups_(groups),
      backend_(completion),
      memory_(backend_, ledger_, run.checksums),
      scaler_(config::Settings()),
      program_(run, groups, backend_.ops(), memory_, scaler_, observer) {
  std::size_t num_parameters = 0;
  for (const auto& unit : units) num_parameters += unit.parameters.size();
  member_of_.resize(num_parameters);
  for (std::size_t g = 0; g < units.size(); ++g)
    for (std::size_t i = 0; i < units[g].parameters.size(); ++i)
      member_of_.at(units[g].parameters[i]) = {static_cast<int>(g), static_cast<int>(i)};
  backend_.released = [this](int buffer) {
    if (gradients_.erase(buffer) == 0) memory_.give_block(buffer);  // a block that the program allocated
  };
}

DryRun::~DryRun() = default;

// --- activations ------------------------------------------------------------------------------

Tensor DryRun::make(std::int64_t bytes) {
  const auto with_header = bytes + step::kReadableOverhead;
  if (memory_.serves(with_header))
    return std::make_shared<Allocated>(*this, memory_.take_block(with_header), with_header, true);
  ledger_.book(Tier::Device, Purpose::Activations, bytes);
  return std::make_shared<Allocated>(*this, memory_.register_foreign(), bytes, false);
}

void DryRun::free(const Allocated& tensor) {
  if (tensor.in_block)
    memory_.give_block(tensor.buffer);
  else
    ledger_.book(Tier::Device, Purpose::Activations, -tensor.bytes);
}

// As activations/offload_backend.h: the file starts at 16 MiB, doubles when full and never shrinks. In either
// direction, at most two tensors at a time are in host memory.
void DryRun::put_away(Tier tier, std::int64_t bytes) {
  constexpr std::int64_t kFirstBytes = std::int64_t{16} << 20;
  if (on_gpu()) traffic_.to_host += bytes;
  if (tier == Tier::Host) return ledger_.book(Tier::Host, Purpose::Activations, bytes);
  traffic_.written += bytes;
  if (++away_ <= 2) ledger_.book(Tier::Host, Purpose::Activations, bytes);
  const auto blocks = step::whole_blocks(bytes);
  away_bytes_ += blocks;
  if (away_bytes_ <= file_bytes_) return;
  const auto more = std::max(file_bytes_, (blocks + kFirstBytes - 1) / kFirstBytes * kFirstBytes);
  ledger_.book(Tier::File, Purpose::Activations, more);
  file_bytes_ += more;
}

void DryRun::bring_back(Tier tier, std::int64_t bytes) {
  if (on_gpu()) traffic_.from_host += bytes;
  if (tier == Tier::Host) return ledger_.book(Tier::Host, Purpose::Activations, -bytes);
  traffic_.read += bytes;
  if (--away_ < 2) ledger_.book(Tier::Host, Purpose::Activations, -bytes);
  away_bytes_ -= step::whole_blocks(bytes);
}

// --- parameters and gradients -----------------------------------------------------------------

void DryRun::use(std::span<const std::size_t> parameters) {
  std::vector<int> groups;
  for (const auto i : parameters)
    if (const int g = member_of_.at(i).first; std::find(groups.begin(), groups.end(), g) == groups.end())
      groups.push_back(g);
  program_.use(groups, /*training=*/true);
}

void DryRun::gradient(std::size_t parameter, Tensor gradient) {
  const auto [g, i] = member_of_.at(parameter);
  const auto& group = groups_[static_cast<std::size_t>(g)];
  if (!group.trainable) return;
  const auto numel = group.layout.parameter_numel(static_cast<std::size_t>(i));
  const auto dtype = group.precision.param;
  if (dtype != run_.precision.param) {  // the model describes gradients of activations' dtype
    gradient.reset();
    gradient = make(numel * width(dtype));
  }
  const auto& tensor = static_cast<const Allocated&>(*gradient);
  const step::View arrived{tensor.buffer, 0, numel, dtype};
  const bool in_block = tensor.in_block;
  gradients_.emplace(arrived.buffer, std::move(gradient));
  program_.gradient(g, i, arrived, in_block);
}

// --- steps ------------------------------------------------------------------------------------

void DryRun::initialise() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const auto numel = groups_[static_cast<std::size_t>(g)].padded();
    program_.initialise(g, {memory_.register_foreign(), 0, numel, step::Dtype::F32}, !run_.topology.deferred_init);
  }
}

step::StepOutcome DryRun::step(bool overflows) {
  backend_.overflows = overflows;
  return program_.step();
}

}  // namespace zero::planning
