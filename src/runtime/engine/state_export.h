// Exports and imports states between steps: full masters, digests, checkpoint pieces, counters.
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

  // The pieces that this rank saves. Over all ranks, every element of every state is saved once; buffers are saved
  // whole by every rank.
  std::vector<StatePiece> pieces_to_save();
  // The pieces that this rank must load: everything that it stores. All ranks must have communicated between their last
  // forward and the first write, because peers may read a shard in place. A delayed update may still be running, and
  // continues if nothing is loaded; Stepper::begin_replacing() ends it.
  std::vector<StatePiece> pieces_to_load();
  // What a rank that continues in the same layout must load. Changes nothing.
  std::vector<StatePiece> pieces_to_keep();
  // Call after the pieces were filled: recomputes parameters from masters, on all ranks.
  void adopt_loaded();
  // Names of tied parameters: alias -> owner.
  std::map<std::string, std::string> aliases() const;
  StateCounters counters() const;
  void set_counters(const StateCounters& counters);

 private:
  const step::Group& group(std::size_t index) const { return *p_.program->groups()[index]; }
  std::vector<StatePiece> pieces(bool to_save, bool to_load);
  void add_pieces(std::vector<StatePiece>& pieces, const step::Group& group, bool to_save);
  void add_buffers(std::vector<StatePiece>& pieces, bool to_load) const;

  Parts& p_;
  const Checks& checks_;
  Stepper& stepper_;
  StateAccess states_;
};

}  // namespace zero::engine
