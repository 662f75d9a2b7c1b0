// Training on a mesh: models cut over tensor-parallel ranks, with ZeRO over the data-parallel ones. The reference is a
// plain loop over one whole module in the test. Ranks are processes.
#include <gtest/gtest.h>
#include <zero/zero.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "examples/megatron_gpt.h"
#include "models/gpt.h"
#include "soundness/ranks.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::mesh_test {
namespace {

constexpr int kBatch = 3, kTokens = 5;

at::Tensor draw(std::vector<std::int64_t> sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions());
}

// --- modules that know nothing of ranks ---------------------------------------------------------

// Linears with a 2-dimensional input, which libtorch computes as addmm.
struct FlatMlpImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, middle{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  FlatMlpImpl() {
    up = register_module("up", torch::nn::Linear(6, 14));
    middle = register_module("middle", torch::nn::Linear(14, 9));
    down = register_module("down", torch::nn::Linear(9, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({9})));
  }
  at::Tensor forward(const at::Tensor& x) {
    return down(norm(middle(torch::tanh(up(x.flatten(0, 1)))))).view({x.size(0), x.size(1), 4});
  }
};
TORCH_MODULE(FlatMlp);

// Two column layers with one input, whose product goes into a row layer.
struct GatedImpl : torch::nn::Module {
  torch::nn::Linear gate{nullptr}, up{nullptr}, down{nullptr};
  GatedImpl() {
    gate = register_module("gate", torch::nn::Linear(torch::nn::LinearOptions(6, 10).bias(false)));
    up = register_module("up", torch::nn::Linear(6, 10));
    down = register_module("down", torch::nn::Linear(10, 6));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::silu(gate(x)) * up(x)); }
};
TORCH_MODULE(Gated);

// Grouped-query attention: 8 query heads of width 3, 4 heads of keys and values; k and v are one fused weight.
struct GroupedImpl : torch::nn::Module {
  torch::nn::Linear q{nullptr}, kv{nullptr}, out{nullptr};
  GroupedImpl() {
    q = register_module("q", torch::nn::Linear(6, 24));
    kv = register_module("kv", torch::nn::Linear(6, 24));
    out = register_module("out", torch::nn::Linear(24, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto b = x.size(0), s = x.size(1);
    const auto heads = [&](const at::Tensor& y) { return y.view({b, s, -1, 3}).transpose(1, 2); };
    const auto queries = heads(q(x));
    const auto both = kv(x).chunk(2, -1);
    const auto keys = heads(both[0]).repeat_interleave(2, 1), values = heads(both[1]).repeat_interleave(2, 1);
    const auto weights = torch::softmax(queries.matmul(keys.transpose(-1, -2)) / std::sqrt(3.0), -1);
    return x + out(weights.matmul(values).transpose(1, 2).reshape({b, s, -1}));
  }
};
TORCH_MODULE(Grouped);

// A model of one list of layers, which are its units.
template <class Layer>
struct StackImpl : torch::nn::Module {
  torch::nn::ModuleList layers{nullptr};
  StackImpl() {
    layers = register_module("layers", torch::nn::ModuleList());
    layers->push_back(Layer());
    layers->push_back(Layer());
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<typename Layer::Impl>()->forward(x);
    return x;
  }
};

struct Model {
  const char* name;
  const char* plan;  // layer_specs
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module&, std::uint64_t seed)> loss;
};

at::ScalarType dtype_of(const torch::nn::Module& module) { return module.parameters().front().scalar_type(); }

template <class M>
at::Tensor loss_of_features(torch::nn::Module& module, std::uint64_t seed, double out) {
  const auto x = draw({kBatch, kTokens, 6}, seed);
  return (dynamic_cast<M&>(module).forward(x.to(dtype_of(module))).to(at::kFloat) - out).pow(2).mean();
}

template <class M>
at::Tensor loss_of_text(torch::nn::Module& module, std::uint64_t seed) {
  auto& gpt = dynamic_cast<M&>(module);
  const auto tokens = at::randint(0, 23, {kBatch, kTokens + 1}, at::detail::createCPUGenerator(seed), at::kLong);
  return gpt.forward(tokens.narrow(1, 0, kTokens).contiguous(), tokens.narrow(1, 1, kTokens).contiguous());
}

models::GptConfig gpt_config(bool tied) {
  return {.layers = 2, .hidden = 24, .heads = 6, .sequence = 8, .vocabulary = 23, .tied_output = tied};
}

const std::vector<Model>& models_() {
  static const std::vector<Model> all{
      {"flat",
       R"([{"patterns": ["up\\.weight"], "partition_type": "column"},
           {"patterns": ["middle\\.weight"], "partition_type": "row"},
           {"patterns": ["down\\.weight"], "partition_type": "column", "gather_output": true},
           {"patterns": [".*norm.*"], "partition_type": "skip"}])",
       [] { return std::make_shared<FlatMlpImpl>(); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_features<FlatMlpImpl>(m, seed, 0.5); }},
      {"gated",
       R"([{"patterns": [".*\\.(gate|up)\\.weight"], "partition_type": "column"},
           {"patterns": [".*\\.down\\.weight"], "partition_type": "row"}])",
       [] { return std::make_shared<StackImpl<Gated>>(); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_features<StackImpl<Gated>>(m, seed, 0.3); }},
      {"grouped",
       R"([{"patterns": [".*\\.q\\.weight"], "partition_type": "column", "multiple": 6},
           {"patterns": [".*\\.kv\\.weight"], "partition_type": "column", "shape": [2, -1], "multiple": 3},
           {"patterns": [".*\\.out\\.weight"], "partition_type": "row", "multiple": 6}])",
       [] { return std::make_shared<StackImpl<Grouped>>(); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_features<StackImpl<Grouped>>(m, seed, 0.3); }},
      {"gpt", nullptr, [] { return std::make_shared<models::GptImpl>(gpt_config(true)); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_text<models::GptImpl>(m, seed); }}};
  return all;
}

void fill(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::uint64_t seed = 1;
  for (auto& item : module.named_parameters()) {
    auto& p = item.value();
    p.copy_(draw(p.sizes().vec(), ++seed) * 0.2 + (p.dim() == 1 ? 0.3 : 0.0));
  }
}

std::shared_ptr<torch::nn::Module> make_model(const Model& model) {
  auto module = model.make();
  fill(*module);
  return module;
}

struct Case {
  const Model* model;
  int t = 2, u = 1, stage = 0, accumulation = 1;
  std::string recipe = "fp32", extra{}, zero{};
  double clip = 0.05;

  Options options() const {
    std::ostringstream out;
    out << R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": )" << accumulation
        << R"(, "gradient_clipping": )" << clip
        << R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.001, "weight_decay": 0.1}}, "zero_optimization": {"stage": )"
        << stage << zero << "}, \"sequence_parallel_size\": " << u << R"(, "tensor_parallel": {"autotp_size": )" << t;
    if (model->plan)
      out << R"(, "partition_config": {"use_default_specs": false, "layer_specs": )" << model->plan << "}";
    else
      out << R"(, "partition_config": {"layer_specs": [{"patterns": ["blocks\\.\\d+\\.qkv\\.weight"],
                 "partition_type": "column", "shape": [3, -1], "multiple": 4},
                 {"patterns": ["blocks\\.\\d+\\.projection\\.weight"], "partition_type": "row", "multiple": 4}]},
                 "preset_model": "gpt")";
    out << "}";
    if (recipe != "fp32") out << ", \"" << recipe << R"(": {"enabled": true})";
    out << extra << "}";
    return Options::from_json(out.str());
  }
};

struct Result {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> masters;
  std::string hash;
};

constexpr int kSteps = 5;
std::uint64_t seed_of(int step, int micro, int data_rank) { return 1000 + 100 * step + 10 * micro + data_rank; }

Result train(const Case& c, const std::shared_ptr<Communicator>& comm) {
  auto module = make_model(*c.model);
  Engine engine(module, c.options(), comm);
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < c.accumulation; ++micro) {
      const auto loss = c.model->loss(*module, seed_of(step, micro, engine.mesh().rank("dp")));
      result.losses.push_back(loss.item<double>());
      engine.backward(loss);
      const auto done = engine.step();
      if (done.updated) result.norms.push_back(done.grad_norm);
    }
  }
  result.masters = engine.full_state_dict();
  result.hash = engine.state_hash();
  return result;
}

// The reference, of one process: AdamW in fp64 on gradients of a whole module in fp32.
Result train_by_hand(const Case& c, int data_ranks, int own) {
  auto module = make_model(*c.model);
  const auto named = module->named_parameters();
  std::vector<at::Tensor> masters, first, second;
  for (const auto& item : named) {
    masters.push_back(item.value().detach().to(at::kDouble));
    first.push_back(at::zeros_like(masters.back()));
    second.push_back(at::zeros_like(masters.back()));
  }
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> gradients;
    for (const auto& master : masters) gradients.push_back(at::zeros_like(master));
    for (int micro = 0; micro < c.accumulation; ++micro)
      for (int d = 0; d < data_ranks; ++d) {
        module->zero_grad();
        const auto loss = c.model->loss(*module, seed_of(step, micro, d));
        if (d == own) result.losses.push_back(loss.item<double>());
        loss.backward();
        for (std::size_t i = 0; i < masters.size(); ++i) gradients[i] += named[i].value().grad().to(at::kDouble);
      }
    double squares = 0;
    for (auto& gradient : gradients) {
      gradient /= c.accumulation * data_ranks;
      squares += gradient.pow(2).sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    result.norms.push_back(norm);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters.size(); ++i) {
      const auto gradient = gradients[i] * (c.clip > 0 && norm > c.clip ? c.clip / (norm + 1e-6) : 1.0);
      first[i] = 0.9 * first[i] + 0.1 * gradient;
      second[i] = 0.999 * second[i] + 0.001 * gradient * gradient;
      const auto mean = first[i] / (1 - std::pow(0.9, step + 1)), square = second[i] / (1 - std::pow(0.999, step + 1));
      masters[i] -= 0.01 * (mean / (square.sqrt() + 0.001) + 0.1 * masters[i]);
      named[i].value().copy_(masters[i]);
    }
  }
  for (std::size_t i = 0; i < masters.size(); ++i) result.masters[named[i].key()] = masters[i];
  return result;
}

double apart(const std::vector<double>& a, const std::vector<double>& b) {
  require(a.size() == b.size(), "as many numbers");
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return most;
}

void require_close(double got, double limit, const std::string& what) {
  require(got < limit, what + ": apart by " + std::to_string(got));
}

void compare(const Result& got, const Result& wanted, const Case& c, const Communicator& comm) {
  const double tolerance = c.recipe == "fp32" ? 1e-5 : 2e-2;
  const std::string where = std::string(c.model->name) + " t " + std::to_string(c.t) + " stage " +
                            std::to_string(c.stage) + " " + c.recipe + " rank " + std::to_string(comm.rank()) + " ";
  require_close(apart(got.losses, wanted.losses), tolerance, where + "losses");
  require_close(apart(got.norms, wanted.norms), 2 * tolerance, where + "norms");
  if (comm.rank() != 0) return;
  require(got.masters.size() == wanted.masters.size(), where + "names of parameters");
  const auto before = make_model(*c.model);
  for (const auto& item : before->named_parameters()) {
    const auto &a = got.masters.at(item.key()).to(at::kDouble), &b = wanted.masters.at(item.key());
    require(a.sizes() == b.sizes(), where + item.key() + " has another shape");
    const double update = (b - item.value().detach().to(at::kDouble)).norm().item<double>();
    require_close((a - b).norm().item<double>() / update, c.recipe == "fp32" ? 1e-3 : 0.1,
                  where + "update of " + item.key());
  }
}

// All models at all stages: as the whole model in one process, and the same state at every stage.
void check_models(const std::shared_ptr<Communicator>& comm, int t) {
  at::set_num_threads(1);
  const int data_ranks = comm->size() / t, own = comm->rank() / t;
  for (const auto& model : models_()) {
    for (const std::string recipe : {"fp32", "bf16"}) {
      for (const int accumulation : {1, 2}) {
        Case c{.model = &model, .t = t, .accumulation = accumulation, .recipe = recipe};
        const auto wanted = train_by_hand(c, data_ranks, own);
        std::string hash;
        for (c.stage = 0; c.stage <= 3; ++c.stage) {
          const auto got = train(c, comm);
          compare(got, wanted, c, *comm);
          // With accumulation, stages 0 and 1 sum micro-batches before ranks, stages 2 and 3 after.
          if (accumulation > 1 && c.stage == 2) hash.clear();
          if (hash.empty()) hash = got.hash;
          require(got.hash == hash, std::string(model.name) + ": another state at stage " + std::to_string(c.stage));
        }
      }
    }
  }
}

void expect_passed(const Place& place, const Body& body) {
  EXPECT_EQ(run_at(place,
                   [&](const auto& comm) {
                     at::set_num_threads(1);
                     body(comm);
                   }),
            "")
      << name_of(place);
}

TEST(Mesh, EqualsOneWholeModel) {
  expect_passed({"shm", 2}, [](const auto& comm) { check_models(comm, 2); });
  expect_passed({"shm", 4}, [](const auto& comm) { check_models(comm, 2); });
  expect_passed({"shm", 3}, [](const auto& comm) { check_models(comm, 3); });
}

const Model& gpt_model() { return models_().back(); }

// --- the same state everywhere ------------------------------------------------------------------

// Stages, tiers and transports: one state for one mesh and recipe.
TEST(Mesh, OneStateOverTransportsAndTiers) {
  const TempFolder folder;
  const auto file = folder.path() / "hash";
  for (const Place place : {Place{"shm", 4}, Place{"gloo", 4}, Place{"thread", 4}})
    expect_passed(place, [&](const auto& comm) {
      std::string known;
      std::getline(std::ifstream(file), known);
      const auto check = [&](const Case& c, const std::string& what) {
        const auto hash = train(c, comm).hash;
        if (known.empty()) known = hash;
        require(hash == known, "another state with " + what);
      };
      for (int stage = 0; stage <= 3; ++stage)
        check({.model = &gpt_model(), .stage = stage, .recipe = "bf16"}, "stage " + std::to_string(stage));
      const auto offload = [&](const std::string& zero) {
        Case c{.model = &gpt_model(), .stage = 3, .recipe = "bf16"};
        c.zero = zero;
        check(c, zero);
      };
      offload(R"(, "offload_optimizer": {"device": "cpu"})");
      offload(R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.path().string() +
              R"("}, "offload_param": {"device": "nvme", "nvme_path": ")" + folder.path().string() + R"("})");
      offload(R"(, "stage3_prefetch_bucket_size": 0, "overlap_comm": false)");
      comm->barrier();
      if (comm->rank() == 0) std::ofstream(file) << known << "\n";
    });
}

// --- initial values -----------------------------------------------------------------------------

TEST(Mesh, InitialValuesAreThoseOfTheWholeModel) {
  expect_passed({"shm", 3}, [](const auto& comm) {
    torch::manual_seed(5);
    const auto plain = std::make_shared<models::GptImpl>(gpt_config(true));
    for (const bool deferred : {false, true}) {
      torch::manual_seed(5);
      const auto module = deferred ? zero::build([] { return models::Gpt(gpt_config(true)); }).ptr()
                                   : models::Gpt(gpt_config(true)).ptr();
      Case c{.model = &gpt_model(), .t = 3, .stage = 3};
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module), c.options(), comm);
      const auto masters = engine.full_state_dict();
      if (comm->rank() != 0) continue;
      for (const auto& item : plain->named_parameters())
        require(masters.at(item.key()).equal(item.value().detach()),
                item.key() + (deferred ? " deferred" : " eager") + " has other initial values");
    }
  });
}

// --- parameters by name -------------------------------------------------------------------------

TEST(Mesh, StatesAndGradientsAreWhole) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const auto& comm) {
    for (const int stage : {1, 3}) {
      Case c{.model = &gpt_model(), .stage = stage};
      const auto module = make_model(*c.model), plain = make_model(*c.model);
      Engine engine(module, c.options(), comm);
      engine.backward(c.model->loss(*module, seed_of(0, 0, engine.mesh().rank("dp"))));
      for (int d = 0; d < 2; ++d) (c.model->loss(*plain, seed_of(0, 0, d)) / 2).backward();
      for (const auto& item : plain->named_parameters()) {
        const auto& name = item.key();
        const auto& grad = item.value().grad();
        require(
            (engine.gradient(name) - grad).norm().template item<double>() <= 1e-5 * grad.norm().template item<double>(),
            "gradient of " + name);
        require(engine.parameter_state(name).equal(item.value().detach()), "master of " + name);
      }
      engine.step();
      // Whole values in, parts on every rank, whole values out.
      const std::string name = "blocks.1.qkv.weight";
      const auto values = draw({72, 24}, 77);
      engine.set_parameter_state(name, "exp_avg", values);
      engine.set_parameter_state(name, "master", values);
      require(engine.parameter_state(name, "exp_avg").equal(values), "exp_avg that was set");
      require(engine.parameter_state(name).equal(values), "master that was set");
      {
        const auto scope = engine.gathered_parameters({"blocks.1.*"}, /*modify=*/true);
        const at::NoGradGuard no_grad;
        for (auto& item : module->named_parameters()) {
          if (item.key() == "blocks.1.norm1.weight" && comm->rank() == 0) item.value().fill_(2);
          if (item.key() == name && engine.mesh().rank("dp_sp") == 0) item.value().fill_(1 + engine.mesh().rank("tp"));
        }
      }
      const auto changed = engine.parameter_state(name);
      require(changed.narrow(0, 0, 12).eq(1).all().template item<bool>() &&
                  changed.narrow(0, 12, 12).eq(2).all().template item<bool>(),
              "each rank's part was written");
      require(engine.parameter_state("blocks.1.norm1.weight").eq(2).all().template item<bool>(),
              "rank 0's value everywhere");
      engine.backward(c.model->loss(*module, 9));
      engine.step();
      engine.save_checkpoint(folder.path(), "stage" + std::to_string(stage));  // replicas are still equal
    }
  });
}

// --- checkpoints --------------------------------------------------------------------------------

TEST(Mesh, CheckpointsHoldWholeTensors) {
  for (const int stage : {0, 3}) {
    const TempFolder folder;
    expect_passed({"shm", 4}, [&](const auto& comm) {
      Case c{.model = &gpt_model(), .stage = stage, .recipe = "bf16"};
      const auto run = [&](Engine& engine, torch::nn::Module& module, int from) {
        for (int step = from; step < from + 3; ++step) {
          engine.backward(c.model->loss(module, seed_of(step, 0, engine.mesh().rank("dp"))));
          engine.step();
        }
      };
      std::string later;
      {
        const auto module = make_model(*c.model);
        Engine engine(module, c.options(), comm);
        run(engine, *module, 0);
        engine.save_checkpoint(folder.path(), "a");
        run(engine, *module, 3);
        later = engine.state_hash();
      }
      const auto module = c.model->make();
      c.stage = 3 - stage;  // another stage loads it, too
      Engine engine(module, c.options(), comm);
      require(engine.load_checkpoint(folder.path()) == "a", "the tag");
      run(engine, *module, 3);
      require(engine.state_hash() == later, "another state after loading");
    });
    std::stringstream manifest;
    manifest << std::ifstream(folder.path() / "a" / "manifest.json").rdbuf();
    for (const char* part : {"\"min_reader\": 3", "\"tp\": 2", "\"slices\""})
      EXPECT_NE(manifest.str().find(part), std::string::npos) << part;
    // The shape of the whole weight; q, k and v are one box each in a slice.
    EXPECT_NE(std::regex_replace(manifest.str(), std::regex("\\s"), "")
                  .find(R"("shape":[72,24],"slices":[[{"size":[12,24],"start":[0,0]},{"size":[12,24],"start":[24,0]},)"
                        R"({"size":[12,24],"start":[48,0]}],[)"),
              std::string::npos);
    expect_passed({"shm", 4}, [&](const auto& comm) {
      Case c{.model = &gpt_model(), .t = 4, .stage = stage, .recipe = "bf16"};
      Engine engine(c.model->make(), c.options(), comm);
      try {
        engine.load_checkpoint(folder.path());
      } catch (const ConfigError& e) {
        return require(contains(e.what(), "was saved with sequence_parallel_size 1 and tensor_parallel.autotp_size 2"),
                       e.what());
      }
      require(false, "expected a ConfigError");
    });
  }
}

// --- random numbers -----------------------------------------------------------------------------

models::GptConfig dropout_config() {
  auto config = gpt_config(true);
  config.dropout = 0.2;
  return config;
}

// Residual dropout is the same on all tensor-parallel ranks, so their losses and replicated parameters stay equal. With
// recomputation the same masks are drawn again.
TEST(Mesh, Dropout) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    std::string known;
    for (const bool checkpointed : {false, true}) {
      torch::manual_seed(11);
      const auto module = std::make_shared<models::GptImpl>(dropout_config());
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

TEST(Mesh, RandomNumbersInAndOutOfSplitRegions) {
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

TEST(Mesh, PartitionedActivations) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const auto& comm) {
    const auto train_segments = [&](const std::string& activations, std::uint64_t& gathered) {
      const auto module = std::dynamic_pointer_cast<models::GptImpl>(make_model(gpt_model()));
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

TEST(Mesh, TrafficOfTensorParallelism) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    for (const int segments : {0, 2, 1}) {
      const auto module = std::dynamic_pointer_cast<models::GptImpl>(make_model(gpt_model()));
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
TEST(Mesh, LayersWithSequenceRegions) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    const MegatronGptConfig config{.layers = 2, .hidden = 24, .heads = 6, .sequence = 8, .vocabulary = 22};
    std::vector<std::vector<double>> losses;
    for (const int variant : {0, 1, 2}) {  // the built-in GPT in one process; without regions; with regions
      std::shared_ptr<torch::nn::Module> module;
      std::function<at::Tensor(const at::Tensor&)> forward;
      if (variant == 0) {
        auto gpt = std::make_shared<models::GptImpl>(models::GptConfig{
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
          return models::cross_entropy(forward(text.narrow(1, 0, 8).contiguous()).flatten(0, 1),
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

TEST(Mesh, SequenceRegionsNeedAMultipleOfTokens) {
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

TEST(Mesh, OperatorsThatPartsDoNotSupport) {
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

TEST(Mesh, FaultsAtConstruction) {
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
}  // namespace zero::test::mesh_test
