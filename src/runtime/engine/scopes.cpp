// See scopes.h.
#include "engine/scopes.h"

#include <ATen/ATen.h>

#include "engine/rank_agreement.h"
#include "engine/state_access.h"

namespace zero::engine {

// Every rank sends its request, or why it is invalid, before anything is gathered.
std::vector<int> Scopes::agreed_groups(const ParameterChoice& choice, bool modify) {
  std::vector<int> groups;
  const auto where = p_.where("gathered_parameters");
  agree_on(p_.relay, *p_.job.comm, "Engine::gathered_parameters", where + "the units asked for", [&] {
    groups = chosen_groups(p_.binding(), p_.plan.remote, choice, where);
    std::string lines = modify ? "to write\n" : "to read\n";
    for (const int g : groups) lines += p_.groups[static_cast<std::size_t>(g)].name + "\n";
    return lines;
  });
  return groups;
}

std::vector<int> Scopes::begin(const ParameterChoice& choice, bool modify) {
  p_.relay.keeping([&] {
    if (modify)
      checks_.require_boundary("gathered_parameters");
    else
      checks_.require_usable("gathered_parameters");
  });
  auto groups = agreed_groups(choice, modify);
  p_.relay.reporting([&] {
    stepper_.flush();
    if (modify) p_.progress.release_saves("gathered_parameters");
    {
      const step::Prefetcher::Alone alone(p_.prefetcher(), p_.where("gathered_parameters"));
      p_.prefetcher().pin(groups);
    }
    p_.progress.scopes.open(groups, modify);
    if (p_.products) p_.products->set_readable(true);
  });
  return groups;
}

void Scopes::end(const std::vector<int>& groups, bool modify) {
  p_.relay.reporting([&] {
    p_.progress.scopes.close(groups, modify);
    if (p_.products) p_.products->set_readable(p_.progress.scopes.any());
    if (modify) {
      checks_.parameters("gathered_parameters");
      p_.job.comm->barrier();  // no rank reads a shard in place any more
      for (const int g : groups) write_back(g);
      p_.progress.worth_keeping = true;
    }
    p_.prefetcher().unpin(groups);
  });
}

// Copies rank 0's values of the parameters to all ranks; those of experts, of the first rank that has them.
void Scopes::write_back(int index) {
  const at::NoGradGuard no_grad;
  const auto& group = *p_.program->groups()[static_cast<std::size_t>(index)];
  const auto& facts = group.facts;
  const auto whole = group.params->whole();
  if (whole.numel == 0) return;
  auto flat = p_.memory->buffers.tensor(whole);
  // Tensor-parallel ranks have equal values of what is not cut; each has its own part of the rest.
  const auto cut_begin = p_.binding().group(index).cut_begin;
  if (p_.ranks.tensor->size() > 1 && cut_begin > 0) p_.ranks.tensor->broadcast(flat.narrow(0, 0, cut_begin), 0)->wait();
  if (auto& ranks = p_.ranks.of(facts); ranks.size() > 1) ranks.broadcast(flat, 0)->wait();
  StateAccess states(p_.memory->buffers);
  if (facts.sharding.params)
    states.write_params(group, 0, flat.narrow(0, p_.plan.run.shard_begin(facts), facts.shard()));
  group.params->mark_updated();
  // Unmodified elements keep their master's full precision.
  const auto owned_begin = p_.plan.run.owned_begin(facts);
  for (const auto& segment : facts.segments) {
    if (segment.aliases_master) continue;
    const auto master = states.read(group, kMaster, segment.begin, segment.numel);
    const auto mine = flat.narrow(0, owned_begin + segment.begin, segment.numel).to(master.device());
    const auto changed = mine.ne(master.to(mine.scalar_type()));
    states.write(group, kMaster, segment.begin, at::where(changed, mine.to(at::kFloat), master));
  }
}

}  // namespace zero::engine
