// How another host is reached: the words of ssh, srun or mpirun that start an agent there. Pure text;
// starts nothing. No secret is ever among these words: everybody on a host can read them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace zero::launch {

struct RemoteShell {
  std::string launcher = "ssh";        // ssh, srun or mpirun; looked up in PATH
  int ssh_port = 0;                    // 0: as ssh's own configuration says
  std::vector<std::string> arguments;  // further ones, before the host
};

// The text as one word of a POSIX shell, and of csh and fish too: unchanged when it is plain, else in
// single quotes. Throws ConfigError for a line break, which no quotes carry through every shell.
std::string shell_word(std::string_view text);

// "-o 'User me'" as {"-o", "User me"}: blanks, both quotes and the backslash as in a shell, nothing
// expanded. Throws ConfigError naming `option` for a quote without its end.
std::vector<std::string> split_words(std::string_view text, std::string_view option);

// argv that runs `agent` (its path and arguments) on `host`, with stdin and stdout connected to ours.
std::vector<std::string> remote_shell_words(const RemoteShell& shell, const std::string& host,
                                            const std::vector<std::string>& agent);

}  // namespace zero::launch
