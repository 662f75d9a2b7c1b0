// A thread that runs a rank's collectives one after the other, in the order of their calls. For transports whose
// collectives have several steps: the order is the same on all ranks whatever the order of their waits, and the program
// computes meanwhile.
#pragma once
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include <zero/work.h>

#include "base/executor.h"

namespace zero::comm {

class CollectiveThread {
 public:
  std::shared_ptr<Work> add(std::function<void()> job) {
    return std::make_shared<JobWork>(executor_.add(std::move(job), /*threads=*/1));  // the program's threads compute
  }
  // Whether all collectives have ended within the limit.
  bool idle_within(std::chrono::milliseconds limit) { return executor_.idle_within(limit); }

 private:
  class JobWork final : public Work {
   public:
    explicit JobWork(std::shared_future<void> result) : result_(std::move(result)) {}
    void wait() override { result_.get(); }
    bool done() override { return base::is_ready(result_); }

   private:
    std::shared_future<void> result_;
  };

  base::Executor executor_;
};

}  // namespace zero::comm
