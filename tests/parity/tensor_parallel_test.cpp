// Tensor parallelism: random numbers, the norm, traffic, layers with sequence regions, and what a model
// must not do.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "examples/megatron_gpt.h"
#include "models/gpt.h"
#include "parity/mesh_problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::tensor_parallel_test {
namespace {

using namespace zero::test::mesh;

// --- random numbers -----------------------------------------------------------------------------

::models::GptConfig dropout_config() {
  auto config = gpt_config();
  config.dropout = 0.2;
  return config;
}

// Residual dropout is the same on all tensor-parallel ranks, so their losses and replicated parameters stay equal. With
// recomputation the same masks are drawn again.
TEST(TensorParallel, Dropout) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    std::string known;
    for (const bool checkpointed : {false, true}) {
      torch::manual_seed(11);
      const auto module = std::make_shared<::models::GptImpl>(dropout_config());
      fill(*module);
      if (checkpointed)
        module->run_layers_by(2, [](const auto& part, const at::Tensor& x) { return activation_checkpoint(part, x); });
      Case c{.model = &gpt_model(), .stage = 3};
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module), c.options(), comm);
      torch::manual_seed(100 + static_cast<std::uint64_t>(engine.mesh().rank("dp")));
      for (int step = 0; step < 4; ++step) {
        const auto loss = c.model->loss(*module, seed_of(step, 0, engine.mesh().rank("dp")));
        const auto all = engine.mesh().group("tp")->all_gather_bytes(std::to_string(loss.template item<double>()));
        require(all[0] == all[1], "losses of a tensor-parallel group differ");
        engine.backward(loss);
        engine.step();
      }
      const auto state = at::detail::getDefaultCPUGenerator().get_state();
      const auto hash = engine.state_hash();
      const auto states = engine.mesh().group("tp")->all_gather_bytes(
          {static_cast<const char*>(state.const_data_ptr()), state.nbytes()});
      require(states[0] == states[1], "the generators of a tensor-parallel group differ");
      if (known.empty()) known = hash;
      require(known == hash, "another state with checkpointed segments");
    }
  });
}

// Within a split region each rank draws its own numbers.
struct NoisyImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor inside, again, outside;  // again: in a second region, with no draw between them
  std::function<at::Tensor(const at::Tensor&)> mask = [](const at::Tensor& y) {
    return at::bernoulli(at::full_like(y, 0.5));
  };
  NoisyImpl() {
    up = register_module("up", torch::nn::Linear(4, 2000));
    down = register_module("down", torch::nn::Linear(2000, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = up(x);
    inside = mask(y);
    y = down(y * inside);
    const auto z = up(x);
    again = mask(z);
    y = y + down(z * again);
    outside = mask(y);
    return y + outside;
  }
  static Options options(int t) {
    return Options::build()
        .train_micro_batch_size(2)
        .adamw({.lr = 1e-3})
        .tensor_parallel(
            t, {.layer_specs = {{.patterns = {"up.weight"}}, {.patterns = {"down.weight"}, .partition_type = "row"}}});
  }
};

TEST(TensorParallel, RandomNumbersInAndOutOfSplitRegions) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<NoisyImpl>();
    torch::manual_seed(static_cast<std::uint64_t>(comm->rank()));  // of different seeds, rank 0's counts
    Engine engine(std::static_pointer_cast<torch::nn::Module>(module), NoisyImpl::options(2), comm);
    const auto x = draw({50, 4}, 1);
    at::Tensor before;
    for (int step = 0; step < 2; ++step) {
      engine.backward(module->forward(x).pow(2).mean());
      engine.step();
      const auto both = [&](const at::Tensor& mine) {
        auto all = at::empty({2, mine.numel()});
        comm->all_gather(all.view({-1}), mine.detach().contiguous().view({-1}))->wait();
        return all;
      };
      const auto inside = both(module->inside), outside = both(module->outside);
      require(outside[0].equal(outside[1]), "different numbers outside of split regions");
      require(!module->again.equal(module->inside), "the same numbers in the next region");
      const double product = (inside[0] * inside[1]).mean().template item<double>();
      require(std::abs(product - 0.25) < 0.01, "numbers inside depend on each other: " + std::to_string(product));
      require(!before.defined() || !before.equal(inside[0]), "the same numbers in the next step");
      before = inside[0];
    }
  });
}

// Masks have one distribution whatever the number of ranks: the same mean, and independent over ranks, regions and
// steps. Bounds: five standard deviations of the mean of as many draws.
TEST(TensorParallel, DropoutOfAnyNumberOfRanks) {
  for (const int t : {1, 2, 4})
    expect_passed({"shm", t}, [t](const auto& comm) {
      const double p = 0.2;
      const auto module = std::make_shared<NoisyImpl>();
      module->mask = [p](const at::Tensor& y) { return at::dropout(at::full_like(y, 1 - p), p, /*train=*/true); };
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module), NoisyImpl::options(t), comm);
      torch::manual_seed(7);
      std::vector<at::Tensor> inside;  // one row a rank, region and step
      for (int step = 0; step < 2; ++step) {
        engine.backward(module->forward(draw({60, 4}, 1)).pow(2).mean());
        engine.step();
        for (const auto& mine : {module->inside, module->again}) {
          require(mine.numel() == 60 * 2000 / t, "another part");
          auto all = at::empty({t, mine.numel()});
          comm->all_gather(all.view({-1}), mine.detach().contiguous().view({-1}))->wait();
          for (int j = 0; j < t; ++j) inside.push_back(all[j]);
        }
        auto outside = at::empty({t, module->outside.numel()});
        comm->all_gather(outside.view({-1}), module->outside.detach().contiguous().view({-1}))->wait();
        for (int j = 1; j < t; ++j) require(outside[j].equal(outside[0]), "different numbers outside of split regions");
      }
      const auto require_mean = [](const at::Tensor& mask, double wanted, const std::string& what) {
        const double bound = 5 * std::sqrt(wanted * (1 - wanted) / static_cast<double>(mask.numel()));
        const double mean = mask.mean().template item<double>();
        require(std::abs(mean - wanted) < bound, what + ": " + std::to_string(mean) + ", expected " +
                                                     std::to_string(wanted) + " within " + std::to_string(bound));
      };
      require_mean(at::cat(inside), 1 - p, "mean over " + std::to_string(t) + " ranks");
      for (std::size_t a = 0; a < inside.size(); ++a) {
        require(inside[a].eq(0).logical_or(inside[a].eq(1)).all().template item<bool>(), "neither 0 nor 1");
        require_mean(inside[a], 1 - p, "mean of a mask");
        for (std::size_t b = 0; b < a; ++b)
          require_mean(inside[a] * inside[b], (1 - p) * (1 - p),
                       "product of masks " + std::to_string(a) + " and " + std::to_string(b) + " of " +
                           std::to_string(t) + " ranks");
      }
    });
}

// --- the norm -----------------------------------------------------------------------------------

// The clipped norm is that of the whole model: replicated, tied, cut and summed parameters count once.
TEST(TensorParallel, TheNormCountsEveryElementOnce) {
  for (const Place place : {Place{"shm", 4}, Place{"shm", 3}})
    expect_passed(place, [](const auto& comm) {
      for (int stage = 0; stage <= 3; ++stage)
        for (const bool layers : {false, true}) {  // a plan; layers with sequence regions, whose norms are summed
          Case c{.model = &gpt_model(), .t = comm->size() == 3 ? 3 : 2, .stage = stage};
          auto module = make_model(*c.model);
          if (layers) {
            const auto gpt = std::make_shared<MegatronGptImpl>(
                MegatronGptConfig{.layers = 2, .hidden = 24, .heads = 6, .sequence = 9, .vocabulary = 22});
            module = gpt;
          }
          Engine engine(module,
                        layers ? Options::build()
                                     .stage(stage)
                                     .adamw({.lr = 0.01})
                                     .gradient_clipping(0.05)
                                     .train_micro_batch_size(3)
                                     .tensor_parallel(c.t, {})
                               : c.options(),
                        comm);
          if (layers) {
            auto& gpt = dynamic_cast<MegatronGptImpl&>(*module);
            gpt.set_group(engine.mesh().group("tp"));
            const auto text = at::randint(0, 22, {3, 6}, at::detail::createCPUGenerator(1), at::kLong);
            engine.backward(gpt.forward(text).pow(2).mean());
          } else {
            engine.backward(c.model->loss(*module, seed_of(0, 0, engine.mesh().rank("dp"))));
          }
          double squares = 0;
          std::uint64_t seed = 50;
          for (const auto& item : module->named_parameters()) {
            const auto sizes = engine.parameter_state(item.key()).sizes().vec();
            const auto values = draw(sizes, ++seed);
            squares += values.to(at::kDouble).pow(2).sum().template item<double>();
            engine.set_gradient(item.key(), values);
          }
          const double got = engine.step().grad_norm, wanted = std::sqrt(squares);
          require(std::abs(got - wanted) <= 1e-12 * wanted, "norm " + std::to_string(got) + ", expected " +
                                                                std::to_string(wanted) + " at stage " +
                                                                std::to_string(stage) + (layers ? " with layers" : ""));
        }
    });
}

// --- traffic ------------------------------------------------------------------------------------

template <class Stats>
void require_bytes(const Stats& stats, const std::string& op, std::uint64_t wanted) {
  const auto row = stats.by_op.find(op);
  const auto got = row == stats.by_op.end() ? 0 : row->second.bytes_sent;
  require(got == wanted, op + ": sent " + std::to_string(got) + ", expected " + std::to_string(wanted));
}

TEST(TensorParallel, TrafficOfTensorParallelism) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    for (const auto& [segments, dropout] : {std::pair{0, 0.0}, {2, 0.0}, {1, 0.0}, {2, 0.1}, {1, 0.1}}) {
      auto config = gpt_config();
      config.dropout = dropout;
      const auto module = std::make_shared<::models::GptImpl>(config);
      if (segments > 0)
        module->run_layers_by(segments,
                              [](const auto& part, const at::Tensor& x) { return activation_checkpoint(part, x); });
      Case c{.model = &gpt_model(), .stage = 0};
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module), c.options(), comm);
      for (int step = 0; step < 2; ++step) {
        comm->reset_stats();
        engine.backward(c.model->loss(*module, seed_of(step, 0, engine.mesh().rank("dp"))));
        const auto stats = comm->stats();
        engine.step();
        // Each sum of 3 x 5 x 24 fp32 sends 2 f times its bytes, f = 1/2. Of a block two in forward and two in
        // backward: 8 f of its bytes. Embedding and head: one each. A segment that draws random numbers is computed
        // again to its end, so that a block of its own sends 12 f; others stop before their last sum.
        const std::uint64_t bytes = 3 * 5 * 24 * 4;
        const std::uint64_t spared = dropout > 0 ? 0 : static_cast<std::uint64_t>(segments);
        const std::uint64_t again = segments == 0 ? 0 : 2 * 2 - spared;
        require(stats.by_op.at("tp.all_reduce").bytes_sent == bytes * (2 * 4 + 2 + again),
                "sums: " + std::to_string(stats.by_op.at("tp.all_reduce").bytes_sent) + " bytes with " +
                    std::to_string(segments) + " segments and dropout " + std::to_string(dropout));
        // The logits of 15 tokens: 11 of 23 columns on tp 0, 12 on tp 1.
        const std::uint64_t columns = engine.mesh().rank("tp") == 0 ? 11 : 12;
        require(stats.by_op.at("tp.all_to_all").bytes_sent == 15 * columns * 4, "logits");
      }
    }
  });
}

// Parts of 3 ranks: 2 heads and 32 inner features each, and 7, 8 and 8 of 23 columns of logits.
TEST(TensorParallel, TrafficOfUnevenParts) {
  for (const auto& [world, t] : {std::pair{3, 3}, {6, 3}, {4, 4}})
    expect_passed({"shm", world}, [t](const auto& comm) {
      for (const int segments : {0, 2}) {
        const auto module = std::make_shared<::models::GptImpl>(gpt_config());
        if (segments > 0)
          module->run_layers_by(segments,
                                [](const auto& part, const at::Tensor& x) { return activation_checkpoint(part, x); });
        Case c{.model = &gpt_model(), .t = t, .stage = 0};
        Engine engine(std::static_pointer_cast<torch::nn::Module>(module), c.options(), comm);
        auto& group = *engine.mesh().group("tp");
        for (int step = 0; step < 2; ++step) {
          group.reset_stats();
          engine.backward(c.model->loss(*module, seed_of(step, 0, engine.mesh().rank("dp"))));
          const auto stats = group.stats();
          engine.step();
          // Sums: 2 of each of 2 blocks in forward and in backward, of the embedding, of the head's input. A segment of
          // a block runs one of its sums again.
          const std::uint64_t sums = 2 * 4 + 2 + static_cast<std::uint64_t>(segments), bytes = 3 * 5 * 24 * 4,
                              others = static_cast<std::uint64_t>(t) - 1;
          require_bytes(stats, "all_reduce", sums * 2 * others * bytes / (others + 1));
          // Each rank sends its columns to all others.
          const auto own = static_cast<std::uint64_t>(23 * (group.rank() + 1) / t - 23 * group.rank() / t);
          require_bytes(stats, "all_to_all", others * 15 * own * 4);
          require(stats.by_op.size() == 2, "other operations");
        }
      }
    });
}

// Layers with sequence regions send what the sums would, by reduce-scatters and all-gathers.
TEST(TensorParallel, TrafficOfSequenceRegions) {
  for (const auto& [world, t] : {std::pair{2, 2}, {4, 2}, {3, 3}})
    expect_passed({"shm", world}, [t](const auto& comm) {
      for (const int layers : {1, 2})
        for (const bool regions : {true, false})
          for (const int accumulation : {1, 2}) {
            const auto module = std::make_shared<MegatronGptImpl>(MegatronGptConfig{.layers = layers,
                                                                                    .hidden = 24,
                                                                                    .heads = 6,
                                                                                    .sequence = 9,
                                                                                    .vocabulary = 22,
                                                                                    .sequence_regions = regions});
            Engine engine(module,
                          Options::build()
                              .adamw()
                              .train_micro_batch_size(3)
                              .gradient_accumulation_steps(accumulation)
                              .tensor_parallel(t, {}),
                          comm);
            const auto& group = engine.mesh().group("tp");
            module->set_group(group);
            group->reset_stats();
            for (int micro = 0; micro < accumulation; ++micro) {
              const auto text = at::randint(0, 22, {3, 6}, at::detail::createCPUGenerator(1), at::kLong);
              engine.backward(module->forward(text).pow(2).mean());
              engine.step();
            }
            const auto stats = group->stats();
            const auto n = static_cast<std::uint64_t>(t), others = n - 1, blocks = static_cast<std::uint64_t>(layers),
                       micro_batches = static_cast<std::uint64_t>(accumulation);
            const auto sent = [&](std::uint64_t elements) { return micro_batches * elements * 4 * others / n; };
            const std::uint64_t activation = 3 * 6 * 24, logits = 3 * 6 * 22;
            const std::uint64_t gathered_logits = 22 % t == 0 ? logits : 0;
            const auto columns = static_cast<std::uint64_t>(22 * (group->rank() + 1) / t - 22 * group->rank() / t);
            require_bytes(stats, "all_to_all", gathered_logits > 0 ? 0 : micro_batches * others * 3 * 6 * columns * 4);
            if (!regions) {
              require_bytes(stats, "all_reduce", sent(2 * (4 * blocks + 2) * activation));
              require_bytes(stats, "all_gather", sent(gathered_logits));
              require_bytes(stats, "reduce_scatter", 0);
              continue;
            }
            // Reduce-scatters: in forward the outputs of the embedding and of 2 row layers a block, in backward the
            // gradients of the inputs of 2 column layers a block and of the head. An all-gather is in the other
            // direction of each, and one is of the positions' gradient.
            const std::uint64_t moves = 1 + 2 * blocks + 2 * blocks + 1;
            require_bytes(stats, "reduce_scatter", sent(moves * activation));
            require_bytes(stats, "all_gather", sent(moves * activation + 6 * 24 + gathered_logits));
            // Each rank has the gradients of its tokens for 2 norms and 2 row biases a block and the last norm.
            require_bytes(stats, "all_reduce", sent(2 * (6 * blocks + 2) * 24));
          }
    });
}

// --- layers with sequence regions ---------------------------------------------------------------

// The built-in GPT with the explicit layers has its losses; sequence regions change the bits of gradients only.
TEST(TensorParallel, LayersWithSequenceRegions) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    const MegatronGptConfig config{.layers = 2, .hidden = 24, .heads = 6, .sequence = 8, .vocabulary = 22};
    std::vector<std::vector<double>> losses;
    for (const int variant : {0, 1, 2}) {  // the built-in GPT in one process; without regions; with regions
      std::shared_ptr<torch::nn::Module> module;
      std::function<at::Tensor(const at::Tensor&)> forward;
      if (variant == 0) {
        auto gpt = std::make_shared<::models::GptImpl>(::models::GptConfig{
            .layers = 2, .hidden = 24, .heads = 6, .sequence = 8, .vocabulary = 22, .tied_output = true});
        forward = [gpt](const at::Tensor& x) { return gpt->forward(x); };
        module = gpt;
      } else {
        auto of_layers = config;
        of_layers.sequence_regions = variant == 2;
        auto gpt = std::make_shared<MegatronGptImpl>(of_layers);
        forward = [gpt](const at::Tensor& x) { return gpt->forward(x); };
        module = gpt;
      }
      {
        const at::NoGradGuard no_grad;
        for (auto& item : module->named_parameters()) {
          const auto name = item.key() == "position.weight" ? "position" : item.key();
          const auto seed = static_cast<std::uint64_t>(std::hash<std::string>{}(name) % 10007);
          item.value().copy_(draw(item.value().sizes().vec(), seed) * 0.2 + (item.value().dim() == 1 ? 0.3 : 0.0));
        }
      }
      std::unique_ptr<Engine> engine;
      std::vector<at::Tensor> parameters = module->parameters();
      torch::optim::SGD sgd(parameters, 0.1);
      if (variant > 0) {
        engine = std::make_unique<Engine>(module,
                                          Options::build()
                                              .stage(3)
                                              .sgd({.lr = 0.1})
                                              .gradient_clipping(0)
                                              .train_micro_batch_size(3)
                                              .tensor_parallel(2, {}),
                                          comm);
        dynamic_cast<MegatronGptImpl&>(*module).set_group(engine->mesh().group("tp"));
      }
      losses.emplace_back();
      for (int step = 0; step < 50; ++step) {
        const auto loss_at = [&](int d) {
          const auto text = at::randint(
              0, 22, {3, 9}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(10 * step + d)), at::kLong);
          return ::models::cross_entropy(forward(text.narrow(1, 0, 8).contiguous()).flatten(0, 1),
                                         text.narrow(1, 1, 8).flatten());
        };
        if (engine) {
          const auto loss = loss_at(engine->mesh().rank("dp"));
          losses.back().push_back(loss.template item<double>());
          engine->backward(loss);
          engine->step();
        } else {
          sgd.zero_grad();
          for (int d = 0; d < 2; ++d) {
            const auto loss = loss_at(d);
            if (d == comm->rank() / 2) losses.back().push_back(loss.template item<double>());
            (loss / 2).backward();
          }
          sgd.step();
        }
      }
      if (engine) engine->state_hash();
    }
    require(losses[1][0] == losses[2][0], "the first loss with regions has other bits");
    require(apart(losses[1], losses[0]) < 1e-5,
            "losses without regions: apart by " + std::to_string(apart(losses[1], losses[0])));
    require(apart(losses[2], losses[0]) < 1e-5,
            "losses with regions: apart by " + std::to_string(apart(losses[2], losses[0])));
    require(losses[0].back() < losses[0].front(), "the reference does not learn");
  });
}

// The gradients of what ranks have in common are sums of those of each rank's tokens. Their bits are equal on all
// ranks, else the parameters would come apart.
TEST(TensorParallel, GradientsOfSequenceRegionsAreEqualOverTheRanks) {
  for (const auto& [world, t] : {std::pair{2, 2}, {4, 2}, {3, 3}})
    expect_passed({"shm", world}, [t = t](const auto& comm) {
      for (const bool bf16 : {false, true})
        for (int stage = 0; stage <= 3; ++stage) {
          const MegatronGptConfig config{.layers = 2, .hidden = 24, .heads = 6, .sequence = 8, .vocabulary = 24};
          const auto module = std::make_shared<MegatronGptImpl>(config),
                     plain = std::make_shared<MegatronGptImpl>(config);
          fill(*module);
          fill(*plain);
          auto options = Options::build()
                             .adamw()
                             .train_micro_batch_size(3)
                             .gradient_accumulation_steps(2)
                             .stage(stage)
                             .tensor_parallel(t, {});
          if (bf16) options.bf16();
          Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options, comm);
          const auto& group = engine.mesh().group("tp");
          module->set_group(group);
          const auto loss_of = [](MegatronGptImpl& m, int micro, int d) {
            const auto seed = static_cast<std::uint64_t>(10 * micro + d);
            const auto text = at::randint(0, 24, {3, 6}, at::detail::createCPUGenerator(seed), at::kLong);
            return m.forward(text).to(at::kFloat).pow(2).mean();
          };
          const int data_ranks = engine.mesh().size("dp");
          for (int micro = 0; micro < 2; ++micro) {
            engine.backward(loss_of(*module, micro, engine.mesh().rank("dp")));
            for (int d = 0; d < data_ranks; ++d) (loss_of(*plain, micro, d) / (2 * data_ranks)).backward();
            if (micro == 0) engine.step();
          }
          const auto where = (bf16 ? " in bf16" : " in fp32") + (" at stage " + std::to_string(stage));
          int compared = 0;
          for (const auto& item : plain->named_parameters()) {
            const auto& name = item.key();
            const bool whole = contains(name, "norm") || contains(name, "projection.bias") ||
                               contains(name, "down.bias") || name == "position";
            if (!whole) continue;
            ++compared;
            const auto own = engine.own_gradient(name);
            std::string bytes = std::to_string(own.begin) + ":";
            bytes.append(static_cast<const char*>(own.values.contiguous().const_data_ptr()), own.values.nbytes());
            for (const auto& theirs : group->all_gather_bytes(bytes))
              require(theirs == bytes, "gradients of " + name + " differ over the ranks" + where);
            const auto& wanted = item.value().grad();
            const double apart = ((engine.gradient(name) - wanted).norm() / wanted.norm()).template item<double>();
            require(apart < (bf16 ? 0.05 : 1e-5),
                    "gradient of " + name + " is apart by " + std::to_string(apart) + where);
          }
          require(compared == 2 * 6 + 3, "parameters that were compared");
          engine.step();
        }
    });
}

TEST(TensorParallel, SequenceRegionsNeedAMultipleOfTokens) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    auto gpt = std::make_shared<MegatronGptImpl>(MegatronGptConfig{});
    Engine engine(std::static_pointer_cast<torch::nn::Module>(gpt),
                  Options::build().adamw().train_micro_batch_size(1).tensor_parallel(2, {}), comm);
    gpt->set_group(engine.mesh().group("tp"));
    try {
      gpt->forward(at::zeros({1, 7}, at::kLong));
    } catch (const ConfigError& e) {
      return require(contains(e.what(), "expected a multiple of 2"), e.what());
    }
    require(false, "expected a ConfigError");
  });
}

// --- what a model must not do -------------------------------------------------------------------

struct OddImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  int rank = 0;
  OddImpl() {
    up = register_module("up", torch::nn::Linear(4, 6));
    down = register_module("down", torch::nn::Linear(6, 4));
  }
};

TEST(TensorParallel, OperatorsThatPartsDoNotSupport) {
  struct Wrong {
    const char* words;
    std::function<at::Tensor(OddImpl&, const at::Tensor&)> body;
  };
  const std::vector<Wrong> all{
      {"aten::mul reads up.weight, of which this rank holds rows",
       [](OddImpl& m, const at::Tensor& x) { return x.matmul((m.up->weight * 2).t()); }},
      {"got 6 features for down.weight, which takes this rank's 3: the layer before it is not split",
       [](OddImpl& m, const at::Tensor& x) {
         return m.down(at::cat({x, x}, -1).narrow(-1, 0, 6));
       }},
      {"got 3 features for up.weight, which takes 4: the layer before it is split",
       [](OddImpl& m, const at::Tensor& x) { return m.up(m.up(x)); }},
      {"the ranks of a tensor-parallel group got different input for up.weight",
       [](OddImpl& m, const at::Tensor& x) { return m.down(m.up(x + m.rank)); }}};
  for (const auto& wrong : all)
    expect_passed({"shm", 2}, [&](const auto& comm) {
      const auto module = std::make_shared<OddImpl>();
      module->rank = comm->rank();
      const auto options = Options::build().train_micro_batch_size(2).adamw().tensor_parallel(
          2, {.layer_specs = {{.patterns = {"up.weight"}}, {.patterns = {"down.weight"}, .partition_type = "row"}}});
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options, comm);
      try {
        wrong.body(*module, draw({5, 4}, 1));
      } catch (const ConfigError& e) {
        return require(contains(e.what(), wrong.words), e.what());
      }
      require(false, std::string("expected an error with: ") + wrong.words);
    });
}

TEST(TensorParallel, LossesThatDiffer) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    Case c{.model = &gpt_model()};
    const auto module = make_model(*c.model);
    Engine engine(module, c.options(), comm);
    const auto loss = c.model->loss(*module, seed_of(0, 0, engine.mesh().rank("dp")));
    try {
      engine.backward(comm->rank() == 3 ? loss * 1.0001 : loss);
    } catch (const ConfigError& e) {
      // The other rank may be reading the losses still; the end of this one would be its error.
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return require(
          comm->rank() >= 2 && contains(e.what(), "the ranks of a tensor-parallel group got different losses"),
          e.what());
    } catch (const CommError& e) {
      return require(comm->rank() < 2, e.what());  // the other group fails with it
    }
    require(comm->rank() < 2, "expected an error");
  });
}

// One error with the same text on every rank, before anything is sent that others would wait for. json: of rank 0;
// of_others: of the other ranks, if it differs.
void expect_fault(int world, const std::string& json, const std::vector<std::string>& words,
                  const std::string& of_others = "") {
  expect_passed({"shm", world}, [&](const auto& comm) {
    const auto module = make_model(gpt_model());
    const auto& own = comm->rank() > 0 && !of_others.empty() ? of_others : json;
    std::string text;
    try {
      Engine engine(
          module,
          Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, )" + own + "}"),
          comm);
    } catch (const ConfigError& e) {
      text = e.what();
    }
    for (const auto& theirs : comm->all_gather_bytes(text)) require(theirs == text, text + "\nand\n" + theirs);
    for (const auto& part : words) require(contains(text, part), "expected an error with: " + part + "\ngot: " + text);
  });
}

TEST(TensorParallel, FaultsAtConstruction) {
  const auto cut = [](const std::string& specs) {
    return R"("tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, "layer_specs": [)" +
           specs + "]}}";
  };
  const std::string gpt = R"("tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})";
  expect_fault(3, gpt, {"3 ranks are no multiple of tensor_parallel.autotp_size 2 x sequence_parallel_size 1"});
  expect_fault(2, R"("tensor_parallel": {"autotp_size": 2})",
               {"without tensor_parallel.partition_config or preset_model"});
  expect_fault(2, R"("data_parallel_size": 2, )" + gpt, {"expected 1"});
  expect_fault(4, R"("train_batch_size": 3, )" + gpt, {"train_batch_size"});
  expect_fault(2, R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, )" + gpt,
               {"zero_hpz_partition_size: got 2 with tensor or sequence parallelism"});
  // All faults of a plan at once.
  expect_fault(2, cut(R"({"patterns": ["nothing.*"]}, {"patterns": ["norm.weight"]},
                      {"patterns": [".*qkv"], "shape": [[25, 25], -1]}, {"patterns": [".*up"], "multiple": 36})"),
               {"(nothing.*) matches no parameter", "norm.weight [24] (", "): expected a weight of two dimensions",
                "blocks.0.qkv.weight [72, 24] (", "dimension 0 has 72 elements, expected 50, the sum of its pieces",
                "blocks.1.up.weight [96, 24] (", "dimension 0 has 96 elements, expected a multiple of 36"});
  // Ranks with different plans.
  expect_fault(2, cut(R"({"patterns": ["blocks.*up"]}, {"patterns": ["blocks.*down"], "partition_type": "row"})"),
               {"[Engine] the configurations on rank 0 and on rank 1 differ"}, cut(R"({"patterns": ["token"]})"));
}

}  // namespace
}  // namespace zero::test::tensor_parallel_test
