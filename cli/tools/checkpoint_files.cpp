// `zero checkpoint export|convert|diff`, through include/zero/checkpoint_tools.h.
#include "cli/tools/checkpoint_files.h"

#include <string>
#include <vector>

#include <zero/checkpoint_tools.h>

#include "base/json_write.h"
#include "base/printable.h"
#include "cli/support/console.h"
#include "cli/support/options.h"
#include "config/byte_count.h"
#include "report/text/text.h"

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
  command.option("--names", options.names, "MAP", "gpt2, llama, bert, t5, or a file of zero.names/1");
  command.option("--prefix", options.prefix, "P", "put before every name");
  command.option("--shard-bytes", shard_bytes, "BYTES", "tensors of one file of hf");
  command.option("--heads", options.heads, "N", "attention heads, for config.json of gpt2 (those of zero train)", 1,
                 1 << 20);
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
