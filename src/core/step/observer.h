// Sees every operation of a step when the program issues it: how bytes are counted, events listed, traces written. An
// observer changes nothing.
#pragma once
#include <memory>

#include "step/facts.h"

namespace zero::step {

enum class OpKind {
  Unshard,           // the all-gather of parameters before their use
  UnshardSymmetric,  // the same without a copy, from peers' memory
  AllGatherParams,   // of replicated parameters, after an update
  Broadcast,         // of initial values
  Reduce,            // of gradients
  AllGatherGrads,    // the second half of an all-reduce
  Fetch,             // a parameter shard, from a file
  FetchStates,
  Store,
  StoreStates,
  Copy,  // between tiers
  Update,
};

enum class OpReason { BeforeUse, NewValues, InitialValues, Sum, Arrives, Leaves, Update };

struct Op {
  OpKind kind = OpKind::Copy;
  OpReason reason = OpReason::Arrives;
  int group = 0;
  std::int64_t bytes = 0;  // of collectives the whole vector's; else what moves, of an update its states
  std::int64_t sent = 0;   // that this rank sends, as CommStats counts; unsharding symmetric memory counts what the
                           // all-gather would have sent
  bool quantized = false;  // as integers
  bool node = false;       // among the ranks of a secondary shard, which CommStats of the axis does not count
  bool to_all = false;     // of a reduction: an all-reduce
  Tier from = Tier::Device, to = Tier::Device;
  std::int64_t offloaded_numel = 0;  // of an update: elements whose states do not rest on the device
};

// Follows one operation to its end, which is the end of this object.
class Observed {
 public:
  virtual ~Observed() = default;
  // The program begins to wait for it.
  virtual void waiting() {}
};

class Observer {
 public:
  virtual ~Observer() = default;
  // From the program's threads and the background job's. nullptr: its end does not matter.
  virtual std::unique_ptr<Observed> issued(const Op& op) = 0;
};

}  // namespace zero::step
