// See state_export.h.
#include "engine/state_export.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <xxhash.h>

#include <algorithm>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/hex.h"
#include "engine/dtypes.h"
#include "engine/model_buffers.h"
#include "engine/parameter_access.h"
#include "engine/tensor_parts.h"

namespace zero::engine {

std::map<std::string, at::Tensor> StateExport::full_state_dict() {
  return p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    if (p_.experts) p_.experts->share_buffers();
    std::map<std::string, at::Tensor> result;
    for (std::size_t g = 0; g < p_.groups.size(); ++g) {
      const auto flat = gathered_state(p_, group(g), kMaster);
      const auto& layout = p_.groups[g].layout;
      const auto& members = p_.binding().group(static_cast<int>(g)).members;
      for (std::size_t i = 0; i < members.size(); ++i) {
        const auto part = flat.narrow(0, layout.parameter_offset(i), layout.parameter_numel(i));
        const auto whole = whole_of(members[i], part, *p_.ranks.tensor);
        const auto add = [&](const std::string& name, const at::Tensor& values) {
          if (p_.job.comm->rank() == 0) result[name] = values.to(at::kCPU, at::kFloat, false, /*copy=*/true);
        };
        const auto& expert = members[i].expert;
        if (!expert) add(members[i].name, whole);
        for (int place = 0; expert && place < expert->ep_size; ++place)
          add(expert->at(place, members[i].name), values_of_owner(p_, {static_cast<int>(g), i, place, {}, {}}, whole));
      }
    }
    return result;
  });
}

std::string StateExport::state_hash() {
  return p_.relay.reporting([&] {
    stepper_.flush();
    auto* hash = XXH3_createState();
    XXH3_128bits_reset(hash);
    const auto add = [&](const at::Tensor& shard) {
      const auto part = shard.cpu();
      if (part.numel() > 0) XXH3_128bits_update(hash, part.const_data_ptr(), part.nbytes());
    };
    for (std::size_t g = 0; g < p_.groups.size(); ++g) {
      if (!p_.groups[g].trainable) continue;
      for (int state = 0; state <= p_.groups[g].num_slots(); ++state) add(states_.shard(group(g), state));
    }
    const auto own = XXH3_128bits_digest(hash);
    XXH3_freeState(hash);
    const auto all = base::all_gather_values(*p_.job.comm, own);
    const auto digest = XXH3_128bits(all.data(), all.size() * sizeof own);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, digest);
    return base::hex(canonical.digest, sizeof canonical.digest);
  });
}

// --- checkpoints ------------------------------------------------------------------------------

namespace {

// Parts of a state in blocks, each of which would round the rest of a block again: they are written together.
std::function<void(std::int64_t, const at::Tensor&)> collected(
    std::int64_t numel, std::function<void(std::int64_t, const at::Tensor&)> write) {
  struct Parts {
    at::Tensor values;
    std::int64_t missing = 0;
  };
  return [=, parts = std::make_shared<Parts>()](std::int64_t at, const at::Tensor& values) {
    if (!parts->values.defined()) *parts = {at::empty({numel}, at::kFloat), numel};
    parts->values.narrow(0, at, values.numel()).copy_(values);
    parts->missing -= values.numel();
    if (parts->missing > 0) return;
    write(0, parts->values);
    *parts = {};
  };
}

}  // namespace

void StateExport::add_pieces(std::vector<StatePiece>& pieces, const step::Group& group, bool to_save) {
  const auto& facts = group.facts;
  const auto shard_begin = p_.plan.run.shard_begin(facts), owned_begin = p_.plan.run.owned_begin(facts);
  const auto& members = p_.binding().group(group.index).members;
  // For a vector that holds the flat vector's elements from vector_begin on.
  const auto add = [&](const std::string& kind, at::ScalarType dtype, std::int64_t begin, std::int64_t numel,
                       std::int64_t vector_begin, int state, const auto& read, const auto& write) {
    for (const auto& piece : facts.layout.pieces(begin, numel)) {
      const auto& member = members[piece.parameter];
      // Tensor-parallel ranks have equal values of what is not cut; one of them saves them.
      if (to_save && !member.is_cut() && p_.ranks.tensor->rank() > 0) continue;
      const auto at = begin + piece.range_begin - vector_begin;
      pieces.push_back(
          {kind, member.name, member.sizes, member.elements_before(p_.ranks.tensor->rank()) + piece.parameter_begin,
           piece.numel, dtype, facts.trainable,
           [=](std::int64_t from, std::int64_t count) { return read(at + from, count).cpu(); },
           [=](std::int64_t from, const at::Tensor& values) { write(at + from, values); }, group.index, state, at});
      auto& added = pieces.back();
      if (facts.trainable && state != kMaster && facts.precision.slots == step::Dtype::U8)
        added.write = collected(added.numel, std::move(added.write));
    }
  };
  if (!facts.trainable) {
    const bool whole = !facts.sharding.params && !to_save;
    add(
        "param", scalar_type(facts.precision.param), whole ? 0 : shard_begin, whole ? facts.padded() : facts.shard(),
        facts.sharding.params ? shard_begin : 0, kMaster,
        [this, &group](std::int64_t at, std::int64_t count) { return states_.read_params(group, at, count); },
        [this, &group](std::int64_t at, const at::Tensor& values) { states_.write_params(group, at, values); });
    return;
  }
  for (int state = 0; state <= facts.num_slots(); ++state)
    add(
        state == kMaster ? "master" : "opt." + facts.states[static_cast<std::size_t>(state - 1)],
        dtype_of_state(facts, state), to_save ? shard_begin : owned_begin, to_save ? facts.shard() : facts.owned(),
        owned_begin, state,
        [this, &group, state](std::int64_t at, std::int64_t count) { return states_.read(group, state, at, count); },
        [this, &group, state](std::int64_t at, const at::Tensor& values) { states_.write(group, state, at, values); });
}

void StateExport::add_buffers(std::vector<StatePiece>& pieces, bool to_load) const {
  const auto unsaved = unsaved_buffers(*p_.job.model);
  for (const auto& item : p_.job.model->named_buffers()) {
    if (!item.value().defined()) continue;
    const bool saved = !unsaved.contains(item.key());
    if (!saved && !can_be_saved(item.value())) continue;
    require_dense(item.value(), item.key());
    // The program may have replaced buffers by others with another layout. Saving uses a copy then; loading needs
    // separate memory for each element.
    if (to_load && !item.value().is_contiguous()) item.value().set_data(item.value().contiguous());
    const auto data = item.value().detach().contiguous().view({-1});
    pieces.push_back(
        {saved ? "buffer" : kPrivateKind, saved ? item.key() : unsaved_name(item.key()), item.value().sizes().vec(), 0,
         data.numel(), data.scalar_type(), false,
         [data](std::int64_t at, std::int64_t count) { return data.narrow(0, at, count).cpu(); },
         [data](std::int64_t at, const at::Tensor& values) { data.narrow(0, at, values.numel()).copy_(values); }});
  }
}

std::vector<StatePiece> StateExport::pieces(bool to_save, bool to_load) {
  std::vector<StatePiece> result;
  for (std::size_t g = 0; g < p_.groups.size(); ++g) add_pieces(result, group(g), to_save);
  add_buffers(result, to_load);
  return result;
}

std::vector<StatePiece> StateExport::pieces_to_save() {
  p_.program->optimizer().settle();
  return pieces(/*to_save=*/true, /*to_load=*/false);
}

std::vector<StatePiece> StateExport::pieces_to_load() { return pieces(/*to_save=*/false, /*to_load=*/true); }

std::vector<StatePiece> StateExport::pieces_to_keep() {
  p_.program->optimizer().settle();
  return pieces(/*to_save=*/false, /*to_load=*/false);
}

void StateExport::adopt_loaded() {
  p_.relay.reporting([&] { p_.program->end_replacing(); });
}

std::map<std::string, std::string> StateExport::aliases() const {
  std::map<std::string, std::string> result;
  for (const auto& group : p_.binding().groups())
    for (const auto& member : group->members)
      for (const auto& alias : member.aliases) {
        if (!member.expert) result[alias] = member.name;
        for (int place = 0; member.expert && place < member.expert->ep_size; ++place)
          result[member.expert->at(place, alias)] = member.expert->at(place, member.name);
      }
  return result;
}

StateCounters StateExport::counters() const {
  StateCounters counters{p_.program->steps(),
                         p_.progress.skipped_steps,
                         p_.optimizer->applied_steps(),
                         p_.progress.global_samples,
                         p_.scaler->state(),
                         {},
                         {}};
  const auto& rates = p_.optimizer->set_rates();
  if (std::any_of(rates.begin(), rates.end(), [](double rate) { return rate >= 0; })) counters.set_rates = rates;
  for (std::size_t g = 0; g < p_.groups.size(); ++g) {
    const auto& members = p_.binding().group(static_cast<int>(g)).members;
    const auto& all = p_.backend->update.missed_steps(static_cast<int>(g));
    for (std::size_t i = 0; i < members.size(); ++i)
      if (p_.groups[g].trainable && all[i] > 0) counters.missed_steps[members[i].name] = all[i];
  }
  return counters;
}

void StateExport::set_counters(const StateCounters& counters) {
  p_.program->set_steps(counters.global_steps);
  p_.progress.skipped_steps = counters.skipped_steps;
  p_.progress.global_samples = counters.global_samples;
  p_.optimizer->set_applied_steps(counters.applied_steps);
  p_.scaler->set_state(counters.scaler);
  p_.optimizer->restore_rates(counters.set_rates);
  for (std::size_t g = 0; g < p_.groups.size(); ++g) {
    std::vector<std::int64_t> missed;
    for (const auto& member : p_.binding().group(static_cast<int>(g)).members) {
      const auto it = counters.missed_steps.find(member.name);
      missed.push_back(!p_.groups[g].trainable             ? counters.applied_steps
                       : it == counters.missed_steps.end() ? 0
                                                           : it->second);
    }
    p_.backend->update.set_missed_steps(static_cast<int>(g), std::move(missed));
  }
  p_.program->forget_accumulated();
  p_.progress.backward_since_step = false;
}

}  // namespace zero::engine
