// Faults of a program or a configuration on a mesh are ConfigErrors in words, on every rank, and nothing hangs.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>
#include <zero/library.h>
#include <zero/nn.h>
#include <zero/sp.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parity/mesh_problems.h"
#include "support/golden_texts.h"
#include "support/require.h"

namespace zero::test::mesh_errors_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;

// A column and a row layer, an embedding, and weights that a test uses as it likes.
struct ToyImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Embedding token{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  ToyImpl() {
    up = register_module("up", torch::nn::Linear(4, 8));
    down = register_module("down", torch::nn::Linear(8, 4));
    token = register_module("token", torch::nn::Embedding(10, 4));
    lstm = register_module("lstm", torch::nn::LSTM(4, 4));
    gru = register_module("gru", torch::nn::GRU(4, 4));
    fill(*this);
  }
};
using Toy = std::shared_ptr<ToyImpl>;

const char* const kUp = R"({"patterns": ["up.weight"]})";
const char* const kPair = R"({"patterns": ["up.weight"]}, {"patterns": ["down.weight"], "partition_type": "row"})";

// specs: of partition_config.layer_specs; more: further keys of partition_config, before it.
std::string tensor_parallel(const std::string& specs, const std::string& more = "") {
  return R"("tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, )" + more +
         R"("layer_specs": [)" + specs + "]}}";
}
Options options_with(const std::string& keys) {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, )" + keys + "}",
                            "ds.json");
}
Engine engine_of(const Toy& toy, const Comm& comm, const std::string& keys) {
  return Engine(std::static_pointer_cast<torch::nn::Module>(toy), options_with(keys), comm);
}

std::string config_error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const ConfigError& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("no ConfigError, but: ") + e.what();
  }
  return "no error";
}

// The texts of all ranks, as an entry of tests/golden/mesh_errors.txt. Without a hang, and with a communicator that
// still works.
void require_errors(const Comm& comm, const char* entry, const std::string& text) {
  const auto texts = comm->all_gather_bytes(text);
  std::string all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    all += "rank " + std::to_string(rank) + ": " + texts[rank] + "\n";
  require_golden(entry, all, comm->rank() == 0);
}
// The same text on every rank.
void require_one_error(const Comm& comm, const char* entry, const std::string& text) {
  for (const auto& theirs : comm->all_gather_bytes(text)) require(theirs == text, text + "\nand\n" + theirs);
  require_golden(entry, text, comm->rank() == 0);
}

std::uint64_t data_calls(const Comm& comm) {
  std::uint64_t calls = 0;
  for (const auto& [name, row] : comm->stats().by_op)
    if (name != "control") calls += row.calls;
  return calls;
}

// --- replaced weights -----------------------------------------------------------------------------

// A tensor of the whole shape in the place of a part, which libtorch would only find too large: in a training forward,
// in a second evaluation, and in one of several models on one communicator.
TEST(MeshErrors, AWeightReplacedByAWholeTensor) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const std::map<std::string, const char*> entries{{"up.weight", "replaced weight, cut by rows"},
                                                     {"down.weight", "replaced weight, cut by columns"},
                                                     {"up.bias", "replaced bias"}};
    for (const auto& [name, entry] : entries)
      for (const int evaluations : {0, 2}) {
        const auto toy = std::make_shared<ToyImpl>();
        auto engine = engine_of(toy, comm, tensor_parallel(kPair));
        const auto forward = [&] { return toy->down(torch::tanh(toy->up(draw({3, 4}, 1)))); };
        {
          const at::NoGradGuard no_grad;
          for (int i = 0; i < evaluations; ++i) forward();
        }
        auto parameter = toy->named_parameters()[name];
        const auto whole = engine.parameter_state(name).sizes().vec();
        parameter.set_data(at::zeros(whole));
        std::string text;
        {
          const at::AutoGradMode mode(evaluations == 0);
          text = config_error_of([&] { forward(); });
        }
        require_errors(comm, entry, text);
      }
  });
}

// Only a member of the module, so that the registered parameter is still the Engine's.
TEST(MeshErrors, AMemberThatIsAnotherTensor) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    for (const bool flat : {true, false}) {  // addmm; matmul and add_
      const auto toy = std::make_shared<ToyImpl>();
      auto engine = engine_of(toy, comm, tensor_parallel(kPair));
      toy->up->weight = at::zeros({8, 4}).requires_grad_();
      const auto text = config_error_of([&] {
        toy->up(draw(flat ? std::vector<std::int64_t>{3, 4} : std::vector<std::int64_t>{1, 3, 4}, 1));
      });
      require_errors(comm, flat ? "member of another tensor, 2 dimensions" : "member of another tensor, 3 dimensions",
                     text);
    }
  });
}

// --- operators ------------------------------------------------------------------------------------

TEST(MeshErrors, OperatorsThatReadParts) {
  struct Wrong {
    const char* entry;
    std::string specs;
    std::function<void(ToyImpl&)> body;
  };
  const std::vector<Wrong> all{{"operator: conv1d", kUp,
                                [](ToyImpl& m) {
                                  at::conv1d(draw({1, 4, 5}, 1), m.up->weight.unsqueeze(-1));
                                }},
                               {"operator: lstm", R"({"patterns": ["lstm.weight_ih_l0"]})",
                                [](ToyImpl& m) {
                                  m.lstm(draw({5, 1, 4}, 1));
                                }},
                               {"operator: gru", R"({"patterns": ["gru.weight_hh_l0"], "partition_type": "row"})",
                                [](ToyImpl& m) {
                                  m.gru(draw({5, 1, 4}, 1));
                                }},
                               {"operator: einsum", kUp,
                                [](ToyImpl& m) {
                                  at::einsum("bi,oi->bo", {draw({3, 4}, 1), m.up->weight});
                                }},
                               {"operator: addmm with alpha", kUp,
                                [](ToyImpl& m) {
                                  at::addmm(m.up->bias, draw({3, 4}, 1), m.up->weight.t(), /*beta=*/1, /*alpha=*/2);
                                }},
                               {"operator: addmm with beta", kUp,
                                [](ToyImpl& m) {
                                  at::addmm(m.up->bias, draw({3, 4}, 1), m.up->weight.t(), /*beta=*/0.5);
                                }},
                               {"operator: linear of a view", kUp,
                                [](ToyImpl& m) {  // as MultiheadAttention does
                                  at::linear(draw({3, 4}, 1), m.up->weight.narrow(0, 0, 2));
                                }},
                               {"operator: embedding", R"({"patterns": ["token.weight"], "partition_type": "row"})",
                                [](ToyImpl& m) { m.token(at::zeros({3}, at::kLong)); }}};
  expect_passed({"shm", 2}, [&](const auto& comm) {
    for (const auto& wrong : all) {
      const auto toy = std::make_shared<ToyImpl>();
      auto engine = engine_of(toy, comm, tensor_parallel(wrong.specs));
      const auto before = data_calls(comm);
      const auto text = config_error_of([&] { wrong.body(*toy); });
      require(data_calls(comm) == before, "sent before: " + text);
      require_errors(comm, wrong.entry, text);
    }
  });
}

// A part in the place of something whole.
TEST(MeshErrors, PartsThatReachAnEmbeddingOrTheLoss) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    {
      const auto toy = std::make_shared<ToyImpl>();
      auto engine = engine_of(toy, comm, tensor_parallel(std::string(kPair) + R"(, {"patterns": ["token.weight"]})"));
      const auto text = config_error_of([&] { toy->token(toy->up(draw({3, 4}, 1)).argmax(-1) + comm->rank()); });
      require_one_error(comm, "part that reaches an embedding", text);
    }
    const auto toy = std::make_shared<ToyImpl>();
    auto engine = engine_of(toy, comm, tensor_parallel(kUp));
    // Times 0, so that the losses have no rounding.
    const auto loss = toy->up(draw({3, 4}, 1)).pow(2).mean() * 0 + 1.5 + comm->rank();
    const auto text = config_error_of([&] { engine.backward(loss); });
    require_errors(comm, "part that reaches the loss", text);
  });
}

// --- sequences ------------------------------------------------------------------------------------

// Layers that say themselves how they are cut.
TEST(MeshErrors, LayersWithFewerHeadsThanRanks) {
  expect_passed({"shm", 3}, [](const auto& comm) {
    const auto error_with = [&](const nn::ColumnParallelLinearOptions& options) {
      const auto module = std::make_shared<torch::nn::Module>();
      module->register_module("qkv", nn::ColumnParallelLinear(options));
      return config_error_of(
          [&] { Engine(module, Options::build().adamw().train_micro_batch_size(1).tensor_parallel(3, {}), comm); });
    };
    nn::ColumnParallelLinearOptions qkv{.in_features = 4, .out_features = 24, .pieces = {8, 8, 8}, .multiple = 4};
    require_one_error(comm, "layer: fewer heads than ranks", error_with(qkv));
    qkv.multiple = 0;
    require_one_error(comm, "layer: multiple of 0", error_with(qkv));
    qkv.multiple = 1;
    qkv.pieces = {26, -2};
    require_one_error(comm, "layer: negative piece", error_with(qkv));
    qkv.pieces = {12, 13};
    require_one_error(comm, "layer: sum of pieces", error_with(qkv));
  });
}

struct RegionImpl : torch::nn::Module {
  nn::ColumnParallelLinear up{nullptr};
  nn::RowParallelLinear down{nullptr};
  RegionImpl() {
    up = register_module("up", nn::ColumnParallelLinear(nn::ColumnParallelLinearOptions{
                                   .in_features = 4, .out_features = 8, .sequence = true}));
    down = register_module("down", nn::RowParallelLinear(nn::RowParallelLinearOptions{
                                       .in_features = 8, .out_features = 4, .sequence = true}));
  }
};

TEST(MeshErrors, TokensThatDoNotDivide) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<RegionImpl>();
    Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                  Options::build().adamw().train_micro_batch_size(1).tensor_parallel(2, {}), comm);
    const auto error_at = [&](std::vector<std::int64_t> sizes) {
      return config_error_of([&] { module->down(draw(std::move(sizes), 1)); });
    };
    require_one_error(comm, "region: 7 tokens", error_at({1, 7, 4}));
    require_one_error(comm, "region: 1 token", error_at({1, 1, 4}));
    require_one_error(comm, "region: no batch, row layer", error_at({6, 4}));
    const auto text = config_error_of([&] { module->up(draw({6, 4}, 1)); });
    require_one_error(comm, "region: no batch, column layer", text);
    const auto of_mesh = [&](std::int64_t tokens) { return config_error_of([&] { engine.mesh().tokens(tokens); }); };
    require_one_error(comm, "mesh: -1 tokens", of_mesh(-1));
    require_one_error(comm, "mesh: fewest tokens", of_mesh(std::numeric_limits<std::int64_t>::min()));
  });
}

TEST(MeshErrors, FewerHeadsThanRanks) {
  expect_passed({"shm", 3}, [](const auto& comm) {
    const auto mesh = Mesh::of(options_with(R"("sequence_parallel_size": 3)"), comm);
    const auto of = [&](std::int64_t heads, std::int64_t of_keys, std::int64_t tokens = 2) {
      const auto q = at::zeros({1, tokens, heads, 4}), k = at::zeros({1, tokens, of_keys, 4});
      return config_error_of(
          [&] { attention_over_heads(*mesh, q, k, k, [](const auto& a, const auto&, const auto&) { return a; }); });
    };
    const auto before = data_calls(comm);
    require_one_error(comm, "attention: fewer heads than ranks", of(2, 2));
    require_one_error(comm, "attention: heads of keys and values", of(6, 4));
    const auto to_heads = [&](std::int64_t heads, std::int64_t tokens) {
      const auto x = at::zeros({1, 2, heads, 4});
      return config_error_of([&] { sequence_to_heads(x, *mesh, tokens); });
    };
    const auto to_sequence = [&](std::int64_t tokens, std::int64_t heads) {
      const auto x = at::zeros({1, 6, 1, 4});
      return config_error_of([&] { heads_to_sequence(x, *mesh, tokens, heads); });
    };
    require_one_error(comm, "sequence_to_heads: fewer heads than ranks", to_heads(2, 0));
    require_one_error(comm, "sequence_to_heads: -4 tokens", to_heads(3, -4));
    require_one_error(comm, "heads_to_sequence: -1 tokens", to_sequence(-1, 0));
    require_one_error(comm, "heads_to_sequence: -3 heads", to_sequence(6, -3));
    require(data_calls(comm) == before, "something was sent");
  });
}

// Before anything is sent: the engine can continue.
TEST(MeshErrors, FewerTokensThanNone) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto toy = std::make_shared<ToyImpl>();
    auto engine = engine_of(toy, comm, R"("sequence_parallel_size": 2)");
    const auto loss = [&] { return toy->down(torch::tanh(toy->up(draw({3, 4}, 1)))).pow(2).sum(); };
    const auto wrong = loss();
    const auto before = data_calls(comm);
    const auto text = config_error_of([&] { engine.backward(wrong, {.tokens = -1}); });
    require_errors(comm, "backward: -1 tokens", text);
    require(data_calls(comm) == before, "something was sent");
    engine.backward(loss(), {.tokens = 3});
    require(engine.step().updated, "no step");
  });
}

// --- construction ---------------------------------------------------------------------------------

TEST(MeshErrors, FaultsOfTheConfigurationAreEqualOnAllRanks) {
  const std::string gpt = R"("tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})";
  const std::string long_pattern(257, 'a'), most = "9223372036854775807";
  const std::vector<std::pair<const char*, std::string>> all{
      {"configuration: long pattern", tensor_parallel(R"({"patterns": [")" + long_pattern + R"("]})")},
      {"configuration: backreference", tensor_parallel(R"({"patterns": ["(up)\\1"]})")},
      {"configuration: unknown field of partition_config", tensor_parallel(kUp, R"("strict_mod": true, )")},
      {"configuration: unknown field of an entry", tensor_parallel(R"({"patterns": ["up"], "scater_input": true})")},
      {"configuration: strict_mode, 5 weights", tensor_parallel(kPair, R"("strict_mode": true, )")},
      {"configuration: strict_mode, 2 weights",
       tensor_parallel(std::string(kPair) + R"(, {"patterns": ["token", "lstm"], "partition_type": "skip"})",
                       R"("strict_mode": true, )")},
      {"configuration: no plan", R"("tensor_parallel": {"autotp_size": 2})"},
      {"configuration: tp_size", tensor_parallel(kUp, R"("tp_size": 4, )")},
      {"configuration: shape with a negative piece",
       tensor_parallel(R"({"patterns": ["up.weight"], "shape": [[-3, 11], -1]})")},
      {"configuration: shape with 0 pieces", tensor_parallel(R"({"patterns": ["up.weight"], "shape": [0, -1]})")},
      {"configuration: shape of a row layer",
       tensor_parallel(R"({"patterns": ["down"], "partition_type": "row", "shape": [2, -1]})")},
      {"configuration: negative multiple", tensor_parallel(R"({"patterns": ["up.weight"], "multiple": -2})")},
      {"configuration: multiple too large", tensor_parallel(R"({"patterns": ["up.weight"], "multiple": 1e30})")},
      {"configuration: pattern of nothing", tensor_parallel(std::string(kUp) + R"(, {"patterns": ["nothing"]})")},
      {"configuration: weight of one dimension",
       tensor_parallel(R"({"patterns": ["up"]}, {"patterns": ["lstm.bias"]})")},
      {"configuration: shape with another sum",
       tensor_parallel(R"({"patterns": ["up.weight"], "shape": [[3, 4], -1]})")},
      {"configuration: shape whose sum overflows",
       tensor_parallel(R"({"patterns": ["up.weight"], "shape": [[)" + most + ", " + most + R"(, 10], -1]})")},
      {"configuration: too many pieces",
       tensor_parallel(R"({"patterns": ["up.weight"], "shape": [)" + most + R"(, -1]})")},
      {"configuration: multiple of all rows", tensor_parallel(R"({"patterns": ["up.weight"], "multiple": 8})")},
      {"configuration: autotp_size too large",
       R"("tensor_parallel": {"autotp_size": 4294967298, "preset_model": "gpt"})"},
      {"configuration: negative autotp_size", R"("tensor_parallel": {"autotp_size": -2})"},
      {"configuration: sequence_parallel_size too large", R"("sequence_parallel_size": 4294967297)"},
      {"configuration: negative sequence_parallel_size", R"("sequence_parallel_size": -1)"},
      {"configuration: degrees too large together",
       R"("tensor_parallel": {"autotp_size": 65536, "preset_model": "gpt"}, "sequence_parallel_size": 65536)"},
      {"configuration: ranks that do not divide", R"("sequence_parallel_size": 3)"},
      {"configuration: data_parallel_size", R"("data_parallel_size": 2, )" + gpt}};
  expect_passed({"shm", 2}, [&](const auto& comm) {
    for (const auto& [entry, keys] : all) {
      const auto toy = std::make_shared<ToyImpl>();
      const auto before = data_calls(comm);
      const auto text = config_error_of([&] { engine_of(toy, comm, keys); });
      require_one_error(comm, entry, text);
      require(data_calls(comm) == before, "sent before: " + text);
    }
  });
}

// A plan with an entry for every weight; embeddings are cut by rows whatever the dimension says.
TEST(MeshErrors, KeysOfAPlanThatChangeNothing) {
  const std::string all = std::string(kPair) + R"(, {"patterns": ["token.weight"]},
                                                  {"patterns": ["lstm|gru"], "partition_type": "skip"})";
  expect_passed({"shm", 2}, [&](const auto& comm) {
    std::string known;
    for (const char* more : {"", R"("embedding_partition_dim": 1, )", R"("embedding_partition_dim": 0, )",
                             R"("strict_mode": true, )", R"("tp_size": 2, )"}) {
      const auto toy = std::make_shared<ToyImpl>();
      auto engine = engine_of(toy, comm, tensor_parallel(all, more));
      require(toy->token->weight.sizes() == at::IntArrayRef({5, 4}), std::string("another part with ") + more);
      for (int step = 0; step < 2; ++step) {
        const auto x = toy->token(at::tensor({0, 3, 5, 9, 9}, at::kLong));
        engine.backward(toy->down(torch::tanh(toy->up(x))).pow(2).sum());
        engine.step();
      }
      const auto hash = engine.state_hash();
      if (known.empty()) known = hash;
      require(hash == known, std::string("another state with ") + more);
    }
  });
}

// Before a group is made, which ranks with other degrees would not take part in.
TEST(MeshErrors, RanksWithDifferentDegrees) {
  for (const Place place : {Place{"shm", 4}, Place{"thread", 4}})
    expect_passed(place, [](const auto& comm) {
      const std::string cut = tensor_parallel(kPair);
      const struct {
        std::string of_rank_2, of_others;
        const char *mesh, *engine;  // entries
      } cases[] = {{R"("seed": 1)", cut, "mesh: degrees of 3 ranks", "engine: degrees of 3 ranks"},
                   {cut, R"("sequence_parallel_size": 2)", "mesh: tp and sp", "engine: tp and sp"},
                   // Three is no degree of 4 ranks, which rank 2 would find alone.
                   {R"("sequence_parallel_size": 3)", cut, "mesh: degree 3", "engine: degree 3"}};
      for (const auto& c : cases) {
        const auto& keys = comm->rank() == 2 ? c.of_rank_2 : c.of_others;
        const auto toy = std::make_shared<ToyImpl>();
        const auto before = data_calls(comm);
        require_one_error(comm, c.mesh, config_error_of([&] { Mesh::of(options_with(keys), comm); }));
        require_one_error(comm, c.engine, config_error_of([&] { engine_of(toy, comm, keys); }));
        require(data_calls(comm) == before, "something was sent");
      }
      const auto mesh = Mesh::of(options_with(cut), comm);  // the communicator still works
      require(mesh->size("dp") == 2, mesh->text());
    });
}

// The degrees of all ranks are compared in a message that is sent anyway, and that has no byte more without the keys.
TEST(MeshErrors, RunsWithoutDegreesSendNothingMore) {
  for (const bool all : {true, false})
    expect_passed({"thread", 2}, [&](const auto& comm) {
      const auto toy = std::make_shared<ToyImpl>();
      comm->reset_stats();
      auto engine = engine_of(toy, comm,
                              all ? R"("tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1)"
                                  : R"("zero_optimization": {"stage": 3})");
      const auto sent = comm->stats().control;
      // The outcomes of the checks and of the plan of tiers have 2 bytes, the hashes of configuration and model 16; all
      // ranks wait for each other once.
      require(sent.calls == 5 && sent.bytes_sent == 2 + 16 + 16 + 2,
              std::to_string(sent.calls) + " calls, " + std::to_string(sent.bytes_sent) + " bytes");
      require(engine.shared_mesh().get() == &engine.mesh() && engine.mesh().group("dp") == comm, "another mesh");
    });
}

TEST(MeshErrors, MultiheadAttentionCannotBeCut) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto toy = std::make_shared<ToyImpl>();
    toy->register_module("attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(4, 2)));
    const auto text = config_error_of(
        [&] { engine_of(toy, comm, tensor_parallel(R"({"patterns": [".*in_proj_weight"], "shape": [3, -1]})")); });
    require_one_error(comm, "MultiheadAttention", text);
  });
}

}  // namespace
}  // namespace zero::test::mesh_errors_test
