// Hugging Face's config.json to and from the models' configurations, and configurations by name. Keys are those of
// transformers 5, and of 4 where they differ. A value that changes what a model computes and that the model does not
// have is an error; nothing is ignored silently. No torch.
#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "models/gpt_config.h"
#include "models/model_configs.h"

namespace models {

using AnyConfig = std::variant<GptConfig, LlamaConfig, BertConfig, T5Config, VitConfig>;

struct HfConfig {
  AnyConfig config;
  // The first of "architectures", such as "BertForMaskedLM"; "": not given. A task may use another one of the same
  // model_type.
  std::string architecture;
  std::int64_t bos_token = -1;                // -1: none
  std::vector<std::int64_t> eos_tokens = {};  // any of them ends a text
  std::int64_t pad_token = -1;                // -1: none
  std::vector<std::string> labels = {};       // names of classes, where given
  // Keys of the file that this reader does not know: they are of no effect here, which a caller can tell its user.
  std::vector<std::string> unknown = {};
};

// text: of config.json. source: its name, for errors. Throws std::invalid_argument that names every key at fault with
// its value and what is supported; also for a text that is not JSON, is nested deeper than 16, has a key twice or more
// than 32,768 classes.
HfConfig parse_hf_config(const std::string& text, const std::string& source = "config.json");
// path: of a config.json of at most 4 MiB, or of a directory that has one. Throws also if it cannot be read.
HfConfig read_hf_config(const std::string& path);
// The text of a config.json that transformers reads as the same model. dtype: of the parameters, as "float32".
// architecture "": that of a language model, or image classifier, of this type.
std::string hf_config_text(const HfConfig& config, const std::string& dtype = "float32");

// "gpt2", "llama-110m", "bert-base", "t5-small", "vit-base" and others. Throws std::invalid_argument with all names.
HfConfig hf_preset(const std::string& name);
std::vector<std::string> hf_preset_names();
// What a user means by "gpt2": a folder or file of this path if there is one, else the model of this name.
bool is_hf_path(const std::string& name_or_path);
// "gpt2", "llama", "bert", "t5" or "vit": model_type, which is also the name of the map of names (docs/interchange.md).
const char* model_type(const AnyConfig& config);

}  // namespace models
