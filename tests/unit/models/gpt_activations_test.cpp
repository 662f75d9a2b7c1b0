// The formula for the GPT's activations (models/gpt_activations.h) against the ledger, over shapes, batches, dtypes and
// numbers of segments.
#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/library.h>

#include "models/gpt.h"
#include "models/gpt_activations.h"
#include "step/memory_ledger.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::gpt_activations_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

constexpr double kWithin = 0.05;

struct Case {
  const char* name;
  models::GptConfig shape;
  std::int64_t batch;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"narrow", {.layers = 6, .hidden = 64, .heads = 4, .sequence = 64, .vocabulary = 256}, 4},
      {"narrow, large batch", {.layers = 6, .hidden = 64, .heads = 4, .sequence = 64, .vocabulary = 256}, 32},
      {"wide", {.layers = 4, .hidden = 256, .heads = 8, .sequence = 64, .vocabulary = 512}, 8},
      {"deep", {.layers = 24, .hidden = 64, .heads = 2, .sequence = 96, .vocabulary = 256}, 4},
      {"long", {.layers = 4, .hidden = 96, .heads = 4, .sequence = 512, .vocabulary = 256}, 2},
      {"large vocabulary", {.layers = 4, .hidden = 64, .heads = 4, .sequence = 64, .vocabulary = 8192}, 8},
      {"not tied",
       {.layers = 6, .hidden = 128, .heads = 4, .sequence = 64, .vocabulary = 1024, .tied_output = false},
       8},
      {"small batch", {.layers = 4, .hidden = 256, .heads = 4, .sequence = 32, .vocabulary = 256}, 1},
  };
  return all;
}

// What oneDNN allocates inside 16-bit matrix products depends on the processor.
struct WithoutOneDnn {
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(true); }
};

std::int64_t measured(const Case& one, const std::string& recipe, std::int64_t segments, Tier tier = Tier::Device,
                      const std::string& keys = "") {
  const auto tokens = torch::arange(one.batch * one.shape.sequence).remainder(256).view({one.batch, -1});
  models::Gpt model(one.shape);
  if (segments > 0)
    model->run_layers_by(segments, [](const models::GptImpl::Part& part, const at::Tensor& x) {
      return activation_checkpoint(part, x);
    });
  const WithoutOneDnn plain;
  Engine engine(model,
                Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"})" +
                                   (recipe == "fp32" ? "" : ", \"" + recipe + "\": {\"enabled\": true}") + keys + "}"),
                Communicator::local());
  for (int step = 0; step < 2; ++step) {
    engine.reset_peak_memory();
    engine.backward(model->forward(tokens, tokens));
    engine.step();
  }
  return static_cast<std::int64_t>(engine.memory().peak(tier, Purpose::Activations));
}

// Workspace bytes of this machine's matrix product of the shape: none in fp32; in bf16 it depends on
// the CPU's instructions.
std::int64_t workspace(const Case& one, at::ScalarType dtype) {
  const WithoutOneDnn plain;
  const auto tokens = one.batch * one.shape.sequence, hidden = one.shape.hidden;
  const auto a = at::ones({tokens, hidden}, dtype), b = at::ones({hidden, 4 * hidden}, dtype);
  const auto ledger = std::make_shared<step::MemoryLedger>();
  torch_hooks::AllocationObserver observer(
      [ledger](std::int64_t bytes) { ledger->book(Tier::Device, Purpose::Activations, bytes); });
  const auto product = a.mm(b);
  return static_cast<std::int64_t>(ledger->report().peak(Tier::Device, Purpose::Activations) - product.nbytes());
}

class Recipes : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Recipes, ::testing::Values("fp32", "bf16"), [](const auto& info) { return info.param; });

TEST_P(Recipes, PeakActivationsAreThoseOfTheFormula) {
  const std::int64_t element = GetParam() == "fp32" ? 4 : 2;
  for (const auto& one : cases()) {
    for (const std::int64_t segments : {one.shape.layers, one.shape.layers / 2, std::int64_t{0}}) {
      SCOPED_TRACE(std::string(one.name) + ", " + std::to_string(segments) + " segments");
      auto formula = models::activations_of(one.shape, one.batch, element, segments);
      formula.layers += workspace(one, element == 4 ? at::kFloat : at::kBFloat16);
      const auto peak = measured(one, GetParam(), segments);
      EXPECT_NEAR(static_cast<double>(peak) / static_cast<double>(formula.peak()), 1, kWithin)
          << peak << " bytes, formula " << formula.layers << " layers, " << formula.head << " head, " << formula.tokens
          << " tokens";
    }
  }
}

// Offloaded from the device: one input per segment, exact to the byte.
TEST_P(Recipes, InputsInHostMemoryAreOneASegment) {
  const std::int64_t element = GetParam() == "fp32" ? 4 : 2;
  for (const auto& one : cases()) {
    SCOPED_TRACE(one.name);
    const auto inputs = one.shape.layers * one.batch * one.shape.sequence * one.shape.hidden * element;
    EXPECT_EQ(measured(one, GetParam(), one.shape.layers, Tier::Host,
                       R"(, "activation_checkpointing": {"cpu_checkpointing": true})"),
              inputs);
  }
}

}  // namespace
}  // namespace zero::gpt_activations_test
