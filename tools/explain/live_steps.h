// The training steps of `zero explain --live`: a GPT with a trace, and counters read at every phase boundary. The
// result is a LiveRun (live_record.h); it is compared with the schedule elsewhere.
#pragma once
#include <zero/options.h>

#include <memory>
#include <string>
#include <vector>

#include "models/gpt_config.h"
#include "tools/explain/live_record.h"

namespace zero {
class Communicator;
}

namespace zero::cli {

struct LiveTask {
  std::string config;             // configuration file; empty: `text`
  std::string text = "{}";        // configuration as JSON
  std::vector<Setting> settings;  // overrides of the configuration
  models::GptConfig gpt;
  std::string folder;             // for traces, and for offloaded files unless the configuration names a directory
  std::string transport = "shm";  // "thread": ranks are threads of this process
  int world = 2;
  int steps = 3;  // recorded steps; two more are run, so that operations begun by the last recorded one end

  Options options() const {
    return config.empty() ? Options::from_json(text, "<zero explain>", settings) : Options::from_file(config, settings);
  }
  Json json() const;
  static LiveTask from(const Json& json);
};

// Runs one rank. Collective; the result is complete on rank 0 only. The caller sets the number of threads
// (at::set_num_threads).
LiveRun live_steps(const LiveTask& task, const std::shared_ptr<Communicator>& comm);

}  // namespace zero::cli
