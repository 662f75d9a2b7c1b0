// Numbers of a built-in rule that the program changes while it trains.
#include <gtest/gtest.h>
#include <zero/errors.h>

#include "optim/sharded_optimizer.h"

namespace zero::optim::numbers_test {
namespace {

TEST(Numbers, ASetNumberActsInItsGroupFromTheNextUpdate) {
  config::OptimizerSettings sgd;
  sgd.type = config::OptimizerType::Sgd;
  sgd.lr = 1;
  sgd.momentum = 0.5;
  ShardedOptimizer optimizer(sgd, {}, {{.pattern = "b", .lr = {}, .weight_decay = {}}});
  float masters[2] = {0, 0}, buffers[2] = {1, 1}, gradients[2] = {1, 1};
  const auto step = [&] {
    optimizer.begin_step();
    for (int i = 0; i < 2; ++i) {
      Span span;
      span.master = masters + i;
      span.slots[0] = buffers + i;
      span.gradient = gradients + i;
      span.numel = 1;
      span.parameter_group = i;
      optimizer.update(span, 1);
    }
    optimizer.complete_updates();
    optimizer.end_step();
  };
  step();  // the first one begins the buffers: 1
  EXPECT_EQ(optimizer.set_numbers(), "");
  optimizer.set_number(1, "momentum", 0.25);
  optimizer.set_number(1, "weight_decay", 0.5);
  step();
  EXPECT_FLOAT_EQ(buffers[0], 1.5f);
  EXPECT_FLOAT_EQ(buffers[1], 0.75f);  // 0.25 x 1 and 1 - 0.5 x 1
  EXPECT_EQ(optimizer.set_numbers(), "1momentum0.25;1weight_decay0.5;");
  EXPECT_THROW(optimizer.set_number(2, "momentum", 0.1), ConfigError);
  EXPECT_THROW(optimizer.set_number(0, "nesterov", 1), ConfigError);
  EXPECT_THROW(optimizer.set_number(0, "beta1", 1), ConfigError);
  EXPECT_THROW(optimizer.set_number(0, "eps", -1), ConfigError);
  sgd.momentum = 0;
  EXPECT_THROW(ShardedOptimizer(sgd, {}, {}).set_number(0, "momentum", 0.1), ConfigError);
}

}  // namespace
}  // namespace zero::optim::numbers_test
