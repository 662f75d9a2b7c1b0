// ssh passes its last argument to the remote login shell, so it is quoted; srun and mpirun execute words.
#include "tools/launch/remote/remote_shell.h"

#include <utility>

#include "base/check.h"

namespace zero::launch {

std::string shell_word(std::string_view text) {
  static constexpr std::string_view kPlain =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%+:,./-";  // not "=": zsh expands "=word"
  if (text.find_first_of(std::string_view("\n\r\0", 3)) != std::string_view::npos)
    throw ConfigError("[zero run] got a line break in a path for another host, expected a path without");
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string_view::npos) return std::string(text);
  std::string out = "'";
  for (const char c : text) {
    // "\" escapes in fish's single quotes and "!" in csh's: both are escaped outside of quotes.
    if (c == '\'' || c == '\\' || c == '!') {
      (out += "'\\") += c;
      out += '\'';
    } else {
      out += c;
    }
  }
  return out += '\'';
}

std::vector<std::string> split_words(std::string_view text, std::string_view option) {
  std::vector<std::string> words;
  std::string word;
  bool begun = false;
  char quote = 0;
  std::size_t quoted_at = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool escapes =
        c == '\\' && quote != '\'' && i + 1 < text.size() && (quote == 0 || text[i + 1] == '"' || text[i + 1] == '\\');
    if (escapes) {
      word += text[++i];
      begun = true;
    } else if (quote) {
      if (c == quote)
        quote = 0;
      else
        word += c;
    } else if (c == '\'' || c == '"') {
      quote = c;
      quoted_at = i;
      begun = true;
    } else if (c == ' ' || c == '\t' || c == '\n') {
      if (begun) words.push_back(std::exchange(word, ""));
      begun = false;
    } else {
      word += c;
      begun = true;
    }
  }
  if (quote)
    throw ConfigError(
        base::join("[", option, ":1:", quoted_at + 1, "] got a ", quote, " without its end, expected both quotes"));
  if (begun) words.push_back(word);
  return words;
}

std::vector<std::string> remote_shell_words(const RemoteShell& shell, const std::string& host, const std::string& user,
                                            const std::vector<std::string>& agent) {
  std::vector<std::string> words{shell.launcher};
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  if (shell.launcher == "ssh") {
    // No interactive questions; a host that disappears is detected within 15 s.
    add({"-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=5", "-o",
         "ServerAliveCountMax=3"});
    if (shell.ssh_port > 0) add({"-p", std::to_string(shell.ssh_port)});
    if (!user.empty()) add({"-l", user});
  } else if (shell.launcher == "srun") {
    // A step in parallel to others of the job, with all cores of the job on that host.
    add({"--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--unbuffered"});
  } else {
    add({"-n", "1", "--bind-to", "none"});
  }
  words.insert(words.end(), shell.arguments.begin(), shell.arguments.end());
  if (shell.launcher == "ssh") {
    std::string line;
    for (const std::string& word : agent) line += (line.empty() ? "" : " ") + shell_word(word);
    add({"--", host, line});
    return words;
  }
  if (shell.launcher == "srun") {
    words.push_back("--nodelist=" + host);
  } else {
    add({"-host", host});
  }
  words.insert(words.end(), agent.begin(), agent.end());
  return words;
}

}  // namespace zero::launch
