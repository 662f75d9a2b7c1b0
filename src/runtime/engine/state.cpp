// See state.h.
#include "engine/state.h"

#include <algorithm>

#include "base/idle_memory.h"
#include "engine/build.h"
#include "engine/initial_values.h"
#include "engine/model_buffers.h"

namespace zero::engine {
namespace {

// Allocates gradients in memory that peers can read, and counts this thread's tensors.
std::unique_ptr<torch_hooks::AllocationObserver> observe_allocations(const Parts& parts) {
  torch_hooks::BlockAllocator blocks;
  const auto count = [ledger = parts.memory->ledger](std::int64_t bytes) {
    ledger->book(step::Tier::Device, step::Purpose::Activations, bytes);
  };
  const auto peers_read = [&](const step::GroupFacts& group) { return parts.plan.run.peer_reduces(group); };
  if (std::none_of(parts.groups.begin(), parts.groups.end(), peers_read))
    return std::make_unique<torch_hooks::AllocationObserver>(count);
  blocks.take = [memory = parts.memory](std::size_t size) -> void* {
    const auto bytes = static_cast<std::int64_t>(size);
    if (!memory->memory.serves(bytes)) return nullptr;
    try {
      return memory->buffers.data({memory->memory.take_block(bytes), 0, bytes, step::Dtype::U8});
    } catch (const std::exception&) {
      return nullptr;  // if no memory is available at all, the default allocator reports it
    }
  };
  blocks.give = [memory = parts.memory](void* block) { memory->memory.give_block(memory->buffers.block_at(block)); };
  return std::make_unique<torch_hooks::AllocationObserver>(count, std::move(blocks));
}

// Unsharded parameters stay usable, sharded ones throw an explanation when read.
void abandon_model(const Parts& parts) noexcept {
  for (const auto& group : parts.program->groups()) {
    if (!group->facts.sharding.params) continue;
    try {
      group->params->reshard();
    } catch (const std::exception&) {
      // A pending all-gather failed with its communicator; the data is lost either way.
    }
    parts.binding().abandon(group->index);
  }
}

}  // namespace

State::State(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm,
             std::shared_ptr<Mesh> mesh, std::shared_ptr<UpdateRule> rule)
    : job(std::move(model), std::move(options), std::move(comm), std::move(mesh), std::move(rule)),
      parts(build(job, relay)) {
  relay.reporting([&] {
    trace.start_of_environment();
    if (job.comm->size() > 1) job.comm->barrier();  // if one rank's budget refuses, all ranks throw
    try {
      // After zero::build with a device the model is still on the CPU.
      const bool moves = parts.binding().group(0).members.front().tensor.device() != parts.plan.device;
      adopt_parameters(parts);
      adopt_buffers(parts, moves);
      listener.attach([this](int group, int member) { backward.on_gradient(group, member); });
      if (parts.experts) parts.experts->bind();
      observer_ = observe_allocations(parts);
    } catch (...) {
      detach();
      throw;
    }
    // The full-precision originals are freed; return the heap memory that glibc caches.
    base::release_idle_memory();
  });
}

State::~State() {
  relay.report_if_unwinding();
  parts.backend->update.settle();
  parts.progress.background.reset();
  parts.progress.kept.reset();
  detach();
}

// Detaches the model. Also called if the constructor throws, which destroys only its members.
void State::detach() noexcept {
  trace.end();
  listener.detach();
  if (parts.activations) parts.activations->end();
  abandon_model(parts);
}

MemoryReport State::memory() const {
  auto report = parts.memory->ledger->report();
  report.allocator = allocator_report(parts.plan.device);
  return report;
}

void State::reset_peak_memory() {
  parts.memory->memory.trim();
  base::release_idle_memory();  // return idle memory to the kernel, so that its count agrees with the ledger
  parts.memory->ledger->reset_peak();
  reset_allocator_peak(parts.plan.device);
}

}  // namespace zero::engine
