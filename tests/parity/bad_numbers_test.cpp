// Numbers that a fault has changed do not spread: a flipped bit in what ranks replicate, and NaN or infinity in one
// rank's gradient, parameter, master, moment or gathered parameter end the run on all ranks, with the tensor's name and
// without a checkpoint of it. Steps without a fault are never refused.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <random>

#include "parity/training.h"
#include "support/folder.h"
#include "support/on_ranks.h"

namespace zero::test::bad_numbers_test {
namespace {
namespace fs = std::filesystem;

int trials() {
  const char* text = std::getenv("ZERO_BAD_NUMBERS");
  return text == nullptr ? 1 : std::atoi(text);
}

// As a fault of memory does it: past libtorch, so that nobody is told.
void* memory_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->storage().mutable_data(); }

void set_element(const at::Tensor& tensor, float value) {
  const at::NoGradGuard no_grad;
  const auto element = at::full({1}, value, at::TensorOptions().dtype(tensor.scalar_type()));
  std::memcpy(memory_of(tensor), element.const_data_ptr(), element.element_size());
}

void flip_bit(const at::Tensor& tensor, std::int64_t element, int bit) {
  auto* byte = static_cast<unsigned char*>(memory_of(tensor)) + element * tensor.element_size() + bit / 8;
  *byte = static_cast<unsigned char>(*byte ^ (1U << (bit % 8)));
}

struct Rank {
  std::shared_ptr<torch::nn::Module> module;
  Engine engine;
  const Training& setup;
  Rank(const Training& setup, const std::shared_ptr<Communicator>& comm)
      : module(make_module(problem(setup.problem))),
        engine(module, Options::from_json(json_of(setup)), comm),
        setup(setup) {}
  StepResult step(int number) {
    engine.backward(loss_of(problem(setup.problem), *module, engine.communicator().rank(), number, dtype_of(setup)));
    return engine.step();
  }
};

std::string keys(int every) {
  return R"(, "libzero": {"max_skipped_steps": 1, "replica_check_steps": )" + std::to_string(every) + "}";
}

// --- replicas -------------------------------------------------------------------------------------

TEST(BadNumbers, CleanStepsAreNeverRefused) {
  std::int64_t steps = 0;
  for (const char* model : {"gpt", "frozen"})
    for (const int world : {2, 3})
      for (const char* recipe : {"fp32", "bf16", "fp16"})
        for (int stage = 0; stage <= 3; ++stage)
          for (const char* offload :
               {"", R"(, "offload_optimizer": {"device": "cpu"})",
                R"(, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true, "start_step": 3})"}) {
            if (stage == 0 && *offload != '\0') continue;
            Training setup;
            setup.problem = model;
            setup.world = world;
            setup.recipe = recipe;
            setup.stage = stage;
            setup.zero = offload;
            setup.steps = 8 * trials();
            setup.extra = R"(, "libzero": {"replica_check_steps": 1})";
            SCOPED_TRACE(json_of(setup));
            ASSERT_NO_THROW(train_threads(setup));
            steps += setup.steps;
          }
  std::cout << steps << " clean steps, each with a comparison, 0 refused\n";
}

struct Flip {
  const char* model;
  int stage, world, rank;
  const char* recipe;
  int every, at;  // the comparison, and the step before which the bit flips
  int parameter, bit;
  int latest;  // step that has to notice
};

// Returns what each rank has thrown, and checks that it was in time.
std::vector<std::string> errors_after(const Flip& flip, std::string* name) {
  Training setup;
  setup.problem = flip.model;
  setup.world = flip.world;
  setup.stage = flip.stage;
  setup.recipe = flip.recipe;
  setup.extra = keys(flip.every);
  std::vector<std::string> texts(static_cast<std::size_t>(flip.world));
  on_ranks(flip.world, [&](const auto& comm) {
    Rank rank(setup, comm);
    const auto items = rank.module->named_parameters();
    auto at = static_cast<std::size_t>(flip.parameter) % items.size();
    if (flip.model == std::string("frozen"))
      for (at = 0; items[at].value().requires_grad();) ++at;
    if (comm->rank() == 0) *name = items[at].key();
    for (int step = 0; step < flip.latest; ++step) {
      if (step == flip.at && comm->rank() == flip.rank)
        flip_bit(items[at].value(), items[at].value().numel() - 1, flip.bit);
      try {
        rank.step(step);
      } catch (const InternalError& e) {
        EXPECT_EQ(e.code(), ExitCode::kNumerical) << e.what();
        texts[static_cast<std::size_t>(comm->rank())] = e.what();
        EXPECT_ANY_THROW(rank.engine.save_checkpoint(fs::temp_directory_path(), "never"));
        return;
      }
    }
    ADD_FAILURE() << "rank " << comm->rank() << " noticed nothing in " << flip.latest << " steps";
  });
  return texts;
}

TEST(BadNumbers, AFlippedBitInAReplicaIsNamed) {
  std::vector<Flip> flips;
  // Compared in every step: whatever the stage, whether or not the next update would have overwritten it.
  for (const char* recipe : {"fp32", "bf16", "fp16"})
    for (int stage = 0; stage <= 2; ++stage) flips.push_back({"mlp", stage, 3, stage, recipe, 1, 3, stage, 1, 4});
  // Not every step: what no update overwrites is found at the next comparison.
  flips.push_back({"mlp", 0, 4, 2, "fp32", 5, 1, 1, 3, 5});
  for (const int stage : {0, 1, 2}) flips.push_back({"frozen", stage, 3, 2, "fp32", 6, 1, 0, 7, 6});
  std::minstd_rand random(20261125);
  for (int more = 1; more < 20 * trials(); ++more) {
    const int world = 3 + static_cast<int>(random() % 2), at = static_cast<int>(random() % 4);
    flips.push_back({"mlp", static_cast<int>(random() % 3), world, static_cast<int>(random() % world),
                     random() % 2 ? "fp32" : "bf16", 1, at, static_cast<int>(random() % 6),
                     static_cast<int>(random() % 6), at + 1});
  }
  for (const auto& flip : flips) {
    SCOPED_TRACE(std::string(flip.model) + " stage " + std::to_string(flip.stage) + " " + flip.recipe + " rank " +
                 std::to_string(flip.rank) + "/" + std::to_string(flip.world) + " bit " + std::to_string(flip.bit));
    std::string name;
    for (const auto& text : errors_after(flip, &name)) {
      EXPECT_NE(text.find("parameter " + name + ": rank " + std::to_string(flip.rank) + " has other values than " +
                          std::to_string(flip.world - 1) + " ranks"),
                std::string::npos)
          << text;
    }
  }
  std::cout << flips.size() << " flipped bits, all found with rank and tensor\n";
}

TEST(BadNumbers, TwoRanksThatDifferAreBothNamed) {
  std::string name;
  for (const auto& text : errors_after({"mlp", 1, 2, 1, "bf16", 1, 2, 1, 0, 3}, &name))
    EXPECT_NE(text.find(name + ": ranks 0, 1 have different values"), std::string::npos) << text;
}

TEST(BadNumbers, ComparisonsCanBeTurnedOff) {
  Training setup;
  setup.stage = 1;
  setup.problem = "mlp";
  setup.extra = R"(, "libzero": {"replica_check_steps": 0})";
  on_ranks(2, [&](const auto& comm) {
    Rank rank(setup, comm);
    if (comm->rank() == 1) flip_bit(rank.module->parameters()[0], 0, 0);
    for (int step = 0; step < 3; ++step) EXPECT_NO_THROW(rank.step(step));
  });
}

// --- numbers that are not finite ------------------------------------------------------------------

enum class Place { Gradient, Parameter, Master, Moment, Gathered };
const char* name_of(Place place) {
  constexpr const char* kNames[] = {"gradient", "parameter", "master", "moment", "gathered parameter"};
  return kNames[static_cast<int>(place)];
}

// Uses one parameter twice in a forward, so that it can change in between: where parameters are gathered for their use,
// in the gathered copy.
thread_local std::function<void(const at::Tensor&)> between_uses;

struct Twice : torch::nn::Module {
  torch::nn::Linear first{nullptr}, last{nullptr};
  Twice() {
    first = register_module("first", torch::nn::Linear(12, 12));
    last = register_module("last", torch::nn::Linear(12, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = at::tanh(first(x));
    if (between_uses) between_uses(first->weight);
    return last(first(h));  // without a function that would make infinity finite
  }
};

const Problem kTwice{"twice", [] { return std::make_shared<Twice>(); },
                     [](torch::nn::Module& module, const at::Generator& g, at::ScalarType dtype) {
                       const auto x = at::randn({4, 12}, g, at::TensorOptions().dtype(at::kFloat)).to(dtype);
                       return dynamic_cast<Twice&>(module).forward(x).to(at::kFloat).pow(2).mean();
                     }};

constexpr int kFault = 2;  // the step with the fault

struct Case {
  Place place;
  float value;
  int stage, culprit;
  bool saves;  // between the fault and the next step
};

struct Ended {
  std::string error;
  std::int64_t steps = 0;  // whole ones before it
};

Ended run_with(const Case& c, const fs::path& folder) {
  Training setup;
  setup.stage = c.stage;
  setup.world = 3;
  setup.extra = keys(200);
  std::vector<Ended> all(3);
  on_ranks(3, [&](const auto& comm) {
    const bool guilty = comm->rank() == c.culprit;
    auto module = make_module(kTwice);
    const auto& weight = dynamic_cast<Twice&>(*module).first->weight;
    bool armed = false;
    if (c.place == Place::Gradient && guilty)
      weight.register_hook([&](const at::Tensor& gradient) {
        if (!armed) return gradient;
        auto changed = gradient.clone();
        changed.view({-1})[7] = c.value;
        return changed;
      });
    if (c.place == Place::Gathered && guilty)
      between_uses = [&](const at::Tensor& gathered) {
        if (armed) set_element(gathered, c.value);
      };
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    auto& ended = all[static_cast<std::size_t>(comm->rank())];
    try {
      for (int step = 0; step < kFault + 3; ++step) {
        if (step == kFault) {
          engine.save_checkpoint(folder, "good");
          armed = true;
          if (c.place == Place::Parameter && guilty) set_element(weight, c.value);
          if (c.place == Place::Master || c.place == Place::Moment) {
            const std::string state = c.place == Place::Master ? "master" : "exp_avg";
            auto values = engine.parameter_state("first.weight", state).clone();
            values.view({-1})[c.culprit * 48 + 1] = c.value;  // from stage 1 on, one rank's
            engine.set_parameter_state("first.weight", state, values);
          }
          if (c.saves) engine.save_checkpoint(folder, "bad");
        }
        engine.backward(loss_of(kTwice, *module, comm->rank(), step, at::kFloat));
        engine.step();
        ended.steps = step + 1;
      }
      ADD_FAILURE() << "rank " << comm->rank() << " noticed nothing";
    } catch (const InternalError& e) {
      EXPECT_EQ(e.code(), ExitCode::kNumerical) << e.what();
      ended.error = e.what();
      EXPECT_ANY_THROW(engine.save_checkpoint(folder, "bad"));
    }
    between_uses = nullptr;
  });
  for (const auto& other : all) EXPECT_EQ(other.steps, all[0].steps);
  return all[0];
}

TEST(BadNumbers, WhatIsNotFiniteEndsTheRunOnAllRanksWithoutASave) {
  std::vector<Case> cases;
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (int round = 0; round < trials(); ++round)
    for (int stage = 0; stage <= 3; ++stage)
      for (const auto place : {Place::Gradient, Place::Parameter, Place::Master, Place::Moment, Place::Gathered})
        for (const float value : {kNan, round % 2 ? -kInf : kInf}) {
          // A sharded parameter is one rank's alone only as a master; at other stages nothing is gathered.
          if (stage == 3 ? place == Place::Parameter : place == Place::Gathered) continue;
          cases.push_back({place, value, stage, (stage + round) % 3, false});
          if (place == Place::Master || place == Place::Moment)
            cases.push_back(cases.back()), cases.back().saves = true;
        }
  for (const auto& c : cases) {
    SCOPED_TRACE(std::string(name_of(c.place)) + " " + std::to_string(c.value) + " stage " + std::to_string(c.stage) +
                 " rank " + std::to_string(c.culprit) + (c.saves ? ", saved" : ""));
    const TempFolder folder;
    const auto ended = run_with(c, folder.path());
    // A moment reaches its parameter with the next update, and is met in the step after it.
    EXPECT_LE(ended.steps, kFault + (c.place == Place::Moment && !c.saves ? 1 : 0)) << ended.error;
    // What is not finite in one element of a forward is so in every gradient: one of them is named.
    const bool exact = c.place == Place::Gradient || c.place == Place::Parameter || c.saves;
    EXPECT_NE(ended.error.find(exact ? "first.weight" : "t."), std::string::npos) << ended.error;
    if (c.place == Place::Parameter) {
      EXPECT_NE(ended.error.find("rank " + std::to_string(c.culprit) + " has other values"), std::string::npos)
          << ended.error;
    }
    EXPECT_FALSE(fs::exists(folder.path() / "bad"));
    EXPECT_TRUE(fs::exists(folder.path() / "good" / "SUMS"));
  }
  std::cout << cases.size() << " values that are not finite, all found, none saved\n";
}

}  // namespace
}  // namespace zero::test::bad_numbers_test
