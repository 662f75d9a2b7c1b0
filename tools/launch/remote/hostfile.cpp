// A small hand-written scanner, because errors need columns.
#include "tools/launch/remote/hostfile.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <set>

#include "base/check.h"
#include "base/system.h"

namespace zero::launch {
namespace {

constexpr int kMostSlots = 1024;

bool word_character(char c, bool first) {
  const bool alnum = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  return alnum || (!first && (c == '.' || c == '-'));
}
bool blank(char c) { return c == ' ' || c == '\t'; }
bool digit(char c) { return c >= '0' && c <= '9'; }

// A NUL would end the message, and an escape sequence would reach the terminal.
std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text.substr(0, 80)) {
    if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) {
      out += c;
    } else {
      char code[8];
      std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += code;
    }
  }
  return out + (text.size() > 80 ? "..." : "") + "\"";
}

// Parses digits at `at` and advances it; -1 if there are none or the number exceeds `most`.
int number(std::string_view text, std::size_t& at, int most) {
  const std::size_t start = at;
  long value = 0;
  while (at < text.size() && digit(text[at])) {
    value = std::min(value * 10 + (text[at] - '0'), 1000000000L);
    ++at;
  }
  return at == start || value > most ? -1 : static_cast<int>(value);
}

std::string names_of(const std::vector<Host>& hosts) {
  std::string names;
  for (const Host& h : hosts) names += (names.empty() ? "" : ", ") + h.name;
  return names;
}

// The filter as host -> slots; an empty set is the whole host.
std::map<std::string, std::set<int>> parse_filter(const std::vector<Host>& hosts, std::string_view filter,
                                                  const char* option) {
  std::map<std::string, std::set<int>> chosen;
  std::set<std::string> whole;
  const auto fail = [&](std::size_t column, const std::string& got, const std::string& expected) {
    throw ConfigError(base::join("[", option, ":1:", column + 1, "] got ", got, ", expected ", expected,
                                 ". Hint: the form is HOST[:SLOT[,SLOT...]][@HOST...]."));
  };
  std::size_t at = 0;
  while (true) {
    const std::size_t start = at;
    while (at < filter.size() && word_character(filter[at], at == start)) ++at;
    const std::string name(filter.substr(start, at - start));
    if (name.empty())
      fail(at, at < filter.size() ? in_quotes(filter.substr(at, 1)) : std::string("the end"), "a host name");
    const auto host = std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; });
    if (host == hosts.end()) fail(start, "host " + in_quotes(name), "one of: " + names_of(hosts));
    std::set<int>& slots = chosen[name];
    if (at < filter.size() && filter[at] == ':') {
      do {
        const std::size_t column = ++at;
        const int slot = number(filter, at, kMostSlots - 1);
        if (slot < 0) fail(column, in_quotes(filter.substr(column, 8)), "a slot number from 0 to 1023");
        if (std::find(host->slots.begin(), host->slots.end(), slot) == host->slots.end())
          fail(column, base::join("slot ", slot, " of ", name),
               host->slots.empty() ? std::string("a host with slots")
                                   : base::join("a slot from ", host->slots.front(), " to ", host->slots.back()));
        slots.insert(slot);
      } while (at < filter.size() && filter[at] == ',');
    } else {
      whole.insert(name);
    }
    if (at == filter.size()) break;
    if (filter[at] != '@') fail(at, in_quotes(filter.substr(at, 1)), "\"@\", \":\", \",\" or the end");
    ++at;
  }
  for (const std::string& name : whole) chosen[name].clear();  // "w1@w1:0" is all of w1
  return chosen;
}

}  // namespace

std::vector<Host> parse_hostfile(std::string_view text, std::string_view name) {
  std::vector<Host> hosts;
  std::map<std::string, int> line_of;
  int line_number = 0;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t end = std::min(text.find('\n', start), text.size());
    std::string_view line = text.substr(start, end - start);
    start = end + 1;
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    const auto fail = [&](std::size_t column, const std::string& got, const std::string& expected) {
      throw ConfigError(base::join(name, ":", line_number, ":", column + 1, ": error: got ", got, ", expected ",
                                   expected, ". Hint: a line reads \"worker-0 slots=4\"."));
    };
    std::size_t at = 0;
    while (at < line.size() && blank(line[at])) ++at;
    if (at == line.size() || line[at] == '#') continue;
    const auto rest = [&](std::size_t from) {
      return from < line.size() ? in_quotes(line.substr(from)) : std::string("the end of the line");
    };
    const std::size_t host_at = at;
    if (host_at != 0) fail(0, "a blank", "a host name at the start of the line");
    while (at < line.size() && word_character(line[at], at == host_at)) ++at;
    if (at == host_at) fail(at, rest(at), "a host name ([A-Za-z0-9_] first)");
    Host host;
    host.name = line.substr(host_at, at - host_at);
    if (at < line.size() && line[at] == '@') {
      host.user = std::move(host.name);
      const std::size_t name_at = ++at;
      while (at < line.size() && word_character(line[at], at == name_at)) ++at;
      if (at == name_at) fail(at, rest(at), "a host name ([A-Za-z0-9_] first) behind the user");
      host.name = line.substr(name_at, at - name_at);
    }
    const std::size_t gap = at;
    while (at < line.size() && blank(line[at])) ++at;
    if (at == gap) fail(at, rest(at), "a blank and slots=N");
    if (line.substr(at, 6) != "slots=") fail(at, rest(at), "slots=N");
    at += 6;
    const std::size_t slots_at = at;
    const int slots = number(line, at, kMostSlots);
    if (slots < 1) fail(slots_at, rest(slots_at), "a number from 1 to 1024");
    const std::size_t after = at;
    while (at < line.size() && blank(line[at])) ++at;
    if (at < line.size() && line[at] != '#') fail(after, rest(after), "the end of the line or a # comment");
    const auto [first, fresh] = line_of.emplace(host.name, line_number);
    if (!fresh)
      fail(host_at, "host " + in_quotes(host.name) + " again",
           base::join("each host once (first in line ", first->second, ")"));
    host.slots.resize(static_cast<std::size_t>(slots));
    std::iota(host.slots.begin(), host.slots.end(), 0);
    hosts.push_back(std::move(host));
  }
  if (hosts.empty())
    throw ConfigError(base::join(name, ":", std::max(line_number, 1),
                                 ":1: error: got no host, expected at least one. "
                                 "Hint: a line reads \"worker-0 slots=4\"."));
  return hosts;
}

std::vector<Host> read_hostfile(const std::filesystem::path& path) {
  std::error_code no_matter;
  const bool folder =
      std::filesystem::is_directory(path, no_matter);  // reading a directory would throw a different exception type
  std::ifstream in;
  if (!folder) in.open(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (folder || !in.is_open())
    throw IoError(base::join("[--hostfile] got ", folder ? "a directory" : std::strerror(errno), " for ", path.string(),
                             ", expected a readable file"),
                  ExitCode::kConfig);
  return parse_hostfile(text, path.string());
}

std::vector<Host> include_hosts(const std::vector<Host>& hosts, std::string_view filter) {
  const auto chosen = parse_filter(hosts, filter, "--include");
  std::vector<Host> kept;
  for (const Host& host : hosts) {
    const auto found = chosen.find(host.name);
    if (found == chosen.end()) continue;
    kept.push_back(host);
    if (!found->second.empty()) kept.back().slots.assign(found->second.begin(), found->second.end());
  }
  return kept;
}

std::vector<Host> exclude_hosts(const std::vector<Host>& hosts, std::string_view filter) {
  const auto dropped = parse_filter(hosts, filter, "--exclude");
  std::vector<Host> kept;
  for (const Host& host : hosts) {
    const auto found = dropped.find(host.name);
    if (found != dropped.end() && found->second.empty()) continue;
    Host rest{host.name, {}, host.user};
    for (const int slot : host.slots)
      if (found == dropped.end() || !found->second.count(slot)) rest.slots.push_back(slot);
    if (!rest.slots.empty()) kept.push_back(std::move(rest));
  }
  if (kept.empty())
    throw ConfigError(base::join("[--exclude] got ", in_quotes(filter),
                                 ", which leaves nothing, expected at least one slot to remain"));
  return kept;
}

bool is_loopback(std::string_view name) { return name == "localhost" || name.substr(0, 4) == "127." || name == "::1"; }

bool is_this_host(std::string_view name) {
  if (is_loopback(name)) return true;
  const auto own = base::host_name("");
  const std::string_view full(own);
  return !own.empty() && (name == full || name == full.substr(0, full.find('.')));
}

}  // namespace zero::launch
