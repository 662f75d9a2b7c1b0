// Faults of a program or a configuration on a mesh are ConfigErrors in words, on every rank, and nothing hangs.
#include <gtest/gtest.h>
#include <zero/nn.h>
#include <zero/sp.h>
#include <zero/zero.h>

#include <functional>
#include <string>
#include <vector>

#include "parity/mesh_problems.h"
#include "support/require.h"

namespace zero::test::mesh_errors_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;
using Words = std::vector<std::string>;

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

void require_words(const std::string& text, const Words& words) {
  for (const auto& part : words) require(contains(text, part), "expected an error with: " + part + "\ngot: " + text);
}
// The same text on every rank. Without a hang, and with a communicator that still works.
void require_one_error(const Comm& comm, const std::string& text, const Words& words) {
  require_words(text, words);
  for (const auto& theirs : comm->all_gather_bytes(text)) require(theirs == text, text + "\nand\n" + theirs);
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
    for (const std::string name : {"up.weight", "down.weight", "up.bias"})
      for (const int evaluations : {0, 2}) {
        const auto toy = std::make_shared<ToyImpl>();
        auto engine = engine_of(toy, comm, tensor_parallel(kPair));
        const auto forward = [&] { return toy->down(torch::tanh(toy->up(draw({3, 4}, 1)))); };
        {
          const at::NoGradGuard no_grad;
          for (int i = 0; i < evaluations; ++i) forward();
        }
        auto parameter = toy->named_parameters()[name];
        const auto part = parameter.sizes().vec();
        const auto whole = engine.parameter_state(name).sizes().vec();
        parameter.set_data(at::zeros(whole));
        std::string text;
        {
          const at::AutoGradMode mode(evaluations == 0);
          text = config_error_of([&] { forward(); });
        }
        const auto shape = [](const std::vector<std::int64_t>& sizes) {
          std::ostringstream out;
          out << at::IntArrayRef(sizes);
          return out.str();
        };
        require_words(text, {"[Engine::forward] (rank " + std::to_string(comm->rank()) + "/2",
                             "parameter " + name + " was replaced behind the Engine by a tensor of shape " +
                                 shape(whole) + "; this rank, tp " + std::to_string(comm->rank()) +
                                 ", has a part of shape " + shape(part) + " of " + shape(whole),
                             "Hint: ", "with copy_ to this rank's part, or give set_parameter_state() the whole"});
        comm->all_gather_bytes("");
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
      require_words(
          text,
          {flat ? "aten::addmm got 8 features beside up.bias" : "aten::add_ got 8 features beside up.bias",
           comm->rank() == 0 ? "of which this rank holds rows 0-3 of 8" : "of which this rank holds rows 4-7 of 8",
           "the weight of the same module was replaced behind the Engine. Hint: keep the tensor"});
      comm->all_gather_bytes("");
    }
  });
}

// --- operators ------------------------------------------------------------------------------------

TEST(MeshErrors, OperatorsThatReadParts) {
  struct Wrong {
    std::string specs;
    Words words;
    std::function<void(ToyImpl&)> body;
  };
  const std::string rows = "of which this rank holds rows ";
  const Words operators{": torch::linear or matmul use parts of a weight [out, in]; otherwise \"skip\" it in"};
  const std::vector<Wrong> all{{kUp,
                                {"aten::conv1d reads up.weight, " + rows},
                                [](ToyImpl& m) {
                                  at::conv1d(draw({1, 4, 5}, 1), m.up->weight.unsqueeze(-1));
                                }},
                               {R"({"patterns": ["lstm.weight_ih_l0"]})",
                                {"aten::lstm reads lstm.weight_ih_l0, " + rows},
                                [](ToyImpl& m) {
                                  m.lstm(draw({5, 1, 4}, 1));
                                }},
                               {R"({"patterns": ["gru.weight_hh_l0"], "partition_type": "row"})",
                                {"aten::gru reads gru.weight_hh_l0, of which this rank holds columns "},
                                [](ToyImpl& m) {
                                  m.gru(draw({5, 1, 4}, 1));
                                }},
                               {kUp,
                                {"aten::einsum reads up.weight, " + rows},
                                [](ToyImpl& m) {
                                  at::einsum("bi,oi->bo", {draw({3, 4}, 1), m.up->weight});
                                }},
                               {kUp,
                                {"aten::addmm reads up.weight, " + rows},
                                [](ToyImpl& m) {
                                  at::addmm(m.up->bias, draw({3, 4}, 1), m.up->weight.t(), /*beta=*/1, /*alpha=*/2);
                                }},
                               {kUp,
                                {"aten::addmm reads up.weight, " + rows},
                                [](ToyImpl& m) {
                                  at::addmm(m.up->bias, draw({3, 4}, 1), m.up->weight.t(), /*beta=*/0.5);
                                }},
                               {kUp,
                                {"aten::linear reads up.weight, " + rows},  // as MultiheadAttention does
                                [](ToyImpl& m) {
                                  at::linear(draw({3, 4}, 1), m.up->weight.narrow(0, 0, 2));
                                }},
                               {R"({"patterns": ["token.weight"], "partition_type": "row"})",
                                {"aten::embedding reads token.weight, of which this rank holds columns "},
                                [](ToyImpl& m) { m.token(at::zeros({3}, at::kLong)); }}};
  expect_passed({"shm", 2}, [&](const auto& comm) {
    for (const auto& wrong : all) {
      const auto toy = std::make_shared<ToyImpl>();
      auto engine = engine_of(toy, comm, tensor_parallel(wrong.specs));
      const auto before = data_calls(comm);
      const auto text = config_error_of([&] { wrong.body(*toy); });
      require(data_calls(comm) == before, "sent before: " + text);
      require_words(text, wrong.words);
      require_words(text, operators);
      comm->all_gather_bytes("");
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
      require_one_error(
          comm, text,
          {"the ranks of a tensor-parallel group got different input for token.weight: tp 0 and tp 1. Hint: "});
    }
    const auto toy = std::make_shared<ToyImpl>();
    auto engine = engine_of(toy, comm, tensor_parallel(kUp));
    const auto loss = toy->up(draw({3, 4}, 1)).pow(2).mean();
    const auto text = config_error_of([&] { engine.backward(loss); });
    require_words(text, {"the ranks of a tensor-parallel group got different losses: ", " on tp 0 and ", " on tp 1"});
    comm->all_gather_bytes("");
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
    require_one_error(comm, error_with(qkv),
                      {"qkv.weight [24, 4]: dimension 0 has 2 heads or blocks, expected at least 3, one a rank. Hint: "
                       "tensor_parallel.autotp_size 2 or less"});
    qkv.multiple = 0;
    require_one_error(comm, error_with(qkv), {"qkv.weight [24, 4]: got a multiple of 0, expected 1 or more"});
    qkv.multiple = 1;
    qkv.pieces = {26, -2};
    require_one_error(comm, error_with(qkv), {"dimension 0 has 24 elements, got a piece of 26"});
    qkv.pieces = {12, 13};
    require_one_error(comm, error_with(qkv), {"dimension 0 has 24 elements, expected 25, the sum of its pieces"});
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
    require_one_error(comm, error_at({1, 7, 4}),
                      {"got 7 tokens for down.weight, expected a multiple of 2", "Hint: 6 or 8 tokens"});
    require_one_error(comm, error_at({1, 1, 4}), {"got 1 token for down.weight", "Hint: 2 tokens"});
    require_one_error(comm, error_at({6, 4}), {"[6, 4] for down.weight, expected [batch, tokens, features]"});
    const auto text = config_error_of([&] { module->up(draw({6, 4}, 1)); });
    require_one_error(comm, text, {"[6, 4] for up.weight, expected [batch, tokens, features]"});
    for (const std::int64_t tokens : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()})
      require_one_error(comm, config_error_of([&] { engine.mesh().tokens(tokens); }),
                        {"got " + std::to_string(tokens) + " tokens, expected 0 or more"});
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
    require_one_error(comm, of(2, 2),
                      {"got 2 heads for 3 sequence-parallel ranks, expected at least 3",
                       "Hint: 3 heads or more, or sequence_parallel_size 2 or less"});
    require_one_error(comm, of(6, 4),
                      {"got 4 heads of keys and values for 6 query heads, expected a divisor", "Hint: 3 or 6"});
    require_one_error(comm, config_error_of([&] {
                        sequence_to_heads(at::zeros({1, 2, 2, 4}), *mesh);
                      }),
                      {"Hint: 3 heads or more"});
    require_one_error(comm, config_error_of([&] {
                        sequence_to_heads(at::zeros({1, 2, 3, 4}), *mesh, -4);
                      }),
                      {"got -4 tokens, expected 0 or more"});
    require_one_error(comm, config_error_of([&] {
                        heads_to_sequence(at::zeros({1, 6, 1, 4}), *mesh, -1);
                      }),
                      {"got -1 tokens, expected 0 or more"});
    require_one_error(comm, config_error_of([&] {
                        heads_to_sequence(at::zeros({1, 6, 1, 4}), *mesh, 6, -3);
                      }),
                      {"got -3 heads for 3 sequence-parallel ranks"});
    require(data_calls(comm) == before, "something was sent");
  });
}

// Before anything is sent: the engine goes on.
TEST(MeshErrors, FewerTokensThanNone) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto toy = std::make_shared<ToyImpl>();
    auto engine = engine_of(toy, comm, R"("sequence_parallel_size": 2)");
    const auto loss = [&] { return toy->down(torch::tanh(toy->up(draw({3, 4}, 1)))).pow(2).sum(); };
    const auto wrong = loss();
    const auto before = data_calls(comm);
    const auto text = config_error_of([&] { engine.backward(wrong, {.tokens = -1}); });
    require_words(text, {"[Engine::backward] (rank " + std::to_string(comm->rank()) + "/2, step 0) got -1 tokens"});
    require(data_calls(comm) == before, "something was sent");
    engine.backward(loss(), {.tokens = 3});
    require(engine.step().updated, "no step");
  });
}

// --- construction ---------------------------------------------------------------------------------

TEST(MeshErrors, FaultsOfTheConfigurationAreEqualOnAllRanks) {
  const std::string gpt = R"("tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})";
  const std::string long_pattern(257, 'a'), most = "9223372036854775807";
  const std::vector<std::pair<std::string, Words>> all{
      {tensor_parallel(R"({"patterns": [")" + long_pattern + R"("]})"),
       {"got a pattern of 257 characters, expected at most 256"}},
      {tensor_parallel(R"({"patterns": ["(up)\\1"]})"), {"got the pattern (up)\\1 with a backreference"}},
      {tensor_parallel(kUp, R"("strict_mod": true, )"),
       {"got an unknown field strict_mod", "did you mean strict_mode?"}},
      {tensor_parallel(R"({"patterns": ["up"], "scater_input": true})"),
       {"got an unknown field scater_input", "did you mean scatter_input?"}},
      {tensor_parallel(kPair, R"("strict_mode": true, )"),
       {"the model cannot be cut over 2 tensor-parallel ranks:\n"
        "  token.weight [10, 4] matches no entry, and strict_mode is true\n"
        "  lstm.weight_ih_l0 [16, 4] matches no entry, and strict_mode is true\n"
        "  lstm.weight_hh_l0 [16, 4] matches no entry, and strict_mode is true\n"
        "  gru.weight_ih_l0 [12, 4] matches no entry, and strict_mode is true\n"
        "  gru.weight_hh_l0 [12, 4] matches no entry, and strict_mode is true"}},
      {tensor_parallel(std::string(kPair) + R"(, {"patterns": ["token", "lstm"], "partition_type": "skip"})",
                       R"("strict_mode": true, )"),
       {"tensor-parallel ranks:\n  gru.weight_ih_l0 [12, 4] matches no entry, and strict_mode is true\n  "
        "gru.weight_hh_l0 [12, 4] matches no entry, and strict_mode is true"}},
      {R"("tensor_parallel": {"autotp_size": 2})",
       {"tensor_parallel.autotp_size: got 2 without tensor_parallel.partition_config or preset_model",
        "layer_specs for these weights:\n  ", "\n  up.weight [8, 4]", "\n  down.weight [4, 8]",
        "\n  token.weight [10, 4]", "\n  lstm.weight_ih_l0 [16, 4]", "\n  gru.weight_hh_l0 [12, 4]"}},
      {tensor_parallel(kUp, R"("tp_size": 4, )"), {"tp_size", "got 4, expected 2, as tensor_parallel.autotp_size"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "shape": [[-3, 11], -1]})"),
       {"got -3, expected a whole number of at least 1"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "shape": [0, -1]})"),
       {"got 0, expected a whole number of at least 1"}},
      {tensor_parallel(R"({"patterns": ["down"], "partition_type": "row", "shape": [2, -1]})"),
       {"got pieces of a weight that is not cut by columns"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "multiple": -2})"),
       {"got -2, expected a whole number of at least 1"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "multiple": 1e30})"),
       {"got 1e+30, expected a whole number of at least 1"}},
      {tensor_parallel(std::string(kUp) + R"(, {"patterns": ["nothing"]})"), {"(nothing) matches no parameter"}},
      {tensor_parallel(R"({"patterns": ["up"]}, {"patterns": ["lstm.bias"]})"),
       {"lstm.bias_ih_l0 [16] (", "expected a weight of two dimensions"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "shape": [[3, 4], -1]})"),
       {"up.weight [8, 4] (", "dimension 0 has 8 elements, expected 7, the sum of its pieces"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "shape": [[)" + most + ", " + most + R"(, 10], -1]})"),
       {"up.weight [8, 4] (", "dimension 0 has 8 elements, got a piece of " + most}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "shape": [)" + most + R"(, -1]})"),
       {"up.weight [8, 4] (", "8 rows are not " + most + " equal pieces"}},
      {tensor_parallel(R"({"patterns": ["up.weight"], "multiple": 8})"),
       {"dimension 0 has 1 heads or blocks, expected at least 2, one a rank. Hint: tensor_parallel.autotp_size 1 or "
        "less"}},
      {R"("tensor_parallel": {"autotp_size": 4294967298, "preset_model": "gpt"})", {"autotp_size", "at most 65536"}},
      {R"("tensor_parallel": {"autotp_size": -2})", {"autotp_size", "at least 0"}},
      {R"("sequence_parallel_size": 4294967297)", {"sequence_parallel_size", "at most 65536"}},
      {R"("sequence_parallel_size": -1)", {"sequence_parallel_size", "at least 1"}},
      {R"("tensor_parallel": {"autotp_size": 65536, "preset_model": "gpt"}, "sequence_parallel_size": 65536)",
       {"2 ranks are no multiple of tensor_parallel.autotp_size 65536 x sequence_parallel_size 65536",
        "start 4294967296 ranks, or"}},
      {R"("sequence_parallel_size": 3)", {"2 ranks are no multiple of", "start 3 ranks, or"}},
      {R"("data_parallel_size": 2, )" + gpt, {"data_parallel_size", "got 2, expected 1"}}};
  expect_passed({"shm", 2}, [&](const auto& comm) {
    for (const auto& [keys, words] : all) {
      const auto toy = std::make_shared<ToyImpl>();
      const auto before = data_calls(comm);
      const auto text = config_error_of([&] { engine_of(toy, comm, keys); });
      require_one_error(comm, text, words);
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
        std::string of_rank_2, of_others, words;
      } cases[] = {{R"("seed": 1)", cut,
                    "autotp_size 2 x sequence_parallel_size 1 on ranks 0-1, 3; tensor_parallel.autotp_size 1 x "
                    "sequence_parallel_size 1 on rank 2"},
                   {cut, R"("sequence_parallel_size": 2)",
                    "autotp_size 1 x sequence_parallel_size 2 on ranks 0-1, 3; tensor_parallel.autotp_size 2 x "
                    "sequence_parallel_size 1 on rank 2"},
                   // Three is no degree of 4 ranks, which rank 2 would find alone.
                   {R"("sequence_parallel_size": 3)", cut, "autotp_size 1 x sequence_parallel_size 3 on rank 2"}};
      for (const auto& c : cases) {
        const auto& keys = comm->rank() == 2 ? c.of_rank_2 : c.of_others;
        const auto toy = std::make_shared<ToyImpl>();
        const auto before = data_calls(comm);
        require_one_error(
            comm, config_error_of([&] { Mesh::of(options_with(keys), comm); }),
            {"[Mesh] the ranks have different degrees of parallelism: tensor_parallel.", c.words, "Hint: "});
        require_one_error(comm, config_error_of([&] { engine_of(toy, comm, keys); }),
                          {"[Engine] the ranks have different degrees of parallelism: tensor_parallel.", c.words});
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
    require_one_error(comm, text, {"attention.in_proj_weight [12, 4] (", "MultiheadAttention"});
  });
}

}  // namespace
}  // namespace zero::test::mesh_errors_test
