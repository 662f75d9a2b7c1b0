// See initial_values.h.
#include "engine/initial_values.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/rank_agreement.h"
#include "engine/tensor_parts.h"
#include "torch_hooks/allocation_observer.h"
#include "torch_hooks/deferred_init.h"
#include "torch_hooks/interception.h"

namespace zero::engine {
namespace {

// Outside of split layers, the ranks of a tensor-parallel group draw the same random numbers: rank 0's.
void agree_on_random_numbers(comm::Group& tensor_group, at::Device device) {
  for (auto& generator : parallel::default_generators(device)) {
    at::Tensor state;
    {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state().clone();
    }
    tensor_group.broadcast(state, 0)->wait();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

// A hash of the values in fp32.
std::uint64_t hash_of_values(const at::Tensor& whole) {
  constexpr std::int64_t kPart = std::int64_t{1} << 20;  // elements
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const auto flat = whole.reshape({-1});
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kPart) {
    const auto part = flat.narrow(0, begin, std::min(kPart, flat.numel() - begin)).to(at::kCPU, at::kFloat);
    XXH3_64bits_update(state.get(), part.const_data_ptr(), static_cast<std::size_t>(part.nbytes()));
  }
  return XXH3_64bits_digest(state.get());
}

step::View resting_of(const step::StepProgram& program, int group) {
  const auto& params = *program.groups()[static_cast<std::size_t>(group)]->params;
  return params.rests_sharded() ? step::View{} : params.resting();
}

// fp32 values under a number of the step program.
class Lent {
 public:
  Lent(EngineMemory& memory, const at::Tensor& values)
      : memory_(memory), view_{memory.memory.register_foreign(), 0, values.numel(), step::Dtype::F32} {
    memory_.buffers.adopt(view_.buffer, values);
  }
  ~Lent() { memory_.buffers.drop(view_.buffer); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  const step::View& view() const { return view_; }

 private:
  EngineMemory& memory_;
  const step::View view_;
};

// Keeps this rank's part of a parameter. `whole` may be the parameter's own memory, which is released.
void adopt(const Parts& parts, int group, std::size_t i, const at::Tensor& whole) {
  const auto& g = parts.binding().group(group);
  const auto part = part_of(g.members[i], whole, parts.ranks.tensor->rank()).reshape({-1}).to(at::kCPU, at::kFloat);
  const Lent lent(*parts.memory, part);
  parts.program->initialise_part(group, g.facts.layout.parameter_offset(i), lent.view());
  parts.binding().attach(group, i, resting_of(*parts.program, group));
}

// Rank 0's values of a parameter, on every rank. Only rank 0's are the parameter's own memory.
at::Tensor of_rank_0(comm::Group& comm, const at::Tensor& parameter) {
  const auto own = parameter.detach();
  if (comm.size() == 1 || own.numel() == 0) return own;
  const auto values = comm.rank() == 0 ? own.contiguous() : at::empty(own.sizes(), own.options());
  comm.broadcast(values.view({-1}), 0)->wait();
  return values;
}

std::vector<std::size_t> all_members(const ModelBinding::Group& group) {
  std::vector<std::size_t> all(group.members.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// A model that has values.
void adopt_members(const Parts& parts, int group) {
  const auto count = parts.binding().group(group).members.size();
  for (std::size_t i = 0; i < count; ++i)
    adopt(parts, group, i, of_rank_0(*parts.job.comm, parts.binding().group(group).members[i].tensor));
  parts.program->complete_initialisation(group);
}

// Member i of a group of experts on the rank at `place`.
const at::Tensor& tensor_at(const std::vector<ModelParameter>& remote, const ModelParameter& member, int place) {
  if (place == member.expert->place()) return member.tensor;
  const auto name = member.expert->at(place, member.name);
  const auto found =
      std::find_if(remote.begin(), remote.end(), [&](const ModelParameter& other) { return other.name == name; });
  ZERO_CHECK(found != remote.end(), "no parameter ", name);
  return found->tensor;
}

// The same for experts. Rank 0 sends the values of all of them.
void adopt_experts(const Parts& parts, int group, const std::vector<std::size_t>& members) {
  for (const auto i : members) {
    const auto& member = parts.binding().group(group).members[i];
    for (int place = 0; place < member.expert->ep_size; ++place) {
      const auto values = of_rank_0(*parts.job.comm, tensor_at(parts.plan.remote, member, place));
      if (place == member.expert->place()) adopt(parts, group, i, values);
    }
  }
  parts.program->complete_initialisation(group);
}

// The same without tensor parallelism: one broadcast of the whole group.
void adopt_group(const Parts& parts, int group) {
  auto& binding = parts.binding();
  const auto values = binding.values(group);
  const Lent lent(*parts.memory, values);
  parts.program->initialise(group, lent.view(), /*broadcast=*/true);
  for (std::size_t i = 0; i < binding.group(group).members.size(); ++i)
    binding.attach(group, i, resting_of(*parts.program, group));
}

// The parameters of a deferred build, and buffers that have no values yet.
struct Deferred {
  struct Place {
    int group;  // kBuffer, kRemote
    std::size_t member;
  };
  static constexpr int kBuffer = -1, kRemote = -2;  // kRemote: parts.plan.remote[member]
  std::vector<at::Tensor> tensors;
  std::vector<Place> places;
  std::vector<std::size_t> missing;              // by group: members without values
  std::vector<std::vector<std::size_t>> others;  // by group: members that have values already
};

Deferred find_deferred(const Parts& parts) {
  Deferred found;
  for (const auto& group : parts.binding().groups()) {
    const auto g = static_cast<int>(found.missing.size());
    auto& others = found.others.emplace_back();
    for (std::size_t i = 0; i < group->members.size(); ++i) {
      if (!torch_hooks::is_deferred(group->members[i].tensor)) {
        others.push_back(i);
        continue;
      }
      found.tensors.push_back(group->members[i].tensor);
      found.places.push_back({g, i});
    }
    found.missing.push_back(group->members.size() - others.size());
  }
  for (const auto& buffer : parts.job.model->buffers()) {
    if (!torch_hooks::is_deferred(buffer)) continue;
    found.tensors.push_back(buffer);
    found.places.push_back({Deferred::kBuffer, 0});
  }
  for (std::size_t i = 0; i < parts.plan.remote.size(); ++i) {
    if (!torch_hooks::is_deferred(parts.plan.remote[i].tensor)) continue;
    found.tensors.push_back(parts.plan.remote[i].tensor);
    found.places.push_back({Deferred::kRemote, i});
  }
  return found;
}

// Draws the values in the order of their initializers, equal on every rank. A parameter is cut and its memory released
// as soon as it has its last value.
void adopt_deferred(const Parts& parts, Deferred deferred) {
  auto& comm = *parts.job.comm;
  if (comm.size() > 1) {
    // libtorch seeds each process randomly, so all ranks use rank 0's generator state.
    const auto states =
        comm.all_gather_bytes(comm.rank() == 0 ? torch_hooks::deferred_generators(deferred.tensors) : std::string());
    torch_hooks::set_deferred_generators(deferred.tensors, states[0]);
  }
  std::string hashes;
  const auto note = [&](const ModelParameter& parameter) {
    if (comm.size() > 1) hashes += base::join(parameter.name, " ", hash_of_values(parameter.tensor.detach()), "\n");
  };
  const auto take = [&](int group, std::size_t i) {
    const auto& member = parts.binding().group(group).members[i];
    note(member);
    adopt(parts, group, i, member.tensor.detach());
  };
  torch_hooks::replay_deferred(deferred.tensors, [&](std::size_t t) {
    const auto [group, member] = deferred.places[t];
    if (group == Deferred::kRemote) {
      note(parts.plan.remote[member]);
      parts.experts->release(parts.plan.remote[member]);
    }
    if (group < 0) return;
    take(group, member);
    const auto g = static_cast<std::size_t>(group);
    if (--deferred.missing[g] != 0 || parts.groups[g].axis > 0) return;
    for (const auto i : deferred.others[g])
      adopt(parts, group, i, of_rank_0(comm, parts.binding().group(group).members[i].tensor));
    parts.program->complete_initialisation(group);
  });
  // Ranks have other experts, which are complete at other times.
  for (std::size_t g = 0; g < deferred.missing.size(); ++g)
    if (parts.groups[g].axis > 0 &&
        deferred.others[g].size() < parts.binding().group(static_cast<int>(g)).members.size())
      adopt_experts(parts, static_cast<int>(g), deferred.others[g]);
  if (comm.size() == 1) return;
  const auto text = disagreement(comm, "[Engine] the initial values of deferred parameters", hashes);
  if (!text.empty())
    throw ConfigError(text +
                      ". Hint: the model reads or draws while it is built; call torch::manual_seed with the same "
                      "seed on every rank before zero::build.");
}

}  // namespace

void adopt_parameters(const Parts& parts) {
  const at::NoGradGuard no_grad;
  const torch_hooks::AllocationObserver::Pause pause;
  // Ranks that are threads share one generator.
  if (parts.products && parts.job.comm->transport() != "thread")
    agree_on_random_numbers(*parts.ranks.tensor, parts.plan.device);
  auto deferred = find_deferred(parts);
  std::vector<int> eager;
  for (std::size_t g = 0; g < deferred.missing.size(); ++g)
    if (deferred.missing[g] == 0) eager.push_back(static_cast<int>(g));
  if (!deferred.tensors.empty()) adopt_deferred(parts, std::move(deferred));
  for (const int group : eager) {
    if (parts.groups[static_cast<std::size_t>(group)].axis > 0)
      adopt_experts(parts, group, all_members(parts.binding().group(group)));
    else if (parts.products || parts.job.comm->size() == 1)
      adopt_members(parts, group);
    else
      adopt_group(parts, group);
  }
  for (const auto& parameter : parts.plan.remote)
    if (!torch_hooks::is_intercepted(parameter.tensor)) parts.experts->release(parameter);
}

}  // namespace zero::engine
