// The backend that executes nothing, for predicting a step. Memory still books bytes, and observers still see
// operations.
#pragma once
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "step/backend.h"

namespace zero::step {

// Whether a reduction that reads peers' memory is complete before the program waits for it: the only timing-dependent
// result in a step. Late: never, which needs the most memory. Immediate: always, which needs the least. Replay: as
// recorded in a run, then Late.
struct Completion {
  enum Kind { Late, Immediate, Replay } kind = Late;
  std::vector<bool> answers{};
};

class DryBackend final : public BufferOps, public CommOps, public TensorOps, public ModelOps, public UpdateOps {
 public:
  explicit DryBackend(Completion completion = {}) : completion_(std::move(completion)) {}
  DryBackend(const DryBackend&) = delete;
  DryBackend& operator=(const DryBackend&) = delete;
  Backend ops() { return {*this, *this, *this, *this, *this}; }

  // Called when the program no longer uses a gradient. Set it before the first gradient arrives.
  std::function<void(int buffer)> released;
  // Called before and after a background job, which the dry backend runs synchronously. May be empty.
  std::function<void(bool begins)> in_background;
  // Makes the next norm non-finite.
  bool overflows = false;

  void allocate(int, const Allocation&) override {}
  void free(int) override {}
  WorkPtr all_gather(int, View, View, Lane) override { return done_; }
  WorkPtr all_gather_node(int, View, View, Lane) override { return done_; }
  WorkPtr reduce_scatter(int, View, View, int) override { return done_; }
  WorkPtr reduce_pieces(const PeerReduce&) override { return std::make_shared<Timed>(*this); }
  void square_pieces(const PeerReduce&) override {}
  WorkPtr broadcast(int, View, int) override { return done_; }
  void wait_symmetric(int, int) override {}
  void signal_symmetric(int) override {}
  void barrier() override {}
  std::vector<double> exchange(double) override {
    return {std::exchange(overflows, false) ? std::numeric_limits<double>::infinity() : 0.0};
  }
  void copy(View, View, Lane) override {}
  void accumulate(View, View) override {}
  void scale(View, float) override {}
  void fill(View, float) override {}
  void quantize(View, View, int) override {}
  void dequantize(View, View, int) override {}
  void begin_squares(int) override {}
  void read_squared() override {}
  void square(int, int, View, std::int64_t) override {}
  double sum_of_squares(int) override { return 0; }
  WorkPtr read(View, View) override { return done_; }
  WorkPtr write(View, View) override { return done_; }
  void bind(int, View) override {}
  void unbind(int) override {}
  void values_changed(int) override {}
  void set_gradient(int, int, View) override {}
  void drop_gradients(int) override {}
  void release_gradient(View arrived) override { released(arrived.buffer); }
  void begin_update(std::optional<float>) override {}
  void end_update(bool) override {}
  void update(int, std::int64_t, std::int64_t, const UpdateTarget&, View) override {}
  void complete_updates() override {}
  void run_async(std::function<void()> job) override {
    if (in_background) in_background(true);
    job();
    if (in_background) in_background(false);
  }
  void join() override {}

 private:
  struct Done : Work {
    void wait() override {}
    bool done() override { return true; }
  };
  struct Timed final : Done {
    explicit Timed(DryBackend& dry) : dry(dry) {}
    bool done() override { return dry.answer(); }
    DryBackend& dry;
  };
  bool answer() {
    if (completion_.kind != Completion::Replay) return completion_.kind == Completion::Immediate;
    return next_answer_ < completion_.answers.size() && completion_.answers[next_answer_++];
  }

  const Completion completion_;
  const WorkPtr done_ = std::make_shared<Done>();
  std::size_t next_answer_ = 0;
};

}  // namespace zero::step
