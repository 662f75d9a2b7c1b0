// One rank of `zero bench checkpoint`: trains a GPT, and saves or loads it once. checkpoint.cpp selects what is
// measured and prints results.
#pragma once
#include <zero/communicator.h>

#include <cstdint>
#include <memory>
#include <string>

#include "models/gpt.h"
#include "tools/support/measurement.h"

namespace zero::cli {

struct CheckpointTask {
  std::string what = "save";  // "save", "background", "load", "disk"
  std::string folder, recipe = "bf16";
  std::int64_t stage = 2, steps = 6, threads = 1;
  std::int64_t rest = 0;   // seconds of training without I/O before a save or a load
  std::int64_t bytes = 0;  // of all ranks' files, for "disk"
  std::string digest;      // logical_hash() of what is loaded, for "load"
  models::GptConfig model;

  Json json() const;
  static CheckpointTask from(const Json& json);
};

// Collective. Times are the slowest rank's, in seconds; bytes are lists by rank.
// "save", "background": two steps, `steps` steps without a save, then one save and `steps` steps:
//   {"without_s", "call_s": of save_checkpoint(), "stall_s": (the call, the steps, and in the background nothing else)
//   -
//    without_s, "durable_s": from the call until the checkpoint is complete, "bytes": of the checkpoint,
//    "peak_bytes": proportional set size above the highest of the steps without a save, "digest": logical_hash() at
//    the call}. Throws InternalError if the files have another digest.
// "load": {"load_s", "read_bytes": by read system calls, "needed_bytes": of this rank's states, "peak_bytes": above the
//   engine before it loads, "digest": logical_hash() after it}. The files' pages are dropped from the cache before.
//   Throws InternalError if the loaded state has another digest than the task.
// "disk": the ranks write task.bytes into new files and read them, with direct I/O and no other work:
//   {"write_s": with fdatasync, "read_s", "bytes"}
Json measure_checkpoint(const CheckpointTask& task, const std::shared_ptr<Communicator>& comm);

}  // namespace zero::cli
