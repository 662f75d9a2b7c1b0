// config.json of exported weights, from which transformers builds the model: what names and shapes tell, the number of
// attention heads, and fields that the user gives. No file access.
#pragma once
#include <map>
#include <string>
#include <vector>

#include <zero/weights.h>

#include "interchange/weights_layout.h"

namespace zero::interchange {

struct ModelConfig {
  std::string text;    // of config.json; "": names and shapes do not tell enough, which the remark says
  std::string remark;  // "": nothing to say
};

// `map`: the name of the built-in map that gave the names ("gpt2", "llama", "bert", "t5"); others have no config.json.
// tensors and aliases: of the files, before any prefix; ties under all their names or one. Throws ConfigError for heads
// that do not divide the sizes, and for given fields that shapes contradict or that are not "KEY=VALUE".
ModelConfig model_config(const std::string& map, const std::vector<OutTensor>& tensors,
                         const std::map<std::string, std::string>& aliases, const ExportOptions& options);

}  // namespace zero::interchange
