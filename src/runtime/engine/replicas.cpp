// See replicas.h.
#include "engine/replicas.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/mix.h"
#include "engine/rank_agreement.h"
#include "engine/state_access.h"

namespace zero::engine {
namespace {

struct Replica {
  std::string name;
  std::uint64_t hash = 0;
};

// Elements. Chunks bound the host memory that a parameter of a device takes.
constexpr std::int64_t kChunk = std::int64_t{1} << 22;

std::uint64_t hash_of_bytes(const at::Tensor& flat) {
  if (flat.numel() == 0) return 0;
  if (flat.is_cpu()) return XXH3_64bits(flat.const_data_ptr(), flat.nbytes());
  std::uint64_t hash = 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const auto chunk = flat.narrow(0, begin, std::min(kChunk, flat.numel() - begin)).cpu();
    hash = XXH3_64bits_withSeed(chunk.const_data_ptr(), chunk.nbytes(), hash);
  }
  return hash;
}

// Of the bits of elements, each times an odd number that depends on its index; the first one has the index `begin`.
std::uint64_t weighted_sum(const at::Tensor& flat, std::int64_t begin) {
  const auto values = flat.cpu().contiguous();
  std::uint64_t sum = 0;
  const auto add = [&](const auto* bits) {
    for (std::int64_t i = 0; i < values.numel(); ++i)
      sum += bits[i] * (base::mixed(static_cast<std::uint64_t>(begin + i)) | 1);
  };
  ZERO_CHECK(values.element_size() == 4 || values.element_size() == 2, "a state of ",
             c10::toString(values.scalar_type()));
  if (values.element_size() == 4)
    add(static_cast<const std::uint32_t*>(values.const_data_ptr()));
  else
    add(static_cast<const std::uint16_t*>(values.const_data_ptr()));
  return sum;
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
                          hash_of_bytes(states.read_params(*p.program->groups()[g], facts.layout.parameter_offset(i),
                                                           facts.layout.parameter_numel(i)))});
    }
  }
  return replicas;
}

// "PARAMETER (master)" and the like of what tensor-parallel ranks have in common, in the order of the units: of the
// elements in this rank's shard, the sum of their bits times a weight of their position in the parameter. The total
// over the ranks of one tensor coordinate does not depend on how uneven parts move the borders of its shards.
std::vector<Replica> common_states(const Parts& p) {
  const StateAccess states(p.memory->buffers);
  std::vector<Replica> result;
  for (std::size_t g = 0; g < p.groups.size(); ++g) {
    const auto& facts = p.groups[g];
    const auto& group = *p.program->groups()[g];
    const auto& members = p.binding().group(static_cast<int>(g)).members;
    const auto begin = p.plan.run.shard_begin(facts), end = begin + facts.shard();
    for (int state = kMaster; state <= (facts.trainable ? facts.num_slots() : kMaster); ++state)
      for (std::size_t i = 0; i < members.size(); ++i) {
        if (members[i].is_cut()) continue;
        const auto offset = facts.layout.parameter_offset(i);
        const auto last = std::min(end, offset + facts.layout.parameter_numel(i));
        const auto kind = !facts.trainable   ? "frozen"
                          : state == kMaster ? "master"
                                             : facts.states[static_cast<std::size_t>(state - 1)];
        Replica sum{base::join(members[i].name, " (", kind, ")"), 0};
        for (auto at = std::max(begin, offset); at < last; at += std::min(kChunk, last - at)) {
          const auto numel = std::min(kChunk, last - at);
          sum.hash +=
              weighted_sum(facts.trainable ? states.read(group, state, at - p.plan.run.owned_begin(facts), numel)
                                           : states.read_params(group, at - (facts.sharding.params ? begin : 0), numel),
                           at - offset);
        }
        result.push_back(std::move(sum));
      }
  }
  return result;
}

// What some ranks replicate, and each one's hashes.
struct Holder {
  std::string rank;
  std::vector<std::uint64_t> hashes;
};

// The holders whose hash `which` is not that of the most; where no hash has more than the others, all of them. `rank`
// is what they are called.
std::string odd_ranks(const std::vector<Holder>& holders, std::size_t which, const std::string& called) {
  std::map<std::uint64_t, std::size_t> votes;
  for (const auto& holder : holders) ++votes[holder.hashes[which]];
  if (votes.size() < 2) return "";
  std::size_t most = 0, with_most = 0;
  for (const auto& [hash, count] : votes) {
    if (count > most) with_most = 0;
    most = std::max(most, count);
    with_most += count == most;
  }
  std::string odd;
  std::size_t named = 0;
  for (const auto& holder : holders) {
    if (with_most == 1 && votes[holder.hashes[which]] == most) continue;
    odd += (named == 0 ? "" : ", ") + holder.rank;
    ++named;
  }
  if (with_most > 1) return base::join(called, "s ", odd, " have different values");
  return base::join(called, named > 1 ? "s " : " ", odd, named > 1 ? " have" : " has", " other values than ", most, " ",
                    called, "s");
}

// "" if nothing differs.
std::string odd_ones(const std::vector<std::string>& names, const std::vector<Holder>& holders,
                     const std::string& called) {
  constexpr int kShown = 5;
  std::string text;
  int found = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto odd = odd_ranks(holders, i, called);
    if (!odd.empty() && ++found <= kShown) text += (text.empty() ? "" : "; ") + names[i] + ": " + odd;
  }
  if (found > kShown) text += base::join("; and ", found - kShown, " more");
  return text;
}

// [collective] What differs over `ranks`, the same sentence on each of them; "" if nothing does.
std::string differences(comm::Group& ranks, std::int64_t world_rank, const std::vector<Replica>& mine) {
  if (ranks.size() == 1) return "";
  std::vector<std::uint64_t> hashes;
  for (const auto& replica : mine) hashes.push_back(replica.hash);
  struct Digest {
    std::int64_t rank;
    std::uint64_t hash;
  };
  const auto all = base::all_gather_values(
      ranks, Digest{world_rank, XXH3_64bits(hashes.data(), hashes.size() * sizeof(std::uint64_t))});
  if (std::all_of(all.begin(), all.end(), [&](const Digest& other) { return other.hash == all[0].hash; })) return "";
  const auto lists = base::all_gather_lists(ranks, hashes);
  std::vector<std::string> names;
  for (const auto& replica : mine) names.push_back(replica.name);
  std::vector<Holder> holders;
  for (std::size_t r = 0; r < lists.size(); ++r) {
    ZERO_CHECK(lists[r].size() == hashes.size(), "rank ", r, " sent ", lists[r].size(), " hashes");
    holders.emplace_back(std::to_string(all[r].rank), lists[r]);
  }
  return odd_ones(names, holders, "rank");
}

// "1 (ranks 1, 3)"
std::string tensor_coordinate(int place, int degree, int world) {
  constexpr int kShown = 4;
  std::string text = base::join(place, " (rank", world > degree ? "s " : " ", place);
  for (int r = place + degree, shown = 1; r < world; r += degree)
    if (++shown <= kShown) text += base::join(", ", r);
  return text + (world > kShown * degree ? ", ...)" : ")");
}

}  // namespace

void compare_replicas_at_times(Parts& p) {
  const auto every = p.job.settings.replica_check_steps;
  if (every > 0 && (p.program->steps() + 1) % every == 0) compare_replicas(p);
}

void compare_replicas(Parts& p) {
  if (p.job.comm->size() == 1) return;
  const observe::TraceSpan wait(p.trace.trace(), observe::TraceKind::ExchangeWait, "replicas");
  const auto rank = p.job.comm->rank();
  const auto compare = [&]() -> std::string {
    std::string text;
    const auto add = [&](const std::string& more) { text += (text.empty() || more.empty() ? "" : "; ") + more; };
    for (std::size_t axis = 0; axis < p.ranks.axes.size(); ++axis) {
      auto replicas = replicas_of(p, static_cast<int>(axis), false);
      if (axis == 0) replicas.push_back(counters_of(p));
      add(differences(*p.ranks.axes[axis], rank, replicas));
    }
    if (p.ranks.tensor->size() > 1) {
      auto replicas = replicas_of(p, 0, true);
      replicas.push_back(counters_of(p));
      add(differences(*p.ranks.tensor, rank, replicas));
    }
    if (text.empty()) return "";
    throw InternalError(p.where("step") + "replicated state differs between ranks: " + text +
                            ". Hint: memory or a device of the rank named has changed bits, or the program wrote to "
                            "its parameters on some ranks only. Resume from the last checkpoint, on other hardware if "
                            "it happens again.",
                        ExitCode::kNumerical);
  };
  // Ranks of other groups have seen nothing.
  if (p.ranks.axes.size() > 1 || p.ranks.tensor->size() > 1)
    agree(*p.job.comm, "Engine::step", compare);
  else
    compare();
}

void compare_tensor_parallel_ranks(const Parts& p, const char* call) {
  const int degree = p.ranks.tensor->size(), world = p.job.comm->size();
  if (degree == 1) return;
  std::vector<Replica> mine;
  const auto texts = agree(*p.job.comm, call, [&] {
    mine = common_states(p);
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < mine.size(); ++i) sum += mine[i].hash * (base::mixed(i) | 1);
    return std::to_string(sum);
  });
  std::vector<std::uint64_t> totals(static_cast<std::size_t>(degree));
  for (std::size_t r = 0; r < texts.size(); ++r) totals[r % totals.size()] += std::stoull(texts[r]);  // neighbours
  if (std::all_of(totals.begin(), totals.end(), [&](std::uint64_t total) { return total == totals[0]; })) return;

  std::string lines;
  for (const auto& sum : mine) lines += base::join(sum.hash, " ", sum.name, "\n");
  std::vector<Holder> holders;
  for (int place = 0; place < degree; ++place) holders.push_back({tensor_coordinate(place, degree, world), {}});
  // Ranks have different experts.
  std::vector<std::string> names;
  std::map<std::string, std::size_t> index;
  const auto lists = p.job.comm->all_gather_bytes(lines);
  for (std::size_t r = 0; r < lists.size(); ++r) {
    std::istringstream in(lists[r]);
    std::uint64_t sum = 0;
    for (std::string name; in >> sum && in.get() && std::getline(in, name);) {
      const auto [at, is_new] = index.emplace(name, names.size());
      if (is_new) {
        names.push_back(name);
        for (auto& holder : holders) holder.hashes.push_back(0);
      }
      holders[r % holders.size()].hashes[at->second] += sum;
    }
  }
  throw InternalError(
      base::join("[", call,
                 "] what tensor-parallel ranks have in common differs: ", odd_ones(names, holders, "tp rank"),
                 ". Hint: give all ranks of a tensor-parallel group the same samples, and write parameters only inside "
                 "gathered_parameters(true). If the program does, memory or a device has changed bits: resume from the "
                 "last checkpoint."),
      ExitCode::kNumerical);
}

}  // namespace zero::engine
