#include "support/golden_texts.h"
#include "support/file_text.h"

#include <cstdlib>
#include <fstream>
#include <map>

#include "support/process.h"
#include "support/require.h"

namespace zero::test {
namespace {

const char* const kFile = ZERO_SOURCE_DIR "/tests/golden/mesh_errors.txt";
const std::string kIndent = "    ";

std::map<std::string, std::string> read() {
  std::map<std::string, std::string> entries;
  std::string name;
  for (const auto& line : lines(file_text(kFile))) {
    if (line.empty() || line.rfind(kIndent, 0) == 0)
      entries[name] += (line.empty() ? line : line.substr(kIndent.size())) + "\n";
    else
      entries[name = line];
  }
  return entries;
}

void write(const std::map<std::string, std::string>& entries) {
  std::ofstream out(kFile);
  for (const auto& [name, text] : entries) {
    out << name << "\n";
    for (const auto& line : lines(text)) out << (line.empty() ? "" : kIndent) << line << "\n";
  }
}

}  // namespace

void require_golden(const std::string& name, const std::string& text, bool writes) {
  const auto got = text.empty() || text.back() != '\n' ? text + "\n" : text;
  auto entries = read();
  const char* const asked = std::getenv("ZERO_WRITE_GOLDEN");
  if (asked != nullptr && std::string(asked) == "1") {
    if (!writes) return;
    entries[name] = got;
    write(entries);
    return;
  }
  const auto found = entries.find(name);
  require(found != entries.end(), std::string(kFile) + " has no entry \"" + name + "\"; got:\n" + got);
  require(found->second == got, std::string(kFile) + ": \"" + name + "\" is:\n" + found->second + "got:\n" + got);
}

}  // namespace zero::test
