// One thread that runs one job at a time, for as long as its owner lives. What the job does is the owner's; so is that
// nobody else touches what it works on.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace zero::engine {

class Background {
 public:
  Background() = default;
  ~Background();  // waits for the job
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts `job`, which may use as many OpenMP threads as the caller. InternalError while one is running.
  void begin(std::function<void()> job);
  // Returns when no job is running; throws what the last one threw, until the next begins.
  void wait();
  bool running() const;

 private:
  void loop();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;  // empty: none
  std::exception_ptr error_;
  bool end_ = false;
  std::thread thread_;  // made for the first job
};

}  // namespace zero::engine
