// A program may fork its ranks, for example for a helper that writes files. The child is not a rank, and its exit has
// no effect on the run.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include <zero/library.h>

#include "comm/group.h"
#include "comm/symmetric_buffer.h"
#include "support/shm_ranks.h"

namespace zero::test::fork_test {
namespace {

using namespace std::chrono_literals;

// Runs `body` in a child of this rank; a text unless it returned within ten seconds.
std::string in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    body();
    ::_exit(0);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return "no child";
  if (WIFSIGNALED(status)) return "the child ended by signal " + std::to_string(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "the child ended with " + std::to_string(WEXITSTATUS(status));
}

void check_sum(const Comm& comm) {
  auto sum = at::full({100000}, comm->rank() + 1.0, at::kFloat);
  comm->all_reduce(sum)->wait();
  require(sum.eq(comm->size() * (comm->size() + 1) / 2).all().item<bool>(), "the sum");
}

TEST(Fork, GivesUpNoSharedVector) {
  const auto ends = with_ranks(2, [](Comm comm) {
    auto vector = comm::group_of(*comm)->share(100000, at::kFloat);
    vector->shard().fill_(comm->rank() + 1.0);
    vector->publish();
    if (comm->rank() == 1) {
      const auto text = in_child([&] {
        vector.reset();
        comm.reset();
      });
      require(text.empty(), text);
    }
    comm->barrier();
    comm::group_of(*comm)->gather(*vector);
    require(vector->whole()[199999].item<float>() == 2, "the shard");
    check_sum(comm);
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Fork, SaysNoFarewellOverTcp) {
  const auto run_id = fresh_run_id();
  const auto ends = fork_ranks(3, [&](int rank) {
    at::set_num_threads(1);
    auto comm = comm::make_communicator(comm::make_gloo(identity_of(run_id, rank, 3), 20s));
    check_sum(comm);
    const auto text = rank == 2 ? "" : in_child([&] { comm.reset(); });
    require(text.empty(), text);
    std::this_thread::sleep_for(100ms);
    check_sum(comm);
  });
  EXPECT_EQ(errors_of(ends), "");
}

// An Engine with a background thread, which does not exist in the child.
TEST(Fork, EndsNoEngine) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
    const char* const options = R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true, "start_step": 1}}})";
    std::optional<Engine> engine(std::in_place, model.ptr(), Options::from_json(options), comm);
    for (int step = 0; step < 4; ++step) {
      engine->backward(model->forward(at::ones({2, 64})).pow(2).mean());
      engine->step();
      if (step != 1 || comm->rank() != 0) continue;
      const auto text = in_child([&] { engine.reset(); });
      require(text.empty(), text);
    }
    require(engine->state_hash().size() == 32, "no hash");
  });
  EXPECT_EQ(errors_of(ends), "");
}

}  // namespace
}  // namespace zero::test::fork_test
