// Training on a mesh: models cut over tensor-parallel ranks, with ZeRO over the data-parallel ones. The reference is a
// plain loop over one whole module. Ranks are processes, or threads of one.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>

#include "formats/manifest.h"
#include "models/gpt.h"
#include "parity/mesh_problems.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "support/require.h"

namespace zero::test::mesh_test {
namespace {

using namespace zero::test::mesh;

// All models at all stages: as the whole model in one process, and the same state at every stage. Sequence parallelism
// needs attention that knows of it, which is the GPT's.
void check_models(const std::shared_ptr<Communicator>& comm, int t, int u = 1) {
  const int data_ranks = comm->size() / t / u, own = comm->rank() / t / u;
  OneIn part(u > 1 ? 3 : 5);
  for (const auto& model : mesh::models()) {
    if (u > 1 && &model != &gpt_model()) continue;
    for (const std::string recipe : {"fp32", "bf16"}) {
      for (const int accumulation : {1, 3}) {
        if (!part.take()) continue;
        Case c{.model = &model, .t = t, .u = u, .accumulation = accumulation, .recipe = recipe};
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

TEST(Mesh, EqualsOneWholeModel) {
  OneIn part(3);
  for (const auto& [world, t] : {std::pair{4, 2}, {4, 4}, {2, 2}, {3, 3}})
    if (part.take()) expect_passed({"shm", world}, [t](const auto& comm) { check_models(comm, t); });
}

TEST(Mesh, SequenceParallelRanksEqualOneWholeModel) {
  expect_passed({"shm", 3}, [](const auto& comm) { check_models(comm, 1, 3); });
  for (const int t : {1, 2})
    if (t == 2 || nightly()) expect_passed({"shm", 4}, [t](const auto& comm) { check_models(comm, t, 2); });
}

// An unchanged model would attend to a stretch of the tokens only.
TEST(Mesh, AModelThatDoesNotKnowOfSequenceParallelism) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    for (const bool knows : {true, false}) {
      std::string log;
      set_log_sink([&](LogLevel level, std::string_view text) {
        if (level == LogLevel::Warning) log += text;
      });
      Case c{.model = &gpt_model(), .t = 1, .u = 2, .steps = 1};
      if (knows) {
        train(c, comm);
      } else {
        const auto module = make_model(*c.model);
        Engine engine(module, c.options(), comm);
        engine.backward(c.model->loss(*module, 1));
        engine.step();
      }
      set_log_sink({});
      require(contains(log, "the model exchanged no tokens in its first forward") == (!knows && comm->rank() == 0),
              log);
    }
  });
}

// Errors do not grow with the steps. Losses of 50 steps, and in fp32 the gradients of each.
void check_fifty_steps(const std::shared_ptr<Communicator>& comm, int t, int u, int stage) {
  for (const auto& model : mesh::models())
    for (const char* recipe : {"fp32", "bf16"}) {
      if (u > 1 && &model != &gpt_model()) continue;
      Case c{.model = &model, .t = t, .u = u, .stage = stage, .recipe = recipe, .steps = 50};
      c.with_gradients = c.recipe == "fp32";
      const auto got = train(c, comm);
      const auto wanted = train_by_hand(c, comm->size() / t / u, comm->rank() / t / u);
      const auto where = std::string(model.name) + " t " + std::to_string(t) + " " + c.recipe + ": ";
      const double losses = apart(got.losses, wanted.losses);
      require(losses < (c.with_gradients ? 1e-5 : 1e-2), where + "losses: apart by " + std::to_string(losses));
      for (std::size_t step = 0; step < wanted.gradients.size(); ++step)
        for (const auto& [name, gradient] : wanted.gradients[step])
          require(
              (got.gradients[step].at(name) - gradient).norm().item<double>() < 1e-5 * gradient.norm().item<double>(),
              where + "gradient of " + name + " in step " + std::to_string(step));
    }
}

TEST(Mesh, FiftyStepsEqualOneWholeModel) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    check_fifty_steps(comm, 2, 1, 3);
    check_fifty_steps(comm, 2, 2, 3);
    check_fifty_steps(comm, 4, 1, 1);
  });
  expect_passed({"shm", 3}, [](const auto& comm) { check_fifty_steps(comm, 3, 1, 2); });
}

using Gradients = std::map<std::string, at::Tensor>;

// The mean over data-parallel ranks, of one process in which the whole model has these parameters.
Gradients gradients_by_hand(const Model& model, const Gradients& parameters, at::ScalarType dtype, int step,
                            int ranks) {
  const auto module = make_model(model);
  module->to(dtype);
  Gradients all;
  for (auto& item : module->named_parameters()) {
    const at::NoGradGuard no_grad;
    item.value().copy_(parameters.at(item.key()));
    all[item.key()] = at::zeros(item.value().sizes());
  }
  for (int d = 0; d < ranks; ++d) {
    module->zero_grad();
    model.loss(*module, seed_of(step, 0, d)).backward();
    for (auto& item : module->named_parameters()) all[item.key()] += item.value().grad().to(at::kFloat) / ranks;
  }
  return all;
}

// Gradients in bf16 are apart from those in fp32 by some percent, of one whole model as well. Cut, by no more.
TEST(Mesh, GradientsInBf16AreAsCloseAsOneWholeModels) {
  for (const auto& [ranks, t] : {std::pair{4, 2}, {4, 4}, {3, 3}})
    expect_passed({"shm", ranks}, [t](const auto& comm) {
      for (const auto& model : mesh::models()) {
        Case c{.model = &model, .t = t, .stage = 2, .recipe = "bf16"};
        const auto module = make_model(model);
        Engine engine(module, c.options(), comm);
        const int data_ranks = engine.mesh().size("dp");
        std::map<std::string, double> cut, whole;  // squares of what they are apart by
        for (int step = 0; step < 20; ++step) {
          Gradients parameters;
          for (const auto& item : module->named_parameters())
            parameters[item.key()] = engine.parameter_state(item.key()).to(at::kBFloat16);
          engine.backward(model.loss(*module, seed_of(step, 0, engine.mesh().rank("dp"))));
          const auto exact = gradients_by_hand(model, parameters, at::kFloat, step, data_ranks),
                     rounded = gradients_by_hand(model, parameters, at::kBFloat16, step, data_ranks);
          for (const auto& [name, gradient] : exact) {
            cut[name] += (engine.gradient(name) - gradient).pow(2).sum().template item<double>();
            whole[name] += (rounded.at(name) - gradient).pow(2).sum().template item<double>();
          }
          engine.step();
        }
        double of_cut = 0, of_whole = 0;
        for (const auto& [name, squares] : cut) {
          const double ratio = std::sqrt(squares / whole.at(name));
          require(ratio < 2, std::string(model.name) + ": errors of " + name + " are " + std::to_string(ratio) +
                                 " times those of the whole model");
          of_cut += squares, of_whole += whole.at(name);
        }
        const double ratio = std::sqrt(of_cut / of_whole);
        require(ratio < 1.25,
                std::string(model.name) + ": errors are " + std::to_string(ratio) + " times those of the whole model");
      }
    });
}

// --- sequence and tensor parallelism of one attention -------------------------------------------

// Causal grouped-query attention, 16 query heads of width 3 over 8 heads of keys and values. Over sequence-parallel
// ranks of `mesh`, if there is one.
struct GroupedAttentionImpl : torch::nn::Module {
  torch::nn::Linear q{nullptr}, kv{nullptr}, out{nullptr};
  const Mesh* mesh = nullptr;
  GroupedAttentionImpl() {
    q = register_module("q", torch::nn::Linear(6, 48));
    kv = register_module("kv", torch::nn::Linear(6, 48));
    out = register_module("out", torch::nn::Linear(48, 6));
    fill(*this);
  }
  // x: [batch, tokens or a stretch of them, features]; tokens: of the whole.
  at::Tensor forward(const at::Tensor& x, std::int64_t tokens) {
    const auto heads = [&](const at::Tensor& y) { return y.view({x.size(0), x.size(1), -1, 3}); };
    const auto both = kv(x).chunk(2, -1);
    const auto local = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
      const auto of = [&](const at::Tensor& y) {
        return y.transpose(1, 2).repeat_interleave(a.size(2) / y.size(2), 1);
      };
      return at::scaled_dot_product_attention(of(a), of(b), of(c), {}, 0, /*is_causal=*/true).transpose(1, 2);
    };
    const auto queries = heads(q(x)), keys = heads(both[0]), values = heads(both[1]);
    const auto mixed =
        mesh ? attention_over_heads(*mesh, queries, keys, values, local, tokens) : local(queries, keys, values);
    return out(mixed.reshape({x.size(0), x.size(1), -1}));
  }
};

// t 2, u 2: whole groups on each rank. t 2, u 3: 2, 3 and 3 of 8 query heads, so groups are divided over
// sequence-parallel ranks. t 3: 4, 6 and 6 query heads a rank.
TEST(Mesh, GroupedQueryAttentionOverTokensAndWeights) {
  for (const auto& [t, u] : {std::pair{2, 2}, {3, 2}, {2, 3}})
    expect_passed({"shm", t * u}, [t, u](const auto& comm) {
      for (const int stage : {1, 3})
        for (const std::int64_t tokens : {6, 7}) {
          const auto module = std::make_shared<GroupedAttentionImpl>(),
                     plain = std::make_shared<GroupedAttentionImpl>();
          Engine engine(
              std::static_pointer_cast<torch::nn::Module>(module),
              Options::build().train_micro_batch_size(2).adamw().stage(stage).sequence_parallel(u).tensor_parallel(
                  t, {.layer_specs = {{.patterns = {"q"}, .multiple = 6},
                                      {.patterns = {"kv"}, .pieces = {24, 24}, .multiple = 3},
                                      {.patterns = {"out"}, .partition_type = "row", .multiple = 6}}}),
              comm);
          module->mesh = &engine.mesh();
          const auto [begin, end] = engine.mesh().tokens(tokens);
          const auto x = draw({2, tokens, 6}, 1), w = draw({2, tokens, 6}, 2);
          const auto stretch = [&, from = begin, to = end](const at::Tensor& y) {
            return y.narrow(1, from, to - from);
          };
          auto own = stretch(x).contiguous().requires_grad_(), whole = x.clone().requires_grad_();
          const auto got = module->forward(own, tokens), wanted = plain->forward(whole, tokens);
          (wanted * w).sum().backward();
          engine.backward((got * stretch(w)).sum() * u);  // the mean over sequence-parallel ranks is the sum
          const auto require_close = [&](const at::Tensor& a, const at::Tensor& b, const std::string& what) {
            const double apart = (a - b).norm().template item<double>() / b.norm().template item<double>();
            require(apart < 1e-5, what + " with t " + std::to_string(t) + ", u " + std::to_string(u) + ", stage " +
                                      std::to_string(stage) + ": apart by " + std::to_string(apart));
          };
          require_close(got.detach(), stretch(wanted.detach()), "output");
          require_close(own.grad(), stretch(whole.grad()) * u, "gradient of the input");
          for (const auto& item : plain->named_parameters())
            require_close(engine.gradient(item.key()), item.value().grad(), "gradient of " + item.key());
          engine.step();
        }
    });
}

// --- initial values -----------------------------------------------------------------------------

TEST(Mesh, InitialValuesAreThoseOfTheWholeModel) {
  expect_passed({"shm", 3}, [](const auto& comm) {
    torch::manual_seed(5);
    const auto plain = std::make_shared<::models::GptImpl>(gpt_config());
    for (const bool deferred : {false, true}) {
      torch::manual_seed(5);
      const auto module =
          deferred ? zero::build([] { return ::models::Gpt(gpt_config()); }).ptr() : ::models::Gpt(gpt_config()).ptr();
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

// Tensor-parallel ranks repeat a loss, so their tokens count once.
TEST(Mesh, TokensOfAMesh) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    Case c{.model = &gpt_model(), .stage = 2};
    const auto module = make_model(*c.model), plain = make_model(*c.model);
    Engine engine(module, c.options(), comm);
    const std::int64_t tokens[] = {100, 60};
    const auto loss_of = [&](torch::nn::Module& m, int d) {
      return c.model->loss(m, seed_of(0, 0, d)) * static_cast<double>(tokens[d]);
    };
    const int own = engine.mesh().rank("dp");
    engine.backward(loss_of(*module, own), {.tokens = tokens[own]});
    for (int d = 0; d < 2; ++d) (loss_of(*plain, d) / 160).backward();
    for (const auto& item : plain->named_parameters()) {
      const auto wanted = item.value().grad();
      require((engine.gradient(item.key()) - wanted).norm().template item<double>() <=
                  1e-5 * wanted.norm().template item<double>(),
              "gradient of " + item.key());
    }
  });
}

// The sum of what a rank's tokens count is `sum`, at any value of the parameter 1.
struct ScaleImpl : torch::nn::Module {
  at::Tensor scale = register_parameter("scale", at::ones({1}));
  at::Tensor forward(double sum) { return (scale * sum).sum(); }
};

// Sums of 250 and 90 over 100 and 60 tokens have the mean 2.125. The mean of their means, 2.5 and 1.5, is 2.
TEST(Mesh, EveryTokenCountsOnceHoweverManyARankHas) {
  struct Rank {
    double sum;
    std::int64_t tokens;
  };
  const struct {
    std::vector<Rank> ranks;
    double mean;
  } cases[] = {{{{250, 100}, {90, 60}}, 2.125},
               {{{250, 100}, {90, 60}, {0, 0}, {0, 0}}, 2.125},
               {{{250, 100}, {90, 60}, {7, 1}, {-27, 159}}, 1},
               {{{0, 0}, {0, 0}}, 0}};
  for (const auto& c : cases)
    for (const int u : {1, 2})
      expect_passed({"shm", static_cast<int>(c.ranks.size())}, [&, u](const auto& comm) {
        for (int stage = 0; stage <= 3; ++stage)
          for (const bool tokens_in_all : {true, false}) {  // of two micro-batches; the second may have none
            const auto module = std::make_shared<ScaleImpl>();
            Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                          Options::build()
                              .train_micro_batch_size(1)
                              .gradient_accumulation_steps(2)
                              .sgd({.lr = 0.25})
                              .gradient_clipping(0)
                              .stage(stage)
                              .sequence_parallel(u),
                          comm);
            const auto own = c.ranks[static_cast<std::size_t>(comm->rank())];
            engine.backward(module->forward(own.sum), {.tokens = own.tokens});
            engine.step();
            if (tokens_in_all)
              engine.backward(module->forward(2 * own.sum), {.tokens = own.tokens});
            else
              engine.backward(module->forward(0), {.tokens = 0});
            const double wanted = (tokens_in_all ? 1.5 : 0.5) * c.mean;
            const double got = engine.gradient("scale").template item<double>();
            require(std::abs(got - wanted) <= 3e-7 * std::abs(wanted),
                    "gradient " + std::to_string(got) + ", expected " + std::to_string(wanted) + " with u " +
                        std::to_string(u) + " at stage " + std::to_string(stage));
            engine.step();
            const double updated = engine.parameter_state("scale").template item<double>();
            require(std::abs(updated - (1 - 0.25 * wanted)) < 1e-6, "updated to " + std::to_string(updated));
          }
      });
}

// 7 tokens of 3 samples, of which some do not count: another number on every rank, none on the first.
TEST(Mesh, TokensThatDoNotCountOfUnevenStretches) {
  constexpr std::int64_t tokens = 7;
  const auto text_of = [](int d) {
    const auto seed = static_cast<std::uint64_t>(d);
    const auto text = at::randint(0, 23, {3, tokens + 1}, at::detail::createCPUGenerator(seed), at::kLong);
    auto targets = text.narrow(1, 1, tokens).clone();
    targets.masked_fill_(draw({3, tokens}, seed).gt(0.5), -100);
    if (d == 0) targets.narrow(1, 0, tokens / 2).fill_(-100);
    return std::pair{text.narrow(1, 0, tokens), targets};
  };
  const auto sum_of = [](torch::nn::Module& module, const at::Tensor& text, const at::Tensor& targets) {
    const auto logits = dynamic_cast<::models::GptImpl&>(module).forward(text.contiguous());
    return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), {}, at::Reduction::Sum);
  };
  for (const auto& [world, t, u] : {std::tuple{2, 1, 2}, {3, 1, 3}, {4, 1, 2}, {4, 2, 2}})
    expect_passed({"shm", world}, [&, t = t, u = u](const auto& comm) {
      for (const int stage : {0, 2, 3}) {
        Case c{.model = &gpt_model(), .t = t, .u = u, .stage = stage};
        const auto module = make_model(*c.model), plain = make_model(*c.model);
        Engine engine(module, c.options(), comm);
        divide_sequence(dynamic_cast<::models::GptImpl&>(*module), engine.mesh(), tokens);
        const auto [text, targets] = text_of(engine.mesh().rank("dp"));
        const auto [begin, end] = engine.mesh().tokens(tokens);
        const auto own = targets.narrow(1, begin, end - begin);
        engine.backward(sum_of(*module, text.narrow(1, begin, end - begin), own),
                        {.tokens = own.ne(-100).sum().template item<std::int64_t>()});
        at::Tensor sum = at::zeros({});
        std::int64_t all = 0;
        for (int d = 0; d < engine.mesh().size("dp"); ++d) {
          const auto [x, y] = text_of(d);
          sum = sum + sum_of(*plain, x, y);
          all += y.ne(-100).sum().template item<std::int64_t>();
        }
        (sum / all).backward();
        for (const auto& item : plain->named_parameters()) {
          const auto& wanted = item.value().grad();
          const double apart = ((engine.gradient(item.key()) - wanted).norm() / wanted.norm()).template item<double>();
          require(apart <= 1e-5, "gradient of " + item.key() + " is apart by " + std::to_string(apart) + " with t " +
                                     std::to_string(t) + ", u " + std::to_string(u) + " at stage " +
                                     std::to_string(stage));
        }
        engine.step();
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
    for (const char* part : {"\"min_reader\": 4", "\"tp\": 2", "\"slices\""})
      EXPECT_NE(manifest.str().find(part), std::string::npos) << part;
    // The shape of the whole weight; q, k and v are one box each in a slice.
    EXPECT_NE(std::regex_replace(manifest.str(), std::regex("\\s"), "")
                  .find(R"("shape":[72,24],"slices":[[{"size":[12,24],"start":[0,0]},{"size":[12,24],"start":[24,0]},)"
                        R"({"size":[12,24],"start":[48,0]}],[)"),
              std::string::npos);
  }
}

// How a test expects a parameter to be cut; dim -1: not at all.
struct Cutting {
  std::int64_t dim = -1, pieces = 1, multiple = 1;
};
Cutting cutting_of(const Model& model, const std::string& name) {
  const bool bias = name.ends_with("bias");
  const auto has = [&](const char* part) { return contains(name, part); };
  if (&model == &gpt_model()) {
    if (has("token")) return {.dim = 0};
    if (has("qkv")) return {.dim = 0, .pieces = 3, .multiple = 4};
    if (has(".up.")) return {.dim = 0};
    if (has("projection.weight")) return {.dim = 1, .multiple = 4};
    if (has("down.weight")) return {.dim = 1};
    return {};
  }
  if (has(".q.")) return {.dim = 0, .multiple = 6};
  if (has(".kv.")) return {.dim = 0, .pieces = 2, .multiple = 3};
  return has(".out.") && !bias ? Cutting{.dim = 1, .multiple = 6} : Cutting{};
}

// Names, whole shapes, and what each tensor-parallel rank holds: of each piece of n elements the multiples
// floor(j c / t) to floor((j + 1) c / t) of c.
void expect_manifest(const std::filesystem::path& file, const Case& c, int world) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  const auto dense = std::regex_replace(text.str(), std::regex("\\s"), "");
  EXPECT_NE(dense.find("\"mesh\":{\"dp\":" + std::to_string(world / c.t / c.u) + ",\"sp\":" + std::to_string(c.u) +
                       ",\"tp\":" + std::to_string(c.t) + "}"),
            std::string::npos);
  const auto manifest = formats::parse_manifest(text.str(), file.string());
  EXPECT_EQ(manifest.world, world);
  EXPECT_EQ(manifest.sequence, c.u);
  EXPECT_EQ(manifest.tensor, c.t);
  std::set<std::string> found, wanted;
  for (const auto& item : make_model(*c.model)->named_parameters())
    for (const char* kind : {"master", "opt.exp_avg", "opt.exp_avg_sq"}) wanted.insert(kind + (" " + item.key()));
  const auto shapes = make_model(*c.model)->named_parameters();
  for (const auto& tensor : manifest.tensors) {
    if (tensor.kind != "master" && !tensor.kind.starts_with("opt.")) continue;
    found.insert(tensor.kind + " " + tensor.name);
    const auto* const whole = shapes.find(tensor.name);
    ASSERT_NE(whole, nullptr) << tensor.name;
    EXPECT_EQ(tensor.shape, whole->sizes().vec()) << tensor.name;
    const auto cutting = cutting_of(*c.model, tensor.name);
    std::vector<std::vector<formats::Box>> slices;
    for (int j = 0; cutting.dim >= 0 && j < c.t; ++j) {
      slices.emplace_back();
      const auto dim = static_cast<std::size_t>(cutting.dim);
      const auto length = tensor.shape[dim] / cutting.pieces, blocks = length / cutting.multiple;
      for (std::int64_t piece = 0; piece < cutting.pieces; ++piece) {
        formats::Box box{std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape};
        const auto begin = j * blocks / c.t * cutting.multiple, end = (j + 1) * blocks / c.t * cutting.multiple;
        box.start[dim] = piece * length + begin;
        box.size[dim] = end - begin;
        slices.back().push_back(std::move(box));
      }
    }
    EXPECT_TRUE(tensor.slices == slices) << tensor.kind << " " << tensor.name << " is cut otherwise";
  }
  EXPECT_EQ(found, wanted);
}

// Every state has its bits after loading, and training continues as if nothing had been. Over sequence- and
// tensor-parallel ranks; over 3 ranks with 8 heads, 4 of them of keys and values.
TEST(Mesh, CheckpointsContinueBitForBit) {
  for (const auto& [model, world, t, u] : {std::tuple{&gpt_model(), 4, 2, 2}, {&mesh::models()[2], 3, 3, 1}})
    for (const auto& [from, to] : {std::pair{2, 2}, {0, 3}, {3, 0}}) {
      const TempFolder folder;
      const Case c{.model = model, .t = t, .u = u, .stage = from, .recipe = "bf16"};
      expect_passed({"shm", world}, [&, to = to](const auto& comm) {
        Case other = c;
        std::map<std::string, at::Tensor> saved;
        std::string hash, later;
        for (const bool loads : {false, true}) {
          if (loads) other.stage = to;
          const auto module = loads ? c.model->make() : make_model(*c.model);
          Engine engine(module, other.options(), comm);
          if (c.u > 1) divide_sequence(dynamic_cast<::models::GptImpl&>(*module), engine.mesh(), kTokens);
          const auto run = [&](int first) {
            for (int step = first; step < first + 2; ++step) {
              backward(engine, *module, other, seed_of(step, 0, engine.mesh().rank("dp")));
              engine.step();
            }
            return engine.state_hash();
          };
          if (loads) {
            require(engine.load_checkpoint(folder.path()) == "a", "the tag");
            require(engine.state_hash() == hash, "another state after loading");
          } else {
            hash = run(0);
            engine.save_checkpoint(folder.path(), "a");
          }
          for (const auto& item : module->named_parameters())
            for (const std::string state : {"master", "exp_avg", "exp_avg_sq"}) {
              const auto values = engine.parameter_state(item.key(), state);
              if (loads)
                require(values.equal(saved.at(state + " " + item.key())), state + " of " + item.key());
              else
                saved[state + " " + item.key()] = values;
            }
          const auto end = run(2);
          if (loads)
            require(end == later, "another state after two more steps");
          else
            later = end;
        }
      });
      expect_manifest(folder.path() / "a" / "manifest.json", c, world);
    }
}

}  // namespace
}  // namespace zero::test::mesh_test
