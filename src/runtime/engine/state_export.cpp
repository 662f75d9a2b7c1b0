// Handing states out and taking them back: gathered scopes, whole masters, digests, checkpoint pieces.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/hex.h"
#include "engine/state.h"

namespace zero::engine {

void State::begin_gathered(bool modify) {
  relay_.keeping([&] {
    if (modify)
      require_boundary("gathered_parameters");
    else
      require_usable("gathered_parameters");
  });
  relay_.telling([&] {
    flush();
    {
      const step::Prefetcher::Alone alone(*prefetcher_, where("gathered_parameters"));
      prefetcher_->pin_all();
    }
    ++gathered_scopes_;
    modifying_scopes_ += modify ? 1 : 0;
  });
}

void State::end_gathered(bool modify) {
  relay_.telling([&] {
    const bool outermost = --gathered_scopes_ == 0;
    if (modify) {
      --modifying_scopes_;
      check_parameters("gathered_parameters");
      comm_->barrier();  // nobody reads a shard in place any more
      for (const auto& group : groups_) group->write_back();
    }
    if (outermost) prefetcher_->unpin_all();
  });
}

void State::require_no_scope(const char* what, bool reading_too) const {
  if (modifying_scopes_ == 0 && (gathered_scopes_ == 0 || !reading_too)) return;
  throw ConfigError(where(what) + "called inside a scope of gathered_parameters" +
                    (reading_too ? "" : "(true), whose writes count from its end on") +
                    ". Hint: close() the scope first.");
}

std::map<std::string, at::Tensor> State::full_state_dict() {
  return relay_.telling([&] {
    flush();
    at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> result;
    for (const auto& group : groups_) {
      // Frozen parameters have no master: their resting values stand for it.
      const bool frozen = !group->trainable();
      at::Tensor whole;
      if (frozen ? !group->rests_sharded() : stage_ == 0) {
        whole =
            (frozen ? group->parameters().read() : group->states().read(GroupStates::kMaster, 0, group->owned().numel))
                .to(at::kFloat);
      } else if (group->layout().padded_numel() > 0) {
        const auto part =
            (frozen ? group->parameters().read() : group->state_shard(GroupStates::kMaster)).to(device_, at::kFloat);
        whole = at::empty({group->layout().padded_numel()}, part.options());
        comm_->all_gather(whole, part.contiguous())->wait();
      } else {
        whole = at::empty({0}, at::kFloat);
      }
      if (comm_->rank() != 0) continue;
      whole = whole.cpu();
      for (std::size_t i = 0; i < group->members().size(); ++i) {
        const auto& member = group->members()[i];
        result[member.name] = whole.narrow(0, group->layout().parameter_offset(i), group->layout().parameter_numel(i))
                                  .view(member.tensor.sizes())
                                  .clone();
      }
    }
    return result;
  });
}

std::string State::state_hash() {
  return relay_.telling([&] {
    flush();
    auto* hash = XXH3_createState();
    XXH3_128bits_reset(hash);
    const auto add = [&](const at::Tensor& shard) {
      const auto part = shard.cpu();
      if (part.numel() > 0) XXH3_128bits_update(hash, part.const_data_ptr(), part.nbytes());
    };
    for (const auto& group : groups_) {
      if (!group->trainable()) continue;
      for (int state = 0; state < group->states().num_states(); ++state) add(group->state_shard(state));
    }
    auto own = XXH3_128bits_digest(hash);
    XXH3_freeState(hash);
    std::string all;
    for (const auto& text : comm_->all_gather_bytes({reinterpret_cast<const char*>(&own), sizeof own})) all += text;
    const auto digest = XXH3_128bits(all.data(), all.size());
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, digest);
    return base::hex(canonical.digest, sizeof canonical.digest);
  });
}

// The group and member of a parameter whose gradient is reduced and waits for step(); null: frozen.
std::pair<const ParamGroup*, std::size_t> State::reduced_member(const char* what, const std::string& name) {
  require_usable(what);
  if (!settings_.managed_gradient_accumulation)
    throw ConfigError(where(what) +
                      "called with gradient accumulation that the program ends: gradients are reduced by "
                      "step(). Hint: set libzero.managed_gradient_accumulation to true.");
  if (open_ || micro_step_ != accumulation_)
    throw ConfigError(where(what) + base::join("called after ", micro_step_, " of ", accumulation_, " micro-batches",
                                               open_ ? " and within another" : "",
                                               ", expected between the last backward() and step()"));
  for (const auto& group : groups_)
    for (std::size_t i = 0; i < group->members().size(); ++i) {
      const auto& member = group->members()[i];
      const auto& aliases = member.aliases;
      if (member.name != name && std::find(aliases.begin(), aliases.end(), name) == aliases.end()) continue;
      return {group->trainable() && group->autograd().active(i) ? group.get() : nullptr, i};
    }
  throw ConfigError(where(what) + "got the name " + name + ", which no parameter of the model has");
}

OwnGradient State::own_gradient(const std::string& name) {
  return relay_.keeping([&]() -> OwnGradient {
    const auto [group, i] = reduced_member("own_gradient", name);
    if (group == nullptr) return {};
    const at::NoGradGuard no_grad;
    const auto [begin, values] = group->own_gradient(i);
    return {begin, values.to(at::kFloat) * (static_cast<double>(postmultiply_) / scaler_->scale())};
  });
}

at::Tensor State::gradient(const std::string& name) {
  const auto own = own_gradient(name);
  if (!own.values.defined()) return {};
  return relay_.telling([&]() -> at::Tensor {
    const at::NoGradGuard no_grad;
    const auto [group, i] = reduced_member("gradient", name);
    const auto& tensor = group->members()[i].tensor;
    // Each element is one rank's, and zero on the others.
    auto whole = at::zeros({tensor.numel()}, own.values.options().device(device_));
    whole.narrow(0, own.begin, own.values.numel()).copy_(own.values);
    if (comm_->size() > 1 && whole.numel() > 0) comm_->all_reduce(whole)->wait();
    return whole.view(tensor.sizes());
  });
}

std::vector<StatePiece> State::pieces(bool to_save) {
  std::vector<StatePiece> result;
  const std::int64_t rank = comm_->rank();
  for (const auto& group : groups_) {
    const auto& layout = group->layout();
    const auto shard_begin = rank * layout.shard_numel();
    // Of a vector that holds the flat vector's elements from vector_begin on.
    const auto add = [&](const std::string& kind, at::ScalarType dtype, std::int64_t begin, std::int64_t numel,
                         std::int64_t vector_begin, const auto& read, const auto& write) {
      for (const auto& piece : layout.pieces(begin, numel)) {
        const auto& member = group->members()[piece.parameter];
        const auto at = begin + piece.range_begin - vector_begin;
        result.push_back({kind, member.name, member.tensor.sizes().vec(), piece.parameter_begin, piece.numel, dtype,
                          group->trainable(),
                          [=](std::int64_t from, std::int64_t count) { return read(at + from, count).cpu(); },
                          [=](std::int64_t from, const at::Tensor& values) { write(at + from, values); }});
      }
    };
    const auto owned = group->owned();
    const auto begin = to_save ? shard_begin : owned.begin, numel = to_save ? layout.shard_numel() : owned.numel;
    if (group->trainable()) {
      for (int state = 0; state < group->states().num_states(); ++state)
        add(
            state == GroupStates::kMaster ? "master" : std::string("opt.") + optimizer_->slot_name(state - 1),
            at::kFloat, begin, numel, owned.begin,
            [&states = group->states(), state](std::int64_t at, std::int64_t count) {
              return states.read(state, at, count);
            },
            [&states = group->states(), state](std::int64_t at, const at::Tensor& values) {
              states.write(state, at, values);
            });
      continue;
    }
    auto& parameters = group->parameters();
    const bool whole = !group->rests_sharded() && !to_save;
    add(
        "param", parameters.dtype(), whole ? 0 : shard_begin, whole ? layout.padded_numel() : layout.shard_numel(),
        group->rests_sharded() ? shard_begin : 0,
        [&parameters](std::int64_t at, std::int64_t count) { return parameters.read(at, count); },
        [&parameters](std::int64_t at, const at::Tensor& values) { parameters.write(at, values); });
  }
  for (const auto& item : model_->named_buffers()) {
    if (!item.value().defined()) continue;
    // The program may have assigned buffers of another layout since the Engine was made. What is saved is a copy then;
    // what is loaded needs memory of its own for each element.
    if (!to_save && !item.value().is_contiguous()) item.value().set_data(item.value().contiguous());
    const auto data = item.value().detach().contiguous().view({-1});
    result.push_back(
        {"buffer", item.key(), item.value().sizes().vec(), 0, data.numel(), data.scalar_type(), false,
         [data](std::int64_t at, std::int64_t count) { return data.narrow(0, at, count).cpu(); },
         [data](std::int64_t at, const at::Tensor& values) { data.narrow(0, at, values.numel()).copy_(values); }});
  }
  return result;
}

std::vector<StatePiece> State::pieces_to_save() {
  update_->settle();
  return pieces(true);
}

// A late update may still be running, and goes on if nothing is loaded in the end: begin_replacing() ends it.
std::vector<StatePiece> State::pieces_to_load() { return pieces(false); }

void State::adopt_loaded() {
  relay_.telling([&] {
    for (const auto& group : groups_) {
      group->refresh_parameters();
      group->begin_publish();
    }
    for (const auto& group : groups_) group->finish_publish();
  });
}

std::map<std::string, std::string> State::aliases() const {
  std::map<std::string, std::string> result;
  for (const auto& group : groups_)
    for (const auto& member : group->members())
      for (const auto& alias : member.aliases) result[alias] = member.name;
  return result;
}

State::Counters State::counters() const {
  Counters counters{global_steps_, skipped_steps_, optimizer_->applied_steps(), scaler_->state(), {}, {}};
  const auto& rates = optimizer_->set_rates();
  if (std::any_of(rates.begin(), rates.end(), [](double rate) { return rate >= 0; })) counters.set_rates = rates;
  for (const auto& group : groups_)
    for (std::size_t i = 0; i < group->members().size(); ++i)
      if (const auto missed = group->missed_steps()[i]; group->trainable() && missed > 0)
        counters.missed_steps[group->members()[i].name] = missed;
  return counters;
}

void State::set_counters(const Counters& counters) {
  global_steps_ = counters.global_steps;
  skipped_steps_ = counters.skipped_steps;
  optimizer_->set_applied_steps(counters.applied_steps);
  scaler_->set_state(counters.scaler);
  optimizer_->restore_rates(counters.set_rates);
  for (const auto& group : groups_) {
    std::vector<std::int64_t> missed;
    for (const auto& member : group->members()) {
      const auto it = counters.missed_steps.find(member.name);
      missed.push_back(!group->trainable()                 ? counters.applied_steps
                       : it == counters.missed_steps.end() ? 0
                                                           : it->second);
    }
    group->set_missed_steps(std::move(missed));
  }
  begin_accumulation();
  backward_since_step_ = false;
}

}  // namespace zero::engine
