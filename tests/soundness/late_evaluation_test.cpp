// An evaluation during a delayed update would use parameters that are one step old; it throws an error.
#include <gtest/gtest.h>

#include "soundness/ranks.h"

namespace zero::test::late_evaluation_test {
namespace {

class LateEvaluation : public ::testing::TestWithParam<int> {};

TEST_P(LateEvaluation, IsRefusedUntilFlush) {
  const int stage = GetParam();
  for (const auto& place : places()) {
    const auto errors = run_at(place, [stage](std::shared_ptr<Communicator> comm) {
      auto net = make_net();
      const std::string late =
          R"(, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true, "start_step": 1})";
      Engine engine(net, Options::from_json(json_for(stage, "AdamW", 2, "", late)), comm);
      int batch = 0;
      const auto train = [&] {
        for (int micro = 0; micro < 2; ++micro) {
          engine.backward(loss_of(*net, comm->rank(), batch++));
          engine.step();
        }
      };
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        return loss_of(*net, 0, 99).item<double>();
      };
      const auto refused = [&](const char* what) {
        const auto text = error_of([&] { evaluate(); }, what);
        require(contains(text, "one step behind") && contains(text, "engine.flush()"), text);
      };
      evaluate();  // before the first step
      train();
      evaluate();  // not delayed yet
      train();     // from here on
      refused("no flush");
      refused("asked again");
      {
        const c10::InferenceMode mode;
        const auto text = error_of([&] { loss_of(*net, 0, 99); }, "inference mode");
        require(contains(text, "engine.flush()"), text);
      }
      engine.flush();
      const auto current = evaluate();
      {
        auto scope = engine.gathered_parameters();
        require(evaluate() == current, "in a scope");
        scope.close();
      }
      train();  // training continues as if nothing had happened
      refused("after another step");
      // Reading without grad mode within a forward or a step is not checked.
      const auto loss = loss_of(*net, comm->rank(), batch++);
      evaluate();
      engine.backward(loss);
      engine.step();
      evaluate();
      engine.backward(loss_of(*net, comm->rank(), batch++));
      engine.step();
      refused("at the boundary");
      engine.flush();
      evaluate();
    });
    EXPECT_EQ(errors, "") << name_of(place) << ", stage " << stage;
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, LateEvaluation, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace zero::test::late_evaluation_test
