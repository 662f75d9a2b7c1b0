// Bytes that an Engine's groups of parameters need on one rank, by where their states rest: pure arithmetic, for
// choosing places before anything is allocated. Resting bytes are exact; those that come and go are the most that a
// model whose units run one after the other uses.
#pragma once
#include <cstdint>
#include <vector>

#include <zero/memory_report.h>

namespace zero::memory {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

// A group of parameters, in elements.
struct GroupSize {
  std::int64_t numel = 0, padded = 0, shard = 0;  // of the parameters; of the flat vector; of one rank's part
  std::int64_t members = 1;
  bool trainable = true, root = false;
  bool persistent = false;  // never sharded
};

// Where its states rest.
struct GroupPlace {
  Tier parameters = Tier::Device, optimizer = Tier::Device;
  bool operator==(const GroupPlace&) const = default;
};

// What holds for all groups. Widths are bytes an element.
struct FootprintRules {
  int stage = 0, world = 1;
  int parameter_width = 4, gradient_width = 4, wire_width = 4;
  int num_slots = 2;                       // moments
  double ratio = 1;                        // of a group's optimizer states, on its tier; the rest stays on the device
  bool on_cpu = true;                      // the device shares the host's memory
  bool maps_shards = false;                // ranks read each other's shards where they rest: nothing is gathered
  int second_shards = 0;                   // ranks that keep second shards together (hpZ); 0: nobody
  bool reads_gradients = false;            // and their gradients
  bool direct_gradients = false;           // autograd's own are the kept ones
  bool delayed = false;                    // updates run beside training
  std::int64_t tile_numel = 1, tiles = 3;  // of the update of what rests in files
  int fetch_ahead = 0;                     // shards on their way from a file
  bool checksums = false;                  // of files, in host memory
};

struct Footprint {
  std::int64_t resting[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t passing[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t& rests(Tier tier, Purpose purpose) { return at(resting, tier, purpose); }
  std::int64_t& passes(Tier tier, Purpose purpose) { return at(passing, tier, purpose); }
  std::int64_t total(Tier tier) const;  // both

 private:
  static std::int64_t& at(std::int64_t (&table)[MemoryReport::kTiers][MemoryReport::kPurposes], Tier t, Purpose p) {
    return table[MemoryReport::index(t)][MemoryReport::index(p)];
  }
};

// `places`: one a group.
Footprint footprint(const FootprintRules& rules, const std::vector<GroupSize>& groups,
                    const std::vector<GroupPlace>& places);

}  // namespace zero::memory
