// `zero checkpoint export|convert|import|diff`, through include/zero/checkpoint_tools.h.
#include "tools/commands/checkpoint_files.h"

#include <string>
#include <vector>

#include <zero/checkpoint_tools.h>

#include "base/json_write.h"
#include "base/printable.h"
#include "config/byte_count.h"
#include "tools/report/text/text.h"
#include "tools/support/console.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace {
using base::json_quote;

std::string json_list(const std::vector<std::string>& texts) {
  std::string result = "[";
  for (std::size_t i = 0; i < texts.size(); ++i) result += (i == 0 ? "" : ", ") + json_quote(texts[i]);
  return result + "]";
}

std::int64_t bytes_in(const std::string& verb, const std::string& text) {
  const auto bytes = config::byte_count(text);
  if (!bytes || *bytes < 1)
    throw ConfigError("[zero checkpoint " + verb + "] --shard-bytes: got \"" + text +
                      "\", expected a number of bytes such as 5GB");
  return *bytes;
}

}  // namespace

int export_weights(int argc, char** argv) {
  const std::string verb = argv[0];
  const bool convert = verb == "convert";
  std::string source, out, tag, shard_bytes = "5GB", dtype = convert ? "stored" : "fp32";
  ExportOptions options;
  options.format = "";
  Command command("checkpoint " + verb,
                  convert ? "Writes the weights of any files that libzero reads as others'."
                          : "Writes the weights of a checkpoint for other libraries; no engine, 32 MiB of a tensor.",
                  convert ? "SRC OUT --to FORM [options]" : "DIR OUT --to FORM [options]",
                  convert ? "zero checkpoint convert model.safetensors.index.json model.pt --to pt"
                          : "zero checkpoint export runs/ckpt gpt2-hf --to hf --names gpt2");
  command.positional(source, convert ? "SRC" : "DIR", "a checkpoint or a directory of them, or files of safetensors",
                     false);
  command.positional(out, "OUT", "what to write; must not exist", false);
  command.choice("--to", options.format, {"hf", "pt", "universal"},
                 "hf: a directory of safetensors; pt: a file for torch.load; universal: for DeepSpeed");
  command.option("--tag", tag, "TAG", "the checkpoint to use (the newest complete one)");
  command.choice("--dtype", dtype, {"fp32", "bf16", "fp16", "stored"}, "of floating-point parameters");
  command.option("--names", options.names, "MAP", "gpt2, llama, bert, t5, vit, or a file of zero.names/1");
  command.option("--prefix", options.prefix, "P", "put before every name");
  command.option("--shard-bytes", shard_bytes, "BYTES", "tensors of one file of hf");
  command.option("--heads", options.heads, "N", "attention heads, for config.json (those of zero train)", 1, 1 << 20);
  command.repeated("--config-field", options.config, "KEY=VALUE", "for config.json, which tensors do not tell");
  command.flag("--duplicate-tied", options.duplicate_tied, "tied tensors under all their names");
  command.flag("--allow-overflow", options.allow_overflow, "values that fp16 cannot hold become infinite");
  if (!command.parse(argc, argv)) return 0;
  const auto where = "[zero checkpoint " + verb + "] ";
  if (source.empty() || out.empty() || options.format.empty())
    throw ConfigError(where + "got no " +
                      (source.empty() ? "source"
                       : out.empty()  ? "OUT"
                                      : "--to") +
                      ", expected a source, OUT and --to hf, pt or universal. Hint: zero checkpoint " + verb +
                      " --help");
  options.dtype = dtype == "stored" ? "" : dtype;
  options.shard_bytes = bytes_in(verb, shard_bytes);
  const auto report = export_checkpoint(source, out, options, tag);
  for (const auto& remark : report.remarks) print_note(command.name(), LogLevel::Info, base::printable(remark));
  print_result(command.global().json
                   ? "{\"schema\": \"zero.checkpoint.export/1\", \"out\": " + json_quote(out) + ", \"format\": \"" +
                         options.format + "\", \"tensors\": " + std::to_string(report.tensors) +
                         ", \"bytes\": " + std::to_string(report.bytes) + ", \"files\": " + json_list(report.files) +
                         ", \"remarks\": " + json_list(report.remarks) + "}\n"
                   : base::printable(out) + ": " + std::to_string(report.tensors) + " tensors, " +
                         report::human_bytes(static_cast<std::uint64_t>(report.bytes)) + " in " +
                         std::to_string(report.files.size()) + (report.files.size() == 1 ? " file\n" : " files\n"));
  return 0;
}

void declare_source(Command& command, SourceChoice& choice) {
  command.option("--key", choice.key, "K", "the dictionary in a file of torch.save, such as model or state_dict");
  command.option("--prefix", choice.prefix, "P", "removed from every name");
  command.flag("--ignore-crc", choice.ignore_crc, "of files that were written without checksums");
}

std::string source_text(const SourceInfo& info, const std::string& path, const Command& command) {
  if (command.global().json) {
    std::string tensors, aliases;
    for (const auto& tensor : info.tensors) {
      std::string shape;
      for (const auto size : tensor.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
      tensors += (tensors.empty() ? "{\"kind\": " : ", {\"kind\": ") + json_quote(tensor.kind) +
                 ", \"name\": " + json_quote(tensor.name) + ", \"dtype\": \"" + tensor.dtype + "\", \"shape\": [" +
                 shape + "], \"bytes\": " + std::to_string(tensor.bytes) + "}";
    }
    for (const auto& [name, stored] : info.aliases)
      aliases += (aliases.empty() ? "" : ", ") + json_quote(name) + ": " + json_quote(stored);
    std::string steps;
    if (info.global_steps >= 0)
      steps = ", \"global_steps\": " + std::to_string(info.global_steps) +
              ", \"applied_steps\": " + std::to_string(info.applied_steps);
    return "{\"schema\": \"zero.checkpoint.source/1\", \"path\": " + json_quote(path) + ", \"format\": \"" +
           info.format + "\", \"bytes\": " + std::to_string(info.bytes) + steps +
           ", \"optimizer\": " + json_quote(info.optimizer) + ", \"tensors\": [" + tensors + "], \"aliases\": {" +
           aliases + "}, \"remarks\": " + json_list(info.remarks) + "}\n";
  }
  using Narrow = report::Column::Narrow;
  const auto terminal = report::describe_terminal(STDOUT_FILENO, command.global().color);
  const auto columns = static_cast<std::size_t>(terminal.columns);
  report::Table head({{"name"}, {"value", report::Align::Left, Narrow::Wrap}});
  head.row({"source", path});
  head.row({"format", info.format});
  if (info.global_steps >= 0)
    head.row(
        {"steps", std::to_string(info.global_steps) + ", of which " + std::to_string(info.applied_steps) + " updated"});
  if (!info.optimizer.empty()) head.row({"optimizer", info.optimizer});
  head.row({"size", report::human_bytes(static_cast<std::uint64_t>(info.bytes)) + " in " +
                        std::to_string(info.tensors.size()) + " tensors"});
  report::Table tensors({{"kind"},
                         {"name", report::Align::Left, Narrow::Cut, 16},
                         {"dtype"},
                         {"shape"},
                         {"bytes", report::Align::Right}});
  for (const auto& tensor : info.tensors) {
    std::string shape = "[";
    for (const auto size : tensor.shape) shape += (shape.size() == 1 ? "" : ",") + std::to_string(size);
    tensors.row({tensor.kind, tensor.name, tensor.dtype, shape + "]",
                 report::human_bytes(static_cast<std::uint64_t>(tensor.bytes))});
  }
  std::string text = head.render(columns, terminal.utf8, false) + "\n" + tensors.render(columns, terminal.utf8);
  for (const auto& [name, stored] : info.aliases) text += "tied: " + name + " to " + stored + "\n";
  for (const auto& remark : info.remarks) text += remark + "\n";
  return base::printable(text);
}

int import_files(int argc, char** argv) {
  std::string source, into, tag;
  CheckpointImport options;
  Command command("checkpoint import",
                  "Makes a checkpoint of other libraries' files, with the optimizer's states where they have them; any "
                  "number of ranks loads it. Holds 64 MiB of a tensor; executes nothing.",
                  "SRC --into DIR --tag T [options]",
                  "zero checkpoint import deepspeed/global_step100 --into runs/ckpt --tag step-100");
  command.positional(source, "SRC",
                     "a checkpoint of DeepSpeed or torch.distributed, a file of torch.save, files of safetensors",
                     false);
  command.option("--into", into, "DIR", "directory of checkpoints");
  command.option("--tag", tag, "TAG", "the new checkpoint; must not exist");
  command.option("--source-tag", options.source.tag, "TAG", "the checkpoint of SRC (the newest)");
  command.option("--names", options.names, "MAP", "gpt2, llama, bert, t5, vit, or a file of zero.names/1");
  declare_source(command, options.source);
  command.repeated("--buffers", options.buffers, "PATTERN", "tensors that are buffers and no parameters");
  command.repeated("--frozen", options.frozen, "PATTERN", "parameters that are not trained");
  command.repeated("--untie", options.untie, "NAME", "of tensors that --names ties and that differ: the one to take");
  command.option("--optimizer", options.optimizer, "TYPE",
                 "of the run that will load it (as in the files, else AdamW)");
  if (!command.parse(argc, argv)) return 0;
  if (source.empty() || into.empty() || tag.empty())
    throw ConfigError(std::string("[zero checkpoint import] got no ") +
                      (source.empty() ? "source"
                       : into.empty() ? "--into"
                                      : "--tag") +
                      ", expected a source, --into DIR and --tag TAG. Hint: zero checkpoint import --help");
  const auto report = import_checkpoint(source, into, tag, options);
  for (const auto& remark : report.remarks) print_note(command.name(), LogLevel::Info, base::printable(remark));
  print_result(
      command.global().json
          ? "{\"schema\": \"zero.checkpoint.import/1\", \"into\": " + json_quote(into) +
                ", \"tag\": " + json_quote(tag) + ", \"format\": \"" + report.format + "\", \"masters\": " +
                std::to_string(report.masters) + ", \"states\": " + std::to_string(report.states) +
                ", \"frozen\": " + std::to_string(report.frozen) + ", \"buffers\": " + std::to_string(report.buffers) +
                ", \"global_steps\": " + std::to_string(report.global_steps) +
                ", \"optimizer\": " + json_quote(report.optimizer) + ", \"bytes\": " + std::to_string(report.bytes) +
                ", \"remarks\": " + json_list(report.remarks) + "}\n"
          : base::printable(into + "/" + tag) + ": " + std::to_string(report.masters) + " parameters with " +
                std::to_string(report.states) + " states of " + report.optimizer + ", " +
                std::to_string(report.frozen) + " frozen, " + std::to_string(report.buffers) + " buffers; step " +
                std::to_string(report.global_steps) + ", " +
                report::human_bytes(static_cast<std::uint64_t>(report.bytes)) + "\n");
  return 0;
}

int diff_checkpoints(int argc, char** argv) {
  std::string a, b;
  Command command("checkpoint diff",
                  "Compares the tensors of two checkpoints or files by name, bit by bit; exit 0 if they are equal, "
                  "else 1.",
                  "A B [options]", "zero checkpoint diff runs/a/step-1000 runs/b/step-1000");
  command.positional(a, "A", "a checkpoint or a directory of them, or files of safetensors", false);
  command.positional(b, "B", "another", false);
  if (!command.parse(argc, argv)) return 0;
  if (b.empty())
    throw ConfigError("[zero checkpoint diff] got " + std::string(a.empty() ? "no paths" : "one path") +
                      ", expected two. Hint: zero checkpoint diff A B");
  const auto difference = zero::diff_checkpoints(a, b);
  std::string json, text;
  for (const auto& tensor : difference.tensors) {
    const bool values = tensor.first >= 0;
    text += tensor.name + ": " + tensor.what;
    if (values)
      text += "; " + std::to_string(tensor.count) + (tensor.count == 1 ? " element, " : " elements, first ") + "[" +
              std::to_string(tensor.first) + "]: " + tensor.a + " against " + tensor.b;
    text += "\n";
    json += (json.empty() ? "{\"name\": " : ", {\"name\": ") + json_quote(tensor.name) +
            ", \"difference\": " + json_quote(tensor.what) + ", \"elements\": " + std::to_string(tensor.count);
    if (values)
      json += ", \"first\": " + std::to_string(tensor.first) + ", \"a\": " + json_quote(tensor.a) +
              ", \"b\": " + json_quote(tensor.b);
    json += "}";
  }
  const auto count = difference.tensors.size();
  print_result(command.global().json
                   ? "{\"schema\": \"zero.checkpoint.diff/1\", \"a\": " + json_quote(a) + ", \"b\": " + json_quote(b) +
                         ", \"compared\": " + std::to_string(difference.compared) + ", \"different\": [" + json + "]}\n"
                   : base::printable(text + std::to_string(difference.compared) + " tensors compared, " +
                                     std::to_string(count) + (count == 1 ? " difference\n" : " differences\n")));
  return count == 0 ? 0 : 1;
}

}  // namespace zero::cli
