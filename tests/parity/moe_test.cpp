// Layers with experts over ranks, at every stage, against one process that lets every expert compute every token.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/library.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/file_text.h"
#include "support/folder.h"
#include "support/golden_texts.h"
#include "support/nightly.h"
#include "support/process.h"
#include "support/require.h"

namespace zero::test::moe_test {
namespace {

using namespace zero::test::moe;
using zero::test::mesh::expect_passed;
using Comm = std::shared_ptr<Communicator>;

double relative(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>() / (b.norm().item<double>() + 1e-12);
}

std::string label_of(int world, const MoeOptions& options, int stage, const std::string& more = "") {
  return std::to_string(world) + " ranks, ep " + std::to_string(options.ep_size) + ", k " + std::to_string(options.k) +
         ", stage " + std::to_string(stage) + more + ": ";
}

// Gradients, norms and parameters of some steps.
void check_training(const Comm& comm, const MoeOptions& options, int stage, const std::string& extra = "",
                    const std::string& zero = "", int accumulation = 1, int steps = 3) {
  const auto label = label_of(comm->size(), options, stage, extra + zero);
  const auto net = make_net(options);
  Engine engine(net, engine_options(stage, "fp32", extra, zero, accumulation), comm);
  auto whole = options;
  whole.ep_size = 1;
  Reference reference(whole, comm->size());
  for (int step = 0; step < steps; ++step) {
    const auto gradients = reference.backward(step, accumulation);
    for (int micro = 0; micro < accumulation; ++micro) {
      const auto loss = loss_of(*net, step_seed(step, micro), comm->rank());
      const auto by_mask = loss_of(reference.net(), step_seed(step, micro), comm->rank(), /*by_mask=*/true);
      require(std::abs(loss.item<double>() / by_mask.item<double>() - 1) < 1e-5, label + "loss");
      engine.backward(loss);
      if (micro + 1 < accumulation) engine.step();
    }
    for (const auto& [name, wanted] : gradients)
      require(relative(engine.gradient(name), wanted) < 2e-5, label + "gradient of " + name);
    const auto norm = reference.step();
    const auto result = engine.step();
    require(std::abs(result.grad_norm / norm - 1) < 1e-5,
            label + "norm " + std::to_string(result.grad_norm) + ", expected " + std::to_string(norm));
  }
  const auto all = engine.full_state_dict();
  for (const auto& item : reference.net().named_parameters()) {
    require(relative(engine.parameter_state(item.key()), item.value()) < 2e-5, label + "parameter " + item.key());
    if (comm->rank() != 0) continue;
    require(all.contains(item.key()), label + "full_state_dict has no " + item.key());
    require(relative(all.at(item.key()), item.value()) < 2e-5, label + "full_state_dict of " + item.key());
  }
  require(comm->rank() != 0 || all.size() == reference.net().named_parameters().size(), label + "full_state_dict");
}

TEST(MoeTraining, EqualsADenseReference) {
  for (const auto& place : {Place{"shm", 4}, Place{"gloo", 2}, Place{"shm", 2}}) {
    if (!nightly() && place.world == 2 && place.transport == std::string("shm")) continue;
    expect_passed(place, [](const Comm& comm) {
      OneIn part(11);
      for (int ep = 1; ep <= comm->size(); ep *= 2)
        for (const std::int64_t k : {1, 2, 3})
          for (int stage = 0; stage <= 3; ++stage)
            if (part.take()) check_training(comm, options_of(ep, k), stage);
    });
  }
}

TEST(MoeTraining, OverEveryTransport) {
  for (const auto& place : {Place{"local", 1}, Place{"thread", 2}, Place{"thread", 4}, Place{"delayed", 4},
                            Place{"gloo", 4}, Place{"c10d", 2}})
    expect_passed(place, [](const Comm& comm) {
      for (const int stage : {0, 3}) check_training(comm, options_of(std::min(2, comm->size()), 2), stage);
    });
}

TEST(MoeTraining, WithVariants) {
  expect_passed({"shm", 4}, [](const Comm& comm) {
    for (const int stage : {1, 3}) {
      auto options = options_of(2, 1);
      options.use_residual = true;
      check_training(comm, options, stage);
      options.use_residual = false;
      options.drop_tokens = false;
      check_training(comm, options, stage);
      options.merged_batches = true;
      options.k = 2;
      check_training(comm, options, stage);
      check_training(comm, options_of(2, 2), stage, R"(, "use_data_before_expert_parallelism": true)");
      check_training(comm, options_of(2, 2), stage, "", R"(, "reduce_bucket_size": 300)");
      check_training(comm, options_of(2, 2), stage, "", R"(, "stage3_param_persistence_threshold": 50)");
      check_training(comm, options_of(4, 2), stage, "", "", /*accumulation=*/2);
      check_training(comm, options_of(2, 1), stage, "", R"(, "offload_optimizer": {"device": "cpu"})");
      // Groups of experts are cut out of all ranks that ZeRO shards over. Each rank's gate sees its own tokens.
      for (const int ep : {2, 4}) check_training(comm, options_of(ep, 2), stage, R"(, "sequence_parallel_size": 2)");
    }
  });
}

// --- bits -----------------------------------------------------------------------------------------

// What a forward and a backward of a rank compute: outputs, losses and counts of the layers, and every gradient.
std::string bits_of(const Comm& comm, const MoeOptions& options, const std::string& recipe, bool experts_too) {
  const auto net = make_net(options);
  Engine engine(net, engine_options(1, recipe), comm);
  const auto loss = loss_of(*net, 7, comm->rank());
  engine.backward(loss);
  std::string bits = std::to_string(loss.item<double>());
  const auto add = [&](const at::Tensor& values) {
    const auto flat = values.detach().contiguous();
    bits.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  };
  for (const auto& y : net->outputs) add(y);
  add(net->loss);
  for (const auto& counts : net->counts) add(counts);
  for (const auto& item : make_net(options)->named_parameters())
    if (experts_too || item.key().find(".experts.") == std::string::npos) add(engine.gradient(item.key()));
  return bits;
}

TEST(MoeTraining, BitsDoNotDependOnTheDegree) {
  for (const int world : {2, 4})
    expect_passed({"shm", world}, [world](const Comm& comm) {
      for (const std::string recipe : {"fp32", "bf16"})
        for (const std::int64_t k : {1, 2, 3}) {
          // A sum of more than two gradients of an expert is grouped by the degree.
          const auto whole = bits_of(comm, options_of(1, k), recipe, /*experts_too=*/world == 2);
          for (int ep = 2; ep <= world; ep *= 2)
            require(bits_of(comm, options_of(ep, k), recipe, world == 2) == whole,
                    label_of(world, options_of(ep, k), 1, " " + recipe) + "other bits than with ep 1");
        }
    });
}

// States after some steps, over stages, tiers and transports.
TEST(MoeTraining, StateIsTheSameAtEveryStageTierAndTransport) {
  std::string first;
  const TempFolder folder;
  for (const char* transport : {"shm", "gloo", "thread"}) {
    if (!nightly() && transport == std::string("thread")) continue;
    const auto file = folder.file(transport);
    expect_passed({transport, 4}, [&](const Comm& comm) {
      std::string hashes;
      OneIn part(2);
      for (const std::string recipe : {"bf16", "fp32"}) {
        if (!part.take()) continue;
        std::string wanted;
        for (const auto& [stage, zero] : std::vector<std::pair<int, std::string>>{
                 {0, ""},
                 {1, ""},
                 {2, ""},
                 {3, ""},
                 {2, R"(, "offload_optimizer": {"device": "cpu"})"},
                 {3, R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.text() +
                         R"("}, "offload_param": {"device": "nvme", "nvme_path": ")" + folder.text() + "\"}"}}) {
          const auto net = make_net(options_of(2, 2));
          Engine engine(net, engine_options(stage, recipe, "", zero, 2), comm);
          for (int step = 0; step < 3; ++step)
            for (int micro = 0; micro < 2; ++micro) {
              engine.backward(loss_of(*net, step_seed(step, micro), comm->rank()));
              engine.step();
            }
          const auto hash = engine.state_hash();
          // With accumulation, stages 0 and 1 sum micro-batches before ranks, stages 2 and 3 after.
          if (wanted.empty() || (stage == 2 && zero.empty())) hashes += wanted = hash;
          require(hash == wanted, recipe + ", stage " + std::to_string(stage) + zero + ": other states");
        }
      }
      if (comm->rank() == 0) std::ofstream(file) << hashes;
    });
    const auto hashes = file_text(file);
    ASSERT_FALSE(hashes.empty());
    if (first.empty()) first = hashes;
    EXPECT_EQ(hashes, first) << transport;
  }
}

// --- routing --------------------------------------------------------------------------------------

// Sets the gate so that experts whose bit is not in `chosen` are like the one before them, which is taken instead.
void starve(Engine& engine, unsigned chosen, std::uint64_t seed) {
  for (int i = 0; i < 2; ++i) {
    const auto name = "blocks." + std::to_string(i) + ".gate.wg.weight";
    auto weight = mesh::draw({kExperts, kHidden}, seed + static_cast<std::uint64_t>(i));
    for (std::int64_t e = 0; e < kExperts; ++e)
      if ((chosen >> e & 1U) == 0) weight[e] = weight[(e + kExperts - 1) % kExperts];
    engine.set_parameter_state(name, "master", weight);
  }
}

// Ranks have other numbers of tokens, some none; experts have rows on some ranks, or on none.
TEST(MoeTraining, TwoHundredRandomRoutingsNeverHang) {
  const int routings = nightly() ? 200 : 40;
  for (const auto& place : {Place{"shm", 4}, Place{"gloo", 4}})
    expect_passed(place, [routings](const Comm& comm) {
      auto options = options_of(2, 1);
      options.use_rts = true;
      const auto net = make_net(options);
      Engine engine(net, engine_options(3), comm);
      std::mt19937_64 random(17);  // the same on every rank
      std::int64_t without_rows = 0;
      for (int i = 0; i < routings; ++i) {
        if (i % 20 == 0) starve(engine, static_cast<unsigned>(random() % 15 + 1), random());
        std::vector<std::int64_t> tokens;
        for (int rank = 0; rank < comm->size(); ++rank)
          tokens.push_back(static_cast<std::int64_t>(random() % 3 == 0 ? 0 : random() % 12));
        const auto mine = tokens[static_cast<std::size_t>(comm->rank())];
        const auto loss = loss_of(*net, i, comm->rank(), false, mine);
        for (const auto& counts : net->counts) without_rows += counts.eq(0).sum().item<std::int64_t>();
        require(std::isfinite(loss.item<double>()), "loss of routing " + std::to_string(i));
        engine.backward(loss);
        require(std::isfinite(engine.step().grad_norm), "norm of routing " + std::to_string(i));
      }
      require(without_rows > routings / 2, "only " + std::to_string(without_rows) + " experts had no tokens");
    });
}

// Against the formula, with unequal numbers of tokens: a mean over ranks of each rank's loss.
TEST(MoeTraining, UnequalTokens) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const std::int64_t tokens[] = {9, 0};
    for (const int stage : {0, 3}) {
      const auto net = make_net(options_of(2, 2));
      Engine engine(net, engine_options(stage), comm);
      const auto whole = make_net(options_of(1, 2));
      for (int rank = 0; rank < 2; ++rank)
        (loss_of(*whole, 1, rank, /*by_mask=*/rank == 0, tokens[rank]) / 2).backward();
      engine.backward(loss_of(*net, 1, comm->rank(), false, tokens[comm->rank()]));
      for (const auto& item : whole->named_parameters())
        require(relative(engine.gradient(item.key()), item.value().grad()) < 2e-5,
                "stage " + std::to_string(stage) + ": gradient of " + item.key());
    }
  });
}

// Only rows of kept tokens travel, twice in forward and twice in backward, and the numbers of rows once.
TEST(MoeTraining, TrafficIsThatOfTheKeptRows) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    for (const std::string recipe : {"fp32", "bf16"}) {
      auto options = options_of(2, 1);
      const auto net = make_net(options);
      Engine engine(net, engine_options(0, recipe), comm);
      comm->reset_stats();
      const auto loss = loss_of(*net, 3, comm->rank());
      const auto forward = comm->stats().by_op.at("all_to_all").bytes_sent;
      engine.backward(loss);
      const auto both = comm->stats().by_op.at("all_to_all").bytes_sent;
      // By the rule: the first ones of an expert stay, up to its capacity of ceil(15 / 4).
      std::uint64_t to_other = 0, from_other = 0;
      const auto other = static_cast<std::int64_t>(1 - comm->rank());
      for (const auto& counts : net->counts) {
        const auto all = comm->all_gather_bytes({static_cast<const char*>(counts.const_data_ptr()), 32});
        for (std::int64_t e = 0; e < kExperts; ++e) {
          const auto rows_of = [&](std::int64_t rank) {
            std::int64_t count = 0;
            std::memcpy(&count, all[static_cast<std::size_t>(rank)].data() + 8 * e, 8);
            return static_cast<std::uint64_t>(std::min<std::int64_t>(count, 4));
          };
          if (e / 2 == other) to_other += rows_of(comm->rank());
          if (e / 2 == comm->rank()) from_other += rows_of(other);
        }
      }
      const std::uint64_t row = kHidden * (recipe == "fp32" ? 4 : 2), counts = 2 * 8 * kExperts / 2;
      require(forward == (to_other + from_other) * row + counts,
              recipe + ": " + std::to_string(forward) + " bytes in forward");
      require(both == 2 * (to_other + from_other) * row + counts, recipe + ": " + std::to_string(both) + " in both");
    }
  });
}

// --- recomputation --------------------------------------------------------------------------------

// A checkpointed layer has the same routing in both runs, and draws and exchanges its choices once.
TEST(MoeTraining, RecomputationHasTheSameRouting) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    for (const std::int64_t k : {1, 2}) {
      std::vector<std::string> bits;
      for (const bool checkpointed : {false, true}) {
        auto options = options_of(2, k);
        options.use_rts = options.top2_2nd_expert_sampling = true;
        if (k == 1) options.noisy_gate_policy = "RSample";
        const auto net = make_net(options);
        Engine engine(net, engine_options(3), comm);
        torch::manual_seed(static_cast<std::uint64_t>(21 + comm->rank()));
        at::Tensor aux;
        const auto block = [net](const at::Tensor& h) {
          const auto [y, l_aux, counts] = (*net->blocks)[0]->as<MoEImpl>()->forward(h);
          return std::vector<at::Tensor>{h + torch::dropout(y, 0.3, true), l_aux};
        };
        const auto h = torch::tanh(net->in(moe::input_of(1, comm->rank())));
        const auto out = checkpointed ? activation_checkpoint(block, h) : block(h);
        comm->reset_stats();
        engine.backward(net->head(out[0]).pow(2).mean() + out[1] * 0.1);
        std::string text;
        for (const auto& item : make_net(options)->named_parameters()) {
          const auto gradient = engine.gradient(item.key());
          text.append(static_cast<const char*>(gradient.const_data_ptr()), gradient.nbytes());
        }
        const auto next = at::rand({1}).item<float>();
        text += std::to_string(next);
        bits.push_back(text);
        require(comm->stats().by_op.at("all_to_all").calls == (checkpointed ? 4U : 2U),
                std::to_string(comm->stats().by_op.at("all_to_all").calls) + " all-to-alls in backward");
      }
      require(bits[0] == bits[1], "k " + std::to_string(k) + ": a checkpointed layer has other gradients");
    }
  });
}

// --- experts of other ranks -----------------------------------------------------------------------

TEST(MoeTraining, InitialValuesDoNotDependOnTheDegree) {
  expect_passed({"shm", 4}, [](const Comm& comm) {
    std::vector<std::map<std::string, std::string>> hashes;
    for (const bool deferred : {false, true})
      for (const int ep : {1, 2, 4}) {
        torch::manual_seed(deferred ? 5 : static_cast<std::uint64_t>(5 + comm->rank()));  // rank 0's values are taken
        std::shared_ptr<NetImpl> net;
        if (deferred)
          net = build([&] { return std::make_shared<NetImpl>(options_of(ep, 1)); });
        else
          net = std::make_shared<NetImpl>(options_of(ep, 1));
        Engine engine(net, engine_options(3), comm);
        auto& all = hashes.emplace_back();
        for (const auto& item : make_net(options_of(ep, 1))->named_parameters()) {
          const auto values = engine.parameter_state(item.key());
          all[item.key()] = {static_cast<const char*>(values.const_data_ptr()), values.nbytes()};
        }
        require(all == hashes.front(), "ep " + std::to_string(ep) + (deferred ? ", deferred" : "") + ": other values");
      }
  });
}

TEST(MoeTraining, StatesAndGradientsByNameOnEveryRank) {
  expect_passed({"shm", 4}, [](const Comm& comm) {
    for (const int stage : {0, 3}) {
      const auto net = make_net(options_of(2, 1));
      Engine engine(net, engine_options(stage), comm);
      for (const std::string name : {"blocks.0.experts.1.up.weight", "blocks.1.experts.3.down.bias"}) {
        const bool here = (name.find("experts.1") != std::string::npos ? 0 : 1) == comm->rank() % 2;
        const auto values = mesh::draw(make_net(options_of(1, 1))->named_parameters()[name].sizes().vec(), 77);
        engine.set_parameter_state(name, "master", values);
        require(engine.parameter_state(name).equal(values), name + ": set_parameter_state");
        const auto own = engine.own_parameter_state(name);
        require((own.values.numel() > 0) <= here, name + ": own_parameter_state of another rank's expert");
        engine.set_own_parameter_state(name, "master", own.values * 2);
        require(engine.parameter_state(name).equal(values * 2), name + ": set_own_parameter_state");
        require(engine.full_state_dict().contains(name) == (comm->rank() == 0), name + ": full_state_dict");
      }
      engine.backward(loss_of(*net, 1, comm->rank()));
      const std::string name = "blocks.0.experts.2.up.weight";
      const auto gradient = engine.gradient(name);
      engine.set_gradient(name, gradient * 3);
      require(relative(engine.gradient(name), gradient * 3) < 1e-6, "set_gradient");
      engine.set_own_gradient(name, engine.own_gradient(name).values / 3);
      require(relative(engine.gradient(name), gradient) < 1e-6, "set_own_gradient");
    }
  });
}

// A scope may name an expert of other ranks; the first rank that has it writes it.
TEST(MoeTraining, ScopesNameExpertsOfOtherRanks) {
  expect_passed({"shm", 4}, [](const Comm& comm) {
    for (const int stage : {1, 3}) {
      const auto net = make_net(options_of(2, 1));
      Engine engine(net, engine_options(stage), comm);
      const std::string name = "blocks.1.experts.3.up.weight";
      {
        const auto scope = engine.gathered_parameters({name}, /*modify=*/true);
        const at::NoGradGuard no_grad;
        if (comm->rank() == 1) net->named_parameters()[name].fill_(7);
      }
      require(engine.parameter_state(name).eq(7).all().item<bool>(), "stage " + std::to_string(stage));
      const auto text = error_of([&] { (void)engine.gathered_parameters({"blocks.1.experts.9.*"}); }, "no such expert");
      require(contains(text, "match no parameter and no unit"), text);
    }
  });
}

TEST(MoeTraining, AnExpertOfAnotherRankCannotBeRead) {
  expect_passed({"shm", 4}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    {
      Engine engine(net, engine_options(2), comm);
      const int other = 1 - comm->rank() % 2;
      const auto index = other * 2 + 1;
      const auto weight = net->named_parameters()["blocks.1.experts." + std::to_string(index) + ".up.weight"];
      const auto text = error_of([&] { (void)weight.sum(); }, "a read");
      if (other == 1)
        require_golden("experts: a read of another rank's", text, comm->rank() == 0);
      else
        require(contains(text, "expert 1 of blocks.1 lives on ranks 0, 2"), text);
      const at::NoGradGuard no_grad;
      require(contains(error_of([&] { weight.zero_(); }, "a write"), "blocks.1 lives on ranks"), "a write");
      require(weight.sizes() == (at::IntArrayRef{20, kHidden}), "shape");
    }
    const auto text = error_of([&] { (void)net->forward(moe::input_of(0, 0)); }, "a forward after the Engine");
    require_golden("experts: a forward without an Engine", text, comm->rank() == 0);
  });
}

// Twelve pairs of degree and stage: equal states after the load, and equal training.
TEST(MoeTraining, CheckpointsHaveGlobalNames) {
  struct Layout {
    int ep, stage;
    std::string text() const { return "ep " + std::to_string(ep) + ", stage " + std::to_string(stage); }
  };
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const Comm& comm) {
    const auto names = make_net(options_of(1, 1))->named_parameters().keys();
    const auto train = [&](Engine& engine, const std::shared_ptr<moe::NetImpl>& net, int steps) {
      std::vector<double> losses;
      for (int step = 0; step < steps; ++step) {
        auto loss = loss_of(*net, step_seed(step, 0), comm->rank());
        engine.backward(loss);
        engine.step();
        losses.push_back(loss.item<double>());
      }
      return losses;
    };
    OneIn part(3);
    for (const auto& saved : {Layout{1, 0}, Layout{2, 2}, Layout{4, 3}}) {
      const auto from = make_net(options_of(saved.ep, 1));
      Engine engine(from, engine_options(saved.stage), comm);
      train(engine, from, 2);
      const auto tag = "ep" + std::to_string(saved.ep);
      engine.save_checkpoint(folder.path(), tag);
      std::map<std::string, at::Tensor> states;
      for (const auto& name : names)
        for (const char* state : {"master", "exp_avg", "exp_avg_sq"})
          states[name + " " + state] = engine.parameter_state(name, state).clone();
      const int steps = nightly() ? 20 : 5;
      const auto expected = train(engine, from, steps);
      for (const auto& layout : {Layout{1, 3}, Layout{2, 1}, Layout{4, 2}, Layout{2, 3}}) {
        if (!part.take()) continue;
        const auto label = "from " + saved.text() + " to " + layout.text() + ": ";
        const auto to = make_net(options_of(layout.ep, 1));
        Engine loaded(to, engine_options(layout.stage), comm);
        loaded.load_checkpoint(folder.path(), tag);
        for (const auto& name : names)
          for (const char* state : {"master", "exp_avg", "exp_avg_sq"})
            require(loaded.parameter_state(name, state).equal(states.at(name + " " + state)),
                    label + state + " of " + name);
        const auto losses = train(loaded, to, steps);
        for (std::size_t k = 0; k < losses.size(); ++k)
          require(std::abs(losses[k] - expected[k]) <= 2e-5 * std::abs(expected[k]),
                  label + "loss " + std::to_string(losses[k]) + ", expected " + std::to_string(expected[k]));
      }
    }
  });
}

// Steps without an expert count on the ranks that have it, also after a load.
TEST(MoeTraining, AFrozenExpertMissesSteps) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const Comm& comm) {
    std::vector<at::Tensor> after;
    for (const bool resumed : {false, true}) {
      const auto net = make_net(options_of(2, 1));
      Engine engine(net, engine_options(2), comm);
      const auto freeze = [&](bool frozen) {
        for (auto& item : net->named_parameters())
          if (contains(item.key(), "blocks.0.experts.3.")) item.value().requires_grad_(!frozen);
      };
      const auto train = [&](int begin, int end) {
        for (int step = begin; step < end; ++step) {
          engine.backward(loss_of(*net, step, comm->rank()));
          engine.step();
        }
      };
      if (resumed) {
        engine.load_checkpoint(folder.path(), "frozen");
      } else {
        train(0, 1);
        freeze(true);
        const auto before = engine.parameter_state("blocks.0.experts.3.up.weight").clone();
        train(1, 3);
        freeze(false);
        require(engine.parameter_state("blocks.0.experts.3.up.weight").equal(before), "a frozen expert was trained");
        engine.save_checkpoint(folder.path(), "frozen");
      }
      train(3, 5);
      after.push_back(engine.parameter_state("blocks.0.experts.3.up.weight"));
    }
    require(after[0].equal(after[1]), "an expert that was frozen is other after a load");
  });
}

// --- faults ---------------------------------------------------------------------------------------

TEST(MoeFaults, DegreesThatDoNotDivideTheRanks) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto text = error_of([&] { Engine(make_net(options_of(4, 1)), engine_options(1), comm); }, "ep 4 on 2 ranks");
    require_golden("experts: ep_size that does not divide the ranks", text, comm->rank() == 0);
    for (const auto& theirs : comm->all_gather_bytes(text)) require(theirs == text, theirs);
  });
}

TEST(MoeFaults, NotWithTensorParallelism) {
  expect_passed({"shm", 4}, [](const Comm& comm) {
    const auto text = error_of(
        [&] {
          Engine(make_net(options_of(2, 1)),
                 engine_options(1, "fp32", R"(, "tensor_parallel": {"autotp_size": 2, "partition_config":
                   {"use_default_specs": false, "layer_specs": [{"patterns": ["head.weight"], "gather_output": true}]}})"),
                 comm);
        },
        "tensor parallelism");
    require_golden("experts: with tensor parallelism", text, comm->rank() == 0);
  });
}

}  // namespace
}  // namespace zero::test::moe_test
