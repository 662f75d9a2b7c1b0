// Name maps (zero.names/1): which tensor of a model is which tensor of another library's files, with the operation
// between them. One table is applied in both directions. No files.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "interchange/segments.h"
#include "interchange/source.h"

namespace zero::interchange {

class NameMap {
 public:
  // The text of a map. Throws ConfigError with `path` for one that cannot be applied in both directions.
  static NameMap parse(std::string_view text, const std::string& path);
  // A built-in map ("gpt2", "llama", "bert", "t5", "vit"), else the file of that name. Throws ConfigError if there is
  // neither.
  static NameMap find(formats::FsOps& fs, const std::string& name);
  static std::vector<std::string> builtin_names();
  static const char* builtin_text(const std::string& name);  // null: none

  const std::string& name() const { return name_; }

  struct Rule {
    std::string ours;
    std::vector<std::string> theirs;  // several: joined along the first dimension
    std::vector<std::string> also;    // older spellings, which are read and never written
    Order order = Order::Same;        // from theirs to ours
    std::int64_t heads = 0;
    std::vector<std::int64_t> shares;  // of the rows, by element of theirs
  };
  // `alias` is absent from files that have `stored`, if a name matches `condition` (empty: always).
  struct Tie {
    std::string alias, stored, condition;
  };
  const std::vector<Rule>& rules() const { return rules_; }
  const std::vector<Tie>& ties() const { return ties_; }
  const std::vector<std::string>& ignore() const { return ignore_; }
  const std::string& prefix() const { return prefix_; }

 private:
  std::string name_, prefix_;
  std::vector<Rule> rules_;
  std::vector<Tie> ties_;
  std::vector<std::string> ignore_;
};

enum class Direction { ToTheirs, ToOurs };

struct Mapping {
  std::vector<MappedTensor> tensors;           // by kind and name; segments count the given tensors
  std::map<std::string, std::string> aliases;  // name of a tied tensor -> name of one of `tensors`
  // To ours: names that the map's ties make equal, whether the files have both or not.
  std::map<std::string, std::string> ties = {};
};
// Maps all tensors of a source; states of optimizers like their parameters. Throws ConfigError that lists every tensor
// without a rule, incomplete joints, wrong shapes and names met twice. `label`: of the source, for the message.
Mapping map_names(const NameMap& map, Direction direction, const std::vector<SourceTensor>& tensors,
                  const std::map<std::string, std::string>& aliases, const std::string& label);
// Every tensor as it is.
Mapping same_names(const std::vector<SourceTensor>& tensors, const std::map<std::string, std::string>& aliases);

// Whether a name fits a pattern: "{i}", "{j}" ... are decimal numbers, "*" any text.
bool name_matches(const std::string& pattern, const std::string& name);

}  // namespace zero::interchange
