// States handed out and taken back, between steps: whole masters, digests, gradients, checkpoint pieces, counters.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "engine/scopes.h"
#include "engine/state_access.h"
#include "engine/state_piece.h"

namespace zero::engine {

class StateExport {
 public:
  StateExport(Parts& parts, const Checks& checks, Stepper& stepper)
      : p_(parts), checks_(checks), stepper_(stepper), states_(parts.memory->buffers) {}

  // Collective.
  std::map<std::string, at::Tensor> full_state_dict();
  std::string state_hash();
  at::Tensor gradient(const std::string& name);
  // Of this rank alone.
  OwnGradient own_gradient(const std::string& name);

  // What this rank writes: over all ranks every element of every state once; buffers whole by every rank.
  std::vector<StatePiece> pieces_to_save();
  // What this rank must fill to go on: what rests on it. All ranks must have met between their last forward and the
  // first write, since a shard may be read in place. A delayed update may still be running, and goes on if nothing is
  // loaded in the end: Stepper::begin_replacing() ends it.
  std::vector<StatePiece> pieces_to_load() { return pieces(/*to_save=*/false); }
  // After the pieces were filled: parameters from masters, on all ranks.
  void adopt_loaded();
  // Names tied to another: alias -> owner.
  std::map<std::string, std::string> aliases() const;
  StateCounters counters() const;
  void set_counters(const StateCounters& counters);

 private:
  const step::Group& group(std::size_t index) const { return *p_.program->groups()[index]; }
  at::Tensor whole_master(const step::Group& group) const;
  std::vector<StatePiece> pieces(bool to_save);
  void add_pieces(std::vector<StatePiece>& pieces, const step::Group& group, bool to_save);
  void add_buffers(std::vector<StatePiece>& pieces, bool to_save) const;
  std::pair<int, std::size_t> reduced_member(const char* call, const std::string& name) const;

  Parts& p_;
  const Checks& checks_;
  Stepper& stepper_;
  StateAccess states_;
};

}  // namespace zero::engine
