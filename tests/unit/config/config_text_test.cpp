// Messages about configurations with hostile or unusual text: no terminal control sequences, counts stated once, limits
// named, and no explanation of a configuration that cannot start as if it could.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "base/printable.h"
#include "config/document.h"

namespace zero::config_text_test {
namespace {

using base::Lines;
using base::printable;

std::string error_of(const std::string& text, const std::vector<Setting>& settings = {}) {
  try {
    Options::from_json(text, "ds.json", settings);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return {};
}

// Every control character, C1 in UTF-8, a byte that is not UTF-8, an override of direction, a line separator.
bool commands(const std::string& text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7F) return true;
    if (c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0) return true;
  }
  return text.find("\u202e") != std::string::npos || text.find("\u2066") != std::string::npos ||
         text.find("\u2028") != std::string::npos;
}

TEST(Printable, EscapesWhatCommandsATerminalAndNothingElse) {
  EXPECT_EQ(printable("a\x1b[31mb\x7f\r"), "a\\u001b[31mb\\u007f\\u000d");
  EXPECT_EQ(printable("\u0080\u009b\u009f\u00a0"), "\\u0080\\u009b\\u009f\u00a0");
  EXPECT_EQ(printable("\u202a\u202e\u2066\u2069\u200f\u061c\u2028"),
            "\\u202a\\u202e\\u2066\\u2069\\u200f\\u061c\\u2028");
  EXPECT_EQ(printable("\x9b"
                      "x\xc3(\xe2\x82\xf5\xed\xa0\x80\xc0\xaf"),
            "\\x9bx\\xc3(\\xe2\\x82\\xf5\\xed\\xa0\\x80\\xc0\\xaf");
  const std::string good = "über 漢字 🙂 \u0301 \"quotes\" \\u001b\n\tend";
  EXPECT_EQ(printable(good), good);
  EXPECT_EQ(printable("a\nb\tc", Lines::Escape), "a\\nb\\tc");
  for (int c = 0; c < 256; ++c) {
    const std::string once = printable(std::string("x") + static_cast<char>(c) + "y");
    EXPECT_FALSE(commands(once)) << c;
    EXPECT_EQ(printable(once), once) << c;
  }
  EXPECT_EQ(base::width_of("aü漢🙂"), 4u);
}

TEST(ConfigText, NoMessageCommandsTheTerminal) {
  const std::vector<std::string> texts = {
      R"({"a\u001b[2Jb\u009bc\u202ed": 1})",
      R"({"line\nbreak\tand more": 1, "gradient_clipping": "\u001b[2J\u0085"})",
      R"({"optimizer": {"type": "Ad\u001bam"}})",
      R"({"zero_optimization": {"st\u2066age": 1}})",
      R"({"libzero": {"parameter_groups": [{"pat\u001btern": "x"}]}})",
      "{\"seed\": -1} // \x1b[31mred",
      "{\"seed\": -1, \"\u202eevil\": 1}",
      "{\x1b: 1}",
      "{\"seed\": \u009b}",
      "{\"a\": 1, \"a\": 2, \"\u202e\": {\"b\": 1, \"b\": 2}}",
  };
  for (const auto& text : texts) {
    const std::string said = error_of(text);
    EXPECT_FALSE(said.empty()) << text;
    EXPECT_FALSE(commands(said)) << printable(said);
  }
  const std::string said = error_of(texts[1]);
  EXPECT_NE(said.find("error: /line\\nbreak\\tand more: unknown key"), std::string::npos) << said;
  // Notices and explain also show keys and values; a file's name is untrusted text as well.
  const auto options = Options::from_json(
      R"({"train_batch_size": 1, "autotuning": {"\u001b": 1}, "tensorboard": {"job_name": "\u001b[31m\u009b\u202e"}})",
      "d\x1b.json");
  for (const auto& notice : options.notices()) EXPECT_FALSE(commands(notice)) << printable(notice);
  EXPECT_FALSE(options.notices().empty());
  EXPECT_FALSE(commands(options.explain(1, true))) << printable(options.explain(1, true));
  EXPECT_FALSE(commands(explain_json(options, 1, true)));
  EXPECT_EQ(nlohmann::json::parse(explain_json(options, 1, true)).at("values").at("tensorboard.job_name").at("value"),
            "\u001b[31m\u009b\u202e");
}

TEST(ConfigText, TheCaretStandsBelowItsWordBehindAnEscape) {
  const std::string said = error_of("{ /* \x1b\u202e\u00fc */ \"stge\": 1}");
  const auto from = said.find("     1 | "), middle = said.find('\n', from), to = said.find('\n', middle + 1);
  ASSERT_NE(to, std::string::npos) << said;
  const std::string line = said.substr(from, middle - from), marks = said.substr(middle + 1, to - middle - 1);
  EXPECT_EQ(line, "     1 | { /* \\u001b\\u202e\u00fc */ \"stge\": 1}");
  EXPECT_EQ(marks.find('^'), base::width_of(line.substr(0, line.find("\"stge\"")))) << said;
  EXPECT_TRUE(marks.ends_with("^~~~~~")) << said;
}

TEST(ConfigText, OneGroupIsNotAChoiceOfOneOrOne) {
  const std::string start = R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0, 0]}})";
  const std::string one = error_of(start + "}");
  EXPECT_NE(one.find("got 3 values, expected 1, for there is one parameter group"), std::string::npos) << one;
  EXPECT_EQ(one.find("1 or 1"), std::string::npos) << one;
  const std::string two = error_of(start + R"(, "libzero": {"parameter_groups": [{"pattern": "*.bias"}]}})");
  EXPECT_NE(two.find("got 3 values, expected 1 or 2 (one per parameter group)"), std::string::npos) << two;
}

std::string nested(int levels) {
  std::string text = "1";
  for (int i = 0; i < levels; ++i) text = "{\"a\": " + text + "}";
  return text;
}

TEST(ConfigText, WhatIsTooDeepIsCalledSo) {
  const std::string batch = R"({"train_micro_batch_size_per_gpu": 1)";
  EXPECT_EQ(error_of(batch + ", \"autotuning\": " + nested(31) + "}"), "");
  const std::string in_file = error_of(batch + ", \"autotuning\": " + nested(33) + "}");
  EXPECT_NE(in_file.find("got more than 32 levels [too-deep]"), std::string::npos) << in_file;
  EXPECT_EQ(error_of(batch + "}", {{"autotuning", nested(32), "CLI"}}), "");
  for (const char* key : {"autotuning", "zero_optimization", "optimizer.params.betas"}) {
    const std::string set = error_of(batch + "}", {{key, nested(33), "CLI"}});
    EXPECT_NE(set.find("got more than 32 levels [too-deep]"), std::string::npos) << set;
    EXPECT_EQ(set.find("wrong-type"), std::string::npos) << set;
    EXPECT_NE(set.find("--set:1:"), std::string::npos) << set;
  }
  // Text that is not JSON is a word, as before.
  EXPECT_EQ(error_of(batch + "}", {{"optimizer.type", "AdamW", "CLI"}}), "");
}

TEST(ConfigText, ExplainSaysThatNothingCanStart) {
  const auto none = Options::from_json(R"({"zero_optimization": {"stage": 2}})", "ds.json");
  const std::string said = none.explain(1, false);
  EXPECT_NE(said.find("cannot start: batch sizes: got neither train_batch_size nor train_micro_batch_size_per_gpu, "
                      "expected one of them. "
                      "Hint: add \"train_micro_batch_size_per_gpu\": 1 to ds.json."),
            std::string::npos)
      << said;
  EXPECT_NE(cannot_start(none, {}), "");
  EXPECT_EQ(nlohmann::json::parse(explain_json(none, 1, false)).at("cannot_start"), cannot_start(none, {}));
  const auto eight = Options::from_json(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4})");
  EXPECT_EQ(cannot_start(eight, {}), "") << "two ranks can";
  EXPECT_EQ(cannot_start(eight, 2), "");
  EXPECT_NE(cannot_start(eight, 3).find("cannot be divided by 12"), std::string::npos) << cannot_start(eight, 3);
  EXPECT_NE(eight.explain(3, false).find("cannot start with 3 ranks: "), std::string::npos) << eight.explain(3, false);
  EXPECT_EQ(eight.explain(2, false).find("cannot start"), std::string::npos);
  EXPECT_TRUE(nlohmann::json::parse(explain_json(eight, 2, false)).at("cannot_start").is_null());
}

}  // namespace
}  // namespace zero::config_text_test
