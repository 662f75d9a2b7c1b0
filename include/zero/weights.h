// Weights for and from other libraries: options and reports of exports and imports, of a live Engine and of files. The
// formats are described in docs/interchange.md.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zero {

struct ExportOptions {
  // "hf": a directory with safetensors as Hugging Face writes it. "pt": one file that torch.load(weights_only=True)
  // opens. "universal": DeepSpeed's universal checkpoint, with the optimizer's states, in fp32.
  std::string format = "hf";
  std::string dtype = "fp32";  // of floating-point parameters: "fp32", "bf16", "fp16", or "" for that of the source
  std::string names;           // a name map: "gpt2", "llama", "bert", "t5", "vit", or a file of zero.names/1; "": none
  std::string prefix;          // put before every name
  std::int64_t shard_bytes = 5'000'000'000;  // tensors of one file of "hf"
  bool duplicate_tied = false;               // tied tensors under all their names
  bool allow_overflow = false;               // values that fp16 cannot hold become infinite, instead of an error
  // For config.json, which is written with a built-in map: attention heads (0: those of a run of `zero train`, or of
  // T5's tensors), and "KEY=VALUE" of fields that tensors do not tell, VALUE in JSON or a text.
  std::int64_t heads = 0;
  std::vector<std::string> config = {};
  // Parameters and buffers, by pattern of their names in the model (* matches any text, {i} a number); empty: all.
  std::vector<std::string> only = {};
  std::string stem = "model";  // of the names of files of "hf": "adapter_model" gives adapter_model.safetensors
  // Names and contents of further files of "hf", such as a tokenizer's; those of rank 0. A config.json among them is in
  // place of the one that a map gives.
  std::vector<std::pair<std::string, std::string>> extra_files = {};
  // Of Engine::export_weights alone, by parameter, the same names on every rank: changes what is written, not the
  // model, such as low-rank factors that are merged. `values`: elements [begin, begin + values.size()) of the flattened
  // parameter in fp32, of its master; called by the ranks that hold them, once or more often, in any order.
  std::map<std::string, std::function<void(std::int64_t begin, std::span<float> values)>> change = {};
};

struct ImportOptions {
  std::string names;   // as in ExportOptions
  std::string key;     // of a nested dictionary in a torch file, such as "model"
  std::string prefix;  // removed from every name of the file
  // Parameters and buffers, by pattern (* matches any text, {i} a number), that may be missing in the files, have
  // another shape there, or be missing in the model.
  std::vector<std::string> partial;
  bool optimizer = false;  // also the optimizer's states
  // Of tied tensors that are stored more than once, the names (in the model) of those to take, if values differ.
  std::vector<std::string> untie = {};
  // Parameters and buffers of the model, by pattern, that are wanted; all others keep their values, and the files must
  // not have them. Empty: all are wanted.
  std::vector<std::string> only = {};
};

// Names of the model's tensors, except `unexpected`.
struct ImportReport {
  std::vector<std::string> taken;       // all that were read
  std::vector<std::string> converted;   // of these, those stored in another dtype: "name: F64, largest change 5e-8"
  std::vector<std::string> tied;        // filled from the tensor that they are tied to in the file
  std::vector<std::string> missing;     // left as they were: ImportOptions::partial
  std::vector<std::string> unexpected;  // of the file: tensors that repeat one that is taken, or that are left out
  std::int64_t bytes_read = 0;          // by this rank
};

struct ExportReport {
  std::vector<std::string> files;  // names in the directory; of "pt" the path
  std::int64_t tensors = 0, bytes = 0;
  std::vector<std::string> remarks;  // one line each: what was left out or changed
};

}  // namespace zero
