// Capabilities of a stream: whether it is a terminal, its width, colour and UTF-8. The rules of docs/cli.md "Streams":
// --color takes precedence over NO_COLOR and TERM, COLUMNS over the device.
#pragma once

namespace zero::report {

enum class Choice { Auto, Always, Never };

struct Terminal {
  bool tty = false;
  bool color = false;  // escape codes for colour may be written
  bool utf8 = false;   // the locale uses UTF-8
  bool dumb = false;   // TERM is unset, empty or "dumb"
  int columns = 80;    // COLUMNS, else the terminal's width, else 80; at least 20
};

Terminal describe_terminal(int fd, Choice color = Choice::Auto);

// Whether `zero` may draw a progress line on stderr: only on rank 0 and on a terminal, never with
// --json or --quiet. `Always` also allows dumb terminals; escape codes are never written to a file.
bool progress_wanted(const Terminal& err, int rank, Choice progress, bool json, bool quiet);

}  // namespace zero::report
