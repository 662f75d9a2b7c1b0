// `zero-torch torch-check`: a line for each mechanism of libtorch that libzero relies on, with what is wrong after a
// tab. `zero doctor` starts it.
#include <cstdio>
#include <string>

#include <zero/torch_check.h>

#include "tools/commands.h"

int zero_torch_check(int, char**) {
  for (const auto& check : zero::check_torch()) std::printf("%s\t%s\n", check.mechanism.c_str(), check.fault.c_str());
  return 0;
}
