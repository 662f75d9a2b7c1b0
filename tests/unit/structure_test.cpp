// The structure of the tree: which layer may include which, how long a file may be, and that the
// library neither prints nor ends the process.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {
namespace fs = std::filesystem;

const fs::path kRoot = ZERO_SOURCE_DIR;

std::vector<std::string> lines_of(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<fs::path> sources_under(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto extension = entry.path().extension();
    if (entry.is_regular_file() && (extension == ".cpp" || extension == ".h" || extension == ".cu"))
      files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(Structure, ALayerIncludesOnlyItselfAndThoseAboveIt) {
  const std::vector<std::string> layers{"base", "config", "comm",   "memory",     "torchglue", "offload", "optim",
                                        "step", "cuda",   "engine", "checkpoint", "launch",    "report",  "plan"};
  // The step, launching, reporting and planning know nothing of the engine's inside.
  const std::set<std::string> outer{"step", "launch", "report", "plan"};
  // What the step and a plan may use of layers that otherwise know torch.
  const std::set<std::string> arithmetic{"memory/shard_layout.h", "memory/unit_cut.h",  "memory/prefetcher.h",
                                         "memory/ledger.h",       "optim/loss_scaler.h", "optim/clipping.h"};
  const std::regex include("^#include \"([a-z_]+)/[^\"]+\"");
  int checked = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (!fs::exists(kRoot / "src" / layers[l])) continue;
    for (const auto& file : sources_under(kRoot / "src" / layers[l])) {
      for (const auto& line : lines_of(file)) {
        std::smatch match;
        if (!std::regex_search(line, match, include)) continue;
        const auto to = std::find(layers.begin(), layers.end(), match[1].str());
        ASSERT_NE(to, layers.end()) << file << ": " << line;
        const auto t = static_cast<std::size_t>(to - layers.begin());
        EXPECT_LE(t, l) << file << " includes a layer below it: " << line;
        const auto begin = line.find('"') + 1;
        const bool shared = arithmetic.count(line.substr(begin, line.find('"', begin) - begin)) != 0;
        if ((layers[l] == "plan" && (shared || *to == "step")) || (layers[l] == "step" && shared)) continue;
        if (outer.count(layers[l]) != 0 && *to != layers[l]) EXPECT_LE(t, 1u) << file << " may know base and config only: " << line;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 50);
}

TEST(Structure, SomeLayersDoNotKnowTorch) {
  const std::regex torch("^#include <(torch|ATen|c10)/");
  for (const char* layer : {"base", "config", "step", "launch", "report", "plan"}) {
    if (!fs::exists(kRoot / "src" / layer)) continue;
    for (const auto& file : sources_under(kRoot / "src" / layer))
      for (const auto& line : lines_of(file)) EXPECT_FALSE(std::regex_search(line, torch)) << file << ": " << line;
  }
}

// What a ZeRO stage means is said once, where the facts of a run are derived.
TEST(Structure, TheStepReadsNoStageButInItsFacts) {
  const std::regex stage("\\bstage_?[ .;,)=<>-]");  // not at the end of a text
  int files = 0;
  for (const auto& file : sources_under(kRoot / "src" / "step")) {
    ++files;
    if (file.stem() == "facts") continue;
    for (const auto& line : lines_of(file))
      EXPECT_FALSE(std::regex_search(line.substr(0, line.find("//")), stage)) << file << ": " << line;
  }
  EXPECT_GT(files, 15);
}

TEST(Structure, ModelsAndDataDoNotKnowLibzero) {
  const std::regex zero("^#include [<\"](zero|engine|comm|config|memory|torchglue|optim|checkpoint|base)/");
  for (const char* folder : {"models", "data"})
    for (const auto& file : sources_under(kRoot / folder))
      for (const auto& line : lines_of(file)) EXPECT_FALSE(std::regex_search(line, zero)) << file << ": " << line;
}

TEST(Structure, OnlyTransportsSeeC10dAndOnlyPublicHeadersArePublic) {
  const std::regex c10d("^#include <(torch/csrc/distributed|gloo|nccl)");
  for (const auto& file : sources_under(kRoot / "src"))
    for (const auto& line : lines_of(file))
      if (std::regex_search(line, c10d)) EXPECT_EQ(file.parent_path().filename(), "comm") << file << ": " << line;
  const std::regex inner("^#include \"");
  for (const auto& file : sources_under(kRoot / "include"))
    for (const auto& line : lines_of(file)) EXPECT_FALSE(std::regex_search(line, inner)) << file << ": " << line;
}

TEST(Structure, FilesStayShort) {
  for (const char* folder : {"src", "include", "cli", "models", "data"}) {
    for (const auto& file : sources_under(kRoot / folder)) {
      const auto count = lines_of(file).size();
      EXPECT_LE(count, file.extension() == ".h" ? 200u : 600u) << file;
      EXPECT_TRUE(lines_of(file).front().starts_with("//") || file.extension() == ".cpp") << file << " opens without saying what it is for";
    }
  }
}

std::string output_of(const std::string& command) {
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string text;
  std::array<char, 4096> part;
  while (const auto n = std::fread(part.data(), 1, part.size(), pipe.get())) text.append(part.data(), n);
  return text;
}

TEST(Structure, TheLibraryNeitherPrintsNorEndsTheProcess) {
  const std::string library = std::string(ZERO_BINARY_DIR) + "/lib/libzero.so";
  ASSERT_TRUE(fs::exists(library));
  const auto undefined = output_of("nm -D --undefined-only " + library);
  ASSERT_NE(undefined.find("malloc"), std::string::npos) << "nm did not work";
  const std::regex banned(
      "\\bU (printf|puts|putchar|fputs|fputc|fprintf|vprintf|vfprintf|perror|exit|_exit|quick_exit|abort|__assert_fail|"
      "__printf_chk|__fprintf_chk|_ZSt4cout|_ZSt4cerr|_ZSt4clog|stdout|stderr)(@|\\n|$)");
  std::smatch match;
  EXPECT_FALSE(std::regex_search(undefined, match, banned)) << match[0];
}

}  // namespace
