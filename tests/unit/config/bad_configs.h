// Configurations that must be refused: text, the fault's id, its place, and a part of its hint or message.
#pragma once
#include <vector>

namespace zero::test {

struct BadConfig {
  const char* text;
  const char* id;
  int line, column;
  const char* says;  // in message or hint
};

const std::vector<BadConfig>& bad_configs();

}  // namespace zero::test
