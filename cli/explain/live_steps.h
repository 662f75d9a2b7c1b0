// Steps of training as `zero explain --live` runs them: a GPT under a trace, counters read at every border of a phase.
// What came of them is a LiveRun (live_record.h); nothing here knows what was expected.
#pragma once
#include <zero/options.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/explain/live_record.h"

namespace zero {
class Communicator;
}

namespace zero::cli {

struct LiveTask {
  std::string config;             // a configuration's file; empty: `text`
  std::string text = "{}";        // JSON
  std::vector<Setting> settings;  // on top of it
  std::vector<std::int64_t> gpt;  // layers, hidden, heads, sequence, vocabulary, tied (0 or 1)
  std::string folder;             // for traces, and for what is offloaded to files without another place
  std::string transport = "shm";  // "thread": ranks are threads of this process
  int world = 2;
  int steps = 3;  // that are recorded; two more are run, so that what the last of them began ends

  Options options() const {
    return config.empty() ? Options::from_json(text, "<zero explain>", settings) : Options::from_file(config, settings);
  }
  Json json() const;
  static LiveTask from(const Json& json);
};

// One rank's part, collective; complete on rank 0 only. One thread a rank: at::set_num_threads is the caller's.
LiveRun live_steps(const LiveTask& task, const std::shared_ptr<Communicator>& comm);

}  // namespace zero::cli
