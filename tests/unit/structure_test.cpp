// The structure of the tree: which layer may include which, how long a file may be, and that the
// library neither prints nor ends the process.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace structure_test {
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

// The rings around the library (src), each of which uses only those before it.
const std::set<std::string> kRings{"tools", "apps", "lab"};

// The folder that a file or an include is in: "core/step", "runtime/comm", "apps/finetune"; files of a ring itself:
// "lab".
struct Row {
  std::string folder;
  std::set<std::string> may_include;  // besides itself and core/base
};

// docs/architecture.md shows the same table. A row names only rows above it, so there is no circle.
const std::vector<Row>& table() {
  static const std::vector<Row> rows{
      {"core/base", {}},
      {"core/config", {}},
      {"core/kernels", {}},
      {"core/net", {}},
      {"core/observe", {"core/config"}},
      {"core/sharding", {"core/config"}},
      {"core/optim", {"core/config", "core/kernels"}},
      {"core/storage", {}},
      {"core/step", {"core/config", "core/kernels", "core/net", "core/sharding", "core/optim"}},
      {"core/formats", {"core/observe"}},
      {"core/interchange", {"core/kernels", "core/formats", "pickle"}},
      {"core/plan", {"core/config", "core/optim", "core/sharding", "core/step"}},
      {"runtime/gpu", {"core/kernels", "core/net"}},
      {"runtime/torch_hooks", {}},
      {"runtime/comm", {"core/kernels", "core/net", "core/observe", "runtime/gpu"}},
      {"runtime/parallel", {"core/config", "core/sharding", "runtime/torch_hooks", "runtime/comm"}},
      {"runtime/activations", {"core/config", "core/storage", "core/step", "runtime/torch_hooks", "runtime/gpu"}},
      {"runtime/engine",
       {"core/config", "core/kernels", "core/observe", "core/sharding", "core/optim", "core/storage", "core/step",
        "runtime/gpu", "runtime/torch_hooks", "runtime/comm", "runtime/parallel", "runtime/activations"}},
      {"runtime/checkpoint",
       {"core/observe", "core/optim", "core/formats", "core/interchange", "runtime/gpu", "runtime/engine"}},
      {"tools", {}},
      {"tools/launch", {"core/observe"}},
      {"tools/report", {}},
      {"tools/support", {"core/config", "core/observe", "tools/launch", "tools/report", "models"}},
      {"tools/run", {"tools", "tools/support", "tools/launch", "tools/report"}},
      {"tools/plan", {"tools", "tools/support", "core/config", "core/plan", "tools/report", "models"}},
      {"tools/explain", {"tools", "tools/support", "core/config", "core/plan", "tools/report", "models"}},
      {"tools/commands",
       {"tools", "tools/support", "core/config", "core/storage", "tools/launch", "tools/report", "models"}},
      {"apps/data", {"pickle"}},
      {"apps/finetune",
       {"tools/support", "core/config", "core/observe", "core/interchange", "tools/launch", "tools/report", "models",
        "apps/data"}},
      {"lab", {}},
      {"lab/bench",
       {"tools/support", "tools/plan", "tools/explain", "core/config", "core/optim", "core/storage", "core/plan",
        "tools/launch", "tools/report", "models"}},
      {"lab/reproduce", {"tools/support", "core/plan", "tools/launch", "tools/report", "models"}},
  };
  return rows;
}

std::string folder_of_include(const std::string& key) {
  const auto first = key.substr(0, key.find('/'));
  if (kRings.count(first) != 0) {
    const auto second = key.find('/', first.size() + 1);
    return second == std::string::npos ? first : key.substr(0, second);
  }
  for (const char* root : {"core", "runtime"})
    if (fs::exists(kRoot / "src" / root / first)) return std::string(root) + "/" + first;
  return first;
}

TEST(Structure, AFolderIncludesOnlyWhatItsRowNames) {
  const std::regex include("^#include \"([^\"]+)\"");
  std::set<std::string> rows, seen;
  int checked = 0;
  for (const auto& row : table()) {
    for (const auto& other : row.may_include)
      EXPECT_TRUE(rows.count(other) != 0 || other == "models" || other == "pickle")
          << row.folder << " names " << other << ", a row below it";
    rows.insert(row.folder);
    const auto ring = row.folder.substr(0, row.folder.find('/'));
    const bool mains = kRings.count(row.folder) != 0;  // files that make a program of the ring's folders
    for (const auto& file : sources_under(kRings.count(ring) != 0 ? kRoot / row.folder : kRoot / "src" / row.folder)) {
      if (mains && file.parent_path() != kRoot / row.folder) continue;
      for (const auto& line : lines_of(file)) {
        std::smatch match;
        if (!std::regex_search(line, match, include)) continue;
        const auto to = folder_of_include(match[1].str());
        ++checked;
        const bool program = mains && (to.starts_with(ring + "/") || to == "tools/support");
        EXPECT_TRUE(to == row.folder || to == "core/base" || program || row.may_include.count(to) != 0)
            << file << ": " << line << " (" << to << ")";
      }
    }
  }
  EXPECT_GT(checked, 500);
  for (const char* root : {"src/core", "src/runtime", "tools", "apps"})
    for (const auto& entry : fs::directory_iterator(kRoot / root))
      if (entry.is_directory()) {
        const auto folder = fs::relative(entry.path(), kRoot).string();
        EXPECT_EQ(rows.count(folder.starts_with("src/") ? folder.substr(4) : folder), 1u) << folder << " has no row";
      }
}

TEST(Structure, NoFilesIncludeEachOtherInACircle) {
  const std::regex include("^#include \"([^\"]+)\"");
  std::map<std::string, std::vector<std::string>> to;
  for (const char* root : {"src/core", "src/runtime", "tools", "apps", "lab"})
    for (const auto& file : sources_under(kRoot / root)) {
      const auto base = kRings.count(root) != 0 ? kRoot : kRoot / root;
      auto& edges = to[fs::relative(file, base).string()];
      for (const auto& line : lines_of(file)) {
        std::smatch match;
        // Highway includes the file itself once a target.
        if (std::regex_search(line, match, include) && !file.string().ends_with(match[1].str()))
          edges.push_back(match[1].str());
      }
    }
  std::map<std::string, int> state;  // 1: on the way, 2: done
  std::function<void(const std::string&)> walk = [&](const std::string& file) {
    state[file] = 1;
    for (const auto& next : to[file]) {
      EXPECT_NE(state[next], 1) << file << " and " << next << " include each other";
      if (state[next] == 0) walk(next);
    }
    state[file] = 2;
  };
  std::vector<std::string> files;
  for (const auto& [file, edges] : to) files.push_back(file);
  for (const auto& file : files)
    if (state[file] == 0) walk(file);
  EXPECT_GT(files.size(), 300u);
}

TEST(Structure, CoreDoesNotKnowTorch) {
  const std::regex torch("^#include <(torch|ATen|c10)/");
  for (const auto& file : sources_under(kRoot / "src" / "core"))
    for (const auto& line : lines_of(file)) EXPECT_FALSE(std::regex_search(line, torch)) << file << ": " << line;
}

// Libraries that one folder is there to hide.
TEST(Structure, OutsideLibrariesHaveOneHome) {
  const std::vector<std::pair<std::regex, std::vector<std::string>>> homes{
      {std::regex("^#include <(torch/csrc/distributed|gloo|nccl)"), {"src/runtime/comm/"}},
      {std::regex("^#include <liburing"), {"src/core/storage/"}},
      {std::regex("^#include <sodium"), {"src/core/net/"}},
      {std::regex("^#include <zlib"), {"src/core/interchange/"}},
      {std::regex("^#include <hwy/"), {"src/core/kernels/"}},
  };
  for (const auto& file : sources_under(kRoot / "src")) {
    const auto path = fs::relative(file, kRoot).string();
    for (const auto& line : lines_of(file))
      for (const auto& [library, allowed] : homes)
        if (std::regex_search(line, library)) {
          EXPECT_TRUE(
              std::any_of(allowed.begin(), allowed.end(), [&](const auto& home) { return path.starts_with(home); }))
              << file << ": " << line;
        }
  }
}

// What a ZeRO stage means is said once, where the facts of a run are derived.
TEST(Structure, TheStepReadsNoStageButInItsFacts) {
  const std::regex text("\"[^\"]*\"|//.*"), stage("\\bstage_?\\b");
  int files = 0;
  for (const char* folder : {"src/core/step", "src/runtime/engine"})
    for (const auto& file : sources_under(kRoot / folder)) {
      ++files;
      if (file.stem() == "facts") continue;
      for (const auto& line : lines_of(file))
        EXPECT_FALSE(std::regex_search(std::regex_replace(line, text, ""), stage)) << file << ": " << line;
    }
  EXPECT_GT(files, 60);
}

TEST(Structure, ModelsAndDataDoNotKnowLibzero) {
  const std::regex zero("^#include (<zero/|\"(?!models/|apps/data/|pickle/))");
  for (const char* folder : {"models", "apps/data", "src/pickle"})
    for (const auto& file : sources_under(kRoot / folder))
      for (const auto& line : lines_of(file)) EXPECT_FALSE(std::regex_search(line, zero)) << file << ": " << line;
}

TEST(Structure, PublicHeadersIncludeNoOthers) {
  const std::regex inner("^#include \"");
  for (const auto& file : sources_under(kRoot / "include"))
    for (const auto& line : lines_of(file)) EXPECT_FALSE(std::regex_search(line, inner)) << file << ": " << line;
}

// Characters of UTF-8.
std::size_t columns_of(const std::string& line) {
  const auto continuation = [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; };
  return line.size() - static_cast<std::size_t>(std::count_if(line.begin(), line.end(), continuation));
}

TEST(Structure, LinesOfPythonStayShort) {
  int files = 0;
  for (const char* folder : {"python", "examples/python", "deploy"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const auto extension = entry.path().extension();
      if (extension != ".py" && extension != ".pyi" && extension != ".cpp" && extension != ".h") continue;
      const auto lines = lines_of(entry.path());
      for (std::size_t l = 0; l < lines.size(); ++l)
        EXPECT_LE(columns_of(lines[l]), 120u) << entry.path() << ":" << l + 1;
      ++files;
    }
  EXPECT_GT(files, 20);
}

TEST(Structure, FilesStayShort) {
  for (const char* folder : {"src", "include", "tools", "apps", "lab", "models"}) {
    for (const auto& file : sources_under(kRoot / folder)) {
      const auto lines = lines_of(file);
      const auto count = lines.size();
      for (std::size_t l = 0; l < count; ++l) EXPECT_LE(columns_of(lines[l]), 120u) << file << ":" << l + 1;
      EXPECT_LE(count, file.extension() == ".h" ? 200u : 600u) << file;
      EXPECT_TRUE(lines.front().starts_with("//") || file.extension() == ".cpp")
          << file << " opens without saying what it is for";
    }
  }
}

TEST(Structure, EveryFileThatTheDocumentsNameIsThere) {
  const std::regex file(
      "`((src|tools|apps|lab|include|script|tests|models|examples|cmake|configs)/[A-Za-z0-9_./-]+\\.[a-z]+)`");
  int named = 0;
  for (const auto& entry : fs::directory_iterator(kRoot / "docs")) {
    if (entry.path().extension() != ".md") continue;
    for (const auto& line : lines_of(entry.path()))
      for (std::sregex_iterator match(line.begin(), line.end(), file), end; match != end; ++match) {
        ++named;
        EXPECT_TRUE(fs::exists(kRoot / (*match)[1].str())) << entry.path() << " names " << (*match)[1];
      }
  }
  EXPECT_GT(named, 30);
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

// What a program can link is what include/zero declares.
TEST(Structure, TheLibraryExportsOnlyItsInterface) {
  std::set<std::string> declared;
  const std::regex name("^[^#]*ZERO_API ([^;{(]*?)(\\w+)( final)?( : [^{]*)?( \\{|\\()");
  for (const auto& entry : fs::directory_iterator(kRoot / "include/zero"))
    for (const auto& line : lines_of(entry.path()))
      if (std::smatch match; std::regex_search(line, match, name)) declared.insert(match[2]);
  ASSERT_TRUE(declared.count("Engine") == 1 && declared.count("run_ranks") == 1);
  const auto exported = output_of(std::string("nm -DC --defined-only ") + ZERO_BINARY_DIR + "/lib/libzero.so");
  const std::regex symbol(
      "[TVBDR] ((typeinfo|vtable|typeinfo name|guard variable) for )?zero::(detail::|comm::|nn::|tp::)?(\\w+)");
  std::set<std::string> found;
  for (std::sregex_iterator match(exported.begin(), exported.end(), symbol), end; match != end; ++match) {
    EXPECT_EQ(declared.count((*match)[4]), 1u) << (*match)[0] << " is exported but not declared with ZERO_API";
    found.insert((*match)[4]);
  }
  for (const auto& one : declared) EXPECT_EQ(found.count(one), 1u) << one << " is declared but not exported";
}

}  // namespace
}  // namespace structure_test
