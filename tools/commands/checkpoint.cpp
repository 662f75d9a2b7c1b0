// `zero checkpoint`: shows the contents of a directory of checkpoints. Reads manifests and hashes through
// include/zero/checkpoint_tools.h.
#include <filesystem>
#include <string>
#include <vector>

#include <unistd.h>

#include <zero/checkpoint_tools.h>
#include <zero/config_tools.h>

#include "base/json_write.h"
#include "base/printable.h"
#include "tools/commands.h"
#include "tools/commands/checkpoint_files.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/console.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace {
namespace fs = std::filesystem;
using base::json_quote;
using report::Align;
using report::human_bytes;

// DIR, or DIR/TAG itself.
struct Place {
  std::string dir, tag;
  void declare(Command& command) {
    command.positional(dir, "DIR", "directory of checkpoints, or one checkpoint", false);
    command.option("--tag", tag, "TAG", "the checkpoint to use (the newest complete one)");
  }
  void resolve(const std::string& verb) {
    if (dir.empty())
      throw ConfigError("[zero checkpoint " + verb + "] got no directory, expected one. Hint: zero checkpoint " + verb +
                        " runs/ckpt");
    fs::path path(dir);
    if (!path.has_filename()) path = path.parent_path();
    std::error_code error;
    if (!tag.empty() || !fs::exists(path / "manifest.json", error)) return;
    tag = path.filename().string();
    dir = path.has_parent_path() ? path.parent_path().string() : ".";
  }
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  return text + "]";
}

std::string bytes_text(std::int64_t bytes) { return bytes < 0 ? "-" : human_bytes(static_cast<std::uint64_t>(bytes)); }
std::string count_text(std::int64_t count) { return count < 0 ? "-" : std::to_string(count); }

std::string list_text(const std::vector<CheckpointEntry>& entries, const report::Terminal& terminal) {
  using Narrow = report::Column::Narrow;
  report::Table table({{"tag"},
                       {"seq", Align::Right},
                       {"step", Align::Right},
                       {"bytes", Align::Right},
                       {"state", Align::Left, Narrow::Wrap}});
  for (const auto& entry : entries)
    table.row({entry.tag, count_text(entry.seq), count_text(entry.global_steps), bytes_text(entry.bytes),
               !entry.fault.empty() ? "damaged: " + entry.fault
               : entry.weights_only ? "whole, weights only"
               : entry.latest       ? "whole, newest"
                                    : "whole"});
  return table.render(static_cast<std::size_t>(terminal.columns), terminal.utf8);
}

std::string info_text(const CheckpointInfo& info, const std::string& dir, const report::Terminal& terminal) {
  using Narrow = report::Column::Narrow;
  const auto columns = static_cast<std::size_t>(terminal.columns);
  report::Table head({{"name"}, {"value", Align::Left, Narrow::Wrap}});
  head.row({"checkpoint", dir + "/" + info.tag});
  head.row({"saved", info.created + " by libzero " + info.libzero_version + ", libtorch " + info.libtorch_version});
  head.row({"commit", "number " + std::to_string(info.seq) + " of its directory"});
  head.row({"steps", std::to_string(info.global_steps) + ", of which " + std::to_string(info.applied_steps) +
                         " updated and " + std::to_string(info.skipped_steps) + " were skipped"});
  head.row({"ranks", std::to_string(info.world)});
  head.row({"stage", std::to_string(info.stage)});
  head.row({"recipe", info.recipe});
  head.row({"optimizer", info.optimizer});
  if (info.weights_only)
    head.row({"content", "weights only: no run can be resumed from it (--weights-only takes them)"});
  head.row({"loss scale", info.loss_scale});
  head.row({"user state", info.user_state.empty() ? "none" : std::to_string(info.user_state.size()) + " bytes"});
  head.row({"size", human_bytes(static_cast<std::uint64_t>(info.bytes)) + " in " + std::to_string(info.files.size()) +
                        " files"});
  std::string text = head.render(columns, terminal.utf8, false) + "\n";
  report::Table tensors({{"kind"},
                         {"name", Align::Left, Narrow::Cut, 16},
                         {"dtype"},
                         {"shape"},
                         {"bytes", Align::Right},
                         {"parts", Align::Right},
                         {"rank", Align::Right}});
  for (const auto& tensor : info.tensors)
    tensors.row({tensor.kind, tensor.name, tensor.dtype, shape_text(tensor.shape), bytes_text(tensor.bytes),
                 std::to_string(tensor.parts), tensor.rank < 0 ? "all" : std::to_string(tensor.rank)});
  text += tensors.render(columns, terminal.utf8) + "\n";
  report::Table files({{"file"}, {"bytes", Align::Right}, {"xxh128"}});
  for (const auto& file : info.files) files.row({file.name, std::to_string(file.bytes), file.hash});
  return text + files.render(columns, terminal.utf8);
}

std::string list_json(const std::vector<CheckpointEntry>& entries) {
  std::string text = "[";
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    text += std::string(i == 0 ? "" : ", ") + "{\"tag\": " + json_quote(entry.tag) +
            ", \"whole\": " + (entry.fault.empty() ? "true" : "false") +
            ", \"newest\": " + (entry.latest ? "true" : "false");
    if (entry.fault.empty())
      text += ", \"seq\": " + std::to_string(entry.seq) + ", \"global_steps\": " + std::to_string(entry.global_steps) +
              ", \"bytes\": " + std::to_string(entry.bytes) +
              ", \"content\": " + (entry.weights_only ? "\"weights\"" : "\"training\"");
    else
      text += ", \"fault\": " + json_quote(entry.fault);
    text += "}";
  }
  return text + "]";
}

int inspect(int argc, char** argv) {
  Place place;
  bool list = false;
  SourceChoice choice;
  Command command(
      "checkpoint inspect",
      "Shows the manifest of a checkpoint, or all checkpoints of a directory, or what other libraries' files "
      "hold; executes nothing.",
      "DIR [options]", "zero checkpoint inspect runs/ckpt --tag step-1000");
  place.declare(command);
  declare_source(command, choice);
  command.flag("--list", list, "one line for every checkpoint of DIR");
  if (!command.parse(argc, argv)) return 0;
  if (list && !place.tag.empty())
    throw ConfigError("[zero checkpoint inspect] got --list and --tag, expected one of them");
  const auto terminal = report::describe_terminal(STDOUT_FILENO, command.global().color);
  if (list) {
    if (place.dir.empty()) place.resolve("inspect");
    const auto entries = list_checkpoints(place.dir);
    print_result(command.global().json ? "{\"schema\": \"zero.checkpoint.list/1\", \"directory\": " +
                                             json_quote(place.dir) + ", \"checkpoints\": " + list_json(entries) + "}\n"
                                       : base::printable(list_text(entries, terminal)));
    return 0;
  }
  choice.tag = place.tag;
  const std::string path = place.dir;
  place.resolve("inspect");
  if (const auto source = inspect_source(path, choice); source.format != "libzero") {
    print_result(source_text(source, path, command));
    return 0;
  }
  const auto info = inspect_checkpoint(place.dir, place.tag);
  print_result(command.global().json
                   ? "{\"schema\": \"zero.checkpoint.inspect/1\", \"directory\": " + json_quote(place.dir) +
                         ", \"tag\": " + json_quote(info.tag) + ", \"manifest\": " + info.manifest + "}\n"
                   : base::printable(info_text(info, place.dir, terminal)));
  return 0;
}

int verify(int argc, char** argv) {
  Place place;
  Command command("checkpoint verify",
                  "Reads every byte of all checkpoints of DIR, or of one, and compares all hashes; exit 0 or 3.",
                  "DIR [options]", "zero checkpoint verify runs/ckpt");
  place.declare(command);
  if (!command.parse(argc, argv)) return 0;
  place.resolve("verify");
  std::vector<std::string> tags;
  if (!place.tag.empty()) tags.push_back(place.tag);
  if (place.tag.empty())
    for (const auto& entry : list_checkpoints(place.dir)) tags.push_back(entry.tag);
  if (tags.empty()) tags.emplace_back();  // the error of a directory without checkpoints
  std::string whole, faults, json;
  std::size_t damaged = 0;
  for (const auto& tag : tags) {
    try {
      const auto info = inspect_checkpoint(place.dir, tag, true);
      whole += base::printable(place.dir + "/" + info.tag) + ": whole, " +
               human_bytes(static_cast<std::uint64_t>(info.bytes)) + " in " + std::to_string(info.files.size()) +
               " files have the right hashes" + (info.weights_only ? "; weights only\n" : "\n");
      json += (json.empty() ? "{\"tag\": " : ", {\"tag\": ") + json_quote(info.tag) +
              ", \"bytes\": " + std::to_string(info.bytes) + "}";
    } catch (const IoError& e) {
      if (tags.size() == 1 || e.code() != ExitCode::kCheckpoint) throw;
      ++damaged;
      faults += std::string("\n  ") + e.what();
    }
  }
  print_result(command.global().json
                   ? "{\"schema\": \"zero.checkpoint.verify/2\", \"directory\": " + json_quote(place.dir) +
                         ", \"whole\": [" + json + "], \"damaged\": " + std::to_string(damaged) + "}\n"
                   : whole);
  if (damaged > 0)
    throw IoError("[zero checkpoint verify] " + std::to_string(damaged) + " of " + std::to_string(tags.size()) +
                      " checkpoints of " + place.dir + " are damaged:" + faults,
                  ExitCode::kCheckpoint);
  return 0;
}

int digest(int argc, char** argv) {
  Place place;
  Command command("checkpoint digest",
                  "Prints 32 hex digits that depend on the values alone: equal for checkpoints of any number of ranks, "
                  "parallel degrees and stage.",
                  "DIR [options]", "zero checkpoint digest runs/ckpt --tag step-1000");
  place.declare(command);
  if (!command.parse(argc, argv)) return 0;
  place.resolve("digest");
  const auto info = inspect_checkpoint(place.dir, place.tag);
  const auto digits = checkpoint_digest(place.dir, info.tag);
  print_result(command.global().json
                   ? "{\"schema\": \"zero.checkpoint.digest/1\", \"directory\": " + json_quote(place.dir) +
                         ", \"tag\": " + json_quote(info.tag) + ", \"digest\": \"" + digits + "\"}\n"
                   : digits + "  " + base::printable(place.dir + "/" + info.tag) + "\n");
  return 0;
}

int prune(int argc, char** argv) {
  std::string dir;
  PruneOptions options;
  Command command("checkpoint prune", "Removes old checkpoints of a directory; the newest complete one always stays.",
                  "DIR --keep N [options]", "zero checkpoint prune runs/ckpt --keep 3 --keep-every 1000");
  command.positional(dir, "DIR", "directory of checkpoints", false);
  command.option("--keep", options.keep, "N", "newest complete checkpoints that stay, those of weights only apart", 1,
                 INT64_MAX);
  command.option("--keep-every", options.keep_every, "K", "those of every K steps stay as well", 1, INT64_MAX);
  command.option("--keep-weights", options.keep_weights, "N", "newest ones of weights only that stay (all)", 1,
                 INT64_MAX);
  command.flag("--dry-run", options.dry_run, "only say what would be removed");
  if (!command.parse(argc, argv)) return 0;
  if (dir.empty() || !command.given("--keep"))
    throw ConfigError(std::string("[zero checkpoint prune] got no ") + (dir.empty() ? "directory" : "--keep") +
                      ", expected a directory and --keep N. Hint: zero checkpoint prune runs/ckpt --keep 3");
  const auto removed = prune_checkpoints(dir, options);
  std::int64_t bytes = 0;
  for (const auto& entry : removed) bytes += entry.bytes;
  if (command.global().json) {
    print_result("{\"schema\": \"zero.checkpoint.prune/1\", \"directory\": " + json_quote(dir) +
                 ", \"dry_run\": " + (options.dry_run ? "true" : "false") + ", \"bytes\": " + std::to_string(bytes) +
                 ", \"removed\": " + list_json(removed) + "}\n");
    return 0;
  }
  const auto terminal = report::describe_terminal(STDOUT_FILENO, command.global().color);
  print_result(base::printable((removed.empty() ? "" : list_text(removed, terminal)) + dir + ": " +
                               (options.dry_run ? "would remove " : "removed ") + std::to_string(removed.size()) +
                               (removed.size() == 1 ? " checkpoint, " : " checkpoints, ") + bytes_text(bytes) + "\n"));
  return 0;
}

constexpr const char* kHelp = R"(zero checkpoint: look into checkpoints, exchange weights, remove old ones

Usage: zero checkpoint inspect|verify|digest|prune|export|convert|import|diff ...

  inspect DIR     the manifest of the newest checkpoint, or of --tag; --list for all of them; other libraries' files
  verify DIR      reads every byte of all checkpoints, or of --tag, and compares all hashes; exit 0 or 3
  digest DIR      32 hex digits of the values, the same for any number of ranks that saved them
  prune DIR       removes all but the newest --keep N, and those of --keep-every K steps
  export DIR OUT  weights for Hugging Face (--to hf), torch.load (--to pt) or DeepSpeed
  import SRC      a checkpoint of libzero from DeepSpeed, torch.distributed, torch.save or safetensors
  convert SRC OUT the same from any files that libzero reads
  diff A B        tensors in which two checkpoints or files differ; exit 0 or 1

Example
  zero checkpoint inspect runs/ckpt --list
)";

}  // namespace
}  // namespace zero::cli

int zero_checkpoint(int argc, char** argv) {
  using namespace zero;
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb == "inspect") return cli::inspect(argc - 1, argv + 1);
  if (verb == "verify") return cli::verify(argc - 1, argv + 1);
  if (verb == "digest") return cli::digest(argc - 1, argv + 1);
  if (verb == "prune") return cli::prune(argc - 1, argv + 1);
  if (verb == "export" || verb == "convert") return cli::export_weights(argc - 1, argv + 1);
  if (verb == "import") return cli::import_files(argc - 1, argv + 1);
  if (verb == "diff") return cli::diff_checkpoints(argc - 1, argv + 1);
  if (verb == "-h" || verb == "--help" || verb == "help") {
    cli::print_result(cli::kHelp);
    return 0;
  }
  const std::string known = ", expected inspect, verify, digest, prune, export, convert, import or diff";
  if (verb == "reshard")
    throw ConfigError("[zero checkpoint] got reshard" + known +
                      ". Hint: none is needed, checkpoints load on any number of ranks.");
  const auto near = nearest_name(verb, {"inspect", "verify", "digest", "prune", "export", "convert", "import", "diff"});
  throw ConfigError("[zero checkpoint] got " + (verb.empty() ? "no word" : "\"" + verb.substr(0, 80) + "\"") + known +
                    (near.empty() ? ". Hint: zero checkpoint --help" : ". Hint: did you mean \"" + near + "\"?"));
}
