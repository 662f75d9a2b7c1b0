// ExportOptions::change: what is written differs from the model by what the function adds, element by element, whatever
// ranks and stage hold the elements and whatever order a name map gives them; the model stays.
#include <torch/types.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include "checkpoint/weights.h"
#include "models/gpt.h"
#include "support/on_ranks.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::export_change_test {
namespace {

constexpr const char* kTrained = "blocks.0.qkv.weight";      // [24, 8]; of "gpt2": [8, 24]
constexpr const char* kFrozenWeight = "blocks.1.up.weight";  // in bf16, without a master
constexpr const char* kTheirTrained = "transformer.h.0.attn.c_attn.weight";
constexpr const char* kTheirFrozen = "transformer.h.1.mlp.c_fc.weight";

// Of the place in the flattened parameter; exact in fp32 with small weights only if the sum is made there.
float added(std::int64_t place) { return 0.001F * static_cast<float>(place % 97); }

void add(std::int64_t begin, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += added(begin + static_cast<std::int64_t>(i));
}

Options options_of(int stage) {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": )" +
      std::to_string(stage) + "}}");
}

std::shared_ptr<models::GptImpl> tiny_gpt() {
  torch::manual_seed(5);
  auto gpt = models::Gpt(models::GptConfig{.layers = 2, .hidden = 8, .heads = 2, .sequence = 16, .vocabulary = 48});
  gpt->named_parameters()[kFrozenWeight].set_requires_grad(false);
  return gpt.ptr();
}

// What one element of each file should be, from the file without a change.
void expect_added(const PlainTensors& changed, const PlainTensors& plain, const std::string& name, bool transposed) {
  const auto& one = changed.at(name);
  ASSERT_EQ(one.dtype, "F32");
  const auto got = one.floats(), base = plain.at(name).floats();
  const std::int64_t rows = one.shape[0], columns = one.shape[1];
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) {
      const auto at = static_cast<std::size_t>(i * columns + j);
      ASSERT_EQ(got[at], base[at] + added(transposed ? j * rows + i : i * columns + j))
          << name << " " << i << ", " << j;
    }
}

TEST(ExportChange, IsWrittenAndTheModelStays) {
  for (const int world : {1, 2, 3})
    for (const int stage : {0, 3}) {
      const TempFolder folder(TempFolder::On::Memory);
      on_ranks(world, [&](const auto& comm) {
        engine::State state(tiny_gpt(), options_of(stage), comm);
        const auto write = [&](const std::string& name, const ExportOptions& options) {
          (void)checkpoint::export_weights(state, formats::system_files(), folder.file(name), options);
        };
        ExportOptions options;
        write("plain", options);
        options.names = "gpt2";
        options.heads = 2;
        write("their-plain", options);
        options.change = {{kTrained, add}, {kFrozenWeight, add}};
        write("their-changed", options);
        options.names = "";
        write("changed", options);
        options.change.clear();
        write("again", options);
      });
      const auto plain = plain_folder(folder.path() / "plain"), changed = plain_folder(folder.path() / "changed");
      expect_added(changed, plain, kTrained, false);
      expect_added(changed, plain, kFrozenWeight, false);
      const auto theirs = plain_folder(folder.path() / "their-changed");
      const auto their_plain = plain_folder(folder.path() / "their-plain");
      expect_added(theirs, their_plain, kTheirTrained, true);
      expect_added(theirs, their_plain, kTheirFrozen, true);
      for (const auto& [name, tensor] : plain)
        if (name != kTrained && name != kFrozenWeight) EXPECT_EQ(changed.at(name), tensor) << name;
      EXPECT_EQ(plain_folder(folder.path() / "again"), plain);
    }
}

TEST(ExportChange, NamesNoParameterOrDiffersBetweenRanks) {
  const TempFolder folder(TempFolder::On::Memory);
  on_ranks(2, [&](const auto& comm) {
    engine::State state(tiny_gpt(), options_of(3), comm);
    const auto fails = [&](const ExportOptions& options, const std::string& part) {
      std::string text;
      EXPECT_EQ(
          code_of(
              [&] { (void)checkpoint::export_weights(state, formats::system_files(), folder.file("out"), options); },
              &text),
          static_cast<int>(ExitCode::kConfig));
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    ExportOptions options;
    options.change["blocks.0.qkv"] = add;
    fails(options, "for blocks.0.qkv, expected names of parameters");
    options.change.clear();
    if (comm->rank() == 1) options.change[kTrained] = add;
    fails(options, "differ");
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "out"));
  });
}

TEST(ExportChange, IsNotForFiles) {
  const TempFolder folder(TempFolder::On::Memory);
  ExportOptions options;
  options.change["wte.weight"] = add;
  std::string text;
  EXPECT_EQ(code_of([&] { (void)export_checkpoint(hf_model("hf-gpt2"), folder.file("out"), options); }, &text),
            static_cast<int>(ExitCode::kConfig));
  EXPECT_NE(text.find("Engine::export_weights takes it"), std::string::npos) << text;
}

}  // namespace
}  // namespace zero::test::export_change_test
