// Command lines of ssh, srun or mpirun that start an agent on another host. Text only; starts nothing. They never
// contain secrets, because all users of a host can read them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace zero::launch {

struct RemoteShell {
  std::string launcher = "ssh";        // ssh, srun or mpirun; looked up in PATH
  int ssh_port = 0;                    // 0: from ssh's configuration
  std::vector<std::string> arguments;  // additional arguments, before the host
};

// Quotes text as one word for POSIX shells, csh and fish: unchanged if plain, else in single quotes. Throws ConfigError
// for a line break, which cannot be quoted in every shell.
std::string shell_word(std::string_view text);

// Splits "-o 'User me'" into {"-o", "User me"}: blanks, both quotes and the backslash as in a shell, without expansion.
// Throws ConfigError naming `option` for an unterminated quote.
std::vector<std::string> split_words(std::string_view text, std::string_view option);

// The argv that runs `agent` (path and arguments) on `host`, with its stdin and stdout connected to ours.
std::vector<std::string> remote_shell_words(const RemoteShell& shell, const std::string& host, const std::string& user,
                                            const std::vector<std::string>& agent);

}  // namespace zero::launch
