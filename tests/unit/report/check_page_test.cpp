// script/check-page: the report's script and style are valid, and faults in copies of them are detected. Skipped if its
// tools are missing.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/file_text.h"

namespace check_page_test {
namespace {

using zero::test::file_text;
namespace fs = std::filesystem;

const fs::path kPage = ZERO_SOURCE_DIR "/tools/report/page";

struct Checked {
  int code = -1;
  std::string out;
};

Checked check(const fs::path& folder) {
  Checked checked;
  FILE* pipe = ::popen((ZERO_SOURCE_DIR "/script/check-page '" + folder.string() + "' 2>&1").c_str(), "r");
  char part[512];
  while (pipe && std::fgets(part, sizeof part, pipe)) checked.out += part;
  if (pipe) checked.code = WEXITSTATUS(::pclose(pipe));
  return checked;
}

class CheckPage : public testing::Test {
 protected:
  CheckPage() : folder_(fs::temp_directory_path() / ("check-page-" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~CheckPage() override { fs::remove_all(folder_); }
  void SetUp() override {
    const Checked whole = check(kPage);
    if (whole.code == 77) GTEST_SKIP() << "no oxlint or tinycss2 in .deps/lint: script/setup";
    ASSERT_EQ(whole.code, 0) << whole.out;
  }

  // The page with `from` replaced in one of its files must be refused, with `says`.
  void fault(const std::string& name, const std::string& from, const std::string& to, const std::string& says) const {
    fs::copy(kPage, folder_, fs::copy_options::overwrite_existing | fs::copy_options::recursive);
    auto text = file_text(kPage / name);
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    std::ofstream(folder_ / name) << text.replace(at, from.size(), to);
    const Checked checked = check(folder_);
    EXPECT_EQ(checked.code, 1) << to;
    EXPECT_NE(checked.out.find(name + ":"), std::string::npos) << checked.out;
    EXPECT_NE(checked.out.find(says), std::string::npos) << checked.out;
  }

  const fs::path folder_;
};

TEST_F(CheckPage, FaultsOfTheScriptAreSeen) {
  fault("page.js", "function commas(text) {", "function commas(text {", "Expected");
  fault("page.js", "redraws.push(redraw)", "redraws.push(redrew)", "'redrew' is not defined");
  fault("page.js", "const redraws = [];", "const redraws = [], spare = [];", "'spare' is declared but never used");
  fault("page.js", "value === 0", "value == 0", "===");
}

TEST_F(CheckPage, FaultsOfTheStyleAreSeen) {
  fault("page.css", "{box-sizing:border-box}", "{box-sizing:border-box", "a rule within a rule");
  fault("page.css", "{box-sizing:border-box}", "{box-sizing:border-box;", "a rule within a rule");
  fault("page.css", "{box-sizing:border-box}", "{box-sizing:border-box}}", "}");
  fault("page.css", "{box-sizing:border-box}", "box-sizing:border-box}", "}");
  fault("page.css", "{box-sizing:border-box}", "{box-sizing border-box}", "EOF reached before {} block");
  fault("page.css", "margin:0;background", "margin:0 background", "the value of margin has a colon in it");
  fault("page.css", "background:var(--bg)", "background:var(--bgr)", "var(--bgr) is not declared");
  fault("page.css", ".curve{", ".kurve{", "the class kurve");
  fault("page.css", "margin:0;background", "margin:0;margin:0;background", "margin stands twice");
}

}  // namespace
}  // namespace check_page_test
