// Weights of other libraries into ranks and out of them: what transformers computed is what the imported model
// computes; files are the same whatever ranks and stage wrote them; faults of one rank are the error of all.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <numeric>

#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "models/gpt.h"
#include "support/on_ranks.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::weights_ranks_test {
namespace {
namespace fs = std::filesystem;
using checkpoint::export_weights;
using checkpoint::import_weights;

Options options_of(int stage, const std::string& more = "") {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, )" + more +
      R"("zero_optimization": {"stage": )" + std::to_string(stage) + "}}");
}

std::shared_ptr<models::GptImpl> tiny_gpt(bool tied = true) {
  return models::Gpt(models::GptConfig{
                         .layers = 2, .hidden = 8, .heads = 2, .sequence = 16, .vocabulary = 48, .tied_output = tied})
      .ptr();
}

at::Tensor tensor_of(const PlainTensor& plain) {
  const auto type = plain.dtype == "I64" ? at::kLong : plain.dtype == "BF16" ? at::kBFloat16 : at::kFloat;
  auto result = at::empty(plain.shape, type);
  std::memcpy(result.mutable_data_ptr(), plain.bytes.data(), plain.bytes.size());
  return result;
}

const PlainTensors& gpt2_expected() {
  static const auto expected = plain_tensors(hf_model("hf-gpt2") / "expected.safetensors");
  return expected;
}

ImportOptions gpt2_names() {
  ImportOptions options;
  options.names = "gpt2";
  return options;
}

void train(engine::State& state, models::GptImpl& gpt, int step) {
  const auto tokens = (at::arange(16).view({1, 16}) * (step + 3) + state.job.comm->rank()) % 48;
  state.backward.run(gpt.forward(tokens, tokens.roll(1, 1)), {});
  state.stepper.step();
}

// --- import -------------------------------------------------------------------------------------

TEST(WeightsImport, TheModelComputesWhatTransformersComputed) {
  const auto tokens = tensor_of(gpt2_expected().at("tokens")), logits = tensor_of(gpt2_expected().at("logits"));
  for (const int world : {1, 4})
    for (const int stage : {0, 1, 3})
      for (const bool tied : {true, false})
        on_ranks(world, [&](const auto& comm) {
          const auto gpt = tiny_gpt(tied);
          engine::State state(gpt, options_of(stage), comm);
          const auto report =
              import_weights(state, formats::system_files(), hf_model("hf-gpt2").string(), gpt2_names());
          const at::NoGradGuard no_grad;
          gpt->eval();
          const auto difference = (gpt->forward(tokens) - logits).abs().max().template item<float>();
          EXPECT_LE(difference, 1e-5) << "stage " << stage << ", " << world << " ranks";
          EXPECT_EQ(report.taken.size(), tied ? 28u : 29u);
          EXPECT_EQ(report.tied, tied ? std::vector<std::string>() : std::vector<std::string>{"output.weight"});
          // Every element is read by the ranks that store it, and by no other.
          std::int64_t bytes = 0;
          for (const auto& text : comm->all_gather_bytes(std::to_string(report.bytes_read))) bytes += std::stoll(text);
          const std::int64_t all = 4 * (2272 + (tied ? 0 : 48 * 8));
          EXPECT_EQ(bytes, stage == 0 ? world * all : all);
        });
}

// Every call of one rank fails once: the state is what it was, or the engine wants a load and continues after it.
TEST(WeightsImport, AFaultLeavesTheEngineWholeOrRefused) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  int unchanged = 0, refused = 0;
  on_ranks(2, [&](const auto& comm) {
    const auto import = [&](engine::State& state, formats::FsOps& files) {
      return import_weights(state, files, hf_model("hf-gpt2").string(), gpt2_names());
    };
    std::string saved, imported;
    {
      const auto gpt = tiny_gpt();
      engine::State state(gpt, options_of(3), comm);
      train(state, *gpt, 0);
      checkpoint::save(state, formats::system_files(), root, "t");
      saved = state.exports.state_hash();
      (void)import(state, formats::system_files());
      imported = state.exports.state_hash();
    }
    for (int k = 1;; ++k) {
      const auto gpt = tiny_gpt();
      engine::State state(gpt, options_of(3), comm);
      checkpoint::load(state, formats::system_files(), root, "");
      FaultyFiles files(FaultyFiles::Fault::Error, k, EIO);
      std::string text, refusal;
      const int code =
          code_of([&] { (void)import(state, comm->rank() == 1 ? files : formats::system_files()); }, &text);
      const auto texts = comm->all_gather_bytes(std::to_string(code) + text);
      EXPECT_EQ(texts[0], texts[1]);
      if (comm->all_gather_bytes(files.struck() ? "1" : "0")[1] == "0") {
        EXPECT_EQ(code, 0) << text;
        EXPECT_EQ(state.exports.state_hash(), imported);
        break;
      }
      if (code == 0) continue;  // closing a file that was read
      EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << text;
      EXPECT_NE(text.find("rank 1/2"), std::string::npos) << text;
      if (code_of([&] { (void)import(state, formats::system_files()); }, &refusal) != 0) {
        EXPECT_NE(refusal.find("failed halfway"), std::string::npos) << refusal;
        EXPECT_EQ(code_of([&] { checkpoint::save(state, formats::system_files(), root, "no"); }),
                  static_cast<int>(ExitCode::kConfig));
        EXPECT_EQ(code_of([&] { train(state, *gpt, 1); }), static_cast<int>(ExitCode::kConfig));
        // What a partial load leaves out would keep half of the import.
        std::string partial;
        EXPECT_EQ(
            code_of([&] { checkpoint::load(state, formats::system_files(), root, "", {.partial = {"*"}}); }, &partial),
            static_cast<int>(ExitCode::kConfig));
        EXPECT_NE(partial.find("got partial after"), std::string::npos) << partial;
        checkpoint::load(state, formats::system_files(), root, "");
        EXPECT_EQ(state.exports.state_hash(), saved) << k << ": " << text;
        (void)import(state, formats::system_files());
        if (comm->rank() == 0) ++refused;
      } else if (comm->rank() == 0) {
        ++unchanged;
      }
      EXPECT_EQ(state.exports.state_hash(), imported) << k << ": " << text;
      train(state, *gpt, 1);
    }
  });
  EXPECT_GT(unchanged, 3);
  EXPECT_GT(refused, 1);
}

// Two parameters, which may be one, and a buffer.
struct Pair : torch::nn::Module {
  at::Tensor a, b, scale;
  explicit Pair(bool tied) {
    a = register_parameter("a", at::arange(30, at::kFloat).view({5, 6}));
    b = register_parameter("b", tied ? a : at::zeros({5, 6}));
    scale = register_buffer("scale", at::full({3}, 2.0, at::kFloat));
  }
};

std::vector<float> thirty(float from) {
  std::vector<float> values(30);
  std::iota(values.begin(), values.end(), from);
  return values;
}

struct Outcome {
  int code = 0;
  std::string text;
  ImportReport report;
  std::map<std::string, at::Tensor> values;  // of rank 0, with the buffer
};

Outcome import_pair(bool tied, const PlainTensors& tensors, const nlohmann::json& metadata = nullptr,
                    const ImportOptions& options = {}, int world = 2) {
  TempFolder folder;
  write_all(folder.path() / "model.safetensors", plain_file(tensors, metadata));
  Outcome outcome;
  on_ranks(world, [&](const auto& comm) {
    const auto module = std::make_shared<Pair>(tied);
    engine::State state(module, options_of(2), comm);
    ImportReport report;
    std::string text;
    const int code = code_of(
        [&] { report = import_weights(state, formats::system_files(), folder.file("model.safetensors"), options); },
        &text);
    const auto values = state.exports.full_state_dict();  // the engine is usable whatever happened
    if (comm->rank() == 0) {
      outcome = {code, text, report, values};
      outcome.values["scale"] = module->scale.clone();
    }
    const auto texts = comm->all_gather_bytes(text);
    for (const auto& other : texts) EXPECT_EQ(other, texts[0]);
  });
  return outcome;
}

bool holds(const Outcome& outcome, const std::string& part) { return outcome.text.find(part) != std::string::npos; }

TEST(WeightsImport, Ties) {
  const auto one = plain_tensor("F32", {5, 6}, thirty(100)), other = plain_tensor("F32", {5, 6}, thirty(200));
  const auto scale = plain_tensor<float>("F32", {3}, {7, 8, 9});
  const auto is = [](const Outcome& outcome, const std::string& name, float from) {
    return outcome.code == 0 && outcome.values.at(name).equal(at::arange(30, at::kFloat).view({5, 6}) + from);
  };
  using Names = std::vector<std::string>;
  // A model with a tie takes either name, both if they are equal, and the alias of the file in either direction.
  auto outcome = import_pair(true, {{"a", one}, {"scale", scale}});
  EXPECT_TRUE(is(outcome, "a", 100)) << outcome.text;
  EXPECT_TRUE(outcome.values.at("scale").equal(at::tensor({7.f, 8.f, 9.f})));
  EXPECT_EQ(outcome.report.taken, (Names{"a", "scale"}));
  EXPECT_TRUE(outcome.report.tied.empty() && outcome.report.unexpected.empty() && outcome.report.converted.empty());
  outcome = import_pair(true, {{"b", one}, {"scale", scale}});
  EXPECT_TRUE(is(outcome, "a", 100) && outcome.report.tied == Names{"a"}) << outcome.text;
  outcome = import_pair(true, {{"a", one}, {"b", one}, {"scale", scale}});
  EXPECT_TRUE(is(outcome, "a", 100) && outcome.report.unexpected == Names{"b"}) << outcome.text;
  outcome = import_pair(true, {{"c", one}, {"scale", scale}}, {{"b", "c"}});
  EXPECT_TRUE(is(outcome, "a", 100)) << outcome.text;
  auto bytes = one;
  bytes.bytes[17 * 4] ^= 1;
  outcome = import_pair(true, {{"a", one}, {"b", bytes}, {"scale", scale}});
  EXPECT_TRUE(outcome.code == static_cast<int>(ExitCode::kConfig) && holds(outcome, "element 17 is 117 and 117.0"))
      << outcome.text;
  EXPECT_TRUE(outcome.values.at("a").equal(at::arange(30, at::kFloat).view({5, 6}))) << "nothing has changed";
  // Or one of them is chosen.
  ImportOptions options;
  for (const auto& [name, from] : std::map<std::string, float>{{"a", 100}, {"b", 200}}) {
    options.untie = {name};
    outcome = import_pair(true, {{"a", one}, {"b", other}, {"scale", scale}}, nullptr, options);
    EXPECT_TRUE(is(outcome, "a", from) && outcome.report.unexpected == Names{name == "a" ? "b" : "a"}) << outcome.text;
    EXPECT_EQ(outcome.report.tied, name == "a" ? Names() : Names{"a"});
  }
  for (const auto& [wrong, part] : std::map<std::string, std::string>{
           {"scale", "untie scale: is not stored as one of several"}, {"c", "untie c: is not stored"}}) {
    options.untie = {wrong};
    outcome = import_pair(true, {{"a", one}, {"b", other}, {"scale", scale}}, nullptr, options);
    EXPECT_TRUE(outcome.code == static_cast<int>(ExitCode::kConfig) && holds(outcome, part)) << outcome.text;
  }
  options.untie = {"a", "b"};
  outcome = import_pair(true, {{"a", one}, {"b", other}, {"scale", scale}}, nullptr, options);
  EXPECT_TRUE(holds(outcome, "untie a and b: one of them can be the values of a")) << outcome.text;
  // A model without a tie is filled from a file that has one; two tensors are two.
  outcome = import_pair(false, {{"a", one}, {"scale", scale}}, {{"b", "a"}});
  EXPECT_TRUE(is(outcome, "a", 100) && is(outcome, "b", 100) && outcome.report.tied == Names{"b"}) << outcome.text;
  outcome = import_pair(false, {{"a", one}, {"b", other}, {"scale", scale}});
  EXPECT_TRUE(is(outcome, "a", 100) && is(outcome, "b", 200)) << outcome.text;
  outcome = import_pair(false, {{"a", one}, {"scale", scale}});
  EXPECT_TRUE(holds(outcome, "b: missing")) << outcome.text;
}

TEST(WeightsImport, EveryDifferenceInOneError) {
  const auto outcome = import_pair(false, {{"a", plain_tensor("F32", {6, 5}, thirty(0))},
                                           {"stray", plain_tensor<float>("F32", {1}, {1})},
                                           {"scale", plain_tensor<std::int64_t>("I64", {3}, {1, 2, 3})}});
  EXPECT_EQ(outcome.code, static_cast<int>(ExitCode::kConfig));
  for (const char* part : {"4 differences", "a: has the shape [6, 5] in the files, [5, 6] in the model", "b: missing",
                           "stray: unexpected", "scale: is I64 in the files, F32 in the model"})
    EXPECT_TRUE(holds(outcome, part)) << part << ": " << outcome.text;
  ImportOptions options;
  options.partial = {"b*"};
  const auto partial = import_pair(
      false, {{"a", plain_tensor("F32", {5, 6}, thirty(9))}, {"scale", plain_tensor<float>("F32", {3}, {1, 2, 3})}},
      nullptr, options);
  EXPECT_EQ(partial.code, 0) << partial.text;
  EXPECT_EQ(partial.report.missing, std::vector<std::string>{"b"});
  EXPECT_TRUE(partial.values.at("b").equal(at::zeros({5, 6})));
  const auto integers = import_pair(false, {{"a", plain_tensor("I32", {5, 6}, thirty(0))},
                                            {"b", plain_tensor("F32", {5, 6}, thirty(0))},
                                            {"scale", plain_tensor<std::uint16_t>("BF16", {3}, {1, 2, 3})}});
  EXPECT_TRUE(holds(integers, "1 difference") && holds(integers, "a: is I32") && holds(integers, "dequantise"))
      << integers.text;
  EXPECT_EQ(import_pair(false, {}, nullptr).code, static_cast<int>(ExitCode::kConfig));
}

TEST(WeightsImport, DtypesBecomeMasters) {
  std::vector<double> doubles(30);
  for (std::size_t i = 0; i < 30; ++i) doubles[i] = 1 + std::ldexp(static_cast<double>(i), -27);
  std::vector<std::uint16_t> halves(30);
  for (std::size_t i = 0; i < 30; ++i) halves[i] = static_cast<std::uint16_t>(0x3c00 + i * 37);
  const auto outcome =
      import_pair(false, {{"a", plain_tensor("F64", {5, 6}, doubles)},
                          {"b", plain_tensor("F16", {5, 6}, halves)},
                          {"scale", plain_tensor<std::uint16_t>("BF16", {3}, {0x3f80, 0x4000, 0x4040})}});
  ASSERT_EQ(outcome.code, 0) << outcome.text;
  const auto a = outcome.values.at("a").view({-1}), b = outcome.values.at("b").view({-1});
  for (std::int64_t i = 0; i < 30; ++i) {
    EXPECT_EQ(a[i].item<float>(), static_cast<float>(doubles[static_cast<std::size_t>(i)]));
    EXPECT_EQ(b[i].item<float>(), std::ldexp(1024.0f + static_cast<float>(halves[static_cast<std::size_t>(i)] & 1023),
                                             (halves[static_cast<std::size_t>(i)] >> 10) - 25));
  }
  EXPECT_TRUE(outcome.values.at("scale").equal(at::tensor({1.f, 2.f, 3.f})));
  ASSERT_EQ(outcome.report.converted.size(), 3u);
  // 2^-27 compared with 1 is a quarter of fp32's last place.
  EXPECT_TRUE(outcome.report.converted[0].starts_with("a: F64, largest relative change ") &&
              outcome.report.converted[1] == "b: F16")
      << outcome.report.converted[0] << outcome.report.converted[1];
}

// --- export -------------------------------------------------------------------------------------

// The files of GPT-2 from our masters, by transformers' definition of Conv1D.
std::map<std::string, at::Tensor> gpt2_of(const std::map<std::string, at::Tensor>& ours) {
  std::map<std::string, at::Tensor> theirs{{"transformer.wte.weight", ours.at("token.weight")},
                                           {"transformer.wpe.weight", ours.at("position.weight")},
                                           {"transformer.ln_f.weight", ours.at("norm.weight")},
                                           {"transformer.ln_f.bias", ours.at("norm.bias")}};
  for (const std::string layer : {"0", "1"})
    for (const auto& [mine, other] : std::map<std::string, std::string>{{"norm1", "ln_1"},
                                                                        {"norm2", "ln_2"},
                                                                        {"qkv", "attn.c_attn"},
                                                                        {"projection", "attn.c_proj"},
                                                                        {"up", "mlp.c_fc"},
                                                                        {"down", "mlp.c_proj"}}) {
      const auto weight = ours.at("blocks." + layer + "." + mine + ".weight");
      theirs["transformer.h." + layer + "." + other + ".weight"] = weight.dim() == 2 ? weight.t().contiguous() : weight;
      theirs["transformer.h." + layer + "." + other + ".bias"] = ours.at("blocks." + layer + "." + mine + ".bias");
    }
  return theirs;
}

void expect_files(const fs::path& folder, const std::map<std::string, at::Tensor>& expected, at::ScalarType dtype) {
  const auto files = plain_folder(folder);
  ASSERT_EQ(files.size(), expected.size());
  for (const auto& [name, values] : expected) EXPECT_TRUE(tensor_of(files.at(name)).equal(values.to(dtype))) << name;
}

std::map<std::string, std::string> bytes_in(const fs::path& path) {
  std::map<std::string, std::string> bytes;
  if (!fs::is_directory(path)) return {{"", file_text(path)}};
  for (const auto& entry : fs::recursive_directory_iterator(path))
    if (entry.is_regular_file()) bytes[fs::relative(entry.path(), path)] = file_text(entry.path());
  return bytes;
}

TEST(WeightsExport, FilesAreTheMastersForAllRanksAndStages) {
  for (const int world : {1, 2, 3, 5})
    for (const int stage : {0, 2, 3}) {
      TempFolder folder(TempFolder::On::Memory);
      on_ranks(world, [&](const auto& comm) {
        const auto gpt = tiny_gpt();
        engine::State state(gpt, options_of(stage), comm);
        (void)import_weights(state, formats::system_files(), hf_model("hf-gpt2").string(), gpt2_names());
        ExportOptions options;
        options.names = "gpt2";
        options.heads = 2;
        options.shard_bytes = 3000;
        const auto report = export_weights(state, formats::system_files(), folder.file("first"), options);
        EXPECT_EQ(report.tensors, 28);
        for (int step = 0; step < 2; ++step) train(state, *gpt, step);
        (void)export_weights(state, formats::system_files(), folder.file("hf"), options);
        options.dtype = "bf16";
        (void)export_weights(state, formats::system_files(), folder.file("bf16"), options);
        (void)export_weights(state, formats::system_files(), folder.file("plain"), {});
        options.dtype = "fp32";
        options.format = "pt";
        (void)export_weights(state, formats::system_files(), folder.file("weights.pt"), options);
        options.format = "universal";
        (void)export_weights(state, formats::system_files(), folder.file("universal"), options);
        options.format = "pt";
        checkpoint::save(state, formats::system_files(), folder.file("run"), "t");
        const auto masters = state.exports.full_state_dict();
        if (comm->rank() != 0) return;
        // Before a step: what transformers saved, bit for bit.
        EXPECT_EQ(plain_folder(folder.path() / "first"), plain_folder(hf_model("hf-gpt2")));
        expect_files(folder.path() / "plain", masters, at::kFloat);
        expect_files(folder.path() / "hf", gpt2_of(masters), at::kFloat);
        expect_files(folder.path() / "bf16", gpt2_of(masters), at::kBFloat16);
        // One process writes the same from the checkpoint.
        (void)export_checkpoint(folder.file("run"), folder.file("one.pt"), options);
        EXPECT_EQ(bytes_in(folder.file("one.pt")), bytes_in(folder.file("weights.pt")));
        options.format = "universal";
        (void)export_checkpoint(folder.file("run"), folder.file("one.universal"), options);
        EXPECT_EQ(bytes_in(folder.file("one.universal")), bytes_in(folder.file("universal")));
        EXPECT_EQ(bytes_in(folder.file("universal")).size(), 4 * 28 + 4u);
        options.format = "hf";
        (void)export_checkpoint(folder.file("run"), folder.file("one"), options);
        EXPECT_EQ(bytes_in(folder.file("one")), bytes_in(folder.file("hf")));
        const auto config = nlohmann::json::parse(file_text(folder.path() / "hf" / "config.json"));
        const auto theirs = nlohmann::json::parse(file_text(hf_model("hf-gpt2") / "config.json"));
        for (const char* field :
             {"architectures", "model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head",
              "activation_function", "layer_norm_epsilon", "tie_word_embeddings", "dtype"})
          EXPECT_EQ(config[field], theirs[field]) << field;
      });
    }
}

TEST(WeightsExport, TiesBuffersAndFrozenParameters) {
  TempFolder folder;
  on_ranks(2, [&](const auto& comm) {
    const auto module = std::make_shared<Pair>(true);
    const auto frozen = module->register_parameter("frozen", at::full({7}, 1.5, at::kFloat), false);
    engine::State state(module, options_of(3, R"("bf16": {"enabled": true}, )"), comm);
    (void)export_weights(state, formats::system_files(), folder.file("once"), {});
    ExportOptions options;
    options.duplicate_tied = true;
    options.dtype = "bf16";
    options.prefix = "p.";
    (void)export_weights(state, formats::system_files(), folder.file("twice"), options);
  });
  const auto once = plain_folder(folder.path() / "once");
  ASSERT_EQ(once.size(), 3u);
  EXPECT_EQ(once.at("a"), plain_tensor("F32", {5, 6}, thirty(0)));
  EXPECT_EQ(once.at("frozen"), plain_tensor<float>("F32", {7}, {1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5}));
  EXPECT_EQ(once.at("scale"), plain_tensor<float>("F32", {3}, {2, 2, 2})) << "buffers keep their dtype";
  EXPECT_EQ(plain_header(file_text(folder.path() / "once" / "model.safetensors"))["__metadata__"],
            (nlohmann::json{{"format", "pt"}, {"b", "a"}}));
  const auto twice = plain_folder(folder.path() / "twice");
  EXPECT_EQ(twice.at("p.a"), twice.at("p.b"));
  EXPECT_EQ(twice.at("p.a").dtype, "BF16");
  EXPECT_EQ(twice.size(), 4u);
}

TEST(WeightsExport, FaultsAreTheErrorOfAll) {
  TempFolder folder;
  on_ranks(3, [&](const auto& comm) {
    const auto module = std::make_shared<Pair>(false);
    engine::State state(module, options_of(1), comm);
    const auto fails = [&](const std::string& path, const ExportOptions& options, ExitCode code,
                           const std::string& part) {
      std::string text;
      EXPECT_EQ(code_of([&] { (void)export_weights(state, formats::system_files(), path, options); }, &text),
                static_cast<int>(code));
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    ExportOptions options;
    options.names = "gpt2";
    fails(folder.file("out"), options, ExitCode::kConfig, "b: no rule");
    options.names = "";
    options.dtype = "fp8";
    fails(folder.file("out"), options, ExitCode::kConfig, "fp8");
    fails(folder.text(), {}, ExitCode::kConfig, "exists");
    options.dtype = comm->rank() == 1 ? "bf16" : "fp32";
    fails(folder.file("out"), options, ExitCode::kConfig, "differ");
    const auto write = state.exports.pieces_to_load();
    for (const auto& piece : write)
      if (piece.kind == "master" && piece.name == "b") piece.write(0, at::full({piece.numel}, 1e6));
    options.dtype = "fp16";
    fails(folder.file("out"), options, ExitCode::kNumerical, "b: 30 values");
    EXPECT_FALSE(fs::exists(folder.path() / "out"));
    options.allow_overflow = true;
    (void)export_weights(state, formats::system_files(), folder.file("out"), options);
    comm->barrier();
    EXPECT_EQ(plain_folder(folder.path() / "out").at("b").bytes.substr(0, 4), std::string("\x00\x7c\x00\x7c", 4));
  });
}

// A host with a folder of its own: it does not see what other hosts make. Counts what is written.
struct OwnFiles : formats::FsOps {
  bool shares = true;
  std::atomic<int> writes{0};
  int info_at(int folder, const char* name, formats::FileInfo* out) override {
    return shares ? FsOps::info_at(folder, name, out) : -ENOENT;
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    ++writes;
    return FsOps::pwrite(fd, data, bytes, offset);
  }
};

TEST(WeightsExport, HostsWithoutASharedFileSystemAreAnErrorBeforeAnyWork) {
  for (const char* format : {"hf", "pt", "universal"}) {
    TempFolder folder;
    on_ranks(3, [&](const auto& comm) {
      const auto module = std::make_shared<Pair>(false);
      engine::State state(module, options_of(3), comm);
      ExportOptions options;
      options.format = format;
      OwnFiles files;
      files.shares = comm->rank() != 2;
      std::string text;
      EXPECT_EQ(code_of([&] { (void)export_weights(state, files, folder.file("out"), options); }, &text),
                static_cast<int>(ExitCode::kConfig))
          << format;
      EXPECT_NE(text.find("this rank does not see " + folder.text()), std::string::npos) << format << ": " << text;
      EXPECT_NE(text.find("rank 2/3"), std::string::npos) << text;
      EXPECT_NE(text.find("Hint: write to a file system that all hosts share"), std::string::npos) << text;
      // Rank 0 has made the files, with the headers that it knows; nobody has written a tensor.
      if (comm->rank() != 0) EXPECT_EQ(files.writes, 0) << format;
      comm->barrier();
      EXPECT_FALSE(fs::exists(folder.path() / "out")) << format;
      comm->barrier();
      (void)export_weights(state, formats::system_files(), folder.file("out"), options);
      comm->barrier();
      EXPECT_TRUE(fs::exists(folder.path() / "out")) << format;
    });
  }
}

TEST(WeightsExport, AFaultOfOneRankLeavesNothing) {
  for (const char* format : {"hf", "pt"})
    for (const int hit : {0, 1}) {
      TempFolder folder(TempFolder::On::Memory);
      int failed = 0;
      on_ranks(2, [&](const auto& comm) {
        const auto gpt = tiny_gpt();
        engine::State state(gpt, options_of(3), comm);
        ExportOptions options;
        options.names = "gpt2";  // panels, whose exchanges all ranks must reach
        options.format = format;
        for (int k = 1;; ++k) {
          FaultyFiles files(FaultyFiles::Fault::Error, k, ENOSPC);
          std::string text;
          const int code = code_of(
              [&] {
                (void)export_weights(state, comm->rank() == hit ? files : formats::system_files(), folder.file("out"),
                                     options);
              },
              &text);
          const auto texts = comm->all_gather_bytes(std::to_string(code) + text);
          EXPECT_EQ(texts[0], texts[1]);
          const auto struck = comm->all_gather_bytes(files.struck() ? "1" : "0");
          if (struck[static_cast<std::size_t>(hit)] == "0") {
            EXPECT_EQ(code, 0) << text;
            break;
          }
          if (code != 0 && comm->rank() == 0) {
            ++failed;
            EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << text;
            EXPECT_TRUE(text.find("rank " + std::to_string(hit) + "/2") != std::string::npos &&
                        text.find("No space left") != std::string::npos)
                << text;
          }
          comm->barrier();
          if (comm->rank() == 0) fs::remove_all(folder.path() / "out");
          if (comm->rank() == 0)
            for (const auto& entry : fs::directory_iterator(folder.path())) fs::remove_all(entry.path());
          comm->barrier();
        }
      });
      EXPECT_GT(failed, 5);
    }
}

// A job of two ranks dies at a call of either. Afterwards the files are whole or not there, and an export completes.
TEST(WeightsExport, KilledAtEveryCallOfEitherRank) {
  struct Form {
    const char* name;
    FaultyFiles::Fault fault;
  };
  const auto files_in = [](const fs::path& out) {
    std::map<std::string, std::string> all;
    if (fs::is_regular_file(out)) all[""] = file_text(out);
    if (fs::is_directory(out))
      for (const auto& entry : fs::directory_iterator(out)) all[entry.path().filename()] = file_text(entry.path());
    return all;
  };
  const auto write = [](const std::string& out, const Form& form, int hit, int k) {
    at::set_num_threads(1);
    on_ranks(2, [&](const auto& comm) {
      const auto gpt = tiny_gpt();
      engine::State state(gpt, options_of(3), comm);
      (void)import_weights(state, formats::system_files(), hf_model("hf-gpt2").string(), gpt2_names());
      ExportOptions options;
      options.names = "gpt2";
      options.format = form.name;
      FaultyFiles files(form.fault, k);
      (void)export_weights(state, comm->rank() == hit ? files : formats::system_files(), out, options);
    });
  };
  const auto in_a_child = [&](const std::string& out, const Form& form, int hit, int k) {
    const auto child = ::fork();
    EXPECT_GE(child, 0);
    if (child == 0) ::_exit(code_of([&] { write(out, form, hit, k); }) == 0 ? 0 : 1);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return status;
  };
  for (const Form form : {Form{"hf", FaultyFiles::Fault::DieBefore}, {"pt", FaultyFiles::Fault::DieAfter}})
    for (const int hit : {0, 1}) {
      TempFolder undisturbed(TempFolder::On::Memory);
      ASSERT_EQ(in_a_child(undisturbed.file("out"), form, -1, 1), 0);
      const auto wanted = files_in(undisturbed.path() / "out");
      ASSERT_FALSE(wanted.empty());
      int died = 0;
      for (int k = 1;; ++k) {
        TempFolder folder(TempFolder::On::Memory);
        const auto out = folder.path() / "out";
        const auto status = in_a_child(out, form, hit, k);
        const auto label = std::string(form.name) + ", rank " + std::to_string(hit) + ", call " + std::to_string(k);
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        ASSERT_TRUE(killed || status == 0) << label << ": " << status;
        for (const auto& entry : fs::directory_iterator(folder.path())) {
          const auto name = entry.path().filename().string();
          EXPECT_TRUE(name == "out" || (killed && name.starts_with(".tmp-"))) << label << " leaves " << name;
        }
        if (!fs::exists(out)) {
          EXPECT_TRUE(killed) << label;
          ASSERT_EQ(in_a_child(out, form, -1, 1), 0) << label;
        }
        EXPECT_TRUE(files_in(out) == wanted) << label;
        if (!killed) break;
        ++died;
      }
      EXPECT_GT(died, 5) << form.name << " " << hit;
    }
}

}  // namespace
}  // namespace zero::test::weights_ranks_test
