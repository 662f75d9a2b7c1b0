// Sees every operation of a step when the program issues it. Counts bytes, lists events, writes traces. Observers have
// no effect on the step.
#pragma once
#include <memory>

#include "step/facts.h"

namespace zero::step {

enum class OpKind {
  Unshard,           // the all-gather of parameters before their use
  UnshardSymmetric,  // the same without a copy, from the peers' memory
  AllGatherParams,   // of replicated parameters, after an update
  Broadcast,         // of initial values
  Reduce,            // of gradients
  AllGatherGrads,    // the second half of an all-reduce
  Fetch,             // of a parameter shard, from a file
  FetchStates,
  Store,
  StoreStates,
  SendToOwners,    // what updates of whole parameters need
  SendFromOwners,  // their results
  Copy,            // between tiers
  Update,
};

enum class OpReason { BeforeUse, NewValues, InitialValues, Sum, Arrives, Leaves, Update };

struct Op {
  OpKind kind = OpKind::Copy;
  OpReason reason = OpReason::Arrives;
  int group = 0;
  std::int64_t bytes = 0;  // of collectives: the whole vector; else the bytes moved; of an update: its states
  std::int64_t sent = 0;   // by this rank, as in CommStats; unsharding symmetric memory counts as an all-gather
  bool quantized = false;  // as integers
  bool node = false;       // among the ranks of a secondary shard; not counted in CommStats of the axis
  bool to_all = false;     // of a reduction: all-reduce
  Tier from = Tier::Device, to = Tier::Device;
  std::int64_t numel = 0;  // of an update: its elements
};

// One operation in progress; destroyed when it ends.
class Observed {
 public:
  virtual ~Observed() = default;
  // The program starts to wait for the operation.
  virtual void waiting() {}
};

class Observer {
 public:
  virtual ~Observer() = default;
  // Called from the program's threads and the background job's. nullptr: the end is not observed.
  virtual std::unique_ptr<Observed> issued(const Op& op) = 0;
};

}  // namespace zero::step
