// Embeddings whose vocabulary is cut over tensor-parallel ranks: padding, ids outside of the vocabulary, and options
// that parts do not support. The reference is one whole module of torch.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <string>
#include <vector>

#include "parity/mesh_problems.h"
#include "support/require.h"

namespace zero::test::vocabulary_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;

constexpr std::int64_t kVocabulary = 11, kWidth = 6;

struct TextImpl : torch::nn::Module {
  torch::nn::Embedding token{nullptr};
  torch::nn::Linear body{nullptr};
  bool tied;
  explicit TextImpl(torch::nn::EmbeddingOptions options = {kVocabulary, kWidth}, bool tied = false) : tied(tied) {
    token = register_module("token", torch::nn::Embedding(options));
    body = register_module("body", torch::nn::Linear(kWidth, kWidth));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto y = torch::tanh(body(token(ids)));
    return tied ? torch::linear(y, token->weight) : y;
  }
};

Engine engine_of(const std::shared_ptr<TextImpl>& module, const Comm& comm, int t, int stage = 2) {
  return Engine(std::static_pointer_cast<torch::nn::Module>(module),
                Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
                  "zero_optimization": {"stage": )" +
                                   std::to_string(stage) + R"(}, "tensor_parallel": {"autotp_size": )" +
                                   std::to_string(t) + R"(, "partition_config": {"use_default_specs": false,
                  "layer_specs": [{"patterns": ["token"], "gather_output": true}]}}})"),
                comm);
}

at::Tensor ids_of(std::uint64_t seed, std::int64_t count = 24) {
  return at::randint(0, kVocabulary, {3, count / 3}, at::detail::createCPUGenerator(seed), at::kLong);
}

// --- padding ------------------------------------------------------------------------------------

// The row of the padding gets no gradient from the embedding; the rows at its place in the parts of other ranks do.
TEST(Vocabulary, PaddingGetsNoGradient) {
  for (const auto& [world, t] : {std::pair{4, 2}, {3, 3}, {4, 4}})
    expect_passed({"shm", world}, [t](const auto& comm) {
      for (int stage = 0; stage <= 3; ++stage)
        for (const std::int64_t padding :
             t == 2 ? std::vector<std::int64_t>{0, 4, -7} : std::vector<std::int64_t>{0, 1})
          for (const bool tied : {false, true}) {
            const auto options = torch::nn::EmbeddingOptions(kVocabulary, kWidth).padding_idx(padding);
            const auto module = std::make_shared<TextImpl>(options, tied),
                       plain = std::make_shared<TextImpl>(options, tied);
            auto engine = engine_of(module, comm, t, stage);
            const auto label = "padding " + std::to_string(padding) + " with t " + std::to_string(t) + ", stage " +
                               std::to_string(stage) + (tied ? ", tied" : "");
            const int ranks = engine.mesh().size("dp");
            const auto loss_of = [&](TextImpl& m, int d) {
              const auto ids = at::cat({ids_of(1 + static_cast<std::uint64_t>(d)).flatten(), at::arange(kVocabulary)});
              return m.forward(ids).pow(2).mean();
            };
            engine.backward(loss_of(*module, engine.mesh().rank("dp")));
            for (int d = 0; d < ranks; ++d) (loss_of(*plain, d) / ranks).backward();
            for (const auto& item : plain->named_parameters()) {
              const auto &got = engine.gradient(item.key()), &wanted = item.value().grad();
              require((got - wanted).norm().template item<double>() <= 1e-5 * wanted.norm().template item<double>(),
                      label + ": gradient of " + item.key());
            }
            const auto rows = engine.gradient("token.weight").abs().sum(1).ne(0);
            const auto row = padding < 0 ? padding + kVocabulary : padding;
            require(tied || (!rows[row].template item<bool>() && rows.sum().template item<std::int64_t>() == 10),
                    label + ": rows with gradients");
            const auto before = engine.parameter_state("token.weight");
            engine.step();
            require(tied || engine.parameter_state("token.weight")[row].equal(before[row]), label + ": it was updated");
          }
    });
}

// By the function, the padding may be a row of any rank.
TEST(Vocabulary, PaddingOfAnyRank) {
  for (const int t : {2, 3})
    expect_passed({"shm", t}, [t](const auto& comm) {
      const auto whole = draw({kVocabulary, kWidth}, 1), w = draw({3, 8, kWidth}, 2);
      const auto begin = kVocabulary * comm->rank() / t, end = kVocabulary * (comm->rank() + 1) / t;
      for (std::int64_t padding = 0; padding < kVocabulary; ++padding) {
        auto own = whole.narrow(0, begin, end - begin).clone().requires_grad_(), plain = whole.clone().requires_grad_();
        const auto ids = ids_of(static_cast<std::uint64_t>(padding));
        const auto got = tp::vocab_parallel_embedding(own, ids, comm, begin, kVocabulary, padding);
        const auto wanted = at::embedding(plain, ids, padding);
        (got * w).sum().backward();
        (wanted * w).sum().backward();
        require(got.equal(wanted), "rows with padding " + std::to_string(padding));
        require((own.grad() - plain.grad().narrow(0, begin, end - begin)).abs().max().template item<float>() < 1e-5,
                "gradient with padding " + std::to_string(padding));
      }
    });
}

// --- ids outside of the vocabulary --------------------------------------------------------------

std::string index_error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const c10::IndexError& e) {
    return e.what_without_backtrace();
  }
  return "no IndexError";
}

// Every rank gets torch's error and nothing is sent, so that the micro-batch can be discarded.
TEST(Vocabulary, IdsOutsideAreTorchsErrorOnEveryRank) {
  for (const auto& [world, t] : {std::pair{4, 2}, {3, 3}})
    expect_passed({"shm", world}, [t](const auto& comm) {
      const auto run = [&](bool wrong) {
        const auto module = std::make_shared<TextImpl>(), plain = std::make_shared<TextImpl>();
        auto engine = engine_of(module, comm, t);
        for (int step = 0; step < 3; ++step) {
          for (const std::int64_t id : {kVocabulary, std::int64_t{-1}, std::int64_t{-11}, std::int64_t{1} << 40}) {
            if (!wrong || step == 2) break;
            for (const auto dtype : {at::kLong, at::kInt}) {
              if (dtype == at::kInt && id > kVocabulary) continue;
              auto ids = ids_of(static_cast<std::uint64_t>(step));
              ids[1][2] = id;
              const auto of_torch = index_error_of([&] { plain->forward(ids.to(dtype)); });
              require(contains(of_torch, "index out of range in self"), "torch: " + of_torch);
              const auto text = index_error_of([&] { engine.backward(module->forward(ids.to(dtype)).pow(2).mean()); });
              require(contains(text, "index out of range in self"), std::to_string(id) + ": " + text);
              require(engine.discard_micro_batch() == 0, "micro-batches that are left");
            }
          }
          const auto seed = static_cast<std::uint64_t>(10 * step + engine.mesh().rank("dp"));
          engine.backward(module->forward(ids_of(seed).to(step == 1 ? at::kInt : at::kLong)).pow(2).mean());
          engine.step();
        }
        return engine.state_hash();
      };
      require(run(true) == run(false), "another state than without wrong ids");
    });
}

// Only one data-parallel rank's samples have a wrong id: its tensor-parallel ranks leave, and the others do not wait.
TEST(Vocabulary, AWrongIdInOneGroup) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    const auto module = std::make_shared<TextImpl>();
    auto engine = engine_of(module, comm, 2);
    auto ids = ids_of(1);
    const bool wrong = engine.mesh().rank("dp") == 1;
    if (wrong) ids[0][0] = kVocabulary;
    try {
      engine.backward(module->forward(ids).pow(2).mean());
      engine.step();
    } catch (const c10::IndexError&) {
      return require(wrong, "an IndexError of right ids");
    } catch (const CommError& e) {  // a slow rank with a wrong id finds that the other one has left
      return require(!wrong || std::string(e.what()).find("has ended") != std::string::npos, e.what());
    }
    require(false, "expected an error");
  });
}

TEST(Vocabulary, NoIds) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<TextImpl>();
    auto engine = engine_of(module, comm, 2);
    const auto y = module->forward(at::zeros({2, 0}, at::kLong));
    require(y.sizes() == at::IntArrayRef({2, 0, kWidth}), "shape without ids");
    engine.backward(y.sum());
    require(engine.gradient("token.weight").eq(0).all().template item<bool>(), "gradient without ids");
    engine.step();
  });
}

// --- options that parts do not support ----------------------------------------------------------

TEST(Vocabulary, OptionsThatPartsDoNotSupport) {
  const auto options = [] { return torch::nn::EmbeddingOptions(kVocabulary, kWidth); };
  const std::vector<std::pair<torch::nn::EmbeddingOptions, std::string>> all{
      {options().max_norm(1.0), "token.weight: its embedding has max_norm"},
      {options().sparse(true), "token.weight: its embedding has sparse"},
      {options().scale_grad_by_freq(true), "token.weight: its embedding has scale_grad_by_freq"},
      {options().padding_idx(3),
       "its embedding has padding_idx 3, expected less than 3, the rows of the smallest part"},
      {options().padding_idx(-1), "its embedding has padding_idx 10, expected less than 3"}};
  for (const auto& [of_embedding, words] : all)
    expect_passed({"shm", 3}, [of = of_embedding, words = words](const auto& comm) {
      const auto module = std::make_shared<TextImpl>(of);
      const auto before = module->token->weight.detach().clone();
      try {
        engine_of(module, comm, 3);
      } catch (const ConfigError& e) {
        require(contains(e.what(), words) && contains(e.what(), "Hint: \"skip\" it"), e.what());
        require(module->token->weight.equal(before), "the model was changed");
        return comm->barrier();  // stays usable
      }
      require(false, "expected a ConfigError with: " + words);
    });
}

// Where a program looks rows up by functions, the first forward tells.
TEST(Vocabulary, FunctionsThatPartsDoNotSupport) {
  namespace F = torch::nn::functional;
  const std::vector<std::pair<F::EmbeddingFuncOptions, std::string>> all{
      {F::EmbeddingFuncOptions().max_norm(1.0), "Hint: leave out max_norm of the embedding"},
      {F::EmbeddingFuncOptions().sparse(true), "the embedding token.weight has sparse gradients"},
      {F::EmbeddingFuncOptions().scale_grad_by_freq(true),
       "the embedding token.weight has sparse gradients or scale_grad"}};
  for (const auto& [of_call, words] : all)
    expect_passed({"shm", 2}, [of = of_call, words = words](const auto& comm) {
      const auto module = std::make_shared<TextImpl>();
      auto engine = engine_of(module, comm, 2);
      try {
        F::embedding(ids_of(1), module->token->weight, of);
      } catch (const ConfigError& e) {
        return require(contains(e.what(), words), e.what());
      }
      require(false, "expected a ConfigError with: " + words);
    });
}

}  // namespace
}  // namespace zero::test::vocabulary_test
