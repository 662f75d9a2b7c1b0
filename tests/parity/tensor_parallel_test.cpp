// Tensor parallelism: random numbers, partitioned activations, traffic, layers with sequence regions, and what a model
// must not do.
#include <gtest/gtest.h>
#include <zero/zero.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <functional>

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
  at::Tensor inside, outside;
  NoisyImpl() {
    up = register_module("up", torch::nn::Linear(4, 2000));
    down = register_module("down", torch::nn::Linear(2000, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = up(x);
    inside = at::bernoulli(at::full_like(y, 0.5));
    y = down(y * inside);
    outside = at::bernoulli(at::full_like(y, 0.5));
    return y + outside;
  }
};

TEST(TensorParallel, RandomNumbersInAndOutOfSplitRegions) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<NoisyImpl>();
    const auto options =
        Options::build()
            .train_micro_batch_size(2)
            .adamw({.lr = 1e-3})
            .tensor_parallel(2, {.layer_specs = {{.patterns = {"up.weight"}},
                                                 {.patterns = {"down.weight"}, .partition_type = "row"}}});
    torch::manual_seed(static_cast<std::uint64_t>(comm->rank()));  // of different seeds, rank 0's counts
    Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options, comm);
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
      const double product = (inside[0] * inside[1]).mean().template item<double>();
      require(std::abs(product - 0.25) < 0.01, "numbers inside depend on each other: " + std::to_string(product));
      require(!before.defined() || !before.equal(inside[0]), "the same numbers in the next step");
      before = inside[0];
    }
  });
}

// --- partitioned activations --------------------------------------------------------------------

TEST(TensorParallel, PartitionedActivations) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const auto& comm) {
    const auto train_segments = [&](const std::string& activations, std::uint64_t& gathered) {
      const auto module = std::dynamic_pointer_cast<::models::GptImpl>(make_model(gpt_model()));
      module->run_layers_by(2, [](const auto& part, const at::Tensor& x) { return activation_checkpoint(part, x); });
      Case c{.model = &gpt_model(), .stage = 2};
      c.extra = R"(, "activation_checkpointing": {)" + activations + "}";
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module), c.options(), comm);
      for (int step = 0; step < 3; ++step) {
        comm->reset_stats();
        engine.backward(c.model->loss(*module, seed_of(step, 0, engine.mesh().rank("dp"))));
        const auto stats = comm->stats();
        const auto row = stats.by_op.find("tp.all_gather");
        gathered = row == stats.by_op.end() ? 0 : row->second.bytes_sent;
        engine.step();
      }
      return engine.state_hash();
    };
    std::uint64_t gathered = 0;
    const auto wanted = train_segments("", gathered);
    require(gathered == 0, "all-gathers without partition_activations");
    const std::string file =
        R"("partition_activations": true}, "libzero": {"activation_file_path": ")" + folder.path().string() + "\"";
    for (const std::string& settings : std::vector<std::string>{
             R"("partition_activations": true)", R"("partition_activations": true, "cpu_checkpointing": true)",
             R"("partition_activations": true, "contiguous_memory_optimization": true, "number_checkpoints": 2)",
             file}) {
      require(train_segments(settings, gathered) == wanted, "another state with " + settings);
      // Two segments with inputs of 3 x 5 x 24 fp32, of which this rank sends its half.
      require(gathered == 2 * 3 * 5 * 24 * 4 / 2, "gathered " + std::to_string(gathered) + " bytes with " + settings);
    }
  });
}

// --- traffic ------------------------------------------------------------------------------------

TEST(TensorParallel, TrafficOfTensorParallelism) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    for (const int segments : {0, 2, 1}) {
      const auto module = std::dynamic_pointer_cast<::models::GptImpl>(make_model(gpt_model()));
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
        // backward; a segment of c blocks is computed again up to its last sum but one: 2c - 1. Embedding and head: one
        // each.
        const std::uint64_t bytes = 3 * 5 * 24 * 4;
        const std::uint64_t again = segments == 0 ? 0 : segments == 2 ? 2 * (2 * 1 - 1) : 2 * 2 - 1;
        require(stats.by_op.at("tp.all_reduce").bytes_sent == bytes * (2 * 4 + 2 + again),
                "sums: " + std::to_string(stats.by_op.at("tp.all_reduce").bytes_sent) + " bytes with " +
                    std::to_string(segments) + " segments");
        // The logits of 15 tokens: 11 of 23 columns on tp 0, 12 on tp 1.
        const std::uint64_t columns = engine.mesh().rank("tp") == 0 ? 11 : 12;
        require(stats.by_op.at("tp.all_to_all").bytes_sent == 15 * columns * 4, "logits");
      }
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
      for (int step = 0; step < 30; ++step) {
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

TEST(TensorParallel, SequenceRegionsNeedAMultipleOfTokens) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    auto gpt = std::make_shared<MegatronGptImpl>(MegatronGptConfig{});
    Engine engine(std::static_pointer_cast<torch::nn::Module>(gpt),
                  Options::build().adamw().train_micro_batch_size(1).tensor_parallel(2, {}), comm);
    gpt->set_group(engine.mesh().group("tp"));
    try {
      gpt->forward(at::zeros({1, 7}, at::kLong));
    } catch (const ConfigError& e) {
      return require(contains(e.what(), "with a multiple of 2 tokens"), e.what());
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
      return require(
          comm->rank() >= 2 && contains(e.what(), "the losses of a tensor-parallel group on rank 0 and on rank 1"),
          e.what());
    } catch (const CommError& e) {
      return require(comm->rank() < 2, e.what());  // the other group fails with it
    }
    require(comm->rank() < 2, "expected an error");
  });
}

TEST(TensorParallel, FaultsAtConstruction) {
  const auto expect = [](int world, const std::string& json, const std::string& words) {
    expect_passed({"shm", world}, [&](const auto& comm) {
      const auto module = make_model(gpt_model());
      try {
        Engine engine(module,
                      Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, )" +
                                         json + "}"),
                      comm);
      } catch (const ConfigError& e) {
        require(contains(e.what(), words), e.what());
        return comm->barrier();  // nothing was sent that others wait for
      }
      require(false, "expected an error with: " + words);
    });
  };
  expect(3, R"("tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})",
         "3 ranks are no multiple of tensor_parallel.autotp_size 2 x sequence_parallel_size 1");
  expect(2, R"("tensor_parallel": {"autotp_size": 2})", "without tensor_parallel.partition_config or preset_model");
  expect(2, R"("data_parallel_size": 2, "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})", "expected 1");
  expect(2, R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
               "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})",
         "zero_hpz_partition_size: got 2 with tensor or sequence parallelism");
}

}  // namespace
}  // namespace zero::test::tensor_parallel_test
