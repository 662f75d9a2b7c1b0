// Typed values of the keys of checkpoints.
#pragma once
#include <cstdint>
#include <string>

namespace zero::config {

// Of buffers that differed between the ranks that saved, on another number of ranks: rank r takes those of rank
// r mod (number that saved), those of rank 0, or their mean; or the load is refused.
enum class PrivateBuffers { Modulo, Rank0, Mean, Error };

// What a load checks: the bytes that it uses; first every byte of every file; no more than that all files have their
// sizes.
enum class VerifyOnLoad : std::uint8_t { Used, Full, Sizes };

struct CheckpointSettings {
  std::string tag_validation = "Warn";
  PrivateBuffers private_buffers = PrivateBuffers::Modulo;
  bool decoupled = false;                         // saves run in the background
  std::int64_t memory = std::int64_t{128} << 20;  // bytes per rank that a save in the background may hold
  std::int64_t keep_every = 0;                    // steps between kept snapshots; 0: none
  bool save_errors_warn = false;                  // a failed save in the background is logged, not thrown
  bool show_statistics = false;                   // logs bytes and seconds of a save
  VerifyOnLoad verify_on_load = VerifyOnLoad::Used;
  bool export_weights = false;  // each save writes weights for other libraries as well; stage 3
};

}  // namespace zero::config
