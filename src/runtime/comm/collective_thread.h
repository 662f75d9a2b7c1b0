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
    // The program's threads compute.
    return std::make_shared<JobWork>(executor_.add(std::move(job), /*threads=*/1), advance_others_);
  }
  // See Transport::on_wait().
  void on_wait(std::function<bool()> advance_others) {
    advance_others_ = std::make_shared<const std::function<bool()>>(std::move(advance_others));
  }
  // Whether all collectives have ended within the limit.
  bool idle_within(std::chrono::milliseconds limit) { return executor_.idle_within(limit); }

 private:
  using AdvanceOthers = std::shared_ptr<const std::function<bool()>>;

  class JobWork final : public Work {
   public:
    JobWork(std::shared_future<void> result, AdvanceOthers advance_others)
        : result_(std::move(result)), advance_others_(std::move(advance_others)) {}
    void wait() override {
      while (!done() && advance_others_ && (*advance_others_)()) result_.wait_for(std::chrono::milliseconds(1));
      result_.get();
    }
    bool done() override { return base::is_ready(result_); }

   private:
    std::shared_future<void> result_;
    AdvanceOthers advance_others_;
  };

  AdvanceOthers advance_others_;

  base::Executor executor_;
};

}  // namespace zero::comm
