// See replicas.h.
#include "engine/replicas.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "engine/rank_agreement.h"
#include "engine/state_access.h"

namespace zero::engine {
namespace {

struct Replica {
  std::string name;
  std::uint64_t hash = 0;
};

// Chunks bound the host memory that a parameter of a device takes.
std::uint64_t hash_of(const at::Tensor& flat) {
  constexpr std::int64_t kChunk = std::int64_t{1} << 22;  // elements
  if (flat.numel() == 0) return 0;
  if (flat.is_cpu()) return XXH3_64bits(flat.const_data_ptr(), flat.nbytes());
  std::uint64_t hash = 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const auto chunk = flat.narrow(0, begin, std::min(kChunk, flat.numel() - begin)).cpu();
    hash = XXH3_64bits_withSeed(chunk.const_data_ptr(), chunk.nbytes(), hash);
  }
  return hash;
}

// Equal on all ranks at all stages.
Replica counters_of(const Parts& p) {
  const auto& scaler = p.scaler->state();
  std::string text;
  const auto add = [&](const auto& value) { text.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (const std::int64_t value :
       {p.program->steps(), p.progress.skipped_steps, p.progress.global_samples, p.optimizer->applied_steps()})
    add(value);
  for (const double value : {p.scaler->scale(), p.progress.last_norm}) add(value);
  add(static_cast<std::int64_t>(scaler.floor));
  for (int group = 0; group < p.optimizer->num_parameter_groups(); ++group) add(p.optimizer->lr(group));
  return {"the counters, learning rates, loss scale or last norm", XXH3_64bits(text.data(), text.size())};
}

// The parameters of an axis that each of its ranks stores whole. common: only those that tensor-parallel ranks share.
std::vector<Replica> replicas_of(const Parts& p, int axis, bool common) {
  const StateAccess states(p.memory->buffers);
  std::vector<Replica> replicas;
  for (std::size_t g = 0; g < p.groups.size(); ++g) {
    const auto& facts = p.groups[g];
    if (facts.axis != axis || facts.sharding.params) continue;
    const auto& members = p.binding().group(static_cast<int>(g)).members;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (common && members[i].is_cut()) continue;
      replicas.push_back({"parameter " + members[i].name,
                          hash_of(states.read_params(*p.program->groups()[g], facts.layout.parameter_offset(i),
                                                     facts.layout.parameter_numel(i)))});
    }
  }
  return replicas;
}

// The ranks whose hash is not that of the most; where no hash has more ranks than the others, all of them.
std::string odd_ranks(const std::vector<std::pair<std::int64_t, std::uint64_t>>& hashes) {
  std::map<std::uint64_t, std::size_t> votes;
  for (const auto& [rank, hash] : hashes) ++votes[hash];
  if (votes.size() < 2) return "";
  std::size_t most = 0, with_most = 0;
  for (const auto& [hash, count] : votes) {
    if (count > most) with_most = 0;
    most = std::max(most, count);
    with_most += count == most;
  }
  std::string odd;
  std::size_t named = 0;
  for (const auto& [rank, hash] : hashes) {
    if (with_most == 1 && votes[hash] == most) continue;
    odd += base::join(named == 0 ? "" : ", ", rank);
    ++named;
  }
  if (with_most > 1) return base::join("ranks ", odd, " have different values");
  return base::join("rank", named > 1 ? "s " : " ", odd, named > 1 ? " have" : " has", " other values than ", most,
                    " ranks");
}

// [collective] What differs over `ranks`, the same sentence on each of them; "" if nothing does.
std::string differences(comm::Group& ranks, std::int64_t world_rank, const std::vector<Replica>& mine) {
  if (ranks.size() == 1) return "";
  std::vector<std::uint64_t> hashes;
  for (const auto& replica : mine) hashes.push_back(replica.hash);
  struct Digest {
    std::int64_t rank;
    std::uint64_t hash;
  } digest{world_rank, XXH3_64bits(hashes.data(), hashes.size() * sizeof(std::uint64_t))};
  std::vector<Digest> all;
  for (const auto& text : ranks.all_gather_bytes({reinterpret_cast<const char*>(&digest), sizeof digest})) {
    ZERO_CHECK(text.size() == sizeof digest, "a hash of ", text.size(), " bytes");
    std::memcpy(&all.emplace_back(), text.data(), sizeof digest);
  }
  if (std::all_of(all.begin(), all.end(), [&](const Digest& other) { return other.hash == all[0].hash; })) return "";
  const auto lists =
      ranks.all_gather_bytes({reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(std::uint64_t)});
  constexpr int kShown = 5;
  std::string text;
  int found = 0;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    std::vector<std::pair<std::int64_t, std::uint64_t>> of_ranks;
    for (std::size_t r = 0; r < lists.size(); ++r) {
      ZERO_CHECK(lists[r].size() == hashes.size() * sizeof(std::uint64_t), "hashes of ", lists[r].size(), " bytes");
      std::memcpy(&of_ranks.emplace_back(all[r].rank, 0).second, lists[r].data() + i * sizeof(std::uint64_t),
                  sizeof(std::uint64_t));
    }
    const auto odd = odd_ranks(of_ranks);
    if (!odd.empty() && ++found <= kShown) text += (text.empty() ? "" : "; ") + mine[i].name + ": " + odd;
  }
  if (found > kShown) text += base::join("; and ", found - kShown, " more");
  return text;
}

}  // namespace

void compare_replicas_at_times(Parts& p) {
  const auto every = p.settings.replica_check_steps;
  if (every > 0 && (p.program->steps() + 1) % every == 0) compare_replicas(p);
}

void compare_replicas(Parts& p) {
  if (p.comm->size() == 1) return;
  const observe::TraceSpan wait(p.trace.trace(), observe::TraceKind::ExchangeWait, "replicas");
  const auto rank = p.comm->rank();
  const auto compare = [&]() -> std::string {
    std::string text;
    const auto add = [&](const std::string& more) { text += (text.empty() || more.empty() ? "" : "; ") + more; };
    for (std::size_t axis = 0; axis < p.axis_groups.size(); ++axis) {
      auto replicas = replicas_of(p, static_cast<int>(axis), false);
      if (axis == 0) replicas.push_back(counters_of(p));
      add(differences(*p.axis_groups[axis], rank, replicas));
    }
    if (p.tensor_group->size() > 1) {
      auto replicas = replicas_of(p, 0, true);
      replicas.push_back(counters_of(p));
      add(differences(*p.tensor_group, rank, replicas));
    }
    if (text.empty()) return "";
    throw InternalError(p.where("step") + "what ranks have alike differs: " + text +
                            ". Hint: memory or a device of the rank named has changed bits, or the program wrote to "
                            "its parameters on some ranks only. Resume from the last checkpoint, on other hardware if "
                            "it happens again.",
                        ExitCode::kNumerical);
  };
  // Ranks of other groups have seen nothing.
  if (p.axis_groups.size() > 1 || p.tensor_group->size() > 1)
    agree(*p.comm, "Engine::step", compare);
  else
    compare();
}

}  // namespace zero::engine
