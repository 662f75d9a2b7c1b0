// DeepSpeed's loss scaler of fp16 through its checkpoints and ours: a run that continues from them has the scales that
// DeepSpeed's own rule gives (script/make-interchange-fixtures).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <zero/checkpoint_tools.h>

#include "interchange/deepspeed_scaler.h"
#include "interchange/source.h"
#include "optim/loss_scaler.h"
#include "support/folder.h"
#include "unit/interchange/source_samples.h"

namespace loss_scale_files_test {
namespace {

using zero::interchange::SourceScaler;
using zero::test::golden;
using zero::test::TempFolder;

std::optional<SourceScaler> scaler_in(const std::string& path) {
  const auto source = zero::interchange::open_source(zero::formats::system_files(), path);
  EXPECT_TRUE(source->progress()) << path;
  return source->progress() ? source->progress()->scaler : std::nullopt;
}

nlohmann::json expected_scalers() {
  return nlohmann::json::parse(zero::test::bytes_of_file(golden("deepspeed-fp16/scalers.json")));
}

zero::optim::LossScaler scaler_of(const SourceScaler& stored) {
  zero::config::Settings settings;
  settings.precision = zero::config::Precision::Fp16;
  settings.scaler = {stored.dynamic ? 0 : stored.scale,
                     16,
                     stored.window,
                     stored.most_hysteresis,
                     stored.consecutive,
                     stored.smallest};
  zero::optim::LossScaler scaler(settings);
  scaler.set_state({stored.scale, stored.hysteresis, stored.good, 0});
  return scaler;
}

// The scales of DeepSpeed's rule: without overflows for many steps, and up to an overflow in the fourth.
void expect_scales(const SourceScaler& stored, const nlohmann::json& wanted, const std::string& name) {
  EXPECT_EQ(stored.scale, wanted["scale"]) << name;
  EXPECT_EQ(stored.dynamic, !wanted["static"]) << name;
  auto clean = scaler_of(stored), struck = scaler_of(stored);
  for (std::size_t step = 0; step < wanted["clean"].size(); ++step) {
    clean.update(false);
    EXPECT_EQ(clean.scale(), wanted["clean"][step]) << name << ", step " << step;
  }
  for (std::size_t step = 0; step < 4; ++step) {
    struck.update(step == 3);
    EXPECT_EQ(struck.scale(), wanted["overflow"][step]) << name << ", step " << step;
  }
}

TEST(LossScaleFiles, ContinueAsDeepSpeedDoes) {
  const auto scalers = expected_scalers();
  EXPECT_EQ(scalers.size(), 7u);
  for (const auto& [name, wanted] : scalers.items()) {
    const auto source = golden("deepspeed-fp16/" + name);
    const auto stored = scaler_in(source);
    ASSERT_TRUE(stored) << name;
    expect_scales(*stored, wanted, name);
    // Through a checkpoint of ours, and from it to DeepSpeed and back.
    const TempFolder folder(TempFolder::On::Memory);
    (void)zero::import_checkpoint(source, folder.path() / "run", "t");
    const auto info = zero::inspect_checkpoint(folder.path() / "run");
    EXPECT_EQ(info.recipe, "F16");
    EXPECT_EQ(std::stod(info.loss_scale), wanted["scale"]);
    const auto own = scaler_in(folder.file("run"));
    ASSERT_TRUE(own) << name;
    expect_scales(*own, wanted, name + " imported");
    zero::ExportOptions options;
    options.format = "universal";
    (void)zero::export_checkpoint(folder.path() / "run", folder.path() / "universal", options);
    const auto back = scaler_in(folder.file("universal"));
    ASSERT_TRUE(back) << name;
    expect_scales(*back, wanted, name + " exported");
    EXPECT_EQ(back->window, stored->window);
    EXPECT_EQ(back->most_hysteresis, stored->most_hysteresis);
    EXPECT_EQ(back->hysteresis, stored->hysteresis);
    EXPECT_EQ(back->consecutive, stored->consecutive);
    EXPECT_EQ(back->good, stored->good);
  }
}

TEST(LossScaleFiles, OtherRecipesHaveNone) {
  for (const char* const name : {"deepspeed-1-bf16", "deepspeed-3-fp32", "deepspeed-0-fp32", "universal-2"})
    EXPECT_FALSE(scaler_in(golden(name))) << name;
}

// A step of DeepSpeed's rule, in its own words.
struct Reference {
  double scale = 1;
  std::int64_t iteration = 0, overflow = -1, window = 1;
  void clean() {
    const auto stable = iteration - overflow - 1;
    if (stable > 0 && stable % window == 0) scale *= 2;
    ++iteration;
  }
};

TEST(LossScaleFiles, EveryStateDoublesAtTheSameStep) {
  for (std::int64_t window = 1; window <= 5; ++window)
    for (std::int64_t overflow = -1; overflow < 6; ++overflow)
      for (std::int64_t iteration = overflow + 1; iteration < 20; ++iteration) {
        zero::interchange::PickleWriter pickle;
        pickle.begin_dict();
        SourceScaler given;
        given.window = window;
        given.scale = 256;
        given.good = iteration - overflow - 2;
        zero::interchange::write_deepspeed_scaler(pickle, given, iteration);
        pickle.end_dict();
        const auto bytes = pickle.finish();
        const auto tree = zero::interchange::parse_pickle(bytes, "it");
        const auto read = zero::interchange::read_deepspeed_scaler({tree.root(), "it"}, true);
        ASSERT_TRUE(read);
        auto ours = scaler_of(*read);
        Reference theirs{256, iteration, overflow, window};
        for (int step = 0; step < 12; ++step) {
          ours.update(false);
          theirs.clean();
          ASSERT_EQ(ours.scale(), theirs.scale) << window << " " << overflow << " " << iteration << " " << step;
        }
      }
}

TEST(LossScaleFiles, ImpossibleNumbersAreDamage) {
  const auto fails = [](const auto& change) {
    zero::interchange::PickleWriter pickle;
    pickle.begin_dict();
    SourceScaler given;
    given.scale = 256;
    change(given);
    zero::interchange::write_deepspeed_scaler(pickle, given, 10);
    pickle.end_dict();
    const auto bytes = pickle.finish();
    const auto tree = zero::interchange::parse_pickle(bytes, "it");
    try {
      (void)zero::interchange::read_deepspeed_scaler({tree.root(), "it"}, true);
    } catch (const zero::IoError& error) {
      return error.code() == zero::ExitCode::kCheckpoint;
    }
    return false;
  };
  EXPECT_FALSE(fails([](SourceScaler&) {}));
  EXPECT_TRUE(fails([](SourceScaler& s) { s.scale = 0; }));
  EXPECT_TRUE(fails([](SourceScaler& s) { s.scale = -2; }));
  EXPECT_TRUE(fails([](SourceScaler& s) { s.scale = HUGE_VAL; }));
  EXPECT_TRUE(fails([](SourceScaler& s) { s.window = 0; }));
  EXPECT_TRUE(fails([](SourceScaler& s) { s.hysteresis = 0; }));
  EXPECT_TRUE(fails([](SourceScaler& s) { s.good = -2; })) << "an overflow after the last step";
}

}  // namespace
}  // namespace loss_scale_files_test
